"""Averages against their definitions in NumPy, their properties, and what they do at each place that averages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from strategies_by_hand import Parameters, driven, normal, same_apart, size, started
from torch import Tensor, nn

from vsim.cli import parse_strategy
from vsim.core.average import robust
from vsim.models import GPT
from vsim.strategy import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    Rule,
    SimpleReduceStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
    TopK,
    centered_clip,
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
from vsim.strategy.average import (
    RDA,
    CenteredClip,
    Edit,
    GeometricMedian,
    Krum,
    Median,
    TrimmedMean,
    average_of,
)

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


def length_and_direction(rows: Rows) -> Rows:
    lengths = np.sqrt((rows.reshape(len(rows), -1) ** 2).sum(1))
    direction = sum(row / (length or 1) for row, length in zip(rows, lengths, strict=True)) / len(rows)
    norm = np.sqrt((direction**2).sum())
    return lengths.mean() * (direction / norm if norm else direction)


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


def by_norms(rows: Rows, temperature: float = 2.0) -> Rows:
    norms = np.sqrt((rows.reshape(len(rows), -1) ** 2).sum(1))
    shares = np.exp(-(norms - norms.min()) / temperature)
    return np.tensordot(shares / shares.sum(), rows, axes=1)


def weiszfeld(rows: Rows) -> Rows:
    center = np.median(rows, axis=0)
    distance = np.sort(np.abs(rows - center).reshape(len(rows), -1).max(1))[(len(rows) - 1) // 2]
    for _ in range(3):
        near = [1 / max(1e-6 * distance, 1e-30, float(np.sqrt(((row - center) ** 2).sum()))) for row in rows]
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
ALL = [*(merger for merger, _ in REFERENCES.values()), tsv(), krum(2)]


def stacked(shape: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[Rows]:
    """Stacked rows whose entries float32 has exactly, in steps large enough for lengths to be far from 0 or 0."""
    steps = st.integers(-8000, 8000).map(lambda i: i / 8)
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


# Every rule that tolerates arbitrary vectors: class → (n → the most faulty ones of n, (n, faulty) → the rule).
ROBUST: dict[type[Rule], tuple[Callable[[int], int], Callable[[int, int], Rule]]] = {
    Median: (lambda n: (n - 1) // 2, lambda n, faulty: median()),
    TrimmedMean: (lambda n: (n - 1) // 2, lambda n, faulty: trimmed_mean(max(faulty, 1) / n)),
    Krum: (lambda n: (n - 3) // 2, lambda n, faulty: krum(faulty)),
    GeometricMedian: (lambda n: (n - 1) // 2, lambda n, faulty: geometric_median(8 if 3 < n >= 2.5 * faulty else 20)),
    CenteredClip: (lambda n: (n - 1) // 2, lambda n, faulty: centered_clip(RADIUS, 40)),
    Edit: (lambda n: n - 1, lambda n, faulty: edit()),
}
RADIUS = 30.0  # about twice the distances of honest vectors from their mean
FAR = [1e10, -1e19, 3e38, math.inf, -math.inf, math.nan]


def faulty_vectors(value: float, faulty: int, dtype: torch.dtype) -> list[Tensor]:
    """Vectors (faulty, 200) of this size: equal ones, of both signs, with a single large entry; one of each value."""
    signs = normal(faulty, 200).sign()
    single = normal(faulty, 200)
    single[:, 7] = value
    mixed = torch.tensor(FAR)[torch.arange(faulty) % len(FAR), None].expand(faulty, 200)
    return [rows.to(dtype) for rows in (torch.full((faulty, 200), value), signs * value, single, mixed)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("kind", ROBUST)
def test_faulty_vectors_do_not_move_a_robust_rule_far(kind: type[Rule], dtype: torch.dtype) -> None:
    most, make = ROBUST[kind]
    rounding = 20 * torch.finfo(dtype).eps
    for n, value in itertools.product((3, 4, 7, 10), FAR):
        for faulty in {*range(1, most(n) + 1, 2), most(n)} - {0}:
            honest = (0.5 + normal(n, 200))[faulty:].to(dtype)
            exact, center = honest.double(), honest.double().mean(0)
            spread = (exact - center).norm(dim=1).max()
            for bad in faulty_vectors(value, faulty, dtype):
                rows, rule = torch.cat([bad, honest]), make(n, faulty)
                if isinstance(rule, CenteredClip):
                    rule.center = torch.zeros(200, dtype=dtype)
                given = rows.clone()
                result = rule(rows)
                assert result.dtype == dtype and result.isfinite().all() and torch.equal(bits(rows), bits(given))
                away = (result.double() - center).norm()
                if isinstance(rule, TrimmedMean):
                    assert (result >= honest.amin(0)).all() and (result <= honest.amax(0)).all()
                elif isinstance(rule, Krum):
                    assert (rows == result).all(1).any()
                    assert away <= spread * (1 + rounding)
                elif isinstance(rule, GeometricMedian):
                    limit = limit_of_weiszfeld(rows)
                    assert (result.double() - limit).norm() <= spread * (0.01 + rounding)
                elif isinstance(rule, CenteredClip):
                    assert away <= RADIUS * faulty / (n - faulty) + spread * rounding + 0.1
                else:
                    expected = by_norms(exact.numpy(), 1.0)
                    torch.testing.assert_close(result.double().numpy(), expected, atol=rounding, rtol=rounding)


def bits(rows: Tensor) -> Tensor:
    return rows.view({4: torch.int32, 2: torch.int16}[rows.element_size()])


def limit_of_weiszfeld(rows: Tensor) -> Tensor:
    """The geometric median of the finite rows, in float64, where the squares of 3e38 do not overflow."""
    finite = rows[rows.isfinite().all(1)].double()
    center = finite.median(0).values
    for _ in range(100):
        away = finite - center
        lengths = away.norm(dim=1, keepdim=True).clamp(min=1e-9)
        center = center + (away / lengths).sum(0) / (1 / lengths).sum()
    return center


def test_every_rule_of_the_room_is_robust() -> None:
    found = {cls for cls in vars(robust).values() if isinstance(cls, type) and issubclass(cls, Rule)} - {Rule}
    assert found == ROBUST.keys() - {Edit}


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e30])
def test_a_geometric_median_has_no_scale(size: float) -> None:
    rows = normal(5, 50)
    rows[0] = 1e4
    torch.testing.assert_close(geometric_median()(rows * size) / size, geometric_median()(rows))


def test_a_geometric_median_of_equal_vectors() -> None:
    rows = torch.full((5, 3), 2.0)
    rows[:2] = torch.tensor([[3e38], [-5.0]])
    assert torch.equal(geometric_median()(rows), rows[2])
    assert torch.equal(geometric_median()(torch.zeros(4, 3)), torch.zeros(3))


@pytest.mark.parametrize("merger", [mean(), rda(), iso()], ids=repr)
@settings(max_examples=30)
@given(rows=vectors, data=st.data())
def test_weights_are_so_many_equal_nodes(merger: Rule, rows: Rows, data: st.DataObject) -> None:
    counts = np.array(data.draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows))))
    assume(not isinstance(merger, RDA) or well_defined(rows.repeat(counts, axis=0)))
    weighted = merged(merger, rows, counts / counts.sum())
    assert_close(weighted, merged(merger, rows.repeat(counts, axis=0)), rows, 1e-3)


def test_singular_vectors_of_tasks_by_hand() -> None:
    # Of two nodes each sends one of two singular parts, here orthogonal ones: nothing is lost.
    parts = torch.stack([torch.diag(torch.tensor([3.0, 0.0])), torch.diag(torch.tensor([0.0, 2.0]))])
    torch.testing.assert_close(tsv()(parts), torch.diag(torch.tensor([3.0, 2.0])))
    torch.testing.assert_close(tsv()(parts[:1]), parts[0])
    # Each of three nodes sends one of two. The vectors e₁, e₂, e₁ become e₁/√2, e₂, e₁/√2: (3 + 1) / 2 and 2.
    more = torch.cat([parts, torch.diag(torch.tensor([1.0, 0.0]))[None]])
    torch.testing.assert_close(tsv()(more), 2 * torch.eye(2))


# The places that average ---------------------------------------------------------------------------------------------


def stepped(strategy: Strategy, *gradients: float, steps: int = 1) -> Any:
    """One weight that starts at 0, on nodes with these gradients."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1))
    return driven(strategy, model, torch.tensor(gradients)[None, :, None].repeat(steps, 1, 1))


PLAIN: dict[str, Any] = {"inner_optim": "sgd", "lr": 1.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4),
        ({"average": "median"}, 2),
        ({"average": median}, 2),
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
    sent.append(("merge" if average.rule.needs_rows else "all_reduce", "gradients"))
    assert [(e.collective, e.label, e.payload_bytes) for e in run.ledger] == [(*one, 4) for one in sent]


def test_weights_in_islands_by_hand() -> None:
    # After a step θ_k = −g_k. Of five nodes three are an island, then the other two, as the generator's seed has it.
    run = stepped(FedAvgStrategy(H=1, island_size=3, average="median", **PLAIN), 1.0, 2.0, 4.0, 8.0, 16.0)
    (event,) = run.ledger
    assert event.collective == "merge" and sorted(map(len, event.groups)) == [2, 3]
    for island in event.groups:
        expected = -float(np.median([2.0**node for node in island]))
        assert run.cluster.weights[list(island), 0].tolist() == [expected] * len(island)
    # All gather what all hold: 2 and 1 others of 4 bytes.
    assert run.ledger.total_wire_bytes == 3 * 2 * 4 + 2 * 1 * 4


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
    torch.testing.assert_close(after, before - 2.75)


UNIT = OptimSpec("sgd", lr=1.0)


@pytest.mark.parametrize(
    ("average", "expected", "norms"),
    [
        ("mean", 4 * 2, False),
        (clip(3.0), (2 + 3 + 3) / 3, False),
        (clip("median"), (2 + 4 + 4) / 3, True),
        (rda() | clip("median"), (2 + 4 + 4) / 3, True),
        (mean("examples"), (2 + 4 + 2 * 18) / 4, False),
        (mean("examples") | clip(3.0), (2 + 3 + 2 * 3) / 4, False),
        (clip("median") | compress(TopK(1.0)), (2 + 4 + 4) / 3, True),
    ],
    ids=str,
)
def test_moves_of_rounds_by_hand(average: Any, expected: float, norms: bool) -> None:
    # After two steps a node has moved by 2 g_k, and so again in the second round. The outer step goes as far.
    for make, label, factors in (
        (FedAvgStrategy, "weights", [1, 1, 1, 1]),
        (partial(DiLoCoStrategy, outer_optim=UNIT), "outer gradient", [1, 1, 1, 1]),
        (partial(StreamingDiLoCoStrategy, outer_optim=UNIT, fragments=1, delay=1), "outer gradient", [1, 1, 0]),
    ):
        run = started(make(H=2, average=average, **PLAIN), Parameters((1,)), 3)
        run.cluster.shard_sizes = torch.tensor([1.0, 1.0, 2.0])
        before, rounds = run.cluster.weights.clone(), sum(factors) // 2
        for factor in factors:
            after = run.step(factor * torch.tensor([[1.0], [2.0], [9.0]]))
        torch.testing.assert_close(before - after, torch.full((3, 1), rounds * float(expected)))
        assert [e.label for e in run.ledger] == rounds * ([f"{label}: norms"] * norms + [label])


def test_embeddings_take_the_mean() -> None:
    gpt = GPT(7, block_size=4, layers=1, width=8, heads=2)
    gradients = normal(1, 3, size(gpt), seed=1)
    plain, by_tensor = (driven(SimpleReduceStrategy(average=m, **PLAIN), gpt, gradients) for m in ("mean", "rda"))
    replicas = plain.cluster.replicas
    assert replicas.embeddings == {"tokens.weight", "positions.weight"}
    both = (replicas.views(run.cluster.replicas.weights[0]) for run in (plain, by_tensor))
    for (name, ours), theirs in zip(next(both).items(), next(both).values(), strict=True):
        assert torch.allclose(ours, theirs) == (name in replicas.embeddings), name


SHAPES = [(5, 3), (7,), (), (4, 2, 3)]


@pytest.mark.parametrize("merger", ALL, ids=repr)
def test_nodes_apart_and_without_values(merger: Rule) -> None:
    num_nodes = 3 + 2 * (merger.faulty if isinstance(merger, Krum) else 0)  # the fewest that Krum takes
    model = Parameters(*SHAPES)
    gradients = normal(3, num_nodes, size(model))
    both: dict[str, Any] = {"average": merger | clip("median"), "lr": 0.1}
    parts = [["p0", "p3"], ["p1", "p2"]]
    for strategy in (SimpleReduceStrategy(**both), StreamingDiLoCoStrategy(H=2, fragments=parts, delay=1, **both)):
        together = same_apart(strategy, model, gradients)
        meta = Parameters(*SHAPES).to("meta")
        assert list(strategy.dry_run(meta, num_nodes, 3)) == list(together.ledger)
    if not merger.of_moves and not isinstance(merger, Krum):  # which islands of two are too small for
        same_apart(FedAvgStrategy(lr=0.1, H=2, island_size=2, average=merger), model, gradients)


@pytest.mark.parametrize("merger", [median(), trimmed_mean(), krum(2), geometric_median(), edit()], ids=repr)
def test_nodes_apart_beside_faulty_ones(merger: Rule) -> None:
    model = Parameters(*SHAPES)
    gradients = normal(3, 8, size(model))
    gradients[:, 2], gradients[:, 5] = 3e38, math.nan
    run = same_apart(SimpleReduceStrategy(inner_optim="sgd", lr=0.1, average=merger), model, gradients)
    assert run.cluster.weights.isfinite().all()


# What is given -------------------------------------------------------------------------------------------------------


def test_on_the_command_line() -> None:
    for text in ("krum(faulty=2)", "median() | clip(norm='median')"):
        (module,) = parse_strategy(f"allreduce:average={text}", lr=1e-3).parts
        assert repr(vars(module)["average"]) == text


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: FedAvgStrategy(average="medain"), ValueError, "average … medain … did you mean 'median'"),
        (lambda: FedAvgStrategy(average=3), TypeError, "FedAvgStrategy … average … function … 3"),  # type: ignore[arg-type]
        (lambda: FedAvgStrategy(average="rda", island_size=2), ValueError, "FedAvgStrategy … average=rda"),
        (lambda: FedAvgStrategy(average=clip(1.0), island_size=2), ValueError, "FedAvgStrategy … clip"),
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
