"""SPARTA: which entries are chosen, what becomes of them, and every byte of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separate import TASKS, Communication, Task, small_mlp, stacked_weights, train_separately, vectors
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from vsim_kernels.quantize import uniform_quantize_reference

from vsim import Event, Trainer
from vsim.cluster import Cluster
from vsim.cluster.ledger import Ledger
from vsim.cluster.optim import OptimSpec
from vsim.cluster.replicas import Replicas
from vsim.cluster.stacked import StackedCollectives
from vsim.strategy import (
    CommunicateOptimizeStrategy,
    DiLoCoCommunicator,
    DiLoCoStrategy,
    FedAvgStrategy,
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
    SparseCommunicator,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
)
from vsim.strategy.selectors import round_up

SELECTORS = [RandomIndexSelector, ShuffledSequentialIndexSelector, PartitionedIndexSelector]
every_selector = pytest.mark.parametrize("selector", SELECTORS, ids=lambda cls: cls.__name__)
every_K = pytest.mark.parametrize("num_nodes", [1, 2, 3, 5])
every_K_and_executor = pytest.mark.parametrize(
    ("num_nodes", "executor"),
    [
        pytest.param(k, executor, marks=() if (i + j) % 2 else pytest.mark.slow)
        for i, k in enumerate((1, 2, 3, 5))
        for j, executor in enumerate(("vmap", "loop"))
    ],
)

ADAMW = OptimSpec("adamw", lr=1e-2, eps=1e-3)


class Tensors(nn.Module):
    """Parameters of the given shapes, all zero."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)


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


def play(module: SparseCommunicator, cluster: Cluster, moves: list[Any]) -> Iterator[Tensor]:
    """Yield the weights (K, P) after each step, in which the nodes' weights change by one of `moves`."""
    module.setup(cluster)
    for move in moves:
        cluster.collectives.position.begin(cluster.step + 1)
        cluster.weights.add_(torch.tensor(move))
        module.communicate(cluster)
        yield cluster.weights.clone()


class Fixed(IndexSelector):
    """Round r shares the columns at position r mod their number."""

    def __init__(self, *columns: list[int]) -> None:
        super().__init__(0.5)
        self.columns = columns

    def select(self, cluster: Cluster, round: int) -> Tensor:
        return torch.tensor(self.columns[round % len(self.columns)], dtype=torch.int64)


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
    rounds, p = 4000, 0.2
    index = chosen(RandomIndexSelector(p), cluster, rounds)
    counts = torch.cat(index).bincount(minlength=24)
    # Binomial(4000, 0.2) for each of 24 entries: mean 800, deviation √640 = 25.3; five of them are 126.
    assert (counts - 800).abs().max() < 126
    # The number in a round is Binomial(24, 0.2): mean 4.8, variance 3.84. Its mean over 4000 rounds deviates by 0.031;
    # the variance by about 3.84·√(2/4000) = 0.086.
    sizes = torch.tensor([len(i) for i in index], dtype=torch.float64)
    assert abs(sizes.mean() - 4.8) < 5 * 0.031 and abs(sizes.var() - 3.84) < 5 * 0.086


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
    # Of 10 entries the first chunk has 3 and the last 2: over 3000 permutations an entry is in the first 900 ± 25.1
    # times and in the last 600 ± 21.9.
    cluster = cluster_of(Tensors((10,)))
    first, last = torch.zeros(10), torch.zeros(10)
    for _ in range(3000):
        rounds = chosen(ShuffledSequentialIndexSelector(0.3), cluster, 4)
        first[rounds[0]] += 1
        last[rounds[3]] += 1
    assert (first - 900).abs().max() < 5 * 25.1 and (last - 600).abs().max() < 5 * 21.9


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
    # one. In 3000 partitions that is 900 ± 25.1 and 1000 ± 25.8.
    cluster = cluster_of(Tensors((10,), (3,)))
    rounds = chosen(PartitionedIndexSelector(0.3), cluster, 12_000)
    long = torch.cat(rounds[::4]).bincount(minlength=13)[:10]
    short = torch.cat(rounds[:9000:3]).bincount(minlength=13)[10:]
    assert (long - 900).abs().max() < 5 * 25.1 and (short - 1000).abs().max() < 5 * 25.8


@every_selector
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


@every_selector
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


def test_a_selector_must_select() -> None:
    with pytest.raises(NotImplementedError, match="IndexSelector must define select"):
        IndexSelector(0.5).select(cluster_of(Tensors((2,))), 0)
    assert repr(PartitionedIndexSelector(0.005)) == "PartitionedIndexSelector(p=0.005)"
    for p, error in [(0, ValueError), (-0.1, ValueError), (1.5, ValueError), (True, TypeError), ("0.1", TypeError)]:
        with pytest.raises(error, match=r"p must be"):
            RandomIndexSelector(p)  # type: ignore[arg-type]


# By hand ---------------------------------------------------------------------------------------------------------


def test_chosen_entries_become_their_mean() -> None:
    module = SparseCommunicator(Fixed([0, 2], []), every=2)
    steps = play(module, cluster_of(Tensors((3,))), [[[0.0, 2, 4], [2.0, 6, 0]], 0.0, 1.0, 1.0])
    assert next(steps).tolist() == [[0, 2, 4], [2, 6, 0]]  # rounds are after steps 2 and 4
    assert next(steps).tolist() == [[1, 2, 2], [1, 6, 2]]
    assert next(steps).tolist() == [[2, 3, 3], [2, 7, 3]]
    assert next(steps).tolist() == [[3, 4, 4], [3, 8, 4]]  # of nothing


def test_a_delayed_mean_is_written_into_the_entries_that_it_is_of() -> None:
    # Rounds share entries 0, 1, 0, 1; node 1 moves by (2, 2) in every step, node 0 not at all; d = 1.
    #   after the move        mean to come   written        result
    #   (0, 0)   (2, 2)       entry 0: 1     –              (0, 0)   (2, 2)
    #   (0, 0)   (4, 4)       entry 1: 2     entry 0 ← 1    (1, 0)   (1, 4)
    #   (1, 0)   (3, 6)       entry 0: 2     entry 1 ← 2    (1, 2)   (3, 2)
    #   (1, 2)   (5, 4)       entry 1: 3     entry 0 ← 2    (2, 2)   (2, 4)
    cluster = cluster_of(Tensors((2,)))
    module = SparseCommunicator(Fixed([0], [1]), async_delay=1)
    weights = [w.tolist() for w in play(module, cluster, [[[0.0], [2.0]]] * 4)]
    assert weights == [[[0, 0], [2, 2]], [[1, 0], [1, 4]], [[1, 2], [3, 2]], [[2, 2], [2, 4]]]
    # Bytes count in the round in which the mean is taken; the last mean is never written.
    assert [(e.step, e.payload_bytes) for e in cluster.collectives.ledger] == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_a_mean_is_written_as_many_rounds_later_as_the_delay(delay: int) -> None:
    # One entry: node 1 moves by 1 a step, so that until something is written it is t after step t, and the mean t / 2.
    cluster = cluster_of(Tensors((1,)))
    steps = list(play(SparseCommunicator(Fixed([0]), async_delay=delay, every=2), cluster, [[[0.0], [1.0]]] * 14))
    first = 2 * (1 + delay)  # rounds are after steps 2, 4, …: the mean of step 2 is 1
    assert [w[1].item() for w in steps[: first - 1]] == list(range(1, first))
    assert steps[first - 1].tolist() == [[1], [1]]


def test_nodes_nominate_the_entries_that_moved_furthest() -> None:
    # Tensors of 4 and 2 entries, p = 1/4: each node nominates ⌈1⌉ and ⌈1/2⌉, one of each.
    cluster = cluster_of(Tensors((4,), (2,)))
    module = SparseCommunicator(sparsification_rate=0.25, compression_method="topk")
    steps = play(
        module,
        cluster,
        [
            [[4.0, 1, 0, 0, 0, -1], [0.0, 0, -2, 1, 2, 3]],
            [[0.5, 0, 0, 0, 0, 0.25], [0.0, 0, 0, 0, 0, 0]],
        ],
    )
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
    module = SparseCommunicator(sparsification_rate=1 / 3, compression_method="topk", async_delay=1)
    moves = [[[3.0, 0, 0], [1.0, 0, 0]], [[0.0, 1, 0], [0.0, 2, 0]], [[0.0, 0, 0.5], [0.0, 0, 0.5]]]
    weights = [w.tolist() for w in play(module, cluster, moves)]
    assert weights[0] == [[3, 0, 0], [1, 0, 0]]
    assert weights[1] == [[2, 1, 0], [2, 2, 0]]
    assert weights[2] == [[2, 1.5, 0.5], [2, 1.5, 0.5]]
    assert [e.payload_bytes for e in cluster.collectives.ledger] == [4, 4] * 3  # both nodes nominate the same


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 16])
def test_values_are_rounded_by_node_and_tensor(bits: int) -> None:
    # Entries 1, 2 and 4 of a tensor of 5, none of the next, two of the last.
    cluster = cluster_of(Tensors((5,), (2,), (3,)), num_nodes=3)
    before = torch.randn(3, 10, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1.0], [10.0], [0.1]])
    (after,) = play(SparseCommunicator(Fixed([1, 2, 4, 7, 9]), quantization_bits=bits), cluster, [before.tolist()])
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
    expected = {1: 1, 2: 2, 3: 2, 8: 5, 16: 10}[bits] + 8
    (event,) = cluster.collectives.ledger
    assert (event.collective, event.payload_bytes, event.wire_bytes) == ("all_gather", expected, 2 * expected)


def test_scales_have_the_precision_of_the_weights() -> None:
    cluster = cluster_of(Tensors((4,), dtype=torch.float64))
    list(play(SparseCommunicator(Fixed([0, 1, 3]), quantization_bits=8), cluster, [[[1.0, 2, 3, 4], [5.0, 6, 7, 8]]]))
    assert [e.payload_bytes for e in cluster.collectives.ledger] == [3 + 8]
    assert cluster.weights.dtype == torch.float64


def test_rows_of_a_larger_matrix_are_all_that_is_touched() -> None:
    whole = Replicas.of(Tensors((4,)), 5, torch.device("cpu"))
    whole.weights.copy_(torch.arange(20.0).view(5, 4))
    before = whole.weights.clone()
    collectives = StackedCollectives(Ledger(2))
    cluster = Cluster(whole.rows(1, 3), collectives, torch.Generator(), torch.ones(2), 100)
    list(play(SparseCommunicator(Fixed([1, 2])), cluster, [0.0]))
    assert torch.equal(whole.weights[[0, 3, 4]], before[[0, 3, 4]])
    assert whole.weights[1:3].tolist() == [[4, 7, 8, 7], [8, 7, 8, 11]]


# Events ----------------------------------------------------------------------------------------------------------

# small_mlp: tensors of 12·16 = 192, 16, 16·5 = 80 and 5 entries; P = 293.


def summary(events: list[Event]) -> list[tuple[int, str, str, float]]:
    return [(e.step, e.collective, e.label, e.payload_bytes) for e in events]


@every_K
def test_the_events_of_sequential_chunks(num_nodes: int) -> None:
    # 4 chunks: 192/4 + 16/4 + 80/4 = 72 entries and of the last tensor 2, 1, 1, 1: 74 or 73 entries of 4 bytes.
    selector = ShuffledSequentialIndexSelector(0.25)
    _, events = fitted(SPARTAStrategy(index_selector=selector), num_nodes)
    assert summary(events) == [
        (t, "all_reduce", "sparse weights", 4 * (74 if t in (1, 5) else 73)) for t in range(1, 7)
    ]
    wire = 2 * (num_nodes - 1) / num_nodes  # of a payload, in a ring
    assert [e.wire_bytes for e in events] == [pytest.approx(wire * e.payload_bytes) for e in events]
    assert all(e.groups == (range(num_nodes),) for e in events)


def test_the_events_of_parts() -> None:
    # 10 parts: 192 = 20 + 20 + 8 · 19, 16 = 6 · 2 + 4 · 1, 80 = 10 · 8; of the last tensor 5 parts of one entry.
    _, events = fitted(SPARTAStrategy(index_selector=PartitionedIndexSelector(0.1), sparta_interval=2))
    assert summary(events) == [
        (2, "all_reduce", "sparse weights", 4 * (20 + 2 + 8 + 1)),
        (4, "all_reduce", "sparse weights", 4 * (20 + 2 + 8 + 1)),
        (6, "all_reduce", "sparse weights", 4 * (19 + 2 + 8 + 1)),
    ]


def test_random_masks_send_p_of_all_bytes_on_average() -> None:
    # Binomial(293, 0.1) · 4 bytes a step: mean 117.2, deviation 4·√26.4 = 20.5; over 300 steps 1.2.
    _, events = fitted(SPARTAStrategy(p_sparta=0.1), max_steps=300)
    assert len(events) == 300
    assert abs(sum(e.payload_bytes for e in events) / 300 - 117.2) < 5 * 1.2


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
    assert torch.equal(weights, fitted(Strategy())[0])


def test_the_payload_of_nominations_and_of_few_bits() -> None:
    # p = 0.02: ⌈3.84⌉ + ⌈0.32⌉ + ⌈1.6⌉ + ⌈0.1⌉ = 4 + 1 + 2 + 1 = 8 indices of 4 bytes from every node; then 8 to 24
    # values of 3 bits and 4 scales of 4 bytes.
    _, events = fitted(SPARTAStrategy(p_sparta=0.02, compression_method="topk", quantization_bits=3))
    assert [e.label for e in events] == ["nominations", "sparse weights"] * 6
    assert all(e.payload_bytes == 32 and e.collective == "all_gather" for e in events[::2])
    assert all(3 + 16 <= e.payload_bytes <= 9 + 16 for e in events[1::2])


def test_the_hybrid_has_an_interval_for_each_part() -> None:
    # At step 6 both, SPARTA first. One of 5 parts: 192 → 39, 39, 38; 16 → 4, 3, 3; 80 → 16; 5 → 1.
    selector = PartitionedIndexSelector(0.2)
    _, events = fitted(SPARTADiLoCoStrategy(index_selector=selector, sparta_interval=2, H=3))
    assert summary(events) == [
        (2, "all_reduce", "sparse weights", 4 * (39 + 4 + 16 + 1)),
        (3, "all_reduce", "outer gradient", 4 * 293),
        (4, "all_reduce", "sparse weights", 4 * (39 + 3 + 16 + 1)),
        (6, "all_reduce", "sparse weights", 4 * (38 + 3 + 16 + 1)),
        (6, "all_reduce", "outer gradient", 4 * 293),
    ]


# Identities ------------------------------------------------------------------------------------------------------


@every_K_and_executor
def test_sharing_everything_is_fedavg(num_nodes: int, executor: str) -> None:
    for interval in (1, 3):
        fedavg, events = fitted(FedAvgStrategy(H=interval, lr=1e-2), num_nodes, executor=executor)
        for which in [{"p_sparta": 1.0}, *({"index_selector": cls(1.0)} for cls in SELECTORS)]:
            sparta = SPARTAStrategy(sparta_interval=interval, lr=1e-2, **which)
            weights, sent = fitted(sparta, num_nodes, executor=executor)
            assert torch.equal(weights, fedavg)
            assert [e.payload_bytes for e in sent] == [e.payload_bytes for e in events]
        topk = SPARTAStrategy(p_sparta=1.0, sparta_interval=interval, compression_method="topk", lr=1e-2)
        assert torch.equal(fitted(topk, num_nodes, executor=executor)[0], fedavg)


@every_K
def test_sharing_nothing_is_training_alone(num_nodes: int) -> None:
    alone, _ = fitted(Strategy(), num_nodes)
    assert torch.equal(fitted(SPARTAStrategy(p_sparta=1e-12), num_nodes)[0], alone)
    assert torch.equal(fitted(SPARTAStrategy(p_sparta=0.5, sparta_interval=7), num_nodes)[0], alone)
    assert torch.equal(
        fitted(SPARTAStrategy(p_sparta=0.5, async_delay=6), num_nodes)[0], alone
    )  # nothing written by then


def test_one_node_trains_alone() -> None:
    alone, _ = fitted(Strategy(), 1)
    for options in ({}, {"mask": "broadcast"}, {"compression_method": "topk"}):
        weights, events = fitted(SPARTAStrategy(p_sparta=0.3, **options), 1)
        assert torch.equal(weights, alone) and all(e.wire_bytes == 0 for e in events)


@every_K
def test_the_hybrid_without_one_part_is_the_other(num_nodes: int) -> None:
    assert torch.equal(
        fitted(SPARTADiLoCoStrategy(p_sparta=1e-12, H=2), num_nodes)[0], fitted(DiLoCoStrategy(H=2), num_nodes)[0]
    )
    assert torch.equal(
        fitted(SPARTADiLoCoStrategy(p_sparta=0.1), num_nodes)[0], fitted(SPARTAStrategy(p_sparta=0.1), num_nodes)[0]
    )


def test_the_hybrids_are_compositions() -> None:
    for sparse, outer, options, parts in [
        ({}, {"H": 3}, {}, {"sparsification_rate": 0.1, "every": 2}),
        ({"async_delay": 1}, {"H": 2, "outer_lr": 0.5}, {"lr": 1e-2}, {"sparsification_rate": 0.1, "every": 2}),
    ]:
        hybrid = fitted(SPARTADiLoCoStrategy(p_sparta=0.1, sparta_interval=2, **sparse, **outer, **options))
        modules = [SparseCommunicator(**parts, **sparse), DiLoCoCommunicator(**outer)]
        composed = fitted(CommunicateOptimizeStrategy(modules, **options))
        assert torch.equal(hybrid[0], composed[0]) and hybrid[1] == composed[1]
    alone = fitted(CommunicateOptimizeStrategy([SparseCommunicator(RandomIndexSelector(0.1))]))
    sparta = fitted(SPARTAStrategy(p_sparta=0.1))
    assert torch.equal(alone[0], sparta[0]) and alone[1] == sparta[1]
    assert torch.equal(fitted(SPARTAStrategy())[0], fitted(SPARTAStrategy(p_sparta=0.005))[0])


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


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize(("num_nodes", "interval", "delay"), [(2, 1, 0), (3, 2, 1), (5, 1, 3)])
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
        OptimSpec("adamw", lr=1e-2), sparta_interval=interval, index_selector=EveryThird(1 / 3), async_delay=delay
    )
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=7, batch_size=5, progress=False, deterministic=True)
    assert trainer.strategy is not None
    assert torch.equal(trainer.strategy.cluster.weights, separate.weights)


# As a strategy ---------------------------------------------------------------------------------------------------


CASES: dict[str, Any] = {
    "default": lambda: SPARTAStrategy(),
    "partitioned": lambda: SPARTAStrategy(index_selector=PartitionedIndexSelector(0.3), async_delay=2),
    "sequential": lambda: SPARTAStrategy(index_selector=ShuffledSequentialIndexSelector(0.1), quantization_bits=8),
    "topk": lambda: SPARTAStrategy(p_sparta=0.1, compression_method="topk"),
    "hybrid": lambda: SPARTADiLoCoStrategy(p_sparta=0.1, H=2),
}
every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_executors_agree(case: str) -> None:
    # What is quantized or ranked may round to the other side: those are compared where that is unlikely, in few steps.
    strategy = CASES[case]()
    strategy.optim_spec = ADAMW
    loop, events = fitted(strategy, executor="loop", max_steps=3)
    vmap, same = fitted(strategy, executor="vmap", max_steps=3)
    torch.testing.assert_close(loop, vmap, rtol=1e-4, atol=1e-5)
    assert events == same


@every_case
def test_state_is_not_shared_between_clusters(case: str) -> None:
    # Two runs that alternate, each on its own copy, as if they ran one after the other.
    marks: list[Tensor] = []

    def interrupt(step: int, loss: float) -> None:
        if step == 3:
            marks.append(fitted(strategy)[0])

    strategy = CASES[case]()
    outer, _ = fitted(strategy, train_loss_hook=interrupt)
    assert torch.equal(outer, marks[0]) and torch.equal(outer, fitted(strategy)[0])


def test_the_global_model_is_the_mean_replica_or_the_outer_copy() -> None:
    for strategy in (SPARTAStrategy(p_sparta=0.3), SPARTADiLoCoStrategy(p_sparta=0.3, H=4)):
        trainer = Trainer(small_mlp(), vectors())
        trainer.fit(strategy=strategy, num_nodes=3, max_steps=6, batch_size=5, progress=False)
        assert trainer.strategy is not None
        mean = trainer.strategy.cluster.weights.mean(0)
        assert torch.equal(trainer.strategy.global_weights(), mean) == isinstance(strategy, SPARTAStrategy)
