"""torch.optim on stacked rows: one optimizer over the matrix is K optimizers, or there are K."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from separate import AverageWeights, small_mlp, train_separately, vectors
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from vsim import Trainer
from vsim.cluster.optim import ELEMENTWISE, OPTIMIZERS, OptimSpec, clip_by_node, resolve_optim
from vsim.cluster.optimizers import NodeOptimizers, torch_optimizers
from vsim.cluster.replicas import Replicas
from vsim.cluster.schedule import Schedule, warmup_cosine
from vsim.models import MLP
from vsim.strategy import FedAvgStrategy, SimpleReduceStrategy, Strategy

CPU = torch.device("cpu")


class Matrices(nn.Module):
    """Two-dimensional weights only, which is what Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(7, 12, generator=g))
        self.second = nn.Parameter(torch.randn(5, 7, generator=g))

    def forward(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy((x @ self.first.T).tanh() @ self.second.T, y)


def gradients(replicas: Replicas, step: int) -> Tensor:
    return torch.randn(replicas.grads.shape, generator=torch.Generator().manual_seed(step)).to(replicas.grads)


def separately(replicas: Replicas, spec: OptimSpec, steps: int) -> Tensor:
    """The rows after `steps` steps of an optimizer for each node, over tensors of its own."""
    rows = []
    for row in range(replicas.num_held):
        own = [v.clone().requires_grad_() for v in replicas.views(replicas.weights[row]).values()]
        optimizer = spec.cls(own, **spec.kwargs)
        for step in range(steps):
            for p, g in zip(own, replicas.views(gradients(replicas, step)[row]).values(), strict=True):
                p.grad = g.clone()
            optimizer.step()
        rows.append(torch.cat([p.detach().flatten() for p in own]))
    return torch.stack(rows)


def stacked(replicas: Replicas, spec: OptimSpec, steps: int, deterministic: bool) -> Tensor:
    optimizer = spec.build_for(replicas, deterministic)
    for step in range(steps):
        replicas.grads.copy_(gradients(replicas, step))
        optimizer.step()
    return replicas.weights


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{"lr": 0.1, "maximize": True}],
    "RMSprop": [{"lr": 0.1, "momentum": 0.5, "centered": True}],
    "Adagrad": [{"lr": 0.1, "lr_decay": 0.1}],
    "NAdam": [{"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}],
}
SPECS = [OptimSpec(cls) for cls in sorted(ELEMENTWISE, key=lambda cls: cls.__name__)]
SPECS += [OptimSpec(name.lower(), **kwargs) for name, each in OPTIONS.items() for kwargs in each]
FUSED = [OptimSpec(name, lr=0.1, fused=True) for name in ("sgd", "adam", "adamw", "adagrad")]
SPECS += [*FUSED, OptimSpec("adamw", lr=0.1, foreach=True)]


def long_mlp() -> MLP:
    """Its 65,610 weights are long enough for a call of each row's own, and no multiple of what a vector holds."""
    return MLP(8, (3453,), 10, seed=1)


@pytest.mark.parametrize("model", [small_mlp, long_mlp])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_one_optimizer_over_the_matrix_is_one_for_each_node(spec: OptimSpec, model: Callable[[], MLP]) -> None:
    start = Replicas.of(model(), 3, CPU)
    expected = separately(start, spec, steps=5)
    assert torch.equal(stacked(Replicas.of(model(), 3, CPU), spec, 5, deterministic=True), expected)
    fast = stacked(Replicas.of(model(), 3, CPU), spec, 5, deterministic=False)
    torch.testing.assert_close(fast, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected, start.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_weights_of_less_precision_are_stepped_by_no_fused_kernel(name: str, dtype: torch.dtype) -> None:
    # It rounds once a step and not after each operation; torch's SGD is far off.
    model, spec = small_mlp().to(dtype), OptimSpec(name, lr=0.1)
    expected = separately(Replicas.of(model, 3, CPU), spec, steps=5)
    ours = stacked(Replicas.of(model, 3, CPU), spec, 5, deterministic=False)
    unit = torch.finfo(dtype).eps  # by which the last entries of a tensor, which fill no vector, may differ
    torch.testing.assert_close(ours, expected, rtol=4 * unit, atol=unit, equal_nan=True)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_of_torch_is_right_by_node_or_refused(name: str) -> None:
    if name in ("lbfgs", "sparseadam"):
        with pytest.raises(ValueError, match="needs closures or sparse gradients"):
            OptimSpec(name)
        return
    spec = OptimSpec(name, lr=0.01)
    start = Replicas.of(Matrices(), 3, CPU)
    expected = separately(start, spec, steps=3)
    built = spec.build_for(Replicas.of(Matrices(), 3, CPU), deterministic=True)
    assert isinstance(built, NodeOptimizers) == (not spec.elementwise)
    assert torch.equal(stacked(Replicas.of(Matrices(), 3, CPU), spec, 3, deterministic=True), expected)


MIXING = [name for name, cls in OPTIMIZERS.items() if cls not in ELEMENTWISE and name not in ("lbfgs", "sparseadam")]


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_elements_is_applied_node_by_node(name: str) -> None:
    spec = OptimSpec(name, lr=0.05)
    trainer = Trainer(Matrices(), vectors())
    trainer.fit(
        strategy=FedAvgStrategy(H=2, inner_optim=spec, lr_scheduler=StepLR, lr_scheduler_kwargs={"step_size": 2}),
        num_nodes=3,
        max_steps=5,
        batch_size=4,
        deterministic=True,
        progress=False,
    )
    separate = train_separately(
        Matrices(),
        vectors(),
        AverageWeights(2),
        lambda parameters: spec.cls(parameters, **spec.kwargs),
        num_nodes=3,
        max_steps=5,
        batch_size=4,
        lr_factor=lambda s: 0.1 ** (s // 2),
    )
    assert trainer.strategy is not None
    assert torch.equal(trainer.strategy.cluster.weights, separate.weights)
    assert len(torch_optimizers(trainer.strategy.optim)) == 3


class OwnOptimizer(torch.optim.SGD):
    """A user's: it could do anything."""


def test_a_users_own_optimizer_is_applied_node_by_node() -> None:
    spec = OptimSpec(OwnOptimizer, lr=0.1, momentum=0.9)
    assert not spec.elementwise
    built = spec.build_for(Replicas.of(small_mlp(), 3, CPU), False)
    assert isinstance(built, NodeOptimizers) and len(built.param_groups) == 3
    expected = separately(Replicas.of(small_mlp(), 3, CPU), spec, 3)
    assert torch.equal(stacked(Replicas.of(small_mlp(), 3, CPU), spec, 3, False), expected)


def test_arguments_that_only_the_optimizer_knows() -> None:
    class Open(torch.optim.SGD):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, lr=options["rate"])

    optimizer = OptimSpec(Open, rate=0.5).build_for(Replicas.of(small_mlp(), 2, CPU), False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, OwnOptimizer])
def test_it_is_refused_over_stacked_parameters(cls: Callable[..., torch.optim.Optimizer]) -> None:
    class Direct(Strategy):
        def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
            self.optim = cls(model.parameters(), lr=0.1)

    with pytest.raises(TypeError, match=r"would mix nodes; build it with OptimSpec\(.*\)\.build\(self\.model\)"):
        Trainer(small_mlp(), vectors()).fit(strategy=Direct(), num_nodes=2, progress=False)


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_a_fused_one_is_refused_over_stacked_parameters_that_are_apart_in_memory(num_nodes: int) -> None:
    class Direct(Strategy):
        def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
            self.optim = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    train = functools.partial(Trainer(small_mlp(), vectors()).fit, strategy=Direct(), num_nodes=num_nodes, max_steps=2)
    if num_nodes == 1:  # as in a process: there is nothing between the rows
        train(progress=False)
        return
    with pytest.raises(
        TypeError, match=r"fused AdamW takes tensors for contiguous.*fused=True, …\)\.build\(self\.model"
    ):
        train(progress=False)


@pytest.mark.parametrize(
    "spec",
    [
        OptimSpec("adafactor", lr=0.05),
        OptimSpec("sgd", lr=0.1, momentum=0.9, fused=False),
        OptimSpec("adamw", lr=0.1, fused=True),
    ],
    ids=repr,
)
def test_building_over_the_stacked_model_is_the_same(spec: OptimSpec) -> None:
    class Built(Strategy):
        def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
            self.optim = spec.build(model)

    weights = []
    options: dict[str, Any] = {"deterministic": True, "max_steps": 4, "batch_size": 4, "progress": False}
    for strategy in (Built(), Strategy(inner_optim=spec)):
        trainer = Trainer(Matrices(), vectors())
        trainer.fit(strategy=strategy, num_nodes=3, executor="loop", **options)
        assert trainer.strategy is not None
        weights.append(trainer.strategy.cluster.weights)
    assert torch.equal(*weights)


def test_building_over_an_ordinary_model() -> None:
    model = small_mlp()
    assert type(OptimSpec("adafactor").build(model)) is torch.optim.Adafactor
    optimizer = OptimSpec("sgd", lr=0.5).build(p for p in model.parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_zero_grad_of_node_optimizers() -> None:
    replicas = Replicas.of(Matrices(), 2, CPU)
    optimizer = OptimSpec("adafactor").build_for(replicas, False)
    replicas.grads.fill_(1)
    optimizer.zero_grad(set_to_none=False)
    assert not replicas.grads.any()
    before = replicas.weights.clone()
    for _ in range(2):
        optimizer.zero_grad()
    optimizer.step()  # no gradient, no step
    assert torch.equal(replicas.weights, before)


def test_the_kernel_that_a_user_chose_is_kept() -> None:
    replicas = Replicas.of(small_mlp(), 2, CPU)
    assert OptimSpec("adamw").build_for(replicas, False).param_groups[0]["fused"] is True
    assert OptimSpec("adamw").build_for(replicas, True).param_groups[0]["fused"] is None
    assert OptimSpec("adamw", fused=False).build_for(replicas, False).param_groups[0]["fused"] is False
    assert OptimSpec("adamw", foreach=True).build_for(replicas, False).param_groups[0]["fused"] is None
    assert not OptimSpec("rmsprop").build_for(replicas, False).param_groups[0].get("fused")


# Specifications


def test_specifications() -> None:
    assert repr(OptimSpec("SGD", lr=0.1)) == "OptimSpec(SGD, lr=0.1)"
    assert (
        repr(OptimSpec.from_string("adamw", lr=0.1, betas=(0.9, 0.95))) == "OptimSpec(AdamW, lr=0.1, betas=(0.9, 0.95))"
    )
    assert OptimSpec(torch.optim.AdamW).elementwise and not OptimSpec("adafactor").elementwise
    assert {"sgd", "adam", "adamw", "rmsprop", "adagrad"} <= OPTIMIZERS.keys()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: OptimSpec("adamv"), ValueError, r"optimizer must be one of .*'sgd'.*got 'adamv'; did you mean 'adam"),
        (
            lambda: OptimSpec("sgd", learning_rate=1),
            TypeError,
            r"SGD got an unknown argument 'learning_rate'.*Valid: lr",
        ),
        (lambda: OptimSpec("sgd", momentun=1), TypeError, "'momentun'; did you mean 'momentum'"),
        (lambda: OptimSpec(3), TypeError, "must be a torch.optim class or the name of one, got 3"),
        (lambda: OptimSpec(nn.Linear), TypeError, "must be a torch.optim class or the name of one, got .*Linear"),
        (lambda: OptimSpec(torch.optim.LBFGS), ValueError, "LBFGS needs closures"),
    ],
)
def test_wrong_specifications(make: Callable[[], OptimSpec], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_spellings_of_an_optimizer() -> None:
    default = OptimSpec("adamw", weight_decay=0.1)

    def resolve(a: Any = None, b: Any = None, lr: float | None = None, inner_lr: float | None = None) -> str:
        return repr(resolve_optim("X()", {"a": a, "b": b}, {"lr": lr, "inner_lr": inner_lr}, default))

    assert resolve() == "OptimSpec(AdamW, weight_decay=0.1)"
    assert resolve(inner_lr=0.5) == "OptimSpec(AdamW, weight_decay=0.1, lr=0.5)"
    assert resolve(b="sgd", lr=1) == "OptimSpec(SGD, lr=1.0)"
    assert resolve(torch.optim.SGD) == "OptimSpec(SGD)"
    assert resolve(OptimSpec("sgd", momentum=0.9), lr=0.5) == "OptimSpec(SGD, momentum=0.9, lr=0.5)"
    with pytest.raises(TypeError, match=r"X\(\): a and b are two spellings of one argument"):
        resolve("sgd", "sgd")
    with pytest.raises(TypeError, match=r"X\(\): lr and inner_lr are two spellings"):
        resolve(lr=0.1, inner_lr=0.1)
    with pytest.raises(TypeError, match=r"the learning rate is given twice, as 0\.5 and in OptimSpec\(SGD, lr=0\.1\)"):
        resolve(OptimSpec("sgd", lr=0.1), lr=0.5)
    with pytest.raises(ValueError, match="inner_lr must be >= 0, got -1"):
        resolve(inner_lr=-1)


# Schedules


def rates(strategy: Strategy, steps: int = 10) -> list[float]:
    trainer = Trainer(small_mlp(), vectors())
    trainer.fit(strategy=strategy, num_nodes=2, max_steps=steps, batch_size=2, progress=False)
    assert math.isnan(trainer.history["lr"][0])  # step 0 is before training
    return trainer.history["lr"][1:].tolist()


@pytest.mark.parametrize("spec", ["sgd", "adafactor"])
@pytest.mark.parametrize(
    ("options", "warmup", "anneal", "total"),
    [
        ({"lr_scheduler": "cosine"}, 0, True, 10),
        ({"lr_scheduler": "cosine", "warmup_steps": 4}, 4, True, 10),
        ({"lr_scheduler": "lambda_cosine", "warmup_steps": 4}, 4, False, 10),
        ({"lr_scheduler": "lambda_cosine", "cosine_anneal": True, "max_steps": 6}, 0, True, 6),
        ({"lr_scheduler": "lambda_cosine", "lr_scheduler_kwargs": {"warmup_steps": 3, "max_steps": 20}}, 3, False, 20),
        ({"warmup_steps": 3}, 3, False, 10),
        ({"cosine_anneal": True, "warmup_steps": 2}, 2, True, 10),
        ({"lr_scheduler": "cosine", "cosine_anneal": False}, 0, False, 10),
        ({"warmup_steps": 0, "cosine_anneal": False}, 0, False, 10),
    ],
)
def test_named_schedules_are_the_formula(
    options: dict[str, Any], warmup: int, anneal: bool, total: int, spec: str
) -> None:
    def factor(s: int) -> float:
        if s < warmup:
            return s / warmup
        w, T = warmup, total
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (min(s, T) - w) / (T - w))) if anneal else 1.0

    assert rates(Strategy(inner_optim=spec, lr=0.2, **options)) == pytest.approx([0.2 * factor(s) for s in range(10)])


@given(warmup=st.integers(0, 20), steps=st.integers(1, 40))
def test_annealing_ends_at_a_tenth(warmup: int, steps: int) -> None:
    factor = warmup_cosine(warmup, True, warmup + steps)
    assert factor(warmup) == pytest.approx(1.0)
    assert factor(warmup + steps) == factor(warmup + 2 * steps) == pytest.approx(0.1)
    values = [factor(s) for s in range(warmup, warmup + steps + 1)]
    assert values == sorted(values, reverse=True)
    assert all(factor(s) == s / warmup for s in range(warmup))
    assert warmup_cosine(5, True, 5)(5) == pytest.approx(1.0)  # a run that ends with its warm-up


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (StepLR, {"step_size": 3, "gamma": 0.5}),
        (ExponentialLR, {"gamma": 0.9}),
        (CosineAnnealingLR, {"T_max": 7}),
        (OneCycleLR, {"max_lr": 0.5, "total_steps": 12}),
        (LambdaLR, {"lr_lambda": lambda s: 1 / (s + 1)}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_schedulers_of_torch(cls: type[LRScheduler], kwargs: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.2, momentum=0.9)
    scheduler = cls(optimizer, **kwargs)
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    spec = OptimSpec("sgd", lr=0.2, momentum=0.9)
    assert rates(SimpleReduceStrategy(inner_optim=spec, lr_scheduler=cls, lr_scheduler_kwargs=kwargs)) == expected


@pytest.mark.parametrize("spec", [{"cls": "adafactor"}, {"cls": "adafactor", "only": "layers.0.weight", "rest": "sgd"}])
def test_a_rate_that_is_a_tensor_belongs_to_one_optimizer(spec: dict[str, Any]) -> None:
    # A schedule changes it in place: each of several optimizers would have changed that of all.
    def trained(lr: Any) -> Tensor:
        strategy = FedAvgStrategy(
            H=2, optim_spec=OptimSpec(lr=lr, **spec), lr_scheduler=ExponentialLR, lr_scheduler_kwargs={"gamma": 0.5}
        )
        trainer = Trainer(small_mlp(), vectors())
        trainer.fit(strategy=strategy, num_nodes=3, max_steps=5, batch_size=4, progress=False)
        assert trainer.history["lr"].tolist()[1:] == [0.5 * 0.5**step for step in range(5)]
        assert trainer.strategy is not None
        return trainer.strategy.cluster.weights

    torch.testing.assert_close(trained(torch.tensor(0.5)), trained(0.5))


def schedule(scheduler: Any = None, kwargs: Any = None, w: Any = None, c: Any = None, t: Any = None) -> Schedule:
    return Schedule(scheduler, kwargs, w, c, t)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: schedule("linear"), ValueError, "lr_scheduler must be one of 'cosine', 'lambda_cosine', got 'linear'"),
        (lambda: schedule(3), TypeError, "must be a torch.optim.lr_scheduler class or one of cosine.*got 3"),
        (lambda: schedule(torch.optim.SGD), TypeError, "must be a torch.optim.lr_scheduler class"),
        (lambda: schedule(ReduceLROnPlateau), ValueError, "ReduceLROnPlateau needs a metric"),
        (
            lambda: schedule(StepLR, {"step": 3}),
            TypeError,
            "lr_scheduler_kwargs of StepLR got an unknown argument 'step'",
        ),
        (lambda: schedule(StepLR, {"step_size": 3}, 5), TypeError, "warmup_steps belongs to the named schedules"),
        (lambda: schedule(None, {"gamma": 3}), TypeError, "lr_scheduler_kwargs has no effect without lr_scheduler="),
        (lambda: schedule(None, None, None, None, 9), TypeError, "max_steps has no effect without lr_scheduler="),
        (
            lambda: schedule("cosine", {"warmup": 3}),
            TypeError,
            "unknown argument 'warmup'; did you mean 'warmup_steps'",
        ),
        (lambda: schedule("cosine", {"warmup_steps": 3}, 3), TypeError, "warmup_steps is given twice"),
        (lambda: schedule("cosine", None, -1), ValueError, "warmup_steps must be a whole number >= 0, got -1"),
        (lambda: schedule("cosine", None, 1.5), TypeError, r"warmup_steps must be a whole number, got 1\.5"),
        (lambda: schedule("cosine", None, None, None, 0), ValueError, "max_steps must be a whole number >= 1, got 0"),
    ],
)
def test_wrong_schedules(make: Callable[[], Schedule], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# Clipping


@given(num_nodes=st.integers(1, 5), max_norm=st.floats(1e-3, 1e3), scale=st.floats(1e-6, 1e3), seed=st.integers(0, 99))
def test_clipping_is_torchs_on_every_node(num_nodes: int, max_norm: float, scale: float, seed: int) -> None:
    replicas = Replicas.of(small_mlp(), num_nodes, CPU)
    grads = scale * gradients(replicas, seed) * torch.arange(num_nodes)[:, None]  # that of node 0 is zero
    expected = []
    for row in grads:
        model = small_mlp()
        for p, g in zip(model.parameters(), replicas.views(row).values(), strict=True):
            p.grad = g.clone()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        expected.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    replicas.grads.copy_(grads)
    clip_by_node(replicas, max_norm, exact=True)
    assert torch.equal(replicas.grads, torch.stack(expected))
    replicas.grads.copy_(grads)
    clip_by_node(replicas, max_norm, exact=False)
    torch.testing.assert_close(replicas.grads, torch.stack(expected), rtol=1e-5, atol=1e-8)
    assert (replicas.grads.norm(dim=1) <= max_norm * 1.0001).all()
