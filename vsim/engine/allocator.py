"""Memory that a step frees is kept for the next step, where the C library's allocator can be asked to.

A step allocates and frees the same tensors over and over. glibc gives large blocks back to the system as soon as they
are free, and each then costs page faults again at its next use: 20,000 of them in a step of four small GPTs, a seventh
of its time. While a run trains, blocks of up to 256 MB stay with the process; afterwards they are given back.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# malloc.h: names of mallopt's settings, what runs set them to, and what they are afterwards (glibc's own limits).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_WHILE_TRAINING = {_MMAP_THRESHOLD: 2**28, _TRIM_THRESHOLD: 2**30}
_AFTERWARDS = {_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26}

_runs = 0  # that train now, in this process


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Keep freed memory within a block. Does nothing where the C library is not glibc."""
    global _runs
    library = _glibc()
    if library is not None and _runs == 0:
        _set(library, _WHILE_TRAINING)
    _runs += 1
    try:
        yield
    finally:
        _runs -= 1
        if library is not None and _runs == 0:
            _set(library, _AFTERWARDS)
            library.malloc_trim(0)


def _set(library: Any, settings: dict[int, int]) -> None:
    for name, value in settings.items():
        library.mallopt(name, value)


@functools.lru_cache(maxsize=1)
def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018
        return library
    except (OSError, AttributeError, TypeError):
        return None
