"""DeMo against its definition, one tensor and one node at a time, with scipy's DCT in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from reference_cluster import warmup_then_cosine
from scipy.fft import dctn, idctn
from strategies_by_hand import Parameters, driven, normal, size, started
from torch import Tensor, nn

import vsim
from vsim.algorithms import demo
from vsim.data import digits
from vsim.models import MLP
from vsim.private_torch import TorchDispatchMode
from vsim.strategy import PRESETS, DeMoStrategy


def side(n: int, chunk: int) -> int:
    """The largest divisor of n that is not above chunk."""
    return max(d for d in range(1, min(n, chunk) + 1) if n % d == 0)


def orthogonal(n: int) -> np.ndarray:
    """An orthogonal matrix that is neither symmetric nor that of cosines."""
    q: np.ndarray = np.linalg.qr(np.random.default_rng(n).normal(size=(n, n)))[0]
    return q


def tiles_of(matrix: np.ndarray, chunk: int) -> list[np.ndarray]:
    """Views of a matrix, tile by tile."""
    h, w = (side(n, chunk) for n in matrix.shape)
    return [matrix[i : i + h, j : j + w] for i in range(0, matrix.shape[0], h) for j in range(0, matrix.shape[1], w)]


class DeMoOfOneTensor:
    """One parameter on K nodes; everything in float64."""

    def __init__(
        self,
        start: Tensor,
        num_nodes: int,
        k: int = 32,
        chunk: int = 64,
        decay: float = 0.999,
        weight_decay: float = 0,
        alpha: float = 1.0,
        transform: str = "dct",
        update: str = "sign",
        version: int = 1,
    ) -> None:
        self.theta = start.detach().numpy().copy()
        self.alpha, self.transform, self.update, self.version = alpha, transform, update, version
        self.k, self.chunk, self.decay, self.weight_decay = k, chunk, decay, weight_decay
        self.delta = [np.zeros_like(self.theta) for _ in range(num_nodes)]
        self.margin = 1.0  # the smallest relative difference between a coefficient that is sent and one that is not

    def step(self, gradients: list[np.ndarray], lr: float) -> None:
        self.theta = self.theta * (1 - lr * self.weight_decay)
        messages = []  # of each node, for each tile: {index: value}
        for delta, gradient in zip(self.delta, gradients, strict=True):
            delta *= self.decay
            delta += (lr if self.version == 1 else 1 - self.decay) * gradient
            messages.append([self.send(tile) for tile in tiles_of(self.matrix(delta), self.chunk)])
        mean = np.zeros_like(self.theta)
        for number, tile in enumerate(tiles_of(self.matrix(mean), self.chunk)):
            received: dict[int, list[float]] = {}
            for message in messages:
                for index, value in message[number].items():
                    received.setdefault(index, []).append(value)
            counts = {index: len(values) if self.version == 1 else len(gradients) for index, values in received.items()}
            tile[:] = self.decode({index: sum(values) / counts[index] for index, values in received.items()}, tile)
        self.theta = self.theta - lr * self.phi(mean)

    def phi(self, mean: np.ndarray) -> np.ndarray:
        if self.update == "sign":
            return np.sign(mean)
        if self.update == "identity":
            return mean
        matrix = self.matrix(mean)  # M (MᵀM)^−½, where the eigenvalues 0 stay 0
        values, vectors = np.linalg.eigh(matrix.T @ matrix)
        inverse = np.where(values > 1e-12 * values[-1], values.clip(min=1e-300) ** -0.5, 0)
        return (matrix @ (vectors * inverse) @ vectors.T).reshape(mean.shape)

    def forward(self, tile: np.ndarray) -> np.ndarray:
        if self.transform == "dct":
            return dctn(tile, norm="ortho")
        h, w = (orthogonal(n) if self.transform == "random" else np.eye(n) for n in tile.shape)
        return h @ tile @ w.T

    def inverse(self, coefficients: np.ndarray) -> np.ndarray:
        if self.transform == "dct":
            return idctn(coefficients, norm="ortho")
        h, w = (orthogonal(n) if self.transform == "random" else np.eye(n) for n in coefficients.shape)
        return h.T @ coefficients @ w

    def send(self, tile: np.ndarray) -> dict[int, float]:
        """Choose the k largest coefficients, and take what they say out of the tile."""
        coefficients = self.forward(tile).flatten()
        order = np.argsort(-np.abs(coefficients))
        message = {int(i): float(coefficients[i]) for i in order[: self.k]}
        if len(order) > self.k:
            sent, kept = np.abs(coefficients[order[self.k - 1 : self.k + 1]])
            self.margin = min(self.margin, (sent - kept) / sent if sent else 1.0)
        tile -= self.alpha * self.decode(message, tile)
        return message

    def decode(self, message: dict[int, float], tile: np.ndarray) -> np.ndarray:
        coefficients = np.zeros(tile.size)
        for index, value in message.items():
            coefficients[index] = value
        return self.inverse(coefficients.reshape(tile.shape))

    def matrix(self, tensor: np.ndarray) -> np.ndarray:
        """A view: (out, rest); a vector is one row, whose two-dimensional DCT is the one-dimensional."""
        return tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.reshape(tensor.shape[0], -1)


# A matrix of 2 × 3 tiles of 64 × 64, one of 20 × 30 in one tile, vectors above and below k = 32, a convolution, a
# scalar, and dimensions with no divisor from 2 to 64: 67 in tiles of 1, and 71 × 6 in tiles of 1 × 6.
SHAPES = [(128, 192), (20, 30), (128,), (10,), (), (8, 3, 3, 3), (67,), (71, 6)]
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "others": {"compression_decay": 0.9, "compression_topk": 7, "compression_chunk": 24, "weight_decay": 0.1},
    "all": {"compression_topk": 10_000, "compression_chunk": 16},
    "schedule": {"lr_scheduler": "cosine", "warmup_steps": 3},
    "clipped": {"max_norm": 20.0},
    "version 2": {"version": 2, "alpha": 0.2},
    "version 2, no transform": {"version": 2, "alpha": 0.5, "transform": "none", "update": "identity"},
    "version 2, random": {
        **{"version": 2, "alpha": 0.2, "transform": "random", "update": "orthogonal"},
        **{"weight_decay": 0.1, "compression_chunk": 24, "compression_decay": 0.9},
    },
    "version 1, halves": {"alpha": 0.5, "update": "orthogonal", "compression_chunk": 16},
}


NEW = ("alpha", "transform", "update", "version")


def joined(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))


@pytest.mark.filterwarnings("ignore:(DCT|Tile|RandomBasis)TopK:UserWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_eight_steps_by_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_drawn", lambda side, cluster: torch.from_numpy(orthogonal(side)))
    lr, options, K = 0.01, OPTIONS[name], 3
    model = Parameters(*SHAPES, dtype=torch.float64)
    run = started(DeMoStrategy(lr=lr, **options), model, K, deterministic=name == "others", max_steps=8)
    names = {"compression_decay": "decay", "compression_topk": "k", "compression_chunk": "chunk"}
    own = {names.get(key, key): v for key, v in options.items() if key in (*names, *NEW, "weight_decay")}
    tensors = [DeMoOfOneTensor(p, K, **own) for p in model.parameters()]
    factor = warmup_then_cosine(3, 8) if name == "schedule" else lambda s: 1.0
    for step in range(8):
        given = normal(K, size(model), seed=100 + step, dtype=torch.float64)
        weights = run.step(given)
        if name == "clipped":
            given = given * (20.0 / (given.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
        pieces = given.split([math.prod(shape) for shape in SHAPES], dim=1)
        for tensor, piece, shape in zip(tensors, pieces, SHAPES, strict=True):
            tensor.step([row.reshape(shape).numpy() for row in piece], lr * factor(step))
        # A mean at rounding level would have a sign by accident. In float64 none is as near to 0 as its rounding.
        expected = joined([tensor.theta for tensor in tensors])
        torch.testing.assert_close(weights, expected.expand(K, -1), rtol=1e-12, atol=1e-11)
        assert (weights == weights[0]).all()
    # Of two coefficients that differ by less than rounding either may be sent. There are none with these seeds.
    assert min(tensor.margin for tensor in tensors) > 1e-12
    momentum = run.strategy.momentum
    for node, row in enumerate(momentum.compressor.restore(momentum.residual)):
        delta = joined([tensor.delta[node] for tensor in tensors])
        scale = max(delta.norm(), lr)  # with all coefficients sent nothing is left but rounding
        assert (row - delta).norm() <= 1e-12 * scale


@pytest.mark.filterwarnings("ignore:(DCT|Tile|RandomBasis)TopK:UserWarning")
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


@pytest.mark.filterwarnings("ignore:(DCT|Tile|RandomBasis)TopK:UserWarning")
def test_what_is_sent_must_leave_the_momentum_and_cosines_are_the_better_basis() -> None:
    """As in the paper's second version: α = 0 is worse than 0.2, and no transform is the worst. Images are smooth."""
    options: dict[str, Any] = {"version": 2, "compression_topk": 2, "compression_chunk": 16, "lr": 3e-3}
    tried = {"α 0": {"alpha": 0.0}, "α .2": {}, "random": {"transform": "random"}, "none": {"transform": "none"}}
    strategies = {
        name: DeMoStrategy(**{**options, "compression_decay": 0.99, "alpha": 0.2, **own}) for name, own in tried.items()
    }
    more: dict[str, Any] = {"num_nodes": 4, "max_steps": 100, "val_size": 360, "val_interval": None, "seed": 1}
    result = vsim.compare(MLP(hidden=(32,), seed=0), *digits(), strategies=strategies, progress=False, **more)
    right = {name: run.history.measured("global_accuracy")[0][-1] for name, run in result.items()}
    assert right["none"] + 0.05 < right["α 0"] < right["random"] < right["α .2"] and right["α 0"] + 0.08 < right["α .2"]


@pytest.mark.filterwarnings("ignore:(DCT|Tile|RandomBasis)TopK:UserWarning")
def test_random_bases_are_orthogonal_new_in_every_step_and_equal_on_all_nodes() -> None:
    class Draws:
        generator = torch.Generator().manual_seed(1)

    one, two = (demo._drawn(5, Draws()) for _ in range(2))  # type: ignore[arg-type]
    torch.testing.assert_close(one @ one.T, torch.eye(5, dtype=torch.float64))
    assert not torch.allclose(one, two)
    # With all coefficients sent the basis does not matter: θ ← θ − lr (1 − β) mean of g at first.
    model = Parameters((6, 4), (5,), dtype=torch.float64)
    options: dict[str, Any] = {"version": 2, "compression_topk": 99, "compression_decay": 0.5, "update": "identity"}
    gradients = normal(3, size(model), dtype=torch.float64)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    for transform in ("random", "none"):
        rows = started(DeMoStrategy(lr=0.1, transform=transform, **options), model, 3).step(gradients)
        torch.testing.assert_close(rows, (start - 0.1 * 0.5 * gradients.mean(0)).expand(3, -1))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"update": "identity"}, "update='identity' takes version=2"),
        ({"version": 2, "compression_decay": 1}, "compression_decay=1"),
        ({"version": 3}, "version"),
        ({"alpha": 1.5}, "alpha"),
        ({"transform": "fft"}, "transform must be one of 'dct'"),
        ({"update": "adam"}, "update"),
    ],
)
def test_arguments_of_version_2(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        DeMoStrategy(**arguments)


def test_the_preset_is_the_second_paper() -> None:
    cls, arguments = PRESETS["demo-2"]
    made = cls(**arguments)
    assert isinstance(made, DeMoStrategy) and (made.version, made.alpha, made.transform) == (2, 0.2, "dct")
    assert (made.momentum.error_feedback, made.momentum.compressor.subtracted) == (0.999, 0.2)


def warning_of(model: nn.Module, **options: Any) -> str:
    with pytest.warns(UserWarning, match="DCTTopK.*because its tiles are small") as caught:
        driven(DeMoStrategy(**options), model, normal(3, 2, size(model)))
    (warning,) = caught  # once in a run of three steps
    return str(warning.message)


def test_a_warning_names_what_is_larger_than_before() -> None:
    # p0: 32 of 4096 is fine. p1: 32 · 12 = 384 bytes of 64 · 4 = 256. p2 and p3 send everything, 12 bytes for 4.
    model = Parameters((64, 64), (64,), (10,), (67, 71))
    message = warning_of(model)
    assert "p0" not in message and "topk=32, chunk=64" in message
    assert "p1 (384 for 256), p2 (120 for 40), p3 (57084 for 19028)" in message
    # Packed: p1 32 · 4 + 32 · 6 / 8 = 152; p2 10 · 4 + 10 · 4 / 8 = 45; p3 67 · 71 · 4 and no bits.
    assert warning_of(model, index_bytes="packed").endswith("small: p2 (45 for 40)")
    assert warning_of(Parameters(*[(5,)] * 10)).endswith("p7 (60 for 20) and 2 more")
    driven(DeMoStrategy(), Parameters((128, 64), (16, 3, 3, 3)), normal(1, 2, 8624))  # a warning would be an error
