"""DeMo's megabytes a step, by the number of coefficients of a tile; without training."""

from __future__ import annotations

from torch import nn

import vsim
from vsim.strategy import DeMoStrategy, SimpleReduceStrategy

from .result import Row, Table

SIZES = {"OLMo-300M": 319_946_752, "OLMo-1B": 1_176_764_416}  # parameters
# MB a step: of data-parallel training, and of DeMo by k, as printed.
PUBLISHED = {
    "OLMo-300M": ("636.9", {32: "29.9", 16: "14.9", 8: "7.49", 4: "3.74", 2: "1.87", 1: "0.93"}),
    "OLMo-1B": ("2416.6", {32: "110.32", 16: "55.16", 8: "27.58", 4: "13.79", 2: "6.89", 1: "3.44"}),
}
UNKNOWN = "vsim counts bfloat16. The paper has {bytes:.2f} bytes a parameter, and does not explain it."


def row(printed: str, note: str = "") -> Row:
    return Row(float(printed), within=10.0 ** -len(printed.partition(".")[2]), unit="MB", note=note)


TABLE = Table(
    title="Bytes of DeMo",
    setting="MB that a node sends in a step: data-parallel training, and DeMo with the k largest of the 4,096 "
    "coefficients of a tile, each with a value of four bytes and an index of eight. The tolerance is one unit of the "
    "last digit that is printed.",
    source="Peng et al. 2024, table 1",
    url="https://arxiv.org/abs/2411.19870",
    rows={
        f"{model}, {name}": one
        for model, (parallel, by_k) in PUBLISHED.items()
        for name, one in (
            ("data-parallel", row(parallel, UNKNOWN.format(bytes=1e6 * float(parallel) / SIZES[model]))),
            *((f"k = {k}", row(printed)) for k, printed in by_k.items()),
        )
    },
    note="The paper cuts numbers off after its last digit instead of rounding them: 29.995 is printed as 29.9. Five of "
    "DeMo's numbers were read in the paper's second version (openreview.net/forum?id=U9oewpa7cn), and the others in a "
    "copy of its table.",
    digits=".6g",
)


def megabytes(strategy: vsim.strategy.Algorithm, parameters: int, bytes_per_parameter: int) -> float:
    line = vsim.price(
        strategy,
        model=nn.Linear(64, parameters // 64, bias=False, device="meta"),  # whole tiles of 64 × 64, as OLMo's matrices
        num_nodes=2,
        max_steps=1,
        network="1 Gbit/s",
        compute=1.0,
        bytes_per_parameter=bytes_per_parameter,
    )
    return sum(event.payload_bytes for event in line.ledger) / 1e6


def measure(quick: bool) -> dict[str, float]:
    found = {}
    for model, (_, by_k) in PUBLISHED.items():
        found[f"{model}, data-parallel"] = megabytes(SimpleReduceStrategy(), SIZES[model], 2)
        for k in by_k:
            found[f"{model}, k = {k}"] = megabytes(DeMoStrategy(compression_topk=k), SIZES[model], 4)
    return found
