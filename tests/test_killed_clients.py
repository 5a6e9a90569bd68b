"""Runs whose clients' state lies in a folder, killed at any event: they resume to the bits of the run that was not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cut_runs import assert_same_run
from reference_cluster import images, small_cnn

import vsim
from vsim.checkpoint.folder import checkpoints_in
from vsim.runs import saving
from vsim.runs.acts import measure
from vsim.runs.acts.record import Record
from vsim.runs.clients import Clients
from vsim.strategy import DittoStrategy, FedBNStrategy, FedDynStrategy, ScaffoldStrategy, Strategy

# Functions around which the state of the run, its clients' files or its folder change.
EVENTS: list[tuple[Any, str]] = [
    *((Clients, "arrive"), (Clients, "leave")),  # a round begins and ends
    *((measure, "validate"), (Record, "_record")),
    *((saving, "captured"), (saving, "prune")),  # before and after a checkpoint is written
]
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "Scaffold": lambda: ScaffoldStrategy(H=3, lr=1e-2),
    "Ditto": lambda: DittoStrategy(H=3, lr=1e-2),
    "FedDyn": lambda: FedDynStrategy(H=3, lr=1e-2),
    "FedBN": lambda: FedBNStrategy(H=3, lr=1e-2),
}


def trained(strategy: Strategy, folder: Path, **options: Any) -> vsim.Trainer:
    """Validations and checkpoints are after every second step; rounds have three steps."""
    trainer = vsim.Trainer(small_cnn(), images(), images(7, seed=1))
    given = {"num_nodes": 2, "batch_size": 2, "max_steps": 8, "val_interval": 2, "correlation_interval": 3}
    given |= {"save_dir": folder / "run", "checkpoint_interval": 2, "progress": False, **options}
    clients = vsim.Sample(2, of=5, store=folder / "clients")
    trainer.final = trainer.fit(strategy=strategy, participation=clients, **given)  # type: ignore[attr-defined]
    return trainer


@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "Scaffold" else pytest.mark.slow) for name in STRATEGIES]
)
def test_killed_at_every_event(name: str, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the folders at an event is what a process leaves that is killed there."""
    make, copies = STRATEGIES[name], list[Path]()
    options: dict[str, Any] = {"deterministic": deterministic}

    def copied() -> None:
        if checkpoints_in(tmp_path / "live" / "run"):
            copies.append(tmp_path / str(len(copies)))
            shutil.copytree(tmp_path / "live", copies[-1])

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **given: Any) -> Any:
            copied()
            result = function(*args, **given)
            copied()
            return result

        return around

    with monkeypatch.context() as patched:
        for owner, function in EVENTS:
            patched.setattr(owner, function, watched(getattr(owner, function)))
        straight = trained(make(), tmp_path / "live", **options)
    assert len(copies) == 40
    for folder in copies[:: 4 if name == "Scaffold" else 1]:
        assert_same_run(trained(make(), folder, **options, resume=True), straight)
