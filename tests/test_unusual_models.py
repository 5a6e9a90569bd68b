"""Models that do more than compute: they compute parts again, differentiate, count, or change their own weights."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from separate import AverageGradients, AverageWeights, train_separately, vectors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vsim
from vsim import Trainer
from vsim.engine import CompileError, VmapError
from vsim.strategy import FedAvgStrategy, OptimSpec, SimpleReduceStrategy

STEPS, H = 8, 3


class Classifier(nn.Module):
    """Two layers, the second as a subclass has it. With 16 units every parameter begins at a multiple of 64 bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, width), nn.Linear(width, 5)
        stream = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.4 * torch.randn(p.shape, generator=stream))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.outputs(batch[0]), batch[1])

    def outputs(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Checkpointed(Classifier):
    """The first layer and its dropout are computed again for the backward pass."""

    reentrant = False

    def outputs(self, x: Tensor) -> Tensor:
        if self.reentrant:
            x = x.clone().requires_grad_()  # or there would be nothing to go back to
        hidden = checkpoint(lambda x: F.dropout(self.first(x).tanh(), 0.3), x, use_reentrant=self.reentrant)
        return self.second(hidden)


class CheckpointedReentrantly(Checkpointed):
    """By the older form, which wants `backward` and not torch.autograd.grad."""

    reentrant = True


class MaxNorm(Classifier):
    """Limits the norm of columns, as EEGNet does, by assigning a new weight."""

    def outputs(self, x: Tensor) -> Tensor:
        self.second.weight.data = torch.renorm(self.second.weight.data, p=2, dim=0, maxnorm=0.5)
        return self.second(self.first(x))


class Clipped(Classifier):
    """A weight is changed in place, behind autograd's back."""

    def outputs(self, x: Tensor) -> Tensor:
        self.second.weight.data.clamp_(-0.3, 0.3)
        return self.second(self.first(x))


class ClippedWithoutGrad(Classifier):
    """The same with autograd's knowledge, when the first layer's output and weight are kept for the backward pass."""

    def outputs(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh() @ self.first.weight
        with torch.no_grad():
            self.second.weight.clamp_(-0.3, 0.3)
        return self.second(self.first(hidden))


class Decaying(Classifier):
    """A weight shrinks at every call, so that a call too many is seen."""

    def outputs(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.first.weight.mul_(0.9)
        return self.second(self.first(x))


class Counting(Classifier):
    """A factor is annealed by a counter in Python."""

    calls = 0

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0

    def outputs(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.second(self.first(x)) * (1 + 0.1 * self.calls)


class Hooked(Classifier):
    """The gradient is reversed by a hook."""

    def outputs(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: -grad)
        return self.second(hidden)


class HookedModule(Classifier):
    """The gradient is made larger by a hook on a module."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.second.register_full_backward_hook(lambda module, inputs, outputs: (3 * inputs[0],))

    def outputs(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class HookedBefore(HookedModule):
    """The same, and by a hook that comes before the module's own backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.second.register_full_backward_pre_hook(lambda module, outputs: (3 * outputs[0],))


class HookedOperation(Classifier):
    """The same by a hook on an operation."""

    def outputs(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.grad_fn is not None:
            hidden.grad_fn.register_prehook(lambda grads: (3 * grads[0],))
        return self.second(hidden)


class Differentiating(Classifier):
    """What a gradient penalty is made of."""

    def outputs(self, x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            logits = self.second(self.first(x).tanh())
            (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return logits + slope.square().sum(1, keepdim=True)


class Padded(Classifier):
    """Words of bounded length, the first of which is padding and has no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        stream = torch.Generator().manual_seed(4)
        self.words = nn.Embedding(9, 12, padding_idx=0, max_norm=1.5, _weight=torch.randn(9, 12, generator=stream))

    def outputs(self, x: Tensor) -> Tensor:
        indices = (4 * x.abs()).long() % 9
        direct = torch.embedding(self.words.weight, indices, 0)
        return self.second(self.first((self.words(indices) + direct).mean(1)))


class InPlace(Classifier):
    """An activation in place, right after a convolution of each kind, a norm, a product and a pooling."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.single, self.grouped = nn.Conv1d(1, 32, 3), nn.Conv1d(32, 32, 1)
        self.norm, self.last = nn.GroupNorm(2, 32), nn.Conv1d(32, 1, 1)
        stream = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=stream))

    def outputs(self, x: Tensor) -> Tensor:
        y = F.relu(self.single(F.pad(x, (1, 1))[:, None]), inplace=True)
        y = F.leaky_relu(self.norm(F.leaky_relu(self.grouped(y), inplace=True)), inplace=True)
        y = F.hardtanh(F.avg_pool1d(y, 3, 1, 1), inplace=True)
        return self.second(F.relu(self.first(F.relu(self.last(y)[:, 0], inplace=True)), inplace=True))


class SmallOperations(Classifier):
    """Operations by another spelling: products with named operands, a norm of what lies apart."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.GroupNorm(1, 3)

    def outputs(self, x: Tensor) -> Tensor:
        hidden = torch.mm(self.norm(x.view(-1, 3, 4)).flatten(1), mat2=self.first.weight.T)
        return torch.bmm(hidden[None], mat2=self.second.weight.T[None])[0]


class Masking(Classifier):
    """A buffer that is made when it is first needed, and stays as it is."""

    def outputs(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.linspace(0, 1, self.first.out_features), persistent=False)
        return self.second(self.first(x) * self.mask)


class Widening(Classifier):
    """A buffer gets another dtype, or another shape, when it is first assigned."""

    def __init__(self, start: Tensor | None, width: int = 16) -> None:
        super().__init__(width)
        self.register_buffer("seen", start)

    def outputs(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.seen = hidden.detach().mean(0) if self.seen is None else 0.9 * self.seen + hidden.detach().mean(0)
        return self.second(hidden)


class Starting(Widening):
    """A buffer gets its first tensor in the first call."""

    def __init__(self, width: int) -> None:
        super().__init__(None, width)


class Normalizing(Classifier):
    """The input is changed in place."""

    def outputs(self, x: Tensor) -> Tensor:
        x.sub_(0.5).mul_(2)
        return self.second(self.first(x).tanh())


class Hidden(Classifier):
    """A layer is in a dict in a list, where torch does not find its parameters."""

    trains = True

    def __init__(self, width: int) -> None:
        super().__init__(width)
        torch.manual_seed(0)
        self.parts = [{"scale": nn.Linear(12, 12).requires_grad_(self.trains)}]

    def outputs(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.parts[0]["scale"](x)))


class HiddenFrozen(Hidden):
    trains = False


HOOKED = [HookedModule, HookedBefore, HookedOperation]
IN_PYTHON = [Counting, Starting]
NOT_VECTORIZED = [
    *(Checkpointed, CheckpointedReentrantly, MaxNorm, Clipped, Hooked, Differentiating),
    *HOOKED,
    *IN_PYTHON,
]
UNUSUAL = [
    *NOT_VECTORIZED,
    ClippedWithoutGrad,
    Decaying,
    Padded,
    InPlace,
    Normalizing,
    SmallOperations,
    Masking,
    HiddenFrozen,
]
SGD = OptimSpec("sgd", lr=0.2, momentum=0.9)
OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": STEPS, "batch_size": 4, "minibatch_size": 2, "progress": False}


def trained(model: nn.Module, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors())
    trainer.fit(strategy=FedAvgStrategy(H=H, optim_spec=SGD), **OPTIONS, **options)
    return trainer


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize(
    ("width", "options"),
    [
        (12, {"executor": "loop", "deterministic": True}),
        (16, {"executor": "auto"}),
        (12, {"executor": "auto", "deterministic": True}),
        (16, {"executor": "auto", "chunk_size": 2}),
    ],
    ids=str,
)
def test_they_train_as_separate_models(kind: type[Classifier], width: int, options: dict[str, Any]) -> None:
    expected = train_separately(
        kind(width),
        vectors(),
        AverageWeights(H),
        lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
        num_nodes=3,
        max_steps=STEPS,
        batch_size=4,
        minibatch_size=2,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "executor='auto' continues with 'loop'", UserWarning)
        trainer = trained(kind(width), **options)
    assert trainer.strategy is not None
    tolerance: dict[str, float] = {"rtol": 0, "atol": 0} if "deterministic" in options else {}
    torch.testing.assert_close(torch.as_tensor(trainer.history.node_losses).float(), torch.tensor(expected.losses))
    torch.testing.assert_close(trainer.strategy.cluster.weights, expected.weights, **tolerance)


@pytest.mark.parametrize("kind", [Decaying, Padded, InPlace, ClippedWithoutGrad, Normalizing, SmallOperations])
def test_what_can_be_vectorized_is(kind: type[Classifier]) -> None:
    assert trained(kind(16), executor="vmap").history.executor == "vmap"


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_validation_is_always_on_the_same_examples(executor: str) -> None:
    validation = vectors(10, seed=3)
    before = validation.tensors[0].clone()
    trainer = Trainer(Normalizing(12), vectors(), validation)
    strategy = FedAvgStrategy(H=100, inner_optim="sgd", lr=0.0)
    trainer.fit(strategy=strategy, **OPTIONS, executor=executor, val_interval=2)
    assert torch.equal(validation.tensors[0], before)
    losses = [trainer.history[column] for column in ("local_loss", "global_loss", "node_loss_max")]
    with torch.no_grad():
        expected = Normalizing(12)([before.clone(), validation.tensors[1]]).item()
    measured = np.concatenate(losses)
    np.testing.assert_allclose(measured[~np.isnan(measured)], expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
def test_padding_has_no_gradient_where_it_is_compiled() -> None:
    class Words(Padded):
        def outputs(self, x: Tensor) -> Tensor:
            return self.second(self.first(self.words((4 * x.abs()).long() % 9).mean(1)))

    model = Words(12)
    model.words.max_norm = None
    trainers = [trained(model, executor="vmap", compile=compile) for compile in (True, False)]
    rows = [trainer.strategy.cluster.weights for trainer in trainers]  # type: ignore[union-attr]
    torch.testing.assert_close(*rows)
    assert trainers[0].history.executor == "compiled"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
@pytest.mark.parametrize("kind", [Hooked, Padded])
def test_what_is_compiled_wrongly_is_not(kind: type[Classifier]) -> None:
    """A hook is not in the graph, and functorch knows padding of the first node only, where no module says of it."""

    class Words(Padded):
        def outputs(self, x: Tensor) -> Tensor:
            indices = (4 * x.abs()).long() % 9
            return self.second(self.first(F.embedding(indices, self.words.weight, padding_idx=0).mean(1)))

    model = Words(12) if kind is Padded else kind(12)
    with pytest.warns(UserWarning, match="executor='auto' continues with '(loop|vmap)'"):
        ours = trained(model, compile=True)
    assert ours.history.executor == ("vmap" if kind is Padded else "loop")
    rows = [trainer.strategy.cluster.weights for trainer in (ours, trained(model, executor="loop"))]  # type: ignore[union-attr]
    torch.testing.assert_close(*rows)
    message = "gradient of (words|first).weight differs from that of eager PyTorch"
    with pytest.raises(CompileError, match=message):
        trained(model, executor="vmap", compile=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
def test_what_cannot_be_compiled_leaves_nothing_behind() -> None:
    with pytest.warns(UserWarning, match="executor='auto' continues with 'loop'") as caught:
        assert trained(Checkpointed(16), compile=True).history.executor == "loop"
    assert len([one for one in caught if "continues with" in str(one.message)]) == 1
    assert trained(ClippedWithoutGrad(16), compile=True).history.executor == "compiled"


class AloneInLastBatches(Classifier):
    """What vmap cannot do comes with the last batch of an epoch, which is smaller; it draws before."""

    def outputs(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x), 0.2)
        if len(x) == 1:
            hidden = 2 * hidden[hidden.isfinite()][None]
        return self.second(hidden)


@pytest.mark.parametrize(("deterministic", "executor"), [(False, "auto"), (False, "vmap"), (True, "auto")])
def test_what_vmap_cannot_do_may_come_late(deterministic: bool, executor: str) -> None:
    options: dict[str, Any] = {"num_nodes": 3, "max_steps": STEPS, "batch_size": 3}  # 10 examples: 3, 3, 3 and 1
    model = AloneInLastBatches(12)
    expected = train_separately(
        model, vectors(), AverageWeights(H), lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9), **options
    )
    trainer = Trainer(model, vectors())
    strategy = FedAvgStrategy(H=H, optim_spec=SGD)
    trainer.fit(strategy=strategy, deterministic=deterministic, executor=executor, progress=False, **options)
    if not deterministic:
        assert "went to the loop; the first" in trainer.history.executor_reason
    assert trainer.strategy is not None
    tolerance: dict[str, float] = {"rtol": 0, "atol": 0} if deterministic else {}
    torch.testing.assert_close(trainer.strategy.cluster.weights, expected.weights, **tolerance)


class Sparse(Classifier):
    """A table whose gradients are sparse; here they are made dense."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        stream = torch.Generator().manual_seed(6)
        self.words = nn.Embedding(9, 12, sparse=True, _weight=torch.randn(9, 12, generator=stream))

    def outputs(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.words((4 * x.abs()).long() % 9).mean(1)))


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_sparse_gradients_are_those_of_separate_models_but_for_rounding(executor: str) -> None:
    options: dict[str, Any] = {"num_nodes": 3, "max_steps": STEPS, "batch_size": 4}
    expected = train_separately(
        Sparse(12), vectors(), AverageWeights(H), lambda p: torch.optim.SGD(p, lr=0.2), **options
    )
    trainer = Trainer(Sparse(12), vectors())
    strategy = FedAvgStrategy(H=H, inner_optim="sgd", lr=0.2)
    trainer.fit(strategy=strategy, executor=executor, progress=False, **options)
    assert trainer.strategy is not None
    torch.testing.assert_close(trainer.strategy.cluster.weights, expected.weights)


class Frequencies(Classifier):
    """The gradient of a word is divided by how often a node's batch has it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        stream = torch.Generator().manual_seed(4)
        table = torch.randn(9, 12, generator=stream)
        self.words = nn.Embedding(9, 12, scale_grad_by_freq=True, _weight=table)

    def outputs(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.words((4 * x.abs()).long() % 9).mean(1)))


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_frequencies_are_of_a_nodes_own_batch_where_nodes_share_their_weights(executor: str) -> None:
    counts = {"num_nodes": 3, "max_steps": STEPS, "batch_size": 4}
    expected = train_separately(
        Frequencies(12), vectors(), AverageGradients(), lambda p: torch.optim.SGD(p, lr=0.2), **counts
    )
    trainer = Trainer(Frequencies(12), vectors())
    strategy = SimpleReduceStrategy(inner_optim="sgd", lr=0.2)
    trainer.fit(strategy=strategy, executor=executor, progress=False, **counts)
    assert trainer.strategy is not None and trainer.strategy.cluster.replicas.shares_grads
    every = trainer.strategy.cluster.weights.expand_as(expected.weights)
    torch.testing.assert_close(every, expected.weights)


@pytest.mark.parametrize("kind", NOT_VECTORIZED)
def test_what_cannot_be_vectorized_is_refused_by_name(kind: type[Classifier]) -> None:
    with pytest.raises(VmapError, match=r"cannot be vectorised over nodes.*executor='loop' runs it node by node"):
        trained(kind(16), executor="vmap")
    of_checkpoints = "activation checkpointing computes a part of the model again" if kind is Checkpointed else ""
    with pytest.warns(UserWarning, match=f"executor='auto' continues with 'loop': .*{of_checkpoints}"):
        trainer = trained(kind(16))
    assert trainer.history.executor == "loop"


class Judged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.utils.weight_norm(nn.Linear(5, 5)).requires_grad_(False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.critic(outputs), targets)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_with_the_old_weight_norm_is_named() -> None:
    model = SmallOperations(12)
    nn.utils.weight_norm(model.first)
    with pytest.raises(TypeError, match=r"In first, use torch\.nn\.utils\.parametrizations\.weight_norm"):
        trained(model)
    trainer = Trainer(nn.Linear(12, 5), vectors(), loss_fn=Judged())
    with pytest.raises(TypeError, match=r"loss_fn .*\. In critic, use torch\.nn\.utils\.parametrizations\.weight_norm"):
        trainer.fit(strategy=FedAvgStrategy(), **OPTIONS)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
def test_the_module_that_was_compiled_is_trained() -> None:
    trained_alone, compiled = trained(SmallOperations(12)), trained(torch.compile(SmallOperations(12)))
    assert torch.equal(compiled.strategy.cluster.weights, trained_alone.strategy.cluster.weights)
    assert not any("_orig_mod" in name for name in compiled.model.state_dict())


class Teacher(Classifier):
    """A mean teacher: frozen parameters that follow the others."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.teacher = nn.Linear(12, width).requires_grad_(False)

    def outputs(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.first.weight, 0.1)
        return self.second(self.first(x) - self.teacher(x))


class Listed(Classifier):
    """A weight is kept in a list as well."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weights = [self.first.weight]

    def outputs(self, x: Tensor) -> Tensor:
        return self.second(F.linear(x, self.weights[0]))


class Penalized(nn.Module):
    """The loss names the model that is given to the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)
        self.whole = [lambda: self.layer.weight]  # a function, which no copy of the model makes its own

    def forward(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1]) + self.whole[0]().square().sum()


class Recorded(Classifier):
    """A hook writes what forward reads: to the model, which its closure names, or to the module that it is given."""

    def __init__(self, write: Callable[[Any, Tensor], object], start: list[Any] | None, by_closure: bool) -> None:
        super().__init__(12)
        self.by_closure = by_closure
        if start is not None:
            (self if by_closure else self.first).seen = list(start)
        self.first.register_forward_hook(
            lambda module, _, out: write(self if by_closure else module, out.detach().mean(0))
        )

    def outputs(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden + sum((self if self.by_closure else self.first).seen))


REFUSED = [
    (
        lambda: Hidden(16),
        r"the parameter parts\[0\]\['scale'\]\.(weight|bias).*nn\.ModuleList.*requires_grad_\(False\)",
    ),
    (lambda: Listed(16), r"the loss depends on first\.weight not by the module that has it.*belongs to no node"),
    (Penalized, r"the loss depends on layer\.weight not by the module that has it"),
    (lambda: Teacher(16), r"changes teacher\.weight in forward, a frozen parameter.*make it a buffer"),
    (lambda: Widening(torch.zeros(16).long()), r"seen, which is torch\.int64 \[16\], again as torch\.float32 \[16\]"),
    (lambda: Widening(torch.tensor(0.0)), r"seen, which is torch\.float32 \[\], again as torch\.float32 \[16\]"),
]


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
@pytest.mark.parametrize("executor", ["auto", "loop"])
@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_no_node_could_have_of_its_own_is_refused(
    make: Callable[[], nn.Module], message: str, executor: str
) -> None:
    with pytest.raises(ValueError, match=message):
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
    "partial": lambda loss: functools.partial(loss),
    "parameter": lambda loss: lambda outputs, y: F.cross_entropy(outputs * loss.scale.exp(), y),
}


def trained_with(loss_fn: Any, **options: Any) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(nn.Linear(12, 5), vectors(), loss_fn=loss_fn)
    trainer.fit(strategy=FedAvgStrategy(H=H, optim_spec=SGD), **{**OPTIONS, **options})
    return trainer


@pytest.mark.parametrize(
    "options",
    [{"executor": "vmap"}, {"executor": "loop"}, pytest.param({"backend": "process"}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_has_no_parameters_that_train(kind: str, options: dict[str, Any]) -> None:
    loss = Weighted()
    with pytest.raises(ValueError, match=r"parameter.*part of the model.*freeze") as caught:
        trained_with(LOSSES[kind](loss), **options)
    assert kind != "method" or "loss_fn.scale of shape []" in str(caught.value)
    if options != {"backend": "process"}:
        loss.requires_grad_(False)
        factor = loss.scale.exp() if kind == "parameter" else loss.scale
        rows, expected = (
            trained_with(of, **options).strategy.cluster.weights  # type: ignore[union-attr]
            for of in (LOSSES[kind](loss), lambda outputs, y: F.cross_entropy(outputs * float(factor), y))
        )
        torch.testing.assert_close(rows, expected)


WRITES: list[tuple[Callable[[Any, Tensor], object], list[Any] | None]] = [
    (lambda own, out: setattr(own, "seen", [out]), None),
    (lambda own, out: setattr(own, "seen", [out]), [1.0]),
    (lambda own, out: own.seen.append(out), [1.0]),
]


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
@pytest.mark.parametrize("executor", ["auto", "loop"])
@pytest.mark.parametrize(("write", "start"), WRITES)
def test_a_hook_writes_to_the_module_that_it_is_given(write: Any, start: list[Any] | None, executor: str) -> None:
    with pytest.raises(ValueError, match=r"a function that names the model changes .*from a hook's arguments"):
        trained(Recorded(write, start, by_closure=True), executor=executor)
    expected = train_separately(
        Recorded(write, start, by_closure=False),
        vectors(),
        AverageWeights(H),
        lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
        **{name: value for name, value in OPTIONS.items() if name != "progress"},
    )
    trainer = trained(Recorded(write, start, by_closure=False), executor=executor)
    assert trainer.strategy is not None
    torch.testing.assert_close(trainer.strategy.cluster.weights, expected.weights)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Decaying, {"executor": "loop"}),
        (Padded, {"executor": "loop"}),
        (Decaying, {"executor": "vmap", "chunk_size": 2}),
    ],
)
def test_a_row_that_all_nodes_share_is_changed_by_none(kind: type[Classifier], options: dict[str, Any]) -> None:
    trainer, strategy = Trainer(kind(12), vectors()), SimpleReduceStrategy(optim_spec=SGD)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "executor='auto' continues with 'loop'", UserWarning)
        with pytest.raises(ValueError, match=r"changes its weights in forward.*share one row.*deterministic=True"):
            trainer.fit(strategy=strategy, **OPTIONS, **options)
    trainer.fit(strategy=strategy, deterministic=True, **OPTIONS)
    expected = train_separately(
        kind(12),
        vectors(),
        AverageGradients(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
        **{name: value for name, value in OPTIONS.items() if name != "progress"},
    )
    assert trainer.strategy is not None
    assert torch.equal(trainer.strategy.cluster.weights, expected.weights)
    both = {"one row": strategy, "rows": FedAvgStrategy(optim_spec=SGD)}
    if kind is Padded:
        with pytest.raises(ValueError, match="changes its weights in forward, on each node in another way"):
            vsim.compare(kind(12), vectors(), strategies=both, **OPTIONS)
        return
    comparison = vsim.compare(kind(12), vectors(), strategies=both, **OPTIONS)  # where each has a copy of the row
    ended = dict(comparison["one row"].model.named_parameters())
    for name, weight in trainer.strategy.cluster.replicas.views(expected.weights).items():
        torch.testing.assert_close(ended[name], weight.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedReentrantly, MaxNorm, Counting, Starting])
def test_processes_have_the_same_bits(kind: type[Classifier]) -> None:
    options = {name: value for name, value in OPTIONS.items() if name not in ("num_nodes", "max_steps")}
    strategy = FedAvgStrategy(H=2, optim_spec=SGD)
    report = vsim.verify(kind(12), vectors(), strategy, 2, 5, **options)
    assert report.identical, report
