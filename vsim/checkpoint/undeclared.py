"""Find attributes that change during a run without being declared, so that a checkpoint would not hold them."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from vsim.cluster.randomness import GENERATORS
from vsim.cluster.state import Stateful, owners, placements_of
from vsim.records.describe import flat_bytes

_HIDDEN = ("_placements", "_of_clients")
Contents = dict[tuple[str, str], Any]


class _Pickler(pickle.Pickler):
    """Pickles tensors by digest, views of known tensors and known objects by name, and generators by state."""

    def __init__(self, file: io.BytesIO, known: Mapping[int, str], memory: Mapping[int, str]) -> None:
        super().__init__(file)
        self._known, self._memory = known, memory

    def persistent_id(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, Tensor):
            name = self._memory.get(value.untyped_storage().data_ptr(), "") if value.numel() else ""
            own = (value.storage_offset(), value.stride()) if name else hashlib.sha256(_bytes(value)).digest()
            return "tensor", str(value.dtype), tuple(value.shape), name, own
        for kind, (state_of, _) in GENERATORS.items():
            if isinstance(value, kind):
                state = state_of(value)
                return "generator", _bytes(state) if isinstance(state, Tensor) else state
        return None


def contents_of(strategy: Stateful, known: Iterable[Any], memory: Mapping[str, Tensor]) -> Contents:
    """Return (part, attribute) → what is compared, for the attributes that a strategy and its parts do not declare.

    Args:
        known: objects that belong to the run, such as the cluster. memory: tensors whose views are no state.
    """
    parts = owners(strategy)
    names = {id(own): f"known {i}" for i, own in enumerate(known)} | {id(own): name for name, own in parts.items()}
    of_memory = {tensor.untyped_storage().data_ptr(): name for name, tensor in memory.items()}
    found: Contents = {}
    for part, owner in parts.items():
        declared = {*placements_of(owner), *owner.derived, *_HIDDEN}
        for name, value in vars(owner).items():
            if name not in declared:
                found[part, name] = _compared(value, names, of_memory)
    return found


def changed(before: Contents, now: Contents) -> list[tuple[str, str]]:
    """Return the attributes (part, name) that differ."""
    keys = dict.fromkeys((*before, *now))
    return [key for key in keys if key not in before or key not in now or _differ(before[key], now[key])]


def line_for(name: str, value: Any, rows: int) -> str:
    """Return the line that declares an attribute: as stacked, if its tensors have a row for each node."""
    tensors = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    stacked = len(tensors) > 0 and all(isinstance(t, Tensor) and t.dim() and len(t) == rows for t in tensors)
    return f"self.keep_{'stacked' if stacked else 'shared'}({name}=…)"


def _compared(value: Any, known: Mapping[int, str], memory: Mapping[int, str]) -> Any:
    """Return a value pickled, or the value itself if pickle refuses it."""
    if isinstance(value, Iterator | io.IOBase):
        return None  # moves on unseen: counts as changed
    with suppress(Exception):
        file = io.BytesIO()
        _Pickler(file, known, memory).dump(value)
        return file.getvalue()
    return value


def _differ(one: Any, other: Any) -> bool:
    return one is None or (one != other if isinstance(one, bytes) and isinstance(other, bytes) else one is not other)


def _bytes(tensor: Tensor) -> bytes:
    return flat_bytes(tensor.detach().resolve_conj().resolve_neg().cpu()).numpy().tobytes()
