"""The import path of collectives for users; they are defined in `vsim.algorithms.communicate`."""

from vsim.algorithms.communicate import (
    all_gather,
    all_reduce,
    broadcast,
    send,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "send",
]
