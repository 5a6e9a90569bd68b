"""When runs reach a loss: the step of each seed, the data of a race to the loss, and strategies that never reach it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.losses import begun
from vsim.analysis.spent import until
from vsim.arguments import a_text, real_number, true_or_false
from vsim.history.attendance import rounds
from vsim.history.reached import NEVER, Crossing

Racers = dict[str, list[tuple[ComparedRun, Crossing, float]]]


def steps_to(
    comparison: Runs, loss: float | None = None, of: str = "step", *, accuracy: float | None = None, stays: bool = False
) -> dict[str, list[float]]:
    """Return name → for each seed the first step with a validation loss of at most `loss`, NaN if there is none.

    Between measurements the last value holds. Without validation, the training loss is used.

    Args:
        loss: the target. accuracy: the validation accuracy to reach instead, from 0 to 1; give one of the two.
        of: another column of `History` to return at that step, such as "wire_bytes", or "round" of a run with
            `participation`. If no node holds the global model, bytes include one more all-reduce, which would form it.
        stays: whether the loss counts as reached only if no later measurement is above it. Otherwise, the first
            measurement at or below the loss counts. With noise, this is too early: of two equal curves, the noisier
            one seems faster.
    """
    true_or_false("stays", stays)
    if (loss is None) == (accuracy is None):
        raise TypeError(f"steps_to takes one of loss= and accuracy=, got {loss!r:.100} and {accuracy!r:.100}")
    target: Any = loss if accuracy is None else real_number("accuracy", accuracy, at_least=0, at_most=1)
    if accuracy is not None and not comparison.has("global_accuracy"):
        raise ValueError("accuracy=: the validation of these runs has none; give loss=")
    if a_text("of", of) == "round" and not all(h.ledger.attendance for h in comparison.all_histories):
        raise ValueError("of='round' needs participation=, which has rounds; of='step' is there for all runs")
    kinds = {f"{way}_bytes": way for way in ("wire", "payload")}

    def value(run: ComparedRun) -> float:
        at = crossing_of(comparison, run, target, stays, "global_accuracy" if accuracy is not None else None)
        if of in kinds:
            return until(run.history, at, comparison.spent(run, kinds[of]))
        if of == "round" and not math.isnan(at.step):
            return float(rounds(run.history)[np.searchsorted(run.history["step"], at.step)])
        return run.history.at_step(at.step, "step" if of == "round" else of)

    return {name: [value(run) for run in comparison.runs(name)] for name in comparison}


def crossing_of(runs: Runs, run: ComparedRun, loss: float, stays: bool, of: str | None = None) -> Crossing:
    """Return where a run reaches a loss, or a value of column `of`; with `stays`, a failed run never reaches it."""
    at = run.history.crossing(loss, of or runs.loss_column, stays)
    return NEVER if stays and run.failed else at


def racers(runs: Runs, loss: float, stays: bool) -> Racers:
    """Return name → for each seed: the run, its crossing of the loss, and the first step that might have reached it.

    With one seed, a step might have reached the loss if its own loss is within 1.96 standard errors of it. A run that
    ended above the loss might have reached it in its next step: its last step counts; NaN for a failed run. Strategies
    that reach the loss with no seed are left out. If no strategy reaches it with all seeds, the result is empty.
    """
    found: Racers = {}
    for name in runs:
        own = begun(runs.runs(name))
        at = [(run, crossing_of(runs, run, loss, stays)) for run in own]
        found[name] = [(run, one, _might(runs, run, one, loss, stays, len(own) == 1)) for run, one in at]
    reached = {name: [not math.isnan(at.step) for _, at, _ in own] for name, own in found.items()}
    return {name: own for name, own in found.items() if any(reached[name])} if any(map(all, reached.values())) else {}


def _might(runs: Runs, run: ComparedRun, at: Crossing, loss: float, stays: bool, alone: bool) -> float:
    if math.isnan(at.step):
        return math.nan if run.failed else run.history.last("step")
    error = run.history.last("global_loss_se") if alone and runs.loss_column == "global_loss" else math.nan
    return at.step if math.isnan(error) else crossing_of(runs, run, loss + 1.96 * error, stays).step


def never(runs: Runs, loss: float, stays: bool = False) -> dict[str, str]:
    """Return name → text for each strategy with a seed that does not reach the loss."""
    said = {}
    for name in runs:
        own = [not math.isnan(crossing_of(runs, run, loss, stays).step) for run in begun(runs.runs(name))]
        if not all(own):
            said[name] = f"{sum(own)} of {len(own)} runs" if any(own) else "never"
    return said


def doubts(runs: Runs, stays: bool) -> list[str]:
    """Return notes on the certainty of crossings: a single seed, and noise."""
    said = []
    if all(len(runs.runs(name)) == 1 for name in runs):
        errors = (
            "ties follow from validation's standard errors" if runs.has("global_loss_se") else "ties are not tested"
        )
        said.append(f"one seed: {errors}")
    return [*said, *noise(runs, stays)]


def noise(runs: Runs, stays: bool) -> list[str]:
    """Return a note if noise may make a sample's losses reach the target too early."""
    sampled = runs.sampled and not stays
    return ["validated on a sample, whose noise may reach the loss too early; see stays=True"] if sampled else []
