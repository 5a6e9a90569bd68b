"""The simulator is bitwise equal to K separate modules in eager PyTorch; vmap comes close to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from separate import (
    TASKS,
    AverageGradients,
    AverageWeights,
    Communication,
    OuterStep,
    Task,
    stacked_weights,
    train_separately,
    warmup_then_cosine,
)

from vsim import Trainer
from vsim.cluster.optim import OptimSpec
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy

STEPS = 8  # two epochs and more for every K below: 29 examples, batch 6

STRATEGIES: dict[str, tuple[Callable[..., Strategy], Callable[[], Communication]]] = {
    "alone": (Strategy, Communication),
    "allreduce": (SimpleReduceStrategy, AverageGradients),
    "fedavg": (partial(FedAvgStrategy, H=3), partial(AverageWeights, 3)),
    "diloco": (partial(DiLoCoStrategy, H=3), partial(OuterStep, 3)),
}
OPTIMIZERS = {
    "sgd": OptimSpec("sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": OptimSpec("adamw", lr=1e-2),
}
# Plain: only the optimizer. Full: warm-up and annealing, clipping that is in force at every step (norms
# here are above 0.5), gradients accumulated over pieces of 2.
EXTRAS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "full": (
        {"lr_scheduler": "cosine", "warmup_steps": 2, "max_norm": 0.3},
        {"minibatch_size": 2},
        {"lr_factor": warmup_then_cosine(2, STEPS), "max_norm": 0.3, "minibatch_size": 2},
    ),
}
ALL = list(itertools.product(STRATEGIES, TASKS, OPTIMIZERS, [1, 2, 3, 5], EXTRAS))
# Every strategy with every model, every optimizer with every K, in the fast part.
QUICK = [
    ("allreduce", TASKS[0], "adamw", 3, "full"),
    ("allreduce", TASKS[1], "sgd", 5, "plain"),
    ("allreduce", TASKS[2], "adamw", 2, "full"),
    ("fedavg", TASKS[0], "sgd", 2, "full"),
    ("fedavg", TASKS[1], "adamw", 3, "full"),
    ("fedavg", TASKS[2], "sgd", 1, "plain"),
    ("diloco", TASKS[0], "adamw", 5, "plain"),
    ("diloco", TASKS[1], "sgd", 2, "full"),
    ("diloco", TASKS[2], "sgd", 3, "full"),
    ("diloco", TASKS[2], "adamw", 1, "full"),
    ("alone", TASKS[1], "adamw", 2, "full"),
]
CASES = [
    pytest.param(*case, id="-".join([case[0], case[1].name, case[2], f"K{case[3]}", case[4]]), marks=marks)
    for cases, marks in [(QUICK, ()), ([c for c in ALL if c not in QUICK], pytest.mark.slow)]
    for case in cases
]


def fit(task: Task, strategy: Strategy, num_nodes: int, **options: Any) -> Trainer:
    trainer = Trainer(task.model(), task.data())
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=STEPS, batch_size=6, progress=False, **options)
    return trainer


@pytest.mark.parametrize(("strategy", "task", "optimizer", "num_nodes", "extra"), CASES)
def test_the_bits_are_those_of_separate_modules(
    strategy: str, task: Task, optimizer: str, num_nodes: int, extra: str
) -> None:
    ours, by_hand = STRATEGIES[strategy]
    spec = OPTIMIZERS[optimizer]
    strategy_options, fit_options, separate_options = EXTRAS[extra]

    trainer = fit(
        task,
        ours(optim_spec=spec, **strategy_options),
        num_nodes,
        deterministic=True,
        **fit_options,
    )
    separate = train_separately(
        task.model(),
        task.data(),
        by_hand(),
        lambda parameters: spec.cls(parameters, **spec.kwargs),
        num_nodes=num_nodes,
        max_steps=STEPS,
        batch_size=6,
        **separate_options,
    )

    assert trainer.history.node_losses.tolist() == separate.losses
    assert trainer.strategy is not None
    cluster = trainer.strategy.cluster
    assert torch.equal(cluster.weights, separate.weights)
    assert (cluster.weights != stacked_weights([task.model()])).any(1).all()  # they have moved
    for name, buffer in cluster.replicas.buffers.items():
        assert torch.equal(buffer, separate.buffers(name)), name
    assert ("cnn" in task.name) == bool(cluster.replicas.buffers)


# vmap rounds differently, by about 1e-7 a step. AdamW divides a gradient by its own size, so that one which is only
# rounding (a convolution's bias before BatchNorm) becomes a whole step either way: with its eps well above rounding
# the two executors stay as close as under SGD. The bound is 1e-5, or one part in 10⁴, on every weight.
@pytest.mark.parametrize(
    ("extra", "task", "strategy"),
    [  # every strategy, every model, with everything once; the others are slow
        pytest.param(
            *case,
            marks=pytest.mark.slow if case[0] == "full" and i % 4 != 1 else (),
            id="-".join([*case[::2], case[1].name]),
        )
        for i, case in enumerate(itertools.product(EXTRAS, TASKS, ["allreduce", "fedavg", "diloco"]))
    ],
)
def test_vmap_is_close_to_the_loop(strategy: str, task: Task, extra: str) -> None:
    make = STRATEGIES[strategy][0]
    strategy_options, fit_options, _ = EXTRAS[extra]
    for spec in (OPTIMIZERS["sgd"], OptimSpec("adamw", lr=1e-2, eps=1e-3)):
        weights, losses, buffers = [], [], []
        for executor in ("vmap", "loop"):
            trainer = fit(task, make(optim_spec=spec, **strategy_options), 3, executor=executor, **fit_options)
            assert trainer.strategy is not None and trainer.history.executor == executor
            weights.append(trainer.strategy.cluster.weights)
            losses.append(torch.from_numpy(trainer.history.node_losses))
            buffers.append(trainer.strategy.cluster.replicas.buffers)
        torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*buffers, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


def test_a_deterministic_run_is_computed_node_by_node() -> None:
    task, make = TASKS[1], partial(FedAvgStrategy, H=2, inner_optim="sgd", lr=0.1)
    auto, loop = (fit(task, make(), 3, deterministic=True, executor=executor) for executor in ("auto", "loop"))
    assert auto.strategy is not None and loop.strategy is not None
    assert torch.equal(auto.strategy.cluster.weights, loop.strategy.cluster.weights)
    assert (auto.history.executor, auto.history.executor_reason) == ("loop", "deterministic=True")
    for options in ({"executor": "vmap"}, {"chunk_size": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.* has no effect with deterministic=True"):
            fit(task, make(), 3, deterministic=True, **options)
