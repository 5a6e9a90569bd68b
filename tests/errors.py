"""What an error says: its type, and the argument, value and allowed values that it names, in any words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def _patterns(names: tuple[Any, ...]) -> dict[str, str]:
    """From name to pattern: a string may hold several names, "num_nodes … >= 1 … 0"; of other values the repr counts.

    A name that begins or ends with a letter or digit is a whole word there.
    """
    words = [word for name in names for word in (name.split(" … ") if isinstance(name, str) else [repr(name)])]
    return {word: r"(?<!\w)" * word[:1].isalnum() + re.escape(word) + r"(?!\w)" * word[-1:].isalnum() for word in words}


def unnamed(text: str, *names: Any) -> list[str]:
    """Return those of the names that a text lacks."""
    return [word for word, pattern in _patterns(names).items() if not re.search(pattern, text)]


@contextmanager
def refused(error: Any, *names: Any) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error of this type that says these names."""
    with pytest.raises(error) as caught:
        yield caught
    text = " ".join(map(str, (caught.value, *caught.value.args)))
    assert not unnamed(text, *names), f"{unnamed(text, *names)} not in: {text}"


def warned(*names: Any) -> Any:
    """Expect a warning that says these names; others are passed on."""
    return pytest.warns(UserWarning, match=r"(?s)\A" + "".join(f"(?=.*{one})" for one in _patterns(names).values()))
