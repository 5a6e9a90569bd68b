"""Fetch and collate examples of datasets into stacked batches (K, B, …), and check the batches."""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import signal
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_structure
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from vsim.arguments import a_function, is_factory, real_number, reject_unknown, retold, true_or_false, whole_number
from vsim.cluster.randomness import EVALUATION, LOADER, derive_seed, generator
from vsim.data.order import Order, Uneven
from vsim.trees import mapped, tensors_of

DatasetFactory = Callable[[int, int, bool], Dataset[Any]]
Data = Dataset[Any] | DatasetFactory
_VALIDATED = 2048  # default upper bound of validation examples
LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)
_CURES = {  # argument of DataLoader that chooses or orders the examples → argument to give instead
    "sampler": "torch.utils.data.Subset(dataset, list(sampler)) as the dataset; shuffle=False keeps the order",
    "batch_sampler": "torch.utils.data.Subset(dataset, [i for batch in batch_sampler for i in batch]) as the dataset, "
    "and batch_size=; shuffle=False keeps the order",
    "batch_size": "batch_size= itself, the examples of one node and step",
    "shuffle": "shuffle= itself",
    "generator": "seed=",
}


class Batches:
    """Stacked batches (R, B, …) of the nodes held in this process, step after step.

    Args:
        datasets: one dataset that is split among the nodes as by DistributedSampler, or one for each node held here.
        num_nodes: the number of nodes K.
        batch_size: examples per node and step.
        shuffle, seed: see DistributedSampler.
        dataloader_kwargs: more arguments for the DataLoader. A `collate_fn` gets the samples of one node at a time.
        argument: the name of the user's argument that sets the number of nodes, for errors.
        held: the nodes held in this process; default: all.
        of_all: takes a number for each of `datasets`; returns the numbers for the datasets of all processes' nodes.

    Attributes:
        datasets: the shared dataset, or one for each node held here.
        lengths: the number of examples of the shared dataset, or of each node's dataset.
        steps_per_epoch: steps until every example has been seen.
        epoch_steps: (K,) steps until a node has seen its own examples. shard_sizes: (K,) their number.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        num_nodes: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        argument: str = "num_nodes",
        held: range | None = None,
        of_all: Callable[[list[int]], list[int]] = list,
    ) -> None:
        options, drop_last = loader_options(dataloader_kwargs)
        self.lengths = of_all([_length(dataset) for dataset in datasets])
        order = Order(self.lengths, num_nodes, batch_size, shuffle, seed, drop_last)
        order.check(argument)
        self.order = order if held is None or len(held) == num_nodes else order.of_nodes(held)
        self.steps_per_epoch, self.epoch_steps = self.order.steps_per_epoch, self.order.epoch_steps
        self.shard_sizes = self.order.shard_sizes
        self.datasets, self._of_all = list(datasets), of_all
        self._gather = None if options else in_one_gather(datasets)
        self._options = options
        self._seed = seed

    def of_datasets(self, number: Callable[[Dataset[Any]], int]) -> list[int]:
        """Return a list of number(dataset) for the datasets of all nodes, or for the one dataset that nodes share."""
        return self._of_all([number(dataset) for dataset in self.datasets])

    @property
    def shared_in_memory(self) -> Dataset[Any] | None:
        """The dataset that the nodes share, if it is held in tensors; else None."""
        return self.datasets[0] if len(self.datasets) == 1 and self._gather is not None else None

    @property
    def num_rows(self) -> int:
        """R, the number of nodes in a batch."""
        return len(self.order.nodes)

    def attended(self, nodes: Sequence[int], missed: Sequence[int]) -> Batches:
        """Return the batches (n, B, …) of n nodes; `missed` holds the number of steps that each of them has missed."""
        own = copy.copy(self)
        own.order = self.order.attended(nodes, missed)
        return own

    def from_step(self, start_step: int = 0) -> Iterator[Any]:
        """Yield the stacked batch of every step from the 0-based `start_step` on, endlessly, on the dataset's device.

        A batch is an `Uneven` if the nodes' batches differ in size.
        """
        return self._batches(self.order.batches(start_step), self.order.nodes)

    def of_node(self, node: int, start_step: int = 0) -> Iterator[Any]:
        """Yield one node's batch (1, B, …) for every step of the node from the 0-based `start_step` on."""
        return self._batches((own[None] for own in self.order.of_node(node, start_step)), [node])

    def _batches(self, order: Iterator[Tensor | Uneven], nodes: Sequence[int]) -> Iterator[Any]:
        """Yield the batches of some nodes, at the positions in `order`."""
        if self._gather is None:
            return self._loaded(order, nodes)
        # Make positions contiguous, because gathered examples get the layout of the positions.
        gather = self._gather
        return (mapped(lambda own: gather(own.contiguous()), positions) for positions in order)

    def _loaded(self, order: Iterator[Tensor | Uneven], nodes: Sequence[int]) -> Iterator[Any]:
        """Load any dataset by one DataLoader, whose batches hold the samples of all nodes in the nodes' order."""
        # A worker_init_fn may access the user's own dataset: load from it, one example at a time.
        begin = self._options.get("worker_init_fn")
        one_by_one = len(self.datasets) == 1 and begin is not None
        own = {"collate_fn": _Collate(self._options.get("collate_fn"), len(nodes), not one_by_one)}
        yield from DataLoader(
            self.datasets[0] if one_by_one else _OfNodes(self.datasets, nodes),
            batch_sampler=map(_one_by_one if one_by_one else _by_node, order),
            generator=generator(self._seed, LOADER),
            **{**self._options, **own, "worker_init_fn": _Beginning(begin)},
        )


def _by_node(positions: Tensor | Uneven) -> list[list[int]]:
    """Return the positions of every node's examples."""
    if isinstance(positions, Tensor):
        return positions.tolist()
    matrices = zip(positions.rows, positions.parts, strict=True)
    found = {row: own for rows, matrix in matrices for row, own in zip(rows, matrix.tolist(), strict=True)}
    return [found[row] for row in range(len(found))]


def _one_by_one(positions: Tensor | Uneven) -> list[int]:
    """Return the positions of all nodes' examples in one list, in the nodes' order."""
    if isinstance(positions, Uneven):
        raise ValueError(
            "dataloader_kwargs: with worker_init_fn the nodes' batches must have one size, and here nodes have "
            "different numbers of examples left in their epoch; give drop_last=True, too"
        )
    return positions.flatten().tolist()


def joined(batches: Sequence[Any], counts: Sequence[int]) -> Any:
    """Concatenate the stacked batches of several runs; `counts` holds the number of rows of each batch."""
    alike: dict[Any, tuple[list[int], list[Any]]] = {}
    first = 0
    for batch, count in zip(batches, counts, strict=True):
        uneven = batch if isinstance(batch, Uneven) else Uneven([list(range(count))], [batch])
        for rows, part in zip(uneven.rows, uneven.parts, strict=True):
            known = alike.setdefault(tuple(t.shape[1:] for t in tree_leaves(part)), ([], []))
            known[0].extend(first + row for row in rows)
            known[1].append(part)
        first += count
    parts = [tree_map(lambda *own: torch.cat(own), *own) for _, own in alike.values()]
    if len(parts) > 1:
        return Uneven([rows for rows, _ in alike.values()], parts)
    ((rows, _),) = alike.values()
    in_order = sorted(range(first), key=rows.__getitem__)
    return parts[0] if in_order == list(range(first)) else tree_map(lambda t: t[in_order], parts[0])


class OfNode(Dataset[Any]):
    """One node's dataset; errors of an example name the example and the node."""

    def __init__(self, dataset: Dataset[Any], node: int) -> None:
        self.dataset, self.node = dataset, node

    def __len__(self) -> int:
        return _length(self.dataset)

    def __getitems__(self, positions: list[int]) -> list[Any]:
        return fetch(self.dataset, positions, [self.node] * len(positions))


class _OfNodes(ConcatDataset[Any]):
    """The nodes' datasets one after another, or a shared dataset; errors of an example name the example and its node.

    A dataset with `__getitems__` fetches all of its examples in one call.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]], nodes: Sequence[int]) -> None:
        super().__init__(datasets)
        self.nodes = nodes

    def __getitems__(self, by_node: list[list[int]]) -> list[list[Any]]:
        """Return each node's examples; `by_node` holds each node's positions in the concatenation."""
        ends, shared = self.cumulative_sizes, len(self.datasets) == 1
        asked = [(position, node) for own, node in zip(by_node, self.nodes, strict=True) for position in own]
        examples: list[Any] = []
        for which, group in itertools.groupby(asked, key=lambda a: 0 if shared else bisect.bisect_right(ends, a[0])):
            positions, nodes = zip(*group, strict=True)
            start = ends[which - 1] if which else 0
            examples += fetch(self.datasets[which], [position - start for position in positions], nodes)
        found = iter(examples)
        return [list(itertools.islice(found, len(own))) for own in by_node]


_OF_WORKERS = ("timeout", "prefetch_factor", "persistent_workers", "multiprocessing_context")
_MOST_WORKERS = 1024  # processes of one DataLoader


def loader_options(dataloader_kwargs: Mapping[str, Any] | None) -> tuple[dict[str, Any], bool]:
    """Check the user's arguments for the DataLoader; return (arguments without drop_last, drop_last)."""
    options = dict(dataloader_kwargs or {})
    for name, cure in _CURES.items():
        if name in options:
            raise TypeError(f"dataloader_kwargs got {name!r}, but vsim deals the examples to the nodes; give {cure}")
    reject_unknown(options, LOADER_OPTIONS, "dataloader_kwargs")
    for name, value in options.items():
        where = f"dataloader_kwargs: {name}"
        if name in ("collate_fn", "worker_init_fn") and value is not None:
            a_function(where, value, "samples" if name == "collate_fn" else "worker's number")
        if name in ("pin_memory", "persistent_workers", "in_order", "drop_last"):
            options[name] = true_or_false(where, value)
        elif name == "timeout":
            options[name] = real_number(where, value, at_least=0)
        elif name in ("num_workers", "prefetch_factor") and value is not None:
            most = _MOST_WORKERS if name == "num_workers" else None
            options[name] = whole_number(where, value, at_least=0, at_most=most)
    for name in _OF_WORKERS:
        if options.get(name) and not options.get("num_workers"):
            given = f"dataloader_kwargs: {name}={options[name]!r:.100}"
            raise ValueError(f"{given} has no effect without num_workers; give num_workers=, too")
    return options, options.pop("drop_last", False)


class _Beginning:
    """Begins a worker process. A Ctrl-C in a terminal reaches workers, too, and the current step still needs them."""

    def __init__(self, begin: Callable[[int], Any] | None) -> None:
        self.begin = begin

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.begin is not None:
            self.begin(number)


class _Collate:
    """Collates the samples of all nodes: by the user's function, node by node; without one, all at once as torch does.

    The user's function may return batches of different shapes, for instance with different padding.

    Args:
        by_node: whether the samples come as one list per node; False: as one list with the same number from each node.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None, num_nodes: int, by_node: bool) -> None:
        self.collate, self.num_nodes, self.by_node = collate, num_nodes, by_node

    def __call__(self, samples: list[Any]) -> Any:
        if not self.by_node:
            size = len(samples) // self.num_nodes
            samples = [samples[i * size : (i + 1) * size] for i in range(self.num_nodes)]
        if self.collate is not None:
            batches = [self.collate(own) for own in samples]
            for batch in batches:
                check_tensors(batch)
            structures = [tree_structure(batch) for batch in batches]
            if any(structure != structures[0] for structure in structures):
                raise ValueError(f"the nodes' batches have different fields and cannot be stacked: {structures}")
            return joined([tree_map(lambda t: t[None], batch) for batch in batches], [1] * len(batches))
        alike: dict[int, list[int]] = {}
        for row, own in enumerate(samples):
            alike.setdefault(len(own), []).append(row)
        by_size = [alike[size] for size in sorted(alike, reverse=True)]
        parts = [self._stacked([samples[row] for row in rows]) for rows in by_size]
        return parts[0] if len(parts) == 1 else Uneven(by_size, parts)

    def _stacked(self, samples: list[list[Any]]) -> Any:
        """Return the stacked batch of nodes that have the same number of samples."""
        batch = _collated([sample for own in samples for sample in own])
        check_tensors(batch)
        return tree_map(lambda t: t.view(len(samples), len(t) // len(samples), *t.shape[1:]), batch)


def _collated(samples: list[Any]) -> Any:
    """Collate examples as torch does; raise a ValueError with advice if the examples do not fit together."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, LookupError, AttributeError, ValueError) as error:
        raise ValueError(
            f"examples of the dataset cannot be put into one batch: {str(error).strip()}; all must have the same "
            "fields and shapes, or give dataloader_kwargs={'collate_fn': …}, which may pad them"
        ) from error


def _stack(*tensors: Tensor) -> Tensor:
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) > 1:
        raise ValueError(
            f"the nodes' batches have different shapes, {sorted(shapes)}, and cannot be stacked; "
            "pad them, or give dataloader_kwargs={'collate_fn': …}, whose batches may differ between nodes"
        )
    return torch.stack(tensors)


def check_tensors(batch: Any) -> None:
    """Raise a ValueError that names the fields of a collated batch that are not tensors."""
    odd = [
        f"batch{keystr(path)}: {type(leaf).__name__}"
        for path, leaf in tree_flatten_with_path(batch)[0]
        if not isinstance(leaf, Tensor)
    ]
    if odd:
        raise ValueError(
            f"a batch must hold tensors only, got {', '.join(odd[:5])}; convert or drop them in the dataset or in "
            "dataloader_kwargs={'collate_fn': …}"
        )


def in_memory(dataset: Dataset[Any] | None) -> Callable[[Tensor], list[Tensor]] | None:
    """Return f(index tensor (…)) → the dataset's fields (…, *shape), if the dataset is held in tensors, else None.

    A TensorDataset that does not override __getitem__ is held in tensors, and so is a Subset of such a dataset.
    """
    if type(dataset) is Subset:
        inner = in_memory(dataset.dataset)
        if inner is None:
            return None
        chosen = torch.as_tensor(dataset.indices, dtype=torch.long)
        return lambda positions: inner(chosen[positions])
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        tensors = dataset.tensors
        devices = dict.fromkeys(t.device for t in tensors)

        def gather(positions: Tensor) -> list[Tensor]:
            # Select whole rows at a time; indexing by a matrix of positions would copy number by number.
            flat = {device: positions.flatten().to(device) for device in devices}
            return [t.index_select(0, flat[t.device]).view(*positions.shape, *t.shape[1:]) for t in tensors]

        return gather
    return None


def in_one_gather(datasets: Sequence[Dataset[Any]]) -> Callable[[Tensor], list[Tensor]] | None:
    """Return the function of `in_memory` for the concatenation of datasets; None unless all are held in tensors.

    The returned function takes positions (n, b) in the concatenation; the b positions of a row must lie in one dataset.
    """
    if len(datasets) == 1:
        return in_memory(datasets[0])
    parts = [dataset for dataset in datasets if type(dataset) is Subset]
    whole = {id(part.dataset): part.dataset for part in parts}
    if len(whole) == 1 and len(parts) == len(datasets):
        inner = in_memory(*whole.values())
        if inner is not None:
            chosen = torch.cat([torch.as_tensor(part.indices, dtype=torch.long) for part in parts])
            return lambda positions: inner(chosen[positions])
    stored = [of_one for of_one in map(in_memory, datasets) if of_one is not None]
    if len(stored) < len(datasets):
        return None
    starts = torch.tensor([0, *map(_length, datasets)]).cumsum(0)

    def gather(positions: Tensor) -> list[Tensor]:
        whose = torch.searchsorted(starts, positions[:, 0].contiguous(), right=True) - 1
        rows = zip(whose.tolist(), positions - starts[whose, None], strict=True)
        own = [stored[which](p) for which, p in rows]
        if len({len(fields) for fields in own}) > 1:
            raise ValueError(f"the nodes' datasets have different numbers of fields: {[len(f) for f in own]}")
        return [_stack(*column) for column in zip(*own, strict=True)]

    return gather


def fetch(dataset: Dataset[Any], indices: list[int], nodes: Sequence[int] = ()) -> list[Any]:
    """Return the examples at `indices`, by one call if the dataset has `__getitems__`; an error names their `nodes`.

    Raises:
        Exception: the dataset's error, with a message that names the example and the node.
    """
    fetch_many = getattr(dataset, "__getitems__", None)
    examples: list[Any] = []
    try:
        if fetch_many:
            return list(fetch_many(indices))
        for index in indices:
            examples.append(dataset[index])  # the length of the list tells which example fails
    except Exception as error:
        place = slice(None, 8) if fetch_many else slice(len(examples), len(examples) + 1)
        which = f"example{'s' if fetch_many else ''} {', '.join(map(str, indices[place]))}"
        whose = f" of node {', '.join(map(str, dict.fromkeys(nodes[place])))}" if nodes else ""
        length = f" (its length is {_length(dataset)})" if isinstance(error, IndexError) else ""
        raise retold(error, f"{which} of the dataset{whose and ','}{whose}: {error}{length}") from error
    return examples


class ValidationExamples(NamedTuple):
    """The examples that runs are validated on.

    Attributes:
        batch: one batch (N, …).
        total: number of examples in the dataset.
    """

    batch: Any
    total: int


def validation_examples(
    dataset: Dataset[Any], size: int | None, collate: Callable[[list[Any]], Any] | None
) -> ValidationExamples:
    """Return up to `size` examples (default: 2,048) of a validation dataset, the same for every run.

    A larger dataset is sampled with a fixed seed, not the run's seed, so that runs with different seeds are validated
    on the same examples.
    """
    total = _length(dataset)
    count = min(total, _VALIDATED if size is None else size)
    positions = np.arange(total)
    if count < total:
        stream = np.random.default_rng(derive_seed(0, EVALUATION, total))
        positions = stream.choice(total, count, replace=False)
    stored = in_memory(dataset) if collate is None else None
    if stored is not None:
        return ValidationExamples(stored(torch.from_numpy(positions)), total)
    batch = (collate or _collated)(fetch(dataset, positions.tolist()))
    check_tensors(batch)
    return ValidationExamples(batch, total)


def resolve(dataset: Any, num_nodes: int, ranks: range, train: bool, what: str) -> list[Dataset[Any]]:
    """Return the datasets that an argument stands for: the given one, or a factory's dataset for each of `ranks`.

    Raises:
        TypeError: the argument is neither a map-style dataset nor a function f(rank, num_nodes, train_dataset).
        ValueError: a dataset is empty.
    """
    if is_factory(dataset):
        a_function(what, dataset, "rank, num_nodes, train_dataset")
        made = [dataset(rank, num_nodes, train) for rank in ranks]
        return [check_dataset(d, f"{what}({rank}, {num_nodes}, {train})") for rank, d in zip(ranks, made, strict=True)]
    return [check_dataset(dataset, what)]


def check_dataset(dataset: Any, what: str) -> Dataset[Any]:
    """Return the dataset if it is map-style and has examples; else raise a TypeError or ValueError."""
    if isinstance(dataset, list | tuple) and dataset and isinstance(dataset[0], Dataset):
        raise TypeError(
            f"{what} is a {type(dataset).__name__} of {len(dataset)} datasets; for one a node give a function, such as "
            "lambda rank, num_nodes, train_dataset: datasets[rank]"
        )
    if isinstance(dataset, tuple) and len(dataset) < 4 and all(hasattr(part, "shape") for part in dataset):
        raise TypeError(
            f"{what} is a tuple of {len(dataset)} arrays; TensorDataset(x, y) of torch.utils.data joins them"
        )
    if isinstance(dataset, Mapping):  # such as a DatasetDict of Hugging Face
        raise TypeError(
            f"{what} is a {type(dataset).__name__} with {', '.join(map(repr, list(dataset)[:5]))}; give one of its "
            f"datasets, such as dataset[{next(iter(dataset), 'train')!r}]"
        )
    if isinstance(dataset, type | IterableDataset | str | bytes) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        iterable = hasattr(dataset, "__iter__") and not isinstance(dataset, type | str | bytes)
        advice = "; list(dataset) reads an iterable dataset into memory, as one that can be indexed" if iterable else ""
        raise TypeError(
            f"{what} must be a dataset with __getitem__ and __len__, or a function f(rank, num_nodes, train_dataset) "
            f"that returns one; got {type(dataset).__name__}{advice}"
        )
    if getattr(dataset, "shape", None) == ():
        raise TypeError(f"{what} must have a dimension of examples, got one value, {dataset!r:.100}")
    if _length(dataset) == 0:
        raise ValueError(f"{what} is empty")
    return dataset


def _length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]


# The batches of several runs ------------------------------------------------------------------------------------------


class BatchSource(Protocol):
    """The source of a run's batches: `vsim.data.batches.Batches`, or one node's loader."""

    datasets: list[Dataset[Any]]
    lengths: list[int]
    steps_per_epoch: int
    epoch_steps: Tensor
    shard_sizes: Tensor

    def of_datasets(self, number: Callable[[Dataset[Any]], int]) -> list[int]: ...

    @property
    def num_rows(self) -> int: ...

    def attended(self, nodes: Sequence[int], missed: Sequence[int]) -> BatchSource: ...

    def from_step(self, start_step: int = 0) -> Iterator[Any]: ...


@dataclass
class Source:
    """The batches of one run.

    Attributes:
        key: a value that is equal for runs that see the same examples in the same order.
        context: makes the context in which examples are fetched.
    """

    batches: BatchSource
    key: Hashable
    context: Callable[[], AbstractContextManager[None]] = nullcontext


def joint_batches(sources: Sequence[Source], start_step: int) -> Iterator[Any]:
    """Yield stacked batches (R, B, …) of all runs from the 0-based `start_step` on, endlessly.

    Args:
        sources: one per run, in the order of their rows.
    """
    if len(sources) == 1:
        return _fetched(sources[0], start_step)
    distinct = {source.key: source for source in reversed(sources)}
    keys = [source.key for source in sources]
    datasets = {id(one_in_memory(source.batches)): one_in_memory(source.batches) for source in distinct.values()}
    fields = in_memory(next(iter(datasets.values()))) if len(datasets) == 1 else None
    if fields is not None:
        return _gathered(fields, {key: source.batches for key, source in distinct.items()}, keys, start_step)
    return _concatenated(distinct, keys, start_step)


def one_in_memory(batches: BatchSource) -> Any:
    """Return the dataset that all nodes share, if it is held in tensors and fetching runs no user code; else None."""
    return batches.shared_in_memory if isinstance(batches, Batches) else None


def _fetched(source: Source, start_step: int) -> Iterator[Any]:
    batches = source.batches.from_step(start_step)
    while True:
        with source.context():
            batch = next(batches)
        yield batch


def _gathered(
    fields: Callable[[Tensor], list[Tensor]], sources: dict[Hashable, Any], keys: Sequence[Hashable], start_step: int
) -> Iterator[Any]:
    """Yield batches of a dataset held in tensors; one gather fetches the examples of all runs."""
    orders = {key: batches.order.batches(start_step) for key, batches in sources.items()}
    counts = [sources[key].num_rows for key in keys]
    while True:
        positions = {key: next(order) for key, order in orders.items()}
        yield mapped(fields, joined([positions[key] for key in keys], counts))


def _concatenated(distinct: dict[Hashable, Source], keys: Sequence[Hashable], start_step: int) -> Iterator[Any]:
    fetched = {key: _fetched(source, start_step) for key, source in distinct.items()}
    counts = [distinct[key].batches.num_rows for key in keys]
    while True:
        batches = {key: next(own) for key, own in fetched.items()}
        yield joined([batches[key] for key in keys], counts)


def sizes_of(batch: Any, rows: Iterable[int] = (0,)) -> tuple[int, int]:
    """Return the numbers of examples and of token ids in some rows of a stacked batch (R, B, …).

    Inputs (`batch["input_ids"]`, or the first tensor) are token ids if they are whole numbers of shape (R, B, T). All
    token ids count, including padding.

    >>> sizes_of([torch.zeros(4, 8, 64, dtype=torch.long), torch.zeros(4, 8, 64, dtype=torch.long)], range(3))
    (24, 1536)
    >>> sizes_of([torch.zeros(4, 8, 1, 28, 28), torch.zeros(4, 8, dtype=torch.long)])
    (8, 0)
    """
    rows = set(rows)
    if isinstance(batch, Uneven):
        own = [sizes_of(part, rows.intersection(those)) for those, part in zip(batch.rows, batch.parts, strict=True)]
        return sum(examples for examples, _ in own), sum(tokens for _, tokens in own)
    leaves = tensors_of(batch)
    largest = max(leaves, key=Tensor.dim)
    named = isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor)
    inputs = batch["input_ids"] if named else leaves[0]
    whole = not (inputs.is_floating_point() or inputs.is_complex() or inputs.dtype is torch.bool)
    tokens = math.prod(inputs.shape[1:]) if whole and inputs.dim() == 3 else 0
    return len(rows) * (largest.shape[1] if largest.dim() > 1 else 1), len(rows) * tokens


def evened(batch: Any) -> Any:
    """Return a batch for measuring memory; in an `Uneven`, all rows get the size of its largest part."""
    if not isinstance(batch, Uneven):
        return batch
    rows = [0] * sum(map(len, batch.rows))
    largest = max(batch.parts, key=lambda part: sum(t[0].numel() for t in tree_leaves(part)))
    return tree_map(lambda t: t[rows], largest)


def of_rows(batch: Any, rows: range) -> Any:
    """Return some rows of a stacked batch: (n, B, …), or an `Uneven`."""
    if not isinstance(batch, Uneven):
        return tree_map(lambda t: t[rows.start : rows.stop], batch)
    found = Uneven([], [])
    for those, part in zip(batch.rows, batch.parts, strict=True):
        own = [i for i, row in enumerate(those) if row in rows]
        if own:
            found.rows.append([those[i] - rows.start for i in own])
            found.parts.append(tree_map(lambda t, own=own: t[own], part))
    return found
