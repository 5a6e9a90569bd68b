"""Strategies with code that is written as if for one node, and runs for all nodes.

gradients ─► modules' communicate_gradients ─► clip ─► optimizer ─► modules' communicate ─► schedule ─► t + 1
            └────────── before_optimizer ──────────┘              └ after_optimizer ┘
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import field, replace
from types import FrameType, MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from vsim.algorithms.communicate import communicating_through
from vsim.cluster import Cluster
from vsim.cluster.muon import StackedMuon
from vsim.cluster.optim import ELEMENTWISE
from vsim.cluster.optimizers import StackedOptimizer, stepped_tensors, torch_optimizers
from vsim.cluster.replicas import Columns, Replicas
from vsim.core.algorithm import Algorithm
from vsim.core.fields import OPTIONS, algorithm, arguments_of, state

# Functions that only rearrange values: they mix no nodes, even if the result has no leading node dimension.
_ARRANGES = (
    *("getitem", "select", "unbind", "split", "tensor_split", "chunk", "narrow", "index_select", "gather", "stack"),
    *("unsqueeze", "squeeze", "expand", "expand_as", "repeat", "tile", "roll", "flip", "einsum"),
    *("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "t", "T", "mT", "H", "mH"),
)


@algorithm
class Strategy(Algorithm):
    """An inner optimizer, other algorithms as parts, and code of your own. The base to subclass.

    A subclass may extend `before_optimizer` or `after_optimizer`, or `step` with code written as if for one node, which
    must end with `super().step()`; see docs/own-strategy.md.

    Args:
        communication_modules: algorithms that communicate in this order, before the strategy's own `sync`. They take
            no options of their own, and only communicate: neither of them replaces the optimizer's step.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Attributes during a run:
        model: the stacked model: `parameters()` yields tensors (K, *shape) with stacked `.grad`.
        optim: the inner optimizer. num_nodes: K. local_step: the number of completed steps. cluster: everything else.
    """

    derived: ClassVar[tuple[str, ...]] = ("_stepped",)
    uncalled = ()

    communication_modules: Sequence[Algorithm] = field(default=(), kw_only=False)

    model: StackedModel = state()

    def __post_init__(self) -> None:
        where = f"{type(self).__name__}()"
        self.communication_modules = _checked_parts(self.communication_modules, where)
        if self.attack is not None:
            self.communication_modules = [copy.copy(part) for part in self.communication_modules]
        super().__post_init__()

    @property
    def parts(self) -> Sequence[Algorithm]:
        return (*self.communication_modules, self)

    @property
    def communicates(self) -> bool:  # type: ignore[override]
        return len(self.communication_modules) > 0

    def begin(self, cluster: Cluster) -> None:
        if self.defines_step and cluster.plan is not None and cluster.plan.segment(1).steps:
            raise TypeError(
                f"{type(self).__name__} defines step(), in which it communicates and steps its optimizer; with "
                "Sample(epochs=…) or Partial(…) clients rest between the two"
            )
        super().begin(cluster)

    def inner_optimizer(self) -> StackedOptimizer:
        self.model = StackedModel(self.cluster.replicas)
        self._init_node(self.model, self.cluster.replicas.first_node, self.cluster.num_nodes)
        for optimizer in torch_optimizers(self.optim):
            name = type(optimizer).__name__
            if optimizer is self.optim and type(optimizer) not in (*ELEMENTWISE, StackedMuon):
                raise TypeError(
                    f"{name} may mix the elements of a tensor, so over stacked parameters it would mix nodes; "
                    f"build it with OptimSpec(torch.optim.{name}, …).build(self.model), one for each node"
                )
            for group in optimizer.param_groups:
                if group.get("fused") and not all(p.is_contiguous() for p in group["params"]):
                    raise TypeError(
                        f"a fused {name} takes tensors for contiguous, and stacked parameters are not; build it with "
                        f"OptimSpec(torch.optim.{name}, fused=True, …).build(self.model), one for each node"
                    )
        self._stepped = [(p, p.grad) for p in stepped_tensors(self.optim)]
        return self.optim

    def move_rows(self, earlier: Replicas) -> None:
        super().move_rows(earlier)
        self.model.move(self.cluster.replicas)
        self._stepped = [(p, p.grad) for p in stepped_tensors(self.optim)]

    def _stacked_parameters(self) -> list[Tensor]:
        return [*super()._stacked_parameters(), *self.model.made()]

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Prepare the nodes; a subclass may extend this, and may set `self.optim`.

        Args:
            model: the stacked model, also `self.model`.
            rank: the number of the first node held here: 0 in the simulator, where all nodes are held together.
            num_nodes: K.
        """
        self.optim = super().inner_optimizer()

    def _setup_scheduler(self) -> None:
        """Do nothing: strategies written for EXO Gym call this in `_init_node`, but vsim builds the schedule later."""

    @property
    def num_nodes(self) -> int:
        """The number of nodes, K."""
        return self.cluster.num_nodes

    @property
    def local_step(self) -> int:
        """Completed steps; 0 during the first step, and 1 in code that follows its `super().step()`."""
        return self.cluster.completed + self.cluster.collectives.position.has_communicated

    @property
    def defines_step(self) -> bool:
        """Whether a subclass defines `step`, which may step the optimizer itself."""
        return type(self).step is not Strategy.step

    # What a subclass extends -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step of all nodes: gradients → communicate → clip → optimizer → communicate → schedule."""
        self.before_optimizer()
        if self.cluster.collectives.position.moment == "gradients":  # a subclass may have called optim.step()
            super().optimize()
        self.after_optimizer()

    def before_optimizer(self) -> None:
        """Communicate the gradients, then clip them; if a subclass defines `step`, `optim.step()` clips them later."""
        self.model.write_back()
        if self.defines_step:
            self._communicate_gradients()
        else:
            super().gradients()

    def after_optimizer(self) -> None:
        """Communicate the weights."""
        if self.cluster.collectives.position.has_communicated:
            raise TypeError(f"{type(self).__name__}: step {self.cluster.step} communicates twice; call super() once")
        super().advance()

    # A step ----------------------------------------------------------------------------------------------------------

    def gradients(self) -> None:
        if not self.defines_step:
            with self._as_one_node("before_optimizer"):
                self.before_optimizer()

    def optimize(self) -> None:
        if not self.defines_step:
            super().optimize()
            return
        for parameter, grad in self._stepped:
            if parameter.grad is None:  # if the previous step called self.optim.zero_grad()
                parameter.grad = grad
        matrix = self.cluster.replicas.weights.data_ptr()  # one torch optimizer may step the whole matrix
        is_whole = isinstance(self.optim, Optimizer) and [p.data_ptr() for p, _ in self._stepped] == [matrix]
        if is_whole and not isinstance(self.optim.state, StateByParameter):  # type: ignore[union-attr]
            self.optim.state = StateByParameter(self.optim.state, self.optim, self.model)  # type: ignore[union-attr, arg-type]

        def prepare(*_: Any) -> None:
            self.model.write_back()
            self.clip_gradients()

        def note(*_: Any) -> None:
            self.cluster.collectives.position.moment = "weights"  # the ledger's moment of all later collectives

        optimizers = torch_optimizers(self.optim)
        with ExitStack() as hooks, self._as_one_node("step"):
            hooks.callback(optimizers[0].register_step_pre_hook(prepare).remove)
            hooks.callback(optimizers[-1].register_step_post_hook(note).remove)
            self.step()

    def advance(self) -> None:
        if not self.defines_step:
            with self._as_one_node("after_optimizer"):
                self.after_optimizer()

    @contextmanager
    def _as_one_node(self, method: str) -> Iterator[None]:
        """Return a context for a subclass's method, which may communicate and assign tensors, but not mix nodes.

        Only the first step is checked for mixed nodes, since the same code runs at every step.
        """
        is_own = getattr(type(self), method) is not getattr(Strategy, method)
        watched = is_own and not self.cluster.compile and self.cluster.completed == 0
        mode = NoMixing([*self.model.parameters()], method) if watched else nullcontext()
        with communicating_through(self.cluster.collectives), mode:
            yield
        self.model.write_back()


def replaced_by(cls: type[Algorithm]) -> list[str]:
    """Return what a class defines that only whole strategies have: an algorithm that does cannot be a part."""
    of_wholes = ("begin", "inner_optimizer", "gradients", "optimize", "advance", "model_weights", "parts")
    return [name for name in of_wholes if getattr(cls, name) is not getattr(Algorithm, name)]


def _checked_parts(given: Any, where: str) -> list[Algorithm]:
    if not isinstance(given, list | tuple):
        raise TypeError(f"{where}: communication_modules must be a list of algorithms, got {given!r}")
    for part in given:
        if not isinstance(part, Algorithm):
            raise TypeError(f"{where}: communication_modules must be algorithms, got {part!r}")
        if options := [name for name in arguments_of(part) if name in OPTIONS]:
            raise TypeError(f"{where}: {part!r} is a part, and takes no {', '.join(options)}; give them to {where}")
        if replaced := replaced_by(type(part)):
            raise TypeError(f"{where}: {part!r} extends {', '.join(replaced)}, and is no part of another strategy")
    for i, part in enumerate(given):
        for other in given[:i]:  # an algorithm holds one state; a second one may do nothing
            if part is other or (type(part) is type(other) and (part.only_once or not arguments_of(part))):
                raise ValueError(f"{where}: communication_modules has the same {type(part).__name__} twice")
    return list(given)


@algorithm
class CommunicateOptimizeStrategy(Strategy):
    """Let several algorithms communicate in turn, around one inner optimizer.

        CommunicateOptimizeStrategy([SPARTAStrategy(p_sparta=0.01), DiLoCoStrategy(H=50)], inner_optim="adamw", lr=1e-3)

    Args:
        communication_modules: the algorithms, in the order in which they communicate; see `Strategy`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.
    """


class StackedModel(nn.Module):
    """The user's model with stacked parameters (K, *shape); they and their `.grad` are views of the nodes' matrices.

    Elementwise code that is written for one node (`p.grad.div_(2)`, `p.mul_(0.9)`, `p.grad = sign(p.grad)`) runs
    for all nodes at once. The model has trainable parameters only; frozen parameters are shared and never change.
    """

    def __init__(self, replicas: Replicas) -> None:
        super().__init__()
        self._replicas = replicas
        self._stacked: dict[str, nn.Parameter] | None = None
        self._views: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, stacked parameter (K, *shape)), in the order of the user's model."""
        for name, parameter in self._parameters_by_name().items():
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def __deepcopy__(self, memo: object) -> StackedModel:
        """Return a copy with its own memory, for strategies that keep a snapshot of the weights."""
        own = self._replicas
        buffers = copy.deepcopy(own.buffers)
        return StackedModel(replace(own, weights=own.weights.clone(), grads=own.grads.clone(), buffers=buffers))

    @property
    def columns(self) -> Sequence[Columns]:
        """The columns of every parameter in the node matrix."""
        return self._replicas.layout

    @property
    def of_one_node(self) -> nn.Module:
        """The user's model; its tensors are not used."""
        return self._replicas.module

    def made(self) -> list[nn.Parameter]:
        """Return the stacked parameters; an empty list if they have not been used yet."""
        return [*(self._stacked or {}).values()]

    def move(self, replicas: Replicas) -> None:
        """Switch to the rows of `replicas`; the parameters are already views of these rows."""
        self._replicas = replicas
        weights, grads = (replicas.views(rows) for rows in (replicas.weights, replicas.grads))
        self._views = [(p, weights[name], grads[name]) for name, p in (self._stacked or {}).items()]

    def write_back(self) -> None:
        """Copy assigned tensors (`p.grad = …`, `p.data = …`) into the matrix, which all other code reads."""
        for parameter, weights, grads in self._views:
            if parameter.data_ptr() != weights.data_ptr():
                weights.copy_(parameter)
                parameter.data = weights
            if parameter.grad is None:
                grads.zero_()
            elif parameter.grad.data_ptr() != grads.data_ptr() or parameter.grad.shape != grads.shape:
                grads.copy_(parameter.grad)
            else:
                continue
            parameter.grad = grads

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        if self._stacked is None:  # on first use: strategies that work on the matrix need no stacked parameters
            self._stacked = {}
            weights = self._replicas.views(self._replicas.weights)
            grads = self._replicas.views(self._replicas.grads)
            for name, view in weights.items():
                parameter = nn.Parameter(view)
                parameter.grad = grads[name]
                parameter.is_stacked = True  # type: ignore[attr-defined]
                self._stacked[name] = parameter
                self._views.append((parameter, view, grads[name]))
        return self._stacked


class StateByParameter(defaultdict[Any, Any]):
    """The state of an optimizer that steps all nodes as one matrix; the model's stacked parameters are keys, too.

    Args:
        state: the optimizer's state. optimizer: steps one parameter, the matrix (R, pitch).
        model: the stacked model whose parameters are the keys.
    """

    def __init__(self, state: Mapping[Any, Any], optimizer: Optimizer, model: StackedModel) -> None:
        super().__init__(dict, state)
        (self._matrix,) = optimizer.param_groups[0]["params"]
        self._columns: dict[Any, Columns] = dict(zip(model.parameters(), model.columns, strict=True))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter: tensors (K, *shape) that share the optimizer's memory."""
        columns = self._columns.get(key)
        if columns is None:
            return super().get(key, default)
        own = super().get(self._matrix)
        if not own:
            return default
        shape, of_matrix = self._matrix.shape, slice(columns.start, columns.stop)
        return MappingProxyType(
            {
                name: value[:, of_matrix].unflatten(1, columns.shape or (1,)).view(len(value), *columns.shape)
                if isinstance(value, Tensor) and value.shape == shape
                else value
                for name, value in own.items()
            }
        )

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._matrix if key in self._columns else key)

    def __getitem__(self, key: Any) -> Any:
        return self.get(key, MappingProxyType({})) if key in self._columns else super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self._columns:
            raise TypeError("optim.state takes no state of your own here: keep it in an attribute of the strategy")
        super().__setitem__(key, value)


class NoMixing(TorchFunctionMode):
    """A context that raises a ValueError if an operation on stacked tensors gives one result for all nodes.

    Results of operations on stacked tensors count as stacked, too, so that `p.grad.abs().max()` raises the error.
    Functions under `torch.vmap`, indexed tensors (`p.grad[0]`), collectives and optimizers are not checked.

    Args:
        parameters: stacked (K, *shape). method: the name of the user's method, for the error.
    """

    def __init__(self, parameters: Sequence[Tensor], method: str) -> None:
        super().__init__()
        self._method = method
        self._num_rows = len(parameters[0]) if parameters else 1
        self._stacked = {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._num_rows == 1 or not self._any_stacked((args, kwargs)) or not _is_called_by_user():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        name = (func.__self__.__name__ if name == "__get__" else name).strip("_")
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if name == "view":  # rows of a stacked tensor are not adjacent in memory
                raise ValueError(_message(name, self._method)) from error
            raise
        index = args[1] if name == "getitem" else None
        by_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 1
        for tensor in _tensors(result):
            if name.startswith("new_") or (name in _ARRANGES and not by_mask):
                self._stacked.pop(id(tensor), None)
            elif tensor.dim() == 0 or len(tensor) != self._num_rows:
                raise ValueError(_message(name, self._method))
            else:
                self._stacked[id(tensor)] = weakref.ref(tensor)
        return result

    def _any_stacked(self, arguments: Any) -> bool:
        return any((known := self._stacked.get(id(t))) is not None and known() is t for t in _tensors(arguments))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _is_called_by_user() -> bool:
    """Whether the current operation was called by a user's strategy, not by vsim or an optimizer."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("vsim.", "vsim_kernels.", "torch.optim.")):
            return False
        if not module.startswith("torch."):
            return True
        frame = frame.f_back
    return True


def _message(name: str, method: str) -> str:
    if name == "foreach_norm":
        return (
            "clip_grad_norm_ over self.model.parameters() takes one norm over all nodes, whose gradients are stacked; "
            "give the strategy max_norm=, which clips every node's gradient by its own norm"
        )
    return (
        f"{name}() in {method}() mixes the nodes: parameters and gradients are stacked, (K, *shape), and its result is "
        "one for all nodes. Write a function of one node's tensor and call torch.vmap(function)(p.grad); or begin with "
        "p.grad.flatten(1), (K, n), and give dim=1. A value that nodes have in common takes all_reduce()"
    )
