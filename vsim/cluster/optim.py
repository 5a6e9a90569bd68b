"""Specifications of torch.optim optimizers for stacked rows, and gradient clipping per node."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsim.arguments import naming, one_of, real_number, reject_unknown
from vsim.cluster.muon import StackedMuon, hidden_matrices
from vsim.cluster.optimizers import JointOptimizers, NodeOptimizers, StackedOptimizer, in_training, without_compiler
from vsim.cluster.replicas import Replicas, with_gaps
from vsim.private_torch import CHECKS_OF_CAPTURE

# Elementwise optimizers: every element of the update depends on that element alone, so that one optimizer over the
# (K, P) matrix equals K optimizers. Other classes (Adafactor, a user's class) may mix elements, and are applied node by
# node. Muon is applied node by node in deterministic runs, and as `StackedMuon` otherwise.
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
# Optimizers with fused kernels, which pass over memory once; the last bits may differ from separate operations. 16-bit
# weights get no fused kernel: separate operations round to 16 bits each time, so results would differ more, and torch's
# fused SGD is wrong for bfloat16. Adagrad has a fused kernel on CPU and CUDA only.
_FUSED = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW})
_FUSED_ON_SOME = frozenset({*_FUSED, torch.optim.Adagrad})
_PRECISE = (torch.float32, torch.float64)
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
    >>> OptimSpec("muon", lr=0.02, rest=OptimSpec("adamw", betas=(0.9, 0.95)))
    OptimSpec(Muon, lr=0.02, rest=OptimSpec(AdamW, betas=(0.9, 0.95)))

    Args:
        cls: a subclass of torch.optim.Optimizer, or the lower-case name of a class in torch.optim.
        rest: the optimizer for the parameters that `cls` does not step: an `OptimSpec`, class or name. The learning
            rate of `rest` is by default that of `cls`. None: `cls` steps all parameters.
        only: allowed with `rest`: names of the parameters that `cls` steps, or patterns such as "blocks.*.weight".
            Default: the hidden matrices, which are all matrices except embeddings and the last linear layer; a
            convolution's weights count as a matrix (out, rest).
        groups: parameter groups: name of a parameter, or a pattern → other arguments for these parameters, such as
            `{"*.bias": {"weight_decay": 0.0}}`. A parameter is in the first group whose pattern matches; all others
            have `kwargs`.
        kwargs: the arguments of `cls`.

    Raises:
        TypeError: `cls` is not an optimizer, or lacks one of the arguments.
        ValueError: an unknown name, or an optimizer that needs more than gradients (LBFGS, SparseAdam).
    """

    def __init__(
        self,
        cls: type[Optimizer] | str,
        *,
        rest: OptimSpec | type[Optimizer] | str | None = None,
        only: str | Sequence[str] | None = None,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(cls, str):
            cls = OPTIMIZERS[one_of("optimizer", cls.lower(), sorted(OPTIMIZERS))]
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise TypeError(f"an optimizer must be a torch.optim class or the name of one, got {cls!r}")
        if cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
            raise ValueError(f"{cls.__name__} needs closures or sparse gradients, which vsim does not provide")
        parameters = inspect.signature(cls).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            reject_unknown(
                kwargs, [*(p.name for p in parameters if p.name != "params"), "rest", "only", "groups"], cls.__name__
            )
        self.cls: type[Optimizer] = cls
        self.kwargs = kwargs
        self.rest = OptimSpec(rest) if rest is not None and not isinstance(rest, OptimSpec) else rest
        if self.rest is not None and self.rest.rest is not None:
            raise ValueError(f"rest={self.rest} has a rest of its own; two optimizers share the parameters")
        if only is not None and self.rest is None:
            raise TypeError(f"only={only!r} has no effect without rest=, the optimizer of the other parameters")
        self.only = [only] if isinstance(only, str) else only
        named = isinstance(self.only, Sequence) and all(isinstance(name, str) for name in self.only)
        if only is not None and not (named and self.only):
            raise TypeError(f"only must be a name or names of parameters, got {only!r}")
        own_groups = groups.values() if isinstance(groups, Mapping) else ()
        if groups is not None and not (own_groups and all(isinstance(own, Mapping) for own in own_groups)):
            raise TypeError(
                f"groups must map patterns to arguments, as {{'*.bias': {{'weight_decay': 0}}}} does, got {groups!r}"
            )
        if groups is not None and self.rest is not None:
            raise TypeError(f"groups has no effect with rest={self.rest}: give one of them")
        self.groups = None if groups is None else {pattern: dict(own) for pattern, own in groups.items()}
        for pattern, own in (self.groups or {}).items():
            with naming(f"groups[{pattern!r}]"):
                OptimSpec(cls, **{**kwargs, **own})
        self._check()

    def _check(self) -> None:
        """Build the optimizer once, to check its arguments now."""
        try:
            if self.kwargs.get("lr") == math.inf:
                raise ValueError("lr must be finite")
            self.state_names()
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self} is not possible: {error}") from error

    def state_names(self) -> frozenset[str]:
        """Return the names of the state that the optimizer keeps for a tensor; empty for a user's class."""
        if self.cls not in OPTIMIZERS.values():  # a user's class may not accept the sample
            return frozenset()
        sample = torch.zeros(2, 2, requires_grad=True)  # all of torch's optimizers accept a matrix
        sample.grad = torch.zeros(2, 2)
        kwargs = dict(self.kwargs)
        # Look for GPUs only if needed: afterwards, processes forked from this one cannot use GPUs.
        if "capturable" in kwargs and torch.cuda.is_available():
            del kwargs["capturable"]
        optimizer = without_compiler(self.cls)([sample], **kwargs)
        vars(optimizer).update(dict.fromkeys(CHECKS_OF_CAPTURE, lambda: None))  # the sample is on the CPU
        with torch.set_grad_enabled(bool(kwargs.get("differentiable"))):
            optimizer.step()
        return frozenset(optimizer.state[sample])

    @classmethod
    def from_string(cls, name: str, **kwargs: Any) -> OptimSpec:
        """Return the specification of the optimizer with this lower-case name in torch.optim."""
        return cls(name, **kwargs)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments except the class."""
        own = {"only": self.only, "rest": self.rest, "groups": self.groups}
        return self.kwargs | {name: value for name, value in own.items() if value is not None}

    @property
    def elementwise(self) -> bool:
        """Whether one optimizer over stacked rows equals one optimizer for each row."""
        return self.cls in ELEMENTWISE and self.is_single

    @property
    def is_single(self) -> bool:
        """Whether all parameters have the same optimizer with the same arguments."""
        return self.rest is None and self.groups is None

    def parts(self, model: nn.Module) -> list[tuple[OptimSpec, list[str]]]:
        """Return the specifications for `cls` and then `rest`, or for each group of parameters, each with the names of
        its parameters of `model`.

        Raises:
            ValueError: `cls` gets no parameter, or gets one that it does not accept.
        """
        shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        names = list(shapes)
        if self.rest is not None:
            names = hidden_matrices(model) if self.only is None else matching("only", self.only, shapes)
            if not names:
                raise ValueError(
                    f"{self}: the model has no hidden matrix, only {_few(shapes)}; name the parameters that "
                    f"{self.cls.__name__} is for with only=[…]"
                )
        odd = [name for name in names if len(shapes[name]) < 2]
        if odd and issubclass(self.cls, torch.optim.Muon):
            raise ValueError(
                f"{self.cls.__name__} steps matrices only, and {_few(odd)} are none: OptimSpec('muon', rest='adamw') "
                "leaves all but the hidden matrices to AdamW"
            )
        if self.groups is not None:
            return self._grouped(names)
        found = [(OptimSpec(self.cls, **self.kwargs), names)]
        others = [name for name in shapes if name not in names]
        if self.rest is not None and others:
            rate = {"lr": self.kwargs["lr"]} if "lr" in self.kwargs else {}
            found.append((OptimSpec(self.rest.cls, **rate | self.rest.kwargs), others))
        return found

    def _grouped(self, names: list[str]) -> list[tuple[OptimSpec, list[str]]]:
        assert self.groups is not None
        matching("groups", [*self.groups], names)  # raises an error if a pattern matches none
        of_name = [next((pattern for pattern in self.groups if fnmatchcase(name, pattern)), None) for name in names]
        found: list[tuple[dict[str, Any], list[str]]] = []
        for pattern in [None, *self.groups]:
            own = [name for name, its in zip(names, of_name, strict=True) if its == pattern]
            arguments = self.kwargs if pattern is None else {**self.kwargs, **self.groups[pattern]}
            same = next((part for part in found if part[0] == arguments), None)
            if same is not None:
                same[1].extend(own)
            elif own:
                found.append((arguments, own))
        return [(OptimSpec(self.cls, **arguments), own) for arguments, own in found]

    def build(self, parameters: nn.Module | Iterable[Tensor]) -> StackedOptimizer:
        """Build the optimizer over `parameters`: tensors with a `.grad`, or a module.

        For the stacked `self.model` of a strategy, an optimizer that is not elementwise becomes one optimizer per node.
        """
        if isinstance(parameters, nn.Module):
            named = {name: p for name, p in parameters.named_parameters() if p.requires_grad}
            return self._build_parts(named, getattr(parameters, "of_one_node", parameters), deterministic=True)
        if not self.is_single:
            raise TypeError(f"{self} is built over a model: tensors alone have no names, by which it divides them")
        return self._build_part({str(i): p for i, p in enumerate(parameters) if p.requires_grad}, deterministic=True)

    def build_for(self, replicas: Replicas, deterministic: bool) -> StackedOptimizer:
        """Build the optimizer of all nodes of `replicas`; a single one over the matrix if equal to one per node."""
        by_tensor = deterministic and bool(self.kwargs.get("fused")) and not _fills_lines(replicas)
        if self.elementwise and not by_tensor:
            return self.build_over(replicas.weights, replicas.grads, deterministic)
        grads = replicas.views(replicas.grads)
        named = {name: _with_grad(w, grads[name]) for name, w in replicas.views(replicas.weights).items()}
        for stacked in named.values():
            stacked.is_stacked = True  # type: ignore[attr-defined]
        return self._build_parts(named, replicas.module, deterministic)

    def _build_parts(self, named: Mapping[str, Tensor], model: nn.Module, deterministic: bool) -> StackedOptimizer:
        """Build the optimizer over `named` parameters of `model`, name → tensor, stacked or not."""
        parts = [
            spec._build_part({name: named[name] for name in names}, deterministic) for spec, names in self.parts(model)
        ]
        return parts[0] if len(parts) == 1 and self.rest is None else JointOptimizers(parts)

    def _build_part(self, named: Mapping[str, Tensor], deterministic: bool) -> Optimizer | NodeOptimizers:
        tensors = list(named.values())
        # A fused kernel reads memory from a tensor's first element on, including gaps between rows.
        as_one = self.cls in ELEMENTWISE and not self.kwargs.get("fused")
        if as_one or not all(getattr(p, "is_stacked", False) for p in tensors):
            return self.cls(tensors, **copy.deepcopy(self.kwargs))
        if issubclass(self.cls, torch.optim.Muon):
            tensors = [_as_matrix(p) for p in tensors]
        if self.cls is torch.optim.Muon and not deterministic:
            return StackedMuon(tensors, **copy.deepcopy(self.kwargs))
        return NodeOptimizers(self.cls, tensors, self.kwargs)

    def build_over(self, weights: Tensor, grads: Tensor, deterministic: bool) -> Any:
        """Build one optimizer that updates stacked `weights` (R, P) in place from `grads`.

        Rows are stepped together with the gaps between them, as one dense parameter (R, pitch). Fused kernels then read
        whole SIMD vectors, and round equal rows alike, wherever one thread's part ends.
        """
        if deterministic and self.kwargs.get("fused"):
            # Step row by row, as one node does: a row's last entries, if they do not fill a vector, round differently.
            return NodeOptimizers(self.cls, [_with_grad(weights, grads)], self.kwargs)
        return self.build_shared([with_gaps(weights)], [with_gaps(grads)], deterministic)

    def build_shared(self, weights: Sequence[Tensor], grads: Sequence[Tensor], deterministic: bool) -> Optimizer:
        """Build one optimizer that updates the tensors `weights` in place from `grads`.

        Raises:
            ValueError: the specification has a `rest` or `groups`, and so needs parameters with names.
        """
        if not self.is_single:
            raise ValueError(
                f"{self} chooses parameters by name, which an outer optimizer cannot; leave out rest= and groups="
            )
        kwargs = copy.deepcopy(self.kwargs)
        picks = not (deterministic or _CHOICE_OF_KERNEL & kwargs.keys() or weights[0].is_meta)
        fused = _FUSED_ON_SOME if weights[0].device.type in ("cpu", "cuda") else _FUSED
        if picks and self.cls in fused and weights[0].dtype in _PRECISE:
            kwargs["fused"] = True
        return in_training(self.cls([_with_grad(w, g) for w, g in zip(weights, grads, strict=True)], **kwargs))

    def __repr__(self) -> str:
        return f"OptimSpec({', '.join([self.cls.__name__, *(f'{k}={v!r}' for k, v in self.arguments.items())])})"


def matching(argument: str, patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the `names` that at least one pattern matches.

    Raises:
        ValueError: a pattern matches no name; the message names the `argument`.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{argument}={pattern!r} is no trainable parameter; the model has {_few(names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")


def _fills_lines(replicas: Replicas) -> bool:
    """Return whether a fused kernel rounds a whole row as it rounds the row's parameters one by one.

    The kernel reads a tensor in lines of 64 bytes, and may round an incomplete last line differently. The results are
    equal if every parameter but the last consists of whole lines.
    """
    return all(c.shape.numel() * replicas.weights.element_size() % 64 == 0 for c in replicas.layout[:-1])


def _with_grad(weights: Tensor, grads: Tensor) -> Tensor:
    tensor = weights.detach().requires_grad_()
    tensor.grad = grads
    return tensor


def _as_matrix(stacked: Tensor) -> Tensor:
    """Return stacked weights (R, out, …) and their gradient as views (R, out, rest)."""
    assert stacked.grad is not None
    return _with_grad(stacked.flatten(2), stacked.grad.flatten(2))


def resolve_optim(
    where: str, name: str, given: Any, rate_name: str, rate: float | None, default: OptimSpec
) -> OptimSpec:
    """Return the specification of an optimizer that a user gave.

    Args:
        where: the class with these arguments, for errors.
        name, given: the argument's name, and an OptimSpec, a class, a name, or None.
        rate_name, rate: the argument's name, and the learning rate of the specification, or None.
        default: the specification if none is given.
    """
    if isinstance(given, OptimSpec):
        spec = given
        if rate is not None and "lr" in spec.kwargs:
            raise TypeError(f"{where}: the learning rate is given twice, as {rate} and in {spec}")
    else:
        with naming(name):
            spec = default if given is None else OptimSpec(given)
    if rate is None:
        return spec
    return OptimSpec(spec.cls, **{**spec.arguments, "lr": real_number(rate_name, rate, at_least=0)})


def clip_by_node(replicas: Replicas, max_norm: float, exact: bool) -> None:
    """Scale every node's gradient so that its 2-norm is at most `max_norm`, as torch's clip_grad_norm_ does.

    With `exact`, torch's function computes each norm tensor by tensor, so that the norm is bitwise equal to that of a
    run with one node. Otherwise, the norms of all rows are computed at once.
    """
    grads = replicas.grads
    if exact:
        norms = torch.stack([nn.utils.get_total_norm(list(replicas.views(row).values())) for row in grads])
    else:
        norms = torch.linalg.vector_norm(grads, dim=1)  # (R,)
    grads.mul_((max_norm / (norms + 1e-6)).clamp(max=1.0)[:, None])
