"""How much less DES-LOC communicates than data-parallel training and local Adam; without training."""

from __future__ import annotations

import vsim
from vsim.strategy import Algorithm, DESLOCStrategy, SimpleReduceStrategy

from .result import Row, Table

H = 256
STEPS = 6 * H  # a multiple of all periods
TABLE = Table(
    title="Communication of DES-LOC",
    setting=f"Payload in {STEPS:,} steps: that of data-parallel training and of local Adam, divided by DES-LOC's with "
    f"H = {H} for the weights, 3 H for the first moments and 6 H for the second.",
    source="Iacob et al. 2025, abstract",
    url="https://arxiv.org/abs/2505.22549",
    rows={"data-parallel training": Row(170, within=1, unit="×"), "local Adam": Row(2, within=0.005, unit="×")},
    note="The paper recommends 3 H and 6 H; that its factor of 170 is for H = 256 is inferred from the factor.",
)


def payload(strategy: Algorithm) -> float:
    line = vsim.price(strategy, parameters=1e6, layers=1, num_nodes=2, max_steps=STEPS, network="1 Gbit/s", compute=1.0)
    return sum(event.payload_bytes for event in line.ledger)


def measure(quick: bool) -> dict[str, float]:
    own = payload(DESLOCStrategy(H=H, H_m=3 * H, H_v=6 * H))
    others = SimpleReduceStrategy(), DESLOCStrategy(H=H, H_m=H, H_v=H)
    return {name: payload(other) / own for name, other in zip(TABLE.rows, others, strict=True)}
