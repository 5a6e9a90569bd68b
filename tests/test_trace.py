"""What happens in a run between its steps, in this order: the events of today, in traces.json, run by run.

The order across runs is no part of a trace. If a function moves, PLACES in event_traces.py follows it; if an order
changes on purpose, `python tests/test_trace.py` writes the file anew, and its diff says what has changed.
"""

from __future__ import annotations

import json
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import event_traces
import pytest
from event_traces import ALL, Tells
from small_cases import COMPUTE, SGD, Failing, Listed, examples, mlp, own

import vsim
from vsim.strategy import AsyncDiLoCoStrategy, DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy

FILE = Path(__file__).parent / "traces.json"
Traces = dict[str, list[str]]
FEDAVG = FedAvgStrategy(H=2, lr=1e-2)
TWO = {"fedavg": FEDAVG, "diloco": DiLoCoStrategy(H=3, lr=1e-2)}
DIVERGES = FedAvgStrategy(H=3, inner_optim=SGD, lr=1e30)
FAILS = Failing(H=2, lr=1e-2)
JOINS = vsim.Schedule({0: [0], 2: [0, 1], 4: [1]})
OPTIONS: dict[str, Any] = {"num_nodes": 2, "max_steps": 5, "batch_size": 4, "val_interval": 2, "progress": False}
SAVED: dict[str, Any] = {"checkpoint_interval": 2}
AGAIN: dict[str, Any] = {**SAVED, "resume": True}
CLIENTS: dict[str, Any] = {"client_val_dataset": own, "test_dataset": examples(7, seed=2)}


def data(options: dict[str, Any]) -> tuple[Any, ...]:
    """Training and validation data; options without a val_interval are of a run without validation."""
    return mlp(), options.pop("data", examples()), examples(7, seed=1) if options["val_interval"] else None


@contextmanager
def ending() -> Iterator[None]:
    """Note how a call ends."""
    end = "ended"
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        end = f"raised {type(error).__name__}"
    event_traces.TRACKS.tell(ALL, end)


def fit(folder: Path, *act: Any, **more: Any) -> None:
    options = {**OPTIONS, "strategy": FEDAVG, **more}
    if "checkpoint_interval" in options:
        options["save_dir"] = folder / "run"
    trainer = vsim.Trainer(*data(options))
    with ending():
        trainer.fit(**{k: v for k, v in options.items() if v is not None}, callbacks=[Tells(*act)])


def compare(folder: Path, *act: Any, **more: Any) -> None:
    options = {**OPTIONS, "strategies": TWO, **more}
    if "checkpoint_interval" in options:
        options["save_dir"] = folder / "all"
    with ending():
        vsim.compare(*data(options), **{k: v for k, v in options.items() if v is not None}, callbacks=[Tells(*act)])


def halve(folder: Path, *act: Any, **more: Any) -> None:
    options = {**OPTIONS, "max_steps": 10, "halving": 2, "val_interval": 3, **more}
    # Rates whose losses are far apart: rounding, which differs from CPU to CPU, must not decide who continues.
    settings = options.pop("settings", {"H": 2, "lr": [1e-2, 3e-3, 1e-3, 1e-4]})
    if "batch_size" in settings:
        del options["batch_size"]
    if "checkpoint_interval" in options:
        options["save_dir"] = folder / "all"
    given, call = data(options), {"strategy": FedAvgStrategy, "settings": {"lr": 1e-2, **settings}}
    with ending():
        vsim.sweep(*given, **call, **{k: v for k, v in options.items() if v is not None}, callbacks=[Tells(*act)])


def twice(train: Callable[..., None], *act: Any, **more: Any) -> Callable[[Path], None]:
    """Cut by an act of a callback, and resumed."""

    def both(folder: Path) -> None:
        train(folder, *act, **{**SAVED, **more})
        train(folder, **{**AGAIN, **more})

    return both


def once(train: Callable[..., None], *act: Any, **more: Any) -> Callable[[Path], None]:
    return lambda folder: train(folder, *act, **more)


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "plain": once(fit),
    "no validation": once(fit, val_interval=None),
    "saved": once(fit, **SAVED),
    "saved, no validation": once(fit, **SAVED, val_interval=None),
    "stopped at a validation, saved": once(fit, "stops", "on_step", 2, **SAVED),
    "stopped between, saved": once(fit, "stops", "on_step", 3, **SAVED),
    "stopped before the first step": once(fit, "stops", "on_evaluation", 0, **SAVED),
    "test and clients' data": once(fit, **SAVED, **CLIENTS),
    "test and clients' data, stopped": once(fit, "stops", "on_step", 3, **SAVED, **CLIENTS),
    "joins": once(fit, participation=JOINS, **SAVED),
    "joins, stopped": once(fit, "stops", "on_step", 4, participation=JOINS),
    "cohorts": once(fit, participation=vsim.Sample(2, of=5), **SAVED, **CLIENTS),
    "cohorts, cut": twice(fit, "interrupts", "on_step", 2, participation=vsim.Sample(2, of=5)),
    "joins, cut": twice(fit, "interrupts", "on_step", 2, participation=JOINS),
    "cut": twice(fit, "presses", "on_step", 3),
    "cut at start": twice(fit, "interrupts", "on_start", 0),
    "cut in a validation": twice(fit, "presses", "on_evaluation", 4),
    "cut in the last step": twice(fit, "presses", "on_step", 5),
    "cut in on_end": twice(fit, "presses", "on_end", 5),
    "cut twice": twice(fit, "insists", "on_step", 3),
    "asynchronous": once(
        fit,
        strategy=AsyncDiLoCoStrategy(H=2, lr=1e-2, outer_lr=0.4),
        compute=COMPUTE,
        network="1 Mbit/s",
        **SAVED,
    ),
    "diverges": once(fit, strategy=DIVERGES, **SAVED),
    "strategy fails": once(fit, strategy=FAILS, **SAVED),
    "callback fails": once(fit, "raises", "on_step", 3, **SAVED),
    "callback fails in on_end": once(fit, "raises", "on_end", 5, **SAVED),
    "data fail": once(fit, data=Listed("failing"), max_steps=14, **SAVED),
    "compared": once(compare, **SAVED, **CLIENTS),
    "compared one by one": once(compare, together=False, **SAVED),
    "compared, one diverges": once(compare, strategies={**TWO, "bad": DIVERGES}, **SAVED),
    "compared, one fails": once(compare, strategies={**TWO, "bad": FAILS}, **SAVED),
    "compared, a callback fails": once(compare, "raises", "on_step", 3, "DiLoCo", **SAVED),
    "compared, data fail": once(compare, data=Listed("failing"), max_steps=14, **SAVED),
    "compared, one stops": once(compare, "stops", "on_step", 3, "DiLoCo", **SAVED, **CLIENTS),
    "compared, cut": twice(compare, "presses", "on_step", 3, "DiLoCo"),
    "compared, cut one by one": twice(compare, "presses", "on_step", 3, "DiLoCo", together=False),
    "compared, joins": once(compare, participation=JOINS),
    "compared, cohorts": once(compare, participation=vsim.Sample(2, of=5), seeds=[1, 2]),
    "compared, lengths": once(compare, max_steps={"fedavg": 3, "diloco": 5}, **SAVED),
    "halved": once(halve, **SAVED, **CLIENTS),
    "halved, joins": once(halve, participation=JOINS),
    "halved, no validation": once(halve, val_interval=None),
    "halved, two sizes, one stops": once(halve, "stops", "on_step", 4, settings={"H": [1, 2], "batch_size": [2, 4]}),
    "halved, cut at a rung": twice(halve, "interrupts", "on_step", 5),
}


def trace(name: str, folder: Path) -> Traces:
    """Return name of a run → its events."""
    with warnings.catch_warnings(), event_traces.tracing() as found:
        warnings.simplefilter("ignore")
        SCENARIOS[name](folder)
    return found


def in_processes(folder: Path) -> Traces:
    """Two processes, with nodes that come and go, checkpoints, and a callback that stops in the second alone."""
    with ending(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vsim.Trainer(mlp(), examples(), examples(7, seed=1)).fit(
            **{**OPTIONS, **SAVED, "num_nodes": 3, "save_dir": folder / "run"},
            strategy=SimpleReduceStrategy(lr=1e-2),
            participation=vsim.Schedule({0: [0, 2], 2: [0, 1, 2]}),
            callbacks=[Tells("stops", "on_step", 3, folder=folder, rank=1)],
            **{"backend": "process", "num_processes": 2, "threads_per_process": 1, "timeout_seconds": 60},
        )
    return event_traces.of_processes(folder)


def readable(traces: Traces) -> Traces:
    """Name of a run → a line for each step."""
    return {name: event_traces.by_step(events) for name, events in sorted(traces.items())}


def expected(name: str) -> Traces:
    return json.loads(FILE.read_text(encoding="utf-8"))[name]  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", SCENARIOS)
def test_events_of_every_run_are_in_their_order(name: str, tmp_path: Path) -> None:
    assert readable(trace(name, tmp_path)) == expected(name)


def test_events_of_processes_are_in_their_order(tmp_path: Path) -> None:
    assert readable(in_processes(tmp_path)) == expected("in two processes")


def test_no_scenario_is_forgotten() -> None:
    assert {*json.loads(FILE.read_text(encoding="utf-8"))} == {*SCENARIOS, "in two processes"}


def write() -> None:
    """Write the file anew."""
    made = {}
    for name in [*SCENARIOS, "in two processes"]:
        with tempfile.TemporaryDirectory() as folder:
            made[name] = readable(in_processes(Path(folder)) if name not in SCENARIOS else trace(name, Path(folder)))
    FILE.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
