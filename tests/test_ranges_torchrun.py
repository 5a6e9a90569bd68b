"""Under torchrun every rank holds several nodes: on one machine, and on two with a link whose bytes are counted."""

from __future__ import annotations

import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from separate import small_mlp, vectors
from test_ranges import assert_same_comparison, assert_same_record, in_processes
from test_torchrun import SECONDS, free_port, torchrun

import vsim
from vsim import Trainer
from vsim.records.comparison import Comparison
from vsim.records.history import History
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy, Strategy

pytestmark = pytest.mark.slow

K = 6
RUN: dict[str, Any] = {"num_nodes": K, "batch_size": 4, "val_interval": 2}
HEAD = """
    import os
    import sys
    import time
    from pathlib import Path

    sys.path.insert(0, {tests!r})
    import torch
    import tqdm.auto
    import vsim
    from separate import small_mlp, vectors
    from vsim import Trainer
    from vsim.logger import CSVLogger
    from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy

    rank, folder = int(os.environ["RANK"]), Path({folder!r})
    options = dict(
        num_nodes=6, batch_size=4, val_interval=2, backend="process", num_processes="auto", threads_per_process=1,
    )

    def fit(**more):
        trainer = Trainer(small_mlp(0.2), vectors(), vectors(13, 9))
        strategy = DiLoCoStrategy(H=2, lr=1e-2)
        model = trainer.fit(strategy=strategy, **{{"progress": False, **options, **more}})
        return trainer.history, model.state_dict()

    def compare(**more):
        strategies = {{"DiLoCo": DiLoCoStrategy(H=2, lr=1e-2), "AllReduce": SimpleReduceStrategy(lr=1e-2)}}
        more = {{"progress": False, **options, **more}}
        return vsim.compare(small_mlp(0.2), vectors(), vectors(13, 9), strategies=strategies, **more)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    head = HEAD.format(tests=str(Path(__file__).parent), folder=str(folder))
    path.write_text(textwrap.dedent(head) + textwrap.dedent(text))
    return str(path)


def fit(**options: Any) -> tuple[History, dict[str, torch.Tensor]]:
    """What the scripts do, without torchrun."""
    trainer = Trainer(small_mlp(0.2), vectors(), vectors(13, 9))
    model = trainer.fit(strategy=DiLoCoStrategy(H=2, lr=1e-2), **{"progress": False, **RUN, **options})
    return trainer.history, model.state_dict()


def compare(**options: Any) -> Comparison:
    strategies: dict[str, Strategy] = {
        "DiLoCo": DiLoCoStrategy(H=2, lr=1e-2),
        "AllReduce": SimpleReduceStrategy(lr=1e-2),
    }
    return vsim.compare(
        small_mlp(0.2), vectors(), vectors(13, 9), strategies=strategies, **{"progress": False, **RUN, **options}
    )


def assert_same_fit(ours: Any, theirs: Any) -> None:
    assert_same_record(ours[0], theirs[0])
    assert all(torch.equal(tensor, theirs[1][name]) for name, tensor in ours[1].items())


def run_on_two_ranks(path: str) -> str:
    run = torchrun("--nproc_per_node=2", "--master_port", str(free_port()), path)
    try:
        out, _ = run.communicate(timeout=SECONDS)
    finally:
        run.kill()
    assert run.returncode == 0, out
    return out


ALL = """
    class Bar(tqdm.auto.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            (folder / f"bar of {rank}").touch()

    tqdm.auto.tqdm = Bar
    exact = dict(deterministic=True)
    saved = dict(save_dir=folder / "run", **exact)
    fit(max_steps=4, **saved)
    logger = CSVLogger(folder / "logs of fit")
    found = {"fit": fit(max_steps=6, resume=True, progress=True, logger=logger, **saved), "plain": fit(max_steps=6)}
    saved = dict(save_dir=folder / "runs", **exact)
    compare(max_steps=4, **saved)
    logger = CSVLogger(folder / "logs of compare")
    found["compare"] = compare(max_steps=6, resume=True, progress=True, logger=logger, **saved)
    found["refused"] = []
    for train in fit, compare:
        for wrong in dict(num_processes=3), dict(num_nodes=1), dict(num_processes=7):
            try:
                train(max_steps=1, **wrong)
            except ValueError as error:
                found["refused"].append(str(error))
    torch.save(found, folder / f"found by {rank}.pt")
    assert not torch.distributed.is_initialized()
"""


def test_a_script_runs_on_ranks_with_several_nodes_each(tmp_path: Path) -> None:
    """fit and compare, saved, resumed, logged and refused; all ranks return the same."""
    run_on_two_ranks(script(tmp_path, ALL))
    found = [torch.load(tmp_path / f"found by {rank}.pt", weights_only=False) for rank in range(2)]
    simulated, plain = fit(max_steps=6, deterministic=True), fit(max_steps=6, **in_processes(2))
    comparison = compare(max_steps=6, deterministic=True)
    for own in found:
        assert_same_fit(own["fit"], simulated)
        assert_same_fit(own["plain"], plain)  # as without torchrun, in as many processes
        assert_same_comparison(own["compare"], comparison)
        counts = "num_processes is 3, but torchrun has started 2"
        assert len(own["refused"]) == 6
        for wrong, few, many in (own["refused"][:3], own["refused"][3:]):
            assert counts in wrong and "whole number from 1 to 6, got 7" in many
            assert "torchrun has started 2 processes for num_nodes=1 nodes: start fewer" in few
    assert sorted(path.name for path in tmp_path.glob("bar of *")) == ["bar of 0"]
    for name, files in (("fit", 2), ("compare", 4)):
        logs = [*(tmp_path / f"logs of {name}").glob("**/*.csv")]
        assert len(logs) == files, logs  # of each run, train.csv and validation.csv
        for log in logs:
            steps = [line.split(",")[0] for line in log.read_text().splitlines()[1:]]
            assert len(steps) == len(set(steps)) > 0


INTERRUPTED = """
    def slowly(run):
        time.sleep(0.05)
        if run.done == 3 and rank == 0:
            print("step 3", flush=True)

    options |= dict(deterministic=True, max_steps=40, callbacks=[slowly])
    try:
        if WHAT == "fit":
            fit(save_dir=folder / "saved")
        else:
            found = compare(save_dir=folder / "saved")
            told = {run.failure for name in found for run in found.runs(name)}
            raise KeyboardInterrupt(" and ".join(told))
    except KeyboardInterrupt as error:
        (folder / f"told {rank}").write_text(str(error))
"""


@pytest.mark.parametrize("what", ["fit", "compare"])
def test_ctrl_c_stops_all_ranks_after_a_step(what: str, tmp_path: Path) -> None:
    """torchrun passes it on to its ranks."""
    path = script(tmp_path, INTERRUPTED.replace("WHAT", repr(what)))
    run = torchrun("--nproc_per_node=2", "--master_port", str(free_port()), path)
    try:
        assert run.stdout is not None
        while (line := run.stdout.readline()) != "step 3\n":
            assert line, "ended before step 3"
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=SECONDS)
    finally:
        run.kill()
    told = [tmp_path / f"told {rank}" for rank in range(2)]
    assert all(re.match(r"interrupted after step \d+", path.read_text()) for path in told), out
    assert told[0].read_text() == told[1].read_text()
    straight: dict[str, Any] = {"max_steps": 40, "deterministic": True}
    resumed = {**straight, "save_dir": tmp_path / "saved", "resume": True}
    if what == "fit":
        assert_same_fit(fit(**resumed), fit(**straight))
    else:
        assert_same_comparison(compare(**resumed), compare(**straight))


FAULT = """
    def fail(run):
        if run.done == 3 and rank == 1:
            raise ArithmeticError("out of luck")

    found = compare(callbacks=[fail], max_steps=6)
    failures = {(len(run.history), run.failure) for name in found for run in found.runs(name)}
    torch.save(failures, folder / f"failures of {rank}.pt")
"""


def test_a_comparison_keeps_its_records_on_all_ranks_if_one_fails(tmp_path: Path) -> None:
    run_on_two_ranks(script(tmp_path, FAULT))
    first, second = (torch.load(tmp_path / f"failures of {rank}.pt", weights_only=False) for rank in range(2))
    assert {failure for _, failure in second} == {"ArithmeticError: out of luck"}
    assert all(failure.startswith("CollectiveFailure: ") for _, failure in first)
    assert {length for length, _ in first | second} <= {3, 4}
