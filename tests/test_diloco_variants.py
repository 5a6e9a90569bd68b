"""Strategies after DiLoCo's: eager and delayed DiLoCo, NoLoCo, SparseLoCo, MuLoCo, EDiT and GPA."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import test_strategies_common as common
import torch
from cut_runs import fit, trainer_of, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import small_gpt, small_mlp, tokens, vectors
from reproductions import formulas
from strategies_by_hand import Parameters, driven, normal, size, started
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from vsim import Trainer
from vsim.cluster.optimizers import torch_optimizers
from vsim.network import Compute
from vsim.strategy import (
    DeMoStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    EDiTStrategy,
    GPAStrategy,
    MuLoCoStrategy,
    NoLoCoStrategy,
    OptimSpec,
    PostLocal,
    Seconds,
    SimpleReduceStrategy,
    SparseLoCoStrategy,
    Strategy,
    TopK,
    clip,
    compress,
    edit,
    mean,
)

SGD = OptimSpec("sgd", lr=0.1)
UNIT = OptimSpec("sgd", lr=1.0)


# Eager and delayed ----------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(H=st.integers(1, 4), num_nodes=st.integers(1, 4), eager=st.booleans())
def test_every_round_of_eager_diloco_has_the_update_rule(H: int, num_nodes: int, eager: bool) -> None:
    model, gradients = Parameters((3,), dtype=torch.float64), normal(9, num_nodes, 3, dtype=torch.float64)
    outer = OptimSpec("sgd", lr=0.5, momentum=0.9, nesterov=True)
    run = driven(EagerDiLoCoStrategy(inner_optim=SGD, outer_optim=outer, H=H, eager=eager), model, gradients)
    formula = formulas.Eager(0.1, H, outer_lr=0.5, eager=eager)
    state = formula.start(np.tile(model.p0.detach().numpy(), (num_nodes, 1)))
    for t, given_ in enumerate(gradients.numpy(), start=1):
        formula.step(t, state, given_)
    np.testing.assert_allclose(run.cluster.weights.numpy(), state["θ"], rtol=1e-12)
    assert [(e.step, e.due) for e in run.ledger] == [(step, step + H) for step in range(H, 10, H)]


def test_an_outer_optimizer_that_mixes_is_refused() -> None:
    with pytest.raises(ValueError, match="must be elementwise; Muon is not"):
        EagerDiLoCoStrategy(outer_optim="muon")


# NoLoCo ---------------------------------------------------------------------------------------------------------------


def partners(num_nodes: int, shared: torch.Generator) -> list[int]:
    """Return each node's partner in a round; itself if it has none."""
    order = torch.randperm(num_nodes, generator=shared).tolist()
    met = list(range(num_nodes))
    for one, other in zip(order[::2], order[1::2], strict=False):
        met[one], met[other] = other, one
    return met


@settings(max_examples=20)
@given(
    H=st.integers(1, 3), num_nodes=st.integers(1, 6), beta=st.floats(0.1, 1.0), gamma=st.none() | st.floats(0.0, 1.0)
)
def test_every_round_of_noloco_has_the_update_rule(H: int, num_nodes: int, beta: float, gamma: float | None) -> None:
    model, gradients = Parameters((3,), dtype=torch.float64), normal(8, num_nodes, 3, dtype=torch.float64)
    run = driven(NoLoCoStrategy(inner_optim=SGD, H=H, beta=beta, gamma=gamma), model, gradients)
    shared = torch.Generator().manual_seed(5)  # that of a driven run
    theta = phi = np.tile(model.p0.detach().numpy(), (num_nodes, 1))
    m, pull = 0 * phi, beta if gamma is None else gamma
    for t, gradient in enumerate(gradients.numpy(), start=1):
        theta = theta - 0.1 * gradient
        if t % H == 0:
            met = partners(num_nodes, shared)
            moved = theta - phi
            m = 0.5 * m + beta * (moved + moved[met]) / 2 + pull * ((phi + phi[met]) / 2 - phi)
            theta = phi = phi + m
    np.testing.assert_allclose(run.cluster.weights.numpy(), theta, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_pairs_pay_for_both_messages_and_wait_for_one(num_nodes: int) -> None:
    # The distances of a round are waited for; outer weights are due at the next, where those meet who sent them.
    run = driven(NoLoCoStrategy(inner_optim=SGD, H=2), Parameters((3, 2)), normal(4, num_nodes, 6))
    shared = torch.Generator().manual_seed(5)
    now, then, after = ({(k, j) for k, j in enumerate(partners(num_nodes, shared)) if k != j} for _ in range(3))
    sent = [(2, 2, now), (2, 4, then), (4, 4, then), (4, 6, after)] if num_nodes > 1 else []
    assert [(e.step, e.due, {*e.groups}) for e in run.ledger] == sent
    paid = [6 * 4 * sum(k in {src for src, _ in pairs} for _, _, pairs in sent) for k in range(num_nodes)]
    assert run.ledger.node_payload_bytes.tolist() == paid


# SparseLoCo -----------------------------------------------------------------------------------------------------------


def test_what_travels_are_the_bytes_that_are_billed(monkeypatch: pytest.MonkeyPatch) -> None:
    # But for the codes of the values, which travel as a byte each: 12-bit indices of 64 values are 96 bytes a tile.
    model = Parameters((128, 64), (100,))
    run = started(SparseLoCoStrategy(H=1), model, 2)
    sent: list[Tensor] = []
    gather = run.cluster.collectives._all_gather
    monkeypatch.setattr(run.cluster.collectives, "_all_gather", lambda rows: sent.append(rows) or gather(rows))
    run.step(normal(2, size(model)))
    index, codes, table = sent
    # (100,) is two tiles of 50, with 6 bits an index.
    assert index.dtype == torch.uint8 and index.shape == (2, 2 * 96 + 75)
    assert codes.dtype == torch.uint8 and codes.numel() == 2 * (2 * 64 + 100) and table.shape == (2, 1, 4)
    (event,) = run.ledger
    assert event.payload_bytes == index[0].numel() + codes[0].numel() * 2 / 8 + 4 * table[0].numel()


@pytest.mark.parametrize("strategy", [SparseLoCoStrategy(H=2), DeMoStrategy()], ids=lambda s: type(s).__name__)
@pytest.mark.filterwarnings("ignore:DCTTopK|TileTopK")
def test_a_parameter_without_entries_changes_nothing(strategy: Strategy) -> None:
    models, gradients = (Parameters((4, 3), (10,)), Parameters((4, 3), (10,), (3, 0), (0,))), normal(4, 2, 22)
    without, with_it = (driven(strategy, model, gradients) for model in models)
    torch.testing.assert_close(with_it.cluster.weights, without.cluster.weights)
    assert [*with_it.ledger] == [*without.ledger]


# MuLoCo ---------------------------------------------------------------------------------------------------------------

PLAIN = OptimSpec("muon", adjust_lr_fn="match_rms_adamw", weight_decay=0.0, rest=OptimSpec("adamw", weight_decay=0.0))


class Constant(nn.Module):
    """Its gradient is always diag(3, 3) for the matrix and (2, −2) for the vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(2, 2))
        self.vector = nn.Parameter(torch.zeros(2))

    def forward(self, batch: list[Tensor]) -> Tensor:
        slopes = torch.tensor([2.0, -2.0])
        return 3 * self.matrix.trace() + (slopes * self.vector).sum() + 0 * batch[0].mean()


@pytest.mark.parametrize(("num_nodes", "lr", "momentum"), [(1, 0.7, 0.6), (2, 0.8, 0.9)])
def test_two_rounds_of_muloco_by_hand(num_nodes: int, lr: float, momentum: float) -> None:
    # Muon. A constant gradient has momentum in its own direction, so that every step is along the factor of diag(1, 1),
    # which is diag(s, s): s = 1/√2 after division by the norm, then five times s ← a·s + b·s³ + c·s⁵. The step is
    # 0.01 · 0.2·√2 · s. AdamW steps by 0.01 · sign. After H = 3 steps: matrix −Δ = −3 · 0.01 · 0.2·√2 · s on the
    # diagonal, vector −Δ = −0.03, +0.03. Outer momentum: b₁ = Δ, the move lr·(Δ + μ·b₁); b₂ = μ·Δ + Δ, the move
    # lr·(Δ + μ·b₂): together lr·Δ·(2 + 2μ + μ²).
    s = 1 / math.sqrt(2)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    total = lr * (2 + 2 * momentum + momentum**2)
    trainer = Trainer(Constant(), TensorDataset(torch.zeros(12, 1)))
    strategy = MuLoCoStrategy(H=3, inner_optim=PLAIN, lr=0.01)
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=6, batch_size=2, progress=False)
    matrix, vector = weights(trainer)[0].split([4, 2])
    moved = -total * 0.03 * 0.2 * math.sqrt(2) * s
    torch.testing.assert_close(matrix.view(2, 2), torch.diag(torch.full((2,), moved)), rtol=0.03, atol=1e-4)  # bfloat16
    torch.testing.assert_close(vector, total * 0.03 * torch.tensor([-1.0, 1.0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("average", ["mean", compress(TopK(0.1), error_feedback=0.9)], ids=str)
def test_muloco_is_diloco_with_that_optimizer_inside(average: Any) -> None:
    inner, outer = OptimSpec("muon", lr=0.02, rest="sgd"), OptimSpec("sgd", lr=0.8, momentum=0.9, nesterov=True)
    ours, theirs = (
        fit(strategy, trainer_of(small_mlp, vectors), max_steps=8)
        for strategy in (
            MuLoCoStrategy(H=3, inner_optim=inner, average=average),
            DiLoCoStrategy(H=3, inner_optim=inner, outer_optim=outer, average=average),
        )
    )
    torch.testing.assert_close(weights(ours), weights(theirs))


def test_muloco_s_optimizers() -> None:
    trainer = fit(MuLoCoStrategy(lr=5e-3), trainer_of(small_gpt, tokens), max_steps=4)
    assert trainer.strategy is not None
    muon, adamw = torch_optimizers(trainer.strategy.optim)
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert muon.param_groups[0]["lr"] == adamw.param_groups[0]["lr"] == 5e-3
    assert muon.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw" and adamw.param_groups[0]["betas"] == (0.9, 0.95)
    (outer,) = MuLoCoStrategy(outer_lr=0.5).parts
    assert isinstance(outer, MuLoCoStrategy)
    specs = [spec.kwargs for spec in (outer.outer_optim_spec, outer.spec_of_one_node)]
    assert specs == [{"lr": 0.5, "momentum": momentum, "nesterov": True} for momentum in (0.9, 0.6)]


# EDiT: weights, the gate and the limit by hand, and A-EDiT's clock ----------------------------------------------------


def scalar(*gradients: tuple[float, ...], **options: Any) -> list[float]:
    """φ after each sync, of one weight from 0 whose nodes have these gradients, with all rates 1 and H = 1."""
    net = Parameters((1,))
    nn.init.zeros_(net.p0)
    strategy = EDiTStrategy(
        inner_optim=UNIT, outer_optim=UNIT, H=1, **{"outer_max_norm": None, "gate_after": 4, **options}
    )
    course = started(strategy, net, len(gradients[0]), deterministic=True, max_steps=len(gradients))
    return [float(course.step(torch.tensor(given)[:, None])[0]) for given in gradients]


PAST = [(1.0, 1.0), (1.1, 1.1), (1.0, 1.0), (1.1, 1.1)]  # norms of mean 1.05, standard deviation 0.05


@pytest.mark.parametrize(
    ("last", "options", "moved"),
    [
        ([(1.0, 1.19)], {}, None),  # z = 2.8
        ([(1.0, 1.19)], {"average": edit(2.0)}, None),
        ([(1.0, 1.21)], {}, 1.0),  # z = 3.2
        ([(1.0, 1.5)], {"gate_after": 5}, None),
        ([(1.0, 0.01)], {}, None),  # too near is no fault
        ([(1.0, math.inf)], {}, 1.0),
        ([(math.nan, 1.1)], {}, 1.1),
        ([(100.0, 200.0)], {}, 0.0),
        ([(1.0, 100.0), (1.0, 1.5)], {}, 1.0),  # were 100 in the average, 1.5 would be no anomaly after it
    ],
)
def test_an_anomalous_node_is_left_out_and_others_count_less_the_further_they_moved(
    last: list[tuple[float, float]], options: dict[str, Any], moved: float | None
) -> None:
    *_, before, after = scalar(*PAST, *last, **options)
    if moved is None:
        norms = torch.tensor(last[-1])
        moved = float(torch.softmax(-norms / (2 if "average" in options else 1), 0) @ norms)
    assert before - after == pytest.approx(moved, abs=1e-5)


def test_a_tensor_stays_where_all_are_anomalous_whatever_the_momentum() -> None:
    net, gradients = Parameters((3,), (2,)), torch.ones(6, 2, 5)
    gradients[::2] += 0.1
    gradients[5, :, :3] = 50.0
    outer = OptimSpec("sgd", lr=0.5, momentum=0.9, nesterov=True)
    course = driven(EDiTStrategy(inner_optim=UNIT, outer_optim=outer, H=1, gate_after=4), net, gradients[:5])
    before = course.cluster.weights[0].clone()
    moved = before - course.step(gradients[5])[0]
    assert torch.equal(moved[:3], torch.zeros(3)) and bool((moved[3:] > 0.5).all())


def test_the_sum_is_limited_and_without_gate_and_limit_it_is_diloco_with_its_average() -> None:
    net, gradients = Parameters((3,), (4,)), normal(1, 3, 7)
    (free, limited, diloco) = (
        driven(strategy, net, gradients).cluster.weights[0]
        for strategy in (
            EDiTStrategy(inner_optim=UNIT, outer_optim=UNIT, H=1, outer_max_norm=None),
            EDiTStrategy(inner_optim=UNIT, outer_optim=UNIT, H=1, outer_max_norm=0.1),
            DiLoCoStrategy(inner_optim=UNIT, outer_optim=UNIT, H=1, average=edit()),
        )
    )
    torch.testing.assert_close(free, diloco)
    start = nn.utils.parameters_to_vector(net.parameters()).detach()
    assert float((limited - start).norm()) == pytest.approx(0.1, rel=1e-4)
    torch.testing.assert_close((limited - start) / 0.1, (free - start) / (free - start).norm(), rtol=1e-4, atol=1e-5)


def test_edit_by_the_clock_and_after_averages_of_gradients() -> None:
    # The slower node takes a step in 2 s: two of them fit in 5 s.
    trainer = common.run(EDiTStrategy(H=Seconds(5)), num_nodes=2, max_steps=6, compute=Compute(1.0, speeds=[1, 0.5]))
    assert sorted({e.step for e in trainer.ledger}) == [2, 4, 6]
    ledger = common.run(EDiTStrategy(H=PostLocal(2, then=2))).ledger
    sent = [(e.step, e.label) for e in ledger if "norms" not in e.label]
    assert sent == [(1, "gradients"), (2, "gradients"), (4, "outer gradient"), (6, "outer gradient")]


def test_edit_has_no_other_averages() -> None:
    for average in ("median", mean(), edit() | clip(1.0)):
        with pytest.raises(TypeError, match=r"average must be edit\(temperature\)"):
            EDiTStrategy(average=average)


# GPA ------------------------------------------------------------------------------------------------------------------


ADAMW = OptimSpec("adamw", lr=1e-2, weight_decay=0.1)


def test_gpa_of_one_node_is_a_plain_loop() -> None:
    strategy = GPAStrategy(inner_optim=ADAMW, mu_x=0.9, mu_y=0.7, max_norm=0.5)
    trainer = common.run(strategy, num_nodes=1, data=common.examples(), executor="auto", deterministic=True)
    z, x, y = (copy.deepcopy(common.model()) for _ in range(3))
    optimizer = torch.optim.AdamW(z.parameters(), lr=1e-2, weight_decay=0.1)
    sampler = DistributedSampler(common.examples(), num_replicas=1, rank=0, seed=42)
    for batch in itertools.islice(DataLoader(common.examples(), batch_size=8, sampler=sampler), common.STEPS):
        y.zero_grad()
        y(batch).backward()
        nn.utils.clip_grad_norm_(y.parameters(), 0.5)
        for pz, py in zip(z.parameters(), y.parameters(), strict=True):
            pz.grad = py.grad
        optimizer.step()
        with torch.no_grad():
            for px, py, pz in zip(x.parameters(), y.parameters(), z.parameters(), strict=True):
                px.copy_(0.9 * px + 0.1 * pz)
                py.copy_(0.7 * px + 0.3 * pz)
    assert trainer.strategy is not None
    for held, module in ((common.weights(trainer)[0], y), (trainer.strategy.model_weights(), x)):
        torch.testing.assert_close(held, nn.utils.parameters_to_vector(module.parameters()).detach())


def test_gpa_without_an_average_is_allreduce() -> None:
    gpa, allreduce = (
        driven(strategy, Parameters((3,), (4, 2)), normal(5, 3, 11)).cluster.weights
        for strategy in (GPAStrategy(inner_optim=ADAMW, mu_x=0.0, mu_y=0.7), SimpleReduceStrategy(inner_optim=ADAMW))
    )
    torch.testing.assert_close(gpa, allreduce)


def test_what_gpa_evaluates_is_the_average() -> None:
    trainer = Trainer(common.model(), common.examples(), common.examples(16, seed=9))
    trainer.fit(
        strategy=GPAStrategy(inner_optim=ADAMW, mu_x=0.9),
        num_nodes=2,
        max_steps=common.STEPS,
        val_size=16,
        progress=False,
    )
    assert trainer.strategy is not None
    model = common.model()
    nn.utils.vector_to_parameters(trainer.strategy.model_weights(), model.parameters())
    with torch.no_grad():
        loss = model(common.examples(16, seed=9).tensors).item()
    assert trainer.history.last("global_loss") == pytest.approx(loss) != trainer.history.last("average_loss")
