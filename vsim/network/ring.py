"""The ring on which a collective is fastest where links differ: a ring is as fast as its slowest link."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Rings are considered with at most so many sets of visits on the way.
FEW = 2**8


def slowest_on_best_ring(
    latency: Floats, seconds_per_byte: Floats, message_bytes: Floats, nodes: NDArray[np.int64] | None = None
) -> Floats:
    """Return the time of a message on the slowest link of the best ring, for several sizes of messages (E,): (E,).

    A ring may come to a place as often as there are nodes. Every ring is considered of up to 8 nodes, and of up to 4
    places where the links inside are the fastest: then n − 1 times are enough, and the rest of the nodes follow in a
    row. It comes to each of 5 places twice at most, of 6 to 8 once. Beyond that the best of two rings, one made for
    short messages and one for long ones, by insertion: place by place, those with the poorest links first, where the
    slower of its two links is fastest; then each is taken out twice and put elsewhere if that is better.

    Args:
        latency, seconds_per_byte: (n, n) from place to place, n at least 2; on the diagonal between nodes of one place.
        message_bytes: (E,).
        nodes: (n,) of every place; default one each.
    """
    nodes = np.ones(len(latency), dtype=np.int64) if nodes is None else nodes
    most = next((m for m in range(int(min(nodes.max(), FEW)), 0, -1) if np.prod(np.minimum(nodes, m) + 1.0) <= FEW), 1)
    visits = np.minimum(nodes, most)
    if len(nodes) <= FEW.bit_length() - 1:
        slowest = _exact(latency[..., None] + seconds_per_byte[..., None] * message_bytes, visits.tolist())
    else:
        links = [(ring, np.roll(ring, -1)) for ring in map(_inserted, (latency, seconds_per_byte))]
        slowest = np.minimum(*((latency[own] + seconds_per_byte[own] * message_bytes[:, None]).max(1) for own in links))
    inner = np.flatnonzero(nodes > visits)
    inside = latency[inner, inner] + seconds_per_byte[inner, inner] * message_bytes[:, None]
    return np.maximum(slowest, inside.max(1, initial=0))


def _exact(cost: Floats, visits: list[int]) -> Floats:
    """Likewise, of links (n, n, E) and rings that come to every place so many times."""
    # The slowest link of the best path from place 0 with so many visits of every place that ends at one of them.
    paths = {((1, *[0] * (len(visits) - 1)), 0): np.zeros(cost.shape[2])}
    for visited in itertools.product(range(1, visits[0] + 1), *(range(most + 1) for most in visits[1:])):
        for j, times in enumerate(visited):
            before = (*visited[:j], times - 1, *visited[j + 1 :])
            steps = [np.maximum(paths[before, i], cost[i, j]) for i in range(len(visits)) if (before, i) in paths]
            if steps:
                paths[visited, j] = np.minimum.reduce(steps)
    whole = [np.maximum(paths[tuple(visits), j], cost[j, 0]) for j in range(len(visits)) if (tuple(visits), j) in paths]
    return np.minimum.reduce(whole)


def _inserted(cost: Floats) -> NDArray[np.int64]:
    def inserted(ring: NDArray[np.int64], place: int) -> NDArray[np.int64]:
        slower = np.maximum(cost[ring, place], cost[place, np.roll(ring, -1)])
        return np.insert(ring, int(slower.argmin()) + 1, place)

    def links(ring: NDArray[np.int64]) -> list[float]:
        slowest_first: list[float] = np.sort(cost[ring, np.roll(ring, -1)])[::-1].tolist()
        return slowest_first

    nearest = np.where(np.eye(len(cost), dtype=bool), np.inf, cost).min(1)
    order = np.argsort(-nearest, kind="stable")
    ring = order[:1]
    for place in order[1:]:
        ring = inserted(ring, place)
    for place in np.tile(order, 2):
        other = inserted(ring[ring != place], place)
        if links(other) < links(ring):
            ring = other
    return ring
