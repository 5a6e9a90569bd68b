"""Six steps of each strategy from given gradients, by its formula: `python -m tests.reproductions.golden` writes them.

Nothing here is from vsim. `call` makes the strategy whose history it is, from the names in vsim.strategy. Asynchronous
strategies are left out; for others without a history, a row of TABLE in tests/test_strategies_common.py says why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import formulas
from .formulas import TENSORS, Array, Formula

FOLDER = Path(__file__).parents[1] / "golden"
START = (1.0, -2.0, 0.5)
# From −2.25 to 2.25: for each of six steps, four nodes of three weights; fewer nodes take the first.
INDEX = np.arange(72)
GRADIENTS: Array = ((7 * INDEX**3 + 11 * INDEX) % 37 - 18).reshape(6, 4, 3) / 8
SGD = "inner_optim='sgd', lr=0.25"


@dataclass(frozen=True)
class Golden:
    """A history: the call of a strategy, and the formula of all weights, or one for each parameter."""

    call: str
    formula: Formula | tuple[Formula, ...]
    num_nodes: int = 3


def local(name: str, given: str, formula: Any, num_nodes: int = 3) -> Golden:
    return Golden(f"{name}({SGD}{', ' if given else ''}{given})", formula, num_nodes)


ADAMW = "OptimSpec('adamw', lr=0.25, weight_decay=0.0)"
STREAM = "H=2, fragments=[['body'], ['head']], delay=1, mixing=0.5, outer_lr=0.7"
HISTORIES = {
    "allreduce": local("SimpleReduceStrategy", "", formulas.AllReduce(0.25)),
    "alone": local("AloneStrategy", "", Formula(0.25)),
    "fedavg": local("FedAvgStrategy", "H=2", formulas.FedAvg(0.25, 2)),
    "hierarchical": local(
        "HierarchicalStrategy", "levels={2: 2, 4: 3}", formulas.Hierarchical(0.25, ((2, 2), (4, 3))), 4
    ),
    "slowmo": local("SlowMoStrategy", "H=2, alpha=0.75, beta=0.5", formulas.SlowMo(0.25, 2, alpha=0.75, beta=0.5)),
    "diloco": local("DiLoCoStrategy", "H=2", formulas.DiLoCo(0.25, 2)),
    "edit": local(
        "EDiTStrategy", "H=2, outer_max_norm=0.5", formulas.EDiT(0.25, 2, outer_lr=0.8, momentum=0.85, clip=0.5)
    ),
    "streaming": local(
        "StreamingDiLoCoStrategy", STREAM, tuple(formulas.Streaming(0.25, 2, fragment=i, delay=1) for i in range(2))
    ),
    "eager": local("EagerDiLoCoStrategy", "H=2", formulas.Eager(0.25, 2)),
    "delayed": local("EagerDiLoCoStrategy", "H=2, eager=False", formulas.Eager(0.25, 2, eager=False)),
    "desloc": Golden(f"DESLOCStrategy(inner_optim={ADAMW}, H=2, H_m=3, H_v=6)", formulas.DesLoc(0.25)),
    "noloco": local("NoLoCoStrategy", "H=2", formulas.NoLoCo(0.25, 2), 2),
    "gossip": local("GossipStrategy", "H=2", formulas.Gossip(0.25, 2), 4),
    "diging": local("GossipStrategy", "tracking=True", formulas.Tracking(0.25), 4),
    "d2": local("D2Strategy", "", formulas.D2(0.25), 4),
    "exact_diffusion": local("ExactDiffusionStrategy", "", formulas.D2(0.25, lazy=True), 4),
    "gradient_tracking": local("GradientTrackingStrategy", "", formulas.AdaptThenCombine(0.25), 4),
    "quasi_global": local("QuasiGlobalMomentumStrategy", "", formulas.QuasiGlobal(0.25), 4),
    "push_sum": local("PushSumStrategy", "topology=[(0, 1), (1, 2), (2, 0), (2, 1)]", formulas.PushedSums(0.25)),
    "relay_sum": local("RelaySumStrategy", "", formulas.Relay(0.25), 4),
    "relay_sum_gradients": local("RelaySumStrategy", "form='gradient'", formulas.Relay(0.25, gradients=True), 4),
    "sparseloco": local(
        "SparseLoCoStrategy",
        "H=2, topk=1, quantization_bits=None, error_feedback=0.5, outer_lr=0.5",
        formulas.SparseLoCo(0.25, 2, error_feedback=0.5, outer_lr=0.5),
    ),
    "demo": Golden(
        "DeMoStrategy(lr=0.25, compression_decay=0.5, compression_topk=1, weight_decay=0.125)",
        formulas.DeMo(0.25, decay=0.5, weight_decay=0.125),
    ),
    "demo_2": Golden(
        "DeMoStrategy(lr=0.25, compression_decay=0.5, compression_topk=1, weight_decay=0.125, alpha=0.25, "
        "update='identity', version=2)",
        formulas.DeMo2(0.25, decay=0.5, weight_decay=0.125),
    ),
    "gpa": local("GPAStrategy", "mu_x=0.5, mu_y=0.75", formulas.GPA(0.25)),
    "fedadam": local("FedOptStrategy", "H=2", formulas.FedOpt(0.25, 2)),
    "fedyogi": local("FedOptStrategy", "H=2, outer_optim='yogi'", formulas.FedOpt(0.25, 2, "yogi")),
    "fedadagrad": local(
        "FedOptStrategy",
        "H=2, outer_optim='adagrad'",
        formulas.FedOpt(0.25, 2, "adagrad", server_lr=0.1, betas=(0.0, 0.0)),
    ),
    "fedprox": local("FedProxStrategy", "H=2, mu=0.5", formulas.FedProx(0.25, 2)),
    "scaffold": local("ScaffoldStrategy", "H=2, outer_lr=0.5", formulas.Scaffold(0.25, 2, server_lr=0.5)),
    "fednova": local("FedNovaStrategy", "H=2", formulas.FedNova(0.25, 2)),
    "feddyn": local("FedDynStrategy", "H=2, alpha=0.5", formulas.FedDyn(0.25, 2)),
    "fedper": local("FedPerStrategy", "H=2, personal=['head']", formulas.Personal(0.25, 2)),
    "fedbn": local("FedBNStrategy", "H=2", formulas.Personal(0.25, 2)),
    "dpfedavg": local("DPFedAvgStrategy", "H=2, clip=0.5, noise_multiplier=0.0", formulas.Clipped(0.25, 2)),
}


def history(golden: Golden) -> dict[str, Any]:
    """The weights (7, K, 3) before step 1 and after each, and the bytes that a node sends after each."""
    steps, K = len(GRADIENTS), golden.num_nodes
    whole = isinstance(golden.formula, Formula)
    parts = [(golden.formula, (0, 1, 2))] if whole else [*zip(golden.formula, TENSORS, strict=True)]
    weights, sent = np.empty((steps + 1, K, 3)), np.zeros(steps)
    for formula, columns in parts:
        state = formula.start(np.tile(np.array(START)[list(columns)], (K, 1)))
        weights[0][:, columns] = state["θ"]
        for t in range(1, steps + 1):
            formula.step(t, state, GRADIENTS[t - 1, :K][:, columns])
            weights[t][:, columns] = state["θ"]
            sent[t - 1] += formula.sent(t, len(columns))
    return {
        "call": golden.call,
        "gradients": GRADIENTS[:, :K].tolist(),
        "weights": weights.tolist(),
        "bytes": sent.tolist(),
    }


if __name__ == "__main__":
    for name, golden in HISTORIES.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(history(golden)) + "\n", encoding="utf-8")
