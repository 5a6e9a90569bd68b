"""The strategies: how the nodes of a cluster train and communicate."""

import types
import typing

from vsim.algorithms.adapters import AdapterStrategy as AdapterStrategy
from vsim.algorithms.afl import AFLStrategy as AFLStrategy
from vsim.algorithms.allreduce import SimpleReduceStrategy as SimpleReduceStrategy
from vsim.algorithms.alone import AloneStrategy as AloneStrategy
from vsim.algorithms.async_diloco import AsyncDiLoCoStrategy as AsyncDiLoCoStrategy
from vsim.algorithms.asynchronous import AsynchronousStrategy as AsynchronousStrategy
from vsim.algorithms.compression import FP4 as FP4
from vsim.algorithms.compression import QSGD as QSGD
from vsim.algorithms.compression import Compressor as Compressor
from vsim.algorithms.compression import DCTTopK as DCTTopK
from vsim.algorithms.compression import PowerSGD as PowerSGD
from vsim.algorithms.compression import RandomK as RandomK
from vsim.algorithms.compression import ScaledSign as ScaledSign
from vsim.algorithms.compression import SignVote as SignVote
from vsim.algorithms.compression import StatisticalQuantizer as StatisticalQuantizer
from vsim.algorithms.compression import TileTopK as TileTopK
from vsim.algorithms.compression import TopK as TopK
from vsim.algorithms.compression import UniformQuantizer as UniformQuantizer
from vsim.algorithms.d2 import D2Strategy as D2Strategy
from vsim.algorithms.decoupled import DecoupledDiLoCoStrategy as DecoupledDiLoCoStrategy
from vsim.algorithms.delayed_nesterov import DelayedNesterovStrategy as DelayedNesterovStrategy
from vsim.algorithms.demo import DeMoStrategy as DeMoStrategy
from vsim.algorithms.desloc import DESLOCStrategy as DESLOCStrategy
from vsim.algorithms.desloc import StateAverage as StateAverage
from vsim.algorithms.diloco import DiLoCoStrategy as DiLoCoStrategy
from vsim.algorithms.dion import DionStrategy as DionStrategy
from vsim.algorithms.ditto import DittoStrategy as DittoStrategy
from vsim.algorithms.dpfedavg import DPFedAvgStrategy as DPFedAvgStrategy
from vsim.algorithms.eager import EagerDiLoCoStrategy as EagerDiLoCoStrategy
from vsim.algorithms.edit import EDiTStrategy as EDiTStrategy
from vsim.algorithms.exact_diffusion import ExactDiffusionStrategy as ExactDiffusionStrategy
from vsim.algorithms.fedavg import FedAvgStrategy as FedAvgStrategy
from vsim.algorithms.fedbn import FedBNStrategy as FedBNStrategy
from vsim.algorithms.feddyn import FedDynStrategy as FedDynStrategy
from vsim.algorithms.fednova import FedNovaStrategy as FedNovaStrategy
from vsim.algorithms.fedopt import FedAdagrad as FedAdagrad
from vsim.algorithms.fedopt import FedAdam as FedAdam
from vsim.algorithms.fedopt import FedOptStrategy as FedOptStrategy
from vsim.algorithms.fedopt import FedYogi as FedYogi
from vsim.algorithms.fedper import FedPerStrategy as FedPerStrategy
from vsim.algorithms.fedprox import FedProxStrategy as FedProxStrategy
from vsim.algorithms.fedrep import FedRepStrategy as FedRepStrategy
from vsim.algorithms.gossip import GossipStrategy as GossipStrategy
from vsim.algorithms.gpa import GPAStrategy as GPAStrategy
from vsim.algorithms.gradient_tracking import GradientTrackingStrategy as GradientTrackingStrategy
from vsim.algorithms.graphs import RandomGraph as RandomGraph
from vsim.algorithms.hierarchical import GroupAverage as GroupAverage
from vsim.algorithms.hierarchical import HierarchicalStrategy as HierarchicalStrategy
from vsim.algorithms.muloco import MuLoCoStrategy as MuLoCoStrategy
from vsim.algorithms.noloco import NoLoCoStrategy as NoLoCoStrategy
from vsim.algorithms.per_node import CommunicateOptimizeStrategy as CommunicateOptimizeStrategy
from vsim.algorithms.per_node import Strategy as Strategy
from vsim.algorithms.push_sum import PushSumStrategy as PushSumStrategy
from vsim.algorithms.qfedavg import QFedAvgStrategy as QFedAvgStrategy
from vsim.algorithms.quasi_global import QuasiGlobalMomentumStrategy as QuasiGlobalMomentumStrategy
from vsim.algorithms.relay_sum import RelaySumStrategy as RelaySumStrategy
from vsim.algorithms.scaffold import ScaffoldStrategy as ScaffoldStrategy
from vsim.algorithms.selectors import IndexSelector as IndexSelector
from vsim.algorithms.selectors import PartitionedIndexSelector as PartitionedIndexSelector
from vsim.algorithms.selectors import RandomIndexSelector as RandomIndexSelector
from vsim.algorithms.selectors import ShuffledSequentialIndexSelector as ShuffledSequentialIndexSelector
from vsim.algorithms.slowmo import SlowMoStrategy as SlowMoStrategy
from vsim.algorithms.sparseloco import SparseLoCoStrategy as SparseLoCoStrategy
from vsim.algorithms.sparta import SPARTAStrategy as SPARTAStrategy
from vsim.algorithms.sparta_diloco import SPARTADiLoCoStrategy as SPARTADiLoCoStrategy
from vsim.algorithms.streaming import StreamingDiLoCoStrategy as StreamingDiLoCoStrategy
from vsim.algorithms.weight_sync import WeightSyncStrategy as WeightSyncStrategy
from vsim.cluster.optim import OptimSpec as OptimSpec
from vsim.cluster.schedule import restarts as restarts
from vsim.core.algorithm import Algorithm as Algorithm
from vsim.core.attack import Attack as Attack
from vsim.core.average import RULES as RULES
from vsim.core.average import Average as Average
from vsim.core.average import Rule as Rule
from vsim.core.average import centered_clip as centered_clip
from vsim.core.average import clip as clip
from vsim.core.average import compress as compress
from vsim.core.average import edit as edit
from vsim.core.average import geometric_median as geometric_median
from vsim.core.average import iso as iso
from vsim.core.average import krum as krum
from vsim.core.average import mean as mean
from vsim.core.average import median as median
from vsim.core.average import rda as rda
from vsim.core.average import ties as ties
from vsim.core.average import trimmed_mean as trimmed_mean
from vsim.core.average import tsv as tsv
from vsim.core.fields import algorithm as algorithm
from vsim.core.fields import state as state
from vsim.core.when import QSR as QSR
from vsim.core.when import Every as Every
from vsim.core.when import PostLocal as PostLocal
from vsim.core.when import Seconds as Seconds
from vsim.core.when import When as When

# The command line's defaults where they differ from those of the class.
_DEFAULTS: dict[type, dict[str, typing.Any]] = {
    FedAvgStrategy: {"H": 10},
    StreamingDiLoCoStrategy: {"fragments": 2, "delay": 1, "mixing": 0.5},
    DeMoStrategy: {"index_bytes": "packed"},
    DionStrategy: {"lr": 0.01},
    SparseLoCoStrategy: {"H": 10, "topk": 32, "outer_lr": 1.5},
    MuLoCoStrategy: {"H": 10, "outer_lr": 0.4, "lr": 0.01},
    NoLoCoStrategy: {"H": 10},
    SlowMoStrategy: {"H": 10},
    DESLOCStrategy: {"H": 10, "H_v": 30},
    GPAStrategy: {"mu_x": 0.974},
    FedOptStrategy: {"H": 10},
    FedProxStrategy: {"H": 10},
    FedPerStrategy: {"H": 10},
    FedRepStrategy: {"H": 10},
    DittoStrategy: {"H": 10},
    FedNovaStrategy: {"H": 10},
    FedDynStrategy: {"H": 10, "lr": 0.3},
    QFedAvgStrategy: {"H": 10},
    AFLStrategy: {"H": 10},
    ScaffoldStrategy: {"H": 10, "lr": 0.3},
    AsyncDiLoCoStrategy: {"H": 10, "outer_optim": OptimSpec("sgd", lr=0.4)},
    DelayedNesterovStrategy: {"H": 10, "outer_lr": 0.4, "momentum": 0.5},
    DecoupledDiLoCoStrategy: {"H": 10, "outer_optim": OptimSpec("sgd", lr=0.4)},
}
# The command line offers every strategy under the name of its file, except those that need other arguments or models.
_NOT_OFFERED = (AdapterStrategy, DPFedAvgStrategy, FedBNStrategy, HierarchicalStrategy, WeightSyncStrategy)

# Short name → class, and the command line's defaults.
STRATEGIES: dict[str, tuple[type[Algorithm], dict[str, typing.Any]]] = {
    one.__module__.rpartition(".")[2]: (one, _DEFAULTS.get(one, {}))
    for one in [*vars().values()]
    if isinstance(one, type) and "family" in vars(one) and one not in _NOT_OFFERED
}
# The strategies that the command line compares by default. A few hundred steps make few rounds, in which DiLoCo's outer
# learning rate of 0.7, tuned for H = 500, overshoots the minimum.
_FEW_ROUNDS = "H=10,outer_lr=0.4"
COMPARED = [
    *("allreduce", "fedavg", f"diloco:{_FEW_ROUNDS}", "sparta", f"sparta_diloco:{_FEW_ROUNDS}", "demo", "alone"),
]

# Short name → class, and the paper's hyperparameters as far as the paper gives them.
PRESETS: dict[str, tuple[type[Algorithm], dict[str, typing.Any]]] = {
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

# All names but modules: `X as X` in an import above is also how type checkers see that X is public here.
__all__ = sorted(name for name, one in [*vars().items()] if name[0] != "_" and not isinstance(one, types.ModuleType))
