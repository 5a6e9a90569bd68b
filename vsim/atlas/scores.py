"""What entries say: means over seeds, who is ahead, and how near to the best a strategy stays over the tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.atlas.entries import NO_LIMIT, SCORES, key
from vsim.atlas.tasks import NETWORKS
from vsim.figures.words import brief_list

Floats = NDArray[np.float64]
Entries = Mapping[str, Mapping[str, Any]]  # strategy → entry, of one task
# The scores with one limit or none: by bytes, by time, and by steps.
SINGLE = [score for score in SCORES if NO_LIMIT in score]


class Place(NamedTuple):
    """A strategy at a score.

    Attributes:
        loss, accuracy: means over the seeds. half: half of the loss's 95 % interval. steps: mean steps within limits.
        is_tied: whether the seeds cannot tell the strategy from the first.
        diverged: the number of seeds that diverged, which count as the worst loss of all strategies.
    """

    strategy: str
    loss: float
    half: float
    accuracy: float
    steps: float
    is_tied: bool
    diverged: int


def losses(entries: Entries, score: tuple[str, str]) -> dict[str, Floats]:
    """Return strategy → losses (seeds,) of the strategies that have this score. A run that diverged has the largest
    loss of any strategy."""
    found = {
        name: np.array([math.inf if one is None else one for one in own["scores"][key(score)]["loss"]])
        for name, own in entries.items()
        if key(score) in own["scores"]
    }
    worst = max((own[np.isfinite(own)].max(initial=0.0) for own in found.values()), default=0.0)
    return {name: np.where(np.isfinite(own), own, worst) for name, own in found.items()}


def interval(values: Floats) -> tuple[float, float]:
    """Return the 95 % interval of a mean over seeds, by Student's t: that of a bootstrap of five values covers 84 %."""
    from scipy import stats

    half = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


def decided(one: Floats, other: Floats) -> bool:
    """Whether the interval of the mean difference, paired by seed, excludes 0."""
    low, high = interval(one - other)
    return low > 0 or high < 0


def standings(entries: Entries, score: tuple[str, str]) -> list[Place]:
    """Return the strategies at a score, the lowest mean loss first."""
    found = losses(entries, score)
    order = sorted(found, key=lambda name: float(found[name].mean()))
    places = []
    for name in order:
        own, (low, high) = entries[name]["scores"][key(score)], interval(found[name])
        known = [one for one in own["accuracy"] if one is not None]
        places.append(
            Place(
                name,
                float(found[name].mean()),
                (high - low) / 2,
                float(np.mean(known)) if known else math.nan,
                float(np.mean(own["steps"])),
                not decided(found[name], found[order[0]]),
                own["loss"].count(None),
            )
        )
    return places


def standing(entries: Entries, name: str, score: tuple[str, str]) -> str:
    """Return where a strategy stands among the others, as text."""
    found = losses(entries, score)
    if name not in found:
        return "no score: its training depends on another network"
    place = sorted(found, key=lambda one: float(found[one].mean())).index(name) + 1
    others = {one: own for one, own in found.items() if one != name}
    open_to = [one for one, own in others.items() if not decided(found[name], own)]
    behind = [one for one in others if one not in open_to and others[one].mean() < found[name].mean()]
    text = f"{place} of {len(found)}; ahead of {len(others) - len(open_to) - len(behind)}, behind {len(behind)}"
    return text + (f", not decided against {len(open_to)} ({brief_list(open_to, 3)})" if open_to else "")


def ratios(by_task: Mapping[str, Entries], score: tuple[str, str]) -> dict[str, Floats]:
    """Return strategy → loss divided by the task's lowest mean loss, for the tasks that it entered."""
    found: dict[str, list[float]] = {}
    for entries in by_task.values():
        means = {name: float(own.mean()) for name, own in losses(entries, score).items()}
        for name, mean in means.items():
            found.setdefault(name, []).append(mean / min(means.values()))
    return {name: np.array(own) for name, own in found.items()}


def profile(own: Floats, factors: Floats) -> Floats:
    """Return the share of tasks (N,) in which a strategy's loss is within each factor (N,) of the best.

    >>> profile(np.array([1.0, 1.5, 4.0, 1.0]), np.array([1.0, 2.0]))
    array([0.5 , 0.75])
    """
    return (own[None, :] <= factors[:, None] * (1 + 1e-12)).mean(1)


def tuning(entry: Mapping[str, Any]) -> tuple[float, int]:
    """Return the median trial's validation loss after all steps divided by the best trial's, and how many diverged."""
    trials = [math.inf if one is None else one for one in entry["tuning"][key((NO_LIMIT, NO_LIMIT))]]
    return float(np.median(trials)) / min(trials), trials.count(math.inf)


def label(score: tuple[str, str]) -> str:
    """Return the heading of a score."""
    share, network = score
    if NO_LIMIT == share == network:
        return "all steps"
    parts = ([f"{share} of the bytes"] if share != NO_LIMIT else []) + ([network] if network in NETWORKS else [])
    return ", ".join(parts)
