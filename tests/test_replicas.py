"""The node matrix: views share its memory, and every kind of parameter and buffer has its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import small_cnn, small_gpt, small_mlp
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim import Ledger
from vsim.cluster import Cluster
from vsim.cluster.replicas import Columns, Replicas
from vsim.cluster.stacked import StackedCollectives
from vsim.shapes import check_apart
from vsim.strategy import FedAvgStrategy

CPU = torch.device("cpu")


class Shapes(nn.Module):
    """Parameters of given shapes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)


@settings(max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=5),
    num_nodes=st.integers(1, 5),
)
def test_views_are_the_matrix(shapes: list[tuple[int, ...]], num_nodes: int) -> None:
    model = Shapes(*shapes)
    replicas = Replicas.of(model, num_nodes, CPU)
    for row in (*replicas.weights, *replicas.grads):
        assert row.is_contiguous() and row.data_ptr() % 64 == 0
    assert replicas.weights.shape == replicas.grads.shape == (replicas.num_held, replicas.num_parameters)
    assert replicas.num_held == num_nodes
    assert replicas.num_parameters == sum(p.numel() for p in model.parameters())
    views = replicas.views(replicas.weights)
    assert list(views) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert torch.equal(views[name], p.detach().expand(num_nodes, *p.shape))
    for number, view in enumerate(views.values()):
        view.fill_(number)
    sizes = [p.numel() for p in model.parameters()]
    expected = torch.cat([torch.full((size,), float(number)) for number, size in enumerate(sizes)])
    assert torch.equal(replicas.weights, expected.expand(num_nodes, -1))
    # A shared row has views without the node dimension.
    shared = replicas.views(replicas.weights[0])
    assert [tuple(v.shape) for v in shared.values()] == shapes
    assert not replicas.grads.any()


def test_tied_parameters_are_one_column_range() -> None:
    model = small_gpt()
    assert model.lm_head.weight is model.tokens.weight
    replicas = Replicas.of(model, 2, CPU)
    names = [c.name for c in replicas.layout]
    assert "tokens.weight" in names and "lm_head.weight" not in names
    assert replicas.num_parameters == sum(p.numel() for p in model.parameters())
    assert replicas.layout[0] == Columns("tokens.weight", torch.Size([11, 16]), 0, 176)
    restored = replicas.as_module(replicas.weights[0] + 1, {}, model)
    assert isinstance(restored, type(model)) and restored.lm_head.weight is restored.tokens.weight
    assert torch.equal(restored.lm_head.weight, model.lm_head.weight + 1)


def test_every_node_has_its_own_buffers() -> None:
    model = small_cnn()
    model.features[1].running_mean.copy_(torch.arange(4.0))
    model.register_buffer("phase", torch.tensor([1j]))
    replicas = Replicas.of(model, 3, CPU)
    assert list(replicas.buffers) == [name for name, _ in model.named_buffers()]
    means = replicas.buffers["features.1.running_mean"]
    assert torch.equal(means, torch.arange(4.0).expand(3, 4))
    means[1] += 3
    assert torch.equal(means[0], torch.arange(4.0))  # rows do not share memory
    counts = replicas.buffers["features.1.num_batches_tracked"]
    counts.copy_(torch.tensor([5, 6, 7]))
    replicas.buffers["phase"].copy_(torch.tensor([[1j], [2j], [3j]]))
    cluster = Cluster(replicas, StackedCollectives(Ledger(3)), torch.Generator(), torch.ones(3).long(), max_steps=1)
    shared = cluster.mean_buffers()
    assert torch.equal(shared["features.1.running_mean"], torch.arange(4.0) + 1)
    assert shared["features.1.num_batches_tracked"].item() == 5  # a whole number is that of row 0
    assert shared["phase"].item() == 2j
    assert len(cluster.collectives.ledger) == 0
    counts.zero_()
    assert shared["features.1.num_batches_tracked"].item() == 5  # with memory of its own


def test_a_row_slice_shares_memory() -> None:
    replicas = replace(Replicas.of(small_cnn(), 5, CPU), first_node=10)
    assert replicas.nodes == range(10, 15)
    part = replicas.rows(1, 3)
    assert part.nodes == range(11, 13) and part.num_held == 2
    assert part.frozen is replicas.frozen and part.module is replicas.module
    part.weights.fill_(7)
    part.grads.fill_(8)
    part.buffers["features.1.running_mean"].fill_(9)
    buffer = replicas.buffers["features.1.running_mean"]
    for whole, value in ((replicas.weights, 7), (replicas.grads, 8), (buffer, 9)):
        assert [bool((row == value).all()) for row in whole] == [False, True, True, False, False]
    assert part.rows(1, 2).nodes == range(12, 13)


def changed(change: Callable[[Any], Any]) -> nn.Module:
    model = small_mlp()
    change(model.layers)
    return model


CANNOT: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "none": (nn.ReLU, ("no trainable parameter",)),
    "frozen": (lambda: small_mlp().requires_grad_(False), ("no trainable parameter",)),
    "lazy": (lambda: nn.LazyLinear(3), (["weight", "bias"], "initialised")),
    "dtypes": (lambda: changed(lambda own: own[0].to(torch.float64)), ("one dtype", "torch.float32", "torch.float64")),
    "devices": (lambda: changed(lambda own: own[3].to("meta")), ("one device", "layers.", ".weight", "meta", "cpu")),
    "complex": (lambda: nn.ParameterList([torch.zeros(1).cfloat()]), ("floating-point", "0", "torch.complex64")),
    "hook": (lambda: changed(lambda own: own[3].weight.register_hook(id)), (["layers.3.weight"], "hooks")),
}


@pytest.mark.parametrize("kind", CANNOT)
def test_models_that_cannot_be_stacked(kind: str) -> None:
    make, parts = CANNOT[kind]
    with refused(ValueError, *parts):
        Replicas.of(make(), 2, CPU)


# Memory that parameters share


class Tied(nn.Module):
    """A table (6, 4) and a head (6, 4), which `share` makes share memory."""

    def __init__(self, share: Callable[[Tied], Any]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        share(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def by_data(model: Tied) -> None:
    model.head.weight.data = model.table.weight.data


def by_view(model: Tied) -> None:
    model.head.weight = nn.Parameter(model.table.weight.detach().flatten()[4:].view(5, 4))


def by_transposing(model: Tied) -> None:
    model.head.weight.data = model.table.weight.data.T


def by_column(model: Tied) -> None:
    whole = torch.randn(6, 7)
    model.table.weight, model.head.weight = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 3:])


def trainable_with_frozen(model: Tied) -> None:
    by_data(model)
    model.table.weight.requires_grad_(False)


def with_buffer(model: Tied) -> None:
    model.head.register_buffer("weight0", model.table.weight.detach()[2])


SHARING = [by_data, by_view, by_transposing, by_column, trainable_with_frozen, with_buffer]
IDS = TensorDataset(torch.arange(24) % 6, torch.arange(24) % 6)
FIT: dict[str, Any] = {"num_nodes": 2, "max_steps": 2, "progress": False}


@pytest.mark.parametrize("share", SHARING)
def test_parameters_that_share_memory_are_refused(share: Callable[[Tied], None]) -> None:
    other = "head.weight0" if share is with_buffer else "head.weight"
    model, strategy, network = Tied(share), FedAvgStrategy(H=2), {"network": "1 Gbit/s", "compute": 1}
    options = {**FIT, "loss_fn": F.cross_entropy}
    for call in (
        lambda: vsim.Trainer(model, IDS, loss_fn=F.cross_entropy).fit(strategy=strategy, **FIT),
        lambda: vsim.verify(model, IDS, strategy, **options),
        lambda: vsim.compare(model, IDS, strategies={"A": strategy}, **options),
        lambda: vsim.price(strategy, model=model, num_nodes=2, max_steps=2, **network),
    ):
        with refused(ValueError, f"table.weight and {other}", f"{other} = table.weight"):
            call()


def test_the_cure_ties_them() -> None:
    def one_parameter(model: Tied) -> None:
        model.head.weight = model.table.weight

    trainer = vsim.Trainer(Tied(one_parameter), IDS, loss_fn=F.cross_entropy)
    model = trainer.fit(strategy=FedAvgStrategy(H=2, lr=0.1), **FIT)
    assert model.head.weight is model.table.weight
    assert trainer.history.last("payload_bytes") == 6 * 4 * 4


def test_memory_may_be_shared_where_nothing_trains_apart() -> None:
    def halves(model: Tied) -> None:
        whole = torch.randn(12, 4)
        model.table.weight, model.head.weight = nn.Parameter(whole[:6]), nn.Parameter(whole[6:])

    def columns(model: Tied) -> None:
        whole = torch.randn(6, 8)
        model.table.weight, model.head.weight = nn.Parameter(whole[:, ::2]), nn.Parameter(whole[:, 1::2])

    def frozen(model: Tied) -> None:
        by_data(model.requires_grad_(False))
        model.bias = nn.Parameter(torch.zeros(6))

    def constants(model: Tied) -> None:
        model.register_buffer("one", torch.zeros(4))
        model.head.register_buffer("two", model.one.view(2, 2))
        model.register_buffer("none", model.table.weight.detach()[:0])

    for share in (halves, columns, frozen, constants):
        check_apart(Tied(share))
    with torch.device("meta"):
        check_apart(Tied(lambda model: None))
        with refused(ValueError, "table.weight and head.weight"):
            check_apart(Tied(by_data))
    bare = Tied(lambda model: None).to("meta")  # of whose storages none has an address
    priced = vsim.price(FedAvgStrategy(H=1), model=bare, num_nodes=2, max_steps=2, network="1 Gbit/s", compute=1)
    assert priced.seconds[-1] > 2
