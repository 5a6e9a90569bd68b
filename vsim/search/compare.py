"""Train several strategies under identical conditions: the same model, data, order and seeds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vsim.analysis.compared import ComparedRun
from vsim.analysis.comparison import Comparison, no_comparison
from vsim.analysis.conditions import BY_NAME, Conditions
from vsim.analysis.spent import amount
from vsim.analysis.swept import Sweep, are_numbers
from vsim.arguments import (
    a_function,
    a_list,
    a_path,
    brief,
    encodable,
    given,
    naming,
    one_of,
    real_number,
    true_or_false,
    whole_number,
)
from vsim.cluster.optim import OptimSpec
from vsim.cluster.participation import Participation
from vsim.cluster.randomness import isolated
from vsim.cluster.state import CheckpointError
from vsim.core.algorithm import Algorithm
from vsim.core.fields import arguments_of, shown
from vsim.core.run import Diverged
from vsim.data.batches import Batches, Data, resolve
from vsim.engine.objective import LossFunction
from vsim.history.describe import describe_problem
from vsim.history.loggers import check_run_name, date_and_time, folder_name, for_one_run
from vsim.network import Compute, Network
from vsim.price import overlapped, steps_within
from vsim.processes import (
    NodeFailure,
    Ranks,
    first_device,
    joined_group,
    number_of_processes,
    options_of,
    run_ranges,
    train_in_processes,
    under_torchrun,
    world_rank,
)
from vsim.runs.acts.halve import Keep
from vsim.runs.elsewhere import each, train_elsewhere
from vsim.runs.interrupt import Interrupt, Interrupted
from vsim.runs.race import Race, copied_callbacks
from vsim.runs.race_folder import saving_in
from vsim.runs.spec import RunSpec, takes_options, two_lengths
from vsim.runs.tracked import TrackedRun
from vsim.search.grid import made, merged, points, settings_of
from vsim.search.pooled import train_in_pool
from vsim.shapes import sizes_of, without_values
from vsim.trainer import Trainer


@takes_options("strategy")
def compare(
    model: nn.Module | Callable[[int], nn.Module],
    train_dataset: Data,
    val_dataset: Data | None = None,
    *,
    strategies: Mapping[str, Any],
    num_nodes: int,
    loss_fn: LossFunction | None = None,
    seeds: Sequence[int] | None = None,
    together: bool = True,
    max_steps: int | Mapping[str, int] | None = None,
    budget: Mapping[str, Any] | None = None,
    at: float | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    extend: Comparison | None = None,
    strategy_defaults: Mapping[str, Any] | None = None,
    pool: Executor | None = None,
    **options: Any,
) -> Comparison:
    """Train the same model on the same data in the same order with several strategies at the same time.

    The nodes of all runs are rows of one matrix, and runs of equal shapes are computed in one call. Each run has its
    own history, ledger and random streams. With `deterministic=True`, a run is bitwise equal to a separate
    `Trainer.fit`, otherwise equal up to rounding.

    Args:
        model: the initial model of all runs; or a function f(seed) → model, so that every seed has its own initial
            weights, the same for all strategies.
        train_dataset, val_dataset, loss_fn: see `Trainer`.
        strategies: name → strategy; or name → dict of strategies, such as a `vsim.grid`; the name becomes a prefix.
        num_nodes: K.
        seeds: train every strategy once with each seed; tables then show mean ± standard deviation, and figures show
            bands. Default: only `seed`.
        logger, run_name, wandb_project: see `Trainer.fit`. Every strategy is logged as a run
            "<run_name>/<name of the strategy>", in a folder of this name; the default run name is date and time.
            vsim's loggers are copied for every run; a logger object of your own gets all runs, step by step.
        together: whether to train runs at the same time, in parts that fit into half of the free memory (or into the
            share `max_memory_usage` of all memory), instead of one after the other. If a model, strategy or callback
            draws from the global random generators of Python, NumPy or torch in its first two steps, that is an error,
            because the runs would share them.
        max_steps: see `Trainer.fit`; or a dict: strategy's name → its steps.
        budget: limits for every strategy, such as `{"time": "10 h", "cost": 500}`: "time" on the network, "cost" in
            dollars, "wire" bytes per node, and "examples" of all nodes. Each strategy takes the largest number of steps
            that `vsim.price` finds within all limits, at most `max_steps`, and its learning-rate schedule ends with its
            last step. Tables show the steps, and the used share of each limit.
        at: number of parameters of the model that is priced for the budget; default: the trained model's. The result
            has the bytes and hours of that model, see `Comparison.at`.
        tune: argument of strategies → values to try. Each strategy is first trained with every combination of the
            tuned arguments that it takes. Tuning uses as many seeds as the comparison, but others: the numbers after
            the comparison's largest seed. The comparison uses the setting with the lowest mean validation loss, after
            equal steps or within the budget; of settings that seeds cannot tell from the best, the middle one, see
            `Sweep.chosen`. A warning says if the best value of an argument is the smallest or largest one tried.
            `Comparison.tuned` has all runs of tuning, which have no loggers or hooks and are saved in save_dir/tuning.
        extend: a comparison of the same problem, which may be read from a file. Only missing strategies and seeds, and
            failed or interrupted runs, are trained; the result includes the comparison's other runs. For more steps,
            resume the comparison from its `save_dir`.
        strategy_defaults: arguments for all strategies that do not set them, such as `{"inner_optim": OptimSpec("sgd",
            lr=0.1), "max_norm": 1.0}`. See `from_trainer`.
        pool: a `concurrent.futures.Executor`, such as `ProcessPoolExecutor()` or that of a cluster, whose workers train
            the runs, all seeds of a strategy in a task. Models, data, strategies and callbacks must pickle. If a worker
            is lost, its runs are trained again. With save_dir, each task has a folder in it.
        save_dir: a folder for checkpoints, with a subfolder for each run that `load_checkpoint` and `Trainer.fit` can
            read. Runs are saved every `checkpoint_interval` steps, at the end, and when interrupted.
        resume: resume the comparison in `save_dir`, each run from its newest checkpoint; the result is bitwise equal to
            a comparison without a stop. "auto": resume if there is a comparison, else start one.
        network, compute: hours are derived from these, see `vsim.timeline`. The comparison keeps them; its tables show
            hours and utilization. Only asynchronous strategies need them to train; for others, give them now or later.
        options: every other argument of `Trainer.fit`, the same for all strategies.

    Returns:
        A `Comparison`. All strategies are set up before the first one trains, so that mistakes are found early; errors
        name the strategy. A run that fails later is kept with its record and the reason, and the other runs continue.
        After an interrupt, all runs are returned: complete runs with their models, and all other runs with the step of
        the interrupt. A warning names failed and interrupted runs. If runs train together, each history's `seconds` is
        a share of their time, in proportion to the run's nodes.

    Raises:
        TypeError, ValueError: see `Trainer.fit`.
        CheckpointError: a ValueError: `save_dir` holds another comparison, or nothing to resume.
        Exception: any error in a run's first step, as no progress is lost yet, except a non-finite loss.
    """
    if not isinstance(strategies, Mapping):
        raise TypeError(f"strategies must be a dict of name → strategy, got {type(strategies).__name__}")
    strategies = merged(strategies)
    odd = [f"{name}: {value!r}" for name, value in strategies.items() if not isinstance(value, Algorithm)]
    if odd:
        raise TypeError(f"strategies must be Strategy objects, got {', '.join(odd)}")
    shared: dict[str, Any] = {"loss_fn": loss_fn, "together": together, "budget": budget, "at": at, "pool": pool}
    shared["strategy_defaults"] = strategy_defaults
    if isinstance(max_steps, Mapping):
        max_steps = _of_each("max_steps", max_steps, strategies)
    tuned: dict[str, Sweep] = {}
    if tune is not None:
        if extend is not None:
            raise ValueError("tune= and extend= do not go together: extend with the strategies that were found")
        own_options = {**shared, **options, "max_steps": max_steps}
        tuned = _tuned(strategies, tune, num_nodes, model, train_dataset, val_dataset, seeds, own_options)
        strategies = {
            name: _best_of(name, strategy, tuned.get(name), budget is None) for name, strategy in strategies.items()
        }
    entries = {name: {"strategy": strategy, "num_nodes": num_nodes} for name, strategy in strategies.items()}
    options = {"max_steps": max_steps, **options}
    # The call that is resumed may have been interrupted while tuning, before its comparison began.
    resumed = {"resume": "auto"} if tune is not None and options.get("resume") else {}
    comparison = train_entries(
        entries, model, train_dataset, val_dataset, seeds=seeds, extend=extend, **shared, **{**options, **resumed}
    )
    comparison.tuned.update(tuned)
    about = {"num_nodes": num_nodes, "tune": tune, "seeds": seeds, "budget": budget, "at": at, **options}
    about["strategy_defaults"] = strategy_defaults
    comparison.calls = [call_text("vsim.compare", strategies=strategies, **about)]
    return comparison if extend is None else extend | comparison


def call_text(function: str, **arguments: Any) -> str:
    """Return the text of a call; arguments that are None are left out.

    >>> call_text("vsim.compare", strategies={"alone": Algorithm(lr=0.1)}, num_nodes=4, seeds=None)
    "vsim.compare(strategies={'alone': Algorithm(lr=0.1)}, num_nodes=4)"
    """

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key!r}: {text(one)}' for key, one in value.items())}}}"
        return shown(value)

    return f"{function}({', '.join(f'{key}={text(value)}' for key, value in arguments.items() if value is not None)})"


# Options that only the final comparison gets, not the runs of tuning.
_OF_THE_COMPARISON = (
    *("logger", "run_name", "wandb_project", "train_loss_hook", "eval_loss_hook"),
    *("client_val_dataset", "client_val_steps", "test_dataset"),
)


def _tuned(
    strategies: Mapping[str, Algorithm],
    tune: Mapping[str, Sequence[Any]],
    num_nodes: int,
    model: Any,
    train_dataset: Data,
    val_dataset: Data | None,
    seeds: Sequence[int] | None,
    options: dict[str, Any],
) -> dict[str, Sweep]:
    """Train every strategy with all combinations of the tuned settings that it takes; return name → sweep."""
    if not isinstance(tune, Mapping) or not tune:
        raise TypeError(f"tune must be a dict of argument → list of values, got {tune!r}")
    if val_dataset is None:
        raise ValueError("tune= chooses by validation loss and needs a validation dataset")
    if (save_dir := options.get("save_dir")) is not None:
        folder = a_path("save_dir", save_dir)
        if not options.get("resume") and (folder / "race.json").exists():
            raise CheckpointError(f"save_dir {str(folder)!r} holds a comparison; give resume=True, or another save_dir")
        options = {**options, "save_dir": folder / "tuning"}
    for key, values in tune.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) < 2:
            raise ValueError(f"tune[{key!r}] must be a list of at least two values, got {values!r}")
    takes = {name: [key for key in tune if key in settings_of(type(own))] for name, own in strategies.items()}
    for key in tune:
        if not any(key in own for own in takes.values()):
            known = {one for own in strategies.values() for one in settings_of(type(own))}
            one_of("an argument to tune", key, sorted(known))
    found = {
        name: points(type(strategies[name]), {key: tune[key] for key in keys}) for name, keys in takes.items() if keys
    }
    entries = {
        f"{name}, {point}": {"strategy": _with(strategies[name], point, own.values), "num_nodes": num_nodes}
        for name, by_point in found.items()
        for point, own in by_point.items()
    }
    options = {key: value for key, value in options.items() if key not in _OF_THE_COMPARISON}
    used = checked_seeds(seeds, options)
    own_seeds = [max(used) + 1 + i for i in range(len(used))]
    interrupt = Interrupt()
    if isinstance(steps := options["max_steps"], Mapping):
        options["max_steps"] = {f"{name}, {point}": steps[name] for name, own in found.items() for point in own}
    runs = train_entries(entries, model, train_dataset, val_dataset, seeds=own_seeds, interrupt=interrupt, **options)
    if interrupt.requested:
        raise KeyboardInterrupt("interrupted while tuning, before the comparison began")
    sweeps: dict[str, Sweep] = {}
    for name, by_point in found.items():
        own = {point: runs.runs(f"{name}, {point}") for point in by_point}
        sweeps[name] = Sweep.of_points(runs.holding(own, names=list(own)), by_point, name)
    return sweeps


def _of_each(argument: str, given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return `given` as a dict; raise a ValueError unless its names are exactly `names`."""
    for name in given:
        one_of(f"{argument}: a name", name, names)
    if lacking := [name for name in names if name not in given]:
        raise ValueError(f"{argument} must have a value for every name, and {', '.join(lacking)} is missing")
    return dict(given)


def _with(strategy: Algorithm, point: str, values: Mapping[str, Any]) -> Algorithm:
    """Return a copy of a strategy with some arguments changed to `values`."""
    return made(type(strategy), point, {**arguments_of(strategy), **values})


# Arguments of strategies that belong together: a strategy that has one of them has its own.
_TOGETHER = (("lr_scheduler", "lr_scheduler_kwargs", "warmup_steps", "cosine_anneal"),)


def _with_defaults(name: str, strategy: Algorithm, defaults: Mapping[str, Any]) -> Algorithm:
    """Return a copy of a strategy with the `defaults` that it does not set itself."""
    if not isinstance(defaults, Mapping):
        raise TypeError(f"strategy_defaults must be a dict of argument → value, got {given(defaults)}")
    own = {*arguments_of(strategy)}
    own |= {one for together in _TOGETHER if own & {*together} for one in together}
    values = {key: value for key, value in defaults.items() if key not in own}
    optim = values.get("inner_optim")
    if "lr" in own and isinstance(optim, OptimSpec):
        values["inner_optim"] = OptimSpec(optim.cls, **{n: v for n, v in optim.arguments.items() if n != "lr"})
    return _with(strategy, name, values)


def _best_of(name: str, strategy: Algorithm, sweep: Sweep | None, equal_steps: bool) -> Algorithm:
    """Return the strategy with its best setting; warn if the best value is the smallest or largest value tried."""
    if sweep is None:
        return strategy
    with naming(name):
        best = sweep.chosen()
    values = sweep.settings[best]
    for key, value in values.items():
        tried = [own[key] for own in sweep.settings.values()]
        if are_numbers(tried) and value in (min(tried), max(tried)):
            which, wider = ("smallest", "smaller") if value == min(tried) else ("largest", "larger")
            hint = f"a {wider} one may be better"
            if equal_steps and sweep.sends_most(best, key):
                hint = (
                    "it sends the most, which equal steps do not count: budget={'time': …} compares within equal hours"
                )
            warnings.warn(
                f"{name}: the best {key} is {value:g}, the {which} that was tried; {hint}",
                UserWarning,
                stacklevel=5,
            )
    return _with(strategy, best, values)


def train_entries(
    entries: Mapping[str, Mapping[str, Any]],
    model: nn.Module | Callable[[int], nn.Module],
    train_dataset: Data,
    val_dataset: Data | None = None,
    *,
    loss_fn: LossFunction | None = None,
    seeds: Sequence[int] | None = None,
    together: bool = True,
    max_steps: int | Mapping[str, int] | None = None,
    budget: Mapping[str, Any] | None = None,
    at: float | None = None,
    halving: int | None = None,
    pruning: tuple[Sequence[int], Keep] | None = None,
    extend: Comparison | None = None,
    network: Network | str | float | None = None,
    compute: Compute | float | str | None = None,
    interrupt: Interrupt | None = None,
    title: str = "",
    strategy_defaults: Mapping[str, Any] | None = None,
    pool: Executor | None = None,
    **options: Any,
) -> Comparison:
    """Train every entry with every seed; see `compare` for other arguments and for errors.

    Args:
        entries: name → options of `Trainer.fit` for this entry; `options` are the same for all.
        max_steps: steps of all entries, or name → steps.
        halving: only the best 1 / halving of the entries (on average over the seeds) continue at each of the `rungs`.
            Runs of stopped entries stay in the result, with `stopped_at`.
        pruning: steps at which entries may end, and the function `keep` of `Halve`: it returns entries that continue.
        extend: a comparison whose runs are neither trained again nor in the result.
        interrupt: `requested` is true afterwards if the training was interrupted.
        title: start of the progress title.
    """
    if strategy_defaults is not None:
        entries = {
            name: {**own, "strategy": _with_defaults(name, own["strategy"], strategy_defaults)}
            for name, own in entries.items()
        }
    if pool is not None:
        own_options = {**options, "max_steps": max_steps, "halving": halving, "pruning": pruning, "extend": extend}
        own_options |= {"seeds": seeds, "loss_fn": loss_fn, "together": together, "budget": budget, "at": at}
        own_options |= {"model": model, "train_dataset": train_dataset, "val_dataset": val_dataset}
        own_options |= {"network": network, "compute": compute, "title": title}
        show = own_options.pop("progress", True)
        return train_in_pool(pool, train_entries, entries, interrupt, show, **own_options)
    if options.get("num_epochs") is not None and (max_steps is not None or budget is not None):
        other = f"max_steps={max_steps}" if budget is None else f"budget={budget}"
        raise TypeError(two_lengths(options["num_epochs"], other))
    if not isinstance(extend, Comparison | None):
        raise no_comparison("extend", extend)
    if extend is not None and halving is not None:
        raise ValueError("halving compares all settings from the start, and the settings of extend= have been trained")
    seeds = checked_seeds(seeds, options)
    if max_steps is not None and not isinstance(max_steps, Mapping):
        whole_number("max_steps", max_steps)  # `fit` also takes 0, after which there is nothing to compare
    amounts, within = _amounts(budget, at), None  # `within`: what decides each run's steps, if they may differ
    lengths: dict[str, int] = {}
    if isinstance(max_steps, Mapping):
        if budget is not None:
            raise TypeError("budget and max_steps by name both decide the steps of each strategy; give one of them")
        lengths, within = _of_each("max_steps", max_steps, entries), BY_NAME
        for name, own_steps in lengths.items():
            whole_number(f"max_steps of {name!r}", own_steps)
    elif budget is not None:
        within = _within(budget, at, max_steps)
    if halving is not None and within is not None:
        raise ValueError("halving compares runs of one length: give max_steps as a number, and no budget")
    participation: Participation | None = options.get("participation")
    waits = isinstance(participation, Participation) and participation.needs_compute
    on_clock = {name for name, own in entries.items() if own["strategy"].is_asynchronous}
    if network is None and compute is not None and (waits or on_clock):
        network = Network(math.inf)  # messages take no time
    priced = None
    if network is not None or compute is not None:
        network, compute = Network.of(network), Compute.of(compute)  # values, also if files were named
        if at is not None and compute.pipeline is not None:
            compute = compute.of_model(sizes_of(without_values(at, overlapped(None, compute, None), None)))
        priced = network, compute
    if priced is not None:
        for own in entries.values():
            everyone = own["num_nodes"]
            everyone = participation.population(everyone) if isinstance(participation, Participation) else everyone
            priced[0].check(everyone)
            priced[1].steps(everyone)
    save_dir, resume = options.pop("save_dir", None), options.pop("resume", False)
    checkpoint_interval = options.pop("checkpoint_interval", None)
    if not isinstance(resume, bool) and not (isinstance(resume, str) and resume == "auto"):
        raise TypeError(
            f'resume must be True, False or "auto", the comparison in save_dir is what resumes; got {given(resume)}'
        )
    if resume and save_dir is None:
        raise ValueError(f"resume={resume!r} needs save_dir, the folder of the comparison")
    if checkpoint_interval is not None:
        whole_number("checkpoint_interval", checkpoint_interval)
        if save_dir is None:
            raise ValueError("checkpoint_interval has no effect without save_dir, the folder to save to")
    logger, run_name = options.pop("logger", None), options.pop("run_name", None)
    if run_name is not None:
        check_run_name(run_name)
    logs = logger is not None or run_name is not None or options.get("wandb_project") is not None
    folder = run_name or date_and_time()
    models = {seed: model if isinstance(model, nn.Module) else _made(model, seed) for seed in seeds}
    running: list[TrackedRun] = []
    configs: dict[TrackedRun, Callable[[], dict[str, Any]]] = {}
    problems: dict[Trainer, dict[str, Any]] = {}  # the descriptions of model and data that were made so far
    started = datetime.now()
    fitting = None if extend is None else _conditions_of(extend)
    for seed in seeds:
        trainer = Trainer(models[seed], train_dataset, val_dataset, loss_fn=loss_fn)
        for name, settings in entries.items():
            label = encodable("the name of a run", name if len(seeds) == 1 else f"{name}, seed {seed}")
            own = {**options, **settings, "seed": seed, "logger": for_one_run(logger)}
            own["max_steps"] = lengths[name] if within == BY_NAME else max_steps
            if logs:
                own["run_name"] = f"{folder}/{folder_name(label)}"
            if name in on_clock:
                own |= {"network": network, "compute": compute}
            elif waits:
                own |= {"compute": compute}
            with naming(name):
                spec = trainer.spec(label, **own)
                if amounts:
                    lengths[name] = lengths.get(name) or _steps_within(amounts, spec, at, priced)
                    own["max_steps"] = lengths[name]
                    spec = replace(spec, max_steps=lengths[name])
            about = own if within is None else {**own, "budget": within}
            saving = None if save_dir is None else saving_in(save_dir, folder_name(label), checkpoint_interval)
            if spec.participation is not None:
                spec = replace(spec, participation=spec.participation.of_run(len(running)))
            spec = replace(spec, saving=saving, callbacks=copied_callbacks(spec))
            others = spec.backend == "process" and world_rank() > 0
            run = TrackedRun.of(trainer.logged(spec, about, [] if others else spec.loggers), name)
            config = partial(_config, trainer, about, started, problems)
            if extend is not None and fitting is not None:
                with naming("extend"):
                    fitting.check(name, seed, config())
                if not _is_new(name, seed, extend):
                    continue
            running.append(run)
            configs[run] = config
    if spec.backend == "process" and spec.num_processes is None:
        raise ValueError(
            "a comparison trains all its runs together, and backend='process' alone gives each node of one run a "
            "process: give num_processes=, too, so that each process computes its nodes of all runs"
        )
    folders = [run.folder for run in running if run.folder is not None]
    if len({str(own).casefold() for own in folders}) < len(folders):  # some file systems ignore case
        raise ValueError("the names of strategies become folders, and two of them are the same there")
    if halving is not None:
        if spec.max_steps is None:
            raise ValueError("halving needs max_steps, of which its rungs are parts")
        if not true_or_false("together", together):
            raise ValueError("halving compares all runs at every rung, which together=False trains one after the other")
        # A rung lies at or after a tenth of the run, so that no run has one with a larger factor.
        kept = dict(rungs(len(entries), spec.max_steps, whole_number("halving", halving, at_least=2, at_most=10)))
        if len(entries) == 1:
            raise ValueError(f"halving={halving} has no effect with one setting, which always continues; leave it out")
        if not kept:
            text = f"halving={halving} to have a rung, and the runs end after {spec.max_steps}; all settings continue"
            warnings.warn(f"too few steps for {text}", UserWarning, stacklevel=4)
        pruning = list(kept), partial(_lowest, kept)
    steps, keep = ((), None) if pruning is None else pruning
    race = Race(
        running,
        trainer.device_of(spec),
        together=true_or_false("together", together),
        memory_share=spec.max_memory_usage,
        rungs=steps,
        keep=keep,
        progress=spec.progress,
        title=title + (f"{len(entries)} × {len(seeds)} runs" if len(seeds) > 1 else f"{len(entries)} runs"),
        folder=None if save_dir is None else Path(save_dir),
        resume=resume,
        configs=[] if save_dir is None else [configs[run]() for run in running],
        interrupt=interrupt or Interrupt(),
    )
    with race.interrupt:
        try:
            if running:
                _train(race, trainer.device)
        except Interrupted:
            race.interrupt.request()
        for run in running:
            if not run.has_begun:
                counts = ("step", "examples", "payload_bytes", "wire_bytes", "seconds", "validation_seconds")
                run.history.append(dict.fromkeys(counts, 0))
            run.history.config = configs[run]()
    trainable = [p for p in models[seeds[0]].parameters() if p.requires_grad]
    comparison = Comparison(sum(p.numel() * p.element_size() for p in trainable))
    if priced is not None:
        comparison.network, comparison.compute = priced
    for run in running:
        comparison.add(run.name, _compared(run))
    if at is None:
        return comparison
    return comparison.at(parameters=at, layers=None if priced is None else overlapped(None, priced[1], None))


# The limits that budget= may have.
OF_RUNS = ("time", "cost", "wire", "examples")


def _amounts(budget: Mapping[str, Any] | None, at: float | None) -> dict[str, float]:
    """Return a budget as numbers, see `vsim.price.steps_within`; empty without a budget."""
    if budget is None:
        if at is not None:
            raise TypeError(f"at={at!r} has no effect without budget: it is the size of the model whose prices count")
        return {}
    if not isinstance(budget, Mapping) or not budget:
        raise TypeError(f"budget must be a dict such as {{'time': '10 h'}}, got {given(budget)}")
    if at is not None:
        real_number("at", at, at_least=1)
    return {of: amount(of, value, "budget", OF_RUNS) for of, value in budget.items()}


def _steps_within(
    amounts: Mapping[str, float], spec: RunSpec, at: float | None, priced: tuple[Network, Compute] | None
) -> int:
    """Return the number of steps of a run within a budget; `spec.max_steps` limits them.

    Raises:
        TypeError: time or cost is limited without network and compute. ValueError: the run cannot be priced before
            training, or one step exceeds the budget.
    """
    if spec.strategy.is_asynchronous or spec.participation is not None:
        why = f"{spec.participation}" if spec.participation is not None else "an asynchronous strategy"
        raise ValueError(f"budget: {why} has no price before training; give max_steps= as a dict of name → steps")
    with naming("budget"):
        network, compute = priced or (None, None)
        if {"time", "cost"} & amounts.keys() and priced is None:
            network, compute = Network.of(None), Compute.of(None)  # raises the TypeError
        if "cost" in amounts and compute is not None and compute.dollars_per_hour is None:
            raise ValueError("cost needs a price: give compute=Compute(…, dollars_per_hour=…)")
        batches: list[Batches] = []
        if "examples" in amounts:
            with isolated(spec.seed, torch.device("cpu")):
                datasets = resolve(spec.train_dataset, spec.num_nodes, range(spec.num_nodes), True, "train_dataset")
            order = spec.batch_size, spec.shuffle, spec.seed, spec.dataloader_kwargs
            batches.append(Batches(datasets, spec.num_nodes, *order))
        return steps_within(
            amounts,
            spec.strategy,
            parameters=at,
            model=spec.model if at is None else None,
            num_nodes=spec.num_nodes,
            examples=lambda steps: batches[0].order.examples(steps),
            network=network,
            compute=compute,
            most=spec.max_steps,
            seed=spec.seed,
        )


def _train(race: Race, device: torch.device | None) -> None:
    """Train in this process or, with backend="process", in several processes."""
    specs = [run.spec for run in race.runs]
    device = race.device if specs[0].device is not None else device
    here = specs[0].backend == "stacked"
    number = 1 if here else min(number_of_processes(spec, device) for spec in specs)
    if here or (number == 1 and specs[0].num_processes == "auto" and not under_torchrun()):
        race.device = first_device(specs[0], device)
        race.train()
        return
    options = options_of(specs[0], device, number)
    race.portion = options.most_on_a_device / number
    race.memory_share = share = race.memory_share and race.memory_share / options.most_on_a_device
    for run in race.runs:
        run.spec = replace(run.spec, num_processes=number, max_memory_usage=share)
    if under_torchrun():
        with joined_group(options) as own:
            race.processes = Ranks()
            race.progress = race.processes.is_first and race.progress
            race.train(lambda: train_elsewhere(race, lambda content, receive: run_ranges(content, own, each(receive))))
    else:
        race.train(lambda: train_elsewhere(race, lambda given, receive: train_in_processes(given, options, receive)))


def _config(
    trainer: Trainer, options: Mapping[str, Any], started: datetime, problems: dict[Trainer, dict[str, Any]]
) -> dict[str, Any]:
    """Return the configuration of a run; model and data are described once for all runs of a seed."""
    if trainer not in problems:
        data = trainer.train_dataset, trainer.val_dataset
        problems[trainer] = describe_problem(trainer.model, *data, trainer.loss_fn)
    return trainer.config(options, started, problems[trainer])


def config_of(
    model: nn.Module | Callable[[int], nn.Module],
    train_dataset: Data,
    val_dataset: Data | None,
    *,
    seed: int,
    loss_fn: LossFunction | None = None,
    together: bool = True,
    budget: Mapping[str, Any] | None = None,
    at: float | None = None,
    max_steps: int | None = None,
    strategy_defaults: Mapping[str, Any] | None = None,
    pool: Executor | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the configuration that a run of `train_entries` would have, but for its strategy; train nothing."""
    model = model if isinstance(model, nn.Module) else _made(model, seed)
    trainer = Trainer(model, train_dataset, val_dataset, loss_fn=loss_fn)
    within = {"budget": _within(budget, at, max_steps)} if budget is not None and _amounts(budget, at) else {}
    return trainer.config({"strategy": Algorithm(), **options, **within, "seed": seed, "max_steps": max_steps})


def _within(budget: Mapping[str, Any], at: float | None, max_steps: int | None) -> dict[str, Any]:
    """Return all that limits the steps of a run with a budget, as its configuration holds it."""
    return {**budget, **{key: value for key, value in (("at", at), ("max_steps", max_steps)) if value is not None}}


def _conditions_of(comparison: Comparison) -> Conditions:
    found = Conditions(comparison.varied_options)
    for name in comparison:
        for run in comparison.runs(name):
            found.check(name, run.seed, run.history.config)
    return found


def _is_new(name: str, seed: int, extended: Comparison) -> bool:
    """Return whether to train a run: whether the extended comparison lacks the run, or has only a part of it."""
    runs = extended.runs(name) if name in extended else []
    return not any(run.seed == seed and (run.ended or run.diverged_at is not None) for run in runs)


def checked_seeds(seeds: Sequence[int] | None, options: dict[str, Any]) -> list[int]:
    """Return the seeds of all runs; remove a single seed from `options`."""
    what = "seed" if seeds is None else "every one of seeds"
    if seeds is None:
        seeds = [options.pop("seed", 42)]
    elif "seed" in options:
        raise TypeError("seed and seeds say the same thing; give one of them")
    checked = [whole_number(what, seed, at_least=0) for seed in a_list("seeds", seeds)]
    if len(set(checked)) < len(checked):
        raise ValueError(f"seeds must be different numbers, got {checked}")
    return checked


def _compared(run: TrackedRun) -> ComparedRun:
    """Return the outcome of a run; issue a UserWarning if the run is not complete."""
    failure, error = "", run.error
    if error is not None:
        where = f" ({_first_line(error.__cause__).rstrip(':')})" if isinstance(error.__cause__, NodeFailure) else ""
        diverged = isinstance(error, Diverged)
        failure = str(error).split(" (")[0] if diverged else f"{type(error).__name__}: {_first_line(error)}{where}"
        warnings.warn(f"{run.spec.label}: {brief(str(error))}{where}", UserWarning, stacklevel=4)
    elif not run.has_outcome:
        step = int(run.history.last("step"))
        failure = f"interrupted after step {step}" if step else "interrupted before the first step"
        text = f"{run.spec.label}: {failure}" + ("; the comparison holds its steps so far" if step else "")
        if run.folder is not None:
            resumes = f"resume=True (--resume) resumes it from {str(run.folder.parent)!r}"
            text += f", and {resumes}" if step else f"; {resumes}"
        warnings.warn(text, UserWarning, stacklevel=4)
    return ComparedRun(
        run.history,
        run.model,
        failure,
        run.spec.seed,
        error,
        run.diverged_at,
        run.stopped_at,
        [one for one in run.spec.callbacks if not getattr(one, "here", False)],
        run.spec.strategy,
        client_models=run.client_models,
    )


def rungs(count: int, max_steps: int, factor: int) -> list[tuple[int, int]]:
    """Return the rungs of `halving` as (step, number of names that continue).

    Rungs are at T / f, T / f², … of T steps while more than one name is left. No rung is in the first tenth of the run,
    where losses predict little about the end.

    >>> rungs(27, 270, 3), rungs(3, 100, 2)
    ([(30, 9), (90, 3)], [(25, 2), (50, 1)])
    """
    steps: list[int] = []
    while factor ** len(steps) < count and 10 * (step := max_steps // factor ** (len(steps) + 1)) >= max(max_steps, 10):
        steps.insert(0, step)
    kept = [count]
    for _ in steps:
        kept.append(-(-kept[-1] // factor))
    return list(zip(steps, kept[1:], strict=True))


def _lowest(kept: Mapping[int, int], step: int, losses: Mapping[str, float]) -> list[str]:
    """Return the `kept[step]` names with the lowest losses."""
    return sorted(losses, key=losses.__getitem__)[: kept[step]]


def _made(model: Any, seed: int) -> nn.Module:
    if not callable(model) or isinstance(model, type):  # the first argument of a class is not a seed
        raise TypeError(f"model must be a torch.nn.Module, or a function f(seed) that makes one, got {model!r:.100}")
    a_function("model", model, "seed")
    made = model(seed)
    if not isinstance(made, nn.Module):
        raise TypeError(f"model({seed}) must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _first_line(error: BaseException) -> str:
    return brief((str(error).strip().splitlines() or [""])[0])
