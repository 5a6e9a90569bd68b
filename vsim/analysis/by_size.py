"""The same strategies at several sizes of a model: losses by size, their order at another size, and files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from vsim.analysis.comparison import Comparison
from vsim.analysis.losses import by_seed, compare_finals
from vsim.analysis.questions.decide import Decision, decide
from vsim.analysis.size_order import Order, order, silent_sizes
from vsim.analysis.tables import UNDECIDED, aligned, with_notes
from vsim.arguments import a_text, countable, given, naming, one_of, real_number, true_or_false, whole_number
from vsim.cluster.ledger import BYTES_OF_A_STEP
from vsim.figures.legends import add_legend
from vsim.figures.looks import Looks, looks_of
from vsim.figures.style import literal, styled
from vsim.figures.words import in_short
from vsim.history.formats import holding_a_record, read_json, write_json
from vsim.network import Compute, Network
from vsim.network.links import MOST_NODES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from vsim.analysis.report.page import Report

_KEYS = ("sizes", "parameters", "comparisons", "tuned")
# Default number of tokens of all nodes in a step of a large model: 2^20.
_TOKENS_PER_STEP = 1_048_576


class Ladder:
    """Comparisons of the same strategies at several sizes. A notebook shows the ladder as a table and a figure.

    Attributes:
        comparisons: size → Comparison, by ascending parameters. parameters: size → trainable parameters.
        tokens_per_parameter: training tokens of a run per parameter; None if `max_steps` or a budget set the steps.
        tokens_per_example: token ids in an example; 0 if there are none: an example then counts as a token.
        tuned: size → strategy → the setting that `tune=` found there, as text; empty without it.
    """

    def __init__(
        self,
        comparisons: Mapping[int, Comparison],
        parameters: Mapping[int, int],
        tokens_per_parameter: float | None = None,
        tokens_per_example: int = 0,
        tuned: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        for name, value in (
            ("comparisons", comparisons),
            ("parameters", parameters),
            ("tuned", {} if tuned is None else tuned),
        ):
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} must be a dict by size, got {given(value)}")
        if not comparisons:
            raise ValueError("comparisons must have at least one size, got an empty dict")
        for size, one in comparisons.items():
            if not isinstance(one, Comparison):
                raise TypeError(f"comparisons[{size!r:.100}] must be a vsim.Comparison, got {given(one)}")
        if lacking := [size for size in comparisons if size not in parameters]:
            raise ValueError(f"parameters must have a number for every size, and {lacking} are missing")
        parameters = {size: whole_number(f"parameters[{size!r:.100}]", parameters[size]) for size in comparisons}
        if tokens_per_parameter is not None:
            tokens_per_parameter = real_number("tokens_per_parameter", tokens_per_parameter, above=0)
        tokens_per_example = whole_number("tokens_per_example", tokens_per_example, at_least=0)
        for size, own in (tuned or {}).items():
            if not isinstance(own, Mapping):
                raise TypeError(f"tuned[{size!r:.100}] must be a dict of strategy → setting, got {given(own)}")
        ascending = sorted(comparisons, key=parameters.__getitem__)
        self.comparisons = {size: comparisons[size] for size in ascending}
        self.parameters = {size: parameters[size] for size in ascending}
        self.tokens_per_parameter, self.tokens_per_example = tokens_per_parameter, tokens_per_example
        if tuned is None:
            tuned = {
                size: {name: str(sweep.chosen()) for name, sweep in own.tuned.items()}
                for size, own in self.comparisons.items()
            }
        self.tuned = {size: dict(tuned[size]) for size in ascending if tuned.get(size)}

    @property
    def largest(self) -> Comparison:
        """The comparison of the largest model."""
        return list(self.comparisons.values())[-1]

    @property
    def unit(self) -> str:
        """The unit of training: "tokens" or "examples"."""
        return "tokens" if self.tokens_per_example else "examples"

    @property
    def names(self) -> list[str]:
        """The strategies."""
        return list(self.largest)

    def without(self, *sizes: int) -> Ladder:
        """Return the ladder without some sizes, for instance to predict the order at the largest size from the others.

        Raises:
            ValueError: there is no such size, or no size is left.
        """
        for size in sizes:
            if whole_number("sizes", size) not in self.comparisons:
                raise ValueError(f"sizes must be of {', '.join(map(str, self.comparisons))}, got {size!r:.100}")
        left = {size: own for size, own in self.comparisons.items() if size not in sizes}
        if not left:
            raise ValueError(f"nothing is left without {', '.join(map(str, sizes))}")
        return Ladder(left, self.parameters, self.tokens_per_parameter, self.tokens_per_example, self.tuned)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per size, strategy and seed: size, parameters, strategy, seed, steps, loss and wire_bytes.

        The loss is the final loss, NaN for a run that diverged or failed.
        """
        import pandas

        rows = [
            {
                "size": size,
                "parameters": self.parameters[size],
                "strategy": name,
                "seed": run.seed,
                "steps": int(run.history.last("step")),
                "loss": _losses(comparison)[name][run.seed],
                "wire_bytes": run.history.last("wire_bytes"),
            }
            for size, comparison in self.comparisons.items()
            for name in comparison
            for run in comparison.runs(name)
        ]
        return pandas.DataFrame(rows)

    @property
    def silent(self) -> dict[str, list[int]]:
        """Name → sizes at which the strategy never communicated, although it did at others; see `Order.silent`."""
        size_of = {float(parameters): size for size, parameters in self.parameters.items()}
        return {name: [size_of[own] for own in sizes] for name, sizes in silent_sizes(self.to_pandas()).items()}

    def order(self, to: float) -> Order:
        """Return the order of the strategies at a size, pair by pair, with the probability that it holds.

        Args:
            to: number of parameters of the target model.

        See `vsim.analysis.size_order.order` for the method. An order may be "not decided".

        Raises:
            ValueError: the ladder has one size or one strategy, or a loss that is not above 0.
        """
        return order(self.to_pandas(), to)

    def decide(
        self,
        *,
        parameters: float,
        num_nodes: int,
        network: Network | str | float,
        compute: Compute | float | str,
        within: Mapping[str, Any],
        max_steps: int | None = None,
        tokens_per_step: float | None = None,
        bytes_per_parameter: int | None = None,
        strategies: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> Decision:
        """Return the strategy to train a large model with: the cost of each strategy at that size, and their order.

        Hours, dollars and bytes come from the strategies' own code at that size, see `vsim.price`; the order comes from
        `order`. Strategies keep the settings of the largest size.

        Args:
            parameters, num_nodes: parameters and nodes of the target. network, compute: see `vsim.timeline`; compute is
                the time of a step of the target on one node.
            within: budgets of "time", "cost" and "wire", such as `{"time": "10 h", "cost": 500}`.
            max_steps: steps at the target. Default: the steps for `tokens_per_parameter` or, in a ladder without it,
                the steps at the largest size.
            tokens_per_step: tokens of all nodes in a step (examples, if they hold no token ids); default: 2²⁰.
            bytes_per_parameter: see `vsim.price`.
            strategies: name → strategy, for strategies of your own in a ladder that was read from a file.
            progress: whether to show a bar of the strategies that are priced, with the time left.

        Raises:
            TypeError, ValueError: an argument is out of range, or has no effect; a strategy has no price.
        """
        to = real_number("parameters", parameters, at_least=1)
        if not isinstance(strategies, Mapping | None):
            raise TypeError(f"strategies must be a dict of name → strategy, got {given(strategies)}")
        for name in strategies or {}:
            one_of("strategies: a name", name, self.names)
        steps, said = self._steps_at(to, max_steps, tokens_per_step)
        return decide(
            self.largest,
            self.to_pandas(),
            to,
            whole_number("num_nodes", num_nodes, at_most=MOST_NODES),
            Network.of(network),
            Compute.of(compute),
            within,
            steps,
            said,
            list(self.comparisons)[-1] in self.tuned,
            bytes_per_parameter,
            strategies or {},
            self._looks(),
            true_or_false("progress", progress),
        )

    def _steps_at(self, to: float, max_steps: int | None, per_step: float | None) -> tuple[dict[str, int], str]:
        """Return name → steps at the target, and text that explains them."""
        if max_steps is not None:
            if per_step is not None:
                raise TypeError("tokens_per_step has no effect with max_steps=, the steps themselves")
            number = countable("max_steps", max_steps, "steps", BYTES_OF_A_STEP)
            return dict.fromkeys(self.names, number), f"{number:,} steps"
        if self.tokens_per_parameter is None:
            if per_step is not None:
                raise TypeError(
                    "tokens_per_step has no effect: the ladder has no tokens_per_parameter; give max_steps="
                )
            steps = {name: int(self.largest[name].history.last("step")) for name in self.names}
            many = " to ".join(f"{n:,}" for n in sorted({min(steps.values()), max(steps.values())}))
            return steps, f"{many} steps, as at the largest size"
        each = real_number("tokens_per_step", _TOKENS_PER_STEP if per_step is None else per_step, above=0)
        total = self.tokens_per_parameter * to
        with naming("tokens_per_step"):
            number = countable("max_steps", max(1, math.ceil(total / each)), "steps", BYTES_OF_A_STEP)
        many = f"{in_short(total)} {self.unit}, {self.tokens_per_parameter:g} a parameter"
        return dict.fromkeys(self.names, number), f"{many}, in {number:,} steps of {each:,.0f} of all nodes"

    def table(self, format: str = "simple") -> str:
        """Return a text table of each strategy's loss and rank at each size.

        A † marks losses that do not differ significantly from the best, a ‡ sizes at which a strategy never
        communicated, see `silent`.

        Args:
            format: one of tabulate's: "simple", "github", "html", …
        """
        header = ["strategy", *(f"{in_short(self.parameters[size])}" for size in self.comparisons)]
        columns, tied, silent = [], False, self.silent
        for size, comparison in self.comparisons.items():
            means = {name: statistics.fmean(own.values()) for name, own in _losses(comparison).items()}
            ranks = {
                name: i + 1 for i, name in enumerate(sorted(means, key=lambda n: (math.isnan(means[n]), means[n])))
            }
            undecided = compare_finals(comparison)[0].undecided
            tied = tied or bool(undecided)
            column = {}
            for name, own in _losses(comparison).items():
                spread = f" ± {statistics.stdev(own.values()):.4f}" if len(own) > 1 else ""
                mark = (" †" if name in undecided else "") + (" ‡" if size in silent.get(name, ()) else "")
                known = math.isfinite(means[name])
                column[name] = f"{ranks[name]}. {means[name]:.4f}{spread}{mark}" if known else "diverged or failed"
            columns.append(column)
        names = sorted(self.names, key=lambda name: columns[-1][name])
        cells = [[name, *(column.get(name, "–") for column in columns)] for name in names]
        notes = [f"† {UNDECIDED.format(' at that size')}"] if tied else []
        if silent:
            notes.append("‡ never communicated, with too few steps for a first sync: orders leave these sizes out")
        return with_notes(aligned(cells, header, format), [*notes, self.describe()], format)

    def describe(self) -> str:
        """Return a sentence on sizes, tokens, seeds, nodes and tuning."""
        seeds = sorted({len(own.runs(name)) for own in self.comparisons.values() for name in own})
        sizes = ", ".join(f"{size} ({in_short(number)})" for size, number in self.parameters.items())
        each = self.tokens_per_parameter
        unit = self.unit.removesuffix("s") if each == 1 else self.unit
        trained = "" if each is None else f"{each:g} {unit} a parameter, "
        tuned = ", each tuned at its size" if len(self.tuned) == len(self.comparisons) else ""
        number = " or ".join(map(str, seeds))
        return (
            f"sizes {sizes}; {trained}{number} {'seed' if seeds == [1] else 'seeds'}, "
            f"{self.largest.num_nodes} nodes{tuned}"
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the final loss of each strategy against parameters, on logarithmic axes: means, and the spread of seeds.

        Args:
            ax: default: the axes of a new figure as wide as a column.
        """
        from vsim.figures.paper import axes_of, plain_ticks

        own, ax, looks = ax is None, axes_of(ax, 3.3, 2.5), self._looks()
        frame = self.to_pandas()
        for name in self.names:
            by_size = (
                frame[frame["strategy"] == name]
                .groupby("parameters")["loss"]
                .agg(["mean", "std"])
                .dropna(subset="mean")
            )
            x, mean, spread = by_size.index.to_numpy(), by_size["mean"].to_numpy(), by_size["std"].fillna(0).to_numpy()
            look = looks.by_name[name]
            ax.plot(
                x,
                mean,
                color=look.colour,
                linestyle=look.dash,
                marker=look.marker or "o",
                markersize=3.5,
                linewidth=1.3,
                label=literal(name),
            )
            ax.fill_between(x, mean - spread, mean + spread, color=look.colour, alpha=0.15, linewidth=0)
        title = self.largest.loss_title
        ax.set(xscale="log", yscale="log", xlabel="parameters", ylabel=title)
        plain_ticks(ax.xaxis)
        ax.xaxis.set_major_formatter(lambda value, _: in_short(value))
        plain_ticks(ax.yaxis)
        styled(ax)
        add_legend(ax, Looks(looks.by_name), {}, own)
        return ax

    def _looks(self) -> Looks:
        return Looks(looks_of(self.names).by_name)

    def save(self, path: str | Path, *, whole: bool = True) -> None:
        """Write everything but the models to a file, for `vsim.load_ladder`.

        Args:
            whole: False: leave out the runs of tuning, and all rows of a record but the first and the last. Orders and
                decisions remain the same, and the file is small.
        """
        comparisons = [own._as_plain() for own in self.comparisons.values()]
        if not true_or_false("whole", whole):
            for comparison in comparisons:
                comparison.pop("tuned", None)
                for run in comparison["runs"]:
                    history = run["history"]
                    history["columns"] = {name: _ends(own) for name, own in history["columns"].items()}
                    history["node_losses"] = history["node_losses"][-1:]
        about = {"tokens_per_parameter": self.tokens_per_parameter, "tokens_per_example": self.tokens_per_example}
        sizes, tuned = list(self.comparisons), [self.tuned.get(size, {}) for size in self.comparisons]
        parameters = list(self.parameters.values())
        write_json(
            path, {"sizes": sizes, "parameters": parameters, "comparisons": comparisons, "tuned": tuned, **about}
        )

    @classmethod
    def load(cls, path: str | Path) -> Ladder:
        """Read a file that `save` wrote; the runs have no models.

        Raises:
            ValueError: the file holds something else.
        """
        content = read_json(path, "Ladder", _KEYS)
        with holding_a_record(path, "Ladder"):
            sizes = [whole_number("size", size) for size in content["sizes"]]
            parameters = [whole_number("parameters", number) for number in content["parameters"]]
            each = content.get("tokens_per_parameter")
            return cls(
                dict(zip(sizes, map(Comparison._from_plain, content["comparisons"]), strict=True)),
                dict(zip(sizes, parameters, strict=True)),
                None if each is None else real_number("tokens_per_parameter", each, above=0),
                whole_number("tokens_per_example", content.get("tokens_per_example", 0), at_least=0),
                dict(zip(sizes, map(dict, content["tuned"]), strict=True)),
            )

    @overload
    def report(self, path: None = None, *, decision: Decision | None = None, title: str = ...) -> Report: ...
    @overload
    def report(self, path: str | Path, *, decision: Decision | None = None, title: str = ...) -> Path: ...
    def report(
        self, path: str | Path | None = None, *, decision: Decision | None = None, title: str = "Model ladder"
    ) -> Report | Path:
        """Write a page of the ladder: losses by size, a decision, and the page of each size's comparison.

        The page is one HTML file, see `Comparison.report`. A list at its top selects a size, the largest first.

        Args:
            path: the path of the file. Default: write no file, and let a notebook show the page.
            decision: a result of `decide`, shown with the ladder.
            title: the title of the page.

        Returns:
            The path; without a path, the page as a `Report`.
        """
        from vsim.analysis.report.page import report

        if not isinstance(decision, Decision | None):
            raise TypeError(f"decision must be what decide() returned, got {given(decision)}")
        pages = {
            f"{in_short(self.parameters[size])} parameters": self.comparisons[size]
            for size in reversed(self.comparisons)
        }
        content = "".join(own._repr_html_() for own in (decision, self) if own is not None)
        page = report(pages, title=a_text("title", title), section=("Order by size", content))
        return page if path is None else page.save(path)

    def _repr_html_(self) -> str:
        from vsim.figures.paper import image_html

        return self.table("html") + image_html(self.plot(), "final loss against parameters")

    def __repr__(self) -> str:
        return f"Ladder of {len(self.names)} strategies\n{self.table()}"


def _ends(rows: list[Any]) -> list[Any]:
    """Return the first and the last row."""
    return rows if len(rows) < 2 else [rows[0], rows[-1]]


def _losses(comparison: Comparison) -> dict[str, dict[int, float]]:
    """Return name → seed → final loss, NaN for a run that failed."""
    return by_seed(comparison)
