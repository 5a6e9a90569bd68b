"""Which strategies enter, and what is tuned: the learning rate, and at most two settings of a strategy's own.

A range (low, high) is searched on a logarithmic scale; (low, high, "linear") evenly; a list is a choice. The range of
the learning rate is the task's.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import math
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vsim import strategy as of
from vsim.arguments import given
from vsim.strategy import QSGD, Algorithm, OptimSpec, PowerSGD, RandomK, SignVote, TopK, compress

Range = Sequence[Any]


@dataclass(frozen=True)
class Row:
    """A strategy of the atlas.

    Args:
        make: the class, or a function of its arguments.
        space: argument → range.
        kind: "every step" or "rounds", by when it sends; "matrices" for those that treat the matrices of a network;
            "plain SGD" or "Adam" for those that need this inner optimizer; "clients" for those made for clients whose
            data differ; "asynchronous"; or "mine", of a user's own.
        own_step: whether the strategy has its own step instead of the task's inner optimizer, with lengths that do not
            depend on the gradient's: signs, or orthonormal matrices. Its learning rates are `lr` times the task's for
            signs.
        code: digest of a user's file or cell, so that a changed class is trained again.
    """

    make: Callable[..., Algorithm]
    space: Mapping[str, Range] = field(default_factory=dict)
    kind: str = "rounds"
    own_step: bool = False
    lr: float = 1.0
    code: str = ""

    def enters(self, kinds: Container[str]) -> bool:
        """Return whether the strategy enters a task with these kinds; one's own enters all."""
        return self.kind in kinds or self.kind == "mine"


_H = (2, 100)
_OUTER = (0.3, 1.2, "linear")


def _compressed(compressor: Callable[..., Any], argument: str, **fixed: Any) -> Callable[..., Algorithm]:
    def make(**arguments: Any) -> Algorithm:
        own = {argument: arguments.pop(argument)}
        return of.SimpleReduceStrategy(average=compress(compressor(**own, **fixed)), **arguments)

    return make


def _sign_vote(**arguments: Any) -> Algorithm:
    return of.SimpleReduceStrategy(average=compress(SignVote()), inner_optim=OptimSpec("sgd"), **arguments)


def _desloc(H: int, **arguments: Any) -> Algorithm:
    return of.DESLOCStrategy(H=H, H_v=3 * H, **arguments)


def _nesterov(make: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """Return a strategy whose outer optimizer is SGD with Nesterov momentum .9, DiLoCo's."""
    return lambda **own: make(outer_optim=OptimSpec("sgd", momentum=0.9, nesterov=True), **own)


def _fedopt(optimizer: str) -> Callable[..., Algorithm]:
    return lambda **own: of.FedOptStrategy(outer_optim=optimizer, **own)


ROWS: dict[str, Row] = {
    "AllReduce": Row(of.SimpleReduceStrategy, kind="every step"),
    "alone": Row(of.AloneStrategy),
    "top-k AllReduce": Row(
        _compressed(TopK, "fraction", index_bytes="packed"), {"fraction": (0.002, 0.3)}, "every step"
    ),
    "random-k AllReduce": Row(_compressed(RandomK, "fraction"), {"fraction": (0.01, 0.5)}, "every step"),
    "QSGD AllReduce": Row(_compressed(QSGD, "levels"), {"levels": [1, 3, 7, 31]}, "every step"),
    "PowerSGD AllReduce": Row(_compressed(PowerSGD, "rank"), {"rank": [1, 2, 4]}, "matrices"),
    "sign vote": Row(_sign_vote, kind="every step", own_step=True),
    "DeMo": Row(
        lambda **own: of.DeMoStrategy(index_bytes="packed", **own),
        {"compression_topk": (1, 32), "compression_decay": [0.9, 0.99, 0.999]},
        "matrices",
        own_step=True,
    ),
    "DeMo 2": Row(
        lambda **own: of.DeMoStrategy(version=2, index_bytes="packed", **own),
        {"compression_topk": (1, 32), "alpha": (0.05, 1.0)},
        "matrices",
        own_step=True,
    ),
    "Dion": Row(of.DionStrategy, {"rank_fraction": (0.05, 0.5)}, "matrices", own_step=True, lr=3.0),
    "SPARTA": Row(of.SPARTAStrategy, {"p_sparta": (0.002, 0.5)}, "every step"),
    "GPA": Row(of.GPAStrategy, {"mu_x": [0.9, 0.95, 0.974, 0.99], "mu_y": (0.5, 0.95, "linear")}, "every step"),
    "gossip": Row(of.GossipStrategy, {"topology": ["ring", "exponential"], "H": (1, 32)}, "every step"),
    "D²": Row(of.D2Strategy, kind="every step"),
    "exact diffusion": Row(of.ExactDiffusionStrategy, {"topology": ["ring", "exponential"]}, "every step"),
    "gradient tracking": Row(of.GradientTrackingStrategy, {"topology": ["ring", "exponential"]}, "every step"),
    "push-sum": Row(of.PushSumStrategy, kind="every step"),
    "quasi-global momentum": Row(of.QuasiGlobalMomentumStrategy, {"momentum": [0.5, 0.8, 0.9]}, "plain SGD"),
    "RelaySGD": Row(of.RelaySumStrategy, kind="every step"),
    "FedAvg": Row(of.FedAvgStrategy, {"H": _H}),
    "DiLoCo": Row(_nesterov(of.DiLoCoStrategy), {"H": _H, "outer_lr": _OUTER}),
    "SPARTA-DiLoCo": Row(
        _nesterov(lambda **own: of.SPARTADiLoCoStrategy(outer_lr=0.7, **own)),
        {"H": _H, "p_sparta": (0.002, 0.2)},
    ),
    "SlowMo": Row(of.SlowMoStrategy, {"H": _H, "beta": (0.2, 0.8, "linear")}),
    "DES-LOC": Row(_desloc, {"H": _H}, "Adam"),
    "NoLoCo": Row(of.NoLoCoStrategy, {"H": _H, "beta": (0.3, 0.9, "linear")}),
    "SparseLoCo": Row(of.SparseLoCoStrategy, {"H": _H, "topk": [1, 4, 16, 32]}),
    "MuLoCo": Row(of.MuLoCoStrategy, {"H": _H, "outer_lr": _OUTER}, "matrices", own_step=True, lr=3.0),
    "Streaming DiLoCo": Row(_nesterov(of.StreamingDiLoCoStrategy), {"H": (4, 100), "outer_lr": _OUTER}),
    "Eager DiLoCo": Row(_nesterov(of.EagerDiLoCoStrategy), {"H": _H, "outer_lr": _OUTER}),
    "EDiT": Row(_nesterov(of.EDiTStrategy), {"H": _H, "outer_lr": _OUTER}),
    "FedAdam": Row(_fedopt("adam"), {"H": _H, "outer_lr": (1e-3, 0.3)}, "clients"),
    "FedYogi": Row(_fedopt("yogi"), {"H": _H, "outer_lr": (1e-3, 0.3)}, "clients"),
    "FedProx": Row(of.FedProxStrategy, {"H": _H, "mu": (1e-3, 1.0)}, "clients"),
    "FedDyn": Row(of.FedDynStrategy, {"H": _H, "alpha": (1e-3, 0.3)}, "clients"),
    "FedNova": Row(of.FedNovaStrategy, {"H": _H}, "clients"),
    "SCAFFOLD": Row(of.ScaffoldStrategy, {"H": _H, "outer_lr": _OUTER}, "clients"),
    "q-FedAvg": Row(of.QFedAvgStrategy, {"H": _H, "q": (0.01, 1.0)}, "clients"),
    "AFL": Row(of.AFLStrategy, {"H": _H, "gamma": (1e-3, 0.3)}, "clients"),
    "Async DiLoCo": Row(of.AsyncDiLoCoStrategy, {"H": _H, "outer_lr": (0.1, 1.0)}, "asynchronous"),
    "delayed Nesterov": Row(of.DelayedNesterovStrategy, {"H": _H, "outer_lr": (0.1, 1.0)}, "asynchronous"),
    "Decoupled DiLoCo": Row(of.DecoupledDiLoCoStrategy, {"H": (4, 100), "outer_lr": (0.1, 1.0)}, "asynchronous"),
}


def row_of(cls: Any) -> Row:
    """Return the row of a class of one's own, from its attribute `space`."""
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise TypeError(f"--mine must name a class of strategies, got {given(cls)}")
    space = getattr(cls, "space", None)
    if not isinstance(space, Mapping) or len(set(space) - {"lr"}) > 2:
        raise TypeError(
            f"{cls.__name__}.space must be a dict of at most two arguments → range, such as "
            f'{{"H": (2, 128), "outer_lr": (0.3, 1.2, "linear"), "mode": ["a", "b"]}}, got {given(space)}'
        )
    for argument, own in space.items():
        point(own, 0.5, f"{cls.__name__}.space[{argument!r}]")
    return Row(cls, space, "mine", own_step=bool(getattr(cls, "own_step", False)), code=_code(cls))


def _code(cls: type) -> str:
    """Return the digest of the files, or cells of a notebook, that hold a class."""
    files = {own.__code__.co_filename for own in vars(cls).values() if inspect.isfunction(own)}
    files.add(getattr(sys.modules[cls.__module__], "__file__", None) or "")
    linecache.checkcache()
    text = "".join(line for file in sorted(files) for line in linecache.getlines(file))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def point(own: Range, u: float, where: str = "a range") -> Any:
    """Return the value of a range at u in [0, 1).

    >>> point((1, 100), 0.5), point((0.0, 1.0, "linear"), 0.25), point(["a", "b"], 0.7)
    (10, 0.25, 'b')
    """
    if isinstance(own, list) and own:
        return own[int(u * len(own))]
    low, high, scale = (*own, "log")[:3] if isinstance(own, tuple) and len(own) in (2, 3) else (0, 0, "")
    numbers = all(isinstance(end, int | float) for end in (low, high))
    if not numbers or not low < high or scale not in ("log", "linear") or (scale == "log" and low <= 0):
        raise ValueError(
            f'{where} must be (low, high), both above 0; (low, high, "linear"); or a list of choices; got {own!r}'
        )
    value = low + u * (high - low) if scale == "linear" else low * math.exp(u * math.log(high / low))
    return round(value) if isinstance(low, int) and isinstance(high, int) else float(f"{value:.4g}")
