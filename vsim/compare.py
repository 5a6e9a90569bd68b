"""Several strategies under identical conditions: the same model, data, order and seeds."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vsim.arguments import whole_number
from vsim.data.batches import Data
from vsim.engine.objective import LossFunction
from vsim.grid import merged
from vsim.records.comparison import ComparedRun, Comparison
from vsim.records.loggers import Logger, check_run_name, date_and_time, folder_name
from vsim.strategy.base import Strategy
from vsim.trainer import Trainer


@dataclass(frozen=True)
class Entry:
    """What one name of a comparison stands for; everything else is the same for all of them.

    Attributes:
        num_nodes: K.
        batch_size: examples a node and step; None: that of the others.
    """

    strategy: Strategy
    num_nodes: int
    batch_size: int | None = None


def compare(
    model: nn.Module | Callable[[int], nn.Module],
    train_dataset: Data,
    val_dataset: Data | None = None,
    *,
    strategies: Mapping[str, Strategy],
    num_nodes: int,
    loss_fn: LossFunction | None = None,
    device: str | torch.device | None = None,
    logger: Logger | Sequence[Logger] | None = None,
    run_name: str | None = None,
    wandb_project: str | None = None,
    seeds: Sequence[int] | None = None,
    **fit_options: Any,
) -> Comparison:
    """Train the same model on the same data in the same order with several strategies.

    Args:
        model: that all runs start from; or a function f(seed) → model, so that every seed has initial weights of its
            own, the same for all strategies.
        train_dataset, val_dataset, loss_fn, device: as of `Trainer`.
        strategies: name → strategy; or name → dict of these, such as a `vsim.grid`, whose names then begin with it.
        num_nodes: K.
        seeds: train every strategy once with each of them, instead of once with `seed`: tables then show mean ±
            standard deviation, and figures bands.
        logger, run_name, wandb_project: as of `Trainer.fit`. Every strategy is a run of its own, called
            "<run_name>/<name of the strategy>", which is also its folder; without a run name the date and time are it.
        fit_options: every other argument of `Trainer.fit`, the same for all; but save_dir, checkpoint_interval and
            resume belong to one run.

    Returns:
        A `Comparison`. All strategies are set up before the first one trains, so that what is refused is refused
        early. A run that fails later is kept with what it did and with the reason, and the others go on. On an
        interrupt what was done so far comes back. Both with a warning.

    Raises:
        TypeError, ValueError: as `Trainer.fit`.
        Exception: whatever the first run of all raises, except for a non-finite loss: nothing would be lost.
    """
    if not isinstance(strategies, Mapping):
        raise TypeError(f"strategies must be a dict of name → strategy, got {type(strategies).__name__}")
    if not strategies:
        raise ValueError("strategies is empty: give at least one, as a dict of name → strategy")
    strategies = merged(strategies)
    odd = [f"{name}: {value!r}" for name, value in strategies.items() if not isinstance(value, Strategy)]
    if odd:
        raise TypeError(f"strategies must be Strategy objects, got {', '.join(odd)}")
    return run_members(
        {name: Entry(strategy, num_nodes) for name, strategy in strategies.items()},
        model,
        train_dataset,
        val_dataset,
        loss_fn=loss_fn,
        device=device,
        logger=logger,
        run_name=run_name,
        wandb_project=wandb_project,
        seeds=seeds,
        **fit_options,
    )


def run_members(
    entries: Mapping[str, Entry],
    model: nn.Module | Callable[[int], nn.Module],
    train_dataset: Data,
    val_dataset: Data | None = None,
    *,
    loss_fn: LossFunction | None = None,
    device: str | torch.device | None = None,
    logger: Logger | Sequence[Logger] | None = None,
    run_name: str | None = None,
    wandb_project: str | None = None,
    seeds: Sequence[int] | None = None,
    halving: int | None = None,
    **fit_options: Any,
) -> Comparison:
    """Train every entry with every seed; see `compare` for the arguments and for what it raises.

    Args:
        halving: let only the best 1 / halving of the entries (on average over the seeds) go on at each of the `rungs`.
            The others are kept with `stopped_at`.
    """
    if halving is not None:
        raise NotImplementedError("halving= needs runs that train together, which is still to come")
    what = "seed" if seeds is None else "every one of seeds"
    if seeds is None:
        seeds = [fit_options.pop("seed", 42)]
    elif "seed" in fit_options:
        raise TypeError("seed and seeds say the same thing; give one of them")
    seeds = [whole_number(what, seed, at_least=0) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, got {list(seeds)}")
    of_one_run = [n for n in ("save_dir", "checkpoint_interval", "resume") if fit_options.get(n) not in (None, False)]
    if of_one_run and len(entries) * len(seeds) > 1:
        several = f"{len(entries)} strategies" if len(entries) > 1 else f"with {len(seeds)} seeds"
        raise ValueError(
            f"{', '.join(of_one_run)} belongs to one run, and compare() trains {several}; give them to Trainer.fit, "
            "run by run"
        )

    if run_name is not None:
        check_run_name(run_name)
    logs = logger is not None or run_name is not None or wandb_project is not None
    folder = run_name or date_and_time()
    comparison: Comparison | None = None
    for seed in seeds:
        start = model if isinstance(model, nn.Module) else _made(model, seed)
        trainers = {
            name: Trainer(start, train_dataset, val_dataset, loss_fn=loss_fn, device=device) for name in entries
        }
        if comparison is None:
            trainable = [p for p in start.parameters() if p.requires_grad]
            comparison = Comparison(sum(p.numel() * p.element_size() for p in trainable))
            for name in list(entries)[1:]:  # the first is about to say for itself
                _check(name, trainers[name], {**fit_options, **_own(entries[name]), "seed": seed})
        for name, trainer in trainers.items():
            label = name if len(seeds) == 1 else f"{name}, seed {seed}"
            trainer.run_label = label
            run = ComparedRun(trainer.history, trainer.ledger, seed=seed)
            try:
                run.model = trainer.fit(
                    seed=seed,
                    logger=logger,
                    run_name=f"{folder}/{folder_name(label)}" if logs else None,
                    wandb_project=wandb_project,
                    **{**fit_options, **_own(entries[name])},
                )
            except KeyboardInterrupt:
                run.failure = f"interrupted after step {max(0, len(trainer.history) - 1)}"
                warnings.warn(f"{label}: {run.failure}; the comparison holds what was done", UserWarning, stacklevel=2)
            except Exception as error:
                diverged = isinstance(error, FloatingPointError)
                if not diverged and not len(comparison):
                    raise
                run.failure = str(error).split(" (")[0] if diverged else f"{type(error).__name__}: {_first_line(error)}"
                run.error = error
                if diverged:
                    at = re.search(r"step (\d+)", str(error))
                    run.diverged_at = int(at[1]) if at else len(trainer.history)
                warnings.warn(f"{label}: {error}", UserWarning, stacklevel=2)
            run.history, run.ledger = trainer.history, trainer.ledger
            comparison.add(name, run)
            if run.failure.startswith("interrupted"):
                return comparison
    assert comparison is not None
    return comparison


def rungs(count: int, max_steps: int, factor: int) -> list[tuple[int, int]]:
    """Return when `halving` lets only the best go on, as (step, how many): the steps of all rungs cost about the same.

    >>> rungs(27, 270, 3)
    [(10, 9), (30, 3), (90, 1)]
    """
    kept = []
    while count > 1:
        count = -(-count // factor)
        kept.append(count)
    steps = (max_steps // factor ** (len(kept) - i) for i in range(len(kept)))
    # Where there are fewer steps than rungs, the first ones are one.
    return [(step, left) for step, left in dict(zip(steps, kept, strict=True)).items() if step]


def _own(entry: Entry) -> dict[str, Any]:
    """The arguments of `fit` that are the entry's."""
    own = {"strategy": entry.strategy, "num_nodes": entry.num_nodes}
    return own if entry.batch_size is None else {**own, "batch_size": entry.batch_size}


def _check(name: str, trainer: Trainer, options: dict[str, Any]) -> None:
    """Raise what a run would raise before its first step, with its name."""
    try:
        trainer.check(**options)
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):
            raise
        raise type(error)(f"{name}: {error}") from error


def _made(model: Any, seed: int) -> nn.Module:
    if not callable(model) or isinstance(model, type):  # a class takes its first argument for something else
        raise TypeError(f"model must be a torch.nn.Module, or a function f(seed) that makes one, got {model!r}")
    made = model(seed)
    if not isinstance(made, nn.Module):
        raise TypeError(f"model({seed}) must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
