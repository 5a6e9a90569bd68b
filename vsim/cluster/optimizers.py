"""Joint optimizers: several optimizers stepped as one, one for each node or for each part of the parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.cluster.replicas import Replicas
from vsim.private_torch import mark_stepped


class JointOptimizers:
    """Several optimizers that are stepped as one, each with its own parameters.

    Attributes:
        optimizers: torch optimizers, or other joint optimizers.
    """

    optimizers: Sequence[StackedOptimizer]

    # Placement in a checkpoint: "parts" if each optimizer serves all nodes, "rows" if each serves one node.
    placement: ClassVar[str] = "parts"

    def __init__(self, optimizers: Sequence[StackedOptimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Step all optimizers with the current gradients."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for stacked in stepped_tensors(self):
            if stacked.grad is not None and set_to_none:
                stacked.grad = None
            elif stacked.grad is not None:
                stacked.grad.zero_()


class NodeOptimizers(JointOptimizers):
    """One optimizer per node, for classes whose update of an element depends on other elements of its tensor.

    Args:
        cls: the class of torch optimizers.
        stacked: the stacked tensors whose rows the optimizers step.
        options: the arguments of each optimizer.

    Attributes:
        optimizers: the optimizers of the nodes that take part now, row by row.
    """

    optimizers: Sequence[Optimizer]
    placement = "rows"

    def __init__(self, cls: type[Optimizer], stacked: Sequence[Tensor], options: Mapping[str, Any]) -> None:
        self.stacked = stacked
        self._rows = [[p[row].detach() for p in stacked] for row in range(len(stacked[0]))]
        # Copy the options for each optimizer, because schedules change a learning rate in place if it is a tensor.
        self._all = [in_training(cls(rows, **copy.deepcopy(dict(options)))) for rows in self._rows]
        super().__init__(self._all)

    def attend(self) -> None:
        """Step the current rows of the stacked tensors from now on, with one optimizer per row."""
        self.optimizers = self._all[: len(self.stacked[0])]
        for optimizer in self._all:
            mark_stepped(optimizer)  # otherwise torch would warn, because the schedules of absent nodes continue
        for number in range(len(self.optimizers)):
            for own, stacked in zip(self._rows[number], self.stacked, strict=True):
                own.data = stacked[number].detach()

    def step(self) -> None:
        """Step every node's optimizer with the node's row of the current gradients."""
        for node, optimizer in enumerate(self.optimizers):
            rows = self._rows[node]
            for own, stacked in zip(rows, self.stacked, strict=True):
                own.grad = None if stacked.grad is None else stacked.grad[node]
            optimizer.step()


StackedOptimizer = Optimizer | JointOptimizers


def without_compiler(cls: type[Optimizer]) -> Callable[..., Optimizer]:
    """Return a subclass of `cls` that does not load torch.compile, to check arguments; callers must disable gradients.

    torch's optimizers load torch.compile, which takes a second and 70 MB, only to opt out of tracing.
    """
    methods = {name: inspect.unwrap(getattr(cls, name)) for name in ("add_param_group", "step")}
    return type(cls.__name__, (cls,), methods)


def torch_optimizers(optimizer: StackedOptimizer) -> list[Optimizer]:
    """Return the torch optimizers of which a stacked optimizer consists."""
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    return [one for part in optimizer.optimizers for one in torch_optimizers(part)]


def parts_of(optimizer: StackedOptimizer) -> list[StackedOptimizer]:
    """Return one optimizer for each of `OptimSpec.parts`, in their order."""
    if isinstance(optimizer, Optimizer | NodeOptimizers):
        return [optimizer]
    return list(optimizer.optimizers)


def _with_modes(optimizer: StackedOptimizer) -> list[Any]:
    """Return the torch optimizers with separate modes for training and evaluation, such as schedule-free ones."""
    return [o for o in torch_optimizers(optimizer) if hasattr(o, "train") and hasattr(o, "eval")]


def in_training(optimizer: Optimizer) -> Optimizer:
    """Switch an optimizer to its training mode, if it has one, and return it."""
    for one in _with_modes(optimizer):
        one.train()
    return optimizer


@contextmanager
def evaluating(optimizer: StackedOptimizer, weights: Tensor) -> Iterator[None]:
    """Set the `weights` of an optimizer to the weights for evaluation within this context, and restore them after it.

    Schedule-free optimizers compute gradients at an interpolation, but are evaluated at an average. Their eval()
    overwrites the interpolation with the average, and their train() restores the interpolation only up to rounding.
    """
    with_modes = _with_modes(optimizer)
    trained = weights.clone() if with_modes else weights
    for one in with_modes:
        one.eval()
    try:
        yield
    finally:
        for one in with_modes:
            one.train()
        if with_modes:
            weights.copy_(trained)


def move(tensors: Iterable[Tensor], earlier: Replicas, replicas: Replicas) -> None:
    """Turn stacked parameters and gradients from views of rows of `earlier` into views of rows of `replicas`."""
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        grad, tensor.grad = tensor.grad, None
        tensor.data = replicas.moved_view(tensor.data, earlier)
        tensor.grad = None if grad is None else replicas.moved_view(grad, earlier)


def nodes_of(optimizer: StackedOptimizer) -> list[NodeOptimizers]:
    """Return the `NodeOptimizers` among the parts of a stacked optimizer."""
    if isinstance(optimizer, NodeOptimizers):
        return [optimizer]
    return [one for part in getattr(optimizer, "optimizers", ()) for one in nodes_of(part)]


def forget(optimizer: StackedOptimizer) -> None:
    """Clear the state of a stacked optimizer; its parameter groups stay."""
    for one in torch_optimizers(optimizer):
        one.state.clear()


def stepped_tensors(optimizer: StackedOptimizer) -> list[Tensor]:
    """Return the tensors that a stacked optimizer steps from their `.grad`."""
    if isinstance(optimizer, NodeOptimizers):
        return list(optimizer.stacked)
    if isinstance(optimizer, JointOptimizers):
        return [p for part in optimizer.optimizers for p in stepped_tensors(part)]
    return [p for group in optimizer.param_groups for p in group["params"]]


def states_by_node(optimizer: StackedOptimizer, name: str, replicas: Replicas) -> list[list[Tensor]]:
    """Return the state called `name` of all parameters, node by node, as tensors that can be read and written.

    Before the first step an optimizer has no state: the tensors are then zeros with the parameters' shapes.

    Raises:
        ValueError: the optimizer keeps no such state.
    """

    def states(own: Optimizer) -> list[Tensor]:
        return [_state(own, parameter, name) for parameter in stepped_tensors(own)]

    if isinstance(optimizer, NodeOptimizers):
        return [states(own) for own in optimizer.optimizers]
    if isinstance(optimizer, JointOptimizers):
        parts = [states_by_node(part, name, replicas) for part in optimizer.optimizers]
        return [list(chain(*node)) for node in zip(*parts, strict=True)]
    found, size = states(optimizer), replicas.num_parameters
    if all(tensor.shape == (size,) for tensor in found):
        return [[row] for row in found]  # one optimizer with a parameter for each node
    if len(found) == 1:
        found = [found[0][:, :size]]  # without the gaps between rows
    return [[tensor[node] for tensor in found] for node in range(replicas.num_held)]


def _state(optimizer: Optimizer, parameter: Tensor, name: str) -> Tensor:
    state = optimizer.state.get(parameter)
    if not state:
        return torch.zeros_like(parameter)
    if not isinstance(state.get(name), Tensor):
        raise ValueError(f"{type(optimizer).__name__} keeps no {name!r} of a parameter, only {', '.join(state)}")
    return state[name]
