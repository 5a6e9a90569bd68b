"""Read files that may be damaged or forged, or that may not be regular files."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from vsim.arguments import countable

# Kinds of paths other than regular files; reading such a path may never end.
_OTHERS = {stat.S_ISDIR: "folder", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket", stat.S_ISCHR: "device"}
_may_open = ContextVar("may_open", default=True)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@contextmanager
def opening_nothing() -> Iterator[None]:
    """Make `regular` and `read_text` raise a ValueError in this context, in which code runs that a file asks for."""
    token = _may_open.set(False)
    try:
        yield
    finally:
        _may_open.reset(token)


def regular(path: Path) -> Path:
    """Return the path of a regular file that fits in memory.

    Raises:
        FileNotFoundError: there is no such file. OSError: the path is a folder, a pipe or a device. ValueError: the
            file is too large, or nothing may be opened.
    """
    if not _may_open.get():
        raise ValueError(f"{path} is not opened, because only a record names it")
    try:
        found = path.stat()
    except ValueError as error:  # a path with a NUL or a lone surrogate
        raise ValueError(f"{str(path)!r} is not the path of a file: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for is_one, name in _OTHERS.items() if is_one(found.st_mode)), "device")
        raise (IsADirectoryError if kind == "folder" else OSError)(f"{path} is a {kind}, not a file")
    countable("size", found.st_size, f"bytes of {path}", 1, at_least=0)
    return path


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a `regular` file; raise a ValueError if the file is not text."""
    try:
        return regular(path).read_text(encoding="utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error


def parse_json(text: str) -> Any:
    """Return the content of a JSON text; replace lone surrogates, which UTF-8 cannot encode, by "?"."""
    content = json.loads(text)
    if _SURROGATE.search(text):
        content = json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
    return content
