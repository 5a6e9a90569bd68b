"""The event clock of an asynchronous run: finds the local step, message or timer that ends next."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from vsim.network.compute import Compute
from vsim.network.links import Network

# Kinds of events, in the order in which simultaneous events are handled: a local step is done, a message reaches the
# server, a timer of the server ends, a message reaches its worker.
STEP, ARRIVAL, TIMER, RETURN = range(4)
_BLOCK = 256  # number of steps whose seconds are drawn at once
# Times that agree to this many digits are equal: three steps of 0.1 s end with a step of 0.3 s, not 6e-17 s later.
_DIGITS = 10


class VirtualClock:
    """K workers and a server, in virtual time.

    A message costs as much as one node's push or pull on the network. Messages on one line queue in order. The server's
    line takes a message only when the message is first on its node's line, so that a slow line delays no other line.
    Simultaneous events are ordered by kind, then by node.

    Attributes:
        now: the time in seconds. steps: (K,) completed local steps of every worker. taken: the sum of `steps`.
    """

    def __init__(self, num_nodes: int, network: Network, compute: Compute) -> None:
        self.network, self.compute = network, compute
        self.now, self.taken, self.number = 0.0, 0, 0
        self.steps = [0] * num_nodes
        self._coming: list[tuple[float, int, int, int, float]] = []  # a heap: rounded time, kind, node, number, time
        self._ends, self._begun = [0.0] * num_nodes, 0.0  # end of every worker's step; seconds of all begun steps
        self._busy = [0.0, 0.0]  # time until which the server's line is busy, in and out
        # Queues of messages (number, bytes) on the nodes' lines, to the server and back. A queue's first is under way.
        self._queues: list[list[list[tuple[int, float]]]] = [[[] for _ in range(num_nodes)] for _ in range(2)]
        self._drawn = np.empty((0, num_nodes))
        self._computed = compute.steps(num_nodes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes, without the drawn compute seconds, which follow from the seed."""
        fixed = ("network", "compute", "_drawn", "_computed")
        return {name: value for name, value in vars(self).items() if name not in fixed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        vars(self).update(state)

    @property
    def facts(self) -> dict[str, Any]:
        """The network and compute that determine the seconds, as lists, numbers and text."""
        return {"network": self.network.as_plain(), "compute": self.compute.as_plain()}

    @property
    def is_between_steps(self) -> bool:
        """Whether the next event is the end of a worker's local step, or there is no event."""
        return not self._coming or self._coming[0][1] == STEP

    @property
    def computed_seconds(self) -> float:
        """Compute seconds so far, averaged over the workers."""
        done = self._begun - sum(max(0.0, end - self.now) for end in self._ends)
        return done * self.compute.utilization / len(self.steps)

    def next(self) -> tuple[int, int, int]:
        """Advance to the next event; return its kind, the node, and the number of the message or timer."""
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
        """Return the seconds of a worker's next local step."""
        own = self.compute.node_seconds
        if self.compute.varies:
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
        busy = float(self.network.server_seconds(to_server, payload_bytes))
        end = max(self.now + self.message_seconds(node, payload_bytes, to_server), self._busy[way] + busy)
        self._busy[way] = max(self.now, self._busy[way]) + busy
        self._plan(end, what, node, number)

    def message_seconds(self, node: int, payload_bytes: float, to_server: bool) -> float:
        """Return the seconds that a message takes if no other message delays it."""
        collective = "push" if to_server else "pull"
        return float(self.network.seconds(collective, self.network.kind([node]), payload_bytes)[0])

    def wait(self, seconds: float) -> int:
        """Set a timer; return its number."""
        self.number += 1
        self._plan(self.now + seconds, TIMER, 0, self.number)
        return self.number

    def cancel(self, number: int) -> None:
        """Cancel a timer, so that no event marks its end."""
        self._coming = [one for one in self._coming if one[3] != number]
        heapq.heapify(self._coming)

    def _plan(self, when: float, what: int, node: int, number: int = 0) -> None:
        heapq.heappush(self._coming, (float(f"{when:.{_DIGITS}g}"), what, node, number, when))
