"""Small steps are computed by one thread; the user's own setting is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.cluster.optim import OptimSpec
from vsim.cluster.replicas import Replicas, matrix
from vsim.engine import LoopExecutor
from vsim.engine.machine import takes_one_thread
from vsim.engine.objective import Objective
from vsim.models import CNN, GPT, MLP
from vsim.strategy import SimpleReduceStrategy


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


THREADS: list[int] = []  # that compute each call of a model


class Watched(nn.Module):
    """A model that notes how many threads compute it, and draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        THREADS.append(torch.get_num_threads())
        return nn.functional.dropout(self.layer(batch[0]), 0.5).square().mean()


def trained(width: int, **options: Any) -> tuple[list[int], list[int], Tensor]:
    """Return the threads of the model's calls, the threads of callbacks, and the weights."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.zeros(64))
    seen: list[int] = []
    model = Watched(width)
    calls: list[int] = []

    def note(run: Any) -> None:
        seen.append(torch.get_num_threads())
        calls.extend(THREADS)
        THREADS.clear()

    result = Trainer(model, data).fit(
        strategy=SimpleReduceStrategy(),
        num_nodes=2,
        max_steps=3,
        batch_size=8,
        progress=False,
        callbacks=[note],
        **options,
    )
    return calls, seen, result.layer.weight.detach()


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_a_small_step_has_one_thread_and_users_have_theirs(executor: str) -> None:
    calls, seen, weights = trained(4, executor=executor)
    assert set(calls[-2:]) == {1} and set(seen) == {3} and torch.get_num_threads() == 3
    torch.set_num_threads(1)
    _, _, alone = trained(4, executor=executor)  # no choice is made: looking at the model's size has no effect
    assert torch.equal(weights, alone)


@pytest.mark.usefixtures("three_threads")
def test_a_large_step_has_all_threads() -> None:
    calls, _, _ = trained(100_000, executor="vmap")
    assert set(calls) == {3}


@pytest.mark.parametrize(
    ("model", "num_nodes", "one"), [(MLP(), 4, True), (MLP(), 16, False), (CNN(), 4, False), (GPT(97), 4, False)]
)
def test_few_weights_without_convolutions_have_one_thread(model: nn.Module, num_nodes: int, one: bool) -> None:
    replicas = Replicas.of(model, num_nodes, torch.device("cpu"))
    assert takes_one_thread(LoopExecutor(replicas, Objective(replicas.module), [])) == one


@pytest.mark.usefixtures("three_threads")
def test_deterministic_runs_have_the_threads_that_the_real_ones_have() -> None:
    calls, _, _ = trained(4, deterministic=True)
    assert set(calls) == {3}


@pytest.mark.slow
@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("threads", "optimizer"), [(1, "adamw"), (2, "sgd"), (3, "adamw")])
def test_equal_nodes_stay_equal_under_one_fused_call(threads: int, optimizer: str) -> None:
    """A fused kernel rounds the rest of a chunk, which is no whole vector, in another way: rows are whole vectors."""
    torch.set_num_threads(threads)
    num_nodes, columns = 5, 26_123  # more than one thread's chunk, and no multiple of a vector
    weights, grads = (matrix(num_nodes, columns, torch.float32, torch.device("cpu")) for _ in range(2))
    stream = torch.Generator().manual_seed(threads)
    weights[:] = torch.randn(columns, generator=stream)
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    built = OptimSpec(optimizer, lr=1e-3, **options).build_over(weights, grads, deterministic=False)
    assert built.param_groups[0]["fused"] and len(built.param_groups[0]["params"]) == 1
    start = weights.clone()
    for step in range(200):
        grads[:] = torch.randn(columns, generator=stream)
        built.step()
        assert torch.equal(weights, weights[:1].expand_as(weights)), f"step {step + 1}"
    assert not torch.equal(weights, start)
