"""FedBN: the normalization layers stay with their clients."""

from __future__ import annotations

import pytest
import torch
from driven import driven, normal, size
from torch import nn
from torch.utils.data import TensorDataset

from vsim import Sample, Trainer
from vsim.models import MLP
from vsim.strategy import FedAvgStrategy, FedBNStrategy, FedOptStrategy, OptimSpec, PostLocal

PLAIN = OptimSpec("sgd", lr=0.1)


def test_norms_stay_and_all_else_is_averaged() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.LayerNorm(2))
    gradients = normal(4, 3, size(model))
    ours, plain = (driven(cls(PLAIN, H=2), model, gradients) for cls in (FedBNStrategy, FedAvgStrategy))
    views, averaged = (run.cluster.replicas.views(run.cluster.weights) for run in (ours, plain))
    for name, rows in views.items():
        if name.startswith(("1.", "3.")):
            start = dict(model.named_parameters())[name].detach()
            columns = next(c for c in ours.cluster.replicas.layout if c.name == name)
            moved = 0.1 * gradients.sum(0)[:, columns.start : columns.stop].reshape(rows.shape)
            torch.testing.assert_close(rows, start - moved)
        else:
            assert torch.equal(rows, averaged[name])
    # 3 · 4 + 4 + 4 · 2 + 2 = 26 entries of 4 bytes.
    assert [(e.step, e.payload_bytes) for e in ours.ledger] == [(2, 104), (4, 104)]


def test_a_warm_up_leaves_norms_and_statistics_with_their_clients() -> None:
    # With plain SGD the mean of the gradients moves weights as the mean of the weights does after every step.
    x = normal(5, 12, 3) * torch.arange(1.0, 6)[:, None, None]
    clusters = []
    for H in (1, PostLocal(6, 1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        trainer = Trainer(
            model,
            lambda client, n, train: TensorDataset(x[client], torch.arange(12) % 2),
            loss_fn=nn.functional.cross_entropy,
        )
        strategy = FedBNStrategy(PLAIN, H=H)
        trainer.fit(
            strategy=strategy, num_nodes=2, participation=Sample(2, of=5), max_steps=9, batch_size=6, progress=False
        )
        assert trainer.strategy is not None
        clusters.append(trainer.strategy.cluster)
        labels = {event.label for event in trainer.ledger if event.step <= 6}
        assert labels == {"pull", "weights" if H == 1 else "gradients"}
    plain, warm = clusters
    torch.testing.assert_close(warm.weights, plain.weights)
    assert (plain.weights[0] - plain.weights[1]).abs().max() > 1e-3
    for name, rows in plain.replicas.buffers.items():
        torch.testing.assert_close(warm.replicas.buffers[name], rows)


def test_a_model_without_norms_is_refused() -> None:
    model = MLP(hidden=(4,), seed=0)
    with pytest.raises(ValueError, match="no normalization layer"):
        driven(FedBNStrategy(PLAIN), model, normal(1, 2, size(model)))


def test_fedavgm_is_a_servers_momentum() -> None:
    model, gradients = nn.Linear(3, 2), normal(4, 3, 8)
    named, spelled = (
        driven(FedOptStrategy(PLAIN, H=2, outer_optim=server), model, gradients)
        for server in ("momentum", OptimSpec("sgd", lr=1.0, momentum=0.9))
    )
    assert torch.equal(named.cluster.weights, spelled.cluster.weights)
