"""What a model changes in forward besides parameters and buffers is each node's; test_separate_modules.py has kinds."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from errors import refused, warned
from reference_cluster import Scaled, vectors
from torch import Tensor, nn
from torch.nn import functional as F

import vsim
from vsim import Trainer
from vsim.cluster.state import CheckpointError
from vsim.engine import VmapError
from vsim.private_torch import register_recorders
from vsim.strategy import AsyncDiLoCoStrategy, SimpleReduceStrategy, Strategy

OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": 6, "batch_size": 5, "val_interval": 2, "progress": False}
SGD = Strategy(inner_optim="sgd", lr=0.5)


def trained(model: nn.Module, loss_fn: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors(), vectors(7), loss_fn=loss_fn)
    trainer.fit(**{"strategy": SGD, **OPTIONS, **options})
    return trainer


def losses(model: nn.Module, **options: Any) -> Any:
    return trained(model, executor="loop", **options).history.node_losses


class Counter(Scaled):
    """Divides its outputs by the number of calls, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def scaled(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x / self.calls if self.training else x


class InBuffer(Counter):
    def __init__(self) -> None:
        super().__init__()
        del self.calls
        self.register_buffer("calls", torch.zeros(()))


class Average(Scaled):
    """Outputs less their running mean, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(5)

    def scaled(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class InTensor(Average):
    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.zeros(5))


def test_a_validation_reads_each_nodes_own() -> None:
    ours, theirs = (trained(kind(), executor="loop").history for kind in (Average, InTensor))
    for column in ("local_loss", "node_loss_min", "node_loss_max"):
        np.testing.assert_allclose(ours[column], theirs[column], rtol=1e-6)


def test_asynchronous_workers_have_their_own() -> None:
    strategy = AsyncDiLoCoStrategy(H=2, inner_optim="sgd", lr=0.1)
    clock = {"network": vsim.Network(1e9, 1e-3), "compute": vsim.Compute([1.0, 2.0, 3.0])}
    ours, expected = (losses(kind(), strategy=strategy, max_steps=9, **clock) for kind in (Counter, InBuffer))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_a_loss_may_count() -> None:
    class Loss:
        calls = 0

        def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return F.cross_entropy(outputs / self.calls, y)

    with warned("continues with 'loop'", "loss_fn.calls", "register_buffer"):
        ours = trained(Counter().layer, Loss(), val_interval=None)
    np.testing.assert_allclose(ours.history.node_losses, losses(Counter()), rtol=1e-6)


def test_a_callback_sees_the_first_nodes_and_changes_all() -> None:
    seen = []

    def restart(run: Any) -> None:
        seen.append(run.model.calls)
        if run.done == 3:
            run.each_model(lambda model: setattr(model, "calls", 0))

    ours, before = losses(Counter(), callbacks=[restart]), losses(Counter())
    assert seen == [1, 2, 3, 1, 2, 3]
    assert np.array_equal(ours[:3], before[:3]) and not np.isclose(ours[3:], before[3:], rtol=1e-3).any()


# What calls count, and what they draw


class Hot(Scaled):
    """Doubles its outputs from a node's fifth step on; `count` says which step this is."""

    def __init__(self, count: Callable[[Any], Any], **attributes: Any) -> None:
        super().__init__()
        self.count = count
        for name, value in attributes.items():
            setattr(self, name, value)

    def scaled(self, x: Tensor) -> Tensor:
        return x * (1 if self.count(self) < 5 else 2)


class Steps(nn.Module):
    """Counts calls, where torch does not see this module."""

    calls = 0

    def forward(self) -> int:
        self.calls += 1
        return self.calls


def by_attribute(m: Any) -> int:
    m.calls += 1
    return int(m.calls)


def in_dict(m: Any) -> int:
    m.state["calls"] += 1
    return int(m.state["calls"])


def in_object(m: Any) -> int:
    m.state.calls += 1
    return int(m.state.calls)


def in_tensor(m: Any) -> Tensor:
    m.calls = m.calls + 1
    return m.calls  # type: ignore[no-any-return]


# Name in messages → a model that counts.
COUNTERS: dict[str, Callable[[], nn.Module]] = {
    "calls": lambda: Hot(by_attribute, calls=0),
    "state": lambda: Hot(in_dict, state={"calls": 0}),
    "state ": lambda: Hot(in_object, state=SimpleNamespace(calls=0)),
    "parts[0].calls": lambda: Hot(lambda m: m.parts[0](), parts=[Steps()]),
    "calls ": lambda: Hot(in_tensor, calls=torch.tensor(0)),
}
LONGER = {"val_interval": None, "max_steps": 8}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_count_is_of_steps_however_they_are_computed(name: str) -> None:
    expected = losses(COUNTERS[name](), **LONGER)
    assert (expected[5] > 1.05 * expected[3]).any()
    for options in ({}, {"chunk_size": 2}):
        with warned("continues with 'loop'", name.strip(), "register_buffer"):
            ours = trained(COUNTERS[name](), **LONGER, **options).history
        np.testing.assert_allclose(ours.node_losses, expected, rtol=1e-6)
    with refused(VmapError, name.strip(), "register_buffer", "executor='loop'"):
        trained(COUNTERS[name](), **LONGER, executor="vmap")


def test_a_call_that_fails_has_not_counted() -> None:
    class Penalized(Counter):
        """In every fourth step, the slope counts."""

        def scaled(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls % 4:
                return x
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((self.layer.weight.sum() * z).square().sum(), z, create_graph=True)
            return x + slope

    with warned("continues with 'loop'", "calls"):
        ours = trained(Penalized(), **LONGER).history
    np.testing.assert_allclose(ours.node_losses, losses(Penalized(), **LONGER), rtol=1e-6)


GENERATOR = np.random.default_rng(3)
DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy.random": lambda: np.random.rand(),  # noqa: NPY002
    "GENERATOR": lambda: GENERATOR.random(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_rare_draws_always_mean_the_loop(name: str) -> None:
    def noisy(m: Any) -> int:
        return 5 * (DRAWS[name]() < 0.02)

    for seed in range(2):
        state = GENERATOR.bit_generator.state["state"]["state"]
        with warned("continues with 'loop'", name, "torch"):
            ours = trained(Hot(noisy), seed=seed, max_steps=2, val_interval=None).history
        assert ours.executor == "loop"
        assert (GENERATOR.bit_generator.state["state"]["state"] == state) == (name != "GENERATOR")


class Prepared(Scaled):
    """Scales its inputs by a buffer that its first call computes; that is noted in an attribute or in a dict."""

    def __init__(self, in_dict: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.state: Any = {"ready": False} if in_dict else False
        self.register_buffer("deviation", torch.ones(5))

    def scaled(self, x: Tensor) -> Tensor:
        if not (self.state["ready"] if isinstance(self.state, dict) else self.state):
            self.deviation.copy_(x.detach().std(0))
            if isinstance(self.state, dict):
                self.state["ready"] = True
            else:
                self.state = True
        y = x / self.deviation
        return y.abs() if self.reads and x.sum() > 0 else y


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("in_dict", [False, True])
def test_a_first_call_prepares_each_node(in_dict: bool, reads: bool) -> None:
    """In pieces, and where nodes take different branches, so that the loop takes the first call over."""
    options: dict[str, Any] = {"num_nodes": 4, "val_interval": None}
    ours = trained(Prepared(in_dict, reads), chunk_size=2, executor="vmap", **options).history
    assert ours.executor == ("vmap, loop" if reads else "vmap")
    np.testing.assert_allclose(ours.node_losses, losses(Prepared(in_dict, reads), **options), rtol=1e-4)


class Usual(Scaled):
    """Does what libraries do: a flag, a cache for the shape, the same value again, a part in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.size, self.cache = nn.Dropout(0.5), 0, dict[int, Tensor]()

    def scaled(self, x: Tensor) -> Tensor:
        self.seen, self.shape = True, tuple(x.shape)
        self.dropout.eval()
        if self.size < len(x):
            self.size, self.weights = len(x), torch.linspace(1, 2, len(x))[:, None]
        self.cache.setdefault(len(x), torch.ones(5))
        self.positions = torch.arange(len(x))
        return self.dropout(x) * self.weights[: len(x)] * self.cache[len(x)] + 0 * self.positions[:, None]


def test_what_stays_the_same_is_vectorized() -> None:
    ours = trained(Usual(), batch_size=4, val_interval=None).history
    assert ours.executor == "vmap"
    np.testing.assert_allclose(ours.node_losses, losses(Usual(), batch_size=4, val_interval=None), rtol=1e-5)


COUNTS = {"calls": 0}
CALLS = 0


def count_globally() -> None:
    global CALLS
    CALLS += 1
    COUNTS["calls"] += 1


def test_a_proof_leaves_no_trace_outside_of_the_model() -> None:
    closed = 0

    class Outward(Scaled):
        calls = 0
        made: ClassVar[Any]

        def scaled(self, x: Tensor) -> Tensor:
            nonlocal closed
            closed += 1
            type(self).calls += 1
            if not hasattr(Outward, "made"):
                Outward.made = torch.ones(5)
            count_globally()
            assert isinstance(Outward.made, Tensor)
            return x * Outward.made

    before = CALLS, COUNTS["calls"]
    options = {**OPTIONS, "max_steps": 4, "val_interval": None, "executor": "vmap"}
    Trainer(Outward(), vectors()).fit(strategy=SGD, **options)
    assert closed == Outward.calls == 4  # one call a step
    assert (CALLS, COUNTS["calls"]) == (before[0] + 4, before[1] + 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_what_is_compiled_does_not_count_by_itself(drop: float) -> None:
    """With dropout, steps are compared in evaluation mode, in which the model does not count."""

    def count(m: Any) -> int:
        m.calls += m.training
        return int(m.calls)

    class Dropping(Hot):
        def scaled(self, x: Tensor) -> Tensor:
            return F.dropout(super().scaled(x), drop, self.training)

    with warned("continues with 'loop'", "calls", "register_buffer"):
        ours = trained(Dropping(count, calls=0), compile=True, **LONGER).history
    np.testing.assert_allclose(ours.node_losses, losses(Dropping(count, calls=0), **LONGER), rtol=1e-6)


# Tensors in objects


class Slotted:
    __slots__ = ("outputs",)


def of_object(m: Any, x: Tensor) -> None:
    m.seen.outputs = x


def of_list_in_object(m: Any, x: Tensor) -> None:
    m.seen.outputs = [{"last": x}]


class Keeping(Scaled):
    def __init__(self, keep: Callable[[Any, Tensor], None], seen: Any) -> None:
        super().__init__()
        self.keep, self.seen = keep, seen

    def scaled(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return x


@pytest.mark.parametrize("keep", [of_object, of_list_in_object])
@pytest.mark.parametrize("make", [SimpleNamespace, Slotted])
def test_tensors_in_objects_are_found(make: Any, keep: Any) -> None:
    """10 examples a node, 4 at a time: the last batch has another shape."""
    options: dict[str, Any] = {"batch_size": 4, "val_interval": None}
    with warned("continues with 'loop'", "seen", "computed for all nodes"):
        ours = trained(Keeping(keep, make()), **options).history
    np.testing.assert_allclose(ours.node_losses, losses(Keeping(keep, make()), **options), rtol=1e-6)


# Hooks, checkpoints, nodes that come and go


class Hooked(Counter):
    """A hook of a layer counts calls, and writes to the model, which it names, or to the layer that it is given."""

    def __init__(self, names: bool) -> None:
        super().__init__()
        self.layer.register_buffer("seen", torch.zeros(()))
        self.layer.register_forward_hook(lambda layer, i, o: (self.layer if names else layer).seen.add_(1) and None)

    def scaled(self, x: Tensor) -> Tensor:
        return x / self.layer.seen


class Reading(Scaled):
    """A hook reads the model, which it names; that does no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.layer.register_forward_hook(lambda m, i, o: o * self.factor)


def test_a_hook_that_names_the_model_may_read_and_not_write() -> None:
    for options in ({}, {"executor": "loop"}, {"executor": "vmap"}):
        with refused(ValueError, "names the model", "bound method", "hook's arguments"):
            trained(Hooked(names=True), val_interval=None, **options)
    given = trained(Hooked(names=False), val_interval=None).history
    assert given.executor == trained(Reading()).history.executor == "vmap"
    np.testing.assert_allclose(given.node_losses, losses(InBuffer()), rtol=1e-6)


class Remembered(Counter):
    """Counts what differs by node, and has that as extra state; and a flag that is written once."""

    def scaled(self, x: Tensor) -> Tensor:
        self.layer.seen = True  # type: ignore[assignment]
        self.calls += self.training * int((x > 0).sum())
        return super().scaled(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_what_a_checkpoint_does_not_hold_is_said_once(tmp_path: Path) -> None:
    whole = losses(Average())
    with warned("mean", "checkpoint") as caught:
        losses(Average(), save_dir=tmp_path, max_steps=3, checkpoint_interval=1)
    assert len(caught) == 1
    with warned("mean", "checkpoint"):
        resumed = losses(Average(), save_dir=tmp_path, resume=True)
    assert np.array_equal(resumed[:3], whole[:3]) and not np.array_equal(resumed[3:], whole[3:])


def test_extra_state_resumes_and_moves_with_its_node(tmp_path: Path) -> None:
    whole = losses(Remembered())
    losses(Remembered(), max_steps=3, save_dir=tmp_path)
    assert np.array_equal(losses(Remembered(), resume=vsim.load_checkpoint(tmp_path)), whole)
    ours = losses(Remembered(), participation=vsim.Schedule({0: [0, 1, 2], 2: [0, 2]}))
    whole = losses(Remembered(), participation=vsim.Schedule({0: [0, 1, 2]}))
    assert np.array_equal(ours[:, [0, 2]], whole[:, [0, 2]])


COMING = vsim.Schedule({0: [0, 1, 2], 2: [0, 2], 4: [0, 1, 2]})


@pytest.mark.parametrize(
    ("model", "plan", "name"), [(Average, COMING, "mean"), (Counter, vsim.Sample(2, of=3), "calls")], ids=str
)
def test_what_cannot_move_with_its_node_is_refused(model: Any, plan: Any, name: str) -> None:
    with refused(CheckpointError, name, "cannot be moved"):
        losses(model(), participation=plan, num_nodes=2 if isinstance(plan, vsim.Sample) else 3)


# Plain attributes are saved, and move with their node


class Positive(Counter):
    """Counts what differs by node, in attributes of the model and, in a dict, of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.counts = {"positive": 0}  # type: ignore[assignment]

    def scaled(self, x: Tensor) -> Tensor:
        if self.training:
            self.layer.counts["positive"] += int((x > 0).sum())  # type: ignore[index]
            self.calls += self.layer.counts["positive"]  # type: ignore[index]
        return super().scaled(x)


class Late(Scaled):
    """Doubles its outputs from the third step on, in which it sets a flag; a cache has a flag, too."""

    def __init__(self) -> None:
        super().__init__()
        self.hot, self.size = False, 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def scaled(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        if self.steps == 3:
            self.hot = True
        if self.size < len(x):
            self.size, self.ones = len(x), torch.ones(len(x), 1)
        return x * (2 if self.hot else 1) * self.ones[: len(x)]


class Centred(Scaled):
    """Subtracts a mean that its first call makes, with a flag for it."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def scaled(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready, self.mean = True, x.detach().mean(0)
        return x - self.mean


class Masked(Scaled):
    """Makes a buffer when it is first needed, and notes its size."""

    size = 0

    def scaled(self, x: Tensor) -> Tensor:
        if self.size < len(x):
            self.register_buffer("mask", torch.ones(len(x), 1), persistent=False)
            self.size = len(x)
        return x * self.mask[: len(x)]


class Replacing(Scaled):
    """Replaces a module in its first call, and notes that."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.last = "none", nn.Sequential(nn.Identity())

    def scaled(self, x: Tensor) -> Tensor:
        if self.kind == "none":
            self.kind, self.last[0] = "tanh", nn.Tanh()
        out: Tensor = self.last(x)
        return out


SAVED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "count": (Counter, "loop"),
    "counts": (Positive, "loop"),
    "prepared": (Prepared, "vmap"),
    "prepared by node": (functools.partial(Prepared, reads=True), "vmap, loop"),
    "late": (Late, "vmap"),
    "a tensor": (Centred, "loop"),
    "a buffer": (Masked, "vmap"),
    "a module": (Replacing, "vmap"),
}


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
@pytest.mark.parametrize("name", SAVED)
def test_plain_attributes_are_saved(name: str, tmp_path: Path) -> None:
    make, executor = SAVED[name]
    whole = trained(make()).history
    assert whole.executor == executor
    trained(make(), max_steps=4, save_dir=tmp_path)
    for start in (True, vsim.load_checkpoint(tmp_path).fork()):
        options = {"save_dir": tmp_path} if start is True else {}
        ours = trained(make(), resume=start, **options).history
        assert np.array_equal(ours.node_losses[-2:], whole.node_losses[-2:])
        np.testing.assert_array_equal(ours["local_loss"][-2:], whole["local_loss"][-2:])


def test_what_differs_by_node_stays_so_without_a_counter(tmp_path: Path) -> None:
    """What the first step alone sets is no reason for the loop, unless nodes differ."""

    class Once(Scaled):
        scale: float | None = None

        def scaled(self, x: Tensor) -> Tensor:
            self.scale = self.scale or float(x.detach().std())
            return x / self.scale

    with warned("continues with 'loop'"):
        whole = trained(Once(), val_interval=None).history
    with warned("continues with 'loop'"):
        trained(Once(), max_steps=3, val_interval=None, save_dir=tmp_path)
    with warned("continues with 'loop'", "differ by node"):
        ours = trained(Once(), val_interval=None, save_dir=tmp_path, resume=True).history
    assert np.array_equal(ours.node_losses, whole.node_losses)


def test_a_fork_to_other_nodes_takes_the_first_ones(tmp_path: Path) -> None:
    seen = []
    losses(Positive(), max_steps=3, callbacks=[lambda run: seen.append(run.model.calls)], save_dir=tmp_path)

    class Look(vsim.Callback):
        def on_start(self, run: Any) -> None:
            found: list[int] = []
            run.each_model(lambda model: found.append(model.calls))
            assert found == [seen[-1]]

    losses(Positive(), num_nodes=2, resume=vsim.load_checkpoint(tmp_path).fork(), callbacks=[Look()])


def test_what_a_callback_changes_after_a_resume_wins(tmp_path: Path) -> None:
    def reset(run: Any) -> None:
        run.each_model(lambda model: (setattr(model, "calls", 0), model.layer.counts.update(positive=0)))

    class Reset(vsim.Callback):
        def on_start(self, run: Any) -> None:
            reset(run)

    whole = losses(Positive(), callbacks=[lambda run: run.done == 3 and reset(run)])
    losses(Positive(), max_steps=3, save_dir=tmp_path)
    assert np.array_equal(losses(Positive(), save_dir=tmp_path, resume=True, callbacks=[Reset()]), whole)


def test_the_attributes_of_a_loss_are_saved(tmp_path: Path) -> None:
    class Loss:
        calls = 0

        def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return F.cross_entropy(outputs / self.calls, y)

    options: dict[str, Any] = {"executor": "loop", "val_interval": None}
    whole = trained(Counter().layer, Loss(), **options).history
    trained(Counter().layer, Loss(), max_steps=3, save_dir=tmp_path, **options)
    ours = trained(Counter().layer, Loss(), save_dir=tmp_path, resume=True, **options).history
    assert np.array_equal(ours.node_losses, whole.node_losses)


def test_a_plain_attribute_moves_with_its_node() -> None:
    ours, theirs = (losses(kind(), participation=COMING) for kind in (Counter, InBuffer))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    ours = losses(Positive(), participation=vsim.Schedule({0: [0, 1, 2], 2: [0, 2]}))
    whole = losses(Positive(), participation=vsim.Schedule({0: [0, 1, 2]}))
    assert np.array_equal(ours[:, [0, 2]], whole[:, [0, 2]])


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
@pytest.mark.parametrize("make", [Positive, Late])
def test_a_run_that_was_behind_gets_its_own(make: Any, tmp_path: Path) -> None:
    """One run is at step 2, and the other at step 4, so that their flags and counts differ."""
    strategies = {"a": SGD, "b": Strategy(inner_optim="sgd", lr=0.25)}

    def compared(**options: Any) -> Any:
        return vsim.compare(make(), vectors(), vectors(7), strategies=strategies, **{**OPTIONS, **options})

    whole = compared()
    compared(max_steps=4, save_dir=tmp_path, checkpoint_interval=1)
    for path in sorted((tmp_path / "b").glob("*.safetensors"))[-1:]:
        path.unlink()
    kept = sorted((tmp_path / "b").glob("*.safetensors"))
    assert kept
    ours = compared(save_dir=tmp_path, checkpoint_interval=1, resume=True)
    for name in strategies:
        np.testing.assert_allclose(ours[name].history.node_losses, whole[name].history.node_losses, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
def test_attributes_move_when_the_rows_of_ended_runs_go() -> None:
    strategies = {"a": SGD, "b": Strategy(inner_optim="sgd", lr=0.25)}
    options = {**OPTIONS, "max_steps": {"a": 2, "b": 6}}
    ours = vsim.compare(Positive(), vectors(), vectors(7), strategies=strategies, **options)
    np.testing.assert_array_equal(ours["b"].history.node_losses, losses(Positive(), strategy=strategies["b"]))


# Modules that PyTorch does not register


class Hiding(Scaled):
    """Has a module where PyTorch does not see it."""

    def __init__(self, in_list: bool, trains: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(5, affine=False).train(trains)
        if in_list:
            self.parts = [norm]
        else:
            object.__setattr__(self, "parts", {0: norm})

    def scaled(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts[0](x)
        return out


class Showing(Hiding):
    def get_extra_state(self) -> Any:
        return {name: value.clone() for name, value in self.parts[0].state_dict().items()}

    def set_extra_state(self, state: Any) -> None:
        self.parts[0].load_state_dict(state)


@pytest.mark.parametrize("in_list", [True, False])
def test_tensors_of_hidden_modules_are_refused_before_the_second_step(in_list: bool, tmp_path: Path) -> None:
    seen: list[int] = []
    options: dict[str, Any] = {"val_interval": None, "callbacks": [lambda run: seen.append(run.done)]}
    with refused(CheckpointError, "parts[0].running_mean", "nn.ModuleList", "get_extra_state"):
        losses(Hiding(in_list), save_dir=tmp_path, **options)
    assert seen == [1]
    with refused(CheckpointError, "parts[0].running_mean"):
        losses(Hiding(in_list), participation=COMING, **options)
    losses(Hiding(in_list, trains=False), save_dir=tmp_path / "fixed", **options)
    whole = losses(Showing(in_list), **options)
    losses(Showing(in_list), max_steps=3, save_dir=tmp_path / "shown", **options)
    assert np.array_equal(losses(Showing(in_list), save_dir=tmp_path / "shown", resume=True, **options), whole)


# Evaluation


class Bounded(Scaled):
    """Writes to its weights in evaluation: clamps a layer's, and bounds the norm of a table's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=0.5)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(20.0).view(5, 4))

    def forward(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = super().forward(batch)
        if self.training:
            return loss + 0 * self.table.weight.sum()
        self.layer.weight.data.clamp_(-0.01, 0.01)
        return loss + 0.1 * self.table(batch[1]).square().mean()


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("strategy", [SGD, SimpleReduceStrategy(inner_optim="sgd", lr=0.5)], ids=["alone", "AllReduce"])
def test_weights_that_evaluation_writes_to_are_restored(executor: str, strategy: Strategy) -> None:
    options = {"executor": executor, "strategy": strategy, "metrics": {"m": lambda model, b: model(b)}}
    validated, plain = (trained(Bounded(), val_interval=interval, **options) for interval in (1, None))
    np.testing.assert_array_equal(validated.history.node_losses, plain.history.node_losses)
    assert validated.strategy is not None and plain.strategy is not None
    assert torch.equal(validated.strategy.cluster.weights, plain.strategy.cluster.weights)


# Of transformers


def test_recorders_of_an_unpickled_model_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recording(nn.Linear):
        _can_record_outputs: ClassVar = {"router_logits": "gate"}

    registry: dict[nn.Module, Any] = {}
    library = SimpleNamespace(_CAN_RECORD_REGISTRY=registry)
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", library)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(2, 2), Recording(2, 2))
    register_recorders(model)
    assert registry == {model[1]: {"router_logits": "gate"}}
