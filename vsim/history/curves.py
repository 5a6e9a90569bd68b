"""Curves: columns of records against step, bytes and time. Sizes suit print."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import a_text, one_of, true_or_false, whole_number
from vsim.figures.legends import MEAN_REPLICA, THIN, add_legend, line_style
from vsim.figures.looks import MANY, Looks, looks_of
from vsim.figures.style import literal, styled
from vsim.figures.words import quoted
from vsim.history.attendance import rounds
from vsim.network import Compute, Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Runs = Mapping[str, Any]  # name → a `History`, or one for each seed

History: TypeAlias = Any  # the module of `History` imports this one


# Lines with more points than this have markers at only this many points.
MARKED_POINTS = 12


class XAxis(NamedTuple):
    """The x axis of curves: a column of `History`, or a function of a history, divided by its unit.

    The axis is logarithmic if `is_bytes` or `is_wide`, and has whole numbers if `is_count`. In the label, "{each}"
    stands for "node" or "client".
    """

    column: str | Callable[[History], NDArray[np.float64]]
    unit: float
    label: str
    is_bytes: bool = False
    is_wide: bool = False
    is_count: bool = False

    def values(self, history: History) -> NDArray[np.float64]:
        """Return x of every row, in its unit."""
        return (history[self.column] if isinstance(self.column, str) else self.column(history)) / self.unit

    def title(self, histories: Iterable[History]) -> str:
        """Return the label for these runs; for cohorts, bytes are per client on average."""
        of_cohorts = self.is_bytes and any(history.is_of_cohorts for history in histories)
        return self.label.replace("{each}", "client" if of_cohorts else "node")


X_AXES = {
    "step": XAxis("step", 1, "step", is_count=True),
    "examples": XAxis("examples", 1, "examples", is_count=True),
    "tokens": XAxis("tokens", 1, "tokens", is_count=True),
    "round": XAxis(lambda history: rounds(history), 1, "round", is_count=True),
    "payload": XAxis(
        lambda history: history.bytes_per_node("payload"), 1e6, "payload communicated per {each} (MB)", True
    ),
    "wire": XAxis(lambda history: history.bytes_per_node("wire"), 1e6, "sent on the wire per {each} (MB)", True),
    "seconds": XAxis("seconds", 1, "seconds of the simulation"),
}


_TIMES = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
Y_LABELS = {
    "global_loss": "validation loss",
    "local_loss": "validation loss of node 0",
    "average_loss": "validation loss of the mean replica",
    "train_loss": "training loss",
    "global_accuracy": "validation accuracy",
}

# The argument of a run that measures a column.
_MEASURED_BY = {
    **dict.fromkeys(("divergence", "correlation"), "correlation_interval="),
    "consensus_distance": "a strategy on a graph and a validation dataset",
    **dict.fromkeys(("test_loss", "test_accuracy"), "test_dataset="),
    **dict.fromkeys(("local_accuracy", "global_accuracy"), "a validation dataset, and accuracy= if it is not known"),
}


def bands(
    runs: Runs,
    x: str | XAxis = "step",
    y: str = "global_loss",
    ax: Axes | None = None,
    legend: bool = True,
    looks: Looks | None = None,
    diverged: Mapping[str, str] | None = None,
    logy: bool = False,
    from_step: int = 0,
) -> Axes:
    """Draw a column of several runs, one line for each name; with several seeds, draw their mean and a band.

    The mean over the seeds, of y and of the bytes or seconds on the x axis, is taken at every step that all seeds have
    measured. The band extends by one standard deviation (of the sample, n − 1) to both sides; with more than a dozen
    runs there are no bands. A loss that rises far above its start is cut off.

    Against bytes, only the last of several measurements with equal bytes is drawn, which is the loss reached before
    more bytes were sent. A run that sends nothing is a horizontal line at its last loss. On other axes, a thin line
    shows the loss of the mean replica if it differs from the global model, as between two syncs of DiLoCo, whose outer
    weights do not change between syncs.

    Args:
        runs: name → history, or a list of histories with one for each seed.
        x: "step", "examples", "tokens", "payload", "wire" (MB, on a logarithmic axis), "seconds" of the simulation, or
            another axis, such as `time_axis`.
        y: a column of `History`.
        ax: where to draw; default the axes of a new figure.
        legend: whether to add a legend; one with many entries stands below the axes.
        looks: the looks of the lines; default: by their names.
        diverged: name → the legend's text for a run that diverged; a cross at the upper edge marks its end.
        logy: whether the y axis is logarithmic; divergence and consensus_distance always are, from the first value
            above 0.
        from_step: the first step to draw, as the first losses may flatten all others.

    Raises:
        ValueError, KeyError: there is no such x, or no column y, or no run has measured y or has tokens.
    """
    from vsim.figures.paper import axes_of, fit, plain_ticks, whole_ticks

    logy = true_or_false("logy", logy) or a_text("y", y) in ("divergence", "consensus_distance")
    from_step = whole_number("from_step", from_step, at_least=0)
    axis = x if isinstance(x, XAxis) else X_AXES[one_of("x", x, X_AXES)]
    lists = _lists(runs)
    looks, diverged = looks or looks_of(list(runs)), diverged or {}
    own, ax = ax is None, axes_of(ax, 4.4, 3.2)
    if x == "tokens" and lists and not any(h.last("tokens") > 0 for histories in lists.values() for h in histories):
        raise ValueError("x='tokens' needs batches that hold token ids; x='examples' is there for all data")
    if x == "round" and not all(h.ledger.attendance for histories in lists.values() for h in histories):
        raise ValueError("x='round' needs participation=, which has rounds; x='step' is there for all runs")
    _check_measured(y, [history for histories in lists.values() for history in histories])
    silent, drawn, thin = [], [], len(runs) > MANY
    for i, (name, histories) in enumerate(lists.items()):
        xs, mean, deviation = _points(histories, axis, y, from_step)
        if logy:
            xs, mean, deviation = xs[mean > 0], mean[mean > 0], deviation[mean > 0]
        look = looks.by_name[name]
        label = literal(f"{name}, {diverged[name]}" if name in diverged else name)
        drawn.append(mean)
        if axis.is_bytes and not any((axis.values(history) > 0).any() for history in histories):
            if len(mean) and name not in diverged:
                silent.append(name)
                ax.axhline(mean[-1], color=look.colour, linestyle=look.dash, linewidth=0.9, label=label)
            continue
        spacing = -(-len(xs) // MARKED_POINTS)
        # Lines that cover each other have their markers at different points.
        marks = (2 * i % spacing, spacing) if spacing > 1 else 1
        ax.plot(xs, mean, label=label, markevery=marks, **line_style(look, thin))
        if deviation.any() and not thin:
            ax.fill_between(xs, mean - deviation, mean + deviation, color=look.colour, alpha=0.18, linewidth=0)
        if y == "global_loss" and not (axis.is_bytes or thin or looks.key):
            _draw_mean_replica(ax, histories, axis, look.colour, from_step)
        end = max((np.nanmax(axis.values(history), initial=0) for history in histories), default=0.0)
        if name in diverged and not (axis.is_bytes and end <= 0):
            cross: Any = {"color": look.colour, "marker": "x", "linestyle": "none", "label": "_"}
            ax.plot([end], [1.0], transform=ax.get_xaxis_transform(), clip_on=False, zorder=4, **cross)
    ax.set_xlabel(axis.title(history for histories in lists.values() for history in histories))
    ax.set_ylabel(Y_LABELS.get(y, y.replace("_", " ")))
    styled(ax)
    if axis.is_bytes or axis.is_wide:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
    elif axis.is_count:
        whole_ticks(ax.xaxis)
    if logy:
        ax.set_yscale("log")
        plain_ticks(ax.yaxis)
    if y.endswith("loss") and (within := limits(drawn, logy)) is not None:
        ax.set_ylim(within)
    if silent:
        # Names must fit above the axes.
        which = literal(", ".join(quoted(silent).values())) if len(silent) <= 2 else f"{len(silent)} of {len(drawn)}"
        sends = "sends" if len(silent) == 1 else "send"
        said = f"{which} {sends} nothing (horizontal line{'s' * (len(silent) > 1)})"
        ax.set_title(said, fontsize=7.5, color="0.4", loc="right")
    if legend and ax.get_lines():
        add_legend(ax, looks, diverged, own)
    elif legend:
        fit(ax)
    return ax


def _check_measured(y: str, histories: Sequence[History]) -> None:
    """Raise an error if no run has measured column `y`, although some run has begun."""
    begun = [history for history in histories if history.last("step") > 0]
    having = [history for history in begun if y in history.columns]
    if not begun or any(not math.isnan(history.last(y)) for history in having):
        return
    if not having:
        begun[0][y]  # raises a KeyError with the names of all columns
    needs = f"train with {_MEASURED_BY[y]}" if y in _MEASURED_BY else "another column has values"
    known = dict.fromkeys(c for history in begun for c in history.columns if not math.isnan(history.last(c)))
    raise ValueError(f"y={y!r} was measured in no run: {needs}; measured are {', '.join(known)}")


def time_axis(histories: Iterable[History], network: Network, compute: Compute) -> XAxis:
    """Return the axis of the runs' time on a network; logarithmic if some runs take ten times as long as others."""
    begun = [one for one in histories if one.last("step") > 0]
    times = {id(one): one.time(network, compute).seconds[one["step"].astype(int)] for one in begun}
    ends = [float(own[-1]) for own in times.values() if own[-1] > 0]
    unit, name = next(((u, n) for u, n in _TIMES if max(ends, default=0) >= 2 * u), _TIMES[-1])
    wide = bool(ends) and max(ends) > 10 * min(ends)
    return XAxis(
        lambda history: times.get(id(history), np.zeros(len(history))),
        unit,
        f"time on the network ({name})",
        False,
        wide,
    )


def x_axis(
    x: str, histories: Sequence[History], network: Network | str | float | None, compute: Compute | float | str | None
) -> str | XAxis:
    """Return the axis named `x`. Only x="time" takes network and compute: the time is derived from them.

    Raises:
        TypeError: x is "time" and network or compute is missing, or x is another quantity and one of them is given.
    """
    if isinstance(x, str) and x == "time":
        return time_axis(histories, Network.of(network), Compute.of(compute))
    if network is not None or compute is not None:
        raise TypeError(f"network and compute have no effect with x={x!r}; x='time' follows from them")
    return x


def mean_over_seeds(
    histories: Sequence[History], axis: XAxis, y: str, from_step: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return x, the mean of y and its standard deviation, at every step at which all `histories` have measured both;
    `from_step` is the first step.

    >>> from vsim import History
    >>> runs = [History(), History()]
    >>> for loss, run in zip([1.0, 3.0], runs): run.append({"step": 0, "train_loss": loss})
    >>> mean_over_seeds(runs, X_AXES["step"], "train_loss")
    (array([0.]), array([2.]), array([1.41421356]))
    """
    tables = [np.stack([history["step"], axis.values(history), history[y]]) for history in histories]  # (3, rows)
    measured = [table[:, ~np.isnan(table).any(0) & (table[0] >= from_step)] for table in tables]
    steps = sorted(set.intersection(*(set(m[0].tolist()) for m in measured))) if measured else []
    if not steps:
        return np.empty(0), np.empty(0), np.empty(0)
    xs, ys = (np.stack([m[i][np.isin(m[0], steps)] for m in measured]) for i in (1, 2))  # (seeds, steps)
    return xs.mean(0), ys.mean(0), ys.std(0, ddof=1) if len(ys) > 1 else np.zeros(len(steps))


def last_of_equal(xs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each of these non-decreasing numbers is the last of equal ones.

    >>> last_of_equal(np.array([0.0, 0.0, 2.0, 2.0, 3.0]))
    array([False,  True, False,  True,  True])
    """
    return np.append(np.diff(xs) > 0, True) if len(xs) else np.empty(0, bool)


def limits(curves: Iterable[NDArray[np.float64]], log: bool = False) -> tuple[float, float] | None:
    """Return limits of the y axis that cut off diverging losses, which would otherwise flatten all other curves.

    None if no loss diverges.
    """
    finite = [values for values in (curve[np.isfinite(curve)] for curve in curves) if len(values)]
    if not finite:
        return None
    start, best = max(values[0] for values in finite), min(values.min() for values in finite)
    if start <= best or max(values.max() for values in finite) <= start + 0.5 * (start - best):
        return None
    return 0.97 * best if log else best - 0.05 * (start - best), start + 0.1 * (start - best)


def _draw_mean_replica(ax: Axes, histories: Sequence[History], axis: XAxis, colour: str, from_step: int) -> None:
    """Draw the mean replica's loss as a thin line if it differs from the global model's."""
    xs, mean, _ = _points(histories, axis, "average_loss", from_step)
    whole = _points(histories, axis, "global_loss", from_step)[1]
    if len(mean) and not np.array_equal(mean, whole):
        ax.plot(xs, mean, color=colour, label="_", gid=MEAN_REPLICA, **THIN)


def _points(
    histories: Sequence[History], axis: XAxis, y: str, from_step: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the points to draw: x in its unit, mean and deviation of y; of points with equal bytes, only the last."""
    xs, mean, deviation = mean_over_seeds(histories, axis, y, from_step)
    if (axis.is_bytes or axis.is_wide) and len(xs):
        last = last_of_equal(xs) & ((xs > 0) | (xs[-1] == 0))  # if nothing is sent, keep the last point
        xs, mean, deviation = xs[last], mean[last], deviation[last]
    return xs, mean, deviation


def _lists(runs: Runs) -> dict[str, Sequence[History]]:
    return {name: given if isinstance(given, Sequence) else [given] for name, given in runs.items()}
