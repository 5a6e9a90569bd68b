"""A folder for the lasting state of clients, used by one run at a time."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import stat
from pathlib import Path

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class Store:
    """Tensors (N, …) in the files of a folder: `Sample(store=)`.

    A run locks the folder while it trains. It also writes its name to the folder, by which it later notices whether
    another run has used the folder. Links are not followed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name = secrets.token_hex(16).encode()
        self._lock = -1
        self._files: dict[str, mmap.mmap] = {}

    def claim(self) -> None:
        """Lock the folder for this run, and write the run's name to it.

        Raises:
            ValueError: another run is using the folder. OSError: the folder cannot be written to.
        """
        if self._lock >= 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(error.errno, f"store {str(self.folder)!r} cannot be made: {error.strerror}") from error
        lock = self._open("owner")
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, self._name, 0)
        except BlockingIOError:
            os.close(lock)
            raise ValueError(
                f"store {str(self.folder)!r} is in use by another run; give each run a folder of its own"
            ) from None
        self._lock = lock

    def release(self) -> None:
        """Release the folder for other runs."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    __del__ = release

    def check(self) -> None:
        """Raise a ValueError if another run has used the folder since this one claimed it."""
        lock = self._open("owner")
        try:
            if os.pread(lock, 64, 0) != self._name:
                raise ValueError(
                    f"store {str(self.folder)!r} has been used by another run, and what it held for this one is lost; "
                    "give each run a folder of its own"
                )
        finally:
            os.close(lock)

    def check_whole(self) -> None:
        """Raise an OSError if a file has been cut short: access to the missing part would kill the process."""
        for name, memory in self._files.items():
            if memory.size() < len(memory):
                raise OSError(
                    f"store {str(self.folder)!r}: {name} has been cut from {len(memory):,} to {memory.size():,} bytes, "
                    "and what it held for this run is lost"
                )

    def tensor(self, name: str, population: int, like: Tensor) -> Tensor:
        """Return a tensor (N, *shape) that lies in a file: for every client, a row shaped like `like`.

        The file's space is allocated now, because a later write to a full disk would kill the process.

        Raises:
            OSError: there is not enough room, or the path is a link.
        """
        size = population * like.nbytes
        if not size:
            return like.new_empty(population, *like.shape)
        file = self._open(name)
        try:
            os.ftruncate(file, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, size)
            memory = self._files[name] = mmap.mmap(file, size)
        except OSError as error:
            text = f"no room for the {size / 1e9:.3g} GB of {population:,} clients"
            reason = text if error.errno in (errno.ENOSPC, errno.EFBIG) else error.strerror
            raise OSError(error.errno, f"store {str(self.folder)!r}: {reason}") from error
        finally:
            os.close(file)
        return torch.frombuffer(memory, dtype=like.dtype).view(population, *like.shape)

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            file = os.open(self.folder / name, flags, 0o644)
        except OSError as error:
            reason = "is a link" if error.errno == errno.ELOOP else error.strerror
            raise OSError(error.errno, f"store {str(self.folder)!r}: {name} {reason}") from error
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"store {str(self.folder)!r}: {name} is a pipe or a device, not a file")
        return file
