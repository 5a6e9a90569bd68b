"""Find undeclared attributes that change during a run, because a checkpoint would not hold them."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from vsim.cluster.randomness import GENERATORS
from vsim.cluster.state import Stateful, owners, placements_of
from vsim.history.describe import flat_bytes

_HIDDEN = ("_placements", "_of_clients")
Contents = dict[tuple[str, str], Any]


class _Pickler(pickle.Pickler):
    """Pickles tensors as digests, known objects and views of known tensors as names, and generators as states."""

    known: Mapping[int, str]  # id → name
    memory: Mapping[int, str]  # address → name

    def persistent_id(self, value: Any) -> Any:
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, Tensor):
            name = self.memory.get(value.untyped_storage().data_ptr(), "") if value.numel() else ""
            own = (value.storage_offset(), value.stride()) if name else hashlib.sha256(_bytes(value)).digest()
            return "tensor", str(value.dtype), tuple(value.shape), name, own
        for kind, (state_of, _) in GENERATORS.items():
            if isinstance(value, kind):
                state = state_of(value)
                return "generator", _bytes(state) if isinstance(state, Tensor) else state
        return None


def contents_of(strategy: Stateful, known: Iterable[Any], memory: Mapping[str, Tensor]) -> Contents:
    """Return (part, attribute) → comparable content, for undeclared attributes of a strategy and its parts.

    Args:
        known: objects that belong to the run, such as the cluster.
        memory: name → tensor of the run. Views of such a tensor, or of a declared one, are compared without values.
    """
    parts = owners(strategy)
    declared = [(f"{p}.{name}", getattr(own, name)) for p, own in parts.items() for name in placements_of(own)]
    names = {id(own): f"known {i}" for i, own in enumerate(known)} | {id(own): name for name, own in parts.items()}
    tensors = [*memory.items(), *((name, t) for name, own in declared for t in tree_leaves(own))]
    of_memory = {t.untyped_storage().data_ptr(): name for name, t in tensors if isinstance(t, Tensor)}
    found: Contents = {}
    for part, owner in parts.items():
        no_state = {*placements_of(owner), *owner.derived, *_HIDDEN}
        for name, value in vars(owner).items():
            if name not in no_state:
                found[part, name] = _compared(value, names, of_memory)
    return found


def changed(before: Contents, now: Contents) -> list[tuple[str, str]]:
    """Return the attributes (part, name) whose contents differ."""
    keys = dict.fromkeys((*before, *now))
    return [key for key in keys if key not in before or key not in now or _differ(before[key], now[key])]


def line_for(name: str, value: Any, rows: int) -> str:
    """Return the line that declares an attribute: stacked if its tensors have a row for each node, else shared."""
    tensors = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    stacked = len(tensors) > 0 and all(isinstance(t, Tensor) and t.dim() and len(t) == rows for t in tensors)
    return f"self.keep_{'stacked' if stacked else 'shared'}({name}=…)"


def _compared(value: Any, known: Mapping[int, str], memory: Mapping[int, str]) -> Any:
    """Return a value as a pickle, or the value itself if it cannot be pickled."""
    if isinstance(value, Iterator | io.IOBase):
        return None  # it may advance unnoticed, and so counts as changed
    with suppress(Exception):
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.known, pickler.memory = known, memory
        pickler.dump(value)
        return file.getvalue()
    return value


def _differ(one: Any, other: Any) -> bool:
    return one is None or (one != other if isinstance(one, bytes) and isinstance(other, bytes) else one is not other)


def _bytes(tensor: Tensor) -> bytes:
    return flat_bytes(tensor.detach().resolve_conj().resolve_neg().cpu()).numpy().tobytes()
