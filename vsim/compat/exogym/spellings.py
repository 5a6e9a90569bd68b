"""EXO Gym's names and positions of arguments, translated into vsim's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from vsim.core.fields import SPELLINGS

Made = TypeVar("Made")


def translated(
    cls: Callable[..., Made], positions: Sequence[str], names: Mapping[str, str] = SPELLINGS
) -> Callable[..., Made]:
    """Return a function that makes a `cls` from EXO Gym's arguments.

    Args:
        positions: vsim's names of the arguments that EXO Gym takes by position, in EXO Gym's order.
        names: EXO Gym's name of an argument → vsim's name.
    """

    @functools.wraps(cls, updated=())
    def make(*args: Any, **kwargs: Any) -> Made:
        return cls(**in_our_names(cls.__name__, args, kwargs, positions, names))

    make.__signature__ = inspect.signature(lambda *args, **kwargs: None)  # type: ignore[attr-defined]
    return make


def in_our_names(
    where: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    positions: Sequence[str],
    names: Mapping[str, str] = SPELLINGS,
) -> dict[str, Any]:
    """Return the arguments of a call by vsim's names.

    Raises:
        TypeError: an argument is given twice, or too many are given by position.
    """
    if len(args) > len(positions):
        raise TypeError(f"{where}() takes {len(positions)} arguments by position, {', '.join(positions)}; got {args!r}")
    found = dict(zip(positions, args, strict=False))
    for name, value in kwargs.items():
        ours = names.get(name, name)
        if found.get(ours) is not None and value is not None:
            both = name if name == ours else f"{ours} and {name}"
            raise TypeError(f"{where}(): {both} is given twice, as {found[ours]!r} and {value!r}")
        if value is not None or ours not in found:
            found[ours] = value
    return found
