"""Compressors against their definitions, one node after the other; error feedback; bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from strategies_by_hand import Driven, Parameters, driven, normal, same_apart, size, started
from test_demo import tiles_of
from torch import Tensor

from vsim.algorithms.compression.sparse import random_subset
from vsim.strategy import (
    FP4,
    QSGD,
    CommunicateOptimizeStrategy,
    Compressor,
    DCTTopK,
    DiLoCoStrategy,
    OptimSpec,
    PowerSGD,
    RandomK,
    ScaledSign,
    SignVote,
    SimpleReduceStrategy,
    StatisticalQuantizer,
    Strategy,
    StreamingDiLoCoStrategy,
    TileTopK,
    TopK,
    UniformQuantizer,
    compress,
)

pytestmark = pytest.mark.filterwarnings("ignore:(DCT|Tile)TopK:UserWarning")

# P = 12 · 20 + 20 + 8 · 27 + 12 · 20 + 2 · 2 + 7 = 727
SHAPES = [(12, 20), (20,), (8, 3, 3, 3), (12, 20), (2, 2), (7,)]
PLAIN = OptimSpec("sgd", lr=1.0)
ALL: dict[str, Callable[[], Compressor]] = {
    "topk": lambda: TopK(0.1),
    "randomk": lambda: RandomK(0.1),
    "randomk-unbiased": lambda: RandomK(0.1, unbiased=True),
    "vote": SignVote,
    "sign": lambda: ScaledSign(100),
    "int8": lambda: UniformQuantizer(8, 100),
    "int4": lambda: UniformQuantizer(4, 100),
    "qsgd": lambda: QSGD(7, 100),
    "powersgd": lambda: PowerSGD(2),
    "statistical": lambda: StatisticalQuantizer(2, 100),
    "fp4": lambda: FP4(100),
    "int8-two-stage": lambda: UniformQuantizer(8, 100, two_stage=True),
    "statistical-two-stage": lambda: StatisticalQuantizer(4, 100, two_stage=True),
    "qsgd-two-stage": lambda: QSGD(7, 100, two_stage=True),
    "dct": lambda: DCTTopK(9, 12),
    "tiles": lambda: TileTopK(9, 12),
    "tiles-2-bit": lambda: TileTopK(9, 12, quantizer=StatisticalQuantizer(2)),
}
AMONG_SENDERS = ("dct", "tiles", "tiles-2-bit")  # their average is over the nodes that sent an entry
CONTRACTIVE = [name for name, make in ALL.items() if make().contractive]


def compressing(compressor: Compressor, error_feedback: bool | float | None = None) -> Strategy:
    """AllReduce with a compressor."""
    return CommunicateOptimizeStrategy(
        [SimpleReduceStrategy(average=compress(compressor, error_feedback))], inner_optim=PLAIN
    )


def parameters() -> Parameters:
    """In float64: whether 0.5 rounds up must not hang on rounding."""
    return Parameters(*SHAPES, dtype=torch.float64)


def module_of(run: Driven) -> Any:
    module, _ = run.strategy.parts
    return module


def average_of(run: Driven, gradients: Tensor) -> Tensor:
    """Take a step; return the average that all nodes stepped with (P,)."""
    run.step(gradients)
    assert (run.cluster.grads == run.cluster.grads[0]).all()
    return run.cluster.grads[0].clone()


def errors_of(run: Driven) -> Tensor:
    """What the nodes feed back (K, P)."""
    message = module_of(run).average.message
    return message.compressor.restore(message.residual).clone()


def copied(generator: torch.Generator) -> torch.Generator:
    return torch.Generator().set_state(generator.get_state())


# By the definitions --------------------------------------------------------------------------------------------------
#
# Each makes, before a step of `run`, f(vectors of the nodes) → (their average, what each node sent), in numpy.

Vectors = list[np.ndarray]
ByHand = Callable[[Vectors], tuple[np.ndarray, Vectors]]


def mean_of_messages(encode: Callable[[np.ndarray, int], np.ndarray]) -> ByHand:
    """The average of encode(vector, node)."""

    def by_hand(vectors: Vectors) -> tuple[np.ndarray, Vectors]:
        sent = [encode(x, node) for node, x in enumerate(vectors)]
        return sum(sent) / len(sent), sent

    return by_hand


def only(x: np.ndarray, index: Any) -> np.ndarray:
    message = np.zeros_like(x)
    message[index] = x[index]
    return message


def block_by_block(x: np.ndarray, encode: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return np.concatenate([encode(x[i : i + 100]) for i in range(0, len(x), 100)])


def topk_by_hand(run: Driven) -> ByHand:
    return mean_of_messages(lambda x, node: only(x, sorted(range(727), key=lambda i: -abs(x[i]))[:73]))


def randomk_by_hand(run: Driven, factor: float = 1.0) -> ByHand:
    index = random_subset(727, 73, copied(run.cluster.generator)).numpy()
    return mean_of_messages(lambda x, node: factor * only(x, index))


def vote_by_hand(run: Driven) -> ByHand:
    def by_hand(vectors: Vectors) -> tuple[np.ndarray, Vectors]:
        votes = [[1 if v >= 0 else -1 for v in x] for x in vectors]
        return np.array([float(np.sign(sum(column))) for column in zip(*votes, strict=True)]), []

    return by_hand


def sign_by_hand(run: Driven) -> ByHand:
    def encode(block: np.ndarray) -> np.ndarray:
        return np.abs(block).sum() / len(block) * np.where(block < 0, -1, 1)

    return mean_of_messages(lambda x, node: block_by_block(x, encode))


def uniform_by_hand(run: Driven, levels: int) -> ByHand:
    def encode(block: np.ndarray) -> np.ndarray:
        step = np.abs(block).max() / levels
        return np.round(block / step) * step

    return mean_of_messages(lambda x, node: block_by_block(x, encode))


def bins(block: np.ndarray) -> np.ndarray:
    shift, scale = block.mean(), 6 * block.std(ddof=1) / 4
    codes = np.clip(np.round((block - shift) / scale + 2), 0, 3)
    return np.array([block[codes == code].mean() for code in codes])


def powers_of_two(block: np.ndarray) -> np.ndarray:
    codebook = np.array([0, *(sign * 2.0**-e for sign in (1, -1) for e in range(7))]) * np.abs(block).max()
    return codebook[np.abs(block[:, None] - codebook).argmin(1)]


def tiles_by_hand(run: Driven, quantized: Callable[[np.ndarray], np.ndarray] = np.copy) -> ByHand:
    def encode(x: np.ndarray) -> np.ndarray:
        message, first = np.zeros_like(x), 0
        for shape in SHAPES:
            stop = first + int(np.prod(shape))
            rows = shape[0] if len(shape) > 1 else 1
            for tile, own in zip(*(tiles_of(v[first:stop].reshape(rows, -1), 12) for v in (message, x)), strict=True):
                threshold = np.sort(np.abs(own), axis=None)[-min(9, own.size)]
                tile[np.abs(own) >= threshold] = own[np.abs(own) >= threshold]
            first = stop
        message[message != 0] = quantized(message[message != 0])
        return message

    def by_hand(vectors: Vectors) -> tuple[np.ndarray, Vectors]:
        sent = [encode(x) for x in vectors]
        return sum(sent) / np.maximum(sum(message != 0 for message in sent), 1), sent

    return by_hand


def qsgd_by_hand(run: Driven) -> ByHand:
    streams = [copied(stream) for stream in module_of(run).average.message.compressor.streams]

    def encode(x: np.ndarray, node: int) -> np.ndarray:
        draws = torch.rand(727, generator=streams[node], dtype=torch.float64).numpy()
        message = []
        for i in range(0, 727, 100):
            step = np.sqrt((x[i : i + 100] ** 2).sum()) / 7
            for v, draw in zip(x[i : i + 100], draws[i : i + 100], strict=True):
                low = np.floor(abs(v) / step)
                message.append(np.sign(v) * step * (low + (draw < abs(v) / step - low)))
        return np.array(message)

    return mean_of_messages(encode)


def powersgd_by_hand(run: Driven) -> ByHand:
    # Where the matrices start; of each the factor Q, which was random at first. The rest is sent as it is.
    starts = {0: (12, 20), 260: (8, 27), 476: (12, 20)}
    (first, third), (second,) = module_of(run).average.message.compressor.q
    factors = dict(zip(starts, (q.numpy().copy() for q in (first, second, third)), strict=True))

    def by_hand(vectors: Vectors) -> tuple[np.ndarray, Vectors]:
        average, sent = sum(vectors) / len(vectors), [x.copy() for x in vectors]
        for start, (n, m) in starts.items():
            matrices = [x[start : start + n * m].reshape(n, m) for x in vectors]
            p = np.linalg.qr(sum(matrix @ factors[start] for matrix in matrices) / len(vectors))[0]
            average[start : start + n * m] = (p @ (p.T @ sum(matrices) / len(vectors))).ravel()
            for message, matrix in zip(sent, matrices, strict=True):
                message[start : start + n * m] = (p @ (p.T @ matrix)).ravel()
        return average, sent

    return by_hand


BY_HAND: dict[str, Callable[[Driven], ByHand]] = {
    "topk": topk_by_hand,
    "randomk": randomk_by_hand,
    "randomk-unbiased": lambda run: randomk_by_hand(run, 727 / 73),
    "vote": vote_by_hand,
    "sign": sign_by_hand,
    "int8": lambda run: uniform_by_hand(run, 127),
    "int4": lambda run: uniform_by_hand(run, 7),
    "qsgd": qsgd_by_hand,
    "powersgd": powersgd_by_hand,
    "statistical": lambda run: mean_of_messages(lambda x, node: block_by_block(x, bins)),
    "fp4": lambda run: mean_of_messages(lambda x, node: block_by_block(x, powers_of_two)),
    "tiles": tiles_by_hand,
    "tiles-2-bit": lambda run: tiles_by_hand(run, bins),
}  # and "dct" in test_demo


CASES: list[tuple[str, Any, int]] = [(name, None, K) for name in BY_HAND for K in (1, 2, 3)]
CASES += [("topk", False, 3), *((name, 0.5, 2) for name in BY_HAND if name in CONTRACTIVE)]


@pytest.mark.parametrize(("name", "error_feedback", "num_nodes"), CASES)
def test_six_steps_by_the_definition(name: str, error_feedback: float | None, num_nodes: int) -> None:
    run = started(compressing(ALL[name](), error_feedback), parameters(), num_nodes, deterministic=num_nodes == 3)
    beta = float(name in CONTRACTIVE) if error_feedback is None else float(error_feedback)
    errors = [np.zeros(727) for _ in range(num_nodes)]
    for step in range(6):
        gradients = normal(num_nodes, 727, seed=step, dtype=torch.float64)
        by_hand = BY_HAND[name](run)
        vectors = [beta * e + g for e, g in zip(errors, gradients.numpy(), strict=True)]
        expected, sent = by_hand(vectors)
        average = average_of(run, gradients)
        np.testing.assert_allclose(average.numpy(), expected, rtol=1e-10, atol=1e-10)
        if beta:
            errors = [x - message for x, message in zip(vectors, sent, strict=True)]
            np.testing.assert_allclose(errors_of(run).numpy(), np.stack(errors), rtol=1e-10, atol=1e-10)


# Error feedback ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTRACTIVE)
def test_nothing_is_lost_and_what_is_fed_back_arrives(name: str) -> None:
    # With the same gradient at every step the sum of the averages follows the sum of the gradients: what is missing are
    # the errors, which stay bounded. Without feedback what a message lacks is lost for good.
    num_nodes = 1 if name in AMONG_SENDERS else 2
    gradients = normal(num_nodes, 727, dtype=torch.float64)
    total, missing = 60 * gradients.mean(0), {}
    for feedback in (True, False):
        run = started(compressing(ALL[name](), feedback), parameters(), num_nodes)
        missing[feedback] = total - sum(average_of(run, gradients) for _ in range(60))
        if feedback:
            torch.testing.assert_close(missing[True], errors_of(run).mean(0))
    assert 0 < missing[True].norm() < min(0.25 * total.norm(), missing[False].norm())


# In two stages -------------------------------------------------------------------------------------------------------


def in_two_stages(vectors: Vectors, errors: Vectors, encode: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the average, and write what is not sent to `errors`; node k averages the k-th of equal chunks."""
    count, size = len(vectors), -(-len(vectors[0]) // len(vectors))
    padded = [np.pad(x, (0, count * size - len(x))) for x in vectors]
    left, average = [x.copy() for x in padded], []
    for k in range(count):
        chunk = slice(k * size, (k + 1) * size)
        sent = [encode(x[chunk]) for x in padded]
        for own, message in zip(left, sent, strict=True):
            own[chunk] -= message
        mean = sum(sent) / count
        average.append(encode(mean))
        left[k][chunk] += count * (mean - average[-1])
    for own, error in zip(left, errors, strict=True):
        error[:] = own[: len(error)]
    return np.concatenate(average)[: len(vectors[0])]


@pytest.mark.parametrize(("beta", "num_nodes"), [(1.0, 1), (0.5, 2), (1.0, 3)])
def test_two_stages_by_the_definition(beta: float, num_nodes: int) -> None:
    compressor = UniformQuantizer(4, 100, two_stage=True)
    run = started(compressing(compressor, beta), parameters(), num_nodes, deterministic=num_nodes == 3)
    errors = [np.zeros(727) for _ in range(num_nodes)]

    def encode(x: np.ndarray) -> np.ndarray:
        return block_by_block(x, lambda block: np.round(block / (step := np.abs(block).max() / 7)) * step)

    for step in range(6):
        gradients = normal(num_nodes, 727, seed=step, dtype=torch.float64)
        vectors = [beta * e + g for e, g in zip(errors, gradients.numpy(), strict=True)]
        expected = in_two_stages(vectors, errors, encode)
        np.testing.assert_allclose(average_of(run, gradients).numpy(), expected, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(errors_of(run).numpy(), np.stack(errors), rtol=1e-10, atol=1e-10)


def test_two_stages_transmit_as_much_as_an_all_reduce_of_so_few_bits() -> None:
    # P = 4096 in chunks of 512, 8 nodes, 4 bits and a scale for 512: S = 2048 + 8 · 4 bytes, 2 · 7/8 · S of them
    # on the wire, and 7 · S in one stage.
    for two_stage, wire in ((True, 2 * 7 / 8 * 2080), (False, 7 * 2080)):
        run = driven(compressing(UniformQuantizer(4, two_stage=two_stage)), Parameters((4096,)), normal(1, 8, 4096))
        assert run.ledger.wire_bytes == wire


# Each by itself ------------------------------------------------------------------------------------------------------


def test_a_zero_votes_for_plus_and_one_to_one_is_no_decision() -> None:
    votes = torch.tensor([[1.0, -2.0, 0.0, 3.0], [5.0, -0.1, -1.0, -4.0]])
    run = driven(compressing(SignVote()), Parameters((4,)), votes[None])
    assert run.cluster.grads[0].tolist() == [1, -1, 0, 0]


@pytest.mark.parametrize("name", ["qsgd", "qsgd-two-stage", "randomk-unbiased"])
def test_unbiased(name: str) -> None:
    gradients = normal(2, 60, dtype=torch.float64)
    run = started(compressing(ALL[name]()), Parameters((60,), dtype=torch.float64), 2)
    draws = torch.stack([average_of(run, gradients) for _ in range(600)])
    mean, deviation = draws.mean(0), draws.std(0) / 600**0.5
    assert (deviation > 0).all()
    assert ((mean - gradients.mean(0)).abs() < 4.5 * deviation).all()  # 60 tests of 1 in 150,000 each


def test_every_node_rounds_with_numbers_of_its_own() -> None:
    gradients = normal(1, 1, 727).expand(20, 8, 727)
    run = started(compressing(QSGD(1)), Parameters((727,)), 8)
    messages = torch.stack([average_of(run, given) for given in gradients])
    alone = started(compressing(QSGD(1)), Parameters((727,)), 1)
    single = torch.stack([average_of(alone, given[:1]) for given in gradients])
    # The mean of eight independent roundings has an eighth of the variance.
    ratio = (messages - gradients[0, 0]).square().mean() / (single - gradients[0, 0]).square().mean()
    assert 0.1 < ratio < 0.15


def test_powersgd_sends_as_it_is_what_would_not_get_smaller() -> None:
    # Rank 8 of (12, 20): 8 · 32 = 256 numbers for 240.
    model = Parameters((12, 20), (7,))
    gradients = normal(3, 2, size(model))
    with pytest.warns(UserWarning, match=r"PowerSGD\(rank=8\) would make no tensor of this model smaller"):
        run = driven(compressing(PowerSGD(8)), model, gradients)
    plain = driven(CommunicateOptimizeStrategy([SimpleReduceStrategy()], inner_optim=PLAIN), model, gradients)
    torch.testing.assert_close(run.cluster.weights, plain.cluster.weights)
    assert [(e.label, e.payload_bytes) for e in run.ledger] == 3 * [("gradients: P and vectors", 988)]
    alone = driven(compressing(PowerSGD(1)), Parameters((12, 20)), normal(1, 2, 240))  # without vectors
    assert [(e.label, e.payload_bytes) for e in alone.ledger] == [
        ("gradients: P and vectors", 48),
        ("gradients: Q", 80),
    ]


@pytest.mark.parametrize(("size", "count"), [(10, 3), (10, 7), (1, 1), (1000, 500)])
def test_random_subset(size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    times = torch.zeros(size)
    for _ in range(400):
        chosen = random_subset(size, count, generator)
        assert len(chosen) == count and (chosen.diff() > 0).all()
        times[chosen] += 1
    p = count / size
    assert ((times - 400 * p).abs() <= 4.5 * (400 * p * (1 - p)) ** 0.5).all()


# Bytes ---------------------------------------------------------------------------------------------------------------

# Of P = 727 entries, in 8 blocks of up to 100, 10 bits an index; the table of strategies has others:
PAYLOADS: list[tuple[Compressor, list[tuple[str, str, float]]]] = [
    # 73 entries: 292 bytes, 730 bits = 91.25 bytes
    (TopK(0.1, "packed"), [("all_gather", "gradients", 292 + 92)]),
    (RandomK(0.0001), [("all_reduce", "gradients", 4)]),
    # 727 bits = 90.875 bytes
    (ScaledSign(100), [("all_gather", "gradients", 91 + 8 * 4)]),
    # 363.5 bytes
    (UniformQuantizer(4, 100), [("all_gather", "gradients", 364 + 8 * 4)]),
    # blocks of 1: a scale for each
    (UniformQuantizer(12, 1), [("all_gather", "gradients", 1091 + 727 * 4)]),
    # −7 … 7 are 15 values: 4 bits. −1, 0, 1: 2 bits, 181.75 bytes.
    (QSGD(7, 100), [("all_gather", "gradients", 364 + 8 * 4)]),
    (QSGD(1, 100), [("all_gather", "gradients", 182 + 8 * 4)]),
    # 2 bits an entry, 181.75 bytes, and 4 values for each of 8 blocks
    (StatisticalQuantizer(2, 100), [("all_gather", "gradients", 182 + 8 * 4 * 4)]),
    # Of 3 nodes each reduces a chunk of 243 entries, in 3 blocks: 243 codes and 12 bytes, and all three to start with.
    (
        UniformQuantizer(8, 100, two_stage=True),
        [("all_to_all", "gradients: chunks", 3 * 255), ("all_gather", "gradients: means", 255)],
    ),
    # 60.75 bytes and a table of 4 values for each of 3 blocks
    (
        StatisticalQuantizer(2, 100, two_stage=True),
        [("all_to_all", "gradients: chunks", 3 * 109), ("all_gather", "gradients: means", 109)],
    ),
    # P: twice 12 · 2 and 8 · 2, and 20 + 4 + 7 entries as they are (of (2, 2) no rank gets smaller);
    # Q: twice 20 · 2 and 27 · 2
    (
        PowerSGD(2),
        [("all_reduce", "gradients: P and vectors", 4 * (48 + 16 + 31)), ("all_reduce", "gradients: Q", 4 * (80 + 54))],
    ),
    # (12, 20) is two tiles of 12 × 10, twice; (20,) two of 10; (8, 27) three of 8 × 9: 9 of each are sent. (2, 2) and
    # (7,) are sent whole: 9 · 9 + 4 + 7 = 92 entries.
    (DCTTopK(9, 12), [("all_gather", "gradients", 92 * 12)]),
    # With 7, 4, 7, 2 and 3 bits an index: 36 · 7 + 18 · 4 + 27 · 7 + 4 · 2 + 7 · 3 = 542 bits = 67.75 bytes
    (DCTTopK(9, 12, "packed"), [("all_gather", "gradients", 92 * 4 + 68)]),
    (TileTopK(9, 12), [("all_gather", "gradients", 92 * 4 + 68)]),
    # 92 codes of 2 bits are 23 bytes, and tables of 4 values for blocks of 50 and 42
    (TileTopK(9, 12, quantizer=StatisticalQuantizer(2, 50)), [("all_gather", "gradients", 23 + 2 * 16 + 68)]),
    (TileTopK(9, 12, "int64", FP4()), [("all_gather", "gradients", 46 + 4 + 92 * 8)]),
]


@pytest.mark.parametrize(("compressor", "events"), PAYLOADS, ids=lambda x: type(x).__name__)
def test_payload_by_hand(compressor: Compressor, events: list[tuple[str, str, float]]) -> None:
    ledger = driven(compressing(compressor), Parameters(*SHAPES), normal(2, 3, 727)).ledger
    recorded = [(e.step, e.collective, e.label, e.payload_bytes) for e in ledger]
    assert recorded == [(step, *event) for step in (1, 2) for event in events]


def test_scales_of_float64_have_eight_bytes() -> None:
    for compressor, payload_bytes in (
        (UniformQuantizer(8, 100), 727 + 8 * 8),
        (FP4(727), 364 + 8),
        (TopK(0.1), 73 * 16),
    ):
        run = driven(compressing(compressor), parameters(), normal(1, 2, 727, dtype=torch.float64))
        assert run.ledger.payload_bytes == payload_bytes


# In a strategy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("use", ["diloco", "streaming"])
@pytest.mark.filterwarnings("ignore:PowerSGD:UserWarning")  # of the second fragment
def test_nodes_that_are_held_apart_have_the_same_bits(name: str, use: str) -> None:
    outer: dict[str, Any] = {"H": 2, "average": compress(ALL[name]()), "inner_optim": PLAIN}
    fragments = [["p0", "p2", "p3"], ["p1", "p4", "p5"]]  # of columns that are not adjacent
    strategy = (
        DiLoCoStrategy(**outer) if use == "diloco" else StreamingDiLoCoStrategy(**outer, fragments=fragments, delay=1)
    )
    same_apart(strategy, Parameters(*SHAPES), normal(4, 3, 727))


def test_two_modules_with_one_compressor_share_nothing() -> None:
    def trained(*of: Compressor) -> Driven:
        modules = [SimpleReduceStrategy(average=compress(of[0])), DiLoCoStrategy(H=2, average=compress(of[1]))]
        strategy = CommunicateOptimizeStrategy(modules, inner_optim=PLAIN)
        return driven(strategy, Parameters(*SHAPES), normal(4, 2, 727))

    one, two = trained(*[PowerSGD(1)] * 2), trained(PowerSGD(1), PowerSGD(1))
    assert torch.equal(one.cluster.weights, two.cluster.weights)
    assert {e.label.split(":")[0] for e in one.ledger} == {"gradients", "outer gradient"}


@pytest.mark.parametrize("compressor", [TopK(1.0), RandomK(1.0), UniformQuantizer(16)], ids=lambda c: type(c).__name__)
def test_diloco_with_a_compressor_that_sends_all_is_diloco(compressor: Compressor) -> None:
    model, gradients = Parameters(*SHAPES), normal(6, 3, 727)
    compressed = driven(DiLoCoStrategy(H=2, lr=0.01, average=compress(compressor)), model, gradients)
    usual = driven(DiLoCoStrategy(H=2, lr=0.01), model, gradients)
    torch.testing.assert_close(compressed.cluster.weights, usual.cluster.weights, rtol=1e-4, atol=1e-5)


# Arguments -----------------------------------------------------------------------------------------------------------

GIVEN = Parameters(*SHAPES), normal(1, 2, 727)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: TopK(1.5), ValueError, "fraction … 1.5"),
        (lambda: TopK(0.1, "int16"), ValueError, "index_bytes … int16"),
        (lambda: UniformQuantizer(17), ValueError, "bits … from 2 to 16 … 17"),
        (lambda: StatisticalQuantizer(9), ValueError, "bits … from 1 to 8 … 9"),
        (lambda: QSGD(0), ValueError, "levels … from 1 to 32767 … 0"),
        (lambda: TileTopK(quantizer=TopK()), TypeError, "quantizer … TopK()"),  # type: ignore[arg-type]
        (lambda: TileTopK(quantizer=FP4(two_stage=True)), ValueError, "two_stage"),
        (lambda: compress("topk"), TypeError, "compressor … Compressor … topk"),  # type: ignore[arg-type]
        (lambda: compress(TopK), TypeError, "compressor … Compressor"),  # type: ignore[arg-type]
        (lambda: compress(TopK(), 1.5), ValueError, "error_feedback … 1.5"),
        (lambda: driven(compressing(Compressor()), *GIVEN), NotImplementedError, "Compressor defines no exchange"),
        *(
            (lambda name=name: compress(ALL[name](), True), ValueError, "error_feedback=1 … the errors would grow")
            for name in ALL.keys() - set(CONTRACTIVE)
        ),
    ],
)
def test_refused(make: Callable[[], Any], error: type[Exception], said: str) -> None:
    with refused(error, said):
        make()
