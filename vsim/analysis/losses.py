"""Final losses of runs, the strategies that can be the best, and the strategies that seeds cannot tell apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.statistics import Ranking, confidence_interval, contenders, pairwise_p, ranking, shared_seeds
from vsim.analysis.tables import UNDECIDED
from vsim.figures.words import brief_list, quoted


def final_loss(runs: Runs, run: ComparedRun) -> float:
    """Return the last validation loss or, without validation, the mean training loss of the last tenth of the run.

    NaN for a run that diverged, or whose only validation came before the first step.
    """
    if run.diverged_at is not None:
        return math.nan
    if runs.loss_column == "global_loss":
        steps, losses = run.history.measured("step", "global_loss")
        return float(losses[-1]) if len(steps) and steps[-1] > 0 else math.nan
    (losses,) = run.history.measured("train_loss")
    return float(losses[-max(1, len(losses) // 10) :].mean()) if len(losses) else math.nan


def sound(runs: Sequence[ComparedRun]) -> Sequence[ComparedRun]:
    """Return the runs that did not fail, or all runs if all failed."""
    return [run for run in runs if not run.failure] or runs


def begun(runs: Sequence[ComparedRun]) -> Sequence[ComparedRun]:
    """Leave out runs interrupted before the first step; return all runs if that leaves none."""
    return [run for run in runs if run.failed or run.history.last("step") > 0] or runs


def by_seed(runs: Runs, value: Callable[[ComparedRun], float] | None = None) -> dict[str, dict[int, float]]:
    """Return name → seed → a value (default: the final loss) of the `begun` runs, NaN for a run that failed."""

    def own(run: ComparedRun) -> float:
        if run.failed or run.diverged_at is not None:
            return math.nan
        return final_loss(runs, run) if value is None else value(run)

    return {name: {run.seed: own(run) for run in begun(runs.runs(name))} for name in runs}


def rank(runs: Runs, name: str) -> tuple[int, float, float]:
    """Return a sort key: ended strategies by loss, then stopped ones, then failed ones, each by most steps."""
    own = runs.runs(name)
    loss = statistics.fmean(final_loss(runs, run) for run in begun(own))
    steps = min(run.history.last("step") if len(run.history) else 0.0 for run in own)
    if not math.isfinite(loss) or any(run.failed for run in own):
        return 2, -steps, 0.0
    return (0, 0.0, loss) if all(run.ended for run in own) else (1, -steps, loss)


def candidates(runs: Runs) -> list[str]:
    """Return the strategies that may be the best: all that ended or, if none did, all that took the most steps."""
    ranks = {name: rank(runs, name)[:2] for name in runs}
    first = min(ranks.values(), default=(2, 0.0))
    return [name for name, own in ranks.items() if own == first and first[0] < 2]


def compare_finals(runs: Runs) -> tuple[Ranking, list[str]]:
    """Return the strategies with the best final loss and their ties, and text on how they were compared."""
    losses, among = by_seed(runs), candidates(runs)
    found, remarks = ranking(losses, among), []
    known = {name: sum(map(math.isfinite, own.values())) for name, own in losses.items()}
    if sum(number > 0 for number in known.values()) > 1 and found.best and not found.tested:
        seeds = "one seed" if max(map(len, losses.values())) == 1 else "fewer than two common seeds"
        remarks.append(f"{seeds}: differences are not tested; use several seeds")
    if len({frozenset(losses[name]) for name in among}) > 1:
        shared = shared_seeds(losses[name] for name in among)
        over = f"the common seeds {', '.join(map(str, shared))}" if shared else "its own seeds; none is common"
        remarks.append(f"strategies have different seeds: the best has the lowest mean over {over}")
    few = quoted(name for name, own in known.items() if 0 < own < len(losses[name]))
    partly = [f"{said} ({known[name]} of {len(losses[name])} runs)" for name, said in few.items()]
    if partly:
        remarks.append(f"mean of the runs with a result; cannot be the best: {brief_list(partly)}")
    return found, remarks


def legend(found: Ranking) -> str:
    """Return the meaning of a † next to a loss, which names the best."""
    return UNDECIDED.format(f", {', '.join(quoted(found.best).values())}")


def compared_runs(runs: Runs) -> dict[str, Sequence[ComparedRun]]:
    """Return name → the runs whose final losses are compared: contenders' only with seeds that all contenders share."""
    losses = by_seed(runs)
    means = contenders(losses)
    shared = shared_seeds(losses[name] for name in means)
    return {
        name: [run for run in own if run.seed in (shared or losses[name])] if name in means else sound(own)
        for name, own in ((name, runs.runs(name)) for name in runs)
    }


def loss_interval(runs: Runs, own: Sequence[ComparedRun]) -> tuple[float, float]:
    """Return the 95 % interval of the mean loss: by Student's t or, for one run, by its standard error."""
    losses = [final_loss(runs, run) for run in own]
    if len(losses) > 1:
        return confidence_interval(losses)
    error = 1.96 * own[0].history.last("global_loss_se") if runs.loss_column == "global_loss" else math.nan
    return losses[0] - error, losses[0] + error


def ties(runs: Runs) -> dict[str, set[str]]:
    """Return name → the strategies whose final losses do not differ significantly from this strategy's.

    Paired tests over the seeds decide; with one seed, a lower loss is tied if it is in this strategy's interval.
    """
    losses = by_seed(runs)
    names, open_ = list(losses), pairwise_p(losses) > 0.05
    found = {name: {names[i] for i in np.flatnonzero(own)} for name, own in zip(names, open_, strict=True)}
    alone = {name: loss for name, own in losses.items() if len(own) == 1 for loss in own.values()}
    for name, loss in alone.items():
        low, _ = loss_interval(runs, begun(runs.runs(name)))
        found[name] |= {other for other, own in alone.items() if low <= own <= loss}
    return found


def diverged(runs: Runs) -> dict[str, str]:
    """Return name → text, such as "diverged at step 4", for strategies with only diverged runs."""
    said = {}
    for name in runs:
        steps = [run.diverged_at for run in runs.runs(name) if run.diverged_at is not None]
        if len(steps) == len(runs.runs(name)):
            first, last = min(steps), max(steps)
            said[name] = f"diverged at step {first}" if first == last else f"diverged at steps {first} to {last}"
    return said


def note(runs: Runs, name: str) -> str:
    """Return why some runs of a strategy did not end, or ""."""
    own = runs.runs(name)
    notes = {run.seed: run.note for run in own if run.note}
    if len(notes) == len(own) and len(set(notes.values())) == 1:
        return own[0].note
    return "; ".join(f"seed {seed}: {text}" for seed, text in notes.items())


def measured_at(runs: Runs) -> Mapping[str, str]:
    """Return name → the steps of the final losses, as text; "" if only the start was validated."""
    found = {}
    for name in runs:
        last = (run.history.measured("step", runs.loss_column)[0].max(initial=0) for run in sound(runs.runs(name)))
        found[name] = ", ".join(f"{step:g}" for step in sorted({*last}) if step)
    return found
