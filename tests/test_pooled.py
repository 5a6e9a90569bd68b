"""Comparisons whose runs are trained by a pool of workers."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from reference_cluster import small_mlp, vectors

import vsim
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy

STRATEGIES = {"all": SimpleReduceStrategy(lr=0.1), "DiLoCo": DiLoCoStrategy(H=2, lr=0.1)}


class Inline(Executor):
    """An executor whose tasks run at once, but for some that are lost."""

    def __init__(self, lost: int = 0) -> None:
        self.lost, self.tasks = lost, 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tasks += 1
        if self.tasks <= self.lost:
            future.set_exception(ConnectionError("the machine is gone"))
        else:
            future.set_result(function(*args, **kwargs))
        return future


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver")) as pool:
        yield pool


def compared(**options: Any) -> vsim.Comparison:
    own: dict[str, Any] = {"strategies": STRATEGIES, "seeds": [1, 2], "num_nodes": 2, "max_steps": 4, "batch_size": 4}
    own |= {"deterministic": True, "progress": False}
    return vsim.compare(small_mlp(), vectors(), vectors(8), **{**own, **options})


def assert_equal(found: vsim.Comparison, expected: vsim.Comparison) -> None:
    assert list(found) == list(expected)
    for name in expected:
        for own, its in zip(found.runs(name), expected.runs(name), strict=True):
            assert own.seed == its.seed and own.model is not None and its.model is not None
            for column in ("train_loss", "global_loss", "wire_bytes"):
                assert np.array_equal(own.history[column], its.history[column], equal_nan=True), column
            expected_weights = its.model.state_dict()
            assert all(torch.equal(value, expected_weights[key]) for key, value in own.model.state_dict().items())
    assert found.table(columns=["validation loss"]) == expected.table(columns=["validation loss"])


@pytest.mark.slow
def test_a_pool_of_processes_trains_the_same_bits(processes: ProcessPoolExecutor) -> None:
    assert_equal(compared(pool=processes), compared())


@pytest.mark.slow
def test_workers_of_a_dask_cluster_train_the_same_bits() -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor(pure=False) as pool,
    ):
        assert_equal(compared(pool=pool), compared())


class Dies(vsim.Callback):
    """Kills the process of the run at step 2, if it is the first to get there."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_step(self, run: Any) -> None:
        if run.step == 2 and not self.mark.exists():
            self.mark.touch()
            os._exit(1)


def test_the_runs_of_a_lost_process_are_trained_again(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as pool, pytest.warns(UserWarning, match="its worker was lost"):
        found = compared(pool=pool, callbacks=[Dies(tmp_path / "mark")], save_dir=tmp_path / "runs")
    assert (tmp_path / "mark").exists()
    assert_equal(found, compared())


class Counts(vsim.Callback):
    """Notes when runs start and end."""

    seen: ClassVar[list[str]] = []

    def on_start(self, run: Any) -> None:
        self.seen.append("start")
        time.sleep(0.2)  # in which another thread would start

    def on_end(self, run: Any) -> None:
        self.seen.append("end")


def test_threads_train_in_turn() -> None:
    Counts.seen.clear()
    with ThreadPoolExecutor(2) as pool:
        found = compared(pool=pool, seeds=[1], callbacks=[Counts()])
    assert Counts.seen == ["start", "end"] * 2
    assert_equal(found, compared(seeds=[1]))


@pytest.mark.parametrize(("lost", "tasks"), [(0, 2), (2, 4)])
def test_a_task_whose_worker_is_lost_is_submitted_again(lost: int, tasks: int) -> None:
    pool = Inline(lost)
    assert_equal(compared(pool=pool), compared())
    assert pool.tasks == tasks


def test_if_all_workers_are_lost_this_process_trains() -> None:
    with pytest.warns(UserWarning, match="it trains again, in this process"):
        found = compared(pool=Inline(100))
    assert_equal(found, compared())


def test_folders_are_written_by_tasks_and_resumed(tmp_path: Path) -> None:
    compared(pool=Inline(), save_dir=tmp_path, max_steps=2, checkpoint_interval=1, val_interval=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DiLoCo", "all"]
    assert (tmp_path / "all" / "race.json").exists()
    whole = compared(pool=Inline(), save_dir=tmp_path, max_steps=4, resume=True, val_interval=2)
    assert_equal(whole, compared(val_interval=2))
    shown = vsim.saved.read_comparisons([str(tmp_path / name) for name in ("all", "DiLoCo")])
    assert sum(len(own.runs(name)) for own in shown.values() for name in own) == 4


def test_sweeps_and_searches_take_a_pool() -> None:
    data = small_mlp(), vectors(), vectors(8)
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "progress": False, "deterministic": True}
    settings = {"H": [1, 2], "lr": [0.1, 0.2]}
    pool = Inline()
    swept = vsim.sweep(*data, strategy=DiLoCoStrategy, settings=settings, pool=pool, **options)
    assert pool.tasks == 4 and len(swept) == 4
    assert_equal(swept, vsim.sweep(*data, strategy=DiLoCoStrategy, settings=settings, **options))
    pytest.importorskip("optuna")
    searched = vsim.tune(
        *data,
        space=lambda t: DiLoCoStrategy(H=t.suggest_int("H", 1, 3), lr=0.1),
        trials=4,
        together=2,
        pool=pool,
        **options,
    )
    assert pool.tasks == 8 and len(searched) == 4
    with pytest.warns(UserWarning, match="the best lr is"):
        chosen = compared(pool=pool, tune={"lr": [0.1, 0.2]})
    assert chosen.tuned.keys() == {"all", "DiLoCo"}


def test_mistakes_are_errors() -> None:
    with pytest.raises(TypeError, match=r"pool must be a concurrent\.futures\.Executor"):
        compared(pool=2)
    lock = threading.Lock()
    with pytest.raises(TypeError, match="all: the run does not pickle"):
        compared(pool=Inline(), callbacks=[lambda run: lock.locked()])
    with pytest.raises(ValueError, match="backend= does not"):
        compared(pool=Inline(), backend="process", num_processes=2)
    with pytest.raises(ValueError, match="halving= does not"):
        vsim.sweep(
            small_mlp(),
            vectors(),
            vectors(8),
            strategy=DiLoCoStrategy,
            settings={"H": [1, 2]},
            num_nodes=2,
            max_steps=40,
            halving=2,
            pool=Inline(),
        )
    with pytest.raises(ValueError, match="batch_size"):  # raised by a task
        compared(pool=Inline(), batch_size=0)
