"""Errors in a step in which Ctrl-C was pressed: no run gets them as its outcome, and all resume to the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cut_runs import assert_same_comparison, assert_same_record
from reference_cluster import small_mlp, vectors
from test_ensemble import quietly
from torch import Tensor, nn
from torch.utils.data import Dataset

import vsim
from vsim import Callback, load_checkpoint
from vsim.checkpoint.folder import checkpoints_in, step_of
from vsim.core.run import Diverged
from vsim.runs.view import RunView
from vsim.strategy import FedAvgStrategy, Strategy

STEP = 3  # in which it happens
OPTIONS: dict[str, Any] = {
    **{"num_nodes": 2, "max_steps": 5, "batch_size": 4, "val_interval": 1, "checkpoint_interval": 1},
    **{"progress": False, "deterministic": True},
}


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def fails_once_asked() -> None:
    press()
    raise RuntimeError("out of memory")


def turns_a_second_press_into_an_error() -> None:
    press()
    try:
        press()
    except KeyboardInterrupt as error:
        raise RuntimeError("trying to pop from empty mode stack") from error


def turns_a_second_press_into_numbers() -> None:
    press()
    try:
        press()
    except KeyboardInterrupt as error:
        raise FloatingPointError("not finite") from error


def swallows_a_second_press() -> None:
    press()
    try:
        press()
    except BaseException:
        return


def is_ended_by_a_second_press() -> None:
    press()
    press()


class Event:
    """What happens once, at a place of a run's step."""

    place, happens = "", staticmethod(press)
    armed = False

    @classmethod
    def at(cls, place: str) -> None:
        if cls.armed and place == cls.place:
            cls.armed = False
            cls.happens()


class Arms(Callback):
    def on_step(self, run: RunView) -> None:
        if not isinstance(run.strategy, Sends):
            return
        if run.done == STEP - 1:
            Event.armed = bool(Event.place)
        elif run.done == STEP:
            Event.at("callback")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = small_mlp(0.1).layers

    def forward(self, x: Tensor) -> Tensor:
        Event.at("model" if self.training else "validation")
        out: Tensor = self.layers(x)
        return out


def loss(output: Tensor, labels: Tensor) -> Tensor:
    Event.at("loss")
    return nn.functional.cross_entropy(output, labels)


class Sends(FedAvgStrategy):
    def advance(self) -> None:
        Event.at("strategy")
        super().advance()


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return 29

    def __getitem__(self, i: int) -> Any:
        Event.at("data")
        return vectors()[i]


def hook(step: int, _: float) -> None:
    if step == STEP:
        Event.at("hook")


STRATEGIES: dict[str, Strategy] = {"AllReduce": Strategy(lr=1e-2), "FedAvg": Sends(H=2, lr=1e-2)}
PLACES = ["model", "loss", "data", "strategy", "hook", "callback", "validation"]
HAPPENS = [
    fails_once_asked,
    turns_a_second_press_into_an_error,
    turns_a_second_press_into_numbers,
    swallows_a_second_press,
    is_ended_by_a_second_press,
]
QUICK = [("strategy", fails_once_asked), *zip(PLACES, [*HAPPENS, *HAPPENS], strict=False)]
CASES = pytest.mark.parametrize(
    ("place", "happens"),
    [
        pytest.param(place, happens, marks=[] if (place, happens) in QUICK else pytest.mark.slow)
        for place in PLACES
        for happens in HAPPENS
    ],
)


@pytest.fixture(autouse=True)
def nothing_happens_later() -> Iterator[None]:
    yield
    Event.place, Event.armed = "", False


def happening(place: str, happens: Callable[[], None], train: Callable[..., Any], **options: Any) -> Any:
    Event.place, Event.happens = place, staticmethod(happens)
    try:
        with quietly():
            return train(**options)
    finally:
        assert not Event.armed  # it happened
        Event.place = ""


def compared(**options: Any) -> vsim.Comparison:
    given = {**OPTIONS, "strategies": STRATEGIES, "train_loss_hook": hook, "callbacks": [Arms()], **options}
    return vsim.compare(Model(), Data(), vectors(), loss_fn=loss, **given)


def fit(**options: Any) -> vsim.Trainer:
    trainer = vsim.Trainer(Model(), Data(), vectors(), loss_fn=loss)
    given = {**OPTIONS, "strategy": Sends(H=2, lr=1e-2), "train_loss_hook": hook, "callbacks": [Arms()], **options}
    trainer.fit(**given)
    return trainer


@cache
def uncut() -> vsim.Comparison:
    with quietly():
        return compared(checkpoint_interval=None)


def assert_nothing_is_recorded(result: vsim.Comparison, folder: Path) -> None:
    """The runs are at the step that was completed, or at the one before, and can be resumed from where they are."""
    assert not [*folder.glob("*/end.json")]
    for name, run in result.items():
        assert re.fullmatch(f"interrupted after step [{STEP - 1}{STEP}]", run.note) and run.error is None, run.note
        newest = step_of(checkpoints_in(folder / name)[-1])
        assert STEP - 1 <= newest <= run.history["step"][-1]


@CASES
def test_no_run_of_a_comparison_gets_the_error(place: str, happens: Callable[[], None], tmp_path: Path) -> None:
    result = happening(place, happens, compared, save_dir=tmp_path)
    assert_nothing_is_recorded(result, tmp_path)
    if happens is fails_once_asked and place in ("strategy", "callback"):  # the others complete the step
        assert load_checkpoint(tmp_path / "AllReduce").step == STEP
        assert load_checkpoint(tmp_path / "FedAvg").step == STEP - 1
    assert_same_comparison(compared(save_dir=tmp_path, resume=True), uncut())


@pytest.mark.parametrize("happens", HAPPENS[1:])
def test_a_vectorized_step_does_not_go_on_in_the_loop(happens: Callable[[], None], tmp_path: Path) -> None:
    result = happening("model", happens, compared, save_dir=tmp_path, deterministic=False)
    assert_nothing_is_recorded(result, tmp_path)
    assert {step_of(checkpoints_in(tmp_path / name)[-1]) for name in result} == {STEP - 1}


@CASES
def test_a_fit_is_interrupted(place: str, happens: Callable[[], None], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        happening(place, happens, fit, save_dir=tmp_path)
    if happens is fails_once_asked:
        assert "out of memory" in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)
    assert load_checkpoint(tmp_path).step == STEP - 1
    assert_same_record(fit(save_dir=tmp_path, resume=True).history, uncut()["FedAvg"].history)


def test_what_failed_before_the_request_stays_failed(tmp_path: Path) -> None:
    """And a loss that is not finite is one, whoever has asked to stop."""

    def not_finite() -> None:
        press()
        raise Diverged(f"non-finite loss at step {STEP}", STEP)

    result = happening("strategy", not_finite, compared, save_dir=tmp_path)
    assert result["FedAvg"].diverged_at == STEP and result["AllReduce"].note == f"interrupted after step {STEP}"
    assert [path.parent.name for path in tmp_path.glob("*/end.json")] == ["FedAvg"]

    def fails() -> None:
        raise RuntimeError("broken")

    class Presses(Callback):
        def on_step(self, run: RunView) -> None:
            if run.done == STEP + 1:
                press()

    folder = tmp_path / "failed"
    result = happening("strategy", fails, compared, save_dir=folder, callbacks=[Arms(), Presses()])
    assert "broken" in result["FedAvg"].failure
    assert result["AllReduce"].note == f"interrupted after step {STEP + 1}"
    assert [path.parent.name for path in folder.glob("*/end.json")] == ["FedAvg"]


# In processes ---------------------------------------------------------------------------------------------------------


class Asks(Callback):
    """Asks to stop after a step, in the first process."""

    def on_step(self, run: RunView) -> None:
        if run.done == STEP - 1 and 0 in run.cluster.collectives.nodes:
            raise KeyboardInterrupt


class FailsOnTheLastNode(FedAvgStrategy):
    def advance(self) -> None:
        if self.cluster.step == STEP and 1 in self.cluster.replicas.nodes and Path(self.name).exists():
            raise RuntimeError("out of memory")
        super().advance()


@pytest.mark.slow
def test_a_request_in_one_process_counts_for_an_error_in_another(tmp_path: Path) -> None:
    (flag := tmp_path / "fails").touch()
    strategy = FailsOnTheLastNode(H=2, lr=1e-2)
    strategy.name = str(flag)
    processes = {"backend": "process", "num_processes": 2, "threads_per_process": 1, "save_dir": tmp_path / "run"}
    options = {**OPTIONS, **processes, "strategies": {"one": strategy, "two": Strategy(lr=1e-2)}}

    def trained(**more: Any) -> vsim.Comparison:
        with quietly():
            return vsim.compare(small_mlp(0.1), vectors(), vectors(), **{**options, **more})

    result = trained(callbacks=[Asks()])
    assert {run.note for run in result.values()} == {f"interrupted after step {STEP - 1}"}
    assert not [*(tmp_path / "run").glob("*/end.json")]
    flag.unlink()
    assert_same_comparison(trained(resume=True), trained(save_dir=None, checkpoint_interval=None))


# Presses of a keyboard ------------------------------------------------------------------------------------------------

SCRIPT = f"""
import sys, vsim, warnings
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_interrupted_errors import pressed
warnings.simplefilter("ignore")
pressed(sys.argv[1])
"""


class Slow(Data):
    """As slow as files that are read, so that a press often comes while the workers load."""

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.002)
        return vectors()[i]


def of_workers(**options: Any) -> vsim.Comparison:
    given = {**OPTIONS, "strategies": STRATEGIES, "max_steps": 40, "val_interval": None, **options}
    with quietly():
        return vsim.compare(small_mlp(), Slow(), dataloader_kwargs={"num_workers": 1}, **given)


def pressed(folder: str) -> None:
    """Train, say that it trains, and say how the runs ended."""
    result = of_workers(save_dir=folder, train_loss_hook=lambda step, _: print(step, flush=True))
    for run in result.values():
        print(run.note)


@pytest.mark.slow
@pytest.mark.parametrize("after", [(), (0.0,), (0.01,)], ids=["one", "two at once", "two"])
def test_presses_that_reach_all_processes_of_a_terminal(after: tuple[float, ...], tmp_path: Path) -> None:
    """A single one completes the step although the workers of a DataLoader hear it, too."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        while process.stdout.readline() not in ("3\n", ""):
            pass
        for seconds in (0.0, *after):
            time.sleep(seconds)
            os.killpg(process.pid, signal.SIGINT)
        *steps, first, second = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert re.fullmatch(r"interrupted after step \d+", first) and re.fullmatch(r"interrupted after step \d+", second)
    if not after:
        assert first == second == f"interrupted after step {steps[-1]}"
    assert not [*(tmp_path / "run").glob("*/end.json")]
    resumed = of_workers(save_dir=tmp_path / "run", resume=True)
    assert_same_comparison(resumed, of_workers(checkpoint_interval=None))


# Ends that files keep -------------------------------------------------------------------------------------------------


class Ends(vsim.Callback):
    """Raises an error without a message, or stops, or presses Ctrl-C."""

    def __init__(self, what: str, event: str, step: int, label: str) -> None:
        self.what, self.event, self.step, self.label = what, event, step, label

    def _heard(self, event: str, run: Any) -> None:
        if (event, run.done) != (self.event, self.step) or self.label not in run.label:
            return
        if self.what == "fails":
            raise AssertionError
        if self.what == "stops":
            run.stop()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    def on_start(self, run: Any) -> None:
        self._heard("on_start", run)

    def on_step(self, run: Any) -> None:
        self._heard("on_step", run)


@pytest.mark.parametrize(("event", "together"), [("on_step", True), ("on_start", False)])
def test_an_error_without_a_message_ends_a_run_for_good(event: str, together: bool, tmp_path: Path) -> None:
    """Also one without a row, which in a later part ends that run only."""
    strategies = {"first": FedAvgStrategy(H=2, lr=1e-2), "second": FedAvgStrategy(H=3, lr=1e-2)}
    options: dict[str, Any] = {"strategies": strategies, "num_nodes": 2, "max_steps": 4, "batch_size": 4}
    options |= {"progress": False, "together": together, "save_dir": tmp_path / "all"}
    step = 2 if event == "on_step" else 0
    for resume in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            ends = Ends("fails", event, step, "second")
            found = vsim.compare(small_mlp(), vectors(), callbacks=[ends], resume=resume, **options)
        assert found["first"].ended and "AssertionError" in found["second"].failure
        assert found["second"].history["step"][-1] == step


def test_a_rung_is_decided_after_a_resume_though_a_run_had_ended_before(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 8, "batch_size": 4, "progress": False, "halving": 2}
    options |= {"strategy": FedAvgStrategy, "settings": {"H": 2, "lr": [1e-1, 1e-2, 1e-4, 1e-5]}}

    def swept(*callbacks: Ends, **more: Any) -> vsim.Sweep:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return vsim.sweep(small_mlp(), vectors(), vectors(6), callbacks=[*callbacks], **options, **more)

    early = Ends("stops", "on_step", 1, "lr=0.1")
    straight = swept(early)
    swept(early, Ends("presses", "on_step", 2, "lr=1e-05"), save_dir=tmp_path / "all")
    assert_same_comparison(swept(early, save_dir=tmp_path / "all", resume=True), straight)
