"""The questions to a comparison: an argument that several take is one, and each result shows itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
from comparisons_by_hand import comparison, run
from errors import refused

import vsim

PRICES: dict[str, Any] = {"network": "1 Gbit/s", "compute": 1.0}
# Question → a call that has an answer, without network and compute; and the arguments that it shares with others.
QUESTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"loss": 1.5}, "loss stays network compute"),
    "table": ({"loss": 1.5}, "loss stays network compute"),
    "best": ({"within": {"time": "1 h"}}, "network compute"),
    "cheapest": ({"loss": 1.5, "hours": 1}, "loss stays network compute"),
    "winners": ({"loss": 1.5}, "loss stays compute"),
    "steps_to": ({"loss": 1.5}, "loss stays"),
    "pareto": ({"cost": "time"}, "network compute"),
    "plot": ({"x": "time"}, "network compute"),
    "figure": ({"x": "time"}, "network compute"),
    "report": ({}, "network compute"),
}
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "loss": ("low", TypeError, "loss must be a number, got 'low'"),
    "stays": (1, TypeError, "stays must be True or False, got 1"),
    "network": ("fast", ValueError, "network: bandwidth must be a rate in bits"),
    "compute": (-1, ValueError, "compute: seconds_per_step must be > 0, got -1"),
}
SHARED = [(question, argument) for question, (_, shared) in QUESTIONS.items() for argument in shared.split()]


def runs() -> vsim.Comparison:
    finals = {"A": (1.0, 1.1), "B": (1.2, 1.25)}
    made = {
        name: [run([2.0, loss], 10, seed=i, payload=1e3) for i, loss in enumerate(own)] for name, own in finals.items()
    }
    return comparison(**made)


def asked(question: str, of: vsim.Comparison, **given: Any) -> Any:
    """The answer on the network of `PRICES`, with further or other arguments."""
    own, shared = QUESTIONS[question]
    return getattr(of, question)(**own | {name: PRICES[name] for name in shared.split() if name in PRICES} | given)


@pytest.mark.parametrize(("question", "argument"), SHARED)
def test_an_argument_of_several_questions_has_one_check(question: str, argument: str) -> None:
    value, error, said = WRONG[argument]
    with pytest.raises(error, match=f"^{re.escape(said)}"):
        asked(question, runs(), **{argument: value})


@pytest.mark.parametrize("question", [name for name, (_, shared) in QUESTIONS.items() if "compute" in shared])
def test_network_and_compute_are_the_comparison_s_if_none_is_given(question: str) -> None:
    own, other = runs(), runs()
    own.network, own.compute = vsim.Network.of(PRICES["network"]), vsim.Compute.of(PRICES["compute"])
    given, kept = asked(question, other), getattr(own, question)(**QUESTIONS[question][0])
    assert shown(given) == shown(kept) != ""
    if question not in ("report", "winners"):  # a page prices where its sliders stand; a map is over all networks
        with refused(TypeError, "network is missing"):
            getattr(other, question)(**QUESTIONS[question][0] | {"compute": 1.0})


def shown(result: Any) -> str:
    """What a user sees of a result, as text."""
    if hasattr(result, "get_lines"):
        return str([line.get_xydata().tolist() for line in result.get_lines()])
    if hasattr(result, "axes"):
        return str([shown(ax) for ax in result.axes])
    return str(getattr(result, "html", None) or repr(result))


@pytest.mark.parametrize("question", ["best", "cheapest", "differences", "pareto", "winners", "describe"])
def test_each_result_shows_itself(question: str) -> None:
    made = runs()
    calls: dict[str, Any] = {
        "best": made.best,
        "cheapest": lambda: made.cheapest(1.5),
        "differences": made.differences,
        "pareto": made.pareto,
        "winners": lambda: made.winners(1.5, compute=1.0),
        "describe": made.describe,
    }
    result = calls[question]()
    assert "A" in repr(result) and not repr(result).startswith("<")
    if not isinstance(result, str):  # a sentence, which a notebook shows by its repr
        assert re.search(r"<(table|img|pre)\b", result._repr_html_())
