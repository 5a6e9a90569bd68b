"""The bandwidths that utilizations need with eager updates for DiLoCo; without training."""

from __future__ import annotations

import vsim
from vsim.network import Compute
from vsim.strategy import FP4, StreamingDiLoCoStrategy, compress

from .result import Row, Table
from .streaming_bandwidths import MODELS, SHARES

# Model, where messages overlap with computing, H → Gbit/s for each of SHARES.
PUBLISHED: dict[tuple[str, str, int], tuple[float, ...]] = {
    ("1B", "inner step", 30): (2.4, 3.6, 4.3, 4.3, 4.3),
    ("1B", "inner step", 100): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("1B", "outer step", 30): (1.1, 2.0, 2.0, 2.0, 2.4),
    ("1B", "outer step", 100): (0.1, 0.2, 0.2, 0.2, 0.2),
    ("10B", "inner step", 30): (1.4, 2.4, 2.4, 3.0, 3.0),
    ("10B", "inner step", 100): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("10B", "outer step", 30): (0.7, 1.1, 1.4, 1.4, 1.4),
    ("10B", "outer step", 100): (0.1, 0.2, 0.2, 0.3, 0.3),
    ("100B", "inner step", 30): (0.9, 1.7, 2.0, 2.0, 2.0),
    ("100B", "inner step", 100): (0.5, 0.9, 1.1, 1.1, 1.4),
    ("100B", "outer step", 30): (0.5, 0.8, 0.9, 0.9, 0.9),
    ("100B", "outer step", 100): (0.2, 0.3, 0.3, 0.3, 0.4),
}
GRID = [10 ** (8 + i * 4 / 49) for i in range(-20, 50)]  # the paper's, and further down


def named(model: str, overlap: str, H: int) -> str:
    return f"{model}, one {overlap} overlapped, H = {H}"


TABLE = Table(
    title="Bandwidths of eager updates",
    setting="The smallest bandwidth with which two nodes compute for a share of the time, with Streaming DiLoCo whose "
    "outer gradients have four bits, and overlap with one step or with the whole round. Models are those of Streaming "
    "DiLoCo's table. By that paper a fragment is sent every 11, 5 and 2 steps at H = 100: with three layers a "
    "fragment, and one more for the embedding, every ⌊H / fragments⌋ steps, at least 1, as here. One step of the grid "
    "and half a unit of the last printed digit count as agreement.",
    source="Kale et al. 2025, table 5",
    url="https://arxiv.org/abs/2502.12996",
    rows={
        f"{named(*case)}, {share}": Row(gbits, within=0.24 * gbits + 0.05, unit="Gbit/s")
        for case, row in PUBLISHED.items()
        for share, gbits in zip(SHARES, row, strict=True)
    },
    note="Of the 30 cells that overlap one inner step, 26 agree; at 1B, three for H = 30 are two to four steps lower "
    "in vsim, and one for H = 100 is two steps higher. Of those that overlap an outer step one agrees, and they cannot "
    "follow from the bytes. If messages may take a whole round, nodes wait only for their bytes: 4 bits of 100 billion "
    "parameters in 30 steps of 4.9 s are 2.7 Gbit/s, where the paper has 0.9 for 99 %; of 1 billion in 100 steps of .1 "
    "s, 0.40, where it has 0.2. From H = 100 to 30 its numbers grow by 12, 4.7 and 2.3 for 1B, 10B and 100B, the bytes "
    "by 3.3. A transcript of the table was read.",
)


def found(model: str, overlap: str, H: int) -> list[float]:
    """Gbit/s for each of SHARES."""
    parameters, layers, seconds = MODELS[model]
    fragments = layers // 3 + 1
    period = max(1, H // fragments) * fragments
    bits = vsim.required_bandwidth(
        StreamingDiLoCoStrategy(
            H=period, fragments=fragments, average=compress(FP4()), delay=1 if overlap == "inner step" else period - 1
        ),
        parameters=parameters,
        num_nodes=2,
        compute=Compute(seconds, layers=layers),
        bytes_per_parameter=2,
        grid=GRID,
        max_steps=3 * period,
    )
    return [rate / 1e9 for rate in bits.values()]


def measure(quick: bool) -> dict[str, float]:
    return {
        f"{named(*case)}, {share}": gbits
        for case in PUBLISHED
        for share, gbits in zip(SHARES, found(*case), strict=True)
    }
