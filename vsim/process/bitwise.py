"""Compare a run in processes with the simulator's run, bit by bit after every step, for `vsim.verify`."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path

from vsim.cluster.optimizers import (
    JointOptimizers,
    NodeOptimizers,
    StackedOptimizer,
    parts_of,
    stepped_tensors,
    torch_optimizers,
)
from vsim.cluster.replicas import Replicas
from vsim.history.history import OF_THE_MACHINE, History
from vsim.strategy.base import Algorithm
from vsim.training.view import RunView

# The kinds of values that are compared at a step, in this order.
KINDS = ("losses", "weights", "buffers", "optimizer state", "global weights", "ledger", "history")
_CUT = ("weights", "optimizer state", "global weights")  # kinds with P numbers per row, compared by parameter
# A difference counts as rounding up to this many units in the last place (ULPs) of the tensor's largest entry.
ROUNDING_ULPS = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One tensor, event or number of a node that differs between the simulator and the node's process.

    Attributes:
        step: the completed step; 0 before training. node: the node's number.
        what: the kind of value, one of KINDS.
        name: the parameter, buffer, optimizer state ("exp_avg of head.weight") or history column; or the event's label.
        entries: the number of entries that differ, out of `size`.
        ulps: the largest distance of two entries in units in the last place: the number of floating-point steps from
            one to the other; None for events, integers and NaN.
        relative: the largest distance divided by the largest entry; infinite or NaN where undefined.
        index: the entry with the largest distance. simulator, process: this entry's value in each of them.
        rounding: whether the difference can be rounding: at most ROUNDING_ULPS units in the last place of the tensor's
            largest entry (for optimizer state, of all parameters). In the first difference of a report: whether all
            differences at its step can be rounding.
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
        step, node, what, name: see `Difference`.
        scale: the magnitude to which rounding is relative; default: the largest entry.
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
    gap = gap.nan_to_num(math.inf, math.inf)  # distances to NaN or an infinity
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
    """Return the difference of two values whose distance cannot be measured."""
    return Difference(step, node, what, name, 1, 1, None, math.nan, (), simulator, process, False)


def ulps(a: Tensor, b: Tensor) -> NDArray[np.uint64]:
    """Return the number of floating-point steps from `a` to `b`, entry by entry; −0 equals +0.

    >>> ulps(torch.tensor([1.0, -0.0, -1e-45]), torch.tensor([1.0000001, 0.0, 1e-45])).tolist()
    [1, 0, 2]
    """
    first, second = (_ordered(t) for t in (a, b))
    higher, lower = np.maximum(first, second), np.minimum(first, second)
    return higher.view(np.uint64) - lower.view(np.uint64)  # modulo 2⁶⁴, so that nothing overflows


def _ordered(t: Tensor) -> NDArray[np.int64]:
    """Map floating-point numbers to integers in the same order, so that adjacent numbers are one apart."""
    bits = t.contiguous().view(_INTEGERS[t.element_size()])
    lowest = torch.iinfo(bits.dtype).min
    ordered: NDArray[np.int64] = torch.where(bits < 0, lowest - bits, bits).long().numpy()
    return ordered


def _shown(entry: Tensor) -> str:
    return f"{entry.item():.9g}" if entry.is_floating_point() else str(entry.item())


def largest_magnitude(*tensors: Tensor) -> float:
    """Return the largest absolute value of a finite entry."""
    return max(t.double().nan_to_num(0, 0, 0).abs().max().item() if t.numel() else 0.0 for t in tensors)


def only_rounding(differences: Sequence[Difference]) -> bool:
    """Return whether all differences of a step can come from rounding alone.

    AdamW and similar optimizers divide a gradient by its size, so that a gradient that is only rounding moves a weight
    by a whole step. Therefore differences of weights are ignored if optimizer states differ.
    """
    follow = ("weights", "global weights", "history")
    causes = [d for d in differences if d.what not in follow]
    if not any(d.what == "optimizer state" for d in causes):
        causes = list(differences)
    return all(d.rounding for d in causes)


# The numbers of a run, compared in the process of the histories -----------------------------------------------------


def differences_at(
    step: int, simulator: History, processes: History, dtype: torch.dtype, folder: Path
) -> list[Difference]:
    """Return all differences after a step that all processes have completed, by kind, then node, then name.

    Args:
        dtype: the dtype of the computation; losses are measured in this dtype's units in the last place.
        folder: the folder to which the nodes' `CompareStates` have written their differences.
    """
    found = []
    if step:
        pairs = zip(simulator.node_losses[step - 1], processes.node_losses[step - 1], strict=True)
        found += [d for node, pair in enumerate(pairs) for d in _of_numbers(step, node, "losses", "", pair, dtype)]
    for column in (name for name in simulator.columns if name not in ("step", *OF_THE_MACHINE)):
        found += _of_numbers(step, 0, "history", column, (simulator[column][step], processes[column][step]), dtype)
    for file in sorted(folder.glob(f"different-{step}-*")):
        found += pickle.loads(file.read_bytes())
    return sorted(found, key=lambda d: (KINDS.index(d.what), d.node))


def _of_numbers(
    step: int, node: int, what: str, name: str, pair: tuple[float, float], dtype: torch.dtype
) -> Iterator[Difference]:
    both = torch.tensor(pair, dtype=torch.float64)
    own = both.to(dtype)
    shown = own if torch.equal(own.double(), both) else both
    yield from difference(shown[0], shown[1], step, node, what, name)


# The states of nodes, compared in the nodes' processes ---------------------------------------------------------------


@dataclass(frozen=True)
class KeepStates:
    """A callback in the simulator that writes the state of all nodes to a file after every step."""

    folder: Path

    def __call__(self, run: RunView) -> None:
        state = {kind: {n: t.detach().cpu().clone() for n, t in named.items()} for kind, named in _state(run).items()}
        torch.save((state, _events(run)), self.folder / f"step-{run.cluster.step}.pt")


@dataclass(frozen=True)
class CompareStates:
    """A callback in a process that compares the state of its nodes with the simulator's, and writes differences."""

    folder: Path

    def __call__(self, run: RunView) -> None:
        step, state = run.cluster.step, _state(run)
        simulated, events = torch.load(self.folder / f"step-{step}.pt")
        for row, place in enumerate(run.cluster.collectives.nodes):
            node = run.cluster.active[place]
            found = [d for kind, own in state.items() for d in _of_state(run, node, row, kind, simulated[kind], own)]
            found += _of_events(step, node, events, _events(run))
            if found:
                path = self.folder / f"part-{node}"
                path.write_bytes(pickle.dumps(found))
                os.replace(path, self.folder / f"different-{step}-{node:06}")


def compared_kinds(folder: Path) -> tuple[str, ...]:
    """Return the kinds to compare: all except the kinds of state that are empty in the simulator's first step."""
    state, _ = torch.load(folder / "step-1.pt")
    return tuple(kind for kind in KINDS if kind not in state or state[kind])


def _state(run: RunView) -> dict[str, dict[str, Tensor]]:
    """Return kind → name → tensor, stacked (R, …) or shared."""
    replicas = run.cluster.replicas
    return {
        "weights": {"": replicas.weights},
        "buffers": dict(replicas.buffers),
        "optimizer state": _optimizer_state(run.strategy),
        "global weights": {"": run.strategy.model_weights()},
    }


def _events(run: RunView) -> list[tuple[str, str]]:
    step = run.cluster.step
    return [(e.label, str(e)) for e in run.ledger if e.step == step or e.step < step == 1]


def _of_state(
    run: RunView, node: int, row: int, kind: str, simulated: dict[str, Tensor], own: dict[str, Tensor]
) -> Iterator[Difference]:
    step, replicas = run.cluster.step, run.cluster.replicas
    held, num_nodes = replicas.num_held, run.cluster.num_nodes
    for name in dict.fromkeys([*simulated, *own]):
        if name not in simulated or name not in own:
            has = ["present" if name in side else "absent" for side in (simulated, own)]
            yield unlike(step, node, kind, name, *has)
            continue
        pair = simulated[name], own[name].detach().cpu()
        if pair[0].shape == (num_nodes, *pair[1].shape[1:]) and pair[1].shape[:1] == (held,):  # stacked
            pair = pair[0][replicas.first_node + row], pair[1][row]
        if pair[0].dtype == pair[1].dtype and torch.equal(*pair):
            continue
        # A layer's gradient may be a rounding error of larger ones: scale optimizer state by that of all parameters.
        scale = largest_magnitude(*pair) if kind == "optimizer state" else None
        if kind not in _CUT or pair[1].shape[-1:] != (replicas.num_parameters,):
            yield from difference(*pair, step, node, kind, name, scale)
            continue
        for c in replicas.layout:
            ours, theirs = (t[..., c.start : c.stop].reshape(c.shape) for t in pair)
            yield from difference(ours, theirs, step, node, kind, f"{name} of {c.name}" if name else c.name, scale)


def _of_events(
    step: int, node: int, simulator: Sequence[tuple[str, str]], process: Sequence[tuple[str, str]]
) -> Iterator[Difference]:
    count = max(len(simulator), len(process))
    padded = [[*events, *[None] * (count - len(events))] for events in (simulator, process)]
    unequal = [i for i, (ours, theirs) in enumerate(zip(*padded, strict=True)) if ours != theirs]
    if unequal:
        i = unequal[0]
        events = [side[i] for side in padded]
        label = next(event[0] for event in events if event is not None)
        shown = ["no event" if event is None else event[1] for event in events]
        yield replace(unlike(step, node, "ledger", label, *shown), entries=len(unequal), size=count, index=(i,))


def _optimizer_state(strategy: Algorithm) -> dict[str, Tensor]:
    """Return name → tensor of the optimizers' state; (R, P) or (P,) if a tensor covers all weights."""
    replicas = strategy.cluster.replicas
    found: dict[str, Tensor] = {}
    for prefix, optimizer in _optimizers(strategy):
        by_parameter = _states(optimizer, replicas)
        starts = {view.data_ptr(): name for name, view in replicas.views(replicas.weights).items()}
        for j, (tensor, (states, each)) in enumerate(zip(stepped_tensors(optimizer), by_parameter, strict=False)):
            of = ""
            if len(by_parameter) > 1:
                by_place = replicas.layout[j].name if len(by_parameter) == len(replicas.layout) else f"parameter {j}"
                of = f" of {starts.get(tensor.data_ptr(), by_place)}"
            for key, first in states[0].items():
                value = torch.stack([state[key] for state in states]) if each else first
                if first.dim() and first.shape[-1] in (replicas.num_parameters, replicas.weights.stride(0)):
                    found[prefix + key] = value[..., : replicas.num_parameters]  # without the gaps between rows
                else:
                    found[prefix + key + of] = value
    return found


def _optimizers(strategy: Algorithm) -> Iterator[tuple[str, StackedOptimizer]]:
    """Yield the optimizers among the attributes of a strategy and its modules, each with a prefix for its state."""
    yield "", strategy.optim
    owners = [("", vars(strategy))]
    owners += [(f"parts[{i}].", vars(part)) for i, part in enumerate(strategy.parts) if part is not strategy]
    for owner, attributes in owners:
        for name, value in attributes.items():
            listed = {f"{name}[{j}]": one for j, one in enumerate(value)} if isinstance(value, list) else {name: value}
            for called, one in listed.items():
                if isinstance(one, Optimizer | JointOptimizers) and one is not strategy.optim:
                    yield f"{owner}{called} ", one


def _states(optimizer: StackedOptimizer, replicas: Replicas) -> list[tuple[list[dict[str, Tensor]], bool]]:
    """Return for each parameter (its states on all nodes, True), or ([its one shared or stacked state], False)."""
    parts = parts_of(optimizer)
    if len(parts) > 1:
        return [states for part in parts for states in _states(part, replicas)]
    by_part = []
    for part in torch_optimizers(optimizer):
        parameters = [p for group in part.param_groups for p in group["params"]]
        by_part.append([_leaves(part.state.get(p, {})) for p in parameters])
    if isinstance(parts[0], NodeOptimizers):
        return [(list(states), True) for states in zip(*by_part, strict=True)]
    if [p.data_ptr() for p in parameters] == [row.data_ptr() for row in replicas.weights] and parameters[0].dim() == 1:
        return [(by_part[0], True)]
    return [([state], False) for state in by_part[0]]


def _leaves(state: Any) -> dict[str, Tensor]:
    """Return name → tensor for the tensors and numbers in a parameter's state."""
    leaves = {}
    for path, leaf in tree_flatten_with_path(state)[0]:
        if isinstance(leaf, Tensor | int | float):
            leaves[".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)] = (
                leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, dtype=torch.float64)
            )
    return leaves
