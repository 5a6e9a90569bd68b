"""Prices without training: the ledger of a run without values is that of the run, and a published table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import test_strategies_common as common

from vsim import Compute, price, required_bandwidth, timeline
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy, SPARTAStrategy, Strategy

# Streaming DiLoCo [Douillard et al. 2025, arXiv:2501.18512], table 4: Gbit/s for utilizations of 50, 80, 90, 95 and
# 99 %, with two nodes and two bytes a parameter; layers and seconds a step of the models.
MODELS = {1e9: (24, 0.1), 10e9: (48, 0.8), 100e9: (108, 4.9)}
TABLE_4 = [
    (SimpleReduceStrategy(), 10e9, (104.8, 222.3, 222.3, 268.3, 471.5)),
    (DiLoCoStrategy(H=100), 1e9, (1.4, 6.2, 13.3, 23.3, 86.8)),
    (DiLoCoStrategy(H=100), 100e9, (3.0, 11.0, 23.3, 49.4, 184.2)),
]
ON_A_NETWORK: dict[str, Any] = {"network": "200 Mbit/s, 50 ms", "compute": 0.5}


@pytest.mark.parametrize(("strategy", "parameters", "published"), TABLE_4, ids=["data-parallel 10B", "1B", "100B"])
def test_streaming_dilocos_table_4(strategy: Strategy, parameters: float, published: tuple[float, ...]) -> None:
    layers, seconds = MODELS[parameters]
    found = required_bandwidth(
        strategy,
        parameters=parameters,
        num_nodes=2,
        compute=Compute(seconds, layers=layers),
        bytes_per_parameter=2,
        max_steps=200,
    )
    step = math.log(10) * 4 / 49  # of the grid, logspace(-1, 3, 50)
    for share, gbits in zip((0.5, 0.8, 0.9, 0.95, 0.99), published, strict=True):
        steps = math.log(found[share] / 1e9 / gbits) / step
        assert abs(round(steps)) <= 1 and abs(steps - round(steps)) < 0.2, (share, found[share] / 1e9, gbits)


@common.every_row
@pytest.mark.filterwarnings("ignore:DCTTopK")
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
