"""Numbers on the performance of each client's model on its own data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vsim.analysis.result import Result

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Clients:
    """The values of a run's clients, of those that have one; and which of them attacked."""

    values: Floats
    attacked: NDArray[np.bool_]
    higher_is_better: bool

    @property
    def worst_first(self) -> Floats:
        return np.sort(self.values) if self.higher_is_better else -np.sort(-self.values)

    def percentile(self) -> float:
        return float(np.percentile(self.values, 10 if self.higher_is_better else 90))

    def worst_tenth(self) -> float:
        return float(self.worst_first[: math.ceil(len(self.values) / 10)].mean())

    def gini(self) -> float:
        n = len(self.values)
        ranks = 2 * np.arange(n) - n + 1
        return float(np.sort(self.values) @ ranks) / (n * self.values.sum()) if self.values.any() else 0.0

    def mean_of(self, attackers: bool) -> float:
        own = self.values[self.attacked == attackers]
        return float(own.mean()) if len(own) else math.nan


def on_clients(what: str, of: Callable[[Clients], float], result: Result) -> float:
    """Return a number on the clients' "losses" or "accuracies"; NaN for a run that diverged or measured none."""
    history, is_accuracy = result.run.history, what == "accuracies"
    values = history.client_val_accuracies if is_accuracy else history.client_val_losses
    known = ~np.isnan(values)  # leave out clients without a label that counts
    if not known.any() or result.run.diverged_at is not None:
        return math.nan
    attacked = history.attacked_clients if len(history.attacked_clients) else np.zeros(len(values), dtype=bool)
    return of(Clients(values[known], attacked[known], is_accuracy))
