"""Muon on all nodes at once, and two optimizers that share the parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cut_runs import fit, trainer_of, weights
from errors import refused
from reference_cluster import (
    AverageWeights,
    OuterStep,
    small_cnn,
    small_gpt,
    small_mlp,
    tokens,
    train_separately,
    vectors,
)
from test_optim import CPU, Matrices, gradients, separately, stacked
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import vsim
from vsim import Trainer, load_checkpoint
from vsim.cluster.muon import hidden_matrices
from vsim.cluster.optim import OptimSpec
from vsim.cluster.optimizers import JointOptimizers, NodeOptimizers, parts_of, torch_optimizers
from vsim.cluster.replicas import Replicas
from vsim.models import GPT, MLP
from vsim.strategy import AloneStrategy, DiLoCoStrategy, FedAvgStrategy, Strategy

ADAMW = OptimSpec("adamw", lr=3e-3, betas=(0.9, 0.95))
BOTH = OptimSpec("muon", lr=0.02, weight_decay=0.01, rest=ADAMW)
HIDDEN_OF_GPT = [
    f"blocks.{i}.{name}.weight" for i in range(2) for name in ("attention_in", "attention_out", "mlp_in", "mlp_out")
]


def both(parameters: Iterable[Tensor], hidden: list[int]) -> Any:
    """Two torch optimizers on one model of the tests' oracle, by the places of the parameters."""
    own = list(parameters)
    two = [
        torch.optim.Muon([own[i] for i in hidden], lr=0.02, weight_decay=0.01),
        torch.optim.AdamW([p for i, p in enumerate(own) if i not in hidden], lr=3e-3, betas=(0.9, 0.95)),
    ]
    return SimpleNamespace(zero_grad=lambda: [o.zero_grad() for o in two], step=lambda: [o.step() for o in two])


# Muon -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.5},
        {"weight_decay": 0.5, "adjust_lr_fn": "original"},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-3},
        {"ns_coefficients": (3.0, -3.2, 1.2)},
    ],
    ids=repr,
)
def test_all_nodes_at_once_are_close_to_one_muon_a_node(options: dict[str, Any]) -> None:
    spec = OptimSpec("muon", lr=0.1, **options)
    start = Replicas.of(Matrices(), 3, CPU)
    expected = separately(start, spec, steps=4)
    ours = stacked(Replicas.of(Matrices(), 3, CPU), spec, 4, deterministic=False)
    # A step is of bfloat16: 2⁻⁸ of what the weights have moved.
    assert (ours - expected).norm() <= 2**-7 * (expected - start.weights).norm()
    plain = separately(start, OptimSpec("muon", lr=0.1), steps=4)
    assert bool(options) == ((ours - plain).norm() > 0.05 * (expected - start.weights).norm())
    assert torch.equal(stacked(Replicas.of(Matrices(), 3, CPU), spec, 4, deterministic=True), expected)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(name in str(func) for name in ("mm", "matmul"))
        return func(*args, **(kwargs or {}))


def test_the_products_of_a_step_are_as_many_for_any_number_of_nodes_and_layers() -> None:
    counts = set()
    for num_nodes, layers in [(1, 1), (2, 1), (7, 4)]:
        model = GPT(11, block_size=7, layers=layers, width=16, heads=2)
        optimizer = BOTH.build_for(Replicas.of(model, num_nodes, CPU), deterministic=False)
        with Products() as products:
            optimizer.step()
        counts.add(products.count)
    assert counts == {3 * 5 * 3}  # shapes (48, 16), (16, 16), and (64, 16) or lying; iterations; products of each


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_gradient_no_step(deterministic: bool) -> None:
    replicas = Replicas.of(small_mlp(), 2, CPU)
    optimizer = BOTH.build_for(replicas, deterministic)
    replicas.grads.fill_(1)
    optimizer.zero_grad(set_to_none=False)
    assert not replicas.grads.any()
    before = replicas.weights.clone()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(replicas.weights, before)


# Two optimizers -------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A head that is not the last layer, an untied embedding, a frozen matrix, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.embedding = nn.Embedding(5, 4)
        self.bags = nn.EmbeddingBag(5, 4)
        self.own = nn.Parameter(torch.zeros(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.inner = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (small_mlp, ["layers.0.weight"]),
        (small_cnn, ["features.0.weight", "features.4.weight"]),
        (small_gpt, HIDDEN_OF_GPT),
        (Matrices, ["first", "second"]),
        (Encoder, ["own", "head.weight", "inner.weight"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_hidden_matrices(make: Callable[[], nn.Module], names: list[str]) -> None:
    assert hidden_matrices(make()) == names


@pytest.mark.parametrize(("strategy", "communication"), [(FedAvgStrategy, AverageWeights), (DiLoCoStrategy, OuterStep)])
def test_it_is_two_optimizers_on_every_node(strategy: type[Strategy], communication: Any) -> None:
    options: dict[str, Any] = {"num_nodes": 3, "max_steps": 5, "batch_size": 4}
    trainer = Trainer(small_gpt(), tokens())
    trainer.fit(strategy=strategy(inner_optim=BOTH, H=2), deterministic=True, progress=False, **options)
    names = [name for name, _ in small_gpt().named_parameters()]
    hidden = [names.index(name) for name in HIDDEN_OF_GPT]
    optimizer: Any = partial(both, hidden=hidden)
    separate = train_separately(small_gpt(), tokens(), communication(2), optimizer, **options)
    assert torch.equal(weights(trainer), separate.weights)
    fast = Trainer(small_gpt(), tokens())
    fast.fit(strategy=strategy(inner_optim=BOTH, H=2), executor="vmap", progress=False, **options)
    moved = (separate.weights - Replicas.of(small_gpt(), 1, CPU).weights).norm()
    assert (weights(fast) - separate.weights).norm() < 0.05 * moved


@pytest.mark.parametrize("only", [None, ["*.bias", "layers.0.weight"], ["*"]], ids=repr)
def test_two_that_are_alike_are_one(only: Any) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    alike = OptimSpec("sgd", only=only, rest=OptimSpec("sgd", **options), **options)
    for deterministic in (False, True):
        ours, expected = (
            stacked(Replicas.of(small_mlp(), 3, CPU), spec, 4, deterministic)
            for spec in (alike, OptimSpec("sgd", **options))
        )
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_convolution_is_a_matrix(deterministic: bool) -> None:
    spec = OptimSpec("muon", lr=0.1, rest=OptimSpec("sgd", lr=0.0))
    start = Replicas.of(small_cnn(), 2, CPU)
    ours = stacked(Replicas.of(small_cnn(), 2, CPU), spec, 3, deterministic)
    for row in range(2):
        expected = {name: w.clone() for name, w in start.views(start.weights[row]).items()}
        own = [expected[name].flatten(1).requires_grad_() for name in hidden_matrices(small_cnn())]
        muon = torch.optim.Muon(own, lr=0.1)
        for step in range(3):
            grads = start.views(gradients(start, step)[row])
            for p, name in zip(own, hidden_matrices(small_cnn()), strict=True):
                p.grad = grads[name].flatten(1)
            muon.step()
        for name, w in start.views(ours[row]).items():
            torch.testing.assert_close(w, expected[name], rtol=0, atol=0 if deterministic else 2e-3, msg=name)


def test_learning_rates() -> None:
    for spec, options, rates in (
        (OptimSpec("muon", rest="adamw"), {}, [1e-3, 1e-3]),  # torch's defaults
        (OptimSpec("muon", rest="adamw"), {"lr": 0.5}, [0.5, 0.5]),
        (OptimSpec("muon", lr=0.5, rest="adamw"), {}, [0.5, 0.5]),
        (OptimSpec("muon", rest=OptimSpec("adamw", lr=0.1)), {"lr": 0.5}, [0.5, 0.1]),
        (BOTH, {"lr_scheduler": "cosine", "max_steps": 3}, [0.002, 0.0003]),  # a tenth, of each
    ):
        trainer = Trainer(small_mlp(), vectors())
        trainer.fit(strategy=Strategy(inner_optim=spec, **options), num_nodes=2, max_steps=3, progress=False)
        assert trainer.strategy is not None
        assert [group["lr"] for group in trainer.strategy.optim.param_groups] == pytest.approx(rates)


def test_one_part_may_have_nothing_to_do() -> None:
    built = BOTH.build_for(Replicas.of(Matrices(), 2, CPU), deterministic=True)
    assert [type(part) for part in parts_of(built)] == [NodeOptimizers]
    timeline = vsim.price(
        DiLoCoStrategy(H=2, inner_optim=BOTH), parameters=1e9, num_nodes=4, max_steps=4, network="1 Gbit/s", compute=1
    )
    assert timeline.seconds[-1] > 4


def test_in_words() -> None:
    spec = OptimSpec("muon", lr=0.1, only="blocks.*", rest="sgd")
    assert repr(spec) == "OptimSpec(Muon, lr=0.1, only=['blocks.*'], rest=OptimSpec(SGD))"
    assert not OptimSpec("sgd", rest="sgd").elementwise
    plain = BOTH.build(small_gpt())
    assert [type(o) for o in torch_optimizers(plain)] == [torch.optim.Muon, torch.optim.AdamW]
    assert isinstance(plain, JointOptimizers) and len(plain.param_groups[0]["params"]) == 8


def fitted(spec: Any, make: Callable[[], nn.Module] = small_mlp) -> Trainer:
    return fit(Strategy(inner_optim=spec), trainer_of(make, vectors), max_steps=3)


WRONG: list[tuple[Callable[[], Any], Any, tuple[Any, ...]]] = [
    (lambda: fitted("muon"), ValueError, ("Muon", "matrices", "layers.0.bias, layers.3.bias", "rest='adamw'")),
    (
        lambda: fitted(OptimSpec("muon", rest="adamw"), lambda: MLP(12, (), 5)),
        ValueError,
        ("Muon", "layers.0.weight", "only="),
    ),
    (lambda: fitted(OptimSpec("muon", only="*", rest="adamw")), ValueError, ("matrices", "layers.0.bias")),
    (lambda: fitted(OptimSpec("muon", only="l.*", rest="sgd")), ValueError, ("only='l.*'", "layers.0.weight")),
    (lambda: OptimSpec("muon", only="layers.*"), TypeError, ("only='layers.*'", "rest=")),
    (lambda: OptimSpec("muon", only=[], rest="sgd"), TypeError, ("only", [])),
    (lambda: OptimSpec("muon", only=[3], rest="sgd"), TypeError, ("only", [3])),  # type: ignore[list-item]
    (lambda: OptimSpec("muon", only=3, rest="sgd"), TypeError, ("only", 3)),  # type: ignore[arg-type]
    (lambda: OptimSpec("muon", rest="adamv"), ValueError, ("one of", "adamv")),
    (lambda: OptimSpec("muon", rest=BOTH), ValueError, ("rest",)),
    (lambda: OptimSpec("muon", rst="sgd"), TypeError, ("'rst'", "'rest'")),
    (lambda: BOTH.build(small_mlp().parameters()), TypeError, ("model", "tensors")),
    (lambda: fit(DiLoCoStrategy(outer_optim=OptimSpec("sgd", lr=0.1, rest="sgd"))), ValueError, ("outer", "rest=")),
]


@pytest.mark.parametrize(("make", "kind", "parts"), WRONG)
def test_what_is_not_possible(make: Callable[[], Any], kind: type[Exception], parts: tuple[Any, ...]) -> None:
    with refused(kind, *parts):
        make()


# Forked ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_fork_keeps_the_state_of_both_where_it_fits(rest: str, tmp_path: Path) -> None:
    def run(spec: OptimSpec, **options: Any) -> Trainer:
        return fit(AloneStrategy(inner_optim=spec), trainer_of(lambda: small_gpt(0.0), tokens), **options)

    run(OptimSpec("muon", lr=0.02, rest="adamw"), max_steps=4, save_dir=tmp_path)
    kept, anew = (
        run(OptimSpec("muon", lr=0.02, rest=rest), max_steps=6, resume=load_checkpoint(tmp_path).fork(optimizer))
        for optimizer in (True, False)
    )
    assert torch.equal(weights(kept), weights(anew)) == (rest == "sgd")
