"""Ctrl-C: the step is completed, the run is kept, and resumes bitwise as if it had not been interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from resumed import ADAMW, PROCESSES, assert_same_run, fit, hybrid, train_on, trainer_of, weights

from vsim import CheckpointError, load_checkpoint
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy, SPARTAStrategy, Strategy
from vsim.training.interrupt import Interrupt, Interrupted
from vsim.training.run import Run


def strategy() -> Strategy:
    return SPARTAStrategy(p_sparta=0.2, async_delay=2, optim_spec=ADAMW, lr_scheduler="cosine")


class Press:
    """Sends Ctrl-C to this process in the middle of a step."""

    def __init__(self, step: int, times: int = 1) -> None:
        self.step, self.times = step, times

    def __call__(self, run: Run) -> None:
        if run.cluster.step == self.step and run.interrupt.requested is False:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("step", [1, 7, 14])
def test_an_interrupted_run_goes_on_in_memory(step: int) -> None:
    straight = fit(strategy())
    trainer = trainer_of()
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(strategy(), trainer, callbacks=[Press(step)])
    assert type(caught.value) is Interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(trainer.history) == step + 1 and trainer.history["step"][-1] == step
    assert max((event.step for event in trainer.ledger), default=0) <= step
    torch.rand(3)  # what the process draws meanwhile is its own
    state = torch.random.get_rng_state()
    fit(strategy(), trainer, resume=True)
    assert_same_run(trainer, straight)
    assert torch.equal(state, torch.random.get_rng_state())


def test_several_interrupts_and_a_longer_run() -> None:
    trainer = trainer_of()
    for step in (3, 4, 9):
        options = {"resume": len(trainer.history) > 0, "callbacks": [Press(step)]}
        with pytest.raises(KeyboardInterrupt):
            fit(DiLoCoStrategy(H=4, optim_spec=ADAMW), trainer, **options)
    fit(DiLoCoStrategy(H=4, optim_spec=ADAMW), trainer, resume=True, max_steps=12)
    fit(DiLoCoStrategy(H=4, optim_spec=ADAMW), trainer, resume=True, max_steps=14)
    assert torch.equal(weights(trainer), weights(fit(DiLoCoStrategy(H=4, optim_spec=ADAMW))))


def test_an_interrupt_saves_where_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(strategy(), save_dir=tmp_path, callbacks=[Press(8)])
    assert load_checkpoint(tmp_path).step == 8
    assert_same_run(fit(strategy(), save_dir=tmp_path, resume=True), fit(strategy()))


class PressTwice(Strategy):
    """Ctrl-C twice, before the optimizer's step."""

    def step(self) -> None:
        if self.cluster.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        super().step()


def test_a_second_one_raises_at_once_and_the_torn_state_is_not_resumed() -> None:
    trainer = trainer_of()
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(PressTwice(), trainer)
    assert type(caught.value) is KeyboardInterrupt and len(trainer.history) == 5
    with pytest.raises(CheckpointError, match="stopped in the middle of step 5, so that nothing whole is left of it"):
        fit(PressTwice(), trainer, resume=True)
    assert len(trainer.history) == 5  # still


def test_a_run_that_failed_is_not_resumed() -> None:
    trainer = trainer_of()
    with pytest.raises(FloatingPointError):
        fit(Strategy(optim_spec="sgd", lr=1e30), trainer)
    with pytest.raises(CheckpointError, match="stopped in the middle of step"):
        fit(Strategy(optim_spec="sgd", lr=1e30), trainer, resume=True)


def test_a_hook_may_stop_a_run_that_goes_on_later() -> None:
    class Enough(Exception):
        pass

    def stop(step: int, loss: float) -> None:
        if step == 6:
            raise Enough

    trainer = trainer_of()
    with pytest.raises(Enough):
        fit(SimpleReduceStrategy(), trainer, train_loss_hook=stop, val_interval=None)
    fit(SimpleReduceStrategy(), trainer, resume=True, val_interval=None)
    assert_same_run(trainer, fit(SimpleReduceStrategy(), val_interval=None))


def test_handlers_of_others_and_other_threads_are_left_alone() -> None:
    presses: list[int] = []

    def own(number: int, frame: Any) -> None:
        presses.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        fit(strategy(), max_steps=4, callbacks=[Press(3)])
        assert presses == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    seen: list[bool] = []

    def elsewhere() -> None:
        with Interrupt() as interrupt:
            seen.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler and not interrupt.requested)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True]


def press_at(step: int) -> Any:
    def hook(now: int, loss: float) -> None:
        if now == step:
            os.kill(os.getpid(), signal.SIGINT)

    return hook


def slowly(run: Run) -> None:
    """So that the processes do not run far ahead of what is heard here."""
    time.sleep(0.05)


@pytest.mark.slow
def test_processes_stop_together_and_go_on(tmp_path: Path) -> None:
    straight = fit(strategy(), **PROCESSES)
    trainer = trainer_of()
    with pytest.raises(KeyboardInterrupt):
        fit(strategy(), trainer, train_loss_hook=press_at(2), callbacks=[slowly], **PROCESSES)
    done = int(trainer.history["step"][-1])
    assert 2 <= done < 14 and len(trainer.history) == done + 1
    fit(strategy(), trainer, resume=True, **PROCESSES)
    assert_same_run(trainer, straight)
    with pytest.raises(CheckpointError, match="there is none in memory"):
        fit(strategy(), trainer, resume=True, **PROCESSES)  # what processes had at the end is gone with them


@pytest.mark.slow
def test_processes_save_when_they_are_interrupted(tmp_path: Path) -> None:
    trainer = trainer_of()
    options = {"train_loss_hook": press_at(2), "callbacks": [slowly], "save_dir": tmp_path, **PROCESSES}
    with pytest.raises(KeyboardInterrupt):
        fit(strategy(), trainer, **options)
    assert load_checkpoint(tmp_path).step == trainer.history["step"][-1]
    resumed = fit(
        strategy(), save_dir=tmp_path, resume=True, **{**PROCESSES, "backend": "stacked", "threads_per_process": None}
    )
    assert_same_run(resumed, fit(strategy(), deterministic=True))


# Killed --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_thirty_random_moments(tmp_path: Path) -> None:
    steps, folder = 600, tmp_path / "run"
    stream = torch.Generator().manual_seed(11)
    for _ in range(30):
        before = _progress(folder)
        process = forked.started(train_on, folder, steps)
        while process.is_alive() and _progress(folder) == before:  # until it trains
            time.sleep(0.005)
        time.sleep(float(torch.rand((), generator=stream)) * 0.25)
        assert load_checkpoint(folder).step >= before
        process.kill()
        assert forked.ended(process) == -signal.SIGKILL  # long before its end
        assert load_checkpoint(folder).step >= before  # without a warning: none is torn
    assert forked.ended(forked.started(train_on, folder, steps)) == 0
    straight = fit(hybrid(), max_steps=steps)
    assert_same_run(fit(hybrid(), max_steps=steps, resume=folder), straight)


def _progress(folder: Path) -> int:
    from vsim.checkpoint.folder import checkpoints_in, step_of

    found = checkpoints_in(folder)
    return step_of(found[-1]) if found else 0
