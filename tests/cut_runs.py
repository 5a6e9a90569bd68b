"""Runs that are cut in two, and how they are compared with the run that was not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_cluster import images, small_cnn
from torch import Tensor, nn

import vsim
from vsim import Comparison, Trainer
from vsim.checkpoint.folder import checkpoint_path, checkpoints_in
from vsim.data import digits
from vsim.history.history import OF_THE_MACHINE, History
from vsim.models import MLP
from vsim.runs.view import RunView
from vsim.strategy import DiLoCoStrategy, OptimSpec, SPARTADiLoCoStrategy, Strategy

# 29 examples for K = 3 in batches of 4 are 3 steps an epoch, the last of 2: most steps are in the middle of one.
OPTIONS: dict[str, Any] = {
    "num_nodes": 3,
    "batch_size": 4,
    "minibatch_size": 2,
    "max_steps": 14,
    "val_interval": 6,
    "correlation_interval": 5,
    "progress": False,
}
PROCESSES: dict[str, Any] = {"backend": "process", "deterministic": True, "threads_per_process": 1}
SCHEDULE: dict[str, Any] = {"lr_scheduler": "cosine", "warmup_steps": 4, "max_norm": 0.5}
ADAMW = OptimSpec("adamw", lr=1e-2)


def in_processes(number: int | str | None) -> dict[str, Any]:
    """Options of a run in so many processes; None: one for each node."""
    run = {"backend": "process", "threads_per_process": 1}
    return run if number is None else {**run, "num_processes": number}


def trainer_of(model: Callable[[], nn.Module] = small_cnn, data: Callable[..., Any] = images) -> Trainer:
    """With BatchNorm, dropout and validation."""
    return Trainer(model(), data(), data(7, seed=1))


def fit(strategy: Strategy, trainer: Trainer | None = None, **options: Any) -> Trainer:
    """Train; the mean model is kept as `trainer.final`."""
    trainer = trainer or trainer_of()
    trainer.final = trainer.fit(strategy=strategy, **{**OPTIONS, **options})  # type: ignore[attr-defined]
    return trainer


def weights(trainer: Trainer) -> Tensor:
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights


def assert_same_record(ours: History, theirs: History) -> None:
    """Everything that was noted is equal to the bit, but for its seconds."""
    assert ours.columns == theirs.columns
    for column in ours.columns:
        if column not in OF_THE_MACHINE:
            np.testing.assert_array_equal(ours[column], theirs[column], err_msg=column)
    np.testing.assert_array_equal(ours.node_losses, theirs.node_losses)
    assert list(ours.ledger) == list(theirs.ledger)
    assert ours.ledger.wire_bytes == theirs.ledger.wire_bytes
    assert ours.ledger.attendance == theirs.ledger.attendance


def assert_same_model(ours: nn.Module | None, theirs: nn.Module | None) -> None:
    """Both are None, or their weights and buffers are equal to the bit."""
    states = [{} if model is None else model.state_dict() for model in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def assert_same_comparison(ours: Comparison, theirs: Comparison) -> None:
    assert list(ours) == list(theirs)
    for name in ours:
        for one, other in zip(ours.runs(name), theirs.runs(name), strict=True):
            assert_same_record(one.history, other.history)
            assert_same_model(one.model, other.model)
            assert (one.failure, one.stopped_at, one.diverged_at) == (
                other.failure,
                other.stopped_at,
                other.diverged_at,
            )


def assert_same_run(ours: Trainer, theirs: Trainer) -> None:
    """The records are equal, the final model, and the nodes where they are."""
    assert_same_record(ours.history, theirs.history)
    assert_same_model(*(trainer.final for trainer in (ours, theirs)))  # type: ignore[attr-defined]
    if ours.strategy is not None and theirs.strategy is not None:
        assert torch.equal(weights(ours), weights(theirs))
        buffers = [trainer.strategy.cluster.replicas.buffers for trainer in (ours, theirs)]  # type: ignore[union-attr]
        assert all(torch.equal(b, buffers[1][name]) for name, b in buffers[0].items())
        generators = [trainer.strategy.cluster.generator for trainer in (ours, theirs)]  # type: ignore[union-attr]
        assert torch.equal(*(g.get_state() for g in generators))


def assert_it_moves(run: Callable[..., Trainer], folder: Path, *also: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """run(**options) is the same run if one backend saves it and the other resumes, and by the options in `also`."""
    straight = run()
    for saves, resumes in [(PROCESSES, {}), ({}, PROCESSES), *also]:
        own = folder / f"{len(saves)}-{len(resumes)}"
        assert_same_run(run(save_dir=own, checkpoint_interval=5, **saves), straight)
        assert_same_run(run(resume=checkpoints_in(own)[0], **resumes), straight)


class Keeper:
    """Keeps the checkpoints of all steps, of which a folder keeps the newest only. A callback."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self.folder, self.kept = folder, kept
        kept.mkdir(exist_ok=True)

    def __call__(self, run: RunView) -> None:
        for path in self.folder.glob("step-*.safetensors"):
            if not (self.kept / path.name).exists():
                (self.kept / path.name).write_bytes(path.read_bytes())


def saved_at_every_step(
    strategy: Strategy, folder: Path, trainer: Trainer | None = None, **options: Any
) -> tuple[Trainer, Callable[[int], Path]]:
    """Train and save after every step; return the trainer, and step → file."""
    keeper = Keeper(folder / "run", folder / "all")
    trained = fit(strategy, trainer, save_dir=folder / "run", checkpoint_interval=1, callbacks=[keeper], **options)
    keeper(None)  # type: ignore[arg-type]  # the last step's
    return trained, lambda step: checkpoint_path(folder / "all", step)


# What processes do that are killed ------------------------------------------------------------------------------------


def train_on(folder: Path, steps: int) -> None:
    """Continue a run, or begin it."""
    latest = vsim.latest_checkpoint(folder)
    fit(hybrid(), max_steps=steps, checkpoint_interval=2, save_dir=folder, resume=latest)


def hybrid() -> Strategy:
    return SPARTADiLoCoStrategy(p_sparta=0.2, H=5, async_delay=2, lr=1e-2, lr_scheduler="cosine")


def sweep_to(result: Path, folder: Path | None) -> None:
    """Train a sweep, or continue the one that is saved in a folder."""
    settings = {"H": [2, 5, 10], "outer_lr": [0.1, 0.4, 0.7], "lr": [1e-3, 1e9]}
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 60, "val_interval": 10, "progress": False}
    if folder is not None:
        options |= {"save_dir": folder, "checkpoint_interval": 3, "resume": (folder / "race.json").exists()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sweep = vsim.sweep(
            MLP(seed=0), *digits(), strategy=DiLoCoStrategy, settings=settings, seeds=[1, 2], halving=2, **options
        )
    sweep.to_json(result)
