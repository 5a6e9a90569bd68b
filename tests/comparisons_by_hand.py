"""Comparisons made by hand, and lists of calls that must be refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from errors import refused

from vsim import ComparedRun, Comparison, Event, History


def run(
    losses: Sequence[float],
    every: int = 1,
    *,
    seed: int = 0,
    nodes: int = 2,
    payload: float = 0.0,
    syncs: int = 1,
    diverged: int | None = None,
    stopped: int | None = None,
) -> ComparedRun:
    """A run with these losses at steps 0, every, 2 · every, …, whose nodes average `payload` bytes at every `syncs`-th.

    `diverged`: the step at which the run diverged. `stopped`: the step after which halving stopped it.
    """
    history, sent = History("made", nodes), 0.0
    last = every * (len(losses) - 1) if diverged is None else diverged - 1
    for step in range(last + 1):
        if step and payload and step % syncs == 0:
            history.ledger.record(Event(step, step, "weights", "all_reduce", "x", payload, (range(nodes),)))
            sent += payload
        row = {"step": step, "examples": 8 * step, "payload_bytes": sent, "wire_bytes": 2 * (nodes - 1) / nodes * sent}
        if step % every == 0 and step // every < len(losses):
            row["global_loss"] = losses[step // every]
        history.append(row | ({"train_loss": 1.0} if step else {}), [1.0] * nodes if step else None)
    made = ComparedRun(history, seed=seed, stopped_at=stopped, diverged_at=diverged)
    made.failure = "" if diverged is None else f"non-finite loss at step {diverged} on nodes [0]"
    return made


def comparison(weights: int = 4000, /, **runs: Iterable[ComparedRun]) -> Comparison:
    """Name → its runs, of a model of that many bytes."""
    made = Comparison(weights)
    for name, own in runs.items():
        for one in own:
            made.add(name, one)
    return made


def of_finals(**finals: Iterable[float]) -> Comparison:
    """Name → the final loss of each seed; NaN for a run that diverged."""
    return comparison(
        **{
            name: [run([9.0, loss], seed=i, diverged=None if loss == loss else 1) for i, loss in enumerate(own)]
            for name, own in finals.items()
        }
    )


def never(*_: Any, **__: Any) -> Any:
    """Fail where training, or reading, calls this."""
    raise AssertionError("it must not be called")


Refusals = Sequence[tuple[Callable[[], Any], type[Exception], Sequence[object]]]


def check_refusals(cases: Refusals) -> None:
    """Every call raises an error that names its words; see `errors.refused`."""
    for call, kind, words in cases:
        with refused(kind, *words):
            call()


def texts(legend: Any) -> list[str]:
    """The texts of a legend that are not empty."""
    return [text.get_text() for text in legend.get_texts() if text.get_text()]
