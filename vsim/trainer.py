"""Trainer: checks the arguments, picks device and executor, and runs the loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vsim.arguments import known_keywords, one_of, real_number, whole_number
from vsim.assembly import RunConfig, assemble
from vsim.collectives import StackedCollectives
from vsim.data.batches import Batches, Data, resolve
from vsim.distributed import ProcessOptions, default_threads, join, local_ranks, train_in_processes, under_torchrun
from vsim.executor import EXECUTORS, AutoExecutor, Executor, LoopExecutor, VmapExecutor
from vsim.history import History
from vsim.ledger import Ledger
from vsim.loop import Hook, Recorder, Run, StepReport, train
from vsim.objective import LossFunction
from vsim.randomness import isolated
from vsim.replicas import Replicas
from vsim.strategy.base import Strategy

_EXECUTORS: dict[str, Callable[..., Executor]] = {"auto": AutoExecutor, "vmap": VmapExecutor, "loop": LoopExecutor}


class Trainer:
    """Trains a model on K simulated nodes.

    Args:
        model: any nn.Module. `model(batch)` returns a scalar loss, the mean over the batch; with `loss_fn`, `model(x)`
            returns outputs. It is not changed: every `fit` starts from its weights.
        train_dataset: a map-style dataset, which the nodes share as DistributedSampler would, or a function
            f(rank, num_nodes, train_dataset: bool) that returns the dataset of one node.
        val_dataset: likewise; a function is asked for that of rank 0. None: no validation.
        loss_fn: f(outputs, y) → scalar loss of a batch (x, y).
        device: where to train by default. None: cuda, else mps, else cpu. devices: with backend="process", where the
            nodes train by default; see `fit`.

    Attributes, after or during a `fit`:
        history: the `History` of the last run. ledger: its `Ledger`. strategy: its own copy of the strategy.
        run_label: what progress bar and history call the next runs; None: by their strategy.
        after_step: called as f(run) in every process when a step is done, before it is reported; with
            backend="process" it must be picklable. None: nothing.

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
        devices: Sequence[str | torch.device] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of (outputs, y), got {type(loss_fn).__name__}")
        self.model = model
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.loss_fn = loss_fn
        if device is not None and devices is not None:
            raise TypeError("device and devices say the same thing; give one of them")
        self.device = None if device is None else pick_device(device)
        self.devices = devices
        self.history = History()
        self.ledger = Ledger()
        self.strategy: Strategy | None = None
        self.run_label: str | None = None
        self.after_step: Callable[[Run], None] | None = None

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
        compile: bool = False,
        backend: str = "stacked",
        devices: Sequence[str | torch.device] | None = None,
        threads_per_process: int | None = None,
        timeout_seconds: float | None = None,
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
            compile: use torch.compile for the strategy's kernels for which it was measured to pay (top-k selection,
                stochastic rounding, dequantization; see `vsim_kernels.compiled`), after some seconds for compiling.
            backend: "stacked", the simulator; or "process": a process for every node over torch.distributed, in
                ordinary eager PyTorch on this machine, or under torchrun this process as one of its ranks.
            devices: with backend="process", node k computes on devices[k mod len(devices)]. Default: a GPU for every
                node where there are as many, else the CPU.
            threads_per_process: its CPU threads; default the machine's divided by the nodes on it, at least 1.
            timeout_seconds: how long a collective waits for the other nodes; default 600.
            correlation_interval: steps between measurements of the replicas' divergence and correlation.
            dataloader_kwargs: num_workers, collate_fn, drop_last and so on. `collate_fn` gets one node's samples.
            progress: show a progress bar.
            train_loss_hook: called as f(step, mean training loss) after every step.
            eval_loss_hook: called as f(step, global validation loss) after every validation.

        Raises:
            TypeError, ValueError: an argument is unknown, out of range, or would have no effect.
            FloatingPointError: a node's loss is not finite; it names step and nodes.
            NodeFailure: with backend="process", a node's process died; what a node raises is raised here, caused by a
                NodeFailure that has its rank and traceback.
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
            "threads_per_process": threads_per_process,
        }
        for name, value in intervals.items():
            if value is not None:
                whole_number(name, value)
        minibatch_size = _minibatch_size(batch_size, minibatch_size, gradient_accumulation)
        one_of("executor", executor, EXECUTORS)
        inexact = {"executor='vmap'": executor == "vmap", "autocast=True": autocast, "compile=True": compile}
        if deterministic and any(inexact.values()):
            given = next(name for name, chosen in inexact.items() if chosen)
            raise ValueError(f"deterministic=True promises the bits of eager float32; {given} does not have them")
        if eval_loss_hook is not None and self.val_dataset is None:
            raise ValueError("eval_loss_hook has no effect without a val_dataset")
        one_of("backend", backend, ("stacked", "process"))
        if devices is None and device is None:
            devices = self.devices
        options = {"devices": devices, "threads_per_process": threads_per_process, "timeout_seconds": timeout_seconds}
        chosen_device = device if device is not None else self.device
        if backend == "stacked":
            idle = [name for name, value in options.items() if value is not None]
            if idle:
                raise ValueError(f"{', '.join(idle)} has no effect with backend='stacked'")
        elif executor != "auto":
            raise ValueError(f"executor={executor!r} has no effect with backend='process', which runs eager PyTorch")
        elif device is not None and devices is not None:
            raise TypeError("device and devices say the same thing; give one of them")

        config = RunConfig(
            model=self.model,
            train_dataset=self.train_dataset,
            val_dataset=self.val_dataset,
            loss_fn=self.loss_fn,
            strategy=strategy,
            num_nodes=num_nodes,
            num_epochs=num_epochs,
            max_steps=max_steps,
            batch_size=batch_size,
            minibatch_size=minibatch_size,
            shuffle=shuffle,
            val_size=val_size,
            val_interval=val_interval,
            seed=seed,
            autocast=autocast,
            deterministic=deterministic,
            compile=compile,
            correlation_interval=correlation_interval,
            dataloader_kwargs=dict(dataloader_kwargs or {}),
            after_step=self.after_step,
        )
        name = self.run_label or type(strategy).__name__
        self.history, self.ledger, self.strategy = History(name, num_nodes), Ledger(), None
        label = self.run_label or f"{name.removesuffix('Strategy')} × {num_nodes}"
        with Recorder(self.history, progress, label, train_loss_hook, eval_loss_hook) as recorder:
            if backend == "stacked":
                return self._simulate(config, executor, pick_device(chosen_device), recorder)
            nodes_here = local_ranks()[1] if under_torchrun() else num_nodes
            process_options = ProcessOptions(
                _process_devices(devices, chosen_device, nodes_here),
                default_threads(nodes_here) if threads_per_process is None else threads_per_process,
                real_number("timeout_seconds", 600 if timeout_seconds is None else timeout_seconds, above=0),
            )
            return self._train_in_processes(config, process_options, recorder)

    def _simulate(self, config: RunConfig, executor: str, device: torch.device, recorder: Recorder) -> nn.Module:
        """Train all nodes as rows of one matrix in this process."""
        kind = LoopExecutor if executor == "auto" and config.deterministic else _EXECUTORS[executor]
        nodes = range(config.num_nodes)
        with isolated(config.seed, device):
            datasets = resolve(self.train_dataset, config.num_nodes, nodes, True, "train_dataset")
            batches = Batches(
                datasets, config.num_nodes, config.batch_size, config.shuffle, config.seed, config.dataloader_kwargs
            )
            collectives = StackedCollectives(config.num_nodes, self.ledger)
            run = assemble(config, nodes, collectives, batches, kind, device, recorder)
            self.strategy = run.strategy
            train(run)
            cluster = run.cluster
            return cluster.replicas.as_module(cluster.mean_weights(), cluster.mean_buffers(), like=self.model)

    def _train_in_processes(self, config: RunConfig, options: ProcessOptions, recorder: Recorder) -> nn.Module:
        """Train every node in a process of its own, or as the rank that this process is."""

        def record(report: StepReport) -> None:
            for event in report.events:
                self.ledger.record(event)
            recorder(report)

        if under_torchrun():
            recorder.progress = recorder.progress and int(os.environ["RANK"]) == 0
            outcome = join(config, options, record)
        else:
            outcome = train_in_processes(config, options, record)
        skeleton = Replicas.of(self.model, 1, torch.device("cpu"))
        return skeleton.as_module(outcome.weights, outcome.buffers, like=self.model)


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


def _process_devices(
    devices: Sequence[str | torch.device] | None, device: str | torch.device | None, nodes_here: int
) -> list[torch.device]:
    """Return the devices that the nodes' processes take in turn."""
    if devices is not None:
        if isinstance(devices, str) or not len(devices):
            raise TypeError(f"devices must be a list of devices with at least one, got {devices!r}")
        return [pick_device(d) for d in devices]
    if device is not None:
        return [pick_device(device)]
    gpus = torch.cuda.device_count()
    return [torch.device("cuda", i) for i in range(nodes_here)] if gpus >= nodes_here else [torch.device("cpu")]


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
