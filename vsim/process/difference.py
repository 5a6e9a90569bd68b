"""How far two tensors are apart, in units in the last place, and whether that can be rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Up to so many units in the last place of its tensor's largest entry a difference counts as rounding.
ROUNDING_ULPS = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One tensor, event or number of a node that differs between the simulator and the node's process.

    Attributes:
        step: t; 0 is before training. node: its number.
        what: the kind, one of `vsim.process.comparison.KINDS`.
        name: the parameter, the buffer, the state ("exp_avg of head.weight"), the event's label, the history's column.
        entries: how many entries differ, of `size`.
        ulps: the largest distance of two entries in units in the last place: the number of floating-point numbers from
            one to the other; None where that has no meaning (events, integers, NaN).
        relative: the largest distance over the largest entry; infinite or NaN where it has no meaning.
        index: the entry where the distance is largest. simulator, process: its value in each.
        rounding: of a report's first difference whether all that differs at its step can be rounding; otherwise whether
            this one can: it is at most ROUNDING_ULPS units in the last place of the tensor's largest entry, for
            optimizer state that of all parameters'.
    """

    step: int
    node: int
    what: str
    name: str
    entries: int
    size: int
    ulps: int | None
    relative: float
    index: tuple[int, ...]
    simulator: str
    process: str
    rounding: bool

    def __str__(self) -> str:
        where = f"entry {list(self.index)}: " if self.index else ""
        lines = [f"step {self.step}, node {self.node}, {self.what}" + (f", {self.name}" if self.name else "")]
        if self.size > 1:
            lines.append(f"  {self.entries:,} of {self.size:,} entries differ")
        if self.ulps is not None:
            lines.append(f"  by up to {self.ulps:,} ULPs; at most by {self.relative:.1e} of the largest entry")
        lines.append(f"  {where}{self.simulator} in the simulator, {self.process} in the process")
        return "\n".join(lines)


def difference(
    simulator: Tensor, process: Tensor, step: int, node: int, what: str, name: str, scale: float | None = None
) -> Iterator[Difference]:
    """Yield the `Difference` of two tensors, if there is one.

    Args:
        step, node, what, name: as of `Difference`.
        scale: what rounding is relative to; default the largest entry.
    """
    if simulator.shape != process.shape or simulator.dtype != process.dtype:
        shown = [f"{t.dtype} {tuple(t.shape)}" for t in (simulator, process)]
        yield unlike(step, node, what, name, *shown)
        return
    if simulator.is_complex():
        simulator, process = torch.view_as_real(simulator), torch.view_as_real(process)
    differs = (simulator != process) & ~((simulator != simulator) & (process != process))
    entries = int(differs.sum())
    if entries == 0:
        return
    gap = torch.where(differs, (simulator.double() - process.double()).abs(), 0.0)
    gap = gap.nan_to_num(math.inf, math.inf)  # against NaN or an infinity
    position = int(gap.argmax())
    largest = gap.flatten()[position].item()
    own_scale = largest_magnitude(simulator, process)
    relative = largest / own_scale if own_scale else math.inf
    measurable = simulator.is_floating_point() and math.isfinite(largest)
    yield Difference(
        step,
        node,
        what,
        name,
        entries,
        differs.numel(),
        int(ulps(simulator, process)[differs.numpy()].max()) if measurable else None,
        relative,
        tuple(int(i) for i in np.unravel_index(position, differs.shape)),
        _shown(simulator.flatten()[position]),
        _shown(process.flatten()[position]),
        measurable and largest <= ROUNDING_ULPS * torch.finfo(simulator.dtype).eps * (scale or own_scale),
    )


def unlike(step: int, node: int, what: str, name: str, simulator: str, process: str) -> Difference:
    """Return the difference of two things whose distance cannot be measured."""
    return Difference(step, node, what, name, 1, 1, None, math.nan, (), simulator, process, False)


def ulps(a: Tensor, b: Tensor) -> NDArray[np.uint64]:
    """Return how many steps over the floating-point numbers lead from `a` to `b`, entry by entry; −0 is +0.

    >>> ulps(torch.tensor([1.0, -0.0, -1e-45]), torch.tensor([1.0000001, 0.0, 1e-45])).tolist()
    [1, 0, 2]
    """
    first, second = (_ordered(t) for t in (a, b))
    higher, lower = np.maximum(first, second), np.minimum(first, second)
    return higher.view(np.uint64) - lower.view(np.uint64)  # modulo 2⁶⁴, so that nothing overflows


def _ordered(t: Tensor) -> NDArray[np.int64]:
    """Return integers in the order of the floating-point numbers `t`; neighbours are one apart."""
    bits = t.contiguous().view(_INTEGERS[t.element_size()])
    lowest = torch.iinfo(bits.dtype).min
    ordered: NDArray[np.int64] = torch.where(bits < 0, lowest - bits, bits).long().numpy()
    return ordered


def _shown(entry: Tensor) -> str:
    return f"{entry.item():.9g}" if entry.is_floating_point() else str(entry.item())


def largest_magnitude(*tensors: Tensor) -> float:
    """The largest absolute value of a finite entry."""
    return max(t.double().nan_to_num(0, 0, 0).abs().max().item() if t.numel() else 0.0 for t in tensors)


def only_rounding(differences: Sequence[Difference]) -> bool:
    """Whether all differences of a step can come from rounding alone.

    AdamW and its like divide a gradient by its own size: one that is nothing but rounding moves a weight by a whole
    step. Where the optimizer's state differs too, it tells instead of the weights how the gradients differed.
    """
    follow = ("weights", "global weights", "history")
    causes = [d for d in differences if d.what not in follow]
    if not any(d.what == "optimizer state" for d in causes):
        causes = list(differences)
    return all(d.rounding for d in causes)
