"""What one member does, draws or suffers is its own, tried by strategies, data and losses that would spread it."""

from __future__ import annotations

import itertools
import random
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from separate import small_mlp, vectors
from test_ensemble import OPTIONS, Jittered, Killed, alone, assert_is_its_own_fit, assert_same, broken, killed_at
from torch import Tensor, nn
from torch.utils.data import Dataset

import vsim
from vsim.cluster import Cluster
from vsim.engine import VmapExecutor
from vsim.engine.proof import Proof
from vsim.models import MLP
from vsim.strategy import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    FedAvgStrategy,
    OptimSpec,
    SPARTAStrategy,
    Strategy,
)

Strategies = dict[str, Strategy]


def compare(
    strategies: Strategies, data: Any = None, start: nn.Module | None = None, warns: bool = False, **options: Any
) -> vsim.Comparison:
    data = vectors() if data is None else data
    with nullcontext() if warns else warnings.catch_warnings():
        warnings.simplefilter("always" if warns else "ignore", UserWarning)
        start = small_mlp() if start is None else start
        return vsim.compare(start, data, data, strategies=strategies, **{**OPTIONS, "num_nodes": 2, **options})


def assert_own_fits(
    strategies: Strategies,
    besides: Strategies | None = None,
    data: Callable[[], Any] = vectors,
    make: Callable[[], nn.Module] = small_mlp,
    warns: bool = False,
    **options: Any,
) -> vsim.Comparison:
    """Compare strategies, `besides` first, and each with its own fit to the bit."""
    result = compare({**(besides or {}), **strategies}, data(), make(), warns, seeds=[1, 2], **options)
    for name, (i, seed) in itertools.product(strategies, enumerate((1, 2))):
        own = alone(strategies[name], make(), data(), data(), **{"num_nodes": 2, "seed": seed, **options})
        assert_is_its_own_fit(result.runs(name)[i], own)
    return result


def plain() -> Strategies:
    return {"fedavg": FedAvgStrategy(H=2, lr=1e-2), "sparta": SPARTAStrategy(p_sparta=0.3, lr=1e-2)}


# Random numbers -------------------------------------------------------------------------------------------------------


class Noisy(torch.optim.Optimizer):
    """Draws from the process's generator, as Langevin dynamics does."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=1e-3)


def noisy() -> Strategies:
    return {f"noisy {h}": FedAvgStrategy(H=h, inner_optim=OptimSpec(Noisy, lr=1e-2)) for h in (2, 3)}


def test_what_is_drawn_stays_each_members_own_when_others_have_left() -> None:
    assert_own_fits({**plain(), **noisy()}, {"bad": broken(2, 1e-2)}, data=Jittered)


def test_what_is_drawn_resumes_to_the_bit(tmp_path: Path) -> None:
    strategies = {"bad": broken(3, 1e-2), **plain(), **noisy()}
    saved: dict[str, Any] = {"checkpoint_interval": 2}
    expected = compare(strategies, Jittered(), save_dir=tmp_path / "whole", **saved)
    with pytest.raises(Killed):
        compare(strategies, Jittered(), save_dir=tmp_path / "race", train_loss_hook=killed_at(5), **saved)
    assert_same(compare(strategies, Jittered(), save_dir=tmp_path / "race", resume=True, **saved), expected)
    # A run that did not fetch its own data still continues alone.
    for name in ("sparta", "noisy 3"):
        trainer = vsim.Trainer(small_mlp(), Jittered(), Jittered())
        options = {**OPTIONS, "num_nodes": 2, "max_steps": 9, "strategy": strategies[name]}
        trainer.fit(resume=vsim.load_checkpoint(tmp_path / "race" / name.replace(" ", "_")), **options)
        own = alone(strategies[name], small_mlp(), Jittered(), Jittered(), num_nodes=2, max_steps=9)
        assert trainer.history.node_losses.tolist() == own.history.node_losses.tolist()


class DrawsInForward(nn.Module):
    """Takes its noise from a generator that nodes do not have."""

    def __init__(self, draw: Callable[[], float] = lambda: np.random.rand()) -> None:  # noqa: NPY002
        super().__init__()
        self.inner, self.draw = small_mlp(), draw

    def forward(self, batch: Any) -> Tensor:
        return self.inner(batch) * (1 + 0.1 * float(self.draw()))


class DrawsInSetup(FedAvgStrategy):
    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.factor = random.random()

    def sync(self) -> None:
        super().sync()
        self.cluster.weights.mul_(1 + 0.01 * self.factor)


class Shakes(vsim.Callback):
    """Draws after the steps from `first` on."""

    def __init__(self, first: int = 1) -> None:
        self.first, self.heard = first, []

    def on_step(self, run: Any) -> None:
        self.heard.append(run.done)
        if run.done >= self.first:
            run.cluster.weights.add_(torch.randn_like(run.cluster.weights), alpha=1e-3)


@pytest.mark.parametrize("who", ["the model", "own, seed 1: its strategy", "the setup", "fedavg, seed 1: .* callback"])
def test_runs_that_draw_globally_train_one_after_the_other_and_one_warning_says_who(who: str) -> None:
    own: Strategies = {"own": DrawsInSetup(H=2, lr=1e-2)} if who == "the setup" else {}
    options: dict[str, Any] = {"callbacks": [Shakes()]} if "callback" in who else {}
    make: Callable[[], nn.Module] = small_mlp
    if who == "the model":
        make, options = DrawsInForward, {"executor": "loop", "deterministic": False}
    if "strategy" in who:
        own = {"own": FedAvgStrategy(H=2, inner_optim=OptimSpec(Noisy, lr=1e-2))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        result = assert_own_fits({**own, **plain()}, make=make, warns=True, **options)
    told = [str(one.message) for one in caught if "one after the other" in str(one.message)]
    assert len(told) == 1 and re.match(who, told[0])
    for name in result if "callback" in who else ():
        assert [run.callbacks[0].heard for run in result.runs(name)] == 2 * [[1, 2, 3, 4, 5, 6]]


def test_draws_that_begin_later_are_told_at_the_end() -> None:
    with pytest.warns(UserWarning, match="but not in its first steps"):
        compare(plain(), callbacks=[Shakes(4)], warns=True)


def test_runs_of_halving_must_not_draw_globally() -> None:
    settings = {"H": [1, 2, 3, 4], "lr": 1e-2}
    options = {**OPTIONS, "num_nodes": 2, "max_steps": 20, "halving": 2, "callbacks": [Shakes()]}
    with pytest.raises(ValueError, match=r"halving .* callback draws .*\(torch"):
        vsim.sweep(small_mlp(), vectors(), strategy=FedAvgStrategy, settings=settings, **options)


@pytest.mark.parametrize("executor", ["auto", "loop"])
@pytest.mark.parametrize(("draw", "name"), [((random.random,), "random"), ((), r"numpy\.random")])
def test_a_deterministic_model_must_not_draw_globally(draw: Any, name: str, executor: str) -> None:
    options = {"executor": executor, "num_nodes": 2}
    with pytest.raises(ValueError, match=f"deterministic=True .* draw from {name} in forward"):
        alone(Strategy(), DrawsInForward(*draw), vectors(), vectors(), **options)
    with pytest.raises(ValueError, match=f"deterministic=True .* draw from {name} in forward"):
        compare(plain(), start=DrawsInForward(*draw), val_interval=None, **options)


# State ----------------------------------------------------------------------------------------------------------------


class Resets(FedAvgStrategy):
    """Resets its optimizer's state at every sync."""

    def sync(self) -> None:
        super().sync()
        if self.cluster.completed == 2:
            self.optim.state.clear()  # type: ignore[union-attr]
        if self.cluster.completed == 4:
            for state in self.optim.state.values():  # type: ignore[union-attr]
                state["step"].zero_()


class Hooked(FedAvgStrategy):
    """Has its optimizer call something after every step."""

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.optim.register_step_post_hook(lambda *_: self.cluster.weights.mul_(0.99))  # type: ignore[union-attr]


@pytest.mark.parametrize("cls", [Resets, Hooked])
def test_a_strategy_of_ones_own_may_do_anything_with_its_optimizer(cls: type[FedAvgStrategy]) -> None:
    own: Strategies = {"own": cls(H=2, lr=1e-2), "own too": cls(H=3, lr=1e-2)}
    assert_own_fits({"before": FedAvgStrategy(H=2, lr=1e-2), **own, "after": FedAvgStrategy(H=3, lr=1e-2)})


class MadeOnTheWay(FedAvgStrategy):
    """Makes state on the way, which no checkpoint holds."""

    def sync(self) -> None:
        super().sync()
        if not hasattr(self, "stream"):
            self.stream = torch.Generator().manual_seed(3)
        self.cluster.weights.mul_(1 + 0.01 * float(torch.rand(1, generator=self.stream)))


def test_members_keep_what_they_do_not_declare_when_others_have_left() -> None:
    assert_own_fits({"own": MadeOnTheWay(H=2, lr=1e-2), **plain()}, {"bad": broken(2, 1e-2)}, data=Jittered)


class KeepsRows(FedAvgStrategy):
    """Keeps views of its rows, in a list, and shrinks them at every step."""

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.rows = [*cluster.weights]

    def sync(self) -> None:
        super().sync()
        for row in self.rows:
            row.mul_(0.99)


def test_rows_that_a_member_keeps_stay_its_own_when_others_have_left() -> None:
    assert_own_fits({"own": KeepsRows(H=2, lr=1e-2), **plain()}, {"bad": broken(2, 1e-2)})


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def test_the_rows_of_one_that_diverged_prove_nothing_about_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of an epoch is of another shape, and proved again, by the rows that are left."""
    strategies = {"bad": broken(1, 1e-2), "bad too": broken(1, 1e-3), "stays": FedAvgStrategy(H=2, lr=1e-2)}
    prove, nodes = VmapExecutor.prove, []

    def noted(*given: Any) -> Proof:
        proof = prove(*given)
        nodes.append(proof.nodes)
        return proof

    monkeypatch.setattr(VmapExecutor, "prove", noted)
    options = {"executor": "vmap", "batch_size": 6, "max_steps": None, "num_epochs": 2, "deterministic": False}
    result = compare(strategies, start=Normed(), **options)
    assert nodes == [[0, 5], [0, 1]]
    own = alone(strategies["stays"], Normed(), vectors(), vectors(), num_nodes=2, **options)
    np.testing.assert_allclose(result["stays"].history.node_losses, own.history.node_losses, rtol=1e-3)


class RunningScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, y)
        self.scale.mul_(0.9).add_(0.1 * float(loss.detach()))
        return loss / self.scale


def test_a_loss_that_all_nodes_would_change_is_refused() -> None:
    options = {"start": MLP(12, (16,), 5, seed=0), "loss_fn": RunningScale(), "executor": "loop", "num_nodes": 1}
    with pytest.raises(ValueError, match=r"changes loss_fn\.scale in forward, .* a buffer of the\s+loss"):
        compare(plain(), **options)
    assert compare({"alone": Strategy()}, **options)["alone"].ended


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategies", [{"bad": broken(2, 1e-2)}, {"bad": broken(2, 1e-2), **plain()}])
def test_one_that_diverges_is_kept_also_where_nobody_trains_beside_it(strategies: Strategies) -> None:
    result = compare(strategies, together=False)
    assert list(result) == list(strategies)
    assert {name: run.diverged_at for name, run in result.items()} == dict.fromkeys(result) | {"bad": 3}


def test_what_is_refused_is_refused_first_also_one_after_the_other() -> None:
    heard: list[int] = []
    strategies: Strategies = {**plain(), "islands": FedAvgStrategy(island_size=5)}
    with pytest.raises(ValueError, match="islands: island_size must be a whole number from 1 to 2, got 5"):
        compare(strategies, together=False, train_loss_hook=lambda step, _: heard.append(step))
    assert heard == []


class Fails(FedAvgStrategy):
    def gradients(self) -> None:
        raise RuntimeError("at once")


def test_one_that_fails_at_once_takes_nothing_from_those_before_it() -> None:
    with pytest.raises(RuntimeError, match="at once"):
        compare({**plain(), "bad": Fails(H=2)})
    result = compare({**plain(), "bad": Fails(H=2)}, together=False)
    assert [run.failure for run in result.values()] == ["", "", "RuntimeError: at once"]


class Unmeasurable(CommunicationModule):
    def global_weights(self, cluster: Any) -> Tensor | None:
        if cluster.step == 4:
            raise ValueError("no global model")
        return None


def test_one_that_cannot_be_measured_leaves() -> None:
    assert_own_fits(plain(), {"bad": CommunicateOptimizeStrategy([Unmeasurable()], lr=1e-2)})


class Unreadable(CommunicationModule):
    def measured(self, cluster: Any) -> dict[str, float]:
        if cluster.step == 4:
            raise ValueError("nothing to read")
        return {"own": float(cluster.step)}


class Misshapen(CommunicationModule):
    def __init__(self, weights: Callable[[Tensor], Any]) -> None:
        self.weights = weights

    def global_weights(self, cluster: Any) -> Any:
        return self.weights(cluster.weights) if cluster.step == 4 else None


MISSHAPEN: dict[str, Callable[[Tensor], Any]] = {
    "stacked": lambda rows: rows,
    "short": lambda rows: rows[0, :5],
    "of another dtype": lambda rows: rows[0].double(),
    "a list": lambda rows: rows[0].tolist()[:1],
}


def test_one_whose_numbers_or_weights_cannot_be_used_leaves_and_takes_no_other() -> None:
    bad: dict[str, Strategy] = {"unreadable": CommunicateOptimizeStrategy([Unreadable()], lr=1e-2)}
    bad |= {name: CommunicateOptimizeStrategy([Misshapen(own)], lr=1e-2) for name, own in MISSHAPEN.items()}
    result = assert_own_fits(plain(), bad)
    assert result["unreadable"].failure == "ValueError: nothing to read"
    for name in MISSHAPEN:
        assert "global_weights() must return shared weights, torch.float32 (" in result[name].failure
    assert result["short"].failure.endswith("; got torch.float32 (5,)")


class Rotten(Jittered):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.fetched > 80:
            raise OSError("unreadable")
        return super().__getitem__(i)


def test_what_was_done_is_kept_when_the_data_fail() -> None:
    result = compare(plain(), Rotten())
    (failure,) = {run.failure for run in result.values()}
    assert re.fullmatch(r"OSError: the batches of step \d+: example \d+ .*, of node \d: unreadable", failure)
    assert all(len(run.history) > 1 for run in result.values())


def test_a_state_that_cannot_be_saved_is_said_with_whose_it_is(tmp_path: Path) -> None:
    class Holds(FedAvgStrategy):
        def setup(self, cluster: Cluster) -> None:
            super().setup(cluster)
            self.keep_shared(items=iter([1, 2]))

    with pytest.raises(vsim.CheckpointError, match=r"^own: Holds\.items is a "):
        compare({**plain(), "own": Holds(H=2)}, save_dir=tmp_path / "race")


# Lengths --------------------------------------------------------------------------------------------------------------


def test_runs_of_different_lengths_resume_where_each_was(tmp_path: Path) -> None:
    heard: list[int] = []

    def swept(hook: Any = None, **options: Any) -> vsim.Sweep:
        settings = {"H": 2, "lr": 1e-2, "num_nodes": [1, 2, 4]}  # 8, 4 and 2 steps
        options |= {**OPTIONS, "max_steps": None, "num_epochs": 2, "train_loss_hook": hook, "val_interval": 3}
        return vsim.sweep(small_mlp(), vectors(), vectors(), strategy=FedAvgStrategy, settings=settings, **options)

    expected, saved = swept(), {"save_dir": tmp_path / "race", "checkpoint_interval": 1}
    with pytest.raises(Killed):
        swept(killed_at(7), **saved)
    assert_same(swept(lambda step, _: heard.append(step), resume=True, **saved), expected)
    assert heard == [7, 8]
    assert_same(swept(lambda step, _: heard.append(step), resume=True, **saved), expected)
    assert heard == [7, 8]


class Documents(Dataset[Any]):
    """Texts of several lengths, which a batch of one need not pad."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.ones(3 + i % 4), torch.tensor(float(i))


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> Tensor:
        return 1e-3 * (batch[0].sum(1) * self.slope - batch[1]).square().mean()


def test_single_examples_may_have_any_length() -> None:
    assert_own_fits(
        {"alone": Strategy(lr=1e-2)}, data=Documents, make=Slope, num_nodes=1, batch_size=1, val_size=1, val_interval=3
    )
