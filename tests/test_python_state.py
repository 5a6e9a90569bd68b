"""Numbers that a model's Python keeps are each node's own, wherever they are, whatever computes the nodes."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from separate import Communication, Scaled, train_separately, vectors
from torch import Tensor, nn
from torch.nn import functional as F

import vsim
from vsim import Trainer
from vsim.engine import auto, python_state
from vsim.strategy import AsyncDiLoCoStrategy, Strategy

CALLS = 0
TABLE: dict[str, int] = {}
PROCESSES = {"backend": "process"}
OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": 7, "batch_size": 5, "val_interval": 2, "progress": False}


class Model(Scaled):
    """A linear layer, whose outputs are divided by the number of this call."""

    def scaled(self, x: Tensor) -> Tensor:
        return x / self.number()

    def number(self) -> Any:
        raise NotImplementedError


class Buffer(Model):
    """The reference: every node has its own, and evaluation leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def number(self) -> Any:
        self.calls += 1
        return self.calls


class Attribute(Model):
    calls = 0

    def number(self) -> int:
        self.calls += 1
        return self.calls


class InDict(Model):
    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, dict[str, int]] = {"of": {}}

    def number(self) -> int:
        self.stats["of"]["calls"] = self.stats["of"].get("calls", 0) + 1
        return self.stats["of"]["calls"]


class InCounter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.stats: collections.Counter[str] = collections.Counter()

    def number(self) -> int:
        self.stats["calls"] += 1
        return self.stats["calls"]


@dataclass
class Config:
    calls: int = 0


class InDataclass(Model):
    def __init__(self) -> None:
        super().__init__()
        self.configs = (Config(), types.SimpleNamespace(other=3))

    def number(self) -> int:
        self.configs[0].calls += 1
        return self.configs[0].calls


class InList(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def number(self) -> int:
        self.seen.append(0.5)
        return len(self.seen)


class InTuple(Model):
    def __init__(self) -> None:
        super().__init__()
        self.stats = ("calls", (0, None))

    def number(self) -> int:
        self.stats = ("calls", (self.stats[1][0] + 1, None))
        return self.stats[1][0]


class OfNumpy(Model):
    def __init__(self) -> None:
        super().__init__()
        self.calls = np.int64(0)

    def number(self) -> float:
        self.calls = self.calls + 1
        return float(self.calls)


class FromNone(Model):
    """There is no number until the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: int | None = None

    def number(self) -> int:
        self.calls = 1 if self.calls is None else self.calls + 1
        return self.calls


class OfClass(Model):
    calls: ClassVar[int] = 0

    def number(self) -> int:
        type(self).calls += 1
        return self.calls


class Global(Model):
    def number(self) -> int:
        global CALLS
        CALLS += 1
        return CALLS


def counted() -> int:
    TABLE["calls"] = TABLE.get("calls", 0) + 1
    return TABLE["calls"]


class GlobalTable(Model):
    def number(self) -> int:
        return counted()


class Default(Model):
    def number(self, seen: list[int] = []) -> int:  # noqa: B006
        seen.append(1)
        return len(seen)


def closed() -> nn.Module:
    calls = 0

    class Closed(Model):
        def number(self) -> int:
            nonlocal calls
            calls += 1
            return calls

    return Closed()


KINDS: list[Callable[[], nn.Module]] = [
    *(
        Attribute,
        InDict,
        InCounter,
        InDataclass,
        InList,
        InTuple,
        OfNumpy,
        FromNone,
        OfClass,
        Global,
        GlobalTable,
        Default,
        closed,
    )
]


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CALLS", 0)
    TABLE.clear()
    OfClass.calls = 0
    Default.number.__defaults__[0].clear()  # type: ignore[index]


def trained(model: nn.Module, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors(), vectors(7))
    trainer.fit(**{"strategy": Strategy(optim_spec="sgd", lr=0.5), **OPTIONS, **options})
    return trainer


@pytest.mark.parametrize("options", [{"executor": "loop"}, {"executor": "vmap"}, {"executor": "vmap", "chunk_size": 1}])
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_counts_for_itself(kind: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    reference = trained(Buffer(), executor="loop")
    ours = trained(kind(), **options)
    np.testing.assert_allclose(ours.history.node_losses, reference.history.node_losses, rtol=1e-6)


class Turning(Model):
    """After two calls everything is as it was at first."""

    turn: str | None = None

    def number(self) -> int:
        self.turn = "back" if self.turn is None else None
        return 1 if self.turn is None else 2


class Drawing(Model):
    """A random generator of one's own, which every process has a copy of."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream

    def number(self) -> Any:
        if isinstance(self.stream, torch.Generator):
            return 1 + torch.rand((), generator=self.stream) + torch.empty(()).uniform_(generator=self.stream)
        return self.stream.uniform(1, 2)


OWN: list[Callable[[], nn.Module]] = [
    Turning,
    lambda: Drawing(random.Random(3)),
    lambda: Drawing(np.random.default_rng(3)),
    lambda: Drawing(np.random.Generator(np.random.MT19937(3))),
    lambda: Drawing(np.random.RandomState(3)),
    lambda: Drawing(torch.Generator().manual_seed(3)),
]


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
@pytest.mark.parametrize("executor", ["loop", "auto"])
@pytest.mark.parametrize("make", OWN)
def test_every_node_turns_and_draws_for_itself(make: Callable[[], nn.Module], executor: str) -> None:
    counts = {name: OPTIONS[name] for name in ("num_nodes", "max_steps", "batch_size")}
    expected = train_separately(
        make(), vectors(), Communication(), lambda parameters: torch.optim.SGD(parameters, lr=0.5), **counts
    )
    np.testing.assert_allclose(trained(make(), executor=executor).history.node_losses, expected.losses, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
@pytest.mark.parametrize("executor", ["loop", "auto"])
@pytest.mark.parametrize("make", [*KINDS, *OWN])
def test_counts_go_on_in_a_run_that_resumes(make: Callable[[], nn.Module], executor: str, tmp_path: Path) -> None:
    """Also in the process that has counted further meanwhile, and of checkpoints of a run that has resumed itself."""
    options = {**OPTIONS, "strategy": Strategy(optim_spec="sgd", lr=0.5), "executor": executor, "val_interval": None}
    _reset()
    whole = Trainer(make(), vectors())
    whole.fit(**options)
    saved: dict[int, Any] = {0: False}
    turns = [(0, 2, "new process"), (2, 4, "new process"), (2, 4, "same"), (4, 7, "new process"), (2, 7, "same")]
    for turn, (begin, steps, process) in enumerate(turns):
        if process != "same":
            _reset()
        resumed, folder = Trainer(make(), vectors()), tmp_path / str(turn)
        resumed.fit(**{**options, "max_steps": steps}, save_dir=folder, resume=saved[begin])
        saved[steps] = vsim.load_checkpoint(folder)
        np.testing.assert_array_equal(resumed.history.node_losses, whole.history.node_losses[:steps])


class OfItsData(Scaled):
    """Nodes count differently: the labels that they have seen."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.seen = {"of": {"labels": 0.0}}
        self.register_buffer("labels", torch.zeros(()))

    def forward(self, batch: list[Tensor]) -> Tensor:
        if self.place == "buffer":
            self.labels += batch[1].sum()
            return super().forward(batch) / (1 + self.labels)
        self.seen["of"]["labels"] += float(batch[1].sum())
        return super().forward(batch) / (1 + self.seen["of"]["labels"])


class Once(Scaled):
    """Scales by the first batch of a node; what it keeps is read at every step, and changed at one."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.scale: Any = 0.0
        self.register_buffer("of_first", torch.zeros(()))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        first = 10 * x.detach().mean()
        if self.place == "buffer":
            self.of_first = torch.where(self.of_first == 0, first, self.of_first)
            return x * self.of_first
        if isinstance(self.scale, float) and self.scale == 0:
            self.scale = float(first) if self.place == "number" else first
        return x * self.scale


@pytest.mark.parametrize("options", [{"executor": "loop"}, {"executor": "vmap"}, {}], ids=str)
@pytest.mark.parametrize("place", ["number", "tensor"])
def test_what_nodes_have_counted_once_is_their_own_ever_after(
    place: str, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = trained(Once("buffer"), executor="loop")
    straight = trained(Once(place), **options)
    trained(Once(place), **{**OPTIONS, **options, "max_steps": 3}, save_dir=tmp_path)
    resumed = trained(Once(place), **options, resume=vsim.load_checkpoint(tmp_path))
    for ours in (straight, resumed):
        np.testing.assert_allclose(ours.history.node_losses, expected.history.node_losses, rtol=1e-5)
    plan = vsim.Schedule({0: [0, 1, 2], 2: [0, 2], 4: [0, 1, 2]})
    left, expected = (trained(Once(p), executor="loop", participation=plan) for p in (place, "buffer"))
    np.testing.assert_allclose(left.history.node_losses, expected.history.node_losses, rtol=1e-5)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("start", range(1, 9))
def test_a_model_that_begins_to_count_later_counts_for_each_node_or_is_refused(start: int, executor: str) -> None:
    class Beginning(Scaled):
        def __init__(self, place: str) -> None:
            super().__init__()
            self.place, self.mean = place, 0.0
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("of_buffer", torch.zeros(()))

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += self.training
            if self.training and int(self.steps) >= start:
                if self.place == "buffer":
                    self.of_buffer = 0.5 * self.of_buffer + x.detach().mean()
                else:
                    self.mean = 0.5 * self.mean + float(x.detach().mean())
            return x * (1 + self.mean + self.of_buffer)

    expected = trained(Beginning("buffer"), executor="loop", max_steps=9)
    if start.bit_count() > 1:
        with pytest.raises(
            ValueError, match=r"model\.mean, but began to at a step after the first, and the nodes have shared it"
        ):
            trained(Beginning("number"), executor=executor, max_steps=9)
    else:
        ours = trained(Beginning("number"), executor=executor, max_steps=9)
        np.testing.assert_allclose(ours.history.node_losses, expected.history.node_losses, rtol=1e-5)


def test_counts_stay_with_their_nodes_when_others_leave_and_join() -> None:
    def run(place: str) -> vsim.History:
        plan = vsim.Schedule({0: [0, 1, 2], 2: [0, 2], 4: [0, 1, 2], 6: [1, 2]})
        return trained(OfItsData(place), executor="loop", participation=plan).history

    np.testing.assert_allclose(run("dict").node_losses, run("buffer").node_losses, rtol=1e-6)


class Diverging(Strategy):
    def step(self) -> None:
        super().step()
        if self.cluster.step == 3:
            self.cluster.weights[1].fill_(float("nan"))


def test_counts_stay_with_their_members_when_others_leave() -> None:
    def run(place: str) -> Any:
        rates = {"leaves": 0.5, "stays": 0.1, "stays, too": 0.5}
        kinds = {"leaves": Diverging}
        strategies = {n: kinds.get(n, Strategy)(optim_spec="sgd", lr=lr) for n, lr in rates.items()}
        with pytest.warns(UserWarning, match="leaves"):
            return vsim.compare(OfItsData(place), vectors(), strategies=strategies, **{**OPTIONS, "val_interval": None})

    ours, theirs = run("dict"), run("buffer")
    for name in ours:
        np.testing.assert_allclose(ours[name].history.node_losses, theirs[name].history.node_losses, rtol=1e-5)
    alone = trained(OfItsData("dict"), executor="loop", val_interval=None)
    np.testing.assert_allclose(ours["stays, too"].history.node_losses, alone.history.node_losses, rtol=1e-5)


@pytest.mark.slow
def test_counts_move_between_processes_and_simulator(tmp_path: Path) -> None:
    whole = trained(OfItsData("dict"), executor="loop", deterministic=True)
    for saves, resumes in (({}, PROCESSES), (PROCESSES, {})):
        folder = tmp_path / ("processes" if saves else "simulator")
        trained(OfItsData("dict"), deterministic=True, max_steps=4, save_dir=folder, **saves)
        resumed = trained(OfItsData("dict"), deterministic=True, resume=vsim.load_checkpoint(folder), **resumes)
        np.testing.assert_array_equal(resumed.history.node_losses, whole.history.node_losses)


@pytest.mark.parametrize("kind", KINDS)
def test_trials_leave_no_trace(kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever executor is tried first, and for how long, a seed has its bits."""
    alone = trained(kind(), executor="loop", deterministic=True).history.node_losses
    monkeypatch.setattr(auto, "BUDGET_SECONDS", 1e9)
    monkeypatch.setattr(auto, "BUDGET_SHARE", 1e9)
    for timed in (1, 2, 3):
        monkeypatch.setattr(auto, "_TIMED_STEPS", timed)
        monkeypatch.setattr(auto, "_remembered", {})
        _reset()
        np.testing.assert_array_equal(trained(kind(), deterministic=True).history.node_losses, alone)


def _reset() -> None:
    globals()["CALLS"] = OfClass.calls = 0
    TABLE.clear()
    Default.number.__defaults__[0].clear()  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [InDict, InDataclass, InList])
def test_processes_count_alike(kind: Callable[[], nn.Module]) -> None:
    options = {"num_nodes": 2, "max_steps": 4, "val_dataset": vectors(7), "val_interval": 2}
    assert vsim.verify(kind(), vectors(), Strategy(optim_spec="sgd", lr=0.5), **options).identical


def test_a_loss_may_count() -> None:
    class Loss:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return F.cross_entropy(outputs / self.calls, y)

    def run(executor: str) -> Any:
        trainer = Trainer(Buffer().layer, vectors(), loss_fn=Loss())
        options = {**OPTIONS, "val_interval": None, "executor": executor}
        trainer.fit(strategy=Strategy(optim_spec="sgd", lr=0.5), **options)
        return trainer.history.node_losses

    np.testing.assert_allclose(run("loop"), run("vmap"), rtol=1e-6)
    np.testing.assert_allclose(run("loop"), trained(Buffer(), executor="loop").history.node_losses, rtol=1e-6)


def _zero(model: Any) -> None:
    model.calls = 0


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize(("kind", "change"), [(Attribute, _zero), (InList, lambda model: model.seen.clear())])
def test_a_callback_changes_the_numbers_of_all_nodes(
    kind: Callable[[], nn.Module], change: Callable[[Any], None], executor: str
) -> None:
    def anew(run: Any) -> None:
        if run.done == 4:
            change(run.model)

    def expected(run: Any) -> None:
        if run.done == 4:
            run.cluster.replicas.buffers["calls"].zero_()

    ours = trained(kind(), executor=executor, callbacks=[anew]).history.node_losses
    theirs = trained(Buffer(), executor="loop", callbacks=[expected]).history.node_losses
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert not np.isclose(ours[4:], trained(kind(), executor=executor).history.node_losses[4:], rtol=1e-3).all()


@pytest.mark.parametrize("options", [{}, {"executor": "vmap"}, {"executor": "vmap", "chunk_size": 2}])
@pytest.mark.parametrize("deterministic", [True, False])
def test_nodes_that_count_differently_are_computed_one_by_one(options: dict[str, Any], deterministic: bool) -> None:
    by_loop = trained(OfItsData("dict"), executor="loop", deterministic=deterministic)
    ours = trained(OfItsData("dict"), deterministic=deterministic, **options)
    np.testing.assert_array_equal(ours.history.node_losses, by_loop.history.node_losses)
    expected = trained(OfItsData("buffer"), executor="loop")
    np.testing.assert_allclose(ours.history.node_losses, expected.history.node_losses, rtol=1e-6)


def test_nodes_that_have_come_to_count_differently_are_computed_one_by_one() -> None:
    run = Trainer(Attribute(), vectors()).prepare(strategy=Strategy(), **{**OPTIONS, "executor": "vmap"})
    _, stack = run.only
    stack.losses_and_grads(next(stack.batches))
    numbers = stack.executor.objective.numbers
    numbers[2] = python_state.with_changes(numbers[2], {}, {"model": {"calls": 5}})
    stack.losses_and_grads(next(stack.batches))
    assert "1 calls went to the loop; the first: model.calls differs between nodes 0 and 2" in stack.executor.reason
    assert [own["model"]["calls"] for own in numbers.values()] == [2, 2, 6]


@pytest.mark.parametrize("kind", [Attribute, InDict, Global, lambda: OfItsData("dict")])
def test_asynchronous_workers_count_for_themselves(kind: Callable[[], nn.Module]) -> None:
    options: dict[str, Any] = {
        "strategy": AsyncDiLoCoStrategy(H=2, optim_spec="sgd", lr=0.1),
        "network": vsim.Network(1e9, 1e-3),
        "compute": vsim.Compute([1.0, 2.0, 3.0]),
        "max_steps": 9,
    }
    ours = trained(kind(), **options)
    theirs = OfItsData("buffer") if isinstance(ours.model, OfItsData) else Buffer()
    expected = trained(theirs, executor="loop", **options)
    np.testing.assert_allclose(ours.history.node_losses, expected.history.node_losses, rtol=1e-5)


# The search


def test_what_is_none_at_times_and_an_object_at_others_is_left_alone() -> None:
    model = Model()
    model.found = None
    before = python_state.read(model)
    model.found = found = object()  # type: ignore[assignment]
    now = python_state.read(model)
    assert python_state.changed(before, now) == []
    python_state.write(before, model)
    assert model.found is found
    model.found = None
    python_state.write(now, model)
    assert model.found is None


def test_read_write_and_changed() -> None:
    model = InDataclass()
    before = python_state.read(model)
    model.configs[0].calls, model.configs[1].new = 3, 2.5
    now = python_state.read(model)
    places = python_state.changed(before, now)
    assert python_state.dotted(places) == "model.configs.0.calls, model.configs.1.new"
    python_state.write(before, model)
    assert model.configs[0].calls == 0 and not hasattr(model.configs[1], "new")
    assert python_state.changed(before, python_state.read(model)) == []
    assert python_state.with_changes(before, before, now) == now


def test_large_tables_circles_and_libraries_are_left_alone() -> None:
    model = Model()
    model.vocabulary = {str(i): i for i in range(5000)}  # type: ignore[assignment]
    model.itself = [model.__dict__]  # type: ignore[assignment]
    model.reference = types.SimpleNamespace(model=model)  # type: ignore[assignment]
    model.reference.itself = model.reference
    paths = python_state.read(model)
    assert not any("vocabulary" in path or "torch" in path for path in paths)
