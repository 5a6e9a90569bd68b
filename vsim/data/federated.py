"""Generated data of heterogeneous clients, as papers on federated learning define it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from vsim.arguments import countable, real_number, whole_number
from vsim.data.partition import Partition

__all__ = ["fcube", "synthetic_federated"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_PARTS, _OF_A_PART, _TESTED = 4, 1000, 1000  # FCUBE: clients, training points per client, validation points
_FEATURES, _CLASSES = 60, 10  # synthetic(α, β)
_BYTES_OF_A_CLIENT = 453 * 4 * _FEATURES  # synthetic(α, β): average over the clients


def fcube(seed: int = 0) -> tuple[Partition, TensorDataset]:
    """FCUBE: points of a cube; each of four clients gets two opposite octants [Li et al. 2021, arXiv:2102.02079].

    A point's label is 0 if its first coordinate is positive, else 1. Clients 0 to 3 have 1,000 training points each:
    half in the octant with signs (+, +, +), (+, +, −), (+, −, +) or (+, −, −), and half in the opposite octant.

    Args:
        seed: seed of the points' own generator.

    Returns:
        (train, val): a `Partition` of 4,000 points for num_nodes=4, and a dataset of 1,000 points from the whole cube;
        both with x (N, 3) float32 and y (N,) int64.

    Raises:
        ValueError: an argument is out of its range.
    """
    stream = np.random.default_rng(whole_number("seed", seed, at_least=0))
    owners = np.arange(_PARTS).repeat(_OF_A_PART)
    y = np.tile([0, 1], _PARTS * _OF_A_PART // 2)
    signs = np.stack([np.ones_like(owners), np.where(owners > 1, -1, 1), np.where(owners % 2, -1, 1)], 1)  # of label 0
    x = stream.random(signs.shape) * signs * (1 - 2 * y)[:, None]
    val = stream.uniform(-1, 1, (_TESTED, 3))
    return _dealt(x, y, owners, 2, f"FCUBE, seed={seed}"), _dataset(val, (val[:, 0] <= 0).astype(np.int64))


def synthetic_federated(
    alpha: float, beta: float, *, num_clients: int = 30, seed: int = 0
) -> tuple[Partition, Partition]:
    """Synthetic(α, β): each client has a different linear classifier and distribution of inputs [Li et al. 2018,
    arXiv:1812.06127].

        y = argmax(W_k x + b_k) with W_k, b_k ~ N(u_k, 1), u_k ~ N(0, α)
        x ~ N(v_k, Σ), Σ diagonal with Σ_jj = j^(−1.2), v_k ~ N(B_k, 1), B_k ~ N(0, β)

    x has 60 numbers, y is one of 10 classes, and a client has 50 + ⌊exp N(4, 2)⌋ examples, nine tenths for training and
    one tenth for validation. α and β are standard deviations, as in the authors' code. u_k adds the same number to the
    scores of all classes, so that α changes no label.

    Args:
        alpha: α, at least 0. beta: β, at least 0.
        num_clients: the number of clients K; 30 in the paper, 100 in [Li et al. 2019, arXiv:1905.10497].
        seed: seed of all draws.

    Returns:
        (train, val): two `Partition`s of x (N, 60) float32 and y (N,) int64. `val.dataset` has the validation examples
        of all clients; give `val` itself as `client_val_dataset`.

    Raises:
        ValueError: an argument is out of its range.
    """
    alpha, beta = (real_number(name, value, at_least=0) for name, value in (("alpha", alpha), ("beta", beta)))
    countable("num_clients", num_clients, "clients", _BYTES_OF_A_CLIENT)
    stream = np.random.default_rng(whole_number("seed", seed, at_least=0))
    sizes = stream.lognormal(4, 2, num_clients).astype(np.int64) + 50
    shifts, centers = alpha * stream.standard_normal(num_clients), beta * stream.standard_normal(num_clients)
    drawn = [_client(stream, *of_client)[2:] for of_client in zip(sizes, shifts, centers, strict=True)]
    trained = sizes * 9 // 10

    def dealt(own: list[tuple[Floats, Ints]]) -> Partition:
        x, y = (np.concatenate(part) for part in zip(*own, strict=True))
        owners = np.arange(num_clients).repeat([len(labels) for _, labels in own])
        return _dealt(x, y, owners, _CLASSES, f"synthetic({alpha:g}, {beta:g}), seed={seed}")

    train = dealt([(x[:end], y[:end]) for (x, y), end in zip(drawn, trained, strict=True)])
    return train, dealt([(x[end:], y[end:]) for (x, y), end in zip(drawn, trained, strict=True)])


def _client(stream: np.random.Generator, size: int, shift: float, center: float) -> tuple[Floats, Floats, Floats, Ints]:
    """Draw a client's W (60, 10), b (10,), x (N, 60) and y (N,)."""
    mean = center + stream.standard_normal(_FEATURES)
    weights = shift + stream.standard_normal((_FEATURES, _CLASSES))
    bias = shift + stream.standard_normal(_CLASSES)
    x = mean + np.arange(1, _FEATURES + 1) ** -0.6 * stream.standard_normal((size, _FEATURES))
    return weights, bias, x, (x @ weights + bias).argmax(1)


def _dealt(x: Floats, y: Ints, owners: Ints, classes: int, description: str) -> Partition:
    return Partition(_dataset(x, y), int(owners[-1]) + 1, owners, range(classes), y, description)


def _dataset(x: Floats, y: Ints) -> TensorDataset:
    return TensorDataset(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y))
