"""The step at which each run reaches a loss or an accuracy, or what it has cost by then."""

from __future__ import annotations

import math

import numpy as np

from vsim.analysis.asked import target
from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.crossings import crossing_of
from vsim.analysis.spent import until
from vsim.arguments import a_text, real_number, true_or_false
from vsim.history.attendance import rounds


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
    if (loss is None) == (accuracy is None):
        raise TypeError(f"steps_to takes one of loss= and accuracy=, got {loss!r:.100} and {accuracy!r:.100}")
    true_or_false("stays", stays)
    reach = real_number("accuracy", accuracy, at_least=0, at_most=1) if loss is None else target(loss, stays)
    if accuracy is not None and not comparison.has("global_accuracy"):
        raise ValueError("accuracy=: the validation of these runs has none; give loss=")
    if a_text("of", of) == "round" and not all(h.ledger.attendance for h in comparison.all_histories):
        raise ValueError("of='round' needs participation=, which has rounds; of='step' is there for all runs")
    kinds = {f"{way}_bytes": way for way in ("wire", "payload")}

    def value(run: ComparedRun) -> float:
        at = crossing_of(comparison, run, reach, stays, "global_accuracy" if accuracy is not None else None)
        if of in kinds:
            return until(run.history, at, comparison.spent(run, kinds[of]))
        if of == "round" and not math.isnan(at.step):
            return float(rounds(run.history)[np.searchsorted(run.history["step"], at.step)])
        return run.history.at_step(at.step, "step" if of == "round" else of)

    return {name: [value(run) for run in comparison.runs(name)] for name in comparison}
