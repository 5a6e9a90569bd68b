"""The base of objects that users configure: accepts EXO Gym's spellings, and shows the object's arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from inspect import Parameter
from typing import Any, ClassVar

import numpy as np

from vsim.arguments import reject_unknown, renaming
from vsim.cluster.state import Stateful

# EXO Gym's names of arguments → vsim's names.
SPELLINGS = {"optim_spec": "inner_optim", "inner_lr": "lr", "outer_optim_spec": "outer_optim"}
_OF_ALL = ("inner_optim", "lr")  # arguments of every strategy


class Configured(Stateful):
    """Base of strategies, communication modules, compressors and selectors.

    `repr` is the call that makes the object. `derived` of a subclass includes its parents' `derived`.

    Attributes:
        common: the arguments that `**options` in an `__init__` stands for.
    """

    __slots__ = ("_given",)  # a slot, since attributes in `__dict__` are state or settings

    common: ClassVar[tuple[Parameter, ...]] = ()
    _given: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.derived = tuple(dict.fromkeys(name for base in cls.__mro__ for name in vars(base).get("derived", ())))
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__, cls.common)  # type: ignore[method-assign]

    def recorded(self, name: str, value: Any) -> Any:
        """Return the value of an argument as repr and records hold it: a plain value, and never the path of a file."""
        return value.item() if isinstance(value, np.generic) else value

    def check(self) -> None:
        """Raise an error if arguments contradict each other; called after `__init__`."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={shown(value)}" for name, value in arguments_of(self).items())
        return f"{type(self).__name__}({given})"


def arguments_of(configured: Configured) -> dict[str, Any]:
    """Return the arguments that an object was made with, by name."""
    return dict(getattr(configured, "_given", {}))


def names_of(arguments: list[str]) -> list[str]:
    """Return the names of arguments, followed by EXO Gym's spellings of these arguments."""
    return [*arguments, *(theirs for theirs, ours in SPELLINGS.items() if ours in arguments)]


def shown(value: Any) -> str:
    """Return a short text for the value of an argument, without memory addresses.

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


def _checked(init: Callable[..., None], common: tuple[Parameter, ...]) -> Callable[..., None]:
    """Make `init` accept EXO Gym's spellings and reject unknown arguments; the outermost `init` records arguments."""
    given = inspect.signature(init)
    parameters = []
    for parameter in given.parameters.values():
        is_common = parameter.kind is Parameter.VAR_KEYWORD and parameter.name == "options"
        parameters += [p for p in common if p.name not in given.parameters] if is_common else [parameter]
    signature = given.replace(parameters=parameters)
    names = [p.name for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)][1:]
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)

    @wraps(init)
    def made(self: Configured, *args: Any, **kwargs: Any) -> None:
        where, spelled = f"{type(self).__name__}()", {}
        for theirs, ours in SPELLINGS.items():
            if theirs not in kwargs or theirs in names or not (ours in names or (takes_any and ours in _OF_ALL)):
                continue
            value, by_position = kwargs.pop(theirs), names[: len(args)]
            if value is None:
                continue
            if kwargs.get(ours) is not None or (ours in by_position and args[by_position.index(ours)] is not None):
                raise TypeError(f"{where}: {ours} and {theirs} are two spellings of one argument; give one of them")
            spelled[ours] = theirs
            if ours in by_position:
                args = tuple(value if name == ours else arg for name, arg in zip(by_position, args, strict=True))
            else:
                kwargs[ours] = value
        if not takes_any:
            own = [p.name for p in inspect.signature(type(self)).parameters.values() if p.kind is not p.VAR_KEYWORD]
            reject_unknown(kwargs, names_of([*dict.fromkeys([*own, *names])]), where)
        try:
            bound = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            named = ", ".join(p.name for p in parameters[1:] if p.kind is Parameter.KEYWORD_ONLY)
            raise TypeError(f"{where}: {error}; arguments to give by name: {named or 'none'}") from None
        with renaming(spelled):
            init(self, *args, **kwargs)
        if type(self).__init__ is made:
            found: dict[str, Any] = {}
            for name, value in list(bound.items())[1:]:
                found |= value if signature.parameters[name].kind is Parameter.VAR_KEYWORD else {name: value}
            self._given = {name: self.recorded(name, value) for name, value in found.items()}
            self.check()

    made.__signature__ = signature  # type: ignore[attr-defined]
    return made
