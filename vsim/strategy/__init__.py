"""The strategies: how the nodes of a cluster train and communicate."""

from typing import Any

from vsim.algorithms.adapters import AdapterStrategy
from vsim.algorithms.afl import AFLStrategy
from vsim.algorithms.allreduce import SimpleReduceStrategy
from vsim.algorithms.alone import AloneStrategy
from vsim.algorithms.async_diloco import AsyncDiLoCoStrategy
from vsim.algorithms.asynchronous import AsynchronousStrategy
from vsim.algorithms.compression import (
    FP4,
    QSGD,
    Compressor,
    DCTTopK,
    PowerSGD,
    RandomK,
    ScaledSign,
    SignVote,
    StatisticalQuantizer,
    TileTopK,
    TopK,
    UniformQuantizer,
)
from vsim.algorithms.d2 import D2Strategy
from vsim.algorithms.decoupled import DecoupledDiLoCoStrategy
from vsim.algorithms.delayed_nesterov import DelayedNesterovStrategy
from vsim.algorithms.demo import DeMoStrategy
from vsim.algorithms.desloc import DESLOCStrategy, StateAverage
from vsim.algorithms.diloco import DiLoCoStrategy
from vsim.algorithms.dion import DionStrategy
from vsim.algorithms.ditto import DittoStrategy
from vsim.algorithms.dpfedavg import DPFedAvgStrategy
from vsim.algorithms.eager import EagerDiLoCoStrategy
from vsim.algorithms.edit import EDiTStrategy
from vsim.algorithms.exact_diffusion import ExactDiffusionStrategy
from vsim.algorithms.fedavg import FedAvgStrategy
from vsim.algorithms.fedbn import FedBNStrategy
from vsim.algorithms.feddyn import FedDynStrategy
from vsim.algorithms.fednova import FedNovaStrategy
from vsim.algorithms.fedopt import FedAdagrad, FedAdam, FedOptStrategy, FedYogi
from vsim.algorithms.fedper import FedPerStrategy
from vsim.algorithms.fedprox import FedProxStrategy
from vsim.algorithms.fedrep import FedRepStrategy
from vsim.algorithms.gossip import GossipStrategy
from vsim.algorithms.gpa import GPAStrategy
from vsim.algorithms.gradient_tracking import GradientTrackingStrategy
from vsim.algorithms.graphs import RandomGraph
from vsim.algorithms.hierarchical import GroupAverage, HierarchicalStrategy
from vsim.algorithms.muloco import MuLoCoStrategy
from vsim.algorithms.noloco import NoLoCoStrategy
from vsim.algorithms.per_node import CommunicateOptimizeStrategy, Strategy
from vsim.algorithms.push_sum import PushSumStrategy
from vsim.algorithms.qfedavg import QFedAvgStrategy
from vsim.algorithms.quasi_global import QuasiGlobalMomentumStrategy
from vsim.algorithms.relay_sum import RelaySumStrategy
from vsim.algorithms.scaffold import ScaffoldStrategy
from vsim.algorithms.selectors import (
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
)
from vsim.algorithms.slowmo import SlowMoStrategy
from vsim.algorithms.sparseloco import SparseLoCoStrategy
from vsim.algorithms.sparta import SPARTAStrategy
from vsim.algorithms.sparta_diloco import SPARTADiLoCoStrategy
from vsim.algorithms.streaming import StreamingDiLoCoStrategy
from vsim.algorithms.weight_sync import WeightSyncStrategy
from vsim.cluster.optim import OptimSpec
from vsim.cluster.schedule import restarts
from vsim.core import average
from vsim.core.algorithm import Algorithm
from vsim.core.attack import Attack
from vsim.core.average import (
    RULES,
    Average,
    Rule,
    centered_clip,
    clip,
    compress,
    geometric_median,
    iso,
    krum,
    mean,
    median,
    rda,
    ties,
    trimmed_mean,
    tsv,
)
from vsim.core.fields import algorithm, state
from vsim.core.when import QSR, Every, PostLocal, Seconds, When

edit = average.edit  # the imports above bind `edit` to the module edit.py: bind it to the rule

# Short name → class, and the command line's defaults where they differ from those of the class.
STRATEGIES: dict[str, tuple[type[Algorithm], dict[str, Any]]] = {
    "allreduce": (SimpleReduceStrategy, {}),
    "fedavg": (FedAvgStrategy, {"H": 10}),
    "diloco": (DiLoCoStrategy, {}),
    "sparta": (SPARTAStrategy, {}),
    "sparta_diloco": (SPARTADiLoCoStrategy, {}),
    "streaming": (StreamingDiLoCoStrategy, {"fragments": 2, "delay": 1, "mixing": 0.5}),
    "eager": (EagerDiLoCoStrategy, {}),
    "demo": (DeMoStrategy, {"index_bytes": "packed"}),
    "dion": (DionStrategy, {"lr": 1e-2}),
    "sparseloco": (SparseLoCoStrategy, {"H": 10, "topk": 32, "outer_lr": 1.5}),
    "edit": (EDiTStrategy, {}),
    "muloco": (MuLoCoStrategy, {"H": 10, "outer_lr": 0.4, "lr": 1e-2}),
    "noloco": (NoLoCoStrategy, {"H": 10}),
    "gossip": (GossipStrategy, {}),
    "d2": (D2Strategy, {}),
    "exact_diffusion": (ExactDiffusionStrategy, {}),
    "gradient_tracking": (GradientTrackingStrategy, {}),
    "quasi_global": (QuasiGlobalMomentumStrategy, {}),
    "push_sum": (PushSumStrategy, {}),
    "relay_sum": (RelaySumStrategy, {}),
    "slowmo": (SlowMoStrategy, {"H": 10}),
    "desloc": (DESLOCStrategy, {"H": 10, "H_v": 30}),
    "gpa": (GPAStrategy, {"mu_x": 0.974}),
    "fedopt": (FedOptStrategy, {"H": 10}),
    "fedprox": (FedProxStrategy, {"H": 10}),
    "fedper": (FedPerStrategy, {"H": 10}),
    "fedrep": (FedRepStrategy, {"H": 10}),
    "ditto": (DittoStrategy, {"H": 10}),
    "fednova": (FedNovaStrategy, {"H": 10}),
    "feddyn": (FedDynStrategy, {"H": 10, "lr": 0.3}),
    "qfedavg": (QFedAvgStrategy, {"H": 10}),
    "afl": (AFLStrategy, {"H": 10}),
    "scaffold": (ScaffoldStrategy, {"H": 10, "lr": 0.3}),
    "alone": (AloneStrategy, {}),
    "async_diloco": (AsyncDiLoCoStrategy, {"H": 10, "outer_optim": OptimSpec("sgd", lr=0.4)}),
    "delayed_nesterov": (DelayedNesterovStrategy, {"H": 10, "outer_lr": 0.4, "momentum": 0.5}),
    "decoupled": (DecoupledDiLoCoStrategy, {"H": 10, "outer_optim": OptimSpec("sgd", lr=0.4)}),
}
# The strategies that the command line compares by default. A few hundred steps make few rounds, in which DiLoCo's outer
# learning rate of 0.7, tuned for H = 500, overshoots the minimum.
_FEW_ROUNDS = "H=10,outer_lr=0.4"
COMPARED = [
    *("allreduce", "fedavg", f"diloco:{_FEW_ROUNDS}", "sparta", f"sparta_diloco:{_FEW_ROUNDS}", "demo", "alone"),
]

# Short name → class, and the paper's hyperparameters as far as the paper gives them.
PRESETS: dict[str, tuple[type[Algorithm], dict[str, Any]]] = {
    "diloco-paper": (
        DiLoCoStrategy,
        {
            "H": 500,
            "outer_lr": 0.7,
            "lr": 4e-4,
            "inner_optim": OptimSpec("adamw", weight_decay=0.1),
            "lr_scheduler": "cosine",
        },
    ),
    "demo-paper": (DeMoStrategy, {"compression_decay": 0.999, "compression_topk": 32, "compression_chunk": 64}),
    "demo-2": (DeMoStrategy, {"version": 2, "alpha": 0.2}),
}

# fmt: off
__all__ = [
    "COMPARED", "FP4", "PRESETS", "QSGD", "QSR", "RULES", "STRATEGIES", "AFLStrategy", "AdapterStrategy", "Algorithm",
    "AloneStrategy", "AsyncDiLoCoStrategy", "AsynchronousStrategy", "Attack", "Average", "CommunicateOptimizeStrategy",
    "Compressor", "D2Strategy", "DCTTopK", "DESLOCStrategy", "DPFedAvgStrategy", "DeMoStrategy",
    "DecoupledDiLoCoStrategy", "DelayedNesterovStrategy", "DiLoCoStrategy", "DionStrategy", "DittoStrategy",
    "EDiTStrategy", "EagerDiLoCoStrategy", "Every", "ExactDiffusionStrategy", "FedAdagrad", "FedAdam", "FedAvgStrategy",
    "FedBNStrategy", "FedDynStrategy", "FedNovaStrategy", "FedOptStrategy", "FedPerStrategy", "FedProxStrategy",
    "FedRepStrategy", "FedYogi", "GPAStrategy", "GossipStrategy", "GradientTrackingStrategy", "GroupAverage",
    "HierarchicalStrategy", "IndexSelector", "MuLoCoStrategy", "NoLoCoStrategy", "OptimSpec",
    "PartitionedIndexSelector", "PostLocal", "PowerSGD", "PushSumStrategy", "QFedAvgStrategy",
    "QuasiGlobalMomentumStrategy", "RandomGraph", "RandomIndexSelector", "RandomK", "RelaySumStrategy", "Rule",
    "SPARTADiLoCoStrategy", "SPARTAStrategy", "ScaffoldStrategy", "ScaledSign", "Seconds",
    "ShuffledSequentialIndexSelector", "SignVote", "SimpleReduceStrategy", "SlowMoStrategy", "SparseLoCoStrategy",
    "StateAverage", "StatisticalQuantizer", "Strategy", "StreamingDiLoCoStrategy", "TileTopK", "TopK",
    "UniformQuantizer", "WeightSyncStrategy", "When", "algorithm", "centered_clip", "clip", "compress", "edit",
    "geometric_median", "iso", "krum", "mean", "median", "rda", "restarts", "state", "ties", "trimmed_mean", "tsv",
]
