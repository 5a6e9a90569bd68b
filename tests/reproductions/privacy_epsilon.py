"""The ε of DP-SGD on MNIST, as TensorFlow Privacy's tutorials have it and as vsim computes it; without training."""

from __future__ import annotations

import math
from typing import NamedTuple

from vsim.strategy import DPFedAvgStrategy

from .result import Row, Table


class Run(NamedTuple):
    noise: float
    epochs: int
    epsilon: float


EXAMPLES, BATCH, DELTA = 60_000, 256, 1e-5
RUNS = [Run(1.1, 1, 1.03), Run(1.1, 2, 1.11), Run(1.1, 60, 3.01), Run(1.3, 15, 1.19), Run(0.7, 45, 7.10)]
ORDERS = [*(1 + x / 10 for x in range(1, 100)), *range(12, 64)]  # of Rényi divergence, as in the tutorials
TABLE = Table(
    title="ε of DP-SGD",
    setting="ε at δ = 1e-5 of a Gaussian mechanism that takes part with probability 256 / 60,000 in each step, by the "
    "noise multiplier z and the number of epochs. *Older conversion*: ε = min over orders α of R(α) + log(1/δ)/(α − 1) "
    "with R the Rényi divergence of all steps by dp-accounting, which vsim uses, too. *vsim*: the column `epsilon` of "
    "`DPFedAvgStrategy`, whose clients take the place of examples.",
    source="TensorFlow Privacy, tutorials/README.md, MNIST",
    url="https://github.com/tensorflow/privacy/tree/master/tutorials",
    rows={f"z = {z}, {epochs} epochs, older conversion": Row(eps, within=0.005) for z, epochs, eps in RUNS}
    | {f"z = {z}, {epochs} epochs, vsim, not above": Row((0, eps)) for z, epochs, eps in RUNS},
    digits=".4g",
    note="vsim's ε are 11 to 28 % lower than the published ones, for the same runs: today's conversion from Rényi "
    "divergence, R(α) + log((α − 1)/α) − (log δ + log α)/(α − 1), is a tighter bound [Canonne et al. 2020, "
    "arXiv:2004.00010].",
)


def steps(run: Run) -> int:
    return run.epochs * EXAMPLES // BATCH


def older(run: Run) -> float:
    import dp_accounting as dp

    accountant = dp.rdp.RdpAccountant(ORDERS)
    event = dp.PoissonSampledDpEvent(BATCH / EXAMPLES, dp.GaussianDpEvent(run.noise))
    spent = accountant.compose(event, steps(run)).rdp
    return min(float(r) + math.log(1 / DELTA) / (order - 1) for r, order in zip(spent, ORDERS, strict=True))


def of_vsim(run: Run) -> float:
    (module,) = DPFedAvgStrategy(noise_multiplier=run.noise, delta=DELTA).parts
    module.rounds = {(BATCH / EXAMPLES, run.noise): steps(run)}  # what a run of that many rounds has kept
    return module.measured(None)["epsilon"]


def measure(quick: bool) -> dict[str, float]:
    return {f"z = {run.noise}, {run.epochs} epochs, older conversion": older(run) for run in RUNS} | {
        f"z = {run.noise}, {run.epochs} epochs, vsim, not above": of_vsim(run) for run in RUNS
    }
