"""The runs of several strategies, and methods that compare, draw, save and join them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

from typing_extensions import Self

from vsim.analysis import provenance, summary
from vsim.analysis.asked import Asked
from vsim.analysis.columns import columns_of
from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.conditions import Conditions
from vsim.analysis.losses import diverged, sound
from vsim.analysis.overview import overview
from vsim.analysis.questions import at, best, cheapest, differences, pareto, steps_to, winners
from vsim.analysis.result import Result
from vsim.analysis.spent import AnyCompute, AnyNetwork
from vsim.arguments import a_list, a_text, encodable, one_of, true_or_false
from vsim.figures.legends import PAGE
from vsim.figures.words import brief_list
from vsim.history.curves import XAxis, bands, x_axis
from vsim.history.formats import holding_a_record, read_json, write_csv, write_json
from vsim.history.history import History
from vsim.network import Compute, Network

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vsim.analysis.report.page import Report
    from vsim.figures.paper import PaperFigure


class Comparison(Runs):
    """The runs of several strategies, by name. A notebook shows a comparison as a table and a figure.

    With several seeds, `comparison[name]` is the strategy's run with the first seed, and `comparison.runs(name)` lists
    all its runs; tables show mean ± standard deviation, and figures the mean and a band.
    `comparison[["AllReduce", "DiLoCo"]]` is the comparison of these two strategies, which keep their colours.

    Attributes:
        allreduce_bytes: bytes that each node would hand to AllReduce in one step: all its gradients, once.
        network, compute: the default network and compute for deriving hours; None if there are none.
        tuned: name → the `Sweep` in which `tune=` found the strategy's settings; empty without it.
        calls: the calls or commands that trained the runs.
    """

    # Methods that compare the runs, each defined in a separate file.
    best = best.best
    cheapest = cheapest.cheapest
    differences = differences.differences
    pareto = pareto.pareto
    winners = winners.winners
    steps_to = steps_to.steps_to
    at = at.at
    describe = provenance.describe
    rows = summary.rows
    table = summary.table

    # The options of `fit` that a sweep varies, and in which its runs may differ.
    varied_options: Sequence[str] = ()
    # Class name → class, to read the sweeps that a comparison's file holds; and the keys of a file of this class.
    _kinds: ClassVar[dict[str, type[Comparison]]] = {}
    _keys: tuple[str, ...] = ("allreduce_bytes", "runs")

    def __init_subclass__(cls) -> None:
        Comparison._kinds[cls.__name__] = cls

    # Parts and unions -------------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: str) -> ComparedRun: ...
    @overload
    def __getitem__(self, name: list[str]) -> Self: ...
    def __getitem__(self, name: str | list[str]) -> ComparedRun | Self:
        return self.holding({own: self.runs(own) for own in name}) if isinstance(name, list) else self.runs(name)[0]

    def without(self, *names: str) -> Self:
        """Return the runs of all other strategies; they keep their colours.

        Raises:
            ValueError: there is no such strategy, or no strategy is left.
        """
        for name in names:
            one_of("a strategy", name, self)
        left = [name for name in self if name not in names]
        if not left:
            raise ValueError(f"nothing is left without {', '.join(names)}")
        return self[left]

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the same runs under new names, given as name → new name.

        Raises:
            TypeError: a name is not text. ValueError: there is no such name, or two strategies would have one name.
        """
        if not isinstance(names, Mapping) or not all(isinstance(one, str) and one.strip() for one in names.values()):
            raise TypeError(f"names must be a dict of name → new name, got {names!r}")
        for name in names:
            one_of("a strategy", name, self)
        called = {name: encodable("the name of a run", names.get(name, name)) for name in self}
        if twice := sorted({name for name in called.values() if list(called.values()).count(name) > 1}):
            raise ValueError(f"two strategies would be called {', '.join(twice)}")
        new = {name: names.get(name, name) for name in self.names}
        tuned = {new[name]: sweep for name, sweep in self.tuned.items()}
        return self.holding({new[name]: self.runs(name) for name in self}, names=list(new.values()), tuned=tuned)

    def __or__(self, other: Comparison) -> Comparison:
        """Return the runs of both comparisons. Of two runs with the same name and seed, keep the first, unless only the
        second reached its last step.

        The union of two sweeps over the same settings is a sweep.

        Raises:
            ValueError: the runs are of different problems (model, data, nodes, steps, options), or one name has two
                strategies; the message names the differences. The error is also raised if the comparisons derive hours
                from different networks.
        """
        if not isinstance(other, Comparison):
            raise no_comparison("what a comparison is joined with", other)
        pairs = [(name, run) for c in (self, other) for name in c for run in c.runs(name)]
        common = Conditions([*self.varied_options, *other.varied_options])
        for name, run in pairs:
            common.check(name, run.seed, run.history.config)
        for what in ("allreduce_bytes", "measured_bytes"):
            if (sizes := (getattr(self, what), getattr(other, what)))[0] != sizes[1]:
                raise ValueError(f"the two are priced for models of different sizes: {sizes[0]} and {sizes[1]} bytes")
        both = self._empty_with(other)
        both.measured_bytes, both.sizes = self.measured_bytes, self.sizes
        kinds = {run.ledger.of_clients for _, run in pairs}

        def meaning(given: Network | Compute) -> list[dict[str, Any]]:
            meant = [given.for_run(kind) for kind in kinds] if isinstance(given, Network) else [given]
            return [one.as_plain() for one in meant]

        for what in ("network", "compute"):
            own, theirs = getattr(self, what), getattr(other, what)
            if own is not None and theirs is not None and meaning(own) != meaning(theirs):
                raise ValueError(
                    f"their hours are derived from different {what}: {own!r} and {theirs!r}; set the "
                    f"{what} of the second to that of the first, or to None"
                )
            setattr(both, what, theirs if own is None else own)
        kept: dict[tuple[str, int], ComparedRun] = {}
        for name, run in pairs:
            first = kept.setdefault((name, run.seed), run)
            if run.ended and not first.ended:
                kept[name, run.seed] = run
        for (name, _), run in kept.items():
            both.add(name, run)
        both.tuned = {**other.tuned, **self.tuned}
        both.calls = list(dict.fromkeys([*self.calls, *other.calls]))
        return both

    def _empty_with(self, other: Comparison) -> Comparison:
        """Return an empty comparison for the runs of both; an empty sweep if both are sweeps over the same settings."""
        return Comparison(self.allreduce_bytes)

    # Files and descriptions -------------------------------------------------------------------------------------------

    def _titled_runs(self) -> Iterator[tuple[dict[str, Any], ComparedRun]]:
        """Yield each run with the first columns of its lines in a file: column → value."""
        for name in self:
            for run in self.runs(name):
                yield {"strategy": name, "seed": run.seed}, run

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row per strategy, seed and step: strategy, seed and the columns of `History`.

        The last row of each run has some of the table's columns, too: those on clients, with a `client_val_dataset`;
        and "MB per accuracy point".
        """
        import pandas as pd

        frames, columns, asked = [], dict[str, None](), Asked.of(self)
        at_end = [column for column in columns_of(asked) if column.is_at_end]
        for titles, run in self._titled_runs():
            frame = run.history.to_pandas()
            columns |= dict.fromkeys([*frame, *(column.name for column in at_end)])  # some strategies have their own
            for column in at_end:
                value = column.of(Result(asked, run))
                frame[column.name] = [*[math.nan] * (len(frame) - 1), value][-len(frame) :] if len(frame) else []
            frames.append(frame.assign(**titles))
        return pd.concat(frames, ignore_index=True)[[*titles, *columns]]

    def to_csv(self, path: str | Path) -> None:
        """Write one line per strategy, seed and step, with the columns of `to_pandas`."""
        write_csv(path, self.to_pandas())

    def to_json(self, path: str | Path) -> None:
        """Write everything but the models, for `from_json`: histories, ledgers, failures."""
        write_json(path, self._as_plain())

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a file that `to_json` wrote; the runs have no models.

        Raises:
            ValueError: the file holds something else.
        """
        content = read_json(path, cls.__name__, cls._keys)
        with holding_a_record(path, cls.__name__):
            return cls._from_plain(content)

    def _as_plain(self) -> dict[str, Any]:
        runs = [{"strategy": name, **run.as_plain()} for name in self for run in self.runs(name)]
        priced = {"network": self.network, "compute": self.compute}
        more = {
            "tuned": {name: sweep._as_plain() for name, sweep in self.tuned.items()},
            "measured_bytes": self.measured_bytes,
            "sizes": self.sizes,
            "calls": self.calls,
        }
        return {
            "allreduce_bytes": self.allreduce_bytes,
            "runs": runs,
            **{key: None if own is None else own.as_plain() for key, own in priced.items()},
            **{key: value for key, value in more.items() if value},
        }

    @classmethod
    def _from_plain(cls, content: Mapping[str, Any]) -> Self:
        comparison = cls._empty(content)
        if content.get("network") is not None:
            comparison.network = Network.from_plain(content["network"])
            comparison.compute = Compute.from_plain(content["compute"])
        for run in content["runs"]:
            comparison.add(run["strategy"], ComparedRun.from_plain(run))
        comparison.measured_bytes, comparison.calls = content.get("measured_bytes"), list(content.get("calls", []))
        comparison.sizes = dict(content.get("sizes", {}))
        for name, sweep in content.get("tuned", {}).items():
            comparison.tuned[name] = cls._kinds["Sweep"]._from_plain(sweep)
        return comparison

    @classmethod
    def _empty(cls, content: Mapping[str, Any]) -> Self:
        return cls(content["allreduce_bytes"])

    # Figures and pages ------------------------------------------------------------------------------------------------

    def plot(
        self,
        x: str = "step",
        y: str | None = None,
        ax: Axes | None = None,
        *,
        logy: bool = False,
        from_step: int = 0,
        legend: bool = True,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
    ) -> Axes:
        """Draw the loss of every strategy.

        Args:
            x: "step", "examples" or "tokens"; "round", for runs with `participation`; "payload" or "wire", bytes per
                node (for cohorts, per client on average) on a logarithmic axis; "time" on a network; or "seconds" of
                the simulation.
            y: a column of `History`; default the global validation loss, or the training loss without validation.
            ax: the axes to draw on; default: a new figure.
            logy: whether the y axis is logarithmic; divergence and consensus_distance always are.
            from_step: the first step to draw, as the first losses may flatten all others.
            legend: whether to add a legend; on your own axes, one with many names has two columns below them.
            network, compute: determine "time", see `vsim.timeline`; default: the comparison's.
        """
        axis, y = self._x_axis(x, network, compute), self.loss_column if y is None else y
        true_or_false("legend", legend)
        return bands(self._drawn(), axis, y, ax, legend, self.looks(), diverged(self), logy, from_step)

    def _drawn(self) -> dict[str, list[History]]:
        return {name: [run.history for run in sound(self.runs(name))] for name in self}

    def _x_axis(self, x: str, network: AnyNetwork, compute: AnyCompute) -> str | XAxis:
        if isinstance(x, str) and x == "time":
            network, compute = self.prices(network, compute)
        return x_axis(x, self.all_histories, network, compute)

    def figure(
        self,
        title: str | None = None,
        *,
        strategies: list[str] | None = None,
        x: str = "step",
        logy: bool = False,
        from_step: int = 0,
        width: float = PAGE,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
    ) -> PaperFigure:
        """Return the figure of two panels: loss against step, and against bytes on the wire.

        The figure's `save(path)` writes a PDF, PNG or SVG in the style of a paper.

        Args:
            title: the title; default: nodes and size; "" for no title, as in a paper.
            strategies: names to draw, default all.
            x, network, compute: for the first panel, see `plot`.
            logy: whether the loss is on a logarithmic axis. from_step: the first step to draw.
            width: in inches: a page's width (6.8) or a column's (3.3); in a column, the panels are stacked.
        """
        if title is not None and not isinstance(title, str):
            raise TypeError(f"title must be a text, got {title!r}")
        shown = self if strategies is None else self[a_list("strategies", strategies)]
        title = "; ".join([shown.title, *summary.tuning(shown)]) if title is None else title
        axis = shown._x_axis(x, network, compute)
        looks, lost = shown.looks(), diverged(shown)
        return overview(shown._drawn(), title, self.loss_column, looks, lost, axis, logy, width, from_step)

    @overload
    def report(
        self, path: None = None, *, network: AnyNetwork = None, compute: AnyCompute = None, title: str | None = None
    ) -> Report: ...
    @overload
    def report(
        self, path: str | Path, *, network: AnyNetwork = None, compute: AnyCompute = None, title: str | None = None
    ) -> Path: ...
    def report(
        self,
        path: str | Path | None = None,
        *,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
        title: str | None = None,
    ) -> Report | Path:
        """Write a page whose sliders set bandwidth, latency, seconds per step, model size and price of a node.

        The page is one HTML file, which a browser opens without a network. It shows curves, the table, the map of
        winners, and loss against cost, all updated when a slider moves.

        Args:
            path: the path of the file. Default: write no file, and let a notebook show the page.
            network, compute: initial values of the sliders; default: the comparison's. Without them, the page has no
                hours until a slider moves.
            title: the title of the page; default: what was trained.

        Returns:
            The path; without a path, the page as a `Report`.

        Raises:
            ValueError: there is no run, or the network or compute has another number of nodes.
        """
        from vsim.analysis.report.page import report

        short = brief_list([textwrap.shorten(name, 40, placeholder="…") for name in self], 3)
        page = report({short if title is None else a_text("title", title): self}, network, compute, title)
        return page if path is None else page.save(path)

    def _pictures(self) -> dict[str, Figure | Axes]:
        """Return the figures that a notebook shows below the table, by title."""
        return {f"loss against step and bytes of {', '.join(self)}": self.figure()}

    def _repr_html_(self) -> str:
        from vsim.figures.paper import image_html

        return self.table("html") + "".join(image_html(figure, alt) for alt, figure in self._pictures().items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title})\n{self.table()}"


def no_comparison(name: str, given: Any, kind: type[Comparison] = Comparison) -> TypeError:
    """Make the error for an argument that is not a comparison of the required kind."""
    hint = f"; read it with {kind.__name__}.from_json" if isinstance(given, str | Path) else ""
    return TypeError(f"{name} must be a {kind.__name__}, got {given!r}{hint}")
