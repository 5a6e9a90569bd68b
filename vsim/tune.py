"""A search with optuna: trials are requested in batches, and each batch trains as one matrix."""

from __future__ import annotations

import math
import os
import socket
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from torch import nn

from vsim.analysis.compared import ComparedRun
from vsim.analysis.comparison import Comparison
from vsim.analysis.conditions import Conditions
from vsim.analysis.questions.pareto import COSTS
from vsim.analysis.search import Search
from vsim.arguments import a_function, a_list, a_path, a_text, given, naming, one_of, whole_number
from vsim.checkpoint.folder import locked
from vsim.compare import call_text, checked_seeds, compare, config_of, train_entries
from vsim.data.batches import Data
from vsim.extras import extra
from vsim.network import Compute, Network
from vsim.process import from_first_rank, under_torchrun, world_rank
from vsim.strategy.base import Algorithm
from vsim.training.interrupt import Interrupt
from vsim.training.spec import option_defaults, takes_options

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

_OBJECTIVES = ("loss", "wire", "time", "cost")
_FILE = "comparison.json"  # the records in save_dir, for `vsim show` and `vsim report`
# User attributes in optuna: of a trial, its process and the reason why it did not complete; of a study, its problem.
_PROCESS, _FAILURE, _PROBLEM = "process", "failure", "problem"


@takes_options("strategies", "tune", "extend", "resume", of=compare)
def tune(
    model: nn.Module | Callable[[int], nn.Module],
    train_dataset: Data,
    val_dataset: Data,
    *,
    space: Callable[[Any], Algorithm],
    num_nodes: int,
    trials: int = 60,
    together: int = 12,
    objectives: Sequence[str] = ("loss",),
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
    storage: str | BaseStorage | None = None,
    study_name: str | None = None,
    seeds: Sequence[int] | None = None,
    **options: Any,
) -> Search:
    """Search for the best strategy with optuna. Trials are requested in batches, and a batch trains as one matrix.

    Args:
        model, train_dataset, val_dataset, num_nodes: see `compare`.
        space: a function of an `optuna.Trial` that returns a strategy, such as
            `lambda trial: DiLoCoStrategy(H=trial.suggest_int("H", 1, 50))`. It may raise `optuna.TrialPruned`.
        trials: the total number of trials in the study, including trials of earlier calls.
        together: number of trials in a batch; all are requested before the first of them is reported.
        objectives: values to minimize: "loss", the mean final validation loss over the seeds; and, if given, "wire"
            (bytes per node), "time" (seconds) and "cost" (dollars) on the `network` and `compute`.
        sampler: optuna's sampler. Default: `TPESampler` with `constant_liar`, so that the trials of a batch differ. Its
            random numbers depend only on the seed and the trial's number, so that equal calls request equal trials,
            also after a kill. A sampler of your own starts its random numbers again in every call.
        pruner: optuna's pruner, for one objective; default: none. The pruner gets the mean validation loss of every
            trial after every `val_interval` steps. Pruned trials end.
        storage: optuna's storage, such as "sqlite:///study.db": an equal call continues the stored study. Trials that
            were running when a call was killed are trained first, under their numbers. Only one call at a time may
            search a study, and all calls must train with the same seeds, data and options.
        study_name: name of the study in the storage; default "vsim".
        seeds: train every trial once with each seed; default: once with `seed`.
        save_dir: a folder for the records and checkpoints of all trials and, without `storage`, for the study
            (study.db). An equal call continues the batch of a killed call. Without save_dir, the result has only the
            trials that this call trains.
        options: every other argument of `compare`, the same for all trials. `max_steps` is a number.

    Under torchrun, with backend="process", the first rank asks optuna for trials, and has study and folder. The other
    ranks call `space` with the same values, and return the trials that were trained, without a study.

    Returns:
        A `Search`: a comparison of all trials, the best first, with optuna's study as `study`. Trials of earlier calls
        have records but no models; with `save_dir`, `load_checkpoint` reads these from the trials' folders. A trial
        with a diverged run is reported as pruned, so that the sampler avoids such values; a trial with another error is
        reported as failed; in both cases, the trial's user attribute "failure" holds the reason. After an interrupt,
        the storage keeps the trials of the batch in the state "running".

    Raises:
        ImportError: optuna is not installed; it is in the extra `tune`.
        TypeError, ValueError: see `compare`; or the study in the storage is of another problem or other seeds.
        CheckpointError: a ValueError: another call searches in `save_dir`.
    """
    optuna = extra("optuna", "vsim.tune", "optuna", "tune")
    a_function("space", space, "trial")
    whole_number("trials", trials)
    whole_number("together", together)
    objectives = [one_of("every one of objectives", of, _OBJECTIVES) for of in a_list("objectives", objectives)]
    if "loss" not in objectives or len(set(objectives)) < len(objectives):
        raise ValueError(f'objectives must be different ones, and "loss" one of them, got {objectives}')
    if {"time", "cost"} & {*objectives}:
        Network.of(options.get("network"))
        if Compute.of(options.get("compute")).dollars_per_hour is None and "cost" in objectives:
            raise ValueError("cost needs a price: give compute=Compute(…, dollars_per_hour=…)")
    if val_dataset is None:
        raise ValueError("tune() chooses by validation loss and needs a validation dataset")
    used = checked_seeds(seeds, dict(options))
    for argument, value, kind in (
        ("sampler", sampler, optuna.samplers.BaseSampler),
        ("pruner", pruner, optuna.pruners.BasePruner),
        ("storage", None if isinstance(storage, str) else storage, optuna.storages.BaseStorage),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{argument} must be one of optuna's, such as a {kind.__name__}, got {given(value)}")
    rungs = [] if pruner is None else _rungs(objectives, options)
    if options.get("backend") == "process" and options.get("num_processes") is None:
        raise ValueError(
            'backend="process" gives each node of one run a process, and a batch has several: give num_processes='
        )
    folder = None if options.get("save_dir") is None else a_path("save_dir", options.pop("save_dir"))
    if storage is None and folder is None and study_name is not None:
        raise ValueError(f"study_name={study_name!r} has no effect without storage= or save_dir=")
    if storage is not None or folder is not None:
        study_name = a_text("study_name", "vsim" if study_name is None else study_name)
    problem = model, train_dataset, val_dataset
    own_options = {**options, "seeds": seeds}
    in_ranks = options.get("backend") == "process" and under_torchrun()
    if in_ranks and world_rank() > 0:  # the first rank asks and tells
        return _trained_beside(optuna, space, problem, objectives, num_nodes, folder, own_options)
    with locked(folder):
        if folder is not None and storage is None:
            storage = f"sqlite:///{folder / 'study.db'}"
        study = _study(optuna, storage, study_name, sampler, pruner, len(objectives))
        found = _Found(study, objectives, folder, used)
        if found.problem is not None:  # before a trial is requested
            found.check(config_of(*problem, **{**options, "seed": used[0], "num_nodes": num_nodes}))
        asking = _Asking(optuna, study, space, trials, together, used[0] if sampler is None else None)
        while batch := asking.batch():
            # A call that was killed before it reported to optuna leaves trials whose runs are known.
            new = {name: one for name, one in batch.items() if name not in found.runs}
            interrupt = Interrupt()
            if new:
                params = {name: dict(trial.params) for name, (trial, _) in new.items()}
                if in_ranks:
                    from_first_rank(params)
                made = {name: strategy for name, (_, strategy) in new.items()}
                more = {"pruning": (rungs, _Pruning(new))} if rungs else {}
                trained = _trained(made, problem, num_nodes, folder, interrupt, **own_options, **more)
                found.add(trained, params, interrupt.requested)
            if interrupt.requested:
                break
            for name, (trial, _) in batch.items():
                asking.tell(trial, found.runs[name], found.values.get(name))
        if in_ranks:
            from_first_rank({})  # there are no more trials
    search = found.search()
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if unsaved := [one.number for one in complete if f"trial {one.number}" not in search]:
        warnings.warn(
            f"{len(unsaved)} trials of the study are not in the result, as their records were not saved: "
            f"{', '.join(map(str, unsaved))}; save_dir= saves records",
            UserWarning,
            stacklevel=3,
        )
    about = {"space": space, "trials": trials, "together": together, "objectives": objectives}
    search.calls = [
        call_text("vsim.tune", **about, sampler=sampler, pruner=pruner, num_nodes=num_nodes, seeds=seeds, **options)
    ]
    return search


Trial = Mapping[str, Any]  # its parameters
Problem = tuple[Any, Data, Data | None]


def _trained(
    strategies: Mapping[str, Algorithm],
    problem: Problem,
    num_nodes: int,
    folder: Path | None,
    interrupt: Interrupt,
    **options: Any,
) -> Comparison:
    """Train a batch of trials, name → strategy."""
    if folder is not None:
        options |= {"save_dir": folder / f"{next(iter(strategies))} to {[*strategies][-1]}", "resume": "auto"}
    entries = {name: {"strategy": strategy, "num_nodes": num_nodes} for name, strategy in strategies.items()}
    return train_entries(entries, *problem, interrupt=interrupt, **options)


def _trained_beside(
    optuna: Any,
    space: Callable[[Any], Any],
    problem: Problem,
    objectives: Sequence[str],
    num_nodes: int,
    folder: Path | None,
    options: dict[str, Any],
) -> Search:
    """Train the batches of the first rank, as another rank; return the trials that were trained, without a study."""
    runs: dict[str, list[ComparedRun]] = {}
    known: dict[str, Trial] = {}
    interrupt, trained = Interrupt(), None
    while not interrupt.requested and (params := from_first_rank()):
        made = {name: space(optuna.trial.FixedTrial(own)) for name, own in params.items()}
        trained = _trained(made, problem, num_nodes, folder, interrupt, **options)
        runs |= {name: trained.runs(name) for name in trained}
        known |= params
    if trained is None:
        raise ValueError("the study has all its trials, and no record of them is on this rank: give a larger trials=")
    return Search.of(runs, known, objectives, trained)


def _study(optuna: Any, storage: Any, name: str | None, sampler: Any, pruner: Any, objectives: int) -> Any:
    """Create the study, or load it from the storage.

    Raises:
        ValueError: the storage cannot be opened.
    """
    try:
        storage = None if storage is None else optuna.storages.get_storage(storage)
        return optuna.create_study(
            storage=storage,
            sampler=sampler,
            pruner=optuna.pruners.NopPruner() if pruner is None else pruner,
            study_name=name,
            directions=["minimize"] * objectives,
            load_if_exists=True,
        )
    except Exception as error:  # from SQLAlchemy or a database
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"storage={storage!r} cannot be opened: {reason}. If another call has just begun to search there, wait "
            "until it ends: only one call at a time may search a study"
        ) from error


def _rungs(objectives: Sequence[str], options: Mapping[str, Any]) -> list[int]:
    """Return the steps after which a pruner decides."""
    if list(objectives) != ["loss"]:
        raise ValueError(f'pruner= has an effect with the one objective "loss", got objectives={list(objectives)}')
    if options.get("backend") == "process":
        raise ValueError(
            'pruner= decides in this process, and backend="process" trains in others: leave one of them out'
        )
    if options.get("budget") is not None or options.get("max_steps") is None:
        raise ValueError("pruner= compares runs of one length: give max_steps as a number, and no budget")
    steps = whole_number("max_steps", options["max_steps"])
    interval = whole_number("val_interval", options.get("val_interval", option_defaults()["val_interval"]))
    if interval >= steps:
        raise ValueError(
            f"pruner= decides after every val_interval={interval} steps, of max_steps={steps}: give a smaller one"
        )
    return list(range(interval, steps, interval))


class _Asking:
    """Requests batches of trials from optuna, and reports their results.

    Args:
        trials, together: see `tune`. seed: seed of the default sampler; None: the user gave a sampler.

    Attributes:
        exhausted: whether the sampler has no more suggestions.
    """

    def __init__(
        self, optuna: Any, study: Any, space: Callable[[Any], Any], trials: int, together: int, seed: int | None
    ) -> None:
        self.optuna, self.study, self.space, self.trials, self.together = optuna, study, space, trials, together
        self.seed, self.exhausted = seed, False
        self.states = optuna.trial.TrialState
        self.process = f"{socket.gethostname()} {os.getpid()} {psutil.Process().create_time()}"

    def batch(self) -> dict[str, tuple[Any, Algorithm]]:
        """Return name → trial and strategy of the next batch; empty when the study has all its trials."""
        batch: dict[str, tuple[Any, Algorithm]] = {}
        while not batch and not self.exhausted:
            begun = [one for one in self.study.get_trials(deepcopy=False) if one.state != self.states.WAITING]
            left = [one for one in begun if one.state == self.states.RUNNING and _PROCESS in one.user_attrs]
            # Complete the batch of a killed call.
            missing = -len(begun) % self.together if left else self.together - len(begun) % self.together
            new = range(len(begun), min(len(begun) + missing, self.trials))
            if not left and not new:
                break
            for own in (*left, *new):
                trial = self._ask(own) if isinstance(own, int) else self._continue(own)
                if (strategy := self._strategy(trial)) is not None:
                    batch[f"trial {trial.number}"] = trial, strategy
        return batch

    def _ask(self, place: int) -> Any:
        self._seed(place)
        trial = self.study.ask()
        trial.set_user_attr(_PROCESS, self.process)
        if trial.number != place:
            raise ValueError(
                f"the study {self.study.study_name!r} is searched by two calls at a time: this one requested trial "
                f"{place}, and got trial {trial.number}. Wait until no other call runs; this call then continues"
            )
        return trial

    def _continue(self, left: Any) -> Any:
        """Return a trial that another call has left running.

        Raises:
            ValueError: the other call is still running.
        """
        process = left.user_attrs[_PROCESS]
        if process != self.process and _is_alive(process):
            raise ValueError(
                f"the study {self.study.study_name!r} is searched by another process ({process}), which trains its "
                f"trial {left.number}: wait for it, or give another study_name"
            )
        self._seed(left.number)
        # A stored trial is frozen. A new Trial with the private id of the stored one can suggest and report values.
        trial = self.optuna.Trial(self.study, left._trial_id)
        trial.set_user_attr(_PROCESS, self.process)
        return trial

    def _seed(self, place: int) -> None:
        if self.seed is None:
            return
        own = int(np.random.SeedSequence([self.seed, place]).generate_state(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)  # constant_liar, in optuna 4
            self.study.sampler = self.optuna.samplers.TPESampler(seed=own, constant_liar=True)

    def _strategy(self, trial: Any) -> Algorithm | None:
        """Return the strategy of a trial; None if the space prunes it."""
        try:
            strategy = self.space(trial)
            if not isinstance(strategy, Algorithm):
                raise TypeError(f"space(trial) must return a Strategy, got {strategy!r:.100}")
        except self.optuna.TrialPruned:
            self._report(trial, state=self.states.PRUNED)
            return None
        except Exception as error:
            self._fail(trial, f"{type(error).__name__}: {error}", self.states.FAIL)
            with naming(f"trial {trial.number} with {trial.params}"):
                raise
        return strategy

    def tell(self, trial: Any, runs: Sequence[ComparedRun], values: Sequence[float] | None) -> None:
        """Report the end of a trial to optuna.

        Args:
            values: values of the objectives; None if a run is not complete.
        """
        diverged = [run.failure for run in runs if run.diverged_at is not None]
        failed = [run.failure for run in runs if run.failed]
        if values is not None and all(map(math.isfinite, values)):
            self._report(trial, list(values))
        elif failed and not diverged:
            self._fail(trial, failed[0], self.states.FAIL)
        elif failed or values is not None:
            self._fail(trial, (diverged or ["the loss is not finite"])[0], self.states.PRUNED)
        else:
            self._report(trial, state=self.states.PRUNED)

    def _fail(self, trial: Any, why: str, state: Any) -> None:
        trial.set_user_attr(_FAILURE, why)
        self._report(trial, state=state)

    def _report(self, trial: Any, values: Sequence[float] | None = None, state: Any = None) -> None:
        try:
            self.study.tell(trial, values, state=state)
        except RuntimeError:  # optuna cannot stop a study here, as an exhausted sampler asks
            if self.study.trials[trial.number].state == self.states.RUNNING:
                raise
            self.exhausted = True


def _is_alive(process: str) -> bool:
    """Return whether the process described by the text "host id start-time" runs on this machine."""
    host, number, begun = process.rsplit(" ", 2)
    try:
        return host == socket.gethostname() and psutil.Process(int(number)).create_time() == float(begun)
    except psutil.Error:
        return False


class _Pruning:
    """Lets optuna's pruner decide at a rung which trials continue.

    Args:
        batch: name → trial and strategy.
    """

    def __init__(self, batch: Mapping[str, tuple[Any, Algorithm]]) -> None:
        self.trials = {name: trial for name, (trial, _) in batch.items()}
        # Steps and losses that an earlier call had reported before it was killed.
        known = {one.number: one.intermediate_values for one in next(iter(self.trials.values())).study.trials}
        self.reported = {name: set(known[trial.number]) for name, trial in self.trials.items()}

    def __call__(self, step: int, losses: Mapping[str, float]) -> Collection[str]:
        for name, loss in losses.items():
            if step not in self.reported[name]:
                self.trials[name].report(loss, step)
                self.reported[name].add(step)
        return [name for name, loss in losses.items() if math.isfinite(loss) and not self.trials[name].should_prune()]


class _Found:
    """Keeps the runs of all trials so far, and saves them if there is a folder.

    Args:
        seeds: the seeds of every trial.

    Attributes:
        runs: name → runs. values: name → values of the objectives, for complete trials.
        problem: what all trials of the study share; None before the first batch.
    """

    def __init__(self, study: Any, objectives: Sequence[str], folder: Path | None, seeds: Sequence[int]) -> None:
        self.study, self.objectives, self.seeds = study, objectives, seeds
        self.path = None if folder is None else folder / _FILE
        self.runs: dict[str, list[ComparedRun]] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.values: dict[str, list[float]] = {}
        self.priced: Comparison | None = None
        directions, self.problem = [one.name.lower() for one in study.directions], study.user_attrs.get(_PROBLEM)
        theirs = directions if self.problem is None else self.problem["objectives"]
        if directions != ["minimize"] * len(objectives) or (self.problem and theirs != list(objectives)):
            raise ValueError(
                f"the study {study.study_name!r} is of {', '.join(theirs)}, and objectives={list(objectives)} are "
                "to be minimized: give another study_name"
            )
        if self.problem is not None and self.path is not None and self.path.exists():
            saved = Search.from_json(self.path)
            runs = {name: saved.runs(name) for name in saved}
            self._keep(saved, runs, {name: saved.settings[name] for name in saved})

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise a ValueError unless runs of this configuration, with these seeds, fit the study's trials."""
        assert self.problem is not None
        name = f"the study {self.study.study_name!r}"
        if self.problem["seeds"] != list(self.seeds):
            raise ValueError(
                f"the trials of {name} train with the seeds {self.problem['seeds']}, and this call with "
                f"{list(self.seeds)}, which are not comparable: give the same, or another study_name"
            )
        conditions = Conditions()
        conditions.check(name, self.seeds[0], self.problem["config"])
        conditions.check("this call", self.seeds[0], config)

    def add(self, trained: Comparison, params: Mapping[str, Mapping[str, Any]], interrupted: bool) -> None:
        """Add the runs of a batch, and save all unless the batch was interrupted."""
        if self.problem is None:
            config = {**trained.all_histories[0].config, "strategy": {}}
            self.problem = {"seeds": list(self.seeds), "config": config, "objectives": list(self.objectives)}
            self.study.set_user_attr(_PROBLEM, self.problem)
        self._keep(trained, {name: trained.runs(name) for name in trained}, params)
        if self.path is not None and not interrupted:
            self.search().to_json(self.path)

    def _keep(
        self,
        comparison: Comparison,
        runs: Mapping[str, list[ComparedRun]],
        params: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.priced = comparison
        self.runs |= runs
        self.params |= {
            name: {key: value for key, value in own.items() if value is not None} for name, own in params.items()
        }
        ended = [name for name, own in runs.items() if all(run.ended for run in own)]
        if not ended:
            return
        costs = [of for of in self.objectives if of != "loss"]
        frames = {of: comparison[ended].pareto(of).frame.set_index("strategy") for of in costs or ["wire"]}
        first = next(iter(frames.values()))
        for name in ended:
            own = {of: float(frame.loc[name, COSTS[of].column]) * COSTS[of].unit for of, frame in frames.items()}
            own["loss"] = float(first.loc[name, "loss"])
            self.values[name] = [own[of] for of in self.objectives]

    def search(self) -> Search:
        """Return the trials whose runs are known, with the study.

        Raises:
            ValueError: no trial has runs.
        """
        if self.priced is None:
            raise ValueError(
                f"the study {self.study.study_name!r} has all its trials, and their records were not saved: give a "
                "larger trials=, or read the study by optuna.load_study; save_dir= saves records"
            )
        order = sorted(self.runs, key=lambda name: int(name.split()[-1]))
        search = Search.of({name: self.runs[name] for name in order}, self.params, self.objectives, self.priced)
        search.study = self.study
        return search
