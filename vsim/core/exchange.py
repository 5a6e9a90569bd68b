"""What processes tell each other in a step, in one message: losses, examples and tokens, and requests to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from vsim.core.run import Run
from vsim.data.batches import Uneven, sizes_of

R = TypeVar("R", bound=Run)
OfNodes = tuple[list[float], int, int]  # losses (K,), examples, tokens


def exchange(
    losses: Tensor, batch: Any, resting: Mapping[R, Sequence[int]], requested: bool
) -> tuple[dict[R, OfNodes], bool]:
    """Return run → (losses (K,), examples, tokens of its nodes), and whether a process was asked to stop.

    All runs of a group share the message. In one process nothing is sent, and nobody is asked.

    Args:
        losses: of the present rows of this process (R,). batch: theirs.
        resting: run → the places of its nodes that rest, whose examples do not count.
        requested: whether this process was asked to stop.
    """
    runs, found = [*resting], dict[R, OfNodes]()
    if runs[0].is_alone:
        # The only copy from the device in a step, for which the host waits. Copying the losses of several steps at once
        # would let the host run ahead, but a run with a non-finite loss must end with the weights of its last good
        # step, and callbacks, loggers and early stopping need each step's losses in that step.
        values = losses.tolist()
        for run in runs:
            rows = run.present_rows
            counted = (row for row in range(rows.start, rows.stop) if row - rows.start not in resting[run])
            found[run] = (values[rows], *sizes_of(batch, counted))
        return found, False
    present = [row for run in runs for row in range(run.present_rows.start, run.present_rows.stop)]
    alike = [sizes_of(batch)] * len(present) if present and not isinstance(batch, Uneven) else []
    sizes = torch.tensor(alike or [sizes_of(batch, [row]) for row in present], dtype=torch.float64).view(-1, 2)
    own = torch.cat([losses[present].cpu().double()[:, None], sizes], 1)
    request = torch.tensor([[requested, 0, 0]], dtype=torch.float64)  # also of a process without a present node
    ranges = [run.cluster.collectives.ranges for run in runs]
    counts = [[1, *(len(nodes) for nodes in column)] for column in zip(*ranges, strict=True)]  # by process, then run
    sent = torch.cat([request, own])
    message = runs[0].cluster.collectives.all_rows(sent, [sum(of_process) for of_process in counts], "losses")
    parts = iter(message.split([count for of_process in counts for count in of_process]))
    requests, *by_run = zip(*([next(parts) for _ in of_process] for of_process in counts), strict=True)
    for run, of_run in zip(runs, by_run, strict=True):
        node_losses, *of_nodes = torch.cat(of_run).T.tolist()
        examples, tokens = (sum(n for node, n in enumerate(one) if node not in resting[run]) for one in of_nodes)
        found[run] = node_losses, int(examples), int(tokens)
    return found, bool(torch.cat(requests)[:, 0].any())
