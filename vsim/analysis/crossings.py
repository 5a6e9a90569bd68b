"""Where runs reach a loss: the data of a race to it, and strategies that never reach it."""

from __future__ import annotations

import math

from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.losses import begun
from vsim.history.reached import NEVER, Crossing

Racers = dict[str, list[tuple[ComparedRun, Crossing, float]]]


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
