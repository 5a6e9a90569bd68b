"""SPARTA: which entries are chosen, what becomes of them, and every byte of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import TASKS, Communication, Task, small_mlp, stacked_weights, train_separately, vectors
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from vsim_kernels.quantize import uniform_quantize_reference

from vsim import Event, Trainer
from vsim.cluster import Cluster
from vsim.cluster.ledger import Ledger
from vsim.cluster.optim import OptimSpec
from vsim.cluster.reductions import round_up
from vsim.cluster.replicas import Replicas
from vsim.cluster.stacked import StackedCollectives
from vsim.strategy import (
    DiLoCoStrategy,
    FedAvgStrategy,
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
)

SELECTORS = [RandomIndexSelector, ShuffledSequentialIndexSelector, PartitionedIndexSelector]


class Tensors(nn.Module):
    """Parameters of the given shapes, all zero."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)


def cluster_of(model: nn.Module, num_nodes: int = 2, seed: int = 0) -> Cluster:
    """A cluster before its first step."""
    replicas = Replicas.of(model, num_nodes, torch.device("cpu"))
    shared = torch.Generator().manual_seed(seed)
    return Cluster(replicas, StackedCollectives(Ledger(num_nodes)), shared, torch.ones(num_nodes), 100)


def ranges(cluster: Cluster) -> list[set[int]]:
    """The columns of every tensor."""
    return [set(range(c.start, c.stop)) for c in cluster.replicas.layout]


def chosen(selector: IndexSelector, cluster: Cluster, rounds: int) -> list[Tensor]:
    """What a new run's first rounds choose."""
    selector.setup(cluster)
    return [selector.select(cluster, r) for r in range(rounds)]


def play(module: SPARTAStrategy, cluster: Cluster, moves: list[Any]) -> Iterator[Tensor]:
    """Yield the weights (K, P) after each step, in which the nodes' weights change by one of `moves`."""
    module.setup(cluster)
    for move in moves:
        cluster.collectives.position.begin(cluster.step + 1)
        cluster.weights.add_(torch.tensor(move))
        module.communicate(cluster)
        yield cluster.weights.clone()


def fitted(strategy: Strategy, num_nodes: int = 3, **options: Any) -> tuple[Tensor, list[Event]]:
    """The weights (K, P) and events of 6 steps."""
    trainer = Trainer(small_mlp(), vectors())
    options = {"max_steps": 6, "batch_size": 5, "executor": "loop", "progress": False, **options}
    trainer.fit(strategy=strategy, num_nodes=num_nodes, **options)
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights, list(trainer.ledger)


# Selectors -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=4),
    p=st.floats(1e-3, 1.0),
    which=st.sampled_from(SELECTORS),
)
def test_entries_are_distinct_columns_in_ascending_order(
    shapes: list[tuple[int, ...]], p: float, which: type[IndexSelector]
) -> None:
    cluster = cluster_of(Tensors(*shapes))
    for index in chosen(which(p), cluster, 5):
        assert index.dtype == torch.int64 and index.dim() == 1
        columns = index.tolist()
        assert columns == sorted(set(columns)) and set(columns) <= set().union(*ranges(cluster))


def test_random_entries_are_chosen_with_probability_p() -> None:
    cluster = cluster_of(Tensors((4, 5), (3,), ()))
    rounds, p = 1000, 0.2
    index = chosen(RandomIndexSelector(p), cluster, rounds)
    counts = torch.cat(index).bincount(minlength=24)
    # Binomial(1000, 0.2) for each of 24 entries: mean 200, deviation √160 = 12.6; five of them are 63.
    assert (counts - 200).abs().max() < 63
    # The number in a round is Binomial(24, 0.2): mean 4.8, variance 3.84. Its mean over 1000 rounds deviates by 0.062;
    # the variance by about 3.84·√(2/1000) = 0.172.
    sizes = torch.tensor([len(i) for i in index], dtype=torch.float64)
    assert abs(sizes.mean() - 4.8) < 5 * 0.062 and abs(sizes.var() - 3.84) < 5 * 0.172


def test_sequential_chunks_cover_every_tensor_in_a_fixed_shuffled_order() -> None:
    cluster = cluster_of(Tensors((10,), (4,), (3,)))
    rounds = chosen(ShuffledSequentialIndexSelector(0.3), cluster, 12)  # ⌈1/0.3⌉ = 4 chunks
    # 10 = 3 + 3 + 2 + 2, 4 = 1 + 1 + 1 + 1, 3 = 1 + 1 + 1 + 0
    for columns, sizes in zip(ranges(cluster), [(3, 3, 2, 2), (1, 1, 1, 1), (1, 1, 1, 0)], strict=True):
        chunks = [columns & set(index.tolist()) for index in rounds]
        assert [len(chunk) for chunk in chunks] == [*sizes] * 3
        assert set().union(*chunks[:4]) == columns  # with the sizes: disjoint
        assert chunks[:4] == chunks[4:8] == chunks[8:]


def test_sequential_chunks_are_uniform_over_permutations() -> None:
    # Of 10 entries the first chunk has 3 and the last 2: over 750 permutations an entry is in the first 225 ± 12.6
    # times and in the last 150 ± 11.0.
    cluster = cluster_of(Tensors((10,)))
    first, last = torch.zeros(10), torch.zeros(10)
    for _ in range(750):
        rounds = chosen(ShuffledSequentialIndexSelector(0.3), cluster, 4)
        first[rounds[0]] += 1
        last[rounds[3]] += 1
    assert (first - 225).abs().max() < 5 * 12.6 and (last - 150).abs().max() < 5 * 11.0


def test_parts_are_disjoint_cover_every_tensor_and_are_drawn_anew() -> None:
    cluster = cluster_of(Tensors((10,), (2, 4), (3,), (3,), (1,)))
    rounds = chosen(PartitionedIndexSelector(0.3), cluster, 24)
    # min(⌈1/0.3⌉, n) parts: 4, 4, 3, 3, 1
    for columns, count in zip(ranges(cluster), [4, 4, 3, 3, 1], strict=True):
        parts = [columns & set(index.tolist()) for index in rounds]
        cycles = [parts[i : i + count] for i in range(0, 24, count)]
        for cycle in cycles:
            assert sum(len(part) for part in cycle) == len(columns) and set().union(*cycle) == columns
            assert max(map(len, cycle)) - min(map(len, cycle)) <= 1
        assert count == 1 or any(cycle != cycles[0] for cycle in cycles)


def test_parts_are_uniform() -> None:
    # Part 0 of 10 entries in 4 parts has 3, so an entry is in it with probability 0.3; of 3 entries in 3 parts it has
    # one. In 750 partitions that is 225 ± 12.6 and 250 ± 12.9.
    cluster = cluster_of(Tensors((10,), (3,)))
    rounds = chosen(PartitionedIndexSelector(0.3), cluster, 3000)
    long = torch.cat(rounds[::4]).bincount(minlength=13)[:10]
    short = torch.cat(rounds[:2250:3]).bincount(minlength=13)[10:]
    assert (long - 225).abs().max() < 5 * 12.6 and (short - 250).abs().max() < 5 * 12.9


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda cls: cls.__name__)
def test_selectors_at_the_ends_of_p(selector: type[IndexSelector]) -> None:
    cluster = cluster_of(Tensors((10,), (2, 4), (), (0,)))
    assert all(index.tolist() == list(range(19)) for index in chosen(selector(1.0), cluster, 3))
    few = [len(index) for index in chosen(selector(1e-9), cluster, 30)]
    # In 10⁹ rounds every entry once: one of each tensor in the first 10, 8 and 1. Partitions never have more parts than
    # there are entries: one of each tensor in every round.
    expected = {
        "RandomIndexSelector": [0] * 30,
        "ShuffledSequentialIndexSelector": [3] + [2] * 7 + [1] * 2 + [0] * 20,
        "PartitionedIndexSelector": [3] * 30,
    }
    assert few == expected[selector.__name__]


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda cls: cls.__name__)
def test_selectors_draw_from_the_shared_generator_alone(selector: type[IndexSelector]) -> None:
    before = torch.get_rng_state()
    runs = [chosen(selector(0.3), cluster_of(Tensors((9,), (8,)), seed=seed), 6) for seed in (1, 1, 2)]
    assert torch.equal(before, torch.get_rng_state())
    same, other = ([torch.equal(a, b) for a, b in zip(runs[0], run, strict=True)] for run in runs[1:])
    assert all(same) and not all(other)


def test_rounding_of_a_rate_makes_no_extra_chunk() -> None:
    assert 1 / (1 / 49) > 49 and 0.07 * 100 > 7
    assert all(round_up(1 / (1 / n)) == n and round_up(n / 1000 * 1000) == n for n in range(1, 1000))
    assert round_up(2.001) == 3
    assert ShuffledSequentialIndexSelector(1 / 49).p * 49 < 1


# By hand ---------------------------------------------------------------------------------------------------------


def test_nodes_nominate_the_entries_that_moved_furthest() -> None:
    # Tensors of 4 and 2 entries, p = 1/4: each node nominates ⌈1⌉ and ⌈1/2⌉, one of each.
    cluster = cluster_of(Tensors((4,), (2,)))
    module = SPARTAStrategy(p_sparta=0.25, compression_method="topk")
    moves = [[[4.0, 1, 0, 0, 0, -1], [0.0, 0, -2, 1, 2, 3]], [[0.5, 0, 0, 0, 0, 0.25], [0.0, 0, 0, 0, 0, 0]]]
    steps = play(module, cluster, moves)
    # Node 0 nominates 0 and 5, node 1 (2 of |−2| and 5 of 3): entries 0, 2, 5 become 2, −1 and 1.
    assert next(steps).tolist() == [[2, 1, -1, 0, 0, 1], [2, 0, -1, 1, 2, 1]]
    # Since they were last shared (2, 0, −1, 0, 0, 1) the nodes' entries have moved by (½, 1, 0, 0, 0, ¼), of which node
    # 0 nominates 1 and 5, and by (0, 0, 0, 1, 2, 0): 3 and 4. Their means: ½, ½, 1, 9/8.
    assert next(steps).tolist() == [[2.5, 0.5, -1, 0.5, 1, 1.125], [2, 0.5, -1, 0.5, 1, 1.125]]
    # Two indices of 4 bytes from every node, then 3 and 4 values of 4 bytes.
    assert [(e.step, e.collective, e.label, e.payload_bytes) for e in cluster.collectives.ledger] == [
        (1, "all_gather", "nominations", 8),
        (1, "all_reduce", "sparse weights", 12),
        (2, "all_gather", "nominations", 8),
        (2, "all_reduce", "sparse weights", 16),
    ]


def test_an_entry_whose_mean_is_on_its_way_has_been_shared() -> None:
    # One of three entries a round, d = 1. Entry 0 is shared in round 0 as (3, 1); what counts in round 1 is what has
    # moved since, so that entry 1 is next, while entry 0 becomes 2. In round 2 it is entry 2.
    cluster = cluster_of(Tensors((3,)))
    module = SPARTAStrategy(p_sparta=1 / 3, compression_method="topk", async_delay=1)
    moves = [[[3.0, 0, 0], [1.0, 0, 0]], [[0.0, 1, 0], [0.0, 2, 0]], [[0.0, 0, 0.5], [0.0, 0, 0.5]]]
    weights = [w.tolist() for w in play(module, cluster, moves)]
    assert weights[0] == [[3, 0, 0], [1, 0, 0]]
    assert weights[1] == [[2, 1, 0], [2, 2, 0]]
    assert weights[2] == [[2, 1.5, 0.5], [2, 1.5, 0.5]]
    assert [e.payload_bytes for e in cluster.collectives.ledger] == [4, 4] * 3  # both nodes nominate the same


class Fixed(IndexSelector):
    """Entries 1, 2 and 4 of a tensor of 5, none of the next, two of the last."""

    def select(self, cluster: Cluster, round: int) -> Tensor:
        return torch.tensor([1, 2, 4, 7, 9])


@pytest.mark.parametrize("bits", [1, 3, 16])
def test_values_are_rounded_by_node_and_tensor(bits: int) -> None:
    cluster = cluster_of(Tensors((5,), (2,), (3,)), num_nodes=3)
    before = torch.randn(3, 10, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1.0], [10.0], [0.1]])
    (after,) = play(SPARTAStrategy(index_selector=Fixed(0.5), quantization_bits=bits), cluster, [before.tolist()])
    columns = [[1, 2, 4], [7, 9]]
    for own in columns:
        sent = torch.stack([uniform_quantize_reference(row[own], bits) for row in before])
        torch.testing.assert_close(after[:, own], sent.mean(0).expand(3, -1))
        if bits > 1:  # the error of a mean is at most the mean error: half a scale max|x| / (2^(b−1) − 1) a node
            bound = (before[:, own].abs().amax(1) / (2 ** (bits - 1) - 1) / 2).mean()
            assert (after[0, own] - before[:, own].mean(0)).abs().max() <= bound * (1 + 1e-5)
    untouched = [0, 3, 5, 6, 8]
    assert torch.equal(after[:, untouched], before[:, untouched])
    # 5 values of b bits in whole bytes, and a scale of 4 bytes for each of the two tensors that take part.
    expected = {1: 1, 3: 2, 16: 10}[bits] + 8
    (event,) = cluster.collectives.ledger
    assert (event.collective, event.payload_bytes, event.wire_bytes) == ("merge", expected, 2 * expected)


# Events ----------------------------------------------------------------------------------------------------------

# small_mlp: tensors of 12·16 = 192, 16, 16·5 = 80 and 5 entries; P = 293.


def test_a_mask_that_is_sent_costs_a_byte_an_entry() -> None:
    seeded, events = fitted(SPARTAStrategy(p_sparta=0.1))
    broadcast, billed = fitted(SPARTAStrategy(p_sparta=0.1, mask="broadcast"))
    assert torch.equal(seeded, broadcast)
    masks, values = billed[::2], billed[1::2]
    assert values == events
    # 293 bytes from node 0 in every round, which reach 2 other nodes.
    assert masks == [Event(t, t, "weights", "broadcast", "mask", 293, (range(3),)) for t in range(1, 7)]


def test_a_round_without_entries_sends_no_values() -> None:
    weights, events = fitted(SPARTAStrategy(p_sparta=1e-9, mask="broadcast", quantization_bits=8))
    assert [e.label for e in events] == ["mask"] * 6
    torch.testing.assert_close(weights, fitted(Strategy())[0])


# Identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"mask": "broadcast"}, {"compression_method": "topk"}], ids=str)
def test_one_node_trains_alone_and_all_entries_of_all_are_fedavg(options: dict[str, Any]) -> None:
    weights, events = fitted(SPARTAStrategy(p_sparta=0.3, **options), 1)
    torch.testing.assert_close(weights, fitted(Strategy(), 1)[0])
    assert not any(e.wire_bytes for e in events)
    weights, _ = fitted(SPARTAStrategy(p_sparta=1.0, sparta_interval=2, **options))
    torch.testing.assert_close(weights, fitted(FedAvgStrategy(H=2))[0])


def test_the_hybrid_without_one_part_is_the_other() -> None:
    for hybrid, part in (({"p_sparta": 1e-12, "H": 2}, DiLoCoStrategy(H=2)), ({}, SPARTAStrategy(p_sparta=0.1))):
        strategy = SPARTADiLoCoStrategy(**{"p_sparta": 0.1, **hybrid})
        torch.testing.assert_close(fitted(strategy)[0], fitted(part)[0])


class EveryThird(IndexSelector):
    """Columns c with c + round divisible by 3."""

    def select(self, cluster: Cluster, round: int) -> Tensor:
        columns = torch.arange(cluster.replicas.num_parameters)
        return columns[(columns + round) % 3 == 0]


class ShareEveryThird(Communication):
    """SPARTA with `EveryThird` on separate modules, from the definition."""

    def __init__(self, interval: int, delay: int) -> None:
        self.interval, self.delay = interval, delay
        self.means: dict[int, tuple[Tensor, Tensor]] = {}

    def after_step(self, models: list[nn.Module], step: int) -> None:
        if step % self.interval:
            return
        round = step // self.interval - 1
        stacked = stacked_weights(models)
        chosen = (torch.arange(stacked.shape[1]) + round) % 3 == 0
        self.means[round] = chosen, stacked[:, chosen].mean(0)
        if round >= self.delay:
            chosen, mean = self.means[round - self.delay]
            for model in models:
                vector = parameters_to_vector(model.parameters()).detach().clone()
                vector[chosen] = mean
                vector_to_parameters(vector, model.parameters())


@pytest.mark.parametrize(
    ("task", "num_nodes", "interval", "delay"), [(TASKS[0], 2, 1, 0), (TASKS[1], 3, 2, 1), (TASKS[2], 5, 1, 3)]
)
def test_the_bits_are_those_of_separate_modules(task: Task, num_nodes: int, interval: int, delay: int) -> None:
    separate = train_separately(
        task.model(),
        task.data(),
        ShareEveryThird(interval, delay),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        num_nodes=num_nodes,
        max_steps=7,
        batch_size=5,
    )
    trainer = Trainer(task.model(), task.data())
    strategy = SPARTAStrategy(
        inner_optim=OptimSpec("adamw", lr=1e-2),
        sparta_interval=interval,
        index_selector=EveryThird(1 / 3),
        async_delay=delay,
    )
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=7, batch_size=5, progress=False, deterministic=True)
    assert trainer.strategy is not None
    assert torch.equal(trainer.strategy.cluster.weights, separate.weights)
