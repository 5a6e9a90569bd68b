"""torch.optim on stacked rows: optimizers by specification, learning-rate schedules, clipping by node."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from vsim.arguments import one_of, only_one, real_number, reject_unknown, true_or_false, whole_number
from vsim.cluster.replicas import Replicas
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
# One pass over memory instead of one for each operation; the last bits differ from the separate operations'.
_FUSED = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})
# Rows of so many elements are worth calls of their own: they stay in the caches from one operation to the next, and
# temporaries have the size of one.
_LONG_ROW = 2**16
_CHOICE_OF_KERNEL = {"fused", "foreach", "differentiable", "capturable"}

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}
SCHEDULES = ("cosine", "lambda_cosine")


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
            self.state_names()
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self} is not possible: {error}") from error

    def state_names(self) -> frozenset[str]:
        """Return the names of what it keeps for a tensor; nothing for a class that is not torch's."""
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
        """Build one optimizer that updates stacked `weights` (R, P), or a shared row (P,), in place from `grads`."""
        kwargs = dict(self.kwargs)
        if self.cls in _FUSED and not deterministic and not _CHOICE_OF_KERNEL & kwargs.keys():
            kwargs["fused"] = True
        # Fused with a tensor for every row: what is rounded in another way (see `_fills_lines`) are the same entries on
        # all nodes, and nodes that are equal stay equal.
        by_row = weights.dim() == 2 and (kwargs.get("fused") or weights.shape[1] >= _LONG_ROW)
        rows = zip(weights, grads, strict=True) if by_row else [(weights, grads)]
        return self.cls([_with_grad(w, g) for w, g in rows], **kwargs)

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


def warmup_cosine(warmup_steps: int, cosine_anneal: bool, max_steps: int) -> Callable[[int], float]:
    """Return the factor on the peak learning rate at 0-based step s.

    s / w while s < w; afterwards 1, or with `cosine_anneal` 0.1 + 0.45 · (1 + cos(π · (s − w) / (T − w))), held at
    its last value from step T on.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        if not cosine_anneal:
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return factor


class Schedule:
    """A learning-rate schedule that is not built yet.

    Args:
        scheduler: a torch.optim.lr_scheduler class; "cosine" (warm-up, then cosine annealing) or "lambda_cosine" (the
            same, annealing only if asked); or None.
        kwargs: its arguments; for the named ones `warmup_steps`, `cosine_anneal`, `max_steps`.
        warmup_steps, cosine_anneal, max_steps: the same for the named ones, outside of `kwargs`. Giving a warm-up or
            annealing is enough to have the named schedule. `max_steps` None is the run's number of steps.

    Raises:
        TypeError, ValueError: an argument would have no effect, is given twice or is out of range.
    """

    def __init__(
        self,
        scheduler: type[LRScheduler] | str | None,
        kwargs: Mapping[str, Any] | None,
        warmup_steps: int | None,
        cosine_anneal: bool | None,
        max_steps: int | None,
    ) -> None:
        named = {"warmup_steps": warmup_steps, "cosine_anneal": cosine_anneal, "max_steps": max_steps}
        given = {name: value for name, value in named.items() if value is not None}
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"lr_scheduler_kwargs must be a dict of the scheduler's arguments, got {kwargs!r}")
        self.kwargs = dict(kwargs or {})
        self.cls: type[LRScheduler] | None = None
        self.named = isinstance(scheduler, str) or (
            scheduler is None and bool(given.get("warmup_steps") or given.get("cosine_anneal"))
        )
        if self.named:
            self._check_named(scheduler, given)
        elif scheduler is None:
            idle = {"lr_scheduler_kwargs": self.kwargs, "max_steps": max_steps}
            names = [name for name, value in idle.items() if value]
            if names:
                raise TypeError(f"{' and '.join(names)} has no effect without lr_scheduler=")
        else:
            self._check_class(scheduler, [name for name, value in given.items() if value])

    def _check_named(self, scheduler: Any, given: dict[str, Any]) -> None:
        name = one_of("lr_scheduler", scheduler or "lambda_cosine", SCHEDULES)
        reject_unknown(self.kwargs, ["warmup_steps", "cosine_anneal", "max_steps"], "lr_scheduler_kwargs")
        twice = self.kwargs.keys() & given.keys()
        if twice:
            raise TypeError(f"{', '.join(sorted(twice))} is given twice: in lr_scheduler_kwargs and beside it")
        self.kwargs = {"warmup_steps": 0, "cosine_anneal": name == "cosine", **self.kwargs, **given}
        whole_number("warmup_steps", self.kwargs["warmup_steps"], at_least=0)
        true_or_false("cosine_anneal", self.kwargs["cosine_anneal"])
        if self.kwargs.get("max_steps") is not None:
            whole_number("max_steps", self.kwargs["max_steps"])

    def _check_class(self, scheduler: Any, given: list[str]) -> None:
        if not (isinstance(scheduler, type) and issubclass(scheduler, LRScheduler)):
            raise TypeError(
                f"lr_scheduler must be a torch.optim.lr_scheduler class or one of {', '.join(SCHEDULES)}, "
                f"got {scheduler!r}"
            )
        if issubclass(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric at every step, which a strategy does not have")
        if given:
            raise TypeError(
                f"{', '.join(given)} belongs to the named schedules {SCHEDULES}; give {scheduler.__name__} its "
                "arguments as lr_scheduler_kwargs"
            )
        parameters = inspect.signature(scheduler).parameters.values()
        valid = [p.name for p in parameters if p.name != "optimizer"]
        reject_unknown(self.kwargs, valid, f"lr_scheduler_kwargs of {scheduler.__name__}")
        self.cls = scheduler
        if scheduler.__module__ == LRScheduler.__module__:
            self._check_torchs(scheduler)

    def _check_torchs(self, scheduler: type[LRScheduler]) -> None:
        """Take one step with one of torch's, so that its arguments are checked now."""
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        try:
            own = scheduler(optimizer, **copy.deepcopy(self.kwargs))
            optimizer.step()
            own.step()
        except Exception as error:
            given = ", ".join(f"{name}={value!r}" for name, value in self.kwargs.items())
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"lr_scheduler {scheduler.__name__}({given}) is not possible: {error}") from error

    def horizon(self, max_steps: int) -> int | None:
        """Return the steps that the schedule anneals over in a run of `max_steps` steps; None: it does not."""
        return (self.kwargs.get("max_steps") or max_steps) if self.named and self.kwargs["cosine_anneal"] else None

    def build(self, optimizer: StackedOptimizer, max_steps: int) -> list[LRScheduler]:
        """Return the schedulers to step after every optimizer step of a run of `max_steps` steps.

        Raises:
            ValueError: the schedule is shorter than the run.
        """
        if self.named:
            kwargs = {**self.kwargs, "max_steps": self.kwargs.get("max_steps") or max_steps}
            return [LambdaLR(o, warmup_cosine(**kwargs)) for o in torch_optimizers(optimizer)]
        cls = self.cls
        schedulers = [] if cls is None else [cls(o, **self.kwargs) for o in torch_optimizers(optimizer)]
        for scheduler in schedulers:
            if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < max_steps:
                raise ValueError(
                    f"OneCycleLR is over after {scheduler.total_steps} steps, and the run has {max_steps}: give it "
                    f"total_steps={max_steps} in lr_scheduler_kwargs"
                )
        return schedulers


def clip_by_node(replicas: Replicas, max_norm: float, exact: bool) -> None:
    """Scale every node's gradient so that its 2-norm is at most `max_norm`, as torch's clip_grad_norm_ does.

    With `exact` the norm is taken tensor by tensor with torch's own function, for the bits of a node alone; otherwise
    over whole rows at once.
    """
    grads = replicas.grads
    if exact:
        norms = torch.stack([nn.utils.get_total_norm(list(replicas.views(row).values())) for row in grads])
    else:
        norms = torch.linalg.vector_norm(grads, dim=1)  # (R,)
    grads.mul_((max_norm / (norms + 1e-6)).clamp(max=1.0)[:, None])
