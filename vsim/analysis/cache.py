"""A cache that keeps results for as long as they are requested."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class Cache:
    """Results by a key that determines them; `end_round` drops results that were not requested since the last round."""

    def __init__(self) -> None:
        self._before: dict[Hashable, Any] = {}
        self._now: dict[Hashable, Any] = {}

    def get(self, key: Hashable, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result for a key; compute it from the arguments if it is missing."""
        if key not in self._now:
            self._now[key] = self._before[key] if key in self._before else compute(*arguments)
        return self._now[key]

    def end_round(self) -> None:
        self._before, self._now = self._now, {}
