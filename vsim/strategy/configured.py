"""What a user configures: knows the spellings of EXO Gym, and shows the arguments that it was made with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from vsim.cluster.state import Stateful

# EXO Gym's names of arguments → vsim's.
SPELLINGS = {"optim_spec": "inner_optim", "inner_lr": "lr", "outer_optim_spec": "outer_optim"}
_OF_ALL = ("inner_optim", "lr")  # the arguments that every strategy takes


class Configured(Stateful):
    """Base of strategies, communication modules, compressors and selectors.

    Its `repr` is the call that makes it. `derived` of a subclass adds to its parent's.
    """

    __slots__ = ("_given",)  # apart from the attributes, which are state or settings

    _given: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.derived = tuple(dict.fromkeys(name for base in cls.__mro__ for name in vars(base).get("derived", ())))
        if "__init__" in vars(cls):
            cls.__init__ = _respelled(cls.__init__)  # type: ignore[method-assign]

    def _check_made(self) -> None:
        """Raise a TypeError if `__init__` has left something out."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={shown(value)}" for name, value in arguments_of(self).items())
        return f"{type(self).__name__}({given})"


def arguments_of(configured: Configured) -> dict[str, Any]:
    """Return the arguments that something was made with, by name."""
    return dict(getattr(configured, "_given", {}))


def shown(value: Any) -> str:
    """Return a short text for the value of an argument, without addresses.

    >>> shown([0.1, shown, object()])
    '[0.1, shown, object]'
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return name
    text = repr(value)
    return type(value).__name__ if re.search(r" at 0x[0-9a-f]+", text) or len(text) > 200 else text


def _respelled(init: Callable[..., None]) -> Callable[..., None]:
    """Return `init` with EXO Gym's spellings of its arguments, too; the outermost one keeps the arguments."""
    signature = inspect.signature(init)
    names = list(signature.parameters)

    @wraps(init)
    def made(self: Configured, *args: Any, **kwargs: Any) -> None:
        for theirs, ours in SPELLINGS.items():
            if theirs not in kwargs or theirs in names or (ours not in names and ours not in _OF_ALL):
                continue
            value, by_position = kwargs.pop(theirs), names[1 : 1 + len(args)]
            if value is None:
                continue
            if kwargs.get(ours) is not None or (ours in by_position and args[by_position.index(ours)] is not None):
                raise TypeError(
                    f"{type(self).__name__}(): {ours} and {theirs} are two spellings of one argument; give one of them"
                )
            if ours in by_position:
                args = tuple(value if name == ours else arg for name, arg in zip(by_position, args, strict=True))
            else:
                kwargs[ours] = value
        init(self, *args, **kwargs)
        if type(self).__init__ is made:
            given = signature.bind(self, *args, **kwargs).arguments
            of_kinds = {p.name: p.kind for p in signature.parameters.values()}
            self._given = {}
            for name, value in list(given.items())[1:]:
                self._given |= value if of_kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
            self._check_made()

    return made
