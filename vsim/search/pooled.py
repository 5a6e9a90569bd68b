"""Runs of a comparison as tasks of a pool, such as the processes of a machine or the workers of a cluster."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, as_completed
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import cloudpickle
from tqdm import tqdm

from vsim.analysis.comparison import Comparison
from vsim.arguments import given
from vsim.history.loggers import date_and_time, folder_name
from vsim.runs.interrupt import Interrupt

# How often the runs of a lost worker are given to the pool again, before they train in this process.
_TRIES = 3


def train_in_pool(
    pool: Any,
    train: Callable[..., Comparison],
    entries: Mapping[str, Mapping[str, Any]],
    interrupt: Interrupt | None,
    progress: bool | str,
    **options: Any,
) -> Comparison:
    """Train entries, a task each with all of its seeds, and join their comparisons in the order of the entries.

    What a task raises while it trains is raised here. Any other failure of a task is that of its worker: the task is
    given to the pool again and, if that does not help, trained in this process.

    Args:
        pool: a `concurrent.futures.Executor`. train: `train_entries`; `options` are its arguments.
    """
    if not isinstance(pool, Executor):
        raise TypeError(f"pool must be a concurrent.futures.Executor, such as ProcessPoolExecutor(), got {given(pool)}")
    alone = {"backend": options.get("backend", "stacked") != "stacked"}
    alone |= {name: options.get(name) is not None for name in ("halving", "pruning")}
    if odd := [name for name, there in alone.items() if there]:
        raise ValueError(f"pool= trains runs apart from each other, and {odd[0]}= does not: leave one of them out")
    if options.get("run_name") is None and options.get("logger") is not None:
        options["run_name"] = date_and_time()  # one for all tasks

    def task(name: str, tries: int) -> bytes:
        more: dict[str, Any] = {"entries": {name: entries[name]}, "progress": False}
        if isinstance(steps := options.get("max_steps"), Mapping):
            more["max_steps"] = {name: steps[name]} if name in steps else steps  # which raises an error there
        if options.get("save_dir") is not None:
            more["save_dir"] = Path(options["save_dir"]) / folder_name(name)
            more["resume"] = "auto" if options.get("resume") or tries else False
        try:
            return cloudpickle.dumps((train, {**options, **more}))
        except Exception as error:
            raise TypeError(f"{name}: the run does not pickle, and so pool= cannot send it: {error}") from error

    found: dict[str, Comparison] = {}
    waiting: dict[Future[bytes], tuple[str, int]] = {}

    def submit(name: str, tries: int) -> None:
        sent = task(name, tries)
        try:
            if tries < _TRIES:
                waiting[pool.submit(_train, sent)] = name, tries
                return
        except Exception:  # a pool that lost a process may take no more tasks
            pass
        warnings.warn(f"{name}: its worker was lost; it trains again, in this process", UserWarning, stacklevel=6)
        found[name] = _result(_train(sent), interrupt)

    try:
        for name in entries:
            submit(name, 0)
        with tqdm(total=len(entries), desc="entries", disable=not progress) as bar:
            while waiting:
                future = next(as_completed(waiting))
                name, tries = waiting.pop(future)
                if future.cancelled() or future.exception() is not None:
                    submit(name, tries + 1)
                else:
                    found[name] = _result(future.result(), interrupt)
                bar.update(name in found)
    finally:
        for future in waiting:
            future.cancel()
    return reduce(or_, (found[name] for name in entries))


def _train(task: bytes) -> bytes:
    """Train in a worker; return the comparison, and whether it was interrupted, or what was raised."""
    try:
        train, options = cloudpickle.loads(task)
        interrupt = Interrupt()
        return cloudpickle.dumps((train(**options, interrupt=interrupt), interrupt.requested, None))
    except Exception as error:
        return cloudpickle.dumps((None, False, error))


def _result(result: bytes, interrupt: Interrupt | None) -> Comparison:
    comparison, interrupted, error = cloudpickle.loads(result)
    if error is not None:
        raise error
    if interrupted and interrupt is not None:
        interrupt.request()
    own: Comparison = comparison
    return own
