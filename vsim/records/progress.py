"""Reports of steps, the recorder that turns them into a history, and the display of progress."""

from __future__ import annotations

import io
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.cluster.ledger import Event
from vsim.cluster.plan import Segment
from vsim.figures.style import literal, styled
from vsim.records.history import History
from vsim.records.plots import (
    COLOURS,
    LEGEND,
    X_AXES,
    Y_LABELS,
    Look,
    Looks,
    XAxis,
    last_of_equal,
    legend_columns,
    limits,
    looks_of,
    mean_over_seeds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    Curve = tuple[NDArray[np.float64], NDArray[np.float64]]

Hook = Callable[[int, float], Any]


@dataclass
class StepReport:
    """The report of a step: the row of the history, the nodes' losses (K,), the events of the ledger.

    `executor`, `max_steps` and `minibatch_size` (None: the whole batch) are the run's. `segment` lists the nodes that
    take part, unless all nodes take part in all steps. `preparing` names long work that precedes the next step.
    `client_val` holds the global model's "losses" (N,) on the clients' data, and "accuracies" (N,) if known.
    """

    row: Mapping[str, float]
    node_losses: Sequence[float] | None
    events: Sequence[Event]
    executor: str
    max_steps: int
    minibatch_size: int | None = None
    executor_reason: str = ""
    segment: Segment | None = None
    preparing: str = ""
    amends: bool = False  # whether the row replaces the last reported one
    client_val: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def has_sent(self) -> bool:
        """Whether nodes have communicated in this step; nodes that join or begin a round do so before it."""
        step = self.row["step"]
        return any(event.step == step and event.moment != "start" for event in self.events)


@dataclass(eq=False)
class Recorder:
    """Records reports in a history, and shows progress. After an interrupt, the recorded steps remain.

    Attributes:
        history: gets one row per step.
        progress: True or "table" for a progress bar ("table" is for several runs), "plot" for a figure in the notebook.
        description: the text of the bar.
    """

    history: History
    progress: bool | str = False
    description: str = ""

    def __post_init__(self) -> None:
        self.odd_validation: int | None = None  # the first step whose validation loss was not finite
        self.has_warned = False
        self.bar: Any = None
        own = {self.description: [self.history]}
        self.live = LiveRace(own, self.description) if self.progress == "plot" else None

    def __call__(self, report: StepReport) -> None:
        row = report.row
        if report.amends:
            self.history.amend(row, report.client_val)
            return
        self._note_validation(row)
        self.history.executor, self.history.executor_reason = report.executor, report.executor_reason
        self.history.minibatch_size = report.minibatch_size
        self.history.append(row, report.node_losses)
        self._advance(int(row["step"]), report)

    def _note_validation(self, row: Mapping[str, float]) -> None:
        """Warn about a non-finite validation loss, unless the next step's training loss is not finite, either."""
        self._warn_of_validation()
        losses = [row[name] for name in ("local_loss", "global_loss", "average_loss") if name in row]
        if not all(map(math.isfinite, losses)) and self.odd_validation is None:
            self.odd_validation = int(row["step"])

    def _warn_of_validation(self) -> None:
        if self.odd_validation is not None and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"non-finite validation loss at step {self.odd_validation}, where the training loss is finite: look at "
                "the validation data, and at what the model does in evaluation mode",
                UserWarning,
                stacklevel=2,
            )

    def _advance(self, step: int, report: StepReport) -> None:
        if not self.progress:
            return
        if self.live is not None:
            self.live.update(report.max_steps)
            return
        if self.bar is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(
                total=report.max_steps,
                initial=step - ("train_loss" in report.row),
                desc=self.description,
                unit="step",
                dynamic_ncols=True,
                disable=None,  # no bar in files and pipes
            )
        if report.preparing:
            self.bar.set_postfix_str(report.preparing)
        if "train_loss" in report.row:
            megabytes = report.row["wire_bytes"] / 1e6
            self.bar.set_postfix_str(f"loss {report.row['train_loss']:.3f}, {megabytes:.2f} MB sent", refresh=False)
            self.bar.update()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.live is not None:
            self.live.close()
        if kind is None:
            self._warn_of_validation()


# At most two pictures per second; fewer if drawing takes long, so that it costs at most this share of the time.
_SECONDS = 0.5
_SHARE = 0.03
# A training curve with more than _POINTS points is drawn as the means of that many pieces. All curves together have at
# most about _ALL_POINTS pieces, but each has at least _FEWEST.
_POINTS, _ALL_POINTS, _FEWEST = 400, 4000, 60
# Number of leading runs of a race that are named.
_NAMED = 8


class LiveRace:
    """Training and validation loss of runs against step and bytes on the wire: one output of a cell, updated in place.

    With one run, the title shows its progress. With several, the legend names the leading runs and their loss.

    Args:
        histories: name → the growing records of its runs, one for each seed; several records are averaged. More names
            may be added during training.
        title: the title.

    Raises:
        ValueError: not in a notebook.
    """

    def __init__(self, histories: Mapping[str, Sequence[History]], title: str = "") -> None:
        if not _in_notebook():
            raise ValueError("progress='plot' draws in a notebook, and this is not one: give True for a bar, or False")
        self.histories = histories
        self.title = title
        self.max_steps = 0
        self._handle: Any = None
        self._axes: list[Axes] = []
        self._lines: dict[tuple[str, str, str], Line2D] = {}
        self._next = 0.0

    def update(self, max_steps: int) -> None:
        """Draw the current histories, unless the last picture is recent."""
        self.max_steps = max_steps
        if time.perf_counter() >= self._next:
            self._show()

    def close(self) -> None:
        """Draw the final picture with all rows."""
        if any(len(history) for own in self.histories.values() for history in own):
            self._show()

    def _show(self) -> None:
        from IPython.display import Image, display

        started = time.perf_counter()
        picture = Image(data=self._png(), alt=f"loss of {self.title} against step and bytes")
        if self._handle is None:
            self._handle = display(picture, display_id=True)
            started = time.perf_counter()  # the first picture mostly measures matplotlib's start
        else:
            self._handle.update(picture)
        ended = time.perf_counter()
        self._next = ended + max(_SECONDS, (ended - started) / _SHARE)

    def _png(self) -> bytes:
        if not self._axes:
            self._make()
        alone = len(self.histories) == 1
        y_column, running = self._loss_column(), self._running()
        looks = looks_of(list(self.histories))
        drawn = []
        for name, histories in running.items():
            for ax, x in zip(self._axes, ("step", "wire"), strict=True):
                for y in ("train_loss", "global_loss"):
                    xs, ys = _mean(histories, X_AXES[x], y)
                    if y == "train_loss":
                        points = min(_POINTS, max(_FEWEST, _ALL_POINTS // len(running)))
                        xs, ys = _thinned(xs, points), _thinned(ys, points)
                    self._line(ax, name, x, y, looks.by_name[name], alone).set_data(xs, ys)
                    drawn.append(ys)
        for ax, x in zip(self._axes, ("step", "wire"), strict=True):
            ax.relim()
            ax.autoscale_view(scalex=x != "step", scaley=True)
        within = None if alone else limits(drawn)
        self._axes[0].set_ylim(within, auto=within is None)
        self._axes[0].set_xlim(0, self.max_steps)
        if alone:
            self._say_alone(next(iter(self.histories.values()))[-1])
        else:
            self._say_race(running, y_column, looks)
        image = io.BytesIO()
        self.figure.savefig(image, format="png")
        return image.getvalue()

    def _say_alone(self, history: History) -> None:
        row = {name: history.last(name) for name in ("step", "train_loss", "wire_bytes")}
        loss = "" if math.isnan(row["train_loss"]) else f", loss {row['train_loss']:.3f}"
        sent = f"{row['wire_bytes'] / 1e6:.2f} MB sent"
        self.figure.suptitle(f"{self.title}: step {int(row['step'])} of {self.max_steps}{loss}, {sent}", fontsize=9)
        if not self._axes[1].get_legend():
            self._axes[1].legend(loc="upper right", **LEGEND)

    def _say_race(self, running: Mapping[str, Sequence[History]], y: str, looks: Looks) -> None:
        from matplotlib.lines import Line2D

        steps = {name: int(max(history.last("step") for history in own)) for name, own in running.items()}
        front = max(steps.values(), default=0)
        losses = {name: float(np.mean([history.last(y) for history in own])) for name, own in running.items()}
        known = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
        # Runs with fewer steps have stopped or are training now, and come last.
        ranking = sorted(known, key=lambda name: (steps[name] < front, known[name]))
        labels = [
            literal(f"{name}: {known[name]:#.4g}") + (f", step {steps[name]}" if steps[name] < front else "")
            for name in ranking[:_NAMED]
        ]
        handles = [
            Line2D([], [], color=looks.by_name[n].colour, linestyle=looks.by_name[n].dash, linewidth=1.6)
            for n in ranking[:_NAMED]
        ]
        for legend in self.figure.legends[:]:
            legend.remove()
        if labels:
            columns = legend_columns(labels)
            self.figure.legend(handles, labels, loc="lower center", ncols=columns, **LEGEND)
        count = sum(step == front for step in steps.values())
        at_front = f"{count} of {len(self.histories)}" if count < len(self.histories) else f"all {count}"
        more = f"; the {_NAMED} in front are named below" if len(ranking) > _NAMED else ""
        title = f"{self.title}: " if self.title else ""
        self.figure.suptitle(f"{title}{at_front} at step {front} of {self.max_steps}{more}", fontsize=9)

    def _loss_column(self) -> str:
        histories = [history for own in self.histories.values() for history in own]
        return "global_loss" if any(not math.isnan(h.last("global_loss")) for h in histories) else "train_loss"

    def _running(self) -> dict[str, list[History]]:
        """Return for each name its runs with the most rows, so that the mean does not wait for diverged runs."""
        known = {name: [h for h in own if len(h)] for name, own in self.histories.items()}
        return {name: [h for h in own if len(h) == max(map(len, own))] for name, own in known.items() if own}

    def _line(self, ax: Axes, name: str, x: str, y: str, look: Look, alone: bool) -> Line2D:
        """Return the line of a name in a panel; make it at the first call."""
        if (name, x, y) not in self._lines:
            training = y == "train_loss"
            if alone:
                look = Look(COLOURS[2] if training else COLOURS[0])
            # With several runs, training curves are thin and pale lines in the colour of the validation curves.
            few = len(self.histories) <= 2 * _NAMED
            pale = 1.0 if alone or not training else 0.35 if few else 0.15
            (line,) = ax.plot([], [], color=look.colour, linewidth=0.7 if training else 1.4, alpha=pale)
            line.set_label(Y_LABELS[y])
            if not training:
                line.set(linestyle=look.dash, zorder=3)
                if few:
                    line.set(marker=look.marker, markersize=3.5, markerfacecolor="white")
            self._lines[name, x, y] = line
        return self._lines[name, x, y]

    def _make(self) -> None:
        from matplotlib.figure import Figure

        # Set margins by hand, because a new layout would take as long as the drawing.
        longest = max(map(len, self.histories)) * "x" + ": 0.0000"
        named = [longest] * min(_NAMED, len(self.histories))
        rows = 0 if len(named) == 1 else -(-len(named) // legend_columns(named)) + 0.7
        height = 2.6 + 0.17 * rows
        self.figure = Figure(figsize=(6.8, height), dpi=110)
        bottom, top = (0.44 + 0.17 * rows) / height, 1 - 0.31 / height
        self.figure.subplots_adjust(left=0.075, right=0.985, top=top, bottom=bottom, wspace=0.08)
        self._axes = list(self.figure.subplots(1, 2, sharey=True))
        for ax, x in zip(self._axes, ("step", "wire"), strict=True):
            ax.set_xlabel(X_AXES[x].title(history for own in self.histories.values() for history in own))
            styled(ax)
        self._axes[0].set_ylabel("loss")


# The most rows of a table that is updated in place; of more runs, it shows those with the lowest loss.
_ROWS = 20


class LiveTable:
    """A table of runs in a terminal, updated in place while they train; the leading name is bold.

    Without a terminal, such as in a pipe, nothing is written.

    Args:
        title: the title.
        console: a console of rich; default: stderr, if it is a terminal.
    """

    def __init__(self, title: str = "", console: Any = None) -> None:
        import rich.style  # noqa: F401 (imported before any run, because it draws from Python's generator)

        self.title, self._console = title, console
        self._live: Any = None  # False: there is no terminal
        self._next = 0.0

    def update(
        self,
        histories: Mapping[str, Sequence[History]],
        steps: Mapping[str, int],
        last: bool = False,
        caption: str = "",
    ) -> None:
        """Show the current records, unless the table is less than a quarter of a second old.

        Args:
            histories: name → the records of its runs, one for each seed; their means are shown.
            steps: name → T. last: update the table in any case. caption: the text below the table.
        """
        now = time.perf_counter()
        if now < self._next and not last:
            return
        self._next = now + 0.25
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True) if self._console is None else self._console
            self._live = Live(console=console, auto_refresh=False) if console.is_terminal else False
            if self._live:
                self._live.start()
        if self._live:
            self._live.update(self._table(histories, steps, caption), refresh=True)

    def close(self) -> None:
        """Leave the last table in the terminal."""
        if self._live:
            self._live.stop()

    def _table(self, histories: Mapping[str, Sequence[History]], steps: Mapping[str, int], caption: str) -> Any:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        own = {name: [history for history in runs if len(history)] for name, runs in histories.items()}
        validated = any(not math.isnan(h.last("global_loss")) for runs in own.values() for h in runs)
        column = "global_loss" if validated else "train_loss"
        losses = {name: float(np.mean([h.last(column) for h in runs])) for name, runs in own.items() if runs}
        ranked = sorted(losses, key=lambda name: losses[name] if math.isfinite(losses[name]) else math.inf)
        table = Table("strategy", box=box.SIMPLE_HEAD, title=self.title, title_justify="left")
        for header in ("step", "training loss", *(["validation loss"] if validated else []), "MB sent"):
            table.add_column(header, justify="right")
        for name in [name for name in own if name in ranked[:_ROWS]]:
            runs = own[name]
            step = min(int(h.last("step")) for h in runs)
            means = [float(np.mean([h.last(key) for h in runs])) for key in ("train_loss", "global_loss")]
            cells = [f"{loss:.4f}" if math.isfinite(loss) else "" for loss in means[: 1 + validated]]
            sent = np.mean([h.last("wire_bytes") for h in runs]) / 1e6
            style = "bold green" if name == ranked[0] and len(ranked) > 1 else None
            table.add_row(Text(name), f"{step} / {steps[name]}", *cells, f"{sent:.2f}", style=style)
        waiting = [name for name in own if not own[name]][: max(0, _ROWS - len(ranked))]
        for name in waiting:
            table.add_row(Text(name), f"0 / {steps[name]}")
        front = f"the {_ROWS} in front, of {len(own)}" if len(own) > _ROWS else ""
        table.caption = "; ".join(filter(None, (front, caption)))
        table.caption_justify = "left"
        return table


def _in_notebook() -> bool:
    """Return whether this process is a notebook's kernel, which can show pictures."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def _mean(histories: Sequence[History], axis: XAxis, y: str) -> Curve:
    """Return x and y where both were measured, averaged over histories at common steps; keep the last of equal x."""
    xs, ys, _ = mean_over_seeds(histories, axis, y)
    last = last_of_equal(xs)
    return xs[last], ys[last]


def _thinned(values: NDArray[np.float64], points: int) -> NDArray[np.float64]:
    """Return the means of at most `points` consecutive pieces of `values`."""
    if len(values) <= points:
        return values
    return np.array([piece.mean() for piece in np.array_split(values, points)])
