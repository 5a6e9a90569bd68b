"""Learning rates that restart after every sync, against their formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_runs import assert_it_moves, fit, trainer_of

import vsim
from vsim.strategy import (
    QSR,
    Algorithm,
    AloneStrategy,
    AsyncDiLoCoStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    PostLocal,
    SimpleReduceStrategy,
    StreamingDiLoCoStrategy,
    restarts,
)

RATE, STEPS = 0.1, 10


def rates(strategy: Algorithm) -> list[float]:
    return fit(strategy, max_steps=STEPS).history["lr"][1:].tolist()


def by_formula(syncs: list[int], steps: int, floor: float = 0.1) -> list[float]:
    """Return the rate of steps 1 … STEPS, of which `syncs` end with a sync."""
    found, since = [], 0
    for step in range(STEPS):  # completed steps
        found.append(RATE * min(1, floor + (1 - floor) * (step - since) / steps))
        since = step + 1 if step + 1 in syncs else since
    return found


SGD: dict[str, Any] = {"inner_optim": "sgd", "lr": RATE}


@pytest.mark.parametrize(
    ("strategy", "syncs", "steps", "floor"),
    [
        (FedAvgStrategy(H=3, **SGD, lr_scheduler=restarts(2)), [3, 6, 9], 2, 0.1),
        (DiLoCoStrategy(H=4, **SGD, lr_scheduler=restarts(8, floor=0.5)), [4, 8], 8, 0.5),
        (FedAvgStrategy(H=PostLocal(4, 3), **SGD, lr_scheduler=restarts(2)), [7, 10], 2, 0.1),
        (StreamingDiLoCoStrategy(H=4, fragments=2, delay=1, **SGD, lr_scheduler=restarts(2)), [3, 5, 7, 9], 2, 0.1),
    ],
    ids=["FedAvg", "DiLoCo", "after a warm-up", "fragments"],
)
def test_the_rate_is_the_formulas(strategy: Algorithm, syncs: list[int], steps: int, floor: float) -> None:
    assert rates(strategy) == pytest.approx(by_formula(syncs, steps, floor))


def test_qsr_goes_by_the_rate_after_its_sync() -> None:
    """(α / (0.5 · 0.1))² = 4 steps after every sync, at the floor's rate; by the rate before, it would be 1."""
    qsr = QSR(alpha=0.1, minimum=1)
    trainer = fit(FedAvgStrategy(H=qsr, **SGD, lr_scheduler=restarts(2, floor=0.5)), max_steps=STEPS)
    assert [event.step for event in trainer.ledger] == [4, 8, 10]
    assert trainer.history["lr"][1:].tolist() == pytest.approx(by_formula([4, 8, 10], 2, 0.5))


def test_groups_of_parameters_restart_together() -> None:
    spec = OptimSpec("muon", rest=OptimSpec("sgd", lr=0.3), lr=RATE)
    seen: list[list[float]] = []

    def note(run: Any) -> None:
        seen.append([group["lr"] for part in run.cluster.optim.optimizers for group in part.param_groups])

    strategy = FedAvgStrategy(H=2, inner_optim=spec, lr_scheduler=restarts(2))
    fit(strategy, trainer_of(), max_steps=4, callbacks=[note])
    factors = np.array(seen) / np.array([RATE, 0.3])
    np.testing.assert_allclose(factors[:, 0], [0.55, 0.1, 0.55, 0.1])
    np.testing.assert_allclose(factors[:, 0], factors[:, 1])


@pytest.mark.parametrize("make", [FedAvgStrategy, DiLoCoStrategy])
def test_a_resumed_run_is_the_whole_run(make: Callable[..., Algorithm], tmp_path: Path) -> None:
    strategy = make(H=3, lr=RATE, lr_scheduler=restarts(4))
    assert_it_moves(lambda **options: fit(strategy, **{"deterministic": True, **options}), tmp_path)


def test_where_it_cannot_be() -> None:
    for strategy in (SimpleReduceStrategy, DeMoStrategy, AloneStrategy, FedAvgStrategy):
        with pytest.raises(ValueError, match=r"restarts\(steps=2, floor=0.1\): .* communicates at every step"):
            fit(strategy(lr=RATE, lr_scheduler=restarts(2)))
    with pytest.raises(ValueError, match=r"restarts.*AsyncDiLoCoStrategy is asynchronous"):
        fit(AsyncDiLoCoStrategy(H=2, lr_scheduler=restarts(2)), compute=1.0, network="1 Gbit/s")
    with pytest.raises(TypeError, match="warmup_steps has no effect with lr_scheduler=restarts"):
        FedAvgStrategy(H=2, lr_scheduler=restarts(2), warmup_steps=3)
    for steps, floor in ((0, 0.1), (2, 1.5)):
        with pytest.raises(ValueError, match=r"restarts: (steps|floor)"):
            restarts(steps, floor)
    strategy = FedAvgStrategy(H=QSR(0.1), lr_scheduler=restarts(2))
    with pytest.raises(TypeError, match="rates must be known before"):
        fit(strategy, participation=vsim.Sample(2, of=4), num_nodes=2)


def test_prices_and_the_command_line_take_it() -> None:
    from vsim.cli import parse_strategy

    strategy = parse_strategy("fedavg:H=3,lr_scheduler=restarts(2)", lr=RATE)
    assert repr(strategy) == "FedAvgStrategy(H=3, lr=0.1, lr_scheduler=restarts(steps=2, floor=0.1))"
    timeline = vsim.price(strategy, parameters=100, num_nodes=2, max_steps=6, network="1 Gbit/s", compute=1.0)
    assert len(timeline.seconds) == 7
    assert torch.isfinite(torch.tensor(timeline.seconds)).all()
