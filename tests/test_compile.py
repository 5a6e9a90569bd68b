"""`compile=True`: losses, gradients and kernels are compiled, and the training is the same but for rounding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused, warned
from reference_cluster import TASKS, Task, small_cnn, small_gpt, small_mlp
from test_executor import batch_of
from test_lowering import make
from torch import Tensor, nn
from torch.nn import functional as F
from vsim_kernels import COMPILING_PAYS, compiled, scatter_mean

import vsim.models
from vsim import Trainer
from vsim.cluster.randomness import NODE, generator
from vsim.cluster.replicas import Replicas
from vsim.data import digits
from vsim.engine import CompiledExecutor, CompileError, Executor, LoopExecutor, Settings, VmapExecutor
from vsim.engine.memory import activation_bytes
from vsim.engine.objective import Objective
from vsim.models import MLP
from vsim.strategy import (
    QSGD,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    Strategy,
    compress,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
SGD = OptimSpec("sgd", lr=0.1)


def trained(model: nn.Module, strategy: Strategy | None = None, **options: Any) -> Trainer:
    trainer, options = Trainer(model, digits()[0]), {"num_nodes": 3, "max_steps": 8, "progress": False, **options}
    trainer.fit(strategy=strategy or Strategy(inner_optim=SGD), **options)
    return trainer


def test_only_what_pays_is_compiled() -> None:
    assert compiled(scatter_mean) is scatter_mean
    assert all(compiled(kernel) is not kernel and compiled(kernel) is compiled(kernel) for kernel in COMPILING_PAYS)


def test_it_is_refused_where_bits_are_promised() -> None:
    with refused(ValueError, "deterministic=True", "compile=True"):
        trained(MLP(), compile=True, deterministic=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
@pytest.mark.parametrize(
    "strategy",
    [
        DeMoStrategy(lr=1e-3),
        CommunicateOptimizeStrategy([SimpleReduceStrategy(average=compress(QSGD()))], inner_optim=SGD),
    ],
    ids=["DeMo", "QSGD"],
)
def test_compiled_kernels_train_alike(strategy: Strategy) -> None:
    eager = trained(MLP(hidden=(32,), seed=0), strategy).history.node_losses
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    fast = trained(MLP(hidden=(32,), seed=0), strategy, compile=True).history.node_losses
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled, and used
    assert not torch._dynamo.utils.counters["graph_break"]
    np.testing.assert_allclose(fast, eager, rtol=2e-3)


# Losses and gradients; the tests of executors have more of it


MODELS = {"mlp": small_mlp, "cnn": small_cnn, "gpt": small_gpt}


def assert_alike(ours: Executor, theirs: Executor, batch: list[Tensor], size: int | None = None) -> None:
    """Equal losses, gradients and buffers but for rounding."""
    torch.testing.assert_close(ours.losses_and_grads(batch, size), theirs.losses_and_grads(batch, size))
    torch.testing.assert_close(ours.replicas.grads, theirs.replicas.grads, rtol=1e-4, atol=1e-6)
    for name, buffer in ours.replicas.buffers.items():
        torch.testing.assert_close(buffer, theirs.replicas.buffers[name])


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_compiled_step_is_that_of_the_loop(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (make(kind, MODELS[task.name](0.0), 3) for kind in (CompiledExecutor, LoopExecutor))
    # Indices are guarded as on a GPU.
    monkeypatch.setattr("vsim.engine.objective.is_off_cpu", lambda batch: task.name != "cnn")
    assert_alike(ours, theirs, batch_of(task))


@pytest.mark.slow
def test_pieces_of_nodes_and_of_batches_add_up() -> None:
    def made(kind: type[Executor], **options: int) -> Executor:
        r = Replicas.of(small_mlp(0.0), 5, torch.device("cpu"))
        return kind(r, Objective(r.module), [generator(0, NODE, k) for k in range(5)], Settings(**options))

    ours, theirs = made(CompiledExecutor, chunk_size=2), made(VmapExecutor)
    assert isinstance(ours, CompiledExecutor) and len(ours.pieces) == 3
    for size in (None, 4, None):  # 5 examples in 4 and 1; then from zero again
        assert_alike(ours, theirs, batch_of(TASKS[0], 5, 5), size)


@pytest.mark.slow
def test_pieces_follow_from_what_a_batch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (make(kind, small_cnn(0.0), 6) for kind in (CompiledExecutor, VmapExecutor))  # with BatchNorm
    assert isinstance(ours, CompiledExecutor) and len(ours.pieces) == 1
    kept = {size: activation_bytes(ours, [t[0] for t in batch_of(TASKS[1], 6, size)]) for size in (4, 2)}
    assert kept[4] > 1.5 * kept[2]
    monkeypatch.setattr("vsim.engine.compiled.ACTIVATIONS_AT_ONCE", int(2.5 * kept[4]))
    for size, pieces in ((4, 3), (2, 2), (4, 3)):  # of 2 nodes, and of 3: 4 would fit, and 6 is no multiple of it
        assert_alike(ours, theirs, batch_of(TASKS[1], 6, size))
        assert len(ours.pieces) == pieces


# On CUDA --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_cuda_a_graph_of_launches_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Here PyTorch captures none, and says so; what a CUDA graph needs is there nevertheless, and changes no number.
    theirs, batch = make(VmapExecutor, small_cnn(0.0), 4), batch_of(TASKS[1], 4, 4)  # with BatchNorm
    monkeypatch.setattr(CompiledExecutor, "captures", True)
    ours = make(CompiledExecutor, small_cnn(0.0), 4)
    assert isinstance(ours, CompiledExecutor)
    torch._dynamo.utils.counters.clear()
    for size in (None, 2, None):  # minibatches add to the gradients
        assert_alike(ours, theirs, batch, size)
    # A graph for whole batches, and one for minibatches.
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 2
    weights, grads = ours._operands[0]
    stay = [*weights.values(), *grads.values(), *ours.pieces[0].buffers.values()]
    assert len(stay) > 10 and all(hasattr(t, "_dynamo_static_input_type") for t in stay)


@pytest.mark.parametrize("share_of_the_graph", [1.0, 1.5])
def test_what_cuda_compiles_has_safe_options_and_is_proved_when_it_is_replayed(
    share_of_the_graph: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}
    proved: list[int] = []
    prove = CompiledExecutor.prove

    def uncompiled(function: Any, **given: Any) -> Any:
        options.update(given["options"])

        def replayed(*args: Any) -> Any:
            return function(*args) * (share_of_the_graph if len(proved) > 1 else 1)  # a replay that is wrong

        return replayed

    def noted(executor: CompiledExecutor, *given: Any) -> Any:
        proved.append(executor.settings.position.step)
        return prove(executor, *given)

    monkeypatch.setattr(torch, "compile", uncompiled)
    monkeypatch.setattr(CompiledExecutor, "captures", True)
    monkeypatch.setattr(CompiledExecutor, "prove", noted)
    wrong = share_of_the_graph != 1.0
    with warned("'vmap'", "losses", "differ") if wrong else nullcontext():
        history = trained(MLP(hidden=(8,), dropout=0.5, seed=0), max_steps=12, compile=True).history
    assert history.executor == ("vmap" if wrong else "compiled") and proved == [1, 9]
    assert options["fallback_random"] and options["triton.cudagraphs"]
    assert options["triton.mix_order_reduction"] is False and "align_random_eager" not in options
    assert {*options} - {"guard_filter_fn"} <= {*torch._inductor.list_options()}


# Autocast -------------------------------------------------------------------------------------------------------------

DTYPES: list[torch.dtype] = []  # of the results in `Cast`; an attribute of the model's would be each node's


class Cast(nn.Module):
    """Operations of every kind that autocast knows and functorch takes apart; `DTYPES` gets their results' dtypes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.spread = nn.Linear(12, 32)
            self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm(8), nn.RMSNorm(8)])
            self.convolutions = nn.ModuleList([nn.Conv1d(4, 4, 3, padding=1), nn.ConvTranspose1d(4, 4, 3, padding=1)])
            self.rest = nn.ModuleList([nn.PReLU(4), nn.Linear(32, 5)])

    def forward(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        hidden = self.spread(x).unflatten(1, (4, 8))
        for layer in (*self.norms, *self.convolutions, self.rest[0]):
            hidden = layer(hidden)
            DTYPES.append(hidden.dtype)
        out = torch.addmm(self.rest[1].bias, hidden.flatten(1), self.rest[1].weight.T)
        losses = F.cross_entropy(out, y), F.smooth_l1_loss(out, out.detach().roll(1)), F.nll_loss(out, y)
        DTYPES.extend(value.dtype for value in (out, *losses))
        return torch.stack(losses).mean()


class CastInRegion(Cast):
    """Turns autocast on itself."""

    def forward(self, batch: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of RMSNorm, in the loop as well
@pytest.mark.parametrize("region", [False, True])
def test_autocast_casts_what_functorch_takes_apart(region: bool) -> None:
    model = CastInRegion() if region else Cast()
    losses, gradients, batch = [], [], batch_of(TASKS[0])
    for kind in (CompiledExecutor, LoopExecutor):
        DTYPES.clear()
        executor = make(kind, model, autocast=not region)
        if isinstance(executor, CompiledExecutor):
            executor.prove(batch)
        losses.append(executor.losses_and_grads(batch))
        gradients.append(executor.replicas.grads)
        expected = len(DTYPES) // 11 * ([torch.bfloat16] * 8 + [torch.float32] * 3)
        assert len(DTYPES) >= 11 and expected == DTYPES  # the proof leaves no trace in a global
    torch.testing.assert_close(*losses, rtol=2e-3, atol=0)
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[1].norm()


# The proof ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gpt_with_dropout_is_proved_in_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, batch = make(CompiledExecutor, small_gpt(0.3)), batch_of(TASKS[2])
    assert isinstance(executor, CompiledExecutor)
    before, state = executor.replicas.weights.clone(), executor.generators[0].get_state()
    proof = executor.prove(batch)
    assert proof.nodes == [0, 2] and 0 < proof.gradients < 1e-3 and proof.losses < 1e-5
    assert torch.equal(executor.replicas.weights, before) and torch.equal(executor.generators[0].get_state(), state)
    losses = executor.losses_and_grads(batch)
    assert not torch.allclose(losses, make(LoopExecutor, small_gpt(0.3)).losses_and_grads(batch), rtol=1e-4)  # it draws
    graph = executor.compiled
    monkeypatch.setattr(executor, "compiled", lambda *args: 1.01 * graph(*args))
    with refused(CompileError, "cannot be compiled", "the losses"):
        executor.prove(batch)


def test_a_wrong_graph_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Any, **options: Any) -> Any:
        def graph(weights: Any, grads: Any, *rest: Any) -> Tensor:
            losses: Tensor = function(weights, grads, *rest)
            grads["layers.0.bias"].mul_(1.5)
            return losses

        return graph

    model = MLP(hidden=(8,), dropout=0.3, seed=0)
    right = trained(model, max_steps=4).history
    monkeypatch.setattr(torch, "compile", wrong)
    with warned("with 'vmap'", "cannot be compiled", "the gradient of layers.0.bias"):
        history = trained(model, max_steps=4, compile=True).history
    assert history.executor == "vmap" and history.node_losses.tolist() == right.node_losses.tolist()


# Models that change, and what they say --------------------------------------------------------------------------------


class Changing(MLP):
    factor = 1.0

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(batch) * self.factor * FACTOR


FACTOR = 1.0


@pytest.mark.slow
def test_batches_may_have_more_shapes_than_torch_compiles_by_itself() -> None:
    limit = torch._dynamo.config.recompile_limit
    executor = make(CompiledExecutor, nn.Linear(12, 5), loss_fn=F.cross_entropy)
    for examples in range(1, 2 + limit):  # one shape more than torch compiles
        assert len(executor.losses_and_grads(batch_of(TASKS[0], size=examples))) == 3
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.slow
def test_a_model_that_is_another_at_every_step_is_not_compiled_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(step: int, loss: float) -> None:
        monkeypatch.setattr(Changing, "factor", 1 + step / 10)

    with warned("with 'vmap'", "9 times", "factor", 1.8):
        restless = trained(Changing(hidden=(8,), seed=0), max_steps=12, compile=True, train_loss_hook=change).history
    assert restless.executor == "vmap" and len(restless) == 13
    change(0, 0.0)
    assert trained(Changing(hidden=(8,), seed=0), max_steps=2, compile=True).history.executor == "compiled"


@pytest.mark.slow
def test_what_a_user_changes_between_steps_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, batch = make(CompiledExecutor, Changing(12, (8,), 5)), batch_of(TASKS[0])
    model, expected = executor.objective.model, executor.losses_and_grads(batch).clone()
    cross_entropy = vsim.models._cross_entropy
    changes: list[Callable[[], object]] = [
        lambda: setattr(model, "factor", 3.0),
        lambda: monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0),
        lambda: monkeypatch.setattr(vsim.models, "_cross_entropy", lambda *args: 3 * cross_entropy(*args)),
        lambda: model.register_forward_hook(lambda model, inputs, loss: 3 * loss),
    ]
    for change in changes:
        change()
        expected = 3 * expected
        torch.testing.assert_close(executor.losses_and_grads(batch), expected)


@torch.library.custom_op("vsim_tests::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.slow
def test_an_operation_that_cannot_be_compiled_is_named_with_its_reason() -> None:
    class Model(MLP):
        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return super().forward(batch) + opaque(batch[0]).sum()

    with refused(CompileError, "be compiled: vsim_tests.opaque", "no fake impl registered"):
        make(CompiledExecutor, Model(12, (8,), 5)).losses_and_grads(batch_of(TASKS[0]))


@pytest.mark.slow
def test_what_watches_a_step_sees_its_operations() -> None:
    options: dict[str, Any] = {"compile": True, "batch_size": 16}
    trainer = trained(MLP(hidden=(32,), seed=0), max_steps=2, max_memory_usage=0.5, **options)
    assert trainer.history.executor == "compiled" and trainer.history.minibatch_size is None  # the whole batch fits
    explanation = trainer.explain(strategy=Strategy(), num_nodes=3, max_steps=4, **options)
    assert explanation.executor == "compiled"
    # Three nodes, 16 examples, two layers: 2 · in · out forward, and twice that backward but for the input's gradient.
    assert explanation.gradient_flops == 3 * 16 * 2 * (2 * 64 * 32 + 3 * 32 * 10)
