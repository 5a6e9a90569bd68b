"""Check users' arguments. Every error names the argument, the given value, and what is allowed."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

Function = TypeVar("Function", bound=Callable[..., Any])

# Former name of an argument, or that of other libraries → its present name.
RENAMED = {
    "N": "buffer",
    "clip_norm": "outer_max_norm",
    "learning_rate": "lr",
    "server_lr": "outer_lr",
    "server_optim": "outer_optim",
}
_LARGEST = float(np.finfo(np.float32).max)


def reject_unknown(given: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raise a TypeError for the first name in `given` that is not in `valid`, naming the nearest valid one.

    >>> reject_unknown(["num_node"], ["num_nodes", "seed"], "fit()")
    Traceback (most recent call last):
        ...
    TypeError: fit() got an unknown argument 'num_node'; did you mean 'num_nodes'? Valid: num_nodes, seed
    """
    valid = list(valid)
    for name in given:
        if name not in valid:
            alike = {one.lower(): one for one in reversed(valid)}
            nearest = [alike[one] for one in difflib.get_close_matches(str(name).lower(), alike, n=1, cutoff=0.5)]
            nearest = [new for new in [RENAMED.get(name)] if new in valid] or nearest
            hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
            raise TypeError(f"{where} got an unknown argument {name!r}{hint} Valid: {', '.join(valid)}")


def known_keywords(function: Function) -> Function:
    """Decorate a function so that an unknown keyword raises a TypeError that names the nearest valid one."""
    parameters = inspect.signature(function).parameters.values()
    valid = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"]
    where = f"{function.__qualname__.removesuffix('.__init__')}()"

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        reject_unknown(kwargs, valid, where)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def whole_number(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return `value` if it is an int in [at_least, at_most] below 2**63; raise a ValueError or TypeError otherwise."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number, got {given(value)}")
    if not at_least <= number <= (2**63 - 1 if at_most is None else at_most):
        allowed = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(
            f"{name} must be a whole number {allowed}{', below 2**63' * (number >= 2**63)}, got {value!r:.100}"
        )
    return number


def countable(name: str, value: Any, things: str, bytes_each: int, *, at_least: int = 1) -> int:
    """Check that `value` is a `whole_number`, and that this many things of `bytes_each` fit into memory; return it."""
    count, memory = whole_number(name, value, at_least=at_least), psutil.virtual_memory().total
    if count * bytes_each > memory:
        raise ValueError(
            f"{name}={count:,} {things} take {count * bytes_each // 10**9:,} GB of memory, and this machine has "
            f"{memory / 1e9:.3g} GB; at most {name}={memory // bytes_each:,} fit"
        )
    return count


def real_number(
    name: str,
    value: Any,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return `value` as a float if it is in the range and float32 can hold it; raise a ValueError or TypeError."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {given(value)}")
    is_finite = abs(value) <= _LARGEST
    if not (is_finite and at_least <= value <= at_most and above < value < below):
        bounds = [
            f">= {at_least:g}" if at_least > -math.inf else "",
            f"> {above:g}" if above > -math.inf else "",
            f"<= {at_most:g}" if at_most < math.inf else "",
            f"< {below:g}" if below < math.inf else "",
            "" if is_finite or value != value else "finite" if abs(value) == math.inf else f"<= {_LARGEST:.2g} in size",
        ]
        allowed = [bound for bound in bounds if bound] or ["finite"]
        raise ValueError(f"{name} must be {' and '.join(allowed)}, got {value!s:.100}")
    return float(value)


def encodable(what: str, text: str) -> str:
    """Return `text`; raise a ValueError if it has a lone surrogate, which UTF-8 cannot encode in files."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be text that UTF-8 can encode, without surrogates; got {text!r}") from None
    return text


def true_or_false(name: str, value: Any) -> bool:
    """Return `value` as a bool if it is one; raise a TypeError otherwise, because bool() is true for any text."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {given(value)}")
    return bool(value)


def a_function(name: str, value: Any, of: str) -> None:
    """Raise a TypeError unless `value` is a function, not a class, that takes the arguments listed in the text `of`."""
    if not callable(value) or isinstance(value, type):
        raise TypeError(f"{name} must be a function of ({of}), got {given(value)}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a builtin function without a signature
        return
    try:
        signature.bind(*of.split(", "))
    except TypeError as error:
        raise TypeError(f"{name} must be a function of ({of}), got {given(value)}: {error}") from None


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return `value` if it is one of the `allowed` names; raise a ValueError otherwise."""
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        nearest = difflib.get_close_matches(str(value), allowed, n=1)
        begin = f"{name} {value!r:.100}: did you mean {nearest[0]!r}? " if nearest else ""
        end = "" if nearest else f", got {value!r:.100}"
        raise ValueError(f"{begin}{name} must be one of {', '.join(map(repr, allowed))}{end}")
    return value


def a_text(name: str, value: Any) -> str:
    """Return `value` if it is text and not empty or blank; raise a TypeError otherwise."""
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{name} must be a text, got {given(value)}")
    return value


def a_list(name: str, value: Any) -> list[Any]:
    """Return the 1 to 10⁶ entries of a sequence, array or tensor; raise a TypeError or ValueError otherwise."""
    entries = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        raise TypeError(f"{name} must be a list, got {given(value)}")
    if not 1 <= len(entries) <= 10**6:  # a longer list is probably a typing error
        allowed = "at most 1,000,000 values" if entries else "at least one value"
        raise ValueError(f"{name} must have {allowed}, got {value!r:.100}")
    return list(entries)


def a_path(name: str, value: Any) -> Path:
    """Return `value` as a path if it is a path or a text; raise a TypeError or ValueError otherwise."""
    if not isinstance(value, str | PathLike):  # such as the number of an open file
        raise TypeError(f"{name} must be a path, got {given(value)}")
    if not str(value).strip() or "\0" in str(value):
        raise ValueError(f"{name} must be a path, got {str(value)!r}; '.' is the current folder")
    return Path(value)


def given(value: Any) -> str:
    """Describe a value of a wrong type in a few words: the value and its type or, if it is a class, its name."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"{value!r:.100} of type {type(value).__name__}"


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix the message of a TypeError or ValueError in this context with `name`, unless `name` is empty."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not name or type(error).__init__ not in (TypeError.__init__, ValueError.__init__):  # takes more than text
            raise
        raise type(error)(f"{name}: {error}") from error


def brief(text: str, most: int = 10_000) -> str:
    """Shorten a text of more than `most` characters (a whole dataset, say) to its beginning and its length."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"


def retold(error: Exception, text: str) -> Exception:
    """Return a new error with `text`, caused by `error`: of its type or, if that type takes no text, a RuntimeError."""
    try:
        named = type(error)(text)
    except Exception:  # the type takes other arguments
        named = RuntimeError(f"{type(error).__name__}: {text}")
    named.__cause__ = error
    return named


def is_factory(dataset: Any) -> bool:
    """Return whether an argument is a function that makes each node's dataset."""
    return callable(dataset) and not isinstance(dataset, type) and not hasattr(dataset, "__getitem__")
