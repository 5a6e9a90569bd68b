"""The function that is minimised: the user's model and loss as one module from a batch to a scalar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vsim.engine import python_state
from vsim.engine.kept import as_kept, content
from vsim.engine.python_state import Change, Place, State, at, changed, with_changes, with_each

LossFunction = Callable[[Any, Any], Tensor]


class Objective(nn.Module):
    """The mean loss of a batch: `model(batch)`, or `loss_fn(model(x), y)` of a batch (x, y) if there is a `loss_fn`.

    Of outputs with a field or key `loss`, as many libraries' models return them, that is the loss.

    Accuracy is known where the model has a method `loss_and_accuracy(batch)` that returns two scalars, or where a
    `loss_fn` compares outputs (B, C, …) with whole-number targets (B, …): then it is that of argmax over C.

    Attributes:
        originals: the user's own models, of which this one is a copy.
        at_setup: the numbers that its Python kept at first (see `vsim.engine.python_state`).
        numbers: node → its own, for models that count. others: those of nodes that have not called it yet.
        left: those that the last call has left.
        callers: the nodes whose rows are computed; None: row k is node k.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None = None) -> None:
        super().__init__()
        if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
            raise ValueError("loss_fn has trainable parameters: make them part of the model, or freeze them")
        self.model = model
        self.loss_fn = loss_fn
        self.originals: tuple[nn.Module, ...] = ()
        self.at_setup = self.others = self.left = self.read()
        self.numbers: dict[int, State] = {}
        self.callers: Sequence[int] | None = None
        self._restored: set[Place] = set()

    def read(self) -> State:
        """Return the numbers that its Python keeps now."""
        return python_state.read(self.model, self.loss_fn)

    def write(self, numbers: State) -> None:
        """Let the numbers be these."""
        python_state.write(numbers, self.model, self.loss_fn)

    def follow(self, now: State) -> None:
        """Let a change since the last call, as by a callback, be one for all nodes."""
        if now == self.left:
            return
        for node, own in self.numbers.items():
            self.numbers[node] = with_changes(own, self.left, now)
        self.others, self.left = with_changes(self.others, self.left, now), now

    def states(self, nodes: Sequence[int]) -> list[Any]:
        """Return the numbers of each node; None for all where they are the same."""
        found = [self.numbers.get(node, self.others) for node in nodes]
        if all(own is found[0] or own == found[0] for own in found):
            return [None] * len(found)
        self.follow(self.read())
        return [self.numbers.get(node, self.others) for node in nodes]

    def differing(self) -> set[Place]:
        """Return where the numbers of nodes differ, those that have not called it included."""
        return {place for own in self.numbers.values() for place in changed(self.others, own)}

    @contextmanager
    def having(self, numbers: State | None) -> Iterator[None]:
        """Let the numbers be these within a block; None: as they are."""
        before = None if numbers is None else self.read()
        if numbers is not None:
            self.write(numbers)
        try:
            yield
        finally:
            if before is not None:
                self.write(before)

    def changes(self, nodes: Iterable[int]) -> list[list[Change]]:
        """Return what has changed since the setup, or since that of a run that this one resumes, for each node."""
        self.follow(self.read())
        found = []
        for node in nodes:
            own = self.numbers.get(node, self.others)
            places = dict.fromkeys([*changed(self.at_setup, own), *self._restored])
            found.append([content(at(own, place), copies=True) for place in places])
        return found

    def put_back(self, nodes: Iterable[int], changes: Iterable[Sequence[Change]]) -> None:
        """Let nodes have the numbers of which `changes` was returned."""
        for node, own in zip(nodes, changes, strict=True):
            self.numbers[node] = with_each(self.at_setup, as_kept(own))
            self._restored |= {(path, name) for path, name, *_ in own}
            self.write(self.numbers[node])
        self.left = self.read()

    def forward(self, batch: Any, with_accuracy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return (loss, accuracy): scalars; accuracy is None unless asked for and known."""
        if self.loss_fn is None:
            both = getattr(self.model, "loss_and_accuracy", None) if with_accuracy else None
            loss, accuracy = (self.model(batch), None) if both is None else both(batch)
        else:
            x, y = _inputs_and_targets(batch)
            outputs = self.model(x)
            loss = self.loss_fn(outputs, y)
            accuracy = _accuracy(outputs, y) if with_accuracy else None
        return _scalar(_loss_of(loss), "the loss"), None if accuracy is None else _scalar(accuracy, "the accuracy")


def _inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, Sequence) or len(batch) != 2:
        given = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, Sequence) else "")
        raise ValueError(f"with loss_fn= a batch must be a pair (x, y); the dataset gives {given}")
    return batch[0], batch[1]


def _loss_of(outputs: Any) -> Any:
    """Return the field or key `loss` of a model's outputs, or what is no such outputs as it is."""
    if isinstance(outputs, Tensor):
        return outputs
    has_key = isinstance(outputs, Mapping) and "loss" in outputs
    return outputs["loss"] if has_key else getattr(outputs, "loss", outputs)


def _scalar(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        parts = value if isinstance(value, tuple | list) else ()
        of = f" of ({', '.join(type(part).__name__ for part in parts)})" if parts else ""
        raise ValueError(
            f"{what} must be a scalar tensor, or outputs with one called loss, got {type(value).__name__}{of}; return "
            "the loss alone, or give loss_fn= if the model returns outputs"
        )
    if value.dim() != 0:
        raise ValueError(
            f"{what} must be a scalar (the mean over the batch), got a tensor of shape {tuple(value.shape)}; "
            "reduce it with .mean(), or give loss_fn= if the model returns outputs"
        )
    if value.is_complex():
        raise ValueError(f"{what} must be a real number, got one of dtype {value.dtype}")
    return value


def _accuracy(outputs: Any, targets: Any) -> Tensor | None:
    classifies = (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and not targets.is_floating_point()
        and outputs.dim() == targets.dim() + 1 >= 2
        and outputs.shape[:1] + outputs.shape[2:] == targets.shape
    )
    return (outputs.argmax(1) == targets).to(torch.float32).mean() if classifies else None
