"""How examples are dealt to K clients: who owns each of N examples, whose classes are `codes` (N,), of 0 … C − 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import whole_number

Ints = NDArray[np.int64]
_DRAWS = 1000  # by which every client has its examples, or the partition is given up


def _iid(stream: np.random.Generator, codes: Ints, num_nodes: int) -> Ints:
    owners = np.empty_like(codes)
    owners[stream.permutation(len(codes))] = _pieces(len(codes), num_nodes)
    return owners


def _dirichlet(stream: np.random.Generator, codes: Ints, num_nodes: int, alpha: float, min_size: int) -> Ints:
    owners = np.empty_like(codes)
    counts = _drawn(stream, np.bincount(codes), num_nodes, alpha, min_size)
    for own, parts in zip(_shuffled(stream, codes), counts, strict=True):
        owners[own] = np.repeat(np.arange(num_nodes), parts)
    return owners


def _shards(stream: np.random.Generator, codes: Ints, num_nodes: int, shards: int) -> Ints:
    pieces = shards * num_nodes
    if pieces > len(codes):
        raise ValueError(f"partition: shards={shards} for {num_nodes} nodes are {pieces:,}, of {len(codes):,} examples")
    owners = np.empty_like(codes)
    dealt = stream.permutation(pieces) // shards  # the client of every piece
    owners[np.concatenate(_shuffled(stream, codes))] = dealt[_pieces(len(codes), pieces)]
    return owners


def _by_classes(stream: np.random.Generator, codes: Ints, num_nodes: int, classes: int) -> Ints:
    sizes = np.bincount(codes)
    whole_number("classes", classes, at_most=len(sizes))
    if classes * num_nodes < len(sizes):
        raise ValueError(
            f"partition: {num_nodes} nodes with classes={classes} have no more than {classes * num_nodes} of the "
            f"{len(sizes)} classes, and the others would be nobody's"
        )
    has = np.zeros((num_nodes, len(sizes)), bool)
    for client in has:
        client[np.argsort(has.sum(0) + stream.random(len(sizes)))[:classes]] = True  # which the fewest have so far
    if (has.sum(0) > sizes).any():
        rare = int(np.argmax(has.sum(0) - sizes))
        raise ValueError(f"partition: {has.sum(0)[rare]} nodes need a class that has {sizes[rare]} examples")
    owners = np.empty_like(codes)
    for own, clients in zip(_shuffled(stream, codes), has.T, strict=True):
        owners[own] = stream.permutation(np.flatnonzero(clients))[_pieces(len(own), int(clients.sum()))]
    return owners


def _quantity(stream: np.random.Generator, codes: Ints, num_nodes: int, alpha: float, min_size: int) -> Ints:
    # In the order of their places within their own classes, so that any stretch has all classes in proportion.
    own = _shuffled(stream, codes)
    places = np.concatenate([(np.arange(len(one)) + stream.random()) / len(one) for one in own])
    (counts,) = _drawn(stream, np.array([len(codes)]), num_nodes, alpha, min_size)
    owners = np.empty_like(codes)
    owners[np.concatenate(own)[np.argsort(places)]] = np.repeat(np.arange(num_nodes), counts)
    return owners


# Kind → how it is dealt, and its arguments by default; None: to be given.
KINDS: dict[str, tuple[Callable[..., Ints], dict[str, Any]]] = {
    "iid": (_iid, {}),
    "dirichlet": (_dirichlet, {"alpha": None, "min_size": 10}),
    "shards": (_shards, {"shards": 2}),
    "classes": (_by_classes, {"classes": None}),
    "quantity": (_quantity, {"alpha": None, "min_size": 10}),
}


def _pieces(size: int, number: int) -> Ints:
    """The piece of each of `size` places, cut into so many whose sizes differ by at most 1."""
    return np.arange(size) * number // size


def _shuffled(stream: np.random.Generator, codes: Ints) -> list[Ints]:
    """The examples of every class, shuffled."""
    return [stream.permutation(np.flatnonzero(codes == c)) for c in range(codes.max() + 1)]


def _drawn(stream: np.random.Generator, totals: Ints, num_nodes: int, alpha: float, min_size: int) -> Ints:
    """Cut each of `totals` (C,) by shares from Dirichlet(α): (C, K), of which each client has min_size at least."""
    if min_size * num_nodes > totals.sum():
        raise ValueError(
            f"partition: min_size={min_size} for {num_nodes:,} nodes are {min_size * num_nodes:,} examples, and there "
            f"are {totals.sum():,}; lower min_size, or take fewer nodes"
        )
    logs, short = np.empty((len(totals), num_nodes)), np.full(num_nodes, True)
    for _ in range(_DRAWS):
        # Logarithms of Gamma(α), which for small α are beyond floating point: G(α) = G(α + 1) · U^(1/α).
        new = len(totals), int(short.sum())
        logs[:, short] = np.log(stream.standard_gamma(alpha + 1, new)) - stream.standard_exponential(new) / alpha
        shares = np.exp(logs - logs.max(1, keepdims=True))
        ends = np.rint(np.cumsum(shares / shares.sum(1, keepdims=True), axis=1) * totals[:, None]).astype(np.int64)
        counts: Ints = np.diff(ends, axis=1, prepend=0)
        short = counts.sum(0) < min_size
        if not short.any():
            return counts
    raise ValueError(
        f"partition: after {_DRAWS:,} draws of Dirichlet({alpha}), {short.sum():,} of {num_nodes:,} nodes have fewer "
        f"than min_size={min_size} of {totals.sum():,} examples; lower min_size, raise alpha, or take fewer nodes"
    )
