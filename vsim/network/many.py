"""When a run would have been at some of its steps, on many networks at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.network.clock import MOMENTS, Record
from vsim.network.compute import Compute
from vsim.network.links import Network
from vsim.network.timeline import timeline

Floats = NDArray[np.float64]
# What all nodes send and wait for in a step: (collective, payload) of each event, in order.
_Sent = tuple[tuple[str, float], ...]


class _Kind(NamedTuple):
    """A kind of step: whether it computes, as all do but what is sent before training; and what is sent."""

    computes: bool
    sent: _Sent


def seconds_on(
    ledger: Record, networks: Sequence[Network], compute: Compute | float | str, steps: Sequence[int]
) -> Floats:
    """Return the seconds of `timeline` when the last node is done with each of these steps: (networks, steps).

    Where all nodes are alike and wait for each other in every step, as in most runs, a step takes as long as any other
    in which the same is sent: each kind of step is priced once, on all networks together. Other runs are priced network
    by network.
    """
    compute, at = Compute.of(compute), np.asarray(steps, dtype=np.int64)
    kinds = _kinds(ledger, int(at.max(initial=0))) if _nodes_are_alike(compute) else None
    if kinds is None:
        seconds = [timeline(ledger, network, compute).seconds[at] for network in networks]
        return np.array(seconds).reshape(len(networks), len(at))
    for network in networks:
        network.check(ledger.num_nodes)
    compute.steps(ledger.num_nodes)  # which is checked, too
    prices = _prices({sent for kind in kinds for sent in kind.sent}, ledger.num_nodes, networks, compute.layers)
    quiet = at.copy()
    total = np.zeros((len(networks), len(at)))
    for kind, where in kinds.items():
        count = np.searchsorted(where, at, side="right")
        total += np.outer(_duration(kind, prices, compute, len(networks)), count)
        quiet -= kind.computes * count
    return np.where(
        at > 0, total + float(compute.node_seconds[0]) * quiet, 0.0
    )  # what is sent before belongs to step 1


def _nodes_are_alike(compute: Compute) -> bool:
    return not compute.jitter and len(set(compute.node_seconds.tolist())) == 1


def _kinds(ledger: Record, last: int) -> dict[_Kind, list[int]] | None:
    """Return kind → the steps of that kind, up to step `last`; None: something is not of all nodes, or due later."""
    if getattr(ledger, "attendance", ()):
        return None
    by_step: dict[int, dict[str, list[tuple[str, float]]]] = {}
    for event in ledger:
        groups = [group for group in event.groups if len(group) > 1]
        if event.collective in ("send", "push", "pull") or event.due != event.step:
            return None
        if groups and len(groups[0]) < ledger.num_nodes:
            return None
        if groups and event.step <= last:
            own = by_step.setdefault(event.step, {moment: [] for moment in MOMENTS})
            own[event.moment].append((event.collective, event.payload_bytes))
    kinds: dict[_Kind, list[int]] = {}
    for step in sorted(by_step):
        sent = tuple(one for moment in MOMENTS for one in by_step[step][moment])
        kinds.setdefault(_Kind(step > 0, sent), []).append(step)
    return kinds


def _prices(
    sent: set[tuple[str, float]], num_nodes: int, networks: Sequence[Network], layers: int
) -> Mapping[tuple[str, float], Floats]:
    """Return (collective, payload) → the seconds of a layer of it on every network: (networks,)."""
    prices: dict[tuple[str, float], Floats] = {}
    for collective in sorted({collective for collective, _ in sent}):
        payloads = [payload for own, payload in sent if own == collective]
        parts = np.array(payloads) / layers
        seconds = [network.seconds(collective, network.kind(range(num_nodes)), parts) for network in networks]
        columns = np.array(seconds).reshape(len(networks), len(parts)).T
        prices.update(zip(((collective, payload) for payload in payloads), columns, strict=True))
    return prices


def _duration(kind: _Kind, prices: Mapping[tuple[str, float], Floats], compute: Compute, networks: int) -> Floats:
    """Return how long a step takes on every network: (networks,); as the clock takes it, see `Clock`."""
    layers, own = compute.layers, float(compute.node_seconds[0]) if kind.computes else 0.0
    now = np.full(networks, own)
    ready = np.full(networks, own * (layers + 1) / (3 * layers - 1) if layers > 1 else own)
    busy = np.zeros(networks)
    for sent in kind.sent:
        price = prices[sent]
        busy = np.maximum(np.maximum(ready, busy) + layers * price, now + price)
        ready = np.where(busy > now, busy, ready)
        now = np.maximum(now, busy)
    return now
