"""Names and arguments on their way out: they work for one minor version more, with a warning. See docs/stability.md."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

_OWN = f"{Path(__file__).parent}{os.sep}"


def deprecated(old: str, new: str, *, removed: str) -> None:
    """Warn whoever called vsim that a name or an argument goes, and say what takes its place.

    A function calls this if it was given an old argument, and a module's `__getattr__` if it was asked for an old
    name; both then do what the new one does.

    Args:
        old: the name or argument as users write it, `vsim.old_name` or `compare(old=…)`.
        new: what to write instead.
        removed: the version that no longer has the old one, "0.5".
    """
    # The first caller outside of vsim: a warning that names a line of vsim is not shown, and helps nobody.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, level = frame.f_back, level + 1
    message = f"{old} is deprecated and goes with vsim {removed}; use {new}"
    warnings.warn(message, DeprecationWarning, stacklevel=level)
