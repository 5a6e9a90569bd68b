"""A figure of runs that grows with them in a notebook."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.figures.legends import LEGEND, legend_columns
from vsim.figures.looks import COLOURS, Look, Looks, looks_of
from vsim.figures.style import literal, styled
from vsim.history.curves import X_AXES, Y_LABELS, XAxis, last_of_equal, limits, mean_over_seeds
from vsim.history.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    Curve = tuple[NDArray[np.float64], NDArray[np.float64]]


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

        from vsim.figures.paper import whole_ticks

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
        whole_ticks(self._axes[0].xaxis)
        self._axes[0].set_ylabel("loss")


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
