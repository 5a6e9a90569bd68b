"""From checked arguments to a run: the same parts for all nodes in one process, or for one node in each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from vsim import first_calls
from vsim.cluster import Cluster
from vsim.collectives import Collectives
from vsim.data.batches import Data, first_examples, resolve
from vsim.evaluate import Evaluator
from vsim.executor import Executor
from vsim.loop import Reporter, Run
from vsim.objective import LossFunction, Objective
from vsim.randomness import NODE, SHARED, generator
from vsim.replicas import Replicas
from vsim.strategy.base import Strategy


@dataclass(frozen=True)
class RunConfig:
    """What a run is, for any backend: the arguments of `Trainer` and `fit`, checked. See there."""

    model: nn.Module
    train_dataset: Data
    val_dataset: Data | None
    loss_fn: LossFunction | None
    strategy: Strategy
    num_nodes: int
    num_epochs: int
    max_steps: int | None
    batch_size: int
    minibatch_size: int | None
    shuffle: bool
    val_size: int
    val_interval: int | None
    seed: int
    autocast: bool
    deterministic: bool
    compile: bool
    correlation_interval: int | None
    dataloader_kwargs: Mapping[str, Any]
    after_step: Callable[[Run], None] | None = None  # called in every process when a step is done


class BatchSource(Protocol):
    """Where a run's batches come from: `vsim.data.Batches`, or one node's own loader."""

    steps_per_epoch: int
    shard_sizes: Tensor

    def from_step(self, start_step: int = 0) -> Iterator[Any]: ...


def assemble(
    config: RunConfig,
    nodes: range,
    collectives: Collectives,
    batches: BatchSource,
    executor: Callable[..., Executor],
    device: torch.device,
    report: Reporter,
) -> Run:
    """Set up the run of `nodes`, which are held in this process as rows on `device`.

    Args:
        collectives: how they communicate with each other and with the others.
        batches: stacked batches (R, B, …) for them.
        executor: called with (replicas, objective, generators, autocast).
        report: gets every step's outcome.
    """
    first_calls.settle()
    steps = config.num_epochs * batches.steps_per_epoch if config.max_steps is None else config.max_steps
    replicas = Replicas.of(config.model, len(nodes), device, nodes.start)
    replicas.module.train()
    cluster = Cluster(
        replicas,
        collectives,
        generator(config.seed, SHARED),
        batches.shard_sizes,
        steps,
        config.deterministic,
        config.compile,
    )
    strategy = copy.deepcopy(config.strategy)
    strategy.setup(cluster)
    objective = Objective(replicas.module, copy.deepcopy(config.loss_fn)).to(device)
    streams = [generator(config.seed, NODE, node, device=device) for node in nodes]
    engine = executor(replicas, objective, streams, config.autocast)
    return Run(
        cluster,
        strategy,
        engine,
        batches.from_step(0),
        collectives.ledger,
        report,
        steps,
        config.minibatch_size,
        _evaluator(config, engine, device),
        config.val_interval,
        config.correlation_interval,
        config.after_step,
    )


def _evaluator(config: RunConfig, engine: Executor, device: torch.device) -> Evaluator | None:
    if config.val_dataset is None:
        return None
    (dataset,) = resolve(config.val_dataset, config.num_nodes, range(1), False, "val_dataset")
    examples = first_examples(dataset, config.val_size, config.dataloader_kwargs.get("collate_fn"))
    examples = tree_map(lambda t: t.to(device), examples)
    # Without gradients no activations are kept, so that more examples fit at once than in training.
    return Evaluator(engine, examples, 4 * (config.minibatch_size or config.batch_size), config.seed)
