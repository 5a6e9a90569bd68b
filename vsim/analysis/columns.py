"""The columns of a comparison's table: a record each, from which rows, tables, files and the page are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vsim.analysis.asked import Asked
from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.on_clients import Clients, on_clients
from vsim.analysis.result import Result
from vsim.analysis.tables import COUNT, DOLLARS, HOURS, MEGABYTES, NUMBER, SECONDS, SHARE, TIMES, Heading, Measure
from vsim.cluster.traffic import traffic
from vsim.history.history import CONSENSUS

Floats = NDArray[np.float64]


def _always(_: Asked) -> bool:
    return True


def _shown(_: Runs) -> bool:
    return True


def _on_demand(_: Runs) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Column(Heading):
    """A column: what computes it from a run, where it is, and how it is shown (see `Heading`).

    Attributes:
        of: returns the number of one run. With several seeds, a row has the mean.
        when: whether a table has the column, given what was asked of it.
        shown: whether a text table has it unasked, given the comparison; otherwise `columns=` names it, and the page
            has it under "all columns", if it needs no `loss`.
        scales: whether the number grows in proportion to the model, as bytes do: the page's slider multiplies it.
        is_to_loss: whether it is there only for a `loss`. The title has "{loss}" then, a row is the mean over all runs
            that began, and a strategy that never reaches the loss has a word instead.
        is_priced: whether it is there only with a network and compute.
        is_live: whether the page computes it where its sliders stand: `priced` in script/prices.js does.
        is_at_end: whether the last row of each run in `to_pandas` and CSV has it, too.
    """

    of: Callable[[Result], float]
    when: Callable[[Asked], bool] = _always
    shown: Callable[[Runs], bool] = _shown
    scales: bool = False
    is_to_loss: bool = False
    is_priced: bool = False
    is_live: bool = False
    is_at_end: bool = False

    def is_in(self, asked: Asked) -> bool:
        """Return whether a table has the column."""
        if (self.is_to_loss and asked.loss is None) or (self.is_priced and asked.priced is None):
            return False
        return self.when(asked)

    def to(self, loss: float | str | None) -> Column:
        """Return the column with this loss in its title."""
        if not self.is_to_loss:
            return self
        return replace(self, title=self.title.replace("{loss}", loss if isinstance(loss, str) else f"{loss:g}"))


def _client_columns(what: str, title: str, measure: Measure, digits: int | None, percentile: str) -> list[Column]:
    """Return the columns on the clients' "losses" or "accuracies"; of both, a table has the accuracies."""

    def is_shown(asked: Asked) -> bool:
        return what in asked.on_clients and (what == "accuracies" or "accuracies" not in asked.on_clients)

    def is_of_attack(asked: Asked) -> bool:
        return is_shown(asked) and "attacked" in asked.on_clients

    numbers: list[tuple[str, Callable[[Clients], float], Callable[[Asked], bool]]] = [
        ("", lambda clients: float(clients.values.mean()), is_shown),
        (f", {percentile} percentile", Clients.percentile, is_shown),
        (", worst tenth", Clients.worst_tenth, is_shown),
        (", worst", lambda clients: float(clients.worst_first[0]), is_shown),
        (", deviation", lambda clients: float(clients.values.std()), is_shown),
        (", Gini", Clients.gini, is_shown),
        (", honest", lambda clients: clients.mean_of(attackers=False), is_of_attack),
        (", attackers", lambda clients: clients.mean_of(attackers=True), is_of_attack),
    ]
    return [
        Column(
            f"client {title}{which}",
            measure,
            digits,
            of=partial(on_clients, what, of),
            when=when,
            shown=_on_demand,
            is_at_end=True,
        )
        for which, of, when in numbers
    ]


# The columns ----------------------------------------------------------------------------------------------------------


def _measured(column: str, when: Callable[[Asked], bool] = _always) -> Callable[[Asked], bool]:
    """Return whether some run has measured a column of `History`, as a function of what was asked."""
    return lambda asked: when(asked) and asked.runs.has(column)


def _unless_diverged(column: str) -> Callable[[Result], float]:
    return lambda result: math.nan if result.run.diverged_at is not None else result.last(column)


def _is_of_nodes(asked: Asked) -> bool:
    return not asked.of_clients


def _is_of_clients(asked: Asked) -> bool:
    return asked.of_clients


def _is_validated(asked: Asked) -> bool:
    return asked.is_validated


def _has_unequal_steps(runs: Runs) -> bool:
    return len({history.config.get("max_steps") for history in runs.all_histories}) > 1 or bool(runs.budget)


def _per_point(result: Result) -> float:
    """Return the megabytes on the wire for each percentage point of the final accuracy; NaN without any."""
    points = 100 * result.accuracy
    return result.wire_bytes / 1e6 / points if points else math.nan


def times_less(runs: Runs, run: ComparedRun) -> float:
    """Return AllReduce's bytes on the wire in the steps of a run, divided by the run's; NaN if the run sent nothing."""
    of_one_step = traffic("all_reduce", run.history.num_nodes, run.ledger.server)
    steps = run.history.last("step")
    if runs.of_clients:
        sent, of_allreduce = run.ledger.total_wire_bytes, float(of_one_step.total)
    else:
        sent, of_allreduce = run.history.last("wire_bytes"), float(of_one_step.busiest)
    return of_allreduce * (runs.allreduce_bytes * steps) / sent if sent else math.nan


COLUMNS: tuple[Column, ...] = (
    Column("validation loss", digits=4, of=lambda result: result.loss, when=_is_validated),
    Column("training loss", digits=4, of=lambda result: result.loss, when=lambda asked: not asked.is_validated),
    Column(
        "perplexity",
        of=lambda result: math.inf if result.loss >= 700 else math.exp(result.loss),
        shown=_on_demand,
    ),
    Column("accuracy", SHARE, of=lambda result: result.accuracy, when=_measured("global_accuracy", when=_is_validated)),
    Column("consensus distance", digits=4, of=_unless_diverged(CONSENSUS), when=_measured(CONSENSUS), shown=_on_demand),
    Column("test loss", digits=4, of=_unless_diverged("test_loss"), when=_measured("test_loss")),
    Column("test accuracy", SHARE, of=_unless_diverged("test_accuracy"), when=_measured("test_accuracy")),
    *_client_columns("accuracies", "accuracy", SHARE, None, "10th"),
    *_client_columns("losses", "loss", NUMBER, 4, "90th"),
    Column("steps", COUNT, of=lambda result: result.steps, shown=_has_unequal_steps),
    Column(
        "wire {unit}/client", MEGABYTES, of=lambda result: result.wire_bytes / 1e6, when=_is_of_clients, scales=True
    ),
    Column(
        "payload {unit}/client",
        MEGABYTES,
        of=lambda result: float(result.run.ledger.node_payload_bytes.mean()) / 1e6,
        when=_is_of_clients,
        shown=_on_demand,
        scales=True,
    ),
    Column(
        "busiest client {unit}",
        MEGABYTES,
        of=lambda result: result.run.ledger.wire_bytes / 1e6,
        when=_is_of_clients,
        shown=_on_demand,
        scales=True,
    ),
    Column(
        "server {unit}",
        MEGABYTES,
        of=lambda result: result.run.ledger.server_wire_bytes / 1e6,
        when=_is_of_clients,
        scales=True,
    ),
    Column("wire {unit}/node", MEGABYTES, of=lambda result: result.wire_bytes / 1e6, when=_is_of_nodes, scales=True),
    Column(
        "payload {unit}/node",
        MEGABYTES,
        of=lambda result: result.last("payload_bytes") / 1e6,
        when=_is_of_nodes,
        shown=_on_demand,
        scales=True,
    ),
    Column("fewer bytes than AllReduce", TIMES, of=lambda result: times_less(result.asked.runs, result.run)),
    Column(
        "{unit} per accuracy point",
        MEGABYTES,
        of=_per_point,
        when=_measured("global_accuracy", when=_is_validated),
        shown=_on_demand,
        scales=True,
        is_at_end=True,
    ),
    Column("{unit} to simulate", SECONDS, digits=1, of=lambda result: result.last("seconds"), is_first_out=True),
    Column(
        "validation {unit}",
        SECONDS,
        digits=1,
        of=lambda result: result.last("validation_seconds"),
        when=_is_validated,
        shown=_on_demand,
    ),
    Column("steps to {loss}", COUNT, of=lambda result: result.at_loss.step, is_to_loss=True, is_live=True),
    Column(
        "wire {unit} to {loss}",
        MEGABYTES,
        of=lambda result: result.to_loss("wire") / 1e6,
        scales=True,
        is_to_loss=True,
        is_live=True,
    ),
    Column("{unit}", HOURS, of=lambda result: result.seconds / 3600, is_priced=True, is_live=True),
    *(  # a text table has them in the cell of the hours
        Column(
            f"{{unit}} {end}",
            HOURS,
            of=lambda result, place=place: result.percentile(place) / 3600,  # type: ignore[misc]
            when=lambda asked: asked.priced is not None and asked.priced[1].varies,
            shown=_on_demand,
            is_priced=True,
        )
        for end, place in (("low", 0), ("high", 2))
    ),
    Column(
        "utilization",
        SHARE,
        of=lambda result: result.timeline.utilization if result.timeline else math.nan,
        is_priced=True,
        is_live=True,
    ),
    Column(
        "dollars",
        DOLLARS,
        of=lambda result: result.dollars,
        when=lambda asked: asked.priced is not None and asked.priced[1].dollars_per_hour is not None,
        is_priced=True,
        is_live=True,
    ),
    Column(
        "{unit} to {loss}",
        HOURS,
        unit_of="hours",
        of=lambda result: result.to_loss("time") / 3600,
        is_to_loss=True,
        is_priced=True,
        is_live=True,
    ),
    *(
        Column(
            f"{of} used",
            SHARE,
            of=lambda result, of=of: result.used(of),  # type: ignore[misc]
            when=lambda asked, of=of: of in asked.runs.budget,  # type: ignore[misc]
            is_priced=of in ("time", "cost"),
        )
        for of in ("wire", "time", "cost", "examples")
    ),
)


def columns_of(asked: Asked) -> list[Column]:
    """Return the columns of the table of what was asked, in their order."""
    return [column.to(asked.loss) for column in COLUMNS if column.is_in(asked)]


def headings(*names: str) -> list[Heading]:
    """Return columns by their names, for tables of other numbers."""
    by_name = {column.name: column for column in COLUMNS}
    return [by_name[name] for name in names]
