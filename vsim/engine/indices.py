"""Handle indices out of range on an accelerator: the loss of the node becomes NaN, and the process stays usable.

How a lookup treats an index out of range depends on the device:

- the CPU raises an IndexError;
- CUDA reports the error after the host has issued later operations, and then all operations of the process fail;
- MPS does not check.

On accelerators, indices and class labels are therefore clamped to their range, and the loss of a node with an index out
of range becomes NaN. This needs no check for which the host would wait for the device. When a loss is NaN,
`Objective.check_indices` computes the loss again on the CPU, which raises the error.

On MPS, lookups in large tables may be wrong, too: `tables_at_once` keeps the tables small.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vsim.cluster.replicas import Replicas
from vsim.trees import tensors_of

# PyTorch before 2.14 returns zeros for lookups in larger tables on MPS [github.com/pytorch/pytorch/issues/188756]. The
# bound also holds for later versions, whose lookups and gradients in larger tables were not compared with the CPU's.
_ENTRIES_ON_MPS = 2**31 - 1
_LOOKUPS = (F.embedding, F.embedding_bag)
_LOSSES = (F.cross_entropy, F.nll_loss)
_INDICES = (torch.uint8, torch.int32, torch.int64)  # PyTorch rejects other dtypes, or does not read them as indices


def is_off_cpu(batch: Any) -> bool:
    """Return whether the tensors of a batch lie on an accelerator."""
    first = next((t for t in tensors_of(batch) if isinstance(t, Tensor)), None)
    return first is not None and first.device.type not in ("cpu", "meta")


def tables_at_once(replicas: Replicas) -> int:
    """Return the largest number of nodes for which MPS looks up their embedding tables, stacked into one, correctly.

    Raises:
        ValueError: a single node's table is too large.
    """
    tables = {c.name: c.shape.numel() for c in replicas.layout if c.name in replicas.embeddings}
    if not tables:
        return replicas.num_held
    name, largest = max(tables.items(), key=lambda table: table[1])
    if largest > _ENTRIES_ON_MPS:
        raise ValueError(
            f"the embedding table {name} has {largest} entries; on MPS, where PyTorch before 2.14 looks up zeros in "
            f"larger tables, vsim takes at most {_ENTRIES_ON_MPS}: give device='cpu'"
        )
    return min(replicas.num_held, _ENTRIES_ON_MPS // largest)


class InRange(TorchFunctionMode):
    """Context that clamps the indices of embedding lookups, and the class labels of losses, to their range."""

    def __init__(self) -> None:
        super().__init__()
        self._odd: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(args) > 1 and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            first, second, *rest = args
            if func in _LOOKUPS:  # passes indices and table by position
                args = (self._clamped(first, second.shape[0]), second, *rest)
            elif func is torch.embedding:
                args = (first, self._clamped(second, first.shape[0]), *rest)
            elif func in _LOSSES:
                args = (first, self._clamped(second, first.shape[-1 if first.dim() == 1 else 1], kwargs), *rest)
        if func is Tensor.unflatten:  # a method written in Python, which the compiler cannot trace
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

    def _clamped(self, indices: Tensor, size: int, options: Any = None) -> Tensor:
        """Return indices clamped to 0 … size − 1; in a loss, keep the label `ignore_index`."""
        if indices.dtype not in _INDICES:
            return indices
        clamped = indices.clamp(0, size - 1)
        if options is not None:
            clamped = torch.where(indices == options.get("ignore_index", -100), indices, clamped)
        self._odd.append((clamped != indices).any())
        return clamped

    def spoiled(self, loss: Tensor) -> Tensor:
        """Return the loss, or NaN if an index was out of range."""
        for odd in self._odd:
            loss = loss.masked_fill(odd, torch.nan)
        return loss
