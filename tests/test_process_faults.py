"""What goes wrong in a process reaches the caller with its rank and cause, soon; nothing is left; the run resumes."""

from __future__ import annotations

import atexit
import errno
import importlib
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import uuid
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import torch
import torch.distributed as dist
from cut_runs import assert_same_comparison, assert_same_run, in_processes
from errors import refused, warned
from reference_cluster import small_mlp, vectors
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

import vsim
from vsim import Callback, Comparison, Trainer, load_checkpoint
from vsim.models import MLP
from vsim.processes import CollectiveFailure, ForkServerFailure, NodeFailure
from vsim.runs.interrupt import Interrupted
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy

NO_HANG_SECONDS = 15.0
STEPS, DONE, RANK = 6, 3, 1  # steps of a run, and before a fault; the process where it happens
NODES: dict[str, Any] = {"num_nodes": 2, **in_processes(None)}
RANGES: dict[str, Any] = {"num_nodes": 4, **in_processes(2)}
OF_RANGES = "rank 1 (nodes 2 to 3)"
linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")


def processes(name: str = "VSIM_TEST_SESSION", value: str = os.environ["VSIM_TEST_SESSION"]) -> set[int]:
    """The processes with a variable in their environment, workers of DataLoaders included; the dead have none."""
    found = set()
    for entry in Path("/proc").iterdir() if Path("/proc/self/environ").exists() else ():
        try:
            if entry.name.isdigit() and f"{name}={value}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except OSError:
            continue
    return found - {os.getpid()}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def helpers() -> set[int]:
    """multiprocessing's own processes, which stay as long as this one: they are its children."""
    return {pid for pid in processes() if parent_of(pid) == os.getpid() and b"multiprocessing." in command_of(pid)}


def fork_server() -> int:
    return next(pid for pid in helpers() if b"forkserver" in command_of(pid))


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes, files and threads that a test starts are gone when it ends."""
    multiprocessing.util.get_temp_dir()  # of the fork server's socket, whose path must be short
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before, threads = processes(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2
    while processes() - before - helpers() or not set(threading.enumerate()) <= threads:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [path.name for path in folder.glob("vsim-*")] == []


# A run that can fail in many places, as the environment says ----------------------------------------------------------


class OutOfLuck(Exception):
    def __init__(self, why: str, node: int = 0) -> None:
        super().__init__(why)
        self.node = node


class Stubborn(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


def raising(error: BaseException) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise error

    return act


def _fill_the_disk() -> None:
    safetensors.numpy.save_file = raising(OSError(errno.ENOSPC, "No space left on device"))


def _kill_later() -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    time.sleep(60)


def _signal(name: str) -> None:
    os.kill(os.getpid(), signal.Signals[name])


ACTS: dict[str, Callable[[], Any]] = {
    **{name: partial(_signal, name) for name in ("SIGKILL", "SIGTERM", "SIGSTOP")},
    "_exit 0": lambda: os._exit(0),
    "exit": lambda: sys.exit(0),
    "no memory": raising(MemoryError("none is left")),
    "exception": raising(OutOfLuck("no more", RANK)),
    "stubborn": raising(Stubborn("as ever")),
    "not finite": raising(FloatingPointError("found on one rank only")),
    "sleep": lambda: time.sleep(60),
    "SIGKILL late": _kill_later,
    "full disk": _fill_the_disk,
}
# The error, and what it or the failure behind it names.
FOUND: dict[str, tuple[type[BaseException], tuple[str, ...]]] = {
    "SIGKILL": (NodeFailure, ("process", "signal 9 (SIGKILL)", "lack of memory", "after step 3")),  # as the kernel does
    "SIGTERM": (NodeFailure, ("process", "signal 15 (SIGTERM)", "after step 3")),
    "_exit 0": (NodeFailure, ("process", "exited with 0", "after step 3")),
    "exit": (NodeFailure, ("failed after step 3", "SystemExit")),
    "no memory": (MemoryError, ("failed after step 3",)),
    "exception": (OutOfLuck, ("failed after step 3", "in act", "test_process_faults.py")),
    "stubborn": (NodeFailure, ("failed after step 3", "Stubborn: as ever")),
    "not finite": (FloatingPointError, ("failed after step 3",)),
}


class Now:
    done = 0  # steps of this process


def reached(place: str) -> None:
    """Act here, if this is the place, the process, and the step."""
    there, act, rank, done = os.environ.get("FAULT", ":::").split(":")
    if there == place and dist.is_initialized() and (dist.get_rank(), Now.done) == (int(rank), int(done)):
        ACTS[act]()


Fault = Callable[..., None]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Call it with the place and act of a fault, or with nothing for none."""

    def of(place: str = "", act: str = "", rank: int = RANK, after: int = DONE) -> None:
        monkeypatch.setenv("FAULT", f"{place}:{act}:{rank}:{after}")

    return of


class Counts(Callback):
    """Counts the steps of this process."""

    def on_step(self, run: Any) -> None:
        reached("callback")
        Now.done = run.done


class Model(MLP):
    def __init__(self) -> None:
        super().__init__(12, (16,), 5, dropout=0.2, seed=1)

    def logits(self, x: Tensor) -> Tensor:
        reached("model" if self.training else "validation")
        return super().logits(x)


class Data(Dataset[Any]):
    def __init__(self) -> None:
        self.data = vectors()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        reached("data" if get_worker_info() is None else "worker")
        return self.data[index]


class Own(DiLoCoStrategy):
    def advance(self) -> None:
        reached("strategy")
        super().advance()


def defaults(**options: Any) -> dict[str, Any]:
    run = {"num_nodes": 4, "max_steps": STEPS, "batch_size": 4, "val_interval": 2, "deterministic": True}
    return {**run, "progress": False, "callbacks": [Counts()], **options}


def trainer_of() -> Trainer:
    return Trainer(Model(), Data(), vectors(7, 9))


def fit(strategy: Strategy | None = None, **options: Any) -> Trainer:
    trainer = options.pop("trainer", None) or trainer_of()
    trainer.final = trainer.fit(strategy=strategy or Own(H=2, lr=1e-2), **defaults(**options))
    return trainer


def compared(**options: Any) -> Comparison:
    strategies = {"DiLoCo": Own(H=2, lr=1e-2), "AllReduce": SimpleReduceStrategy(lr=1e-2)}
    return vsim.compare(Model(), Data(), vectors(7, 9), strategies=strategies, **defaults(**options))


@pytest.fixture(scope="module")
def straight() -> Callable[[int], Trainer]:
    """From K to the run without a fault, in the simulator."""
    runs = {num_nodes: fit(num_nodes=num_nodes) for num_nodes in (2, 4)}
    return runs.__getitem__


@pytest.fixture(scope="module")
def straight_comparison() -> Comparison:
    return compared()


def failure_of(caught: Any) -> NodeFailure:
    """The failure of a process that was raised, or is the cause of what was raised."""
    failure = caught.value if isinstance(caught.value, NodeFailure) else caught.value.__cause__
    assert isinstance(failure, NodeFailure)
    return failure


def names(text: str, *parts: str) -> bool:
    return all(part in text for part in parts)


# Faults of one process ------------------------------------------------------------------------------------------------

QUICK = [(NODES, "strategy", "exception"), (NODES, "strategy", "SIGKILL")]
PLACES = [("model", "SIGKILL"), ("data", "exception"), ("callback", "exception"), ("validation", "SIGKILL")]
FAULTS = [
    *QUICK,
    *(
        pytest.param(RANGES, place, act, marks=pytest.mark.slow, id=f"ranges, {place}, {act}")
        for place, act in [*PLACES, *(("strategy", act) for act in FOUND)]
    ),
]


@pytest.mark.parametrize(("options", "place", "act"), FAULTS)
def test_a_fault_of_one_process(
    options: dict[str, Any], place: str, act: str, straight: Any, fault: Fault, tmp_path: Path
) -> None:
    """It names rank and nodes, and the run resumes from its checkpoint in any number of processes."""
    fault(place, act)
    saved: dict[str, Any] = {"save_dir": tmp_path / "run", "checkpoint_interval": 2}
    (kind, parts), trainer = FOUND[act], trainer_of()
    steps: list[float] = []  # when each was done: processes start slowly on a busy machine
    with pytest.raises(kind) as caught:
        fit(trainer=trainer, train_loss_hook=lambda *_: steps.append(time.monotonic()), **saved, **options)
    assert time.monotonic() - steps[-1] < NO_HANG_SECONDS
    failure = failure_of(caught)
    who = "node 1" if options is NODES else OF_RANGES
    assert failure.rank == RANK and names(str(failure), who, *(parts if place == "strategy" else ()))
    if act == "exception":
        assert "no more" in str(caught.value) and (caught.value.node == RANK or place == "data")  # type: ignore[attr-defined]
    assert trainer.history["step"].tolist()[: DONE + 1] == [0, 1, 2, 3] and len(trainer.history) <= DONE + 2
    fault()
    resumes = in_processes(3 if act == "SIGKILL" else 1) if (place, act) in PLACES else {}
    resumed = fit(resume=True, num_nodes=options["num_nodes"], **saved, **resumes)
    assert_same_run(resumed, straight(options["num_nodes"]))


@pytest.mark.slow
def test_a_process_that_stops_is_named_with_collective_and_step(straight: Any, fault: Fault, tmp_path: Path) -> None:
    """And after it, a process that fails in a run which resumes."""
    fault("model", "SIGSTOP")
    saved: dict[str, Any] = {"save_dir": tmp_path / "run", "checkpoint_interval": 2}
    with refused(CollectiveFailure, "'losses'", "step 4", [1]) as caught:
        fit(**saved, timeout_seconds=1, **RANGES)
    assert "failed after step 3" in str(failure_of(caught))
    fault("model", "exception", after=0)
    with pytest.raises(OutOfLuck) as raised:
        fit(resume=True, **saved, **RANGES)
    assert "failed after step 2" in str(failure_of(raised))
    fault()
    assert_same_run(fit(resume=True, **saved), straight(4))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "after", "kind"), [("strategy", DONE, NodeFailure), ("worker", 0, RuntimeError)])
def test_worker_processes_of_data_end(place: str, after: int, kind: Any, fault: Fault) -> None:
    """With a process that is killed while its worker holds its pipes, too; and a worker is killed itself."""
    fault(place, "SIGKILL", after=after)
    with pytest.raises(kind) as caught:
        fit(dataloader_kwargs={"num_workers": 1}, **RANGES)
    assert names(str(failure_of(caught)), OF_RANGES, "SIGKILL" if after else "DataLoader worker")


@pytest.mark.slow
def test_a_process_is_named_that_ends_while_others_are_in_a_collective(fault: Fault) -> None:
    """Of three; the two others have sent their messages, and wait."""
    fault("strategy", "SIGKILL late")
    with refused(NodeFailure, "rank 1 (node 1)", "signal 9", "after step 3"):
        fit(num_nodes=3, **in_processes(3))


def data_of(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
    if rank == 2 and dist.is_initialized():
        raise OutOfLuck("no data")
    return vectors(seed=rank)


@pytest.mark.slow
def test_before_the_first_step_a_comparison_has_no_records_to_keep(fault: Fault) -> None:
    """The data of a node cannot be made, for a fit or a comparison; a process ends in the first step."""
    run, strategies = defaults(**RANGES, val_interval=None), {"DiLoCo": Own(H=2)}
    for act, train in (
        ("", lambda: Trainer(Model(), data_of).fit(strategy=Own(H=2), **run)),
        ("", lambda: vsim.compare(Model(), data_of, strategies=strategies, **run)),
        ("SIGKILL", lambda: compared(**RANGES)),
    ):
        fault("strategy", act, after=0)
        with pytest.raises(FOUND[act or "exception"][0]) as caught:
            train()
        assert names(str(failure_of(caught)), OF_RANGES, "after step 0")


# Comparisons ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "act", "resumes"), [("strategy", "exception", {}), ("model", "SIGKILL", in_processes(3))], ids=str
)
def test_a_fault_in_a_comparison(
    place: str, act: str, resumes: Any, straight_comparison: Comparison, fault: Fault, tmp_path: Path
) -> None:
    """All runs keep their records; the comparison resumes in another number of processes."""
    fault(place, act)
    saved: dict[str, Any] = {"save_dir": tmp_path / "runs", "checkpoint_interval": 2}
    with warned(OF_RANGES):
        comparison = compared(**saved, timeout_seconds=20, **RANGES)
    for run in comparison.values():
        assert isinstance(run.error, FOUND[act][0]) and OF_RANGES in run.failure
        assert run.model is None and len(run.history) in (DONE + 1, DONE + 2)
    fault()
    assert_same_comparison(compared(resume=True, **saved, **resumes), straight_comparison)


@pytest.mark.slow
def test_runs_with_other_numbers_of_nodes_are_named_by_rank_alone(fault: Fault) -> None:
    fault("strategy", "exception")
    options = {name: value for name, value in defaults(**in_processes(2)).items() if name != "num_nodes"}
    with warned("no more", "(rank 1 failed after step 3"):
        vsim.sweep(Model(), Data(), vectors(7, 9), strategy=Own, settings={"num_nodes": [2, 4]}, **options)


@pytest.mark.slow
def test_a_full_disk_is_a_warning_in_the_process_that_writes(
    straight: Any, straight_comparison: Comparison, fault: Fault, tmp_path: Path
) -> None:
    fault("callback", "full disk", rank=0)
    saved: dict[str, Any] = {"save_dir": tmp_path / "run", "checkpoint_interval": 2}
    with warned("could not be saved", "No space left on device") as issued:
        assert_same_run(fit(**saved, **RANGES), straight(4))
    assert len(issued) == 2  # of steps 4 and 6
    assert load_checkpoint(tmp_path / "run").step == 2
    saved = {"save_dir": tmp_path / "runs", "checkpoint_interval": 2}
    with warned("could not be saved", "No space left on device"):
        assert_same_comparison(compared(**saved, **RANGES), straight_comparison)
    fault()
    assert_same_comparison(compared(**saved, resume=True), straight_comparison)


# What is shipped ------------------------------------------------------------------------------------------------------


class Locked(nn.Module):
    """Anything that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(2, 2), threading.Lock()


class LockedStrategy(FedAvgStrategy):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize("name", ["model", "train_dataset", "val_dataset", "loss_fn", "strategy", "dataloader_kwargs"])
def test_what_cannot_be_shipped_is_named(name: str) -> None:
    given: dict[str, Any] = {"model": small_mlp(), "train_dataset": vectors(), "val_dataset": vectors()}
    options: dict[str, Any] = {"strategy": FedAvgStrategy(), **NODES}
    if name in ("strategy", "dataloader_kwargs"):
        options[name] = LockedStrategy() if name == "strategy" else {"collate_fn": Locked()}
    else:
        given[name] = Locked()
    with refused(TypeError, f"backend='process' cannot ship {name}", "lock"):
        fit(trainer=Trainer(**given), **options)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(12, 5))
        self.layer = nn.utils.parametrizations.spectral_norm(layer)

    def forward(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])


class Shippable(Normed):
    def __reduce__(self) -> Any:
        return _of_state, (self.state_dict(),)


def _of_state(state: Any) -> Shippable:
    model = Shippable()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("kind", [Normed, Shippable])
def test_parametrized_models_are_shipped(kind: type[Normed]) -> None:
    losses = []
    for options in ({"num_nodes": 2}, NODES):
        torch.manual_seed(0)
        trainer = fit(FedAvgStrategy(H=2), trainer=Trainer(kind(), vectors()), val_interval=None, **options)
        losses.append(trainer.history.node_losses.tolist())
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_what_the_processes_cannot_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = types.ModuleType("made_up")
    exec("class Alone(Strategy): pass", vars(made_up) | {"Strategy": Strategy, "__name__": "made_up"}, vars(made_up))
    monkeypatch.setitem(sys.modules, "made_up", made_up)
    with refused(ModuleNotFoundError, "'made_up'", "importable by its name") as caught:
        fit(made_up.Alone(), **NODES)
    failure_of(caught)


def test_the_way_to_ship_custom_operators_is_told() -> None:
    @torch.library.custom_op("test_faults::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    class Direct(nn.Linear):
        def forward(self, batch: Any) -> Tensor:
            return twice(super().forward(batch[0]))

    class ByName(nn.Linear):
        def forward(self, batch: Any) -> Tensor:
            return torch.ops.test_faults.twice(super().forward(batch[0]))

    for model in Direct(12, 2), ByName(12, 2):
        with refused(TypeError, "cannot ship model", "in a module that the script imports"):
            fit(trainer=Trainer(model, vectors()), val_interval=None, **NODES)


@pytest.mark.slow
def test_hooks_progress_warnings_and_threads(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            shown.append(options["total"])

        def set_postfix_str(self, text: str, refresh: bool) -> None: ...

        def update(self) -> None:
            shown.append("step")

        def close(self) -> None:
            shown.append("closed")

    def act(run: Any) -> None:
        if run.done == 2:
            rank, threads = dist.get_rank(), torch.get_num_threads()
            kernels = importlib.import_module("torch.backends.cpu").get_cpu_capability()
            line = f"{rank} {threads} {os.environ['OMP_NUM_THREADS']} {os.environ['GLOO_SOCKET_IFNAME']} {kernels}\n"
            os.write(1, line.encode())  # in one go: the nodes share where it goes
            warnings.warn("one warning of all nodes", UserWarning, stacklevel=1)
            atexit.register((tmp_path / f"ended {rank}").touch)

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    seen: list[Any] = []
    hooks: dict[str, Any] = {
        "train_loss_hook": lambda step, loss: seen.append((step, loss)),
        "eval_loss_hook": lambda step, loss: seen.append((step, "eval", loss)),
    }
    run = {**NODES, "threads_per_process": 2, "max_steps": 4, "progress": True, "callbacks": [act]}
    with pytest.warns(UserWarning, match="one warning") as issued:
        history = fit(**run, **hooks).history
    losses, evals = history["train_loss"], history["global_loss"]
    expected = [(0, "eval", evals[0]), (1, losses[1]), (2, losses[2]), (2, "eval", evals[2])]
    assert seen == [*expected, (3, losses[3]), (4, losses[4]), (4, "eval", evals[4])]
    assert shown == [4, *["step"] * 4, "closed"] and len(issued) == 1
    printed = capfd.readouterr()
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    kernels = torch.backends.cpu.get_cpu_capability()
    assert sorted(printed.out.splitlines()) == [f"{rank} 2 2 {loopback} {kernels}" for rank in range(2)]
    assert printed.err == "" and len([*tmp_path.glob("ended *")]) == 2  # they have ended by themselves


# Ctrl-C; test_interrupt.py has it with a process for every node ------------------------------------------------------

LONG = 25


def slowly(run: Any) -> None:
    """Called after every step, so that nodes do not run far ahead of the hooks here."""
    time.sleep(0.05)


def press_at(pressed_at: int) -> Callable[[int, float], None]:
    """Press once, even if several runs call it."""
    pressed = []

    def press(step: int, loss: float) -> None:
        if step == pressed_at and not pressed:
            pressed.append(step)
            os.kill(os.getpid(), signal.SIGINT)

    return press


@pytest.mark.slow
def test_ctrl_c_stops_a_comparison_after_a_step(tmp_path: Path) -> None:
    run: dict[str, Any] = {"max_steps": LONG, "save_dir": tmp_path / "runs"}
    slow = {"callbacks": [Counts(), slowly], "train_loss_hook": press_at(2)}
    with warned("interrupted after step", "resume=True"):
        comparison = compared(**run, **slow, **RANGES)
    steps = [run.history["step"][-1] for run in comparison.values()]
    assert 2 <= steps[0] == steps[1] < LONG
    assert_same_comparison(compared(resume=True, **run, **in_processes(3)), compared(max_steps=LONG))


@pytest.mark.slow
@pytest.mark.parametrize("train", [fit, compared])
def test_a_second_ctrl_c_ends_all_processes_at_once(train: Callable[..., Any], fault: Fault) -> None:
    fault("strategy", "sleep")
    again = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    press, pressed = press_at(DONE), []

    def press_twice(step: int, loss: float) -> None:
        press(step, loss)
        if step == DONE and again.ident is None:
            pressed.append(time.monotonic())
            again.start()

    if train is fit:
        with pytest.raises(KeyboardInterrupt) as caught:
            fit(train_loss_hook=press_twice, **RANGES)
        assert not isinstance(caught.value, Interrupted)
    else:  # a comparison keeps what it has, as in one process
        with warned("interrupted after step"):
            found = compared(train_loss_hook=press_twice, **RANGES)
        assert all(run.failure.startswith("interrupted after step") for run in found.values())
    again.join()
    assert time.monotonic() - pressed[0] < NO_HANG_SECONDS


@pytest.mark.slow
def test_a_caller_that_blocks_signals_hears_of_its_nodes_ends() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    try:
        assert len(fit(**NODES).history) == STEPS + 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# The fork server ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@linux
def test_a_fork_server_that_is_killed_or_stopped_ends_the_run(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, where a node dies and where one is to start; the next run has another server."""

    def sending(number: int) -> Callable[[int, float], None]:
        return lambda step, loss: os.kill(fork_server(), number) if step == 2 else None

    with refused(ForkServerFailure, "interpreter that starts the processes"):
        fit(max_steps=100_000, train_loss_hook=sending(signal.SIGKILL), **RANGES)
    monkeypatch.setattr("vsim.processes.launch._EXIT_SECONDS", 1.0)
    fault("strategy", "SIGKILL")
    with refused(NodeFailure, "node 1", "closed its connection"):
        fit(train_loss_hook=sending(signal.SIGSTOP), **NODES, callbacks=[Counts(), slowly])
    fault()
    fit(**NODES)
    os.kill(fork_server(), signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr("vsim.processes.launch._START_SECONDS", 1.0)
        with refused(ForkServerFailure, "1 seconds"):
            fit(**NODES)
    assert len(fit(**NODES).history) == STEPS + 1


def said_by(code: str, **environment: str) -> str:
    """What another interpreter prints."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


@pytest.mark.slow
@linux
def test_a_fork_server_starts_no_thread_and_asks_for_no_device_and_groups_end() -> None:
    """Neither threads of OpenMP nor a device would survive a fork. Nothing keeps a group that was destroyed."""
    code = """
        import contextlib, functools, gc, os, weakref
        from unittest import mock
        import torch

        @functools.cache  # as torch's are, some of whose importers look for __wrapped__
        def never(**_: object) -> bool:
            raise AssertionError("a process asks for a device")

        with contextlib.ExitStack() as stack:
            for module in torch.cuda, torch.accelerator, torch.backends.mps:
                for name in {"is_available", "device_count", "current_accelerator"} & {*dir(module)}:
                    stack.enter_context(mock.patch.object(module, name, never))
            import vsim.processes.preload
            print(len(os.listdir("/proc/self/task")), torch.cuda.is_initialized())
        import vsim.processes.node
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        group = weakref.ref(torch.distributed.group.WORLD)
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        torch.optim.AdamW([weight]).step()
        torch.distributed.destroy_process_group()
        gc.collect()
        print("gone" if group() is None else "kept")
    """
    assert said_by(code, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="4") == "1 False\ngone\n"


# Scripts --------------------------------------------------------------------------------------------------------------

# Everything is defined in the script, which has no `if __name__ == "__main__"`.
SCRIPT = """
    import time
    import torch
    import vsim
    from torch import nn
    from torch.utils.data import TensorDataset
    from vsim.strategy import Strategy, FedAvgStrategy

    print("started", flush=True)

    class OwnError(Exception):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
        def forward(self, batch):
            return self.layer(batch[0]).square().mean()

    class Own(Strategy):
        def step(self):
            if self.local_step == 3:
                ACT
            super().step()

    def slowly(run):
        time.sleep(0.05)

    trainer = vsim.Trainer(Model(), TensorDataset(torch.randn(20, 3)))
    try:
        trainer.fit(
            strategy=Own([FedAvgStrategy(H=2)]), max_steps=10_000, batch_size=2, progress=False,
            backend="process", callbacks=[slowly], dataloader_kwargs={"num_workers": 1},
            train_loss_hook=lambda step, loss: print("step", step, flush=True), NODES
        )
    except KeyboardInterrupt:
        print("interrupted at", len(trainer.history) - 1)
    except OwnError as error:
        print("caught", error, "of node", error.__cause__.rank)
"""


def script(act: str = "pass", nodes: str = "num_nodes=2") -> str:
    return textwrap.dedent(SCRIPT).replace("ACT", act).replace("NODES", nodes)


def started(folder: Path, text: str) -> tuple[subprocess.Popen[str], str]:
    """Run it as a file, from a folder whose modules are not to be imported; return a mark of what it starts, too."""
    (folder / "code").mkdir()
    (folder / "elsewhere").mkdir()
    for module in ("pickle", "types", "contextlib", "socket"):
        (folder / "elsewhere" / f"{module}.py").write_text("raise ImportError('this is not on the path')")
    (folder / "code" / "script.py").write_text(text)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(folder / "code" / "script.py")],
        cwd=folder / "elsewhere",
        env={**os.environ, "TMPDIR": str(folder), "VSIM_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, mark


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while (got := process.stdout.readline()) != f"{line}\n":
        assert got, f"ended before {line!r}: {process.communicate()[1]}"


def gone_within(seconds: float, mark: str) -> bool:
    deadline = time.monotonic() + seconds
    while processes("VSIM_TEST_MARK", mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_of_a_script(tmp_path: Path) -> None:
    process, mark = started(tmp_path, script())
    with process:
        read_until(process, "step 3")
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=NO_HANG_SECONDS)
    assert time.monotonic() - interrupted < NO_HANG_SECONDS
    assert process.returncode == 0 and err == "", err
    assert int(out.splitlines()[-1].removeprefix("interrupted at ")) >= 3
    assert "started" not in out  # the script ran once
    assert gone_within(2, mark)


ASLEEP = "__import__('ctypes').PyDLL(None).sleep(60)"  # within C code: it keeps Python's lock


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    ("text", "until"),
    [(script(ASLEEP, "num_nodes=4, num_processes=2"), "step 3"), (script(), "started")],
    ids=["within C code", "while they start"],
)
def test_the_processes_end_with_a_caller_that_is_killed(text: str, until: str, tmp_path: Path) -> None:
    process, mark = started(tmp_path, text)
    with process:
        read_until(process, until)
        while len(processes("VSIM_TEST_MARK", mark)) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        # The fork server notices once it has imported torch.
        assert gone_within(60 if until == "started" else NO_HANG_SECONDS, mark)
        assert process.stderr is not None
        said = process.stderr.read().strip() if until == "started" else ""
        # A process that was not told yet what to run finds an empty pipe, which Python's fork server prints.
        assert said == "" or (said.startswith("Traceback") and said.endswith("EOFError: Ran out of input"))
    assert list(tmp_path.glob("vsim-*")) == []


@pytest.mark.slow
def test_a_script_from_standard_input_catches_its_own_exception() -> None:
    run: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 180, "check": False}
    ended = subprocess.run([sys.executable, "-"], input=script('raise OwnError("mine")'), **run)
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    *_, last = ended.stdout.splitlines()
    assert last in ("caught mine of node 0", "caught mine of node 1")
    assert ended.stdout.count("started") == 1
