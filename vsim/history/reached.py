"""Where a curve reaches a loss."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Crossing(NamedTuple):
    """The steps at which a curve reaches a loss; NaN if it never does.

    Between measurements the last value holds, so that a loss is reached at a measurement. Fewer measurements can only
    make the step later.

    Attributes:
        step: step of the first measurement at or below the loss.
        formed: step of the first such measurement of a model that a node or a server holds, not of a mean of nodes.
        first: the earliest step that can have reached the loss: the step after the measurement before `step`.
    """

    step: float
    formed: float
    first: float


NEVER = Crossing(math.nan, math.nan, math.nan)


def crossing(
    steps: ArrayLike, losses: ArrayLike, target: float, formed: ArrayLike | None = None, stays: bool = False
) -> Crossing:
    """Return where a curve reaches a loss.

    >>> crossing([0, 20, 40, 60], [3.0, 2.0, 1.0, 1.5], 1.75, formed=[True, True, False, True])
    Crossing(step=40.0, formed=60.0, first=21.0)

    Args:
        steps: (M,) whole numbers, ascending. losses: (M,) measured at these steps. target: the loss to reach.
        formed: (M,) whether the measured model exists; default: all do.
        stays: whether a measurement counts only if no later one is above the loss.
    """
    at, measured = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    low = measured <= target
    if stays:
        low = np.logical_and.accumulate(low[::-1])[::-1]
    reached = np.flatnonzero(low)
    if not len(reached):
        return NEVER
    i = int(reached[0])
    exists = reached if formed is None else np.flatnonzero(low & np.asarray(formed, dtype=bool))
    first = at[i - 1] + 1 if i else at[i]
    return Crossing(float(at[i]), float(at[exists[0]]) if len(exists) else math.nan, float(first))
