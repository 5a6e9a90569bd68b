"""After how many steps a strategy sends the same again, so that the price of a long run takes only a few steps."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from vsim.core.when import Every

Algorithm = Any  # vsim.core.algorithm, which imports this file
_SILENT = ("cluster", "optim", "optim_spec", "schedule", "schedulers", "settings")  # attributes that send nothing
_SILENT_SECONDS = 2  # a dry run that takes longer shows its progress


class Stretch(NamedTuple):
    """The steps begun + 1 to end, in which messages repeat after `period` steps."""

    begun: int
    period: int
    end: int


def stretches(strategy: Algorithm) -> list[Stretch]:
    """Return the stretches of a strategy's run, after its `begin`; one whose period is its length if messages vary."""
    last, parts = strategy.cluster.max_steps, strategy.parts
    phases: list[list[tuple[int, int]]] = [[(0, 1)]]
    for part in {id(own): own for own in (strategy, *parts)}.values():
        rounds = part.rounds_repeat(strategy.cluster.num_nodes) if _answers_for_itself(part) else None
        own = part.when.phases if part in parts else [(0, 1)]
        if rounds is None or not own:
            return [Stretch(0, last, last)]
        phases.append([(begun, rounds * period) for begun, period in own])
    begins = sorted({begun for own in phases for begun, _ in own if begun < last})
    found = []
    for begun, end in zip(begins, [*begins[1:], last], strict=True):
        periods = [next(period for first, period in reversed(own) if first <= begun) for own in phases]
        found.append(Stretch(begun, math.lcm(*periods), end))
    return found


def dry_steps(strategy: Algorithm, take: Callable[[], object], base: type) -> None:
    """Take all steps of a dry run, after `begin`: where they repeat, until two periods are equal, and then copies.

    Args:
        take: takes a step. base: the class `Algorithm`, whose own methods do nothing but to sync when it is due.
    """
    collectives, last = strategy.cluster.collectives, strategy.cluster.max_steps
    ledger, intervals = collectives.ledger, _intervals(strategy, base)
    with _shown(type(strategy).__name__, last) as show:
        for step, period, end in stretches(strategy):
            before = None
            while step < end:
                begin, place = step, len(ledger.recorded)
                step = min(begin + period, end)
                for number in _active(begin + 1, step, intervals):
                    collectives.position.begin(number)
                    take()
                    show(number)
                block = [(own.step - begin, own.due - begin, *own[2:]) for own in ledger.recorded[place:]]
                # The last period of a phase is taken, since a schedule changes there.
                until = end if end == last else end - 1 - (end - 1 - step) % period
                awaited = end < last and any(own[0] < own[1] for own in block)  # at a step that the strategy keeps
                if block == before and not awaited and until > step:
                    ledger.repeat(place, begin, period, until)
                    for part in strategy.parts:
                        part.when.skip(until - step)
                    step = until
                before = block
    collectives.position.begin(last, "end")


def _intervals(strategy: Algorithm, base: type) -> list[int] | None:
    """Return numbers H such that nothing happens in a step that is a multiple of none; None if there are no such."""
    silent = [(strategy, name) for name in ("gradients", "optimize", "advance")]
    silent += [(part, name) for part in strategy.parts for name in ("communicate", "communicate_gradients")]
    if any(getattr(type(one), name) is not getattr(base, name) for one, name in silent):
        return None
    syncs = [part.when for part in strategy.parts]
    return [when.period for when in syncs] if all(isinstance(when, Every) for when in syncs) else None


def _active(first: int, last: int, intervals: Sequence[int] | None) -> Sequence[int]:
    """Return the steps first to last; with intervals, only their multiples."""
    if intervals is None:
        return range(first, last + 1)
    return sorted({step for H in intervals for step in range(first + -first % H, last + 1, H)})


def _answers_for_itself(part: Algorithm) -> bool:
    """Whether `rounds_repeat` is about all code of a part: a user's class defines it, or all classes are vsim's."""
    if not _is_own(type(part)):
        return "rounds_repeat" in vars(type(part))
    return not any(_foreign(value, set()) for name, value in vars(part).items() if name not in _SILENT)


def _foreign(value: Any, seen: set[int]) -> bool:
    """Whether a value holds an object of a user's class, whose code may send anything."""
    if id(value) in seen or isinstance(value, type | Tensor | nn.Module | Optimizer):
        return False
    seen.add(id(value))
    if isinstance(value, list | tuple | set):
        return any(_foreign(one, seen) for one in value)
    if isinstance(value, dict):
        return any(_foreign(one, seen) for one in value.values())
    if not _is_own(type(value)) and "rounds_repeat" not in vars(type(value)):
        root = type(value).__module__.partition(".")[0]
        return root not in ("torch", "numpy", "networkx") and root not in sys.stdlib_module_names
    return any(_foreign(one, seen) for one in getattr(value, "__dict__", {}).values())


def _is_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("vsim", "vsim_kernels")


@contextmanager
def _shown(name: str, steps: int) -> Iterator[Callable[[int], object]]:
    """Return a context whose function takes the number of the last step, and shows it in a bar once that takes long."""
    bar, began = None, time.monotonic()

    def show(step: int) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - began >= _SILENT_SECONDS:
            from tqdm.auto import tqdm

            bar = tqdm(total=steps, desc=f"pricing {name}", unit="step", leave=False, disable=None)
        if bar is not None:
            bar.update(step - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
