"""Runs that are killed, or interrupted by Ctrl-C, before every act of every step: they resume to the bit."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cut_runs import assert_same_comparison, assert_same_run
from reference_cluster import images, small_cnn, small_mlp, vectors

import vsim
from vsim.runs import fit as training
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, ScaffoldStrategy

STEPS, ACTS = 6, 17
OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": STEPS, "batch_size": 3, "val_interval": 2, "progress": False}
JOINS = vsim.Schedule({0: [0, 1], 2: [0, 1, 2], 4: [1, 2]})
Train = Callable[..., Any]  # f(folder, resume=…)


def fit(folder: Path, strategy: Any, **options: Any) -> vsim.Trainer:
    trainer = vsim.Trainer(small_cnn(), images(), images(7, seed=1))
    given = {**OPTIONS, "checkpoint_interval": 2, "save_dir": folder / "run", "test_dataset": images(5), **options}
    trainer.final = trainer.fit(strategy=strategy, **given)  # type: ignore[attr-defined]
    return trainer


def halved(folder: Path, **options: Any) -> vsim.Sweep:
    """Three settings, of which two continue after step 2 and one after step 3, in two groups."""
    settings = {"lr": [1e-1, 1e-3], "batch_size": [2, 3], "H": 2}
    given = {**OPTIONS, "max_steps": 6, "halving": 2, "checkpoint_interval": 2, "save_dir": folder / "run", **options}
    del given["batch_size"]
    return vsim.sweep(small_mlp(), vectors(), vectors(6), strategy=FedAvgStrategy, settings=settings, **given)


TRAINED: dict[str, tuple[Train, Callable[[Any, Any], None]]] = {
    "a run": (lambda folder, **more: fit(folder, DiLoCoStrategy(H=2, lr=1e-2), **more), assert_same_run),
    "nodes come and go": (
        lambda folder, **more: fit(folder, DiLoCoStrategy(H=2, lr=1e-2), participation=JOINS, **more),
        assert_same_run,
    ),
    "clients": (
        lambda folder, **more: fit(
            folder,
            ScaffoldStrategy(H=3, lr=1e-2),
            participation=vsim.Sample(3, of=5, store=folder / "clients"),
            **more,
        ),
        assert_same_run,
    ),
    "halving": (halved, assert_same_comparison),
}


@contextmanager
def before_acts(do: Callable[[int, int], None]) -> Iterator[None]:
    """Call do(step, number of the act) before every act of every step."""
    begin = training.begin

    def watched(groups: Any, orders: Any) -> None:
        assert len(orders.after_a_step) == ACTS
        orders.after_a_step = [around(number, act) for number, act in enumerate(orders.after_a_step)]
        begin(groups, orders)

    def around(number: int, act: Any) -> Any:
        def acts(moment: Any) -> None:
            do(moment.number, number)
            act(moment)

        return acts

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*interrupted", UserWarning)
        patch.setattr(training, "begin", watched)
        yield


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def content(folder: Path) -> str:
    """A digest of all files; locks and times do not count."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_killed_before_every_act(name: str, tmp_path: Path) -> None:
    """A copy of the folder is what a process leaves that is killed there; equal folders are resumed once."""
    train, assert_same = TRAINED[name]
    live, copies, moments = tmp_path / "live", dict[str, Path](), list[tuple[int, int]]()

    def copied(step: int, number: int) -> None:
        moments.append((step, number))
        if (live / "run").exists() and (digest := content(live)) not in copies:
            copies[digest] = tmp_path / f"step {step}, act {number}"
            shutil.copytree(live, copies[digest])

    with before_acts(copied):
        straight = train(live)
    assert len(moments) == STEPS * ACTS and len(copies) >= 3
    for folder in copies.values():
        assert_same(train(folder, resume="auto" if name == "halving" else bool([*folder.glob("run/step-*")])), straight)


# Every act at a step with a checkpoint and a rung, and at one without or the last: 204 in all.
PRESSES = [(number, step) for number in range(ACTS) for step in (2, (3, STEPS)[number % 2])]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", TRAINED)
def test_ctrl_c_before_every_act(name: str, times: int, tmp_path: Path) -> None:
    """The step is completed; pressed again, the last file counts. Either way the run resumes to the bit."""
    train, assert_same = TRAINED[name]
    straight = train(tmp_path / "straight")
    for act, at in PRESSES if times == 1 else PRESSES[::-2]:
        folder, pressed = tmp_path / f"act {act}, step {at}", list[int]()

        def press(step: int, number: int, act: int = act, at: int = at, pressed: list[int] = pressed) -> None:
            if (step, number) == (at, act) and not pressed:
                pressed.append(step)
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)

        with before_acts(press):
            try:
                train(folder)
            except KeyboardInterrupt:
                assert pressed
        resumes: bool | str = bool([*folder.glob("run/step-*")]) if name != "halving" else "auto"
        assert pressed or at == STEPS
        assert_same(train(folder, resume=resumes), straight)
