"""DeMo against its definition, one tensor and one node at a time, with scipy's DCT in float64."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from driven import Driven, Parameters, driven, driven_apart, normal, size, started
from scipy.fft import dctn, idctn
from separate import Communication, train_separately, vectors, warmup_then_cosine
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.data import digits
from vsim.models import MLP
from vsim.private_torch import TorchDispatchMode
from vsim.strategy import CommunicateOptimizeStrategy, DCTTopK, DeMoStrategy, GradientAverage, compress

pytestmark = pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")


# The definition ------------------------------------------------------------------------------------------------------


def side(n: int, chunk: int) -> int:
    """The largest divisor of n that is not above chunk."""
    return max(d for d in range(1, min(n, chunk) + 1) if n % d == 0)


def tiles_of(matrix: np.ndarray, chunk: int) -> list[np.ndarray]:
    """Views of a matrix, tile by tile."""
    h, w = (side(n, chunk) for n in matrix.shape)
    return [matrix[i : i + h, j : j + w] for i in range(0, matrix.shape[0], h) for j in range(0, matrix.shape[1], w)]


@dataclass
class DeMoOfOneTensor:
    """One parameter on K nodes; everything in float64."""

    theta: np.ndarray
    num_nodes: int
    k: int = 32
    chunk: int = 64
    decay: float = 0.999
    weight_decay: float = 0.0
    mean: np.ndarray = field(init=False)
    margin: float = (
        1.0  # the smallest relative difference so far between a coefficient that is sent and one that is not
    )

    def __post_init__(self) -> None:
        self.delta = [np.zeros_like(self.theta) for _ in range(self.num_nodes)]

    def step(self, gradients: list[np.ndarray], lr: float) -> None:
        self.theta = self.theta * (1 - lr * self.weight_decay)
        messages = []  # of each node, for each tile: {index: value}
        for node, gradient in enumerate(gradients):
            self.delta[node] *= self.decay
            self.delta[node] += lr * gradient
            messages.append([self.send(tile) for tile in tiles_of(self.matrix(self.delta[node]), self.chunk)])
        self.mean = np.zeros_like(self.theta)
        for number, tile in enumerate(tiles_of(self.matrix(self.mean), self.chunk)):
            received: dict[int, list[float]] = {}
            for message in messages:
                for index, value in message[number].items():
                    received.setdefault(index, []).append(value)
            tile[:] = self.decode({index: sum(values) / len(values) for index, values in received.items()}, tile)
        self.theta = self.theta - lr * np.sign(self.mean)

    def send(self, tile: np.ndarray) -> dict[int, float]:
        """Choose the k largest coefficients, and take what they say out of the tile."""
        coefficients = dctn(tile, norm="ortho").flatten()
        order = np.argsort(-np.abs(coefficients))
        message = {int(i): float(coefficients[i]) for i in order[: self.k]}
        if len(order) > self.k:
            sent, kept = np.abs(coefficients[order[self.k - 1 : self.k + 1]])
            self.margin = min(self.margin, (sent - kept) / sent if sent else 1.0)
        tile -= self.decode(message, tile)
        return message

    def decode(self, message: dict[int, float], tile: np.ndarray) -> np.ndarray:
        coefficients = np.zeros(tile.size)
        for index, value in message.items():
            coefficients[index] = value
        return idctn(coefficients.reshape(tile.shape), norm="ortho")

    def matrix(self, tensor: np.ndarray) -> np.ndarray:
        """A view: (out, rest); a vector is one row, whose two-dimensional DCT is the one-dimensional."""
        return tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.reshape(tensor.shape[0], -1)


class DeMoOfAll:
    """All parameters of a model."""

    def __init__(self, model: nn.Module, num_nodes: int, **options: Any) -> None:
        self.shapes = [p.shape for p in model.parameters()]
        thetas = [p.detach().double().numpy().copy() for p in model.parameters()]
        self.tensors = [DeMoOfOneTensor(theta, num_nodes, **options) for theta in thetas]

    def step(self, gradients: Tensor, lr: float) -> None:
        """Take a step with the gradients (K, P)."""
        pieces = gradients.double().split([math.prod(shape) for shape in self.shapes], dim=1)
        for tensor, piece, shape in zip(self.tensors, pieces, self.shapes, strict=True):
            tensor.step([row.reshape(shape).numpy() for row in piece], lr)

    def weights(self) -> Tensor:
        return torch.from_numpy(np.concatenate([t.theta.ravel() for t in self.tensors]))

    def mean(self) -> Tensor:
        return torch.from_numpy(np.concatenate([t.mean.ravel() for t in self.tensors]))

    def delta(self, node: int) -> Tensor:
        return torch.from_numpy(np.concatenate([t.delta[node].ravel() for t in self.tensors]))


# A matrix of 2 × 3 tiles of 64 × 64, one of 20 × 30 in one tile, vectors above and below k = 32, a convolution, a
# scalar, and dimensions with no divisor from 2 to 64: 67 in tiles of 1, and 71 × 6 in tiles of 1 × 6.
SHAPES = [(128, 192), (20, 30), (128,), (10,), (), (8, 3, 3, 3), (67,), (71, 6)]


def recorded_means(run: Driven) -> list[Tensor]:
    """A list that the run appends to: what the mean of every step decodes to, before its sign is taken."""
    means: list[Tensor] = []
    compressor = run.strategy.momentum.compressor
    original = compressor.restore

    def recorded(arranged: list[Tensor]) -> Tensor:
        mean = original(arranged)
        means.append(mean.clone())
        return mean

    compressor.restore = recorded
    return means


def residuals(run: Driven | Trainer) -> Tensor:
    """δ of all nodes (K, P)."""
    momentum = run.strategy.momentum
    return momentum.compressor.restore(momentum.residual)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "others": {"compression_decay": 0.9, "compression_topk": 7, "compression_chunk": 24, "weight_decay": 0.1},
    "all": {"compression_topk": 10_000, "compression_chunk": 16},
    "schedule": {"lr_scheduler": "cosine", "warmup_steps": 3},
    "clipped": {"max_norm": 20.0},
}
SEED = 100
NAMES = {"compression_decay": "decay", "compression_topk": "k", "compression_chunk": "chunk"}


@pytest.mark.parametrize(
    ("name", "num_nodes", "dtype"),
    [
        *[pytest.param("defaults", num_nodes, torch.float32, marks=pytest.mark.slow) for num_nodes in (1, 4)],
        ("defaults", 3, torch.float32),
        ("others", 3, torch.float32),
        *[(name, 3, torch.float64) for name in ("all", "schedule", "clipped")],
        *[pytest.param(name, 3, torch.float64, marks=pytest.mark.slow) for name in ("defaults", "others")],
    ],
)
def test_twenty_steps_by_the_definition(name: str, num_nodes: int, dtype: torch.dtype) -> None:
    lr, options = 0.01, OPTIONS[name]
    model = Parameters(*SHAPES, dtype=dtype)
    run = started(DeMoStrategy(lr=lr, **options), model, num_nodes, deterministic=name == "others")
    means = recorded_means(run)
    own = {NAMES.get(key, key): value for key, value in options.items() if key.startswith(("comp", "weight"))}
    reference = DeMoOfAll(model, num_nodes, **own)
    factor = warmup_then_cosine(3, 20) if name == "schedule" else lambda s: 1.0
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    certain = torch.ones(size(model), dtype=torch.bool)
    for step in range(20):
        given = normal(num_nodes, size(model), seed=SEED + step, dtype=dtype)
        weights = run.step(given)
        if "max_norm" in options:
            given = given * (20.0 / (given.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
        reference.step(given, lr * factor(step))

        mean = reference.mean()
        assert (means[-1].double() - mean).norm() <= tolerance * mean.norm()
        # A mean at rounding level has a sign by accident, and θ then differs by 2·lr, now and ever after; nothing else
        # does, as the gradients are given. In float64 no mean is as near to 0 as its rounding.
        certain &= (mean.abs() > 10 * tolerance * mean.abs().max()) | (mean == 0)
        for node in range(num_nodes):
            close = torch.isclose(weights[node].double(), reference.weights(), rtol=tolerance, atol=10 * tolerance)
            assert close[certain].all()
        assert all(torch.equal(row, weights[0]) for row in weights)
    assert certain.double().mean() > (0.99 if dtype == torch.float32 else 0.999999)
    # Of two coefficients that differ by less than rounding either may be sent. There are none with this seed, so that
    # every choice of every node was compared.
    assert min(tensor.margin for tensor in reference.tensors) > tolerance
    for node in range(num_nodes):
        delta = reference.delta(node)
        scale = max(delta.norm(), lr)  # with all coefficients sent nothing is left but rounding
        assert (residuals(run)[node].double() - delta).norm() <= tolerance * scale


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_training_is_plain_torch_with_demo_written_by_hand(executor: str, num_nodes: int) -> None:
    # In float64 and with smooth activations: a unit whose gradient is 0 would step by the sign of rounding.
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 67), nn.Tanh(), nn.Linear(67, 5)).double()
    model = WithLoss(network)
    x, y = vectors().tensors
    data = TensorDataset(x.double(), y)
    options = {"k": 5, "chunk": 16, "weight_decay": 0.1}
    by_hand = train_separately(
        model,
        data,
        DeMoByHand(0.01, options),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        num_nodes=num_nodes,
        max_steps=20,
        batch_size=5,
    )
    trainer = Trainer(model, data)
    trainer.fit(
        strategy=DeMoStrategy(lr=0.01, compression_topk=5, compression_chunk=16, weight_decay=0.1),
        num_nodes=num_nodes,
        max_steps=20,
        batch_size=5,
        executor=executor,
        progress=False,
    )
    weights = trainer.strategy.cluster.weights
    torch.testing.assert_close(weights, by_hand.weights, rtol=1e-10, atol=1e-12)
    assert torch.tensor(by_hand.losses)[-3:].mean() < torch.tensor(by_hand.losses)[:3].mean()


class WithLoss(nn.Module):
    """A classifier that returns its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])


class DeMoByHand(Communication):
    """Turns the gradients of separate modules into signs; torch's SGD takes the step."""

    def __init__(self, lr: float, options: dict[str, Any]) -> None:
        self.lr, self.options = lr, options

    def start(self, models: list[nn.Module]) -> None:
        self.tensors = [
            DeMoOfOneTensor(p.detach().numpy().copy(), len(models), **self.options) for p in models[0].parameters()
        ]

    def after_backward(self, models: list[nn.Module]) -> None:
        for tensor, *nodes in zip(self.tensors, *(m.parameters() for m in models), strict=True):
            tensor.step([p.grad.numpy() for p in nodes], self.lr)
            with torch.no_grad():
                for p in nodes:
                    p.mul_(1 - self.lr * tensor.weight_decay)
                    p.grad.copy_(torch.from_numpy(np.sign(tensor.mean)))


# What follows from the definition ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_sending_everything_without_memory_is_sign_sgd_on_the_mean_gradient(num_nodes: int) -> None:
    model = Parameters((12, 20), (7,), (4, 3, 3, 3))
    gradients = normal(10, num_nodes, size(model))
    strategy = DeMoStrategy(lr=0.01, compression_decay=0.0, compression_topk=10_000)
    run = driven(strategy, model, gradients)
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    for given in gradients:
        expected = expected - 0.01 * given.mean(0).sign()
    torch.testing.assert_close(run.cluster.weights, expected.expand_as(run.cluster.weights), rtol=1e-6, atol=1e-6)


def test_nodes_stay_equal_to_the_bit_while_their_momentum_differs() -> None:
    trainer = fitted(DeMoStrategy(lr=1e-3, weight_decay=0.01), num_nodes=5)
    weights, delta = trainer.strategy.cluster.weights, residuals(trainer)
    assert (weights == weights[0]).all()
    assert not torch.isclose(delta[0], delta[1]).all()


def test_nodes_that_are_held_apart_do_the_same() -> None:
    model = Parameters((128, 192), (20, 30), (100,), (8, 3, 3, 3))
    gradients = normal(4, 3, size(model))
    strategy = DeMoStrategy(lr=0.01, weight_decay=0.1, max_norm=50.0)
    for deterministic in (True, False):
        together = driven(strategy, model, gradients, deterministic=deterministic)
        for rank, alone in enumerate(driven_apart(strategy, model, gradients, deterministic)):
            if deterministic:
                assert torch.equal(alone.cluster.weights[0], together.cluster.weights[rank])
                kept = zip(alone.strategy.momentum.residual, together.strategy.momentum.residual, strict=True)
                assert all(torch.equal(own[0], all_nodes[rank]) for own, all_nodes in kept)
            torch.testing.assert_close(residuals(alone)[0], residuals(together)[rank], rtol=1e-4, atol=1e-6)
            assert alone.ledger[:] == together.ledger[:]


def test_a_scatter_serves_all_nodes_and_all_shapes_of_tiles() -> None:
    class Scatters(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.overloadpacket.__name__ == "scatter_add_"
            return func(*args, **(kwargs or {}))

    model = Parameters((8, 8), (6, 6), (5,), (7,))
    run = started(DeMoStrategy(lr=0.01, compression_topk=3), model, 3)
    with Scatters() as scatters:
        run.step(normal(3, size(model)))
    assert scatters.count == 1 + 1  # and one that counts the senders


def test_the_communication_composes_with_any_optimizer() -> None:
    # DeMo without the sign: momentum in the messages, AdamW on what they decode to.
    strategy = CommunicateOptimizeStrategy([GradientAverage(compress(DCTTopK(), error_feedback=0.999))], lr=1e-3)
    trainer = fitted(strategy, max_steps=100)
    assert trainer.history.last("global_accuracy") > 0.7
    assert {event.label for event in trainer.ledger} == {"gradients"}


# Bytes and warnings --------------------------------------------------------------------------------------------------


def test_payload_by_hand() -> None:
    # shape          tiles          entries kept a tile    entries sent    bits of an index
    # (128, 192)     6 of 64 × 64   32                     192             12
    # (20, 30)       1 of 20 × 30   32                     32              10
    # (128,)         2 of 64        32                     64              6
    # (10,)          1 of 10        10                     10              4
    # ()             1 of 1         1                      1               0
    # (8, 3, 3, 3)   1 of 8 × 27    32                     32              8
    # (67,)          67 of 1        1                      67              0
    # (71, 6)        71 of 1 × 6    6                      426             3
    # In all 824 entries: · 12 bytes = 9888; packed 4 · 824 = 3296 bytes and
    # 192 · 12 + 32 · 10 + 64 · 6 + 10 · 4 + 32 · 8 + 426 · 3 = 4582 bits, which is 572.75 bytes.
    model = Parameters(*SHAPES)
    gradients = normal(2, 3, size(model))
    for index_bytes, payload_bytes in (("int64", 9888), ("packed", 3296 + 573)):
        ledger = driven(DeMoStrategy(index_bytes=index_bytes), model, gradients).ledger
        assert [(e.step, e.collective, e.label, e.payload_bytes) for e in ledger] == [
            (step, "all_gather", "DCT coefficients", payload_bytes) for step in (1, 2)
        ]
        assert ledger.wire_bytes == 2 * 2 * payload_bytes  # (K − 1) a step


@pytest.mark.filterwarnings("always:DCTTopK:UserWarning")
def test_a_warning_names_what_is_larger_than_before() -> None:
    # p0: 32 of 4096 is fine. p1: 32 · 12 = 384 bytes of 64 · 4 = 256. p2 and p3 send everything, 12 bytes for 4.
    model = Parameters((64, 64), (64,), (10,), (67, 71))
    with pytest.warns(UserWarning, match="because its tiles are small") as caught:
        driven(DeMoStrategy(), model, normal(3, 2, size(model)))
    (warning,) = caught  # once in a run of three steps
    message = str(warning.message)
    assert "p0" not in message and "topk=32, chunk=64" in message
    assert "p1 (384 for 256), p2 (120 for 40), p3 (57084 for 19028)" in message
    # Packed: p1 32 · 4 + 32 · 6 / 8 = 152; p2 10 · 4 + 10 · 4 / 8 = 45; p3 67 · 71 · 4 and no bits.
    with pytest.warns(UserWarning, match=r"small: p2 \(45 for 40\)$"):
        driven(DeMoStrategy(index_bytes="packed"), model, normal(1, 2, size(model)))


@pytest.mark.filterwarnings("always:DCTTopK:UserWarning")
def test_a_long_warning_is_cut() -> None:
    model = Parameters(*[(5,)] * 10)
    with pytest.warns(UserWarning, match=r"p7 \(60 for 20\) and 2 more$"):
        driven(DeMoStrategy(), model, normal(1, 2, size(model)))


def test_no_warning_where_tiles_are_large() -> None:
    model = Parameters((128, 64), (16, 3, 3, 3))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        driven(DeMoStrategy(), model, normal(1, 2, size(model)))
    assert not told


# Arguments -----------------------------------------------------------------------------------------------------------


def fitted(strategy: Any, num_nodes: int = 2, max_steps: int = 8) -> Trainer:
    train, val = digits()
    trainer = Trainer(MLP(seed=0), train, val)
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=max_steps, progress=False)
    return trainer
