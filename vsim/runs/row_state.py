"""The state of some rows of a run, encoded: what a checkpoint holds of nodes, and what moves when they come and go.

For example, a run of two rows has weights w (2, P) and one random stream a row. `rows_of(run, [1, 0])` is

    {"optimizer": …, "streams": {"nodes": [<state of stream 1>, <state of stream 0>]}}

with matrix=True also {"weights": w[[1, 0]]},

and `fill_rows` writes it into the run's rows 0 and 1: into the tensors, generators and optimizers that the run has by
then, so that views of them stay valid. `vsim.checkpoint.tree` defines encoded values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vsim.checkpoint.tree import Encoded, Filler, cut, encoded, first_rows, joined
from vsim.cluster.optimizers import forget
from vsim.runs.lasting import PYTHON, restore, stacked_state
from vsim.runs.tracked import TrackedRun

SENT = -1  # stands for a row that another process holds, and has sent


def rows_of(
    run: TrackedRun, rows: Sequence[int], matrix: bool = False, sent: Mapping[str, Encoded] | None = None
) -> dict[str, Encoded]:
    """Return the encoded state of these rows of a run; `matrix`: with weights and buffers.

    Args:
        rows: rows held here, or SENT.
        sent: the state of the row that was sent, with weights and buffers, which are then included.
    """
    held, found = len(run.rows), {}
    for name, value in stacked_state(run).items():
        if not sent:
            if matrix or not _is_in_matrix(name):
                found[name] = cut(encoded(value, name, True, held), list(rows), [held])
        elif all(row == SENT for row in rows):  # the row that a process without a node holds has no state to join
            found[name] = cut(sent[name], [0] * len(rows), [1])
        else:
            both = joined([encoded(value, name, True, held), sent[name]], [held, 1], True)
            found[name] = cut(both, [held if row == SENT else row for row in rows], [held, 1])
    return found


def fill_rows(run: TrackedRun, state: Mapping[str, Encoded], filler: Filler) -> None:
    """Fill the rows of a run, whose number may have changed, with the state that `rows_of` returned.

    Optimizers are emptied first, as their state has the old number of rows; `state` fills them. What a strategy made in
    its setup for more nodes (`Presence.made`) is cut to the rows that there are now.

    Raises:
        ValueError: weights or buffers have other shapes than in this run.
    """
    forget(run.strategy.optim)
    live = stacked_state(run)
    if lost := [name for name in live if name not in state and not _is_in_matrix(name) and name not in PYTHON]:
        raise LookupError(f"no state of {', '.join(lost)}")
    live |= {name: first_rows(live[name], made, len(run.rows)) for name, made in run.presence.made.items()}
    filled = {name: filler.fill(own, live[name], name) for name, own in state.items()}
    if any(own is not live[name] for name, own in filled.items() if _is_in_matrix(name)):
        raise ValueError("weights or buffers have other shapes")
    restore(run, filled)


def _is_in_matrix(name: str) -> bool:
    return name == "weights" or name.startswith("buffer ")
