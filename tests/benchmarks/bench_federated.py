"""Rounds of FedAvg over a large population, against pfl and Flower's simulation, all in turn in one run.

    python -m venv peers && peers/bin/pip install "torch>=2.8,<2.14" pfl==0.6.0 "flwr[simulation]"
    python tests/benchmarks/bench_federated.py --peers peers/bin/python

10,000 clients with 50 examples each, of whom 50 are drawn a round and take five steps of SGD with batches of 10; an
MLP 64-128-128-10 and a small CNN on images of 8 × 8. Each side trains in its own examples' way: vsim with `Sample`,
also with its steps captured, history and ledger on; pfl with FederatedAveraging on its SimulatedBackend; Flower with
a ClientApp simulated by Ray, a core a client. The peers have an environment, and for each turn a process, of their own.

Seconds of a round are medians over all turns; ratios are medians of those by turn. The first round of each is left
out, as are imports and data, which are made on the spot; "before" are the seconds to the end of the first round.

The memory of the population's state is the growth of a process after its first step, less the state of the clients
that were drawn: with SCAFFOLD, whose clients keep as much as the model has, and with FedAvg.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import federated_peers
import torch
from federated_peers import BATCH, EXAMPLES, LR, Classifier
from psutil import Process
from tabulate import tabulate
from torch.utils.data import TensorDataset

import vsim
from vsim import Sample, Trainer, strategy
from vsim.cluster.participation import Round
from vsim.data import Partition, partition
from vsim.strategy import FedAvgStrategy

H = EXAMPLES // BATCH
PEERS = ["pfl", "flower"]


@cache
def clients_of(number: int) -> Partition:
    x, y = federated_peers.population(number)
    return partition(TensorDataset(x.flatten(0, 1), y.flatten()), number, "iid")


def vsim_rounds(kind: str, arguments: argparse.Namespace, cls: Any = FedAvgStrategy, **options: Any) -> dict[str, Any]:
    data, marks = clients_of(arguments.clients), []
    started = time.perf_counter()
    Trainer(Classifier(kind), data, loss_fn=torch.nn.functional.cross_entropy).fit(
        strategy=cls(H=H, inner_optim="sgd", lr=LR),
        num_nodes=arguments.cohort,
        participation=Sample(arguments.cohort, of=arguments.clients, rounds=H),
        max_steps=H * (arguments.rounds + 1),
        batch_size=BATCH,
        executor="vmap",
        device="cpu",
        progress=False,
        **{"train_loss_hook": lambda *_: marks.append(time.perf_counter()), **options},
    )
    ends = marks[H - 1 :: H] or [started]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return {
        "version": f"vsim {vsim.__version__}, torch {torch.__version__}",
        "seconds": seconds,
        "before": ends[0] - started,
    }


def peer_rounds(peer: str, kind: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What a peer's own process says; None, with the reason, if it cannot run."""
    names = ("clients", "cohort", "rounds", "threads")
    options = [f"--{name}={getattr(arguments, name)}" for name in names]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": str(arguments.threads)}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet
    command = [arguments.peers, str(Path(federated_peers.__file__)), peer, kind, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        print(f"{peer}: not run: {(done.stderr.splitlines() or ['no output'])[-1]}", file=sys.stderr)
        return None
    return dict(json.loads(lines[-1]))


def growth(strategy: str, arguments: argparse.Namespace) -> float:
    """MB by which a process of its own grows after the first step of training the MLP."""
    options = [f"--{name}={getattr(arguments, name)}" for name in ("clients", "cohort", "rounds", "threads")]
    command = [sys.executable, __file__, "--growth", strategy, *options]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def show_memory(arguments: argparse.Namespace) -> None:
    entries = sum(p.numel() for p in Classifier("mlp").parameters())
    plan = Sample(arguments.cohort, of=arguments.clients).plan(Round(arguments.cohort, 42, H, None))
    cohorts = [plan.segment(1 + H * number).nodes for number in range(arguments.rounds + 1)]
    drawn = len({client for cohort in cohorts for client in cohort})
    fedavg, scaffold = (growth(name, arguments) for name in ("FedAvgStrategy", "ScaffoldStrategy"))
    print(
        f"\nstate of {drawn:,} clients drawn of {arguments.clients:,}: {drawn * entries * 4 / 1e6:.0f} MB, of a cohort "
        f"{arguments.cohort * entries * 4 / 1e6:.0f} MB; SCAFFOLD's process grew by {scaffold:.0f} MB, FedAvg's by "
        f"{fedavg:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has pfl and flwr; else vsim alone")
    parser.add_argument("--models", nargs="+", choices=["mlp", "cnn"], default=["mlp", "cnn"])
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10, help="per turn, after the first (default: 10)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of vsim and pfl, and of each of Flower's clients")
    parser.add_argument("--compile", nargs="+", choices=["none", "full"], default=["none"])
    parser.add_argument("--growth", choices=["FedAvgStrategy", "ScaffoldStrategy"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    if arguments.growth:
        bytes_held: list[int] = []
        cls = getattr(strategy, arguments.growth)
        vsim_rounds("mlp", arguments, cls, train_loss_hook=lambda *_: bytes_held.append(Process().memory_info().rss))
        print((max(bytes_held) - bytes_held[0]) / 1e6)
        return
    if arguments.peers is not None and shutil.which(arguments.peers) is None:
        parser.error(f"--peers {arguments.peers} is no program")
    if arguments.peers is None:
        print("no --peers PYTHON: pfl and Flower are not run")
    for kind in arguments.models:
        found: dict[str, list[dict[str, Any]]] = {}
        for _ in range(arguments.turns):
            for mode in arguments.compile:
                side = "vsim" if mode == "none" else "vsim, compiled"
                found.setdefault(side, []).append(vsim_rounds(kind, arguments, compile=mode == "full"))
            for peer in PEERS if arguments.peers else []:
                if (one := peer_rounds(peer, kind, arguments)) is not None:
                    found.setdefault(peer, []).append(one)
        show(kind, found, arguments)
    show_memory(arguments)


def show(kind: str, found: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    print(
        f"\n{kind}: {arguments.clients:,} clients, cohort {arguments.cohort}, {H} steps of {BATCH} examples; "
        f"{arguments.turns} turns of {arguments.rounds} rounds, {arguments.threads} threads of {os.cpu_count()} cores"
    )
    by_turn = {side: [statistics.median(turn["seconds"]) for turn in turns] for side, turns in found.items()}
    peers = [by_turn[peer] for peer in PEERS if peer in by_turn]
    rows = []
    for side, turns in found.items():
        own = statistics.median(by_turn[side])
        row = [turns[0]["version"] if side in PEERS else side, 1e3 * own, 1 / own, turns[0]["before"]]
        for peer in peers:
            row.append(statistics.median(theirs / ours for theirs, ours in zip(peer, by_turn[side], strict=False)))
        rows.append(row)
    headers = ["side", "ms a round", "rounds a second", "s before", *(f"× {peer}" for peer in PEERS if peer in by_turn)]
    print(tabulate(rows, headers, floatfmt=".1f"), flush=True)


if __name__ == "__main__":
    main()
