"""DeMo against its definition, one tensor and one node at a time, with scipy's DCT in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from driven import Parameters, driven, normal, size, started
from scipy.fft import dctn, idctn
from separate import warmup_then_cosine
from torch import Tensor, nn

from vsim.private_torch import TorchDispatchMode
from vsim.strategy import DeMoStrategy


def side(n: int, chunk: int) -> int:
    """The largest divisor of n that is not above chunk."""
    return max(d for d in range(1, min(n, chunk) + 1) if n % d == 0)


def tiles_of(matrix: np.ndarray, chunk: int) -> list[np.ndarray]:
    """Views of a matrix, tile by tile."""
    h, w = (side(n, chunk) for n in matrix.shape)
    return [matrix[i : i + h, j : j + w] for i in range(0, matrix.shape[0], h) for j in range(0, matrix.shape[1], w)]


class DeMoOfOneTensor:
    """One parameter on K nodes; everything in float64."""

    def __init__(
        self, start: Tensor, num_nodes: int, k: int = 32, chunk: int = 64, decay: float = 0.999, weight_decay: float = 0
    ) -> None:
        self.theta = start.detach().numpy().copy()
        self.k, self.chunk, self.decay, self.weight_decay = k, chunk, decay, weight_decay
        self.delta = [np.zeros_like(self.theta) for _ in range(num_nodes)]
        self.margin = 1.0  # the smallest relative difference between a coefficient that is sent and one that is not

    def step(self, gradients: list[np.ndarray], lr: float) -> None:
        self.theta = self.theta * (1 - lr * self.weight_decay)
        messages = []  # of each node, for each tile: {index: value}
        for delta, gradient in zip(self.delta, gradients, strict=True):
            delta *= self.decay
            delta += lr * gradient
            messages.append([self.send(tile) for tile in tiles_of(self.matrix(delta), self.chunk)])
        mean = np.zeros_like(self.theta)
        for number, tile in enumerate(tiles_of(self.matrix(mean), self.chunk)):
            received: dict[int, list[float]] = {}
            for message in messages:
                for index, value in message[number].items():
                    received.setdefault(index, []).append(value)
            tile[:] = self.decode({index: sum(values) / len(values) for index, values in received.items()}, tile)
        self.theta = self.theta - lr * np.sign(mean)

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


# A matrix of 2 × 3 tiles of 64 × 64, one of 20 × 30 in one tile, vectors above and below k = 32, a convolution, a
# scalar, and dimensions with no divisor from 2 to 64: 67 in tiles of 1, and 71 × 6 in tiles of 1 × 6.
SHAPES = [(128, 192), (20, 30), (128,), (10,), (), (8, 3, 3, 3), (67,), (71, 6)]
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "others": {"compression_decay": 0.9, "compression_topk": 7, "compression_chunk": 24, "weight_decay": 0.1},
    "all": {"compression_topk": 10_000, "compression_chunk": 16},
    "schedule": {"lr_scheduler": "cosine", "warmup_steps": 3},
    "clipped": {"max_norm": 20.0},
}


def joined(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))


@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_eight_steps_by_the_definition(name: str) -> None:
    lr, options, K = 0.01, OPTIONS[name], 3
    model = Parameters(*SHAPES, dtype=torch.float64)
    run = started(DeMoStrategy(lr=lr, **options), model, K, deterministic=name == "others", max_steps=8)
    names = {"compression_decay": "decay", "compression_topk": "k", "compression_chunk": "chunk"}
    own = {names.get(key, key): v for key, v in options.items() if key in (*names, "weight_decay")}
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


@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
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
