"""DES-LOC with every optimizer that keeps moments, and the errors of optimizers without moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from strategies_by_hand import Parameters, driven, normal, same_apart

from vsim import price
from vsim.cluster.optimizers import states_by_node
from vsim.strategy import CommunicateOptimizeStrategy, DESLOCStrategy, OptimSpec, StateAverage

SGD = OptimSpec("sgd", lr=1.0, momentum=0.5)
MATRICES = Parameters((7, 3), (5, 2))
# Moments of every kind, and the events of an averaging of all of them.
KEPT = {
    "adamw": (OptimSpec("adamw"), ["exp_avg", "exp_avg_sq"]),
    "fused": (OptimSpec("adam", fused=True), ["exp_avg", "exp_avg_sq"]),
    "amsgrad": (OptimSpec("adamw", amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    "adamax": (OptimSpec("adamax"), ["exp_avg", "exp_inf"]),
    "nadam": (OptimSpec("nadam"), ["exp_avg", "exp_avg_sq"]),
    "rmsprop": (OptimSpec("rmsprop", momentum=0.9), ["momentum_buffer", "square_avg"]),
    "adagrad": (OptimSpec("adagrad"), ["sum"]),
    "sgd": (SGD, ["momentum_buffer"]),
    "muon": (OptimSpec("muon"), ["momentum_buffer"]),
}


@pytest.mark.parametrize(("spec", "names"), KEPT.values(), ids=KEPT)
def test_every_moment_is_averaged_at_its_period_also_by_nodes_apart_and_without_values(
    spec: OptimSpec, names: list[str]
) -> None:
    run = same_apart(DESLOCStrategy(inner_optim=spec, H=1), MATRICES, normal(6, 3, 31))
    labels = [(e.step, e.label) for e in run.ledger if e.label != "weights"]
    first = ("exp_avg", "momentum_buffer")
    expected = [(3, name) for name in names if name in first] + [(6, name) for name in names]
    assert labels == expected and {e.payload_bytes for e in run.ledger} == {4 * 31}
    for name in names:
        ours, *others = states_by_node(run.strategy.optim, name, run.cluster.replicas)
        for theirs in others:
            assert all(map(torch.equal, ours, theirs))
    options: dict[str, Any] = {"network": "1 Gbit/s", "compute": 1, "num_nodes": 3, "max_steps": 6}
    assert [*price(DESLOCStrategy(inner_optim=spec, H=1), model=MATRICES, **options).ledger] == [*run.ledger]


class Own(torch.optim.SGD):
    """Nobody but its author knows what this keeps."""


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        ("sgd", {}, r"SGD\) is not known to keep any of exp_avg, .*: .* FedAvgStrategy\(H=32\) does"),
        (OptimSpec(Own, lr=0.1), {}, r"\(Own, .*\) is not known"),
        (SGD, {"H_v": 5}, r"H_v=5 has no effect: OptimSpec\(SGD, .*\) is not known to keep any of exp_avg_sq"),
        ("rmsprop", {"H_m": 5}, r"H_m=5 has no effect"),
        (OptimSpec("muon", rest="adamw"), {}, r"OptimSpec\(Muon, rest=.*\) is two optimizers, each with moments"),
    ],
)
def test_moments_that_an_optimizer_does_not_keep(spec: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        DESLOCStrategy(inner_optim=spec, **arguments)


def test_state_that_is_not_there_is_named_at_the_sync() -> None:
    strategy = CommunicateOptimizeStrategy([StateAverage(name="exp_avg", H=1)], inner_optim=SGD)
    with pytest.raises(ValueError, match="SGD keeps no 'exp_avg' of a parameter, only momentum_buffer"):
        driven(strategy, MATRICES, normal(1, 2, 31))
