"""Scaling laws: the published fit, known laws found again, intervals that hold, and what is refused."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from errors import refused

from vsim import scaling


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


@pytest.mark.parametrize(("law", "form"), [(power, "power"), (floored, "floor")])
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
    plt.close("all")


def test_an_outlier_counts_less_than_its_square() -> None:
    data = drawn(power, 0.003)
    data["loss"][5] *= 1.5
    robust, squares = (scaling.fit(data, "power", bootstrap=0, delta=delta) for delta in (0.005, 10.0))
    off = [abs(law.parameters["a"] + 0.1) for law in (robust, squares)]
    assert off[0] < off[1] / 3


@pytest.mark.slow
def test_intervals_hold_the_truth() -> None:
    """In 300 draws of noise, nominal 95 % intervals of every parameter hold it in 90 to 97 %."""
    truth, held = {"A": 20.0, "a": -0.1, "b": 0.02, "c": 0.01}, dict.fromkeys("Aabc", 0)
    for seed in range(300):
        law = scaling.fit(drawn(power, 0.01, seed), "power", bootstrap=40, seed=seed)
        for name, (low, high) in law.intervals.items():
            held[name] += low <= truth[name] <= high
    assert all(0.90 <= count / 300 <= 0.97 for count in held.values()), held


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({"loss": None}, {}, "column 'loss'"),
        ({"loss": [1.0, -1.0]}, {}, "frame['loss'] … above 0"),
        ({"M": [1.0]}, {}, "frame['M']"),
        ({}, {"form": "cubic"}, "form … cubic"),
        ({}, {"form": "interaction"}, "M does not vary"),
        ({}, {"form": "floor"}, "3 parameters … 2 rows"),
        ({}, {"bootstrap": -1}, "bootstrap"),
    ],
)
def test_refused(change: dict[str, Any], options: dict[str, Any], said: str) -> None:
    frame = {"N": [1.0, 2.0], "loss": [2.0, 1.0], **change}
    with refused(ValueError, said):
        scaling.fit({name: values for name, values in frame.items() if values is not None}, **options)


def test_predict_takes_what_the_law_has() -> None:
    with refused(TypeError, "N, M, H … predict() … N"):
        scaling.fit(drawn(power), "power", bootstrap=0).predict(N=1e9)
