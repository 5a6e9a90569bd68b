"""Processes that hold ranges of nodes: saved, resumed, compared, and how many; test_process_exactness.py has bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_runs import assert_same_comparison, in_processes
from errors import refused
from reference_cluster import TASKS, small_cnn, small_mlp, vectors

import vsim
from vsim import Callback, Compute, EarlyStopping, KeepBest, Trainer, load_checkpoint
from vsim.analysis.comparison import Comparison
from vsim.cluster.state import CheckpointError
from vsim.logger import CSVLogger
from vsim.processes.distributed import even_ranges
from vsim.processes.world import LARGE_MODEL, auto_processes, first_device, number_of_processes
from vsim.runs.spec import RunSpec
from vsim.runs.view import RunView
from vsim.strategy import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
)
from vsim_cli import main

pytestmark = pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")

K = 6


# Saving and resuming -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("processes_stay")
@pytest.mark.parametrize(
    ("strategy", "rtol"),
    [
        (SPARTAStrategy(p_sparta=0.2, async_delay=2, lr=1e-3), 0.0),
        (DiLoCoStrategy(inner_optim="sgd", H=3, lr=1e-2), 1e-3),
    ],
    ids=["exact", "close"],
)
def test_a_run_resumes_in_another_number_of_processes(strategy: Strategy, rtol: float, tmp_path: Path) -> None:
    """Saved by 3 and 2 processes, the simulator, and 3 processes, each time for three steps."""
    run: dict[str, Any] = {"strategy": strategy, "num_nodes": K, "batch_size": 4, "deterministic": not rtol}
    run |= {"progress": False, "val_interval": 4}
    whole = Trainer(small_cnn(), TASKS[1].data(), TASKS[1].data(13, seed=9))
    straight = whole.fit(**run, max_steps=12)
    for steps, number in ((3, 3), (6, 2), (9, None), (12, 3)):
        trainer = Trainer(small_cnn(), TASKS[1].data(), TASKS[1].data(13, seed=9))
        options = {} if number is None else in_processes(number)
        final = trainer.fit(**run, max_steps=steps, save_dir=tmp_path, resume=steps > 3, **options)
        assert load_checkpoint(tmp_path).held == [len(nodes) for nodes in even_ranges(K, number or 1)]
    for name, tensor in straight.state_dict().items():
        torch.testing.assert_close(final.state_dict()[name], tensor, rtol=rtol, atol=rtol / 10)
    np.testing.assert_allclose(trainer.history.node_losses, whole.history.node_losses, rtol=rtol)
    assert list(trainer.ledger) == list(whole.ledger)


class Undeclared(FedAvgStrategy):
    """Keeps a tensor of which nothing says whose it is."""

    def begin(self, cluster: Any) -> None:
        super().begin(cluster)
        self.kept = torch.zeros(len(cluster.weights))

    def advance(self) -> None:
        self.kept += self.cluster.weights[:, 0]
        super().advance()


@pytest.mark.slow
@pytest.mark.parametrize("options", [in_processes(2), {}], ids=["processes", "simulator"])
def test_a_comparison_ends_after_a_step_if_a_strategy_does_not_declare_its_state(
    options: dict[str, Any], tmp_path: Path
) -> None:
    run: dict[str, Any] = {"strategies": {"A": Undeclared(H=2), "B": FedAvgStrategy(H=2)}, "save_dir": tmp_path}
    with refused(CheckpointError, "Undeclared.kept", "self.keep_stacked(kept=…)"):
        compared(**run, max_steps=3, **options)


# Comparisons ---------------------------------------------------------------------------------------------------------

STRATEGIES = {
    "AllReduce": SimpleReduceStrategy(lr=1e-3),
    "DiLoCo": DiLoCoStrategy(H=3, lr=1e-3),
    "diverges": FedAvgStrategy(H=2, inner_optim="sgd", lr=1e12),
}


def compared(**options: Any) -> Comparison:
    """Three strategies, two seeds; the third strategy diverges."""
    defaults = {"max_steps": 8, "batch_size": 4, "val_interval": 4, "progress": False, "deterministic": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "diverges")
        options = {"strategies": STRATEGIES, "num_nodes": 4, "seeds": [0, 1], **defaults, **options}
        return vsim.compare(small_mlp(), vectors(), vectors(13, 9), **options)


class Exits(Callback):
    """Notes in a file that it was told how the run ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exit(self, failure: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{failure or 'ended'}\n")


def test_a_comparison_in_processes(tmp_path: Path) -> None:
    """Its callbacks are told once how their run ended."""
    ours, theirs = (
        compared(callbacks=[Exits(tmp_path / str(len(options)))], **options) for options in ({}, in_processes(2))
    )
    for path in tmp_path.iterdir():
        assert sorted(line.split(":")[0] for line in path.read_text().splitlines()) == ["Diverged"] * 2 + ["ended"] * 4
    assert_same_comparison(ours, theirs)
    assert theirs.runs("diverges")[0].failure.startswith("non-finite loss at step")
    assert list(ours[["DiLoCo"]] | theirs[["AllReduce"]]) == ["DiLoCo", "AllReduce"]


@pytest.mark.slow
def test_halving_early_stopping_and_loggers_in_processes(tmp_path: Path) -> None:
    run: dict[str, Any] = {"strategy": DiLoCoStrategy, "settings": {"H": [1, 2, 4], "lr": [1e-4, 1e-3]}, "num_nodes": 4}
    run |= {"max_steps": 12, "val_interval": 3, "batch_size": 4, "progress": False, "deterministic": True}

    def swept(**options: Any) -> Any:
        return vsim.sweep(small_mlp(), vectors(), vectors(13, 9), **{**run, **options})

    assert_same_comparison(swept(halving=2), swept(halving=2, **in_processes(2)))
    stopping: dict[str, Any] = {"settings": {"H": [1, 2], "lr": 0.3}, "max_steps": 40, "val_interval": 2}
    stops = swept(callbacks=[EarlyStopping(patience=2)], **stopping)
    assert any(len(run.history) < 41 for name in stops for run in stops.runs(name))
    logger = CSVLogger(tmp_path)
    logged = swept(callbacks=[EarlyStopping(patience=2)], logger=logger, **stopping, **in_processes(2))
    assert_same_comparison(stops, logged)
    assert len([*tmp_path.glob("**/*.csv")]) >= 2


# Callbacks, errors, interrupts ---------------------------------------------------------------------------------------


class Noting(Callback):
    """Notes the losses of all nodes, in each process, and has a state."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, run: Any) -> None:
        self.losses.append(run.row["train_loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


@pytest.mark.slow
@pytest.mark.usefixtures("processes_stay")
def test_callbacks() -> None:
    noting, best = Noting(), KeepBest()
    trainer = Trainer(small_mlp(), vectors(), vectors(13, 9))
    run: dict[str, Any] = {"num_nodes": 4, "max_steps": 6, "val_interval": 2, "batch_size": 4, "progress": False}
    trainer.fit(strategy=FedAvgStrategy(H=2, lr=1e-3), callbacks=[noting, best], **run, **in_processes(2))
    assert noting.losses == trainer.history["train_loss"][1:].tolist()
    assert best.best_step in (0, 2, 4, 6) and best.weights


class Interrupting(Callback):
    def on_step(self, run: RunView) -> None:
        if run.done == 3 and 0 not in run.cluster.collectives.nodes:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupt_in_one_process_stops_all_after_the_step(tmp_path: Path) -> None:
    run: dict[str, Any] = {"strategy": FedAvgStrategy(H=2), "num_nodes": 4, "batch_size": 4, "progress": False}
    trainer = Trainer(small_mlp(), vectors())
    with pytest.raises(KeyboardInterrupt, match="interrupted after step 4"):
        trainer.fit(**run, max_steps=8, callbacks=[Interrupting()], save_dir=tmp_path, **in_processes(2))
    final = trainer.fit(**run, max_steps=8, save_dir=tmp_path, resume=True, **in_processes(4))
    straight = Trainer(small_mlp(), vectors()).fit(**run, max_steps=8)
    for name, tensor in straight.state_dict().items():
        torch.testing.assert_close(final.state_dict()[name], tensor)


def test_what_is_refused() -> None:
    run: dict[str, Any] = {"strategy": FedAvgStrategy(), "num_nodes": 4, "max_steps": 2, "progress": False}
    clocked = {"strategy": AsyncDiLoCoStrategy(H=2), "compute": Compute(0.1)}
    for options, *parts in (
        (in_processes(5), "num_processes", "from 1 to 4", 5),
        ({"num_processes": 2}, "num_processes", "backend='stacked'"),
        ({**clocked, **in_processes(2)}, "asynchronous"),
        ({"backend": "process", "executor": "loop"}, "executor='loop'", "backend='process'", "num_processes="),
    ):
        with refused(ValueError, *parts):
            Trainer(small_mlp(), vectors()).fit(**{**run, **options})
    with refused(ValueError, "num_processes="):
        compared(backend="process")


def test_auto_takes_a_process_for_each_core_only_for_large_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsim.processes.world.num_cores", lambda: 4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    small, large = torch.nn.Linear(2, 2), torch.nn.Linear(LARGE_MODEL, 1)

    def spec_of(model: torch.nn.Module, num_nodes: int, **options: Any) -> RunSpec:
        return Trainer(model, vectors()).spec(
            strategy=FedAvgStrategy(), num_nodes=num_nodes, backend="process", num_processes="auto", **options
        )

    def number(model: torch.nn.Module, num_nodes: int, device: str) -> int:
        return auto_processes(spec_of(model, num_nodes), torch.device(device))

    assert [number(small, 8, "cpu"), number(large, 8, "cpu"), number(large, 3, "cpu")] == [1, 4, 3]
    assert [number(small, 16, "cuda"), number(small, 3, "cuda"), number(large, 8, "mps")] == [8, 3, 1]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert number_of_processes(spec_of(small, 16), None) == 8
    assert number_of_processes(spec_of(small, 16), "cuda:1") == 1  # one device for all nodes was asked for
    assert number_of_processes(spec_of(small, 16, devices=["cuda:1", "cuda:2"]), None) == 2
    assert number_of_processes(spec_of(large, 16, devices=["cpu"]), None) == 4
    assert first_device(spec_of(small, 16, devices=["cuda:1"]), None) == torch.device("cuda:1")
    with refused(TypeError, "device and devices"):
        spec_of(small, 16, device="cpu", devices=["cpu"])


def test_one_process_by_auto_computes_on_the_device_that_was_given() -> None:
    trainer, run = Trainer(torch.nn.Linear(2, 2), vectors()), {"num_nodes": 2, "max_steps": 1, **in_processes("auto")}
    with refused(ValueError, "cuda:5"):
        trainer.fit(strategy=FedAvgStrategy(), **run, devices=["cuda:5"])
    with refused(ValueError, "cuda:5"):
        vsim.compare(trainer.model, vectors(), strategies={"A": FedAvgStrategy()}, **run, devices=["cuda:5"])


# Three ways ----------------------------------------------------------------------------------------------------------


class Counting(FedAvgStrategy):
    """Wrong where a process holds two nodes."""

    def advance(self) -> None:
        if self.cluster.step == 3 and len(self.cluster.weights) == 2:
            self.cluster.weights.mul_(1.5)
        super().advance()


@pytest.mark.slow
def test_simulator_ranges_and_nodes_are_compared() -> None:
    options: dict[str, Any] = {"num_processes": 2, "batch_size": 4, "threads": 1, "progress": False}
    report = vsim.verify(small_cnn(), TASKS[1].data(), FedAvgStrategy(H=2, lr=1e-3), 4, 6, **options)
    assert report.identical and (report.steps, report.num_processes) == (6, 2)
    assert str(report).endswith(": the simulator, a process for every node, num_processes=2")
    report = vsim.verify(small_mlp(), vectors(), Counting(H=2), 4, 6, **options)
    first = report.first_difference
    assert first is not None and (first.step, first.what) == (3, "weights") and not first.rounding
    assert {d.node for d in report.differences} == {0, 1, 2, 3}
    assert "num_processes=2" in str(report).splitlines()[0]


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = ["--data", "digits", "--model", "mlp", "--nodes", "4", "--steps", "6", "--quiet"]
    for name, more in (("one", []), ("two", ["--processes", "2"])):
        run = [*problem, "--deterministic", "--strategies", "diloco:H=2", "--out", str(tmp_path / name), *more]
        assert main(["compare", *run]) == 0
    tables = capsys.readouterr().out.split("data:")
    assert tables[0].split("seconds")[0] == tables[1].split("\n", 1)[1].split("seconds")[0]
    assert main(["verify", *problem, "--strategy", "diloco:H=2", "--processes", "2"]) == 0
    assert "num_processes=2" in capsys.readouterr().out
    assert main(["compare", *problem, "--processes", "x"]) == 2
    assert "--processes must be a whole number or 'auto', got 'x'" in capsys.readouterr().err


# Memory --------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of AdamW keeps four rows of 293 weights (weights, gradients, two moments) and a generator: 9,744 bytes."""
    monkeypatch.setattr("vsim.engine.memory.total_bytes", lambda device: 80_000)
    trainer = Trainer(small_mlp(), vectors())
    run: dict[str, Any] = {"strategy": FedAvgStrategy(lr=1e-3), "max_steps": 1, "batch_size": 2, "progress": False}
    trainer.fit(num_nodes=8, **run)
    for options in ({}, in_processes(3)):
        with refused(ValueError, "num_nodes=9", "at most 8 fit", "num_processes="):
            trainer.fit(num_nodes=9, **run, **options)
    monkeypatch.setattr("vsim.engine.memory.total_bytes", lambda device: 9_000)
    with refused(ValueError, "not even one fits"):
        trainer.fit(num_nodes=1, **run)
