"""A simulated run and the same run in processes, compared step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsim.cluster.replicas import Columns, Replicas
from vsim.process.difference import Difference, difference, largest_magnitude, unlike
from vsim.process.states import state_file
from vsim.records.history import OF_THE_MACHINE, History

# What is compared of a step, in this order.
KINDS = ("losses", "weights", "buffers", "optimizer state", "global weights", "ledger", "history")
_NOT_COMPARED = ("step", *OF_THE_MACHINE)


class RunComparison:
    """The comparison of a simulated run with the same run in processes, as far as it has come.

    Args:
        folder: where the `StateWriter`s of the two write, in the folders "simulator" and "processes".
        replicas: the simulator's. there: returns the numbers of the processes that take part in a step.
        histories: returns the simulator's history, which is complete, and that of the processes, which may be growing.

    Attributes:
        differences: all that differs at the first step at which anything does: by kind, then node, then name.
        compared: the kinds that either side has, of KINDS.
    """

    def __init__(
        self,
        folder: Path,
        replicas: Replicas,
        there: Callable[[int], Sequence[int]],
        histories: Callable[[], tuple[History, History]],
    ) -> None:
        self.folder, self.there, self.histories = folder, there, histories
        self.layout: list[Columns] = replicas.layout
        self.dtype = replicas.weights.dtype
        self.next_step = 0
        self.differences: list[Difference] = []
        self.compared: set[str] = {"losses", "ledger", "history"}

    def advance(self, last: int) -> None:
        """Compare the steps up to `last` that are known in full, until one differs; their files are deleted."""
        while self.next_step <= min(last, len(self.histories()[1]) - 1) and not self.differences:
            step = self.next_step
            files = [state_file(self.folder / "simulator", step, 0)]
            files += [state_file(self.folder / "processes", step, row) for row in range(len(self.there(step)))]
            if step and not all(file.exists() for file in files):
                return
            found = self._step(step, files) if step else list(self._of_history(0))
            self.differences = sorted(found, key=lambda d: (KINDS.index(d.what), d.node))
            self.next_step += 1
            for file in files:
                file.unlink(missing_ok=True)

    @property
    def steps(self) -> int:
        """The number of steps that were compared and found equal."""
        return max(0, self.next_step - 1 - bool(self.differences))

    def _step(self, step: int, files: Sequence[Path]) -> list[Difference]:
        simulator, *processes = (torch.load(file, weights_only=True) for file in files)
        found = [*self._of_losses(step), *self._of_history(step)]
        for row, (node, process) in enumerate(zip(self.there(step), processes, strict=True)):
            found += self._of_states(step, node, row, simulator, process)
            found += _of_events(step, node, simulator["events"], process["events"])
        return found

    def _of_losses(self, step: int) -> Iterator[Difference]:
        pairs = zip(*(history.node_losses[step - 1] for history in self.histories()), strict=True)
        for node, pair in enumerate(pairs):
            yield from self._of_numbers(step, node, "losses", "", *pair)

    def _of_history(self, step: int) -> Iterator[Difference]:
        histories = self.histories()
        for column in (name for name in histories[0].columns if name not in _NOT_COMPARED):
            pair = (history[column][step] for history in histories)
            yield from self._of_numbers(step, 0, "history", column, *pair)

    def _of_numbers(
        self, step: int, node: int, what: str, name: str, simulator: float, process: float
    ) -> Iterator[Difference]:
        pair = torch.tensor([simulator, process], dtype=torch.float64)
        # In the dtype of the computation, for the ULPs.
        own = pair.to(self.dtype)
        if torch.equal(own.double(), pair):
            pair = own
        yield from difference(pair[0], pair[1], step, node, what, name)

    def _of_states(
        self, step: int, node: int, row: int, simulator: Mapping[str, Any], process: Mapping[str, Any]
    ) -> Iterator[Difference]:
        for place in ("matrices", "tensors"):
            for what, theirs in simulator[place].items():
                others = process[place][what]
                if theirs or others:
                    self.compared.add(what)
                for name in dict.fromkeys([*theirs, *others]):
                    if name not in theirs or name not in others:
                        has = ["present" if name in side else "absent" for side in (theirs, others)]
                        yield unlike(step, node, what, name, *has)
                        continue
                    pair = _rows(theirs[name], others[name], row, len(self.there(step)))
                    if pair[0].dtype == pair[1].dtype and torch.equal(*pair):
                        continue
                    # A layer's gradient may be nothing but rounding of larger ones: their scale is that of the state.
                    scale = largest_magnitude(*pair) if what == "optimizer state" else None
                    for part, own in self._parts(name, pair) if place == "matrices" else [(name, pair)]:
                        yield from difference(*own, step, node, what, part, scale)

    def _parts(self, name: str, pair: tuple[Tensor, Tensor]) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Cut two rows (P,) into the parameters, by name."""
        for c in self.layout:
            cut = tuple(row[..., c.start : c.stop].reshape(c.shape) for row in pair)
            yield f"{name} of {c.name}" if name else c.name, (cut[0], cut[1])


def _rows(simulator: Tensor, process: Tensor, row: int, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return a node's row of the simulator's tensor and of its process's; shared tensors unchanged."""
    if simulator.shape == (num_nodes, *process.shape[1:]) and process.shape[:1] == (1,):
        return simulator[row], process[0]
    return simulator, process


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
