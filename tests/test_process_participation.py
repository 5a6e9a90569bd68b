"""Nodes that come and go between processes: bitwise the simulator's run. Nothing hangs."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed import assert_same_record
from separate import Noisy, small_mlp, vectors
from separate import own_examples as dataset
from torch import Tensor
from torch.utils.data import Subset

import vsim
from vsim import Compute, Deadline, Dropout, DropSlowest, OverCommit, Sample, Schedule, Trace
from vsim.cluster import Cluster
from vsim.cluster.participation import Participation
from vsim.process import NodeFailure
from vsim.strategy import (
    DeMoStrategy,
    DiLoCoStrategy,
    DionStrategy,
    DittoStrategy,
    EagerDiLoCoStrategy,
    EDiTStrategy,
    FedAvgStrategy,
    FedBNStrategy,
    FedDynStrategy,
    FedNovaStrategy,
    FedRepStrategy,
    GossipStrategy,
    MuLoCoStrategy,
    NoLoCoStrategy,
    ScaffoldStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)
from vsim.training.interrupt import Interrupted

OPTIONS: dict[str, Any] = {"max_steps": 6, "batch_size": 4, "progress": False, "deterministic": True}
PROCESSES: dict[str, Any] = {"backend": "process", "threads_per_process": 1}
TWO: dict[str, Any] = {**PROCESSES, "num_processes": 2}  # each holds a range of the nodes, and at times none of them


def trained(strategy: Strategy, model: Any = None, **options: Any) -> tuple[Tensor, vsim.Trainer]:
    trainer = vsim.Trainer(model or Noisy(), dataset, dataset)
    after = trainer.fit(strategy=strategy, **{**OPTIONS, **options})
    return torch.cat([t.flatten().double() for t in after.state_dict().values()]), trainer


def check_equal(one: tuple[Tensor, vsim.Trainer], other: tuple[Tensor, vsim.Trainer]) -> None:
    """Weights, losses, what was measured, and who sent what, bit by bit."""
    assert_same_record(one[1].history, other[1].history)
    assert torch.equal(one[0], other[0])


def test_one_joins_and_one_leaves() -> None:
    options: dict[str, Any] = {"num_nodes": 2, "participation": Schedule({0: [0], 3: [1]}), "max_steps": 4}
    check_equal(trained(DiLoCoStrategy(H=2), **options), trained(DiLoCoStrategy(H=2), **options, **PROCESSES))


def few_examples(rank: int, num_nodes: int, train: bool) -> Subset[Any]:
    return Subset(dataset(rank, num_nodes, train), range((6, 16)[rank]))


@pytest.mark.parametrize(
    ("data", "plan"), [(few_examples, None), (vectors(30), Schedule({8: [0]}))], ids=["unequal", "failure to come"]
)
def test_batches_are_those_of_loaders_over_three_epochs(data: Any, plan: Participation | None) -> None:
    model = Noisy() if plan is None else small_mlp()
    options: dict[str, Any] = {"num_nodes": 2, "batch_size": 4, "max_steps": 12, "participation": plan}
    assert vsim.verify(model, data, DiLoCoStrategy(H=3, lr=1e-2), **options).identical


# Random schedules -----------------------------------------------------------------------------------------------------

STRATEGIES: list[Callable[[], Strategy]] = [
    lambda: SimpleReduceStrategy(lr=1e-2, max_norm=1.0),
    lambda: DiLoCoStrategy(H=2, lr=1e-2),
    lambda: StreamingDiLoCoStrategy(H=3, fragments=2, delay=1, mixing=0.5, lr=1e-2),
    lambda: FedAvgStrategy(H=2, island_size=2, lr=1e-2),
    lambda: SPARTAStrategy(p_sparta=0.3, async_delay=1, lr=1e-2),
    lambda: DeMoStrategy(lr=1e-3, compression_chunk=4, compression_topk=4),
    lambda: EagerDiLoCoStrategy(H=2, lr=1e-2),
    lambda: NoLoCoStrategy(H=2, lr=1e-2),
    lambda: GossipStrategy(tracking=True, lr=1e-2),
    lambda: MuLoCoStrategy(H=2, lr=1e-2),
    lambda: ScaffoldStrategy(H=2, lr=1e-2),
    lambda: DionStrategy(lr=1e-2),
]


def drawn(seed: int) -> dict[str, Any]:
    """A schedule in which nodes join."""
    stream = random.Random(seed)
    num_nodes = 2 + seed % 4
    while True:
        steps = sorted(stream.sample(range(1, OPTIONS["max_steps"]), stream.choice([1, 2, 3])))
        changes = {step: {node for node in range(num_nodes) if stream.random() < 0.5} for step in [0, *steps]}
        if all(changes.values()) and any(now - before for before, now in itertools.pairwise(changes.values())):
            return {"num_nodes": num_nodes, "participation": Schedule(changes)}


OTHERS: list[dict[str, Any]] = [
    {"num_nodes": 3, "participation": Dropout(0.3, rounds=2)},
    {"num_nodes": 2, "participation": Trace([(1, 0, "fail"), (4, 0, "join"), (4, 1, "leave")])},
    {"num_nodes": 3, "participation": DropSlowest(0.4), "compute": Compute(1.0, jitter=0.5)},
    {"num_nodes": 3, "participation": Deadline(2.2), "compute": Compute(1.0, jitter=0.5)},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DCTTopK")
@pytest.mark.filterwarnings("ignore:too few steps")
@pytest.mark.parametrize("case", range(len(STRATEGIES) + len(OTHERS)))
def test_schedules_of_failures_and_joins(case: int) -> None:
    """A random schedule for every strategy, then the other kinds of participation; with a process a node, and two."""
    make = STRATEGIES[case % len(STRATEGIES)]
    options = {**(drawn(case) if case < len(STRATEGIES) else OTHERS[case - len(STRATEGIES)])}
    options["seed"], options["val_interval"] = case, 4
    simulated = trained(make(), **options)
    for processes in (PROCESSES, TWO):
        check_equal(simulated, trained(make(), **options, **processes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "participation"),
    [
        (ScaffoldStrategy(H=2, lr=1e-2), Sample(2, of=5)),
        (FedDynStrategy(H=2, lr=1e-2), Sample(2, of=5)),
        (FedNovaStrategy(H=2, lr=1e-2), Sample(2, of=5)),
        (EDiTStrategy(H=2, lr=1e-2, gate_after=1), Sample(2, of=5)),
        (SPARTAStrategy(p_sparta=0.5, sparta_interval=2, lr=1e-2), Sample(2, of=5)),
        (FedBNStrategy(H=2, lr=1e-2), Sample(2, of=5)),
        (FedRepStrategy(H=2, lr=1e-2), Sample(2, of=5)),
        (DittoStrategy(H=2, lr=1e-2), Sample(2, of=5)),
        (FedAvgStrategy(H=2, lr=1e-2), Sample(2, of=5, stragglers=OverCommit(1.5))),
        (FedAvgStrategy(H=2, lr=1e-2), Sample(2, of=5, stragglers=Deadline(2.2))),  # at times one of the two
    ],
)
def test_cohorts(strategy: Strategy, participation: Participation) -> None:
    compute = {} if participation.stragglers is None else {"compute": Compute(1.0, jitter=0.5)}  # type: ignore[attr-defined]
    options: dict[str, Any] = {"participation": participation, **compute}
    report = vsim.verify(Noisy(), dataset, strategy, 2, 6, batch_size=4, progress=False, **options)
    assert report.identical, report
    check_equal(*(trained(strategy, num_nodes=2, **options, **one) for one in ({}, TWO)))


# Checkpoints and interrupts -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_resumes_where_nodes_come_and_go(tmp_path: Path) -> None:
    """In the middle of a segment, after a Ctrl-C, and where one begins; with either backend."""
    changes = {0: [1, 2], 2: [0, 2], 4: [1, 2]}
    own: dict[str, Any] = {"num_nodes": 3, "participation": Schedule(changes), "val_interval": 2}
    strategy = SPARTAStrategy(p_sparta=0.3, async_delay=1, lr=1e-2)
    whole = trained(strategy, **own)

    def interrupt(step: int, loss: float) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    trainer = vsim.Trainer(Noisy(), dataset, dataset)
    with pytest.raises(Interrupted):
        trainer.fit(strategy=strategy, **OPTIONS, **own, **PROCESSES, train_loss_hook=interrupt)
    assert trainer.history["step"][-1] < 6
    after = trainer.fit(strategy=strategy, **OPTIONS, **own, **PROCESSES, resume=True)
    check_equal(whole, (torch.cat([t.flatten().double() for t in after.state_dict().values()]), trainer))

    backends: list[dict[str, Any]] = [{}, PROCESSES]
    for first, second in (backends, backends[::-1]):
        saved = tmp_path / str(len(first))
        trained(strategy, **{**own, "max_steps": 4}, **first, save_dir=saved)
        check_equal(whole, trained(strategy, **own, **second, save_dir=saved, resume=True))


# What goes wrong ------------------------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Read:
    """Calls a function when its state is read."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def state_dict(self) -> dict[str, Any]:
        self.call()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Mortal(SimpleReduceStrategy):
    """Dies on one node, in a step or as its state is read, to be passed on."""

    def __init__(self, node: int, step: int, in_step: bool) -> None:
        super().__init__()
        self.fate = node, step, in_step

    def dies(self, in_step: bool) -> bool:
        here = [self.cluster.active[place] for place in self.cluster.collectives.nodes]
        return (here, self.cluster.step, in_step) == ([self.fate[0]], *self.fate[1:])

    def gradients(self) -> None:
        if self.dies(True):
            die()
        super().gradients()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.keep_stacked(read=Read(lambda: die() if self.dies(False) else None))


@pytest.mark.slow
@pytest.mark.parametrize(("node", "step", "in_step"), [(2, 3, True), (1, 2, False)], ids=["in a step", "passing on"])
def test_an_unplanned_death_names_the_node(node: int, step: int, in_step: bool) -> None:
    failing = {"num_nodes": 3, "participation": Schedule({0: [1], 2: [2]})}
    with pytest.raises(NodeFailure, match=rf"node {node}'s process was ended by signal 9.*after step 2") as caught:
        trained(Mortal(node, step, in_step), **failing, **PROCESSES)
    assert caught.value.rank == node
