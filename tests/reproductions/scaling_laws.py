"""The scaling laws for DiLoCo, fitted to the paper's losses by `vsim.scaling.fit`; without training."""

from __future__ import annotations

import math

import vsim

from .result import Row, Table

# A and the exponent of N of L = A · N^a, by replicas; None: data-parallel training.
LAWS: dict[int | None, tuple[float, float]] = {
    None: (18.129, -0.0953),
    1: (18.363, -0.0961),
    2: (18.768, -0.0969),
    4: (19.762, -0.0992),
    8: (21.051, -0.1018),
}
JOINT = {"A": 19.226, "a": -0.0985, "b": 0.0116}  # L = A · N^a · M^b
# |log predicted − log measured| at 2.4 billion, when fitted up to 1.3: of the law of one M, and of the joint law.
RESIDUALS = {1: (0.011, 0.019), 2: (0.0099, 0.013), 4: (0.012, 0.0082), 8: (0.014, 0.0076)}
HELD_OUT = ((4e9, 2.224, 2.219, 2.220, 2.230), (10e9, 2.090, 2.086, 2.086, 2.096))


def named(M: int | None) -> str:
    return "data-parallel" if M is None else f"DiLoCo, M = {M}"


TABLE = Table(
    title="Scaling laws for DiLoCo",
    setting="Power laws of the loss in the number of parameters N and replicas M, fitted to the paper's 35 losses from "
    "35 million to 2.4 billion parameters, which have four digits: A within 2 %, exponents within 0.001. "
    "*Residuals* are |log law − log measured| at 2.4 billion of laws fitted up to 1.3 billion, within 0.0035: sizes "
    "are printed with two digits, so that 2.4 and 1.3 billion may be 2 and 4 % off, which moves them by that much. "
    "*Held out*: the loss at 4 and 10 billion by these laws, which the paper says are within a few percentage points: "
    "here 5 %.",
    source="Charles et al. 2025, tables 4, 5, 7, 10 and 11",
    url="https://arxiv.org/abs/2503.09799",
    rows={
        name: row
        for M, (A, a) in LAWS.items()
        for name, row in (
            (f"{named(M)}: A", Row(A, within=0.02 * A)),
            (f"{named(M)}: exponent of N", Row(a, within=0.001)),
        )
    }
    | {
        "joint: A": Row(JOINT["A"], within=0.02 * JOINT["A"]),
        "joint: exponent of N": Row(JOINT["a"], within=0.001),
        "joint: exponent of M": Row(JOINT["b"], within=0.001),
    }
    | {
        f"residual at 2.4B, M = {M}, {kind}": Row(value, within=0.0035)
        for M, values in RESIDUALS.items()
        for kind, value in zip(("alone", "joint"), values, strict=True)
    }
    | {
        f"held out, {N / 1e9:g}B, {named(M)}": Row(loss, within=0.05 * loss)
        for N, *losses in HELD_OUT
        for M, loss in zip(LAWS, losses, strict=False)
    },
    digits=".4g",
    note="The measured residuals are all 0.002 lower than published, as they would be if the model called 2.4B had "
    "2.46 billion parameters.",
)


def fits(largest: float) -> tuple[dict[int | None, vsim.scaling.Law], vsim.scaling.Law]:
    """Return the laws by M, and the joint law, of the losses up to a size."""
    losses = vsim.scaling.published()
    losses = losses[(losses.paper == "2503.09799") & (losses["N"] <= largest)]
    diloco = losses[losses.algorithm == "DiLoCo"]
    own = {M: diloco[diloco.M == M] if M else losses[losses.algorithm == "data parallel"] for M in LAWS}
    alone = {M: vsim.scaling.fit(rows[["N", "loss"]], "power", bootstrap=0) for M, rows in own.items()}
    return alone, vsim.scaling.fit(diloco[["N", "M", "loss"]], "power", bootstrap=0)


def measure(quick: bool) -> dict[str, float]:
    alone, joint = fits(2.4e9)
    found = {}
    for M, law in alone.items():
        found |= {f"{named(M)}: A": law.parameters["A"], f"{named(M)}: exponent of N": law.parameters["a"]}
    for text, name in (("A", "A"), ("exponent of N", "a"), ("exponent of M", "b")):
        found[f"joint: {text}"] = joint.parameters[name]
    losses = vsim.scaling.published()
    losses = losses[(losses.paper == "2503.09799") & (losses.N == 2.4e9)].set_index("M").loss
    below, jointly = fits(1.3e9)
    for M in RESIDUALS:
        predicted = below[M].predict(N=2.4e9).loss, jointly.predict(N=2.4e9, M=M).loss
        for kind, value in zip(("alone", "joint"), predicted, strict=True):
            found[f"residual at 2.4B, M = {M}, {kind}"] = abs(math.log(value / losses[M]))
    for N, *_ in HELD_OUT:
        for M in (None, 1, 2, 4):
            law = alone[M] if M is None else joint
            found[f"held out, {N / 1e9:g}B, {named(M)}"] = law.predict(N=N, **({"M": M} if M else {})).loss
    return found
