"""The strategies: how the nodes of a cluster train and communicate."""

import types
import typing

from vsim.cluster.optim import OptimSpec as OptimSpec
from vsim.cluster.schedule import restarts as restarts
from vsim.strategy import average
from vsim.strategy.afl import AFLStrategy as AFLStrategy
from vsim.strategy.allreduce import SimpleReduceStrategy as SimpleReduceStrategy
from vsim.strategy.alone import AloneStrategy as AloneStrategy
from vsim.strategy.async_diloco import AsyncDiLoCoStrategy as AsyncDiLoCoStrategy
from vsim.strategy.asynchronous import AsynchronousStrategy as AsynchronousStrategy
from vsim.strategy.attack import Attack as Attack
from vsim.strategy.average import RULES as RULES
from vsim.strategy.average import Average as Average
from vsim.strategy.average import Rule as Rule
from vsim.strategy.average import centered_clip as centered_clip
from vsim.strategy.average import clip as clip
from vsim.strategy.average import compress as compress
from vsim.strategy.average import geometric_median as geometric_median
from vsim.strategy.average import iso as iso
from vsim.strategy.average import krum as krum
from vsim.strategy.average import mean as mean
from vsim.strategy.average import median as median
from vsim.strategy.average import rda as rda
from vsim.strategy.average import ties as ties
from vsim.strategy.average import trimmed_mean as trimmed_mean
from vsim.strategy.average import tsv as tsv
from vsim.strategy.base import Algorithm as Algorithm
from vsim.strategy.compression import FP4 as FP4
from vsim.strategy.compression import QSGD as QSGD
from vsim.strategy.compression import Compressor as Compressor
from vsim.strategy.compression import DCTTopK as DCTTopK
from vsim.strategy.compression import PowerSGD as PowerSGD
from vsim.strategy.compression import RandomK as RandomK
from vsim.strategy.compression import ScaledSign as ScaledSign
from vsim.strategy.compression import SignVote as SignVote
from vsim.strategy.compression import StatisticalQuantizer as StatisticalQuantizer
from vsim.strategy.compression import TileTopK as TileTopK
from vsim.strategy.compression import TopK as TopK
from vsim.strategy.compression import UniformQuantizer as UniformQuantizer
from vsim.strategy.d2 import D2Strategy as D2Strategy
from vsim.strategy.decoupled import DecoupledDiLoCoStrategy as DecoupledDiLoCoStrategy
from vsim.strategy.delayed_nesterov import DelayedNesterovStrategy as DelayedNesterovStrategy
from vsim.strategy.demo import DeMoStrategy as DeMoStrategy
from vsim.strategy.desloc import DESLOCStrategy as DESLOCStrategy
from vsim.strategy.desloc import StateAverage as StateAverage
from vsim.strategy.diloco import DiLoCoStrategy as DiLoCoStrategy
from vsim.strategy.dion import DionStrategy as DionStrategy
from vsim.strategy.ditto import DittoStrategy as DittoStrategy
from vsim.strategy.dpfedavg import DPFedAvgStrategy as DPFedAvgStrategy
from vsim.strategy.eager import EagerDiLoCoStrategy as EagerDiLoCoStrategy
from vsim.strategy.edit import EDiTStrategy as EDiTStrategy
from vsim.strategy.exact_diffusion import ExactDiffusionStrategy as ExactDiffusionStrategy
from vsim.strategy.fedavg import FedAvgStrategy as FedAvgStrategy
from vsim.strategy.fedbn import FedBNStrategy as FedBNStrategy
from vsim.strategy.feddyn import FedDynStrategy as FedDynStrategy
from vsim.strategy.fednova import FedNovaStrategy as FedNovaStrategy
from vsim.strategy.fedopt import FedAdagrad as FedAdagrad
from vsim.strategy.fedopt import FedAdam as FedAdam
from vsim.strategy.fedopt import FedOptStrategy as FedOptStrategy
from vsim.strategy.fedopt import FedYogi as FedYogi
from vsim.strategy.fedper import FedPerStrategy as FedPerStrategy
from vsim.strategy.fedprox import FedProxStrategy as FedProxStrategy
from vsim.strategy.fedrep import FedRepStrategy as FedRepStrategy
from vsim.strategy.fields import algorithm as algorithm
from vsim.strategy.fields import state as state
from vsim.strategy.gossip import GossipStrategy as GossipStrategy
from vsim.strategy.gpa import GPAStrategy as GPAStrategy
from vsim.strategy.gradient_tracking import GradientTrackingStrategy as GradientTrackingStrategy
from vsim.strategy.graphs import RandomGraph as RandomGraph
from vsim.strategy.hierarchical import GroupAverage as GroupAverage
from vsim.strategy.hierarchical import HierarchicalStrategy as HierarchicalStrategy
from vsim.strategy.muloco import MuLoCoStrategy as MuLoCoStrategy
from vsim.strategy.noloco import NoLoCoStrategy as NoLoCoStrategy
from vsim.strategy.per_node import CommunicateOptimizeStrategy as CommunicateOptimizeStrategy
from vsim.strategy.per_node import Strategy as Strategy
from vsim.strategy.push_sum import PushSumStrategy as PushSumStrategy
from vsim.strategy.qfedavg import QFedAvgStrategy as QFedAvgStrategy
from vsim.strategy.quasi_global import QuasiGlobalMomentumStrategy as QuasiGlobalMomentumStrategy
from vsim.strategy.relay_sum import RelaySumStrategy as RelaySumStrategy
from vsim.strategy.scaffold import ScaffoldStrategy as ScaffoldStrategy
from vsim.strategy.selectors import IndexSelector as IndexSelector
from vsim.strategy.selectors import PartitionedIndexSelector as PartitionedIndexSelector
from vsim.strategy.selectors import RandomIndexSelector as RandomIndexSelector
from vsim.strategy.selectors import ShuffledSequentialIndexSelector as ShuffledSequentialIndexSelector
from vsim.strategy.slowmo import SlowMoStrategy as SlowMoStrategy
from vsim.strategy.sparseloco import SparseLoCoStrategy as SparseLoCoStrategy
from vsim.strategy.sparta import SPARTADiLoCoStrategy as SPARTADiLoCoStrategy
from vsim.strategy.sparta import SPARTAStrategy as SPARTAStrategy
from vsim.strategy.streaming import StreamingDiLoCoStrategy as StreamingDiLoCoStrategy
from vsim.strategy.when import QSR as QSR
from vsim.strategy.when import Every as Every
from vsim.strategy.when import PostLocal as PostLocal
from vsim.strategy.when import Seconds as Seconds
from vsim.strategy.when import When as When

edit = average.edit  # the imports above bind `edit` to the module edit.py: bind it to the rule

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
_NAMES: dict[type, str] = {SPARTADiLoCoStrategy: "sparta_diloco"}
_NOT_OFFERED = (DPFedAvgStrategy, FedBNStrategy, HierarchicalStrategy)


def _name(cls: type) -> str:
    return _NAMES.get(cls, cls.__module__.rpartition(".")[2])


# Short name → class, and the command line's defaults.
STRATEGIES: dict[str, tuple[type[Algorithm], dict[str, typing.Any]]] = {
    _name(one): (one, _DEFAULTS.get(one, {}))
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
}

# All names but modules: `X as X` in an import above is also how type checkers see that X is public here.
__all__ = sorted(name for name, one in [*vars().items()] if name[0] != "_" and not isinstance(one, types.ModuleType))
