"""Results that are computed once for as long as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class Cache:
    """Results by everything that they depend on; `end_round` forgets results that were not asked for since the last."""

    def __init__(self) -> None:
        self._before: dict[Hashable, Any] = {}
        self._now: dict[Hashable, Any] = {}

    def get(self, key: Hashable, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result for a key; compute it of these arguments if it is not known."""
        if key not in self._now:
            self._now[key] = self._before[key] if key in self._before else compute(*arguments)
        return self._now[key]

    def end_round(self) -> None:
        self._before, self._now = self._now, {}
