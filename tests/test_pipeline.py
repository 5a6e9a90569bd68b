"""The price of a node that is a pipeline, against an event simulation of stages and links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import refused
from reference_cluster import vectors
from shared_comparisons import three_strategies

import vsim
from vsim import Compute, Network, Pipeline, price, required_bandwidth
from vsim.models import MLP
from vsim.network.planes import planes
from vsim.shapes import gpt_of
from vsim.strategy import AloneStrategy, AsyncDiLoCoStrategy, DiLoCoStrategy

LAYERS, WIDTH = 12, 64
SIZES: dict[str, Any] = {"layers": LAYERS, "width": WIDTH, "bytes_per_activation": 2}


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
    inside: dict[str, Any] = {"stages": stages, "microbatches": microbatches if stages > 1 else 1, "compression": 4}
    pipeline = Pipeline(tokens=1024, within=Network(bandwidth, 0.01), **inside, **SIZES)
    send = 0.01 + 8 * (1024 / microbatches) * WIDTH * 2 / 4 / bandwidth
    expected = [simulated(stages, microbatches, own, send if stages > 1 else 0) for own in (3.0, 0.1)]
    np.testing.assert_allclose(pipeline.seconds(np.array([3.0, 0.1])), expected)
    assert pipeline.boundary_bytes == 2 * 1024 * WIDTH * 2 / 4


def test_without_links_that_cost_time_only_the_bubble_remains() -> None:
    pipeline = Pipeline(stages=4, microbatches=8, tokens=1024, within=float("inf"), **SIZES)
    found = pipeline.seconds(np.array([1.0]))
    np.testing.assert_allclose(found, (8 + 4 - 1) / 8)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (3, 6)])
def test_experts_cost_four_exchanges_a_layer(stages: int, microbatches: int) -> None:
    E, network = 8, Network(1e9, 0.001)
    tokens = 1536
    # A machine sends 7/8 of its tokens' activations, to 7 others.
    one = float(network.seconds("all_to_all", E, tokens / microbatches / E * WIDTH * 2)[0])
    send = 0.001 + 8 * tokens / microbatches * WIDTH * 2 / 1e9 if stages > 1 else 0.0
    inside: dict[str, Any] = {"stages": stages, "microbatches": microbatches, "experts": E}
    found = Pipeline(tokens=tokens, within=network, **inside, **SIZES).seconds(np.array([1.0]))
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


INSIDE: dict[str, Any] = {"stages": 8, "microbatches": 16, "tokens": 16 * 2048, "within": "10 Gbit/s, 1 ms"}


def test_keywords_and_a_pipeline_have_one_price(tmp_path: Path) -> None:
    strategy = DiLoCoStrategy(H=3)
    keywords = price(strategy, **OPTIONS, compute=10.0, **INSIDE, compression=4)
    compute = Compute(10.0, pipeline=Pipeline(**INSIDE, compression=4))
    line = price(strategy, **OPTIONS, compute=compute)
    np.testing.assert_array_equal(line.seconds, keywords.seconds)
    np.testing.assert_array_equal(line.stalls, keywords.stalls)
    assert compute.node_seconds.tolist() == [10] and line.compute.utilization < 1
    again = Compute.from_plain(line.compute.as_plain())
    assert again.as_plain() == line.compute.as_plain() and repr(again) == repr(line.compute)
    np.testing.assert_array_equal(vsim.timeline(line.ledger, line.network, again).stalls, line.stalls)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"compute": {"seconds_per_step": 10, "memory": "80 GB", "pipeline": INSIDE}}))
    read = Compute.from_file(path)
    assert read.pipeline is not None and read.pipeline.as_plain() == Pipeline(**INSIDE).as_plain()
    assert read.memory == 80e9 and "80 GB" in repr(read)
    assert Compute.from_plain(read.as_plain()).memory == 80e9
    with refused(TypeError, "stages= … pipeline"):
        price(strategy, **OPTIONS, compute=compute, **INSIDE)


def test_a_small_model_takes_its_sizes_from_the_pipeline() -> None:
    small = {**OPTIONS, "parameters": 1e6}
    pipeline = Pipeline(**INSIDE, layers=12, width=64)
    line = price(AloneStrategy(), **small, compute=Compute(10.0, pipeline=pipeline))
    send = 0.001 + 8 * 2048 * 64 * 4 / 10e9
    assert line.seconds[-1] == pytest.approx(6 * simulated(8, 16, 10.0, send))
    with refused(TypeError, "layers and width … layers=… … parameters="):
        price(AloneStrategy(), **small, compute=Compute(10.0, pipeline=Pipeline(**INSIDE)))


def test_no_network_is_fast_enough_for_more_than_a_pipeline_computes() -> None:
    compute = Compute(10.0, pipeline=Pipeline(**INSIDE))
    options = {"parameters": 1.3e9, "num_nodes": 4, "compute": compute, "max_steps": 4}
    share = price(AloneStrategy(), **OPTIONS, compute=compute).utilization
    found = required_bandwidth(DiLoCoStrategy(H=2), **options, utilization=[0.5 * share, share + 0.01])
    assert found[0.5 * share] < found[share + 0.01] == float("inf")


def test_after_at_a_comparison_knows_the_sizes(tmp_path: Path) -> None:
    small = three_strategies()
    large = small.at(parameters=1.3e9)
    large.to_json(tmp_path / "large.json")
    compute, network = Compute(10.0, pipeline=Pipeline(**INSIDE)), "1 Gbit/s, 10 ms"
    for own in (large, vsim.Comparison.from_json(tmp_path / "large.json")):
        rows = own.rows(network=network, compute=compute).set_index("strategy")
        for name in own:
            run = small[name]
            options = {"num_nodes": run.history.num_nodes, "max_steps": int(run.history.last("step"))}
            line = price(run.strategy, parameters=1.3e9, network=network, compute=compute, seed=run.seed, **options)
            assert rows["hours"][name] == pytest.approx(line.seconds[-1] / 3600)
            assert rows["utilization"][name] == pytest.approx(line.utilization)
    chart = large.winners(loss=1e9, compute=compute, bandwidths=["1 Gbit/s", "10 Gbit/s"], latencies=[0.01])
    assert chart.first
    with refused(TypeError, "layers … width … bytes_per_activation"):
        small.table(network=network, compute=compute)
    whole = compute.of_model({"layers": 12, "width": 64, "bytes_per_activation": 2})
    assert small.table(network=network, compute=whole)
    with refused(TypeError, "layers and width"):
        small.at(model=MLP(2, (2,), 2)).table(network=network, compute=compute)


def test_what_a_pipeline_refuses() -> None:
    with refused(ValueError, "stages … from 1 to 4", 8):
        Pipeline(**INSIDE, layers=4)
    with refused(ValueError, "pipeline … stages … from 1 to 4", 8):
        Compute(1.0, pipeline=Pipeline(**INSIDE)).of_model({"layers": 4})
    with refused(TypeError, "within … equal links"):
        Pipeline(tokens=8, within=Network.regions({"a": 2, "b": 2}, inside="1 Gbit/s", between="1 Mbit/s"))
    with refused(TypeError, "microbatches=2 … stages="):
        Pipeline(tokens=8, within=1e9, microbatches=2)
    with refused(TypeError, "pipeline … Pipeline", 8):
        Compute(1.0, pipeline=8)  # type: ignore[arg-type]
    with refused(ValueError, "memory … 80 GB", "80"):
        Compute(1.0, memory="80")
    with refused(ValueError, "memory", 0):
        Compute(1.0, memory=0)


def test_pages_and_asynchronous_runs_have_the_waits_too() -> None:
    compute = Compute(10.0, pipeline=Pipeline(**INSIDE, layers=12, width=512, bytes_per_activation=4))
    share = 10 / float(compute.node_seconds[0])
    assert compute.utilization == pytest.approx(share) and share < 0.8
    line = price(DiLoCoStrategy(H=3), **OPTIONS, compute=compute)
    found = planes(line.ledger, line.network, compute, [6])
    mean = float(compute.node_seconds[0])
    assert found.computed * mean == pytest.approx(line.compute_seconds.sum()) == pytest.approx(60)
    assert found.seconds(mean, 0.01, 1e9) == pytest.approx(line.seconds[-1], rel=1e-3)
    trainer = vsim.Trainer(MLP(12, (3,), 5), vectors())
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 6, "batch_size": 4, "progress": False}
    trainer.fit(strategy=AsyncDiLoCoStrategy(H=2), compute=compute, network="1 Gbit/s", **options)
    alone = trainer.history.time("1 Gbit/s", compute)
    assert alone.seconds[-1] > 3 * mean and alone.utilization == pytest.approx(share, rel=1e-3)


def test_a_budget_counts_the_waits() -> None:
    compute, network = Compute(10.0, pipeline=Pipeline(**INSIDE)), "1 Gbit/s, 10 ms"
    line = price(AloneStrategy(), parameters=1e8, num_nodes=2, max_steps=4, network=network, compute=compute)
    options: dict[str, Any] = {"num_nodes": 2, "batch_size": 4, "progress": False, "compute": compute}
    found = vsim.compare(
        MLP(12, (3,), 5),
        vectors(),
        vectors(),
        strategies={"alone": AloneStrategy()},
        budget={"time": line.seconds[-1]},
        at=1e8,
        network=network,
        **options,
    )
    assert found["alone"].history.last("step") == 4 and line.seconds[-1] > 50
