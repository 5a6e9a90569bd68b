"""Rows are separate modules in plain PyTorch: whatever a model does in forward, and however the rows are computed."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused, warned
from reference_cluster import (
    TASKS,
    AverageGradients,
    AverageWeights,
    Communication,
    OuterStep,
    stacked_weights,
    train_separately,
    vectors,
    warmup_then_cosine,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import vsim
from vsim import Trainer
from vsim.engine import CompileError, VmapError
from vsim.strategy import (
    DeMoStrategy,
    DiLoCoStrategy,
    DionStrategy,
    FedAvgStrategy,
    GPAStrategy,
    OptimSpec,
    PowerSGD,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
    compress,
)

# Strategies, optimizers, numbers of nodes -----------------------------------------------------------------------------

STEPS = 8  # two epochs and more for every K below: 29 examples, batch 6
STRATEGIES: dict[str, tuple[Callable[..., Strategy], Callable[[], Communication]]] = {
    "alone": (Strategy, Communication),
    "allreduce": (SimpleReduceStrategy, AverageGradients),
    "fedavg": (functools.partial(FedAvgStrategy, H=3), functools.partial(AverageWeights, 3)),
    "diloco": (functools.partial(DiLoCoStrategy, H=3), functools.partial(OuterStep, 3)),
}
# An eps well above rounding: AdamW divides a gradient by its own size, so that one which is only rounding (a
# convolution's bias before BatchNorm) becomes a whole step either way.
OPTIMIZERS = {
    "sgd": OptimSpec("sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": OptimSpec("adamw", lr=1e-2, eps=1e-3),
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
# Every strategy with every model, every optimizer with every K, in the fast part; then every two values together.
QUICK = [
    *(("allreduce", 0, "adamw", 3, "full"), ("allreduce", 1, "sgd", 5, "plain"), ("allreduce", 2, "adamw", 2, "full")),
    *(("fedavg", 0, "sgd", 2, "full"), ("fedavg", 1, "adamw", 3, "full"), ("fedavg", 2, "sgd", 1, "plain")),
    *(("diloco", 0, "adamw", 5, "plain"), ("diloco", 1, "sgd", 2, "full"), ("diloco", 2, "sgd", 3, "full")),
    *(("diloco", 2, "adamw", 1, "full"), ("alone", 1, "adamw", 2, "full")),
]
ALL = itertools.product(*map(enumerate, (STRATEGIES, range(3), OPTIMIZERS, [1, 2, 3, 5], EXTRAS)))
SLOW = [tuple(value for _, value in case) for case in ALL if sum(place for place, _ in case) % 4 == 0]


@pytest.mark.parametrize(
    ("strategy", "task", "optimizer", "num_nodes", "extra"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in QUICK)],
)
def test_the_bits_are_those_of_separate_modules(
    strategy: str, task: int, optimizer: str, num_nodes: int, extra: str
) -> None:
    """With `deterministic=True`; with vmap, which rounds by about 1e-7 a step, weights are close."""
    (ours, by_hand), spec, own = STRATEGIES[strategy], OPTIMIZERS[optimizer], TASKS[task]
    strategy_options, fit_options, separate_options = EXTRAS[extra]
    options: dict[str, Any] = {"num_nodes": num_nodes, "max_steps": STEPS, "batch_size": 6}
    separate = train_separately(
        own.model(), own.data(), by_hand(), lambda p: spec.cls(p, **spec.kwargs), **options, **separate_options
    )
    for how in ({"deterministic": True}, {"executor": "vmap"}):
        trainer = Trainer(own.model(), own.data())
        algorithm = ours(inner_optim=spec, **strategy_options)
        trainer.fit(strategy=algorithm, progress=False, **options, **fit_options, **how)
        assert trainer.strategy is not None
        cluster, exact = trainer.strategy.cluster, how != {"executor": "vmap"}
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
        assert trainer.history.executor == ("loop" if exact else "vmap")
        np.testing.assert_allclose(trainer.history.node_losses, separate.losses, **tolerance)
        torch.testing.assert_close(cluster.weights, separate.weights, **tolerance)
        assert (cluster.weights != stacked_weights([own.model()])).any(1).all()  # they have moved
        for name, buffer in cluster.replicas.buffers.items():
            torch.testing.assert_close(buffer, separate.buffers(name), **tolerance, msg=name)
        assert ("cnn" in own.name) == bool(cluster.replicas.buffers)


def test_what_has_no_effect_with_deterministic_is_refused() -> None:
    for options in ({"executor": "vmap"}, {"chunk_size": 2}):
        with refused(ValueError, f"{next(iter(options))}=", "deterministic=True"):
            trained(Classifier(plain), deterministic=True, **options)


# Models ---------------------------------------------------------------------------------------------------------------

H = 3
SGD = OptimSpec("sgd", lr=0.2, momentum=0.9)
OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": 6, "batch_size": 4, "minibatch_size": 2, "progress": False}


class Classifier(nn.Module):
    """Two layers, with what a kind of model does between. With 16 units parameters begin at multiples of 64 bytes."""

    def __init__(self, outputs: Callable[[Any, Tensor], Tensor], prepare: Any = None, width: int = 12) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, width), nn.Linear(width, 5)
        self.outputs = outputs
        if prepare is not None:
            prepare(self)
        stream = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.4 * torch.randn(p.shape, generator=stream))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.outputs(self, batch[0]), batch[1])


def plain(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.second(m.first(x))
    return out


def checkpointed(m: Any, x: Tensor, reentrant: bool = False) -> Tensor:
    """Compute the first layer and its dropout again for the backward pass."""
    x = x.clone().requires_grad_() if reentrant else x  # or there would be nothing to go back to
    return m.second(checkpoint(lambda x: F.dropout(m.first(x).tanh(), 0.3), x, use_reentrant=reentrant))


def clipped(m: Any, x: Tensor) -> Tensor:
    """Change a weight in place, behind autograd's back."""
    m.second.weight.data.clamp_(-0.3, 0.3)
    return plain(m, x)


def clipped_without_grad(m: Any, x: Tensor) -> Tensor:
    """The same with autograd's knowledge, when the first layer's output and weight are kept for the backward pass."""
    hidden = m.first(x).tanh() @ m.first.weight
    with torch.no_grad():
        m.second.weight.clamp_(-0.3, 0.3)
    return plain(m, hidden)


def decaying(m: Any, x: Tensor) -> Tensor:
    """Shrink a weight at every call, so that a call too many is seen."""
    if m.training:
        with torch.no_grad():
            m.first.weight.mul_(0.9)
    return plain(m, x)


def assigned(m: Any, x: Tensor) -> Tensor:
    """Assign a weight again at every call, as nn.LSTM does on CUDA to lay its weights out."""
    m.first.weight.data = m.first.weight.data.clone()
    return plain(m, x)


def reversed_gradient(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: -grad)
    return m.second(hidden)


def hooked(m: Any) -> None:
    """Make the gradient larger by a hook on a module."""
    m.second.register_full_backward_hook(lambda module, inputs, outputs: (3 * inputs[0],))


def differentiating(m: Any, x: Tensor) -> Tensor:
    """Compute what a gradient penalty is made of."""
    x = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        logits = m.second(m.first(x).tanh())
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    return logits + slope.square().sum(1, keepdim=True)


def words(m: Any, **options: Any) -> None:
    m.words = nn.Embedding(9, 12, **options)


def by_words(m: Any, x: Tensor) -> Tensor:
    """Look up the rows of a table."""
    return plain(m, m.words((4 * x.abs()).long() % 9).mean(1))


def padded(m: Any, x: Tensor) -> Tensor:
    """Look up words of bounded length, the first of which is padding and has no gradient, in two spellings."""
    indices = (4 * x.abs()).long() % 9
    return plain(m, (m.words(indices) + torch.embedding(m.words.weight, indices, 0)).mean(1))


def layers(m: Any) -> None:
    m.single, m.grouped = nn.Conv1d(1, 32, 3), nn.Conv1d(32, 32, 1)
    m.norm, m.last = nn.GroupNorm(2, 32), nn.Conv1d(32, 1, 1)


def in_place(m: Any, x: Tensor) -> Tensor:
    """Activate in place, right after a convolution of each kind, a norm, a product and a pooling."""
    y = F.relu(m.single(F.pad(x, (1, 1))[:, None]), inplace=True)
    y = F.leaky_relu(m.norm(F.leaky_relu(m.grouped(y), inplace=True)), inplace=True)
    y = F.hardtanh(F.avg_pool1d(y, 3, 1, 1), inplace=True)
    return m.second(F.relu(m.first(F.relu(m.last(y)[:, 0], inplace=True)), inplace=True))


def small_operations(m: Any, x: Tensor) -> Tensor:
    """Multiply with named operands, and take the norm of what lies apart."""
    hidden = torch.mm(m.norm(x.view(-1, 3, 4)).flatten(1), mat2=m.first.weight.T)
    return torch.bmm(hidden[None], mat2=m.second.weight.T[None])[0]


def masking(m: Any, x: Tensor) -> Tensor:
    """Make a buffer when it is first needed, which stays as it is."""
    if not hasattr(m, "mask"):
        m.register_buffer("mask", torch.linspace(0, 1, 12), persistent=False)
    return m.second(m.first(x) * m.mask)


def widening(m: Any, x: Tensor) -> Tensor:
    """Assign a buffer, which at first is None, or of another dtype or shape."""
    hidden = m.first(x)
    m.seen = hidden.detach().mean(0) if m.seen is None else 0.9 * m.seen + hidden.detach().mean(0)
    return m.second(hidden)


def normalizing(m: Any, x: Tensor) -> Tensor:
    """Change the input in place."""
    x.sub_(0.5).mul_(2)
    return m.second(m.first(x).tanh())


def hidden_layer(m: Any, trains: bool = False) -> None:
    """Keep a layer in a dict in a list, where torch does not find its parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        m.parts = [{"scale": nn.Linear(12, 12).requires_grad_(trains)}]


def selecting(m: Any, x: Tensor) -> Tensor:
    """Draw, then do in the last batch of an epoch, which is smaller, what vmap cannot do."""
    hidden = F.dropout(m.first(x), 0.2)
    return m.second(2 * hidden[hidden.isfinite()][None] if len(x) == 1 else hidden)


def branching(m: Any, x: Tensor) -> Tensor:
    """Take another way where examples are mostly negative."""
    return plain(m, x) if x.mean() > 0 else 2 * plain(m, x)


def tied(m: Any) -> None:
    """Have a layer in two places, tied weights, a parameter beside a buffer, and modules within modules."""
    m.square = nn.Linear(12, 12)
    m.again, m.tied, m.scale = m.square, nn.Linear(12, 12), nn.Parameter(torch.ones(12))
    m.tied.weight = m.square.weight
    m.register_buffer("seen", torch.zeros(12))
    m.nested = nn.Sequential(nn.Linear(12, 12), nn.Sequential(nn.LayerNorm(12)))


def in_two_places(m: Any, x: Tensor) -> Tensor:
    m.seen = m.seen + x.detach().mean(0)  # assigned, not written in place
    return plain(m, m.nested(m.tied(m.again(m.square(x)))) * m.scale + m.seen)


def packed(m: Any, x: Tensor) -> Tensor:
    """Run a recurrent layer over sequences that are packed, whose lengths are read."""
    sequences = nn.utils.rnn.pack_padded_sequence(x.view(-1, 3, 4), torch.full((len(x),), 3), batch_first=True)
    outputs, _ = nn.utils.rnn.pad_packed_sequence(m.rnn(sequences)[0], batch_first=True)
    return plain(m, outputs.flatten(1))


def scaled_by(number: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: plain(m, x) / (number(m) if m.training else 1)


def counted(m: Any) -> int:
    m.calls += 1
    return int(m.calls)


def drawn(m: Any) -> Any:
    is_torchs = isinstance(m.stream, torch.Generator)
    return 1 + torch.rand((), generator=m.stream) if is_torchs else m.stream.uniform(1, 2)


def average(m: Any, x: Tensor) -> Tensor:
    """Subtract the running mean of outputs, which is an attribute."""
    out = plain(m, x)
    if m.training:
        m.mean = 0.9 * m.mean + 0.1 * out.detach().mean(0)
    return out - m.mean


def shown(m: Any, x: Tensor) -> Tensor:
    m.shown = plain(m, x)
    return m.shown  # type: ignore[no-any-return]


def having(**attributes: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda m: [setattr(m, name, make()) for name, make in attributes.items()] and None


@dataclass(frozen=True)
class Kind:
    """A model; what is named where vmap cannot do it; how its nodes are trained."""

    make: Callable[..., nn.Module]
    named: str | None = None
    batch_size: int = 4
    minibatch_size: int | None = 2
    optimizer: OptimSpec = SGD


def of(outputs: Any, prepare: Any = None) -> Callable[..., nn.Module]:
    return functools.partial(Classifier, outputs, prepare)


CANNOT = "cannot be vectorised"
PLAIN_SGD = OptimSpec("sgd", lr=0.2)
KINDS: dict[str, Kind] = {
    "plain": Kind(of(plain)),
    "checkpointed": Kind(of(checkpointed), "activation checkpointing"),
    # By the older form, which wants `backward` and not torch.autograd.grad.
    "checkpointed reentrantly": Kind(of(functools.partial(checkpointed, reentrant=True)), CANNOT),
    "clipped": Kind(of(clipped), CANNOT),
    "clipped without grad": Kind(of(clipped_without_grad)),
    "decaying": Kind(of(decaying)),
    "assigned": Kind(of(assigned), CANNOT),
    "a hook on a tensor": Kind(of(reversed_gradient), CANNOT),
    "a hook on a module": Kind(of(plain, hooked), CANNOT),
    "differentiating": Kind(of(differentiating), CANNOT),
    "padded": Kind(of(padded, functools.partial(words, padding_idx=0, max_norm=0.7))),
    "in place": Kind(of(in_place, layers)),
    "small operations": Kind(of(small_operations, having(norm=lambda: nn.GroupNorm(1, 3)))),
    "masking": Kind(of(masking)),
    "a buffer from None": Kind(of(widening, lambda m: m.register_buffer("seen", None)), CANNOT),
    "normalizing": Kind(of(normalizing)),
    "a hidden layer": Kind(of(lambda m, x: plain(m, m.parts[0]["scale"](x)), hidden_layer)),
    "a layer in two places": Kind(of(in_two_places, tied)),
    "parametrized": Kind(of(plain, lambda m: nn.utils.parametrizations.weight_norm(m.first) and None)),
    "branching": Kind(of(branching)),
    "late": Kind(of(selecting), batch_size=3, minibatch_size=None),  # 10 examples: 3, 3, 3 and 1
    "sparse gradients": Kind(of(by_words, functools.partial(words, sparse=True)), None, 4, None, PLAIN_SGD),
    "by frequency": Kind(of(by_words, functools.partial(words, scale_grad_by_freq=True)), None, 4, None, PLAIN_SGD),
    "packed sequences": Kind(of(packed, having(rnn=lambda: nn.LSTM(4, 4, batch_first=True))), CANNOT),
    "a count": Kind(of(scaled_by(counted), having(calls=int)), "calls"),
    "NumPy's generator": Kind(of(scaled_by(drawn), having(stream=lambda: np.random.default_rng(3))), "stream"),
    "torch's generator": Kind(of(scaled_by(drawn), having(stream=lambda: torch.Generator().manual_seed(3))), "stream"),
    "a mean": Kind(of(average, having(mean=lambda: torch.zeros(5))), "mean"),
    "outputs are kept": Kind(of(shown)),
}
WAYS: dict[str, dict[str, Any]] = {
    "loop": {"executor": "loop"},
    "auto": {"executor": "auto"},
    "exact": {"deterministic": True},
    "chunks": {"chunk_size": 2},
    "vmap": {"executor": "vmap"},
    "AllReduce": {"strategy": SimpleReduceStrategy(inner_optim=SGD)},
}


def trained(model: nn.Module, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors())
    trainer.fit(**{"strategy": FedAvgStrategy(H=H, inner_optim=SGD), **OPTIONS, **options})
    return trainer


def separate(kind: Kind, by_hand: Communication, **options: Any) -> Any:
    given = {name: value for name, value in {**OPTIONS, **options}.items() if name != "progress"}
    spec = kind.optimizer
    return train_separately(kind.make(), vectors(), by_hand, lambda p: spec.cls(p, **spec.kwargs), **given)


@functools.cache
def expected(name: str, allreduce: bool) -> Any:
    kind = KINDS[name]
    sizes = {"batch_size": kind.batch_size, "minibatch_size": kind.minibatch_size}
    return separate(kind, AverageGradients() if allreduce else AverageWeights(H), **sizes)


# Every kind by the executor that is chosen and to the bit; some kinds in every way.
QUICK_KINDS = {"in place", "branching", "late", "packed sequences", "a count"}
CASES = [
    pytest.param(name, way, marks=[] if way in ("auto", "exact") or name in QUICK_KINDS else pytest.mark.slow)
    for name, way in itertools.product(KINDS, WAYS)
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_rows_are_separate_modules(name: str, way: str) -> None:
    kind, options = KINDS[name], {"batch_size": KINDS[name].batch_size, "minibatch_size": KINDS[name].minibatch_size}
    algorithm = type(WAYS[way].get("strategy", FedAvgStrategy()))
    strategy = algorithm(inner_optim=kind.optimizer, **({} if algorithm is SimpleReduceStrategy else {"H": H}))
    fit = functools.partial(trained, kind.make(), **{**options, **WAYS[way], "strategy": strategy})
    cannot = kind.named is not None
    by_loop = cannot or way in ("loop", "exact")
    if cannot and way == "vmap":
        with refused(VmapError, kind.named, "executor='loop'"):
            fit()
        return
    if cannot and way in ("auto", "chunks", "AllReduce"):
        with warned("executor='auto' continues with 'loop'", kind.named):
            trainer = fit()
    else:
        trainer = fit()
    assert trainer.strategy is not None and trainer.history.executor.startswith("loop" if by_loop else "vmap")
    may_differ = name in ("late", "branching") and not by_loop
    assert ("went to the loop" in trainer.history.executor_reason) == may_differ
    oracle = expected(name, way == "AllReduce")
    exact = {"rtol": 0.0, "atol": 0.0} if way == "exact" and name != "sparse gradients" else {}
    torch.testing.assert_close(torch.as_tensor(trainer.history.node_losses).float(), torch.tensor(oracle.losses))
    torch.testing.assert_close(trainer.strategy.cluster.weights, oracle.weights, **exact)


# What changes gradients within the backward pass, in ways that depend on their size.
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "clip": lambda grad: grad.clamp(-0.05, 0.05),
    "round": lambda grad: (grad * 64).round() / 64,
    "normalize": lambda grad: grad / grad.norm(),
}


class Through(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, change: str) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.change = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return CHANGES[ctx.change](grad), None


def through_functions(m: Any, x: Tensor) -> Tensor:
    hidden = Through.apply(m.first(Through.apply(m.zero(x), "normalize")).tanh(), "round")
    return Through.apply(m.second(hidden), "clip")  # type: ignore[no-any-return]


def through_hooks(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(m.zero(x)).tanh()  # m.first has a hook
    logits: Tensor = m.second(hidden)
    for tensor, change in ((hidden, "round"), (logits, "clip")):
        if tensor.requires_grad:
            tensor.register_hook(CHANGES[change])
    return logits


def with_a_zeroth(m: Any, hooked: bool = False) -> None:
    m.zero = nn.Linear(12, 12)
    if hooked:
        m.first.register_full_backward_hook(lambda module, inputs, outputs: (CHANGES["normalize"](inputs[0]),))


@dataclass
class PrimalAveraging(AverageGradients):
    """GPA with μ_x = .9 and μ_y = .7."""

    def start(self, models: list[nn.Module]) -> None:
        self.averaged = self.stepped = stacked_weights(models)[0]

    def after_backward(self, models: list[nn.Module]) -> None:
        super().after_backward(models)
        for model in models:
            nn.utils.vector_to_parameters(self.stepped.clone(), model.parameters())

    def after_step(self, models: list[nn.Module], step: int) -> None:
        self.stepped = stacked_weights(models)[0]
        self.averaged = 0.9 * self.averaged + 0.1 * self.stepped
        for model in models:
            nn.utils.vector_to_parameters(0.7 * self.averaged + 0.3 * self.stepped, model.parameters())


BACKWARD: dict[str, tuple[Callable[[], Strategy], Callable[[], Communication] | None]] = {
    "AllReduce": (functools.partial(SimpleReduceStrategy, inner_optim=SGD), AverageGradients),
    "GPA": (functools.partial(GPAStrategy, inner_optim=SGD, mu_x=0.9, mu_y=0.7), PrimalAveraging),
    "FedAvg": (functools.partial(FedAvgStrategy, inner_optim=SGD, H=H), functools.partial(AverageWeights, H)),
    "DeMo": (functools.partial(DeMoStrategy, lr=0.01, compression_topk=5, compression_chunk=6), None),
    "Dion": (functools.partial(DionStrategy, lr=0.02), None),
    "SPARTA": (functools.partial(SPARTAStrategy, inner_optim=SGD, p_sparta=0.3), None),
    "PowerSGD": (functools.partial(SimpleReduceStrategy, inner_optim=SGD, average=compress(PowerSGD(2))), None),
}


@pytest.mark.parametrize(
    "way",
    [
        {"executor": "vmap"},
        {"executor": "vmap", "chunk_size": 2, "minibatch_size": 3},
        {"executor": "loop", "minibatch_size": 3},
    ],
    ids=lambda way: "-".join(map(str, way.values())),
)
@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
def test_every_node_has_a_backward_pass_of_its_own(name: str, way: dict[str, Any]) -> None:
    """It begins at 1, or at a minibatch's share of the batch, whatever the strategy does with the gradients."""
    (make, by_hand), pieces = BACKWARD[name], way.get("minibatch_size")
    inputs, targets = vectors().tensors
    data = TensorDataset(inputs.double(), targets)
    models: list[nn.Module] = [Classifier(through_functions, with_a_zeroth).double()]
    if way["executor"] == "loop":  # vmap would not call hooks
        models.append(Classifier(through_hooks, functools.partial(with_a_zeroth, hooked=True)).double())
    for model in models:
        options: dict[str, Any] = {"num_nodes": 3, "max_steps": 6, "batch_size": 6}  # 10 examples: 6 and 4
        found = {}
        for label, how in {"ours": way, "exact": {"deterministic": True, "minibatch_size": pieces}}.items():
            trainer = Trainer(model, data)
            trainer.fit(strategy=make(), progress=False, **options, **how)
            assert trainer.strategy is not None
            found[label] = trainer.strategy.cluster.weights
        torch.testing.assert_close(found["ours"], found["exact"], rtol=1e-8, atol=1e-10)
        if by_hand is not None:
            sgd = functools.partial(SGD.cls, **SGD.kwargs)
            oracle = train_separately(model, data, by_hand(), sgd, minibatch_size=pieces, **options)
            torch.testing.assert_close(found["ours"], oracle.weights, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.(jit|autograd).*:DeprecationWarning")  # torch itself, while compiling
def test_a_compiled_backward_pass_is_that_of_the_node_or_an_error() -> None:
    """Under vmap, torch 2.13 compiles the gradient of a function's forward in place of its backward."""
    fit = functools.partial(trained, Classifier(through_functions, with_a_zeroth), strategy=BACKWARD["AllReduce"][0]())
    with contextlib.suppress(CompileError):  # from the proof
        ours, theirs = fit(executor="vmap", compile=True).strategy, fit(deterministic=True).strategy
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.cluster.weights, theirs.cluster.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_validation_is_always_on_the_same_examples(executor: str) -> None:
    validation, model = vectors(10, seed=3), Classifier(normalizing)
    before = validation.tensors[0].clone()
    trainer = Trainer(model, vectors(), validation)
    trainer.fit(strategy=FedAvgStrategy(inner_optim="sgd", lr=0.0), **OPTIONS, executor=executor, val_interval=2)
    assert torch.equal(validation.tensors[0], before)
    measured = np.concatenate([trainer.history[name] for name in ("local_loss", "global_loss", "node_loss_max")])
    with torch.no_grad():
        loss = model([before.clone(), validation.tensors[1]]).item()
    np.testing.assert_allclose(measured[~np.isnan(measured)], loss, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpointed", "checkpointed reentrantly", "a count", "a mean"])
def test_processes_have_the_same_bits(name: str) -> None:
    options = {key: value for key, value in OPTIONS.items() if key not in ("num_nodes", "max_steps")}
    report = vsim.verify(KINDS[name].make(), vectors(), FedAvgStrategy(H=2, inner_optim=SGD), 2, 5, **options)
    assert report.identical, report


# What is compiled -----------------------------------------------------------------------------------------------------

compiling = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself


@pytest.mark.slow
@compiling
def test_what_is_compiled_wrongly_is_not() -> None:
    """A hook is not in the graph, and functorch knows padding of the first node only, where no module says of it."""

    def by_function(m: Any, x: Tensor) -> Tensor:
        return plain(m, F.embedding((4 * x.abs()).long() % 9, m.words.weight, padding_idx=0).mean(1))

    compiled = trained(Classifier(by_words, functools.partial(words, padding_idx=0)), executor="vmap", compile=True)
    assert compiled.history.executor == "compiled"
    for model, executor, gradient in (
        (Classifier(by_function, words), "vmap", "words.weight"),
        (Classifier(reversed_gradient), "loop", "first.weight"),
    ):
        with warned(f"executor='auto' continues with '{executor}'"):
            ours = trained(model, compile=True)
        assert ours.history.executor == executor
        rows = [one.strategy.cluster.weights for one in (ours, trained(model, executor="loop"))]  # type: ignore[union-attr]
        torch.testing.assert_close(*rows)
        with refused(CompileError, f"gradient of {gradient} differs"):
            trained(model, executor="vmap", compile=True)


@compiling
def test_the_module_that_was_compiled_is_trained() -> None:
    alone, compiled = (
        trained(KINDS["small operations"].make()),
        trained(torch.compile(KINDS["small operations"].make())),
    )
    assert torch.equal(compiled.strategy.cluster.weights, alone.strategy.cluster.weights)  # type: ignore[union-attr]
    assert not any("_orig_mod" in name for name in compiled.model.state_dict())


# What no node could have of its own -----------------------------------------------------------------------------------


def teaching(m: Any, x: Tensor) -> Tensor:
    """Follow the weights by frozen ones, as a mean teacher does."""
    with torch.no_grad():
        m.teacher.weight.lerp_(m.first.weight, 0.1)
    return m.second(m.first(x) - m.teacher(x))


def teacher(m: Any) -> None:
    m.teacher = nn.Linear(12, 12).requires_grad_(False)


def listed(m: Any) -> None:
    """Keep a weight in a list as well; in `hidden` a function, which no copy of the model makes its own."""
    m.weights, m.hidden = [m.first.weight], [lambda: m.second.weight]


def buffer(start: Tensor) -> Callable[[Any], None]:
    return lambda m: m.register_buffer("seen", start)


REFUSED: dict[str, tuple[Callable[..., nn.Module], tuple[str, ...]]] = {
    "hidden parameters": (
        of(lambda m, x: plain(m, m.parts[0]["scale"](x)), functools.partial(hidden_layer, trains=True)),
        ("parts[0]['scale'].", "nn.ModuleList", "requires_grad_(False)"),
    ),
    "listed": (of(lambda m, x: m.second(F.linear(x, m.weights[0])), listed), ("first.weight", "belongs to no node")),
    "by a function": (of(lambda m, x: plain(m, x) + m.hidden[0]().square().sum(), listed), ("second.weight",)),
    "teacher": (of(teaching, teacher), ("teacher.weight", "frozen", "buffer")),
    "dtype": (of(widening, buffer(torch.zeros(12).long())), ("seen", "torch.int64 [12]", "torch.float32 [12]")),
    "shape": (of(widening, buffer(torch.tensor(0.0))), ("seen", "torch.float32 []", "torch.float32 [12]")),
}


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
@pytest.mark.parametrize("executor", ["auto", "loop"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_node_could_have_of_its_own_is_refused(name: str, executor: str) -> None:
    make, parts = REFUSED[name]
    with refused(ValueError, *parts):
        trained(make(), executor=executor)


class Weighted(nn.Module):
    """A loss with a parameter, which is called as a module, by a method or by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.scale, y)


LOSSES: dict[str, Callable[[Weighted], Callable[[Tensor, Tensor], Tensor]]] = {
    "module": lambda loss: loss,
    "lambda": lambda loss: lambda outputs, y: loss(outputs, y),
    "method": lambda loss: loss.forward,
    "parameter": lambda loss: lambda outputs, y: F.cross_entropy(outputs * loss.scale, y),
}


def trained_with(loss_fn: Any, **options: Any) -> Tensor:
    torch.manual_seed(0)
    trainer = Trainer(nn.Linear(12, 5), vectors(), loss_fn=loss_fn)
    trainer.fit(strategy=FedAvgStrategy(H=H, inner_optim=SGD), **{**OPTIONS, **options})
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights


@pytest.mark.parametrize("options", [{"executor": "vmap"}, {"executor": "loop"}], ids=str)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_has_no_parameters_that_train(kind: str, options: dict[str, Any]) -> None:
    loss = Weighted()
    with refused(ValueError, "part of the model", "freeze", *["loss_fn.scale"] * (kind == "method")):
        trained_with(LOSSES[kind](loss), **options)
    loss.requires_grad_(False)
    rows = trained_with(lambda outputs, y: F.cross_entropy(outputs * 0.5, y), **options)
    torch.testing.assert_close(trained_with(LOSSES[kind](loss), **options), rows)


class Judged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.utils.weight_norm(nn.Linear(5, 5)).requires_grad_(False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.critic(outputs), targets)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_with_the_old_weight_norm_is_named() -> None:
    model = Classifier(plain)
    nn.utils.weight_norm(model.first)
    with refused(TypeError, "In first", "torch.nn.utils.parametrizations.weight_norm"):
        trained(model)
    with refused(TypeError, "loss_fn", "In critic", "torch.nn.utils.parametrizations.weight_norm"):
        trained_with(Judged())
