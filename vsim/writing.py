"""Write files atomically: the new file is written next to the old file, and replaces it once complete."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Names of the temporary folders that `replacing` makes; a killed process leaves its folder behind.
PART = re.compile(r"\..+\.\d+\.part")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which atomically replaces `path` at the end of the block.

    The new file keeps the permissions of the old file. If `path` is a link, its target is replaced. A path that is not
    a regular file, such as /dev/stdout, is written directly.

    Raises:
        OSError: the file cannot be written. The error names `path`, whose old content is intact.
    """
    part = None
    try:
        mode = _mode(path)
        if mode is not None and not stat.S_ISREG(mode):
            yield path
            return
        real = Path(os.path.realpath(path))
        # Use a folder, because a writer may put temporary files next to its file, and may depend on the file's suffix.
        part = Path(tempfile.mkdtemp(f".{os.getpid()}.part", ".", real.parent))
        new = part / real.name
        yield new
        if mode is not None:
            new.chmod(stat.S_IMODE(mode))
        _flush(new)
        os.replace(new, real)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror or error}, while writing", str(path)) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
    with suppress(OSError):  # some systems cannot open a folder
        _flush(real.parent)


def check_output(what: str, path: Path, inputs: Iterable[Path]) -> None:
    """Raise a ValueError if writing `path` would overwrite one of the inputs, under any of its names."""
    for one in inputs:
        with suppress(OSError):  # no such file
            if os.path.samefile(path, one):
                raise ValueError(f"{what} {path} would overwrite {one}, which is an input; give another path")


def _mode(path: Path) -> int | None:
    """Return type and permissions of a file; None if there is no such file."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
