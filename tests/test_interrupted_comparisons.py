"""Ctrl-C at any moment of a comparison: every run is returned, and says how it ended."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from reference_cluster import small_mlp, vectors

import vsim
from vsim import Callback, Comparison
from vsim.runs import race
from vsim.runs.race import Race
from vsim.strategy import FedAvgStrategy, Strategy
from vsim_cli import main

STEPS, SEEDS = 4, [3, 5]
STRATEGIES: dict[str, Strategy] = {"AllReduce": Strategy(lr=1e-2), "FedAvg": FedAvgStrategy(H=2, lr=1e-2)}
OPTIONS: dict[str, Any] = {
    **{"strategies": STRATEGIES, "num_nodes": 2, "max_steps": STEPS, "batch_size": 4, "seeds": SEEDS},
    **{"val_interval": 2, "progress": False},
}
IN_PROCESSES = {"backend": "process", "num_processes": 2, "threads_per_process": 1, "timeout_seconds": 60}
pytestmark = pytest.mark.filterwarnings("ignore:.*interrupted (after|before):UserWarning")


def compared(**options: Any) -> Comparison:
    data = vectors()
    return vsim.compare(small_mlp(), data, data, **{**OPTIONS, **options})


def outcomes(result: Comparison) -> list[str]:
    """How the runs ended, in the order in which they train one after the other; checks what holds of every run."""
    assert {name: [run.seed for run in result.runs(name)] for name in result} == dict.fromkeys(STRATEGIES, SEEDS)
    found, shown = [], result.table() + repr(result)
    for place, _ in enumerate(SEEDS):
        for name in STRATEGIES:
            run = result.runs(name)[place]
            step = int(run.history["step"][-1])
            assert run.ended == (run.model is not None) == (run.note == "") and not run.failed
            if not run.ended:
                assert run.note == (f"interrupted after step {step}" if step else "interrupted before the first step")
                assert run.note in shown and name in shown
            found.append(run.note or "ended")
    return found


class Press(Callback):
    """Sends Ctrl-C, or raises KeyboardInterrupt, at an event of the run of some seed and strategy."""

    presses = 0  # of all runs, which have copies of the callback

    def __init__(self, event: str, step: int, times: int, label: str) -> None:
        self.event, self.step, self.times, self.label = event, step, times, label
        Press.presses = 0

    def _heard(self, event: str, run: Any) -> None:
        if (event, run.done, run.label) != (self.event, self.step, self.label) or Press.presses:
            return
        for _ in range(self.times):
            Press.presses += 1
            os.kill(os.getpid(), signal.SIGINT)
        if not self.times:
            Press.presses = 1
            raise KeyboardInterrupt

    on_start, on_step, on_evaluation, on_end = (
        (lambda self, run, event=event: self._heard(event, run))
        for event in ("on_start", "on_step", "on_evaluation", "on_end")
    )


AFTER = "interrupted after step {}"
BEFORE = "interrupted before the first step"
MOMENTS = [("on_start", 0), ("on_step", 1), ("on_evaluation", 2), ("on_step", STEPS), ("on_end", STEPS)]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("event", "step"), MOMENTS)
def test_one_press_completes_the_step_and_a_second_ends_it(event: str, step: int, together: bool) -> None:
    for presses in (0, 1, 2) if event == "on_evaluation" else (1, 2):
        found = outcomes(compared(callbacks=[Press(event, step, presses, "FedAvg, seed 3")], together=together))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        reached = AFTER.format(step) if step > 0 else BEFORE
        if presses < 2:
            how = "ended" if step == STEPS else AFTER.format(max(step, 1))
            assert found == (4 * [how] if together else ["ended", how, BEFORE, BEFORE])
        elif not together:
            assert found == ["ended", reached, BEFORE, BEFORE]
        elif event == "on_end":  # of the run that is before it, all callbacks know that it has ended
            assert found == ["ended", reached, reached, reached]
        else:  # all rows of a step are recorded before callbacks hear of any
            assert found == 4 * [reached]


def test_a_press_before_the_next_group_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, before = [], race.prepare

    def press(runs: Any, device: Any, interrupt: Any = None, **given: Any) -> Any:
        prepared.extend(runs if interrupt else ())  # without it, to find errors early
        if len(prepared) == 2:
            raise KeyboardInterrupt
        return before(runs, device, interrupt, **given)

    monkeypatch.setattr(race, "prepare", press)
    assert outcomes(compared(together=False)) == ["ended", BEFORE, BEFORE, BEFORE]


def test_a_press_in_the_last_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    from vsim.runs.acts import measure

    measured = measure.validate

    def validate(runs: Any) -> Any:
        if runs[0].done == STEPS:
            raise KeyboardInterrupt
        return measured(runs)

    monkeypatch.setattr(measure, "validate", validate)
    assert outcomes(compared()) == 4 * [AFTER.format(STEPS - 1)]
    assert outcomes(compared(together=False)) == [AFTER.format(STEPS - 1), BEFORE, BEFORE, BEFORE]


def test_a_press_after_the_last_step_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vsim.Trainer.config

    def press(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(vsim.Trainer, "config", config)
        return config(*args)

    monkeypatch.setattr(vsim.Trainer, "config", press)
    assert outcomes(compared()) == 4 * ["ended"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Moment:
    """Raises KeyboardInterrupt when vsim calls its n-th function while the runs train, as a second Ctrl-C would."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/vsim/" in file and not file.endswith("interrupt.py"):
            self.count += 1
            if self.count == self.number:
                raise KeyboardInterrupt

    def around(self, train: Any) -> Any:
        def run(*args: Any) -> None:
            sys.setprofile(self)
            try:
                train(*args)
            finally:
                sys.setprofile(None)

        return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a generator that is closed
@pytest.mark.parametrize("together", [True, False])
def test_any_moment(together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is missing, and what is saved resumes as if it had not been interrupted."""
    train, straight = Race.train_here, compared(together=together)
    never = _Moment(0)
    monkeypatch.setattr(Race, "train_here", never.around(train))
    compared(together=together, save_dir=tmp_path / "whole")
    stream = torch.Generator().manual_seed(int(together))
    moments = torch.randint(1, never.count, (3 if together else 1,), generator=stream).tolist()
    # At the end there are more kinds of moments.
    for number in [*moments, *range(never.count - 60, never.count, 30)]:
        moment, folder = _Moment(number), tmp_path / str(number)
        monkeypatch.setattr(Race, "train_here", moment.around(train))
        try:
            found = outcomes(compared(together=together, save_dir=folder, checkpoint_interval=2))
        except KeyboardInterrupt:  # raised where no run trains any more, or none trains yet
            found = []
        monkeypatch.setattr(Race, "train_here", train)
        resumed = compared(together=together, save_dir=folder, resume=True)
        assert outcomes(resumed) == 4 * ["ended"], (number, found)
        for name, one in straight.items():
            # Runs that were behind were computed without the others' rows.
            np.testing.assert_allclose(one.history.node_losses, resumed[name].history.node_losses, rtol=1e-5)


def test_a_run_that_is_not_concluded_is_not_saved_as_ended(tmp_path: Path) -> None:
    press = Press("on_step", STEPS, 2, "FedAvg, seed 3")
    found = outcomes(compared(callbacks=[press], together=False, save_dir=tmp_path))
    assert found == ["ended", AFTER.format(STEPS), BEFORE, BEFORE]
    assert [path.parent.name for path in sorted(tmp_path.glob("*/end.json"))] == ["AllReduce,_seed_3"]
    assert outcomes(compared(together=False, save_dir=tmp_path, resume=True)) == 4 * ["ended"]


# What a comparison shows ----------------------------------------------------------------------------------------------


def interrupted_in(what: str, **options: Any) -> Comparison:
    """FedAvg has not begun at all, or not with the second seed; or no run has begun."""
    press = {
        "the first run": Press("on_step", STEPS, 1, "AllReduce, seed 3"),
        "the first seed": Press("on_step", STEPS, 1, "FedAvg, seed 3"),
        "no run": Press("on_start", 0, 2, "AllReduce, seed 3"),
    }[what]
    return compared(callbacks=[press], together=False, **options)


@pytest.mark.parametrize("what", ["the first run", "the first seed", "no run"])
def test_runs_that_have_not_begun_are_shown(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = interrupted_in(what, network="1 Mbit/s", compute=vsim.Compute(1.0, dollars_per_hour=2.0))
    last = result.runs("FedAvg")[1]
    assert last.note == BEFORE and last.history["step"].tolist() == [0] and len(last.ledger) == 0
    rows = {row["strategy"]: row for row in result.rows(loss=100.0).to_dict("records")}
    for name, row in rows.items():
        begun = any(run.ended for run in result.runs(name))
        for column in ("hours", "dollars", "utilization"):
            assert math.isnan(row[column]) != begun
        assert BEFORE in row["note"]
    result.to_json(tmp_path / "comparison.json")
    again = Comparison.from_json(tmp_path / "comparison.json")
    for name in result:
        assert [run.note for run in again.runs(name)] == [run.note for run in result.runs(name)]
    assert main(["show", str(tmp_path)]) == 0
    assert BEFORE in capsys.readouterr().out
    result.report(tmp_path / "report.html")
    result.figure(x="time")
    for cost in ("wire", "time", "cost"):
        front = result.pareto(cost).frame.set_index("strategy")
        assert math.isnan(front.loc["FedAvg", "loss"]) == (what != "the first seed")
    if what == "no run":
        with pytest.raises(ValueError, match=BEFORE):
            result.best()
    else:
        assert result.best() in ("AllReduce", "FedAvg")
        assert result.best(within={"time": "1 h"}) in ("AllReduce", "FedAvg")
        ours, theirs = result.differences(to="AllReduce").set_index("strategy")["seeds"], result.runs("AllReduce")
        assert ours["FedAvg"] == (1 if what == "the first seed" else 0) and theirs[0].ended


def test_they_train_when_the_comparison_is_extended_or_resumed(tmp_path: Path) -> None:
    straight = compared(together=False)
    first = interrupted_in("the first seed", save_dir=tmp_path)
    for result in (compared(extend=first), compared(save_dir=tmp_path, resume=True, together=False)):
        assert outcomes(result)[2:] == ["ended", "ended"]
        for name, one in straight.items():
            assert (one.history.node_losses == result[name].history.node_losses).all()
    both = first | interrupted_in("no run")
    assert [run.note for run in both.runs("FedAvg")] == ["", BEFORE]


def test_a_map_says_after_which_step_a_run_was_interrupted() -> None:
    options = {key: value for key, value in OPTIONS.items() if key not in ("strategies", "seeds")}
    data = vectors()
    press = Press("on_step", 2, 1, "FedAvg H=2, lr=0.1")
    result = vsim.sweep(
        *(small_mlp(), data, data),
        **{**options, "strategy": FedAvgStrategy, "settings": {"H": [1, 2], "lr": [0.1, 0.2]}},
        **{"callbacks": [press], "together": False},
    )
    notes = {name: result[name].note for name in result}
    assert list(notes.values()) == ["", "", AFTER.format(2), BEFORE], notes
    texts = [text.get_text().partition("\n") for text in result.heatmap("H", "lr").texts]
    assert sorted(below for _, _, below in texts) == ["", "", "", "step 2"]  # in a cell, below the loss
    assert sum(above == "step 0" for above, _, _ in texts) == 1  # which has no loss


@pytest.mark.parametrize(("step", "times"), [(2, 1), (2, 2), (8, 1)])
def test_halving(step: int, times: int, tmp_path: Path) -> None:
    """Rungs are after steps 2 and 4, and leave 2 and 1 of 4 settings."""
    options = {key: value for key, value in OPTIONS.items() if key not in ("strategies", "seeds")}
    data = vectors()
    options |= {"strategy": FedAvgStrategy, "settings": {"lr": [0.01, 0.1, 0.2, 0.3]}, "halving": 2, "max_steps": 8}

    def sweep(**more: Any) -> Comparison:
        return vsim.sweep(small_mlp(), data, data, **options, **more)

    straight = sweep()
    best = straight.best()
    result = sweep(callbacks=[Press("on_step", step, times, str(best))], save_dir=tmp_path, checkpoint_interval=1)
    assert list(result) == list(straight)
    for name, run in result.items():
        assert run.ended == (run.model is not None)
        if run.stopped_at is not None and run.stopped_at < step:
            assert run.note == straight[name].note == AFTER.replace("interrupted", "stopped").format(run.stopped_at)
        elif step == 8 and times == 1:
            assert name == best and run.ended
        else:
            last = int(run.history["step"][-1])
            assert run.note == AFTER.format(last) and last in (step - 1, step)
    resumed = sweep(save_dir=tmp_path, resume=True)
    for name, run in straight.items():
        assert resumed[name].note == run.note and (run.history.node_losses == resumed[name].history.node_losses).all()


def test_a_press_in_the_last_step_of_tuning_ends_the_comparison() -> None:
    def press(run: Any) -> None:
        if run.done == STEPS:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="while tuning"):
        compared(tune={"lr": [0.01, 0.1]}, callbacks=[press])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
def test_a_press_in_the_last_step_of_processes(together: bool) -> None:
    pressed: list[int] = []

    def press(step: int, loss: float) -> None:
        if step == STEPS and not pressed:
            pressed.append(step)
            os.kill(os.getpid(), signal.SIGINT)

    found = outcomes(compared(train_loss_hook=press, together=together, **IN_PROCESSES))
    ended = found.index(BEFORE) if BEFORE in found else len(found)  # the processes may be in the next run already
    assert found[:1] == ["ended"] and found[ended:] == (len(found) - ended) * [BEFORE]
    assert all(one == "ended" or one.startswith("interrupted after step") for one in found[:ended])
    if together:
        assert found == 4 * ["ended"]


def test_a_second_press_while_processes_train_keeps_the_comparison() -> None:
    def press(step: int, loss: float) -> None:
        if step == 2:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    found = outcomes(compared(train_loss_hook=press, **IN_PROCESSES))
    assert found and set(found) <= {AFTER.format(1), AFTER.format(2)}


class Fails(Callback):
    def on_step(self, run: Any) -> None:
        if run.done == 2 and run.label == "FedAvg, seed 3":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*was ended by signal 9:UserWarning")
def test_runs_that_ended_before_a_process_died_keep_their_models() -> None:
    result = compared(callbacks=[Fails()], together=False, **IN_PROCESSES)
    runs = [result.runs(name)[place] for place in range(2) for name in STRATEGIES]
    assert [run.ended for run in runs] == [run.model is not None for run in runs] == [True, False, False, False]
    assert all("signal 9" in run.failure for run in runs[1:])
    assert [run.history["step"][-1] for run in runs[2:]] == [0, 0]
