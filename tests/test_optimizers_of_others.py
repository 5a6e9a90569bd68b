"""Optimizers that are not torch's, or not elementwise: one for each node, evaluated where they want to be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from cut_runs import assert_it_moves, assert_same_run, fit, trainer_of, weights
from reference_cluster import (
    AverageGradients,
    AverageWeights,
    Communication,
    shard_batches,
    small_mlp,
    stacked_weights,
    train_separately,
    vectors,
)
from standing_ranks import Ranks
from test_strategies_common import EACH, Row, examples, model
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from vsim import Trainer
from vsim.checkpoint.folder import checkpoints_in
from vsim.runs.view import RunView
from vsim.strategy import (
    DESLOCStrategy,
    DiLoCoStrategy,
    DionStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    Strategy,
)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675, as a user might have it in a file."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(momentum.lerp(p.grad, 1 - first).sign(), alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - second)


FREE = OptimSpec(schedulefree.AdamWScheduleFree, lr=0.02, warmup_steps=3)
SPECS = [
    OptimSpec(Lion, lr=3e-3),
    FREE,
    OptimSpec(schedulefree.SGDScheduleFree, lr=0.2, foreach=False),
    OptimSpec("adafactor", lr=0.02),
    OptimSpec("muon", lr=0.02, rest=OptimSpec(Lion, lr=3e-3)),
    OptimSpec(Lion, lr=3e-3, rest=FREE),
]


def in_training(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> Callable[[Any], Any]:
    """Make an optimizer as a script would: schedule-free ones get a call of `train()` first."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = optimizer(parameters, **options)
        if hasattr(made, "train"):
            made.train()
        return made

    return make


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.rest is None], ids=repr)
@pytest.mark.parametrize(
    ("strategy", "communication"),
    [(SimpleReduceStrategy(), AverageGradients()), (FedAvgStrategy(H=2), AverageWeights(2))],
    ids=["allreduce", "fedavg"],
)
def test_it_is_the_optimizer_of_every_node(strategy: Strategy, communication: Any, spec: OptimSpec) -> None:
    options: dict[str, Any] = {"num_nodes": 3, "max_steps": 6, "batch_size": 4}
    trainer = Trainer(small_mlp(), vectors())
    strategy.optim_spec = spec
    trainer.fit(strategy=strategy, deterministic=True, progress=False, **options)
    separate = train_separately(small_mlp(), vectors(), communication, in_training(spec.cls, spec.kwargs), **options)
    assert torch.equal(weights(trainer), separate.weights)


# Evaluation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_schedule_free_run_is_evaluated_at_the_average(deterministic: bool) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def watch(run: RunView) -> None:
        seen.append((parameters_to_vector(run.global_model().parameters()).detach(), run.cluster.weights[0].clone()))

    trainer = Trainer(small_mlp(), vectors(), vectors(7, seed=1))
    options: dict[str, Any] = {"num_nodes": 1, "max_steps": 5, "batch_size": 4, "val_interval": 1, "progress": False}
    final = trainer.fit(strategy=Strategy(inner_optim=FREE), deterministic=deterministic, callbacks=[watch], **options)
    plain = small_mlp()
    optimizer = schedulefree.AdamWScheduleFree(plain.parameters(), **FREE.kwargs)
    optimizer.train()
    losses, x = [], next(iter(vectors(7, seed=1).tensors))
    for step, batch in enumerate(itertools.islice(shard_batches(vectors(), 1, 0, 4, True, 42), 5)):
        optimizer.zero_grad()
        plain(batch).backward()
        optimizer.step()
        trained = parameters_to_vector(plain.parameters()).detach().clone()
        optimizer.eval()
        average = parameters_to_vector(plain.parameters()).detach().clone()
        assert (average - trained).abs().max() > 1e-4 or step == 0  # where both are the first iterate
        losses.append(plain(list(vectors(7, seed=1).tensors)).item())
        torch.testing.assert_close(seen[step], (average, trained), rtol=1e-5, atol=1e-6)
        optimizer.train()
        with torch.no_grad():
            nn.utils.vector_to_parameters(trained, plain.parameters())
    np.testing.assert_allclose(trainer.history["global_loss"][1:], losses, rtol=1e-5)
    nn.utils.vector_to_parameters(average, plain.parameters())
    torch.testing.assert_close(final(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS[1:], ids=repr)
def test_evaluation_changes_no_bit(spec: OptimSpec) -> None:
    strategy = FedAvgStrategy(H=2, inner_optim=spec)
    often, never = (
        fit(strategy, trainer_of(small_mlp, vectors), max_steps=6, val_interval=interval) for interval in (1, None)
    )
    assert torch.equal(weights(often), weights(never))
    assert often.history.last("global_loss") == never.history.last("global_loss")
    assert all(torch.equal(*pair) for pair in zip(often.final.parameters(), never.final.parameters(), strict=True))


# Outer ----------------------------------------------------------------------------------------------------------------


class OuterStep(Communication):
    """DiLoCo with an outer optimizer over a copy of the model, every parameter in its own shape."""

    def __init__(self, H: int, spec: OptimSpec) -> None:
        self.H, self.spec = H, spec

    def start(self, models: list[nn.Module]) -> None:
        self.outer = copy.deepcopy(models[0])
        self.optim = in_training(self.spec.cls, self.spec.kwargs)(self.outer.parameters())

    def after_step(self, models: list[nn.Module], step: int) -> None:
        if step % self.H == 0:
            parameters, mean = [*self.outer.parameters()], stacked_weights(models).mean(0)  # of one message
            for p, own in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
                p.grad = p - own.view_as(p)
            self.optim.step()
            for model in models:
                model.load_state_dict(self.outer.state_dict())


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.rest is None], ids=repr)
def test_as_an_outer_optimizer(spec: OptimSpec) -> None:
    options: dict[str, Any] = {"num_nodes": 3, "max_steps": 7, "batch_size": 4}
    inner = OptimSpec("sgd", lr=0.1)
    trainer = Trainer(small_mlp(), vectors(), vectors(7, seed=1))
    strategy = DiLoCoStrategy(H=2, inner_optim=inner, outer_optim=spec)
    trainer.fit(strategy=strategy, deterministic=True, val_interval=2, progress=False, **options)
    oracle = OuterStep(2, spec)
    separate = train_separately(
        small_mlp(), vectors(), oracle, lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options
    )
    assert torch.equal(weights(trainer), separate.weights)
    if hasattr(oracle.optim, "eval"):
        oracle.optim.eval()
        average, trained = parameters_to_vector(oracle.outer.parameters()), separate.weights[0]
        assert (average - trained).abs().max() > 1e-4
    loss = oracle.outer(list(vectors(7, seed=1).tensors)).item()
    np.testing.assert_allclose(trainer.history.last("global_loss"), loss, rtol=1e-6)


@pytest.mark.parametrize("spec", [FREE, OptimSpec("adafactor", lr=0.02)], ids=repr)
def test_an_outer_optimizer_resumes(spec: OptimSpec, tmp_path: Path) -> None:
    def run(**options: Any) -> Trainer:
        strategy = DiLoCoStrategy(H=2, lr=1e-2, outer_optim=spec)
        return fit(strategy, trainer_of(small_mlp, vectors), max_steps=8, val_interval=1, **options)

    straight = run(save_dir=tmp_path, checkpoint_interval=5)
    assert_same_run(run(resume=checkpoints_in(tmp_path)[0]), straight)


# All strategies -------------------------------------------------------------------------------------------------------
# All strategies -------------------------------------------------------------------------------------------------------


QUICK = {"AllReduce": FREE, "DiLoCo": SPECS[4], "SPARTA": SPECS[4]}
# An optimizer for each strategy, other ones from row to row.
CASES = [
    pytest.param(row, spec, id=f"{row.name}-{spec!r}", marks=() if row.name in QUICK else pytest.mark.slow)
    for i, row in enumerate(EACH)
    for spec in [QUICK.get(row.name, SPECS[i % len(SPECS)])]
    if not (row.refuses or row.cls is DESLOCStrategy or (row.cls is DionStrategy and spec.rest))
]


@pytest.mark.parametrize(("row", "spec"), CASES)
@pytest.mark.filterwarnings("ignore:(DCT|Tile)TopK:UserWarning")
def test_every_strategy_resumes_bitwise(row: Row, spec: OptimSpec, tmp_path: Path) -> None:
    def run(**options: Any) -> Trainer:
        given = {"num_nodes": 4, "max_steps": 6, "batch_size": 8, "val_interval": 2, "minibatch_size": None, **options}
        strategy = row.cls(**{**row.arguments, "inner_optim": spec})
        return fit(strategy, Trainer(model(), examples(), examples(8, seed=1)), **given)

    straight = run(save_dir=tmp_path, checkpoint_interval=3)
    assert straight.history["global_loss"][-1] != straight.history["global_loss"][0]
    assert_same_run(run(resume=checkpoints_in(tmp_path)[0]), straight)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_it_moves_between_backends(
    spec: OptimSpec, tmp_path: Path, ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsim.trainer.train_in_processes", ranks_of(3).train)

    def run(**options: Any) -> Trainer:
        options = {"deterministic": True, "max_steps": 8, **options}
        return fit(DiLoCoStrategy(inner_optim=spec, H=3), trainer_of(small_mlp, vectors), **options)

    assert_it_moves(run, tmp_path)
