"""A resumed comparison whose runs are at different steps: each run trains as if the comparison had not been cut."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cut_runs import assert_same_comparison
from reference_cluster import small_mlp, vectors
from test_ensemble import Killed, broken, killed_at, quietly

import vsim
from vsim.checkpoint.folder import checkpoints_in
from vsim.core.group import Group
from vsim.runs.acts import feed as feeding
from vsim.runs.feeding import feed
from vsim.search.compare import train_entries
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, Strategy

SAVED = 3  # steps between checkpoints; the runs are killed in step 9, and wait at step 6
KINDS: dict[str, dict[str, Any]] = {  # options of all runs
    "one group": {},
    "two groups": {},  # "more" has another number of nodes
    "cohorts": {"participation": vsim.Sample(2, of=5)},
    "uneven": {"data": lambda rank, num_nodes, train: vectors(9 + 4 * rank)},
    "workers": {"dataloader_kwargs": {"num_workers": 1}},
}
ENDS = ["stopped at 5", "stopped at 6", "stopped at 8", "diverged at 5", "diverged at 6", "diverged at 8"]
HALVED = ["halved", *(f"halved, {end}" for end in ENDS)]
BEHIND = ["ends, seed 1", "ends, seed 1; ends, seed 2", "other, seed 2", "ends, seed 1; more, seed 2"]
OPTIONS: dict[str, Any] = {"progress": False, "deterministic": True, "batch_size": 8}


class Stops(vsim.Callback):
    """Stops the first seed of "ends"."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, run: Any) -> None:
        if run.label == "ends, seed 1" and run.done == self.at:
            run.stop()


def compared(end: str, kind: str, **options: Any) -> vsim.Comparison:
    """Runs of "ends" end as `end` says; the others train to step 10, or until halving stops them."""
    at = int(end.split()[-1]) if end != "halved" else 0
    ends: Strategy = broken(at - 1) if "diverged" in end else FedAvgStrategy(H=2, lr=1e-2)
    entries: dict[str, Any] = {
        "ends": {"strategy": ends, "num_nodes": 2},
        "other": {"strategy": DiLoCoStrategy(H=3, lr=2e-2), "num_nodes": 2},
        "more": {"strategy": FedAvgStrategy(H=2, lr=3e-2), "num_nodes": 3 if kind == "two groups" else 2},
    }
    given: dict[str, Any] = {**OPTIONS, "seeds": [1, 2], "val_interval": 5, "data": vectors(), **KINDS[kind]}
    given["max_steps"] = {"ends": 6 if end == "last is 6" else 10, "other": 10, "more": 10}
    if "halved" in end:
        given |= {"halving": 2, "max_steps": 10}
    if "stopped" in end:
        given["callbacks"] = [Stops(at)]
    with quietly():
        return train_entries(entries, small_mlp(0.2), given.pop("data"), vectors(), **{**given, **options})


@cache
def uncut(end: str, kind: str) -> vsim.Comparison:
    return compared(end, kind)


def saved_behind(end: str, kind: str, behind: Collection[str], folder: Path, **options: Any) -> dict[str, Any]:
    """Kill a comparison; runs in `behind` lack their last checkpoint and end.json, as if killed before writing these.

    Returns: the options with which it was saved.
    """
    saved: dict[str, Any] = {"save_dir": folder, "checkpoint_interval": SAVED}
    with pytest.raises(Killed):
        compared(end, kind, **saved, **options, train_loss_hook=killed_at(9))
    for label in behind:
        own = folder / label.replace(" ", "_")
        (own / "end.json").unlink(missing_ok=True)
        if len(found := checkpoints_in(own)) > 1:
            found[-1].unlink()
    return saved


# Of kind, behind and end each pair of two, with the quick cases.
ALL_ENDS = [*ENDS, "last is 6", *HALVED]
PAIRS = [
    (kind, BEHIND[(i + j) % len(BEHIND)], end)
    for i, kind in enumerate(KINDS)
    for j, end in enumerate(ALL_ENDS)
    if kind != "uneven" or end not in HALVED[-2:]  # "ends" would be the only one left, and diverge before step 9
]
QUICK = [
    *((kind, "other, seed 2", "last is 6") for kind in ("uneven", "workers")),
    ("cohorts", "other, seed 2", "halved, diverged at 5"),
    ("one group", "other, seed 2", "stopped at 6"),
    ("two groups", "ends, seed 1", "diverged at 6"),
]
CASES = [*QUICK, *(case for case in PAIRS if case not in QUICK)]


@pytest.mark.parametrize(
    ("kind", "behind", "end"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow, id=": ".join(case)) for case in CASES],
)
def test_every_run_resumes_with_the_batches_of_its_own_step(kind: str, behind: str, end: str, tmp_path: Path) -> None:
    saved = saved_behind(end, kind, behind.split("; "), tmp_path)
    assert_same_comparison(compared(end, kind, **saved, resume=True), uncut(end, kind))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["last is 6", "halved, diverged at 5"])
def test_processes_resume_with_the_batches_of_each_runs_own_step(end: str, tmp_path: Path) -> None:
    saved = saved_behind(end, "two groups", ["other, seed 2"], tmp_path)
    saved |= {"backend": "process", "num_processes": 2, "threads_per_process": 1}
    assert_same_comparison(compared(end, "two groups", **saved, resume=True), uncut(end, "two groups"))


def test_a_batch_of_another_step_is_an_error_that_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(group: Group[Any]) -> None:
        feed(group)
        next(group.batches)

    monkeypatch.setattr(feeding, "feed", late)
    with pytest.raises(RuntimeError, match=r"step 1 got the batch of step 2 .* \{1\}"):
        compared("last is 6", "two groups", save_dir=tmp_path)
    assert not [*tmp_path.glob("*/end.json")]


def test_a_rung_at_which_runs_wait_is_decided_once(tmp_path: Path) -> None:
    """The run behind them ends at step 4, and no run takes steps 5 and 6."""
    asked: list[int] = []

    def keep(step: int, scores: Mapping[str, float]) -> Collection[str]:
        asked.append(step)
        return list(scores)

    pruned: dict[str, Any] = {"pruning": ([6], keep)}
    saved = saved_behind("stopped at 8", "one group", ["ends, seed 1"], tmp_path, **pruned)
    assert asked == [6]
    compared("stopped at 8", "one group", **saved, **pruned, resume=True, callbacks=[Stops(4)])
    assert asked == [6, 6]


def test_the_rows_of_an_ended_run_keep_their_cohort() -> None:
    """The ended run would have a larger cohort where the other run's next cohort is as large as the one before."""

    def trained(**strategies: Strategy) -> np.ndarray[Any, Any]:
        cohorts = vsim.Sample(3, of=6, available=vsim.Dropout(0.5))
        entries = {name: {"strategy": strategy, "num_nodes": 3} for name, strategy in strategies.items()}
        workers = {"num_workers": 1}  # with which rows of ended runs are computed on
        options = {**OPTIONS, "batch_size": 2, "dataloader_kwargs": workers, "participation": cohorts}
        with quietly():
            result = train_entries(entries, small_mlp(), vectors(), seeds=[3], max_steps=12, **options)
        assert not result["fed"].failure
        return result["fed"].history.node_losses

    fed = FedAvgStrategy(H=3, lr=1e-2)
    np.testing.assert_array_equal(trained(fed=fed, bad=broken(2)), trained(fed=fed))
