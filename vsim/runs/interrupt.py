"""Handle Ctrl-C during a run: complete the current step before stopping, so that the state is consistent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vsim.checkpoint.folder import Saving


class Interrupted(KeyboardInterrupt):
    """Raised when a run is interrupted between two steps, in a consistent state; `fit(resume=True)` resumes the run.

    Args:
        step: the last completed step. saving: where the run is saved; None: it is not saved.
    """

    def __init__(self, step: int, saving: Saving | None) -> None:
        super().__init__(step, saving)

    def __str__(self) -> str:
        step, saving = self.args
        kept = "kept in memory; this trainer's fit(resume=True) resumes it, and a save_dir (--save-dir) would save it"
        if saving is not None and saving.wanted:
            kept = f"saved in {str(saving.folder)!r}; resume=True with this save_dir (--save-dir … --resume) resumes it"
        return f"interrupted after step {step}: the run is {kept}"


class Interrupt:
    """A request to stop after the current step. In its context, Ctrl-C makes the request; a second one raises at once.

    The handler is installed only in the main thread, and only in place of Python's default handler of SIGINT.

    Attributes:
        requested: whether the run should stop. insisted: whether Ctrl-C was pressed again.
    """

    def __init__(self) -> None:
        self.requested = self.insisted = False
        self._installed: list[bool] = []  # one item for each nested context, a comparison's or a run's

    def request(self) -> None:
        """Ask the run to stop. May be called from any thread."""
        self.requested = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed again and whoever was interrupted has swallowed that.

        What was computed since may be incomplete: it must neither be recorded nor saved.
        """
        if self.insisted:
            raise KeyboardInterrupt

    def explains(self, error: Exception) -> bool:
        """Return whether an error may come of the request, so that it must not become the outcome of a run.

        Torch, for instance, may turn a KeyboardInterrupt into a RuntimeError. Non-finite numbers do not come of a
        request alone.
        """
        return self.insisted or (self.requested and not isinstance(error, FloatingPointError))

    @contextmanager
    def requested_inside(self) -> Iterator[None]:
        """Treat a KeyboardInterrupt raised by a user's hook as the first Ctrl-C."""
        try:
            yield
        except KeyboardInterrupt:
            if self.insisted:
                raise
            self.requested = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self.insisted = True
            signal.default_int_handler(number, frame)
        self.requested = True

    def __enter__(self) -> Interrupt:
        in_main = threading.current_thread() is threading.main_thread()
        self._installed.append(in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        if self._installed[-1]:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed.pop():
            signal.signal(signal.SIGINT, signal.default_int_handler)
