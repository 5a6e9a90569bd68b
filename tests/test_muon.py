"""Muon on all nodes at once, and two optimizers that share the parameters of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from resumed import OPTIONS, PROCESSES, SCHEDULE, assert_it_moves, assert_same_run, fit, trainer_of
from separate import AverageWeights, OuterStep, small_cnn, small_gpt, small_mlp, tokens, train_separately, vectors
from test_optim import CPU, Matrices, gradients, separately, stacked
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import vsim
from vsim import Trainer, load_checkpoint
from vsim.checkpoint.folder import checkpoints_in
from vsim.cluster.muon import StackedMuon, hidden_matrices
from vsim.cluster.optim import OptimSpec
from vsim.cluster.optimizers import JointOptimizers, NodeOptimizers, parts_of, torch_optimizers
from vsim.cluster.replicas import Replicas
from vsim.engine.memory import optimizer_bytes
from vsim.models import GPT, MLP
from vsim.records.describe import describe
from vsim.strategy import AloneStrategy, DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy

ADAMW = OptimSpec("adamw", lr=3e-3, betas=(0.9, 0.95))
BOTH = OptimSpec("muon", lr=0.02, weight_decay=0.01, rest=ADAMW)
HIDDEN_OF_GPT = [
    f"blocks.{i}.{name}.weight" for i in range(2) for name in ("attention_in", "attention_out", "mlp_in", "mlp_out")
]


class Both:
    """Two torch optimizers on one model of the tests' oracle, by the places of the parameters."""

    def __init__(self, parameters: Iterable[Tensor], hidden: list[int]) -> None:
        own = list(parameters)
        matrices, others = [own[i] for i in hidden], [p for i, p in enumerate(own) if i not in hidden]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
            torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95)),
        ]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def weights(trainer: Trainer) -> Tensor:
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights


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


def test_what_muon_will_keep_is_known() -> None:
    replicas = Replicas.of(Matrices(), 3, CPU)
    built = OptimSpec("muon").build_for(replicas, False)
    assert isinstance(built, StackedMuon) and optimizer_bytes(built) == replicas.weights.nbytes == 3 * 119 * 4
    assert optimizer_bytes(OptimSpec("muon").build_for(replicas, True)) == 3 * 119 * 4


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
    optimizer: Any = lambda parameters: Both(parameters, hidden)  # noqa: E731
    separate = train_separately(small_gpt(), tokens(), communication(2), optimizer, **options)
    assert torch.equal(weights(trainer), separate.weights)
    fast = Trainer(small_gpt(), tokens())
    fast.fit(strategy=strategy(inner_optim=BOTH, H=2), executor="vmap", progress=False, **options)
    moved = (separate.weights - Replicas.of(small_gpt(), 1, CPU).weights).norm()
    assert (weights(fast) - separate.weights).norm() < 0.05 * moved


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("only", [None, "layers.0.*", ["*.bias", "layers.0.weight"], ["*"]], ids=repr)
def test_two_that_are_alike_are_one(only: Any, deterministic: bool) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    alike = OptimSpec("sgd", only=only, rest=OptimSpec("sgd", **options), **options)
    ours = stacked(Replicas.of(small_mlp(), 3, CPU), alike, 4, deterministic)
    expected = stacked(Replicas.of(small_mlp(), 3, CPU), OptimSpec("sgd", **options), 4, deterministic)
    if deterministic:
        assert torch.equal(ours, expected)
    torch.testing.assert_close(ours, expected)


def test_the_parts_step_parameters_of_their_own() -> None:
    replicas = Replicas.of(small_mlp(), 3, CPU)
    before = replicas.views(replicas.weights.clone())
    spec = OptimSpec("sgd", lr=0.5, only="layers.3.weight", rest=OptimSpec("sgd", lr=0.25))
    after = replicas.views(stacked(replicas, spec, 1, False))
    grads = replicas.views(gradients(replicas, 0))
    for name in after:
        rate = 0.5 if name == "layers.3.weight" else 0.25
        torch.testing.assert_close(after[name], before[name] - rate * grads[name], msg=name)


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


def linear() -> MLP:
    return MLP(12, (), 5)


def test_learning_rates() -> None:
    def rates(spec: OptimSpec, **options: Any) -> list[float]:
        trainer = Trainer(small_mlp(), vectors())
        trainer.fit(strategy=Strategy(inner_optim=spec, **options), num_nodes=2, max_steps=3, progress=False)
        assert trainer.strategy is not None
        return [group["lr"] for group in trainer.strategy.optim.param_groups]

    assert rates(OptimSpec("muon", rest="adamw")) == [1e-3, 1e-3]  # torch's defaults
    assert rates(OptimSpec("muon", rest="adamw"), lr=0.5) == [0.5, 0.5]
    assert rates(OptimSpec("muon", lr=0.5, rest="adamw")) == [0.5, 0.5]
    assert rates(OptimSpec("muon", rest=OptimSpec("adamw", lr=0.1)), lr=0.5) == [0.5, 0.1]
    assert rates(BOTH, lr_scheduler="cosine", max_steps=3) == pytest.approx([0.002, 0.0003])  # a tenth, of each


def test_built_over_a_model() -> None:
    class Built(Strategy):
        def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
            self.optim = BOTH.build(model)

    ours, theirs = (
        fit(strategy, trainer_of(small_mlp, vectors), deterministic=True, max_steps=4)
        for strategy in (Built(), Strategy(inner_optim=BOTH))
    )
    assert torch.equal(weights(ours), weights(theirs))
    plain = BOTH.build(small_gpt())
    assert [type(o) for o in torch_optimizers(plain)] == [torch.optim.Muon, torch.optim.AdamW]
    assert isinstance(plain, JointOptimizers) and len(plain.param_groups[0]["params"]) == 8


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
    assert describe(spec) == {"class": "Muon", "lr": 0.1, "only": ["blocks.*"], "rest": {"class": "SGD"}}
    assert not OptimSpec("sgd", rest="sgd").elementwise


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: fit(Strategy(inner_optim="muon"), trainer_of(small_mlp, vectors)),
            ValueError,
            r"Muon steps matrices only, and layers\.0\.bias, layers\.3\.bias are none: .*rest='adamw'",
        ),
        (
            lambda: fit(Strategy(inner_optim=OptimSpec("muon", rest="adamw")), trainer_of(linear, vectors)),
            ValueError,
            r"Muon.*: the model has no hidden matrix, only layers\.0\.weight, layers\.0\.bias; name .* only=",
        ),
        (
            lambda: fit(Strategy(inner_optim=OptimSpec("muon", only="*", rest="adamw"))),
            ValueError,
            r"matrices only, and features\.0\.bias",
        ),
        (
            lambda: fit(Strategy(inner_optim=OptimSpec("muon", only="layer.*", rest="sgd"))),
            ValueError,
            r"only='layer\.\*' is no trainable parameter; the model has features\.0\.weight",
        ),
        (lambda: OptimSpec("muon", only="layers.*"), TypeError, "only='layers.*' has no effect without rest="),
        (lambda: OptimSpec("muon", only=[], rest="sgd"), TypeError, r"only must be a name or names .*, got \[\]"),
        (lambda: OptimSpec("muon", only=[3], rest="sgd"), TypeError, r"only must be a name or names .*, got \[3\]"),
        (lambda: OptimSpec("muon", only=3, rest="sgd"), TypeError, r"only must be a name or names .*, got 3"),
        (lambda: OptimSpec("muon", rest="adamv"), ValueError, "must be one of .*got 'adamv'"),
        (lambda: OptimSpec("muon", rest=BOTH), ValueError, "has a rest of its own"),
        (lambda: OptimSpec("muon", rst="sgd"), TypeError, "'rst'; did you mean 'rest'"),
        (lambda: BOTH.build(small_mlp().parameters()), TypeError, "built over a model: tensors alone do not say"),
        (
            lambda: StackedMuon([torch.zeros(2, 3, 3)]).step(lambda: 0.0),  # type: ignore[call-arg]
            TypeError,
            "takes 1 positional argument",
        ),
        (
            lambda: fit(DiLoCoStrategy(outer_optim=OptimSpec("sgd", lr=0.1, rest="sgd"))),
            ValueError,
            r"OptimSpec\(SGD, lr=0.1, rest=.* which an outer optimizer does not; leave out rest=",
        ),
    ],
)
def test_what_is_not_possible(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# Saved, resumed, moved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("strategy", [SimpleReduceStrategy, FedAvgStrategy], ids=lambda cls: cls.__name__)
def test_it_resumes(strategy: type[Strategy], deterministic: bool, tmp_path: Path) -> None:
    def run(**options: Any) -> Trainer:
        options = {"deterministic": deterministic, "max_steps": 8, **options}
        return fit(strategy(inner_optim=BOTH, **SCHEDULE), trainer_of(lambda: small_gpt(0.2), tokens), **options)

    straight = run(save_dir=tmp_path, checkpoint_interval=5)
    assert_same_run(run(resume=checkpoints_in(tmp_path)[0]), straight)


@pytest.mark.slow
def test_it_moves_between_backends(
    tmp_path: Path, ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsim.trainer.train_in_processes", ranks_of(OPTIONS["num_nodes"]).train)

    def run(**options: Any) -> Trainer:
        options = {"deterministic": True, "max_steps": 8, **options}
        strategy = DiLoCoStrategy(inner_optim=BOTH, H=3, **SCHEDULE)
        return fit(strategy, trainer_of(lambda: small_gpt(0.2), tokens), **options)

    assert_it_moves(run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [SimpleReduceStrategy, FedAvgStrategy], ids=lambda cls: cls.__name__)
def test_it_moves_between_backends_where_nodes_share_a_row(
    strategy: type[Strategy], tmp_path: Path, ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsim.trainer.train_in_processes", ranks_of(OPTIONS["num_nodes"]).train)
    apart = {**PROCESSES, "deterministic": False}

    def run(**options: Any) -> Trainer:
        trainer = trainer_of(lambda: small_gpt(0.2), tokens)
        return fit(strategy(inner_optim=BOTH, **SCHEDULE), trainer, **{"max_steps": 8, **options})

    straight = run()
    for saves, resumes in [(apart, {}), ({}, apart)]:
        run(save_dir=tmp_path / str(len(saves)), checkpoint_interval=5, **saves)
        moved = run(resume=checkpoints_in(tmp_path / str(len(saves)))[0], **resumes)
        losses = [trainer.history["train_loss"][1:] for trainer in (moved, straight)]
        np.testing.assert_allclose(*losses, rtol=1e-3)
        if moved.strategy is not None:
            shapes = {v.shape[0] for o in torch_optimizers(moved.strategy.optim) for v in states(o)}
            assert shapes == {len(moved.strategy.cluster.replicas.weights)}


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for own in optimizer.state.values() for v in own.values() if isinstance(v, Tensor) and v.dim()]


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [2, 3, 5])
def test_it_is_verified(num_nodes: int) -> None:
    strategy = DiLoCoStrategy(inner_optim=BOTH, H=2)
    report = vsim.verify(small_gpt(), tokens(), strategy, num_nodes, 4, batch_size=4, progress=False)
    assert report.identical and "optimizer state" in report.compared, report


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_a_fork_keeps_the_state_of_both_where_it_fits(rest: str, tmp_path: Path) -> None:
    def run(spec: OptimSpec, **options: Any) -> Trainer:
        return fit(AloneStrategy(inner_optim=spec), trainer_of(lambda: small_gpt(0.0), tokens), **options)

    run(OptimSpec("muon", lr=0.02, rest="adamw"), max_steps=4, save_dir=tmp_path)
    kept, anew = (
        run(OptimSpec("muon", lr=0.02, rest=rest), max_steps=6, resume=load_checkpoint(tmp_path).fork(optimizer))
        for optimizer in (True, False)
    )
    assert torch.equal(weights(kept), weights(anew)) == (rest == "sgd")


def test_members_are_bitwise_their_own_fit() -> None:
    specs = {"a": BOTH, "b": copy.deepcopy(BOTH), "c": OptimSpec("adamw", lr=3e-3)}
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "batch_size": 4, "deterministic": True}
    together = vsim.compare(
        MLP(12, (16,), 5, seed=1),
        vectors(),
        strategies={name: FedAvgStrategy(H=2, inner_optim=spec) for name, spec in specs.items()},
        progress=False,
        **options,
    )
    for name, spec in specs.items():
        own = Trainer(MLP(12, (16,), 5, seed=1), vectors())
        own.fit(strategy=FedAvgStrategy(H=2, inner_optim=spec), progress=False, **options)
        ours, theirs = together.runs(name)[0].history, own.history
        assert (ours.node_losses == theirs.node_losses).all()
