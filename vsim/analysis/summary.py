"""The results of a comparison as rows of numbers, and as a table with notes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vsim.analysis.asked import Asked
from vsim.analysis.columns import columns_of, times_less
from vsim.analysis.compared import Runs
from vsim.analysis.crossings import never, noise
from vsim.analysis.losses import begun, compare_finals, diverged, legend, measured_at, note, sound
from vsim.analysis.result import Result
from vsim.analysis.spent import AnyCompute, AnyNetwork, amount_text, forming_bytes
from vsim.analysis.tables import Marks, text_table
from vsim.arguments import whole_number
from vsim.figures.words import brief_list, in_short, quoted, size_text
from vsim.network.timeline import DRAWS

_ALIKE = 0.02  # relative difference in compression up to which there is no note

if TYPE_CHECKING:
    import pandas as pd


def rows(
    comparison: Runs,
    loss: float | None = None,
    network: AnyNetwork = None,
    compute: AnyCompute = None,
    *,
    stays: bool = False,
) -> pd.DataFrame:
    """Return a DataFrame with one row per strategy: the columns of the table as numbers.

    Losses are the last measured losses of the global model on the validation data or, without validation, the mean
    training loss over the last tenth of the run; NaN for a run that diverged. With several seeds, a number is the mean
    over the runs that ended (over all runs, if none ended; for costs until a loss, over all runs that began). If the
    runs differ, a column "<column> std" follows: the sample's standard deviation. Some columns:

    - fewer bytes than AllReduce: AllReduce's wire bytes in these steps, divided by the strategy's; NaN if that is 0.
    - MB per accuracy point: the wire bytes for each percentage point of the final accuracy; in a table on demand.
    - wire and payload MB/client: for cohorts, means over all clients, next to "busiest client MB" and "server MB".
    - client accuracy: with a `client_val_dataset`, mean over clients, 10th percentile, mean of the worst tenth, and
      worst client; then the deviation over clients, the Gini coefficient, and in comparisons with an `attack`, the
      means over honest clients and over attackers. Without accuracies, "client loss", with the 90th percentile.
    - consensus distance: of gossip, the nodes' distance from their mean at the last validation; in a table on demand.
    - test loss, test accuracy: the final global model's. steps: in a table on demand, if all runs have equal numbers.
    - time used, wire used and so on: with a budget, the used shares.
    - hours: if the compute varies, the median of 32 draws, "hours low" and "hours high" the 10th and 90th percentile.

    Args:
        loss: adds the steps and wire bytes until this loss, see `steps_to`; NaN if a run never reaches it.
        network, compute: add the hours that the run would take, the share of hours in which nodes compute, and the
            hours to `loss`; see `vsim.timeline`; default: the comparison's.
        stays: see `steps_to`.
    """
    import pandas

    return pandas.DataFrame(numbers(Asked.of(comparison, loss, network, compute, stays=stays)))


def numbers(asked: Asked) -> list[dict[str, Any]]:
    """Return `rows`, each as a dict."""
    comparison, columns, found = asked.runs, columns_of(asked), []
    for name in comparison.order:
        runs = comparison.runs(name)
        results = {run: Result(asked, run) for run in runs}
        row: dict[str, Any] = {**comparison.labels(name)}
        for column in columns:
            values = [column.of(results[run]) for run in (begun(runs) if column.is_to_loss else sound(runs))]
            row[column.name] = statistics.fmean(values)
            if len(set(values)) > 1 and all(map(math.isfinite, values)):
                row[f"{column.name} std"] = statistics.stdev(values)
        if not all(run.ended for run in comparison.all_runs):
            row["note"] = note(comparison, name)
        found.append(row)
    return found


def table(
    comparison: Runs,
    format: str = "simple",
    *,
    columns: Sequence[str] | None = None,
    digits: int | Mapping[str, int] | None = None,
    loss: float | None = None,
    network: AnyNetwork = None,
    compute: AnyCompute = None,
    stays: bool = False,
    width: int | None = None,
) -> str:
    """Return the results as a text table.

    Args:
        format: one of tabulate's: "simple", "github", "html", "latex", "latex_booktabs", …
        columns: the columns of `rows` to show, in this order; default: all that fit a page of most comparisons.
        digits: digits after the point, for all columns or by column.
        loss: adds the cost of reaching this loss, see `rows`; marks strategies that never reach it.
        network, compute: add hours; see `rows`.
        stays: see `steps_to`.
        width: the most characters in a line of a "simple" table: without columns on the right, and first without
            "seconds to simulate", if all do not fit; a line below names them. Default: no limit.

    All numbers of a column have one unit, which its heading names: "wire GB/node" or "minutes" instead of MB and hours.
    A † marks losses that do not differ significantly from the best: their p in `differences()` is above 0.05. Lines
    below say if one seed allows no test, if seeds differ, and which strategies have runs without a result. A LaTeX
    table is a float with a caption, the label tab:comparison and the notes below; the best is in bold, and numbers
    are aligned at their points.

    Raises:
        ValueError: there is no such column, or `width` is not a positive whole number.
    """
    if width is not None:
        whole_number("width", width)
    order, title = comparison.order, comparison.loss_title
    asked = Asked.of(comparison, loss, network, compute, stays=stays)
    shown, known = numbers(asked), columns_of(asked)
    without, at = diverged(comparison), measured_at(comparison)
    missed = {} if loss is None else never(comparison, loss, stays)
    for name, row in zip(order, shown, strict=True):
        if name in without:
            row[title] = without[name]
        elif not any(run.ended for run in comparison.runs(name)) and not row["note"].endswith(f" step {at[name]}"):
            row["note"] += f" (loss of step {at[name]})" if at[name] else " (no loss yet)"
        if name in missed:
            row |= {column.name: missed[name] for column in known if column.is_to_loss}
        if comparison.sampled:
            row["validated on"] = ", ".join(dict.fromkeys(h.validated_on for h in comparison.histories[name]))
    has_loss = columns is None or (isinstance(columns, list | tuple) and title in columns)
    marks: Marks | None = None
    if len(comparison) > 1 and has_loss:
        found, remarks = compare_finals(comparison)
        best, others = ({order.index(name) for name in names} for names in (found.best, found.undecided))
        marks = Marks(title, best, others, legend(found), remarks)
    notes = [*budgeted(comparison), *([*tuning(comparison), *unformed(comparison)] if has_loss else [])]
    notes += drawn_note(comparison, network, compute)
    notes += [*(noise(comparison, stays) if loss is not None else []), *resized(comparison)]
    titles = list(comparison.labels(order[0])) if order else []
    on_demand = [column.name for column in known if not column.shown(comparison)]
    return text_table(shown, format, titles, columns, digits, marks, notes, comparison.title, on_demand, width, known)


# Notes below a table; each is a list of one text, or empty ------------------------------------------------------------


def budgeted(runs: Runs) -> list[str]:
    """Return a note on the budget."""
    if not runs.budget:
        return []
    said = runs.limits
    size = f", priced for {in_short(float(said['at']))} parameters" if "at" in said else ""
    most = f", at most {said['max_steps']:,} steps" if "max_steps" in said else ""
    found = " and ".join(amount_text(of, own) for of, own in runs.budget.items())
    return [f"budget of each run: {found}{size}{most}"]


def drawn_note(runs: Runs, network: AnyNetwork, compute: AnyCompute) -> list[str]:
    """Return a note on hours of a compute that varies."""
    priced = runs.pricing(network, compute)
    if priced is None or not priced[1].varies:
        return []
    return [f"time: median and 10th to 90th percentile of {DRAWS} draws of {priced[1]!r}; others: the draw of its seed"]


def tuning(runs: Runs) -> list[str]:
    """Return a note on the strategies that were tuned, with their numbers of settings."""
    own = quoted(name for name in runs if name in runs.tuned)
    tuned = [f"{said} ({len(runs.tuned[name])} settings)" for name, said in own.items()]
    others = list(quoted(name for name in runs if name not in runs.tuned).values())
    return [f"tuned: {brief_list(tuned)}" + (f"; not tuned: {brief_list(others)}" if others else "")] if tuned else []


def unformed(runs: Runs) -> list[str]:
    """Return a note on final losses of global models that no node holds."""
    own = {name: [run.history for run in sound(runs.runs(name))] for name in runs.order}
    names = [n for n, has in own.items() if any(not h.formed.all() and h.last("global_formed") == 0 for h in has)]
    if not names:
        return []
    size = size_text(max(forming_bytes(h, "wire", runs.allreduce_bytes) for name in names for h in own[name]))
    each = "client" if runs.of_clients else "node"
    how = f"loss of the averaged model; averaging would cost another {size}/{each}"
    return [f"{brief_list([*quoted(names).values()])}: {how}"]


def resized(runs: Runs) -> list[str]:
    """Return a note on strategies that compress differently at the size priced by `at` than at the trained size."""
    found = {}
    for name in runs.order:
        measured, priced = runs[name].measured_less, times_less(runs, runs[name])
        if measured is not None and abs(priced / measured - 1) > _ALIKE:  # False for NaN
            found[name] = f"{measured:.3g}× fewer bytes at the trained size, {priced:.3g}× at the priced size"
    said = [f"{name} {found[own]}" for own, name in quoted(found).items()]
    return [f"compression depends on the model's size: {brief_list(said)}"] if said else []
