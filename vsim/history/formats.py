"""Records in files: CSV, and JSON that every reader takes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vsim.arguments import a_path
from vsim.reading import parse_json, read_text
from vsim.writing import replacing

if TYPE_CHECKING:
    import pandas as pd


def write_csv(path: str | Path, frame: pd.DataFrame) -> None:
    """Write a DataFrame; see `csv_field`."""
    for column in frame.select_dtypes(exclude="number"):
        frame[column] = frame[column].map(csv_field)
    frame.columns = frame.columns.map(csv_field)
    with replacing(a_path("path", path)) as part:
        frame.to_csv(part, index=False, float_format=lambda v: str(csv_field(v)), lineterminator="\r\n")


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a dict as JSON that every reader takes: no NaN, no infinity."""
    with replacing(a_path("path", path)) as part, open(part, "w", encoding="utf-8") as file:
        json.dump(content, file, allow_nan=False)


def checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a dict, the same before it is written as JSON and after it is read."""
    as_read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def read_json(path: str | Path, what: str, keys: Iterable[str]) -> dict[str, Any]:
    """Read a dict that has these keys; otherwise raise a ValueError that names the expected content."""
    text = read_text(a_path("path", path))
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or any(key not in content for key in keys):
        raise ValueError(f"{path} was not written by {what}.to_json: it lacks {' or '.join(map(repr, keys))}")
    return content


@contextmanager
def holding_a_record(path: str | Path, what: str) -> Iterator[None]:
    """Convert errors in a block that interprets a file's content to a ValueError that names the file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(f"{path} does not hold what {what}.to_json writes: {reason}") from error


def csv_field(value: Any) -> Any:
    """Return a value as CSV files hold it: NaN is an empty field, and whole numbers have no decimal point.

    Text that a spreadsheet would compute as a formula begins with an apostrophe.

    >>> [csv_field(value) for value in (2.0, -0.5, float("nan"), "DiLoCo", "=1+1")]
    [2, -0.5, '', 'DiLoCo', "'=1+1"]
    """
    if isinstance(value, str):
        return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return ""
    return int(value) if (value.is_integer() and abs(value) >= 1) or value == 0 else value
