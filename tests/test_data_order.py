"""Which example each node sees when: the order of DistributedSampler and DataLoader, whatever the path to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import shard_batches
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from vsim.data import Batches, Order
from vsim.data.batches import evened, joined, of_rows, resolve, sizes_of, validation_examples
from vsim.data.order import Uneven


class Numbers(Dataset[Any]):
    """Example i is `example(i)`; how often it was asked for what is kept."""

    def __init__(self, count: int, example: Callable[[int], Any] = torch.tensor) -> None:
        self.count, self.example = count, example
        self.fetched: list[Any] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.fetched.append(index)
        return self.example(index)


class ManyNumbers(Numbers):
    """With a `__getitems__`, as Hugging Face datasets have."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.fetched.append(list(indices))
        return [self.example(i) for i in indices]


def taken(batches: Iterator[Any], count: int) -> list[Any]:
    return list(itertools.islice(batches, count))


@given(
    num_examples=st.integers(1, 50),
    num_nodes=st.integers(1, 7),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
    drop_last=st.booleans(),
)
def test_batches_are_those_of_dataloaders(
    num_examples: int, num_nodes: int, batch_size: int, shuffle: bool, seed: int, drop_last: bool
) -> None:
    num_examples = max(num_examples, num_nodes * (batch_size if drop_last else 1))  # fewer are an error, below
    order = Order([num_examples], num_nodes, batch_size, shuffle, seed, drop_last=drop_last)
    shard = -(-num_examples // num_nodes)
    assert order.shard_sizes.tolist() == [shard] * num_nodes
    assert order.steps_per_epoch == (shard // batch_size if drop_last else -(-shard // batch_size))
    steps, data = 2 * order.steps_per_epoch + 1, TensorDataset(torch.arange(num_examples))
    loaders = [shard_batches(data, num_nodes, k, batch_size, shuffle, seed, drop_last) for k in range(num_nodes)]
    for ours in taken(order.batches(), steps):
        assert torch.equal(ours, torch.stack([next(loader)[0] for loader in loaders]))


def by_row(batch: Any) -> list[Any]:
    """Return the batch of every row."""
    uneven = batch if isinstance(batch, Uneven) else Uneven([[*range(len(tree_leaves(batch)[0]))]], [batch])
    found = {}
    for rows, part in zip(uneven.rows, uneven.parts, strict=True):
        found |= {row: tree_map(lambda t, i=i: t[i], part) for i, row in enumerate(rows)}
    return [found[row] for row in sorted(found)]


def pairs(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count * 6.0).view(count, 2, 3), torch.arange(count))


class SlowPairs(TensorDataset):
    """Not known to be in memory, as its `__getitem__` is its own."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return super().__getitem__(index)


def equal(ours: Any, theirs: Any) -> bool:
    (own, own_tree), (other, other_tree) = tree_flatten(ours), tree_flatten(theirs)
    return own_tree == other_tree and all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


def test_clients_of_one_dataset_are_gathered_at_once() -> None:
    class Counted(Tensor):
        gathers = 0

        def index_select(self, dim: int, index: Tensor) -> Tensor:
            Counted.gathers += 1
            return self.as_subclass(Tensor).index_select(dim, index)

    data = pairs(30)
    counted = TensorDataset(data.tensors[0].as_subclass(Counted), data.tensors[1])
    dealt = [[3, 1, 4, 29], [5, 9, 2, 6, 0], [8, 7, 11], [12]]
    of = [
        Batches([Subset(d, own) for own in dealt], 4, 2, True, 4, o)
        for d, o in ((counted, {}), (data, {"num_workers": 0}))
    ]
    fast, slow = (batches.attended([3, 0, 1], [0, 3, 1]) for batches in of)
    ours = taken(fast.from_step(4), 9)
    assert all(map(equal, ours, taken(slow.from_step(4), 9)))
    assert Counted.gathers == sum(len(batch.parts) if isinstance(batch, Uneven) else 1 for batch in ours)


# From a number of examples and the first of their numbers to a dataset, which lies in memory or is loaded.
DATASETS: dict[str, Callable[[int, int], Any]] = {
    "in memory": lambda count, first: numbered(TensorDataset, count, first),
    "loaded": lambda count, first: numbered(SlowPairs, count, first),
    "subset": lambda count, first: Subset(
        Subset(numbered(TensorDataset, count + 4, first), range(4, count + 4)), range(count)[::-1]
    ),
    "subset of others": lambda count, first: Subset(
        Numbers(count + 2, lambda i: torch.tensor(first + i)), range(1, count + 1)
    ),
    "number": lambda count, first: Numbers(count, lambda i: float(first + i)),
    "nested": lambda count, first: Numbers(
        count, lambda i: {"x": (torch.full((2, 1), first + i), [i, {"z": torch.tensor(-i)}])}
    ),
}


def numbered(kind: type[TensorDataset], count: int, first: int) -> TensorDataset:
    x, y = pairs(count).tensors
    return kind(x + first, y)


@pytest.mark.parametrize("kind", DATASETS)
@given(
    lengths=st.integers(4, 20) | st.lists(st.integers(1, 12), min_size=2, max_size=4) | st.just([4, 4, 4]),
    batch_size=st.integers(1, 5),
    start=st.integers(0, 12),
    shuffle=st.booleans(),
    collated=st.booleans(),
    drop_last=st.booleans(),
)
@settings(max_examples=20)
def test_batches_of_any_dataset_from_any_step_are_those_of_dataloaders(
    kind: str, lengths: Any, batch_size: int, start: int, shuffle: bool, collated: bool, drop_last: bool
) -> None:
    options: dict[str, Any] = {"collate_fn": torch.utils.data.default_collate} if collated else {}
    if drop_last:
        options["drop_last"] = True
        lengths = lengths + 3 * batch_size if isinstance(lengths, int) else [n + batch_size for n in lengths]
    ways = batch_size, shuffle, 9, drop_last
    if isinstance(lengths, int):  # shared by three nodes
        datasets, num_nodes = [DATASETS[kind](lengths, 0)], 3
        loaders = [shard_batches(datasets[0], 3, node, *ways) for node in range(3)]
    else:  # each goes in epochs of its own
        datasets, num_nodes = [DATASETS[kind](n, 100 * k) for k, n in enumerate(lengths)], len(lengths)
        loaders = [shard_batches(own, 1, 0, *ways) for own in datasets]
    batches = Batches(datasets, num_nodes, batch_size, shuffle, 9, options)
    assert (batches._gather is not None) == (kind in ("in memory", "subset") and not collated)
    expected = [[next(loader) for loader in loaders] for _ in range(start + 4)][start:]
    for ours, theirs in zip(taken(batches.from_step(start), 4), expected, strict=True):
        assert all(map(equal, by_row(ours), theirs))


def test_many_examples_are_fetched_in_one_go() -> None:
    dataset = ManyNumbers(12)
    batches = Batches([dataset], 3, 2, False, 0)
    assert [b.tolist() for b in taken(batches.from_step(), 2)] == [
        [[0, 3], [1, 4], [2, 5]],
        [[6, 9], [7, 10], [8, 11]],
    ]
    assert dataset.fetched == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]
    batch, _ = validation_examples(dataset, 3, None)
    assert dataset.fetched[-1] == batch.tolist()
    made = [ManyNumbers(4, lambda i, k=k: torch.tensor(10 * k + i)) for k in range(2)]
    assert taken(Batches(made, 2, 2, False, 0).from_step(), 1)[0].tolist() == [[0, 1], [10, 11]]
    assert [d.fetched for d in made] == [[[0, 1]], [[0, 1]]]


def test_worker_processes_do_not_change_the_batches() -> None:
    dataset = SlowPairs(*pairs(17).tensors)
    alone = taken(Batches([dataset], 2, 3, True, 9).from_step(), 5)
    workers = Batches([dataset], 2, 3, True, 9, {"num_workers": 2, "prefetch_factor": 2}).from_step()
    assert all(map(equal, taken(workers, 5), alone))
    workers.close()


def test_validation_examples_are_all_or_a_sample_from_a_seed_of_its_own() -> None:
    for size in (None, 3, 64):
        batch, total = validation_examples(pairs(3), size, None)
        assert equal(batch, list(pairs(3)[:])) and total == 3
    batch, total = validation_examples(Numbers(5000), None, None)
    assert (len(batch), total) == (2048, 5000)
    assert len(set(batch.tolist())) == 2048 and 2300 < batch[:256].float().mean() < 2700
    samples = []
    for data in (Numbers(100), Numbers(100), SlowPairs(*pairs(100).tensors), pairs(100)):
        before = torch.get_rng_state()
        samples.append(validation_examples(data, 10, None)[0])
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(1)
    assert samples[0].tolist() == samples[1].tolist() != list(range(10))
    assert equal(samples[2], samples[3])
    assert validation_examples(Numbers(100, int), 10, torch.tensor)[0].tolist() == samples[0].tolist()


def test_a_factory_is_asked_for_every_node() -> None:
    asked: list[tuple[int, int, bool]] = []

    def factory(rank: int, num_nodes: int, train_dataset: bool) -> Dataset[Any]:
        asked.append((rank, num_nodes, train_dataset))
        return pairs(rank + 1)

    # All nodes of the simulator; the first, to validate on; and the one that a process holds.
    for nodes, train in ((range(3), True), (range(1), False), (range(2, 3), True)):
        made = resolve(factory, 3, nodes, train, "train_dataset" if train else "val_dataset")
        assert [len(own) for own in made] == [k + 1 for k in nodes]
        assert asked[-len(nodes) :] == [(k, 3, train) for k in nodes]
    assert len(asked) == 5


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize(
    ("dataset", "error", "said"),
    [
        (Stream(), TypeError, "train_dataset … __getitem__ and __len__ … Stream"),
        (object(), TypeError, "object"),
        ([pairs(3)] * 2, TypeError, "train_dataset … list of 2 datasets … lambda"),
        (3, TypeError, "int"),
        ({"train": pairs(3)}, TypeError, "dict with 'train' … dataset['train']"),
        (iter([3]), TypeError, "list_iterator … list(dataset)"),
        (lambda rank, num_nodes, train: None, TypeError, "train_dataset(0, 2, True) … NoneType"),
        (pairs(0), ValueError, "train_dataset … empty"),
        (lambda rank, num_nodes, train: pairs(1 - rank), ValueError, "train_dataset(1, 2, True) … empty"),
    ],
)
def test_what_is_no_dataset(dataset: Any, error: type[Exception], said: str) -> None:
    with refused(error, said):
        resolve(dataset, 2, range(2), True, "train_dataset")


def test_batches_that_differ_in_shape_stay_apart() -> None:
    def ragged(samples: list[int]) -> Tensor:
        return torch.full((len(samples), samples[0] // 2 + 1), samples[0])

    batch = next(Batches([Numbers(8, int)], 4, 2, False, 0, {"collate_fn": ragged}).from_step())
    assert batch.rows == [[0, 1], [2, 3]]  # first examples 0, 1, 2, 3
    assert [part.tolist() for part in batch.parts] == [[[[0]] * 2, [[1]] * 2], [[[2, 2]] * 2, [[3, 3]] * 2]]
    assert evened(batch).tolist() == [[[2, 2]] * 2] * 4


def test_batches_that_are_refused() -> None:
    texts, collate = Numbers(8, lambda i: {"text": str(i)}), lambda samples: {"text": [str(s) for s in samples]}
    with refused(ValueError, "tensors … batch['text'][0] … str … collate_fn"):
        next(Batches([texts], 2, 2, False, 0, {"collate_fn": collate}).from_step())
    with refused(ValueError, "tensors"):
        validation_examples(texts, 2, collate)
    with refused(ValueError, "2 examples … 3 clients … lower of"):
        Batches([pairs(2)], 3, 1, True, 0, argument="of")
    with refused(ValueError, "drop_last … 1 of 2 nodes … batch_size=5 … 1: 3"):
        Batches([pairs(8), pairs(3)], 2, 5, True, 0, {"drop_last": True})


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    missed=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    batch_size=st.integers(1, 5),
    reverse=st.booleans(),
)
def test_nodes_that_attend_see_what_each_would_see_alone(
    lengths: list[int], missed: list[int], batch_size: int, reverse: bool
) -> None:
    if len(lengths) == 1:
        lengths = [4 * lengths[0]]
    order = Order(lengths, 4 if len(lengths) == 1 else len(lengths), batch_size, True, 3)
    nodes = list(range(order.num_nodes))[:: -1 if reverse else 1][:5]
    together = taken(order.attended(nodes, missed[: len(nodes)]).batches(5), 9)
    alone = [order.of_node(node, 5 - m) for node, m in zip(nodes, missed, strict=False)]
    for batch, *rows in zip(together, *(taken(own, 9) for own in alone), strict=True):
        assert all(map(torch.equal, by_row(batch), rows))
        assert not isinstance(batch, Uneven) or len({p.shape[1] for p in batch.parts}) == len(batch.parts) > 1


def test_batches_of_several_runs_are_joined_by_size() -> None:
    whole, uneven = (
        torch.arange(6).view(2, 3),
        Uneven([[2, 0], [1]], [torch.arange(6).view(2, 3) + 10, torch.ones(1, 2)]),
    )
    batch = joined([whole, uneven], [2, 3])
    assert batch.rows == [[0, 1, 4, 2], [3]]
    assert [b.tolist() for b in by_row(batch)] == [[0, 1, 2], [3, 4, 5], [13, 14, 15], [1, 1], [10, 11, 12]]
    assert joined([whole, whole], [2, 2]).tolist() == [*whole.tolist(), *whole.tolist()]
    assert sizes_of(batch, range(1, 4)) == (8, 0)
    assert [b.tolist() for b in by_row(of_rows(batch, range(2, 5)))] == [b.tolist() for b in by_row(batch)[2:]]
    same = Uneven([[1], [0]], [torch.ones(1), torch.zeros(1)])  # as a collate_fn may make them
    assert joined([same], [2]).tolist() == [0, 1]


@pytest.mark.parametrize("options", [{}, {"drop_last": True}], ids=["", "drop_last"])
def test_a_worker_init_fn_needs_batches_of_one_size(options: dict[str, Any]) -> None:
    batches = Batches([pairs(21)], 3, 2, True, 4, {"worker_init_fn": print, **options}).attended([0, 2], [0, 3])
    if options:
        assert all(b[0].shape == (2, 2, 2, 3) for b in taken(batches.from_step(4), 5))
    else:
        with refused(ValueError, "worker_init_fn … drop_last=True"):
            taken(batches.from_step(4), 5)


def test_only_whole_numbers_of_a_text_count_as_tokens() -> None:
    ids, labels = torch.zeros(2, 3, 5, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    images, mask = torch.zeros(2, 3, 1, 8, 8, dtype=torch.uint8), ids.bool()
    texts: list[Any] = [[ids, ids], {"input_ids": ids, "mask": mask}, ids.int(), {"mask": mask, "input_ids": ids}]
    others: list[Any] = [[labels, ids], [images, labels], [ids.double(), ids]]
    assert [sizes_of(batch)[1] for batch in texts + others] == [15] * 4 + [0] * 3
