"""Data with wrong labels on some nodes, for attacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from vsim.arguments import is_factory
from vsim.data.batches import DatasetFactory, in_memory


class FlippedLabels:
    """A factory of the nodes' training data that gives some nodes labels C − 1 − y in place of y.

    Args:
        factory: f(rank, num_nodes, train_dataset), such as a `Partition`. Examples are (inputs, label), or dicts with a
            "label" or "labels".
        nodes: f(num_nodes) → the numbers of the nodes with flipped labels.
        classes: the number of classes C.

    Raises:
        TypeError: the nodes share one dataset.
    """

    def __init__(self, factory: Any, nodes: Callable[[int], Sequence[int]], classes: int) -> None:
        if not is_factory(factory):
            raise TypeError(
                "attack: labels are flipped in the data of single nodes: give each its own train_dataset, such as "
                f"vsim.data.partition(dataset, num_nodes); got {type(factory).__name__}"
            )
        self.factory: DatasetFactory = factory
        self.nodes, self.classes = nodes, classes

    def __call__(self, rank: int, num_nodes: int, train_dataset: bool) -> Any:
        dataset = self.factory(rank, num_nodes, train_dataset)
        if not train_dataset or rank not in self.nodes(num_nodes):
            return dataset
        stored = in_memory(dataset)
        if stored is None:
            return _Flipped(dataset, self.classes)
        *inputs, labels = stored(torch.arange(len(dataset)))  # type: ignore[arg-type]
        _check_labels(labels, self.classes)
        return TensorDataset(*inputs, self.classes - 1 - labels)


def _check_labels(labels: Any, classes: int) -> None:
    """Raise a ValueError if labels are not classes; C − 1 − y would be no class either."""
    numbers = torch.as_tensor(labels)
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < classes:
        raise ValueError(
            f"attack: classes={classes}, and the data have labels from {int(numbers.min())} to {int(numbers.max())}: "
            "labels must be from 0 to classes − 1"
        )


class _Flipped(Dataset[Any]):
    def __init__(self, dataset: Any, classes: int) -> None:
        self.dataset, self.classes = dataset, classes

    def _flipped(self, label: Any) -> Any:
        _check_labels(label, self.classes)
        return self.classes - 1 - label

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        example = self.dataset[index]
        if isinstance(example, dict):
            key = next((key for key in ("label", "labels") if key in example), None)
            if key is None:
                raise TypeError(f"attack: an example has no 'label', only {', '.join(map(repr, example))}")
            return {**example, key: self._flipped(example[key])}
        if not isinstance(example, list | tuple) or len(example) < 2:
            raise TypeError(f"attack: an example must be (inputs, label), got {type(example).__name__}")
        return (*example[:-1], self._flipped(example[-1]))
