"""NIID-Bench's row for FCUBE: a linear classifier, four parties that each see two opposite octants of a cube."""

from __future__ import annotations

import vsim
from vsim.data import fcube
from vsim.models import MLP
from vsim.strategy import FedAvgStrategy, FedNovaStrategy, FedProxStrategy, OptimSpec, ScaffoldStrategy

from .result import Row, Table

PARTIES, BATCH, EPOCHS, H = 4, 64, 10, 160  # H steps are ten epochs of 1,000 examples
MU = 0.01
TABLE = Table(
    title="FCUBE, dealt by octants",
    setting="Accuracy on 1,000 test points of the global model after 50 rounds of 10 local epochs; a linear layer "
    "from 3 numbers to 2 classes, SGD with rate .01, momentum .9 and weight decay 1e-5, batches of 64, four parties "
    "with 1,000 points each.",
    source="Li et al. 2021, table 3, feature distribution skew",
    url="https://arxiv.org/abs/2102.02079",
    rows={
        name: Row((99.7, 99.8), within=0.3, unit="%")
        for name in ("FedAvg", f"FedProx, μ = {MU}", "SCAFFOLD", "FedNova")
    },
    note="Published values are means of three runs. Each seed has its own points and initial weights. SCAFFOLD takes "
    "plain SGD only; its rate is .1, with which it moves weights as far as momentum .9 does at .01. FedNova equals "
    "FedAvg here, because all parties take equally many steps.",
    digits=".2f",
    quick_agrees=False,  # fewer rounds
)


def measure(quick: bool) -> dict[str, list[float]]:
    momentum = OptimSpec("sgd", lr=0.01, momentum=0.9, weight_decay=1e-5)
    strategies = dict(
        zip(
            TABLE.rows,
            (
                FedAvgStrategy(inner_optim=momentum, H=H),
                FedProxStrategy(inner_optim=momentum, H=H, mu=MU),
                ScaffoldStrategy(inner_optim=OptimSpec("sgd", lr=0.1, weight_decay=1e-5), H=H),
                FedNovaStrategy(inner_optim=momentum, H=H),
            ),
            strict=True,
        )
    )
    found: dict[str, list[float]] = {name: [] for name in TABLE.rows}
    for seed in range(1 if quick else 3):
        train, test = fcube(seed=seed)
        compared = vsim.compare(
            MLP(3, (), 2, seed=seed),
            train,
            strategies=strategies,
            num_nodes=PARTIES,
            max_steps=H * (2 if quick else 50),
            batch_size=BATCH,
            participation=vsim.Sample(PARTIES, of=PARTIES, epochs=EPOCHS),  # with a fresh optimizer in each round
            seed=seed,
            test_dataset=test,
            progress=False,
        )
        for name, run in compared.items():
            found[name].append(100 * run.history.last("test_accuracy"))
    return found
