"""The event clock of an asynchronous run: which worker's step, or which message, is done next."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from vsim.network.compute import Compute
from vsim.network.links import Network

# What happens, in this order where it happens at the same moment: a local step is done, a message reaches the server,
# the server has waited so long, a message reaches its worker.
STEP, ARRIVAL, TIMER, RETURN = range(4)
_BLOCK = 256  # steps whose seconds are drawn at once
# Moments that agree to this many digits are one: three steps of 0.1 s end with one of 0.3 s, not 6e-17 s after it.
_DIGITS = 10


class VirtualClock:
    """K workers and a server, in virtual time.

    A message costs as much as one node's push or pull does on the network. Messages on one line queue in order; the
    server's line takes a message when its turn has come on its node's line, so that a slow line holds up no others.
    Simultaneous events are ordered by kind, then by node.

    Attributes:
        now: seconds. steps: (K,) local steps that every worker has done; taken: their sum.
    """

    def __init__(self, num_nodes: int, network: Network, compute: Compute) -> None:
        self.network, self.compute = network, compute
        self.now, self.taken, self.number = 0.0, 0, 0
        self.steps = [0] * num_nodes
        self._coming: list[tuple[float, int, int, int, float]] = []  # a heap: when, in digits; what, node, number; when
        self._ends, self._begun = [0.0] * num_nodes, 0.0  # of the step that is computed; seconds of all that began
        self._busy = [0.0, 0.0]  # until when the server's line is, in and out
        # On the lines of the nodes, in and out: number and bytes; the first is on its way.
        self._queues: list[list[list[tuple[int, float]]]] = [[[] for _ in range(num_nodes)] for _ in range(2)]
        self._drawn = np.empty((0, num_nodes))
        self._computed = compute.steps(num_nodes)

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes, but for drawn seconds, which follow from their seed."""
        fixed = ("network", "compute", "_drawn", "_computed")
        return {name: value for name, value in vars(self).items() if name not in fixed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        vars(self).update(state)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that its seconds follow from, as lists, numbers and text."""
        return {"network": self.network.as_plain(), "compute": self.compute.as_plain()}

    @property
    def is_between_steps(self) -> bool:
        """Whether nothing more happens before some worker's next local step is done."""
        return not self._coming or self._coming[0][1] == STEP

    @property
    def computed_seconds(self) -> float:
        """Compute seconds so far, in the mean of the workers."""
        return (self._begun - sum(max(0.0, end - self.now) for end in self._ends)) / len(self.steps)

    def next(self) -> tuple[int, int, int]:
        """Go on to what happens next: what, the node, and the number of the message or timer."""
        if not self._coming:
            raise RuntimeError("all workers wait, and nothing is on its way: receive must return some that continue")
        _, what, node, number, when = heapq.heappop(self._coming)
        self.now = max(self.now, when)
        if what == STEP:
            self.steps[node] += 1
            self.taken += 1
        elif what != TIMER:
            queue = self._queues[what == RETURN][node]
            del queue[0]
            if queue:
                self._begin(node, what)
        return what, node, number

    def step(self, node: int) -> None:
        """Begin a worker's next local step."""
        seconds = self.step_seconds(node)
        self._begun += seconds
        self._ends[node] = self.now + seconds
        self._plan(self._ends[node], STEP, node)

    def step_seconds(self, node: int) -> float:
        """Return how long a worker's next local step takes."""
        own = self.compute.node_seconds
        if self.compute.jitter:
            while len(self._drawn) <= self.steps[node]:
                self._drawn = np.concatenate([self._drawn, self._computed.next(_BLOCK)])
            own = self._drawn[self.steps[node]]
        return float(own[node % len(own)])

    def send(self, node: int, payload_bytes: float, to_server: bool) -> int:
        """Put a message on its node's line; return its number."""
        queue, self.number = self._queues[not to_server][node], self.number + 1
        queue.append((self.number, payload_bytes))
        if len(queue) == 1:
            self._begin(node, ARRIVAL if to_server else RETURN)
        return queue[-1][0]

    def _begin(self, node: int, what: int) -> None:
        """Send the first message in the queue of a line, through the server's line."""
        way, to_server = int(what == RETURN), what == ARRIVAL
        number, payload_bytes = self._queues[way][node][0]
        held = float(self.network.server_seconds(to_server, payload_bytes))
        end = max(self.now + self.message_seconds(node, payload_bytes, to_server), self._busy[way] + held)
        self._busy[way] = max(self.now, self._busy[way]) + held
        self._plan(end, what, node, number)

    def message_seconds(self, node: int, payload_bytes: float, to_server: bool) -> float:
        """Return how long a message takes where no other is on its way."""
        collective = "push" if to_server else "pull"
        return float(self.network.seconds(collective, self.network.kind([node]), payload_bytes)[0])

    def wait(self, seconds: float) -> int:
        """Set a timer; return its number."""
        self.number += 1
        self._plan(self.now + seconds, TIMER, 0, self.number)
        return self.number

    def cancel(self, number: int) -> None:
        """Take a timer back: when it would have been over nothing happens, and no step lasts until then."""
        self._coming = [one for one in self._coming if one[3] != number]
        heapq.heapify(self._coming)

    def _plan(self, when: float, what: int, node: int, number: int = 0) -> None:
        heapq.heappush(self._coming, (float(f"{when:.{_DIGITS}g}"), what, node, number, when))
