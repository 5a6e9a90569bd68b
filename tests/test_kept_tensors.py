"""Tensors that a model keeps from one call to the next, and has not registered, are each node's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from separate import Scaled, vectors
from torch import Tensor, nn

import vsim
from vsim import Compute, Network, Trainer
from vsim.engine import Executor, auto
from vsim.engine.kept import Apart, Kept, apart, joined
from vsim.engine.stacked import NodesDifferError
from vsim.strategy import AsyncDiLoCoStrategy, Strategy

OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": 6, "batch_size": 5, "val_interval": 2, "progress": False}


class Average(Scaled):
    """Outputs less their running mean."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5)) if kind == "buffer" else setattr(self, "mean", torch.zeros(5))

    def scaled(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Bank(Scaled):
    """Outputs less the mean of those of the last three batches; the newest come last."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.bank: Any = {"list": [], "dict": {"of": []}, "tuple": ()}.get(kind)
        self.register_buffer("stacked", torch.zeros(3, 5))
        self.register_buffer("count", torch.zeros(()))

    def scaled(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        own = x.detach().mean(0)
        if self.kind == "buffer":
            self.stacked = torch.cat([self.stacked[1:], own[None]])
            self.count = (self.count + 1).clamp(max=3)
            return x - self.stacked.sum(0) / self.count
        if self.kind == "tuple":
            self.bank = (*self.bank, own)[-3:]
            return x - torch.stack(self.bank).sum(0) / len(self.bank)
        held = self.bank if self.kind == "list" else self.bank["of"]
        held.append(own)
        del held[:-3]
        return x - torch.stack([torch.zeros(5)] * (3 - len(held)) + held).sum(0) / len(held)


class Shown(Scaled):
    """Keeps its outputs for whoever wants to see them, and a part of its loss until the end of the call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = super().forward(batch)
        return loss + (0 if self.kind == "buffer" else 0 * self.part)

    def scaled(self, x: Tensor) -> Tensor:
        if self.kind != "buffer":
            self.shown, self.part = x, x.square().mean()
        return x


class Cache(Scaled):
    """Makes a constant when it is first needed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale: Tensor | None = None

    def scaled(self, x: Tensor) -> Tensor:
        if self.kind == "buffer":
            return x * torch.arange(5)
        if self.scale is None:
            self.scale = torch.arange(5)
        return x * self.scale


TOTALS: dict[str, Tensor] = {}


class InGlobals(Average):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind
        TOTALS["mean"] = torch.zeros(5)

    def scaled(self, x: Tensor) -> Tensor:
        if self.kind == "buffer":
            return super().scaled(x)
        if self.training:
            TOTALS["mean"] = 0.9 * TOTALS["mean"] + 0.1 * x.detach().mean(0)
        return x - TOTALS["mean"]


KINDS: list[tuple[Callable[[str], nn.Module], str]] = [
    (Average, "attribute"),
    (Bank, "list"),
    (Bank, "dict"),
    (Bank, "tuple"),
    (Shown, "attribute"),
    (Cache, "attribute"),
    (InGlobals, "global"),
]


def trained(model: nn.Module, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors(), vectors(7))
    options = {"strategy": Strategy(optim_spec="sgd", lr=0.5), **OPTIONS, **options}
    trainer.fit(**options)
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {"executor": "loop"},
        {"executor": "vmap"},
        {"executor": "vmap", "chunk_size": 2},
        {},
        {"deterministic": True},
        {"num_nodes": 1},
        {"num_nodes": 1, "executor": "loop"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_every_node_has_its_own(make: Callable[[str], nn.Module], kind: str, options: dict[str, Any]) -> None:
    expected = trained(make("buffer"), executor="loop", num_nodes=options.get("num_nodes", 3))
    ours = trained(make(kind), **options)
    np.testing.assert_allclose(ours.history.node_losses, expected.history.node_losses, rtol=1e-5)
    for column in ("local_loss", "node_loss_min", "node_loss_max"):
        np.testing.assert_allclose(ours.history[column], expected.history[column], rtol=1e-5)


@pytest.mark.parametrize("executor", ["vmap", "auto"])
@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_all_nodes_are_computed_together(
    make: Callable[[str], nn.Module], kind: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_TIMED_SECONDS", math.inf)  # what comes first is kept, unless it can't be done
    monkeypatch.setattr(auto, "_remembered", {})
    history = trained(make(kind), executor=executor, deterministic=executor == "auto").history
    assert history.executor == "vmap" and "loop" not in history.executor_reason


def test_nodes_with_other_shapes_are_computed_one_by_one() -> None:
    class Ranked(Average):
        def scaled(self, x: Tensor) -> Tensor:
            if self.training:
                own = x.detach().mean(0)
                self.mean = 0.5 * own + self.mean.sum() if len(self.mean) else own[: int(own[0] > 0)]
            return x - self.mean.sum()

    expected, ours = (trained(Ranked("attribute"), executor=executor).history for executor in ("loop", "vmap"))
    np.testing.assert_allclose(ours.node_losses, expected.node_losses, rtol=1e-6)


@pytest.mark.parametrize(("make", "calls"), [(Shown, 2), (Bank, 2), (Average, 4)])
def test_nodes_are_validated_apart_only_where_the_model_reads_them(
    make: Callable[[str], nn.Module], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three nodes, in one call, and the global model, in another or by itself."""
    evaluate, rows = Executor.evaluate, []
    monkeypatch.setattr(Executor, "evaluate", lambda self, *a: rows.append(len(a[0])) or evaluate(self, *a))
    strategy = Strategy(optim_spec="sgd", lr=0.1)
    trained(make("list" if make is Bank else "attribute"), executor="vmap", strategy=strategy, val_interval=6)
    assert len(rows) == 1 + calls  # equal at first


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_they_go_on_in_a_run_that_resumes(
    make: Callable[[str], nn.Module], kind: str, executor: str, tmp_path: Path
) -> None:
    straight = trained(make(kind), executor=executor)
    trained(make(kind), executor=executor, max_steps=3, save_dir=tmp_path)
    resumed = trained(make(kind), executor=executor, resume=vsim.load_checkpoint(tmp_path))
    np.testing.assert_array_equal(resumed.history.node_losses, straight.history.node_losses)


@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_they_stay_with_their_nodes_when_others_leave_and_join(make: Callable[[str], nn.Module], kind: str) -> None:
    plan = vsim.Schedule({0: [0, 1, 2], 2: [0, 2], 4: [0, 1, 2]})
    expected = trained(make("buffer"), executor="loop", participation=plan)
    ours = trained(make(kind), participation=plan)
    np.testing.assert_allclose(ours.history.node_losses, expected.history.node_losses, rtol=1e-5)


@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_asynchronous_workers_have_their_own(make: Callable[[str], nn.Module], kind: str) -> None:
    options = {
        "strategy": AsyncDiLoCoStrategy(H=2, optim_spec="sgd", lr=0.1),
        "network": Network(1e9, 1e-3),
        "compute": Compute([1.0, 2.0, 3.0]),
        "max_steps": 8,
    }
    expected = trained(make("buffer"), executor="loop", **options)
    ours = trained(make(kind), **options)
    np.testing.assert_allclose(ours.history.node_losses, expected.history.node_losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind"), [(Average, "attribute"), (Bank, "dict"), (Shown, "attribute")])
def test_processes_have_their_own(make: Callable[[str], nn.Module], kind: str, tmp_path: Path) -> None:
    options = {"num_nodes": 2, "max_steps": 4, "val_dataset": vectors(7), "val_interval": 2}
    assert vsim.verify(make(kind), vectors(), Strategy(optim_spec="sgd", lr=0.5), **options).identical
    straight = trained(make(kind), deterministic=True)
    for i, (saves, resumes) in enumerate((({}, {"backend": "process"}), ({"backend": "process"}, {}))):
        trained(make(kind), deterministic=True, max_steps=3, save_dir=tmp_path / str(i), **saves)
        resumed = trained(make(kind), deterministic=True, resume=vsim.load_checkpoint(tmp_path / str(i)), **resumes)
        np.testing.assert_array_equal(resumed.history.node_losses, straight.history.node_losses)


IN_ATTRIBUTES = [(make, kind) for make, kind in KINDS if kind == "attribute"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"num_nodes": 1}, {"chunk_size": 2}, {"gradient_accumulation": 2}], ids=str)
@pytest.mark.parametrize(("make", "kind"), IN_ATTRIBUTES)
def test_a_compiled_graph_takes_and_returns_those_in_attributes(
    make: Callable[[str], nn.Module], kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {"batch_size": 6, **options}
    of_loop = {name: value for name, value in options.items() if name != "chunk_size"}
    expected = trained(make("buffer"), executor="loop", **of_loop)
    straight = trained(make(kind), compile=True, **options)
    assert straight.history.executor == "compiled"
    np.testing.assert_allclose(straight.history.node_losses, expected.history.node_losses, rtol=1e-5)
    np.testing.assert_allclose(straight.history["local_loss"], expected.history["local_loss"], rtol=1e-5)
    trained(make(kind), compile=True, max_steps=3, save_dir=tmp_path, **options)
    resumed = trained(make(kind), compile=True, resume=vsim.load_checkpoint(tmp_path), **options)
    np.testing.assert_allclose(resumed.history.node_losses, straight.history.node_losses, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "kind"), [k for k in KINDS if k not in IN_ATTRIBUTES])
def test_compiling_a_model_that_keeps_them_elsewhere_goes_on_without(
    make: Callable[[str], nn.Module], kind: str
) -> None:
    expected = trained(make("buffer"), executor="loop")
    with pytest.warns(UserWarning, match=r"continues with 'vmap': .* it keeps a tensor that it has computed"):
        ours = trained(make(kind), compile=True)
    np.testing.assert_allclose(ours.history.node_losses, expected.history.node_losses, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"executor": "loop"},
        {"executor": "vmap"},
        {"deterministic": True},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_that_holds_the_graph_of_an_earlier_step_is_an_error_as_in_torch(
    options: dict[str, Any], num_nodes: int
) -> None:
    class Attached(Average):
        def scaled(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return x - self.mean

    compiles = pytest.warns(UserWarning, match="cannot be compiled") if options.get("compile") else nullcontext()
    with compiles, pytest.raises(RuntimeError, match="backward through the graph a second time"):
        trained(Attached("attribute"), num_nodes=num_nodes, **options)


@pytest.mark.parametrize("options", [{"executor": "loop"}, {"executor": "vmap"}, {"deterministic": True}], ids=str)
def test_one_that_is_changed_in_place_is_refused(options: dict[str, Any]) -> None:
    class InPlace(Average):
        def scaled(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return x - self.mean

    class Counting(Average):
        def scaled(self, x: Tensor) -> Tensor:
            self.mean += 1
            return x

    class Later(Average):
        def scaled(self, x: Tensor) -> Tensor:
            if self.training and self.mean.dim():
                self.mean.mul_(0.9)
            elif self.training:
                self.mean = x.detach().mean(0)
            return x - self.mean

    later = Later("attribute")
    later.mean = torch.tensor(0.0)
    for model in (InPlace("attribute"), Counting("attribute"), later):
        with pytest.raises(ValueError, match=r"changes model\.mean in place, .* \(register_buffer\)"):
            trained(model, **options)


def test_a_callback_sees_those_of_the_last_node_and_changes_those_of_all() -> None:
    seen: list[Tensor] = []

    def anew(run: Any) -> None:
        seen.append(run.model.mean)
        if run.done == 3:
            run.model.mean = torch.zeros(5)

    def expected(run: Any) -> None:
        if run.done == 3:
            run.cluster.replicas.buffers["mean"].zero_()

    ours = trained(Average("attribute"), callbacks=[anew])
    theirs = trained(Average("buffer"), executor="loop", callbacks=[expected])
    np.testing.assert_allclose(ours.history.node_losses, theirs.history.node_losses, rtol=1e-5)
    assert all(type(mean) is Tensor and mean.shape == (5,) for mean in seen) and len(seen) == 6


def test_what_differs_stands_apart_and_comes_back() -> None:
    one, two = Kept(torch.zeros(2)), Kept(torch.zeros(2))
    states = [{"a": {"x": one, "n": 1}, "b": [one, one]}, {"a": {"x": two, "n": 1}, "b": [one, two]}]
    both = joined(states)
    assert both["a"]["n"] == 1 and both["b"][0] is one and isinstance(both["a"]["x"].tensor, Apart)
    assert apart(both, 2) == states
    assert joined([states[0], states[0]]) is states[0]
    for read in (lambda t: t.shape, lambda t: t + 1, float, lambda t: torch.stack([t])):
        with pytest.raises(NodesDifferError, match="differs between nodes"):
            read(both["a"]["x"].tensor)
    with pytest.raises(ValueError, match="differ"):
        joined([states[0], {**states[1], "a": {"x": two, "n": 2}}])
