"""What must hold whatever the implementation: strategies that are the same algorithm train the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import small_mlp, vectors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vsim import Ledger, Trainer
from vsim.cluster.optim import OptimSpec
from vsim.cluster.stacked import StackedCollectives
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy, mean

# With an eps above rounding, a gradient that is only rounding does not step by a whole lr.
SGD = OptimSpec("sgd", lr=0.1)
MOMENTUM = OptimSpec("sgd", lr=0.1, momentum=0.9)
ADAMW = OptimSpec("adamw", lr=1e-2, eps=1e-3)


def trained(
    strategy: Strategy, num_nodes: int = 3, model: nn.Module | None = None, data: Any = None, **options: Any
) -> Tensor:
    """Return the weights (K, P) after 7 steps: more than an epoch for K ≥ 1 of 29 examples."""
    trainer = Trainer(model or small_mlp(), data or vectors())
    options = {"max_steps": 7, "batch_size": 5, "progress": False, **options}
    trainer.fit(strategy=strategy, num_nodes=num_nodes, **options)
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights


SAME: dict[str, tuple[Strategy, Strategy, float]] = {
    "one island of all nodes": (
        FedAvgStrategy(H=2, island_size=3, inner_optim=ADAMW),
        FedAvgStrategy(H=2, inner_optim=ADAMW),
        0,
    ),
    "islands of one": (FedAvgStrategy(H=2, island_size=1, inner_optim=ADAMW), Strategy(inner_optim=ADAMW), 0),
    "no round": (FedAvgStrategy(H=8, inner_optim=ADAMW), Strategy(inner_optim=ADAMW), 0),
    # φ − (φ − x) rounds.
    "an outer step to the mean": (
        DiLoCoStrategy(H=3, outer_optim=OptimSpec("sgd", lr=1.0), inner_optim=ADAMW),
        FedAvgStrategy(H=3, inner_optim=ADAMW),
        1e-6,
    ),
    # mean_k (θ − lr·g_k) = θ − lr·mean_k g_k while all θ_k are equal; and the mean of the nodes' momenta is the
    # momentum of the mean gradient, because each is linear in the gradients.
    "averages at every step": (
        FedAvgStrategy(H=1, inner_optim=MOMENTUM),
        SimpleReduceStrategy(inner_optim=MOMENTUM),
        1e-6,
    ),
    "equal shards by their size": (
        FedAvgStrategy(H=2, average=mean("examples"), inner_optim=SGD),
        FedAvgStrategy(H=2, inner_optim=SGD),
        1e-6,
    ),
}


@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("name", SAME)
def test_the_same_algorithm(name: str, executor: str) -> None:
    one, other, atol = SAME[name]
    ours, theirs = (trained(strategy, executor=executor) for strategy in (one, other))
    torch.testing.assert_close(ours, theirs, rtol=10 * atol, atol=atol)


@pytest.mark.parametrize("num_nodes", [2, 5])
def test_allreduce_is_training_on_the_union_of_the_batches(num_nodes: int) -> None:
    # Without shuffling, step t gives the nodes the examples t·K·B … (t + 1)·K·B − 1 between them: one node with
    # batches of K·B sees the same, and the mean of equally large batches' mean gradients is the union's.
    options: dict[str, Any] = {"shuffle": False, "max_steps": 30 // (2 * num_nodes), "data": vectors(30)}
    many = trained(SimpleReduceStrategy(inner_optim=MOMENTUM), num_nodes, batch_size=2, **options)
    one = trained(Strategy(inner_optim=MOMENTUM), 1, batch_size=2 * num_nodes, **options)
    torch.testing.assert_close(many, one.expand_as(many), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["sgd", "adam", "adagrad"])
def test_fused_kernels_keep_identical_replicas_identical(kernel: str) -> None:
    for strategy in (Strategy(inner_optim=kernel, lr=0.01), SimpleReduceStrategy(inner_optim=kernel, lr=0.01)):
        weights = trained(strategy, data=lambda rank, num_nodes, train: vectors(), executor="vmap")
        assert torch.equal(weights, weights[:1].expand_as(weights))


class Slope(nn.Module):
    """loss = θ · mean(x), so that the gradient is mean(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.theta * batch[0].mean()


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_clipping_and_weights_by_examples_by_hand(executor: str) -> None:
    # Gradients 1 and 3 of shards of 2 and 6 examples. With max_norm 0.5 AllReduce clips their mean 2 to 0.5 and goes
    # 0.05, and nodes alone clip their own to 0.5. With max_norm 2.5 only the second node's is clipped, and AllReduce's
    # mean is not. By examples, 1/4 and 3/4, the mean is 2.5.
    def data(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return TensorDataset(torch.full(((2, 6)[rank],), (1.0, 3.0)[rank]))

    for strategy, expected in (
        (SimpleReduceStrategy(inner_optim=SGD, max_norm=0.5), [0.95, 0.95]),
        (Strategy(inner_optim=SGD, max_norm=0.5), [0.95, 0.95]),
        (Strategy(inner_optim=SGD, max_norm=2.5), [0.9, 0.75]),
        (SimpleReduceStrategy(inner_optim=SGD, max_norm=2.5), [0.8, 0.8]),
        (FedAvgStrategy(H=1, average=mean("examples"), inner_optim=SGD), [0.75, 0.75]),
    ):
        weights = trained(strategy, 2, Slope(), data, max_steps=1, batch_size=2, executor=executor)
        assert weights.flatten().tolist() == pytest.approx(expected, abs=1e-6)


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    """A partition of range(K), in any order."""
    nodes = draw(st.permutations(range(draw(st.integers(1, 8)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(nodes) - 1)))) if len(nodes) > 1 else []
    return [list(nodes[a:b]) for a, b in zip([0, *cuts], [*cuts, len(nodes)], strict=True)]


@settings(max_examples=60)
@given(groups=partitions(), weighted=st.booleans(), seed=st.integers(0, 2**31))
def test_averaging_in_groups_conserves_the_sum_of_the_rows(groups: list[list[int]], weighted: bool, seed: int) -> None:
    # Conserved is the weighted sum: Σ_k w_k · (Σ_j w_j x_j / Σ_j w_j) = Σ_j w_j x_j in every group.
    num_nodes, stream = sum(map(len, groups)), torch.Generator().manual_seed(seed)
    rows = torch.randn(num_nodes, 3, generator=stream, dtype=torch.float64)
    weights = torch.randint(1, 9 if weighted else 2, (num_nodes,), generator=stream)
    before, given_ = rows.clone(), {"weights": weights} if weighted else {}
    averaged = StackedCollectives(Ledger(num_nodes)).all_reduce(rows, "mean", among=groups, **given_)
    assert torch.equal(rows, before)
    torch.testing.assert_close(weights.double() @ averaged, weights.double() @ rows)
    for group in groups:
        expected = sum(weights[j] * rows[j] for j in group) / weights[group].sum()
        torch.testing.assert_close(averaged[group], expected.expand(len(group), -1))
    shared = StackedCollectives(Ledger(num_nodes)).all_reduce(rows, "mean", **given_)
    torch.testing.assert_close(shared, weights.double() @ rows / weights.sum())
