"""The file of a measured cluster, `cluster.json`: its network and its compute, which `vsim measure` writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vsim.arguments import a_path, given, reject_unknown
from vsim.reading import parse_json, read_text

SUFFIX = ".json"
PARTS = ("network", "compute", "measured")


def names_file(text: str) -> bool:
    """Return whether a network or a compute that is given as text is the path of a file."""
    return text.strip().endswith(SUFFIX)


def read_part(path: str | os.PathLike[str], part: str) -> Any:
    """Return the "network" or the "compute" of a file.

    Raises:
        OSError: the file cannot be read. ValueError, TypeError: it is not JSON, has unknown fields, or lacks this part.
    """
    path = a_path(part, path.strip() if isinstance(path, str) else path)
    try:
        content = parse_json(read_text(Path(path)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise TypeError(f"{path} must hold an object with the fields {', '.join(PARTS)}, got {given(content)}")
    reject_unknown(content, PARTS, str(path))
    if content.get(part) is None:
        have = ", ".join(name for name in PARTS if name in content) or "no field"
        way = "measure it with vsim measure --step FILE.py:FUNCTION, or write" if part == "compute" else "write"
        example = (
            '{"seconds_per_step": 0.8}' if part == "compute" else '{"bandwidth": "200 Mbit/s", "latency": "30 ms"}'
        )
        raise ValueError(f'{path} has {have}, but not {part!r}: {way} "{part}": {example} into it')
    return content[part]
