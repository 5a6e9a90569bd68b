"""From checked arguments to a run: the same parts for all nodes in one process, or for one node in each."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vsim.checkpoint.fingerprint import fingerprint, settings_of
from vsim.checkpoint.resume import Checkpointer, begin_fork, resume
from vsim.cluster.cluster import Cluster
from vsim.cluster.collectives import Collectives
from vsim.cluster.randomness import NODE, SHARED, generator
from vsim.cluster.replicas import Replicas
from vsim.data.batches import first_examples, resolve
from vsim.engine import Executor, Settings, first_calls
from vsim.engine.memory import fitting_minibatch, total_bytes
from vsim.engine.objective import Objective
from vsim.records.history import History
from vsim.strategy.base import Strategy
from vsim.training.config import RunConfig
from vsim.training.evaluate import Evaluator
from vsim.training.interrupt import Interrupt
from vsim.training.loop import Reporter, Run


class BatchSource(Protocol):
    """Where a run's batches come from: `vsim.data.Batches`, or one node's own loader."""

    lengths: list[int]
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
    history: History | None = None,
    interrupt: Interrupt | None = None,
) -> Run:
    """Set up the run of `nodes`, which are held in this process as rows on `device`.

    Args:
        collectives: how they communicate with each other and with the others.
        batches: stacked batches (R, B, …) for them.
        executor: called with (replicas, objective, generators, settings).
        report: gets every step's outcome.
        history: the record that these reports go to, where it is kept in this process.
        interrupt: asks the run to stop.

    Raises:
        CheckpointError: the run does not fit the checkpoint that it starts from.
    """
    checkpoint = None if config.start is None else config.start.open()
    first_calls.settle()
    steps = config.num_epochs * batches.steps_per_epoch if config.max_steps is None else config.max_steps
    # Separate processes have a row each; so has an exact run, whose sums have the order of theirs.
    in_one = not config.deterministic and len(nodes) == config.num_nodes > 1
    share_weights, share_grads = (in_one and s for s in (config.strategy.shares_weights, config.strategy.shares_grads))
    replicas = Replicas.of(config.model, len(nodes), device, nodes.start, share_weights, share_grads)
    replicas.module.train()
    if checkpoint is not None and checkpoint.forks:
        begin_fork(checkpoint, replicas)
    cluster = Cluster(
        replicas,
        collectives,
        generator(config.seed, SHARED),
        batches.shard_sizes,
        steps,
        config.deterministic,
        config.compile is True,
    )
    strategy = copy.deepcopy(config.strategy)
    strategy.settings = settings_of(config.strategy)
    strategy.setup(cluster)
    objective = Objective(replicas.module, copy.deepcopy(config.loss_fn)).to(device)
    streams = [generator(config.seed, NODE, node, device=device) for node in nodes]
    settings = Settings(config.autocast, config.deterministic, config.chunk_size, config.compile, steps)
    engine = executor(replicas, objective, streams, settings)
    examples = _validation_examples(config, device)
    run = Run(
        cluster,
        strategy,
        engine,
        iter(()),
        collectives.ledger,
        report,
        steps,
        config.minibatch_size,
        None,
        config.val_interval,
        config.correlation_interval,
        config.after_step,
        None if config.saving is None else Checkpointer(config.saving, history),
        interrupt or Interrupt(),
        history=history,
    )
    run.fingerprint = fingerprint(config, run, batches.lengths)
    if checkpoint is not None:
        resume(run, checkpoint)
        run.starts = checkpoint.forks
        engine.step = run.done
    run.batches = batches.from_step(run.done)
    if config.memory_share is not None and run.done < steps:
        first = next(run.batches)
        run.batches = itertools.chain([first], run.batches)
        run.minibatch_size = _fitting_minibatch(config, cluster, strategy, engine, first)
    if examples is not None:
        # Without gradients no activations are kept, so that more examples fit at once than in training.
        batch_size = 4 * (run.minibatch_size or config.batch_size)
        run.evaluator = Evaluator(engine, examples, batch_size, config.seed)
    return run


def _validation_examples(config: RunConfig, device: torch.device) -> Any:
    """Return one batch (N, …) of the validation examples on `device`, None without validation data."""
    if config.val_dataset is None:
        return None
    (dataset,) = resolve(config.val_dataset, config.num_nodes, range(1), False, "val_dataset")
    examples = first_examples(dataset, config.val_size, config.dataloader_kwargs.get("collate_fn"))
    return tree_map(lambda t: t.to(device), examples)


def _fitting_minibatch(
    config: RunConfig, cluster: Cluster, strategy: Strategy, engine: Executor, batch: Any
) -> int | None:
    """Return the largest minibatch that fits on all nodes into their share of memory, None for the whole batch."""
    assert config.memory_share is not None
    device = cluster.weights.device
    total = total_bytes(device)
    batch = tree_map(lambda t: t.to(device), batch)
    size = fitting_minibatch(engine, strategy.optim, batch, config.batch_size, config.memory_share * total)
    with cluster.collectives.unbilled():
        rows = torch.full((cluster.replicas.num_held,), size, device=device)
        size = int(cluster.collectives.all_gather(rows, label="minibatch sizes").min())
    if size == 0:
        raise ValueError(
            f"max_memory_usage leaves this process {config.memory_share * total / 1e9:.3g} GB of the {total / 1e9:.3g} "
            f"GB of {device.type}, and a minibatch of one example a node does not fit: raise it, or take fewer nodes "
            "or a smaller model"
        )
    return None if size == config.batch_size else size
