"""Read files that may be damaged or forged, or are no files."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

from vsim.arguments import countable

# Reading one of these may never end.
_OTHERS = {stat.S_ISDIR: "folder", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket", stat.S_ISCHR: "device"}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def regular(path: Path) -> Path:
    """Return the path of a file that fits in memory.

    Raises:
        FileNotFoundError: there is none. OSError: it is a folder, a pipe or a device. ValueError: it is too large.
    """
    try:
        found = path.stat()
    except ValueError as error:  # with a NUL or a lone surrogate
        raise ValueError(f"{str(path)!r} is not the path of a file: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for is_one, name in _OTHERS.items() if is_one(found.st_mode)), "device")
        raise (IsADirectoryError if kind == "folder" else OSError)(f"{path} is a {kind}, not a file")
    countable("size", found.st_size, f"bytes of {path}", 1, at_least=0)
    return path


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a `regular` file; raise a ValueError if it is not text."""
    try:
        return regular(path).read_text(encoding="utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error


def parse_json(text: str) -> Any:
    """Return the content of a JSON text, without lone surrogates, which no UTF-8 text can hold: "?" in their place."""
    content = json.loads(text)
    if _SURROGATE.search(text):
        content = json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
    return content
