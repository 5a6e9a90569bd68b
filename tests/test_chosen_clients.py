"""Which clients train in a round, and for how many steps: partial work, selection by size and by loss."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_runs import assert_same_record
from errors import refused
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim import Compute, Deadline, DropSlowest, OverCommit, Partial, Sample, Trainer
from vsim.cluster.plan import Plan, Round, Segment
from vsim.strategy import (
    DPFedAvgStrategy,
    FedAvgStrategy,
    FedPerStrategy,
    FedProxStrategy,
    OptimSpec,
    SimpleReduceStrategy,
)

SGD = OptimSpec("sgd", lr=0.1)


class Distance(nn.Module):
    """The loss 1/2 (w − c)² of a batch of c; its gradient is w − c."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return ((batch[0] - self.w) ** 2).mean() / 2


CENTRES = [1.0, -2.0, 4.0]


def centred(client: int, num_clients: int, train: bool) -> TensorDataset:
    return TensorDataset(torch.full((4, 1), CENTRES[client], dtype=torch.float64))


def fitted(strategy: Any, participation: Any, model: nn.Module, data: Any, **options: Any) -> Trainer:
    trainer = Trainer(model, data)
    given: dict[str, Any] = {"num_nodes": participation.n, "batch_size": 4, "progress": False, **options}
    trainer.fit(strategy=strategy, participation=participation, **given)
    return trainer


def final(trainer: Trainer) -> Tensor:
    assert trainer.strategy is not None
    return trainer.strategy.model_weights()


# Partial work ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [False, True])
def test_partial_work_by_hand(drop: bool) -> None:
    # Client k with centre c_k after E_k steps: θ_k = c_k + (φ − c_k) · 0.9^E_k. Round 1 from φ = 0 with E = 1, 2, 4:
    # 1 · 0.1, −2 · 0.19, 4 · 0.3439. Dropped are clients 0 and 1, which do not take all four steps.
    plan = Sample(3, of=3, stragglers=Partial(steps=[1, 2, 7], drop=drop))
    trainer = fitted(FedAvgStrategy(inner_optim=SGD, H=4), plan, Distance(), centred, max_steps=8)
    phi = 0.0
    for _ in range(2):
        ends = [c + (phi - c) * 0.9**E for c, E in zip(CENTRES, (1, 2, 4), strict=True)]
        phi = ends[2] if drop else sum(ends) / 3
        if _ == 0:
            assert ends == pytest.approx([0.1, -0.38, 1.3756])
    assert final(trainer).item() == pytest.approx(phi, rel=1e-12)
    first = trainer.ledger.attendance[0]
    if drop:
        assert (first.nodes, first.late, first.steps) == ((2,), (0, 1), ())
    else:
        assert (first.nodes, first.late, first.steps) == ((0, 1, 2), (), (1, 2, 4))
        there = ~np.isnan(trainer.history.node_losses[:4])
        assert there.T.tolist() == [[step < own for step in range(4)] for own in (1, 2, 4)]


def test_fedprox_pulls_partial_work_too() -> None:
    """θ ← θ − η (θ − c + μ (θ − φ)) for E_k steps from φ = 0: a limit c / (1 + μ), and a factor 1 − η (1 + μ)."""
    plan = Sample(3, of=3, stragglers=Partial(steps=[1, 2, 4]))
    trainer = fitted(FedProxStrategy(inner_optim=SGD, H=4, mu=1.0), plan, Distance(), centred, max_steps=4)
    ends = [c / 2 * (1 - 0.8**E) for c, E in zip(CENTRES, (1, 2, 4), strict=True)]
    assert final(trainer).item() == pytest.approx(sum(ends) / 3, rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"epochs": 2}])
def test_a_share_of_0_is_bitwise_no_partial_work(options: dict[str, Any]) -> None:
    whole, same = (
        fitted(
            FedAvgStrategy(inner_optim=SGD, H=2), Sample(2, of=3, **options, **own), Distance(), centred, max_steps=6
        )
        for own in ({}, {"stragglers": Partial(0.0)})
    )
    assert_same_record(same.history, whole.history)
    assert torch.equal(final(same), final(whole)) and same.ledger.attendance == whole.ledger.attendance
    assert Sample(3, of=3, stragglers=Partial(0.0)).changes_nothing(3)


def segments(sample: Sample, rounds: int, H: int = 10, **given: Any) -> list[Segment]:
    plan = sample.plan(Round(sample.n, 5, H, sizes=np.ones(sample.of), **given))
    return [*plan.segments(rounds * H)]


def test_a_share_of_each_cohort_takes_a_uniform_number_of_steps() -> None:
    plain = segments(Sample(10, of=30), 400)
    kept, dropped = (segments(Sample(10, of=30, stragglers=Partial(0.55, drop=d)), 400) for d in (False, True))
    steps = np.array([segment.steps for segment in kept])  # (400, 10)
    assert [segment.nodes for segment in kept] == [segment.nodes for segment in plain]
    assert steps.min() == 1 and steps.max() == 10
    # Five of ten are drawn, and take ten steps with probability 1/10: 400 · (5 + 5/10) clients take ten.
    counts = np.bincount(steps.flatten(), minlength=11)
    assert counts[10] == pytest.approx(2200, abs=4 * np.sqrt(2000 * 0.1 * 0.9))
    assert all(abs(count - 200) < 4 * np.sqrt(2000 * 0.1 * 0.9) for count in counts[1:10])
    for one, other in zip(kept, dropped, strict=True):
        assert len(other.late) == 5 and not other.steps and sorted((*other.nodes, *other.late)) == [*one.nodes]
        assert all(own == 10 for node, own in zip(one.nodes, one.steps, strict=True) if node in other.nodes)


def test_partial_work_counts_in_steps_of_epochs() -> None:
    given = {"epochs": np.array([1.0, 2.0, 4.0])}
    found = np.array([s.steps for s in segments(Sample(3, of=3, epochs=2, stragglers=Partial(1.0)), 60, **given)])
    assert found.max(0).tolist() == [2, 4, 8] and found.min(0).tolist() == [1, 1, 1]


def test_at_least_one_client_is_kept() -> None:
    for sample in (Sample(1, of=3, stragglers=Partial(steps=[1, 2, 3], drop=True)),):
        assert all(len(segment.nodes) == 1 and not segment.late for segment in segments(sample, 5))


# Selection ------------------------------------------------------------------------------------------------------------


def test_by_size_clients_are_drawn_one_after_the_other_in_proportion_to_their_size() -> None:
    sizes, rounds = np.array([1.0, 2.0, 3.0, 10.0]), 4000
    plan = Sample(2, of=4, select="size").plan(Round(2, 0, 1, sizes=sizes))
    found: dict[tuple[int, ...], int] = {}
    for segment in plan.segments(rounds):
        found[segment.nodes] = found.get(segment.nodes, 0) + 1
    p = sizes / sizes.sum()
    for i, j in itertools.combinations(range(4), 2):  # first i then j, or first j then i
        expected = rounds * (p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]))
        assert found[i, j] == pytest.approx(expected, abs=4 * np.sqrt(expected))


# Linear regression in NumPy: client k has 4 to 12 examples.
N, GENERATOR = 7, np.random.default_rng(3)
SIZES = [4, 4, 8, 12, 8, 4, 8]
X = [GENERATOR.normal(size=(size, 3)) for size in SIZES]
Y = [x @ GENERATOR.normal(size=3) + k for k, x in enumerate(X)]


def regression(client: int, num_clients: int, train: bool) -> TensorDataset:
    return TensorDataset(torch.tensor(X[client]), torch.tensor(Y[client])[:, None])


def chosen(
    select: str = "power_of_choice", candidates: int | None = 5, strategy: Any = None, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    trainer = Trainer(model, regression, loss_fn=nn.functional.mse_loss)
    plan = Sample(2, of=N, select=select, candidates=candidates, **options.pop("plan", {}))
    given: dict[str, Any] = {"max_steps": 18, "num_nodes": 2, "batch_size": 12, "progress": False, **options}
    trainer.fit(strategy=strategy or FedAvgStrategy(inner_optim=SGD, H=3), participation=plan, **given)
    return trainer


def test_power_of_choice_is_the_formula() -> None:
    """Full batches: NumPy computes the candidates' losses, the largest two, their steps, and the plain mean."""
    trainer = chosen()
    torch.manual_seed(0)
    w = nn.Linear(3, 1, bias=False, dtype=torch.float64).weight.detach().numpy()[0]
    reports = [event for event in trainer.ledger if event.label == "losses of candidates"]
    assert [event.step for event in reports] == [1, 4, 7, 10, 13, 16]
    for event, segment in zip(reports, trainer.ledger.attendance, strict=True):
        (candidates,) = event.groups
        assert len(candidates) == 5
        losses = {k: np.mean((X[k] @ w - Y[k]) ** 2) for k in candidates}
        assert segment.nodes == tuple(sorted(sorted(losses, key=losses.__getitem__)[-2:]))
        ends = []
        for k in segment.nodes:
            own = w.copy()
            for _ in range(3):
                own -= 0.1 * 2 / SIZES[k] * X[k].T @ (X[k] @ own - Y[k])
            ends.append(own)
        w = np.mean(ends, 0)
    np.testing.assert_allclose(final(trainer).numpy(), w, rtol=1e-10)
    assert len({segment.nodes for segment in trainer.ledger.attendance}) > 1


def test_candidates_pull_the_model_and_push_a_number() -> None:
    trainer, plain = chosen(), chosen("uniform", None)
    extra = [e for e in trainer.ledger if "candidates" in e.label]
    of_a_round = [(e.collective, e.label, e.payload_bytes, len(e.groups[0]), e.moment) for e in extra[:2]]
    assert of_a_round == [
        ("pull", "pull of candidates", 24.0, 3, "start"),  # three weights of 8 bytes, to five candidates less two
        ("push", "losses of candidates", 4.0, 5, "start"),
    ]
    for event, segment in zip(extra[::2], trainer.ledger.attendance, strict=True):
        assert not {*event.groups[0]} & {*segment.nodes}
    assert trainer.ledger.total_wire_bytes - plain.ledger.total_wire_bytes == 6 * 5 * 4
    assert trainer.ledger.server_wire_bytes - plain.ledger.server_wire_bytes == 6 * 3 * 24


def test_a_round_begins_when_losses_are_reported() -> None:
    """After the latency of 1 s and 4 bytes at 100 kbit/s; the other candidates fetch the model at the same time."""
    network, compute = vsim.Network("100 kbit/s", "1 s"), Compute(1.0)
    one, other = (vsim.timeline(trainer, network, compute) for trainer in (chosen(), chosen("size", None)))
    np.testing.assert_allclose(np.diff((one.seconds - other.seconds)[::3]), 1 + 4 * 8 / 1e5)


def test_as_many_candidates_as_clients_are_a_draw_by_size() -> None:
    one, other = chosen(candidates=2), chosen("size", None)
    assert one.ledger.attendance == other.ledger.attendance
    assert torch.equal(final(one), final(other))
    assert {e.label for e in one.ledger} - {e.label for e in other.ledger} == {"losses of candidates"}


def test_uniform_is_as_before() -> None:
    whole, same = (
        fitted(FedAvgStrategy(inner_optim=SGD, H=2), plan, Distance(), centred, max_steps=6)
        for plan in (Sample(2, of=3), Sample(2, of=3, select="uniform"))
    )
    assert_same_record(same.history, whole.history)
    assert repr(Sample(2, of=3, select="uniform")) == "Sample(n=2, of=3)"
    assert "select='size'" in repr(Sample(2, of=3, select="size"))


@pytest.mark.parametrize("stop", [3, 4, 5, 6])
def test_a_choice_is_restored_to_the_bit(stop: int, tmp_path: Path) -> None:
    """In the midst of a round, and between two."""
    late: dict[str, Any] = {"stragglers": OverCommit(1.5)}
    clock: dict[str, Any] = {"compute": Compute([1.0, 2.0, 1.5, 1.2, 0.4, 3.0, 1.0])}
    whole = chosen(plan=late, **clock)
    chosen(max_steps=stop, save_dir=tmp_path, plan=late, **clock)
    again = chosen(save_dir=tmp_path, resume=True, plan=late, **clock)
    assert_same_record(again.history, whole.history)
    assert again.ledger.attendance == whole.ledger.attendance and [*again.ledger] == [*whole.ledger]
    assert torch.equal(final(again), final(whole))


@pytest.mark.parametrize(
    "options",
    [
        {"stragglers": Partial(0.5)},
        {"stragglers": Partial(0.5, drop=True)},
        {"stragglers": DropSlowest(0.5), "epochs": 1},
        {"stragglers": Deadline("adaptive")},
        {"available": vsim.Dropout(0.5)},
    ],
    ids=str,
)
def test_losses_choose_among_all_others_rules(options: dict[str, Any]) -> None:
    """Rules for stragglers and absent clients apply to the clients that were chosen: fewer of them may be left."""
    waits = isinstance(options.get("stragglers"), Deadline | DropSlowest)
    clock = {"compute": Compute([1.0, 2.0, 1.5, 1.2, 0.4, 3.0, 1.0], jitter=0.5)} if waits else {}
    trainer, again = (chosen(plan=options, **clock) for _ in range(2))
    assert_same_record(again.history, trainer.history)
    assert len(trainer.ledger.attendance) == 6
    for event, segment in zip(
        (e for e in trainer.ledger if e.label == "losses of candidates"), trainer.ledger.attendance, strict=True
    ):
        assert {*segment.nodes, *segment.late} <= {*event.groups[0]}
        assert 1 <= len(segment.nodes) <= 2


def test_runs_of_a_comparison_choose_for_themselves() -> None:
    """Runs share a matrix, and differ in their clients."""
    strategies = {
        name: FedAvgStrategy(inner_optim=SGD, H=3, lr=None)
        if name == "a"
        else FedPerStrategy(H=3, lr=0.05, personal="bias")
        for name in ("a", "b")
    }
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    options: dict[str, Any] = {
        "participation": Sample(2, of=N, select="power_of_choice", candidates=5),
        **{"max_steps": 9, "num_nodes": 2, "batch_size": 4},
    }
    found = vsim.compare(
        model, regression, strategies=strategies, loss_fn=nn.functional.mse_loss, progress=False, **options
    )
    for name, strategy in strategies.items():
        alone = Trainer(model, regression, loss_fn=nn.functional.mse_loss)
        alone.fit(strategy=strategy, progress=False, **options)
        assert found[name].ledger.attendance == alone.ledger.attendance
    assert found["a"].ledger.attendance != found["b"].ledger.attendance


def test_an_unknown_round_is_not_guessed() -> None:
    plan = Sample(1, of=3, select="power_of_choice", candidates=2).plan(Round(1, 0, 2, sizes=np.ones(3)))
    assert isinstance(plan, Plan) and len(plan.candidates(1)) == 2
    with refused(ValueError, "known only during training"):
        plan.segment(3)
    plan.choose([1.0, 3.0])
    assert plan.candidates(1) == () and plan.segment(2).nodes == plan.segment(1).nodes


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Partial(), TypeError, "share or steps"),
        (lambda: Partial(0.5, steps=[1]), TypeError, "share or steps"),
        (lambda: Partial(1.5), ValueError, "share must be"),
        (lambda: Partial(1, drop=True), ValueError, "below 1"),
        (lambda: Partial(steps=[0]), ValueError, "steps of a client"),
        (lambda: Partial(0.5, drop="yes"), TypeError, "drop"),
        (lambda: Sample(2, of=4, stragglers=Partial(0.4)), ValueError, "less than one client"),
        (lambda: Sample(2, of=4, stragglers=Partial(steps=[1, 2])), ValueError, "4 clients, got 2"),
        (lambda: Sample(2, of=4, select="loss"), ValueError, "power_of_choice"),
        (lambda: Sample(2, of=4, select="power_of_choice"), TypeError, "candidates=None"),
        (lambda: Sample(2, of=4, select="size", candidates=3), TypeError, "candidates=3"),
        (lambda: Sample(2, of=4, select="power_of_choice", candidates=1), ValueError, "from 2 to 4 … 1"),
        (lambda: Sample(2, of=4, select="power_of_choice", candidates=5), ValueError, "from 2 to 4 … 5"),
        (lambda: Sample(4, of=4, select="size"), ValueError, "no effect"),
    ],
)
def test_malformed(make: Any, error: type[Exception], said: str) -> None:
    with refused(error, said):
        make()


def test_refused_in_runs(tmp_path: Path) -> None:
    shared = TensorDataset(torch.ones(24, 1, dtype=torch.float64))
    for plan, data, said in (
        (Sample(2, of=3, select="power_of_choice", candidates=3), shared, "own data"),
        (Partial(0.5), centred, "Sample"),
    ):
        with refused(TypeError, said):
            Trainer(Distance(), data).fit(
                strategy=FedAvgStrategy(inner_optim=SGD, H=2),
                participation=plan,
                num_nodes=2,
                max_steps=4,
                batch_size=4,
            )
    with refused(TypeError, "gradients", "Partial"):
        fitted(
            SimpleReduceStrategy(inner_optim=SGD),
            Sample(2, of=3, rounds=4, stragglers=Partial(0.5)),
            Distance(),
            centred,
            max_steps=4,
        )
    with refused(ValueError, "drawn alike"):
        chosen(strategy=DPFedAvgStrategy(inner_optim=SGD, H=3))
    with refused(ValueError, "budget", "power_of_choice"):
        vsim.compare(
            Distance(),
            centred,
            strategies={"a": FedAvgStrategy(inner_optim=SGD, H=2)},
            num_nodes=2,
            budget={"wire": "1 MB"},
            participation=Sample(2, of=3, select="power_of_choice", candidates=3),
            progress=False,
        )
    chosen(max_steps=4, save_dir=tmp_path)
    for number in (2, 6):  # the cohorts that the checkpoint has recorded may be no candidates here
        with refused(vsim.CheckpointError, "candidates", "participation"):
            chosen(candidates=number, resume=vsim.load_checkpoint(tmp_path))
    with refused(ValueError, "fork"):
        chosen(resume=vsim.load_checkpoint(tmp_path).fork())
