"""A run resumes if its declared settings equal the saved ones."""

from __future__ import annotations

import functools
import random
import threading
import types
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resumed import PROCESSES, fit
from separate import small_mlp, vectors
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from vsim import CheckpointError, Trainer, load_checkpoint
from vsim.checkpoint.settings import _contents, differences
from vsim.data.batches import digest_of
from vsim.strategy import FedAvgStrategy


def smoothed(outputs: Tensor, y: Tensor, smoothing: float = 0.1) -> Tensor:
    return nn.functional.cross_entropy(outputs, y, label_smoothing=smoothing)


def plain_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, y)


class Scaled(nn.Module):
    """A model with settings of its own."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 5)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def trained(
    folder: Path | None = None, loss: Any = smoothed, model: Any = None, data: Any = None, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(model or Scaled(), data or vectors(), loss_fn=loss)
    return fit(FedAvgStrategy(H=2), trainer, **{"save_dir": folder, "max_steps": 4, **options})


def other_vectors() -> TensorDataset:
    x, y = vectors().tensors
    return TensorDataset(x.flip(0), y)


def doubled(samples: list[Any]) -> Any:
    return default_collate(samples * 2)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"data": other_vectors()}, r"contents of the training data was \['[0-9a-f]+'\] and is \['[0-9a-f]+'\]\."),
        ({}, {"loss": plain_loss}, r"loss_fn was test_settings\.smoothed and is test_settings\.plain_loss"),
        (
            {"loss": functools.partial(smoothed, smoothing=0.1)},
            {"loss": functools.partial(smoothed, smoothing=0.2)},
            r"run: loss_fn\.keywords\['smoothing'\] was 0\.1 and is 0\.2\. To",
        ),
        (
            {"loss": nn.CrossEntropyLoss(weight=torch.ones(5))},
            {"loss": nn.CrossEntropyLoss(weight=torch.arange(5.0))},
            r"run: loss_fn\.weight was .* and is .*\. To",
        ),
        (
            {"loss": nn.CrossEntropyLoss()},
            {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
            r"run: loss_fn\.label_smoothing was 0\.0 and is 0\.1\. To",
        ),
        ({}, {"dataloader_kwargs": {"collate_fn": doubled}}, r"run: collate_fn was absent and is .*\.doubled"),
        ({}, {"model": Scaled(2.0)}, r"run: module\.scale was 1\.0 and is 2\.0\. To"),
    ],
)
def test_another_setting_is_named(before: dict[str, Any], after: dict[str, Any], message: str, tmp_path: Path) -> None:
    trained(tmp_path, **before)
    with pytest.raises(CheckpointError, match=message):
        trained(tmp_path, resume=True, max_steps=6, **{**before, **after})


def test_other_versions_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    monkeypatch.setattr("vsim.checkpoint.settings.version", lambda name: f"another {name}")
    with pytest.warns(UserWarning, match="saved with .*torch.*, resumed with .*another torch.*: bits may differ"):
        trained(tmp_path, resume=True, max_steps=6)


class Drawing(Dataset[Any]):
    """Draws from a generator of its own, and holds what has no contents."""

    def __init__(self) -> None:
        self.inner, self.own, self.lock, self.fetched = vectors(), random.Random(0), threading.Lock(), 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.fetched += 1
        x, y = self.inner[i]
        return x + self.own.random(), y


def test_what_changes_while_a_run_trains_is_no_difference(tmp_path: Path) -> None:
    """Counters and caches in a closure, and examples that are others at every look."""
    calls, losses, cache = 0, [], {}
    things = (threading.Lock(), iter([1]), object())

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += len(things) > 0
        losses.append(calls)
        cache[calls] = y.shape
        return nn.functional.cross_entropy(outputs, y)

    data = Drawing()
    trained(tmp_path, loss, data=data, executor="loop")
    trained(tmp_path, loss, data=data, executor="loop", resume=True, max_steps=6)
    assert calls and digest_of(data) == 0


def test_what_is_not_known_is_not_compared() -> None:
    assert list(differences({"c": [None, 1]}, {"c": ["z", 1]})) == []
    found = list(differences({"a": ["x"], "b": 1}, {"a": ["y"]}))
    assert found == ["a was ['x'] and is ['y']", "b was 1 and is absent"]


def test_datasets_are_told_apart_by_their_examples() -> None:
    before = torch.random.get_rng_state()
    same = [vectors(), [vectors()[i] for i in range(29)], [tuple(vectors()[i]) for i in range(29)]]
    assert len({digest_of(data) for data in same}) == 1  # type: ignore[arg-type]
    texts: list[Any] = [[{"text": "a", "image": np.zeros((2, 2))}], [{"text": "b", "image": np.zeros((2, 2))}]]
    texts += [[{"text": "a", "image": np.zeros(4)}], [{"text": "a", "image": np.array([object()])}], [object()]]
    assert len({digest_of(data) for data in texts}) == len(texts)
    assert digest_of(texts[-1]) == digest_of([object()])  # type: ignore[arg-type]
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.slow
def test_processes_have_the_settings_of_the_simulator(tmp_path: Path) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(5))
    factory = lambda rank, num_nodes, train: vectors(10 + rank, seed=rank)  # noqa: E731
    for data in (vectors(), factory):
        for name, backend in (("simulated", {"deterministic": True}), ("processes", PROCESSES)):
            trained(tmp_path / name, loss, data=data, **backend)  # type: ignore[arg-type]
        ours, theirs = (load_checkpoint(tmp_path / name).settings for name in ("simulated", "processes"))
        assert ours == theirs
        assert all(isinstance(digest, str) for digest in ours["contents of the training data"])
        tmp_path /= "factory"


numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
hashable = st.frozensets(st.integers() | st.text())
values = st.recursive(
    numbers | hashable | st.builds(lambda n: torch.arange(float(n)), st.integers(0, 5)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=10,
)


@settings(max_examples=30)
@given(value=values)
def test_a_copy_elsewhere_has_the_same_contents(value: Any) -> None:
    for thing in (value, types.SimpleNamespace(held=value)):
        shipped = cloudpickle.loads(cloudpickle.dumps(thing))
        assert list(_contents(thing, "x")) == list(_contents(shipped, "x"))


leaves = st.integers() | st.text().filter(lambda text: text != "nan") | st.binary()


@given(one=leaves, other=leaves)
def test_other_contents_differ(one: Any, other: Any) -> None:
    told = [list(_contents({"held": [value]}, "x")) for value in (one, other)]
    assert (told[0] == told[1]) == (type(one) is type(other) and one == other)


def test_models_are_compared_without_their_weights(tmp_path: Path) -> None:
    trained(tmp_path, model=small_mlp(), loss=None)
    assert trained(tmp_path, model=small_mlp(), loss=None, resume=True, max_steps=6).history["step"][-1] == 6
