"""Under torchrun a script's `fit(backend="process")` joins as a rank of one node or several, on one machine or two."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_runs import assert_same_comparison, assert_same_record, in_processes
from links import CABLE, address, linked, shape
from reference_cluster import images, small_cnn, small_mlp, vectors
from torch import Tensor

import vsim
from vsim import Sample, Schedule, Trainer, load_checkpoint
from vsim.analysis.comparison import Comparison
from vsim.checkpoint.folder import checkpoints_in
from vsim.history.history import History
from vsim.processes import world
from vsim.processes.distributed import CollectiveFailure
from vsim.strategy import DiLoCoStrategy, OptimSpec, SimpleReduceStrategy, Strategy

SECONDS = 120
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def torchrun(*arguments: str, before: Sequence[str] = (), interface: str = LOOPBACK) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-m", "torch.distributed.run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface},
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def ended(*runs: subprocess.Popen[str]) -> Iterator[None]:
    """At the end of the context they have, too."""
    try:
        yield
    finally:
        for run in runs:
            run.kill()
            run.communicate()


def on_two_ranks(path: str) -> subprocess.Popen[str]:
    return torchrun("--nproc_per_node=2", f"--master_port={free_port()}", path)


def on_two_machines(
    path: str, ranks: int, master: str = "127.0.0.1", inside: Sequence[Sequence[str]] = ((), ()), **options: Any
) -> None:
    """An agent with so many ranks on each."""
    meeting = ["--nnodes=2", f"--nproc_per_node={ranks}", f"--master_addr={master}", f"--master_port={free_port()}"]
    runs = [torchrun(*meeting, f"--node_rank={i}", path, before=own, **options) for i, own in enumerate(inside)]
    with ended(*runs):
        for run in runs:
            out, _ = run.communicate(timeout=SECONDS)
            assert run.returncode == 0, out


# What the scripts define, and the same here ---------------------------------------------------------------------------

HEAD = """
    import os
    import sys
    import time
    from functools import partial
    from pathlib import Path

    sys.path.insert(0, {tests!r})
    import test_torchrun
    import torch
    import tqdm.auto
    from vsim.logger import CSVLogger
    from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy, Strategy

    class Bar(tqdm.auto.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            (folder / f"bar of {{rank}}").touch()

    tqdm.auto.tqdm = Bar
    rank, folder = int(os.environ["RANK"]), Path({folder!r})
    options = dict(backend="process", threads_per_process=1)
    ranges = dict(**options, num_processes="auto")
    fit, compare = partial(test_torchrun.fit, **ranges), partial(test_torchrun.compare, **ranges)
    exact = dict(deterministic=True)

    def refused(train, **wrong):
        try:
            train(max_steps=1, **wrong)
        except ValueError as error:
            return str(error)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    head = HEAD.format(tests=str(Path(__file__).parent), folder=str(folder))
    path.write_text(textwrap.dedent(head) + textwrap.dedent(text))
    return str(path)


Outcome = tuple[History, dict[str, Tensor]]
RUN: dict[str, Any] = {"num_nodes": 6, "batch_size": 4, "val_interval": 2, "progress": False}


def fit(**options: Any) -> Outcome:
    trainer = Trainer(small_mlp(0.2), vectors(), vectors(13, 9))
    model = trainer.fit(strategy=DiLoCoStrategy(H=2, lr=1e-2), **{**RUN, **options})
    return trainer.history, model.state_dict()


def compare(**options: Any) -> Comparison:
    strategies: dict[str, Strategy] = {"DiLoCo": DiLoCoStrategy(H=2, lr=1e-2), "AllReduce": SimpleReduceStrategy()}
    return vsim.compare(small_mlp(0.2), vectors(), vectors(13, 9), strategies=strategies, **{**RUN, **options})


def fit_images(max_steps: int, **options: Any) -> tuple[Outcome, Trainer]:
    trainer = Trainer(small_cnn(), images(), images(7))
    strategy = DiLoCoStrategy(H=2, inner_optim=OptimSpec("adamw", lr=1e-2))
    options = {"num_nodes": 2, "batch_size": 4, "val_interval": 3, "deterministic": True, **options}
    model = trainer.fit(strategy=strategy, max_steps=max_steps, **options)
    return (trainer.history, model.state_dict()), trainer


def fit_plans(**processes: Any) -> list[Outcome]:
    """A rank none of whose nodes takes part, ranges of nodes, and clients."""
    each = {name: value for name, value in processes.items() if name != "num_processes"}
    leaves, joins = Schedule({0: [0, 1], 3: [1], 6: [0, 1]}), Schedule({0: [2, 3], 3: range(3)})
    run: dict[str, Any] = {"max_steps": 8, "deterministic": True, "val_interval": None}
    return [
        fit(**run, num_nodes=2, participation=leaves, **each),
        *(fit(**run, num_nodes=4, participation=plan, **processes) for plan in (joins, Sample(4, of=9))),
    ]


def assert_same_fit(ours: Outcome, theirs: Outcome) -> None:
    assert_same_record(ours[0], theirs[0])
    assert all(torch.equal(tensor, theirs[1][name]) for name, tensor in ours[1].items())


# A node for every rank ------------------------------------------------------------------------------------------------

NODES = """
    def keep(run):
        if run.cluster.step == 6:
            torch.save(run.cluster.weights, folder / f"node {run.cluster.replicas.first_node}.pt")

    fit = partial(test_torchrun.fit_images, callbacks=[keep], **options)
    torch.manual_seed(7)
    found = [fit(6)[0]]
    saved = dict(save_dir=folder / "run")
    fit(3, checkpoint_interval=2, **saved)  # which finds nothing of the first
    found.append(fit(6, resume=True, **saved)[0])
    errors = [refused(fit, **saved), refused(fit, num_nodes=3)]
    torch.save((found, errors), folder / f"found by {rank}.pt")
    assert not torch.distributed.is_initialized()
"""


@pytest.mark.slow
def test_two_agents_meet(tmp_path: Path) -> None:
    """With a rank each: the simulator's bits, also of a run that resumes."""
    on_two_machines(script(tmp_path, NODES), 1)
    simulated, trainer = fit_images(6, progress=False)
    assert trainer.strategy is not None
    weights = trainer.strategy.cluster.weights
    for node in range(2):
        assert torch.equal(torch.load(tmp_path / f"node {node}.pt")[0], weights[node])
        found, (kept, few) = torch.load(tmp_path / f"found by {node}.pt", weights_only=False)
        for one in found:
            assert_same_fit(one, simulated)
        assert "holds the checkpoints of a run" in kept
        assert "num_nodes is 3, but torchrun has started 2 processes, a node each: give num_nodes=2" in few
    assert [path.name for path in tmp_path.glob("bar of *")] == ["bar of 0"]
    files = ["step-00000003.safetensors", "step-00000006.safetensors"]
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == files
    assert torch.equal(load_checkpoint(tmp_path / "run").weights, weights)


@pytest.mark.parametrize("theirs", ["nccl", "gloo", None])
def test_ranks_with_other_backends_are_told(theirs: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    store, opened = dist.HashStore(), []
    monkeypatch.setattr(world, "_meeting", [store])
    monkeypatch.setattr(world, "_runs", itertools.count())
    monkeypatch.setattr(world, "open_group", lambda backend, _, *ranks: opened.append((backend, *ranks[:2])))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if theirs is not None:
        store.set("vsim run 0/backend 1", theirs)
    seconds = timedelta(seconds=0.1)
    if theirs == "gloo":
        world._init_process_group("gloo", seconds)
        assert opened == [("gloo", 0, 2)]
        return
    message = "rank 0 by gloo, rank 1 by nccl" if theirs else "meeting the other ranks on rank 0 did not complete"
    with pytest.raises(ValueError if theirs else CollectiveFailure, match=message):
        world._init_process_group("gloo", seconds)
    assert not opened


# Several nodes in each rank -------------------------------------------------------------------------------------------

RANGES = """
    saved = dict(save_dir=folder / "run", **exact)
    fit(max_steps=4, **saved)
    logger = CSVLogger(folder / "logs of fit")
    found = {"fit": fit(max_steps=6, resume=True, progress=True, logger=logger, **saved), "plain": fit(max_steps=6)}
    saved = dict(save_dir=folder / "runs", **exact)
    compare(max_steps=4, **saved)
    logger = CSVLogger(folder / "logs of compare")
    found["compare"] = compare(max_steps=6, resume=True, progress=True, logger=logger, **saved)
    found["simulated"] = test_torchrun.compare(max_steps=6, **exact)
    found["plans"] = test_torchrun.fit_plans(**ranges)
    found["refused"] = [
        refused(train, **wrong)
        for train in (fit, compare)
        for wrong in (dict(num_processes=3), dict(num_nodes=1), dict(num_processes=7))
    ]
    torch.save(found, folder / f"found by {rank}.pt")
    assert not torch.distributed.is_initialized()
"""


@pytest.mark.slow
def test_a_script_runs_on_ranks_with_several_nodes_each(tmp_path: Path) -> None:
    """fit and compare, saved, resumed, logged and refused; all ranks return the same."""
    run = on_two_ranks(script(tmp_path, RANGES))
    with ended(run):
        out, _ = run.communicate(timeout=SECONDS)
        assert run.returncode == 0, out
    found = [torch.load(tmp_path / f"found by {rank}.pt", weights_only=False) for rank in range(2)]
    simulated, plain = fit(max_steps=6, deterministic=True), fit(max_steps=6, **in_processes(2))
    comparison, plans = compare(max_steps=6, deterministic=True), fit_plans()
    for own in found:
        assert_same_fit(own["fit"], simulated)
        assert_same_fit(own["plain"], plain)  # as without torchrun, in as many processes
        for one, other in zip(own["plans"], plans, strict=True):
            assert_same_fit(one, other)
        for name in ("compare", "simulated"):
            assert_same_comparison(own[name], comparison)
        for wrong, few, many in (own["refused"][:3], own["refused"][3:]):
            assert "num_processes is 3, but torchrun has started 2" in wrong
            assert "torchrun has started 2 processes for num_nodes=1 nodes: start fewer" in few
            assert "whole number from 1 to 6, got 7" in many
    assert sorted(path.name for path in tmp_path.glob("bar of *")) == ["bar of 0"]
    for name, files in (("fit", 2), ("compare", 4)):
        logs = [*(tmp_path / f"logs of {name}").glob("**/*.csv")]
        assert len(logs) == files, logs  # of each run, train.csv and validation.csv
        for log in logs:
            steps = [line.split(",")[0] for line in log.read_text().splitlines()[1:]]
            assert len(steps) == len(set(steps)) > 0


SEARCHED = """
    import vsim

    search = test_torchrun.searched(**ranges, save_dir=folder / "search")
    torch.save([*search.all_histories, search.study is None], folder / f"found by {rank}.pt")
"""


def searched(**options: Any) -> vsim.Search:
    given: dict[str, Any] = {"num_nodes": 4, "max_steps": 4, "batch_size": 4, "progress": False, **options}
    return vsim.tune(small_mlp(), vectors(), vectors(6), space=_strategy, trials=3, together=2, **given)


def _strategy(trial: Any) -> Strategy:
    return DiLoCoStrategy(H=trial.suggest_int("H", 1, 3), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))


@pytest.mark.slow
def test_one_rank_asks_for_trials(tmp_path: Path) -> None:
    run = on_two_ranks(script(tmp_path, SEARCHED))
    with ended(run):
        out, _ = run.communicate(timeout=SECONDS)
        assert run.returncode == 0, out
    here = searched(**in_processes(2))
    for rank in range(2):
        *histories, without_study = torch.load(tmp_path / f"found by {rank}.pt", weights_only=False)
        assert without_study == (rank > 0)
        for one, other in zip(histories, here.all_histories, strict=True):
            assert_same_record(one, other)
    assert {path.name for path in (tmp_path / "search").iterdir()} >= {"study.db", "comparison.json"}


@pytest.mark.slow
def test_the_command_line_prints_and_writes_on_one_rank(tmp_path: Path) -> None:
    arguments = [
        "--strategies",
        "alone",
        "diloco:H=2",
        "--data",
        "digits",
        "--nodes",
        "4",
        "--steps",
        "4",
        "--deterministic",
        "--out",
    ]
    vsim_in_ranks = ["--nproc_per_node=2", f"--master_port={free_port()}", "-m", "vsim"]
    run = torchrun(*vsim_in_ranks, "compare", *arguments, str(tmp_path / "ranks"))
    with ended(run):
        out, _ = run.communicate(timeout=SECONDS)
        assert run.returncode == 0 and out.count("diloco:H=2") == 1 and out.count("data:") == 1, out
    here_too = [sys.executable, "-m", "vsim", "compare", *arguments, str(tmp_path / "here"), "--quiet"]
    subprocess.run(here_too, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # as many threads as in ranks
    ranks, here = (Comparison.from_json(tmp_path / name / "comparison.json") for name in ("ranks", "here"))
    for name in here:
        assert_same_record(ranks[name].history, here[name].history)
    run = torchrun(*vsim_in_ranks, "strategies")
    with ended(run):
        out, _ = run.communicate(timeout=SECONDS)
    assert run.returncode != 0 and "starts `vsim compare`, `sweep` and `measure`, not `vsim strategies`" in out


INTERRUPTED = """
    def fail(run):
        if run.done == 3 and rank == 1:
            raise ArithmeticError("out of luck")

    found = compare(callbacks=[fail], max_steps=6)
    failures = {(len(run.history), run.failure) for run in found.values()}
    torch.save(failures, folder / f"failures of {rank}.pt")

    def slowly(run):
        time.sleep(0.05)
        if run.done == 3 and rank == 0:
            print("step 3", flush=True)

    try:
        fit(save_dir=folder / "saved", max_steps=40, callbacks=[slowly], **exact)
    except KeyboardInterrupt as error:
        (folder / f"told {rank}").write_text(str(error))
"""


@pytest.mark.slow
def test_a_failure_of_one_and_ctrl_c_stop_all_ranks(tmp_path: Path) -> None:
    """torchrun passes Ctrl-C on to its ranks. A comparison keeps its records on all of them."""
    run = on_two_ranks(script(tmp_path, INTERRUPTED))
    with ended(run):
        assert run.stdout is not None
        while (line := run.stdout.readline()) != "step 3\n":
            assert line, "ended before step 3"
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=SECONDS)
    told = [(tmp_path / f"told {rank}").read_text() for rank in range(2)]
    assert told[0] == told[1] and re.match(r"interrupted after step \d+", told[0]), out
    straight: dict[str, Any] = {"max_steps": 40, "deterministic": True}
    assert_same_fit(fit(**straight, save_dir=tmp_path / "saved", resume=True), fit(**straight))
    first, second = (torch.load(tmp_path / f"failures of {rank}.pt", weights_only=False) for rank in range(2))
    assert {failure for _, failure in second} == {"ArithmeticError: out of luck"}
    assert all(failure.startswith("CollectiveFailure: ") for _, failure in first)
    assert {length for length, _ in first | second} <= {3, 4}


# Two machines --------------------------------------------------------------------------------------------------------

MACHINES, H = 2, 5
COUNTED = """
    import json
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import TensorDataset
    from links import CABLE
    from vsim import Trainer

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
        "AllReduce": train(SimpleReduceStrategy(inner_optim="sgd", lr=1e-3)),
        "DiLoCo": train(DiLoCoStrategy(inner_optim="sgd", H=5, lr=1e-3)),
        "exact": train(SimpleReduceStrategy(inner_optim="sgd", lr=1e-3), deterministic=True),
    }
    (folder / f"found by {rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
"""


@pytest.mark.slow
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
        inside = [["ip", "netns", "exec", machine] for machine in machines]
        on_two_machines(script(tmp_path, COUNTED), 2, address(0), inside, interface=CABLE)
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
