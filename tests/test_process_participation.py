"""Nodes that come and go between processes: bitwise the simulator's run. Nothing hangs."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cut_runs import assert_same_run, in_processes
from reference_cluster import Noisy, small_mlp, vectors
from reference_cluster import own_examples as dataset
from torch.utils.data import Subset

import vsim
from vsim import Compute, Deadline, Dropout, DropSlowest, OverCommit, Partial, Sample, Schedule, Trace
from vsim.cluster import Cluster
from vsim.cluster.participation import Participation
from vsim.processes import NodeFailure
from vsim.runs.interrupt import Interrupted
from vsim.strategy import (
    Algorithm,
    D2Strategy,
    DeMoStrategy,
    DiLoCoStrategy,
    DionStrategy,
    DittoStrategy,
    EagerDiLoCoStrategy,
    EDiTStrategy,
    ExactDiffusionStrategy,
    FedAvgStrategy,
    FedBNStrategy,
    FedDynStrategy,
    FedNovaStrategy,
    FedRepStrategy,
    GossipStrategy,
    GradientTrackingStrategy,
    MuLoCoStrategy,
    NoLoCoStrategy,
    PushSumStrategy,
    QuasiGlobalMomentumStrategy,
    RandomGraph,
    RelaySumStrategy,
    ScaffoldStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)

OPTIONS: dict[str, Any] = {"max_steps": 6, "batch_size": 4, "progress": False, "deterministic": True}
PROCESSES = in_processes(None)


def trained(strategy: Strategy, trainer: vsim.Trainer | None = None, **options: Any) -> vsim.Trainer:
    trainer = trainer or vsim.Trainer(Noisy(), dataset, dataset)
    trainer.final = trainer.fit(strategy=strategy, **{**OPTIONS, **options})  # type: ignore[attr-defined]
    return trainer


def check_equal(strategy: Strategy, **options: Any) -> None:
    """With a process for every node, and with two that hold a range of the nodes each, at times none of them."""
    simulated = trained(strategy, **options)
    for processes in (PROCESSES, in_processes(2)):
        assert_same_run(trained(strategy, **options, **processes), simulated)


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


class Server(Algorithm):
    """Its state moves on processes that hold no node at the time, too."""

    def setup(self, cluster: Cluster) -> None:
        self.keep_shared(server=cluster.weights[0].clone())

    def communicate(self, cluster: Cluster) -> None:
        pushed = cluster.collectives.push(cluster.weights, among=cluster.active)
        self.server.lerp_(pushed.mean(0), 0.5)
        cluster.weights.copy_(cluster.collectives.pull(self.server, cluster.weights))


STRATEGIES: list[Strategy] = [
    SimpleReduceStrategy(lr=1e-2, max_norm=1.0),
    DiLoCoStrategy(H=2, lr=1e-2),
    StreamingDiLoCoStrategy(H=3, fragments=2, delay=1, mixing=0.5, lr=1e-2),
    FedAvgStrategy(H=2, island_size=2, lr=1e-2),
    SPARTAStrategy(p_sparta=0.3, async_delay=1, lr=1e-2),
    DeMoStrategy(lr=1e-3, compression_chunk=4, compression_topk=4),
    EagerDiLoCoStrategy(H=2, lr=1e-2),
    NoLoCoStrategy(H=2, lr=1e-2),
    GossipStrategy(tracking=True, lr=1e-2),
    GossipStrategy(
        topology=["ring", RandomGraph(2, redrawn=True)], lr=1e-2, attack=vsim.Attack("sign_flip", nodes=[1])
    ),
    D2Strategy(lr=1e-2),
    ExactDiffusionStrategy(lr=1e-2),
    GradientTrackingStrategy(lr=1e-2),
    QuasiGlobalMomentumStrategy(lr=1e-2),
    PushSumStrategy(lr=1e-2),
    PushSumStrategy(topology="binary_tree", lr=1e-2),
    RelaySumStrategy(lr=1e-2),
    RelaySumStrategy(topology="binary_tree", form="gradient", lr=1e-2),
    MuLoCoStrategy(H=2, lr=1e-2, average="median"),
    ScaffoldStrategy(H=2, lr=1e-2),
    DionStrategy(lr=1e-2),
]


def drawn(seed: int) -> Schedule:
    """A schedule of three nodes in which some join."""
    stream = random.Random(seed)
    while True:
        steps = sorted(stream.sample(range(1, OPTIONS["max_steps"]), stream.choice([1, 2, 3])))
        changes = {step: {node for node in range(3) if stream.random() < 0.5} for step in [0, *steps]}
        if all(changes.values()) and any(now - before for before, now in itertools.pairwise(changes.values())):
            return Schedule(changes)


OTHERS: list[dict[str, Any]] = [
    {"participation": Dropout(0.3, rounds=2)},
    {"participation": Trace([(1, 0, "fail"), (4, 0, "join"), (4, 1, "leave")])},
    {"participation": DropSlowest(0.4), "compute": Compute(1.0, jitter=0.5)},
    {"participation": Deadline(2.2), "compute": Compute(1.0, jitter=0.5)},
]
QUICK = 1  # DiLoCo
CASES = [
    *((strategy, {"participation": drawn(case)}) for case, strategy in enumerate(STRATEGIES)),
    *zip(STRATEGIES, OTHERS, strict=False),
    (Strategy([Server()], lr=1e-2), {"participation": Schedule({0: [0], 2: [0, 2], 4: [1]})}),
]


@pytest.mark.usefixtures("processes_stay")
@pytest.mark.filterwarnings("ignore:DCTTopK", "ignore:too few steps")
@pytest.mark.parametrize("case", [pytest.param(i, marks=[pytest.mark.slow] * (i != QUICK)) for i in range(len(CASES))])
def test_schedules_of_failures_and_joins(case: int) -> None:
    """A random schedule for every strategy, then the other kinds of participation."""
    strategy, options = CASES[case]
    check_equal(strategy, num_nodes=3, seed=case, val_interval=4, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("processes_stay")
@pytest.mark.parametrize(
    ("strategy", "stragglers"),
    [
        (ScaffoldStrategy(H=2, lr=1e-2), None),
        (FedDynStrategy(H=2, lr=1e-2), None),
        (FedNovaStrategy(H=2, lr=1e-2), None),
        (EDiTStrategy(H=2, lr=1e-2, gate_after=1), None),
        (SPARTAStrategy(p_sparta=0.5, sparta_interval=2, lr=1e-2), None),
        (FedBNStrategy(H=2, lr=1e-2), None),
        (FedRepStrategy(H=2, lr=1e-2), None),
        (DittoStrategy(H=2, lr=1e-2), None),
        (FedAvgStrategy(H=2, lr=1e-2), OverCommit(1.5)),
        (FedAvgStrategy(H=2, lr=1e-2), Deadline(2.2)),  # at times one of the two
        (FedAvgStrategy(H=2, lr=1e-2), Partial(0.5)),
        (FedAvgStrategy(H=2, lr=1e-2), Partial(0.5, drop=True)),
    ],
)
def test_cohorts(strategy: Strategy, stragglers: Any) -> None:
    plan = Sample(2, of=5, stragglers=stragglers)
    compute = Compute(1.0, jitter=0.5) if plan.needs_compute else None
    check_equal(strategy, num_nodes=2, participation=plan, compute=compute)


@pytest.mark.usefixtures("processes_stay")
@pytest.mark.parametrize("stragglers", [None, pytest.param(Deadline(2.2), marks=pytest.mark.slow)])
def test_losses_choose_the_same_clients(stragglers: Any, tmp_path: Path) -> None:
    """The first process measures candidates, also if no client of the round is its own; and so after a resume."""
    plan = Sample(2, of=5, select="power_of_choice", candidates=4, stragglers=stragglers)
    compute = Compute(1.0, jitter=0.5) if plan.needs_compute else None
    own: dict[str, Any] = {"num_nodes": 2, "participation": plan, "compute": compute, "val_interval": 1}
    check_equal(FedBNStrategy(H=2, lr=1e-2), **own)
    whole = trained(FedBNStrategy(H=2, lr=1e-2), **own)
    for stop in (3, 4):
        saved = tmp_path / str(stop)
        trained(FedBNStrategy(H=2, lr=1e-2), **{**own, "max_steps": stop}, **PROCESSES, save_dir=saved)
        assert_same_run(trained(FedBNStrategy(H=2, lr=1e-2), **own, save_dir=saved, resume=True), whole)


# Checkpoints and interrupts -------------------------------------------------------------------------------------------


def slowly(run: Any) -> None:
    """So that the processes do not run far ahead of what is heard here."""
    time.sleep(0.2)


@pytest.mark.slow
def test_a_run_resumes_where_nodes_come_and_go(tmp_path: Path) -> None:
    """In the middle of a segment, after a Ctrl-C, and where one begins; with either backend."""
    plan = Schedule({0: [1, 2], 2: [0, 2], 4: [1, 2]})
    own: dict[str, Any] = {"num_nodes": 3, "participation": plan, "val_interval": 2}
    strategy = SPARTAStrategy(p_sparta=0.3, async_delay=1, lr=1e-2)
    whole = trained(strategy, **own)

    def interrupt(step: int, loss: float) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    trainer = vsim.Trainer(Noisy(), dataset, dataset)
    with pytest.raises(Interrupted):
        trained(strategy, trainer, **own, **PROCESSES, train_loss_hook=interrupt, callbacks=[slowly])
    assert trainer.history["step"][-1] < 6
    assert_same_run(trained(strategy, trainer, **own, **PROCESSES, resume=True), whole)
    for first, second in (({}, PROCESSES), (PROCESSES, {})):
        saved = tmp_path / str(len(first))
        trained(strategy, **{**own, "max_steps": 4}, **first, save_dir=saved)
        assert_same_run(trained(strategy, **own, **second, save_dir=saved, resume=True), whole)


# What goes wrong ------------------------------------------------------------------------------------------------------


class Read:
    """Ends its process when its state is read, if told to."""

    def __init__(self, dies: Any) -> None:
        self.dies = dies

    def state_dict(self) -> dict[str, Any]:
        self.dies(False)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Mortal(SimpleReduceStrategy):
    """Dies on one node, in a step or as its state is read, to be passed on."""

    def __init__(self, node: int, step: int, in_step: bool) -> None:
        super().__init__()
        self.fate = node, step, in_step

    def dies(self, in_step: bool) -> None:
        here = [self.cluster.active[place] for place in self.cluster.collectives.nodes]
        if (here, self.cluster.step, in_step) == ([self.fate[0]], *self.fate[1:]):
            os.kill(os.getpid(), signal.SIGKILL)

    def gradients(self) -> None:
        self.dies(True)
        super().gradients()

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        self.keep_stacked(read=Read(self.dies))


@pytest.mark.slow
@pytest.mark.parametrize(("node", "step", "in_step"), [(2, 3, True), (1, 2, False)], ids=["in a step", "passing on"])
def test_an_unplanned_death_names_the_node(node: int, step: int, in_step: bool) -> None:
    failing = {"num_nodes": 3, "participation": Schedule({0: [1], 2: [2]})}
    with pytest.raises(NodeFailure, match=rf"node {node}'s process was ended by signal 9.*after step 2") as caught:
        trained(Mortal(node, step, in_step), **failing, **PROCESSES)
    assert caught.value.rank == node
