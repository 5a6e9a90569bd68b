"""One seed decides everything, and the process's own random state is left alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from errors import refused, warned
from reference_cluster import TASKS, Task, small_mlp, vectors
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from vsim import Trainer
from vsim.cluster.randomness import NODE, SHARED, default_generator, derive_seed, drawing_from, generator, isolated
from vsim.data.batches import Batches
from vsim.engine import VmapError
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy

CPU = torch.device("cpu")
every_executor = pytest.mark.parametrize("executor", ["vmap", "loop"])
every_pair = pytest.mark.parametrize(
    ("executor", "task"),
    [("vmap", TASKS[1]), ("loop", TASKS[1]), ("vmap", TASKS[2])],
    ids=lambda v: getattr(v, "name", v),
)
ISLANDS = FedAvgStrategy(H=2, island_size=2, lr=0.01)  # which are random


def global_draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()  # noqa: NPY002


def seed_globally(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


@pytest.fixture(autouse=True)
def _keep() -> Iterator[None]:
    states = np.random.get_state(), random.getstate()  # noqa: NPY002
    yield
    np.random.set_state(states[0])  # noqa: NPY002
    random.setstate(states[1])


def outcome(model: nn.Module, data: Any, strategy: Strategy | None = None, **options: Any) -> list[Tensor]:
    """Train, and return all that training leaves: weights, buffers, losses."""
    return outcome_of(run(model, data, strategy, **options))


def run(model: nn.Module, data: Any, strategy: Strategy | None = None, **options: Any) -> Trainer:
    trainer = Trainer(model, data, options.pop("val", None))
    options = {"num_nodes": 3, "max_steps": 6, "batch_size": 4, "progress": False, **options}
    trainer.fit(strategy=strategy or DiLoCoStrategy(H=2, lr=0.01), **options)
    return trainer


def outcome_of(trainer: Trainer) -> list[Tensor]:
    assert trainer.strategy is not None
    cluster = trainer.strategy.cluster
    return [cluster.weights, *cluster.replicas.buffers.values(), torch.from_numpy(trainer.history.node_losses)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


# The process's own state, and one seed


@every_pair
def test_two_fits_have_equal_bits_whatever_was_done_before_and_leave_the_generators_alone(
    executor: str, task: Task
) -> None:
    model, options = task.model(), {"executor": executor, "val": task.data(), "correlation_interval": 2}
    seed_globally(0)
    expected = [global_draws() for _ in range(2)]
    seed_globally(0)
    drawn = global_draws()
    first = outcome(model, task.data(), ISLANDS, **options)
    assert [drawn, global_draws()] == expected
    run(small_mlp(), vectors(), seed=7, num_nodes=2)
    assert same(first, outcome(model, task.data(), ISLANDS, **options))
    assert not torch.equal(first[0], outcome(model, task.data(), ISLANDS, seed=43, **options)[0])


class Failing(nn.Module):
    """Its loss is not finite from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        torch.rand(1)
        loss = (batch[0] @ self.weight).square().mean()
        return loss * torch.nan if self.calls > 2 else loss


def no_data(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
    torch.rand(3)
    raise OSError("no such shard")


@pytest.mark.parametrize(
    ("make", "data", "error"), [(Failing, vectors(), FloatingPointError), (small_mlp, no_data, OSError)]
)
def test_a_fit_that_raises_leaves_them_alone_too(make: Any, data: Any, error: type[Exception]) -> None:
    seed_globally(1)
    expected = global_draws()
    seed_globally(1)
    with pytest.raises(error):
        run(make(), data)
    assert global_draws() == expected


def test_the_seed_decides_the_order_too() -> None:
    # Without dropout and islands, the seed is only in the order of the data.
    for shuffle in (True, False):
        one, other = (outcome(small_mlp(), vectors(), SimpleReduceStrategy(), seed=s, shuffle=shuffle) for s in (1, 2))
        assert torch.equal(one[0], other[0]) == (not shuffle)


def test_a_node_does_not_depend_on_how_many_others_there_are() -> None:
    # Each node on its own data, trained alone with dropout: nodes 0 and 1 of 2 and of 5 are the same.
    def data(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return vectors(seed=rank)

    strategy = Strategy(inner_optim="sgd", lr=0.1)
    few, many = (outcome(small_mlp(0.4), data, strategy, num_nodes=k, executor="loop")[0] for k in (2, 5))
    torch.testing.assert_close(few, many[:2], rtol=1e-5, atol=1e-6)  # fused SGD; the losses agree to the bit


class Augmented(Dataset[Any]):
    """Draws from the global generators, as transforms do, and keeps what it drew."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.drawn.append(torch.rand(12) + float(np.random.rand()) + random.random())  # noqa: NPY002
        return self.drawn[-1], index % 5


@every_executor
def test_a_dataset_that_draws_globally_is_reproducible(executor: str) -> None:
    options: dict[str, Any] = {"executor": executor, "val": vectors(8)}
    first = outcome(small_mlp(), Augmented(), **options)
    seed_globally(5)
    assert same(first, outcome(small_mlp(), Augmented(), **options))
    assert not same(first, outcome(small_mlp(), Augmented(), **options, seed=1))
    # Neither dropout in the model nor evaluation moves what the dataset draws.
    data = Augmented(), Augmented()
    run(small_mlp(), data[0], val_interval=1, **options)
    run(small_mlp(0.5), data[1], val_interval=None, **options)
    assert same(*(one.drawn for one in data))


def test_worker_processes_draw_reproducibly() -> None:
    def fetched() -> list[Tensor]:
        with isolated(3, CPU):
            stream = Batches([Augmented()], 2, 3, True, 3, {"num_workers": 2}).from_step()
            batches = [batch[0] for batch in itertools.islice(stream, 4)]
            stream.close()  # type: ignore[attr-defined]
        return batches

    first = fetched()
    assert same(first, fetched())
    assert len(torch.cat(first, 1).unique()) == torch.cat(first, 1).numel()  # no two workers draw the same


# Evaluation changes nothing


@every_pair
def test_evaluation_does_not_change_training(executor: str, task: Task) -> None:
    never = outcome(task.model(), task.data(), executor=executor)
    for options in ({"val_interval": 1, "correlation_interval": 1}, {"val_interval": 2, "val_size": 3}):
        assert same(never, outcome(task.model(), task.data(), executor=executor, val=task.data(), **options))


class Restless(nn.Module):
    """Random in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return F.dropout(batch[0] @ self.weight, 0.5, training=True).square().mean()


@every_executor
def test_what_evaluation_draws_is_the_same_every_time(executor: str) -> None:
    strategy = Strategy(inner_optim="sgd", lr=0.0)  # the model stays as it is
    trainer = run(Restless(), vectors(), strategy, val=vectors(), val_interval=1, executor=executor)
    (losses,) = trainer.history.measured("global_loss")
    assert len(losses) == 7 and len(set(losses)) == 1
    assert len(set(trainer.history.node_losses[:, 0])) > 3  # unlike in training
    assert same(outcome_of(trainer), outcome(Restless(), vectors(), strategy, executor=executor))


# Dropout by node


class Masks(nn.Module):
    """Its gradient is the dropout mask of its weight, scaled."""

    def __init__(self, dropout: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.dropout = dropout
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.dropout(self.weight).sum() + 0 * batch[0].mean()


def masks(executor: str, dropout: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
    """The stacked gradients (3, P) of the first step."""
    sgd = Strategy(inner_optim="sgd", lr=1.0)
    return 1 - outcome(Masks(dropout, *shape), vectors(), sgd, executor=executor, max_steps=1, seed=11)[0]


@every_executor
def test_every_node_draws_its_own_mask(executor: str) -> None:
    # Dropout of other kinds is in test_lowering.py.
    expected = []
    for node in range(3):
        with drawing_from(generator(11, NODE, node)):
            expected.append(F.dropout(torch.ones(50), 0.5))
    assert torch.equal(masks(executor, nn.Dropout(0.5), 50), torch.stack(expected))
    assert len(torch.stack(expected).unique(dim=0)) == 3


def in_rows(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Draw in a vmap of the model's own, whose draws would be of no node."""
    return lambda x: torch.func.vmap(draw, randomness="different")(x)


def filled(kind: str) -> Callable[[Tensor], Tensor]:
    noise = in_rows(lambda row: getattr(row.detach().clone(), kind)())
    return lambda x: x + 1e-9 * noise(x)  # too little for a comparison with the loop to find


NOT_VECTORIZED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "dropout_": (lambda x: torch.dropout_(x * 1, 0.4, True), (50,)),
    "dropout": (in_rows(lambda row: F.dropout(row, 0.5)), (40, 5)),
    **{kind: (filled(kind), (4, 5)) for kind in ("normal_", "exponential_")},
}


@pytest.mark.parametrize("name", NOT_VECTORIZED)
def test_draws_that_would_be_of_no_node_are_left_to_the_loop(name: str) -> None:
    draw, shape = NOT_VECTORIZED[name]
    with refused(VmapError, name, "executor='loop'"):
        masks("vmap", draw, *shape)
    with warned("continues with 'loop'", name):
        automatic = masks("auto", draw, *shape)
    by_loop = masks("loop", draw, *shape)
    assert torch.equal(automatic, by_loop)
    if name == "dropout":
        assert set(by_loop.flatten().tolist()) == {0.0, 2.0} and len(by_loop.unique(dim=0)) == 3
        assert len(by_loop[0].view(40, 5).unique(dim=0)) > 10  # different in every row


@every_executor
def test_a_dropout_probability_out_of_range(executor: str) -> None:
    with refused(ValueError, "dropout probability", "between 0 and 1", 1.5):
        masks(executor, lambda x: F.dropout(x, 1.5), 5)


# Streams


def test_streams_are_told_apart_by_their_keys() -> None:
    keys = [(seed, kind, node) for seed in range(5) for kind in range(5) for node in range(20)]
    keys += [(seed, SHARED) for seed in range(5)]  # type: ignore[misc]
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in (*seeds, derive_seed(2**70, NODE, 0)))


def test_a_stream_is_the_default_generator_for_a_block() -> None:
    seed_globally(4)
    ours = torch.default_generator.get_state()
    stream, reference = generator(1, NODE, 2), generator(1, NODE, 2)
    with drawing_from(stream):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=reference))
    with pytest.raises(KeyError), drawing_from(stream):  # noqa: PT012
        torch.rand(3)
        raise KeyError
    torch.rand(3, generator=reference)
    assert torch.equal(stream.get_state(), reference.get_state())
    assert torch.equal(torch.default_generator.get_state(), ours)


def test_default_generators_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", streams)
    assert default_generator(torch.device("cuda")) is streams[1]
    assert default_generator(torch.device("cuda:0")) is streams[0]
    monkeypatch.setattr(torch.mps, "_get_default_mps_generator", lambda: streams[0])
    assert default_generator(torch.device("mps")) is streams[0]


def test_isolated_draws_depend_on_the_seed_alone() -> None:
    seen = []
    for before, seed in ((1, 8), (2, 8), (1, 9)):
        seed_globally(before)
        with isolated(seed, CPU):
            seen.append(global_draws())
    assert seen[0] == seen[1]
    assert all(a != b for a, b in zip(seen[0], seen[2], strict=True))
