"""One run of a comparison: what it did, and why it did not end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vsim.cluster.ledger import Ledger
from vsim.records.history import History

# What files hold of a run beside its history.
_PLAIN = ("failure", "seed", "diverged_at", "stopped_at")


@dataclass
class ComparedRun:
    """One strategy's run.

    Attributes:
        model: the mean of the nodes' final models; None if the run did not end, or was read from a file.
        failure: why the run did not end, or "".
        seed: of everything random in it.
        error: what was raised, if the run failed.
        callbacks: the run's own copies of those that were given.
        diverged_at: the first step with a loss or weights that are not finite; None: there was none.
        stopped_at: the step after which a sweep with `halving` took it out; None: it went on.
    """

    history: History
    model: nn.Module | None = None
    failure: str = ""
    seed: int = 42
    error: Exception | None = None
    diverged_at: int | None = None
    stopped_at: int | None = None
    callbacks: Sequence[Any] = ()

    @property
    def ledger(self) -> Ledger:
        """What it communicated."""
        return self.history.ledger

    @property
    def ended(self) -> bool:
        """Whether it got to its last step."""
        return not self.failure and self.stopped_at is None

    @property
    def failed(self) -> bool:
        """Whether it diverged or raised; a run that was interrupted, or stopped by `halving`, has not."""
        return bool(self.failure) and not self.failure.startswith("interrupted")

    @property
    def note(self) -> str:
        """Why it did not get to its last step, or ""."""
        return f"stopped after step {self.stopped_at}" if self.stopped_at is not None else self.failure

    def as_plain(self) -> dict[str, Any]:
        """Return everything but the model and the error as dicts, lists, numbers and text, which JSON can hold."""
        plain = {key: getattr(self, key) for key in _PLAIN}
        return {**plain, "history": self.history.as_plain()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ComparedRun:
        """Make the run that `as_plain` was of."""
        return cls(History.from_plain(plain["history"]), **{key: plain[key] for key in _PLAIN})
