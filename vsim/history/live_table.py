"""A table of runs that grows with them in a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vsim.history.history import History

# The most rows of a table that is updated in place; of more runs, it shows those with the lowest loss.
_ROWS = 20


class LiveTable:
    """A table of runs in a terminal, updated in place while they train; the leading name is bold.

    Without a terminal, such as in a pipe, nothing is written.

    Args:
        title: the title.
        console: a console of rich; default: stderr, if it is a terminal.
    """

    def __init__(self, title: str = "", console: Any = None) -> None:
        import rich.style  # noqa: F401 (imported before any run, because it draws from Python's generator)

        self.title, self._console = title, console
        self._live: Any = None  # False: there is no terminal
        self._next = 0.0

    def update(
        self,
        histories: Mapping[str, Sequence[History]],
        steps: Mapping[str, int],
        last: bool = False,
        caption: str = "",
    ) -> None:
        """Show the current records, unless the table is less than a quarter of a second old.

        Args:
            histories: name → the records of its runs, one for each seed; their means are shown.
            steps: name → T. last: update the table in any case. caption: the text below the table.
        """
        now = time.perf_counter()
        if now < self._next and not last:
            return
        self._next = now + 0.25
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True) if self._console is None else self._console
            self._live = Live(console=console, auto_refresh=False) if console.is_terminal else False
            if self._live:
                self._live.start()
        if self._live:
            self._live.update(self._table(histories, steps, caption), refresh=True)

    def close(self) -> None:
        """Leave the last table in the terminal."""
        if self._live:
            self._live.stop()

    def _table(self, histories: Mapping[str, Sequence[History]], steps: Mapping[str, int], caption: str) -> Any:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        own = {name: [history for history in runs if len(history)] for name, runs in histories.items()}
        validated = any(not math.isnan(h.last("global_loss")) for runs in own.values() for h in runs)
        column = "global_loss" if validated else "train_loss"
        losses = {name: float(np.mean([h.last(column) for h in runs])) for name, runs in own.items() if runs}
        ranked = sorted(losses, key=lambda name: losses[name] if math.isfinite(losses[name]) else math.inf)
        table = Table("strategy", box=box.SIMPLE_HEAD, title=self.title, title_justify="left")
        for header in ("step", "training loss", *(["validation loss"] if validated else []), "MB sent"):
            table.add_column(header, justify="right")
        for name in [name for name in own if name in ranked[:_ROWS]]:
            runs = own[name]
            step = min(int(h.last("step")) for h in runs)
            means = [float(np.mean([h.last(key) for h in runs])) for key in ("train_loss", "global_loss")]
            cells = [f"{loss:.4f}" if math.isfinite(loss) else "" for loss in means[: 1 + validated]]
            sent = np.mean([h.last("wire_bytes") for h in runs]) / 1e6
            style = "bold green" if name == ranked[0] and len(ranked) > 1 else None
            table.add_row(Text(name), f"{step} / {steps[name]}", *cells, f"{sent:.2f}", style=style)
        waiting = [name for name in own if not own[name]][: max(0, _ROWS - len(ranked))]
        for name in waiting:
            table.add_row(Text(name), f"0 / {steps[name]}")
        front = f"the {_ROWS} in front, of {len(own)}" if len(own) > _ROWS else ""
        table.caption = "; ".join(filter(None, (front, caption)))
        table.caption_justify = "left"
        return table
