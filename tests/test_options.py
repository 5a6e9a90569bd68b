"""Options that would be ignored, sizes that would never end, and values that are kept as they were checked."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from comparisons_by_hand import never
from errors import refused
from reference_cluster import small_mlp, vectors
from torch import Tensor, nn

import vsim
from vsim import Attack, Trainer
from vsim.cluster.plan import Round
from vsim.compat.diloco_sim import DilocoSimulator
from vsim.scaling import fit, penalty
from vsim.strategy import AloneStrategy, DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, trimmed_mean
from vsim.strategy.remade import remade
from vsim.strategy.when import QSR, PostLocal
from vsim_cli import main

RUN: dict[str, Any] = {"num_nodes": 2, "batch_size": 4, "progress": False}
TRILLION = 10**12


def trained(val: Any = None, model: Any = None, data: Any = None, **options: Any) -> vsim.History:
    trainer = Trainer(model or small_mlp(), vectors(16) if data is None else data, val)
    trainer.fit(**{"strategy": SimpleReduceStrategy(lr=0.1), **RUN, **options})
    return trainer.history


# Ignored in silence ---------------------------------------------------------------------------------------------------


def test_two_lengths_are_refused() -> None:
    assert trained().ledger.steps == trained(num_epochs=1).ledger.steps == 2  # 16 examples, 2 nodes, batches of 4
    with pytest.raises(TypeError, match="num_epochs=5 and max_steps=3 both end the run; give one of them"):
        trained(num_epochs=5, max_steps=3)
    given: dict[str, Any] = {"strategies": {"a": SimpleReduceStrategy(lr=0.1)}, **RUN, "num_epochs": 2}
    for more in ({"budget": {"examples": 24}}, {"max_steps": 2}, {"max_steps": {"a": 2}}):
        with pytest.raises(TypeError, match=f"num_epochs=2 and {re.escape(next(iter(more)))}=.* both end the run"):
            vsim.compare(small_mlp(), vectors(16), **given, **more)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"val_size": 4}, ["val_size=4", "val_dataset"]),
        ({"val_interval": 5}, ["val_interval=5", "val_dataset"]),
        ({"val_nodes": False}, ["val_nodes=False", "val_dataset"]),
        ({"num_nodes": 1, "correlation_interval": 2}, ["correlation_interval=2", "num_nodes=1"]),
        ({"dataloader_kwargs": {"timeout": 5}}, ["timeout=5", "num_workers"]),
        ({"dataloader_kwargs": {"num_workers": TRILLION}}, ["num_workers", "1024"]),
    ],
)
def test_options_without_effect_are_errors(options: dict[str, Any], words: Sequence[str]) -> None:
    with refused(ValueError, *words):
        trained(callbacks=[never], **options)


def test_the_simulator_gives_one_length_and_validates_with_data_alone() -> None:
    given: dict[str, Any] = {"model_cls": lambda: nn.Linear(12, 5), "loss_fn": nn.CrossEntropyLoss(), "num_nodes": 2}
    simulator = DilocoSimulator(**given, train_dataset=vectors(64), num_epochs=3, max_local_step=4)
    simulator.train()
    assert simulator.ledger.steps == 4


def test_options_of_the_command_line_need_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("compare --seeds", "compare --budget --quiet", "time --compute 1 --strategies", "sweep --set"):
        assert main(command.split()) == 2
        assert "needs at least one value" in capsys.readouterr().err


def test_scale_zero_is_given() -> None:
    with refused(TypeError, "scale has no effect"):
        Attack("min_max", share=0.2, scale=0)
    assert Attack("sign_flip", share=0.2, scale=0).scale == 0.0


FLIP = Attack("sign_flip", nodes=[2])
THREE: dict[str, Any] = {"num_nodes": 3, "attack": FLIP, "max_steps": 3}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"participation": vsim.Schedule({0: [0, 1]})}, ["participation=Schedule({0: (0, 1)})"]),
        ({"participation": vsim.Trace([(0, 2, "fail")])}, ["participation=Trace"]),
        ({"participation": vsim.Availability([[1, 0.5, 0], [0.5, 1, 0]])}, ["participation=Availability"]),
        (
            {
                "num_nodes": 2,
                "participation": vsim.Sample(2, of=3, available=vsim.ByLabel([[1], [1], [0]], otherwise=0)),
            },
            ["participation=Sample"],
        ),
    ],
)
def test_attackers_that_never_take_part_are_an_error(changed: dict[str, Any], words: Sequence[str]) -> None:
    with refused(ValueError, f"attack={FLIP}", *words, "[2]"):
        trained(callbacks=[never], **{**THREE, **changed})


@pytest.mark.parametrize(
    ("plan", "comes"),
    [
        (vsim.Schedule({0: [0, 1], 2: [0, 1, 2]}), True),
        (vsim.Schedule({0: [0, 1], 3: [0, 1, 2]}), False),
        (vsim.DropSlowest(0.4), False),
        (vsim.DropSlowest(0.3), True),
        (vsim.Availability([1, 1, 0.999]), True),
        (vsim.Availability([1, 1, 0.001]), False),
    ],
)
def test_of_attackers_that_do_not_come_in_time_a_warning_tells(plan: Any, comes: bool) -> None:
    own = {"compute": vsim.Compute(1.0, speeds=[3, 2, 1])} if plan.needs_compute else {}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trained(**THREE, **own, participation=plan)
    assert any("none of its nodes takes part" in str(one.message) for one in heard) == (not comes)


def test_probabilities_and_counts_of_zero() -> None:
    for call, name in (
        (lambda: vsim.Availability([0, 0]), "p"),
        (lambda: vsim.ByLabel([[0, 0], [0, 0]]), "counts"),
        (lambda: vsim.DayNight(2, day=0, night=0), "day"),
    ):
        with refused(ValueError, f"{name} must"):
            call()
    rare = vsim.Availability([0, 0, 0.01]).plan(Round(3, 0, 1))
    assert {segment.nodes for segment in rare.segments(200)} == {(2,)}  # of who cannot come nobody stands in


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"warmup_steps": 4}, 4),
        ({"lr_scheduler": "cosine", "lr_scheduler_kwargs": {"warmup_steps": 4}}, 4),
        ({"H": PostLocal(4, 2)}, 4),
        ({"H": QSR(alpha=0.1, warmup_steps=4)}, 4),
    ],
)
def test_a_warm_up_longer_than_the_run_gets_a_warning(options: dict[str, Any], steps: int) -> None:
    def run(length: int) -> None:
        strategy = FedAvgStrategy(**{"H": 2, "lr": 0.1, **options})  # type: ignore[arg-type]
        trained(strategy=strategy, max_steps=length)

    with pytest.warns(UserWarning, match=f"too few steps: .*warm-up takes {steps} steps.*after {steps}"):
        run(steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(steps + 1)


def test_a_halving_without_a_rung() -> None:
    def swept(halving: int, *rates: float, steps: int = 8) -> Any:
        settings = {"lr": list(rates), "num_nodes": 2}
        own: dict[str, Any] = {"batch_size": 4, "progress": False, "max_steps": steps, "val_interval": None}
        return vsim.sweep(
            small_mlp(),
            vectors(16),
            vectors(8),
            strategy=SimpleReduceStrategy,
            settings=settings,
            halving=halving,
            **own,
        )

    with pytest.warns(UserWarning, match="too few steps for halving=3 to have a rung, and the runs end after 2"):
        assert {run.stopped_at for run in swept(3, 0.1, 0.2, steps=2).all_runs} == {None}
    with refused(ValueError, "halving", "one setting"):
        swept(2, 0.1)
    with refused(ValueError, "halving", "from 2 to 10", 11):
        swept(11, 0.1, 0.2)


# Obscure or endless ---------------------------------------------------------------------------------------------------


def test_checked_numbers_are_kept() -> None:
    attack = Attack("gaussian", share=np.float64(0.3), seed=np.int64(2), scale=np.float64(2))
    assert repr(attack) == repr(Attack("gaussian", share=0.3, seed=2, scale=2.0))
    assert attack.attackers(10) == Attack("gaussian", share=0.3, seed=2).attackers(10)
    strategy = DiLoCoStrategy(H=np.int64(3), lr=np.float64(0.1), average=trimmed_mean(np.float64(0.2)))
    assert "np." not in repr(strategy) and remade(repr(strategy)) is not None
    parts = [
        vsim.data.partition(vectors(64), kind(2), "shards", shards=kind(2), seed=kind(3)) for kind in (int, np.int64)
    ]
    assert repr(parts[0]) == repr(parts[1]) and torch.equal(parts[0].counts, parts[1].counts)


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 1)

    def forward(self, batch: Sequence[Tensor]) -> Any:
        out = self.linear(batch[0])
        return out.square().mean() if self.training else [{"boxes": row} for row in out]


class Many(Sequence[Any]):
    """A list of another library, such as a ListConfig."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]


LAW = {"N": [1e6, 2e6, 4e6, 8e6], "loss": [4.0, 3.5, 3.0, 2.7]}
FALLING: dict[str, Any] = {"strategies": {"a": SimpleReduceStrategy(lr=0.1)}, **RUN}


def price(**changed: Any) -> Any:
    given = {"parameters": 1e6, "num_nodes": 2, "max_steps": 2, "network": 1e9, "compute": 1.0, **changed}
    return vsim.price(AloneStrategy(), **given)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fit(5), TypeError, ["frame", "DataFrame", "5"]),
        (lambda: fit({"N": ["a", "b"], "loss": [1, 2]}), TypeError, ["frame['N']", "numbers", "'a'"]),
        (lambda: fit({**LAW, "N": [1, 2, 3, 0]}), ValueError, ["frame['N']", "above 0"]),
        (lambda: fit(LAW, bootstrap=TRILLION), ValueError, ["bootstrap", "100000", TRILLION]),
        (lambda: fit(LAW, bootstrap=0).plot(ax=5), TypeError, ["ax", "5"]),
        (lambda: penalty(5), TypeError, ["comparison", "vsim.Comparison", "5"]),
        (lambda: vsim.Ladder({5: 3}, {5: 3}), TypeError, ["comparisons[5]", "vsim.Comparison", "3"]),
        (lambda: vsim.Ladder({}, {}), ValueError, ["comparisons", "at least one"]),
        (lambda: price(max_steps=TRILLION), ValueError, ["max_steps", "memory"]),
        (lambda: vsim.ByLabel([[1, 2]], turn=TRILLION), ValueError, ["turn", "memory"]),
        (lambda: vsim.models.GPT(TRILLION), ValueError, ["vocab_size", "memory"]),
        (lambda: trained(data=torch.tensor(1.0)), TypeError, ["train_dataset", "one value"]),
        (lambda: trained(vectors(8), Boxes(), max_steps=1), ValueError, ["in evaluation mode", "list"]),
        (
            lambda: vsim.compare(small_mlp(), vectors(16), budget={"wire": TRILLION}, **FALLING),
            ValueError,
            ["budget", "1,000,000 steps"],
        ),
        (
            lambda: trained(
                data=vsim.data.partition(vectors(64), 2, "iid"), attack=Attack("label_flip", nodes=[0], classes=2)
            ),
            ValueError,
            ["classes=2", "labels from 0 to 4"],
        ),
    ],
)
def test_wrong_values_are_named(call: Callable[[], Any], error: type[Exception], words: Sequence[Any]) -> None:
    with refused(error, *words):
        call()


def test_a_ladder_names_its_own_arguments() -> None:
    given: dict[str, Any] = {**FALLING, "sizes": [5, 6], "loss_fn": nn.CrossEntropyLoss()}
    for changed, error, words in (
        ({"seed": "x", "max_steps": 2}, TypeError, ["seed must be a whole number", "'x'"]),
        ({"tokens_per_parameter": 1e12}, ValueError, ["tokens_per_parameter", "memory"]),
        ({"num_nodes": TRILLION, "max_steps": 2}, ValueError, ["num_nodes", "memory"]),
    ):
        with refused(error, *words):
            vsim.ladder(lambda width: nn.Linear(12, width), vectors(16), vectors(16), **{**given, **changed})


def test_any_sequence_is_a_list_of_settings() -> None:
    assert len(vsim.grid(DiLoCoStrategy, H=Many(1, 2), lr=Many(0.1, 0.2))) == 4


def test_the_share_of_counts_gives_measures_over_all_examples() -> None:
    def counted(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return (batch[1] == 2).float().mean()

    history = trained(vectors(29), metrics={"of class 2": counted}, max_steps=1)
    assert math.isclose(history.last("of class 2"), float((vectors(29).tensors[1] == 2).float().mean()), rel_tol=1e-6)
