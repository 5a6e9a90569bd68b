"""compile="trace": the operations of one step, called again, have the bits of the model's own Python, or say so."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from separate import TASKS, Scaled, Task, small_mlp, vectors
from test_lowering import OPERATIONS, make
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from vsim import Trainer
from vsim.cluster.randomness import NODE, generator
from vsim.cluster.replicas import Replicas
from vsim.engine import Settings, StaleTraceError, TraceError, TraceExecutor, VmapError, VmapExecutor, trace
from vsim.engine.objective import Objective
from vsim.models import GPT
from vsim.strategy import DeMoStrategy, DiLoCoStrategy, SimpleReduceStrategy

DRAWS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
captures_draws = pytest.mark.skipif(not DRAWS, reason="make_fx takes generators from torch 2.13 on")

SEEN: list[int] = []  # what a model does beside computing
SCALE = 1.0


# They draw, other than by dropout, where a step is captured.
NOT_CAPTURED = {
    "alpha dropout",
    "attention with dropout",
    "dropout of other names",
    "gamma",
    "multi-head attention",
    "noise",
    "pooling by chance",
    "transformer layer",
}


def trained(model: nn.Module, steps: int = 8, data: TensorDataset | None = None, **options: Any) -> Trainer:
    trainer = Trainer(model, data or vectors())
    arguments = {"executor": "vmap", "num_nodes": 3, "batch_size": 4, "compile": "trace", "progress": False, **options}
    strategy = arguments.pop("strategy", None) or DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=5)
    trainer.fit(strategy=strategy, max_steps=steps, **arguments)
    return trainer


def assert_same(one: Trainer, other: Trainer) -> None:
    assert one.strategy is not None and other.strategy is not None
    ours, theirs = one.strategy.cluster.replicas, other.strategy.cluster.replicas
    assert np.array_equal(one.history.node_losses, other.history.node_losses)
    assert torch.equal(ours.weights, theirs.weights)
    assert all(torch.equal(buffer, theirs.buffers[name]) for name, buffer in ours.buffers.items())


# The same bits as the model's own Python


MLP, CNN, TRANSFORMER = TASKS  # with dropout; the second with BatchNorm
EXACT = {"deterministic": True}
IN_PIECES = {"minibatch_size": 2, "chunk_size": 2}


@captures_draws
@pytest.mark.slow
@captures_draws
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_is_called_again_has_the_same_bits(name: str, exact: bool) -> None:
    ours, theirs = (make(kind, OPERATIONS[name], 3, exact=exact) for kind in (TraceExecutor, VmapExecutor))
    refused = pytest.raises(TraceError, match="cannot be traced") if name in NOT_CAPTURED else nullcontext()
    with refused:
        for seed in range(4):  # captured, compared, called, called
            x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(ours.losses_and_grads([x]), theirs.losses_and_grads([x.clone()]))
            assert torch.equal(ours.replicas.grads, theirs.replicas.grads)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        *((MLP, {}), (MLP, EXACT), (MLP, IN_PIECES)),  # batches of 4, 4 and 2: two shapes
        *((CNN, {"batch_size": 5}), (CNN, EXACT), (CNN, IN_PIECES)),
        *((TRANSFORMER, {"batch_size": 5}), (TRANSFORMER, {"batch_size": 5, **EXACT})),
    ],
)
def test_a_traced_run_is_bitwise_equal(task: Task, options: dict[str, Any]) -> None:
    traced, plain = (trained(task.model(), data=task.data(), compile=c, **options) for c in ("trace", False))
    assert traced.history.executor == "trace" and traced.history.executor_reason.startswith("traced in ")
    assert_same(traced, plain)


@captures_draws
@pytest.mark.parametrize("strategy", [SimpleReduceStrategy(lr=0.01, max_norm=1.0), DeMoStrategy(lr=0.01)])
@pytest.mark.parametrize("options", [{}, {"minibatch_size": 2}, {"autocast": True}], ids=str)
@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
def test_so_are_nodes_that_share_a_row(strategy: Any, options: dict[str, Any]) -> None:
    assert_same(*(trained(small_mlp(0.1), strategy=strategy, compile=c, **options) for c in ("trace", False)))


class InPlace(Scaled):
    """It changes its batch, and what it makes of it."""

    def forward(self, batch: list[Tensor]) -> Tensor:
        batch[0].mul_(0.5)
        return F.cross_entropy(self.layer(batch[0]).mul(2.0).add_(1.0).relu_(), batch[1])


class Decaying(Scaled):
    """It changes its weights."""

    def forward(self, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            self.layer.bias.mul_(0.9)
        return super().forward(batch)


class Running(Scaled):
    """A buffer that is assigned anew, one that is written to, and a gradient within."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mean", torch.zeros(5))

    def scaled(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        slope = torch.func.grad(lambda z: z.square().sum())(x)
        return self.norm(x) - self.mean + slope.detach()


class OwnTensor(Scaled):
    """A tensor that is no buffer, which a hook writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(5)

    def scaled(self, x: Tensor) -> Tensor:
        return self.factor * x


class Recurrent(Scaled):
    """An operation that keeps what its backward pass takes only where gradients are on."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 5, batch_first=True)

    def forward(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.recurrent(batch[0].view(-1, 4, 3))[0][:, -1], batch[1])


def test_operations_are_called_with_gradients_on_as_when_captured() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Recurrent()
    del model.layer
    assert_same(*(trained(model, compile=c) for c in ("trace", False)))


@pytest.mark.parametrize("make", [InPlace, Decaying, Running])
def test_what_a_step_writes_is_written(make: Callable[[], nn.Module]) -> None:
    assert_same(*(trained(make(), compile=c) for c in ("trace", False)))


def test_tensors_are_read_anew_at_every_step() -> None:
    def run(compile: Any) -> Trainer:
        trainer = Trainer(OwnTensor(), vectors())
        options = {"num_nodes": 2, "max_steps": 6, "executor": "vmap", "compile": compile}
        trainer.fit(strategy=DiLoCoStrategy(H=5), **options, callbacks=[lambda run: run.model.factor.mul_(0.9)])
        return trainer

    assert_same(run("trace"), run(False))


@captures_draws
def test_a_run_that_resumes_is_bitwise_equal(tmp_path: Path) -> None:
    whole = trained(small_mlp(0.2), steps=12)
    trained(small_mlp(0.2), steps=7, save_dir=tmp_path)
    assert_same(trained(small_mlp(0.2), steps=12, save_dir=tmp_path, resume=True), whole)


# Steps by hand


def parts_of(model: nn.Module, num_nodes: int = 3) -> tuple[Any, ...]:
    replicas = Replicas.of(model, num_nodes, torch.device("cpu"))
    return replicas, Objective(replicas.module), [generator(0, NODE, k) for k in range(num_nodes)]


def engine_of(model: nn.Module, num_nodes: int = 3, **settings: Any) -> TraceExecutor:
    return TraceExecutor(*parts_of(model, num_nodes), Settings(**settings))


def stacked_batch(seed: int, num_nodes: int = 3, size: int = 4) -> list[Tensor]:
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(num_nodes, size, 12, generator=stream)
    return [x, torch.randint(0, 5, (num_nodes, size), generator=stream)]


class Noting(Scaled):
    def scaled(self, x: Tensor) -> Tensor:
        SEEN.append(len(SEEN))
        return x


def test_the_models_python_runs_once_and_at_comparisons() -> None:
    engine = engine_of(Noting(), num_steps=250)
    ran, ready = [], []
    for step in range(1, 251):
        SEEN.clear()
        engine.losses_and_grads(stacked_batch(step))
        ran += [step] * len(SEEN)
        ready += [] if engine.is_ready else [step]
    assert ran == ready == [1, 2, 102, 202, 250]


@pytest.mark.parametrize("compile", ["trace", "auto"])
def test_operations_that_cannot_be_called_again_are_no_trace(compile: str) -> None:
    engine, plain = engine_of(Scaled(), compile=compile), VmapExecutor(*parts_of(Scaled()))
    for seed in range(3):
        if seed == 1:
            (found,) = engine._traces.values()
            found.call = fail
        if seed == 1 and compile == "trace":
            with pytest.raises(TraceError, match="cannot be traced: its operations cannot be called again: never"):
                engine.losses_and_grads(stacked_batch(seed))
            return
        losses = [e.losses_and_grads(stacked_batch(seed)) for e in (engine, plain)]
        assert torch.equal(*losses) and torch.equal(engine.replicas.grads, plain.replicas.grads)
    assert engine.name == "vmap" and engine.reason.endswith("called again: never")


def fail(*leaves: Tensor) -> Tensor:
    raise RuntimeError("never\nmore")


@captures_draws
def test_every_shape_has_a_trace_of_its_own_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_SHAPES", 2)
    engine, other = engine_of(small_mlp(0.2)), engine_of(small_mlp(0.2), compile="auto")
    other._refusal = "none"  # its own Python
    for seed in range(4):
        for size in (4, 3, 2):
            losses = [e.losses_and_grads(stacked_batch(seed, size=size)) for e in (engine, other)]
            assert torch.equal(*losses) and torch.equal(engine.replicas.grads, other.replicas.grads)
    assert len(engine._traces) == 2 and not other._traces


def test_a_batch_may_be_a_dict() -> None:
    class Named(Scaled):
        def forward(self, batch: dict[str, Any]) -> Tensor:
            return F.cross_entropy(self.layer(batch["x"][0]), batch["y"])

    plain, named = engine_of(Scaled()), engine_of(Named())
    for seed in range(4):
        x, y = stacked_batch(seed)
        assert torch.equal(plain.losses_and_grads([x, y]), named.losses_and_grads({"y": y, "x": (x, x)}))
    assert [t.compared_at for t in named._traces.values()] == [2]


def test_numbers_that_are_none_are_no_difference() -> None:
    engine = engine_of(small_mlp(0.0))
    engine.replicas.weights.fill_(torch.nan)
    for seed in range(4):
        assert engine.losses_and_grads(stacked_batch(seed)).isnan().all()


def test_whoever_counts_operations_sees_all() -> None:
    engine = engine_of(small_mlp(0.0))
    counts = []
    for seed in range(4):
        with FlopCounterMode(display=False) as counter:
            engine.losses_and_grads(stacked_batch(seed))
        counts.append(counter.get_total_flops())
        engine.losses_and_grads(stacked_batch(seed))
    assert len(set(counts)) == 1 and counts[0] > 0


def test_an_error_is_that_of_the_model() -> None:
    engine = engine_of(GPT(vocab_size=11, block_size=8, layers=1, heads=1, width=16, seed=0), 2)

    def batch(top: int) -> list[Tensor]:
        tokens = torch.arange(16).remainder(top).view(2, 1, 8)
        return [tokens, tokens.roll(1)]

    for _ in range(3):
        engine.losses_and_grads(batch(11))
    with pytest.raises(IndexError, match="out of range"):
        engine.losses_and_grads(batch(12))


@captures_draws
def test_draws_in_place_are_captured() -> None:
    class Deep(Scaled):
        def scaled(self, x: Tensor) -> Tensor:
            return x * x.new_empty(len(x), 1).bernoulli_(0.8).div_(0.8) + torch.empty(5).normal_()

    assert_same(trained(Deep()), trained(Deep(), compile=False))


# What a trace does not hold


class Annealed(Scaled):
    scale: ClassVar[float] = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return SCALE * x


@pytest.mark.parametrize(
    ("changes", "steps", "message"),
    [
        (150, 300, r"captured at step 1: the loss differs at step 202\..*the steps from 103 on.*compile=False"),
        (104, 120, r"differs at step 120\..*the steps from 103 on"),  # the last step is compared, too
    ],
)
def test_python_that_changes_is_found_and_the_steps_named(
    monkeypatch: pytest.MonkeyPatch, changes: int, steps: int, message: str
) -> None:
    def hook(step: int, _: float) -> None:
        if step == changes:
            monkeypatch.setitem(globals(), "SCALE", 0.5)

    trainer = Trainer(Annealed(), vectors())
    with pytest.raises(StaleTraceError, match=message):
        trainer.fit(
            strategy=DiLoCoStrategy(H=5),
            num_nodes=2,
            max_steps=steps,
            batch_size=5,
            compile="trace",
            executor="vmap",
            train_loss_hook=hook,
            progress=False,
        )


class Counting(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def scaled(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Random(Scaled):
    def scaled(self, x: Tensor) -> Tensor:
        return x * random.random()


class Noisy(Scaled):
    """Its noise comes from the node's stream, but not by an operation that takes a generator."""

    def scaled(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Reading(Scaled):
    """A branch on the weights, which works under vmap where the nodes share them."""

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.layer.weight.norm() > 1e-3 else 2 * x


REFUSED = [
    (Counting, {}, "the loss differs between step 1, called again, and its Python at step 2"),
    (Random, {}, "the loss differs"),
    (Noisy, {}, "the loss differs"),
    (Reading, {"strategy": SimpleReduceStrategy(lr=0.1)}, "trying to get value out of a tracing tensor"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_what_cannot_be_traced_is_refused(make: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    for executor in ("vmap", "auto"):
        with pytest.raises(TraceError, match=f"the model cannot be traced: .*{message}.*compile=False"):
            trained(make(), executor=executor, **options)


@pytest.mark.skipif(DRAWS, reason="make_fx takes generators here")
def test_draws_that_are_refused_are_said_to_need_a_newer_torch() -> None:
    with pytest.raises(
        TraceError, match=r"Generator.*as make_fx takes generators from torch 2\.13 on; with compile=False"
    ):
        trained(small_mlp(0.2))


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_auto_goes_on_without_a_trace(make: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    arguments = {"steps": 200, "executor": "auto", "num_nodes": 2, "batch_size": 5, **options}
    random.seed(3)
    traced = trained(make(), compile="auto", **arguments)
    assert traced.history.executor in ("vmap", "loop")
    if make is not Random:  # which draws another number for every executor that is tried
        assert_same(traced, trained(make(), compile=False, **arguments))


def test_a_model_that_vmap_cannot_take_is_refused() -> None:
    class Branching(Scaled):
        def scaled(self, x: Tensor) -> Tensor:
            return x * x[x > 0].mean()

    for executor, error in (("vmap", VmapError), ("auto", TraceError)):
        with pytest.raises(error, match=r"cannot be vectorised over nodes.*dynamic shape"):
            trained(Branching(), executor=executor)


def test_a_change_between_two_shapes_is_no_reason_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second shape is compared first after the change, when the first was called with the old number."""
    engine = engine_of(Annealed(), compile="auto")
    for step, size in enumerate((4, 4, 4, 3, 4, 3), 1):
        if step == 5:
            monkeypatch.setitem(globals(), "SCALE", 0.5)
        if step == 6:
            with pytest.raises(StaleTraceError, match=r"at step 4: the loss differs at step 6\..*the steps from 3 on"):
                engine.losses_and_grads(stacked_batch(step, size=size))
        else:
            engine.losses_and_grads(stacked_batch(step, size=size))
