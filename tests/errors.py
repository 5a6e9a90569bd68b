"""What an error says: its type, and the argument, value and allowed values that it names, in any words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def unnamed(text: str, *names: Any) -> list[str]:
    """Return those of the names that a text lacks as whole words.

    A string may hold several names: "num_nodes … >= 1 … 0". Of other values the repr is looked for.
    """
    words = [word for name in names for word in (name.split(" … ") if isinstance(name, str) else [repr(name)])]
    return [word for word in words if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)]


@contextmanager
def refused(error: type[BaseException], *names: Any) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of this type that says these names."""
    with pytest.raises(error) as caught:
        yield caught
    text = " ".join(map(str, caught.value.args))
    assert not unnamed(text, *names), f"{unnamed(text, *names)} not in: {text}"
