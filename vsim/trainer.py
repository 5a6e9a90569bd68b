"""Trainer: checks the arguments, picks device and executor, and runs the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from vsim.arguments import known_keywords, one_of, whole_number
from vsim.cluster import Cluster
from vsim.collectives import StackedCollectives
from vsim.data.batches import Batches, DatasetFactory, first_examples, resolve
from vsim.evaluate import Evaluator
from vsim.executor import EXECUTORS, AutoExecutor, Executor, LoopExecutor, VmapExecutor
from vsim.history import History
from vsim.ledger import Ledger
from vsim.loop import Hook, Run, train
from vsim.objective import LossFunction, Objective
from vsim.randomness import NODE, SHARED, generator, isolated
from vsim.replicas import Replicas
from vsim.strategy.base import Strategy

Data = Dataset[Any] | DatasetFactory


class Trainer:
    """Trains a model on K simulated nodes.

    Args:
        model: any nn.Module. `model(batch)` returns a scalar loss, the mean over the batch; with `loss_fn`, `model(x)`
            returns outputs. It is not changed: every `fit` starts from its weights.
        train_dataset: a map-style dataset, which the nodes share as DistributedSampler would, or a function
            f(rank, num_nodes, train_dataset: bool) that returns the dataset of one node.
        val_dataset: likewise; a function is asked for that of rank 0. None: no validation.
        loss_fn: f(outputs, y) → scalar loss of a batch (x, y).
        device: where to train by default. None: cuda, else mps, else cpu.

    Attributes, after or during a `fit`:
        history: the `History` of the last run. ledger: its `Ledger`. strategy: its own copy of the strategy.
        run_label: what progress bar and history call the next runs; None: by their strategy.

    Example:
        >>> from vsim import Trainer
        >>> from vsim.data import digits
        >>> from vsim.models import MLP
        >>> from vsim.strategy import DiLoCoStrategy
        >>> train, val = digits()
        >>> trainer = Trainer(MLP(seed=0), train, val)
        >>> model = trainer.fit(strategy=DiLoCoStrategy(H=10, lr=1e-3), num_nodes=4, max_steps=20, progress=False)
        >>> len(trainer.ledger), trainer.history.node_losses.shape
        (2, (20, 4))
    """

    @known_keywords
    def __init__(
        self,
        model: nn.Module,
        train_dataset: Data,
        val_dataset: Data | None = None,
        *,
        loss_fn: LossFunction | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of (outputs, y), got {type(loss_fn).__name__}")
        self.model = model
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.loss_fn = loss_fn
        self.device = None if device is None else pick_device(device)
        self.history = History()
        self.ledger = Ledger()
        self.strategy: Strategy | None = None
        self.run_label: str | None = None

    @known_keywords
    def fit(
        self,
        *,
        strategy: Strategy,
        num_nodes: int,
        num_epochs: int = 1,
        max_steps: int | None = None,
        batch_size: int = 16,
        minibatch_size: int | None = None,
        gradient_accumulation: int | None = None,
        shuffle: bool = True,
        val_size: int = 64,
        val_interval: int | None = 100,
        seed: int = 42,
        device: str | torch.device | None = None,
        autocast: bool = False,
        executor: str = "auto",
        deterministic: bool = False,
        correlation_interval: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
        train_loss_hook: Hook | None = None,
        eval_loss_hook: Hook | None = None,
    ) -> nn.Module:
        """Train, and return the mean of the nodes' final models as an ordinary nn.Module.

        Args:
            strategy: how the nodes train and communicate. The run works on a copy, so that it can be used again.
            num_nodes: K.
            num_epochs: passes over the data; `max_steps`: optimizer steps, instead of or as a limit on epochs: with
                max_steps given, the run has exactly so many steps.
            batch_size: examples a node and step. Gradients may be accumulated over `minibatch_size` examples at a
                time, or in `gradient_accumulation` pieces; give one of the two.
            shuffle: a new order every epoch.
            val_size: validation examples used; val_interval: steps between validations (None: first and last only).
            seed: everything random follows from it. The process's own random state is not touched.
            device: as of Trainer, which it overrides.
            autocast: compute in bfloat16 where torch.autocast does; weights stay as they are.
            executor: "vmap" (all nodes at once), "loop" (one by one) or "auto" (vmap where the model allows it).
            deterministic: the bits of separate processes in eager PyTorch, on CPU in float32; slower.
            correlation_interval: steps between measurements of the replicas' divergence and correlation.
            dataloader_kwargs: num_workers, collate_fn, drop_last and so on. `collate_fn` gets one node's samples.
            progress: show a progress bar.
            train_loss_hook: called as f(step, mean training loss) after every step.
            eval_loss_hook: called as f(step, global validation loss) after every validation.

        Raises:
            TypeError, ValueError: an argument is unknown, out of range, or would have no effect.
            FloatingPointError: a node's loss is not finite; it names step and nodes.
        """
        if not isinstance(strategy, Strategy):
            raise TypeError(f"strategy must be a vsim Strategy object, got {strategy!r}")
        whole_number("num_nodes", num_nodes)
        whole_number("batch_size", batch_size)
        whole_number("num_epochs", num_epochs)
        whole_number("val_size", val_size)
        whole_number("seed", seed, at_least=0)
        intervals = {
            "max_steps": max_steps,
            "val_interval": val_interval,
            "correlation_interval": correlation_interval,
        }
        for name, value in intervals.items():
            if value is not None:
                whole_number(name, value)
        minibatch_size = _minibatch_size(batch_size, minibatch_size, gradient_accumulation)
        one_of("executor", executor, EXECUTORS)
        if deterministic and (executor == "vmap" or autocast):
            given = "executor='vmap'" if executor == "vmap" else "autocast=True"
            raise ValueError(f"deterministic=True promises the bits of eager float32; {given} does not have them")
        if eval_loss_hook is not None and self.val_dataset is None:
            raise ValueError("eval_loss_hook has no effect without a val_dataset")
        target = pick_device(device) if device is not None else self.device or pick_device(None)

        with isolated(seed, target):
            datasets = resolve(self.train_dataset, num_nodes, True, "train_dataset")
            batches = Batches(datasets, num_nodes, batch_size, shuffle, seed, dataloader_kwargs)
            steps = num_epochs * batches.steps_per_epoch if max_steps is None else max_steps
            replicas = Replicas.of(self.model, num_nodes, target)
            replicas.module.train()
            self.ledger = Ledger()
            cluster = Cluster(
                replicas,
                StackedCollectives(num_nodes, self.ledger),
                generator(seed, SHARED),
                batches.shard_sizes,
                steps,
                deterministic,
            )
            self.strategy = copy.deepcopy(strategy)
            self.strategy.setup(cluster)
            engine = self._executor(executor, replicas, target, seed, autocast, deterministic)
            self.history = History(self.run_label or type(strategy).__name__, num_nodes)
            collate = (dataloader_kwargs or {}).get("collate_fn")
            train(
                Run(
                    cluster,
                    self.strategy,
                    engine,
                    batches.from_step(0),
                    self.history,
                    self.ledger,
                    steps,
                    minibatch_size,
                    self._evaluator(engine, num_nodes, val_size, minibatch_size or batch_size, collate, target, seed),
                    val_interval,
                    correlation_interval,
                    train_loss_hook,
                    eval_loss_hook,
                    progress,
                    self.run_label or f"{type(strategy).__name__.removesuffix('Strategy')} × {num_nodes}",
                )
            )
            return replicas.as_module(cluster.mean_weights(), replicas.mean_buffers(), like=self.model)

    def _executor(
        self,
        name: str,
        replicas: Replicas,
        device: torch.device,
        seed: int,
        autocast: bool,
        deterministic: bool,
    ) -> Executor:
        objective = Objective(replicas.module, copy.deepcopy(self.loss_fn)).to(device)
        streams = [generator(seed, NODE, node, device=device) for node in replicas.nodes]
        if name == "auto" and deterministic:
            name = "loop"
        kind: Callable[..., Executor] = {"auto": AutoExecutor, "vmap": VmapExecutor, "loop": LoopExecutor}[name]
        return kind(replicas, objective, streams, autocast)

    def _evaluator(
        self,
        engine: Executor,
        num_nodes: int,
        val_size: int,
        batch_size: int,
        collate: Any,
        device: torch.device,
        seed: int,
    ) -> Evaluator | None:
        if self.val_dataset is None:
            return None
        (dataset,) = resolve(self.val_dataset, num_nodes, False, "val_dataset")
        batch = first_examples(dataset, val_size, collate)
        return Evaluator(engine, tree_map(lambda t: t.to(device), batch), batch_size, seed)


class LocalTrainer(Trainer):
    """A Trainer on this machine."""


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the device asked for, or the best there is: cuda, else mps, else cpu.

    Raises:
        ValueError: the name is unknown, or this machine has no such device.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    here = [name for name, there in available.items() if there]
    if device is None:
        return torch.device(here[0])
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {device!r}; this machine has {', '.join(here)}") from error
    if not available.get(chosen.type, False):
        raise ValueError(f"device {str(device)!r} is not available; this machine has {', '.join(here)}")
    return chosen


def _minibatch_size(batch_size: int, minibatch_size: int | None, pieces: int | None) -> int | None:
    """Return the size of the pieces that gradients are accumulated over, None for one piece."""
    if minibatch_size is not None and pieces is not None:
        raise TypeError("minibatch_size and gradient_accumulation say the same thing; give one of them")
    name, value = ("gradient_accumulation", pieces) if minibatch_size is None else ("minibatch_size", minibatch_size)
    if value is None:
        return None
    whole_number(name, value, at_most=batch_size)
    if batch_size % value:
        divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
        raise ValueError(
            f"batch_size {batch_size} cannot be divided by {name} {value}; {name} may be one of {divisors}"
        )
    size = value if minibatch_size is not None else batch_size // value
    return None if size == batch_size else size
