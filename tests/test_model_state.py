"""What a model changes in forward besides parameters and buffers is each node's; test_separate_modules.py has kinds."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from errors import refused, warned
from separate import Scaled, vectors
from torch import Tensor, nn
from torch.nn import functional as F

import vsim
from vsim import Trainer
from vsim.cluster.state import CheckpointError
from vsim.private_torch import register_recorders
from vsim.strategy import AsyncDiLoCoStrategy, SimpleReduceStrategy, Strategy

OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": 6, "batch_size": 5, "val_interval": 2, "progress": False}
SGD = Strategy(optim_spec="sgd", lr=0.5)


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
    strategy = AsyncDiLoCoStrategy(H=2, optim_spec="sgd", lr=0.1)
    clock = {"network": vsim.Network(1e9, 1e-3), "compute": vsim.Compute([1.0, 2.0, 3.0])}
    ours, expected = (losses(kind(), strategy=strategy, max_steps=9, **clock) for kind in (Counter, InBuffer))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_a_loss_may_count() -> None:
    class Loss:
        calls = 0

        def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return F.cross_entropy(outputs / self.calls, y)

    with warned("continues with 'loop'", "the losses"):
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
    whole = losses(Counter())
    with warned("calls", "checkpoint") as caught:
        losses(Counter(), save_dir=tmp_path, max_steps=3, checkpoint_interval=1)
    assert len(caught) == 1
    with warned("calls", "checkpoint"):
        resumed = losses(Counter(), save_dir=tmp_path, resume=True)
    assert np.array_equal(resumed[:3], whole[:3]) and not np.array_equal(resumed[3:], whole[3:])


def test_extra_state_resumes_and_moves_with_its_node(tmp_path: Path) -> None:
    whole = losses(Remembered())
    losses(Remembered(), max_steps=3, save_dir=tmp_path)
    assert np.array_equal(losses(Remembered(), resume=vsim.load_checkpoint(tmp_path)), whole)
    ours = losses(Remembered(), participation=vsim.Schedule({0: [0, 1, 2], 2: [0, 2]}))
    whole = losses(Remembered(), participation=vsim.Schedule({0: [0, 1, 2]}))
    assert np.array_equal(ours[:, [0, 2]], whole[:, [0, 2]])


@pytest.mark.parametrize(
    "plan", [vsim.Schedule({0: [0, 1, 2], 2: [0, 2], 4: [0, 1, 2]}), vsim.Sample(2, of=3)], ids=repr
)
def test_nodes_that_come_and_go_are_refused_without_extra_state(plan: Any) -> None:
    with refused(CheckpointError, "calls", "cannot be moved"):
        losses(Counter(), participation=plan, num_nodes=2 if isinstance(plan, vsim.Sample) else 3)


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
@pytest.mark.parametrize("strategy", [SGD, SimpleReduceStrategy(optim_spec="sgd", lr=0.5)], ids=["alone", "AllReduce"])
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
