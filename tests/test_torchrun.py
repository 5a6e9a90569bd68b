"""Under torchrun a script's `fit(backend="process")` joins as a rank: on one machine, and as on two."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from links import CABLE, address, linked
from separate import images, small_cnn
from torch import nn

from vsim import Trainer, load_checkpoint
from vsim.checkpoint.folder import checkpoints_in
from vsim.process import world
from vsim.process.distributed import CollectiveFailure
from vsim.strategy import DiLoCoStrategy, OptimSpec

SECONDS = 120

SCRIPT = """
    import os
    import sys
    from pathlib import Path

    sys.path.insert(0, {tests!r})
    import torch
    import tqdm.auto
    from separate import images, small_cnn
    from vsim import Trainer
    from vsim.strategy import DiLoCoStrategy, OptimSpec

    class Bar(tqdm.auto.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            (folder / f"bar of {{rank}}").touch()

    rank, folder = int(os.environ["RANK"]), Path({folder!r})
    tqdm.auto.tqdm = Bar

    def keep(run):
        if run.cluster.step == 6:
            torch.save(run.cluster.weights, folder / f"node {{run.cluster.replicas.first_node}}.pt")

    def fit(max_steps, **options):
        trainer = Trainer(small_cnn(), images(), images(7))
        model = trainer.fit(
            strategy=DiLoCoStrategy(H=2, optim_spec=OptimSpec("adamw", lr=1e-2)), num_nodes={num_nodes},
            max_steps=max_steps, batch_size=4, backend="process", deterministic=True, threads_per_process=1,
            callbacks=[keep], **options,
        )
        return model.state_dict(), torch.tensor(trainer.history.node_losses), [str(e) for e in trainer.ledger]

    torch.manual_seed(7)
    torch.save(fit(6, correlation_interval=3), folder / f"fit 0 on {{rank}}.pt")
    saved = dict(save_dir=folder / "run")
    fit(3, checkpoint_interval=2, **saved)  # which finds nothing of the first
    torch.save(fit(6, resume=True, **saved), folder / f"fit 1 on {{rank}}.pt")
    try:
        fit(9, **saved)
    except ValueError as error:
        assert "holds the checkpoints of a run" in str(error)
    assert not torch.distributed.is_initialized()
"""


def script(folder: Path, num_nodes: int = 2) -> str:
    path = folder / "script.py"
    text = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(folder), num_nodes=num_nodes)
    path.write_text(textwrap.dedent(text))
    return str(path)


def torchrun(
    *arguments: str, before: Sequence[str] = (), interface: str = "lo0" if sys.platform == "darwin" else "lo"
) -> subprocess.Popen[str]:
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


def simulated() -> tuple[nn.Module, Trainer]:
    """The run of the scripts, in the simulator: the model that comes of it, and its trainer."""
    trainer = Trainer(small_cnn(), images(), images(7))
    strategy = DiLoCoStrategy(H=2, optim_spec=OptimSpec("adamw", lr=1e-2))
    run: dict[str, Any] = {"num_nodes": 2, "max_steps": 6, "batch_size": 4, "deterministic": True, "progress": False}
    return trainer.fit(strategy=strategy, **run), trainer


def assert_the_simulators_bits(folder: Path) -> None:
    model, trainer = simulated()
    assert trainer.strategy is not None
    for node, row in enumerate(trainer.strategy.cluster.weights):
        assert torch.equal(torch.load(folder / f"node {node}.pt")[0], row)
        for fit in range(2):
            state, losses, events = torch.load(folder / f"fit {fit} on {node}.pt")
            assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
            np.testing.assert_array_equal(losses.numpy(), trainer.history.node_losses)
            assert events == [str(event) for event in trainer.ledger]
    assert [path.name for path in folder.glob("bar of *")] == ["bar of 0"]
    assert [p.name for p in checkpoints_in(folder / "run")] == [
        "step-00000003.safetensors",
        "step-00000006.safetensors",
    ]
    assert torch.equal(load_checkpoint(folder / "run").weights, trainer.strategy.cluster.weights)


@pytest.mark.slow
def test_a_script_joins_as_the_ranks_of_one_machine(tmp_path: Path) -> None:
    run = torchrun("--nproc_per_node=2", "--master_port", str(free_port()), script(tmp_path))
    out, _ = run.communicate(timeout=SECONDS)
    assert run.returncode == 0, out
    assert_the_simulators_bits(tmp_path)


@pytest.mark.slow
def test_a_node_for_every_rank_or_an_error_that_says_so(tmp_path: Path) -> None:
    run = torchrun("--nproc_per_node=2", "--master_port", str(free_port()), script(tmp_path, num_nodes=3))
    out, _ = run.communicate(timeout=SECONDS)
    assert run.returncode != 0
    assert "ValueError: num_nodes is 3, but torchrun has started 2 processes, a node each: give num_nodes=2" in out


def on_two_machines(path: str, master: str, befores: Sequence[Sequence[str]], interface: str) -> None:
    meeting = ["--nnodes=2", "--nproc_per_node=1", f"--master_addr={master}", f"--master_port={free_port()}"]
    runs = [
        torchrun(*meeting, f"--node_rank={rank}", path, before=before, interface=interface)
        for rank, before in enumerate(befores)
    ]
    try:
        for run in runs:
            out, _ = run.communicate(timeout=SECONDS)
            assert run.returncode == 0, out
    finally:
        for run in runs:
            run.kill()
            run.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("over", ["loopback", "a network"])
def test_two_agents_meet(over: str, tmp_path: Path) -> None:
    if over == "loopback":
        on_two_machines(script(tmp_path), "127.0.0.1", [(), ()], "lo0" if sys.platform == "darwin" else "lo")
    else:
        with linked(2) as nodes:
            inside = [["ip", "netns", "exec", node] for node in nodes]
            on_two_machines(script(tmp_path), address(0), inside, CABLE)
    assert_the_simulators_bits(tmp_path)


@pytest.mark.slow
def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    """Of torchrun's: the processes that vsim spawns meet in a file."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = torchrun(
            "--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={port}", script(tmp_path)
        )
        out, _ = run.communicate(timeout=SECONDS)
    assert run.returncode != 0
    assert "address already in use" in out and str(port) in out


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


PLANS = """
    import os
    import sys

    sys.path.insert(0, {tests!r})
    import torch
    from separate import small_mlp, vectors
    from vsim import Sample, Schedule, Trainer
    from vsim.strategy import DiLoCoStrategy

    leaves, joins = Schedule({{0: [0, 1], 3: [1], 6: [0, 1]}}), Schedule({{0: [2, 3], 3: range(3)}})
    for number, (num_nodes, plan) in enumerate([(2, leaves), (4, joins), (4, Sample(4, of=9))]):
        trainer = Trainer(small_mlp(), vectors())
        processes = {{}} if {simulated} else {{"backend": "process", "threads_per_process": 1}}
        if processes and num_nodes > 2:
            processes["num_processes"] = 2
        model = trainer.fit(
            strategy=DiLoCoStrategy(H=3, lr=1e-2), num_nodes=num_nodes, max_steps=8, batch_size=4, deterministic=True,
            progress=False, participation=plan, **processes,
        )
        outcome = model.state_dict(), trainer.history.node_losses.tolist(), [str(event) for event in trainer.ledger]
        torch.save(outcome, f"{folder}/{{number}} of {{os.environ.get('RANK', 'simulator')}}.pt")
"""


@pytest.mark.slow
def test_plans_and_cohorts(tmp_path: Path) -> None:
    """A rank none of whose nodes takes part, ranges of nodes, and clients: the simulator's bits on both ranks."""
    for simulated in (True, False):
        text = PLANS.format(tests=str(Path(__file__).parent), folder=str(tmp_path), simulated=simulated)
        (tmp_path / "script.py").write_text(textwrap.dedent(text))
        if simulated:
            subprocess.run([sys.executable, tmp_path / "script.py"], check=True, timeout=SECONDS)
            continue
        run = torchrun("--nproc_per_node=2", f"--master_port={free_port()}", str(tmp_path / "script.py"))
        output, _ = run.communicate(timeout=SECONDS)
        assert run.returncode == 0, output
    for number in range(3):
        weights, losses, events = torch.load(tmp_path / f"{number} of simulator.pt")
        for rank in range(2):
            found, of_nodes, sent = torch.load(tmp_path / f"{number} of {rank}.pt")
            assert all(torch.equal(found[name], weights[name]) for name in weights) and sent == events
            np.testing.assert_array_equal(of_nodes, losses)
