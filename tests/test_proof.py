"""Before the first step, the vectorized step of two nodes is compared with the loop's, on copies."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused, warned
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import Scaled, vectors
from torch import Tensor, nn
from torch.nn import functional as F

import vsim
from vsim import Compute, Network, Schedule, Trainer
from vsim.cluster.randomness import NODE, fingerprints, generator
from vsim.cluster.replicas import Replicas
from vsim.core.run import Diverged
from vsim.engine import AutoExecutor, LoopExecutor, Settings, VmapError, VmapExecutor
from vsim.engine.objective import Objective
from vsim.engine.proof import Proof
from vsim.strategy import AsyncDiLoCoStrategy, SimpleReduceStrategy, Strategy

OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": 4, "batch_size": 4, "progress": False}
ALONE, ALLREDUCE = Strategy(inner_optim="sgd", lr=0.1), SimpleReduceStrategy(inner_optim="sgd", lr=0.1)


def trained(model: nn.Module, strategy: Strategy = ALONE, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors())
    trainer.fit(strategy=strategy, **{**OPTIONS, **options})
    return trainer


# Wrong rules


class _Forward(torch.autograd.Function):
    """Doubles; vectorized, it gives every node another node's result."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return 2 * x.roll(1, in_dims[0]), in_dims[0]


class _Backward(_Forward):
    """Doubles; vectorized, only the gradient differs."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x.detach() + x, in_dims[0]


class Wrong(Scaled):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def scaled(self, x: Tensor) -> Tensor:
        result: Tensor = self.function.apply(x)
        return result


class WrongStatistics(Wrong):
    """Only a buffer is wrong: a mean of outputs, or how many are large."""

    def __init__(self, start: Tensor) -> None:
        super().__init__(_Forward)
        self.register_buffer("seen", start)

    def scaled(self, x: Tensor) -> Tensor:
        values = super().scaled(x.detach())
        self.seen += values.mean(0) if self.seen.is_floating_point() else (values > 1).sum()
        return x


WRONG = {
    "forward": (lambda: Wrong(_Forward), "the losses"),
    "backward": (lambda: Wrong(_Backward), "the gradient of layer.weight"),
    "running mean": (lambda: WrongStatistics(torch.zeros(5)), "the buffer seen"),
    "count": (lambda: WrongStatistics(torch.tensor(0)), "the buffer seen"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_is_found(wrong: str) -> None:
    make, message = WRONG[wrong]
    by_loop = trained(make(), executor="loop")
    for options in ({}, {"chunk_size": 2}, {"minibatch_size": 2}):
        with refused(VmapError, message, "eager PyTorch", "executor='loop'"):
            trained(make(), executor="vmap", **options)
    with warned("continues with 'loop'", message, "eager PyTorch"):
        ours = trained(make())
    assert ours.history.executor == "loop" and "differ" in ours.history.executor_reason
    np.testing.assert_array_equal(ours.history.node_losses, by_loop.history.node_losses)
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(tensor, by_loop.model.state_dict()[name])


def test_the_loop_validates_what_it_trains() -> None:
    """Also if fewer nodes than there are rows were present when the proof failed."""
    losses = []
    for executor in ("auto", "loop"):
        trainer = Trainer(Wrong(_Forward), vectors(), vectors())
        with warned("continues with 'loop'") if executor == "auto" else nullcontext():
            plan = Schedule({0: [0, 1]})
            trainer.fit(strategy=Strategy(), **OPTIONS, executor=executor, participation=plan, val_interval=2)
        losses.append(trainer.history["local_loss"])
    np.testing.assert_array_equal(losses[0][1:], losses[1][1:])


class Bent(_Forward):
    """Vectorized, one percent more, in the dtype of its input."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return 2.02 * x, in_dims[0]


def test_bfloat16_has_wider_bounds() -> None:
    with pytest.raises(VmapError, match="the losses"):
        trained(Wrong(Bent), executor="vmap")
    assert trained(Wrong(Bent), executor="vmap", autocast=True).history.executor == "vmap"
    with pytest.raises(VmapError, match="the losses"):
        trained(Wrong(_Forward), executor="vmap", autocast=True)


def test_the_first_and_the_last_node_are_computed() -> None:
    reason = trained(Scaled(), num_nodes=5, executor="vmap").history.executor_reason
    assert reason.startswith("proved on nodes 0 and 4: losses ")
    assert "proved on node 0: losses" in trained(Scaled(), num_nodes=1, executor="vmap").history.executor_reason


# What a proof leaves as it was


class Right(Scaled):
    """With all that a proof must leave as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.config = nn.BatchNorm1d(5), {"seen": False}

    def scaled(self, x: Tensor) -> Tensor:
        self.config["seen"] = True
        return F.dropout(self.norm(x.erf().cumsum(1)), 0.4) * (1 + 0.1 * torch.rand(()))


ASYNCHRONOUS = AsyncDiLoCoStrategy(H=2, inner_optim="sgd", lr=0.1)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (ALONE, {"chunk_size": 2}),
        (ALLREDUCE, {"minibatch_size": 2}),
        (ASYNCHRONOUS, {"network": Network(1e9, 1e-3), "compute": Compute([1.0, 2.0, 3.0])}),
    ],
)
def test_a_proof_changes_nothing(strategy: Strategy, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prove, proofs = VmapExecutor.prove, []

    def noted(self: VmapExecutor, *given: Any) -> Proof:
        streams = [g.get_state() for g in self.generators]
        tensors = [self.replicas.weights, self.replicas.grads, *self.replicas.buffers.values()]
        before, states = [t.clone() for t in tensors], fingerprints(torch.device("cpu"))
        attributes = self.objective.contents
        proofs.append(prove(self, *given))
        assert all(map(torch.equal, tensors, before)) and self.objective.contents == attributes
        assert all(torch.equal(g.get_state(), state) for g, state in zip(self.generators, streams, strict=True))
        assert states == fingerprints(torch.device("cpu")) and not self.objective._of_nodes
        return proofs[-1]

    monkeypatch.setattr(VmapExecutor, "prove", noted)
    ours = trained(Right(), strategy, executor="vmap", **options)
    assert proofs and {"erf", "cumsum"} <= {name for name, _ in proofs[0].calls}
    monkeypatch.setattr(VmapExecutor, "prove", lambda *_: Proof([0], 0.0, 0.0, Counter()))
    without = trained(Right(), strategy, executor="vmap", **options)
    np.testing.assert_array_equal(ours.history.node_losses, without.history.node_losses)
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(tensor, without.model.state_dict()[name])
    by_loop = trained(Right(), strategy, executor="loop", **{**options, "chunk_size": None})
    np.testing.assert_allclose(ours.history.node_losses, by_loop.history.node_losses, rtol=1e-4)


def test_each_shape_of_batch_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prove, sizes = VmapExecutor.prove, []

    def noted(self: VmapExecutor, batch: Any, *given: Any) -> Proof:
        sizes.append(batch[0].shape[1])
        return prove(self, batch, *given)

    monkeypatch.setattr(VmapExecutor, "prove", noted)
    trained(Right(), max_steps=8)  # 10 examples a node: 4, 4 and 2
    assert sizes == [4, 2]
    sizes.clear()
    strategies = {"AllReduce": ALLREDUCE, "alone": ALONE, "alone, too": Strategy(inner_optim="sgd", lr=0.2)}
    vsim.compare(Right(), vectors(), strategies=strategies, **{**OPTIONS, "max_steps": 8})
    assert sizes == [4, 2]  # of all runs together


# Errors of the model


def test_an_error_of_the_model_is_its_own() -> None:
    class Failing(Scaled):
        def scaled(self, x: Tensor) -> Tensor:
            raise KeyError("words")

    class Misshapen(Scaled):
        def scaled(self, x: Tensor) -> Tensor:
            return x @ x

    for executor in ("auto", "vmap", "loop"):
        with pytest.raises(KeyError, match="words"):
            trained(Failing(), executor=executor)
        with pytest.raises(RuntimeError, match=r"raised this at step 1, given batch\[0\]: float32 \(4, 12\)") as caught:
            trained(Misshapen(), executor=executor)
        assert not isinstance(caught.value, VmapError)


def test_losses_that_are_not_finite_on_both_ways_are_no_difference() -> None:
    class Infinite(Scaled):
        def scaled(self, x: Tensor) -> Tensor:
            return x / 0.0

    with pytest.raises(Diverged, match="non-finite loss at step 1"):  # and no warning
        trained(Infinite())


# Small models, drawn by chance

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten()),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "layer norm": lambda: nn.LayerNorm(6),
    "attention": lambda: nn.Sequential(
        # A norm of two entries would be their sign, in which no noise is seen.
        nn.Unflatten(1, (2, 3)),
        nn.TransformerEncoderLayer(3, 1, 4, 0.2, batch_first=True),
        nn.Flatten(),
    ),
    "dropout": lambda: nn.Dropout(0.3),
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1),
    "in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)),
    "noise": lambda: Noise(lambda m: torch.rand(())),
    "count": lambda: Noise(lambda m: m.calls),
    "Python's noise": lambda: Noise(lambda m: random.random()),
}


class Noise(nn.Module):
    """Scales by what a function of it draws, or counts in Python."""

    calls = 0

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.draw(self))


class Drawn(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(12, 6), *(LAYERS[name]() for name in names), nn.Linear(6, 5))
        self.double()  # norms of nearly equal examples amplify rounding

    def forward(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])


@settings(max_examples=20)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), max_size=4),
    num_nodes=st.integers(1, 4),
    size=st.sampled_from([2, 5]),
    minibatch_size=st.sampled_from([None, 3]),
    chunk_size=st.sampled_from([None, 2]),
)
def test_the_first_step_is_the_loops(
    names: list[str], num_nodes: int, size: int, minibatch_size: int | None, chunk_size: int | None
) -> None:
    stream = torch.Generator().manual_seed(size)
    x = torch.randn(num_nodes, size, 12, generator=stream).double()
    y = torch.randint(5, (num_nodes, size), generator=stream)
    found = []
    for kind in (AutoExecutor, LoopExecutor):
        replicas = Replicas.of(Drawn(names), num_nodes, torch.device("cpu"))
        replicas.module.train()
        streams = [generator(0, NODE, node) for node in range(num_nodes)]
        executor = kind(replicas, Objective(replicas.module), streams, Settings(chunk_size=chunk_size))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "executor='auto' continues with 'loop'", UserWarning)
            random.seed(1)
            losses = executor.losses_and_grads([x.clone(), y.clone()], minibatch_size)
        found.append([losses, replicas.grads.clone(), *replicas.buffers.values()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
