"""The oracle: K nodes as a cluster would have them, each a module, an optimizer and a DataLoader of its own.

Nothing of vsim's training is used here, only the seeds of its streams. Collectives are done by hand: the nodes'
vectors are stacked in the order of their ranks and averaged down the first dimension.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from vsim.cluster.randomness import NODE, generator
from vsim.models import CNN, GPT, MLP


class Communication:
    """What the nodes do together; nothing here, so that every node trains alone."""

    def start(self, models: list[nn.Module]) -> None:
        """Make the state that lasts, from the models before training."""

    def after_backward(self, models: list[nn.Module]) -> None:
        """Change the gradients."""

    def after_step(self, models: list[nn.Module], step: int) -> None:
        """Change the weights, after optimizer step number `step`."""


class AverageGradients(Communication):
    """AllReduce."""

    def after_backward(self, models: list[nn.Module]) -> None:
        mean = torch.stack([parameters_to_vector(dense_grads(m)) for m in models]).mean(0)
        for model in models:
            for p, g in zip(model.parameters(), mean.split([p.numel() for p in model.parameters()]), strict=True):
                p.grad = g.view_as(p).clone()


@dataclass
class AverageWeights(Communication):
    """FedAvg."""

    H: int

    def after_step(self, models: list[nn.Module], step: int) -> None:
        if step % self.H == 0:
            mean = stacked_weights(models).mean(0)
            for model in models:
                vector_to_parameters(mean.clone(), model.parameters())


@dataclass
class OuterStep(Communication):
    """DiLoCo."""

    H: int
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def start(self, models: list[nn.Module]) -> None:
        self.phi = nn.Parameter(parameters_to_vector(models[0].parameters()).detach().clone())
        self.optim = torch.optim.SGD([self.phi], lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)

    def after_step(self, models: list[nn.Module], step: int) -> None:
        if step % self.H == 0:
            self.phi.grad = self.phi.detach() - stacked_weights(models).mean(0)
            self.optim.step()
            for model in models:
                vector_to_parameters(self.phi.detach().clone(), model.parameters())


@dataclass
class Separate:
    """What came out: the models of all nodes and the losses (T, K) of their batches."""

    models: list[nn.Module]
    losses: list[list[float]] = field(default_factory=list)

    @property
    def weights(self) -> Tensor:
        """(K, P)."""
        return stacked_weights(self.models)

    def buffers(self, name: str) -> Tensor:
        """(K, *shape)."""
        return torch.stack([dict(m.named_buffers())[name] for m in self.models])


def train_separately(
    model: nn.Module,
    dataset: Dataset[Any],
    communication: Communication,
    optimizer: Callable[[Any], Optimizer],
    *,
    num_nodes: int,
    max_steps: int,
    batch_size: int,
    seed: int = 42,
    shuffle: bool = True,
    minibatch_size: int | None = None,
    max_norm: float | None = None,
    lr_factor: Callable[[int], float] | None = None,
) -> Separate:
    """Train K copies of `model` (which returns its loss) on their shards of `dataset`."""
    models = [copy.deepcopy(model).train() for _ in range(num_nodes)]
    optimizers = [optimizer(m.parameters()) for m in models]
    schedulers = [LambdaLR(o, lr_factor) for o in optimizers] if lr_factor else []
    streams = [generator(seed, NODE, node) for node in range(num_nodes)]
    loaders = [shard_batches(dataset, num_nodes, node, batch_size, shuffle, seed) for node in range(num_nodes)]
    result = Separate(models)
    communication.start(models)
    for step in range(1, max_steps + 1):
        losses = []
        for m, o, stream, loader in zip(models, optimizers, streams, loaders, strict=True):
            o.zero_grad()
            losses.append(backward(m, next(loader), minibatch_size or batch_size, stream))
        result.losses.append(losses)
        communication.after_backward(models)
        for m, o in zip(models, optimizers, strict=True):
            if max_norm is not None:
                nn.utils.clip_grad_norm_(m.parameters(), max_norm)
            o.step()
        with torch.no_grad():
            communication.after_step(models, step)
        for scheduler in schedulers:
            scheduler.step()
    return result


def backward(model: nn.Module, batch: list[Tensor], minibatch_size: int, stream: torch.Generator) -> float:
    """Accumulate the gradient of the batch's mean loss, with the model's randomness drawn from `stream`."""
    total: Tensor | None = None
    for piece in zip(*(t.split(minibatch_size) for t in batch), strict=True):
        share = len(piece[0]) / len(batch[0])
        ours = torch.default_generator.get_state()
        torch.default_generator.set_state(stream.get_state())
        loss = model(list(piece))
        stream.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(ours)
        loss = loss if share == 1 else loss * share
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total.item()


def shard_batches(
    dataset: Dataset[Any], num_nodes: int, node: int, batch_size: int, shuffle: bool, seed: int, drop_last: bool = False
) -> Iterator[Any]:
    """Yield one node's batches, epoch after epoch, as a torch.distributed script would load them."""
    sampler = DistributedSampler(dataset, num_replicas=num_nodes, rank=node, shuffle=shuffle, seed=seed)
    # The generator is for the seeds of worker processes, which the DataLoader would draw from the global one.
    loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, generator=torch.Generator())
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def dense_grads(model: nn.Module) -> list[Tensor]:
    """The gradients as a cluster averages them: dense, and 0 where the loss does not depend on a parameter."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in model.parameters()]


def stacked_weights(models: list[nn.Module]) -> Tensor:
    """(K, P)."""
    return torch.stack([parameters_to_vector(m.parameters()).detach() for m in models])


def warmup_then_cosine(warmup_steps: int, max_steps: int) -> Callable[[int], float]:
    """The named schedule, written out."""
    return lambda s: (
        s / warmup_steps
        if s < warmup_steps
        else 0.1 + 0.45 * (1 + math.cos(math.pi * (s - warmup_steps) / (max_steps - warmup_steps)))
    )


# Small models and data, so that hundreds of runs take seconds. 29 examples are not divided by any K or batch.


def small_mlp(dropout: float = 0.0) -> MLP:
    """P = 12·16 + 16 + 16·5 + 5 = 293."""
    return MLP(12, (16,), 5, dropout=dropout, seed=1)


class Scaled(nn.Module):
    """A linear layer for `vectors`, and what is made of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)
        stream = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.4 * torch.randn(p.shape, generator=stream))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.scaled(self.layer(batch[0])), batch[1])

    def scaled(self, x: Tensor) -> Tensor:
        return x


def small_cnn(dropout: float = 0.3) -> CNN:
    """With BatchNorm."""
    return CNN((1, 6, 6), (4, 8), 5, batch_norm=True, dropout=dropout, seed=1)


def small_gpt(dropout: float = 0.2) -> GPT:
    """With tied embeddings."""
    return GPT(11, block_size=7, layers=2, width=16, heads=2, dropout=dropout, seed=1)


def vectors(count: int = 29, seed: int = 0) -> TensorDataset:
    """For `small_mlp`."""
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 12, generator=g), torch.randint(5, (count,), generator=g))


def images(count: int = 29, seed: int = 0) -> TensorDataset:
    """For `small_cnn`."""
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 1, 6, 6, generator=g), torch.randint(5, (count,), generator=g))


def tokens(count: int = 29, seed: int = 0) -> TensorDataset:
    """For `small_gpt`."""
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(*torch.randint(11, (2, count, 7), generator=g))


@dataclass(frozen=True)
class Task:
    """A model and data that it can learn."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], TensorDataset]


TASKS = [
    Task("mlp", lambda: small_mlp(0.2), vectors),
    Task("cnn", small_cnn, images),
    Task("gpt", small_gpt, tokens),
]


class Noisy(nn.Module):
    """A small model that draws random numbers, and keeps statistics."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 3))

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def own_examples(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    """Each node's own."""
    stream = torch.Generator().manual_seed(rank)
    return TensorDataset(torch.randn(16, 6, generator=stream), torch.randint(3, (16,), generator=stream))
