"""Make optimizers skip frozen parameters, just as torch's optimizers skip a parameter whose gradient is None."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.cluster.cluster import Cluster
from vsim.cluster.optimizers import torch_optimizers
from vsim.cluster.replicas import Columns
from vsim.private_torch import storage_key

Key = TypeVar("Key")

# Under this key, the optimizer state of a whole matrix holds a dict for parameters that were ever skipped: name → the
# parameter's state without columns, such as its step count, or None if the parameter was never stepped.
_APART = "apart"


def ranges(layout: Sequence[Columns], key: Callable[[str], Key]) -> Iterator[tuple[Key, slice]]:
    """Yield (key, columns) for each range of adjacent parameters whose names have the same key."""
    for value, own in groupby(layout, lambda columns: key(columns.name)):
        first, *others = own
        yield value, slice(first.start, [first, *others][-1].stop)


def clear_gradients(cluster: Cluster) -> None:
    """Set the gradients of frozen parameters to zero."""
    layout = cluster.replicas.layout if cluster.frozen else ()
    if own := [cluster.replicas.grads[:, c.start : c.stop] for c in layout if cluster.frozen.get(c.name)]:
        torch._foreach_zero_(own)


@contextmanager
def skipping(cluster: Cluster) -> Iterator[None]:
    """Make the inner optimizer skip frozen parameters within this context, however the optimizer is stepped.

    An optimizer with a tensor for each parameter leaves out the frozen tensors. An optimizer over whole rows steps
    ranges of columns instead, each with views of the rows' state. A parameter that was ever skipped remains a separate
    range with a separate step count, from which Adam computes the parameter's bias correction.
    """
    if not cluster.frozen:
        yield
        return
    with ExitStack() as hooks:
        for optimizer in torch_optimizers(cluster.optim):
            own = _Parts(cluster, optimizer)
            hooks.callback(optimizer.register_step_pre_hook(own.divide).remove)
            hooks.callback(optimizer.register_step_post_hook(own.join).remove)
        yield


class _Parts:
    """The tensors that an optimizer steps in place of its parameters while some of them are frozen."""

    def __init__(self, cluster: Cluster, optimizer: Optimizer) -> None:
        self.layout, self.frozen = cluster.replicas.layout, cluster.frozen
        # Find the tensors' columns now, because per-node code may move a parameter to other memory before its step.
        weights, names = cluster.replicas.weights, {c.start: c.name for c in self.layout if c.start < c.stop}
        self.names: dict[int, str | None] = {}  # id of a tensor → name of its parameter; None: whole rows
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if storage_key(p) == storage_key(weights):
                start = (p.data_ptr() - weights.data_ptr()) // p.element_size() % weights.stride(0)
                is_whole = p.dim() > 0 and p.stride(-1) == 1 and p.shape[-1] >= weights.shape[1] and start == 0
                self.names[id(p)] = None if is_whole else names.get(start, "")
        self.before: list[dict[str, Any]] = []  # the replaced entries of the parameter groups
        self.split: list[tuple[Tensor, list[tuple[str | None, slice, Tensor]]]] = []

    def divide(self, optimizer: Optimizer, *_: Any) -> None:
        """Replace the optimizer's whole rows by ranges of columns, and leave out its frozen tensors."""
        self.split, self.before = [], []
        for group in optimizer.param_groups:
            self.before.append({key: group[key] for key in ("params", "fused") if key in group})
            stepped: list[Tensor] = []
            for p in group["params"]:
                name = self.names.get(id(p), "")
                if name is not None:
                    stepped += [] if self.frozen.get(name) else [p]
                    continue
                self.split.append((p, self._divided(optimizer, p)))
                stepped += [part for _, _, part in self.split[-1][1]]
                if group.get("fused"):
                    group["fused"] = None  # a fused kernel would read ranges of columns as if contiguous
            group["params"] = stepped

    def _divided(self, optimizer: Optimizer, p: Tensor) -> list[tuple[str | None, slice, Tensor]]:
        """Return (name, columns, part) of each range to step; the name is None if its parameters were never skipped."""
        whole = optimizer.state.get(p) or {}
        apart: dict[str, Any] = whole.pop(_APART, {})
        numbers = {key: value for key, value in whole.items() if not _is_alike(value, p)}
        for new in (name for name, frozen in self.frozen.items() if frozen and name not in apart):
            apart[new] = _copied(numbers) if whole else None
        if whole:
            whole[_APART] = apart
        found: list[tuple[str | None, slice, Tensor]] = []
        for name, own in ranges(self.layout, lambda name: name if name in apart else None):
            if name is not None and self.frozen.get(name):
                continue
            part = p[..., own].detach()
            part.grad = None if p.grad is None else p.grad[..., own]
            others = numbers if name is None else apart[name]
            if whole and others is not None:
                columns = {key: value[..., own] for key, value in whole.items() if _is_alike(value, p)}
                optimizer.state[part] = {**columns, **_copied(others)}
            found.append((name, own, part))
        return found

    def join(self, optimizer: Optimizer, *_: Any) -> None:
        """Restore the optimizer's tensors, and join the state of their ranges."""
        for group, entries in zip(optimizer.param_groups, self.before, strict=True):
            group.update(entries)
        for p, parts in self.split:
            states = [(name, own, part, optimizer.state.pop(part, None)) for name, own, part in parts]
            whole = optimizer.state.get(p) or {}
            apart = whole.pop(_APART, {name: None for name, frozen in self.frozen.items() if frozen})
            for name, own, part, state in states:
                if not state:
                    continue
                numbers = {key: value for key, value in state.items() if not _is_alike(value, part)}
                for key in state.keys() - numbers.keys():
                    if key not in whole:
                        whole[key] = torch.zeros_like(p)
                    columns = whole[key][..., own]
                    if columns.data_ptr() != state[key].data_ptr():
                        columns.copy_(state[key])
                if name is None:
                    whole.update(numbers)
                else:
                    apart[name] = numbers
            if whole:
                optimizer.state[p] = {**whole, _APART: apart}


def _is_alike(value: Any, of: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == of.shape


def _copied(numbers: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in numbers.items()}
