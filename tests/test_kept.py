"""Tensors of the step that a model keeps in an attribute: under vmap the first node's, as in the loop, or the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import warned
from reference_cluster import vectors
from torch import Tensor, nn
from torch.nn import functional as F

import vsim
from vsim.strategy import FedAvgStrategy

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling


class Keeps(nn.Module):
    """A model of vectors (12) that does something with its hidden features and itself."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.does = does
        self.inner, self.outer = nn.Linear(12, 6), nn.Linear(6, 5)
        self.seen: Any = None
        self.number = torch.zeros(())
        self.count = torch.zeros((), dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()
        changed = self.does(self, h)
        outputs: Tensor = self.outer(h if changed is None else changed)
        return outputs


def having(**values: Any) -> Callable[[Any, Tensor], Tensor | None]:
    """Set attributes to f(model, features)."""

    def does(m: Any, h: Tensor) -> None:
        for name, f in values.items():
            setattr(m, name, f(m, h))

    return does


def penalized(m: Any, h: Tensor) -> Tensor:
    """A part of the loss that the model hands over by an attribute, as mixtures of experts do."""
    m.number = h.square().mean()
    return h


def in_training(m: Any, h: Tensor) -> None:
    if m.training:
        m.seen = h.detach().mean(0)


def computes_with_the_last(m: Any, h: Tensor) -> Tensor:
    before, m.seen = m.seen, h.detach()
    return h if before is None else h + 0.1 * before.mean()


def adds_nothing_of_the_last(m: Any, h: Tensor) -> Tensor:
    before, m.seen = m.seen, h.detach()
    return h if before is None else h + 0 * before.mean()


KEPT: dict[str, Callable[[Any, Tensor], Tensor | None]] = {
    "activations": having(seen=lambda m, h: h.detach()),
    "with their graph": having(seen=lambda m, h: h),
    "of one example": having(seen=lambda m, h: h[0]),
    "whole numbers": having(seen=lambda m, h: h.argmax(1)),
    "whether": having(seen=lambda m, h: h > 0),
    "in training only": in_training,
    "a part of the loss": penalized,
    "two": having(seen=lambda m, h: h.detach().mean(), number=lambda m, h: h.detach().var()),
}
# A name that the warning has.
CARRIED: dict[str, tuple[Callable[[Any, Tensor], Tensor | None], str]] = {
    "a running mean": (having(number=lambda m, h: 0.9 * m.number + 0.1 * h.detach().mean()), "number"),
    "a count": (having(count=lambda m, h: m.count + 1), "count"),
    "a sum of counts": (having(count=lambda m, h: m.count + (h > 0).sum()), "count"),
    "the last activations": (computes_with_the_last, "seen"),
    "nothing of them": (adds_nothing_of_the_last, "seen"),
    "a list": (having(seen=lambda m, h: [h.detach()]), "seen"),
}


class WithPenalty(nn.Module):
    """The loss of `Keeps`, with what it has put into `number`, in the same call."""

    def __init__(self, model: Keeps) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        return loss + 0.1 * self.model.number if self.model.does is penalized else loss


class Sees(vsim.Callback):
    """Copies what the model has kept in every step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step(self, run: Any) -> None:
        model = run.model.model
        self.seen.append([None if t is None else t.detach().clone() for t in (model.seen, model.number)])


def trained(does: Callable[[Any, Tensor], Tensor | None], **options: Any) -> tuple[vsim.Trainer, list[Any]]:
    torch.manual_seed(0)
    trainer, sees = vsim.Trainer(WithPenalty(Keeps(does)), vectors(), vectors(7, seed=1)), Sees()
    given = {"num_nodes": 4, "max_steps": 4, "batch_size": 3, "val_interval": 2, "progress": False, **options}
    callbacks = [] if given.pop("blind", False) else [sees]
    trainer.fit(strategy=FedAvgStrategy(H=2, lr=0.1), callbacks=callbacks, **given)
    return trainer, sees.seen


@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}, {"minibatch_size": 1}], ids=str)
@pytest.mark.parametrize("kind", KEPT)
def test_it_is_the_first_nodes_as_in_the_loop(kind: str, options: dict[str, Any]) -> None:
    vmapped, ours = trained(KEPT[kind], executor="auto", **options)
    looped, theirs = trained(KEPT[kind], executor="loop", **{k: v for k, v in options.items() if k != "chunk_size"})
    assert vmapped.history.executor == "vmap" and looped.history.executor == "loop"
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(vmapped.history.node_losses, looped.history.node_losses)
    assert vmapped.strategy is not None and looped.strategy is not None
    torch.testing.assert_close(vmapped.strategy.cluster.weights, looped.strategy.cluster.weights)
    copy.deepcopy(vmapped.model)  # nothing of autograd or functorch is left


@pytest.mark.parametrize("kind", CARRIED)
def test_what_lasts_from_step_to_step_is_each_nodes_own(kind: str) -> None:
    does, name = CARRIED[kind]
    with warned("executor='auto' continues with 'loop'", name):
        trainer, _ = trained(does, executor="auto", blind=True)
    looped, _ = trained(does, executor="loop", blind=True)
    assert trainer.history.executor == "loop"
    torch.testing.assert_close(trainer.history.node_losses, looped.history.node_losses, rtol=0.0, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KEPT)
def test_a_model_that_keeps_is_not_compiled(kind: str) -> None:
    with warned("cannot be compiled"):
        trainer, _ = trained(KEPT[kind], compile=True)
    assert trainer.history.executor == "vmap"
