"""Which strategy reaches a loss at the least cost, and which are tied with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vsim.analysis.statistics import shared_seeds

Floats = NDArray[np.float64]

# Costs within this factor are equal but for rounding.
_EQUAL = 1 + 1e-9


@dataclass(frozen=True)
class Race:
    """The strategy that reaches a loss at the least cost, and strategies tied with it, in each cell (say, a network).

    The first strategy has the least mean cost over the seeds common to all strategies that reach the loss with all
    seeds. Another strategy is tied with the first

    - if its least possible cost, given rare validation, is at most the first's,
    - if its least possible cost, given noise, is at most the first's, or
    - if 0 is in the interval of the paired difference between the two, by Bonferroni over all pairs of strategies, as
      the data chose the first. Equal strategies then count as different with a chance of at most 5 %.

    Attributes:
        costs: name → seed → (3, …) three costs for each cell: until the loss is measured, infinite if never; the least
            possible cost between measurements; and the least possible cost within noise, which is the cost of the whole
            run if the run ended above the loss.
    """

    costs: Mapping[str, Mapping[int, Floats]]

    @cached_property
    def means(self) -> dict[str, Floats]:
        """Name → mean costs (3, …) over the seeds by which strategies are compared; names in alphabetical order."""
        reach = {name for name, own in self.costs.items() if all(np.isfinite(cost[0]).all() for cost in own.values())}
        shared = shared_seeds(self.costs[name] for name in reach)
        return {
            name: np.mean([own[seed] for seed in (shared if name in reach and shared else own)], axis=0)
            for name, own in sorted(self.costs.items())
        }

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """For each cell (…), the index in `means` of the first strategy."""
        return np.argmin([own[0] for own in self.means.values()], axis=0)

    @cached_property
    def _tied(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return two arrays (M, …): whether noise ties a strategy with the first, and whether rare validation does."""
        names = list(self.means)
        lowest = np.min([own[0] for own in self.means.values()], axis=0)
        by_noise, by_validation = np.zeros((2, len(names), *self.first.shape), dtype=bool)
        for i, j in np.ndindex(len(names), len(names)):
            here = self.means[names[i]][0] <= lowest * _EQUAL  # the first, and its equals
            if i == j or not here.any():
                continue
            latest, (_, earliest, least) = self.means[names[i]][0, here] * _EQUAL, self.means[names[j]][:, here]
            one, other = self.costs[names[i]], self.costs[names[j]]
            apart = [other[seed][0, here] - one[seed][0, here] for seed in shared_seeds([one, other])]
            by_validation[j, here] |= earliest <= latest
            by_noise[j, here] |= (least <= latest) | _seeds_cannot_tell(apart, math.comb(len(names), 2))
        return by_noise, by_validation

    @property
    def ahead(self) -> NDArray[np.bool_]:
        """Array (M, …): whether each of the M strategies in `means` is a cell's first strategy, or tied with it."""
        places = np.arange(len(self.means)).reshape(-1, *[1] * self.first.ndim)
        return np.logical_or(*self._tied) | (self.first == places)

    @property
    def left_open(self) -> NDArray[np.bool_]:
        """Array (M, …): whether rare validation alone, without noise, ties a strategy with a cell's first strategy."""
        by_noise, by_validation = self._tied
        mean = np.array([own[0] for own in self.means.values()])
        return by_validation & ~by_noise & (mean > mean.min(0) * _EQUAL)


def _seeds_cannot_tell(apart: Sequence[Floats], tests: int) -> NDArray[np.bool_] | bool:
    """Return whether 0 is in the interval of paired differences (n, cells), whose means are at least 0."""
    if len(apart) < 2 or not np.isfinite(apart).all():
        return False
    from scipy import stats

    own = np.array(apart)
    error = own.std(0, ddof=1) / math.sqrt(len(own))
    return np.asarray(own.mean(0) <= stats.t.isf(0.025 / tests, len(own) - 1) * error)
