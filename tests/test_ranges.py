"""Processes that hold ranges of the nodes: a run's results do not depend on the number of processes."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from separate import TASKS, Task, small_cnn, small_mlp, vectors
from test_process_exactness import DESIGN, ROWS, Result, Variant, fit, own_dataset
from test_strategies_common import Row
from test_torchrun import free_port, torchrun

import vsim
from vsim import Callback, Compute, EarlyStopping, KeepBest, Trainer, cli, load_checkpoint
from vsim.cluster.state import CheckpointError
from vsim.data.partition import partition
from vsim.logger import CSVLogger
from vsim.process import NodeFailure
from vsim.process.collectives import even_ranges
from vsim.process.world import LARGE_MODEL, auto_processes, first_device, number_of_processes
from vsim.records.comparison import Comparison
from vsim.records.history import OF_THE_MACHINE, History
from vsim.strategy import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
)
from vsim.training.run import Run
from vsim.training.spec import RunSpec

pytestmark = pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")

K = 6
OPTIONS: dict[str, Any] = {"deterministic": True, "val_size": 10, "val_interval": 5, "correlation_interval": 4}


def in_processes(number: int) -> dict[str, Any]:
    return {"backend": "process", "num_processes": number, "threads_per_process": 1}


def assert_same_record(ours: History, theirs: History) -> None:
    np.testing.assert_array_equal(ours.node_losses, theirs.node_losses)
    assert ours.columns == theirs.columns
    for column in ours.columns:
        if column not in OF_THE_MACHINE:
            np.testing.assert_array_equal(ours[column], theirs[column], column)
    assert list(ours.ledger) == list(theirs.ledger)


def assert_same(ours: Result, theirs: Result) -> None:
    assert_same_record(ours.trainer.history, theirs.trainer.history)
    for name, rows in ours.rows.items():
        assert torch.equal(rows, theirs.rows[name]), name
    final = theirs.model.state_dict()
    assert all(torch.equal(tensor, final[name]) for name, tensor in ours.model.state_dict().items())


# Equal bits ----------------------------------------------------------------------------------------------------------

QUICK = ["DiLoCo", "AllReduce", "point to point"]
CELLS = {
    f"{number}-{task.name}-{row.name}": (row, task, DESIGN[(i + number) % 12], number)
    for number in (1, 2, 3)  # in this order, so that the processes stay
    for i, row in enumerate(row for row in ROWS if row.takes(K))
    for task in [TASKS[(i + number // 3) % 3]]
    if number > 1 or i % 5 == 0
}


@pytest.mark.parametrize(
    ("row", "task", "variant", "number"),
    [
        pytest.param(*cell, id=name, marks=() if cell[0].name in QUICK and cell[3] == 2 else pytest.mark.slow)
        for name, cell in CELLS.items()
    ],
)
def test_every_strategy_has_the_same_bits_in_any_number_of_processes(
    row: Row,
    task: Task,
    variant: Variant,
    number: int,
    ranks_of: Callable[[int], Ranks],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vsim.trainer.train_in_processes", ranks_of(number).train)
    run: dict[str, Any] = {
        "model": task.model(),
        "data": variant.data(task),
        "val": task.data(13, seed=99),
        "strategy": variant.strategy(row),
        "num_nodes": K,
        "minibatch_size": 2 if variant.accumulation else None,
        **OPTIONS,
    }
    simulated = fit(tmp_path / "simulated", **run)
    assert_same(simulated, fit(tmp_path / "processes", **run, **in_processes(number)))


@pytest.mark.slow
@pytest.mark.parametrize(("num_nodes", "number"), [(5, 2), (5, 3), (3, 3)])
def test_ranges_may_differ_in_size(
    num_nodes: int,
    number: int,
    ranks_of: Callable[[int], Ranks],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vsim.trainer.train_in_processes", ranks_of(number).train)
    run: dict[str, Any] = {"model": small_cnn(), "data": TASKS[1].data(), "deterministic": True}
    run["num_nodes"] = num_nodes
    strategies = DiLoCoStrategy(H=3), SPARTAStrategy(p_sparta=0.2, async_delay=2), SimpleReduceStrategy()
    for i, strategy in enumerate(strategies):
        ours = fit(tmp_path / f"{i} simulated", strategy=strategy, **run)
        assert_same(ours, fit(tmp_path / f"{i} processes", strategy=strategy, **run, **in_processes(number)))


@pytest.mark.slow
def test_nodes_with_data_of_their_own(tmp_path: Path) -> None:
    """Each process makes the data of its own nodes; batches of one step differ in size."""
    for name, data in (
        ("factory", lambda rank, num_nodes, train: own_dataset(vectors, rank, num_nodes, train)),
        ("partition", partition(vectors(60), 5, "dirichlet", alpha=0.5, min_size=4)),
    ):
        run: dict[str, Any] = {"model": small_mlp(), "data": data, "strategy": FedAvgStrategy(H=2), "num_nodes": 5}
        ours = fit(tmp_path / f"{name} simulated", **run, deterministic=True)
        assert_same(ours, fit(tmp_path / f"{name} processes", **run, deterministic=True, **in_processes(2)))


@pytest.mark.parametrize("strategy", [SimpleReduceStrategy(lr=1e-3), DiLoCoStrategy(H=2, lr=1e-3)], ids=repr)
def test_without_deterministic_results_are_equal_up_to_rounding(
    strategy: Strategy, ranks_of: Callable[[int], Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AllReduce, the nodes of a process share one row."""
    monkeypatch.setattr("vsim.trainer.train_in_processes", ranks_of(2).train)
    run: dict[str, Any] = {"model": small_mlp(), "data": vectors(), "val": vectors(13, 9), "strategy": strategy}
    ours = fit(tmp_path / "simulated", **run, num_nodes=5)
    theirs = fit(tmp_path / "processes", **run, num_nodes=5, **in_processes(2))
    torch.testing.assert_close(ours.rows["weights"], theirs.rows["weights"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.trainer.history.node_losses, theirs.trainer.history.node_losses, rtol=1e-4)
    assert list(ours.trainer.ledger) == list(theirs.trainer.ledger)
    assert theirs.trainer.history.executor == ours.trainer.history.executor


# Saving and resuming -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "deterministic"),
    [
        (SPARTAStrategy(p_sparta=0.2, async_delay=2, lr=1e-3), True),
        (FedAvgStrategy(H=2, island_size=2, lr=1e-3), True),
        (DiLoCoStrategy(H=3, inner_optim="sgd", lr=1e-2), False),
        (SimpleReduceStrategy(inner_optim="sgd", lr=1e-2), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Strategy) else "",
)
def test_a_run_resumes_in_another_number_of_processes(strategy: Strategy, deterministic: bool, tmp_path: Path) -> None:
    """Saved by 4, 2 and 1 processes and the simulator in turn, each time for three steps."""
    run: dict[str, Any] = {"strategy": strategy, "num_nodes": K, "batch_size": 4, "deterministic": deterministic}
    run |= {"progress": False, "val_interval": 4}
    whole = Trainer(small_cnn(), TASKS[1].data(), TASKS[1].data(13, seed=9))
    straight = whole.fit(**run, max_steps=12)
    held = []
    for steps, number in ((3, 4), (6, 2), (9, None), (12, 3)):
        trainer = Trainer(small_cnn(), TASKS[1].data(), TASKS[1].data(13, seed=9))
        options = {} if number is None else in_processes(number)
        final = trainer.fit(**run, max_steps=steps, save_dir=tmp_path, resume=steps > 3, **options)
        held.append(load_checkpoint(tmp_path).held)
    assert held == [[len(nodes) for nodes in even_ranges(K, number)] for number in (4, 2, 1, 3)]
    tolerance = {"rtol": 0.0, "atol": 0.0} if deterministic else {"rtol": 1e-3, "atol": 1e-4}
    for name, tensor in straight.state_dict().items():
        torch.testing.assert_close(final.state_dict()[name], tensor, **tolerance)
    np.testing.assert_allclose(trainer.history.node_losses, whole.history.node_losses, rtol=tolerance["rtol"])
    assert list(trainer.ledger) == list(whole.ledger)


class Undeclared(FedAvgStrategy):
    """Keeps a tensor of which nothing says whose it is."""

    def setup(self, cluster: Any) -> None:
        super().setup(cluster)
        self.kept = torch.zeros(len(cluster.weights))

    def sync(self) -> None:
        self.kept += self.cluster.weights[:, 0]
        super().sync()


@pytest.mark.slow
@pytest.mark.parametrize("options", [in_processes(2), {}], ids=["processes", "simulator"])
def test_a_comparison_ends_after_a_step_if_a_strategy_does_not_declare_its_state(
    options: dict[str, Any], tmp_path: Path
) -> None:
    run: dict[str, Any] = {"strategies": {"A": Undeclared(H=2), "B": FedAvgStrategy(H=2)}, "save_dir": tmp_path}
    with pytest.raises(CheckpointError, match=r"Undeclared\.kept .* write self\.keep_stacked\(kept=…\)"):
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


def assert_same_comparison(ours: Comparison, theirs: Comparison) -> None:
    assert list(ours) == list(theirs)
    for name in ours:
        for one, other in zip(ours.runs(name), theirs.runs(name), strict=True):
            assert_same_record(one.history, other.history)
            assert (one.failure, one.stopped_at, one.diverged_at) == (
                other.failure,
                other.stopped_at,
                other.diverged_at,
            )
            assert (one.model is None) == (other.model is None)
            if one.model is not None and other.model is not None:
                final = other.model.state_dict()
                assert all(torch.equal(tensor, final[key]) for key, tensor in one.model.state_dict().items())


def test_a_comparison_in_processes() -> None:
    ours, theirs = compared(), compared(**in_processes(2))
    assert_same_comparison(ours, theirs)
    assert theirs.runs("diverges")[0].failure.startswith("non-finite loss at step")
    assert list(ours[["DiLoCo"]] | theirs[["AllReduce"]]) == ["DiLoCo", "AllReduce"]


@pytest.mark.slow
def test_a_comparison_resumes_in_another_number_of_processes(tmp_path: Path) -> None:
    ours = compared()
    compared(save_dir=tmp_path, max_steps=4, **in_processes(3))
    theirs = compared(save_dir=tmp_path, resume=True, **in_processes(2))
    assert_same_comparison(ours, theirs)


@pytest.mark.slow
def test_halving_early_stopping_and_loggers_in_processes(tmp_path: Path) -> None:
    run: dict[str, Any] = {
        "strategy": DiLoCoStrategy,
        "settings": {"H": [1, 2, 4], "lr": [1e-4, 1e-3]},
        "num_nodes": 4,
        "max_steps": 12,
        "val_interval": 3,
        "batch_size": 4,
        "progress": False,
        "deterministic": True,
    }

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


@pytest.mark.slow
def test_under_torchrun_a_comparison_may_be_simulated_on_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_ranges import assert_same_comparison, compared, in_processes

        if __name__ == "__main__":
            assert_same_comparison(compared(), compared(**in_processes(2)))
        """)
    )
    run = torchrun("--nproc_per_node=2", "--master_port", str(free_port()), str(path))
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 0, out


@pytest.mark.slow
def test_a_comparison_without_num_processes_says_what_to_give() -> None:
    with pytest.raises(ValueError, match="give num_processes="):
        compared(backend="process")


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
def test_callbacks_and_hooks() -> None:
    noting, best, heard = Noting(), KeepBest(), list[int]()
    trainer = Trainer(small_mlp(), vectors(), vectors(13, 9))
    trainer.fit(
        strategy=FedAvgStrategy(H=2, lr=1e-3),
        num_nodes=4,
        max_steps=6,
        val_interval=2,
        batch_size=4,
        callbacks=[noting, best],
        train_loss_hook=lambda step, loss: heard.append(step),
        progress=False,
        **in_processes(2),
    )
    assert noting.losses == trainer.history["train_loss"][1:].tolist()
    assert heard == [1, 2, 3, 4, 5, 6] and best.best_step in (0, 2, 4, 6) and best.weights


class Exits(Callback):
    """Notes in a file that it was told how the run ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exit(self, failure: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{failure or 'ended'}\n")


@pytest.mark.slow
def test_a_callback_is_told_once_how_its_run_ended(tmp_path: Path) -> None:
    for name, options in (("here", {}), ("processes", in_processes(2))):
        compared(callbacks=[Exits(tmp_path / name)], **options)
        told = sorted(line.split(":")[0] for line in (tmp_path / name).read_text().splitlines())
        assert told == ["Diverged"] * 2 + ["ended"] * 4, name


class Interrupting(Callback):
    def on_step(self, run: Run) -> None:
        if run.done == 3 and 0 not in run.nodes:
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
    trainer = Trainer(small_mlp(), vectors())
    run: dict[str, Any] = {"num_nodes": 4, "max_steps": 2, "batch_size": 2, "progress": False}
    with pytest.raises(ValueError, match="num_processes must be a whole number from 1 to 4, got 5"):
        trainer.fit(strategy=FedAvgStrategy(), **run, **in_processes(5))
    with pytest.raises(ValueError, match="num_processes has no effect with backend='stacked'"):
        trainer.fit(strategy=FedAvgStrategy(), **run, num_processes=2)
    with pytest.raises(ValueError, match="asynchronous strategies are simulated only"):
        trainer.fit(strategy=AsyncDiLoCoStrategy(H=2), **run, compute=Compute(0.1), **in_processes(2))
    with pytest.raises(ValueError, match=r"executor='loop' has no effect with backend='process'.*num_processes="):
        trainer.fit(strategy=FedAvgStrategy(), **run, backend="process", executor="loop")


def test_auto_takes_a_process_for_each_core_only_for_large_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsim.process.world.num_cores", lambda: 4)
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
    with pytest.raises(TypeError, match="device and devices say the same thing"):
        spec_of(small, 16, device="cpu", devices=["cpu"])


def test_one_process_by_auto_computes_on_the_device_that_was_given() -> None:
    trainer, run = Trainer(torch.nn.Linear(2, 2), vectors()), {"num_nodes": 2, "max_steps": 1, **in_processes("auto")}
    with pytest.raises(ValueError, match="'cuda:5' is not available"):
        trainer.fit(strategy=FedAvgStrategy(), **run, devices=["cuda:5"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'cuda:5' is not available"):
        vsim.compare(trainer.model, vectors(), strategies={"A": FedAvgStrategy()}, **run, devices=["cuda:5"])


@pytest.mark.slow
def test_auto_may_be_the_simulator() -> None:
    trainer = Trainer(small_mlp(), vectors())
    trainer.fit(strategy=FedAvgStrategy(), num_nodes=4, max_steps=2, progress=False, **in_processes("auto"))  # type: ignore[arg-type]
    assert trainer.strategy is not None  # as in this process


class Failing(FedAvgStrategy):
    """Fails on one node's process."""

    def sync(self) -> None:
        if self.cluster.step == 3 and 2 in self.cluster.replicas.nodes:
            raise ArithmeticError("out of luck")
        super().sync()


@pytest.mark.slow
def test_an_error_names_rank_and_nodes() -> None:
    with pytest.raises(ArithmeticError, match="out of luck") as caught:
        Trainer(small_mlp(), vectors()).fit(
            strategy=Failing(H=1), num_nodes=4, max_steps=6, batch_size=4, progress=False, **in_processes(2)
        )
    failure = caught.value.__cause__
    assert isinstance(failure, NodeFailure) and failure.rank == 1
    assert "rank 1 (nodes 2 to 3) failed after step 2" in str(failure)


@pytest.mark.slow
def test_a_comparison_keeps_its_records_if_a_process_fails() -> None:
    strategies = {"DiLoCo": DiLoCoStrategy(H=3), "fails": Failing(H=1)}
    with pytest.warns(UserWarning, match="out of luck"):
        comparison = vsim.compare(
            small_mlp(), vectors(), strategies=strategies, num_nodes=4, max_steps=6, progress=False, **in_processes(2)
        )
    assert all("out of luck" in run.failure for name in comparison for run in comparison.runs(name))
    assert len(comparison.runs("DiLoCo")[0].history) == 3


# Three ways ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simulator_ranges_and_nodes_agree() -> None:
    strategy = FedAvgStrategy(H=2, inner_optim="adamw", lr=1e-3)
    report = vsim.verify(
        small_cnn(), TASKS[1].data(), strategy, 4, 6, num_processes=2, batch_size=4, threads=1, progress=False
    )
    assert report.identical and (report.steps, report.num_processes) == (6, 2)
    assert str(report).endswith(": the simulator, a process for every node, num_processes=2")


class Counting(FedAvgStrategy):
    """Wrong where a process holds two nodes."""

    def sync(self) -> None:
        if self.cluster.step == 3 and len(self.cluster.weights) == 2:
            self.cluster.weights.mul_(1.5)
        super().sync()


@pytest.mark.slow
def test_a_difference_of_ranges_is_found() -> None:
    report = vsim.verify(
        small_mlp(), vectors(), Counting(H=2), 4, 6, num_processes=2, batch_size=4, threads=1, progress=False
    )
    first = report.first_difference
    assert first is not None and (first.step, first.what) == (3, "weights") and not first.rounding
    assert {d.node for d in report.differences} == {0, 1, 2, 3}
    assert "num_processes=2" in str(report).splitlines()[0]


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = ["--data", "digits", "--model", "mlp", "--nodes", "4", "--steps", "6", "--quiet"]
    for name, more in (("one", []), ("two", ["--processes", "2"])):
        run = [*problem, "--deterministic", "--strategies", "diloco:H=2", "--out", str(tmp_path / name), *more]
        assert cli.main(["compare", *run]) == 0
    tables = capsys.readouterr().out.split("data:")
    assert tables[0].split("seconds")[0] == tables[1].split("\n", 1)[1].split("seconds")[0]
    assert cli.main(["verify", *problem, "--strategy", "diloco:H=2", "--processes", "2"]) == 0
    assert "num_processes=2" in capsys.readouterr().out
    assert cli.main(["compare", *problem, "--processes", "x"]) == 2
    assert "num_processes must be a whole number or 'auto', got 'x'" in capsys.readouterr().err


# Memory --------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of AdamW keeps four rows of 293 weights (weights, gradients, two moments) and a generator: 9,744 bytes."""
    monkeypatch.setattr("vsim.engine.memory.total_bytes", lambda device: 80_000)
    trainer = Trainer(small_mlp(), vectors())
    run: dict[str, Any] = {"strategy": FedAvgStrategy(lr=1e-3), "max_steps": 1, "batch_size": 2, "progress": False}
    trainer.fit(num_nodes=8, **run)
    for options in ({}, in_processes(3)):
        with pytest.raises(ValueError, match=r"num_nodes=9 nodes take .* at most 8 fit.*num_processes="):
            trainer.fit(num_nodes=9, **run, **options)
    monkeypatch.setattr("vsim.engine.memory.total_bytes", lambda device: 9_000)
    with pytest.raises(ValueError, match=r"not even one fits.*has to fit on a device whole"):
        trainer.fit(num_nodes=1, **run)
