"""The clocks of a page: time and bytes of runs at some of their steps, for every network on which a slider stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vsim.analysis.cache import Cache
from vsim.analysis.report.plain import rounded
from vsim.analysis.spent import forming_bytes
from vsim.cluster.ledger import Event, Ledger
from vsim.history.history import History
from vsim.network import Compute, Network
from vsim.network.planes import Planes, planes


class Clocks:
    """The clocks of a page's runs; equal ledgers are priced once.

    Attributes:
        ledgers: what the page holds of each ledger.
    """

    def __init__(self, network: Network, compute: Compute, weights_bytes: int, most_steps: int, cache: Cache) -> None:
        self.network, self.compute, self.weights_bytes, self.cache = network, compute, weights_bytes, cache
        self.most_steps = most_steps
        self.ledgers: list[dict[str, Any]] = []
        self._places: dict[str, int] = {}  # digest of what a clock depends on → index in `ledgers`
        self._priced_on = [network.as_plain(), compute.as_plain()]

    def place(self, history: History, measured: NDArray[np.float64]) -> int:
        """Return the index of a run's ledger in `ledgers`; add the ledger if no equal one is there."""
        ledger = history.ledger
        last = int(history.last("step")) if len(history) else 0
        steps = self._steps(ledger, last, measured)
        rows = np.searchsorted(history["step"], steps) if len(history) else np.zeros(len(steps), dtype=int)
        sent = [history.bytes_per_node(way)[rows] if len(history) else np.zeros(1) for way in ("wire", "payload")]
        plain = [
            ledger.as_plain(),
            history.num_nodes,
            ledger.of_clients,
            steps,
            [own.tolist() for own in sent],
            self._priced_on,
        ]
        digest = hashlib.sha256(json.dumps(plain, default=list).encode()).hexdigest()
        if digest not in self._places:
            self._places[digest] = len(self.ledgers)
            self.ledgers.append(self.cache.get(digest, self._clock, history, steps, sent))
        return self._places[digest]

    def forming(self, history: History) -> dict[str, Any]:
        """Return the cost of the all-reduce that forms the mean of the nodes: bytes on the wire, and time as planes."""
        size, ledger = self.weights_bytes, Ledger(history.ledger.num_nodes, history.ledger.of_clients)
        ledger.steps = 1
        ledger.record(Event(1, 1, "weights", "all_reduce", "weights", size, (range(history.num_nodes),)))
        (own,) = planes(ledger, self.network, Compute(1.0), [1]).planes
        return {"planes": rounded((own * [0, 1, 1]).ravel()), "wire": forming_bytes(history, "wire", size)}

    def _steps(self, ledger: Any, last: int, measured: NDArray[np.float64]) -> list[int]:
        """Return steps between which time and bytes are about linear: all or, of many, measurements and syncs."""
        if last < self.most_steps:
            return list(range(last + 1))
        syncs = {step for event in ledger for at in (event.step, event.due) for step in (at - 1, at) if 0 <= at <= last}
        room = max(2, self.most_steps - len(measured))
        chosen = sorted(syncs)
        kept = chosen if len(chosen) <= room else chosen[:: -(-len(chosen) // room)]
        return sorted({0, last, *kept, *(int(step) for step in measured)})

    def _clock(self, history: History, steps: list[int], sent: list[NDArray[np.float64]]) -> dict[str, Any]:
        """Return time and bytes of a run at some of its steps, between which both are linear."""
        fixed, unknown = "", not len(history.ledger) and history.last("wire_bytes") > 0
        if unknown:
            fixed = "a log has no events, and so no hours"
        try:
            own = planes(history.ledger, self.network, self.compute, steps)
        except ValueError as error:
            line = _recorded(history, self.network, self.compute)
            mean = float(self.compute.node_seconds.mean())
            flat = tuple(np.array([[line.seconds[step] / mean, 0.0, 0.0]]) for step in steps)
            own = Planes(np.array(steps), flat, float(line.compute_seconds.sum()) / mean, mean, "both")
            fixed = f"its hours are for {line.network!r} and {line.compute!r}: {error}"
        kept = _bends(steps, own.planes, np.stack(sent, 1))
        return {
            "steps": [steps[i] for i in kept],
            "planes": [[None] if unknown else rounded(own.planes[i].ravel()) for i in kept],
            "wire": rounded(sent[0][kept]),
            "payload": rounded(sent[1][kept]),
            "computed": own.computed,
            "decided": own.decided,
            "fixed": fixed,
            "seconds": own.compute,
            "nodes": history.ledger.num_nodes,
        }


def _recorded(history: History, network: Network, compute: Compute) -> Any:
    """Return the timeline of a run on this network or, if another network decided its course, on that one."""
    try:
        return history.time(network, compute)
    except ValueError:
        decided = history.ledger.clock or {}
        if "network" in decided:
            network = Network.from_plain(decided["network"])
        if "compute" in decided:
            compute = Compute.from_plain(decided["compute"])
        return history.time(network, compute)


def _bends(steps: Sequence[int], of_steps: Sequence[NDArray[np.float64]], sent: NDArray[np.float64]) -> list[int]:
    """Return indices of steps between which bytes and time are linear in the step; keep all steps whose time has
    several planes.
    """
    kept = [0] if steps else []
    for i in range(1, len(steps)):
        if i + 1 < len(steps):
            a, b, c = (of_steps[j] for j in (kept[-1], i, i + 1))
            if len(a) == len(b) == len(c) == 1:
                share = (steps[i] - steps[kept[-1]]) / (steps[i + 1] - steps[kept[-1]])
                rows = [np.concatenate([own[0], sent[j]]) for own, j in ((a, kept[-1]), (b, i), (c, i + 1))]
                if np.allclose(rows[1], (1 - share) * rows[0] + share * rows[2], rtol=1e-7, atol=0):
                    continue
        kept.append(i)
    return kept
