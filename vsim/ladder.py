"""A model ladder: the same strategies at several sizes of a model, tuned at each size."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vsim.analysis.by_size import Ladder
from vsim.analysis.comparison import Comparison
from vsim.arguments import a_function, a_list, a_path, countable, given, naming, real_number, retold, whole_number
from vsim.cluster.ledger import BYTES_OF_A_STEP
from vsim.cluster.plan import BYTES_OF_A_CLIENT
from vsim.cluster.randomness import isolated
from vsim.compare import call_text, checked_seeds, compare
from vsim.data.batches import Batches, Data, resolve, sizes_of
from vsim.figures.words import in_short
from vsim.network.timeline import duration
from vsim.training.spec import option_defaults, takes_options

__all__ = ["Ladder", "ladder", "load_ladder"]

_CPU, _TOKENS_PER_PARAMETER = torch.device("cpu"), 20.0


@takes_options("extend", of=compare)
def ladder(
    model: Callable[[int], nn.Module],
    train_dataset: Data,
    val_dataset: Data | None = None,
    *,
    sizes: Sequence[int],
    strategies: Mapping[str, Any],
    num_nodes: int,
    tokens_per_parameter: float | None = None,
    max_steps: int | Mapping[str, int] | None = None,
    budget: Mapping[str, Any] | None = None,
    save_dir: str | Path | None = None,
    **options: Any,
) -> Ladder:
    """Train every strategy at every size of a model, to predict the best strategy at a size too large to train.

    Each size is one `compare`: all strategies see the same data, order and seeds. With `tune=`, they are tuned at each
    size. By default, larger models train for more steps. Every run's learning-rate schedule ends with the run.

    Args:
        model: a function f(size) → model, such as `lambda width: GPT(…, width=width)`, called for each seed with
            torch's generators set to that seed.
        train_dataset, val_dataset: see `compare`.
        sizes: at least two sizes to call `model` with, such as widths; the models must differ in number of parameters.
        strategies, num_nodes: see `compare`.
        tokens_per_parameter: tokens that all nodes of a run train on together, per parameter of the model; default: 20.
            An example counts as its number of token ids, or as one token if it has no token ids.
        max_steps, budget: see `compare`; they limit the steps at every size, instead of `tokens_per_parameter`.
        save_dir: a folder for `ladder.json`, the record of complete sizes for `vsim.load_ladder`, and a folder for each
            size. With `resume`, complete sizes are read, and the remaining sizes resume.
        options: every other argument of `compare`, the same for all sizes.

    Returns:
        A `Ladder`; after an interrupt, it has only the complete sizes.

    Raises:
        TypeError, ValueError: see `compare`; or there are too few sizes, or equal sizes.
        KeyboardInterrupt: interrupted before the first size was complete.
    """
    if isinstance(model, nn.Module | type):
        raise TypeError(f"model must be a function f(size) that makes a torch.nn.Module, got {given(model)}")
    a_function("model", model, "size")
    chosen = [whole_number("every one of sizes", size) for size in a_list("sizes", sizes)]
    if len(set(chosen)) < max(2, len(chosen)):
        raise ValueError(f"sizes must be at least two different numbers, got {chosen}")
    first = checked_seeds(options.get("seeds"), dict(options))[0]
    num_nodes = countable("num_nodes", num_nodes, "nodes", BYTES_OF_A_CLIENT)
    if tokens_per_parameter is not None:
        tokens_per_parameter = real_number("tokens_per_parameter", tokens_per_parameter, above=0)
    parameters = {size: _parameters(_made(model, size, first)) for size in chosen}
    if len(set(parameters.values())) < len(chosen):
        raise ValueError(f"models of different sizes must differ in parameters, got {parameters}")
    if (max_steps is None and budget is None) or tokens_per_parameter is not None:
        if max_steps is not None or budget is not None or options.get("num_epochs") is not None:
            what = "max_steps" if max_steps is not None else "budget" if budget is not None else "num_epochs"
            raise TypeError(f"tokens_per_parameter and {what} both decide the steps; give one of them")
        tokens_per_parameter = _TOKENS_PER_PARAMETER if tokens_per_parameter is None else tokens_per_parameter
    ascending = sorted(chosen, key=parameters.__getitem__)
    counted = _Counted(train_dataset, num_nodes, first, options)
    folder = None if save_dir is None else a_path("save_dir", save_dir)
    ended: dict[int, Comparison] = {}
    steps = {size: counted.steps(tokens_per_parameter * parameters[size]) for size in ascending if tokens_per_parameter}
    remaining = _Remaining(parameters, steps)
    for place, size in enumerate(ascending, 1):
        own: dict[str, Any] = {"max_steps": max_steps, "budget": budget, **options}
        if tokens_per_parameter is not None:
            own["max_steps"] = steps[size]
        if folder is not None:
            own["save_dir"] = folder / str(size)
            if own.get("resume"):
                own["resume"] = "auto"
        left = remaining.text(ascending[place - 1 :])
        title = f"size {place} of {len(ascending)}, {in_short(parameters[size])} parameters{left}: "
        began = time.perf_counter()
        try:
            comparison: Comparison = _compare(
                lambda seed, size=size: _made(model, size, seed),
                train_dataset,
                val_dataset,
                strategies=strategies,
                num_nodes=num_nodes,
                title=title,
                **own,
            )
            if any(run.note.startswith("interrupted") for name in comparison for run in comparison.runs(name)):
                raise KeyboardInterrupt("interrupted before the first size had ended")
        except KeyboardInterrupt:
            if not ended:
                raise
            hint = "" if folder is None else f"; resume=True resumes it from {str(folder)!r}"
            warnings.warn(
                f"interrupted at size {size}: the ladder has {', '.join(map(str, ended))}{hint}", stacklevel=3
            )
            break
        about = {"sizes": ascending, "strategies": dict(strategies), "num_nodes": num_nodes, "max_steps": max_steps}
        about |= {"tokens_per_parameter": tokens_per_parameter, "budget": budget, **options}
        comparison.calls = [call_text("vsim.ladder", **about)]
        ended[size] = comparison
        remaining.seconds[size] = time.perf_counter() - began
        if folder is not None:
            Ladder(ended, parameters, tokens_per_parameter, counted.tokens).save(folder / "ladder.json")
    found = Ladder(ended, parameters, tokens_per_parameter, counted.tokens)
    _warn_of_silence(found)
    return found


def _warn_of_silence(found: Ladder) -> None:
    """Warn of strategies that communicate, and that trained too few steps for a first sync at some sizes."""
    silent = dict(found.silent)
    for name in found.names:
        runs = {size: own[name] for size, own in found.comparisons.items() if name in own}
        strategy = next(iter(runs.values())).strategy
        can = getattr(strategy, "communicates", True)
        if can and not any(run.history.last("wire_bytes") for run in runs.values()):
            silent[name] = list(runs) if runs[next(iter(runs))].history.num_nodes > 1 else []
        at = ", ".join(
            f"size {size} ({in_short(found.parameters[size])} parameters, {runs[size].history.last('step'):,.0f} steps)"
            for size in silent.get(name, ())
        )
        if at:
            warnings.warn(
                f"{name} never communicated at {at}: such a size says nothing about it; take more steps or a smaller H",
                stacklevel=4,
            )


class _Remaining:
    """Estimates the time that the remaining sizes take, from the seconds of the sizes that have ended.

    A step's seconds are taken to grow as a power of the parameters: the one through the two largest sizes that ended,
    and at most linearly.
    """

    def __init__(self, parameters: Mapping[int, int], steps: Mapping[int, int]) -> None:
        self.parameters, self.steps = parameters, steps
        self.seconds: dict[int, float] = {}

    def text(self, sizes: Sequence[int]) -> str:
        """Return text such as ", about 5 min left" for these sizes; "" before the first size has ended."""
        a_step = {size: own / self.steps.get(size, 1) for size, own in self.seconds.items()}
        if not a_step:
            return ""
        power, last = 1.0, [*a_step][-1]
        if len(a_step) > 1:
            before = [*a_step][-2]
            power = math.log(a_step[last] / a_step[before]) / math.log(self.parameters[last] / self.parameters[before])
        growth = {size: (self.parameters[size] / self.parameters[last]) ** min(1.0, max(0.0, power)) for size in sizes}
        left = sum(a_step[last] * own * self.steps.get(size, 1) for size, own in growth.items())
        return f", about {duration(left)} left"


_compare = inspect.unwrap(compare)  # without the check of argument names, which rejects `title`


def load_ladder(path: str | Path) -> Ladder:
    """Read a ladder that `Ladder.save` wrote; its runs have no models.

    Args:
        path: the file, or a `save_dir` of `vsim.ladder`.

    Raises:
        FileNotFoundError: there is no such file. ValueError: the file is not a ladder.
    """
    path = a_path("path", path)
    return Ladder.load(path / "ladder.json" if path.is_dir() else path)


class _Counted:
    """Converts between the steps and the tokens of a run.

    Attributes:
        tokens: number of token ids in an example; 0 without token ids.
    """

    def __init__(self, train_dataset: Data, num_nodes: int, seed: int, options: Mapping[str, Any]) -> None:
        with isolated(seed, _CPU):
            datasets = resolve(train_dataset, num_nodes, range(num_nodes), True, "train_dataset")
            defaults = option_defaults()
            names = ("batch_size", "shuffle", "dataloader_kwargs")
            batch_size, shuffle, kwargs = (options.get(name, defaults[name]) for name in names)
            batches = Batches(datasets, num_nodes, whole_number("batch_size", batch_size), shuffle, seed, kwargs)
            examples, tokens = sizes_of(next(batches.from_step()))
        self.tokens, self._order = tokens // examples, batches.order

    def steps(self, tokens: float) -> int:
        """Return the smallest number of steps in which all nodes together see `tokens` tokens."""
        examples = tokens / max(1, self.tokens)
        most = 16
        while self._seen(most) < examples:
            with naming("tokens_per_parameter"):
                most = countable("max_steps", 2 * most, "steps", BYTES_OF_A_STEP)
        return max(1, bisect_left(range(most), examples, key=self._seen))

    def _seen(self, steps: int) -> int:
        return int(self._order.examples(np.array([steps]))[0])


def _made(model: Callable[[int], nn.Module], size: int, seed: int) -> nn.Module:
    with isolated(seed, _CPU):
        try:
            made = model(size)
        except Exception as error:  # of the user's function, which may take other sizes
            raise retold(error, f"sizes: model({size}) is not possible: {error}") from error
    if not isinstance(made, nn.Module):
        raise TypeError(f"model({size}) must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
