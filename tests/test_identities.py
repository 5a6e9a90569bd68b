"""What must hold whatever the implementation: strategies that are the same algorithm train the same weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separate import TASKS, Communication, Task, small_cnn, small_mlp, train_separately, vectors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vsim import Ledger, Trainer
from vsim.cluster.optim import OptimSpec
from vsim.cluster.stacked import StackedCollectives
from vsim.strategy import (
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    DiLoCoCommunicator,
    DiLoCoStrategy,
    FedAvgStrategy,
    GradientAverage,
    SimpleReduceStrategy,
    Strategy,
    mean,
)
from vsim.trainer import Data

# With an eps above rounding, a gradient that is only rounding does not step by a whole lr.
SGD = OptimSpec("sgd", lr=0.1)
MOMENTUM = OptimSpec("sgd", lr=0.1, momentum=0.9)
ADAMW = OptimSpec("adamw", lr=1e-2, eps=1e-3)
# An outer step of exactly the mean distance that the nodes have come.
PLAIN_OUTER = OptimSpec("sgd", lr=1.0)

every_K = pytest.mark.parametrize("num_nodes", [1, 2, 3, 5])
both_executors = pytest.mark.parametrize("executor", ["vmap", "loop"])
# Each K with one executor, each executor with two K; the others are slow.
every_K_and_executor = pytest.mark.parametrize(
    ("num_nodes", "executor"),
    [
        pytest.param(k, executor, marks=() if (i + j) % 2 else pytest.mark.slow)
        for i, k in enumerate((1, 2, 3, 5))
        for j, executor in enumerate(("vmap", "loop"))
    ],
)
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def trained(
    strategy: Strategy,
    num_nodes: int,
    executor: str = "loop",
    model: nn.Module | None = None,
    data: Data | None = None,
    **options: Any,
) -> Tensor:
    """Return the weights (K, P) after 7 steps: more than an epoch for K ≥ 1 of 29 examples."""
    trainer = Trainer(model or small_mlp(), data or vectors())
    options = {"max_steps": 7, "batch_size": 5, "progress": False, **options}
    trainer.fit(strategy=strategy, num_nodes=num_nodes, executor=executor, **options)
    assert trainer.strategy is not None and trainer.history.executor == executor
    return trainer.strategy.cluster.weights


# One node

ALONE: dict[str, Callable[..., Strategy]] = {
    "base": Strategy,
    "allreduce": SimpleReduceStrategy,
    "fedavg": partial(FedAvgStrategy, H=2),
    "fedavg-examples": partial(FedAvgStrategy, H=2, average=mean("examples")),
    "fedavg-islands": partial(FedAvgStrategy, H=2, island_size=1),
}


@pytest.mark.parametrize(
    ("name", "spec", "task"),
    [  # all with the MLP, and every second one with the others
        pytest.param(name, spec, task, marks=() if task.name == "mlp" or (i + j) % 2 else pytest.mark.slow)
        for i, name in enumerate(ALONE)
        for j, spec in enumerate((MOMENTUM, ADAMW))
        for task in TASKS
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_one_node_is_the_inner_optimizer_alone(name: str, spec: OptimSpec, task: Task) -> None:
    alone = train_separately(
        task.model(),
        task.data(),
        Communication(),
        lambda parameters: spec.cls(parameters, **spec.kwargs),
        num_nodes=1,
        max_steps=7,
        batch_size=5,
    )
    weights = trained(ALONE[name](inner_optim=spec), 1, "loop", task.model(), task.data(), deterministic=True)
    assert torch.equal(weights, alone.weights)
    # Vectorised, one node still has the model's own arithmetic up to rounding.
    weights = trained(ALONE[name](inner_optim=spec), 1, "vmap", task.model(), task.data())
    torch.testing.assert_close(weights, alone.weights, rtol=1e-4, atol=1e-5)


@both_executors
def test_one_node_of_diloco_with_a_plain_outer_step_trains_alone(executor: str) -> None:
    ours = trained(DiLoCoStrategy(H=2, outer_optim=PLAIN_OUTER, inner_optim=ADAMW), 1, executor)
    torch.testing.assert_close(ours, trained(Strategy(inner_optim=ADAMW), 1, executor), rtol=1e-5, atol=1e-6)


# Equal algorithms


@every_K_and_executor
@pytest.mark.parametrize("H", [1, 3])
def test_diloco_with_a_plain_outer_step_is_fedavg(num_nodes: int, executor: str, H: int) -> None:
    for spec in (MOMENTUM, ADAMW):
        diloco = trained(DiLoCoStrategy(H=H, outer_optim=PLAIN_OUTER, inner_optim=spec), num_nodes, executor)
        fedavg = trained(FedAvgStrategy(H=H, inner_optim=spec), num_nodes, executor)
        torch.testing.assert_close(diloco, fedavg, rtol=1e-5, atol=1e-6)  # φ − (φ − x) rounds


@every_K_and_executor
@pytest.mark.parametrize("spec", [SGD, MOMENTUM], ids=["sgd", "momentum"])
def test_fedavg_at_every_step_is_allreduce(num_nodes: int, executor: str, spec: OptimSpec) -> None:
    # mean_k (θ − lr·g_k) = θ − lr·mean_k g_k while all θ_k are equal; and the mean of the nodes' momenta is the
    # momentum of the mean gradient, because each is linear in the gradients.
    fedavg = trained(FedAvgStrategy(H=1, inner_optim=spec), num_nodes, executor)
    reduced = trained(SimpleReduceStrategy(inner_optim=spec), num_nodes, executor)
    torch.testing.assert_close(fedavg, reduced, rtol=1e-5, atol=1e-6)


@every_K_and_executor
def test_fedavg_that_never_syncs_is_training_alone(num_nodes: int, executor: str) -> None:
    fedavg = trained(FedAvgStrategy(H=8, inner_optim=ADAMW), num_nodes, executor)
    assert torch.equal(fedavg, trained(Strategy(inner_optim=ADAMW), num_nodes, executor))


@every_K_and_executor
def test_one_island_of_all_nodes_is_no_islands(num_nodes: int, executor: str) -> None:
    islands = trained(FedAvgStrategy(H=2, island_size=num_nodes, inner_optim=ADAMW), num_nodes, executor)
    assert torch.equal(islands, trained(FedAvgStrategy(H=2, inner_optim=ADAMW), num_nodes, executor))


@every_K_and_executor
def test_islands_of_one_node_train_alone(num_nodes: int, executor: str) -> None:
    islands = trained(FedAvgStrategy(H=2, island_size=1, inner_optim=ADAMW), num_nodes, executor)
    assert torch.equal(islands, trained(Strategy(inner_optim=ADAMW), num_nodes, executor))


@every_K_and_executor
def test_equal_shards_weighted_by_examples_are_uniform(num_nodes: int, executor: str) -> None:
    by_examples = trained(FedAvgStrategy(H=2, average=mean("examples"), inner_optim=SGD), num_nodes, executor)
    uniform = trained(FedAvgStrategy(H=2, inner_optim=SGD), num_nodes, executor)
    torch.testing.assert_close(by_examples, uniform, rtol=1e-5, atol=1e-6)


@every_K
def test_allreduce_is_training_on_the_union_of_the_batches(num_nodes: int) -> None:
    # Without shuffling, step t gives the nodes the examples t·K·B … (t + 1)·K·B − 1 between them: one node with
    # batches of K·B sees the same, and the mean of equally large batches' mean gradients is the union's.
    data = vectors(30)
    options: dict[str, Any] = {"shuffle": False, "max_steps": 30 // (2 * num_nodes)}
    many = trained(SimpleReduceStrategy(inner_optim=MOMENTUM), num_nodes, data=data, batch_size=2, **options)
    one = trained(Strategy(inner_optim=MOMENTUM), 1, data=data, batch_size=2 * num_nodes, **options)
    torch.testing.assert_close(many, one.expand_as(many), rtol=1e-5, atol=1e-6)


# Replicas that stay equal

EVERY_STRATEGY: dict[str, Callable[[], Strategy]] = {
    "base": lambda: Strategy(inner_optim=ADAMW),
    "allreduce": lambda: SimpleReduceStrategy(inner_optim=ADAMW, max_norm=0.5),
    "fedavg": lambda: FedAvgStrategy(H=3, inner_optim=MOMENTUM),
    "fedavg-islands": lambda: FedAvgStrategy(H=2, island_size=1, inner_optim=MOMENTUM),
    "fedavg-examples": lambda: FedAvgStrategy(H=2, average=mean("examples"), inner_optim=MOMENTUM),
    "diloco": lambda: DiLoCoStrategy(H=3, inner_optim=ADAMW, max_norm=0.5),
    "adafactor": lambda: FedAvgStrategy(H=3, inner_optim=OptimSpec("adafactor", lr=0.01)),
    "modules": lambda: CommunicateOptimizeStrategy(
        [GradientAverage(), AveragingCommunicator(every=2), DiLoCoCommunicator(3)], inner_optim=MOMENTUM
    ),
}


@every_K_and_executor
@pytest.mark.parametrize("name", EVERY_STRATEGY)
def test_identical_data_keeps_the_replicas_identical(name: str, num_nodes: int, executor: str) -> None:
    weights = trained(EVERY_STRATEGY[name](), num_nodes, executor, data=lambda rank, num_nodes, train: vectors())
    assert torch.equal(weights, weights[:1].expand_as(weights))
    start = torch.cat([p.detach().flatten() for p in small_mlp().parameters()])
    assert not torch.equal(weights[0], start)


@both_executors
@pytest.mark.parametrize("kernel", ["sgd", "adamw", "adam", "adagrad"])
def test_fused_kernels_keep_identical_replicas_identical(kernel: str, executor: str) -> None:
    for strategy in (Strategy(inner_optim=kernel, lr=0.01), SimpleReduceStrategy(inner_optim=kernel, lr=0.01)):
        weights = trained(strategy, 3, executor, data=lambda rank, num_nodes, train: vectors())
        assert torch.equal(weights, weights[:1].expand_as(weights))


@every_K_and_executor
@pytest.mark.parametrize(
    "strategy",
    [
        SimpleReduceStrategy(inner_optim=ADAMW),
        FedAvgStrategy(H=7, inner_optim=ADAMW),
        DiLoCoStrategy(H=7, inner_optim=ADAMW),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_the_replicas_are_identical_after_a_sync(strategy: Strategy, num_nodes: int, executor: str) -> None:
    weights = trained(strategy, num_nodes, executor)
    assert torch.equal(weights, weights[:1].expand_as(weights))
    # One step earlier only AllReduce's are.
    before = trained(strategy, num_nodes, executor, max_steps=6)
    same = torch.equal(before, before[:1].expand_as(before))
    assert same == (isinstance(strategy, SimpleReduceStrategy) or num_nodes == 1)


# Hand-derived: a scalar model θ whose gradient is the example itself


class Slope(nn.Module):
    """loss = θ · mean(x), so that the gradient is mean(x)."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(start))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.theta * batch[0].mean()


def constant(*gradients: float) -> Data:
    """Node k's gradient is the k-th number at every step."""
    return lambda rank, num_nodes, train: TensorDataset(torch.full((4,), gradients[rank]))


def slopes(strategy: Strategy, *gradients: float, steps: int, executor: str) -> list[float]:
    weights = trained(strategy, len(gradients), executor, Slope(), constant(*gradients), max_steps=steps, batch_size=2)
    return weights.flatten().tolist()


@both_executors
def test_fedavg_weighted_by_examples_by_hand(executor: str) -> None:
    # Shards of 2 and 6 examples weigh 1/4 and 3/4: θ = 1 − (0.1·1 + 0.3·3)/4 = 0.75; uniform it would be 0.8.
    def data(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return TensorDataset(torch.full(((2, 6)[rank],), (1.0, 3.0)[rank]))

    strategy = FedAvgStrategy(H=1, average=mean("examples"), inner_optim=SGD)
    weights = trained(strategy, 2, executor, Slope(), data, max_steps=1, batch_size=2)
    assert weights.flatten().tolist() == pytest.approx([0.75, 0.75])


@both_executors
def test_clipping_by_hand(executor: str) -> None:
    # Gradients 1 and 3, max_norm 0.5. AllReduce clips their mean 2 to 0.5 and goes 0.05. Alone, each node clips its
    # own to 0.5. With max_norm 2.5 only the second node's is clipped, and AllReduce's mean is not.
    def after(strategy: type[Strategy], max_norm: float) -> list[float]:
        return slopes(strategy(inner_optim=SGD, max_norm=max_norm), 1.0, 3.0, steps=1, executor=executor)

    assert after(SimpleReduceStrategy, 0.5) == pytest.approx([0.95, 0.95], abs=1e-6)
    assert after(Strategy, 0.5) == pytest.approx([0.95, 0.95], abs=1e-6)
    assert after(Strategy, 2.5) == pytest.approx([0.9, 0.75], abs=1e-6)
    assert after(SimpleReduceStrategy, 2.5) == pytest.approx([0.8, 0.8], abs=1e-6)


# Averaging conserves


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    """A partition of range(K), in any order."""
    nodes = draw(st.permutations(range(draw(st.integers(1, 8)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(nodes) - 1)))) if len(nodes) > 1 else []
    return [list(nodes[a:b]) for a, b in zip([0, *cuts], [*cuts, len(nodes)], strict=True)]


@settings(max_examples=60)
@given(groups=partitions(), columns=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_averaging_conserves_the_sum_of_the_rows(groups: list[list[int]], columns: int, seed: int) -> None:
    num_nodes = sum(map(len, groups))
    rows = torch.randn(num_nodes, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before = rows.clone()
    averaged = StackedCollectives(Ledger(num_nodes)).all_reduce(rows, "mean", among=groups)
    torch.testing.assert_close(averaged.sum(0), rows.sum(0))
    for group in groups:
        assert torch.equal(averaged[group], rows[group].mean(0).expand(len(group), -1))
    assert torch.equal(rows, before)
    shared = StackedCollectives(Ledger(num_nodes)).all_reduce(rows, "mean")
    assert shared.shape == (columns,)
    torch.testing.assert_close(shared * num_nodes, rows.sum(0))


@settings(max_examples=60)
@given(groups=partitions(), seed=st.integers(0, 2**31))
def test_a_weighted_mean_is_scaled_inside_every_group(groups: list[list[int]], seed: int) -> None:
    num_nodes = sum(map(len, groups))
    stream = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_nodes, 3, generator=stream, dtype=torch.float64)
    weights = torch.randint(1, 9, (num_nodes,), generator=stream)
    averaged = StackedCollectives(Ledger(num_nodes)).all_reduce(rows, "mean", among=groups, weights=weights)
    # Conserved is the weighted sum: Σ_k w_k · (Σ_j w_j x_j / Σ_j w_j) = Σ_j w_j x_j in every group.
    torch.testing.assert_close(weights.double() @ averaged, weights.double() @ rows)
    for group in groups:
        expected = sum(weights[j] * rows[j] for j in group) / weights[group].sum()
        torch.testing.assert_close(averaged[group], expected.expand(len(group), -1))


@both_executors
def test_islands_conserve_the_mean_replica(executor: str) -> None:
    # With SGD and no sync before, θ̄ after a step is that of training alone, whatever the islands.
    alone = trained(Strategy(inner_optim=SGD), 5, executor, small_cnn(0.0), TASKS[1].data(), max_steps=3)
    for size in (2, 3, 4):
        strategy = FedAvgStrategy(H=3, island_size=size, inner_optim=SGD)
        islands = trained(strategy, 5, executor, small_cnn(0.0), TASKS[1].data(), max_steps=3)
        assert not torch.equal(islands, alone)
        torch.testing.assert_close(islands.mean(0), alone.mean(0), rtol=1e-5, atol=1e-6)
        # ceil(5 / size) islands, each of equal rows
        assert len(islands.unique(dim=0)) == -(-5 // size)
