"""Averages against their definitions in NumPy, their properties, and what they do at each place that averages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from driven import Parameters, driven, driven_apart, normal, size, started
from errors import refused
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import Tensor, nn

import vsim
from vsim.cli import parse_strategy
from vsim.models import GPT
from vsim.strategy import (
    RULES,
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    Rule,
    SimpleReduceStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
    TopK,
    clip,
    compress,
    edit,
    geometric_median,
    iso,
    krum,
    mean,
    median,
    rda,
    ties,
    trimmed_mean,
    tsv,
)
from vsim.strategy.average import RDA, TIES, Krum, average_of

Rows = NDArray[np.float64]


# The definitions -----------------------------------------------------------------------------------------------------


def trimmed(rows: Rows, share: float) -> Rows:
    n = len(rows)
    cut = next(c for c in range(n) if c >= share * n - 1e-9 or n - 2 * (c + 1) < 1)
    return np.sort(rows, axis=0)[cut : n - cut].mean(0)


def scores(rows: Rows, faulty: int) -> list[float]:
    """Krum's, of every row: the sum of squared distances to its nearest others."""
    found = []
    for i, row in enumerate(rows):
        others = sorted(float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i)
        found.append(sum(others[: max(1, len(rows) - faulty - 2)]))
    return found


def length_and_direction(rows: Rows, weights: Rows | None = None) -> Rows:
    weights = np.full(len(rows), 1 / len(rows)) if weights is None else weights
    lengths = [float(np.sqrt((row**2).sum())) for row in rows]
    direction = sum(w * row / (length or 1) for w, row, length in zip(weights, rows, lengths, strict=True))
    norm = np.sqrt((direction**2).sum())
    return float(weights @ lengths) * (direction / norm if norm else direction)


def flat_spectrum(rows: Rows) -> Rows:
    mean = rows.mean(0)
    if mean.ndim < 2:
        return mean
    u, s, v = np.linalg.svd(mean.reshape(len(mean), -1), full_matrices=False)
    return (s.mean() * u @ v).reshape(mean.shape)


def elected(rows: Rows) -> Rows:
    flat, kept = rows.reshape(len(rows), -1), np.zeros_like(rows.reshape(len(rows), -1))
    for own, target in zip(flat, kept, strict=True):
        largest = sorted(range(len(own)), key=lambda i: -abs(own[i]))[: math.ceil(0.5 * len(own))]
        target[largest] = own[largest]
    found = np.zeros(flat.shape[1])
    for i, column in enumerate(kept.T):
        agreeing = [x for x in column if x and np.sign(x) == np.sign(column.sum())]
        found[i] = np.mean(agreeing) if agreeing else 0
    return found.reshape(rows.shape[1:])


def by_norms(rows: Rows) -> Rows:
    norms = np.sqrt((rows.reshape(len(rows), -1) ** 2).sum(1))
    shares = np.exp(-(norms - norms.min()) / 2.0)
    return np.tensordot(shares / shares.sum(), rows, axes=1)


def weiszfeld(rows: Rows) -> Rows:
    center = rows.mean(0)
    for _ in range(3):
        near = [1 / max(1e-6, float(np.sqrt(((row - center) ** 2).sum()))) for row in rows]
        center = np.tensordot(np.array(near) / sum(near), rows, axes=1)
    return center


REFERENCES: dict[str, tuple[Rule, Callable[[Rows], Rows]]] = {
    "mean": (mean(), lambda rows: rows.mean(0)),
    "median": (median(), lambda rows: np.median(rows, axis=0)),
    "trimmed by a fifth": (trimmed_mean(), lambda rows: trimmed(rows, 0.2)),
    "trimmed by 2 of 7": (trimmed_mean(2 / 7), lambda rows: trimmed(rows, 2 / 7)),
    "geometric median": (geometric_median(3), weiszfeld),
    "rda": (rda(), length_and_direction),
    "iso": (iso(), flat_spectrum),
    "ties": (ties(0.5), elected),
    "edit": (edit(2.0), by_norms),
}
ALL = [*(merger for merger, _ in REFERENCES.values()), krum(), krum(2)]
every_merger = pytest.mark.parametrize("merger", ALL, ids=repr)


def stacked(shape: st.SearchStrategy[tuple[int, ...]], largest: int = 1000) -> st.SearchStrategy[Rows]:
    """Stacked rows whose entries float32 has exactly, in steps large enough for lengths to be far from 0 or 0."""
    steps = st.integers(-largest * 8, largest * 8).map(lambda i: i / 8)
    return shape.flatmap(lambda own: arrays(np.float64, own, elements=steps))


vectors = stacked(st.tuples(st.integers(1, 8), st.integers(1, 5)))
tensors = stacked(st.lists(st.integers(1, 4), min_size=1, max_size=3).flatmap(lambda s: st.just((5, *s))))


def merged(merger: Rule, rows: Rows, weights: Rows | None = None) -> Rows:
    given = torch.from_numpy(rows).float()
    return merger(given, None if weights is None else torch.from_numpy(weights).float()).double().numpy()


def assert_close(result: Rows, expected: Rows, rows: Rows, rtol: float = 2e-5) -> None:
    np.testing.assert_allclose(result, expected, rtol=rtol, atol=rtol * float(np.abs(rows).max(initial=0)))


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=30)
@given(rows=st.one_of(vectors, tensors))
def test_the_definition(name: str, rows: Rows) -> None:
    merger, reference = REFERENCES[name]
    if name == "rda":  # nearly opposite directions cancel, and rounding decides
        assume(np.abs(expected := length_and_direction(rows)).max() == 0 or well_defined(rows))
        assert_close(merged(merger, rows), expected, rows, 1e-3)
    elif name == "iso":  # singular vectors of equal or vanishing values are any
        mean = rows.mean(0)
        matrix = mean.reshape(len(mean), -1) if mean.ndim > 1 else mean[None]
        spectrum = np.linalg.svd(matrix, compute_uv=False)
        assume(mean.ndim < 2 or spectrum.min() > 1e-2 * spectrum.max())
        assert_close(merged(merger, rows), reference(rows), rows, 1e-3)
    elif name == "ties":  # of equal magnitudes any is kept
        rows = rows + np.arange(rows.size).reshape(rows.shape) / 4096
        assert_close(merged(merger, rows), reference(rows), rows)
    else:
        assert_close(merged(merger, rows), reference(rows), rows)


def well_defined(rows: Rows) -> bool:
    units = [row / (np.sqrt((row**2).sum()) or 1) for row in rows]
    return bool(np.sqrt((np.mean(units, axis=0) ** 2).sum()) > 1e-2)


@settings(max_examples=30)
@given(vectors, st.integers(0, 2))
def test_krum_is_a_row_with_the_least_score(rows: Rows, faulty: int) -> None:
    if len(rows) < 2 * faulty + 3:
        with pytest.raises(ValueError, match=f"at least .* = {2 * faulty + 3} nodes, got {len(rows)}"):
            merged(krum(faulty), rows)
        return
    result, own = merged(krum(faulty), rows), scores(rows, faulty)
    best = [row for row, score in zip(rows, own, strict=True) if score <= min(own) * (1 + 1e-5)]
    assert any((result == row).all() for row in best)


# Properties ----------------------------------------------------------------------------------------------------------


@every_merger
@settings(max_examples=30)
@given(data=st.data())
def test_the_order_of_the_nodes_is_nothing(merger: Rule, data: st.DataObject) -> None:
    least = 2 * merger.faulty + 3 if isinstance(merger, Krum) else 1
    rows = data.draw(stacked(st.tuples(st.integers(least, 8), st.integers(1, 5))))
    if isinstance(merger, TIES):
        rows = rows + np.arange(rows.size).reshape(rows.shape) / 4096
    other = rows[data.draw(st.permutations(range(len(rows))))]
    if isinstance(merger, Krum):
        own = sorted(scores(rows, merger.faulty))
        assume(len(own) < 2 or own[1] > own[0] * (1 + 1e-5))  # else the first in order
    if isinstance(merger, RDA):
        assume(well_defined(rows))
    assert_close(merged(merger, other), merged(merger, rows), rows, 1e-3)


@every_merger
@settings(max_examples=30)
@given(row=stacked(st.tuples(st.just(1), st.integers(1, 5))), n=st.integers(1, 7))
def test_equal_vectors_give_the_vector(merger: Rule, row: Rows, n: int) -> None:
    n += 2 * merger.faulty + 2 if isinstance(merger, Krum) else 0
    row = row[:, :1] if isinstance(merger, TIES) else row  # of which small entries are lost
    assert_close(merged(merger, row.repeat(n, axis=0)), row[0], row)


@pytest.mark.parametrize("merger", [median(), trimmed_mean(), trimmed_mean(0.4), krum()], ids=repr)
@settings(max_examples=30)
@given(rows=vectors)
def test_no_entry_is_beyond_those_of_all_nodes(merger: Rule, rows: Rows) -> None:
    rows = rows.repeat(5, axis=0) if isinstance(merger, Krum) else rows
    result, slack = merged(merger, rows), 1e-6 * np.abs(rows).max()
    assert (rows.min(0) - slack <= result).all() and (result <= rows.max(0) + slack).all()


@pytest.mark.parametrize("merger", [median(), trimmed_mean(2 / 7), krum(2)], ids=repr)
@settings(max_examples=30)
@given(data=st.data())
def test_two_of_seven_cannot_move_it_beyond_the_others(merger: Rule, data: st.DataObject) -> None:
    rows = data.draw(stacked(st.tuples(st.just(7), st.integers(1, 4)), largest=10))
    places = data.draw(st.permutations(range(7)))[:2]
    huge = st.floats(1e5, 1e30).flatmap(lambda x: st.sampled_from([x, -x]))
    for place in places:
        rows[place] = data.draw(arrays(np.float64, rows.shape[1], elements=huge))
    result, honest = merged(merger, rows), np.delete(rows, places, axis=0)
    assert (honest.min(0) - 1e-5 <= result).all() and (result <= honest.max(0) + 1e-5).all()


@pytest.mark.parametrize("merger", [median(), trimmed_mean(2 / 7), krum(2)], ids=repr)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_loses(merger: Rule, value: float) -> None:
    rows = torch.arange(7.0)[:, None].repeat(1, 3)
    rows[1, 2], rows[4] = value, value
    result = merger(rows)
    assert result.isfinite().all() and 0 <= float(result[0]) <= 6
    assert torch.equal(merger(rows), result)
    if not isinstance(merger, Krum):
        assert torch.equal(result, merger(rows[[0, 2, 3, 5, 6]]))


@pytest.mark.parametrize("merger", [mean(), rda(), iso()], ids=repr)
@settings(max_examples=30)
@given(rows=vectors, data=st.data())
def test_weights_are_so_many_equal_nodes(merger: Rule, rows: Rows, data: st.DataObject) -> None:
    counts = np.array(data.draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows))))
    assume(not isinstance(merger, RDA) or well_defined(rows.repeat(counts, axis=0)))
    weighted = merged(merger, rows, counts / counts.sum())
    assert_close(weighted, merged(merger, rows.repeat(counts, axis=0)), rows, 1e-3)


def test_by_hand() -> None:
    # Both of length 2, the mean direction (1, 1)/√2.
    half = math.sqrt(2)
    assert rda()(torch.tensor([[2.0, 0.0], [0.0, 2.0]])).tolist() == pytest.approx([half, half])
    assert rda()(torch.tensor([[3.0, -4.0], [-3.0, 4.0]])).tolist() == [0, 0]
    # Singular values 3 and 1 of (±) the unit vectors become 2.
    assert iso()(torch.diag(torch.tensor([3.0, -1.0]))[None]).tolist() == [[2, 0], [0, -2]]
    # The scores of 1 nearest other are 4, 1, 1, 49; of two 4 + 9, 4 + 1, 1 + 9, 49 + 64.
    rows = torch.tensor([[0.0], [2.0], [3.0], [10.0]])
    assert krum(0)(rows).tolist() == [2]
    # Of five with f = 1 two neighbours count: 1 + 4, 1 + 1, 1 + 4, 36 + 49, 81 + 144.
    assert krum(1)(torch.tensor([[1.0], [2.0], [3.0], [9.0], [-9.0]])).tolist() == [2]
    # Norms 1 and 2: softmax(−1, −2) = 0.731, 0.269.
    assert edit()(torch.tensor([[1.0], [-2.0]])).tolist() == pytest.approx([0.73106 - 2 * 0.26894], abs=1e-4)
    # Largest halves (4, 0) and (0, −3), (2, 0): 4 and 2 agree, −3 is alone.
    assert ties(0.5)(torch.tensor([[4.0, 1.0], [-1.0, -3.0], [2.0, 1.0]])).tolist() == [3, -3]
    # A sum of 0 has no sign.
    assert ties(1.0)(torch.tensor([[4.0, 1.0], [-4.0, 3.0]])).tolist() == [0, 2]
    # Of two nodes each sends one of two singular parts, here orthogonal ones: nothing is lost.
    parts = torch.stack([torch.diag(torch.tensor([3.0, 0.0])), torch.diag(torch.tensor([0.0, 2.0]))])
    torch.testing.assert_close(tsv()(parts), torch.diag(torch.tensor([3.0, 2.0])))
    torch.testing.assert_close(tsv()(parts[:1]), parts[0])
    # Each of three nodes sends one of two. The vectors e₁, e₂, e₁ become e₁/√2, e₂, e₁/√2: (3 + 1) / 2 and 2.
    more = torch.cat([parts, torch.diag(torch.tensor([1.0, 0.0]))[None]])
    torch.testing.assert_close(tsv()(more), 2 * torch.eye(2))
    assert median()(rows).tolist() == [2.5]
    # ⌈0.2 · 4⌉ = 1 on each side; of two nodes none.
    assert trimmed_mean(0.2)(rows).tolist() == [2.5] and trimmed_mean(0.2)(rows[2:]).tolist() == [6.5]


# The places that average ---------------------------------------------------------------------------------------------


def stepped(strategy: Strategy, *gradients: float, steps: int = 1) -> Any:
    """One weight that starts at 0, on nodes with these gradients."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1))
    return driven(strategy, model, torch.tensor(gradients)[None, :, None].repeat(steps, 1, 1))


PLAIN: dict[str, Any] = {"optim_spec": "sgd", "lr": 1.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4),
        ({"average": "median"}, 2),
        ({"average": median}, 2),
        ({"average": trimmed_mean(0.3)}, 2),
        ({"average": krum(0)}, 1),  # 1 and 2 are as near to each other, and 1 is first
        ({"average": "rda"}, 4),  # all in one direction
        ({"average": lambda rows, weights: rows.amax(0)}, 9),
        ({"average": clip("median")}, (1 + 2 + 2) / 3),
        ({"average": clip(1.5)}, (1 + 1.5 + 1.5) / 3),
        ({"average": median() | clip("median")}, 2),
        ({"average": clip("median"), "max_norm": 1.0}, 1),  # of what comes out
    ],
)
def test_gradients_by_hand(options: dict[str, Any], expected: float) -> None:
    run = stepped(SimpleReduceStrategy(**PLAIN, **options), 1.0, 2.0, 9.0)
    assert -run.cluster.weights.flatten() == pytest.approx([expected] * 3)
    average = average_of(options.get("average", "mean"), "here")
    sent = [("all_gather", "gradients: norms")] * (average.limit == clip("median"))
    sent.append(("all_gather" if average.rule.needs_rows else "all_reduce", "gradients"))
    assert [(e.collective, e.label, e.payload_bytes) for e in run.ledger] == [(*one, 4) for one in sent]


def test_weights_in_islands_by_hand() -> None:
    # After a step θ_k = −g_k. Of five nodes three are an island, then the other two, as the generator's seed has it.
    run = stepped(FedAvgStrategy(H=1, island_size=3, average="median", **PLAIN), 1.0, 2.0, 4.0, 8.0, 16.0)
    (event,) = run.ledger
    assert event.collective == "all_gather" and sorted(map(len, event.groups)) == [2, 3]
    for island in event.groups:
        expected = -float(np.median([2.0**node for node in island]))
        assert run.cluster.weights[list(island), 0].tolist() == [expected] * len(island)
    # All gather what all hold: 2 and 1 others of 4 bytes.
    assert run.ledger.total_wire_bytes == 3 * 2 * 4 + 2 * 1 * 4


def wilted(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows.mean(0) / 2


def test_a_rule_of_ones_own_gets_weights() -> None:
    seen = []

    class Own(Rule):
        by = "examples"

        def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
            seen.append(weights)
            assert weights is not None
            return weights @ rows

    run = started(FedAvgStrategy(average=Own, **PLAIN), Parameters((2,)), 3)
    run.cluster.shard_sizes[:] = torch.tensor([1.0, 1.0, 2.0])
    before = run.cluster.weights.clone()
    after = run.step(torch.tensor([[1.0], [2.0], [4.0]]).expand(3, 2))
    assert seen[0].tolist() == [0.25, 0.25, 0.5]
    assert repr(average_of(wilted, "here")) == "wilted"
    torch.testing.assert_close(after, before - 2.75)


OUTER = {"outer_optim": OptimSpec("sgd", lr=1.0)}


@pytest.mark.parametrize(
    "strategy",
    [
        FedAvgStrategy(H=2, average=mean("examples"), **PLAIN),
        DiLoCoStrategy(H=2, average=mean("examples"), **OUTER, **PLAIN),
        DiLoCoStrategy(H=2, average=mean("examples") | clip(9.0), **OUTER, **PLAIN),
        StreamingDiLoCoStrategy(H=2, average=mean("examples"), fragments=1, delay=1, **OUTER, **PLAIN),
    ],
    ids=["FedAvg", "DiLoCo", "clipped", "streaming"],
)
def test_weighting_by_examples_by_hand(strategy: Strategy) -> None:
    # The gradient is w / Σx, the rate 1. Client 0 has 3 examples, in batches with Σx = 10 and 4: what remains of w is
    # 0.9 · 0.75 = 0.675. Client 1 has 2, in one batch with Σx = 18: 17/18. (3 · 0.675 + 2 · 17/18) / 5 = 0.78278.
    model = Parameters((3,))
    model.p0.data = torch.tensor([0.0, 2.0, 4.0])
    run = started(strategy, model, 2)
    run.cluster.shard_sizes[:] = torch.tensor([3.0, 2.0])
    run.step(run.cluster.weights / torch.tensor([[10.0], [18.0]]))
    after = run.step(run.cluster.weights / torch.tensor([[4.0], [torch.inf]]))
    if isinstance(strategy, StreamingDiLoCoStrategy):  # what was sent is due a step later
        torch.testing.assert_close(after, torch.tensor([[0.0, 1.35, 2.7], [0.0, 1.888889, 3.777778]]))
        after = run.step(torch.zeros(2, 3))
    torch.testing.assert_close(after, torch.tensor([0.0, 1.565556, 3.131111]).expand(2, 3))


@pytest.mark.parametrize(
    ("options", "expected", "sent"),
    [
        ({}, 4 * 2, ["outer gradient"]),
        ({"average": "median"}, 2 * 2, ["outer gradient"]),
        ({"average": krum(0)}, 1 * 2, ["outer gradient"]),
        ({"average": clip(3.0)}, (2 + 3 + 3) / 3, ["outer gradient"]),
        ({"average": clip("median")}, (2 + 4 + 4) / 3, ["outer gradient: norms", "outer gradient"]),
        (
            {"average": clip("median") | compress(TopK(1.0))},
            (2 + 4 + 4) / 3,
            ["outer gradient: norms", "outer gradient"],
        ),
    ],
)
def test_outer_gradients_by_hand(options: dict[str, Any], expected: float, sent: list[str]) -> None:
    # After two steps φ − θ_k = 2 g_k, and the outer step goes that far.
    strategy = DiLoCoStrategy(H=2, outer_optim=OptimSpec("sgd", lr=1.0), **PLAIN, **options)
    run = stepped(strategy, 1.0, 2.0, 9.0, steps=2)
    assert -run.cluster.weights.flatten() == pytest.approx([expected] * 3)
    assert [e.label for e in run.ledger] == sent


@pytest.mark.parametrize(
    ("options", "expected", "sent"),
    [
        ({"average": clip(3.0)}, (2 + 3 + 3) / 3, ["weights"]),
        ({"average": rda() | clip("median")}, (2 + 4 + 4) / 3, ["weights: norms", "weights"]),
        ({"average": mean("examples") | clip(3.0)}, (2 + 3 + 2 * 3) / 4, ["weights"]),
    ],
)
def test_fedavg_clips_what_a_node_has_moved_in_a_round(
    options: dict[str, Any], expected: float, sent: list[str]
) -> None:
    # After two steps a node has moved by 2 g_k; and so again in the second round.
    run = started(FedAvgStrategy(H=2, **PLAIN, **options), Parameters((1,)), 3)
    run.cluster.shard_sizes = torch.tensor([1.0, 1.0, 2.0])
    before = run.cluster.weights.clone()
    for _ in range(4):
        after = run.step(torch.tensor([[1.0], [2.0], [9.0]]))
    torch.testing.assert_close(before - after, torch.full((3, 1), 2 * expected))
    assert [e.label for e in run.ledger] == 2 * sent


def test_embeddings_take_the_mean() -> None:
    gpt = GPT(7, block_size=4, layers=1, width=8, heads=2)
    gradients = normal(1, 3, size(gpt), seed=1)
    plain, by_tensor = (driven(SimpleReduceStrategy(average=m, **PLAIN), gpt, gradients) for m in ("mean", "rda"))
    replicas = plain.cluster.replicas
    assert replicas.embeddings == {"tokens.weight", "positions.weight"}
    both = (replicas.views(run.cluster.replicas.weights[0]) for run in (plain, by_tensor))
    for (name, ours), theirs in zip(next(both).items(), next(both).values(), strict=True):
        assert torch.equal(ours, theirs) == (name in replicas.embeddings), name


@pytest.mark.parametrize("num_nodes", [2, 3, 5])
@pytest.mark.parametrize("merger", ALL, ids=repr)
def test_nodes_apart_have_the_bits_of_nodes_together(merger: Rule, num_nodes: int) -> None:
    if isinstance(merger, Krum):
        num_nodes += 2 * merger.faulty + 1  # so that 2 become the fewest that it takes
    model = Parameters((5, 3), (7,), (), (4, 2, 3))
    gradients = normal(3, num_nodes, size(model))
    both: dict[str, Any] = {"average": merger | clip("median"), "lr": 0.1}
    parts = [["p0", "p3"], ["p1", "p2"]]
    strategies: list[Strategy] = [
        SimpleReduceStrategy(**both),
        StreamingDiLoCoStrategy(H=2, fragments=parts, delay=1, **both),
    ]
    if not merger.of_moves and not isinstance(merger, Krum):  # which islands of two are too small for
        strategies.append(FedAvgStrategy(lr=0.1, H=2, island_size=2, average=merger))
    for strategy in strategies:
        together = driven(strategy, model, gradients, deterministic=True)
        for rank, alone in enumerate(driven_apart(strategy, model, gradients)):
            assert torch.equal(alone.cluster.weights[0], together.cluster.weights[rank])
            assert alone.ledger[:] == together.ledger[:]


def test_every_merger_can_be_priced() -> None:
    # 100 × 100 parameters of 4 bytes: an all-reduce of 8 nodes transmits 2 · 7/8 of them, an all-gather 7 times.
    for name in RULES:
        priced = vsim.price(
            SimpleReduceStrategy(average=RULES[name]() | clip("median")),
            parameters=10_000,
            num_nodes=8,
            max_steps=1,
            network="1 Gbit/s",
            compute=1.0,
        )
        norms = 7 * 4 * (2 if name == "edit" else 1)
        gradients = (1.75 if name in ("mean", "iso", "edit") else 7) * 40_000
        assert priced.seconds[-1] == pytest.approx(1 + (norms + gradients) * 8 / 1e9), name


# What is given -------------------------------------------------------------------------------------------------------


def test_on_the_command_line_and_in_sweeps() -> None:
    strategy = parse_strategy("fedavg:average=krum(faulty=2)", lr=1e-3)
    assert repr(vars(strategy.communication_modules[0])["average"]) == "krum(faulty=2)"
    strategy = parse_strategy("allreduce:average=median() | clip('median')", lr=1e-3)
    assert repr(vars(strategy.communication_modules[0])["average"]) == "median() | clip(norm='median')"
    names = vsim.grid(FedAvgStrategy, H=5, average=["mean", trimmed_mean(0.1), trimmed_mean(0.3), krum])
    assert [name.partition("average=")[2] for name in names] == [
        "mean",
        "trimmed_mean(share=0.1)",
        "trimmed_mean(share=0.3)",
        "krum",
    ]


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: FedAvgStrategy(average="medain"), ValueError, "average … medain … did you mean 'median'"),
        (lambda: FedAvgStrategy(average=3), TypeError, "FedAvg … average … function … 3"),  # type: ignore[arg-type]
        (lambda: FedAvgStrategy(average="rda", island_size=2), ValueError, "FedAvg … average=rda"),
        (lambda: FedAvgStrategy(average=clip(1.0), island_size=2), ValueError, "FedAvg … clip"),
        (lambda: mean("example"), ValueError, "by … did you mean 'examples'"),
        (lambda: DiLoCoStrategy(average=mean("tokens")), ValueError, "'tokens'"),
        (lambda: median() | compress(TopK(0.1)), TypeError, "median() | compress … plain mean"),
        (lambda: mean("examples") | compress(TopK(0.1)), TypeError, "plain mean"),
        (lambda: mean() | median(), TypeError, "one of each … median"),
        (lambda: clip(1.0) | clip(2.0), TypeError, "one of each"),
        (lambda: mean() | 3, TypeError, "| … 3"),  # type: ignore[operator]
        (lambda: AsyncDiLoCoStrategy(average=compress(TopK(0.1))), ValueError, "one by one"),
        (lambda: trimmed_mean(0.6), ValueError, "share … > 0 and <= 0.5 … 0.6"),
        (lambda: krum(-1), ValueError, "faulty … >= 0 … -1"),
        (lambda: clip("mean"), ValueError, "clip … norm … 'median' … 'mean'"),
        (lambda: clip(0), ValueError, "clip … norm … > 0 … 0"),
        (lambda: started(FedAvgStrategy(average=krum(1)), Parameters((2,)), 4), ValueError, "5 nodes … 4"),
    ],
)
def test_refused(make: Callable[[], object], error: type[Exception], said: str) -> None:
    with refused(error, said):
        make()


def test_gradients_are_kept_where_their_mean_is_not_enough() -> None:
    shared = {"mean": True, "iso": True, "krum": False, mean("examples"): False, clip(1.0): False}
    for average, expected in shared.items():
        assert SimpleReduceStrategy(average=average).shares_grads == expected
    assert SimpleReduceStrategy(average="median", inner_optim=OptimSpec("sgd")).shares_weights
