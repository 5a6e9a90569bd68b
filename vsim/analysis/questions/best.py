"""The strategy with the lowest loss, at the end or within a budget, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.losses import by_seed, candidates, note, rank, sound
from vsim.analysis.spent import AnyCompute, AnyNetwork, Floats, Use, amount, amount_text, unused, use
from vsim.analysis.statistics import contenders, pairwise_p, ranking
from vsim.figures.words import brief_list

_ENDED = "not decided, as runs ended before the budget"
# Run → a pair for each budget: the cost (T,) up to every row of the run's history, and the budget.
Costs = Mapping[ComparedRun, list[tuple[Floats, float]]]


class Best(str):
    """The name of the best strategy, displayed as a sentence that says how sure the result is.

    Attributes:
        loss: the strategy's loss, averaged over the seeds. within: the budget as text; "" without one.
        runner_up: the next best strategy, "" if there is none. runner_up_loss: its loss.
        p: p-value of the paired t-test of the best against the runner-up, adjusted by Holm over all pairs of
            strategies, because the data chose these two; NaN with fewer than two common seeds.
        undecided: name → p-value of every strategy that does not differ significantly from the best (p > 0.05), with
            a † in a table; it may be another than the runner-up, if its runs differ more. Empty if nothing was tested.
        uses: name → how much of the budget the strategy's runs used, see `vsim.analysis.spent.Use`; empty without a
            budget.
    """

    loss: float
    within: str
    runner_up: str
    runner_up_loss: float
    p: float
    undecided: Mapping[str, float]
    uses: Mapping[str, Use]

    @property
    def certain(self) -> bool | None:
        """Whether the best differs significantly from every other strategy (p ≤ 0.05).

        None if no strategy has two seeds in common with the best, or if another strategy's runs ended before the
        budget was used up: with more steps, that strategy might be the best.
        """
        ended = any(own.ended for name, own in self.uses.items() if name != self)
        tested = bool(self.undecided) or not math.isnan(self.p)
        return None if ended or not tested else not self.undecided

    def __repr__(self) -> str:
        text = f"{self}: loss {self.loss:.4f}{f' within {self.within}' if self.within else ''}"
        ended = unused(self.uses)
        if self.runner_up:
            text += f"; runner-up {self.runner_up}: {self.runner_up_loss:.4f} ({self._sure})"
        return f"{text}; {ended}" if ended else text

    @property
    def _sure(self) -> str:
        if self.certain:
            return f"the difference is certain, p = {self.p:.2g}"
        if self.certain is None:
            few = math.isnan(self.p) and not self.undecided
            return "not tested: fewer than two common seeds" if few else _ENDED
        names = (f"{name}{'' if math.isnan(p) else f' (p = {p:.2g})'}" for name, p in self.undecided.items())
        return f"not significantly different from {brief_list([*names])}"


def best(
    comparison: Runs,
    within: Mapping[str, Any] | None = None,
    network: AnyNetwork = None,
    compute: AnyCompute = None,
) -> Best:
    """Return the name of the strategy with the lowest loss, on average over the seeds.

    The name is displayed as a sentence that names the runner-up, and the strategies that do not differ significantly
    from the best. A strategy with a run that diverged or failed is not the best; see
    `vsim.analysis.statistics.contenders` for runs that are missing.

    Args:
        within: budgets, such as `{"wire": "2 GB"}` or `{"time": "10 h", "cost": "$40"}`. A run is compared by the last
            loss measured within all budgets; a global model that no node holds costs one more all-reduce. If runs ended
            before a budget was used up, the sentence says how many steps would use it up. Keys: "wire" and "payload"
            bytes per node (for cohorts, per client on average), "time", "cost" in dollars, "step", "examples",
            "tokens". Default: compare final losses; runs stopped early count only if no run reached its last step.
        network, compute: determine "time" and "cost", see `vsim.timeline`; default: the comparison's.

    Raises:
        ValueError: every strategy has a run that diverged or failed, or has no loss within the budget; or a budget
            has another key.
        TypeError: "time" or "cost" lacks network or compute; or these are given for other budgets only.
    """
    if within is not None and (not isinstance(within, Mapping) or not within):
        raise TypeError(f"within must be a dict such as {{'wire': '2 GB'}}, got {within!r}")
    budgets = {of: amount(of, value) for of, value in (within or {}).items()}
    priced = comparison.pricing_of(list(budgets), network, compute)
    costs = {
        run: [(comparison.spent(run, of, priced), most) for of, most in budgets.items()] for run in comparison.all_runs
    }

    def loss_within(run: ComparedRun) -> float:
        """Return the last loss that was measured at a cost within the budgets; NaN if there is none."""
        losses = run.history.column(comparison.loss_column)
        kept = ~np.isnan(losses)
        for own, most in costs[run]:
            kept &= own <= most * (1 + 1e-12)
        return float(losses[kept][-1]) if kept.any() else math.nan

    values = by_seed(comparison, loss_within if within else None)
    among = None if within else candidates(comparison)
    means = contenders(values if among is None else {name: values[name] for name in among})
    said = " and ".join(amount_text(of, value) for of, value in (within or {}).items())
    if not means and within:
        raise ValueError(f"no strategy has a loss within {said} with all its seeds")
    if not means:
        names = sorted(comparison, key=lambda name: rank(comparison, name))
        raise ValueError("no run got to its end" + "".join(f"; {one}: {note(comparison, one)}" for one in names[:1]))
    first, *others = means
    best = Best(first)
    best.loss, best.within, best.uses = means[first], said, uses(comparison, costs) if within else {}
    p = dict(zip(values, pairwise_p(values)[list(values).index(first)].tolist(), strict=True))
    found = ranking(values, among)
    open_ = {*found.best, *found.undecided} - {first} if found.tested else set()
    best.undecided = {name: p[name] for name in values if name in open_}
    best.runner_up = others[0] if others else ""
    best.runner_up_loss, best.p = means.get(best.runner_up, math.nan), p.get(best.runner_up, math.nan)
    return best


def uses(runs: Runs, costs: Costs) -> dict[str, Use]:
    """Return name → how much of the budgets the strategy's runs used; failed runs are left out, see `sound`."""
    return {name: use([(run.history, costs[run]) for run in sound(runs.runs(name))]) for name in runs}
