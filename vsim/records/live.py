"""A figure that is drawn while a run trains, in place, in a notebook."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.records.history import History
from vsim.records.plots import COLOURS, STYLE, X_AXES, Y_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

# At most two pictures a second; and where a picture takes long to draw, fewer: they may cost this share of the time.
_SECONDS = 0.5
_SHARE = 0.03
# A training curve of more points than the picture has room for is drawn as the means of so many pieces.
_POINTS = 400


class LivePlot:
    """Training and validation loss of a run against step and payload: one output of a cell, updated in place.

    Args:
        history: the record of the run, which grows.
        title: what stands above.

    Raises:
        ValueError: this is no notebook.
    """

    def __init__(self, history: History, title: str = "") -> None:
        if not _in_notebook():
            raise ValueError("progress='plot' draws in a notebook, and this is none: give True for a bar, or False")
        self.history = history
        self.title = title
        self.max_steps = 0
        self._handle: Any = None
        self._panels: list[tuple[Axes, Line2D, Line2D]] = []
        self._next = 0.0

    def update(self, max_steps: int) -> None:
        """Draw the history as it is now, if the last picture is old enough."""
        self.max_steps = max_steps
        if time.perf_counter() >= self._next:
            self._show()

    def close(self) -> None:
        """Draw the last picture, with everything in it."""
        if len(self.history):
            self._show()

    def _show(self) -> None:
        from IPython.display import Image, display

        started = time.perf_counter()
        picture = Image(data=self._png(), alt=f"loss of {self.title} against step and bytes")
        if self._handle is None:
            self._handle = display(picture, display_id=True)
            started = time.perf_counter()  # what the first one took was matplotlib's start, most of it
        else:
            self._handle.update(picture)
        ended = time.perf_counter()
        self._next = ended + max(_SECONDS, (ended - started) / _SHARE)

    def _png(self) -> bytes:
        if not self._panels:
            self._make()
        for (ax, training, validation), x in zip(self._panels, ("step", "payload"), strict=True):
            column, divisor, _, _ = X_AXES[x]
            for line, y in ((training, "train_loss"), (validation, "global_loss")):
                xs, ys = self.history.measured(column, y)
                if y == "train_loss":
                    xs, ys = _thinned(xs), _thinned(ys)
                line.set_data(xs / divisor, ys)
            ax.relim()
            ax.autoscale_view(scalex=x != "step")
        self._panels[0][0].set_xlim(0, self.max_steps)
        row = {name: self.history.last(name) for name in ("step", "train_loss", "payload_bytes")}
        loss = "" if np.isnan(row["train_loss"]) else f", loss {row['train_loss']:.3f}"
        sent = f"{row['payload_bytes'] / 1e6:.2f} MB sent"
        self.figure.suptitle(f"{self.title}: step {int(row['step'])} of {self.max_steps}{loss}, {sent}", fontsize=9)
        image = io.BytesIO()
        self.figure.savefig(image, format="png")
        return image.getvalue()

    def _make(self) -> None:
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(STYLE):
            # Margins by hand: laying them out anew would take as long as the drawing.
            self.figure = Figure(figsize=(6.8, 2.6), dpi=110)
            self.figure.subplots_adjust(left=0.075, right=0.985, top=0.88, bottom=0.17, wspace=0.08)
            axes = self.figure.subplots(1, 2, sharey=True)
            for ax, x in zip(axes, ("step", "payload"), strict=True):
                (training,) = ax.plot([], [], color=COLOURS[2], linewidth=0.9, label=Y_LABELS["train_loss"])
                (validation,) = ax.plot([], [], color=COLOURS[0], linewidth=1.4, label=Y_LABELS["global_loss"])
                validation.set(marker="o", markersize=3.5, markerfacecolor="white")
                ax.set_xlabel(X_AXES[x][2])
                ax.grid(True, color="0.9", linewidth=0.6)
                ax.spines[["top", "right"]].set_visible(False)
                self._panels.append((ax, training, validation))
            axes[0].set_ylabel("loss")
            axes[1].legend(frameon=False, loc="upper right")


def _in_notebook() -> bool:
    """Whether this is a kernel, whose pictures somebody sees."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def _thinned(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return at most `_POINTS` means of consecutive pieces."""
    if len(values) <= _POINTS:
        return values
    return np.array([piece.mean() for piece in np.array_split(values, _POINTS)])
