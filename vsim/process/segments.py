"""Let nodes come and go: processes form a new group in every segment, and joining nodes get the state of a peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vsim.checkpoint.files import Checkpoint, packed, unpacked
from vsim.process.collectives import completing, open_group
from vsim.records.history import History
from vsim.training.run import Run
from vsim.training.spec import RunSpec

# Time limit for the other nodes' interpreters to start and to read the shipped data. It may be generous, because the
# parent notices an interpreter that dies.
_START = timedelta(seconds=600)


class Left(Exception):
    """Raised when the node of this process no longer takes part."""


@dataclass
class Meeting:
    """Connects the process of a node with the other nodes' processes, in one default process group after another.

    Attributes:
        store: the store of all processes of the run. backend: of torch.distributed.
        node: the number of this process's node.
        patience: the timeout of a collective.
        call: asks the parent to start processes for nodes that join a segment. Its arguments are the peer and the
            joining nodes, the nodes of the segment, and the segment's first step.
    """

    store: dist.Store
    backend: str
    node: int
    patience: timedelta
    call: Callable[[Sequence[int], Sequence[int], int], Any]

    def meet(self, nodes: Sequence[int], what: str) -> None:
        """Form the default process group of `nodes`, in their order; this node must be one of them."""
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.PrefixStore(what, self.store)
        store.set(f"started {self.node}", "")
        with completing(f"meeting the other nodes for {what} on node {self.node}"):
            # First wait for nodes that start slowly, so that `patience` limits only collectives.
            store.wait([f"started {node}" for node in nodes], _START + self.patience)
            rank, size = nodes.index(self.node), len(nodes)
            open_group(self.backend, store, rank, size, self.patience)

    def passed_on(self, state: Any, copying: Sequence[int], step: int) -> Any:
        """Broadcast the peer's `state` to the nodes that join at a step, and return it; see `Setup` for `copying`."""
        self.meet(copying, f"joining at step {step}")
        message = [state]
        with completing(f"passing on the state at step {step} on node {self.node}"):
            dist.broadcast_object_list(message, 0)
        return message[0]


@dataclass(eq=False)
class NodeRun(Run):
    """A run in the process of a node, which holds one row."""

    meeting: Meeting | None = None  # None: there is one process group, of all nodes

    def moved(self, step: int) -> NodeRun:
        """See `Run.moved`. The peer sends its row to joining nodes, and this process meets the nodes of the step.

        Raises:
            Left: this node does not take part in the step.
        """
        plan, meeting, start = self.plan, self.meeting, self.spec.start
        assert plan is not None and meeting is not None and start is not None
        nodes, copying = plan.machines(step), (plan.peer(step), *plan.joining(step))
        if len(copying) > 1 and meeting.node == copying[0]:
            meeting.call(copying, nodes, step)
            of_state = {name: getattr(start, name) for name in ("step", "held", "stacked", "shared")}
            tree = {**of_state, "history": start.history.as_plain()}
            meeting.passed_on((*packed(tree), self.minibatch_size), copying, step)
        if meeting.node not in nodes:
            raise Left
        meeting.meet(nodes, f"step {step}")
        return replace(self, continues=[0]).attended(step)  # type: ignore[return-value]


def joined(spec: RunSpec, meeting: Meeting, copying: Sequence[int], step: int) -> tuple[RunSpec, int | None]:
    """Return the options and minibatch size of a node that joins at a step; it starts from its peer's state."""
    text, contents, minibatch_size = meeting.passed_on(None, copying, step)
    tree = unpacked(text, contents)
    start = Checkpoint(**{**tree, "history": History.from_plain(tree["history"]), "settings": {}})
    return replace(spec, start=start, max_memory_usage=None), minibatch_size
