"""The columns of a comparison's table: a record each, from which rows, tables, files and the page are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.crossings import crossing_of
from vsim.analysis.losses import final_loss
from vsim.analysis.spent import Priced, amount, until
from vsim.analysis.tables import COUNT, DOLLARS, HOURS, MEGABYTES, NUMBER, SECONDS, SHARE, TIMES, Heading, Measure
from vsim.cluster.traffic import traffic
from vsim.history.history import CONSENSUS
from vsim.history.reached import Crossing
from vsim.network import Timeline

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Asked:
    """What was asked of a table, which says which columns it has.

    Attributes:
        runs: the comparison. loss: the target of the columns to a loss. stays: see `Comparison.steps_to`.
        priced: the network and compute from which hours are derived.
    """

    runs: Runs
    loss: float | None = None
    stays: bool = False
    priced: Priced = None

    @cached_property
    def is_validated(self) -> bool:
        """Whether the loss that is compared is of validation."""
        return self.runs.loss_column == "global_loss"

    @cached_property
    def of_clients(self) -> bool:
        """Whether cohorts of a larger population trained."""
        return self.runs.of_clients

    @cached_property
    def on_clients(self) -> frozenset[str]:
        """What some run measured on each client's own data: "losses", "accuracies", "attacked"."""
        return frozenset().union(*(history.measured_on_clients for history in self.runs.all_histories))

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the table, in their order."""
        return tuple(column.to(self.loss) for column in COLUMNS if column.is_in(self))

    def of(self, run: ComparedRun) -> Result:
        """Return what the columns of a run are computed from."""
        return Result(self, run)


@dataclass(frozen=True, eq=False)
class Result:
    """A run as columns read it; what several of them need is computed once."""

    asked: Asked
    run: ComparedRun

    def last(self, column: str) -> float:
        """Return the last value of a column of the run's `History`; NaN if there is none."""
        return self.run.history.last(column)

    @cached_property
    def loss(self) -> float:
        """The final loss; NaN for a run that diverged."""
        return final_loss(self.asked.runs, self.run)

    @property
    def accuracy(self) -> float:
        """The last accuracy of a run with a final loss."""
        return math.nan if math.isnan(self.loss) else self.last("global_accuracy")

    @property
    def steps(self) -> int:
        """The completed steps."""
        return int(self.last("step")) if len(self.run.history) else 0

    @property
    def wire_bytes(self) -> float:
        """The bytes on the wire of the busiest node; for cohorts, of a client on average, whatever was drawn."""
        if self.asked.of_clients:
            return self.run.ledger.total_wire_bytes / self.run.ledger.num_nodes
        return self.last("wire_bytes")

    @cached_property
    def at_loss(self) -> Crossing:
        """Where the run reaches the loss that was asked for."""
        assert self.asked.loss is not None
        return crossing_of(self.asked.runs, self.run, self.asked.loss, self.asked.stays)

    def to_loss(self, of: str) -> float:
        """Return the cost of the loss that was asked for, see `vsim.analysis.spent.spent`."""
        return until(self.run.history, self.at_loss, self.asked.runs.spent(self.run, of, self.asked.priced))

    @cached_property
    def timeline(self) -> Timeline | None:
        """The times of the steps on the network; None for a run that was interrupted before the first."""
        assert self.asked.priced is not None
        return self.run.history.time(*self.asked.priced) if self.steps else None

    @property
    def seconds(self) -> float:
        """The time on the network."""
        return float(self.timeline.seconds[-1]) if self.timeline else math.nan

    @property
    def dollars(self) -> float:
        """The cost of all nodes."""
        return self.timeline.dollars if self.timeline else math.nan

    def used(self, of: str) -> float:
        """Return the share of a budget that the run used."""
        ledger = self.run.ledger
        costs: dict[str, Callable[[], float]] = {
            "wire": lambda: ledger.total_wire_bytes if self.asked.of_clients else self.wire_bytes,
            "examples": lambda: self.last("examples"),
            "time": lambda: self.seconds,
            "cost": lambda: self.dollars,
        }
        return costs[of]() / amount(of, self.asked.runs.budget[of], "budget")


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
        shown: whether a text table shows it if it was not asked for by name, given the comparison; the page then has it
            among all others.
        scales: whether the number grows in proportion to the model, as bytes do: the page's slider multiplies it.
        is_to_loss: whether it is there only for a `loss`. The title has "{loss}" then, a row is the mean over all runs
            that began, and a strategy that never reaches the loss has a word instead.
        is_priced: whether it is there only with a network and compute.
        is_live: whether the page computes it where its sliders stand: `priced` in page.js does.
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


# Numbers on clients ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Clients:
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


def _on_clients(what: str, of: Callable[[_Clients], float], result: Result) -> float:
    """Return a number on the clients' "losses" or "accuracies"; NaN for a run that diverged or measured none."""
    history, is_accuracy = result.run.history, what == "accuracies"
    values = history.client_val_accuracies if is_accuracy else history.client_val_losses
    known = ~np.isnan(values)  # leave out clients without a label that counts
    if not known.any() or result.run.diverged_at is not None:
        return math.nan
    attacked = history.attacked_clients if len(history.attacked_clients) else np.zeros(len(values), dtype=bool)
    return of(_Clients(values[known], attacked[known], is_accuracy))


def _client_columns(what: str, title: str, measure: Measure, digits: int | None, percentile: str) -> list[Column]:
    """Return the columns on the clients' "losses" or "accuracies"; of both, a table has the accuracies."""

    def is_shown(asked: Asked) -> bool:
        return what in asked.on_clients and (what == "accuracies" or "accuracies" not in asked.on_clients)

    def is_of_attack(asked: Asked) -> bool:
        return is_shown(asked) and "attacked" in asked.on_clients

    numbers: list[tuple[str, Callable[[_Clients], float], Callable[[Asked], bool]]] = [
        ("", lambda clients: float(clients.values.mean()), is_shown),
        (f", {percentile} percentile", _Clients.percentile, is_shown),
        (", worst tenth", _Clients.worst_tenth, is_shown),
        (", worst", lambda clients: float(clients.worst_first[0]), is_shown),
        (", deviation", lambda clients: float(clients.values.std()), is_shown),
        (", Gini", _Clients.gini, is_shown),
        (", honest", lambda clients: clients.mean_of(attackers=False), is_of_attack),
        (", attackers", lambda clients: clients.mean_of(attackers=True), is_of_attack),
    ]
    return [
        Column(
            f"client {title}{which}",
            measure,
            digits,
            of=partial(_on_clients, what, of),
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


def headings(*names: str) -> list[Heading]:
    """Return columns by their names, for tables of other numbers."""
    by_name = {column.name: column for column in COLUMNS}
    return [by_name[name] for name in names]
