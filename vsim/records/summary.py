"""The results of a comparison as rows of numbers, and as a table with notes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vsim.arguments import true_or_false, whole_number
from vsim.cluster.traffic import traffic
from vsim.network.timeline import DRAWS
from vsim.network.timeline import timeline as time_of
from vsim.records.compared import ComparedRun, Runs, brief_list
from vsim.records.crossings import crossing_of, never, noise
from vsim.records.history import CONSENSUS, TESTED
from vsim.records.losses import begun, compare_finals, diverged, final_loss, legend, measured_at, note, sound
from vsim.records.spent import AnyCompute, AnyNetwork, Priced, amount, amount_text, forming_bytes, until
from vsim.records.tables import (
    CLIENT_ACCURACIES,
    CLIENT_LOSSES,
    ON_DEMAND,
    Marks,
    in_short,
    quoted,
    size_text,
    text_table,
)

_ALIKE = 0.02  # relative difference in compression up to which there is no note


def rows(
    comparison: Runs,
    loss: float | None = None,
    network: AnyNetwork = None,
    compute: AnyCompute = None,
    *,
    stays: bool = False,
) -> list[dict[str, Any]]:
    """Return one dict per strategy: the columns of the table as numbers.

    Losses are the last measured losses of the global model on the validation data or, without validation, the mean
    training loss over the last tenth of the run; NaN for a run that diverged. With several seeds, a number is the mean
    over the runs that ended (over all runs, if none ended; for costs until a loss, over all runs that began). If the
    runs differ, a column "<column> std" follows: the sample's standard deviation. Some columns:

    - fewer bytes than AllReduce: AllReduce's wire bytes in these steps, divided by the strategy's; NaN if that is 0.
    - wire and payload MB/client: for cohorts, means over all clients, next to "busiest client MB" and "server MB".
    - client accuracy: with a `client_val_dataset`, mean over clients, 10th percentile, mean of the worst tenth, and
      worst client; without accuracies, "client loss", with the 90th percentile.
    - consensus distance: of gossip, the nodes' distance from their mean at the last validation; in a table on
      demand.
      Then the deviation over clients, the Gini coefficient, and in comparisons with an `attack`, the means over honest
      clients and over attackers.
    - test loss, test accuracy: the final global model's. steps: in a table on demand, if all runs have equal numbers.
    - time used, wire used and so on: with a budget, the used shares.
    - hours: if the compute varies, the median of 32 draws, "hours low" and "hours high" the 10th and 90th percentile.

    Args:
        loss: adds the steps and wire bytes until this loss, see `steps_to`; NaN if a run never reaches it.
        network, compute: add the hours that the run would take, the share of hours in which nodes compute, and the
            hours to `loss`; see `vsim.timeline`; default: the comparison's.
        stays: see `steps_to`.
    """
    if true_or_false("stays", stays) and loss is None:
        raise TypeError("stays=True has no effect without loss=")
    priced, found = comparison.pricing(network, compute), []
    known = [column for column in ("global_accuracy", CONSENSUS, *TESTED) if comparison.has(column)]
    for name in comparison.order:
        runs = comparison.runs(name)
        numbers = {run: _numbers(comparison, run, known, loss, stays, priced) for run in runs}
        row: dict[str, Any] = {**comparison.labels(name)}
        for column in numbers[runs[0]]:
            to_loss = loss is not None and column.endswith(f" to {loss:g}")
            values = [numbers[run][column] for run in (begun(runs) if to_loss else sound(runs))]
            row[column] = statistics.fmean(values)
            if len(set(values)) > 1 and all(map(math.isfinite, values)):
                row[f"{column} std"] = statistics.stdev(values)
        if not all(run.ended for run in comparison.all_runs):
            row["note"] = note(comparison, name)
        found.append(row)
    return found


def _numbers(
    runs: Runs, run: ComparedRun, known: Sequence[str], target: float | None, stays: bool, priced: Priced
) -> dict[str, float]:
    """Return the columns of the table for one run, in their order; `known` lists the optional columns to include."""
    history, ledger, validated = run.history, run.ledger, runs.loss_column == "global_loss"
    steps, loss = int(history.last("step")) if len(history) else 0, final_loss(runs, run)
    found = {runs.loss_title: loss, "perplexity": math.inf if loss >= 700 else math.exp(loss)}
    if validated and "global_accuracy" in known:
        found["accuracy"] = math.nan if math.isnan(loss) else history.last("global_accuracy")
    for column in filter(known.__contains__, (CONSENSUS, *TESTED)):
        found[column.replace("_", " ")] = math.nan if run.diverged_at is not None else history.last(column)
    found |= on_clients(runs, run)
    found["steps"] = steps
    if runs.of_clients:  # the busiest client's bytes depend on the draw of clients; the mean does not
        sent = ledger.total_wire_bytes / ledger.num_nodes
        found |= {"wire MB/client": sent / 1e6, "payload MB/client": float(ledger.node_payload_bytes.mean()) / 1e6}
        found |= {"busiest client MB": ledger.wire_bytes / 1e6, "server MB": ledger.server_wire_bytes / 1e6}
    else:
        sent = history.last("wire_bytes")
        found |= {"wire MB/node": sent / 1e6, "payload MB/node": history.last("payload_bytes") / 1e6}
    found["fewer bytes than AllReduce"] = times_less(runs, run)
    found["seconds to simulate"] = history.last("seconds")
    if validated:
        found["validation seconds"] = history.last("validation_seconds")
    if target is not None:
        at = crossing_of(runs, run, target, stays)
        found[f"steps to {target:g}"] = at.step
        found[f"wire MB to {target:g}"] = until(history, at, runs.spent(run, "wire")) / 1e6
    used = {"wire": ledger.total_wire_bytes if runs.of_clients else sent, "examples": history.last("examples")}
    if priced is not None:
        timeline = history.time(*priced) if steps else None  # None: interrupted before the first step
        found["hours"] = float(timeline.seconds[-1]) / 3600 if timeline else math.nan
        if timeline and priced[1].varies and not ledger.clock:
            drawn = time_of(history.ledger, *priced, quantiles=(0.1, 0.5, 0.9)).quantiles
            low, found["hours"], high = (float(own[-1]) / 3600 for own in drawn.values())
            found |= {"hours low": low, "hours high": high}
        found["utilization"] = timeline.utilization if timeline else math.nan
        used |= {"time": 3600 * found["hours"], "cost": timeline.dollars if timeline else math.nan}
        if priced[1].dollars_per_hour is not None:
            found["dollars"] = used["cost"]
        if target is not None:
            found[f"hours to {target:g}"] = until(history, at, runs.spent(run, "time", priced)) / 3600
    budget = {of: amount(of, most, "budget") for of, most in runs.budget.items() if of in used}
    return found | {f"{of} used": used[of] / most for of, most in budget.items()}


def on_demand(runs: Runs) -> list[str]:
    """Return the columns that a table of these runs shows only on request."""
    lengths = {history.config.get("max_steps") for history in runs.all_histories}
    return [*ON_DEMAND, *([] if len(lengths) > 1 or runs.budget else ["steps"])]


def times_less(runs: Runs, run: ComparedRun) -> float:
    """Return AllReduce's bytes on the wire in the steps of a run, divided by the run's; NaN if the run sent nothing."""
    of_one_step = traffic("all_reduce", run.history.num_nodes, run.ledger.server)
    steps = run.history.last("step")
    if runs.of_clients:
        sent, of_allreduce = run.ledger.total_wire_bytes, float(of_one_step.total)
    else:
        sent, of_allreduce = run.history.last("wire_bytes"), float(of_one_step.busiest)
    return of_allreduce * (runs.allreduce_bytes * steps) / sent if sent else math.nan


def on_clients(runs: Runs, run: ComparedRun) -> dict[str, float]:
    """Return the columns on the performance of each client's model on its data; empty if no run measured it."""
    measured, history = frozenset().union(*(one.measured_on_clients for one in runs.all_histories)), run.history
    if "accuracies" in measured:
        titles, values, sign = CLIENT_ACCURACIES, history.client_val_accuracies, 1
    elif "losses" in measured:
        titles, values, sign = CLIENT_LOSSES, history.client_val_losses, -1
    else:
        return {}
    titles = titles if "attacked" in measured else titles[:-2]
    if not len(values) or np.isnan(values).all() or run.diverged_at is not None:
        return dict.fromkeys(titles, math.nan)
    known = ~np.isnan(values)  # leave out clients without a label that counts
    bad = history.attacked_clients if len(history.attacked_clients) else np.zeros(len(values), dtype=bool)
    of_kind = [float(values[known & kind].mean()) if (known & kind).any() else math.nan for kind in (~bad, bad)]
    values = values[known]
    ordered = sign * np.sort(sign * values)  # the worst client first
    worst = ordered[: math.ceil(len(values) / 10)]
    percentile = np.percentile(values, 10 if sign > 0 else 90)
    n = len(values)
    gini = float(np.sort(values) @ (2 * np.arange(n) - n + 1)) / (n * values.sum()) if values.any() else 0.0
    numbers = (values.mean(), percentile, worst.mean(), ordered[0], values.std(), gini, *of_kind)
    return dict(zip(titles, map(float, numbers), strict=False))


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
        columns: the columns of `rows` to show, in this order; default: all but some, see `on_demand`.
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
    shown = rows(comparison, loss, network, compute, stays=stays)
    without, at = diverged(comparison), measured_at(comparison)
    missed = {} if loss is None else never(comparison, loss, stays)
    for name, row in zip(order, shown, strict=True):
        if name in without:
            row[title] = without[name]
        elif not any(run.ended for run in comparison.runs(name)) and not row["note"].endswith(f" step {at[name]}"):
            row["note"] += f" (loss of step {at[name]})" if at[name] else " (no loss yet)"
        if name in missed:
            row |= {key: missed[name] for key in row if key.endswith(f" to {loss:g}")}
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
    return text_table(
        shown, format, titles, columns, digits, marks, notes, comparison.title, on_demand(comparison), width
    )


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
