"""The ring on which a collective is fastest where links differ: a ring is as fast as its slowest link."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Up to so many places every ring is considered.
FEW = 8


def slowest_on_best_ring(latency: Floats, seconds_per_byte: Floats, message_bytes: Floats) -> Floats:
    """Return the time of a message on the slowest link of the best ring, for several sizes of messages (E,): (E,).

    Exact for up to `FEW` places. Beyond that the best of two rings, one made for short messages and one for long ones,
    by insertion: place by place, those with the poorest links first, where the slower of its two links is fastest; then
    each is taken out twice and put elsewhere if that is better.

    Args:
        latency, seconds_per_byte: (n, n) from place to place, n at least 2.
        message_bytes: (E,).
    """
    if len(latency) > FEW:
        found = []
        for cost in (latency, seconds_per_byte):
            ring = _inserted(cost)
            link = ring, np.roll(ring, -1)
            found.append((latency[link] + seconds_per_byte[link] * message_bytes[:, None]).max(1))
        return np.minimum(*found)
    cost = latency[..., None] + seconds_per_byte[..., None] * message_bytes  # (n, n, E)
    others = range(1, len(cost))
    # The slowest link of the best path from place 0 through all places of a set (bits) to one of them.
    paths = {(1 << j, j): cost[0, j] for j in others}
    for visited in range(2, 1 << len(cost), 2):
        for j in others:
            before = visited & ~(1 << j)
            if visited != before and before:
                steps = [np.maximum(paths[before, i], cost[i, j]) for i in others if before >> i & 1]
                paths[visited, j] = np.minimum.reduce(steps)
    return np.minimum.reduce([np.maximum(paths[(1 << len(cost)) - 2, j], cost[j, 0]) for j in others])


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
