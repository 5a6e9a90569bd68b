"""The record of a run: columns with one value per step, its configuration, and its communication."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import a_text, real_number
from vsim.cluster.ledger import Ledger
from vsim.history.formats import holding_a_record, read_json, write_csv, write_json
from vsim.history.reached import Crossing, crossing
from vsim.network import Compute, Network, Timeline, timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

CONSENSUS = "consensus_distance"
ACCURACIES = ("local_accuracy", "global_accuracy")
VALIDATED = (
    *("local_loss", "global_loss", "average_loss", "node_loss_min", "node_loss_max", "node_loss_std"),
    *(CONSENSUS, *ACCURACIES, "global_loss_se", "global_formed", "val_examples", "val_total"),
)
TESTED = ("test_loss", "test_accuracy")
SPREAD = ("divergence", "correlation")
COLUMNS = (
    *("step", "examples", "tokens", "train_loss", "lr", "payload_bytes", "wire_bytes"),
    *("seconds", "validation_seconds", "memory_bytes", *VALIDATED, *SPREAD, *TESTED),
)
_MOST_NEW_ROWS = 64
# Columns about the machine, not the training; they differ from run to run.
OF_THE_MACHINE = ("seconds", "validation_seconds", "memory_bytes")


class History:
    """One row per step, the first for step 0, before training. Values not measured at a step are NaN.

    Besides the columns below, a record has the `metrics` of `fit` by their names, measured on the global model, and
    columns that a strategy of your own adds (`measured` of its modules).

    Columns:
        step: completed optimizer steps. examples: examples that all nodes have trained on so far.
        tokens: token ids that all nodes have trained on so far, if batches hold token ids; see
            `vsim.data.batches.sizes_of`.
        train_loss: mean over the nodes of the losses of their batches at this step. lr: the inner learning rate used.
        payload_bytes, wire_bytes: bytes communicated so far by the busiest node.
        seconds: wall-clock time of training so far. validation_seconds: time of validation, which is not in `seconds`.
        memory_bytes: device memory that the training process holds (with a process per node, node 0's process); on the
            CPU, the resident set. It is read at most every 50 ms.
        local_loss: validation loss of node 0. global_loss: validation loss of the global model, which is the strategy's
            own (DiLoCo's outer weights) or the mean replica. average_loss: validation loss of the mean replica.
        node_loss_min, node_loss_max, node_loss_std: range and standard deviation of the nodes' validation losses.
        local_accuracy, global_accuracy: validation accuracy of node 0 and of the global model, if known; see the
            argument `accuracy` of `fit`.
        global_loss_se: standard error of global_loss over the validation examples, at the last step. NaN if the loss is
            not a mean over examples.
        global_formed: 1 if the global model exists, on a node or a server; 0 if it is the mean of nodes that differ,
            which only one more all-reduce of the weights would form.
        val_examples: validation examples used. val_total: validation examples in the dataset.
        test_loss, test_accuracy: results of the global model on the `test_dataset`, at the last step only.
        divergence: root mean square distance of the replicas from their mean, relative to the mean's length.
        consensus_distance: root mean square distance of the replicas from their mean, sqrt(mean_k |θ_k − θ̄|²), at every
            validation of gossip and other strategies whose nodes meet few others.
        correlation: mean Pearson correlation of the weights over pairs of nodes.
        epsilon: the privacy that `DPFedAvgStrategy` has spent.
        clock_seconds: virtual time of an asynchronous run; its train_loss is of the workers' last local steps.
        compute_seconds: compute time of a node in an asynchronous run so far, averaged over the nodes.

    Attributes:
        ledger: the record of communication; see `Ledger`.
        config: the configuration as JSON: every argument of `fit`, model, data, versions, machine and date; see
            `vsim.history.describe`. Empty until the run ends.
        executor: the executor of the last step. executor_reason: why it was chosen.
        minibatch_size: examples per node at once; None: the whole batch.

    `history["train_loss"]` is a column as a numpy array of float64. `node_losses` is (T, K), row t − 1 for step t.
    `client_val_losses` and `client_val_accuracies` (N,) measure the model that each client uses after the last step, on
    the client's part of `client_val_dataset`; empty if not measured.
    """

    def __init__(self, strategy: str = "", num_nodes: int = 1, population: int | None = None) -> None:
        self.strategy = strategy
        self.num_nodes = num_nodes
        self.ledger = Ledger(population or num_nodes, of_clients=population is not None and population > num_nodes)
        self.executor = ""
        self.executor_reason = ""
        self.minibatch_size: int | None = None
        self.config: dict[str, Any] = {}
        self._table: dict[str, list[float]] = {name: [] for name in COLUMNS}
        self._losses: list[NDArray[np.float64]] = []
        self._client_val: dict[str, list[float]] = {}
        self._new: list[tuple[Mapping[str, float], Sequence[float] | None]] = []  # rows not yet added to the columns

    def append(self, row: Mapping[str, float], node_losses: Sequence[float] | None = None) -> None:
        """Add the row of a step; `node_losses` (K,) are the nodes' training losses, absent for step 0.

        Rows are converted to columns only when they are read or become many, so that training does not wait for the
        conversion.
        """
        self._new.append((row, node_losses))
        self._client_val = {}  # measured after the last step only
        for name in ("global_loss_se", *TESTED):
            if self._table[name]:
                self._table[name][-1] = math.nan
        self.ledger.steps = int(row["step"])
        if len(self._new) >= _MOST_NEW_ROWS:
            self._take_in()

    def amend(self, row: Mapping[str, float], client_val: Mapping[str, Sequence[float]] | None = None) -> None:
        """Replace the values of the last row, and of `client_val_losses` and `client_val_accuracies`."""
        self._client_val = {name: list(values) for name, values in (client_val or {}).items()}
        for name, value in row.items():
            self._columns[name][-1] = float(value)

    def _take_in(self) -> None:
        new, self._new = self._new, []
        for row, node_losses in new:
            for name in row:
                if name not in self._table:
                    self._table[name] = [math.nan] * len(self._table["step"])
            for name, column in self._table.items():
                column.append(float(row.get(name, math.nan)))
            if node_losses is not None:
                self._losses.append(np.asarray(node_losses, dtype=np.float64))

    @property
    def _columns(self) -> dict[str, list[float]]:
        self._take_in()
        return self._table

    @property
    def _node_losses(self) -> list[NDArray[np.float64]]:
        self._take_in()
        return self._losses

    def with_ledger(self, ledger: Ledger) -> History:
        """Return this record with the communication of another ledger, up to this record's last step."""
        history = copy.copy(self)
        history._table = {name: list(column) for name, column in self._columns.items()}
        history.ledger = Ledger(ledger.num_nodes, ledger.of_clients)
        sent, events = [(0.0, 0.0)], iter(ledger)
        event = next(events, None)
        for step in range(int(self.last("step")) + 1):
            while event is not None and event.step <= step:
                history.ledger.record(event)
                event = next(events, None)
            sent.append((history.ledger.payload_bytes, history.ledger.wire_bytes))
        history.ledger.steps = self.ledger.steps
        for name, way in (("payload_bytes", 0), ("wire_bytes", 1)):
            history._table[name] = [sent[int(step) + 1][way] for step in history._table["step"]]
        return history

    def continue_from(self, other: History) -> None:
        """Begin with the rows of another record."""
        self._table = {name: list(column) for name, column in other._columns.items()}
        self._losses, self.executor, self._new = list(other._node_losses), other.executor, []
        self._client_val = dict(other._client_val)
        self.ledger.continue_from(other.ledger)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    @property
    def node_losses(self) -> NDArray[np.float64]:
        """(T, K): the training loss of every node at every step."""
        return np.stack(self._node_losses) if self._node_losses else np.empty((0, self.num_nodes))

    @property
    def client_losses(self) -> NDArray[np.float64]:
        """(S, N): the mean training loss of every node or client in every segment of a run with `participation`.

        A segment is a round of clients, or the steps between two changes of participation. NaN for absent nodes.
        """
        losses, attendance = self.node_losses, self.ledger.attendance
        start = self.ledger.steps - len(losses)  # a fork's record begins at the fork
        found = np.full((len(attendance), self.ledger.num_nodes), math.nan)
        for own, segment in zip(found, attendance, strict=True):
            rows = losses[max(0, segment.first - 1 - start) : segment.last - start]
            means = mean_present(rows)
            if len(means) == len(own):
                own[:] = means
            else:  # a cohort's losses are in the order of its clients
                own[list(segment.nodes)] = means[: len(segment.nodes)]
        return found

    @property
    def measured_on_clients(self) -> frozenset[str]:
        """The quantities measured on each client's own data: "losses", "accuracies", both or none."""
        return frozenset(name for name, values in self._client_val.items() if values)

    @property
    def client_val_losses(self) -> NDArray[np.float64]:
        """(N,): the loss of each client's model after the last step on the client's data; empty if not measured."""
        return np.asarray(self._client_val.get("losses", ()), dtype=np.float64)

    @property
    def attacked_clients(self) -> NDArray[np.bool_]:
        """Which clients attacked, (N,); empty without an attack, or if clients were not measured."""
        return np.asarray(self._client_val.get("attacked", ()), dtype=bool)

    @property
    def client_val_accuracies(self) -> NDArray[np.float64]:
        """(N,): the accuracy of each client's model on the client's data; empty if not measured or unknown."""
        return np.asarray(self._client_val.get("accuracies", ()), dtype=np.float64)

    @property
    def is_of_cohorts(self) -> bool:
        """Whether the nodes served a larger population of clients."""
        return self.ledger.of_clients

    def bytes_per_node(self, way: str) -> NDArray[np.float64]:
        """Return the bytes that a node has communicated up to every row, as shown in tables and figures.

        These are the bytes of the busiest node. For cohorts, they are the mean over all clients, which does not depend
        on the draw of clients.

        Args:
            way: "payload" or "wire".
        """
        if not self.is_of_cohorts:
            return self[f"{way}_bytes"]
        events = sorted(self.ledger, key=lambda event: event.step)
        sent = np.cumsum([0.0, *(getattr(event, f"total_{way}_bytes") for event in events)])
        found = sent[np.searchsorted([event.step for event in events], self["step"], side="right")]
        return found / self.ledger.num_nodes

    def __getitem__(self, column: str) -> NDArray[np.float64]:
        if not isinstance(column, str) or column not in self._columns:
            raise KeyError(f"no column {column!r}; there are {', '.join(self._columns)}")
        return np.asarray(self._columns[column])

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a column; all NaN if this run has no column of that name."""
        return self[name] if a_text("name", name) in self._columns else np.full(len(self), math.nan)

    def __len__(self) -> int:
        return len(self._columns["step"])

    def measured(self, *columns: str) -> tuple[NDArray[np.float64], ...]:
        """Return these columns at the steps at which all of them were measured.

        >>> history = History()
        >>> history.append({"step": 0, "global_loss": 2.0}); history.append({"step": 1})
        >>> history.measured("step", "global_loss")
        (array([0.]), array([2.]))
        """
        values = [self[name] for name in columns]
        known = ~np.isnan(np.stack(values)).any(0)
        return tuple(v[known] for v in values)

    def last(self, column: str) -> float:
        """Return the last value measured in a column, NaN if there is none."""
        (values,) = self.measured(column)
        return float(values[-1]) if len(values) else math.nan

    @property
    def validated_on(self) -> str:
        """The number of examples of the last validation, such as "360", or "2,048 of 50,000"; "" without any.

        >>> history = History()
        >>> history.append({"step": 0, "val_examples": 2048, "val_total": 50000}); history.validated_on
        '2,048 of 50,000'
        """
        used, total = self.last("val_examples"), self.last("val_total")
        if math.isnan(used):
            return ""
        return f"{used:,.0f}" if used == total or math.isnan(total) else f"{used:,.0f} of {total:,.0f}"

    def crossing(self, loss: float, of: str, stays: bool = False) -> Crossing:
        """Return the steps at which column `of` reaches a loss; between measurements the last value holds.

        An accuracy is reached from below, a loss from above.

        >>> history = History()
        >>> for step, loss in [(0, 3.0), (10, 2.0), (20, 2.5)]: history.append({"step": step, "global_loss": loss})
        >>> history.crossing(2.2, "global_loss")
        Crossing(step=10.0, formed=10.0, first=1.0)
        """
        known = ~np.isnan(self[of])
        formed = self.formed[known] if of.startswith("global_") else None
        sign, name = (-1, "accuracy") if of in ACCURACIES else (1, "loss")
        return crossing(self["step"][known], sign * self[of][known], sign * real_number(name, loss), formed, stays)

    @property
    def formed(self) -> NDArray[np.bool_]:
        """Whether the global model of every row exists (T,); see the column `global_formed`."""
        return self.column("global_formed") != 0

    def at_step(self, step: float, column: str) -> float:
        """Return the first value of a column measured at or after a step; NaN if there is none."""
        steps, values = self.measured("step", column)
        place = int(np.searchsorted(steps, step)) if not math.isnan(step) else len(steps)
        return float(values[place]) if place < len(values) else math.nan

    def time(
        self, network: Network | str | float | None = None, compute: Compute | float | str | None = None
    ) -> Timeline:
        """Return when this run would have completed its steps on a network; see `vsim.timeline`."""
        return timeline(self, network, compute)

    def plot(
        self,
        x: str = "step",
        y: str | None = None,
        ax: Axes | None = None,
        *,
        logy: bool = False,
        network: Network | str | float | None = None,
        compute: Compute | float | str | None = None,
    ) -> Axes:
        """Draw the loss of the run; see `Comparison.plot`."""
        from vsim.history.curves import bands, x_axis  # imported here, since plots use histories

        axis = x_axis(x, [self], network, compute)
        if y is None:
            y = "train_loss" if math.isnan(self.last("global_loss")) else "global_loss"
        return bands({self.strategy or "run": self}, axis, y, ax, logy=logy)

    def plot_attendance(self, ax: Axes | None = None) -> Axes:
        """Draw which nodes or clients took part in which steps of a run with `participation`, and in a panel above, how
        many took part.

        Args:
            ax: where to draw; default the axes of a new figure, of the width of a column.
        """
        from vsim.history.attendance import attendance

        return attendance(self, ax)

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with one row per step."""
        import pandas as pd  # imported here, since pandas takes half a second to load

        return pd.DataFrame(self._columns).astype({"step": int, "examples": int})

    def to_csv(self, path: str | Path) -> None:
        """Write one line per step; values that were not measured are empty fields."""
        write_csv(path, self.to_pandas())

    def to_json(self, path: str | Path) -> None:
        """Write the whole record, with `node_losses` and ledger, to a file that `from_json` reads back bitwise."""
        write_json(path, self.as_plain())

    @classmethod
    def from_json(cls, path: str | Path) -> History:
        """Read a file that `to_json` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        content = read_json(path, "History", ("columns", "node_losses"))
        with holding_a_record(path, "History"):
            return cls.from_plain(content)

    def as_plain(self) -> dict[str, Any]:
        """Return the record as dicts, lists, numbers and text, which JSON can hold."""
        return {
            "strategy": self.strategy,
            "num_nodes": self.num_nodes,
            "population": self.ledger.num_nodes,
            "executor": self.executor,
            "executor_reason": self.executor_reason,
            "minibatch_size": self.minibatch_size,
            "columns": {name: [_plain(v) for v in column] for name, column in self._columns.items()},
            "node_losses": [[_plain(v) for v in row.tolist()] for row in self._node_losses],
            "client_val": {name: [_plain(v) for v in values] for name, values in self._client_val.items()},
            "ledger": self.ledger.as_plain(),
            "config": self.config,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> History:
        """Restore the history from the output of `as_plain`. A missing column becomes NaN."""
        for name in ("strategy", "executor"):
            if not isinstance(plain[name], str):
                raise TypeError(f"{name} must be a text, got {plain[name]!r}")
        history = cls(plain["strategy"], plain["num_nodes"], plain.get("population"))
        history.executor, history.executor_reason = plain["executor"], plain.get("executor_reason", "")
        history.minibatch_size, history.config = plain.get("minibatch_size"), dict(plain.get("config", {}))
        rows = len(plain["columns"]["step"])
        for name in dict.fromkeys([*COLUMNS, *plain["columns"]]):
            history._columns[name] = [_number(v) for v in plain["columns"].get(name, [None] * rows)]
            if len(history._columns[name]) != rows:
                raise ValueError(f"column {name!r} has {len(history._columns[name])} values, and 'step' {rows}")
        steps = history["step"]
        if not (np.array_equal(steps, np.floor(steps)) and (np.diff(steps, prepend=-1) > 0).all()):
            raise ValueError(f"column 'step' must hold ascending whole numbers, got {steps}")
        history._losses = [np.array([_number(v) for v in row]) for row in plain["node_losses"]]
        if any(len(row) != history.num_nodes for row in history._node_losses):
            raise ValueError(f"node_losses does not have {history.num_nodes} values a step, one a node")
        for name, values in plain.get("client_val", {}).items():
            history._client_val[name] = [_number(v) for v in values]
            if len(values) != history.ledger.num_nodes:
                raise ValueError(f"client_val has {len(values)} {name}, and the run {history.ledger.num_nodes} clients")
        history.ledger = Ledger.from_plain(plain["ledger"], history.ledger.num_nodes, history.ledger.of_clients)
        if rows and steps[-1] != history.ledger.steps:
            raise ValueError(f"the last step is {steps[-1]:g}, and that of the ledger {history.ledger.steps}")
        return history

    @property
    def computed(self) -> str:
        """The executor and why it was chosen: "vmap, proved on nodes 0 and 15: losses 2e-07, gradients 4e-06"."""
        return ", ".join(filter(None, (self.executor, self.executor_reason)))

    def __repr__(self) -> str:
        done = int(self._columns["step"][-1]) if len(self) else 0
        return (
            f"History({self.strategy or 'run'}: {self.num_nodes} nodes, {done} steps, "
            f"train loss {self.last('train_loss'):.4f}, global loss {self.last('global_loss'):.4f}"
            f"{self.computed and f'; {self.computed}'})"
        )


def mean_present(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each node's mean loss (K,) from losses (steps, K), over its known losses; NaN for a node without any."""
    known = ~np.isnan(losses)
    sums, counts = np.where(known, losses, 0).sum(0), known.sum(0)
    return np.divide(sums, counts, out=np.full(len(sums), math.nan), where=counts > 0)


def _plain(value: float) -> float | str | None:
    """Return NaN as None, and infinities as text, because JSON has no such numbers."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return str(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 and math.copysign(1, value) > 0 else value


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)
