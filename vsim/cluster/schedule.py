"""Learning-rate schedules: torch's schedulers, and named schedules with warm-up and cosine annealing."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, OneCycleLR, SequentialLR

from vsim.arguments import one_of, real_number, reject_unknown, true_or_false, whole_number
from vsim.cluster.optimizers import StackedOptimizer, torch_optimizers, without_compiler

SCHEDULES = ("cosine", "lambda_cosine")
JOINING = {
    SequentialLR: "optimizer, [LinearLR(optimizer), …], milestones=[…]",
    ChainedScheduler: "[LinearLR(optimizer), …], optimizer",
}


@dataclass(frozen=True)
class restarts:
    """A learning rate that restarts after every sync, and ramps up over the next `steps` steps.

        η_t = η · min(1, floor + (1 − floor) · (t − t_sync) / steps)

    t is the number of completed steps, and t_sync of those before the last sync, 0 at first: the first step after a
    sync has the rate η · floor. Algorithms that communicate at every step raise an error, as they would stay there.

    Args:
        steps: at least 1. floor: in [0, 1].
    """

    steps: int
    floor: float = 0.1

    def __post_init__(self) -> None:
        whole_number("restarts: steps", self.steps)
        real_number("restarts: floor", self.floor, at_least=0, at_most=1)

    def factor(self, since: int) -> float:
        """Return the factor on the peak learning rate, `since` steps after a sync."""
        return min(1.0, self.floor + (1 - self.floor) * since / self.steps)


def warmup_cosine(warmup_steps: int, cosine_anneal: bool, max_steps: int) -> Callable[[int], float]:
    """Return the factor on the peak learning rate at 0-based step s.

    The factor is s / w for s < w. From step w on, the factor is 1 or, with `cosine_anneal`,
    0.1 + 0.45 · (1 + cos(π · (s − w) / (T − w))). From step T on, it is constant.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        if not cosine_anneal:
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return factor


def rate_after(scheduler: LRScheduler) -> float:
    """Return the learning rate that the next step of a scheduler will set, without taking that step."""
    own = scheduler.optimizer
    groups = [{k: v if k == "params" else copy.deepcopy(v) for k, v in group.items()} for group in own.param_groups]
    stand_in = SimpleNamespace(**{**vars(own), "param_groups": groups})
    copy.deepcopy(scheduler, {id(own): stand_in}).step()
    return float(groups[0]["lr"])


class LRSchedule:
    """A learning-rate schedule that is not built yet.

    Args:
        scheduler: a torch.optim.lr_scheduler class; "cosine" (warm-up, then cosine annealing) or "lambda_cosine" (the
            same, but annealing only with `cosine_anneal`); `restarts(steps)`; or None.
        kwargs: the arguments of the scheduler: for a named schedule, `warmup_steps`, `cosine_anneal`, `max_steps`.
        warmup_steps, cosine_anneal, max_steps: the arguments of named schedules, given outside of `kwargs`. Without
            `scheduler`, warm-up or annealing implies a named schedule. max_steps=None: the run's number of steps.

    Raises:
        TypeError, ValueError: an argument would have no effect, is given twice or is out of range.
    """

    def __init__(
        self,
        scheduler: type[LRScheduler] | restarts | str | None,
        kwargs: Mapping[str, Any] | None,
        warmup_steps: int | None,
        cosine_anneal: bool | None,
        max_steps: int | None,
    ) -> None:
        given: dict[str, Any] = {}
        if warmup_steps is not None:
            given["warmup_steps"] = whole_number("warmup_steps", warmup_steps, at_least=0)
        if cosine_anneal is not None:
            given["cosine_anneal"] = true_or_false("cosine_anneal", cosine_anneal)
        if max_steps is not None:
            given["max_steps"] = whole_number("max_steps", max_steps)
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"lr_scheduler_kwargs must be a dict of the scheduler's arguments, got {kwargs!r}")
        self.kwargs = dict(kwargs or {})
        self.cls: type[LRScheduler] | None = None
        self.restarts = scheduler if isinstance(scheduler, restarts) else None
        self.named = isinstance(scheduler, str) or (
            scheduler is None and bool(given.get("warmup_steps") or given.get("cosine_anneal"))
        )
        if self.restarts is not None:
            if self.kwargs or any(given.values()):
                names = [name for name, value in {"lr_scheduler_kwargs": self.kwargs, **given}.items() if value]
                raise TypeError(f"{' and '.join(names)} has no effect with lr_scheduler={self.restarts}")
        elif self.named:
            self._check_named(scheduler, given)
        elif scheduler is None:
            idle = {"lr_scheduler_kwargs": self.kwargs, "max_steps": max_steps}
            names = [name for name, value in idle.items() if value]
            if names:
                raise TypeError(f"{' and '.join(names)} has no effect without lr_scheduler=")
        else:
            self._check_class(scheduler, [name for name, value in given.items() if value])

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate never changes."""
        return self.cls is None and self.restarts is None and not self.named

    def _check_named(self, scheduler: Any, given: dict[str, Any]) -> None:
        name = one_of("lr_scheduler", "lambda_cosine" if scheduler is None else scheduler, SCHEDULES)
        reject_unknown(self.kwargs, ["warmup_steps", "cosine_anneal", "max_steps"], "lr_scheduler_kwargs")
        twice = self.kwargs.keys() & given.keys()
        if twice:
            raise TypeError(f"{', '.join(sorted(twice))} is given twice: in lr_scheduler_kwargs and as an argument")
        self.kwargs = {"warmup_steps": 0, "cosine_anneal": name == "cosine", **self.kwargs, **given}
        whole_number("warmup_steps", self.kwargs["warmup_steps"], at_least=0)
        true_or_false("cosine_anneal", self.kwargs["cosine_anneal"])
        if self.kwargs.get("max_steps") is not None:
            whole_number("max_steps", self.kwargs["max_steps"])

    def _check_class(self, scheduler: Any, given: list[str]) -> None:
        for joining, init in JOINING.items():
            if scheduler is joining or isinstance(scheduler, joining):
                raise TypeError(
                    f"lr_scheduler must be made for each optimizer, and {joining.__name__} joins schedulers that have "
                    f"one; give a subclass of it with def __init__(self, optimizer): super().__init__({init})"
                )
        if not (isinstance(scheduler, type) and issubclass(scheduler, LRScheduler)):
            raise TypeError(
                f"lr_scheduler must be a torch.optim.lr_scheduler class, restarts(steps) or one of "
                f"{', '.join(SCHEDULES)}, got {scheduler!r}"
            )
        if issubclass(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric at every step, which a strategy does not have")
        if given:
            raise TypeError(
                f"{', '.join(given)} belongs to the named schedules {SCHEDULES}; give {scheduler.__name__} its "
                "arguments as lr_scheduler_kwargs"
            )
        parameters = inspect.signature(scheduler).parameters.values()
        valid = [p.name for p in parameters if p.name != "optimizer"]
        reject_unknown(self.kwargs, valid, f"lr_scheduler_kwargs of {scheduler.__name__}")
        self.cls = scheduler
        if scheduler.__module__ == LRScheduler.__module__:
            self._check_torchs(scheduler)

    def _check_torchs(self, scheduler: type[LRScheduler]) -> None:
        """Take one step with a scheduler of torch, to check its arguments now."""
        optimizer = without_compiler(torch.optim.SGD)([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        try:
            own = scheduler(optimizer, **copy.deepcopy(self.kwargs))
            optimizer.step()
            own.step()
        except Exception as error:
            given = ", ".join(f"{name}={value!r}" for name, value in self.kwargs.items())
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"lr_scheduler {scheduler.__name__}({given}) is not possible: {error}") from error

    def horizon(self, max_steps: int) -> int | None:
        """Return the step at which annealing ends in a run of `max_steps` steps; None without annealing."""
        return (self.kwargs.get("max_steps") or max_steps) if self.named and self.kwargs["cosine_anneal"] else None

    def build(
        self, optimizer: StackedOptimizer, max_steps: int, synced: Callable[[], int] = lambda: 0
    ) -> list[LRScheduler]:
        """Return the schedulers to step after every optimizer step of a run of `max_steps` steps.

        Args:
            synced: returns the number of completed steps before the last sync; for `restarts`.

        Raises:
            ValueError: the schedule is shorter than the run.
        """
        if self.named:
            kwargs = {**self.kwargs, "max_steps": self.kwargs.get("max_steps") or max_steps}
            return [LambdaLR(o, warmup_cosine(**kwargs)) for o in torch_optimizers(optimizer)]
        if (restarting := self.restarts) is not None:
            return [LambdaLR(o, lambda step: restarting.factor(step - synced())) for o in torch_optimizers(optimizer)]
        cls = self.cls
        schedulers = [] if cls is None else [cls(o, **self.kwargs) for o in torch_optimizers(optimizer)]
        for scheduler in schedulers:
            if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < max_steps:
                raise ValueError(
                    f"OneCycleLR is over after {scheduler.total_steps} steps, and the run has {max_steps}: give it "
                    f"total_steps={max_steps} in lr_scheduler_kwargs"
                )
        return schedulers

    def rates(self, optimizer: Optimizer, max_steps: int) -> list[float]:
        """Return the learning rates of a run's steps and of the step after the last; this steps `optimizer`."""
        if self.restarts is not None:
            raise TypeError(f"lr_scheduler={self.restarts} follows the syncs, and here rates must be known before them")
        schedulers, group = self.build(optimizer, max_steps), optimizer.param_groups[0]
        rates = [float(group["lr"])]
        for _ in range(max_steps):
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            rates.append(float(group["lr"]))
        return rates
