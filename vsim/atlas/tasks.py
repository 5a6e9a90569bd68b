"""The tasks of atlas/1. They are fixed: any change of a number is another version of the atlas."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from vsim.data import Partition, TextDataset, Vocabulary, digits, mnist1d, partition
from vsim.data.federated import synthetic_federated
from vsim.models import CNN, GPT, MLP
from vsim.network import Compute, Network

VERSION = "atlas/1"
# Name → bit/s and seconds of the links.
NETWORKS = {"100 Gbit/s": (100e9, 0.0), "1 Gbit/s, 10 ms": (1e9, 0.01), "100 Mbit/s, 50 ms": (1e8, 0.05)}
ASYNCHRONOUS_ON = "1 Gbit/s, 10 ms"  # their training depends on the network


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """A model, data and nodes.

    Args:
        about: what is trained, in words.
        data: () → data for training, validation and tests. model: seed → model.
        num_nodes: K. batch_size: examples of a node's step. max_steps: T, of every run.
        optimizer: the inner one, of torch.optim.
        lr: range of the inner learning rate, searched on a logarithmic scale. lr_of_signs: that of steps by signs.
        computing: seconds that a node computes in a step, one number or one a node.
        priced_as: number of parameters for which time is priced: the messages of the run, as many times larger as this
            model has more parameters.
        kinds: kinds of strategies that enter, see `spaces.Row`.
        collective: how nodes average: "ring", or by a "server" for clients, whose line is as fast as theirs together.
    """

    about: str
    data: Callable[[], tuple[Any, Any, Any]]
    model: Callable[[int], nn.Module]
    num_nodes: int
    batch_size: int
    max_steps: int
    optimizer: str
    lr: tuple[float, float]
    lr_of_signs: tuple[float, float]
    computing: float | tuple[float, ...]
    priced_as: float
    kinds: frozenset[str]
    collective: str = "ring"

    @cached_property
    def parameters(self) -> int:
        return sum(own.numel() for own in self.model(0).parameters())

    @property
    def compute(self) -> Compute:
        return Compute(self.computing)

    def network(self, name: str) -> Network:
        """Return a network of NETWORKS, slower by as much as the priced model is larger than the trained one."""
        bits, latency = NETWORKS[name]
        bits *= self.parameters / self.priced_as
        server = self.num_nodes * bits if self.collective == "server" else None
        return Network(bits, latency, collective=self.collective, server=server)

    def digest(self) -> str:
        """Return what tells this data from other data: the start of a SHA-256 of all whole numbers, of who has which
        examples, and of sums of other numbers, whose last digits differ between machines."""
        found = hashlib.sha256()
        for part in self.data():
            for tensor in _tensors(part):
                if tensor.is_floating_point():
                    sums = tensor.double().abs().sum(), tensor.double().square().sum()
                    found.update(f"{tensor.shape} {sums[0]:.5g} {sums[1]:.5g}".encode())
                else:
                    found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()[:16]


def _tensors(part: Any) -> list[Tensor]:
    """Return the tensors of a dataset, with the indices of a subset, or of each node."""
    if isinstance(part, TensorDataset):
        return [*part.tensors]
    if isinstance(part, Partition):
        return [*_tensors(part.dataset), *map(part.indices, range(part.num_nodes))]
    return [*_tensors(part.dataset), torch.as_tensor(part.indices)]


def _halves(dataset: Any, seed: int = 0) -> tuple[Any, Any]:
    """Return two halves of a dataset: for validation, and for tests."""
    size = len(dataset)
    stream = torch.Generator().manual_seed(seed)
    one, other = random_split(dataset, [size // 2, size - size // 2], generator=stream)
    return one, other


@cache
def _sentences(characters: int = 400_000, seed: int = 0) -> str:
    """Return sentences of words made of syllables. The text is made, because no text is the same on every machine.

    A sentence has a topic, which orders 400 words by how often they occur (Zipf), and a word's successor is one of its
    four favourites half of the time. So letters can be predicted from letters, words from words, and never all.
    """
    stream = np.random.RandomState(seed)  # the old generator, whose stream no version of NumPy changes
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
    words = ["".join(stream.choice(syllables, 1 + stream.randint(3))) for _ in range(400)]
    topics = [stream.permutation(400) for _ in range(6)]
    favourites = stream.randint(400, size=(400, 4))
    chances = 1 / np.arange(1, 401)
    chances /= chances.sum()
    parts, length = [], 0
    while length < characters:
        topic, said = topics[stream.randint(6)], [stream.randint(400)]
        for _ in range(3 + stream.randint(8)):
            likely = favourites[said[-1]][stream.randint(4)]
            said.append(likely if stream.rand() < 0.5 else topic[stream.choice(400, p=chances)])
        parts.append(" ".join(words[word] for word in said).capitalize() + ". ")
        length += len(parts[-1])
    return "".join(parts)[:characters]


_BLOCK = 32


def _characters() -> tuple[Any, Any, Any]:
    text = _sentences()
    vocabulary = Vocabulary(text)
    ids = vocabulary.encode(text)
    ends = [0, 391_808, 395_904, 400_000]  # 128 windows each for validation and tests
    train, val, test = (TextDataset(ids[a:b], vocabulary, _BLOCK, _BLOCK) for a, b in pairwise(ends))
    return train, val, test


def _digits() -> tuple[Any, Any, Any]:
    train, rest = digits(val_fraction=0.4)
    return train, *_halves(rest)


def _strokes() -> tuple[Any, Any, Any]:
    train, rest = mnist1d(size=6000, val_fraction=1 / 3)
    return partition(train, 20, "dirichlet", alpha=0.1, min_size=10, seed=0), *_halves(rest)


def _synthetic() -> tuple[Any, Any, Any]:
    train, rest = synthetic_federated(1, 1, seed=0)
    return train, *_halves(rest.dataset)


_DIMENSIONS, _CONDITION, _OWN = 40, 100.0, 512


def _curvatures() -> NDArray[np.float64]:
    """Return the diagonals of the nodes' A, and of their mean: (9, 40), from about 1 to 1 / 100."""
    stream = np.random.RandomState(1)
    own = np.geomspace(1, 1 / _CONDITION, _DIMENSIONS) * np.exp(stream.standard_normal((8, _DIMENSIONS)) - 0.5)
    return np.vstack([own, own.mean(0)])


def _points() -> tuple[Any, Any, Any]:
    """Return points (N, 40) with their nodes (N,); and, twice, the point at which the mean loss has its minimum.

    Nodes differ in centre and in curvature, so that the mean of their minima is not the minimum of their mean.
    """
    stream = np.random.RandomState(0)
    centers = 2 * stream.standard_normal((8, 1, _DIMENSIONS))
    points = (centers + stream.standard_normal((8, _OWN, _DIMENSIONS))).astype(np.float32)
    curvatures = _curvatures()[:8]
    minimum = (curvatures * points.mean(1)).sum(0, keepdims=True) / curvatures.sum(0)
    train = TensorDataset(torch.from_numpy(points.reshape(-1, _DIMENSIONS)), torch.arange(8).repeat_interleave(_OWN))
    least = TensorDataset(torch.from_numpy(minimum.astype(np.float32)), torch.tensor([8]))
    return partition(train, 8, "classes", classes=1), least, least


class Quadratic(nn.Module):
    """½ (w − z)ᵀ A_k (w − z), the mean over points z of nodes k, with diagonal A_k. At the minimum of all nodes' mean
    loss as z, with their mean A, it is the distance from the minimum, in loss."""

    curvatures: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(_DIMENSIONS))
        self.register_buffer("curvatures", torch.from_numpy(_curvatures().astype(np.float32)))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        z, node = batch
        return 0.5 * (self.curvatures[node] * (self.weights - z) ** 2).sum(1).mean()


_ALL = {"every step", "rounds"}

TASKS = {
    "characters": Task(
        about="GPT with one layer on sentences, by character",
        data=_characters,
        model=lambda seed: GPT(len("".join(sorted({*_sentences()}))), _BLOCK, layers=1, width=32, heads=2, seed=seed),
        num_nodes=4,
        batch_size=4,
        max_steps=200,
        optimizer="adamw",
        lr=(1e-3, 3e-2),
        lr_of_signs=(3e-4, 1e-2),
        computing=2.0,
        priced_as=1e9,
        kinds=frozenset({*_ALL, "matrices", "Adam"}),
    ),
    "digits": Task(
        about="CNN on images of digits; half of the nodes are twice as slow",
        data=_digits,
        model=lambda seed: CNN(channels=(8, 16), seed=seed),
        num_nodes=4,
        batch_size=8,
        max_steps=200,
        optimizer="adamw",
        lr=(3e-4, 1e-2),
        lr_of_signs=(1e-4, 1e-2),
        computing=(0.2, 0.2, 0.4, 0.4),
        priced_as=25e6,
        kinds=frozenset({*_ALL, "matrices", "Adam", "asynchronous"}),
    ),
    "strokes": Task(
        about="MLP on MNIST-1D, dealt to 20 clients by Dirichlet(0.1)",
        data=_strokes,
        model=lambda seed: MLP(40, (64,), seed=seed),
        num_nodes=20,
        batch_size=16,
        max_steps=300,
        optimizer="sgd",
        lr=(1e-2, 1.0),
        lr_of_signs=(3e-4, 3e-2),
        computing=0.1,
        priced_as=1e6,
        kinds=frozenset({*_ALL, "matrices", "plain SGD", "clients"}),
        collective="server",
    ),
    "synthetic": Task(
        about="linear classifier on Synthetic(1, 1), 30 clients",
        data=_synthetic,
        model=lambda seed: MLP(60, (), seed=seed),
        num_nodes=30,
        batch_size=10,
        max_steps=300,
        optimizer="sgd",
        lr=(1e-3, 1.0),
        lr_of_signs=(3e-4, 3e-2),
        computing=0.02,
        priced_as=610,
        kinds=frozenset({*_ALL, "plain SGD", "clients"}),
        collective="server",
    ),
    "quadratics": Task(
        about="quadratics that differ by node; the loss is the distance from the known minimum",
        data=_points,
        model=lambda seed: Quadratic(),
        num_nodes=8,
        batch_size=4,
        max_steps=300,
        optimizer="sgd",
        lr=(3e-3, 1.0),
        lr_of_signs=(1e-3, 0.1),
        computing=0.5,
        priced_as=1e8,
        kinds=frozenset({*_ALL, "plain SGD", "clients"}),
    ),
}
