"""Partitions: what each kind promises, for any labels and K; what is refused; and training with one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

import vsim
from vsim.data import Partition, digits, partition
from vsim.data.batches import in_memory
from vsim.models import MLP
from vsim.strategy import FedAvgStrategy, mean

KINDS: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.3, "min_size": 1},
    "shards": {},
    "classes": {"classes": 2},
    "quantity": {"alpha": 0.5, "min_size": 1},
    "power_law": {"exponent": 1.3, "min_size": 1},
    "noise": {"sigma": 0.5},
}


def labelled(labels: Any) -> TensorDataset:
    labels = torch.as_tensor(labels)
    return TensorDataset(torch.arange(len(labels)).float()[:, None], labels)


def of_sizes(*sizes: int) -> TensorDataset:
    """So many examples of class 0, of class 1, …, mixed."""
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return labelled(labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))])


class Pairs(Dataset[Any]):
    """Examples that are made one by one; reads are counted."""

    def __init__(self, labels: Any) -> None:
        self.labels, self.reads = labels, 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        self.reads += 1
        return torch.rand(1) + random.random(), self.labels[i]


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    sizes=st.lists(st.integers(8, 40), min_size=2, max_size=5),
    num_nodes=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_every_example_is_dealt_once_and_as_the_kind_promises(
    kind: str, sizes: list[int], num_nodes: int, seed: int
) -> None:
    data = of_sizes(*sizes)
    if kind == "classes" and 2 * num_nodes < len(sizes):
        with pytest.raises(ValueError, match="no node would get the others"):
            partition(data, num_nodes, kind, classes=2)
        return
    dealt, again = (partition(data, num_nodes, kind, seed=seed, **KINDS[kind]) for _ in range(2))
    own = [dealt.indices(k) for k in range(num_nodes)]
    assert torch.cat(own).sort().values.tolist() == list(range(len(data)))
    assert all(torch.equal(a, again.indices(k)) for k, a in enumerate(own))
    labels = data.tensors[1]
    counts = torch.stack([labels[i].bincount(minlength=len(sizes)) for i in own])
    assert torch.equal(dealt.counts, counts) and torch.equal(dealt.sizes, counts.sum(1))
    assert dealt.sizes.min() >= 1
    if kind in ("iid", "noise"):
        assert dealt.sizes.max() - dealt.sizes.min() <= 1
    if kind == "shards":  # two pieces of equal size but for 1, which span few classes
        assert dealt.sizes.max() - dealt.sizes.min() <= 2
    if kind == "classes":
        assert ((counts > 0).sum(1) == 2).all()
        has = (counts > 0).sum(0)
        assert has.max() - has.min() <= 1
        assert all(own[own > 0].max() - own[own > 0].min() <= 1 for own in counts.T)
    if kind in ("quantity", "power_law"):  # of each class the client's share of all, but for an example of every class
        share = torch.tensor(sizes) / len(data)
        assert ((counts - dealt.sizes[:, None] * share).abs() <= 1 + len(sizes) * share).all()


@settings(max_examples=40)
@given(
    exponent=st.floats(0.01, 50),
    min_size=st.integers(1, 5),
    num_nodes=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_sizes_follow_the_power_law(exponent: float, min_size: int, num_nodes: int, seed: int) -> None:
    dealt = partition(of_sizes(60, 40), num_nodes, "power_law", exponent=exponent, min_size=min_size, seed=seed)
    powers = np.arange(1, num_nodes + 1.0) ** -exponent
    expected = min_size + powers / powers.sum() * (100 - min_size * num_nodes)
    found = np.sort(dealt.sizes.numpy())[::-1]
    assert np.abs(found - expected).max() <= 1 and found.sum() == 100 and found.min() >= min_size


@settings(max_examples=20)
@given(sigma=st.floats(0.01, 10), num_nodes=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_noise_grows_with_the_client(sigma: float, num_nodes: int, seed: int) -> None:
    x, y = torch.rand(num_nodes * 100, 5, 20, dtype=torch.float64), torch.arange(num_nodes * 100)
    dealt = partition(Subset(TensorDataset(x, y), range(len(y))), num_nodes, "noise", sigma=sigma, seed=seed)
    for k in range(num_nodes):
        noisy, own = zip(*dealt(k, num_nodes, True), strict=True)
        assert own == tuple(dealt.indices(k).tolist())  # with their own labels
        noise = torch.stack(noisy) - x[list(own)]
        assert noise.std() == pytest.approx(sigma * (k + 1) / num_nodes, rel=0.05)  # 10,000 draws
        assert noise.mean().abs() < 0.05 * sigma
    assert in_memory(dealt.dataset) and torch.equal(dealt(0, num_nodes, True)[0][0], dealt(0, num_nodes, True)[0][0])


def test_who_gets_how_many_is_drawn() -> None:
    sizes = [partition(of_sizes(400), 9, "power_law", exponent=2, seed=seed).sizes for seed in range(20)]
    assert len({int(own.argmax()) for own in sizes}) > 4
    dealt = partition(of_sizes(40, 40, 40, 40), 8, "shards", shards=1)  # 8 pieces of 20, of one class each
    assert dealt.counts.sort(descending=True).values.tolist() == [[20, 0, 0, 0]] * 8


def test_tensors_are_shared_and_gathered_in_memory() -> None:
    data = of_sizes(20, 20)
    own = partition(data, 4, "dirichlet", alpha=1.0, min_size=2)(3, 4, True)
    assert own.dataset is data
    assert in_memory(own)(torch.arange(2))[0].tolist() == [own[0][0].tolist(), own[1][0].tolist()]


@pytest.mark.parametrize("alpha", [1e3, 1e9])
def test_with_a_large_alpha_clients_are_of_equal_size(alpha: float) -> None:
    """80 clients share 104 examples of each of ten classes: one or two of each, 13 in all, as with "iid"."""
    dealt = partition(of_sizes(*[104] * 10), 80, "dirichlet", alpha=alpha)
    assert set(dealt.sizes.tolist()) == {13}
    assert set(dealt.counts.flatten().tolist()) == {1, 2} and (dealt.counts.sum(0) == 104).all()


@pytest.mark.parametrize("alpha", [1e-4, 0.05, 1.0, 1e3])
def test_dirichlet_shares(alpha: float) -> None:
    # Of a class, the expected sum of squared shares is (α + 1) / (K α + 1): 1 where one client has all, 1/K where all
    # have alike. 200 classes are as many draws.
    dealt = partition(labelled(torch.arange(200).repeat_interleave(500)), 4, "dirichlet", alpha=alpha, min_size=1)
    shares = dealt.counts.double() / 500
    assert shares.square().sum(0).mean() == pytest.approx((alpha + 1) / (4 * alpha + 1), rel=0.1)
    assert shares.mean(1).tolist() == pytest.approx([0.25] * 4, abs=0.1)


def test_no_client_of_a_large_population_is_empty() -> None:
    dealt = partition(of_sizes(*[4000] * 10), 1000, "dirichlet", alpha=0.1)
    assert dealt.sizes.min() == 10 and dealt.sizes.max() > 100
    assert partition(of_sizes(*[400] * 10), 100, "quantity", alpha=0.2, min_size=7).sizes.min() >= 7


def test_another_seed_is_another_partition_and_no_generator_is_touched() -> None:
    data, before = of_sizes(30, 30, 30), (torch.get_rng_state(), random.getstate())
    for kind, options in KINDS.items():
        one, other = (partition(data, 3, kind, seed=seed, **options) for seed in (0, 1))
        assert one.indices(0).tolist() != other.indices(0).tolist()
    partition(Pairs([0, 1] * 20), 2, "dirichlet", alpha=1)  # whose examples are drawn
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (Subset(labelled([9, 0, 1, 0, 1, 0, 1]), [1, 2, 3, 4, 5, 6]), None),
        (Pairs([0, 1, 0, 1, 0, 1]), None),
        (Pairs(["a", "b", "a", "b", "a", "b"]), None),
        (Pairs(torch.tensor([3, 7, 3, 7, 3, 7])), None),
        (TensorDataset(torch.zeros(6, 2)), [0, 1, 0, 1, 0, 1]),
        (TensorDataset(torch.arange(6.0)), lambda example: int(example[0]) % 2),
        (TensorDataset(torch.zeros(6), torch.zeros(6, 4)), np.array([False, True] * 3)),
    ],
)
def test_where_labels_come_from(data: Dataset[Any], labels: Any) -> None:
    dealt = partition(data, 2, "classes", classes=1, labels=labels)
    assert sorted(dealt.indices(k).tolist() for k in (0, 1)) == [[0, 2, 4], [1, 3, 5]]
    assert dealt.counts.sort().values.tolist() == [[0, 3], [0, 3]] and len(dealt.classes) == 2


def test_iid_needs_no_labels() -> None:
    data = Pairs([[1, 2]] * 6)
    dealt = partition(data, 2, "iid")
    assert data.reads == 0 and dealt.sizes.tolist() == [3, 3] and dealt.counts.shape == (2, 0)
    assert "classes" not in repr(dealt)
    with refused(ValueError, "classes … partition"):
        dealt.plot()
    assert partition(data, 2, "iid", labels=[0, 1] * 3).counts.shape == (2, 2)


def test_it_shows_itself() -> None:
    dealt = partition(of_sizes(30, 30), 3, "shards", seed=4)
    text = "Partition(shards, shards=2, seed=4: 60 examples, K = 3 with 20 to 20, median 20, 1.33 of 2 classes each on "
    assert repr(dealt) == text + "average)"
    assert text in dealt._repr_html_()
    for num_nodes in (3, 60):
        ax = partition(of_sizes(60, 60), num_nodes, "shards", shards=1).plot()
        assert ax.images[0].get_array().shape == (2, num_nodes)
        (above,) = ax.child_axes
        assert above.patches[0].get_data().values.sum() == 120
    assert ax.get_xlabel() == "client, by its main class"
    assert not np.ma.getmaskarray(ax.images[0].get_array())[0, :30].any()  # the first 30 have class 0


DATA, FLOATS = of_sizes(30, 30), TensorDataset(torch.zeros(4))
INTS = TensorDataset(torch.zeros(4).long())
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: partition({"train": DATA}, 2, "iid"), TypeError, "dataset … dict with 'train'"),
    (lambda: partition(DATA, 2, "dirichlett", alpha=1), ValueError, "kind … did you mean 'dirichlet'"),
    (lambda: partition(DATA, 2, "dirichlet"), TypeError, "'dirichlet' … alpha="),
    (lambda: partition(DATA, 2, "iid", alpha=1.0), TypeError, "alpha= … 'iid'"),
    (lambda: partition(DATA, 2, "shards", min_size=1), TypeError, "min_size= … 'shards' … shards"),
    (lambda: partition(DATA, 61, "iid"), ValueError, "num_nodes … from 1 to 60 … 61"),
    (lambda: partition(DATA, 31, "shards"), ValueError, "shards=2 … 31 … 62 … 60"),
    (lambda: partition(DATA, 2, "classes", classes=3), ValueError, "classes … from 1 to 2 … 3"),
    (lambda: partition(of_sizes(2, 50), 6, "classes", classes=1), ValueError, "3 nodes … 2 examples"),
    (lambda: partition(DATA, 7, "quantity", alpha=1), ValueError, "min_size=10 … 7 … 70 … 60"),
    (lambda: partition(DATA, 6, "dirichlet", alpha=1), ValueError, "Dirichlet(1) … min_size=10 … 60"),
    (lambda: partition(Pairs([0, 1]), 2, "noise", sigma=1), TypeError, "'noise' … Pairs"),
    (lambda: partition(INTS, 2, "noise", sigma=1), TypeError, "'noise' … torch.int64"),
    (lambda: partition(DATA, 2, "shards", labels=[0, 1]), ValueError, "60 examples … int64"),
    (lambda: partition(FLOATS, 2, "shards"), ValueError, "example 0"),
    (lambda: partition(Pairs([0.5, 1.5]), 1, "shards"), ValueError, "labels … float64"),
    (lambda: partition(DATA, 2, "iid").indices(2), ValueError, "rank … from 0 to 1 … 2"),
    (lambda: partition(DATA, 2, "iid")(0, 3, True), ValueError, "Partition(iid … 2 nodes … 3"),
    (lambda: partition(DATA, 2, "iid")(0, 2, False), ValueError, "training data"),
    (lambda: partition(of_sizes(4), 4, "iid").split(), ValueError, "client 0 … 1"),
    (lambda: partition(DATA, 2, "iid").split(1.0), ValueError, "test … 1.0"),
]


@pytest.mark.parametrize(("make", "error", "said"), REFUSED)
def test_refused(make: Callable[[], Any], error: type[Exception], said: str) -> None:
    with refused(error, said):
        make()


def trained(dealt: Any, num_nodes: int = 3, **options: Any) -> vsim.Trainer:
    trainer = vsim.Trainer(MLP(hidden=(8,), seed=0), dealt, digits()[1])
    strategy = FedAvgStrategy(H=2, average=mean("examples"), inner_optim="sgd", lr=0.1)
    trainer.fit(strategy=strategy, num_nodes=num_nodes, batch_size=5, progress=False, **{"max_steps": 4, **options})
    return trainer


def dealt_digits(seed: int = 0) -> Partition:
    return partition(digits()[0], 3, "dirichlet", alpha=0.3, seed=seed)


@pytest.mark.parametrize("participation", [None, vsim.Sample(2, of=3)])
def test_training_is_that_of_the_same_subsets(participation: Any) -> None:
    dealt, data = dealt_digits(), digits()[0]
    subsets = [Subset(data, dealt.indices(k).tolist()) for k in range(3)]
    options = {"num_nodes": 2 if participation else 3, "participation": participation}
    one, other = (trained(own, **options) for own in (dealt, lambda rank, num_nodes, train: subsets[rank]))
    assert np.array_equal(one.history.node_losses, other.history.node_losses, equal_nan=True)
    cluster = one.strategy.cluster
    assert cluster.shard_sizes.tolist() == dealt.sizes[list(cluster.active)].tolist()


def test_a_partition_travels_and_a_run_resumes_with_it_but_not_with_another(tmp_path: Any) -> None:
    travelled = cloudpickle.loads(cloudpickle.dumps(dealt_digits()))
    assert torch.equal(travelled.indices(1), dealt_digits().indices(1))
    whole = trained(dealt_digits())
    trained(dealt_digits(), max_steps=2, save_dir=tmp_path)
    resumed = trained(travelled, save_dir=tmp_path, resume=True)
    assert np.array_equal(resumed.history.node_losses, whole.history.node_losses)
    with pytest.raises(vsim.CheckpointError, match=r"train_dataset\[0\]\.examples was"):
        trained(dealt_digits(seed=1), max_steps=6, save_dir=tmp_path, resume=True)


@given(
    sizes=st.lists(st.integers(2, 12), min_size=1, max_size=5),
    test=st.floats(0.01, 0.99) | st.just(0.99),
    seed=st.integers(0, 5),
)
def test_a_split_gives_every_client_both_parts(sizes: list[int], test: float, seed: int) -> None:
    size = sum(sizes)
    owners = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    whole = Partition(labelled(torch.arange(size) % 3), len(sizes), owners, [0, 1, 2], np.arange(size) % 3, "given")
    train, tested = whole.split(test, seed=seed)
    for client, number in enumerate(sizes):
        ours, theirs = train.indices(client).tolist(), tested.indices(client).tolist()
        assert sorted(ours + theirs) == whole.indices(client).tolist() and ours == sorted(ours)
        assert len(theirs) == min(max(1, round(test * number)), number - 1)
    assert torch.equal(train.counts + tested.counts, whole.counts) and torch.equal(train.counts.sum(1), train.sizes)
    assert [repr(part) for part in whole.split(test, seed=seed)] == [repr(train), repr(tested)]
    nested, _ = train.split(0.5) if min(train.sizes) > 1 else (train, None)
    assert set(nested.indices(0).tolist()) <= set(train.indices(0).tolist())
