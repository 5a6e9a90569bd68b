"""An algorithm is one class, and its fields are its arguments.

@algorithm
class SignSGD(Algorithm):
    rate: float = 0.1                                 # an argument, given by name
    velocity: Tensor = state()                        # state, made in `setup`; not an argument

    def __post_init__(self) -> None:                  # checks of values, and of pairs of values
        self.rate = real_number("rate", self.rate, above=0)
        super().__post_init__()                       # last: the options of all algorithms
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from inspect import Parameter
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from typing_extensions import Self, dataclass_transform

from vsim.arguments import reject_unknown
from vsim.cluster.state import Stateful

Class = TypeVar("Class", bound=type)

# The arguments that all algorithms take; the first is shown before an algorithm's own arguments, the others after them.
OPTIONS = (
    *("inner_optim", "lr", "max_norm", "lr_scheduler", "lr_scheduler_kwargs", "warmup_steps", "cosine_anneal"),
    *("max_steps", "attack"),
)
# Arguments of optimizers that are often given to a strategy.
_OF_OPTIMIZERS = ("weight_decay", "betas", "eps", "momentum", "nesterov")
# EXO Gym's names of arguments → vsim's names. `vsim.compat.exogym` takes them.
SPELLINGS = {
    "optim_spec": "inner_optim",
    "inner_lr": "lr",
    "outer_optim_spec": "outer_optim",
    "sparsification_rate": "p_sparta",
    "every": "H",
}


def state(*, default: Any = MISSING, init: Literal[False] = False) -> Any:
    """Declare an attribute that is not an argument: what a run changes, or what follows from arguments."""
    return field(init=init, default=default)


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field, state))
def algorithm(cls: Class) -> Class:
    """Make a class's annotated attributes its arguments, given by name. Objects are equal only to themselves."""
    return dataclass(kw_only=True, eq=False, repr=False)(cls)  # type: ignore[return-value]


class Given(Stateful):
    """Base of objects that users configure. Keeps the arguments of the call that made the object, which `repr` shows.

    An unknown argument raises an error that names the nearest valid one. This holds for dataclasses, and for classes
    with an `__init__` of their own. `derived` and `resolved` of a subclass include its parents'.

    Attributes:
        resolved: names of attributes whose values other attributes hold after checks, so that records omit them.
    """

    __slots__ = ("_given",)  # a slot, since attributes in `__dict__` are state or settings

    resolved: ClassVar[tuple[str, ...]] = ()
    _given: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for names in ("derived", "resolved"):
            found = dict.fromkeys(name for base in cls.__mro__ for name in vars(base).get(names, ()))
            setattr(cls, names, tuple(found))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self._given = given_by(cls, args, kwargs) if args or kwargs else {}  # copies and pickles give none
        return self

    def recorded(self, name: str, value: Any) -> Any:
        """Return the value of an argument as repr and records hold it: a plain value, and never the path of a file."""
        return value.item() if isinstance(value, np.generic) else value

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={shown(value)}" for name, value in arguments_of(self).items())
        return f"{type(self).__name__}({given})"


def arguments_of(made: Given) -> dict[str, Any]:
    """Return the arguments that an object was made with, by name."""
    return {name: made.recorded(name, value) for name, value in getattr(made, "_given", {}).items()}


def parameters_of(cls: type) -> dict[str, Parameter]:
    """Return name → parameter of a class's `__init__`, in the order of the fields; the options of all algorithms last.

    `**options` stands for these options.
    """
    found = dict([*inspect.signature(cls.__init__).parameters.items()][1:])  # type: ignore[misc]
    if "options" in found and found["options"].kind is Parameter.VAR_KEYWORD:
        del found["options"]
        base: Any = next(base for base in cls.__mro__ if "__dataclass_fields__" in vars(base))
        found |= {name: p for name, p in inspect.signature(base.__init__).parameters.items() if name in OPTIONS}
    order: dict[str, int] = {}
    for base in reversed(cls.__mro__):
        fields = vars(base).get("__dataclass_fields__", {})
        for name in inspect.get_annotations(base):
            if name in fields and fields[name].init:
                order.setdefault(name, len(order))
    order |= {name: len(order) + i for i, name in enumerate(OPTIONS)} | {"inner_optim": -1}
    # Arguments by position keep their places; those by name follow, and any others at the end.
    place = {name: order.get(name, -1) if p.kind is Parameter.KEYWORD_ONLY else 0 for name, p in found.items()}
    return dict(sorted(found.items(), key=lambda one: (one[1].kind, place[one[0]])))


def given_by(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return name → value of the arguments of a call of `cls`, after a check of their names."""
    where, parameters = f"{cls.__name__}()", parameters_of(cls)
    kinds = {p.kind for p in parameters.values()}
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    own = [name for name in named if name not in OPTIONS]
    if Parameter.VAR_KEYWORD not in kinds:
        for name in kwargs:
            if name not in named and SPELLINGS.get(name) in named:
                raise TypeError(
                    f"{where}: {name} is EXO Gym's name of {SPELLINGS[name]}: write {SPELLINGS[name]}=…, or import "
                    f"{cls.__name__} from vsim.compat.exogym, which takes EXO Gym's names"
                )
            if name not in named and name in _OF_OPTIMIZERS and "inner_optim" in named:
                optim = "sgd" if name in ("momentum", "nesterov") else "adamw"
                raise TypeError(
                    f"{where} takes no {name}: give it to the nodes' optimizer, such as "
                    f"inner_optim=OptimSpec({optim!r}, {name}={kwargs[name]!r:.40})"
                )
        reject_unknown(kwargs, [*own, *(name for name in named if name in OPTIONS)], where)
    by_position = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(by_position) and Parameter.VAR_POSITIONAL not in kinds:
        if not named:
            raise TypeError(f"{where} takes no arguments, got {_few(args)}")
        example = ", ".join([*by_position, *(f"{name}=…" for name in own if name not in by_position), "inner_optim=…"])
        raise TypeError(f"{where} takes arguments by name, {cls.__name__}({example}, …); got {_few(args)} by position")
    try:
        bound = inspect.Signature([*parameters.values()]).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{where}: {error}; its arguments: {', '.join(named) or 'none'}") from None
    given: dict[str, Any] = {}
    for name in (name for name in parameters if name in bound.arguments):
        value = bound.arguments[name]
        given |= value if parameters[name].kind is Parameter.VAR_KEYWORD else {name: value}
    return given


def _few(args: Sequence[Any]) -> str:
    return ", ".join(shown(value) for value in args[:3]) + (", …" if len(args) > 3 else "")


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
