"""Synthetic(1, 1) of FedProx: stragglers whose work is dropped or kept, and a proximal term."""

from __future__ import annotations

import math

import vsim
from vsim.data import Partition, synthetic_federated
from vsim.models import MLP
from vsim.strategy import FedAvgStrategy, FedProxStrategy, OptimSpec, mean

from .result import Row, Table

CLIENTS, COHORT, EPOCHS, BATCH, ROUNDS = 30, 10, 20, 10, 4
SGD = OptimSpec("sgd", lr=0.01)
TABLE = Table(
    title="Synthetic(1, 1) with stragglers",
    setting="Ratios of the global model's loss on all clients' training data; softmax regression on 60 numbers, SGD "
    "with rate .01, batches of 10, rounds of 20 local epochs of 10 of 30 clients. Of these, 0, 50 or 90 % are "
    "stragglers with random numbers of steps, which FedAvg drops and FedProx keeps. Here 4 rounds, one seed; published "
    "are curves over 200.",
    source="Li et al. 2018, figure 1, Synthetic",
    url="https://arxiv.org/abs/1812.06127",
    rows={
        "FedAvg with 50 % dropped, to none dropped": Row((1, 10)),
        "FedAvg with 90 % dropped, to none dropped": Row((1, 10)),
        "FedProx with μ = 1, to FedAvg, none dropped": Row((0, 1)),
        "FedProx with μ = 0, 50 % partial, to FedAvg with 50 % dropped": Row((0, 1)),
        "FedProx with μ = 0, 90 % partial, to FedAvg with 90 % dropped": Row((0, 1)),
        "FedProx with μ = 1, 50 % partial, to FedAvg with 50 % dropped": Row((0, 1)),
        "FedProx with μ = 1, 90 % partial, to FedAvg with 90 % dropped": Row((0, 1)),
    },
    note="The comparison is qualitative: the paper has curves of one run each and no table, so the published value is "
    "only the side of 1 on which a ratio lies. Stragglers take a number of steps drawn uniformly from 1 to that of 20 "
    "epochs, in the paper a number of epochs from 1 to 20. The same clients are stragglers in all runs of a share.",
    whole="200 rounds instead of 4, about four hours on two cores: `ROUNDS` in the script.",
    digits=".3g",
    quick_agrees=False,
    is_part=True,
)


def loss(train: Partition, share: float, drop: bool, mu: float, rounds: int, epochs: int) -> float:
    """Return the global loss after the last round, with this share of stragglers."""
    H = math.ceil(int(train.sizes.max()) / BATCH) * epochs
    average = mean("examples")
    proximal = (
        FedProxStrategy(inner_optim=SGD, H=H, mu=mu, average=average)
        if mu
        else FedAvgStrategy(inner_optim=SGD, H=H, average=average)
    )
    trainer = vsim.Trainer(MLP(60, (), 10, seed=0), train)
    trainer.fit(
        strategy=proximal,
        num_nodes=COHORT,
        participation=vsim.Sample(COHORT, of=CLIENTS, epochs=epochs, stragglers=vsim.Partial(share, drop=drop)),
        max_steps=rounds * H,
        batch_size=BATCH,
        seed=0,
        test_dataset=train.dataset,
        progress=False,
    )
    return float(trainer.history.last("test_loss"))


def measure(quick: bool) -> dict[str, float]:
    train, _ = synthetic_federated(1, 1, num_clients=CLIENTS)
    length = (1, 1) if quick else (ROUNDS, EPOCHS)
    whole, half, tenth = (loss(train, share, True, 0.0, *length) for share in (0.0, 0.5, 0.9))
    ratios = [half / whole, tenth / whole, loss(train, 0.0, False, 1.0, *length) / whole]
    for mu in (0.0, 1.0):
        ratios += [loss(train, share, False, mu, *length) / dropped for share, dropped in ((0.5, half), (0.9, tenth))]
    return dict(zip(TABLE.rows, ratios, strict=True))
