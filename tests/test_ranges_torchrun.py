"""Under torchrun every rank holds several nodes: on one machine, and on two with a link whose bytes are counted."""

from __future__ import annotations

import json
import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from links import CABLE, address, linked, shape
from resumed import assert_same_comparison, assert_same_record
from separate import small_mlp, vectors
from test_process_exactness import in_processes
from test_torchrun import SECONDS, free_port, torchrun

import vsim
from vsim import Trainer, load_checkpoint
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
    found["simulated"] = compare(max_steps=6, backend="stacked", num_processes=None, threads_per_process=None, **exact)
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
        for name in ("compare", "simulated"):
            assert_same_comparison(own[name], comparison)
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


KILLED = """
    import signal

    def kill(run):
        if run.done == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    fit(callbacks=[kill], max_steps=8, save_dir=folder / "saved", checkpoint_interval=2, deterministic=True)
"""


def test_a_rank_that_is_killed_ends_all_and_the_run_resumes(tmp_path: Path) -> None:
    run = torchrun("--nproc_per_node=2", "--master_port", str(free_port()), script(tmp_path, KILLED))
    try:
        out, _ = run.communicate(timeout=SECONDS)
    finally:
        run.kill()
    assert run.returncode != 0 and "Signal 9 (SIGKILL) received by PID" in out, out
    assert load_checkpoint(tmp_path / "saved").step == 4
    straight: dict[str, Any] = {"max_steps": 8, "deterministic": True}
    resumed = fit(save_dir=tmp_path / "saved", resume=True, **straight, **in_processes(3))
    assert_same_fit(resumed, fit(**straight))


# Two machines --------------------------------------------------------------------------------------------------------

MACHINES, H = 2, 5
COUNTED = """
    import json
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import TensorDataset
    from links import CABLE
    from vsim.strategy import Strategy

    def counted():
        counters = Path(f"/sys/class/net/{CABLE}/statistics")
        return [int((counters / name).read_text()) for name in ("tx_bytes", "rx_bytes")]

    def plain(num_bytes):
        '''What a message of so many bytes to the other machine takes on the wire, for each byte.'''
        message = torch.zeros(num_bytes, dtype=torch.uint8)
        dist.barrier()
        before = counted()
        for src, dst in (0, 2), (2, 0):
            if rank == src:
                dist.send(message, dst)
            elif rank == dst:
                dist.recv(message, src)
        dist.barrier()
        return [(after - b) / num_bytes for after, b in zip(counted(), before)]

    def train(strategy, **more):
        marks = []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
        data = TensorDataset(torch.randn(64, 64), torch.randint(64, (64,)))
        trainer = Trainer(model, data, data, loss_fn=nn.functional.cross_entropy)
        trainer.fit(
            strategy=strategy, num_nodes=8, max_steps=32, batch_size=4, backend="process", num_processes="auto",
            threads_per_process=1, progress=False, train_loss_hook=lambda step, loss: marks.append(counted()),
            **{"val_interval": None, **more},
        )
        a, b = marks[5], marks[30]  # after steps 6 and 31
        weights = sum(p.numel() for p in model.parameters())
        steps = [event for event in trainer.ledger if 6 < event.step <= 31]
        return {
            "sent": (b[0] - a[0]) / 25, "received": (b[1] - a[1]) / 25, "bytes of weights": 4 * weights,
            "ledger": sum(event.wire_bytes for event in steps) / 25,
        }

    dist.init_process_group("gloo")
    found = {
        "plain": plain(4_000_000),
        "losses": train(Strategy(inner_optim="sgd", lr=1e-3)),
        "validated": train(Strategy(inner_optim="sgd", lr=1e-3), val_interval=1),
        "AllReduce": train(SimpleReduceStrategy("sgd", lr=1e-3)),
        "DiLoCo": train(DiLoCoStrategy("sgd", H=5, lr=1e-3)),
        "exact": train(SimpleReduceStrategy("sgd", lr=1e-3), deterministic=True),
    }
    (folder / f"found by {rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
"""


def test_the_link_between_machines_carries_the_bytes_of_ranks(tmp_path: Path) -> None:
    """The ledger has the nodes' bytes, and the link between machines carries the ranks'.

    Two machines, two ranks on each, two nodes in each rank: K = 8 nodes in G = 4 ranks on M = 2 machines. S is the
    bytes of one node's weights. All of this is each way, and protocol overhead is that of a plain message:

    - An all-reduce between nodes is 2 (K − 1) / K · S = 1.75 S for every node of the ledger, whatever G and M are.
      The ranks first reduce their own nodes, then gloo reduces between ranks in a ring, in which every rank sends
      2 (G − 1) / G · S to the next. Of the ring's connections one leaves each machine: 1.5 S on the link. DiLoCo sends
      this once in H steps.
    - With deterministic=True all rows go to all ranks, so that they are reduced in the order of the nodes: a machine
      sends its K / M rows to each of the G − G / M ranks elsewhere, K / M · (G − G / M) · S = 8 S.
    - A validation of nodes that differ takes the mean replica, by an all-reduce of minimum, maximum (whether nodes are
      equal) and mean: three, 4.5 S. The ledger does not count these, as a training run without validation would not
      send them.
    - Every step, ranks tell each other the losses, requests to stop and, as there is a hook here, the row of the
      record: a few messages of some hundred bytes, whatever the size of the model.
    """
    with linked(MACHINES) as machines:
        shape(machines, 200)
        meeting = ["--nnodes=2", "--nproc_per_node=2", f"--master_addr={address(0)}", f"--master_port={free_port()}"]
        path = script(tmp_path, COUNTED)
        runs = [
            torchrun(*meeting, f"--node_rank={n}", path, before=["ip", "netns", "exec", machine], interface=CABLE)
            for n, machine in enumerate(machines)
        ]
        try:
            for run in runs:
                out, _ = run.communicate(timeout=SECONDS)
                assert run.returncode == 0, out
        finally:
            for run in runs:
                run.kill()
                run.communicate()
    found = json.loads((tmp_path / "found by 0.json").read_text())
    weights = found["losses"]["bytes of weights"]
    expected = {"AllReduce": 1.5, "DiLoCo": 1.5 / H, "exact": 8.0, "validated": 4.5}
    for way, overhead in zip(("sent", "received"), found["plain"], strict=True):
        assert 1 < overhead < 1.1
        assert 4 * 64 < found["losses"][way] < 10_000
        times = {name: (found[name][way] - found["losses"][way]) / weights / overhead for name in expected}
        assert times == pytest.approx(expected, rel=0.03), way
    of_a_node = {name: found[name]["ledger"] / weights for name in found if name != "plain"}
    nodes = {"losses": 0, "validated": 0, "AllReduce": 1.75, "DiLoCo": 1.75 / H, "exact": 1.75}
    assert of_a_node == pytest.approx(nodes)
