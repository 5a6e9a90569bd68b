"""torch.optim on stacked rows: one optimizer over the matrix is K optimizers, or there are K."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import small_mlp, vectors
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from vsim import Trainer
from vsim.cluster.optim import OPTIMIZERS, OptimSpec, clip_by_node, resolve_optim
from vsim.cluster.optimizers import NodeOptimizers
from vsim.cluster.replicas import Replicas
from vsim.cluster.schedule import LRSchedule
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy
from vsim.strategy.remade import remade

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


class OwnOptimizer(torch.optim.SGD):
    """A user's: it could do anything."""


def long_mlp() -> MLP:
    """Its 65,610 weights are long enough for a call of each row's own, and no multiple of what a vector holds."""
    return MLP(8, (3453,), 10, seed=1)


ALL = [OptimSpec(name, lr=0.01) for name in sorted(OPTIMIZERS.keys() - {"lbfgs", "sparseadam"})]
ALL += [
    OptimSpec("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    OptimSpec("adam", lr=0.1, amsgrad=True, weight_decay=0.1),
    OptimSpec("adamw", lr=0.1, maximize=True),
    OptimSpec("rmsprop", lr=0.1, momentum=0.5, centered=True),
    OptimSpec("adagrad", lr=0.1, lr_decay=0.1),
    OptimSpec("nadam", lr=0.1, decoupled_weight_decay=True, weight_decay=0.1),
    OptimSpec("adamw", lr=0.1, foreach=True),
    OptimSpec(OwnOptimizer, lr=0.1, momentum=0.9),
    *(OptimSpec(name, lr=0.1, fused=True) for name in ("sgd", "adam", "adamw", "adagrad")),
]


def named(value: Any) -> str:
    return getattr(value, "__name__", "") or repr(value)


# One by node is slow for long rows, and Muon takes matrices.
CASES = [(spec, make) for spec in ALL for make in (small_mlp, long_mlp if spec.elementwise else Matrices)]


@pytest.mark.parametrize(("spec", "make"), [case for case in CASES if case[0].cls is not torch.optim.Muon], ids=named)
def test_one_optimizer_over_the_matrix_is_one_for_each_node(spec: OptimSpec, make: Callable[[], nn.Module]) -> None:
    start = Replicas.of(make(), 3, CPU)
    expected = separately(start, spec, steps=4)
    assert torch.equal(stacked(Replicas.of(make(), 3, CPU), spec, 4, deterministic=True), expected)
    fast = stacked(Replicas.of(make(), 3, CPU), spec, 4, deterministic=False)
    torch.testing.assert_close(fast, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected, start.weights)
    built = spec.build_for(start, deterministic=False)
    assert isinstance(built, NodeOptimizers) == (not spec.elementwise) and len(built.param_groups) in (1, 3)


@pytest.mark.parametrize(
    ("name", "dtype"), [("sgd", torch.float16), ("adamw", torch.bfloat16), ("adagrad", torch.bfloat16)]
)
def test_weights_of_less_precision_are_stepped_by_no_fused_kernel(name: str, dtype: torch.dtype) -> None:
    # It rounds once a step and not after each operation; torch's SGD is far off.
    model, spec = small_mlp().to(dtype), OptimSpec(name, lr=0.1)
    expected = separately(Replicas.of(model, 3, CPU), spec, steps=5)
    ours = stacked(Replicas.of(model, 3, CPU), spec, 5, deterministic=False)
    unit = torch.finfo(dtype).eps  # by which the last entries of a tensor, which fill no vector, may differ
    torch.testing.assert_close(ours, expected, rtol=4 * unit, atol=unit, equal_nan=True)


class Built(Strategy):
    """Builds its optimizer over the stacked model."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.optim = self.make(model)


def test_an_optimizer_over_stacked_parameters_is_refused_where_it_would_mix_nodes() -> None:
    def train(make: Callable[[nn.Module], Any], num_nodes: int = 2) -> None:
        options: dict[str, Any] = {"num_nodes": num_nodes, "max_steps": 2, "progress": False}
        Trainer(small_mlp(), vectors()).fit(strategy=Built(make), **options)

    for cls in (torch.optim.Adafactor, OwnOptimizer):
        with refused(TypeError, "OptimSpec(", ".build(self.model)"):
            train(lambda model, cls=cls: cls(model.parameters(), lr=0.1))  # type: ignore[misc]
    fused = functools.partial(torch.optim.AdamW, lr=0.1, fused=True)
    train(lambda model: fused(model.parameters()), num_nodes=1)  # as in a process: nothing is between the rows
    with refused(TypeError, "fused AdamW", "fused=True", ".build(self.model"):
        train(lambda model: fused(model.parameters()))


@pytest.mark.parametrize("spec", [OptimSpec("adafactor", lr=0.05), OptimSpec("adamw", lr=0.1, fused=True)], ids=repr)
def test_building_over_the_stacked_model_is_the_same(spec: OptimSpec) -> None:
    weights = []
    options: dict[str, Any] = {"deterministic": True, "max_steps": 4, "batch_size": 4, "progress": False}
    for strategy in (Built(spec.build), Strategy(inner_optim=spec)):
        trainer = Trainer(Matrices(), vectors())
        trainer.fit(strategy=strategy, num_nodes=3, executor="loop", **options)
        assert trainer.strategy is not None
        weights.append(trainer.strategy.cluster.weights)
    assert torch.equal(*weights)
    model = small_mlp()  # and over an ordinary one
    assert type(spec.build(model)) is spec.cls
    assert spec.build(p for p in model.parameters()).param_groups[0]["params"] == list(model.parameters())


def test_the_kernel_that_a_user_chose_is_kept() -> None:
    replicas = Replicas.of(small_mlp(), 2, CPU)
    for spec, deterministic, fused in (
        (OptimSpec("adamw"), False, True),
        (OptimSpec("adamw"), True, None),
        (OptimSpec("adamw", fused=False), False, False),
        (OptimSpec("adamw", foreach=True), False, None),
        (OptimSpec("rmsprop"), False, None),
    ):
        assert spec.build_for(replicas, deterministic).param_groups[0].get("fused") is fused


# Specifications


def test_spellings_of_an_optimizer() -> None:
    default = OptimSpec("adamw", weight_decay=0.1)

    class Open(torch.optim.SGD):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, lr=options["rate"])

    def resolve(given: Any = None, lr: float | None = None) -> str:
        return repr(resolve_optim("X()", "a", given, "lr", lr, default))

    assert resolve() == "OptimSpec(AdamW, weight_decay=0.1)"
    assert resolve(lr=0.5) == "OptimSpec(AdamW, weight_decay=0.1, lr=0.5)"
    assert resolve("SGD", lr=1) == "OptimSpec(SGD, lr=1.0)"
    assert resolve(torch.optim.SGD) == repr(OptimSpec.from_string("sgd")) == "OptimSpec(SGD)"
    assert resolve(OptimSpec("sgd", momentum=0.9), lr=0.5) == "OptimSpec(SGD, momentum=0.9, lr=0.5)"
    built = OptimSpec(Open, rate=0.5).build_for(Replicas.of(small_mlp(), 2, CPU), False)  # a name that it knows alone
    assert [group["lr"] for group in built.param_groups] == [0.5, 0.5]
    for make, kind, *parts in (
        (lambda: resolve(OptimSpec("sgd", lr=0.1), lr=0.5), TypeError, "learning rate", 0.5, "OptimSpec(SGD, lr=0.1)"),
        (lambda: resolve(lr=-1), ValueError, "lr", ">= 0", -1),
        (lambda: OptimSpec("adamv"), ValueError, "optimizer", "'sgd'", "adamv", "'adam"),
        (lambda: OptimSpec("sgd", learning_rate=1), TypeError, "SGD", "'learning_rate'", "Valid: lr"),
        (lambda: OptimSpec("sgd", momentun=1), TypeError, "'momentun'", "'momentum'"),
        (lambda: OptimSpec(3), TypeError, "torch.optim", 3),  # type: ignore[arg-type]
        (lambda: OptimSpec(nn.Linear), TypeError, "torch.optim", "Linear"),  # type: ignore[arg-type]
        (lambda: OptimSpec("lbfgs"), ValueError, "LBFGS", "closures"),
        (lambda: OptimSpec(torch.optim.SparseAdam), ValueError, "SparseAdam", "sparse gradients"),
    ):
        with refused(kind, *parts):
            make()


# Schedules


def rates(strategy: Strategy, steps: int = 10) -> list[float]:
    trainer = Trainer(small_mlp(), vectors())
    trainer.fit(strategy=strategy, num_nodes=2, max_steps=steps, batch_size=2, progress=False)
    assert math.isnan(trainer.history["lr"][0])  # step 0 is before training
    return trainer.history["lr"][1:].tolist()


@pytest.mark.parametrize(
    ("options", "warmup", "anneal", "total"),
    [
        ({"lr_scheduler": "cosine"}, 0, True, 10),
        ({"lr_scheduler": "cosine", "warmup_steps": 4, "inner_optim": "adafactor"}, 4, True, 10),
        ({"lr_scheduler": "cosine", "warmup_steps": 10}, 10, True, 11),
        ({"lr_scheduler": "lambda_cosine", "warmup_steps": 4}, 4, False, 10),
        ({"lr_scheduler": "lambda_cosine", "cosine_anneal": True, "max_steps": 6}, 0, True, 6),
        ({"lr_scheduler": "lambda_cosine", "lr_scheduler_kwargs": {"warmup_steps": 3, "max_steps": 20}}, 3, False, 20),
        ({"warmup_steps": 3}, 3, False, 10),
        ({"cosine_anneal": True, "warmup_steps": 2}, 2, True, 10),
        ({"lr_scheduler": "cosine", "cosine_anneal": False}, 0, False, 10),
    ],
    ids=str,
)
def test_named_schedules_are_the_formula(options: dict[str, Any], warmup: int, anneal: bool, total: int) -> None:
    def factor(s: int) -> float:
        if s < warmup:
            return s / warmup
        w, T = warmup, total
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (min(s, T) - w) / (T - w))) if anneal else 1.0

    found = rates(Strategy(**{"inner_optim": "sgd", "lr": 0.2, **options}))
    assert found == pytest.approx([0.2 * factor(s) for s in range(10)])


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (StepLR, {"step_size": 3, "gamma": 0.5}),
        (CosineAnnealingLR, {"T_max": 7}),
        (OneCycleLR, {"max_lr": 0.5, "total_steps": 12}),
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
        schedule: dict[str, Any] = {"lr_scheduler": ExponentialLR, "lr_scheduler_kwargs": {"gamma": 0.5}}
        strategy = FedAvgStrategy(H=2, inner_optim=OptimSpec(lr=lr, **spec), **schedule)
        trainer = Trainer(small_mlp(), vectors())
        trainer.fit(strategy=strategy, num_nodes=3, max_steps=5, batch_size=4, progress=False)
        assert trainer.history["lr"].tolist()[1:] == [0.5 * 0.5**step for step in range(5)]
        assert trainer.strategy is not None
        return trainer.strategy.cluster.weights

    torch.testing.assert_close(trained(torch.tensor(0.5)), trained(0.5))


@pytest.mark.parametrize(
    ("given_", "kind", "parts"),
    [
        (("linear",), ValueError, ("lr_scheduler", "'cosine', 'lambda_cosine'", "linear")),
        ((3,), TypeError, ("torch.optim.lr_scheduler", "cosine", 3)),
        ((torch.optim.SGD,), TypeError, ("torch.optim.lr_scheduler", "SGD")),
        ((ReduceLROnPlateau,), ValueError, ("ReduceLROnPlateau", "metric")),
        ((StepLR, {"step": 3}), TypeError, ("lr_scheduler_kwargs", "StepLR", "'step'")),
        ((StepLR, {"step_size": 3}, 5), TypeError, ("warmup_steps", "named schedules")),
        ((None, {"gamma": 3}), TypeError, ("lr_scheduler_kwargs", "lr_scheduler=")),
        ((None, None, None, None, 9), TypeError, ("max_steps", "lr_scheduler=")),
        (("cosine", {"warmup": 3}), TypeError, ("'warmup'", "'warmup_steps'")),
        (("cosine", {"warmup_steps": 3}, 3), TypeError, ("warmup_steps", "twice")),
        (("cosine", None, -1), ValueError, ("warmup_steps", ">= 0", -1)),
        (("cosine", None, 1.5), TypeError, ("warmup_steps", 1.5)),
        (("cosine", None, None, None, 0), ValueError, ("max_steps", ">= 1", 0)),
    ],
    ids=str,
)
def test_wrong_schedules(given_: tuple[Any, ...], kind: type[Exception], parts: tuple[Any, ...]) -> None:
    with refused(kind, *parts):
        LRSchedule(*[*given_, None, None, None, None][:5])


# Clipping


@settings(max_examples=30)
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
    for exact in (True, False):
        replicas.grads.copy_(grads)
        clip_by_node(replicas, max_norm, exact=exact)
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-8}
        torch.testing.assert_close(replicas.grads, torch.stack(expected), **tolerance)
    assert (replicas.grads.norm(dim=1) <= max_norm * 1.0001).all()


GROUPS = {"*.bias": {"weight_decay": 0.0}, "layers.0.*": {"lr": 0.02}, "layers.*": {"weight_decay": 0.1}}


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_groups_are_those_of_torch_on_every_node(cls: type[torch.optim.Optimizer]) -> None:
    """A parameter is in the first group whose pattern matches."""
    spec, of_torch = OptimSpec(cls, lr=0.01, weight_decay=0.1, groups=GROUPS), [{"weight_decay": 0.0}, {"lr": 0.02}, {}]
    replicas = Replicas.of(small_mlp(), 3, CPU)
    assert [len(names) for _, names in spec.parts(replicas.module)] == [2, 1, 1]
    stacked, nodes = spec.build_for(replicas, deterministic=True), [dict(small_mlp().named_parameters()) for _ in "123"]

    def group(name: str) -> int:
        return 0 if name.endswith("bias") else 1 if name.startswith("layers.0") else 2

    separate = []
    for own in nodes:
        groups = [
            {"params": [p for name, p in own.items() if group(name) == i], **given} for i, given in enumerate(of_torch)
        ]
        separate.append(cls(groups, lr=0.01, weight_decay=0.1))  # type: ignore[call-arg]
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        replicas.grads.copy_(torch.randn(replicas.grads.shape, generator=g))
        for name, grads in replicas.views(replicas.grads).items():
            for own, grad in zip(nodes, grads, strict=True):
                own[name].grad = grad.clone()
        for optimizer in (stacked, *separate):
            optimizer.step()
    for name, weights in replicas.views(replicas.weights).items():
        assert torch.equal(weights, torch.stack([own[name].detach() for own in nodes])), name


def test_groups_that_mean_nothing_are_errors() -> None:
    with pytest.raises(ValueError, match=r"groups='\*\.bia' is no trainable parameter"):
        OptimSpec("adamw", groups={"*.bia": {"lr": 0.1}}).parts(small_mlp())
    with pytest.raises(TypeError, match=r"groups\['x'\]: AdamW got an unknown argument 'rate'"):
        OptimSpec("adamw", groups={"x": {"rate": 0.1}})
    with pytest.raises(TypeError, match="give one of them"):
        OptimSpec("muon", rest="adamw", groups={"x": {"lr": 0.1}})
    wrong: list[Any] = [{}, {"x": 0.1}, ["x"]]
    for one in wrong:
        with pytest.raises(TypeError, match="groups must map patterns to arguments"):
            OptimSpec("adamw", groups=one)


def test_a_run_with_groups_resumes_and_its_record_makes_the_strategy_again(tmp_path: Path) -> None:
    spec = OptimSpec("adamw", weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.0}})
    setting: dict[str, Any] = {"num_nodes": 2, "batch_size": 4, "progress": False, "deterministic": True}

    def trained(steps: int, **options: Any) -> dict[str, Tensor]:
        strategy = DiLoCoStrategy(inner_optim=spec, H=2, lr=0.1)
        trainer = Trainer(small_mlp(), vectors())
        return trainer.fit(strategy=strategy, max_steps=steps, **setting, **options).state_dict()

    whole = trained(6)
    trained(3, save_dir=tmp_path)
    resumed = trained(6, save_dir=tmp_path, resume=True)
    assert all(torch.equal(own, whole[name]) for name, own in resumed.items())
    call = repr(DiLoCoStrategy(inner_optim=spec, H=2, lr=0.1))
    assert repr(remade(call)) == call and "groups={'*.bias': {'weight_decay': 0.0}}" in call
