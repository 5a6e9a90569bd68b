"""What goes wrong in a process of several nodes: reported with rank and nodes; nothing is left, and the run resumes."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import torch
import torch.distributed as dist
from separate import vectors
from test_process_faults import (  # noqa: F401 (the fixtures are these tests', too)
    NO_HANG_SECONDS,
    _nothing_is_left,
    fork_server,
    gone_within,
    linux,
    mark,
    processes,
    read_until,
    slowly,
    started,
)
from test_ranges import assert_same_comparison, assert_same_record, in_processes
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

import vsim
from vsim import Callback, Trainer, load_checkpoint
from vsim.models import MLP
from vsim.process import CollectiveFailure, ForkServerFailure, NodeFailure
from vsim.records.comparison import Comparison
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy
from vsim.training.interrupt import Interrupted

pytestmark = pytest.mark.slow

K, STEPS = 4, 6
RANK, HELD = 1, "nodes 2 to 3"  # where faults happen, in two processes
DONE = 3  # steps before a fault


# A run that can fail in many places, as the environment says ----------------------------------------------------------


class OutOfLuck(Exception):
    pass


class Stubborn(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


def _raise(error: BaseException) -> None:
    raise error


def _fill_the_disk() -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    safetensors.numpy.save_file = full


def _kill_later() -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    time.sleep(60)


ACTS: dict[str, Callable[[], Any]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),  # as the kernel does without memory
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "abort": os.abort,
    "_exit": lambda: os._exit(3),
    "_exit 0": lambda: os._exit(0),
    "exit": lambda: sys.exit(0),
    "MemoryError": lambda: torch.empty(2**60),
    "no memory": lambda: _raise(MemoryError("none is left")),
    "exception": lambda: _raise(OutOfLuck("no more")),
    "stubborn": lambda: _raise(Stubborn("as ever")),
    "not finite": lambda: _raise(FloatingPointError("found on one rank only")),
    "sleep": lambda: time.sleep(60),
    "SIGKILL late": _kill_later,
    "full disk": _fill_the_disk,
}


class Now:
    done = 0  # steps of this process


def fault(place: str) -> None:
    """Act here, if this is the place, the process, and the step."""
    there, _, act = os.environ.get("FAULT", "").partition(":")
    rank, done = (int(os.environ.get(name, usual)) for name, usual in (("FAULT_RANK", RANK), ("FAULT_AFTER", DONE)))
    if there == place and dist.is_initialized() and (dist.get_rank(), Now.done) == (rank, done):
        ACTS[act]()


class Counts(Callback):
    """Counts the steps of this process."""

    def on_step(self, run: Any) -> None:
        fault("callback")
        Now.done = run.done


class Model(MLP):
    def __init__(self) -> None:
        super().__init__(12, (16,), 5, dropout=0.2, seed=1)

    def logits(self, x: Tensor) -> Tensor:
        fault("model" if self.training else "validation")
        return super().logits(x)


class Data(Dataset[Any]):
    def __init__(self) -> None:
        self.data = vectors()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        fault("data" if get_worker_info() is None else "worker")
        return self.data[index]


class Own(DiLoCoStrategy):
    def sync(self) -> None:
        fault("strategy")
        super().sync()


def defaults(**options: Any) -> dict[str, Any]:
    run = {"num_nodes": K, "max_steps": STEPS, "batch_size": 4, "val_interval": 2, "deterministic": True}
    return {**run, "progress": False, "callbacks": [Counts()], **options}


def fit(**options: Any) -> Trainer:
    trainer = options.pop("trainer", None) or Trainer(Model(), Data(), vectors(7, 9))
    trainer.final = trainer.fit(strategy=Own(H=2, lr=1e-2), **defaults(**options))
    return trainer


def compared(**options: Any) -> Comparison:
    strategies = {"DiLoCo": Own(H=2, lr=1e-2), "AllReduce": SimpleReduceStrategy(lr=1e-2)}
    return vsim.compare(Model(), Data(), vectors(7, 9), strategies=strategies, **defaults(**options))


@pytest.fixture(scope="module")
def straight() -> Trainer:
    """The run without a fault, in the simulator."""
    return fit()


@pytest.fixture(scope="module")
def straight_comparison() -> Comparison:
    return compared()


@pytest.fixture(autouse=True)
def _no_file_or_thread_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(threading.enumerate())
    yield
    assert [path.name for path in folder.glob("vsim-*")] == []
    assert set(threading.enumerate()) <= before


def assert_same_run(ours: Trainer, theirs: Trainer) -> None:
    assert_same_record(ours.history, theirs.history)
    final = theirs.final.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(t, final[name]) for name, t in ours.final.state_dict().items())  # type: ignore[attr-defined]


# Faults of one process -----------------------------------------------------------------------------------------------

RANK_AND_NODES = f"rank {RANK} ({HELD})"
ENDS = rf"the process of rank {RANK} \({HELD}\) "
FAILS = rf"rank {RANK} \({HELD}\) failed after step \d of the run"
FOUND: dict[str, tuple[type[BaseException], str]] = {
    "SIGKILL": (NodeFailure, ENDS + r"was ended by signal 9 \(SIGKILL\): by hand, or for lack of memory, after step"),
    "SIGSEGV": (NodeFailure, ENDS + r"was ended by signal 11 \(SIGSEGV\), after step 3"),
    "SIGTERM": (NodeFailure, ENDS + r"was ended by signal 15 \(SIGTERM\), after step 3"),
    "abort": (NodeFailure, ENDS + r"was ended by signal 6 \(SIGABRT\), after step 3"),
    "_exit": (NodeFailure, ENDS + "exited with 3, after step 3"),
    "_exit 0": (NodeFailure, ENDS + "exited with 0, after step 3"),
    "exit": (NodeFailure, rf"{FAILS}:(.|\n)*SystemExit"),
    "MemoryError": (RuntimeError, "(?s)not enough memory|allocate|overflow|storage"),
    "no memory": (MemoryError, "none is left"),
    "exception": (OutOfLuck, "no more"),
    "stubborn": (NodeFailure, rf"{FAILS}:(.|\n)*Stubborn: as ever"),
    "not finite": (FloatingPointError, "found on one rank only"),
}
FAULTS = [
    *((place, act) for place in ("model", "data", "strategy", "callback", "validation") for act in ("exception",)),
    *((place, "SIGKILL") for place in ("model", "data", "callback", "validation")),
    *(("strategy", act) for act in FOUND if act != "exception"),
]


@pytest.mark.parametrize(("place", "act"), FAULTS)
def test_a_fault_of_one_process(
    place: str, act: str, straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names rank and nodes, and the run resumes from its checkpoint in any number of processes."""
    monkeypatch.setenv("FAULT", f"{place}:{act}")
    trainer = Trainer(Model(), Data(), vectors(7, 9))
    saved: dict[str, Any] = {"save_dir": tmp_path / "run", "checkpoint_interval": 2}
    kind, message = FOUND[act]
    began = time.monotonic()
    with pytest.raises(kind, match=message) as caught:
        fit(trainer=trainer, **saved, **in_processes(2))
    assert time.monotonic() - began < 2 * NO_HANG_SECONDS
    failure = caught.value if isinstance(caught.value, NodeFailure) else caught.value.__cause__
    assert isinstance(failure, NodeFailure) and failure.rank == RANK
    assert re.search(FAILS if act not in ("SIGKILL", "_exit") else ENDS, str(failure)) or kind is NodeFailure
    assert trainer.history["step"].tolist()[: DONE + 1] == [0, 1, 2, 3] and len(trainer.history) <= DONE + 2
    monkeypatch.delenv("FAULT")
    number = {"exception": 1, "SIGKILL": 3}.get(act)
    resumed = fit(resume=True, **saved, **({} if number is None else in_processes(number)))
    assert_same_run(resumed, straight)


def test_a_process_that_stops_is_named_after_the_time_limit(
    straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "model:SIGSTOP")
    saved: dict[str, Any] = {"save_dir": tmp_path / "run", "checkpoint_interval": 2}
    message = r"'losses' at step 4 on nodes 0, 1 did not complete.*; ranks \[1\] did not get there"
    with pytest.raises(CollectiveFailure, match=message) as caught:
        fit(**saved, timeout_seconds=2, **in_processes(2))
    failure = caught.value.__cause__
    assert isinstance(failure, NodeFailure) and "rank 0 (nodes 0 to 1) failed after step 3" in str(failure)
    monkeypatch.delenv("FAULT")
    monkeypatch.setenv("FAULT", "model:exception")
    monkeypatch.setenv("FAULT_AFTER", "0")
    with pytest.raises(OutOfLuck) as caught:
        fit(resume=True, **saved, **in_processes(2))
    assert "failed after step 2 of the run" in str(caught.value.__cause__)
    monkeypatch.delenv("FAULT")
    assert_same_run(fit(resume=True, **saved), straight)


def test_a_process_is_named_that_ends_while_others_are_in_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three; the two others have sent their messages, and wait."""
    monkeypatch.setenv("FAULT", "strategy:SIGKILL late")
    with pytest.raises(NodeFailure, match=r"rank 1 \(node 1\) was ended by signal 9.*after step 3") as caught:
        fit(num_nodes=3, **in_processes(3))
    assert caught.value.rank == RANK


@pytest.mark.parametrize(
    ("place", "after", "kind", "message"),
    [
        ("strategy", DONE, NodeFailure, r"\(SIGKILL\).* after step 3"),
        ("worker", 0, RuntimeError, r"the batches of step 1: DataLoader worker .* exited unexpectedly"),
    ],
    ids=["process", "worker"],
)
def test_worker_processes_of_data_end(
    place: str, after: int, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a process that is killed while its worker holds its pipes, too; and a worker is killed itself."""
    monkeypatch.setenv("FAULT", f"{place}:SIGKILL")
    monkeypatch.setenv("FAULT_AFTER", str(after))
    with pytest.raises(kind, match=message) as caught:
        fit(dataloader_kwargs={"num_workers": 1}, **in_processes(2))
    failure = caught.value if isinstance(caught.value, NodeFailure) else caught.value.__cause__
    assert isinstance(failure, NodeFailure) and RANK_AND_NODES in str(failure)


def data_of(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
    if rank == 2 and dist.is_initialized():
        raise OutOfLuck("no data")
    return vectors(seed=rank)


@pytest.mark.parametrize("train", ["fit", "compare"])
def test_the_data_of_one_node_cannot_be_made(train: str) -> None:
    """No step is done: a comparison has no records to keep."""
    run = {**defaults(), **in_processes(2)}
    calls: dict[str, Callable[[], Any]] = {
        "fit": lambda: Trainer(Model(), data_of).fit(strategy=Own(H=2), **run),
        "compare": lambda: vsim.compare(Model(), data_of, strategies={"DiLoCo": Own(H=2)}, **run),
    }
    with pytest.raises(OutOfLuck, match="no data") as caught:
        calls[train]()
    assert f"{RANK_AND_NODES} failed after step 0" in str(caught.value.__cause__)


@linux
def test_a_fork_server_that_is_killed() -> None:
    def kill(step: int, loss: float) -> None:
        if step == 2:
            os.kill(fork_server(), signal.SIGKILL)

    with pytest.raises(ForkServerFailure, match="the interpreter that starts the processes has ended"):
        fit(max_steps=100_000, train_loss_hook=kill, **in_processes(2))
    assert len(fit(**in_processes(2)).history) == STEPS + 1


def test_a_full_disk_is_a_warning_in_the_process_that_writes(
    straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "callback:full disk")
    monkeypatch.setenv("FAULT_RANK", "0")
    saved: dict[str, Any] = {"save_dir": tmp_path / "run", "checkpoint_interval": 2}
    with pytest.warns(UserWarning, match=r"step \d could not be saved.*No space left on device") as issued:
        assert_same_run(fit(**saved, **in_processes(2)), straight)
    assert len(issued) == 2  # of steps 4 and 6
    assert load_checkpoint(tmp_path / "run").step == 2


# Comparisons ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "act"),
    [("strategy", "exception"), ("model", "SIGKILL"), ("validation", "no memory"), ("callback", "not finite")],
)
def test_a_fault_in_a_comparison(
    place: str, act: str, straight_comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs keep their records; the comparison resumes in another number of processes."""
    monkeypatch.setenv("FAULT", f"{place}:{act}")
    saved: dict[str, Any] = {"save_dir": tmp_path / "runs", "checkpoint_interval": 2}
    kind, message = FOUND[act]
    with pytest.warns(UserWarning, match=message if kind is NodeFailure else FAILS):
        comparison = compared(**saved, timeout_seconds=20, **in_processes(2))
    for name in comparison:
        (run,) = comparison.runs(name)
        assert isinstance(run.error, kind) and RANK_AND_NODES in run.failure
        assert run.model is None and len(run.history) in (DONE + 1, DONE + 2)
    monkeypatch.delenv("FAULT")
    number = {"exception": 1, "SIGKILL": 3}.get(act)
    resumed = compared(resume=True, **saved, **({} if number is None else in_processes(number)))
    assert_same_comparison(resumed, straight_comparison)


@pytest.mark.parametrize("act", ["exception", "SIGKILL", "not finite"])
def test_a_fault_in_the_first_step_of_a_comparison_is_raised(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", f"strategy:{act}")
    monkeypatch.setenv("FAULT_AFTER", "0")
    with pytest.raises(FOUND[act][0], match=FOUND[act][1].replace("after step 3", "after step 0")) as caught:
        compared(**in_processes(2))
    failure = caught.value if act == "SIGKILL" else caught.value.__cause__
    assert isinstance(failure, NodeFailure) and (failure.rank, RANK_AND_NODES in str(failure)) == (RANK, True)


def test_a_process_of_a_comparison_that_stops_is_named_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "data:SIGSTOP")
    monkeypatch.setenv("FAULT_AFTER", "2")
    with pytest.warns(UserWarning, match=r"ranks \[1\] did not get there"):
        comparison = compared(timeout_seconds=2, **in_processes(2))
    assert all(len(run.history) == 3 for name in comparison for run in comparison.runs(name))


def test_a_full_disk_is_a_warning_in_a_comparison(
    straight_comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "callback:full disk")
    monkeypatch.setenv("FAULT_RANK", "0")
    saved: dict[str, Any] = {"save_dir": tmp_path / "runs", "checkpoint_interval": 2}
    with pytest.warns(UserWarning, match=r"step \d could not be saved.*No space left on device"):
        assert_same_comparison(compared(**saved, **in_processes(2)), straight_comparison)
    monkeypatch.delenv("FAULT")
    assert_same_comparison(compared(**saved, resume=True, **in_processes(3)), straight_comparison)


# Ctrl-C and the caller -----------------------------------------------------------------------------------------------

LONG = 25


def press_at(pressed_at: int) -> Callable[[int, float], None]:
    """Press once, even if several runs call it."""
    pressed = []

    def press(step: int, loss: float) -> None:
        if step == pressed_at and not pressed:
            pressed.append(step)
            os.kill(os.getpid(), signal.SIGINT)

    return press


def test_ctrl_c_stops_all_processes_after_a_step(tmp_path: Path) -> None:
    run: dict[str, Any] = {"max_steps": LONG, "save_dir": tmp_path / "run"}
    trainer = Trainer(Model(), Data(), vectors(7, 9))
    slow = {"callbacks": [Counts(), slowly], "train_loss_hook": press_at(2)}
    with pytest.raises(Interrupted, match=rf"after step \d+: the run is saved in '{tmp_path / 'run'}'"):
        fit(trainer=trainer, **run, **slow, **in_processes(2))
    assert 2 <= load_checkpoint(tmp_path / "run").step == trainer.history["step"][-1] < LONG
    assert_same_run(fit(resume=True, **run, **in_processes(3)), fit(max_steps=LONG))


def test_a_run_that_is_not_saved_resumes_from_memory() -> None:
    trainer = Trainer(Model(), Data(), vectors(7, 9))
    slow = {"callbacks": [Counts(), slowly], "train_loss_hook": press_at(2)}
    with pytest.raises(Interrupted, match="kept in memory"):
        fit(trainer=trainer, max_steps=LONG, **slow, **in_processes(2))
    assert_same_run(fit(trainer=trainer, max_steps=LONG, resume=True, **in_processes(3)), fit(max_steps=LONG))


def test_ctrl_c_stops_a_comparison_after_a_step(tmp_path: Path) -> None:
    run: dict[str, Any] = {"max_steps": LONG, "save_dir": tmp_path / "runs"}
    slow = {"callbacks": [Counts(), slowly], "train_loss_hook": press_at(2)}
    with pytest.warns(UserWarning, match=r"interrupted after step \d+; .*resume=True"):
        comparison = compared(**run, **slow, **in_processes(2))
    steps = [run.history["step"][-1] for name in comparison for run in comparison.runs(name)]
    assert 2 <= steps[0] == steps[1] < LONG
    assert_same_comparison(compared(resume=True, **run, **in_processes(3)), compared(max_steps=LONG))


@pytest.mark.parametrize("train", [fit, compared])
def test_a_second_ctrl_c_ends_all_processes_at_once(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "strategy:sleep")
    again = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    press = press_at(DONE)

    def press_twice(step: int, loss: float) -> None:
        press(step, loss)
        if step == DONE and again.ident is None:
            again.start()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        train(train_loss_hook=press_twice, **in_processes(2))
    again.join()
    assert not isinstance(caught.value, Interrupted) and time.monotonic() - began < 2 * NO_HANG_SECONDS


SCRIPT = """
    import sys
    import time
    import torch
    from torch.utils.data import TensorDataset
    import vsim
    from vsim.models import MLP
    from vsim.strategy import DiLoCoStrategy

    def slowly(run):
        time.sleep(0.05)

    data = TensorDataset(torch.zeros(40, 12), torch.zeros(40, dtype=torch.long))
    options = dict(
        num_nodes=4, max_steps=10_000, batch_size=2, progress=False, backend="process", num_processes=2,
        train_loss_hook=lambda step, loss: print("step", step, flush=True), callbacks=[slowly],
    )
    model, strategy = MLP(12, (16,), 5, seed=1), DiLoCoStrategy(H=3, lr=1e-2)
    if sys.argv[1] == "fit":
        vsim.Trainer(model, data).fit(strategy=strategy, **options)
    else:
        vsim.compare(model, data, strategies={"DiLoCo": strategy, "DiLoCo again": strategy}, **options)
"""


@linux
@pytest.mark.parametrize("what", ["fit", "compare"])
def test_the_processes_end_with_a_caller_that_is_killed(what: str, tmp_path: Path, mark: str) -> None:  # noqa: F811
    with started(tmp_path, textwrap.dedent(SCRIPT), mark, [what]) as process:
        read_until(process, "step 3")
        assert len(processes("VSIM_TEST_MARK", mark)) >= 3
        process.kill()
        assert gone_within(NO_HANG_SECONDS, mark)
    assert list(tmp_path.glob("vsim-*")) == []


# What messages call a process ----------------------------------------------------------------------------------------


def test_runs_with_other_numbers_of_nodes_are_named_by_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "strategy:exception")
    options = {name: value for name, value in defaults().items() if name != "num_nodes"}
    with pytest.warns(UserWarning, match=r"no more \(rank 1 failed after step 3 of the run\)"):
        vsim.sweep(
            Model(), Data(), vectors(7, 9), strategy=Own, settings={"num_nodes": [2, 4]}, **options, **in_processes(2)
        )
