"""Operations for all nodes at once equal one node's up to rounding, with the draws of the node's own generator."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import warned
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vsim.cluster.randomness import NODE, generator
from vsim.cluster.replicas import Replicas
from vsim.engine import AutoExecutor, Executor, LoopExecutor, Settings, VmapExecutor, batched, rules
from vsim.engine.objective import Objective
from vsim.engine.rules import _DRAWS, _WHOLE, RULES
from vsim.models import CNN

pytestmark = pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input:UserWarning")  # which it takes, for now
CPU = torch.device("cpu")


def make(kind: Any, model: nn.Module, num_nodes: int = 3, loss_fn: Any = None, **options: Any) -> Executor:
    """An executor of replicas that have drifted apart, as they do in training."""
    replicas = Replicas.of(model, num_nodes, CPU)
    replicas.module.train()
    drift = torch.randn(replicas.weights.shape, generator=torch.Generator().manual_seed(5))
    replicas.weights.add_(drift, alpha=0.05)
    streams = [generator(0, NODE, node) for node in range(num_nodes)]
    executor: Executor = kind(replicas, Objective(replicas.module, loss_fn), streams, Settings(**options))
    return executor


def assert_agrees(model: nn.Module, batch: list[Tensor], minibatch_size: int | None = None, **options: Any) -> None:
    """Losses, gradients and buffers are those of the loop up to rounding, and draws are equal to the bit."""
    num_nodes = len(batch[0])
    ours, theirs = make(VmapExecutor, model, num_nodes, **options), make(LoopExecutor, model, num_nodes)
    for _ in range(2):
        losses = [e.losses_and_grads(batch, minibatch_size) for e in (ours, theirs)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(ours.replicas.grads, theirs.replicas.grads, rtol=1e-4, atol=1e-5)
        for name, buffer in ours.replicas.buffers.items():
            torch.testing.assert_close(buffer, theirs.replicas.buffers[name])
        for a, b in zip(ours.generators, theirs.generators, strict=True):
            assert torch.equal(a.get_state(), b.get_state())
    assert not ours.reason  # vmapped it was


# One operation at a time


class One(nn.Module):
    """A model around one operation: a linear map of x (B, 6) before it, another one after it."""

    def __init__(self, operation: Callable[[Tensor, One], Tensor], *modules: nn.Module, width: int = 6) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.before = nn.Linear(6, width)
            self.scale = nn.Parameter(torch.rand(()) + 0.5)
            self.table = nn.Parameter(torch.randn(7, width))
            self.own = nn.ModuleList(modules)
            for p in self.own.parameters():
                nn.init.normal_(p, std=0.5)
        self.operation = operation

    def forward(self, batch: list[Tensor]) -> Tensor:
        out = self.operation(self.before(batch[0]), self)
        return out.pow(2).mean() + 0 * self.scale * self.table.sum()


def images(x: Tensor) -> Tensor:
    """(B, 64) → (B, 4, 4, 4)."""
    return x.view(-1, 4, 4, 4)


def of(module: nn.Module, *shape: int) -> One:
    """A module, of examples of this shape."""
    width = math.prod(shape) if shape else 6
    return One(lambda x, m: m.own[0](x.view(-1, *shape) if shape else x), module, width=width)


OPERATIONS: dict[str, One] = {
    "softmax": One(lambda x, m: x.softmax(-1)),
    "log_softmax over the batch": One(lambda x, m: F.log_softmax(x, 0)),
    "exp, tanh, sigmoid": One(lambda x, m: (x.exp() + x.tanh()).sigmoid()),
    "prelu": of(nn.PReLU(6)),
    "a spectrum": One(lambda x, m: torch.fft.rfft(x).abs()),
    "distances": One(lambda x, m: torch.cdist(x, m.table)),
    "gelu": One(lambda x, m: F.gelu(x) + F.gelu(x, approximate="tanh")),
    "silu, elu, softplus": One(lambda x, m: F.silu(x) + F.elu(x) + F.softplus(x)),
    "relu in place": One(lambda x, m: F.relu(x, inplace=True)),
    "power and root": One(lambda x, m: (x**2 + 1).sqrt() + (x.abs() + 1) ** 0.3),
    "a scalar parameter": One(lambda x, m: x * m.scale + m.scale),
    "a parameter for every example": One(lambda x, m: x + m.table[: len(x)]),
    "a parameter for every feature": One(lambda x, m: x * m.table[0] - m.table[1]),
    "mean and deviation": One(lambda x, m: (x - x.mean(0)) / (x.std(0) + 1)),
    "sums": One(lambda x, m: x.sum(1, keepdim=True) + x.sum(0) + x.amax()),
    "norm": One(lambda x, m: x / (1 + x.norm(dim=1, keepdim=True))),
    "cumulative sum": One(lambda x, m: x.cumsum(1)),
    "sort and top": One(lambda x, m: x.sort(1).values + x.topk(2, 1).values.sum(1, keepdim=True)),
    "matmul with weights": One(lambda x, m: x @ m.table.T),
    "matmul, both ways": One(lambda x, m: (x @ x.T) @ x),
    "matmul, three dimensions": One(lambda x, m: x.view(-1, 2, 3) @ x.view(-1, 3, 2)),
    "matmul of a batch with weights": One(lambda x, m: x.view(-1, 1, 6) @ m.table.T),
    "a vector times a matrix": One(lambda x, m: m.table @ x[0]),
    "einsum": One(lambda x, m: torch.einsum("bi,ji->bj", x, m.table)),
    "bmm": One(lambda x, m: torch.bmm(x.view(-1, 2, 3), x.view(-1, 3, 2))),
    "products of vectors": One(
        lambda x, m: torch.mv(m.table, x[0].float()).sum() + torch.dot(x[0].float(), m.table[0]) + x @ x[0]
    ),
    "products and sums": One(
        lambda x, m: (
            torch.baddbmm(m.table[0, :3], x.view(-1, 2, 3), x.view(-1, 3, 2) @ m.table[:2, :3]).sum()
            + torch.addbmm(m.table[:2, :2], x.view(-1, 2, 3), x.view(-1, 3, 2)).sum()
            + torch.addmv(m.table[0], m.table[:6], x[0].float())
        )
    ),
    "vecdot": One(lambda x, m: torch.linalg.vecdot(x, m.table[: len(x)])),
    "addmm": One(lambda x, m: torch.addmm(m.table[0, :4], x, m.table[:4].T)),
    "linear without bias": One(lambda x, m: F.linear(x, m.table)),
    "linear of three dimensions": One(lambda x, m: F.linear(x.view(-1, 1, 6).expand(-1, 3, 6), m.table)),
    "linear of one example": One(lambda x, m: F.linear(x[0], m.table)),
    "the same weights twice": One(lambda x, m: F.linear(F.linear(x, m.table), m.table.T)),
    "bilinear": One(lambda x, m: m.own[0](x, x), nn.Bilinear(6, 6, 2)),
    "layer norm": of(nn.LayerNorm(6)),
    "layer norm without weights": One(lambda x, m: F.layer_norm(x, (6,))),
    "layer norm without bias": of(nn.LayerNorm(6, bias=False)),
    "rms norm": of(nn.RMSNorm(6)),
    "group norm": of(nn.GroupNorm(2, 4), 4, 4, 4),
    "instance norm": of(nn.InstanceNorm2d(4, affine=True), 4, 4, 4),
    "instance norm with statistics": of(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), 4, 4, 4),
    "batch norm": of(nn.BatchNorm1d(6)),
    # Its cumulative average divides by the number of batches, as a number of Python's.
    "batch norm, cumulative": of(nn.BatchNorm1d(6, momentum=None)),
    "batch norm without statistics": of(nn.BatchNorm1d(6, track_running_stats=False)),
    "convolution": of(nn.Conv2d(4, 3, 3, 2, 1), 4, 4, 4),
    "convolution, same padding": of(nn.Conv2d(4, 3, 3, padding="same"), 4, 4, 4),
    "convolution, reflected": of(nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"), 4, 4, 4),
    "convolution in groups": of(nn.Conv2d(4, 4, 3, groups=2, dilation=1), 4, 4, 4),
    "convolution without bias": of(nn.Conv2d(4, 9, 1, bias=False), 4, 4, 4),
    "convolution in one dimension": of(nn.Conv1d(4, 2, 5, padding=2), 4, 16),
    "convolution in three": of(nn.Conv3d(1, 2, 2), 1, 4, 4, 4),
    "transposed convolution": of(nn.ConvTranspose2d(4, 2, 2, 2), 4, 4, 4),
    "max pooling": One(lambda x, m: F.max_pool2d(images(x), 2), width=64),
    "average pooling": One(lambda x, m: F.avg_pool2d(images(x), 2), width=64),
    "adaptive pooling": One(lambda x, m: F.adaptive_avg_pool2d(images(x), 1), width=64),
    "interpolation": One(lambda x, m: F.interpolate(images(x), scale_factor=2, mode="bilinear"), width=64),
    "attention": One(lambda x, m: attend(x, is_causal=True), width=24),
    "attention with a mask": One(lambda x, m: attend(x, attn_mask=torch.ones(2, 2).tril().bool()), width=24),
    "attention with a mask by example": One(
        lambda x, m: attend(x, attn_mask=x[:, None, None, :2] > x[:, None, None, 2:4]), width=24
    ),
    "attention with learned bias": One(lambda x, m: attend(x, attn_mask=m.table[:2, :2]), width=24),
    "attention with dropout": One(lambda x, m: attend(x, dropout_p=0.4), width=24),
    "multi-head attention": One(
        lambda x, m: m.own[0](*[x.view(-1, 2, 12)] * 3)[0],
        nn.MultiheadAttention(12, 2, 0.3, batch_first=True),
        width=24,
    ),
    "transformer layer": of(nn.TransformerEncoderLayer(12, 2, 8, 0.2, batch_first=True), 2, 12),
    "lstm": One(lambda x, m: m.own[0](x.view(-1, 2, 3))[0], nn.LSTM(3, 4, 2, dropout=0.3, batch_first=True)),
    "gru": One(lambda x, m: m.own[0](x.view(-1, 2, 3))[0], nn.GRU(3, 4, batch_first=True, bidirectional=True)),
    "rnn": One(lambda x, m: m.own[0](x.view(-1, 2, 3))[0], nn.RNN(3, 4, batch_first=True)),
    "embedding": One(lambda x, m: F.embedding((x > 0).long().sum(1), m.table)),
    "embedding with padding": One(lambda x, m: F.embedding((x > 0).long().sum(1), m.table, padding_idx=3)),
    "indexing with a tensor": One(lambda x, m: m.table[(x > 0).long().sum(1)]),
    "gather": One(lambda x, m: x.gather(1, x.argsort(1))),
    "where": One(lambda x, m: torch.where(x > 0, x, m.scale * x)),
    "clamp and minimum": One(lambda x, m: x.clamp(-0.5, 0.5) + torch.minimum(x, x.flip(0))),
    "stack, cat, split": One(lambda x, m: torch.cat([*x.split(2, 1), torch.stack([x, x]).flatten(0, 1)[: len(x)]], 1)),
    "writing into a new tensor": One(lambda x, m: written(x)),
    "transposed then reduced": One(lambda x, m: x.T.exp().sum(1)),
    "repeated": One(lambda x, m: m.table[:1].expand(len(x), -1) * x + x.repeat(1, 2)[:, :6]),
    "cross entropy with weights": One(lambda x, m: F.cross_entropy(x, x.argmax(1), weight=m.table[0].detach().exp())),
    "cross entropy, smoothed": One(lambda x, m: F.cross_entropy(x, x.argmax(1), label_smoothing=0.1)),
    "cross entropy, summed": One(lambda x, m: F.cross_entropy(x, x.argmax(1), reduction="sum")),
    "cross entropy, some ignored": One(lambda x, m: F.cross_entropy(x, x.argmax(1), ignore_index=2)),
    "cross entropy, ignored by a number above": One(
        lambda x, m: F.cross_entropy(x, x.argmax(1).masked_fill(x[:, 0] > 0, 255), ignore_index=255)
    ),
    "cross entropy of images": One(lambda x, m: F.cross_entropy(x.view(-1, 2, 3), (x[:, :3] > 0).long())),
    "cross entropy by probabilities": One(lambda x, m: F.cross_entropy(x, x.detach().softmax(1))),
    "negative log likelihood": One(lambda x, m: F.nll_loss(x.log_softmax(1), x.argmax(1))),
    "binary cross entropy": One(lambda x, m: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid())),
    "divergence": One(lambda x, m: F.kl_div(x.log_softmax(1), m.table[: len(x)].softmax(1), reduction="batchmean")),
    "cosine embedding": One(lambda x, m: F.cosine_embedding_loss(x, m.table[: len(x)], x[:, 0].detach().sign())),
    "mse and huber": One(lambda x, m: F.mse_loss(x, x.detach() + 1) + F.huber_loss(x, x.detach() * 2)),
    "complex products": One(lambda x, m: waves(x, m.table)),
    "a value for some entries": One(lambda x, m: x + torch.zeros(6).index_fill(0, torch.tensor([0, 2]), m.scale)),
    "a row in the place of another": One(lambda x, m: x.select_scatter(m.table[0], 0, 1)),
    "pooling by chance": One(
        lambda x, m: F.fractional_max_pool2d(x.view(-1, 1, 8, 8), 2, 5, return_indices=True)[0], width=64
    ),
    "noise": One(lambda x, m: x + torch.randn_like(x) + torch.rand(6)),
    "dropout": of(nn.Dropout(0.5)),
    "dropout, twice and in place": One(lambda x, m: F.dropout(F.dropout(x * 1, 0.5, inplace=True), 0.5)),
    "dropout of all and none": One(lambda x, m: F.dropout(x, 1.0) + F.dropout(x, 0.0) + F.dropout(x, 0.4, False)),
    "dropout of nothing": One(lambda x, m: F.dropout(x[:0], 0.4).sum() + x),
    "dropout1d": of(nn.Dropout1d(0.4), 4, 16),
    "dropout1d of one example": of(nn.Dropout1d(0.4)),
    "dropout2d": of(nn.Dropout2d(0.5), 4, 4, 4),
    "dropout2d of one dimension": of(nn.Dropout2d(0.4), 4, 16),
    "dropout3d": of(nn.Dropout3d(0.4), 4, 4, 2, 2),
    "dropout3d of one example": of(nn.Dropout3d(0.4), 4, 4, 4),
    "alpha dropout": One(lambda x, m: F.alpha_dropout(x, 0.5, training=True)),
    "dropout of other names": One(lambda x, m: torch.dropout(torch.feature_dropout(x, 0.3, True), 0.2, True)),
    "gamma": One(lambda x, m: x * torch.distributions.Gamma(x.detach().abs() + 1, 1.0).sample()),
    "stochastic depth": One(lambda x, m: x * x.new_empty(len(x), 1).bernoulli_(0.8).div_(0.8)),
    "by probabilities": One(lambda x, m: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid())),
    "noise in place": One(lambda x, m: x + torch.empty(6).normal_(std=0.1) + x.detach().clone().uniform_(-1, to=0)),
    "rare noise in place": One(
        lambda x, m: (
            x
            + x.new_empty(6).exponential_(2.0)
            + x.new_empty(6).log_normal_(0, 0.5)
            + x.new_empty(6).geometric_(0.4)
            + x.new_empty(6).cauchy_().clamp(-1, 1)
            + torch.empty(6, dtype=torch.long).random_(3)
        )
    ),
    "read": One(
        lambda x, m: x * float(x.new_ones(3).sum()) if torch.isfinite(x).all() and len(x) in x.new_full((), 5) else -x
    ),
    "read as another": One(
        lambda x, m: x * x.detach().sign().abs().tolist()[0][1] + int(f"{x.new_ones(()):.0f}") + torch.equal(x, x)
    ),
}


def waves(x: Tensor, table: Tensor) -> Tensor:
    """Products of complex numbers in three spellings, as a Fourier operator has them."""
    weights = torch.complex(table[:4, :4], table[:4, 2:])
    return torch.fft.irfft(F.linear(torch.fft.rfft(x) @ weights, weights) + torch.mm(torch.fft.rfft(x), weights), n=6)


def attend(x: Tensor, **options: Any) -> Tensor:
    """Attention of (B, 24) as (B, 2 heads, 2 positions, 2) queries, keys and values."""
    q, k, v = x.view(-1, 3, 2, 2, 2).unbind(1)
    return F.scaled_dot_product_attention(q, k, v, **options)


if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    in_chunks = nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions(batch_chunk_size=2)
    OPERATIONS["cross entropy of a product"] = One(
        lambda x, m: F.linear_cross_entropy(x, m.table, x.argmax(1), options=in_chunks)
    )


def written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, ::2] = x[:, 1::2]
    return out


@pytest.mark.parametrize(("num_nodes", "on_cpu"), [(1, True), (3, False)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_agrees_with_the_loop(
    name: str, num_nodes: int, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_cpu:  # the forms of an accelerator
        monkeypatch.setattr(batched, "is_cache_bound", lambda device: False)
    assert_agrees(OPERATIONS[name], [torch.randn(num_nodes, 5, 6, generator=torch.Generator().manual_seed(1))])


EXAMPLES = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1))


def noting(model: One) -> tuple[One, list[torch.dtype]]:
    """A model that notes the dtypes of its operation's results, given bfloat16."""
    made, dtypes = copy.deepcopy(model), list[torch.dtype]()

    def noted(x: Tensor, m: One) -> Tensor:
        assert x.dtype == torch.bfloat16
        out = model.operation(x, m)
        dtypes.append(out.dtype)
        return out.float()

    made.operation = noted
    return made, dtypes


# torch itself has no form of these that autocast calls.
NOT_IN_BFLOAT16 = {"bilinear", "gamma"}
# functorch rounds the scalar to bfloat16 before the product.
ROUNDED = {"a scalar parameter"}
# Autocast leaves these in bfloat16 on the CPU, and computes them in float32 on an accelerator.
FLOAT32_ON_ACCELERATORS = {*(name for name in OPERATIONS if name.startswith("layer norm")), "transformer layer"}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of RMSNorm, in the loop as well
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "of the CPU") for name in OPERATIONS),
        *((name, "of an accelerator") for name in OPERATIONS if name not in FLOAT32_ON_ACCELERATORS),
    ],
)
def test_autocast_casts_an_operation_as_in_the_loop(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, dtypes = noting(OPERATIONS[name])
    losses, gradients = [], []
    if name in NOT_IN_BFLOAT16:
        with pytest.raises(RuntimeError):
            make(LoopExecutor, model, 3, autocast=True).losses_and_grads([EXAMPLES])
        return
    for kind in (LoopExecutor, VmapExecutor):
        if kind is VmapExecutor and form == "of an accelerator":
            monkeypatch.setattr(batched, "is_cache_bound", lambda device: False)
        executor = make(kind, model, 3, autocast=True)
        losses.append(executor.losses_and_grads([EXAMPLES]))
        gradients.append(executor.replicas.grads)
        assert executor.name == "loop" or executor.reason == ""  # vmapped it was
    assert len(set(dtypes)) == 1
    # Far less than the 0.004 by which bfloat16 rounds: what is in float32 in the loop, is so in both.
    torch.testing.assert_close(*losses, rtol=0.01 if name in ROUNDED else 1e-4, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=0.02 if name in ROUNDED else 0.01, atol=1e-3)


@pytest.mark.parametrize("name", sorted(FLOAT32_ON_ACCELERATORS - {"transformer layer"}))
def test_autocast_normalizes_in_float32_on_an_accelerator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "is_cache_bound", lambda device: False)
    model, dtypes = noting(OPERATIONS[name])
    make(VmapExecutor, model, 3, autocast=True).losses_and_grads([EXAMPLES])
    assert {*dtypes} == {torch.float32}  # the call that measures memory, of one node, leaves no note


def test_every_operation_of_torch_that_draws_is_known_as_one() -> None:
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    seeded = {
        name
        for name in names
        if isinstance(packet := getattr(torch.ops.aten, name, None), torch._ops.OpOverloadPacket)
        and any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in packet.overloads())
    }
    kernels = {name for name in seeded if "cudnn" in name or "miopen" in name or "attention" in name or "fused" in name}
    unknown = {
        name
        for name in seeded - kernels - _DRAWS - _WHOLE
        if not name.startswith("_") and name.removesuffix("_") not in _DRAWS
        for place in (torch, Tensor, F)
        if callable(function := getattr(place, name, None)) and function not in RULES
    }
    assert len(seeded) > 40 and not unknown - {"dropout"}  # of torch


# The forms themselves


@pytest.mark.parametrize(("little", "name"), [(2**30, "vmap"), (100, "loop")])
def test_large_convolutions_run_node_by_node_on_an_accelerator(
    little: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched, "is_cache_bound", lambda device: False)
    monkeypatch.setattr(rules, "_LITTLE_WORK", little)
    images, labels = torch.randn(3, 2, 1, 8, 8), torch.zeros(3, 2, dtype=torch.long)
    ours = make(AutoExecutor, CNN((1, 8, 8), (4,), 5, seed=0), 3)
    theirs = make(LoopExecutor, CNN((1, 8, 8), (4,), 5, seed=0), 3)
    torch.testing.assert_close(ours.losses_and_grads([images, labels]), theirs.losses_and_grads([images, labels]))
    torch.testing.assert_close(ours.replicas.grads, theirs.replicas.grads, rtol=1e-4, atol=1e-6)
    assert ours.name == name and ("convolutions of this size" in ours.reason) == (name == "loop")


class Doing(nn.Module):
    """Does something with its activations that the page on one's own model speaks of."""

    def __init__(self, does: Callable[[Tensor, Any], Tensor], spectral: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        if spectral:
            nn.utils.parametrizations.spectral_norm(self.inner)
        self.does = does
        self.register_buffer("kept", torch.zeros(5, 4))

    def forward(self, batch: list[Tensor]) -> Tensor:
        h = self.does(self.inner(batch[0]).tanh(), self)
        return (h * h).mean()


def keeping(h: Tensor, m: Any) -> Tensor:
    m.last = h.detach()
    return h


def in_a_buffer(h: Tensor, m: Any) -> Tensor:
    m.kept = h.detach()
    return h


def set_by_mask(h: Tensor, m: Any) -> Tensor:
    h = h.clone()
    h[h > 0.1] = 0
    return h


def put(h: Tensor, m: Any) -> Tensor:
    return h.index_put((torch.tensor([0, 2]),), torch.zeros(4))


DOES: dict[str, tuple[Callable[[], Doing], str]] = {
    "self.last = h.detach()": (lambda: Doing(keeping), ""),
    "float(h)": (lambda: Doing(lambda h, m: setattr(m, "number", float(h.detach().sum())) or h), "number"),
    "h[mask]": (lambda: Doing(lambda h, m: h[h > 0.1]), "vmap"),
    "h[mask] = 0": (lambda: Doing(set_by_mask), "vmap"),
    "spectral_norm": (lambda: Doing(lambda h, m: h, spectral=True), "div.out"),
    "a buffer": (lambda: Doing(in_a_buffer), ""),
    "masked_fill": (lambda: Doing(lambda h, m: h.masked_fill(h > 0.1, 0)), ""),
    "where": (lambda: Doing(lambda h, m: torch.where(h > 0.1, 0, h)), ""),
    "indices": (lambda: Doing(lambda h, m: h[torch.tensor([1, 3])]), ""),
    "index_put": (lambda: Doing(put), ""),
}


@pytest.mark.parametrize("name", DOES)
def test_what_a_page_says_of_operations(name: str) -> None:
    """Which go to the loop; and all of them give what the loop does."""
    made, why = DOES[name]
    batch = [torch.rand(3, 5, 6, generator=torch.Generator().manual_seed(1)) - 0.5]
    torch.manual_seed(0)
    model = made()
    ours, theirs = make(AutoExecutor, copy.deepcopy(model), 3), make(LoopExecutor, copy.deepcopy(model), 3)
    with warned("continues with 'loop'", why) if why else nullcontext():
        losses = ours.losses_and_grads(batch)
    torch.testing.assert_close(losses, theirs.losses_and_grads(batch))
    torch.testing.assert_close(ours.replicas.grads, theirs.replicas.grads)
    torch.testing.assert_close(ours.replicas.buffers, theirs.replicas.buffers)
    assert ours.name == ("loop" if why else "vmap")


class Patches(nn.Module):
    """A transformer whose images are cut into patches by a convolution with large groups of work on any device."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(blocks))
        )
        self.head = nn.Linear(16, 5)

    def forward(self, batch: list[Tensor]) -> Tensor:
        tokens = self.blocks(self.cut(batch[0]).flatten(2).mT)
        return F.cross_entropy(self.head(tokens.mean(1)), batch[1])


@pytest.mark.parametrize(("blocks", "name"), [(2, "vmap"), (0, "loop")])
def test_one_convolution_does_not_send_a_transformer_to_the_loop(blocks: int, name: str) -> None:
    images, labels = torch.randn(3, 2, 3, 8, 8), torch.zeros(3, 2, dtype=torch.long)
    torch.manual_seed(0)
    model = Patches(blocks)
    ours, theirs = make(AutoExecutor, model, 3), make(LoopExecutor, model, 3)
    torch.testing.assert_close(ours.losses_and_grads([images, labels]), theirs.losses_and_grads([images, labels]))
    torch.testing.assert_close(ours.replicas.grads, theirs.replicas.grads, rtol=1e-4, atol=1e-6)
    assert ours.name == name and ("convolutions of this size" in ours.reason) == (name == "loop")
    # The cut: 4 patches of 16 · 3 · 4 · 4 products; a block: 4 tokens of 2 · 16 · 64.
    assert isinstance(ours, AutoExecutor)
    (proof,) = ours.decision.proofs.values()
    own = {key: work // 2 for key, work in proof.work.items() if work}  # of an example
    assert own["conv2d", "node by node"] == 4 * 16 * 48
    assert own["linear", "batched"] == blocks * 4 * 2 * 16 * 64 + 16 * 5


@settings(max_examples=20)
@given(
    nodes=st.integers(1, 4),
    groups=st.integers(1, 2),
    sizes=st.tuples(*(st.integers(*bounds) for bounds in [(1, 3)] * 3 + [(1, 2), (0, 2), (1, 2)])),
    with_bias=st.booleans(),
    inside=st.booleans(),
)
def test_a_convolution_in_groups_is_that_of_each_node(
    nodes: int,
    groups: int,
    sizes: tuple[int, ...],
    with_bias: bool,
    inside: bool,
) -> None:
    depth, next_depth, kernel, stride, padding, dilation = sizes
    stream = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=stream)

    x = random(5, nodes, groups * depth, 7, 6).transpose(0, 1) if inside else random(nodes, 5, groups * depth, 7, 6)
    weight, bias = random(nodes, groups * next_depth, depth, kernel, kernel), random(nodes, groups * next_depth)
    given_tensors = [t.requires_grad_() for t in (x, weight, bias)][: 3 if with_bias else 2]
    geometry = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
    tensors = [*given_tensors, None][:3]
    ours = batched.convolution(*tensors, *geometry)
    each = zip(*(itertools.repeat(t) if t is None else t for t in tensors), strict=False)
    theirs = torch.stack([torch.convolution(*own, *geometry) for own in each])
    torch.testing.assert_close(ours, theirs)
    direction = random(*ours.shape)
    our_grads, their_grads = (torch.autograd.grad(out, given_tensors, direction) for out in (ours, theirs))
    torch.testing.assert_close(our_grads, their_grads)


def test_gradients_of_linear_are_written_to_their_places() -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((3, 5, 6), (3, 4, 6), (3, 4)))
    places = torch.full_like(weight, torch.nan), torch.full_like(bias, torch.nan)
    grads = torch.autograd.grad(batched.linear(x, weight, bias, *places).sum(), (weight, bias))
    assert all(place.data_ptr() == grad.data_ptr() for place, grad in zip(places, grads, strict=True))
