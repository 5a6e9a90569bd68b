"""Trainer: checks the arguments, picks device and executor, and runs the loop."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vsim.arguments import a_function, known_keywords, one_of, real_number, true_or_false, whole_number
from vsim.checkpoint.files import Checkpoint
from vsim.checkpoint.resume import Saving, kept_in_memory, saving_of, start_of
from vsim.cluster.collectives import StackedCollectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.randomness import isolated
from vsim.cluster.replicas import Replicas
from vsim.data.batches import Batches, Data, loader_options, resolve
from vsim.doctor import Explanation, explain
from vsim.engine import COMPILE, EXECUTORS, executor_class
from vsim.engine.objective import LossFunction
from vsim.process import ProcessOptions, default_threads, join, local_ranks, train_in_processes, under_torchrun
from vsim.records.description import describe_run
from vsim.records.history import History
from vsim.records.loggers import Logger, RunLog, run_loggers
from vsim.strategy.base import Strategy
from vsim.training.assemble import assemble
from vsim.training.config import RunConfig
from vsim.training.interrupt import Interrupted
from vsim.training.loop import Hook, Recorder, Run, StepReport, train


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
        loggers: those of the last run.
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
        if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, type)):
            given = f"the class {loss_fn.__name__}" if isinstance(loss_fn, type) else type(loss_fn).__name__
            raise TypeError(f"loss_fn must be a function of (outputs, y), got {given}")
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
        self.loggers: list[Logger] = []
        self.run_label: str | None = None
        self.after_step: Callable[[Run], None] | None = None
        self._last: Run | Checkpoint | None = None  # what resume=True goes on with where there is no save_dir
        self._only_set_up = False
        self._prepared: Run | None = None

    def check(self, **options: Any) -> None:
        """Raise what `fit(**options)` would raise before its first step: everything is set up, and nothing trained.

        With backend="process" only the arguments are checked, as a run is set up in its processes.
        """
        self.set_up(**options)

    def set_up(self, **options: Any) -> Run | None:
        """Return the run of `fit(**options)` before its first step; `vsim.training.loop.steps` takes its steps one by
        one.

        None with backend="process".
        """
        kept = self.history, self.ledger, self.strategy, self._last
        self._only_set_up, self._prepared = True, None
        try:
            self.fit(**options)
            return self._prepared
        finally:
            self._only_set_up = False
            self.history, self.ledger, self.strategy, self._last = kept

    def explain(self, **options: Any) -> Explanation:
        """Take the first steps of `fit(**options)` and tell how they are computed; nothing is kept of them.

        Returns:
            An `Explanation`, which shows itself: the form that every operation takes and whether it has the bits of one
            node, the memory of a node, the executor and why, and the share of the machine's peak that a step achieves.
        """
        run = self.set_up(**{"progress": False, **options})
        if run is None:
            raise ValueError("explain() is about the simulator; backend='process' runs eager PyTorch")
        return explain(run)

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
        compile: bool | str = False,
        chunk_size: int | None = None,
        backend: str = "stacked",
        devices: Sequence[str | torch.device] | None = None,
        threads_per_process: int | None = None,
        timeout_seconds: float | None = None,
        checkpoint_interval: int | None = None,
        save_dir: str | Path | None = None,
        resume: bool | str | Path | Checkpoint | None = False,
        correlation_interval: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        max_memory_usage: float | None = None,
        logger: Logger | Sequence[Logger] | None = None,
        log_interval: int = 1,
        run_name: str | None = None,
        wandb_project: str | None = None,
        log_x_axis: str = "step",
        progress: bool | str = True,
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
            executor: "vmap" (all nodes at once), "loop" (one by one) or "auto": whichever is fastest on the first steps
                of this run; `history.executor_reason` has the times. See `vsim.engine.AutoExecutor`.
            deterministic: the bits of separate processes in eager PyTorch, on CPU in float32. The first step is then
                computed in both ways and compared.
            compile: "trace": the model's Python runs once for every shape of batch; then only its operations are called
                again, with the same bits (see `vsim.engine.TraceExecutor`). True: torch.compile the loss and its
                gradient, and the strategy's kernels for which it was measured to pay (see `vsim_kernels.compiled`), in
                some ten seconds. "auto": trace at once, and compile if the remaining steps are expected to repay it.
                False: the model's own Python runs at every step. Not for executor="loop".
            chunk_size: nodes that "vmap" computes at once. The activations of one chunk are in memory at a time.
            backend: "stacked", the simulator; or "process": a process for every node over torch.distributed, in
                ordinary eager PyTorch on this machine, or under torchrun this process as one of its ranks.
            devices: with backend="process", node k computes on devices[k mod len(devices)]. Default: a GPU for every
                node where there are as many, else the CPU.
            threads_per_process: its CPU threads; default the machine's divided by the nodes on it, at least 1.
            timeout_seconds: how long a collective waits for the other nodes; default 600.
            save_dir: a folder for checkpoints: at the end, when the run is interrupted by Ctrl-C (which takes effect
                after the current step; a second one at once), and every `checkpoint_interval` steps. The newest two
                are kept.
            resume: go on with a run, to the bit as if it had not stopped: from the newest checkpoint in a folder or
                from a file; with True from `save_dir`, or without one with this trainer's last run, if it was
                interrupted or has ended (then with a larger `max_steps`). Everything that the course of a run depends
                on must be as it was, but for its length; `Checkpoint.fork` starts another run from a checkpoint. What
                worker processes of a DataLoader draw is not restored.
            correlation_interval: steps between measurements of the replicas' divergence and correlation.
            dataloader_kwargs: num_workers, collate_fn, drop_last and so on. `collate_fn` gets one node's samples.
            max_memory_usage: the share, 0 < f ≤ 1, of the device's memory that this process may hold (with
                backend="process" all nodes' processes on a device together): takes the largest minibatch that fits, by
                an estimate from small probes, which are not compiled, and leaves it in `history.minibatch_size`.
            logger: a `CSVLogger`, `WandbLogger`, `TensorBoardLogger` or an object of your own (see
                `vsim.records.loggers`), or a list of them. Under torchrun, rank 0 logs.
            log_interval: steps between rows of a log; validations are logged whenever there is one.
            run_name: the run's name in logs; without a `logger`, its files are in logs/<run_name>/ (see `CSVLogger`).
            wandb_project: log to this project of Weights & Biases, too.
            log_x_axis: what W&B and TensorBoard draw over: "step" or "examples".
            progress: show a progress bar; "plot": in a notebook, draw loss against step and bytes while it trains; or
                False.
            train_loss_hook: called as f(step, mean training loss) after every step.
            eval_loss_hook: called as f(step, global validation loss) after every validation.

        Raises:
            TypeError, ValueError: an argument is unknown, out of range, or would have no effect.
            CheckpointError: a ValueError: a checkpoint is damaged or of another run, or something cannot be saved.
            KeyboardInterrupt: the run was interrupted; `history` and `ledger` hold what it did.
            FloatingPointError: a node's loss is not finite, or its weights when they are to be saved or returned; step
                and nodes are named.
            NodeFailure: with backend="process", a node's process died; what a node raises is raised here, caused by a
                NodeFailure that has its rank and traceback.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        if not isinstance(strategy, Strategy):
            raise TypeError(f"strategy must be a vsim Strategy object, got {strategy!r}")
        # Whole numbers of other libraries become Python's, for files and processes.
        num_nodes, batch_size = whole_number("num_nodes", num_nodes), whole_number("batch_size", batch_size)
        num_epochs, val_size = whole_number("num_epochs", num_epochs), whole_number("val_size", val_size)
        seed = whole_number("seed", seed, at_least=0, at_most=2**63 - 1)
        log_interval = whole_number("log_interval", log_interval)
        max_steps, val_interval = _at_least_one("max_steps", max_steps), _at_least_one("val_interval", val_interval)
        checkpoint_interval = _at_least_one("checkpoint_interval", checkpoint_interval)
        correlation_interval = _at_least_one("correlation_interval", correlation_interval)
        chunk_size = _at_least_one("chunk_size", chunk_size)
        threads_per_process = _at_least_one("threads_per_process", threads_per_process)
        shuffle, autocast = true_or_false("shuffle", shuffle), true_or_false("autocast", autocast)
        deterministic = true_or_false("deterministic", deterministic)
        a_function("train_loss_hook", train_loss_hook, "step, loss")
        a_function("eval_loss_hook", eval_loss_hook, "step, loss")
        if dataloader_kwargs is not None and not isinstance(dataloader_kwargs, Mapping):
            raise TypeError(f"dataloader_kwargs must be a dict of arguments of DataLoader, got {dataloader_kwargs!r}")
        loader_options(dataloader_kwargs)
        if max_memory_usage is not None:
            real_number("max_memory_usage", max_memory_usage, above=0, at_most=1)
            by_hand = [n for n in ("minibatch_size", "gradient_accumulation") if arguments[n] is not None]
            if by_hand:
                raise TypeError(f"max_memory_usage chooses the minibatch; leave out {' and '.join(by_hand)}")
        minibatch_size = _minibatch_size(batch_size, minibatch_size, gradient_accumulation)
        one_of("executor", executor, EXECUTORS)
        if not isinstance(compile, bool | str) or compile not in COMPILE:
            raise ValueError(f"compile must be True, False, 'trace' or 'auto', got {compile!r}")
        inexact = {"autocast=True": autocast, "compile=True": compile is True}
        if deterministic and any(inexact.values()):
            given = next(name for name, chosen in inexact.items() if chosen)
            raise ValueError(f"deterministic=True promises the bits of eager float32; {given} does not have them")
        if eval_loss_hook is not None and self.val_dataset is None:
            raise ValueError("eval_loss_hook has no effect without a val_dataset")
        loggers = run_loggers(logger, run_name, wandb_project, log_x_axis)
        if log_interval != 1 and not loggers:
            raise ValueError("log_interval has no effect without a logger, run_name or wandb_project")
        if progress not in (True, False, "plot"):
            raise ValueError(f"progress must be True, False or 'plot', got {progress!r}")
        one_of("backend", backend, ("stacked", "process"))
        if devices is None and device is None:
            devices = self.devices
        options = {"devices": devices, "threads_per_process": threads_per_process, "timeout_seconds": timeout_seconds}
        if executor == "vmap" and compile == "auto":
            allowed = "give True, False or 'trace' with 'vmap'"
            raise ValueError(f"compile='auto' is a choice that executor='auto' makes; {allowed}")
        if executor == "loop" and (compile or chunk_size is not None):
            given = f"compile={compile!r}" if compile else f"chunk_size={chunk_size}"
            raise ValueError(f"{given} has no effect with executor='loop', which is eager and takes one node at a time")
        chosen_device = device if device is not None else self.device
        if backend == "stacked":
            idle = [name for name, value in options.items() if value is not None]
            if idle:
                raise ValueError(f"{', '.join(idle)} has no effect with backend='stacked'")
        elif executor != "auto" or chunk_size is not None or compile in ("trace", "auto"):
            given = f"executor={executor!r}" if executor != "auto" else f"compile={compile!r}"
            given = given if chunk_size is None else f"chunk_size={chunk_size}"
            raise ValueError(f"{given} has no effect with backend='process', which runs eager PyTorch")
        elif device is not None and devices is not None:
            raise TypeError("device and devices say the same thing; give one of them")

        if resume is True and save_dir is None and under_torchrun():
            raise ValueError("under torchrun resume=True needs save_dir: no process has the state of all nodes")
        start = start_of(resume, save_dir, self._last)
        saving = saving_of(checkpoint_interval, save_dir, start)
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
            chunk_size=chunk_size,
            correlation_interval=correlation_interval,
            dataloader_kwargs=dict(dataloader_kwargs or {}),
            after_step=self.after_step,
            memory_share=max_memory_usage,
            start=start,
            saving=saving,
        )
        name = self.run_label or type(strategy).__name__
        self.history, self.ledger, self.strategy = History(name, num_nodes), Ledger(), None
        if start is not None:
            start.fill(self.history)
        label = self.run_label or f"{name.removesuffix('Strategy')} × {num_nodes}"
        if backend == "process" and under_torchrun() and int(os.environ["RANK"]):
            loggers = []  # rank 0's are enough
        self.loggers = loggers
        log = None
        if loggers:
            arguments["logger"] = [type(one).__name__ for one in loggers]
            about = describe_run(arguments, self.model, self.train_dataset, self.val_dataset, self.loss_fn)
            log = RunLog(loggers, about, log_interval)
        with Recorder(self.history, progress, label, train_loss_hook, eval_loss_hook, log) as recorder:
            if backend == "stacked":
                return self._simulate(config, executor, pick_device(chosen_device), recorder)
            if self._only_set_up:
                return self.model
            nodes_here = local_ranks()[1] if under_torchrun() else num_nodes
            process_options = ProcessOptions(
                _process_devices(devices, chosen_device, nodes_here),
                default_threads(nodes_here) if threads_per_process is None else threads_per_process,
                real_number("timeout_seconds", 600 if timeout_seconds is None else timeout_seconds, above=0),
            )
            if max_memory_usage is not None:
                config = replace(config, memory_share=max_memory_usage / _most_on_a_device(process_options, nodes_here))
            return self._train_in_processes(config, process_options, recorder)

    def _simulate(self, config: RunConfig, executor: str, device: torch.device, recorder: Recorder) -> nn.Module:
        """Train all nodes as rows of one matrix in this process."""
        nodes, kind = range(config.num_nodes), executor_class(executor, config.compile)
        with isolated(config.seed, device):
            datasets = resolve(self.train_dataset, config.num_nodes, nodes, True, "train_dataset")
            batches = Batches(
                datasets, config.num_nodes, config.batch_size, config.shuffle, config.seed, config.dataloader_kwargs
            )
            collectives = StackedCollectives(config.num_nodes, self.ledger)
            run = assemble(config, nodes, collectives, batches, kind, device, recorder, self.history)
            if self._only_set_up:
                self._prepared = run
                return self.model
            self.strategy, self._last = run.strategy, run
            train(run)
            cluster = run.cluster
            return cluster.replicas.as_module(cluster.mean_weights(), cluster.mean_buffers(), like=self.model)

    def _train_in_processes(self, config: RunConfig, options: ProcessOptions, recorder: Recorder) -> nn.Module:
        """Train every node in a process of its own, or as the rank that this process is."""

        def record(report: StepReport) -> None:
            for event in report.events:
                self.ledger.record(event)
            recorder(report)

        if config.start is not None:
            config.start.fill(ledger=self.ledger)
        if config.start is None:
            self._last = None
        if under_torchrun():
            if int(os.environ["RANK"]) != 0:
                recorder.progress = False
            outcome = join(config, options, record)
        else:
            with tempfile.TemporaryDirectory(prefix="vsim-") as name:
                folder = Path(name)
                if config.start is not None:
                    config = replace(config, start=config.start.shipped(folder))
                saving = config.saving or Saving(folder, None, wanted=False)
                config = replace(config, saving=saving)
                try:
                    outcome = train_in_processes(config, options, record, folder)
                except Interrupted:
                    self._last = kept_in_memory(saving)
                    raise
            self._last = None
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
    if device is None or device == "":  # "" is what command lines of scripts for EXO Gym have as their default
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


def _most_on_a_device(options: ProcessOptions, nodes_here: int) -> int:
    """Return how many processes of this machine share the memory of a device, at most."""
    places = [options.devices[node % len(options.devices)] for node in range(nodes_here)]
    return max(Counter(str(place) if place.type == "cuda" else place.type for place in places).values())


def _at_least_one(name: str, value: int | None) -> int | None:
    return None if value is None else whole_number(name, value)


def _minibatch_size(batch_size: int, minibatch_size: int | None, pieces: int | None) -> int | None:
    """Return the size of the pieces that gradients are accumulated over, None for one piece."""
    if minibatch_size is not None and pieces is not None:
        raise TypeError("minibatch_size and gradient_accumulation say the same thing; give one of them")
    name, value = ("gradient_accumulation", pieces) if minibatch_size is None else ("minibatch_size", minibatch_size)
    if value is None:
        return None
    value = whole_number(name, value, at_most=batch_size)
    if batch_size % value:
        divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
        raise ValueError(
            f"batch_size {batch_size} cannot be divided by {name} {value}; {name} may be one of {divisors}"
        )
    size = value if minibatch_size is not None else batch_size // value
    return None if size == batch_size else size
