"""Numbers as the data of a page hold them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vsim.history.history import History


def thinned(history: History, column: str, most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return steps and values of at most about `most` measurements, evenly spaced, the first and the last included."""
    steps, values = history.measured("step", column)
    kept = np.unique(np.linspace(0, max(0, len(steps) - 1), min(most, len(steps))).round().astype(int))
    return steps[kept], values[kept]


def rounded(values: Any) -> list[float | None]:
    """Return numbers rounded to 7 digits; None for NaN and infinity."""
    return [plain(float(f"{value:.7g}")) for value in values]


def plain(value: Any) -> Any:
    """Return a number without what JSON lacks: None for NaN and infinity, whole numbers without a decimal point."""
    if isinstance(value, float | np.floating):
        value = float(value)
        return None if not math.isfinite(value) else int(value) if value.is_integer() and abs(value) < 1e15 else value
    return value
