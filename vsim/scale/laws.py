"""Scaling laws: the loss by the size of the model, the number of nodes and the steps between syncs.

    power        L = A · N^a · M^b · H^c
    floor        L = A · N^a · M^b · H^c + C
    interaction  L = A · N^(a + b·M) · H^c + C

with N parameters, M nodes (replicas) and H steps between syncs; a factor is left out if its variable does not vary. The
fit follows "Communication-Efficient Language Model Training Scales Reliably and Robustly: Scaling Laws for DiLoCo"
[Charles et al. 2025, arXiv:2503.09799]: least Huber loss of log law − log measurement, started from many points.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.analysis.compared import Runs
from vsim.analysis.size_order import FAR
from vsim.arguments import given, one_of, real_number, true_or_false, whole_number
from vsim.figures.looks import COLOURS
from vsim.figures.style import STYLE, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from vsim.analysis.comparison import Comparison

Floats = NDArray[np.float64]
FORMS = ("power", "floor", "interaction")
VARIABLES = ("N", "M", "H")
# δ of Huber's loss: larger differences of logarithms count linearly, not squared. Few runs of a sweep differ from a law
# by more than two per cent, so that only outliers count less.
_HUBER = 0.02
_STARTS, _KEPT = 32, 4  # the fit begins at those with the least loss; in 144 tried fits the best one was enough
_MOST_DRAWS = 100_000  # of the bootstrap
# The lowest logarithm of a floor; below it, the data are of a power law.
_LOWEST = -50.0
# The share of the lowest loss below which a floor hardly changes a law.
_NO_FLOOR = 0.01
# The p-value of an F test at which the residuals of a form are larger than those of the best.
_WORSE = 0.05

# Sizes of the paper of `diloco_2503_09799` that it holds out.
_HELD_OUT = (4e9, 10e9)


@dataclass(frozen=True)
class Prediction:
    """A predicted loss, with its interval and the evidence for the law.

    Attributes:
        loss: the law's loss. low, high: the 95 % interval of the law's loss, by the bootstrap, together with the
            intervals of the forms that fit alike; it does not include the noise of a single run.
        factor: the size divided by the largest measured size; above 1, the law is extrapolated.
        held_out_error: relative error of the law at the largest measured size when fitted to the other sizes.
    """

    loss: float
    low: float
    high: float
    factor: float
    held_out_error: float

    def __repr__(self) -> str:
        known = "" if np.isnan(self.held_out_error) else f"; {self.held_out_error:.2%} off at the size held out"
        first = "extrapolated: " if self.factor > FAR else ""
        return (
            f"{first}{self.loss:.4g} ({self.low:.4g} to {self.high:.4g}), {self.factor:.3g} × the largest size{known}"
        )


@dataclass(frozen=True, repr=False)
class Law:
    """A fitted scaling law; see `fit`.

    Attributes:
        form: the name of the form.
        parameters: "A", exponents "a" (of N), "b" (of M) and "c" (of H), and "C", as far as the law has them.
        intervals: name of a parameter → 95 % interval by the bootstrap.
        errors: name of a form → its mean relative error at the largest size, when fitted to the other sizes.
        data: the columns that the law was fitted to.
        alike: laws of other forms that the data do not tell from this one, if `fit` chose the form.
    """

    form: str
    parameters: Mapping[str, float]
    data: Mapping[str, Floats]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    draws: Sequence[Floats] = field(default=(), repr=False)
    alike: Sequence[Law] = field(default=(), repr=False)

    def __repr__(self) -> str:
        own, forms = self.parameters, {"a": "N", "b": "M", "c": "H"}
        if self.form == "interaction":
            factors = [f"N^({own['a']:.4g} {own['b']:+.4g}·M)", *([f"H^{own['c']:.4g}"] if "c" in own else [])]
        else:
            factors = [f"{of}^{own[name]:.4g}" for name, of in forms.items() if name in own]
        floor = f" + {own['C']:.4g}" if "C" in own else ""
        errors = ", ".join(f"{form} {error:.2%}" for form, error in self.errors.items())
        held_out = f"; off at the size held out: {errors}" if errors else ""
        alike = f"; fits alike: {', '.join(law.form for law in self.alike)}" if self.alike else ""
        return f"L = {own['A']:.4g} · {' · '.join(factors)}{floor}, of {len(self.data['loss'])} losses{held_out}{alike}"

    def _interval(self, value: float, drawn: Floats, positive: bool) -> tuple[float, float]:
        """Return the 95 % interval of `value`, by Student's t, from its spread in fits to resampled residuals.

        Args:
            drawn: the value in each of these fits. positive: whether the value is above 0; if so, use logarithms.
        """
        from scipy.stats import t

        if not len(drawn):
            return np.nan, np.nan
        width = t.ppf(0.975, len(self.data["loss"]) - len(self.parameters))
        if positive:
            apart = float(np.exp(width * np.std(np.log(drawn), ddof=1)))
            return float(value / apart), float(value * apart)
        return float(value - width * np.std(drawn, ddof=1)), float(value + width * np.std(drawn, ddof=1))

    def predict(self, **at: float) -> Prediction:
        """Return the law's loss; give those of N, M and H that are variables of the law.

        Its interval holds those of all forms that fit alike: in the data they agree, and far from them they do not.

        Raises:
            TypeError: a variable is missing, or the law does not have it. ValueError: a value is not above 0.
        """
        needed = [name for name in VARIABLES if name in self.data]
        if sorted(at) != sorted(needed):
            raise TypeError(f"the law is of {', '.join(needed)}; predict() got {', '.join(at) or 'nothing'}")
        point = {name: np.array([real_number(name, at[name], above=0)]) for name in needed}
        loss, *drawn = (
            float(np.exp(_log_loss(self.form, values, point))[0])
            for values in (np.array([*self.parameters.values()]), *map(np.asarray, self.draws))
        )
        ends = [self._interval(loss, np.array(drawn), True)]
        for other in self.alike:
            prediction = other.predict(**at)
            ends.append((prediction.low, prediction.high))
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        factor = at["N"] / self.data["N"].max() if "N" in at else 1.0
        return Prediction(loss, low, high, factor, self.errors.get(self.form, np.nan))

    def to_pandas(self) -> pd.DataFrame:
        """Return the data with the law's losses and relative errors."""
        import pandas as pd

        values = np.array([*self.parameters.values()])
        law = np.exp(_log_loss(self.form, values, self.data))
        return pd.DataFrame({**self.data, "law": law, "error": law / self.data["loss"] - 1})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw loss against N on logarithmic axes: measured points, and a line of the law for each M and H."""
        import matplotlib.pyplot as plt

        from vsim.figures.paper import axes_of, plain_ticks  # loads matplotlib

        others = [name for name in ("M", "H") if name in self.data]
        values = np.array([*self.parameters.values()])
        ax = plt.subplots(figsize=(4.5, 3.2), layout="constrained")[1] if ax is None else axes_of(ax, 4.5, 3.2)
        empty = np.zeros((len(self.data["loss"]), 0))
        rows = np.stack([self.data[name] for name in others], 1) if others else empty
        for number, own in enumerate(np.unique(rows, axis=0)):
            same = (rows == own).all(1)
            sizes = np.geomspace(self.data["N"].min(), self.data["N"].max(), 100)
            at = {"N": sizes, **{name: np.full(100, value) for name, value in zip(others, own, strict=True)}}
            label = ", ".join(f"{name} = {value:g}" for name, value in zip(others, own, strict=True))
            colour = COLOURS[number % len(COLOURS)]
            ax.plot(sizes, np.exp(_log_loss(self.form, values, at)), color=colour, lw=1)
            ax.plot(self.data["N"][same], self.data["loss"][same], "o", color=colour, ms=3, label=label)
        ax.set(xscale="log", yscale="log", xlabel="parameters", ylabel="loss")
        for axis in (ax.xaxis, ax.yaxis):
            plain_ticks(axis)
        ax.xaxis.set_major_formatter("{x:g}")
        styled(ax)
        if others:
            ax.legend(frameon=False, fontsize=STYLE["legend.fontsize"])
        return ax


def fit(frame: Any, form: str | None = None, *, bootstrap: int = 200, seed: int = 0, delta: float = _HUBER) -> Law:
    """Fit a scaling law to measured losses.

    Args:
        frame: columns "loss" and "N", and "M" or "H" if they vary: a DataFrame, or a dict of lists.
        form: "power", "floor" or "interaction"; default: the form that predicts the largest size best when fitted to
            the other sizes. The law is then fitted to all sizes, and so are the other forms: intervals of predictions
            hold those of every form whose residuals are not significantly larger (F test, p > 0.05).
        bootstrap: number of fits to resampled residuals, for intervals, 0 to 100,000.
        seed: seed of the resampling and of the starts.
        delta: δ of Huber's loss.

    Warns if a form leaves the residuals one degree of freedom: intervals are then wide, and often miss the truth.

    Raises:
        TypeError: frame is not a table of numbers.
        ValueError: a column is missing, a value is not above 0, or there are too few rows for the form.
    """
    data = _columns(frame)
    bootstrap = whole_number("bootstrap", bootstrap, at_least=0, at_most=_MOST_DRAWS)
    delta = real_number("delta", delta, above=0)
    forms = [one for one in FORMS if one != "interaction" or "M" in data] if form is None else [_form(form, data)]
    stream = np.random.default_rng(whole_number("seed", seed, at_least=0))
    largest = data["N"] == data["N"].max()
    errors = {}
    for one in forms:
        if len(np.unique(data["N"][~largest])) > 1:
            below = {name: values[~largest] for name, values in data.items()}
            if len(below["loss"]) > len(_names(one, data)):
                held_out = {name: values[largest] for name, values in data.items()}
                found = np.exp(_log_loss(one, _fitted(one, below, delta, stream), held_out))
                errors[one] = float(np.mean(np.abs(found / held_out["loss"] - 1)))
    chosen = min(errors, key=errors.__getitem__, default=forms[0])
    names = _names(chosen, data)
    if len(data["loss"]) <= len(names):
        raise ValueError(f"{chosen} has {len(names)} parameters, and there are {len(data['loss'])} rows to fit it to")
    if len(data["loss"]) == len(names) + 1:
        warnings.warn(
            f"{len(names)} parameters of {chosen} and {len(data['loss'])} rows leave one degree of freedom: intervals "
            "say little; give more rows, or a form with fewer parameters",
            stacklevel=2,
        )
    fitted = {one: _fitted(one, data, delta, stream) for one in forms if len(_names(one, data)) < len(data["loss"])}
    law, *others = (
        _law(one, fitted[one], data, delta, stream, bootstrap, errors)
        for one in sorted(_alike(fitted, data, chosen), key=lambda one: one != chosen)
    )
    return replace(law, alike=others)


def _alike(fitted: Mapping[str, Floats], data: Mapping[str, Floats], chosen: str) -> list[str]:
    """Return the chosen form, and the forms whose residuals are not significantly larger than the smallest."""
    from scipy.special import fdtrc

    freedom = {one: len(data["loss"]) - len(values) for one, values in fitted.items()}
    variance = {
        one: float(np.square(_log_loss(one, values, data) - np.log(data["loss"])).sum()) / freedom[one]
        for one, values in fitted.items()
    }
    least = min(variance, key=variance.__getitem__)
    tiny = 1e-20  # of losses without noise
    return [
        one
        for one in fitted
        if one == chosen
        or fdtrc(freedom[one], freedom[least], (variance[one] + tiny) / (variance[least] + tiny)) > _WORSE
    ]


def _law(
    form: str,
    values: Floats,
    data: Mapping[str, Floats],
    delta: float,
    stream: np.random.Generator,
    bootstrap: int,
    errors: Mapping[str, float],
) -> Law:
    """Return the law of parameters fitted to the data, with intervals from fits to resampled residuals."""
    names, logs = _names(form, data), _log_loss(form, values, data)
    residuals = np.log(data["loss"]) - logs
    residuals = (residuals - residuals.mean()) * np.sqrt(len(logs) / (len(logs) - len(names)))
    draws = [
        _fitted(form, {**data, "loss": np.exp(logs + stream.choice(residuals, len(logs)))}, delta, stream, values)
        for _ in range(bootstrap)
    ]
    law = Law(form, dict(zip(names, values.tolist(), strict=True)), data, errors=errors, draws=draws)
    columns = zip(names, values, np.transpose(draws) if draws else (), strict=False)
    return replace(law, intervals={name: law._interval(value, own, name in "AC") for name, value, own in columns})


def diloco_2503_09799(form: str = "power", *, held_out: bool = False) -> Law:
    """Return the law that fits DiLoCo's published losses up to 2.4 billion parameters, in N parameters and M replicas.

    Source: arXiv:2503.09799; its joint fit of the power law has A = 19.226, a = −0.0985 and b = 0.0116. The paper does
    not list losses by H.

    Args:
        form: see `fit`. held_out: fit also to the sizes of 4 and 10 billion, which the paper holds out.
    """
    held_out = true_or_false("held_out", held_out)
    losses = published()
    losses = losses[(losses.paper == "2503.09799") & (losses.algorithm == "DiLoCo")]
    return fit(losses if held_out else losses[~losses.N.isin(_HELD_OUT)], form)


def published() -> pd.DataFrame:
    """Return published losses of language models trained with little communication, and of data-parallel training.

    A row is a cell of a paper's table. Compare cells of the same paper and data only: models, tokenizers and validation
    data differ between papers. Cells that two papers share are listed once, under the earlier paper; perplexities are
    given as their logarithms.

    Returns:
        A DataFrame `paper, table, data, N, algorithm, M, H, tokens, flops, loss, read`. paper: its arXiv number. N: the
        number of parameters, as the paper rounds it. M: replicas. H: steps between syncs. tokens, flops: of the whole
        training. M, H, tokens and flops are NaN, and data is missing, where they are not stated or do not apply. read:
        where the number was read, and what was inferred.
    """
    import pandas as pd

    return pd.read_csv(Path(__file__).with_name("published.csv"), dtype={"paper": str, "table": str, "data": str})


def penalty(
    comparison: Comparison, to: str = "AllReduce", *, loss: float | None = None, level: float = 0.95
) -> pd.DataFrame:
    """Return the penalty of rare communication: a strategy's examples to reach a loss, divided by those of `to`.

    Runs of `to` may be shorter than other runs, see `max_steps` of `vsim.compare`. A loss counts as reached only when
    it is measured, so a smaller `val_interval` gives more precise ratios.

    Args:
        to: the strategy to compare with.
        loss: the loss to reach; default: the highest final loss of `to` over its seeds, so that all its seeds reach it.
        level: the confidence level of the intervals, in (0, 1).

    Returns:
        A DataFrame `strategy, ratio, low, high, at_least, seeds, reached, tied`. ratio: the geometric mean over the
        seeds of both strategies; NaN unless all runs reach the loss. at_least: the ratio if runs that miss the loss had
        reached it in their last steps. low, high: the interval of the ratio, by Student's t of its logarithms; NaN with
        one seed. reached: the number of seeds that reach the loss. tied: whether the interval contains 1.

    Raises:
        ValueError: there is no strategy `to`, or it does not reach the loss.
    """
    import pandas as pd

    from vsim.analysis.statistics import confidence_interval

    if not isinstance(comparison, Runs):
        raise TypeError(f"comparison must be a vsim.Comparison, got {given(comparison)}")
    one_of("to", to, comparison)
    level = real_number("level", level, above=0, below=1)
    if loss is None:
        loss = max(run.history.last("global_loss") for run in comparison.runs(to))
    reached = comparison.steps_to(real_number("loss", loss), of="examples")
    of_to = {run.seed: own for run, own in zip(comparison.runs(to), reached[to], strict=True)}
    if not all(own > 0 for own in of_to.values()):
        raise ValueError(f"loss must be one that {to} reaches with all its seeds, and not before step 1, got {loss:g}")
    rows = []
    for name in comparison:
        if name == to:
            continue
        pairs = [(run, own) for run, own in zip(comparison.runs(name), reached[name], strict=True) if run.seed in of_to]
        ends = [np.nan if run.failed else run.history.last("examples") for run, _ in pairs]
        logs = np.log([own / of_to[run.seed] for run, own in pairs])
        least = np.log([end / of_to[run.seed] for (run, _), end in zip(pairs, ends, strict=True)])
        low, high = np.exp(confidence_interval(logs, level)) if len(logs) > 1 else (np.nan, np.nan)
        row = {"strategy": name, "ratio": np.exp(logs.mean()), "low": low, "high": high}
        row |= {"at_least": np.exp(np.where(np.isnan(logs), least, logs).mean())}
        row |= {"seeds": len(logs), "reached": int((~np.isnan(logs)).sum()), "tied": bool(low <= 1 <= high)}
        rows.append(row)
    return pd.DataFrame(rows)


def _columns(frame: Any) -> dict[str, Floats]:
    """Return N, the loss, and the columns M and H if they vary, as arrays."""
    if not (isinstance(frame, Mapping) or (hasattr(frame, "columns") and hasattr(frame, "__getitem__"))):
        raise TypeError(f"frame must be a DataFrame or a dict of lists, got {given(frame)}")
    missing = [name for name in ("N", "loss") if name not in frame]
    if missing:
        raise ValueError(
            f"frame has no column {missing[0]!r}; it needs N and loss, and may have M and H, got {given(list(frame))}"
        )
    data = {}
    for name in (*VARIABLES, "loss"):
        if name in frame:
            try:
                data[name] = np.asarray(frame[name], dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise TypeError(f"frame[{name!r}] must be numbers, got {given(frame[name])}") from error
    for name, values in data.items():
        if values.ndim != 1 or len(values) != len(data["loss"]) or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(
                f"frame[{name!r}] must have a finite number above 0 in each of its rows, got {given(frame[name])}"
            )
    if len(np.unique(data["N"])) < 2:
        raise ValueError("frame['N'] must have at least two sizes, or nothing tells how the loss depends on it")
    return {name: values for name, values in data.items() if name in ("N", "loss") or len(np.unique(values)) > 1}


def _form(form: str, data: Mapping[str, Floats]) -> str:
    if one_of("form", form, FORMS) == "interaction" and "M" not in data:
        raise ValueError("form='interaction' is of N and M, and M does not vary")
    return form


def _names(form: str, data: Mapping[str, Floats]) -> list[str]:
    """Return the names of a form's parameters, in order."""
    exponents = [exponent for exponent, name in zip("abc", VARIABLES, strict=True) if name in data]
    return ["A", *exponents, *(["C"] if form != "power" else [])]


def _log_loss(form: str, values: Floats, at: Mapping[str, Floats]) -> Floats:
    """Return the logarithm of the law's loss, with the parameters in the order of `_names`."""
    own = dict(zip(_names(form, at), values, strict=True))
    logs = np.log(own["A"]) + own["a"] * np.log(at["N"])
    if "M" in at:
        logs = logs + own["b"] * (np.log(at["M"]) if form != "interaction" else at["M"] * np.log(at["N"]))
    if "H" in at:
        logs = logs + own["c"] * np.log(at["H"])
    return logs if form == "power" else np.logaddexp(logs, np.log(own["C"]))


def _fitted(
    form: str, data: Mapping[str, Floats], delta: float, stream: np.random.Generator, near: Floats | None = None
) -> Floats:
    """Return the parameters with the least Huber loss, starting from many points, or from the parameters `near`."""
    from scipy.optimize import least_squares
    from scipy.special import huber

    names, logs = _names(form, data), np.log(data["loss"])
    columns = {
        "A": np.ones_like(logs),
        **{name: np.log(data[of]) for name, of in zip("abc", VARIABLES, strict=True) if of in data},
    }
    if form == "interaction":
        columns["b"] = data["M"] * columns["a"]
    design = np.stack([columns[name] for name in names if name != "C"], 1)
    slopes = design.shape[1]

    # Parameters are exponents, and the logarithms of A and C.
    def apart(own: Floats) -> Floats:
        known = design @ own[:slopes]
        return (known if form == "power" else np.logaddexp(known, max(float(own[slopes]), _LOWEST))) - logs

    def jacobian(own: Floats) -> Floats:
        if form == "power":
            return design
        share = 1 / (
            1 + np.exp(np.minimum(max(float(own[slopes]), _LOWEST) - design @ own[:slopes], 50))
        )  # above the floor
        return np.column_stack([design * share[:, None], 1 - share])

    def start(floor: float) -> Floats:
        linear = np.linalg.lstsq(design, np.log(data["loss"] - floor), rcond=None)[0]
        return np.array([*linear, *([np.log(max(floor, 1e-12))] if form != "power" else [])])

    least = float(data["loss"].min())
    if near is None:
        shares = stream.uniform(0.0, 0.95, _STARTS) if form != "power" else [0.0]
        starts = sorted((start(share * least) for share in shares), key=lambda one: huber(delta, apart(one)).sum())
    else:
        positive = np.array([name in "AC" for name in names])
        starts = [np.where(positive, np.log(np.where(positive, near, 1.0)), near)]
        if form != "power" and near[slopes] < _NO_FLOOR * least:  # where a floor makes no difference, none is found
            starts.append(start(least / 2))
    options: dict[str, Any] = {"loss": "huber", "f_scale": delta, "x_scale": "jac"}
    found = [least_squares(apart, one, jacobian, **options) for one in starts[:_KEPT]]
    best = min(found, key=lambda one: float(one.cost)).x
    return np.array([np.exp(max(own, _LOWEST)) if name in "AC" else own for name, own in zip(names, best, strict=True)])
