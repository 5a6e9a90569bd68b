"""A strategy's second gradient: against a loop in plain PyTorch, and a run that it must leave as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from errors import refused
from reference_cluster import Noisy
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim import Dropout, Sample
from vsim.cluster.randomness import NODE, drawing_from, generator
from vsim.models import MLP
from vsim.strategy import AsyncDiLoCoStrategy, FedAvgStrategy, OptimSpec, Strategy
from vsim.strategy.compression import by_node

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": 4, "batch_size": 4, "progress": False}


def data(size: int = 60) -> TensorDataset:
    stream = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 6, generator=stream), torch.randint(3, (size,), generator=stream))


class Sam(Strategy):
    """The gradient at w + ρ g / ‖g‖."""

    def before_optimizer(self) -> None:
        weights, grads = self.cluster.weights, self.cluster.grads
        norms = by_node(self.cluster, lambda rows: rows.norm(dim=1, keepdim=True), grads)
        grads.copy_(self.gradient(at=weights + 0.5 * grads / norms))
        super().before_optimizer()


class Looks(FedAvgStrategy):
    """FedAvg that computes further gradients, and keeps those at the nodes' own weights."""

    def gradients(self) -> None:
        self.gradient(at=self.cluster.weights + 1)
        self.differs = float((self.gradient(at=self.cluster.weights) - self.cluster.grads).abs().max())
        super().gradients()

    derived = ("differs",)


def weights_of(model: nn.Module, strategy: Strategy, dataset: Any, **options: Any) -> Tensor:
    trainer = vsim.Trainer(model, dataset)
    trainer.fit(strategy=strategy, **{**OPTIONS, **options})
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights.clone()


@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("minibatch_size", [None, 4])
def test_sam_is_a_loop_in_pytorch(executor: str, minibatch_size: int | None) -> None:
    model, inputs = MLP(6, (4,), 3, seed=0).double(), torch.randn(3, 8, 6, dtype=torch.float64)
    labels = torch.randint(3, (3, 8))
    found = weights_of(
        model,
        Sam(inner_optim="sgd", lr=0.1),
        lambda rank, *_: TensorDataset(inputs[rank], labels[rank]),
        **{"batch_size": 8, "executor": executor, "minibatch_size": minibatch_size},
    )
    for node in range(3):
        own = copy.deepcopy(model)
        for _ in range(4):
            parameters = [*own.parameters()]
            kept = [p.detach().clone() for p in parameters]
            grads = torch.autograd.grad(own((inputs[node], labels[node])), parameters)
            norm = torch.cat([g.flatten() for g in grads]).norm()
            with torch.no_grad():
                for p, g in zip(parameters, grads, strict=True):
                    p.add_(0.5 * g / norm)
            grads = torch.autograd.grad(own((inputs[node], labels[node])), parameters)
            with torch.no_grad():
                for p, g, before in zip(parameters, grads, kept, strict=True):
                    p.copy_(before - 0.1 * g)
        torch.testing.assert_close(found[node], nn.utils.parameters_to_vector(own.parameters()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "options"),  # of 46 examples, some clients have batches of 4 and 3, others of 4 and 2
    [
        (42, {}),
        (46, {"deterministic": True}),
        (42, {"participation": Dropout(0.4)}),
        (42, {"participation": Sample(3, of=7)}),
        (46, {"participation": Sample(3, of=7)}),
    ],
    ids=str,
)
def test_a_run_does_not_notice_further_gradients(size: int, options: dict[str, Any]) -> None:
    plain, looking = (
        weights_of(Noisy(), cls(H=2, lr=0.1, inner_optim="sgd"), data(size), max_steps=9, **options)
        for cls in (FedAvgStrategy, Looks)
    )
    assert torch.equal(plain, looking)


@pytest.mark.parametrize(
    "options", [{"executor": "vmap"}, {"executor": "loop"}, {"deterministic": True}, {"minibatch_size": 2}], ids=str
)
def test_second_passes_draw_the_masks_of_the_first(options: dict[str, Any]) -> None:
    model = Noisy(0.5).double()
    inputs, labels = torch.randn(3, 8, 6, dtype=torch.float64), torch.randint(3, (3, 8))
    found = weights_of(
        model,
        Sam(inner_optim="sgd", lr=0.1),
        lambda rank, *_: TensorDataset(inputs[rank], labels[rank]),
        **{"batch_size": 8, "shuffle": False, "seed": 7, **options},
    )
    size = options.get("minibatch_size", 8)
    for node in range(3):
        own, stream = copy.deepcopy(model), generator(7, NODE, node)
        parameters = [*own.parameters()]

        def backward(node: int = node, own: nn.Module = own) -> None:
            own.zero_grad()
            for x, y in zip(inputs[node].split(size), labels[node].split(size), strict=True):
                (own((x, y)) * (len(x) / 8)).backward()

        for _ in range(4):
            kept, before = [p.detach().clone() for p in parameters], stream.get_state()
            with drawing_from(stream):
                backward()
            norm = torch.cat([p.grad.flatten() for p in parameters]).norm()  # type: ignore[union-attr]
            with torch.no_grad():
                for p in parameters:
                    p.add_(0.5 * p.grad / norm)
            with drawing_from(torch.Generator().set_state(before)):
                backward()
            with torch.no_grad():
                for p, own_weights in zip(parameters, kept, strict=True):
                    p.copy_(own_weights - 0.1 * p.grad)
        torch.testing.assert_close(found[node], nn.utils.parameters_to_vector(parameters), rtol=1e-9, atol=1e-12)


# With batches of one size and of several, for runs alone and in company.
LOOKING: list[dict[str, Any]] = [
    {},
    {"batch_size": 16, "num_nodes": 2},
    {"participation": Sample(3, of=7)},
    {"minibatch_size": 2},
]


@pytest.mark.parametrize("options", [*LOOKING, pytest.param({"compile": True}, marks=pytest.mark.slow)], ids=str)
def test_the_gradient_at_the_nodes_own_weights_is_theirs(options: dict[str, Any]) -> None:
    for model in (MLP(6, (4,), 3, seed=0), Noisy(0.5)):
        trainer = vsim.Trainer(model, data(46))
        trainer.fit(strategy=Looks(H=2), **{**OPTIONS, **options})
        assert trainer.strategy.differs < 1e-6  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [*LOOKING, pytest.param({"compile": True}, marks=pytest.mark.slow)], ids=str)
def test_runs_in_company_draw_their_own_masks_again(options: dict[str, Any]) -> None:
    found: list[float] = []

    class Sees(Looks):
        def gradients(self) -> None:
            super().gradients()
            found.append(self.differs)

    strategies = {"a": Sees(H=2), "b": FedAvgStrategy(H=3), "c": Sees(H=3)}
    vsim.compare(Noisy(0.5), data(46), strategies=strategies, **{**OPTIONS, **options})
    assert len(found) == 8 and max(found) < 1e-6


@pytest.mark.slow
def test_a_batch_of_ones_own_in_company_with_compile_and_masks() -> None:
    class Own(FedAvgStrategy):
        def gradients(self) -> None:
            self.gradient(self.cluster.weights, [torch.randn(3, 4, 6), torch.zeros(3, 4, dtype=torch.int64)])

    options = {**OPTIONS, "compile": True}
    with refused(ValueError, "together=False", "random"):
        vsim.compare(Noisy(0.5), data(), strategies={"a": Own(H=2), "b": FedAvgStrategy(H=2)}, **options)
    vsim.compare(Noisy(0.5), data(), strategies={"a": Own(H=2), "b": FedAvgStrategy(H=2)}, together=False, **options)


def test_a_batch_of_ones_own_and_frozen_parameters() -> None:
    inputs, labels, found = torch.randn(3, 2, 6), torch.randint(3, (3, 2)), []

    class Own(FedAvgStrategy):
        def gradients(self) -> None:
            found.append(self.gradient(self.cluster.weights, [inputs, labels]))
            super().gradients()

    model = MLP(6, (4,), 3, seed=0)
    names = [name for name, _ in model.named_parameters()]
    frozen = [lambda run: run.freeze(names[0])]
    weights_of(model, Own(H=9), data(), max_steps=2, callbacks=frozen)
    for node in range(3):
        expected = torch.autograd.grad(model((inputs[node], labels[node])), [*model.parameters()])
        torch.testing.assert_close(found[0][node], torch.cat([g.flatten() for g in expected]))
    size = next(model.parameters()).numel()
    assert not found[1][:, :size].any() and found[1][:, size:].any()


def test_what_has_no_second_gradient() -> None:
    class Wrong(FedAvgStrategy):
        def gradients(self) -> None:
            self.gradient(self.cluster.weights[:1])

    with refused(ValueError, "at=…", "[3, ", "[1, "):
        weights_of(MLP(6, (4,), 3, seed=0), Wrong(), data())

    class Clocked(AsyncDiLoCoStrategy):
        def begin(self, cluster: Any) -> None:
            super().begin(cluster)
            self.gradient(cluster.weights)

    with refused(ValueError, "asynchronous"):
        weights_of(MLP(6, (4,), 3, seed=0), Clocked(), data(), compute=1.0, network=None)


@pytest.mark.slow
def test_processes_compute_the_same_bits() -> None:
    strategy = Sam(inner_optim=OptimSpec("sgd", momentum=0.9), lr=0.1)
    report = vsim.verify(Noisy(), data(), strategy, num_nodes=2, max_steps=4, batch_size=4)
    assert report.identical, report
