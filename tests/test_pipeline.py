"""The price of a node that is a pipeline, against an event simulation of stages and links."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from errors import refused

from vsim import Compute, Network, price
from vsim.models import MLP
from vsim.network.pipeline import Pipeline
from vsim.shapes import gpt_of
from vsim.strategy import AloneStrategy, DiLoCoStrategy

LAYERS, WIDTH = 12, 64


def simulated(S: int, M: int, computed: float, send: float, exchange: float = 0.0) -> float:
    """When a pipeline is done: each stage and each link serves one microbatch at a time, in order."""

    def passed(begin: float, own: float) -> float:
        free = [begin] * (2 * S - 1)  # stages, with links between them
        for _ in range(M):
            ready = begin
            for place in range(2 * S - 1):
                free[place] = ready = max(ready, free[place]) + (send if place % 2 else own)
        return free[-1]

    forward = passed(0.0, computed / 3 / M + exchange)
    return passed(forward, 2 * computed / 3 / M + exchange)


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e12])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (4, 1), (2, 8), (4, 8), (12, 64)])
def test_a_pipeline_is_what_an_event_simulation_has(stages: int, microbatches: int, bandwidth: float) -> None:
    pipeline = Pipeline(stages, microbatches, 1, 1024, LAYERS, WIDTH, 2, compression=4)
    send = 0.01 + 8 * (1024 / microbatches) * WIDTH * 2 / 4 / bandwidth
    expected = [simulated(stages, microbatches, own, send if stages > 1 else 0) for own in (3.0, 0.1)]
    np.testing.assert_allclose(pipeline.seconds(np.array([3.0, 0.1]), Network(bandwidth, 0.01)), expected)
    assert pipeline.boundary_bytes == 2 * 1024 * WIDTH * 2 / 4


def test_without_links_that_cost_time_only_the_bubble_remains() -> None:
    found = Pipeline(4, 8, 1, 1024, LAYERS, WIDTH, 2).seconds(np.array([1.0]), Network(float("inf")))
    np.testing.assert_allclose(found, (8 + 4 - 1) / 8)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (3, 6)])
def test_experts_cost_four_exchanges_a_layer(stages: int, microbatches: int) -> None:
    E, network = 8, Network(1e9, 0.001)
    tokens = 1536
    # A machine sends 7/8 of its tokens' activations, to 7 others.
    one = float(network.seconds("all_to_all", E, tokens / microbatches / E * WIDTH * 2)[0])
    send = 0.001 + 8 * tokens / microbatches * WIDTH * 2 / 1e9 if stages > 1 else 0.0
    found = Pipeline(stages, microbatches, E, tokens, LAYERS, WIDTH, 2).seconds(np.array([1.0]), network)
    np.testing.assert_allclose(found, simulated(stages, microbatches, 1.0, send, 2 * LAYERS / stages * one))
    if stages == 1:
        np.testing.assert_allclose(found, 1.0 + 4 * LAYERS * one)


OPTIONS: dict[str, Any] = {"parameters": 1.3e9, "num_nodes": 4, "max_steps": 6, "network": "1 Gbit/s, 10 ms"}


def test_a_price_has_the_waits_inside_a_node() -> None:
    strategy, inside = DiLoCoStrategy(H=3), {"stages": 8, "microbatches": 16, "tokens": 16 * 2048}
    plain = price(strategy, **OPTIONS, compute=10.0)
    line = price(strategy, **OPTIONS, compute=10.0, **inside, bytes_per_parameter=4)
    model = gpt_of(1_300_000_000)
    width = len(model.norm.weight)  # type: ignore[arg-type, union-attr]
    step = simulated(8, 16, 10.0, 0.01 + 8 * 2048 * width * 4 / 1e9)
    assert line.ledger[:] == plain.ledger[:]  # type: ignore[index]
    assert line.seconds[-1] == pytest.approx(plain.seconds[-1] + 6 * (step - 10))
    assert line.compute_seconds.sum() == pytest.approx(60) and line.utilization < plain.utilization
    assert (line.compute_seconds + line.stalls).sum() == pytest.approx(line.seconds[-1])
    smaller = price(strategy, **OPTIONS, compute=10.0, **inside, compression=64)
    local = price(strategy, **OPTIONS, compute=10.0, **inside, within="400 Gbit/s")
    assert plain.seconds[-1] < local.seconds[-1] < smaller.seconds[-1] < line.seconds[-1]


def test_nodes_of_different_speeds() -> None:
    options = {**OPTIONS, "num_nodes": 2, "max_steps": 1}
    line = price(AloneStrategy(), **options, compute=Compute([3.0, 6.0]), stages=2, microbatches=2, tokens=4096)
    assert line.compute_seconds.sum() == pytest.approx(4.5)
    assert line.seconds[-1] > 9.0  # (2 + 2 − 1) / 2 of 6 s, and messages


def test_what_does_not_fit_is_refused() -> None:
    def priced(**options: Any) -> None:
        price(AloneStrategy(), **{**OPTIONS, "compute": 1.0, **options})

    with refused(TypeError, "tokens= … stages= … experts="):
        priced(tokens=100)
    with refused(TypeError, "stages= … tokens="):
        priced(stages=2)
    with refused(ValueError, "stages … from 1 to 26", 1000):
        priced(stages=1000, tokens=100)
    with refused(ValueError, "microbatches … from 1 to 100", 101):
        priced(stages=2, microbatches=101, tokens=100)
    with refused(ValueError, "compression", 0.5):
        priced(stages=2, tokens=100, compression=0.5)
    with refused(TypeError, "microbatches=4 … stages="):
        priced(microbatches=4, experts=2, tokens=100)
    with refused(TypeError, "parameters="):
        priced(parameters=None, model=MLP(), stages=2, tokens=100)
    regions = Network.regions({"a": 2, "b": 2}, inside="100 Gbit/s", between="1 Gbit/s")
    with refused(TypeError, "within="):
        priced(network=regions, stages=2, tokens=100)
