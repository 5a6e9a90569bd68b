"""One table of strategies and compositions. A new one is a row, and inherits every check below."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import cloudpickle
import numpy as np
import pytest
import torch
from errors import refused
from strategies_by_hand import normal, same_apart
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import vsim
from vsim import Trainer
from vsim.cluster.plan import ComputeSeconds
from vsim.cluster.state import of_clients, owners
from vsim.core.fields import OPTIONS, parameters_of
from vsim.data import digits
from vsim.models import MLP
from vsim.runs.view import RunView
from vsim.strategy import (
    FP4,
    QSGD,
    AdapterStrategy,
    AFLStrategy,
    Algorithm,
    AloneStrategy,
    CommunicateOptimizeStrategy,
    D2Strategy,
    DelayedNesterovStrategy,
    DeMoStrategy,
    DESLOCStrategy,
    DiLoCoStrategy,
    DionStrategy,
    DittoStrategy,
    DPFedAvgStrategy,
    EagerDiLoCoStrategy,
    EDiTStrategy,
    ExactDiffusionStrategy,
    FedAdam,
    FedAvgStrategy,
    FedBNStrategy,
    FedDynStrategy,
    FedNovaStrategy,
    FedOptStrategy,
    FedPerStrategy,
    FedProxStrategy,
    FedRepStrategy,
    GossipStrategy,
    GPAStrategy,
    GradientTrackingStrategy,
    GroupAverage,
    HierarchicalStrategy,
    MuLoCoStrategy,
    NoLoCoStrategy,
    OptimSpec,
    PartitionedIndexSelector,
    PowerSGD,
    PushSumStrategy,
    QFedAvgStrategy,
    QuasiGlobalMomentumStrategy,
    RandomIndexSelector,
    RandomK,
    RelaySumStrategy,
    ScaffoldStrategy,
    ScaledSign,
    ShuffledSequentialIndexSelector,
    SignVote,
    SimpleReduceStrategy,
    SlowMoStrategy,
    SparseLoCoStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    StatisticalQuantizer,
    Strategy,
    StreamingDiLoCoStrategy,
    TileTopK,
    TopK,
    UniformQuantizer,
    WeightSyncStrategy,
    When,
    clip,
    compress,
    edit,
    mean,
    rda,
)

# The model of the byte counts: MLP 64-16-10, whose tensors are 16×64, 16, 10×16, 10: P = 1024 + 16 + 160 + 10 = 1210.
P = 1210
STEPS = 6
ALWAYS, SYNCS = range(1, STEPS + 1), [3, 6]  # steps with equal replicas

Sent = tuple[int, str, str, float]  # step, collective, label, payload bytes


class Instead(dict[str, Any]):
    """Arguments that take the place of a row's."""


@dataclass(eq=False)
class Row:
    """A strategy, and what the checks need to know of it.

    Attributes:
        cls, arguments: how it is made.
        sent: what it communicates in STEPS steps.
        changes: constructor argument → another value, under which result or bytes must change; or `Instead` of all.
        lr: a learning rate that trains digits.
        alone: whether one node by itself trains as with the inner optimizer alone.
        equal_after: steps after which all replicas are equal.
        learns_with: arguments with which it trains digits in 100 steps, where those above do not: an outer optimizer
            that is made for many rounds swings around the minimum.
        nodes_differ: whether equal nodes do not stay equal, as they draw random numbers of their own, or have different
            places in a tree.
        refuses: what it says to an inner optimizer that is not its own, if it takes no other.
        also: argument → more values that it takes, for the configurations of tests/test_configurations.py.
        refused: argument → values out of its range, which raise an error in the call or when a run begins; or `Instead`
            of all arguments. REFUSED_BY_ALL has those of arguments that many strategies have.
        warm: what averages gradients in the warm-up of a schedule, if it is not the argument `average`, by default the
            mean; False if H takes no warm-up.
        no_history: why tests/reproductions/golden.py has no formula of the strategy.
        clients: whether a round of all clients has the same bits as nodes without rounds; also of federated strategies.
    """

    name: str
    cls: Callable[..., Strategy]
    arguments: dict[str, Any]
    sent: Sequence[Sent]
    changes: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1e-2
    alone: bool = False
    equal_after: Iterable[int] = ()
    learns_with: dict[str, Any] = field(default_factory=dict)
    nodes_differ: bool = False
    refuses: str = ""
    also: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    refused: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    warm: Any = None
    clients: bool = False
    no_history: str = ""

    def make(self, **more: Any) -> Strategy:
        return self.cls(**{**self.arguments, "lr": self.lr, **more})

    def changed(self, argument: str) -> Strategy:
        value = self.changes[argument]
        return self.cls(**(value if isinstance(value, Instead) else {**self.arguments, argument: value}), lr=self.lr)

    @property
    def schedules(self) -> bool:
        """Whether H may be a schedule, by the class's annotation, with a warm-up."""
        parameter = parameters_of(cast("type", self.cls)).get("H")
        return self.warm is not False and parameter is not None and "When" in str(parameter.annotation)

    @property
    def is_of_clients(self) -> bool:
        return self.clients or getattr(self.cls, "family", "") == "federated"

    def takes(self, num_nodes: int) -> bool:
        """Return whether it can run on `num_nodes` nodes."""
        if "levels" in self.arguments:
            return bool(max(self.arguments["levels"]) == num_nodes)
        sizes = [getattr(module, "island_size", None) or 1 for module in self.make().parts]
        return max(sizes, default=1) <= num_nodes


def every(interval: int, collective: str, label: str, payload: float, steps: int = STEPS) -> list[Sent]:
    return [(step, collective, label, payload) for step in range(interval, steps + 1, interval)]


def in_order(*events: list[Sent]) -> list[Sent]:
    return sorted((e for part in events for e in part), key=lambda e: e[0])  # stable: as listed within a step


def periodic(name: str, cls: Callable[..., Strategy], changes: Mapping[str, Any], **more: Any) -> Row:
    """A row of a strategy whose nodes average all weights every three steps, and are equal then."""
    sent = every(3, "all_reduce", more.pop("label", "weights"), 4 * P)
    return Row(name, cls, **{"arguments": {"H": 3}, "sent": sent, "changes": changes, "equal_after": SYNCS, **more})


def on_ring(name: str, cls: Callable[..., Strategy], label: str, payload: float, **changes: Any) -> Row:
    """A row of a strategy whose nodes send to two neighbours on a ring, in every step."""
    return Row(name, cls, {}, in_order(*[every(1, "send", label, payload)] * 2), {"topology": "complete", **changes})


def compressing(name: str, compressor: Any, *sent: tuple[str, str, float], **more: Any) -> Row:
    """A row of AllReduce that sends these messages in every step."""
    modules = {"communication_modules": [SimpleReduceStrategy(average=compress(compressor))]}
    arguments = {**modules, **more.pop("arguments", {})}
    events = in_order(*(every(1, *one) for one in sent))
    return Row(name, CommunicateOptimizeStrategy, arguments, events, equal_after=ALWAYS, **more)


class Widening(When):
    """Syncs after steps 1, 2, 3, 6, 9, …"""

    def after(self, step: int, lr: float, steps_left: int, seconds: ComputeSeconds | None) -> int:
        return step + (1 if step < 3 else 3)


SGD = OptimSpec("sgd", momentum=0.9)
OUTER: dict[str, Any] = {"H": 2, "outer_optim": OptimSpec("sgd", lr=0.5), "outer_lr": 0.3}
OF_ROUNDS: dict[str, Any] = {"H": 5, "outer_lr": 0.2}  # what outer optimizers learn with
# ShuffledSequentialIndexSelector(0.25) cuts every tensor in 4 chunks: 1024 → 256 each, 16 → 4, 160 → 40, 10 → 3, 3, 2,
# 2. With 4 bytes an entry: rounds 1 and 2 send 303 entries, rounds 3 and 4 send 302, then over again.
CHUNKS = [4 * 303, 4 * 303, 4 * 302, 4 * 302, 4 * 303, 4 * 303]
QUARTER: dict[str, Any] = {"index_selector": ShuffledSequentialIndexSelector(0.25)}
SPARSE = [(t + 1, "all_reduce", "sparse weights", float(CHUNKS[t])) for t in range(STEPS)]


def of_sparta(**given: Any) -> dict[str, Any]:
    """What changes SPARTA; an argument in place of the selector is with those that are given."""
    return {
        "p_sparta": Instead(p_sparta=0.1, **given),
        "sparta_interval": 2,
        "async_delay": 2,
        "compression_method": Instead(p_sparta=0.25, compression_method="topk", **given),
        "quantization_bits": 4,
        "mask": "broadcast",
    }


EDGES_OF_SPARTA: dict[str, Any] = {
    "no_history": "draws the entries that it sends",
    "also": {"sparta_interval": [1, 3], "async_delay": [0, 4], "quantization_bits": [1, 16], "mask": ["seed"]}
    | {"compression_method": ["random", "topk"]},
    "refused": {
        "p_sparta": [0, 1.1],
        "sparta_interval": [0],
        "index_selector": [3],
        "async_delay": [-1],
        "compression_method": ["top_k"],
        "quantization_bits": [0, 17, 32],
        "mask": ["sed"],
    },
}
# Two layers are two fragments: 1024 + 16 = 1040 entries after steps 3 // 2 = 1 and 4, 170 after steps 3 and 6.
FRAGMENTS = [(s, f"outer gradient of fragment {i}", 4.0 * n) for s, i, n in ((1, 0, 1040), (3, 1, 170))]
FRAGMENTS += [(s + 3, label, payload) for s, label, payload in FRAGMENTS]
PERSONAL = {"H": 2, "personal": ["layers.0.bias", "layers.3.*"], "average": "median"}

TABLE = [
    Row("no modules", Strategy, {}, [], alone=True),
    Row("alone", AloneStrategy, {}, [], alone=True),
    Row(
        "AllReduce",
        SimpleReduceStrategy,
        {},
        every(1, "all_reduce", "gradients", 4 * P),
        {"average": "median"},
        alone=True,
        equal_after=ALWAYS,
    ),
    Row(
        "AllReduce, RDA",
        SimpleReduceStrategy,
        {"average": rda() | clip("median")},
        in_order(every(1, "all_gather", "gradients: norms", 4), every(1, "merge", "gradients", 4 * P)),
        equal_after=ALWAYS,
    ),
    periodic(
        "FedAvg",
        FedAvgStrategy,
        {"H": 2, "island_size": 2, "average": mean("examples")},
        alone=True,
        also={"island_size": [1, 3], "average": ["median"]},
        refused={"island_size": [0, 9, "all"]},
        clients=True,
    ),
    Row(
        "FedAvg, median",
        FedAvgStrategy,
        {"H": 2, "island_size": 3, "average": "median"},
        every(2, "merge", "weights", 4 * P),
    ),
    Row(
        "hierarchical",
        HierarchicalStrategy,
        {"levels": {2: 1, 4: 3}},
        in_order(every(1, "all_reduce", "gradients in groups of 2", 4 * P), every(3, "all_reduce", "weights", 4 * P)),
        {"levels": {2: 2, 4: 3}, "outer": OUTER["outer_optim"], "outer_lr": 0.3, "average": {4: mean("examples")}},
        equal_after=SYNCS,
        refused={
            "levels": [{2: 0}, {3: 1, 4: 2}, {2: 1}],
            "outer": ["adan"],
            "outer_lr": [Instead(levels={4: 3}, outer="sgd", outer_lr=0)],
            "average": ["men", {3: "mean"}],
        },
    ),
    Row("FedAvg in islands", FedAvgStrategy, {"H": 2, "island_size": 2}, every(2, "all_reduce", "weights", 4 * P)),
    periodic(
        "DiLoCo",
        DiLoCoStrategy,
        {**OUTER, "average": mean("examples")},
        label="outer gradient",
        learns_with=OF_ROUNDS,
        also={"average": ["median"], "outer_lr": [0.1, 0.7, 1.0], "outer_optim": ["sgd", "adam"]},
        clients=True,
    ),
    # topk_entries of P = 1210: round(0.1 · 1210) = 121 pairs of 8 + 4 bytes.
    Row(
        "DiLoCo, top-k",
        DiLoCoStrategy,
        {"H": 3, "average": compress(TopK(0.1))},
        every(3, "all_gather", "outer gradient", 121 * 12),
        equal_after=SYNCS,
    ),
    Row(
        "SPARTA",
        SPARTAStrategy,
        QUARTER,
        SPARSE,
        {**of_sparta(), "index_selector": PartitionedIndexSelector(0.25)},
        alone=True,
        **EDGES_OF_SPARTA,
    ),
    Row(
        "SPARTA, random",
        SPARTAStrategy,
        {"p_sparta": 1.0},
        every(1, "all_reduce", "sparse weights", 4 * P),
        alone=True,
        equal_after=ALWAYS,
    ),
    Row(
        "SPARTA + DiLoCo",
        SPARTADiLoCoStrategy,
        {**QUARTER, "H": 3},
        in_order(SPARSE, every(3, "all_reduce", "outer gradient", 4 * P)),
        {**of_sparta(H=3), **OUTER, "average": "median", "index_selector": RandomIndexSelector(0.25)},
        equal_after=SYNCS,
        learns_with=OF_ROUNDS,
        warm=False,
        **EDGES_OF_SPARTA,
    ),
    Row(
        "Streaming DiLoCo",
        StreamingDiLoCoStrategy,
        {"H": 3, "fragments": 2, "delay": 1, "mixing": 0.5},
        [(step, "all_reduce", label, payload) for step, label, payload in FRAGMENTS],
        {
            **OUTER,
            "fragments": 1,
            "pattern": Instead(H=3, pattern="sequential", fragments=2),
            "delay": 2,
            "mixing": 0.2,
            "outer_step": "send",
            "average": "iso",
        },
        learns_with=OF_ROUNDS,
        also={"fragments": [None], "delay": [0], "mixing": [0, 1.0], "outer_lr": [1.0], "average": ["median"]},
        refused={
            "fragments": [0, 99, [["absent"]], "all"],
            "pattern": ["random"],
            "delay": [-1, Instead(H=3, delay=99)],
            "mixing": [1.5],
            "outer_step": ["late"],
        },
    ),
    Row(
        "Streaming DiLoCo, RDA",
        StreamingDiLoCoStrategy,
        {"H": 3, "fragments": 2, "delay": 1, "average": rda() | clip("median")},
        [
            (step, collective, label + what, bytes)
            for step, label, payload in FRAGMENTS
            for collective, what, bytes in (("all_gather", ": norms", 4.0), ("merge", "", payload))
        ],
    ),
    Row(
        "Eager DiLoCo",
        EagerDiLoCoStrategy,
        {"H": 2},
        every(2, "all_reduce", "outer gradient", 4 * P),
        {**OUTER, "H": 3, "eager": False},
        learns_with=OF_ROUNDS,
    ),
    Row(
        "Delayed DiLoCo",
        EagerDiLoCoStrategy,
        {"H": 2, "eager": False},
        every(2, "all_reduce", "outer gradient", 4 * P),
        equal_after=[2, 4, 6],
    ),
    # The norms of four tensors before the weights. Moves of three steps, after moves of one, are anomalous.
    Row(
        "EDiT",
        EDiTStrategy,
        {"H": Widening(), "gate_after": 2},
        [
            (step, *one)
            for step in (1, 2, 3, 6)
            for one in (("all_gather", "outer gradient: norms", 16.0), ("all_reduce", "outer gradient", 4.0 * P))
        ],
        {**OUTER, "average": edit(0.1), "threshold": 100, "gate_after": 4, "outer_max_norm": 0.01},
        equal_after=[1, 2, 3, 6],
        learns_with={**OF_ROUNDS, "gate_after": 10},
        refused={"threshold": [0], "gate_after": [0], "outer_max_norm": [0]},
        warm="mean",
        clients=True,
    ),
    periodic(
        "MuLoCo",
        MuLoCoStrategy,
        {**OUTER, "average": compress(TopK(0.1))},
        label="outer gradient",
        learns_with=OF_ROUNDS,
        no_history="orthogonalizes matrices",
    ),
    # Tiles 16×64 and 10×16 send 32 pairs each, the vectors of 16 and 10 all of theirs: 90 pairs of 8 + 4 bytes.
    Row(
        "DeMo",
        DeMoStrategy,
        {},
        every(1, "all_gather", "DCT coefficients", 90 * 12),
        {
            "compression_decay": 0.5,
            "compression_topk": 4,
            "compression_chunk": 8,
            "weight_decay": 0.5,
            "index_bytes": "packed",
            "alpha": 0.5,
            "transform": "none",
            "update": "orthogonal",
            "version": 2,
        },
        equal_after=ALWAYS,
        also={"compression_topk": [1, 99], "compression_chunk": [1, 7], "compression_decay": [0.0, 1.0]},
        refused={
            "alpha": [-0.1, 1.1],
            "transform": ["fft"],
            "update": ["sgn"],
            "version": [3],
            "compression_decay": [1.1, 2.0],
            "compression_topk": [0],
            "compression_chunk": [0],
            "weight_decay": [-1],
            "index_bytes": ["int32", "int8"],
        },
        refuses="has no effect, for the step is by the sign",
    ),
    Row(
        "DeMo, version 2",
        DeMoStrategy,
        {"version": 2, "alpha": 0.2, "transform": "random", "update": "orthogonal"},
        every(1, "all_gather", "coefficients", 90 * 12),
        equal_after=ALWAYS,
        refuses="has no effect, for the step is by the sign",
    ),
    # The hidden matrix 16×64 has rank 16 / 4 = 4: P has 64 entries, R 256. The other parameters have 1210 − 1024.
    Row(
        "Dion",
        DionStrategy,
        {},
        in_order(*(every(1, "all_reduce", name, 4 * n) for name, n in (("gradients", 186), ("P", 64), ("R", 256)))),
        {"rank_fraction": 0.5, "mu": 0.5, "weight_decay": 0.5, "only": "*.weight"},
        equal_after=ALWAYS,
        refused={"rank_fraction": [1.1], "mu": [-0.1], "weight_decay": [-1], "only": ["absent"]},
        no_history="begins with a drawn matrix",
    ),
    # Tiles 16×64 and 10×16 send 64 values each with 10 and 8 bits an index, the vectors of 16 and 10 all of theirs
    # with 4: 154 values, 640 + 512 + 64 + 40 bits = 157 bytes. 154 codes of 2 bits are 38.5 bytes; 4 values more.
    Row(
        "SparseLoCo",
        SparseLoCoStrategy,
        {"H": 3},
        every(3, "all_gather", "outer gradient", 157 + 39 + 4 * 4),
        {"H": 2, "topk": 8, "chunk": 8, "quantization_bits": None, "error_feedback": 0.5, "outer_lr": 0.5},
        equal_after=SYNCS,
        learns_with={"H": 5},
        also={"topk": [1, 99], "chunk": [1, 7], "quantization_bits": [1, 8], "error_feedback": [0, 1]},
        refused={"topk": [0], "chunk": [0], "quantization_bits": [0, 9], "error_feedback": [1.1, "all"]},
        warm=compress(TileTopK(64, 64, "packed", StatisticalQuantizer(2)), 0.95),
    ),
    Row(
        "NoLoCo",
        NoLoCoStrategy,
        {"H": 3},
        in_order(every(3, "send", "outer gradient", 4 * P), every(3, "send", "outer weights", 4 * P)),
        {"H": 2, "alpha": 0.9, "beta": 0.9, "gamma": 0.9},
        learns_with={"H": 5},
        also={"alpha": [0], "gamma": [0, None]},
        refused={"alpha": [-0.1, 2], "beta": [0], "gamma": [-1]},
    ),
    # On a ring of four every node has two neighbours: two rounds of messages.
    Row(
        "Gossip",
        GossipStrategy,
        {"H": 3},
        in_order(*[every(3, "send", "weights", 4 * P)] * 2),
        {"H": 2, "topology": "complete", "tracking": Instead(tracking=True)},
        learns_with={"H": 5},
        also={"topology": ["ring", "one_peer_exponential"]},
    ),
    # Hops of 1 and 2 in turn: the mean of four after two steps, from which their own steps have moved them.
    Row("Gossip, one peer", GossipStrategy, {"topology": "one_peer_exponential"}, every(1, "send", "weights", 4 * P)),
    Row(
        "Gradient tracking",
        GossipStrategy,
        {"tracking": True},
        in_order(*[every(1, "send", "weights and trackers", 8 * P)] * 2),
        warm=False,
    ),
    on_ring("D2", D2Strategy, "weights", 4 * P),
    on_ring("Exact diffusion", ExactDiffusionStrategy, "weights", 4 * P),
    on_ring("Gradient tracking, adapt then combine", GradientTrackingStrategy, "weights and trackers", 8 * P),
    replace(
        on_ring("Quasi-global momentum", QuasiGlobalMomentumStrategy, "weights", 4 * P, momentum=0.5),
        lr=0.3,
        refuses="the inner optimizer must be plain SGD",
        refused={"momentum": [1.0, -0.1]},
    ),
    Row(
        "Push-sum",
        PushSumStrategy,
        {},
        every(1, "send", "weights and mass", 4 * (P + 1)),
        {"topology": "complete"},
    ),
    # A chain of four: its inner nodes have two neighbours.
    Row(
        "RelaySumStrategy",
        RelaySumStrategy,
        {},
        in_order(*[every(1, "send", "weights and counts", 4 * (P + 1))] * 2),
        {"topology": "binary_tree", "form": "gradient"},
        nodes_differ=True,
        refused={"topology": ["star", "ring"], "form": ["weights"]},
    ),
    Row(
        "RelaySumStrategy of gradients",
        RelaySumStrategy,
        {"form": "gradient"},
        in_order(*[every(1, "send", "gradients", 4 * P)] * 2),
        nodes_differ=True,
    ),
    periodic(
        "SlowMo",
        SlowMoStrategy,
        {"H": 2, "alpha": 0.9, "beta": 0.9, "average": "rda"},
        learns_with={"H": 5},
        also={"beta": [0]},
        refused={"alpha": [0], "beta": [1.5]},
    ),
    # Most images have the same black margin, not all: m and v together, or there are steps of lr·m/eps.
    Row(
        "DES-LOC",
        DESLOCStrategy,
        {"H": 1},
        in_order(
            *(every(H, "all_reduce", kept, 4 * P) for kept, H in (("weights", 1), ("exp_avg", 3), ("exp_avg_sq", 6)))
        ),
        {"H": 2, "H_m": 1, "H_v": 5},
        alone=True,
        equal_after=ALWAYS,
        learns_with={"H": 5, "H_v": 15},
        also={"H_m": [2, 5]},
        refused={"H_m": [0], "H_v": [0]},
    ),
    Row(
        "GPA",
        GPAStrategy,
        {},
        every(1, "all_reduce", "gradients", 4 * P),
        {"mu_x": 0.9, "mu_y": 0.5},
        equal_after=ALWAYS,
        learns_with={"mu_x": 0.9},
        also={"mu_x": [0], "mu_y": [0, 1.0]},
        refused={"mu_x": [1], "mu_y": [1.1]},
    ),
    periodic(
        "FedAdam",
        FedOptStrategy,
        {"H": 2, "outer_optim": "yogi", "outer_lr": 0.1, "average": "rda"},
        label="outer gradient",
        learns_with={"H": 5},
        also={"outer_optim": ["adam", "sgd"], "outer_lr": [0.01, 1.0], "average": ["median", mean("examples")]},
    ),
    periodic(
        "FedProx", FedProxStrategy, {"H": 2, "mu": 0.1, "average": "median"}, also={"mu": [0]}, refused={"mu": [-1]}
    ),
    Row(
        "FedProx, clipped",
        FedProxStrategy,
        {"H": 3, "average": clip("median")},
        in_order(every(3, "all_gather", "weights: norms", 4), every(3, "all_reduce", "weights", 4 * P)),
        equal_after=SYNCS,
    ),
    # All but the last layer: 1024 + 16 entries.
    periodic(
        "FedPer",
        FedPerStrategy,
        PERSONAL,
        sent=every(3, "all_reduce", "weights", 4 * 1040),
        equal_after=(),
        alone=True,
        also={"personal": ["*.bias", ["*.0.*", "*.bias"]]},
    ),
    periodic(
        "FedRep",
        FedRepStrategy,
        {**PERSONAL, "head_steps": 2},
        sent=every(3, "all_reduce", "weights", 4 * 1040),
        equal_after=(),
        refused={"H": [0, 1], "head_steps": [Instead(H=3, head_steps=3)]},
        no_history="is FedPer, whose clients train one part at a time: tests/test_personal.py",
    ),
    periodic(
        "Ditto",
        DittoStrategy,
        {"H": 2, "lam": 1.0, "personal_lr": 0.1, "average": "median"},
        alone=True,
        refused={"lam": [-1.0], "personal_lr": [-1.0]},
        no_history="computes gradients at other weights: tests/test_personal.py",
    ),
    # The number of steps, and the weights.
    periodic(
        "FedNova",
        FedNovaStrategy,
        {"H": 2, "average": "mean"},
        sent=in_order(every(3, "all_reduce", "normalized moves", 4 * P), every(3, "all_reduce", "steps", 4)),
        warm=mean("examples"),
    ),
    periodic(
        "q-FedAvg",
        QFedAvgStrategy,
        {"H": 2, "q": 3.0},
        sent=every(3, "all_reduce", "weighted moves", 4 * (P + 1)),
        lr=0.3,
        learns_with={"H": 5, "q": 0.1},
        refused={"q": [-1]},
        no_history="weighs nodes by losses, and golden.py has gradients alone: tests/test_fair.py",
    ),
    periodic(
        "AFL",
        AFLStrategy,
        {"H": 2, "gamma": 0.5},
        sent=in_order(every(3, "all_reduce", "weights", 4 * P), every(3, "all_gather", "losses", 4)),
        refused={"gamma": [-1]},
        no_history="weighs nodes by losses, and golden.py has gradients alone: tests/test_fair.py",
    ),
    periodic("FedDyn", FedDynStrategy, {"H": 2, "alpha": 1.0}, lr=0.3, learns_with={"H": 10}, refused={"alpha": [0]}),
    periodic(
        "SCAFFOLD",
        ScaffoldStrategy,
        {"H": 2, "outer_lr": 0.5},
        also={"outer_lr": [2.0]},
        sent=in_order(every(3, "all_reduce", "weights", 4 * P), every(3, "all_reduce", "control variates", 4 * P)),
        lr=0.5,
        learns_with={"H": 5},
        refuses="the inner optimizer must be plain SGD",
    ),
    periodic(
        "DP-FedAvg",
        DPFedAvgStrategy,
        {"H": 2, "clip": 0.1, "noise_multiplier": 0.02},
        arguments={"H": 3, "clip": 1.0, "noise_multiplier": 0.01},
        learns_with={"H": 5, "clip": 5.0},
        refused={"clip": [0], "noise_multiplier": [-1], "delta": [0]},
        warm=False,
    ),
    Row(
        "modules in order",
        CommunicateOptimizeStrategy,
        {"communication_modules": [SimpleReduceStrategy(), FedAvgStrategy(island_size=2, H=4)]},
        in_order(every(1, "all_reduce", "gradients", 4 * P), every(4, "all_reduce", "weights", 4 * P)),
        {"communication_modules": [SimpleReduceStrategy()]},
        equal_after=ALWAYS,
    ),
    Row(
        "sparse, islands, outer",
        CommunicateOptimizeStrategy,
        {
            "communication_modules": [
                SPARTAStrategy(index_selector=ShuffledSequentialIndexSelector(0.25)),
                FedAvgStrategy(island_size=2, H=2),
                DiLoCoStrategy(H=3),
            ]
        },
        in_order(SPARSE, every(2, "all_reduce", "weights", 4 * P), every(3, "all_reduce", "outer gradient", 4 * P)),
        equal_after=SYNCS,
    ),
    compressing("top-k", TopK(0.1), ("all_gather", "gradients", 121 * 12)),
    compressing("random-k", RandomK(0.1), ("all_reduce", "gradients", 121 * 4)),
    # A bit an entry: 1210 / 8 = 151.25.
    compressing("majority vote", SignVote(), ("all_gather", "gradients", 152), arguments={"inner_optim": "sgd"}),
    # The same, and a scale for each of ceil(1210 / 512) = 3 blocks.
    compressing("scaled sign", ScaledSign(), ("all_gather", "gradients", 152 + 3 * 4)),
    # Codes −7 … 7 are 15 values: 4 bits.
    compressing("QSGD", QSGD(), ("all_gather", "gradients", 605 + 3 * 4), nodes_differ=True),
    compressing("int8", UniformQuantizer(8), ("all_gather", "gradients", 1210 + 3 * 4)),
    # Of 4 nodes each averages a chunk of 303 entries: 303 codes of 8 bits and a scale.
    compressing(
        "int8 in two stages",
        UniformQuantizer(8, two_stage=True),
        ("all_to_all", "gradients: chunks", 4 * 307.0),
        ("all_gather", "gradients: means", 307.0),
    ),
    # 4 bits an entry, 605 bytes; one block has a table of 16 values.
    compressing("statistical", StatisticalQuantizer(4), ("all_gather", "gradients", 605 + 16 * 4)),
    compressing("FP4", FP4(), ("all_gather", "gradients", 605 + 3 * 4)),
    # Rank 2 of 16×64: 2·(16 + 64) = 160 < 1024 entries; of 10×16: 2·26 = 52 < 160. P's columns travel with the 26
    # entries of the vectors: 2·16 + 2·10 + 26 = 78, then Q's: 2·64 + 2·16 = 160.
    compressing(
        "PowerSGD",
        PowerSGD(2),
        ("all_reduce", "gradients: P and vectors", 4.0 * 78),
        ("all_reduce", "gradients: Q", 4.0 * 160),
    ),
]
# Of the biases here, whose few entries cost more with their indices than without: tests/test_demo.py has that.
pytestmark = pytest.mark.filterwarnings("ignore:(DCT|Tile|RandomBasis)TopK:UserWarning")
every_row = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
EACH = {
    row.cls: row for row in reversed(TABLE) if row.cls is not CommunicateOptimizeStrategy
}.values()  # the first of a class


def model() -> MLP:
    return MLP(hidden=(16,), seed=3)


def examples(num: int = 96, seed: int = 0) -> TensorDataset:
    stream = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(num, 64, generator=stream), torch.randint(0, 10, (num,), generator=stream))


def uneven(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    return examples(24 + 8 * rank, seed=rank)


def run(strategy: Strategy, num_nodes: int = 4, **options: Any) -> Trainer:
    data = options.pop("data", uneven)
    trainer = Trainer(model(), data)
    defaults = {"max_steps": STEPS, "batch_size": 8, "executor": "vmap", "progress": False}
    trainer.fit(strategy=strategy, num_nodes=num_nodes, **{**defaults, **options})
    return trainer


def weights(trainer: Trainer) -> Tensor:
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights


class Outcome(NamedTuple):
    """What a run has come to: nodes and what is their own, global weights, and what was sent.

    equal_after: steps with all nodes equal.
    """

    weights: bytes
    shared: bytes
    sent: list[Any]
    equal_after: list[int]


def outcome(strategy: Strategy, **options: Any) -> Outcome:
    equal: list[int] = []

    def look(run: RunView) -> None:
        rows = run.cluster.weights
        if torch.equal(rows, rows[:1].expand_as(rows)):
            equal.append(run.done)

    trainer = run(strategy, callbacks=[look], **options)
    assert trainer.strategy is not None
    shared = trainer.strategy.model_weights()
    own = [getattr(o, name) for o in owners(trainer.strategy).values() for name in sorted(of_clients(o))]
    rows = b"".join(t.numpy().tobytes() for t in (weights(trainer), *own))
    return Outcome(rows, shared.numpy().tobytes(), list(trainer.ledger), equal)


@functools.cache
def made_and_run(row: Row) -> tuple[Strategy, Outcome]:
    """A row's strategy and its run, which many checks look at."""
    strategy = row.make()
    return strategy, outcome(strategy)


def of_row(row: Row) -> Outcome:
    return made_and_run(row)[1]


@every_row
def test_what_is_sent_and_when_the_replicas_are_equal(row: Row) -> None:
    assert [(e.step, e.collective, e.label, e.payload_bytes) for e in of_row(row).sent] == list(row.sent)
    assert of_row(row).equal_after == list(row.equal_after)


def test_they_learn_digits() -> None:
    train, val = digits()
    strategies = {row.name: row.make(**row.learns_with) for row in EACH}
    options: dict[str, Any] = {"num_nodes": 4, "max_steps": 100, "val_size": 360, "val_interval": None}
    result = vsim.compare(MLP(hidden=(32,), seed=0), train, val, strategies=strategies, progress=False, **options)
    ends = {name: run.history.measured("global_loss", "global_accuracy") for name, run in result.items()}
    assert {name: loss[-1] / loss[0] for name, (loss, _) in ends.items() if not loss[-1] < 0.35 * loss[0]} == {}
    assert {name: accuracy[-1] for name, (_, accuracy) in ends.items() if not accuracy[-1] > 0.85} == {}


@pytest.mark.parametrize("row", EACH, ids=lambda row: row.name)
def test_both_executors_agree(row: Row) -> None:
    # An eps above rounding, so that no step is the sign of a rounding error; those whose step is by sign keep lr·sign,
    # and are compared by their losses.
    more: dict[str, Any] = (
        {} if "inner_optim" in row.arguments or row.refuses else {"inner_optim": OptimSpec("adamw", eps=1e-3)}
    )
    vmap, loop = (run(row.make(**more), executor=executor) for executor in ("vmap", "loop"))
    np.testing.assert_allclose(vmap.history.node_losses, loop.history.node_losses, rtol=1e-4, atol=1e-4)
    assert [e[:3] for e in vmap.ledger] == [e[:3] for e in loop.ledger]


@every_row
def test_two_runs_of_one_object_have_equal_bits_and_leave_it_as_it_was(row: Row) -> None:
    strategy, first = made_and_run(row)
    torch.rand(3)
    assert outcome(strategy) == first
    assert cloudpickle.dumps(strategy) == cloudpickle.dumps(row.make())


@pytest.mark.parametrize("row", [row for row in TABLE if not row.nodes_differ], ids=lambda row: row.name)
def test_equal_nodes_stay_equal(row: Row) -> None:
    rows = weights(run(row.make(), data=lambda rank, num_nodes, train: examples()))
    assert torch.equal(rows, rows[:1].expand_as(rows))


@pytest.mark.parametrize("row", [row for row in TABLE if row.alone], ids=lambda row: row.name)
@pytest.mark.parametrize("optimizer", [SGD, OptimSpec("adamw")], ids=repr)
def test_one_node_is_plain_torch(row: Row, optimizer: OptimSpec) -> None:
    trainer = run(row.make(inner_optim=optimizer), num_nodes=1, data=examples(), deterministic=True, executor="auto")
    plain = model()
    optim = optimizer.cls(plain.parameters(), **{**optimizer.kwargs, "lr": row.lr})
    sampler = DistributedSampler(examples(), num_replicas=1, rank=0, seed=42)
    for batch in itertools.islice(DataLoader(examples(), batch_size=8, sampler=sampler), STEPS):
        optim.zero_grad()
        plain(batch).backward()
        optim.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    assert torch.equal(weights(trainer)[0], expected)


@pytest.mark.parametrize(
    ("row", "argument"),
    [(row, argument) for row in TABLE for argument in row.changes],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_argument_has_an_effect(row: Row, argument: str) -> None:
    assert outcome(row.changed(argument))[:3] != of_row(row)[:3]


def of_families() -> list[type[Algorithm]]:
    """The exported strategies that name a family."""
    exported = (getattr(vsim.strategy, name) for name in vsim.strategy.__all__)
    return [one for one in exported if isinstance(one, type) and issubclass(one, Algorithm) and "family" in vars(one)]


NO_EFFECT: dict[type[Algorithm], set[str]] = {DPFedAvgStrategy: {"delta"}}  # on training: δ of the ε that is reported
NO_ROW = {
    AdapterStrategy: "the model here has no adapters; tests/test_adapters.py",
    FedBNStrategy: "the model here has no norms; tests/test_personal.py",
    WeightSyncStrategy: "one node trains; tests/test_weight_sync.py",
}


@pytest.mark.parametrize("cls", [cls for cls in of_families() if not cls.is_asynchronous and cls not in NO_ROW])
def test_the_table_knows_every_argument_of_every_strategy(cls: type[Algorithm]) -> None:
    rows = [row for row in TABLE if row.cls is cls]
    assert rows, f"tests/test_strategies_common.py, TABLE: add a row of {cls.__name__}"
    arguments = set(parameters_of(cls)) - {"attack", *COMMON}  # which test_attack.py tries
    known = {name for row in rows for name in row.changes} | NO_EFFECT.get(cls, set())
    said = f"TABLE: `changes` of rows of {cls.__name__} need other values of {arguments - known}"
    assert arguments == known, said if arguments - known else f"{cls.__name__} has no arguments {known - arguments}"


SELECTOR = RandomIndexSelector(0.1)
# Values out of the range of arguments that many strategies have, and of parts, which have no row. Types are in
# tests/test_malformed_inputs.py.
REFUSED_BY_ALL: dict[str, Sequence[Any]] = {
    "H": [0],
    "average": ["men", "size"],
    "outer_optim": ["adan", 3],
    "outer_lr": [0, -1.0, "1", math.nan],
    "topology": ["star", [(0, 0)]],
    "personal": ["absent", 3],
}
REFUSED_BY_PARTS: list[tuple[Callable[..., Any], str, Any]] = [
    (DiLoCoStrategy, "lr", -1),
    (functools.partial(GroupAverage, size=2), "H", 0),
    (functools.partial(GroupAverage, H=2), "size", 1),
    (functools.partial(FedAdam, [torch.zeros(1)]), "tau", 0.0),
]


def own_arguments(cls: Callable[..., Strategy]) -> dict[str, inspect.Parameter]:
    """The arguments of a class besides those of all strategies."""
    found = parameters_of(cast("type", cls))
    return {name: p for name, p in found.items() if name not in OPTIONS}


def refused_by(cls: Callable[..., Strategy]) -> dict[str, list[Any]]:
    """Argument → the values that a strategy refuses, by its rows."""
    found: dict[str, list[Any]] = {}
    for name in own_arguments(cls):
        own = [value for row in TABLE if row.cls is cls for value in row.refused.get(name, ())]
        if values := own or REFUSED_BY_ALL.get(name, ()):
            found[name] = [*values]
    return found


def taken_by(cls: Callable[..., Strategy]) -> dict[str, list[Any]]:
    """Argument → the values that a strategy takes, by its rows."""
    found: dict[str, list[Any]] = {}
    for row in TABLE:
        if row.cls is cls:
            changed = {name: of[name] if isinstance(of, Instead) else of for name, of in row.changes.items()}
            for given in (row.arguments, row.learns_with, changed):
                for name, value in given.items():
                    found.setdefault(name, []).append(value)
            for name, values in row.also.items():
                found.setdefault(name, []).extend(values)
    return found


# Arguments that contradict each other, or are no longer called so: the error names what follows.
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], list[Any]]] = [
    (SPARTAStrategy, {"p_sparta": 0.1, "index_selector": SELECTOR}, ["p_sparta … 0.1 … index_selector", SELECTOR]),
    (SPARTAStrategy, {"index_selector": SELECTOR, "compression_method": "topk"}, ["compression_method", SELECTOR]),
    (SPARTAStrategy, {"mask": "broadcast", "compression_method": "topk"}, ["mask", "compression_method"]),
    (SPARTAStrategy, {"index_selector": RandomIndexSelector}, ["index_selector … IndexSelector"]),
    (SPARTAStrategy, {"p_spart": 0.1}, ["p_spart … p_sparta"]),
    (DiLoCoStrategy, {"inner_lr": 0.1}, ["inner_lr … lr … vsim.compat.exogym"]),
    (DiLoCoStrategy, {"max_steps": 5}, ["max_steps … lr_scheduler"]),
    (DiLoCoStrategy, {"every": 5}, ["DiLoCoStrategy … every … H"]),
    (FedPerStrategy, {"every": 5}, ["FedPerStrategy … every … H"]),
    (FedOptStrategy, {"server_optim": "adam"}, ["server_optim … outer_optim"]),
    (ScaffoldStrategy, {"server_lr": 0.1}, ["server_lr … outer_lr"]),
    (EDiTStrategy, {"clip_norm": 0.1}, ["clip_norm … outer_max_norm"]),
    (DelayedNesterovStrategy, {"N": 2}, ["N … buffer"]),
]


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [(row.cls, name, value) for row in EACH for name, values in refused_by(row.cls).items() for value in values],
)
def test_an_argument_out_of_range_is_named(cls: Callable[..., Strategy], name: str, value: Any) -> None:
    """In the call, or when a run begins."""
    first = next(row for row in TABLE if row.cls is cls)
    required = [one for one, p in own_arguments(cls).items() if p.default is p.empty]
    given = value if isinstance(value, Instead) else {**{one: first.arguments[one] for one in required}, name: value}
    shown = [] if isinstance(given[name], list | dict) else [given[name]]  # of a collection, an error shows a part
    with refused((TypeError, ValueError), name, *shown):
        run(cls(**given))


@pytest.mark.parametrize(("make", "name", "value"), REFUSED_BY_PARTS)
def test_an_argument_of_a_part_out_of_range_is_named(make: Callable[..., Any], name: str, value: Any) -> None:
    with refused(ValueError, name, value):
        make(**{name: value})


@pytest.mark.parametrize("row", EACH, ids=lambda row: row.name)
def test_every_argument_has_values_that_are_refused(row: Row) -> None:
    own = own_arguments(row.cls)
    lacking = [name for name in own if own[name].annotation not in ("bool", bool) and name not in refused_by(row.cls)]
    named = [name for name in lacking if name != "communication_modules"]
    assert not named, f"tests/test_strategies_common.py, TABLE: give a row of {row.cls.__name__} refused={{{named}: …}}"


@pytest.mark.parametrize(("make", "arguments", "names"), REFUSED)
def test_contradictions_and_old_names_are_refused(
    make: Callable[..., Any], arguments: dict[str, Any], names: list[Any]
) -> None:
    with refused(TypeError, *names):
        make(**arguments)


def test_arguments_are_given_by_name() -> None:
    with refused(TypeError, "ScaffoldStrategy … by name, ScaffoldStrategy(H=…, outer_lr=… … 'sgd', 2 by position"):
        ScaffoldStrategy("sgd", 2)  # type: ignore[misc]
    shown = repr(DiLoCoStrategy(inner_optim="sgd", outer_optim="adam", H=5))
    assert shown == "DiLoCoStrategy(inner_optim='sgd', outer_optim='adam', H=5)"


def test_a_strategy_has_the_arguments_and_the_text_of_its_modules() -> None:
    parameters = parameters_of(FedAvgStrategy)
    assert [*parameters][:4] == ["inner_optim", "H", "average", "island_size"] and parameters["H"].default == 1
    text = inspect.getdoc(SPARTADiLoCoStrategy) or ""
    assert all(f"\n    {name}:" in text for name in ("p_sparta", "sparta_interval", "H", "mask", "outer_optim"))
    assert "\n    every:" not in text and text.count("Payload:") == text.count("Args:") == 1


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.cls is not DittoStrategy], ids=lambda row: row.name
)  # Ditto computes gradients itself
def test_nodes_held_apart_have_equal_bits(row: Row) -> None:
    same_apart(row.make(), model(), normal(STEPS, 4, P))


COMMON: dict[str, dict[str, Any]] = {
    "inner_optim": {"inner_optim": "rmsprop"},
    "lr": {"lr": 3e-3},
    "max_norm": {"max_norm": 0.1, "inner_optim": SGD},
    "lr_scheduler": {"lr_scheduler": "cosine"},
    "lr_scheduler_kwargs": {"lr_scheduler": StepLR, "lr_scheduler_kwargs": {"step_size": 2}},
    "warmup_steps": {"warmup_steps": 3},
    "cosine_anneal": {"cosine_anneal": True},
    "max_steps": {"cosine_anneal": True, "max_steps": 3},
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "max_norm": {"inner_optim": SGD},
    "max_steps": {"cosine_anneal": True},
    "lr_scheduler_kwargs": {"lr_scheduler": StepLR, "lr_scheduler_kwargs": {"step_size": 3}},
}


def test_the_common_arguments_are_all_here() -> None:
    assert {*COMMON, "attack"} == {*OPTIONS}


# The common arguments are the base's; these take them in different ways.
QUICKLY = ("AllReduce", "DiLoCo", "DeMo")


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=() if row.name in QUICKLY else pytest.mark.slow) for row in EACH]
)
def test_every_common_argument_has_an_effect(row: Row) -> None:
    plain = outcome(row.cls(**row.arguments))
    for argument, kwargs in COMMON.items():
        if row.refuses and argument == "inner_optim":
            with pytest.raises(TypeError, match=row.refuses):
                row.cls(**kwargs)
            continue
        with_it, without = (
            {name: value for name, value in given.items() if not (row.refuses and name == "inner_optim")}
            for given in (kwargs, OTHERWISE.get(argument, {}))
        )
        other = outcome(row.cls(**row.arguments, **without)) if without else plain
        assert outcome(row.cls(**row.arguments, **with_it)) != other, argument
