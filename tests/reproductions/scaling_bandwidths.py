"""The bandwidths that utilizations need in the scaling laws for DiLoCo; without training."""

from __future__ import annotations

from typing import NamedTuple

import vsim
from vsim.network import Compute
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy

from .result import Row, Table

SHARES = ("50 %", "80 %", "90 %", "95 %", "99 %")


class Model(NamedTuple):
    parameters: float
    layers: int
    seconds: float  # of a step
    gbits: dict[int | None, tuple[float, ...]]  # H → Gbit/s for each of SHARES; None: data-parallel training


MODELS = {
    "Chinchilla 10B": Model(
        10e9,
        48,
        0.8,
        {
            None: (104.8, 184.2, 222.3, 222.3, 390.7),
            10: (16.0, 49.4, 86.8, 152.6, 222.3),
            50: (3.0, 11.0, 23.3, 41.0, 126.5),
            100: (1.4, 6.2, 13.3, 23.3, 86.8),
            300: (0.5, 2.0, 4.3, 9.1, 41.0),
        },
    ),
    "Llama3 405B": Model(
        405e9,
        126,
        26.0,
        {
            None: (126.5, 222.3, 268.3, 323.8, 323.8),
            10: (19.3, 72.0, 126.5, 184.2, 268.3),
            50: (3.6, 13.3, 28.1, 59.6, 184.2),
            100: (2.0, 7.5, 16.0, 33.9, 126.5),
            300: (0.7, 3.0, 6.2, 13.3, 59.6),
        },
    ),
    "DeepSeek-V3 671B": Model(
        671e9,
        61,
        20.0,
        {
            None: (323.8, 569.0, 686.6, 686.6),  # and more than the grid's end
            10: (49.4, 152.6, 268.3, 390.7, 686.6),
            50: (7.5, 33.9, 72.0, 126.5, 390.7),
            100: (4.3, 16.0, 41.0, 72.0, 268.3),
            300: (1.7, 6.2, 13.3, 28.1, 126.5),
        },
    ),
}


def named(model: str, H: int | None) -> str:
    return f"{model}, {'data-parallel' if H is None else f'H = {H}'}"


TABLE = Table(
    title="Bandwidths of the scaling laws for DiLoCo",
    setting="The smallest bandwidth with which two nodes compute for a share of the time: two bytes a parameter, .8, "
    "26 and 20 s a step, and, which the paper does not say, 48, 126 and 61 layers. The grid and the tolerance of one "
    "step are those of Streaming DiLoCo's table; half a unit of the last printed digit is added.",
    source="Charles et al. 2025, table 6",
    url="https://arxiv.org/abs/2503.09799",
    rows={
        f"{named(model, H)}, {share}": Row(gbits, within=0.24 * gbits + 0.05, unit="Gbit/s")
        for model, own in MODELS.items()
        for H, row in own.gbits.items()
        for share, gbits in zip(SHARES, row, strict=False)
    },
    note="Does the paper round down to the last bandwidth of the grid that does not suffice, as Streaming DiLoCo's "
    "table seems to? Then vsim's numbers are one step higher. They are in 38 of the 74 cells: in 18 of 24 for "
    "DeepSeek-V3, 13 of 25 for Llama3, and 7 of 25 for 10B. Of the other cells, 34 are two steps higher, one is three, "
    "and one is equal. So something else differs. It is not the number of layers (24 to 400 were tried for 10B), and "
    "no single factor of size or time explains all cells: with 0.87 times the bytes a second, 20 of the 25 cells of "
    "10B are one step higher. The two papers, which use one simulator, also disagree with each other: both have 10 "
    "billion parameters, .8 s and H = 100, with 1.4, 6.2, 13.3, 23.3 and 86.8 Gbit/s in this one, and 1.7, 7.5, 16.0, "
    "33.9 and 104.8 in Streaming DiLoCo's.",
)


def found(model: str, H: int | None) -> list[float]:
    """Gbit/s for each of SHARES."""
    parameters, layers, seconds, _ = MODELS[model]
    bits = vsim.required_bandwidth(
        SimpleReduceStrategy() if H is None else DiLoCoStrategy(H=H),
        parameters=parameters,
        num_nodes=2,
        compute=Compute(seconds, layers=layers),
        bytes_per_parameter=2,
        max_steps=10 if H is None else 2 * H,
    )
    return [rate / 1e9 for rate in bits.values()]


def measure(quick: bool) -> dict[str, float]:
    return {
        f"{named(model, H)}, {share}": gbits
        for model, own in MODELS.items()
        for H, row in own.gbits.items()
        for share, gbits in zip(SHARES[: len(row)], found(model, H), strict=False)
    }
