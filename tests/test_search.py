"""`vsim.tune`: optuna's trials as the runs of comparisons, pruned, resumed after kills, and told how they ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from comparisons_by_hand import never
from test_tune import TRAIN, VAL, Quadratic

import vsim
from vsim.analysis.search import Search
from vsim.cluster.randomness import fingerprints
from vsim.saved import read_comparison
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy, Strategy

optuna = pytest.importorskip("optuna")  # in the extra `test`, and so in CI
optuna.logging.set_verbosity(optuna.logging.WARNING)
COMPLETE, PRUNED, FAIL, RUNNING = (optuna.trial.TrialState[s] for s in ("COMPLETE", "PRUNED", "FAIL", "RUNNING"))


def space(trial: Any) -> Strategy:
    return DiLoCoStrategy(
        H=trial.suggest_categorical("H", [1, 2, 3]),
        outer_optim="sgd",
        outer_lr=1.0,
        inner_optim="sgd",
        lr=trial.suggest_float("lr", 0.01, 1.0, log=True),
    )


OPTIONS: dict[str, Any] = {"space": space, "num_nodes": 2, "max_steps": 6, "batch_size": 8, "progress": False}


def tune(**options: Any) -> Search:
    return vsim.tune(Quadratic(), TRAIN, VAL, **{**OPTIONS, "trials": 7, "together": 3, **options})


def told(study: Any) -> list[Any]:
    return [(one.number, one.state, one.params, one.values) for one in study.trials]


def assert_equally_told(one: Any, other: Any) -> None:
    for own, theirs in zip(told(one), told(other), strict=True):
        assert own[:3] == theirs[:3]
        assert own[3] == theirs[3] or own[3] == pytest.approx(theirs[3], rel=1e-5)


@pytest.mark.parametrize("together", [1, 3])
def test_trials_are_those_of_optuna_one_by_one(together: int) -> None:
    def objective(trial: Any) -> list[float]:
        run = vsim.compare(Quadratic(), TRAIN, VAL, strategies={"one": space(trial)}, **options)["one"]
        return [run.history.last("global_loss"), float(run.history.last("wire_bytes"))]

    options = {key: value for key, value in OPTIONS.items() if key != "space"}
    alone = optuna.create_study(directions=["minimize"] * 2, sampler=optuna.samplers.RandomSampler(seed=3))
    alone.optimize(objective, n_trials=4)
    sampler = optuna.samplers.RandomSampler(seed=3)
    search = tune(trials=4, together=together, objectives=["loss", "wire"], sampler=sampler)
    assert_equally_told(search.study, alone)
    assert {name: search.settings[name] for name in search} == {f"trial {t.number}": t.params for t in alone.trials}


def test_two_objectives_give_the_front_of_the_full_grid() -> None:
    grid: dict[str, list[Any]] = {"H": [1, 2, 3], "lr": [0.02, 0.1, 0.4]}
    sampler = optuna.samplers.GridSampler(grid, seed=1)
    priced: dict[str, Any] = {"network": "1 Mbit/s, 10 ms", "compute": vsim.Compute(0.1, dollars_per_hour=2.0)}
    priced["max_steps"] = 5  # of which 5, 4 and 3 count, so that no loss is another's but for rounding
    search = tune(trials=9, together=4, objectives=["loss", "time"], sampler=sampler, **priced)
    options = {key: value for key, value in OPTIONS.items() if key != "space"} | priced
    fixed = {"inner_optim": "sgd", "outer_optim": "sgd", "outer_lr": 1.0}
    sweep = vsim.sweep(Quadratic(), TRAIN, VAL, strategy=DiLoCoStrategy, settings={**grid, **fixed}, **options)
    front = sweep.pareto("time").frame.set_index("strategy")
    values = {
        tuple(sweep.settings[name][key] for key in grid): (front.loc[name, "loss"], 3600 * front.loc[name, "hours"])
        for name in sweep
    }
    found = {tuple(one.params[key] for key in grid): one.values for one in search.study.trials}
    assert found.keys() == values.keys() and len(found) == 9
    assert all(found[at] == pytest.approx(values[at], rel=1e-5) for at in found)
    best = {tuple(one.params[key] for key in grid) for one in search.study.best_trials}
    on_front = {tuple(sweep.settings[name][key] for key in grid) for name in sweep.pareto("time").names}
    assert best == on_front == {(H, 0.4) for H in grid["H"]}


def test_equal_seeds_ask_for_equal_trials_and_draw_from_no_global_generator() -> None:
    states = fingerprints(torch.device("cpu"))
    one, same, other = tune(seed=1), tune(seed=1), tune(seed=2)
    assert fingerprints(torch.device("cpu")) == states
    assert_equally_told(one.study, same.study)
    rates = [[own.params["lr"] for own in search.study.trials] for search in (one, other)]
    assert len({*rates[0], *rates[1]}) == 14


class Odd(optuna.pruners.BasePruner):  # type: ignore[misc]
    """Prunes trials of odd numbers after step 4."""

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.number % 2 and trial.last_step >= 4)


def test_pruned_trials_leave_the_matrix() -> None:
    rows: list[int] = []

    def note(run: Any) -> None:
        rows.append(run.done)

    search = tune(trials=5, together=5, pruner=Odd(), val_interval=2, max_steps=7, seeds=[1, 2], callbacks=[note])
    for trial in search.study.trials:
        runs = search.runs(f"trial {trial.number}")
        is_odd = trial.number % 2 == 1
        assert [(run.seed, run.stopped_at) for run in runs] == [(seed, 4 if is_odd else None) for seed in (1, 2)]
        assert trial.state == (PRUNED if is_odd else COMPLETE)
        rungs = [2, 4] if is_odd else [2, 4, 6]
        at = {step: np.mean([run.history.at_step(step, "global_loss") for run in runs]) for step in rungs}
        assert trial.intermediate_values == pytest.approx(at)
        if not is_odd:  # the mean over the seeds counts
            assert trial.value == pytest.approx(np.mean([run.history.last("global_loss") for run in runs]))
    assert search.best() == f"trial {search.study.best_trial.number}"
    assert [rows.count(step) for step in range(1, 8)] == [10] * 4 + [6] * 3
    assert search.rows().to_dict("records")[-1]["note"] == "stopped after step 4"


def test_how_a_trial_ended_is_told() -> None:
    def some_end_otherwise(trial: Any) -> Strategy:
        lr = trial.suggest_categorical("lr", [0.1, 0.2, 0.3, 1e30])
        if lr == 0.3:
            raise optuna.TrialPruned
        if lr == 0.2:
            return SimpleReduceStrategy(inner_optim="sgd", lr=lr)
        H = 2 if lr < 1 else trial.suggest_int("H", 2, 3)
        return DiLoCoStrategy(H=H, inner_optim="sgd", lr=lr)

    class Fails(vsim.Callback):
        def on_step(self, run: Any) -> None:
            if run.done == 3 and isinstance(run.strategy, SimpleReduceStrategy):
                raise RuntimeError("a disk is full")

    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name="own")
    for lr in (0.1, 0.2, 0.3, 1e30):
        study.enqueue_trial({"lr": lr})
    with pytest.warns(UserWarning, match="a disk is full|non-finite"):
        search = tune(
            trials=4,
            together=2,
            space=some_end_otherwise,
            storage=storage,
            study_name="own",
            callbacks=[Fails()],
        )
    states, reasons = zip(*((one.state, one.user_attrs.get("failure", "")) for one in search.study.trials), strict=True)
    assert states == (COMPLETE, FAIL, PRUNED, PRUNED)
    assert reasons[0] == reasons[2] == "" and "a disk is full" in reasons[1] and reasons[3].startswith("non-finite")
    assert list(search) == ["trial 0", "trial 1", "trial 3"]
    assert search.settings["trial 1"] == {"lr": 0.2, "H": None}
    assert {row["trial"]: row["H"] for row in search.rows().to_dict("records")}[
        "1"
    ] == "–" and search.study.best_trial.number == 0


def test_an_error_of_the_space_is_of_its_trial() -> None:
    storage = optuna.storages.InMemoryStorage()

    def wrong(trial: Any) -> Any:
        return space(trial) if trial.number != 1 else "adam"

    with pytest.raises(TypeError, match=r"trial 1 with {}: space\(trial\) must return a Strategy, got 'adam'"):
        tune(space=wrong, storage=storage)
    states = [one.state for one in optuna.load_study(study_name="vsim", storage=storage).trials]
    assert states == [RUNNING, FAIL]
    study = tune(storage=storage).study
    assert [one.state for one in study.trials] == [COMPLETE, FAIL, *[COMPLETE] * 5]


class Killed(BaseException):
    """Ends everything, as a signal does."""


def killed_at(place: str, count: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return options of a search that is killed at the count-th call of the space, of a step, or of optuna's tell."""
    calls = 0

    def kill(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            raise Killed

    def killing_space(trial: Any) -> Strategy:
        kill()
        return space(trial)

    def killing_tell(*args: Any, **kwargs: Any) -> Any:
        kill()
        return tell(*args, **kwargs)

    tell = optuna.Study.tell
    if place == "tell":
        monkeypatch.setattr(optuna.Study, "tell", killing_tell)
    return {"space": killing_space} if place == "space" else {"callbacks": [kill]} if place == "step" else {}


@pytest.mark.parametrize("place", ["step", *(pytest.param(at, marks=pytest.mark.slow) for at in ("space", "tell"))])
def test_a_search_that_is_killed_continues(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = optuna.storages.InMemoryStorage()
    options: dict[str, Any] = {"objectives": ["loss", "wire"], "storage": storage, "checkpoint_interval": 2}
    for count in (2, 5):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            tune(**options, **killed_at(place, count, patch), save_dir=tmp_path)
    whole, search = tune(objectives=["loss", "wire"]), tune(**options, save_dir=tmp_path)
    assert [*search] == [*whole]
    columns = ["validation loss"]
    assert search.table(columns=columns) == whole.table(columns=columns)
    for one in (search, tune(**options, save_dir=tmp_path)):
        assert_equally_told(one.study, whole.study)


def test_a_study_without_records_continues_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = optuna.storages.InMemoryStorage()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        tune(storage=storage, **killed_at("tell", 5, patch))
    with pytest.warns(UserWarning, match="trials of the study are not in the result.*save_dir="):
        assert_equally_told(tune(storage=storage).study, tune().study)
    with pytest.raises(ValueError, match="has all its trials, and their records were not saved"):
        tune(storage=storage)


@pytest.mark.slow
def test_a_search_that_prunes_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"trials": 4, "together": 4, "pruner": Odd(), "val_interval": 2, "max_steps": 7}
    whole = tune(**options)
    options |= {"save_dir": tmp_path, "checkpoint_interval": 3}
    for count in (10, 12):  # before and after the rung that prunes, of 4 runs a step
        with monkeypatch.context() as patch, pytest.raises(Killed):
            tune(**options, **killed_at("step", count, patch))
    search = tune(**options)
    assert_equally_told(search.study, whole.study)
    for one, other in zip(search.study.trials, whole.study.trials, strict=True):
        assert one.intermediate_values == pytest.approx(other.intermediate_values, rel=1e-5)
    assert [run.stopped_at for run in search.values()].count(4) == 2


SCRIPT = """
import os, signal, sys
import test_search as t
import optuna
kill_at, path = int(sys.argv[1]), sys.argv[2]
calls = 0
def count(*_):
    global calls
    calls += 1
    if calls == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
def space(trial):
    count()
    return t.space(trial)
t.tune(space=space, callbacks=[count], save_dir=path, checkpoint_interval=2)
"""


@pytest.mark.slow
def test_kills_lose_no_trial(tmp_path: Path) -> None:
    for kill_at in (2, 8, 13, 20, 23, -1):
        command = [sys.executable, "-c", SCRIPT, str(kill_at), str(tmp_path / "search")]
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == (-signal.SIGKILL if kill_at > 0 else 0), done.stderr
    whole = tune()
    study = optuna.load_study(study_name="vsim", storage=f"sqlite:///{tmp_path / 'search' / 'study.db'}")
    assert_equally_told(study, whole.study)
    assert len(read_comparison(tmp_path / "search")) == 7


def test_an_interrupt_leaves_the_batch_to_the_next_call(tmp_path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()

    def interrupt(run: Any) -> None:
        if run.done == 3 and run.label == "trial 4":
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        search = tune(storage=storage, save_dir=tmp_path, callbacks=[interrupt])
    assert [one.state for one in search.study.trials] == [COMPLETE] * 3 + [RUNNING] * 3
    assert len(search) == 6 and search["trial 4"].failure.startswith("interrupted")
    assert_equally_told(tune(storage=storage, save_dir=tmp_path).study, tune().study)


@pytest.mark.slow
def test_an_interrupt_in_the_first_batch_can_be_resumed(tmp_path: Path) -> None:
    def interrupt(run: Any) -> None:
        if run.done == 3:
            raise KeyboardInterrupt

    whole = tune().study
    for options in ({"save_dir": tmp_path}, {"storage": optuna.storages.InMemoryStorage()}):
        with pytest.warns(UserWarning, match="interrupted"):
            begun = tune(**options, callbacks=[interrupt]).study
        assert [one.state for one in begun.trials] == [RUNNING] * 3
        search = tune(**options)
        assert len(search) == 7 and all(run.ended and run.model is not None for run in search.all_runs)
        assert_equally_told(search.study, whole)


def test_a_search_that_is_called_again_has_records_without_models(tmp_path: Path) -> None:
    first = tune(save_dir=tmp_path, trials=4)
    again = tune(save_dir=tmp_path, trials=5)
    assert [run.model is None for run in first.all_runs] == [False] * 4
    assert [run.model is None for run in again.all_runs] == [True] * 4 + [False]
    for name in first:  # the checkpoints have them
        (folder,) = tmp_path.glob(f"trial * to trial */{name.replace(' ', '_')}")
        saved, trained = vsim.load_checkpoint(folder).model(Quadratic()), first[name].model
        assert trained is not None
        torch.testing.assert_close(saved.weight, trained.weight)


@pytest.mark.filterwarnings("ignore:.*records were not saved:UserWarning")
def test_a_refused_call_leaves_no_trials() -> None:
    storage = optuna.storages.InMemoryStorage()
    options: dict[str, Any] = {"storage": storage, "study_name": "mine"}
    told_at_first = told(tune(**options, trials=2, seeds=[1, 2]).study)
    study = optuna.load_study(study_name="mine", storage=storage)
    for changed, words in (
        ({"seeds": [1, 3]}, r"'mine' train with the seeds \[1, 2\].*with \[1, 3\]"),
        ({"seeds": None}, r"with \[42\]"),
        ({"seeds": None, "seed": 1}, r"with \[1\]"),
        ({"seeds": [1, 2], "batch_size": 4}, "batch_size is 8 and 4"),
        ({"seeds": [1, 2], "max_steps": 7}, "max_steps is 6 and 7"),
        ({"seeds": [1, 2], "budget": {"wire": 1e9}}, "budget"),
    ):
        with pytest.raises(ValueError, match=words):
            tune(**options, trials=9, **changed, callbacks=[never])
        assert told(study) == told_at_first
    tune(**options, trials=3, seeds=[1, 2])
    assert len(study.trials) == 3


def test_only_one_call_searches_a_folder_at_a_time(tmp_path: Path) -> None:
    def inner(run: Any) -> None:
        tune(save_dir=tmp_path)

    with pytest.raises(vsim.CheckpointError, match="in use: another run, in this process"):
        tune(save_dir=tmp_path, callbacks=[inner])
    assert len(tune(save_dir=tmp_path)) == 7


def test_a_damaged_file_of_a_search_is_named(tmp_path: Path) -> None:
    tune(save_dir=tmp_path, trials=3)
    path = tmp_path / "comparison.json"
    text = path.read_text()
    found = re.search(r'"train_loss": \[null, (\d+\.\d+)', text)
    assert found is not None
    path.write_text(text.replace(found[1], f"{float(found[1]) + 1}"))
    for read in (read_comparison, lambda _: tune(save_dir=tmp_path)):
        with pytest.raises(ValueError, match=r"comparison\.json .*is damaged"):
            read(tmp_path)
    path.write_text(text)
    assert len(read_comparison(tmp_path)) == 3


def test_a_study_that_another_process_searches_is_left_alone(tmp_path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name="vsim")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        mark = f"{socket.gethostname()} {other.pid} {psutil.Process(other.pid).create_time()}"
        study.ask().set_user_attr("process", mark)
        with pytest.raises(ValueError, match=rf"another process \(.* {other.pid} .*\), which trains its trial 0"):
            tune(storage=storage)
        other.communicate(b"\n")
    assert len(tune(storage=storage)) == 7


def test_two_calls_that_ask_in_turn_get_an_error() -> None:
    storage = optuna.storages.InMemoryStorage()

    def asking_twice(trial: Any) -> Strategy:
        optuna.load_study(study_name="vsim", storage=storage).ask()
        return space(trial)

    with pytest.raises(ValueError, match="two calls at a time: this one requested trial 1, and got trial 2"):
        tune(storage=storage, space=asking_twice)


def test_the_study_of_another_problem_is_refused_before_training(tmp_path: Path) -> None:
    tune(save_dir=tmp_path)

    with pytest.raises(ValueError, match=r"do not fit together: .*batch_size"):
        tune(save_dir=tmp_path, trials=9, batch_size=4, callbacks=[never])
    with pytest.raises(ValueError, match=r"is of loss, and objectives=\['loss', 'wire'\]"):
        tune(save_dir=tmp_path, trials=9, objectives=["loss", "wire"])
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(storage=storage, study_name="vsim", direction="maximize")
    with pytest.raises(ValueError, match="is of maximize"):
        tune(storage=storage)


def test_files_hold_the_search(tmp_path: Path) -> None:
    search = tune(save_dir=tmp_path, objectives=["loss", "wire"])
    read = read_comparison(tmp_path)
    assert isinstance(read, Search) and read.objectives == ["loss", "wire"] and read.study is None
    assert read.table() == search.table() and read.settings == search.settings
    assert search.table().splitlines()[0].split()[:3] == ["trial", "H", "lr"]
    assert search._repr_html_().count("<img") == 1 and "7 trials; 2 nodes" in repr(search)
    frame = search.to_pandas()
    assert {one.params["lr"] for one in search.study.trials} == {*frame["lr_setting"]}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"objectives": ["wire"]}, ValueError, r'"loss" one of them, got \[\'wire\'\]'),
        ({"objectives": ["loss", "bytes"]}, ValueError, "every one of objectives must be one of .*'wire'.*'bytes'"),
        ({"objectives": ["loss", "time"]}, TypeError, "network"),
        ({"objectives": ["loss", "cost"], "network": 1e6, "compute": 1.0}, ValueError, "dollars_per_hour"),
        ({"pruner": Odd(), "objectives": ["loss", "wire"]}, ValueError, "pruner= .*objectives="),
        ({"pruner": Odd()}, ValueError, r"pruner= .*val_interval=100 .*max_steps=6"),
        ({"pruner": Odd(), "max_steps": None, "num_epochs": 1}, ValueError, "pruner= .*max_steps"),
        ({"pruner": Odd(), "val_interval": 2, "backend": "process"}, ValueError, "pruner= .*process"),
        ({"study_name": "mine"}, ValueError, "study_name='mine' has no effect"),
        ({"storage": "study.db"}, ValueError, "storage='study.db' cannot be opened"),
        ({"strategies": {}}, TypeError, "strategies"),
        ({"resume": True}, TypeError, "resume"),
        ({"max_steps": {"DiLoCo": 3}}, ValueError, "max_steps"),
    ],
)
def test_mistakes_are_named_before_training(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tune(**options, callbacks=[never])


@pytest.mark.slow
def test_it_trains_in_processes() -> None:
    processes: dict[str, Any] = {"backend": "process", "num_processes": 2}
    assert_equally_told(tune(trials=2, **processes).study, tune(trials=2).study)


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs a validation dataset"):
        vsim.tune(Quadratic(), TRAIN, None, **OPTIONS)
    with pytest.raises(ValueError, match="give num_processes="):
        tune(trials=2, backend="process")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r'vsim\.tune needs optuna: pip install "vsim-torch\[tune\]"'):
        tune()
