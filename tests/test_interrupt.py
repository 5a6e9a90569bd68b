"""Ctrl-C: the step is completed, the run is kept, and resumes bitwise as if it had not been interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked_processes
import pytest
import torch
from cut_runs import ADAMW, PROCESSES, assert_same_run, fit, hybrid, train_on, trainer_of, weights
from errors import refused

from vsim import Callback, CheckpointError, load_checkpoint
from vsim.checkpoint.folder import checkpoints_in, step_of
from vsim.core.exchange import exchange
from vsim.runs.interrupt import Interrupt, Interrupted
from vsim.runs.view import RunView
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy, SPARTAStrategy, Strategy


def strategy() -> Strategy:
    return SPARTAStrategy(p_sparta=0.2, async_delay=2, inner_optim=ADAMW, lr_scheduler="cosine")


class Press:
    """Sends Ctrl-C to this process in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def __call__(self, run: RunView) -> None:
        if run.cluster.step == self.step:
            self.step = None
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("step", [7, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 14))])
def test_an_interrupted_run_goes_on_in_memory(step: int) -> None:
    straight, trainer = fit(strategy()), trainer_of()
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
    trainer, own = trainer_of(), DiLoCoStrategy(H=4, inner_optim=ADAMW)
    for step in (3, 4, 9):
        with pytest.raises(KeyboardInterrupt):
            fit(own, trainer, resume=len(trainer.history) > 0, callbacks=[Press(step)])
    for steps in (12, 14):
        fit(own, trainer, resume=True, max_steps=steps)
    assert torch.equal(weights(trainer), weights(fit(own)))


class PressTwice(Strategy):
    """Ctrl-C twice, before the optimizer's step."""

    def step(self) -> None:
        if self.cluster.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        super().step()


@pytest.mark.parametrize(
    ("own", "error"), [(PressTwice(), KeyboardInterrupt), (Strategy(inner_optim="sgd", lr=1e30), FloatingPointError)]
)
def test_a_torn_state_is_not_resumed(own: Strategy, error: type[BaseException]) -> None:
    """Of a second press, which raises at once, or of a run that failed."""
    trainer = trainer_of()
    with pytest.raises(error) as caught:
        fit(own, trainer)
    assert not isinstance(caught.value, Interrupted)
    done = len(trainer.history)
    with refused(CheckpointError, f"stopped in the middle of step {done}", "nothing whole is left"):
        fit(own, trainer, resume=True)
    assert len(trainer.history) == done  # still


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


def test_a_second_press_that_a_metric_swallows_leaves_no_row() -> None:
    """What a metric returns that was interrupted is neither recorded nor shown to callbacks."""
    heard: list[int] = []

    def metric(model: Any, batch: Any) -> float:
        if heard and heard[-1] == 5:
            for _ in range(2):
                with contextlib.suppress(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    trainer = trainer_of()
    with pytest.raises(KeyboardInterrupt):
        fit(Strategy(), trainer, metrics={"m": metric}, callbacks=[lambda run: heard.append(run.done)])
    assert heard[-1] == trainer.history["step"][-1] == 5  # the validation after step 6 was interrupted


def test_the_step_of_an_interrupt_after_an_early_end() -> None:
    class Ends(Callback):
        def on_step(self, run: Any) -> None:
            if run.done == 2:
                run.stop()

        def on_end(self, run: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="interrupted after step 2: "):
        fit(Strategy(), callbacks=[Ends()])


def test_a_process_without_a_node_is_heard() -> None:
    """Of two processes one has both nodes, and the other is asked to stop."""
    sent: list[torch.Tensor] = []

    class Messages:
        ranges = (range(2), range(2, 2))

        def all_rows(self, rows: torch.Tensor, counts: list[int], label: str) -> torch.Tensor:
            assert counts == [3, 1] and label == "losses"
            sent.append(rows)
            return torch.cat(sent[-2:]) if len(sent) > 1 else torch.zeros(4, 3)  # process 0 is called first

    class Held:
        is_alone, cluster = False, SimpleNamespace(collectives=Messages())

        def __init__(self, rows: int) -> None:
            self.present_rows = slice(0, rows)

    for rows, requested in [(2, False), (0, True)]:
        run: Any = Held(rows)
        batch = [torch.ones(rows, 4, 3), torch.ones(rows, 4)]
        found, stops = exchange(torch.tensor([1.0, 2.0])[:rows], batch, {run: [1]}, requested)
    assert stops and found == {run: ([1.0, 2.0], 4, 0)}  # the second node rests


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


def press_at_two(step: int, loss: float) -> None:
    if step == 2:
        os.kill(os.getpid(), signal.SIGINT)


def slowly(run: RunView) -> None:
    """So that the processes do not run far ahead of what is heard here."""
    time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("saves", [False, True])
def test_processes_stop_together_and_go_on(saves: bool, tmp_path: Path) -> None:
    """In memory in processes, from a folder in the simulator."""
    straight, trainer = fit(strategy(), deterministic=True), trainer_of()
    folder: dict[str, Any] = {"save_dir": tmp_path} if saves else {}
    with pytest.raises(KeyboardInterrupt):
        fit(strategy(), trainer, train_loss_hook=press_at_two, callbacks=[slowly], **folder, **PROCESSES)
    done = int(trainer.history["step"][-1])
    assert 2 <= done < 14 and len(trainer.history) == done + 1
    if saves:
        assert load_checkpoint(tmp_path).step == done
        assert_same_run(fit(strategy(), resume=True, deterministic=True, **folder), straight)
        return
    assert_same_run(fit(strategy(), trainer, resume=True, **PROCESSES), straight)
    with refused(CheckpointError, "there is none in memory"):
        fit(strategy(), trainer, resume=True, **PROCESSES)  # what processes had at the end is gone with them


# Killed --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    steps, folder = 300, tmp_path / "run"
    stream = torch.Generator().manual_seed(11)

    def progress() -> int:
        found = checkpoints_in(folder)
        return step_of(found[-1]) if found else 0

    for _ in range(12):
        before = progress()
        process = forked_processes.started(train_on, folder, steps)
        while process.is_alive() and progress() == before:  # until it trains
            time.sleep(0.005)
        time.sleep(float(torch.rand((), generator=stream)) * 0.1)
        assert load_checkpoint(folder).step >= before
        process.kill()
        assert forked_processes.ended(process) == -signal.SIGKILL  # long before its end
        assert load_checkpoint(folder).step >= before  # without a warning: none is torn
    assert forked_processes.ended(forked_processes.started(train_on, folder, steps)) == 0
    assert_same_run(fit(hybrid(), max_steps=steps, resume=folder), fit(hybrid(), max_steps=steps))
