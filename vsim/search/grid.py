"""Strategies over a grid of settings: the product of lists, with short names for the settings that vary."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vsim.analysis.swept import Point
from vsim.arguments import a_list, reject_unknown
from vsim.core.algorithm import Algorithm
from vsim.core.fields import parameters_of
from vsim.history.describe import describe


def grid(strategy: Callable[..., Algorithm], /, **settings: Any) -> dict[str, Algorithm]:
    """Return name → strategy for every combination of settings, for `vsim.compare`.

    `compare` also takes a dict whose values are such dicts or single strategies.

    Args:
        strategy: a class, or a function that returns a strategy.
        settings: arguments of the strategy. A list, tuple, range or array is varied; any other value is the same for
            all. Put a value that is itself a list in a list: `betas=[(0.9, 0.95)]`.

    Raises:
        TypeError, ValueError: an argument is unknown; a combination is invalid for the class (the message names the
            combination); a list is empty, or has a value twice.

    Example:
        >>> from vsim.strategy import DiLoCoStrategy
        >>> list(grid(DiLoCoStrategy, H=[5, 50], outer_lr=[0.4, 0.7], lr=1e-3))[:2]
        ['DiLoCo H=5, outer_lr=0.4', 'DiLoCo H=5, outer_lr=0.7']
    """
    known_settings(strategy, settings)
    return {name: made(strategy, name, point.values) for name, point in points(strategy, settings).items()}


def points(strategy: Callable[..., Algorithm], settings: Mapping[str, Any]) -> dict[str, Point]:
    """Return name → `Point` for every combination of the settings' values; the last setting varies fastest."""
    lists = {key: _listed(key, value) for key, value in settings.items()}
    texts = {key: _texts(values) for key, values in lists.items()}
    title = getattr(strategy, "__name__", "strategy").removesuffix("Strategy") or "Strategy"
    found = {}
    for choice in itertools.product(*(range(len(values)) for values in lists.values())):
        chosen = dict(zip(lists, choice, strict=True))
        labels = {key: texts[key][i] for key, i in chosen.items() if len(texts[key]) > 1}
        name = " ".join(filter(None, [title, ", ".join(f"{key}={label}" for key, label in labels.items())]))
        found[name] = Point({key: lists[key][i] for key, i in chosen.items()}, labels)
    return found


def made(strategy: Callable[..., Algorithm], name: str, values: Mapping[str, Any]) -> Algorithm:
    """Return the strategy with these arguments; errors begin with the name of the combination."""
    try:
        result = strategy(**values)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} is refused: {error}") from error
    if not isinstance(result, Algorithm):
        raise TypeError(f"strategy: expected a class of strategies or a function that returns one, got {result!r}")
    return result


def known_settings(strategy: Any, settings: Mapping[str, Any], also: Sequence[str] = ()) -> None:
    """Raise a TypeError that suggests a name if a setting is neither an argument of `strategy` nor in `also`."""
    if isinstance(strategy, Algorithm) or not callable(strategy):
        raise TypeError(f"strategy must be a class, such as DiLoCoStrategy, or a function, got {strategy!r}")
    parameters = _parameters(strategy)
    valid = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [key for key in settings if key not in valid and not difflib.get_close_matches(key, also, 1, 0.8)]
    if unknown and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return  # a user's class, which may take any argument
    reject_unknown(settings, [*valid, *also], getattr(strategy, "__name__", "the strategy"))


def settings_of(strategy: Callable[..., Algorithm]) -> list[str]:
    """Return the names of a class's arguments, including the arguments that all strategies take."""
    return [name for name, p in _parameters(strategy).items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _parameters(strategy: Callable[..., Algorithm]) -> Mapping[str, inspect.Parameter]:
    if isinstance(strategy, type) and issubclass(strategy, Algorithm):
        return parameters_of(strategy)
    try:
        return inspect.signature(strategy).parameters
    except (TypeError, ValueError):  # a function without a signature
        raise TypeError(f"strategy must be a class, such as DiLoCoStrategy, or a function, got {strategy!r}") from None


def merged(strategies: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a dict of strategies and of dicts of strategies; names in an inner dict get that dict's name as a prefix.

    >>> merged({"a": 1, "b": {"b H=5": 2, "c": 3}})
    {'a': 1, 'b H=5': 2, 'b, c': 3}
    """
    if not strategies:
        raise ValueError("strategies is empty: give at least one, as a dict of name → strategy")
    unnamed = [repr(name) for name in strategies if not isinstance(name, str)]
    if unnamed:
        raise TypeError(f"the names of strategies must be strings, got {', '.join(unnamed)}")
    if not all(map(str.strip, strategies)):
        raise ValueError("every strategy needs a name, which tables show, and one is empty")
    found: dict[str, Any] = {}
    for name, value in strategies.items():
        own = {name: value}
        if isinstance(value, Mapping):
            if not value:
                raise ValueError(f"strategies[{name!r}] is an empty dict: give at least one strategy")
            own = {i if i.startswith(name) else f"{name}, {i}": strategy for i, strategy in merged(value).items()}
        twice = found.keys() & own.keys()
        if twice:
            raise ValueError(f"two strategies have one name: {', '.join(sorted(twice))}")
        found |= own
    return found


def _listed(key: str, value: Any) -> list[Any]:
    """Return the values of a setting as a list; a setting that is not a list has one value."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes):
        return [value]
    value = a_list(key, value)
    for i, one in enumerate(value):
        if any(one is other or (type(one) is type(other) and _equal(one, other)) for other in value[:i]):
            raise ValueError(f"{key} has {one!r} twice")
    return value


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # tensors or arrays of several values
        return False


def _texts(values: Sequence[Any]) -> list[str]:
    """Return a distinct text for every value of a setting; for objects of one class, name only arguments that differ.

    >>> from vsim.strategy import OptimSpec
    >>> _texts([OptimSpec("sgd", lr=0.1, momentum=0.9), OptimSpec("sgd", lr=0.01, momentum=0.9), None])
    ['SGD(lr=0.1)', 'SGD(lr=0.01)', 'None']
    """
    plain = [describe(value) for value in values]
    texts: list[str] = []
    for value, own in zip(values, plain, strict=True):
        text = getattr(value, "__name__", None) or _text(own, plain)
        count = sum(known == text or known.startswith(f"{text} #") for known in texts)
        texts.append(f"{text} #{count + 1}" if count else text)
    return texts


def _text(value: Any, among: Sequence[Any] = ()) -> str:
    """Return short text for a value from `describe`, without arguments that all objects of its class in `among` share.

    >>> _text({"T": 10, "rates": [1e-3, 0.5, None]})
    '(T=10, rates=(0.001, 0.5, None))'
    >>> small, large = ({"class": "A", "of": {"class": "B", "size": size, "shape": None}} for size in (1, 2))
    >>> _text(small, [small, large])
    'A(of=B(size=1))'
    """
    if isinstance(value, dict):
        kin = [other for other in among if isinstance(other, dict) and other.get("class") == value.get("class")]
        differing = ", ".join(
            f"{key}={_text(own, [other[key] for other in kin if key in other])}"
            for key, own in value.items()
            if key != "class" and (not among or any(key not in other or other[key] != own for other in kin))
        )
        return str(value.get("class", "")) + (f"({differing})" if differing else "")
    if isinstance(value, list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return str(value)
