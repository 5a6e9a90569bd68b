"""Prices without training: the ledger of a run without values is that of the run, and a published table."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import test_strategies_common as common
import torch
from errors import refused
from reproductions import streaming_bandwidths
from torch import nn

from vsim import Compute, Network, price, required_bandwidth, timeline
from vsim.cluster import Cluster
from vsim.shapes import gpt_of
from vsim.strategy import (
    STRATEGIES,
    Algorithm,
    AloneStrategy,
    DeMoStrategy,
    DESLOCStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    FedNovaStrategy,
    ScaffoldStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)
from vsim.strategy.communicate import all_reduce

ON_A_NETWORK: dict[str, Any] = {"network": "200 Mbit/s, 50 ms", "compute": 0.5}


@pytest.mark.parametrize("name", streaming_bandwidths.PUBLISHED)
def test_streaming_dilocos_table_4(name: str) -> None:
    strategy, model, published = streaming_bandwidths.PUBLISHED[name]
    needed = streaming_bandwidths.found(strategy, model)
    for share, rate, gbits in zip(streaming_bandwidths.SHARES, needed, published, strict=False):
        steps = math.log(rate / gbits) / math.log(streaming_bandwidths.A_STEP)
        known = bool(streaming_bandwidths.NOTES.get(f"{name}, {share}"))
        assert (abs(round(steps)) <= 1) is not known and abs(steps - round(steps)) < 0.2, (share, rate, gbits)


@pytest.mark.parametrize(("size", "layers"), [(10, 3), (997, 5), (4, 4)])
def test_parameters_are_the_layers_of_the_computation(size: int, layers: int) -> None:
    strategy = StreamingDiLoCoStrategy(H=layers)  # a layer a step
    options: dict[str, Any] = {"parameters": size, "num_nodes": 2, "max_steps": layers, "network": 1e9}
    line = price(strategy, **options, compute=Compute(1, layers=layers))
    sizes = [event.payload_bytes / 4 for event in line.ledger]
    assert sum(sizes) == size and max(sizes) - min(sizes) <= 1 and len(sizes) == layers
    with refused(ValueError, f"at least the number of layers, {size + 1}, got {size}"):
        price(strategy, **options, compute=Compute(1, layers=size + 1))
    halves, alone = StreamingDiLoCoStrategy(H=4, fragments=2), {**options, "parameters": 10**6, "max_steps": 8}
    with refused(ValueError, "1,000,000 parameters are one matrix", "layers="):
        price(halves, **alone, compute=1)
    assert price(halves, **alone, compute=1, layers=layers).seconds[-1] > 8


@common.every_row
@pytest.mark.filterwarnings("ignore:(DCT|RandomBasis)TopK")
def test_without_values_the_same_is_sent(row: common.Row) -> None:
    """As in the run; a share p of entries that are drawn is p of them, and islands are others after other draws."""
    run = common.run(row.make(), data=common.examples())
    drawn = "Random" in repr(row.arguments) or row.cls is SPARTAStrategy
    options: dict[str, Any] = {"model": common.model(), "num_nodes": 4, "max_steps": common.STEPS, **ON_A_NETWORK}
    if "'topk'" in repr(row.arguments) or "quantization_bits" in row.arguments:
        with pytest.raises(ValueError, match="what it sends depends on values"):
            price(row.make(), **options)
        return
    line = price(row.make(), **options)
    assert line.ledger.steps == run.ledger.steps
    for mine, its in zip(line.ledger, run.ledger, strict=True):
        assert mine[:5] == its[:5] and [*map(len, mine.groups)] == [*map(len, its.groups)]
        assert mine.payload_bytes == (pytest.approx(its.payload_bytes, rel=0.3) if drawn else its.payload_bytes)
    if not drawn:
        assert line.seconds.tolist() == timeline(run, **ON_A_NETWORK).seconds.tolist()


def test_a_trillion_parameters_on_ten_thousand_nodes_take_little_memory() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options: dict[str, Any] = {"num_nodes": 10_000, "max_steps": 2000, "network": "1 Gbit/s", "compute": 30}
    line = price(DiLoCoStrategy(H=500), parameters=1e12, **options)
    assert line.seconds[-1] == pytest.approx(2000 * 30 + 4 * 2 * 9999 / 10_000 * 32e12 / 1e9)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100e3  # kilobytes


def gpt2(layers: int, width: int, vocabulary: int, positions: int = 1024) -> nn.Module:
    """The shapes of GPT-2 as other code has them: a module a matrix, without values."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    with torch.device("meta"):
        made = nn.Module()
        made.wte, made.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        made.h = nn.ModuleList(Block() for _ in range(layers))
        made.ln_f = nn.LayerNorm(width)
    return made


@pytest.mark.parametrize(("number", "layers", "width"), [(124e6, 12, 768), (6.7e9, 32, 4096)])
def test_parameters_are_priced_as_a_real_gpt_of_that_size(number: float, layers: int, width: int) -> None:
    options: dict[str, Any] = {"num_nodes": 8, "max_steps": 10, "network": "200 Mbit/s, 50 ms"}
    options["compute"] = Compute(0.8, layers=layers)
    model = gpt2(layers, width, 50_304)
    for name in ("allreduce", "sparta", "streaming", "demo", "sparseloco"):
        made, given = STRATEGIES[name]
        strategy = made(**{**given, **({"H": 5} if name in ("streaming", "sparseloco") else {})})
        real, stand_in = (price(strategy, **size, **options) for size in ({"model": model}, {"parameters": number}))
        assert stand_in.seconds[-1] == pytest.approx(real.seconds[-1], rel=0.05), name
        assert 0 < stand_in.ledger.wire_bytes == pytest.approx(real.ledger.wire_bytes, rel=0.05), name


@pytest.mark.parametrize("number", [19_999_999, 20_000_000, 30_000_001, 1.3e9, 175e9, 1e12])
@pytest.mark.parametrize("layers", [None, 3, 24])
def test_a_gpt_has_exactly_so_many_parameters(number: float, layers: int | None) -> None:
    assert sum(p.numel() for p in gpt_of(int(number), layers).parameters()) == number


def test_layers_do_not_multiply_the_latency_of_small_messages() -> None:
    """SPARTA sends 0.4 MB a step, one bucket: two rounds of 50 ms between two nodes, with 24 layers or with none."""
    options: dict[str, Any] = {"parameters": 2e7, "num_nodes": 2, "max_steps": 10, "network": "1 Tbit/s, 50 ms"}
    strategy = SPARTAStrategy(p_sparta=0.005)
    overlapped = price(strategy, compute=Compute(0.8, layers=24), **options).seconds[-1]
    assert overlapped == pytest.approx(10 * 0.9, rel=1e-3)
    apart = price(strategy, compute=Compute(0.8, layers=24, bucket_bytes=0), **options).seconds[-1]
    assert apart > 10 * (24 * 0.1)
    # All gradients, 80 MB, fill three buckets.
    assert [Compute(1, layers=24).parts(size) for size in (80e6, 25e6, 1.0, 0.0, 1e12)] == [3, 1, 1, 1, 24]


def test_dollars() -> None:
    options: dict[str, Any] = {"parameters": 10, "num_nodes": 3, "max_steps": 3600, "network": 1e9}
    compute = Compute(2.0, dollars_per_hour=1.5)
    assert price(AloneStrategy(), **options, compute=compute).dollars == pytest.approx(3 * 2 * 1.5)  # nodes, hours
    assert math.isnan(price(AloneStrategy(), **options, compute=2.0).dollars)
    assert Compute.from_plain(compute.as_plain()).dollars_per_hour == 1.5


def test_the_model_is_left_as_it_is_and_may_have_no_values() -> None:
    model = common.model()
    before = copy.deepcopy(model.state_dict())
    line = price(DiLoCoStrategy(H=2), model=model, num_nodes=3, max_steps=4, **ON_A_NETWORK)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    bare = price(DiLoCoStrategy(H=2), model=model.to("meta"), num_nodes=3, max_steps=4, **ON_A_NETWORK)
    assert bare.seconds.tolist() == line.seconds.tolist()
    halved = price(DiLoCoStrategy(H=2), model=model, bytes_per_parameter=2, num_nodes=3, max_steps=4, **ON_A_NETWORK)
    assert [event.payload_bytes for event in halved.ledger] == [2 * common.P] * 2


@pytest.mark.filterwarnings("error")
def test_a_step_of_ones_own_and_schedules() -> None:
    class Own(Strategy):
        def step(self) -> None:
            for p in self.model.parameters():
                all_reduce(p.grad)
            super().step()

    options: dict[str, Any] = {"model": common.model(), "num_nodes": 3, "max_steps": 5, **ON_A_NETWORK}
    assert len(price(Own(lr=0.1), **options).ledger) == 5 * len(list(common.model().parameters()))
    schedules: dict[str, Any] = {"lr_scheduler": "cosine", "warmup_steps": 2, "max_norm": 1.0}
    assert len(price(FedAvgStrategy(H=2, **schedules), **options).ledger) == 2


# A million parameters of 4 bytes take s = 1 s at 32 Mbit/s; a message 0.1 s more.
BY_HAND: list[tuple[Strategy, int, float, list[float]]] = [
    # Every step 2 (n - 1) (0.1 + s / n).
    (SimpleReduceStrategy(), 2, 2.0, [3.2, 6.4, 9.6]),
    (SimpleReduceStrategy(), 3, 2.0, [2 + 4 * (0.1 + 1 / 3), 4 + 8 * (0.1 + 1 / 3), 6 + 12 * (0.1 + 1 / 3)]),
    (DiLoCoStrategy(H=2), 2, 2.0, [2, 5.2, 7.2]),
    # Half of the entries: 0.7 s, within the next step; or behind each other on the line, from 0.5 s on.
    (SPARTAStrategy(p_sparta=0.5), 2, 2.0, [2.7, 5.4, 8.1]),
    (SPARTAStrategy(p_sparta=0.5, async_delay=1), 2, 2.0, [2, 4, 6]),
    (SPARTAStrategy(p_sparta=0.5, async_delay=1), 2, 0.5, [0.5, 1.2, 1.9]),
    # 400 tiles of 50 x 50, 32 of each with 8 + 4 bytes; two rounds of 0.1 + 0.0384 s.
    (DeMoStrategy(), 3, 2.0, [2.2768, 4.5536, 6.8304]),
    (DiLoCoStrategy(H=1), 1, 2.0, [2, 4, 6]),
]


@pytest.mark.parametrize(("strategy", "num_nodes", "compute", "expected"), BY_HAND)
def test_three_steps_by_hand(strategy: Strategy, num_nodes: int, compute: float, expected: list[float]) -> None:
    line = price(
        strategy, parameters=1e6, num_nodes=num_nodes, max_steps=3, network="32 Mbit/s, 100 ms", compute=compute
    )
    np.testing.assert_allclose(line.seconds[1:], expected)
    assert line.utilization == pytest.approx(3 * compute / expected[-1])


class SentAhead(Algorithm):
    """Sends all weights after every second step, and takes the mean two steps later."""

    def communicate(self, cluster: Cluster) -> None:
        if cluster.step % 2 == 0:
            cluster.collectives.start("all_reduce", cluster.weights, "mean", delay=2)


@pytest.mark.parametrize(
    ("strategy", "messages"),
    [
        # A ring of four: six messages of a quarter, so 6 a + 1.5 s for each s of payload; P is one second.
        (ScaffoldStrategy(H=2), [0, 2, 0, 2]),
        (DESLOCStrategy(H=1, H_m=2, H_v=4), [1, 2, 1, 3]),
        (DESLOCStrategy(H=3, H_m=2, H_v=2), [0, 2, 1, 2]),  # moments alone, too
        (FedNovaStrategy(H=4, average="mean"), [0, 0, 0, 1.01]),
    ],
)
def test_what_is_sent_together_pays_latency_once(strategy: Strategy, messages: list[float]) -> None:
    options: dict[str, Any] = {"model": nn.Linear(10, 10, bias=False), "num_nodes": 4, "max_steps": 4, "compute": 1.0}
    line = price(strategy, network=Network(3200, 0.1), **options)
    by_hand = [1 + (6 * 0.1 + 1.5 * seconds if seconds else 0) for seconds in messages]
    assert np.diff(line.seconds) == pytest.approx(by_hand)
    assert line.ledger.payload_bytes == pytest.approx(400 * sum(messages))


def test_what_is_due_later_needs_its_bandwidth() -> None:
    """32 Gbit between two nodes within two steps of 1 s, in every round, the last one, too: 16 Gbit/s."""
    options: dict[str, Any] = {"parameters": 1e9, "num_nodes": 2, "compute": 1.0}
    ahead, every = Strategy([SentAhead()]), SimpleReduceStrategy()
    assert required_bandwidth(ahead, utilization=[1], grid=[15e9, 16e9], max_steps=2, **options) == {1: 16e9}
    found = required_bandwidth(every, utilization=[0.5, 0.9], grid=["32 Gbit/s", 64e9], **options)
    assert found == {0.5: 32e9, 0.9: math.inf}  # 32 Gbit take 1 s, as long as a step, and 0.5 s: none suffices


def test_mistakes_are_named() -> None:
    strategy = DiLoCoStrategy(H=10)
    options: dict[str, Any] = {"parameters": 10, "num_nodes": 2, "max_steps": 4, **ON_A_NETWORK}
    three = Network.between(np.ones((3, 3)))
    given: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
        ({"parameters": None}, TypeError, ["parameters=", "model="]),
        ({"model": common.model()}, TypeError, ["parameters=", "model="]),
        ({"parameters": 1e99}, ValueError, ["parameters", "1e+99"]),
        ({"bytes_per_parameter": 3}, ValueError, ["bytes_per_parameter", "'1', '2', '4', '8'", "'3'"]),
        ({"network": three}, ValueError, ["network", "3 nodes", "2"]),
        ({"num_node": 3}, TypeError, ["'num_node'", "did you mean 'num_nodes'"]),
        *(({"num_nodes": n}, ValueError, ["num_nodes", "from 1 to 1000000", str(n)]) for n in (10**9, 10**6 + 1)),
    ]
    for change, kind, words in given:
        with refused(kind, *words):
            price(strategy, **{**options, **change})
    asked: list[tuple[Strategy, dict[str, Any], list[str]]] = [
        (strategy, {"max_steps": 9}, ["DiLoCoStrategy", "nothing in 9 steps", "max_steps"]),
        (SimpleReduceStrategy(), {"num_nodes": 1, "max_steps": 9}, ["SimpleReduceStrategy", "nothing", "one node"]),
        (strategy, {"num_nodes": 10**9}, ["num_nodes", "1000000000"]),
    ]
    for own, change, words in asked:
        with refused((ValueError, TypeError), *words):
            required_bandwidth(own, **{"parameters": 10, "num_nodes": 2, "compute": 1.0, **change})
