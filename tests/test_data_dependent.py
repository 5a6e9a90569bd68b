"""Models whose Python depends on the numbers of a node: vectorized they compute what they compute node by node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from errors import refused, warned
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lowering import One, make
from torch import Tensor, nn
from torch.nn import functional as F

import vsim
from vsim.engine import Executor, LoopExecutor, VmapError, VmapExecutor

SIGNS = [1.0, -1.0, 1.0, 1.0]  # of the nodes' examples, where they differ


def batch_of(signs: list[float], step: int = 0) -> list[Tensor]:
    """[(K, 5, 6)], each node's examples of one sign."""
    x = torch.rand(len(signs), 5, 6, generator=torch.Generator().manual_seed(step)) + 0.1
    return [(x * torch.tensor(signs)[:, None, None]).double()]


class Branching(nn.Module):
    """Draws, counts and updates buffers before it looks at its examples."""

    def __init__(self, look: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = One(lambda x, m: m.own[0](x), nn.BatchNorm1d(6))
        self.look = look
        self.register_buffer("calls", torch.zeros(()))
        self.double()  # a norm over nearly equal examples amplifies rounding

    def forward(self, batch: list[Tensor]) -> Tensor:
        self.calls += self.training
        scale = F.dropout(torch.ones(6), 0.3) + torch.rand(6) + 0.01 * self.calls
        return self.look(self.inner(batch) * scale.mean(), batch[0])


def handled(loss: Tensor, x: Tensor) -> Tensor:
    """An operation raises for one node, which goes another way."""
    try:
        return loss * torch.linalg.cholesky(x.mean() * torch.eye(2)).sum()
    except torch.linalg.LinAlgError:
        return 2 * loss


def swallowed(loss: Tensor, x: Tensor) -> Tensor:
    """The model handles every error, also that the nodes differ."""
    try:
        return loss if x.sum() > 0 else 2 * loss
    except Exception:
        return loss * torch.nan


LOOKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a branch": lambda loss, x: loss if x.sum() > 0 else 2 * loss,
    "a formatted number": lambda loss, x: loss * float(f"{x.sign().mean():.1f}"),
    "a comparison": lambda loss, x: loss if torch.equal(x, x.abs()) else 2 * loss,
    "a condition in evaluation mode, too": lambda loss, x: loss + 1 if loss > x.sum() else loss,
    "a handled error": handled,
    "a swallowed error": swallowed,
}


def assert_same(ours: Executor, theirs: Executor) -> None:
    torch.testing.assert_close(ours.replicas.grads, theirs.replicas.grads)
    for name, buffer in ours.replicas.buffers.items():
        torch.testing.assert_close(buffer, theirs.replicas.buffers[name])
    for one, other in zip(ours.generators, theirs.generators, strict=True):
        assert torch.equal(one.get_state(), other.get_state())


def both(look: Callable[[Tensor, Tensor], Tensor], num_nodes: int, **options: Any) -> list[Executor]:
    return [make(kind, Branching(look), num_nodes, **options) for kind in (VmapExecutor, LoopExecutor)]


@pytest.mark.parametrize("name", LOOKS)
def test_every_node_goes_its_own_way(name: str) -> None:
    ours, theirs = both(LOOKS[name], 4)
    for step, signs in enumerate(([1.0] * 4, SIGNS, [1.0] * 4)):
        batch = batch_of(signs, step)
        losses = [executor.losses_and_grads([t.clone() for t in batch]) for executor in (ours, theirs)]
        torch.testing.assert_close(*losses)
        assert_same(ours, theirs)
        if "condition" not in name:  # an answer that all nodes give keeps the one call
            assert isinstance(ours, VmapExecutor)
            assert bool(ours.not_vmapped) is ("went to the loop" in ours.reason) is (step > 0)


@settings(max_examples=15)
@given(
    threshold=st.floats(-2, 2), minibatch_size=st.sampled_from([None, 3]), chunk_size=st.sampled_from([None, 1, 2, 3])
)
def test_wherever_nodes_differ(threshold: float, minibatch_size: int | None, chunk_size: int | None) -> None:
    def look(loss: Tensor, x: Tensor) -> Tensor:
        return loss.tanh() if x.mean() > threshold else loss

    batch = [torch.linspace(-2, 2, 5)[:, None, None] + batch_of([0.1] * 5)[0]]
    ours, theirs = both(look, 5, chunk_size=chunk_size)
    losses = [executor.losses_and_grads(batch, minibatch_size) for executor in (ours, theirs)]
    torch.testing.assert_close(*losses)
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["a number", "a branch"])
def test_a_number_that_differs_gets_a_word_before_the_first_step(name: str) -> None:
    """A branch may differ in this step only; two nodes' numbers differ in nearly every one."""
    looks = {"a number": lambda loss, x: loss * float(x.mean()) ** 0, **LOOKS}
    x = torch.linspace(-1, 1, 36).view(6, 6).double()
    trainer = vsim.Trainer(Branching(looks[name]), [*zip(x, strict=True)], loss_fn=None)
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 3, "shuffle": False, "progress": False}
    words = "reads a number", "float(x.mean())", "executor='loop'"
    with warned(*words) if name == "a number" else nullcontext():
        trainer.fit(strategy=vsim.strategy.FedAvgStrategy(H=2), batch_size=3, **options)
    assert trainer.history.executor == "vmap, loop"
    trainer.fit(
        strategy=vsim.strategy.FedAvgStrategy(H=2), batch_size=3, executor="vmap", **options
    )  # as was asked for


def test_an_evaluation_whose_rows_differ() -> None:
    def look(loss: Tensor, x: Tensor) -> Tensor:
        return F.dropout(loss, 0.5) if loss > loss.detach().round() else 10 * loss

    ours, theirs = both(look, 4)
    streams = [torch.Generator().manual_seed(1) for _ in range(2)]
    outcomes = [
        e.evaluate(3 * e.replicas.weights, e.replicas.buffers, [batch_of(SIGNS)[0][0]], stream)[0]
        for e, stream in zip((ours, theirs), streams, strict=True)
    ]
    assert torch.equal(*outcomes) and "went to the loop" in ours.reason
    assert torch.equal(*(stream.get_state() for stream in streams))


def test_weights_that_have_changed_in_place_cannot_be_restored() -> None:
    def look(loss: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.inner.scale.mul_(0.9)
        return LOOKS["a branch"](loss, x)

    model = Branching(look)
    executor = make(VmapExecutor, model, 4)
    model = executor.objective.model
    with refused(VmapError, "another", "changed in place already"):
        executor.losses_and_grads(batch_of(SIGNS))


def test_what_fails_in_one_call_at_a_later_step_goes_to_the_loop_or_is_the_models_own_error() -> None:
    def look(loss: Tensor, x: Tensor) -> Tensor:
        if not bool(x.abs().max() > 5):
            return loss
        return loss * x[x > 0].mean() if x.abs().max() < 50 else loss @ loss

    ours, theirs = both(look, 2)
    for scale in (1.0, 10.0, 1.0):
        losses = [e.losses_and_grads([scale * t for t in batch_of([1.0, 1.0])]) for e in (ours, theirs)]
        torch.testing.assert_close(*losses)
        assert_same(ours, theirs)
    with pytest.raises(RuntimeError, match="at least 1D") as caught:
        ours.losses_and_grads([100 * t for t in batch_of([1.0, 1.0])])
    assert not isinstance(caught.value, VmapError)
