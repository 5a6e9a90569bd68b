"""What a run was made of, described: briefly in its record, and whole where it must be the same to resume."""

from __future__ import annotations

import functools
import json
import math
import random
import threading
import types
from enum import Enum
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from cut_runs import fit
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import vectors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, multi_margin_loss
from torch.utils.data import Dataset, TensorDataset, default_collate

from vsim import CheckpointError, Trainer
from vsim.history.agreement import CHANGED, differences
from vsim.history.describe import describe, digest_of
from vsim.strategy import DeMoStrategy, FedAvgStrategy, OptimSpec


class Scaled(nn.Linear):
    """A model with a setting of its own."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(12, 5)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Kind(Enum):
    ONE, TWO = 1, 2


class Odd:
    __slots__ = ()

    def __str__(self) -> str:
        return "odd"


def changed(before: Any, after: Any) -> list[str]:
    return list(differences({"x": before}, {"x": after}, CHANGED))


# Values ---------------------------------------------------------------------------------------------------------------

numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
values = st.recursive(
    numbers
    | st.frozensets(st.integers() | st.text())
    | st.builds(lambda n: torch.arange(float(n)), st.integers(0, 5))
    | st.sampled_from([math.sqrt, cross_entropy, Kind.ONE, torch.float32, range(3), math, Odd(), DeMoStrategy(lr=0.1)])
    | st.sampled_from([Scaled(), np.ones(3), np.float32(0.5), np.longdouble(1), object(), random.Random(3), 1j]),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.tuples(inner, inner)
        | st.builds(lambda x: types.SimpleNamespace(held=x, _hidden=x), inner)
        | st.builds(lambda x: functools.partial(cross_entropy, x), inner)
    ),
    max_leaves=10,
)


@settings(max_examples=20)
@given(value=values)
def test_a_copy_elsewhere_has_the_same_description(value: Any) -> None:
    for seen in (lambda: None, lambda: set()):
        told = [describe(own, seen=seen()) for own in (value, cloudpickle.loads(cloudpickle.dumps(value)))]
        assert told[0] == told[1] == json.loads(json.dumps(told[0], allow_nan=False)) and changed(*told) == []


long = st.text(max_size=3).map(lambda text: text + 257 * "x") | st.lists(st.integers()).map(lambda own: own + 257 * [0])
leaves = st.integers() | st.text() | st.binary() | long


@settings(max_examples=60)
@given(one=leaves, other=leaves)
def test_other_contents_differ(one: Any, other: Any) -> None:
    told = [describe({"held": [value]}, seen=set()) for value in (one, other)]
    assert (told[0] == told[1]) == (type(one) is type(other) and one == other)


ring = types.SimpleNamespace()
ring.next = ring
many = torch.ones(300).unbind()


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (cross_entropy, math.sqrt, "x was torch.nn.functional.cross_entropy and is math.sqrt"),
        (lambda: 1, lambda: 2, None),
        (*(functools.partial(math.dist, p=p) for p in (0.1, 0.2)), "x.keywords.p was 0.1 and is 0.2"),
        (*(nn.CrossEntropyLoss(weight=w) for w in (torch.ones(5), torch.arange(5.0))), "x.weight was [[5], 'torch"),
        (*(nn.CrossEntropyLoss(label_smoothing=s) for s in (0.0, 0.1)), "x.label_smoothing was 0.0 and is 0.1"),
        (nn.Dropout(0.1), nn.Dropout(0.3), "x was torch.nn.modules.dropout.Dropout(p=0.1, inplace=False) and is "),
        (OptimSpec("sgd", lr=0.1), OptimSpec("adam", lr=0.2), "x was torch.optim.sgd.SGD and is torch.optim.adam.Adam"),
        (*(types.SimpleNamespace(_own=[{"n": n}]) for n in (1, 2)), "x._own[0].n was 1 and is 2"),
        ([0.9, 0.95], [0.9, 0.99], "x was [0.9, 0.95] and is [0.9, 0.99]"),
        ([*range(200)], [*range(199), 0], "x[199] was 199 and is 0"),
        ([*many], [*many[:-1], torch.zeros(())], "x was [300, "),
        (np.zeros(3), np.zeros(4), "x was [[3], 'float64', "),
        (Kind.ONE, Kind.TWO, "x was Kind.ONE and is Kind.TWO"),
        (None, 1, "x was absent and is 1"),
        (threading.Lock(), threading.Lock(), None),
        (ring, ring, None),
    ],
)
def test_differences_are_named(one: Any, other: Any, words: str | None) -> None:
    found = changed(*(describe(value, seen=set()) for value in (one, other)))
    assert [text[: len(words or "")] for text in found] == ([] if words is None else [words])


def test_a_record_is_brief() -> None:
    value = {1: [np.float64(0.5), np.int64(3), math.nan, Odd()], "t": torch.ones(3), "p": Path("a"), "f": doubled}
    named = {"t": "Tensor", "p": "a", "f": "test_describe.doubled"}
    assert describe(value) == {"1": [0.5, 3, "nan", "odd"], **named}
    assert describe([Scaled(), types.SimpleNamespace(_own=1, n=2)]) == ["Scaled", {"class": "SimpleNamespace", "n": 2}]
    assert str(describe(ring)).count("SimpleNamespace") == 5  # no deeper
    assert changed({"digest": None, "n": 1}, {"digest": "z", "n": 1}) == []  # what is not known is not compared


def test_datasets_are_told_apart_by_their_examples() -> None:
    before = torch.random.get_rng_state()
    same = [vectors(), [vectors()[i] for i in range(29)], [tuple(vectors()[i]) for i in range(29)]]
    assert len({digest_of(data) for data in same}) == 1
    images = [("a", np.zeros((2, 2))), ("b", np.zeros((2, 2))), ("a", np.zeros(4)), ("a", np.array([object()]))]
    others = [*([{"text": text, "image": image}] for text, image in images), [object()]]
    assert len({digest_of(data) for data in others}) == len(others) and digest_of(others[-1]) == digest_of([object()])
    assert torch.equal(before, torch.random.get_rng_state())


# Runs that resume -----------------------------------------------------------------------------------------------------


def trained(
    folder: Path | None = None, loss: Any = cross_entropy, model: Any = None, data: Any = None, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(model or Scaled(), data or vectors(), loss_fn=loss)
    return fit(FedAvgStrategy(H=2), trainer, **{"save_dir": folder, "max_steps": 4, "val_interval": None, **options})


def doubled(samples: list[Any]) -> Any:
    return default_collate(samples * 2)


def test_all_that_differs_is_named(tmp_path: Path) -> None:
    trained(tmp_path)
    x, y = vectors().tensors
    options = {"data": TensorDataset(x.flip(0), y), "loss": multi_margin_loss, "model": Scaled(2.0)}
    with pytest.raises(CheckpointError) as caught:
        trained(tmp_path, resume=True, max_steps=6, dataloader_kwargs={"collate_fn": doubled}, **options)
    for text in (
        ".cross_entropy and is torch.nn.functional.multi_margin_loss; train_dataset[0].digest was ",
        "; collate_fn was absent and is test_describe.doubled; module.scale was 1.0 and is 2.0. To",
    ):
        assert text in str(caught.value)


def test_other_versions_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    monkeypatch.setattr("vsim.history.agreement.versions", lambda: {"torch": "another torch"})
    with pytest.warns(UserWarning, match="saved with .*torch.*, resumed with .*another torch.*: bits may differ"):
        trained(tmp_path, resume=True, max_steps=6)


class Drawing(Dataset[Any]):
    """Draws from a generator of its own, and holds what has no contents."""

    own, lock = random.Random(0), threading.Lock()

    def __len__(self) -> int:
        return 29

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = vectors()[i]
        return x + self.own.random(), y


def test_what_changes_while_a_run_trains_is_no_difference(tmp_path: Path) -> None:
    """Other initial weights, what a loss keeps in its closure, and examples that are others at every look."""
    losses: list[Any] = [threading.Lock(), iter([1])]

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        losses.append(cross_entropy(outputs, y))
        return losses[-1]

    trained(tmp_path, loss, data=Drawing(), executor="loop")
    resumed = trained(tmp_path, loss, Scaled(), Drawing(), executor="loop", resume=True, max_steps=6)
    assert resumed.history["step"][-1] == 6 and digest_of(Drawing()) == 0
