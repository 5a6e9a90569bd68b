"""Scaling laws: the published fit, known laws found again, intervals that hold, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from comparisons_by_hand import check_refusals, run

from vsim import Comparison, scaling
from vsim.analysis.size_order import order
from vsim.scaling import penalty


def drawn(law: Any, noise: float = 0.0, seed: int = 0, sizes: Any = (1e5, 3e5, 1e6, 3e6)) -> dict[str, Any]:
    """Losses of a law for some sizes, nodes and steps between syncs, with noise of their logarithms."""
    stream = np.random.default_rng(seed)
    N, M, H = (axis.ravel() for axis in np.meshgrid(sizes, (1.0, 4.0, 16.0), (10.0, 100.0), indexing="ij"))
    return {"N": N, "M": M, "H": H, "loss": law(N, M, H) * np.exp(noise * stream.standard_normal(len(N)))}


def power(N: Any, M: Any, H: Any) -> Any:
    return 20 * N**-0.1 * M**0.02 * H**0.01


def floored(N: Any, M: Any, H: Any) -> Any:
    return 200 * N**-0.3 * M**0.05 * H**0.02 + 1.5


def test_the_published_fit() -> None:
    law = scaling.diloco_2503_09799()
    assert law.parameters == pytest.approx({"A": 19.226, "a": -0.0985, "b": 0.0116}, rel=0.01)
    published = {
        (4e9, 1): 2.219,
        (4e9, 2): 2.220,
        (4e9, 4): 2.230,
        (1e10, 1): 2.086,
        (1e10, 2): 2.086,
        (1e10, 4): 2.096,
    }
    errors = {at: law.predict(N=at[0], M=at[1]).loss / loss - 1 for at, loss in published.items()}
    assert all(-0.046 <= error <= -0.005 for error in errors.values()), errors  # a floor is missing
    assert errors[1e10, 2] < errors[4e9, 2]
    with_floor = scaling.diloco_2503_09799("floor")
    assert all(abs(with_floor.predict(N=n, M=m).loss / loss - 1) < 0.02 for (n, m), loss in published.items())
    assert len(scaling.diloco_2503_09799(held_out=True).data["loss"]) == len(law.data["loss"]) + 6


def test_every_published_cell_says_where_it_was_read() -> None:
    losses = scaling.published()
    assert not losses[["paper", "table", "N", "algorithm", "loss", "read"]].isna().any(axis=None)
    cell = ["paper", "table", "data", "N", "algorithm", "M", "H", "tokens"]
    assert not losses.duplicated(cell).any() and not losses.duplicated([c for c in cell if c != "table"]).any()
    assert losses.loss.between(1.8, 3.7).all() and losses.groupby("paper").size().to_dict() == {
        "2311.08105": 11,
        "2501.18512": 47,
        "2502.12996": 21,
        "2503.09799": 43,
        "2505.23725": 23,
    }
    parallel = losses.algorithm.str.startswith("data parallel")
    assert losses[parallel][["M", "H"]].isna().all(axis=None)


def test_the_ladders_rule_orders_published_losses_as_they_were_measured() -> None:
    losses = scaling.published()
    losses = losses[(losses.paper == "2503.09799") & ~(losses.M > 4)]
    names = losses.algorithm.where(losses.M.isna(), losses.algorithm + " " + losses.M.astype(str))
    frame = losses.assign(strategy=names, parameters=losses.N, seed=0)
    decided = {}
    for largest, to in ((1.3e9, 2.4e9), (2.4e9, 4e9), (2.4e9, 10e9)):
        measured = frame[frame["N"] == to].set_index("strategy").loss
        found = [pair for pair in order(frame[frame["N"] <= largest], to).pairs if pair.decided]
        assert all(measured[pair.ahead] <= measured[pair.behind] for pair in found)
        decided[to] = len(found)
    assert decided == {2.4e9: 4, 4e9: 4, 10e9: 1}


@pytest.mark.parametrize(("law", "form"), [pytest.param(power, "power", marks=pytest.mark.slow), (floored, "floor")])
def test_a_known_law_is_found_by_the_size_that_is_held_out(law: Any, form: str) -> None:
    found = scaling.fit(drawn(law), bootstrap=0)
    assert found.form == form and found.errors[form] == min(found.errors.values()) < 1e-3
    prediction = found.predict(N=1e8, M=8, H=50)
    assert prediction.loss == pytest.approx(law(1e8, 8.0, 50.0), rel=1e-3)
    assert prediction.factor == pytest.approx(1e8 / 3e6) and "off at the size held out" in repr(prediction)
    assert repr(found.predict(N=1e9, M=8, H=50)).startswith("extrapolated")
    assert found.to_pandas()["error"].abs().max() < 1e-3


def test_columns_that_do_not_vary_are_no_part_of_the_law() -> None:
    data = drawn(power)
    one = {name: values[(data["M"] == 4) & (data["H"] == 10)] for name, values in data.items()}
    law = scaling.fit(one, "power", bootstrap=0)
    assert sorted(law.parameters) == ["A", "a"] and law.parameters["a"] == pytest.approx(-0.1)
    ax = law.plot()
    assert ax.get_legend() is None and ax.get_xscale() == "log"


def test_a_law_is_drawn_and_written_as_a_formula() -> None:
    law = scaling.fit(drawn(floored), bootstrap=0)
    ax = law.plot()
    lines, dots = ax.get_lines()[::2], ax.get_lines()[1::2]
    assert len(lines) == len(dots) == 6 and ax.get_xscale() == ax.get_yscale() == "log"
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [f"M = {M}, H = {H}" for M in (1, 4, 16) for H in (10, 100)]
    for line, own, (M, H) in zip(lines, dots, itertools.product((1.0, 4.0, 16.0), (10.0, 100.0)), strict=True):
        assert line.get_ydata() == pytest.approx(floored(line.get_xdata(), M, H), rel=1e-3)
        assert own.get_ydata() == pytest.approx(floored(own.get_xdata(), M, H))
    assert repr(law).startswith(
        "L = 200 · N^-0.3 · M^0.05 · H^0.02 + 1.5, of 24 losses; off at the size held out: power "
    )
    interaction = scaling.fit(drawn(floored), "interaction", bootstrap=0)
    assert "·M) · H^" in repr(interaction) and interaction.predict(N=1e7, M=2, H=20).factor == pytest.approx(10 / 3)


def test_an_outlier_counts_less_than_its_square() -> None:
    data = drawn(power, 0.003)
    data["loss"][5] *= 1.5
    robust, squares = (scaling.fit(data, "power", bootstrap=0, delta=delta) for delta in (0.005, 10.0))
    off = [abs(law.parameters["a"] + 0.1) for law in (robust, squares)]
    assert off[0] < off[1] / 3


@pytest.mark.slow
def test_intervals_hold_the_truth() -> None:
    """In 200 draws of noise, nominal 95 % intervals of every parameter hold it in 90 to 97 %."""
    truth, held = {"A": 20.0, "a": -0.1, "b": 0.02, "c": 0.01}, dict.fromkeys("Aabc", 0)
    for seed in range(200):
        law = scaling.fit(drawn(power, 0.01, seed), "power", bootstrap=40, seed=seed)
        for name, (low, high) in law.intervals.items():
            held[name] += low <= truth[name] <= high
    assert all(0.90 <= count / 200 <= 0.97 for count in held.values()), held


def low_floor(N: Any, M: Any, H: Any) -> Any:
    return 30 * N**-0.15 * M**0.02 * H**0.01 + 0.5


@pytest.mark.slow
def test_a_prediction_holds_those_of_all_forms_that_fit_alike() -> None:
    """Data of a law with a low floor do not tell the two forms apart, which 100 times beyond are far apart."""
    data = {name: own[drawn(low_floor)["H"] == 10] for name, own in drawn(low_floor, 0.004, 7).items()}
    found = scaling.fit(data, bootstrap=20)
    forms = [found.form, *(law.form for law in found.alike)]
    assert {"power", "floor"} <= set(forms) <= {"power", "floor", "interaction"} and len(set(forms)) == len(forms)
    assert f"; fits alike: {', '.join(forms[1:])}" in repr(found)
    prediction, others = found.predict(N=3e8, M=16), [law.predict(N=3e8, M=16) for law in found.alike]
    alone = scaling.fit(data, found.form, bootstrap=20).predict(N=3e8, M=16)
    assert prediction.low == pytest.approx(min(alone.low, *(own.low for own in others)), rel=0.01)
    assert prediction.high == pytest.approx(max(alone.high, *(own.high for own in others)), rel=0.01)
    assert prediction.loss == pytest.approx(alone.loss, rel=1e-6)
    assert prediction.high - prediction.low > 2 * (alone.high - alone.low)  # the form alone is too sure
    told = scaling.fit(drawn(floored), bootstrap=0)  # without noise, nothing else fits
    assert told.form == "floor" and not told.alike and "alike" not in repr(told)


def test_one_degree_of_freedom_is_warned_of() -> None:
    frame = {"N": [1e5, 1e6, 1e7, 1e8], "loss": [3.0, 2.5, 2.2, 2.0]}
    with pytest.warns(UserWarning, match="3 parameters of floor and 4 rows leave one degree of freedom"):
        scaling.fit(frame, "floor", bootstrap=0)
    scaling.fit(frame, "power", bootstrap=0)  # two degrees


@pytest.mark.slow
@pytest.mark.parametrize("law", [power, floored, low_floor])
def test_predictions_of_a_form_that_fit_chose_hold_the_truth(law: Any) -> None:
    """Of 60 draws, at 1, 10 and 100 times the largest size; the interval of the chosen form alone holds fewer."""
    held = dict.fromkeys((1, 10, 100), 0)
    for seed in range(60):
        data = drawn(law, 0.005, seed)
        data = {name: own[data["H"] == 10] for name, own in data.items()}
        found = scaling.fit(data, bootstrap=20, seed=seed)
        for factor in held:
            prediction = found.predict(N=3e6 * factor, M=16)
            held[factor] += prediction.low <= law(3e6 * factor, 16.0, 10.0) <= prediction.high
    assert min(held.values()) >= 54, held


def test_refused() -> None:
    frame: dict[str, Any] = {"N": [1.0, 2.0], "loss": [2.0, 1.0]}
    runs = descending(("AllReduce", 20, 1.0, 0), ("slow", 200, 2.0, 0))
    law = scaling.fit(drawn(power), "power", bootstrap=0)
    check_refusals(
        [
            (lambda: scaling.fit({"N": [1.0, 2.0]}), ValueError, ["column 'loss'"]),
            (lambda: scaling.fit(frame | {"loss": [1.0, -1.0]}), ValueError, ["frame['loss'] … above 0"]),
            (lambda: scaling.fit(frame | {"M": [1.0]}), ValueError, ["frame['M']"]),
            (lambda: scaling.fit(frame, form="cubic"), ValueError, ["form … cubic"]),  # type: ignore[arg-type]
            (lambda: scaling.fit(frame, form="interaction"), ValueError, ["M does not vary"]),
            (lambda: scaling.fit(frame, form="floor"), ValueError, ["3 parameters … 2 rows"]),
            (lambda: scaling.fit(frame, bootstrap=-1), ValueError, ["bootstrap"]),
            (lambda: law.predict(N=1e9), TypeError, ["N, M, H … predict() … N"]),
            (lambda: penalty(runs, to="DDP"), ValueError, ["to must be … 'AllReduce' … 'DDP'"]),
            (lambda: penalty(runs, loss=0.1), ValueError, ["loss must be one that AllReduce reaches … got 0.1"]),
            (lambda: penalty(runs, loss=11.0), ValueError, ["loss must be … not before step 1, got 11"]),
            (lambda: penalty(runs, level=1.0), ValueError, ["level must be … < 1, got 1"]),
        ]
    )


def descending(*runs: tuple[str, int, float, int]) -> Comparison:
    """Runs (name, steps, ratio, seed) whose loss after s steps is 10 / (1 + s / ratio)."""
    comparison = Comparison(4)
    for name, steps, ratio, seed in runs:
        comparison.add(name, run([10 / (1 + step / ratio) for step in range(steps + 1)], seed=seed))
    return comparison


def test_the_penalty_by_hand() -> None:
    ratios = {0: 2.0, 1: 4.0, 2: 8.0}
    comparison = descending(
        *(("AllReduce", 20, 1.0, seed) for seed in ratios),
        *(("as good", 25, ratio, seed) for seed, ratio in enumerate((0.5, 1.0, 2.0))),
        *(("slow", 200, ratio, seed) for seed, ratio in ratios.items()),
        *(("late", 100 if seed else 200, ratio, seed) for seed, ratio in ratios.items()),
        ("once", 200, 3.0, 1),
    )
    for loss in (None, 5.0):
        found = penalty(comparison, loss=loss).set_index("strategy")
        slow, late, once = (found.loc[name] for name in ("slow", "late", "once"))
        assert slow["ratio"] == slow["at_least"] == pytest.approx(4)  # the geometric mean
        apart = 4.302653 * np.log(2) / np.sqrt(3)  # Student's t of two degrees of freedom, times the standard error
        assert [slow["low"], slow["high"]] == pytest.approx([4 * np.exp(-apart), 4 * np.exp(apart)])
        assert (slow["seeds"], slow["reached"], bool(slow["tied"])) == (3, 3, True)
        assert once["ratio"] == pytest.approx(3) and np.isnan(once["low"]) and not once["tied"]
        if loss is None:  # of the end, after 20 steps: the third would have taken 160 of its 100
            assert np.isnan(late["ratio"]) and np.isnan(late["high"]) and late["reached"] == 2
            assert late["at_least"] == pytest.approx((2 * 4 * 100 / 20) ** (1 / 3))
            assert np.isnan(found.loc["as good", "ratio"]) and found.loc["as good", "reached"] == 2
        else:
            assert late["ratio"] == pytest.approx(4)
            assert found.loc["as good", "ratio"] == pytest.approx(
                (1 * 1 * 2) ** (1 / 3)
            )  # after 0.5 steps there is no loss
    comparison.runs("late")[2].failure = comparison.runs("late")[2].failure or "non-finite loss"
    assert np.isnan(penalty(comparison).set_index("strategy").loc["late", "at_least"])
    assert list(penalty(comparison, "once", loss=2.0).set_index("strategy")["seeds"]) == [1, 1, 1, 1]
