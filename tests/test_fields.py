"""An algorithm is one class whose fields are its arguments: docstrings, calls, copies, and classes of one's own."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from cut_runs import fit

import vsim
from vsim.core.fields import OPTIONS, arguments_of, parameters_of
from vsim.strategy import (
    Algorithm,
    Attack,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    SignVote,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    algorithm,
)

EXPORTED = {name: getattr(vsim.strategy, name) for name in vsim.strategy.__all__}
ALGORITHMS = [cls for cls in EXPORTED.values() if isinstance(cls, type) and issubclass(cls, Algorithm)]


LONGER = {"algorithm", "asynchronous", "per_node"}  # bases, which hold no algorithm


def documented(cls: type) -> list[str]:
    """The names under `Args:` of a class's docstring, without the options of all algorithms."""
    text = inspect.getdoc(cls) or ""
    args = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\S[^:]*):", args, re.M)
    return [name for entry in entries for name in entry.split(", ") if name not in (*OPTIONS, "…")]


@pytest.mark.parametrize("cls", ALGORITHMS, ids=lambda cls: cls.__name__)
def test_the_docstring_has_the_arguments(cls: type) -> None:
    own = sorted(name for name in parameters_of(cls) if name not in OPTIONS)
    assert sorted(documented(cls)) == own
    text = inspect.getdoc(cls) or ""
    assert not hasattr(cls, "family") or "\nPayload: " in text
    path = Path(inspect.getsourcefile(cls) or "")
    assert path.stem in LONGER or path.read_text("utf-8").count("\n") <= 200, path.name


@algorithm
class Annotated(FedAvgStrategy):
    """With a field more."""

    beta: float = 0.5


class Written(FedAvgStrategy):
    """With an `__init__` of its own."""

    def __init__(self, beta: float = 0.5, **options: Any) -> None:
        self.beta = beta
        super().__init__(**options)


class Open(FedAvgStrategy):
    """Takes any argument."""

    def __init__(self, *, beta: float = 0.5, **more: Any) -> None:
        super().__init__(**more)
        self.beta = beta


@pytest.mark.parametrize("cls", [Annotated, Written, Open])
def test_a_class_of_ones_own_is_shown_copied_swept_and_attacked(cls: Any) -> None:
    made = cls(beta=0.25, lr=0.1)
    assert repr(made) == f"{cls.__name__}(beta=0.25, lr=0.1)"
    for other in (copy.copy(made), copy.deepcopy(made), cloudpickle.loads(cloudpickle.dumps(made))):
        assert repr(other) == repr(made) and other.beta == 0.25 and other.H == 1
    assert repr(pickle.loads(pickle.dumps(made))) == repr(made)
    assert list(vsim.grid(cls, beta=[0.1, 0.2])) == [f"{cls.__name__} beta=0.1", f"{cls.__name__} beta=0.2"]
    attacked = type(made)(**arguments_of(made), attack=Attack("sign_flip", share=0.3))
    assert attacked.average.attack is not None and made.average.attack is None
    history = fit(made, max_steps=2).history
    assert history.config["strategy"]["call"] == repr(made) and history.config["strategy"]["beta"] == 0.25


def test_calls_that_are_wrong_name_what_is_right() -> None:
    for call, words in (
        (lambda: DiLoCoStrategy(h=3), "'h'; did you mean 'H'"),  # type: ignore[call-arg]
        (lambda: DiLoCoStrategy(10), "DiLoCoStrategy(outer_optim=…, H=…"),  # type: ignore[misc]
        (lambda: DiLoCoStrategy(every=3), "every is EXO Gym's name of H"),  # type: ignore[call-arg]
        (lambda: Written(0.5, "sgd"), "Written(beta, inner_optim=…"),
        (lambda: SignVote(5), "SignVote() takes no arguments, got 5"),  # type: ignore[call-arg]
        (lambda: Annotated(gamma=1), "'gamma'"),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match=re.escape(words)):
            call()


def test_strategies_compose_to_the_bit() -> None:
    """SPARTA and DiLoCo as parts are SPARTADiLoCoStrategy."""
    parts: list[Algorithm] = [SPARTAStrategy(p_sparta=0.5), DiLoCoStrategy(H=3)]
    options: dict[str, Any] = {"deterministic": True, "max_steps": 7}
    composed = fit(CommunicateOptimizeStrategy(parts, lr=0.01), **options)
    whole = fit(SPARTADiLoCoStrategy(p_sparta=0.5, H=3, lr=0.01), **options)
    assert composed.strategy is not None and whole.strategy is not None
    assert composed.strategy.cluster.weights.equal(whole.strategy.cluster.weights)
    assert list(composed.ledger) == list(whole.ledger)
    assert [part.H for part in parts] == [1, 3] and not hasattr(parts[0], "cluster")  # a run has copies


def test_who_forgets_the_base_is_told_by_fit() -> None:
    class Forgets(Algorithm):
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match=r"Forgets.__init__\(\) must call super\(\).__init__"):
        fit(Forgets())
