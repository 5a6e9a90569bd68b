"""torch.optim on stacked rows: optimizers by specification, clipping by node."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsim.arguments import one_of, only_one, real_number, reject_unknown
from vsim.cluster.replicas import Replicas, with_gaps
from vsim.cluster.state import Stateful

# Every element of the update depends on that element alone, so that one optimizer over the (K, P) matrix is K
# optimizers. Any other class (Muon, Adafactor, a user's own) may mix elements and is applied node by node.
ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.ASGD,
    }
)
# One pass over memory instead of one for each operation; the last bits differ from those of separate operations.
_FUSED = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})
_CHOICE_OF_KERNEL = {"fused", "foreach", "differentiable", "capturable"}

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}


class OptimSpec:
    """An optimizer that is not built yet: a torch.optim class and its keyword arguments.

    >>> OptimSpec(torch.optim.AdamW, lr=3e-4)
    OptimSpec(AdamW, lr=0.0003)
    >>> OptimSpec("sgd", lr=0.1, momentum=0.9)
    OptimSpec(SGD, lr=0.1, momentum=0.9)

    Args:
        cls: a subclass of torch.optim.Optimizer, or the name of one in torch.optim in small letters.
        kwargs: its arguments.

    Raises:
        TypeError: `cls` is no optimizer, or an argument is not one of its.
        ValueError: an unknown name, or an optimizer that needs more than gradients (LBFGS, SparseAdam).
    """

    def __init__(self, cls: type[Optimizer] | str, **kwargs: Any) -> None:
        if isinstance(cls, str):
            cls = OPTIMIZERS[one_of("optimizer", cls.lower(), sorted(OPTIMIZERS))]
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise TypeError(f"an optimizer must be a torch.optim class or the name of one, got {cls!r}")
        if cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
            raise ValueError(f"{cls.__name__} needs closures or sparse gradients, which a stacked run has not")
        parameters = inspect.signature(cls).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            reject_unknown(kwargs, [p.name for p in parameters if p.name != "params"], cls.__name__)
        self.cls: type[Optimizer] = cls
        self.kwargs = kwargs
        self._check()

    def _check(self) -> None:
        """Build it once, so that its arguments are checked now."""
        try:
            if self.kwargs.get("lr") == math.inf:
                raise ValueError("lr must be finite")
            self.state_names()
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self} is not possible: {error}") from error

    def state_names(self) -> frozenset[str]:
        """Return the names of the state that it keeps for a tensor; none for a class that is not torch's."""
        if self.cls not in OPTIMIZERS.values():  # a user's own may have something else in mind
            return frozenset()
        sample = torch.zeros(2, 2, requires_grad=True)  # which any of torch's takes
        sample.grad = torch.zeros(2, 2)
        of_gpus = {"capturable"} if torch.cuda.is_available() else set()
        optimizer = self.cls([sample], **{name: v for name, v in self.kwargs.items() if name not in of_gpus})
        optimizer.step()
        return frozenset(optimizer.state[sample])

    @classmethod
    def from_string(cls, name: str, **kwargs: Any) -> OptimSpec:
        """Return the specification of the optimizer called `name` in torch.optim, in small letters."""
        return cls(name, **kwargs)

    @property
    def elementwise(self) -> bool:
        """Whether one optimizer over stacked rows is the same as one for each row."""
        return self.cls in ELEMENTWISE

    def build(self, parameters: nn.Module | Iterable[Tensor]) -> Optimizer | NodeOptimizers:
        """Build the optimizer over `parameters`: tensors with a `.grad`, or a module.

        For the stacked `self.model` of a strategy, an optimizer that is not elementwise becomes one for each node.
        """
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        tensors = [p for p in parameters if p.requires_grad]
        # A fused kernel goes over memory from a tensor's first element on, whatever lies between its rows.
        as_one = self.elementwise and not self.kwargs.get("fused")
        if as_one or not all(getattr(p, "is_stacked", False) for p in tensors):
            return self.cls(tensors, **self.kwargs)
        nodes = range(len(tensors[0]))
        return NodeOptimizers(self, [[(p, row) for p in tensors] for row in nodes])

    def build_for(self, replicas: Replicas, deterministic: bool) -> Optimizer | NodeOptimizers:
        """Build the optimizer of all nodes of `replicas`: one over the matrix where that is the same."""
        by_tensor = deterministic and bool(self.kwargs.get("fused")) and not _fills_lines(replicas)
        if by_tensor or not self.elementwise:
            weights = replicas.views(replicas.weights)
            grads = replicas.views(replicas.grads[: len(replicas.weights)])
            for name, w in weights.items():
                weights[name] = _with_grad(w, grads[name])
            return NodeOptimizers(self, [[(w, row) for w in weights.values()] for row in range(len(replicas.weights))])
        # Where the nodes share one row of weights, every row of gradients holds the same step: the first is taken.
        return self.build_over(replicas.weights, replicas.grads[: len(replicas.weights)], deterministic)

    def build_over(self, weights: Tensor, grads: Tensor, deterministic: bool) -> Optimizer:
        """Build one optimizer that updates stacked `weights` (R, P) in place from `grads`.

        A matrix is stepped with the gaps between its rows, as one dense parameter (R, pitch): fused kernels go over
        memory in whole vectors then, so that equal rows are rounded alike wherever a thread's part ends.
        """
        if deterministic and self.kwargs.get("fused"):
            # The last entries of a node's own parameters are no whole vector, and are rounded in another way.
            return self.build_shared(list(weights), list(grads), deterministic)
        return self.build_shared([with_gaps(weights)], [with_gaps(grads)], deterministic)

    def build_shared(self, weights: Sequence[Tensor], grads: Sequence[Tensor], deterministic: bool) -> Optimizer:
        """Build one optimizer that updates tensors as they are, in place from `grads`."""
        kwargs = dict(self.kwargs)
        picks = not (deterministic or _CHOICE_OF_KERNEL & kwargs.keys() or weights[0].is_meta)
        if picks and self.cls in _FUSED:
            kwargs["fused"] = True
        return self.cls([_with_grad(w, g) for w, g in zip(weights, grads, strict=True)], **kwargs)

    def __repr__(self) -> str:
        return f"OptimSpec({', '.join([self.cls.__name__, *(f'{k}={v!r}' for k, v in self.kwargs.items())])})"


class NodeOptimizers(Stateful):
    """One optimizer for each node, for those that mix the elements of a tensor.

    Attributes:
        optimizers: the torch optimizers, node by node.
        stacked: the stacked tensors that they step the rows of.
    """

    def __init__(self, spec: OptimSpec, nodes: Sequence[Sequence[tuple[Tensor, int]]]) -> None:
        self.stacked = [p for p, _ in nodes[0]]
        self._sources = nodes
        self._rows = [[p[row].detach() for p, row in node] for node in nodes]
        self.optimizers = [spec.cls(rows, **spec.kwargs) for rows in self._rows]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all nodes."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all nodes' optimizers; the rest follows from the tensors that they step."""
        return {"optimizers": self.optimizers}

    def step(self) -> None:
        """Step every node's optimizer with that node's row of the gradients as they are now."""
        for optimizer, rows, sources in zip(self.optimizers, self._rows, self._sources, strict=True):
            for own, (stacked, row) in zip(rows, sources, strict=True):
                own.grad = None if stacked.grad is None else stacked.grad[row]
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all nodes."""
        for stacked in self.stacked:
            if stacked.grad is not None and set_to_none:
                stacked.grad = None
            elif stacked.grad is not None:
                stacked.grad.zero_()


StackedOptimizer = Optimizer | NodeOptimizers


def torch_optimizers(optimizer: StackedOptimizer) -> list[Optimizer]:
    """Return the torch optimizers that a stacked optimizer is made of."""
    return optimizer.optimizers if isinstance(optimizer, NodeOptimizers) else [optimizer]


def stepped_tensors(optimizer: StackedOptimizer) -> list[Tensor]:
    """Return the tensors whose `.grad` a stacked optimizer steps with."""
    if isinstance(optimizer, NodeOptimizers):
        return optimizer.stacked
    return [p for group in optimizer.param_groups for p in group["params"]]


def states_by_node(optimizer: StackedOptimizer, name: str, replicas: Replicas) -> list[list[Tensor]]:
    """Return the state called `name` of all parameters, node by node, as tensors to read and to write to.

    Where no step has been taken, for there are no values, the tensors are new, and of the parameters' shapes.

    Raises:
        ValueError: the optimizer keeps no such state.
    """

    def states(own: Optimizer) -> list[Tensor]:
        return [_state(own, parameter, name) for parameter in stepped_tensors(own)]

    if isinstance(optimizer, NodeOptimizers):
        return [states(own) for own in optimizer.optimizers]
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


def _fills_lines(replicas: Replicas) -> bool:
    """Whether a fused kernel rounds a row as it rounds the row's parameters, one by one.

    It goes over a tensor in lines of 64 bytes, and may round what remains at the end in another way: so it does if no
    parameter but the last has such a rest.
    """
    return all(c.shape.numel() * replicas.weights.element_size() % 64 == 0 for c in replicas.layout[:-1])


def _with_grad(weights: Tensor, grads: Tensor) -> Tensor:
    tensor = weights.detach().requires_grad_()
    tensor.grad = grads
    return tensor


def resolve_optim(
    where: str, spellings: Mapping[str, Any], rates: Mapping[str, float | None], default: OptimSpec
) -> OptimSpec:
    """Return the one specification that a user gave under several spellings.

    Args:
        where: whose arguments these are, for errors.
        spellings: argument name → OptimSpec, class, name, or None; at most one given.
        rates: argument name → learning rate or None; at most one given. It replaces the default's.
        default: what holds if none is given.
    """
    given, rate = only_one(where, **spellings), only_one(where, **rates)
    if isinstance(given, OptimSpec):
        spec = given
        if rate is not None and "lr" in spec.kwargs:
            raise TypeError(f"{where}: the learning rate is given twice, as {rate} and in {spec}")
    else:
        spec = default if given is None else OptimSpec(given)
    if rate is None:
        return spec
    name = next(name for name, value in rates.items() if value is not None)
    return OptimSpec(spec.cls, **{**spec.kwargs, "lr": real_number(name, rate, at_least=0)})


def clip_by_node(replicas: Replicas, max_norm: float, exact: bool) -> None:
    """Scale every node's gradient so that its 2-norm is at most `max_norm`, as torch's clip_grad_norm_ does.

    With `exact` the norm is taken tensor by tensor with torch's own function, bitwise equal to a node alone; otherwise
    over whole rows at once.
    """
    grads = replicas.grads
    if exact:
        norms = torch.stack([nn.utils.get_total_norm(list(replicas.views(row).values())) for row in grads])
    else:
        norms = torch.linalg.vector_norm(grads, dim=1)  # (R,)
    grads.mul_((max_norm / (norms + 1e-6)).clamp(max=1.0)[:, None])
