"""The Trainer: checks the arguments, picks device and executor, and runs the loop."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vsim.arguments import a_function, known_keywords, whole_number
from vsim.checkpoint.files import Checkpoint, load_checkpoint, saving_of, start_of
from vsim.checkpoint.folder import Saving, checkpoints_in, locked
from vsim.cluster.ledger import Ledger
from vsim.cluster.randomness import isolated
from vsim.cluster.replicas import idle_dropout
from vsim.core.algorithm import Algorithm
from vsim.core.fields import arguments_of
from vsim.core.group import Group
from vsim.data.batches import Data, evened
from vsim.engine.explain import Explanation, explain
from vsim.engine.machine import check_repeats, devices_of_nodes, pick_device
from vsim.engine.objective import LossFunction
from vsim.history.describe import describe_problem, describe_run
from vsim.history.history import History
from vsim.history.loggers import Logger, RunLog
from vsim.history.progress import Recorder
from vsim.private_torch import uncompiled
from vsim.processes import (
    first_device,
    joined_group,
    number_of_processes,
    options_of,
    run_node,
    run_ranges,
    train_in_processes,
    under_torchrun,
    world_rank,
)
from vsim.runs.callbacks import RemoteCallbacks, telling_exit, with_hooks
from vsim.runs.clients import ClientModels
from vsim.runs.elsewhere import each, for_elsewhere
from vsim.runs.fit import fit, prepare, steps
from vsim.runs.interrupt import Interrupted
from vsim.runs.outcome import Outcome
from vsim.runs.saving import captured
from vsim.runs.spec import RunSpec, option_defaults, takes_options, typed_by
from vsim.runs.tracked import TrackedRun
from vsim.runs.view import RunView
from vsim.shapes import check_apart


class Trainer:
    """Trains a model on K simulated nodes.

    Args:
        model: any nn.Module. `model(batch)` returns a scalar loss, the mean over the batch, or outputs with a field
            `loss`; with `loss_fn`, `model(x)` returns outputs. The model is not changed: every `fit` starts from its
            weights. Modules in evaluation mode stay in that mode, unless the whole model is in evaluation mode: then
            all modules train in training mode.
        train_dataset: a map-style dataset, split among the nodes as by DistributedSampler, or a function
            f(rank, num_nodes, train_dataset: bool) that returns the dataset of one node.
        val_dataset: a dataset, or such a function, which is called for rank 0. None: no validation.
        loss_fn: f(outputs, y) → scalar loss of a batch (x, y).
        device: where to train by default. None: cuda, else mps, else cpu.
        devices: with backend="process", where the nodes train by default; see `fit`.

    Attributes, after or during a `fit`:
        history: the last run's `History`. strategy: that run's copy of the strategy. loggers: that run's loggers.
        run_label: the name that the next runs get in progress bar and history; None: the strategy's name.

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
        if loss_fn is not None:
            a_function("loss_fn", loss_fn, "outputs, y")
        self.model = uncompiled(model)  # compiling would prefix parameters' names; compile=True is for all nodes
        check_apart(self.model)
        if idle := idle_dropout(self.model):
            warnings.warn(
                f"{', '.join(idle)} will train in evaluation mode, without dropout: call train() on it if dropout "
                "should act, or freeze its parameters",
                UserWarning,
                stacklevel=3,
            )
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.loss_fn = loss_fn
        if device is not None and devices is not None:
            raise TypeError("device and devices say the same thing; give one of them")
        self.device = None if device is None else pick_device(device)
        if devices is not None:
            devices_of_nodes(devices, None, 1)  # raises an error here, not in `fit`
        self.devices = devices
        self.history = History()
        self.strategy: Algorithm | None = None
        self.loggers: list[Logger] = []
        self.run_label: str | None = None
        self._last: TrackedRun | Checkpoint | None = None  # what resume=True resumes if there is no save_dir
        self._client_models: ClientModels | None = None  # of the last run, if it trained in other processes

    @property
    def ledger(self) -> Ledger:
        """The ledger of the last run: every collective."""
        return self.history.ledger

    def spec(self, label: str = "", **options: Any) -> RunSpec:
        """Return the checked options of `fit(**options)`."""
        if str(options.get("backend")) == "process" and options.get("device") is options.get("devices") is None:
            options["devices"] = self.devices
        spec = RunSpec(self.model, self.train_dataset, self.val_dataset, self.loss_fn, label, **options)
        if spec.resume is True and spec.save_dir is None and under_torchrun():
            raise ValueError("under torchrun resume=True needs save_dir: no process has the state of all nodes")
        last = self._last
        if isinstance(last, TrackedRun):
            last = captured(last) if spec.resume is True and spec.save_dir is None else None
        start = start_of(spec.resume, spec.save_dir, last)
        saving = saving_of(spec.checkpoint_interval, spec.save_dir, start)
        return replace(spec, start=start, saving=saving, callbacks=with_hooks(spec))

    @takes_options()
    def prepare(self, **options: Any) -> Group[TrackedRun]:
        """Set up the run of `fit(**options)` in the simulator, and return its group before the first step.

        `for moment in vsim.runs.fit.steps([group])` takes its steps one by one: runs are validated, recorded and
        saved, and callbacks are called. `for step in vsim.core.group.train(group)` only trains. Nothing is logged.

        Raises:
            TypeError, ValueError: see `fit`; or the backend is not the simulator.
        """
        spec = self.spec(**options)
        if spec.backend != "stacked":
            raise ValueError("only the simulator prepares a run in this process; backend='process' runs eager PyTorch")
        device = self.device_of(spec)
        with isolated(spec.seed, device):
            history = History(type(spec.strategy).__name__, spec.num_nodes, spec.population)
            if spec.start is not None:
                spec.start.fill(history)
            (group,) = prepare([TrackedRun(spec, recorder=Recorder(history))], device)
            return group

    @takes_options()
    def explain(self, **options: Any) -> Explanation:
        """Take the first steps of `fit(**options)`, discard them, and explain how they are computed.

        Returns:
            An `Explanation`, which prints itself: the form of every operation, the memory per node, the executor and
            the reason for it, and the share of the machine's peak FLOP/s that a step achieves.
        """
        if options.get("backend", "stacked") != "stacked":
            raise ValueError(
                "explain() is about the simulator: leave out backend='process' and the options of processes"
            )
        if options.get("max_steps") is not None:
            whole_number("max_steps", options["max_steps"])
        unheard = dict.fromkeys(("callbacks", "train_loss_hook", "eval_loss_hook"))
        group = self.prepare(**{"progress": False, **options, **unheard})
        batch, optim = group.coming_batch(), group.runs[0].strategy.optim
        first = (moment.number for moment in itertools.islice(steps([group]), 12))
        return explain(group.executor, first, evened(batch), optim, group.minibatch_size)

    @typed_by(RunSpec)
    @takes_options()
    def fit(self, **options: Any) -> nn.Module:
        """Train, and return the mean of the nodes' final models as an ordinary nn.Module.

        Training:
            strategy: how the nodes train and communicate. The run works on a copy, so that the object can be used
                again.
            num_nodes: K.
            num_epochs: passes over the data, by default 1. `max_steps`: number of optimizer steps of the run; 0: the
                untouched model is measured and returned. With both, max_steps ends the run, and a warning says so.
            batch_size: examples per node and step. Gradients may be accumulated over `minibatch_size` examples at a
                time, or in `gradient_accumulation` pieces; give one of the two.
            shuffle: whether to draw a new order every epoch.
            seed: seed of all random numbers; without any (shuffle=False, no dropout) it changes nothing. The process's
                global random state is not changed.
            dataloader_kwargs: num_workers, collate_fn, drop_last and so on. `collate_fn` gets one node's samples.

        Validation:
            val_size: number of validation examples: the whole dataset, or a sample if it is larger. Default: up to
                2,048. Samples are the same for all runs and seeds.
            val_interval: steps between validations (None: first and last only).
            val_nodes: whether validations measure every node's own model besides the global one. False: without the
                columns local_loss, local_accuracy, node_loss_min, node_loss_max and node_loss_std, in a fraction of
                their time.
            test_dataset: a dataset or factory like val_dataset. After the last step, the global model is measured on
                all test examples: `test_loss` and `test_accuracy` in the history's last row. Nothing else uses them.
            client_val_dataset: f(rank, num_nodes, False) → the validation data of a node or, with a population, of a
                client; or a `Partition`, for instance of the training data. After the last step, the global
                model is measured on each client's data, up to `val_size` examples: `history.client_val_losses`. With
                personal layers, every client's own model is measured; see `client_model`.
            client_val_steps: steps of fine-tuning before this measurement. Each client trains a copy of the model on
                its training data, with a new inner optimizer without schedule or max_norm. None: no fine-tuning.
            accuracy: f(outputs, targets) → a boolean for each prediction that counts, or the batch's share of right
                predictions, from 0 to 1 (NaN: none counts), averaged over the examples. Without a loss_fn, f(the
                model's output, batch). False: no accuracy. None: known for models with `loss_and_accuracy`, or if
                loss_fn compares labels with outputs; see `vsim.engine.objective.right_predictions`.
            metrics: further columns of the history, measured with every validation: name → f(model, batch) → number,
                for the global model in evaluation mode, averaged over the validation examples. Measures that are not
                means over examples, such as F1, need counts: see docs/callbacks.md.
            correlation_interval: steps between measurements of the replicas' divergence and correlation.

        Cluster:
            participation: the nodes that take part in each step: `vsim.Sample`, `Dropout`, `Schedule`, `Trace`, or a
                rule for stragglers; see `vsim.cluster.participation`. None: all nodes in all steps.
            attack: a `vsim.Attack` of some nodes, unless the strategy has one. For several attacks in one comparison,
                give each attack to a strategy.
            compute, network: for an asynchronous strategy, whose nodes train on a virtual clock. compute: the time of a
                step, a `vsim.network.Compute` or seconds. network: a `Network` or text; None: messages take no time.

        Computing:
            device: overrides the device of Trainer.
            autocast: compute in bfloat16 where torch.autocast does; weights keep their dtype.
            executor: "vmap" (all nodes at once), "loop" (one by one) or "auto": vmap, unless the loop is as fast, or
                vmap is not proved to agree with the loop; see `vsim.engine.AutoExecutor`. `history.computed` says which
                executor was used, and why.
            deterministic: on the CPU, compute nodes one by one in eager PyTorch; in float32, the run is bitwise equal
                to separate processes. `forward` must not draw from Python's or NumPy's global generator. On CUDA, use
                PyTorch's deterministic algorithms, so that runs repeat bit by bit. Not for MPS. On the CPU, a process
                for every node computes in this way without it.
            compile: torch.compile the loss and its gradient, and those kernels of strategies that were measured to run
                faster compiled (see `vsim_kernels.compiled`); the first step then takes 5 to 20 seconds. Not for
                executor="loop".
            chunk_size: nodes that "vmap" computes at once. The activations of one chunk are in memory at a time.
            max_memory_usage: the share, 0 < f ≤ 1, of the device's memory that this process (with backend="process",
                all nodes' processes on a device) may hold. The largest minibatch that fits is estimated from small
                probes, which are not compiled, and stored in `history.minibatch_size`.

        Processes:
            backend: "stacked", the simulator; or "process": processes over torch.distributed, started on this machine
                or, under torchrun, already started.
            num_processes: with backend="process", the number of processes. Each computes a range of the nodes as the
                simulator does; ranges are as equal as possible. "auto": a process for every GPU; without GPUs, one for
                every core if the model has at least 200,000 weights, else the simulator. None: a process for every
                node, in ordinary eager PyTorch.
            devices: with backend="process", process k computes on devices[k mod len(devices)]. Default: a GPU for every
                process if there are enough GPUs, else the CPU.
            threads_per_process: CPU threads of a process; default: the machine's cores divided by its processes, at
                least 1.
            timeout_seconds: how long a collective waits for other processes; default 600.

        Saving:
            save_dir: a folder for checkpoints, saved at the end, when Ctrl-C interrupts the run (after the current
                step; a second Ctrl-C acts at once), and every `checkpoint_interval` steps. The newest two are kept.
            resume: a folder whose newest checkpoint to resume from, or a file; the run is bitwise equal to one without
                a stop. True: from `save_dir`; without a save_dir, this trainer's last run, if it was interrupted, or
                has ended and `max_steps` is larger now. All settings that determine a run must be as before, except its
                length; `Checkpoint.fork` starts another run from a checkpoint. The random state of a DataLoader's
                worker processes is not restored.

        Record and progress:
            progress: True: a progress bar; "plot": in a notebook, a figure of loss against step and bytes, updated
                during training; "table": in a terminal, a table of all runs of a comparison; False: no progress.
            logger: a `CSVLogger`, `WandbLogger`, `TensorBoardLogger` or an object of your own (see
                `vsim.logger`), or a list of loggers. Under torchrun, rank 0 logs.
            run_name: the run's name in logs; without a `logger`, its files are in logs/<run_name>/ (see `CSVLogger`).
            log_interval: steps between rows of a log; every validation is logged.
            wandb_project: log to this project of Weights & Biases, too.
            log_x_axis: x axis of W&B and TensorBoard: "step" or "examples".

        Your own code:
            callbacks: your own code in the run: objects of a class of `vsim.Callback`, such as `vsim.EarlyStopping` and
                `vsim.KeepBest`, or functions f(run) that are called after every step.
            train_loss_hook: called as f(step, mean training loss) after every step; the short form of a callback.
            eval_loss_hook: called as f(step, global validation loss) after every validation.

        Raises:
            TypeError, ValueError: an argument is unknown, out of range, or would have no effect.
            CheckpointError: a ValueError: a checkpoint is damaged or from another run, or the run's state cannot be
                saved.
            KeyboardInterrupt: the run was interrupted; `history` and `ledger` hold its steps so far.
            FloatingPointError: a node's loss, or a weight to save or return, is not finite; the message names step and
                nodes.
            NodeFailure: with backend="process", a node's process died. An error in a node is raised here, caused by a
                NodeFailure with the node's rank and traceback.
        """
        is_other_rank = str(options.get("backend")) == "process" and world_rank() > 0
        started = datetime.now()
        with locked(None if is_other_rank else options.get("save_dir")):
            name = type(options.get("strategy")).__name__
            label = self.run_label or f"{name.removesuffix('Strategy')} × {options.get('num_nodes')}"
            spec = self.spec(label, **options)
            device = self.device_of(spec)
            self.history, self.strategy = History(self.run_label or name, spec.num_nodes, spec.population), None
            self._client_models = None
            if spec.start is not None:
                spec.start.fill(self.history)
            self.loggers = [] if is_other_rank else spec.loggers
            spec = self.logged(spec, options, self.loggers)
            with Recorder(self.history, spec.progress, label) as recorder, telling_exit(spec.callbacks):
                try:
                    if spec.backend == "stacked":
                        return self._simulate(spec, device, recorder)
                    return self._train_in_processes(spec, recorder)
                finally:
                    if len(self.history):
                        self.history.config = self.config(options, started)

    def client_model(self, client: int) -> nn.Module:
        """Return the model of a node, or of any client of a population, at the end of the last run.

        The model has the global weights and the client's personal values: personal layers, running statistics, or all
        of Ditto's v_k. If the strategy has no personal values, this is the global model.

        Args:
            client: the number of the node or client, 0 to N − 1.

        Raises:
            ValueError: no run has ended yet; the node was absent at the end; or, after a run with backend="process",
                the clients' state is in the folder of Sample(store=…).
        """
        if self._client_models is not None:
            return self._client_models.model(client, like=self.model)
        if not isinstance(self._last, TrackedRun):
            raise ValueError(
                "client_model() needs a run: call fit() first, without Sample(store=…) if it has backend='process'"
            )
        return RunView(self._last).client_model(client)

    def logged(self, spec: RunSpec, options: Mapping[str, Any], loggers: Sequence[Logger]) -> RunSpec:
        """Return `spec`, made of `options`, with a callback that passes the run's rows to these loggers."""
        if not loggers:
            return spec
        about = self.config({**options, "logger": [type(one).__name__ for one in loggers]})
        return replace(spec, callbacks=[RunLog(loggers, about, spec.log_interval), *spec.callbacks])

    def config(
        self, options: Mapping[str, Any], started: datetime | None = None, problem: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the configuration of `fit(**options)` as plain values for JSON; see `vsim.history.describe`.

        Args:
            started: start of the run; default: now.
            problem: the result of `describe_problem` for model and data, if known.
        """
        given = {**option_defaults(), **options}
        device = pick_device(self.device if given["device"] is None else given["device"])
        if problem is None:
            problem = describe_problem(self.model, self.train_dataset, self.val_dataset, self.loss_fn)
        return describe_run(given, arguments_of(given["strategy"]), problem, device, options, started)

    def device_of(self, spec: RunSpec) -> torch.device:
        """Return the device of a run in the simulator."""
        device = pick_device(self.device if spec.device is None else spec.device)
        if spec.deterministic and spec.backend == "stacked":
            check_repeats(device)
        return device

    def _simulate(self, spec: RunSpec, device: torch.device, recorder: Recorder) -> nn.Module:
        """Train all nodes as rows of one matrix in this process."""
        with isolated(spec.seed, device):
            groups = prepare([run := TrackedRun(spec, recorder=recorder)], device)
            self._last, self.strategy = run, run.strategy
            fit(groups)
            assert run.model is not None  # the run is complete
            return run.model

    def _train_in_processes(self, spec: RunSpec, recorder: Recorder) -> nn.Module:
        """Train in several processes or, under torchrun, as the rank of this process."""
        device = self.device if spec.device is None else spec.device
        number = number_of_processes(spec, device)
        if number == 1 and spec.num_processes == "auto" and not under_torchrun():
            return self._simulate(spec, first_device(spec, device), recorder)
        options = options_of(spec, device, number)
        if spec.max_memory_usage is not None:
            spec = replace(spec, max_memory_usage=spec.max_memory_usage / options.most_on_a_device)
        relay, outcomes = RemoteCallbacks(recorder, spec.callbacks), list[Outcome]()

        def receive(_: int, message: Any) -> None:
            outcomes.append(message) if isinstance(message, Outcome) else relay(message)

        spec = for_elsewhere(spec, relay)
        if spec.num_processes is not None:
            spec = replace(spec, num_processes=number)
        self._last = None
        if under_torchrun():
            recorder.progress = world_rank() == 0 and recorder.progress
            with joined_group(options) as own:
                (run_node if spec.num_processes is None else run_ranges)(spec, own, each(receive))
        else:
            saving = spec.saving or Saving(Path(tempfile.gettempdir(), f"vsim-{uuid.uuid4().hex}"), None, wanted=False)
            try:
                train_in_processes(replace(spec, saving=saving), options, receive)
            except Interrupted:
                if checkpoints_in(saving.folder):
                    last = load_checkpoint(saving.folder)
                    self._last = last if saving.wanted else replace(last, path=None)
                raise
            finally:
                if not saving.wanted:
                    shutil.rmtree(saving.folder, ignore_errors=True)
        (outcome,) = outcomes
        self._client_models = outcome.client_models
        relay.end(outcome.callbacks)
        return outcome.model(like=self.model)


class LocalTrainer(Trainer):
    """A Trainer on this machine."""
