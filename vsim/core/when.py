"""When nodes synchronize: after every H-th step, or by a schedule.

When a sync is due, and before it is taken, a schedule gives the step of the next sync. `Algorithm` asks the schedule at
every step, and calls `sync` when a sync is due.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vsim.arguments import real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.plan import ComputeSeconds
from vsim.core.fields import Given


class When(Given):
    """A schedule of syncs. A subclass defines `after`."""

    needs_compute = False  # whether syncs depend on compute seconds
    has_warmup = False  # whether the class defines `is_warmup`
    next: int  # the step of the next sync, shared

    def __init__(self) -> None:
        """Take no arguments; a subclass may."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.has_warmup = cls.is_warmup is not When.is_warmup

    def after(self, step: int, lr: float, steps_left: int, seconds: ComputeSeconds | None) -> int:
        """Return the step of the next sync.

        Args:
            step: the step of the last sync; 0 at the start.
            lr: the inner learning rate of the next step. steps_left: the run's steps after `step`. seconds: the nodes'
                compute seconds, if known.
        """
        raise NotImplementedError(f"{type(self).__name__} must define after(step, lr, steps_left, seconds)")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    def is_warmup(self, step: int) -> bool:
        """Whether gradients are averaged before step number `step`, so that weights stay equal without a sync."""
        return False

    def setup(self, cluster: Cluster) -> None:
        """Prepare for a run on `cluster`."""
        self.keep_shared(next=self._after(0, cluster))

    def is_due(self, cluster: Cluster) -> bool:
        """Whether step number `cluster.step` ends with a sync; asked once a step."""
        if cluster.step < self.next:
            return False
        self.next = self._after(cluster.step, cluster)
        return True

    def ends_with(self, step: int) -> bool:
        """Whether step number `step`, now under way, ends with a sync; called before `is_due`."""
        return step >= self.next

    def _after(self, step: int, cluster: Cluster) -> int:
        found = self.after(step, cluster.next_lr, cluster.max_steps - step, cluster.seconds)
        return whole_number(f"{type(self).__name__}.after()", found, at_least=step + 1)

    @property
    def period(self) -> int | None:
        """Steps from one sync to the next; None if they vary."""
        return None

    @property
    def phases(self) -> Sequence[tuple[int, int]]:
        """Phases of the run with a fixed period each: (steps before the phase, period); none if periods vary."""
        return () if self.period is None else [(0, self.period)]

    def skip(self, steps: int) -> None:
        """Move the next sync by steps that were not taken, a multiple of the phase's period."""
        if "next" in vars(self):
            self.next += steps

    def until_next(self, cluster: Cluster) -> int:
        """Return the number of steps from a sync at `cluster.step` to the next sync."""
        return self.next - cluster.step


@dataclass(eq=False)
class Every(When):
    """Sync after every H-th step of the run: when t % H == 0."""

    H: int

    def __post_init__(self) -> None:
        self.H = whole_number("H", self.H)

    @property
    def period(self) -> int:
        return self.H

    def setup(self, cluster: Cluster) -> None:
        """Do nothing: a sync depends on the step number alone."""

    def is_due(self, cluster: Cluster) -> bool:
        return cluster.step % self.H == 0

    def ends_with(self, step: int) -> bool:
        return step % self.H == 0

    def until_next(self, cluster: Cluster) -> int:
        return self.H - cluster.step % self.H

    def after(self, step: int, lr: float, steps_left: int, seconds: ComputeSeconds | None) -> int:
        return step + self.H - step % self.H


@dataclass(eq=False)
class QSR(When):
    """The quadratic synchronization rule: H grows as the learning rate falls.

        H = minimum during the warm-up, then max(minimum, ⌊(alpha / lr)^power⌋), at most the steps that are left

    Args:
        alpha: see above; above 0. minimum: the smallest H, at least 1.
        warmup_steps: the number of steps, from the first, in which H is `minimum`.
        power: 2 in the paper; 3 for the paper's cubic rule.

    lr is the inner learning rate of the first step after a sync.

    Source: Gu et al. 2024 [arXiv:2310.14423], with the authors' code.
    """

    alpha: float
    minimum: int = 1
    warmup_steps: int = 0
    power: float = 2

    def __post_init__(self) -> None:
        self.alpha = real_number("alpha", self.alpha, above=0)
        self.minimum = whole_number("minimum", self.minimum)
        self.warmup_steps = whole_number("warmup_steps", self.warmup_steps, at_least=0)
        self.power = real_number("power", self.power, above=0)

    def after(self, step: int, lr: float, steps_left: int, seconds: ComputeSeconds | None) -> int:
        if step < self.warmup_steps:
            return step + self.minimum
        grown = (self.alpha / lr) ** self.power if lr > 0 else math.inf
        return step + max(1, min(max(int(min(grown, steps_left + 1)), self.minimum), steps_left))


@dataclass(eq=False)
class PostLocal(When):
    """Average gradients at each of the first w steps, and weights from then on.

    The strategy's `average` merges the gradients of all nodes; its clip() and compress() then apply to gradients.
    Gradients of personal parameters stay with their client.

    Args:
        warmup_steps: w, at least 1.
        then: H after the warm-up: a number or a schedule, counted from step w.

    Source: post-local SGD [Lin et al. 2018, arXiv:1808.07217].
    """

    warmup_steps: int
    then: int | When = 1

    def __post_init__(self) -> None:
        self.warmup_steps = whole_number("warmup_steps", self.warmup_steps)
        self._then = schedule_of(sync_interval(self.then, "then"))
        if isinstance(self._then, PostLocal):
            raise TypeError(f"then={self.then!r} has a warm-up of its own; add up their steps")
        self.needs_compute = self._then.needs_compute

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    def is_warmup(self, step: int) -> bool:
        return step <= self.warmup_steps

    @property
    def phases(self) -> Sequence[tuple[int, int]]:
        w = self.warmup_steps
        own = self._then.phases
        return [(0, 1), *((w + begun, period) for begun, period in own)] if own else ()

    def after(self, step: int, lr: float, steps_left: int, seconds: ComputeSeconds | None) -> int:
        if step < self.warmup_steps:
            return step + 1
        w = self.warmup_steps
        own = None if seconds is None else lambda first, last, local: seconds(first + w, last + w, local)
        return w + self._then.after(step - w, lr, steps_left, own)


@dataclass(eq=False)
class Seconds(When):
    """Sync after as many steps as the slowest node computes in `seconds`, at least 1; the run needs `compute=`.

    Source: A-EDiT [Cheng et al. 2024, arXiv:2412.07210]. Deviation: nodes take equal numbers of steps, and wait for the
    slowest; in A-EDiT, faster nodes take more steps.
    """

    seconds: float
    needs_compute = True

    def __post_init__(self) -> None:
        self.seconds = real_number("seconds", self.seconds, above=0)

    def after(self, step: int, lr: float, steps_left: int, seconds: ComputeSeconds | None) -> int:
        if seconds is None:
            raise TypeError(f"H={self!r} goes by compute seconds: give fit(…, compute=Compute(0.8, …))")
        few, many = 1, 2  # `few` steps fit into `seconds`, or `few` is 1; `many` may not fit
        while many <= steps_left and self._fit(seconds, step, many):
            few, many = many, 2 * many
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (middle, many) if self._fit(seconds, step, middle) else (few, middle)
        return step + few

    def _fit(self, seconds: ComputeSeconds, step: int, count: int) -> bool:
        return float(seconds(step + 1, step + count, None).max()) <= self.seconds * (1 + 1e-9)


def sync_interval(H: Any, name: str = "H") -> int | When:
    """Return H as given: a whole number of steps, or a copy of a schedule."""
    return copy.copy(H) if isinstance(H, When) else whole_number(name, H)


_every = functools.cache(Every)  # cached, since it is called at every step


def schedule_of(H: int | When) -> When:
    """Return H as a schedule."""
    return H if isinstance(H, When) else _every(H)


def syncs(when: When, rates: Sequence[float], max_steps: int, seconds: ComputeSeconds | None) -> list[int]:
    """Return the steps of all syncs of a run, given the learning rates of all steps and of one more step."""
    found, step = [], 0
    while (step := when.after(step, rates[step], max_steps - step, seconds)) <= max_steps:
        found.append(step)
    return found
