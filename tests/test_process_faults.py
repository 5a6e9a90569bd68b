"""What goes wrong in a process reaches the caller with its rank and cause, soon, and no process is left behind."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from separate import small_mlp, vectors
from torch import nn

from vsim import Trainer, load_checkpoint
from vsim.process import CollectiveFailure, ForkServerFailure, NodeFailure
from vsim.process.child import _traceback
from vsim.strategy import FedAvgStrategy, SimpleReduceStrategy, Strategy
from vsim.training.interrupt import Interrupted

NO_HANG_SECONDS = 15.0

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


def helpers() -> set[int]:
    """multiprocessing's own processes, which stay as long as this one: they are its children."""
    return {pid for pid in processes() if parent_of(pid) == os.getpid() and b"multiprocessing." in command_of(pid)}


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def fork_server() -> int:
    return next(pid for pid in helpers() if b"forkserver" in command_of(pid))


@pytest.fixture
def mark() -> str:
    """Of what a script of a test starts."""
    return uuid.uuid4().hex


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Whatever a test starts is gone when it ends."""
    before = processes()
    yield
    deadline = time.monotonic() + 2
    while processes() - before - helpers():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class OutOfLuck(Exception):
    def __init__(self, node: int, why: str) -> None:
        super().__init__(node, why)
        self.node, self.why = node, why


class At(SimpleReduceStrategy):
    """Does something at one step of one node."""

    def __init__(self, step: int, node: int, act: Callable[[int], Any], **options: Any) -> None:
        super().__init__(**options)
        self.at, self.on, self.act = step, node, act

    def gradients(self) -> None:
        rank = self.cluster.replicas.first_node
        if self.cluster.step == self.at and self.on in (rank, ALL):
            self.act(rank)
        super().gradients()


ALL = -1


def fit(strategy: Strategy, num_nodes: int = 2, **options: Any) -> Trainer:
    """Train in processes, `trainer` or a small one."""
    trainer = options.pop("trainer", None) or Trainer(small_mlp(), vectors())
    defaults = {"max_steps": 8, "batch_size": 4, "progress": False, "backend": "process", "threads_per_process": 1}
    trainer.fit(strategy=strategy, num_nodes=num_nodes, **{**defaults, **options})
    return trainer


class Clock:
    """A hook that measures time from the first step on: processes start slowly on a busy machine."""

    def __call__(self, step: int, loss: float) -> None:
        self.last = time.monotonic()

    def seconds_since_the_last_step(self) -> float:
        return time.monotonic() - self.last


def raise_out_of_luck(rank: int) -> None:
    raise OutOfLuck(rank, "no more")


def test_an_exception_comes_with_its_rank_and_traceback() -> None:
    trainer = Trainer(small_mlp(), vectors())
    clock = Clock()
    with pytest.raises(OutOfLuck, match="no more") as caught:
        fit(At(5, 2, raise_out_of_luck), num_nodes=3, trainer=trainer, train_loss_hook=clock)
    assert clock.seconds_since_the_last_step() < NO_HANG_SECONDS
    assert (caught.value.node, caught.value.why) == (2, "no more")
    failure = caught.value.__cause__
    assert isinstance(failure, NodeFailure) and failure.rank == 2
    assert "node 2 failed after step 4 of the run" in str(failure)
    assert "in raise_out_of_luck" in str(failure) and "test_process_faults.py" in str(failure)
    assert trainer.history["step"].tolist() == [0, 1, 2, 3, 4]


class Speechless(Exception):
    def __str__(self) -> str:
        raise TypeError("never")


@pytest.mark.parametrize("error", [OutOfLuck(1, "no more" * 10**6), OutOfLuck(1, "no more"), Speechless()])
def test_a_traceback_is_short_whatever_the_message(error: Exception) -> None:
    """Python needs seconds for a message of millions of lines."""
    try:
        raise error
    except Exception:
        text = _traceback(error)
    assert text.startswith("Traceback") == (len(str(error.args)) < 1000)
    assert len(text) < 12_000
    assert "in test_a_traceback_is_short" in text and type(error).__name__ in text
    assert ("(7,000,007 characters)" in text) == (len(str(error.args)) > 1000)


def test_a_process_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    """From outside, in the middle of a step, while a worker of its DataLoader holds its pipes too."""

    def wait_for_the_end(rank: int) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    killed_at = []

    def kill() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        killed_at.append(time.monotonic())
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(
        NodeFailure, match=r"node 1's process was ended by signal 9 \(SIGKILL\).*after step 2"
    ) as caught:
        fit(At(3, 1, wait_for_the_end), dataloader_kwargs={"num_workers": 1})
    assert caught.value.rank == 1
    assert time.monotonic() - killed_at[0] < NO_HANG_SECONDS


@pytest.mark.slow
def test_a_node_that_does_not_arrive_is_named_with_collective_and_step() -> None:
    trainer = Trainer(small_mlp(), vectors())
    clock = Clock()
    with pytest.raises(CollectiveFailure, match=r"all_reduce of 'gradients' at step 3 on node 0 .*\[1\]") as caught:
        fit(At(3, 1, lambda rank: time.sleep(60)), trainer=trainer, timeout_seconds=4, train_loss_hook=clock)
    assert clock.seconds_since_the_last_step() < NO_HANG_SECONDS
    assert isinstance(caught.value.__cause__, NodeFailure) and caught.value.__cause__.rank == 0
    assert trainer.history["step"].tolist() == [0, 1, 2]


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

    def act(rank: int) -> None:
        line = f"{rank} {torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']} {os.environ['GLOO_SOCKET_IFNAME']}\n"
        os.write(1, line.encode())  # in one go: the nodes share where it goes
        warnings.warn("one warning of all nodes", UserWarning, stacklevel=1)
        atexit.register((tmp_path / str(rank)).touch)

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    seen: list[Any] = []
    trainer = Trainer(small_mlp(), vectors(), vectors(7))
    with pytest.warns(UserWarning, match="one warning") as issued:
        fit(
            At(2, ALL, act),
            trainer=trainer,
            max_steps=4,
            val_interval=2,
            progress=True,
            threads_per_process=2,
            train_loss_hook=lambda step, loss: seen.append((step, loss)),
            eval_loss_hook=lambda step, loss: seen.append((step, "eval", loss)),
        )
    history = trainer.history
    losses, evals = history["train_loss"], history["global_loss"]
    expected = [(0, "eval", evals[0]), (1, losses[1]), (2, losses[2]), (2, "eval", evals[2])]
    assert seen == [*expected, (3, losses[3]), (4, losses[4]), (4, "eval", evals[4])]
    assert shown == [4, *["step"] * 4, "closed"]
    assert [str(w.message) for w in issued] == ["one warning of all nodes"]
    printed = capfd.readouterr()
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    assert sorted(printed.out.splitlines()) == [f"{rank} 2 2 {loopback}" for rank in range(2)]
    assert printed.err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]  # they have ended by themselves


@pytest.mark.slow
def test_an_interrupt_in_a_hook_keeps_what_was_done() -> None:
    def interrupt(step: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    trainer = Trainer(small_mlp(), vectors())
    with pytest.raises(KeyboardInterrupt):
        fit(FedAvgStrategy(H=2), trainer=trainer, max_steps=100_000, train_loss_hook=interrupt)
    # The nodes end the step at which they hear of it, as after a Ctrl-C.
    steps = trainer.history["step"].tolist()
    assert steps == list(range(len(steps))) and 3 <= steps[-1] < 100
    assert [event.step for event in trainer.ledger] == list(range(2, len(steps), 2))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_the_simulators_error() -> None:
    errors, trainers = [], []
    for options in ({"backend": "process"}, {"backend": "stacked", "threads_per_process": None}):
        trainers.append(Trainer(small_mlp(), vectors()))
        with pytest.raises(FloatingPointError, match="non-finite loss at step") as caught:
            fit(FedAvgStrategy(H=2, inner_optim="sgd", lr=1e25), trainer=trainers[-1], deterministic=True, **options)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert trainers[0].history["step"].tolist() == trainers[1].history["step"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 3])
def test_a_node_that_exits_does_not_end_the_caller(status: int) -> None:
    with pytest.raises(NodeFailure, match=r"node 1 failed after step 1 of the run:(.|\n)*SystemExit") as caught:
        fit(At(2, 1, lambda rank: sys.exit(status)))
    assert caught.value.rank == 1


@pytest.mark.slow
def test_an_exception_that_cannot_be_shipped_is_told() -> None:
    class Stubborn(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("never")

    def act(rank: int) -> None:
        raise Stubborn("as ever")

    with pytest.raises(NodeFailure, match=r"node 0 failed(.|\n)*Stubborn: as ever"):
        fit(At(1, 0, act))


@pytest.mark.slow
def test_what_the_processes_cannot_import_is_told() -> None:
    made_up = types.ModuleType("made_up")
    exec("class Alone(Strategy): pass", vars(made_up) | {"Strategy": Strategy, "__name__": "made_up"}, vars(made_up))
    sys.modules["made_up"] = made_up
    try:
        with pytest.raises(ModuleNotFoundError, match=r"cannot load .* 'made_up'.* importable by its name") as caught:
            fit(made_up.Alone())
    finally:
        del sys.modules["made_up"]
    assert isinstance(caught.value.__cause__, NodeFailure)


class Locked:
    """Anything that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, *_: Any) -> Any: ...


class LockedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(2, 2), threading.Lock()


@pytest.mark.parametrize("name", ["model", "train_dataset", "val_dataset", "loss_fn", "strategy", "dataloader_kwargs"])
def test_what_cannot_be_shipped_is_named(name: str) -> None:
    given: dict[str, Any] = {
        "model": small_mlp(),
        "train_dataset": vectors(),
        "val_dataset": vectors(),
        "loss_fn": None,
    }
    options: dict[str, Any] = {"strategy": FedAvgStrategy()}
    if name == "strategy":
        options["strategy"] = At(1, 0, Locked())
    elif name == "dataloader_kwargs":
        options[name] = {"collate_fn": Locked()}
    else:
        given[name] = LockedModel() if name == "model" else Locked()
    with pytest.raises(TypeError, match=f"backend='process' cannot ship {name} to the processes: .*lock"):
        fit(trainer=Trainer(**given), **options)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(12, 5))
        self.layer = nn.utils.parametrizations.spectral_norm(layer)

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
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
    for options in ({"backend": "process"}, {"backend": "stacked", "threads_per_process": None}):
        torch.manual_seed(0)
        trainer = fit(FedAvgStrategy(H=2), trainer=Trainer(kind(), vectors()), deterministic=True, **options)
        losses.append(trainer.history.node_losses.tolist())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("call", ["twice", "torch.ops.test_faults.twice"])
def test_the_way_to_ship_custom_operators_is_told(call: str) -> None:
    code = """
        import torch
        from vsim import Trainer
        from vsim.strategy import FedAvgStrategy

        @torch.library.custom_op("test_faults::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        class Model(torch.nn.Linear):
            def forward(self, batch):
                return CALL(super().forward(batch[0]))

        data = torch.utils.data.TensorDataset(torch.zeros(8, 3))
        try:
            Trainer(Model(3, 2), data).fit(strategy=FedAvgStrategy(), num_nodes=2, max_steps=1, backend="process")
        except TypeError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code).replace("CALL", call)], capture_output=True, text=True, check=False
    )
    assert "cannot ship model" in done.stdout and "in a module that the script imports" in done.stdout, done.stderr


# Scripts -------------------------------------------------------------------------------------------------------------

# Everything is defined in the script, which has no `if __name__ == "__main__"`.
SCRIPT = """
    import time
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from vsim import Trainer
    from vsim.strategy import Strategy, AveragingCommunicator

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
            if self.local_step == STEPS_BEFORE_THE_ERROR:
                raise OwnError("mine")
            time.sleep(PAUSE)
            super().step()

    trainer = Trainer(Model(), TensorDataset(torch.randn(20, 3)))
    try:
        trainer.fit(
            strategy=Own([AveragingCommunicator(every=2)]), num_nodes=2, max_steps=10_000, batch_size=2, progress=False,
            backend="process", train_loss_hook=lambda step, loss: print("step", step, flush=True),
            dataloader_kwargs={"num_workers": 1},
        )
    except KeyboardInterrupt:
        print("interrupted at", len(trainer.history) - 1)
    except OwnError as error:
        print("caught", error, "of node", error.__cause__.rank)
"""


def script(pause: float = 0.0, error_after: int = -1) -> str:
    text = SCRIPT.replace("PAUSE", str(pause)).replace("STEPS_BEFORE_THE_ERROR", str(error_after))
    return textwrap.dedent(text)


def started(folder: Path, text: str, mark: str = "", arguments: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Run it as a file, from a folder whose modules are not to be imported."""
    (folder / "code").mkdir()
    (folder / "elsewhere").mkdir()
    for module in ("pickle", "types", "contextlib", "socket"):
        (folder / "elsewhere" / f"{module}.py").write_text("raise ImportError('this is not on the path')")
    (folder / "code" / "script.py").write_text(text)
    command = [sys.executable, str(folder / "code" / "script.py"), *arguments]
    return subprocess.Popen(
        command,
        cwd=folder / "elsewhere",
        env={**os.environ, "TMPDIR": str(folder), "VSIM_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
def test_ctrl_c_ends_all_processes(tmp_path: Path, mark: str) -> None:
    with started(tmp_path, script(pause=0.05), mark) as process:
        read_until(process, "step 3")
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=NO_HANG_SECONDS)
    assert time.monotonic() - interrupted < NO_HANG_SECONDS
    assert process.returncode == 0, err
    assert int(out.splitlines()[-1].removeprefix("interrupted at ")) >= 3
    assert "started" not in out  # the script ran once
    assert err == ""
    assert gone_within(2, mark)


@pytest.mark.slow
@linux
def test_the_processes_end_with_a_caller_that_is_killed(tmp_path: Path, mark: str) -> None:
    with started(tmp_path, script(pause=0.05), mark) as process:
        read_until(process, "step 3")
        assert len(processes("VSIM_TEST_MARK", mark)) >= 3
        process.kill()
        assert gone_within(NO_HANG_SECONDS, mark)
    assert list(tmp_path.glob("vsim-*")) == []


@pytest.mark.slow
@linux
def test_nodes_within_c_code_end_with_a_caller_that_is_killed(tmp_path: Path, mark: str) -> None:
    asleep = "__import__('ctypes').PyDLL(None).sleep(60) if self.local_step == 3 else None"  # it keeps Python's lock
    with started(tmp_path, script(pause=0.0).replace("time.sleep(0.0)", asleep), mark) as process:
        read_until(process, "step 3")
        process.kill()
        assert gone_within(NO_HANG_SECONDS, mark)
    assert list(tmp_path.glob("vsim-*")) == []


@pytest.mark.slow
@linux
def test_a_fork_server_that_is_killed_ends_the_run() -> None:
    def kill(step: int, loss: float) -> None:
        if step == 2:
            os.kill(fork_server(), signal.SIGKILL)

    with pytest.raises(ForkServerFailure, match="the interpreter that starts the processes has ended"):
        fit(FedAvgStrategy(H=2), max_steps=100_000, train_loss_hook=kill)


@linux
def test_a_fork_server_that_is_stopped_does_not_hang_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where a node dies, nor where one is to start; the next run has another server."""
    monkeypatch.setattr("vsim.process.launch._EXIT_SECONDS", 2.0)

    def stop(step: int, loss: float) -> None:
        if step == 2:
            os.kill(fork_server(), signal.SIGSTOP)

    with pytest.raises(NodeFailure, match="node 1's process closed its connection") as caught:
        fit(At(4, 1, lambda _: os.kill(os.getpid(), signal.SIGKILL)), train_loss_hook=stop, callbacks=[slowly])
    assert caught.value.rank == 1

    fit(FedAvgStrategy(H=2))
    monkeypatch.setattr("vsim.process.launch._START_SECONDS", 2.0)
    os.kill(fork_server(), signal.SIGSTOP)
    with pytest.raises(ForkServerFailure, match="has not answered for 2 seconds"):
        fit(FedAvgStrategy(H=2))
    monkeypatch.setattr("vsim.process.launch._START_SECONDS", 120.0)
    assert len(fit(FedAvgStrategy(H=2)).history) == 9


def slowly(run: Any) -> None:
    """Called after every step, so that nodes do not run far ahead of the hooks here."""
    time.sleep(0.1)


@pytest.mark.slow
@linux
def test_a_third_ctrl_c_leaves_no_node_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the caller waits for the nodes that the second has ended; the fixture finds none of them."""

    def interrupted(self: Any, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("multiprocessing.process.BaseProcess.join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(At(2, ALL, lambda rank: time.sleep(60) if rank else sys.exit(3)), num_nodes=3)


@pytest.mark.slow
def test_a_caller_that_blocks_signals_hears_of_its_nodes_ends() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    try:
        assert len(fit(FedAvgStrategy(H=2)).history) == 9
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.slow
@linux
def test_an_interrupt_of_a_nodes_process_stops_the_run_after_its_step(tmp_path: Path) -> None:
    trainer = Trainer(small_mlp(), vectors())

    def interrupt_a_child(step: int, loss: float) -> None:
        if step == 2:
            os.kill(next(pid for pid in processes() if parent_of(pid) == fork_server()), signal.SIGINT)

    with pytest.raises(
        Interrupted, match=rf"interrupted after step \d+: the run is saved in '{tmp_path}'; resume=True"
    ):
        fit(
            FedAvgStrategy(H=2),
            trainer=trainer,
            max_steps=100_000,
            train_loss_hook=interrupt_a_child,
            save_dir=tmp_path,
        )
    assert load_checkpoint(tmp_path).step == trainer.history["step"][-1]


@pytest.mark.slow
@linux
def test_the_processes_end_with_a_caller_that_is_killed_while_they_start(tmp_path: Path, mark: str) -> None:
    with started(tmp_path, script(), mark) as process:
        read_until(process, "started")
        while len(processes("VSIM_TEST_MARK", mark)) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        assert gone_within(60, mark)  # the fork server notices once it has imported torch
        assert process.stderr is not None
        said = process.stderr.read().strip()
        # A process that was not told yet what to run finds an empty pipe, which Python's fork server prints.
        assert said == "" or (said.startswith("Traceback") and said.endswith("EOFError: Ran out of input"))
    assert list(tmp_path.glob("vsim-*")) == []


@pytest.mark.slow
def test_a_script_from_standard_input_catches_its_own_exception() -> None:
    ended = subprocess.run(
        [sys.executable, "-"], input=script(error_after=3), capture_output=True, text=True, timeout=180, check=False
    )
    assert ended.returncode == 0, ended.stderr
    *_, last = ended.stdout.splitlines()
    assert last in ("caught mine of node 0", "caught mine of node 1")
    assert ended.stdout.count("started") == 1
    assert ended.stderr == ""


@pytest.mark.slow
def test_nothing_keeps_a_process_group_that_was_destroyed() -> None:
    code = """
        import gc, weakref
        import torch, torch.distributed as dist
        import vsim.process.node

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = weakref.ref(dist.group.WORLD)
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        torch.optim.AdamW([weight]).step()
        dist.destroy_process_group()
        gc.collect()
        print("gone" if group() is None else "kept")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "gone\n"


@linux
def test_a_fork_server_starts_no_thread_and_asks_for_no_device() -> None:
    """Neither threads of OpenMP nor a device would survive a fork."""
    code = """
        import functools, os, torch

        @functools.cache  # as torch's are, some of whose importers look for __wrapped__
        def never(**_: object) -> bool:
            raise AssertionError("a process asks for a device")

        torch.cuda.is_available = torch.cuda.device_count = torch.backends.mps.is_available = never
        torch.accelerator.current_accelerator = torch.accelerator.is_available = never
        import vsim.process.preload

        print(len(os.listdir("/proc/self/task")), torch.cuda.is_initialized())
    """
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "4"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **one_thread},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "1 False\n", done.stderr
