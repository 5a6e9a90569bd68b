"""Personal models: FedPer, FedRep and Ditto against a population by hand, and the models of clients after a run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparisons_by_hand import check_refusals
from errors import refused
from strategies_by_hand import Parameters, driven, normal, started
from torch import nn
from torch.utils.data import TensorDataset

import vsim
from vsim import Sample, Schedule, Trainer
from vsim.models import MLP
from vsim.strategy import (
    AloneStrategy,
    DittoStrategy,
    FedAvgStrategy,
    FedBNStrategy,
    FedPerStrategy,
    FedRepStrategy,
    PostLocal,
    TopK,
    clip,
    compress,
    mean,
)

X, Y = normal(7, 6, 4, seed=1, dtype=torch.float64), normal(7, 6, seed=2, dtype=torch.float64)
ALL: dict[str, Any] = {"num_nodes": 3, "batch_size": 6, "progress": False}
COHORT: dict[str, Any] = {**ALL, "participation": Sample(3, of=7)}


def clients(client: int, num_clients: int, train: bool) -> TensorDataset:
    return TensorDataset(X[client], Y[client, :, None])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1, dtype=torch.float64)


def gradient(k: int, w: Any, bias: float) -> tuple[Any, float]:
    """Return the gradient of client k's mean squared error, by hand."""
    error = 2 / 6 * (X[k].numpy() @ w + bias - Y[k].numpy())
    return X[k].numpy().T @ error, error.sum()


def trained(strategy: Any, **options: Any) -> Trainer:
    trainer = Trainer(linear(), clients, loss_fn=nn.functional.mse_loss)
    trainer.fit(strategy=strategy, **{**COHORT, "max_steps": 15, **options})
    return trainer


def models_of(trainer: Trainer) -> np.ndarray:
    """Return the weights of all seven clients' models (7, 5)."""
    rows = [nn.utils.parameters_to_vector(trainer.client_model(k).parameters()).detach() for k in range(7)]
    return torch.stack(rows).numpy()


SHAPES: list[tuple[int, ...]] = [(5, 3), (4,), (2, 3)]


@pytest.mark.parametrize(
    ("personal", "own", "options"),
    [("p1", 4, {}), (["p0", "p2"], 21, {"average": "median"}), (None, 6, {"average": mean("examples")})],
)
@pytest.mark.parametrize("H", [2, PostLocal(3, 2)], ids=str)
def test_what_fedper_shares_is_averaged_and_what_it_does_not_is_alone(
    personal: Any, own: int, options: Any, H: Any
) -> None:
    # Gradients are given, so that no parameter depends on another.
    fedper, fedavg, alone = (
        driven(strategy, Parameters(*SHAPES), normal(8, 3, 25))
        for strategy in (
            FedPerStrategy(inner_optim="adamw", H=H, personal=personal, **options),
            FedAvgStrategy(inner_optim="adamw", H=H, **options),
            AloneStrategy(inner_optim="adamw"),
        )
    )
    assert list(fedper.ledger) == [event._replace(payload_bytes=4 * (25 - own)) for event in fedavg.ledger]
    ours, averaged, trained = (run.cluster.replicas.views(run.cluster.weights) for run in (fedper, fedavg, alone))
    for name, rows in ours.items():
        torch.testing.assert_close(rows, (trained if name in (personal or ["p2"]) else averaged)[name], msg=name)


@pytest.mark.parametrize("average", [clip(0.3), compress(TopK(0.2))], ids=str)
@pytest.mark.parametrize("H", [2, PostLocal(3, 2)], ids=str)
def test_an_average_sees_what_is_shared_alone(average: Any, H: Any) -> None:
    gradients = normal(8, 3, 25)
    ours = driven(
        FedPerStrategy(inner_optim="adamw", H=H, personal="p2", average=average), Parameters(*SHAPES), gradients
    )
    shared = driven(
        FedAvgStrategy(inner_optim="adamw", H=H, average=average), Parameters(*SHAPES[:2]), gradients[:, :, :19]
    )
    torch.testing.assert_close(ours.cluster.weights[:, :19], shared.cluster.weights)
    assert list(ours.ledger) == list(shared.ledger)


@pytest.mark.parametrize("warmup", [0, 5])
def test_the_heads_of_fedper_are_their_clients_own(warmup: int) -> None:
    """In a warm-up every step is a round: the mean of the gradients moves weights as the mean of the weights does."""
    strategy = FedPerStrategy(inner_optim="sgd", H=PostLocal(warmup, 2) if warmup else 2, personal="bias", lr=0.1)
    trainer, model = trained(strategy, max_steps=24 + warmup), linear()
    w, bias = model.weight.detach().numpy()[0].copy(), np.full(7, model.bias.item())
    for segment in trainer.ledger.attendance:
        own = {k: w.copy() for k in segment.nodes}
        for k in own:
            for _ in range(segment.first, segment.last + 1):
                of_w, of_bias = gradient(k, own[k], bias[k])
                own[k], bias[k] = own[k] - 0.1 * of_w, bias[k] - 0.1 * of_bias
        w = np.mean([*own.values()], 0)
    weights = trainer.strategy.cluster.weights.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(weights, [[*w, bias[k]] for k in segment.nodes], rtol=1e-10)
    labels = ["pull", "weights", *["gradients"][:warmup]]
    assert {(event.label, event.payload_bytes) for event in trainer.ledger} == {(label, 32) for label in labels}
    assert len(trainer.ledger.attendance) == 12 + warmup


@pytest.mark.parametrize("head_steps", [None, 1, 3])
def test_fedrep_trains_heads_then_the_representation(head_steps: int | None) -> None:
    """Rounds of four steps, the last of which is cut off; the bias is the head."""
    trainer = trained(FedRepStrategy(inner_optim="sgd", H=4, head_steps=head_steps, personal="bias", lr=0.1))
    model = linear()
    w, bias = model.weight.detach().numpy()[0].copy(), np.full(7, model.bias.item())
    for segment in trainer.ledger.attendance:
        own = {k: w.copy() for k in segment.nodes}
        for step in range(min(segment.last, 15) - segment.first + 1):
            for k in own:
                of_w, of_bias = gradient(k, own[k], bias[k])
                if step < (head_steps or 2):
                    bias[k] -= 0.1 * of_bias
                else:
                    own[k] -= 0.1 * of_w
        w = np.mean([*own.values()], 0) if segment.last <= 15 else w
    weights = trainer.strategy.cluster.weights.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(weights, [[*own[k], bias[k]] for k in segment.nodes], rtol=1e-10)
    w = np.mean([*own.values()], 0)
    np.testing.assert_allclose(models_of(trainer), [[*w, own] for own in bias], rtol=1e-10)


@pytest.mark.parametrize("options", [{}, {"personal_lr": 0.05}])
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_ditto_ties_each_clients_model_to_the_global_one(lam: float, options: dict[str, float]) -> None:
    trainer = trained(DittoStrategy(inner_optim="sgd", H=4, lam=lam, lr=0.1, **options))
    start = np.array([*linear().weight.detach().numpy()[0], linear().bias.item()])  # type: ignore[operator, union-attr]
    phi, v, eta = start.copy(), np.tile(start, (7, 1)), options.get("personal_lr", 0.1)
    for segment in trainer.ledger.attendance:
        own = {k: phi.copy() for k in segment.nodes}
        for _ in range(segment.first, min(segment.last, 15) + 1):
            for k in own:
                v[k] -= eta * (np.append(*gradient(k, v[k][:4], v[k][4])) + lam * (v[k] - phi))
                own[k] -= 0.1 * np.append(*gradient(k, own[k][:4], own[k][4]))
        phi = np.mean([*own.values()], 0)
    np.testing.assert_allclose(models_of(trainer), v, rtol=1e-10)


def test_dittos_global_model_is_fedavgs() -> None:
    data, model = TensorDataset(normal(40, 5), torch.arange(40) % 3), MLP(5, (4,), 3, seed=0, dropout=0.2)
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 7, "batch_size": 4, "progress": False}

    ditto, fedavg = Trainer(model, data), Trainer(model, data)
    for trainer, cls in ((ditto, DittoStrategy), (fedavg, FedAvgStrategy)):
        trainer.fit(strategy=cls(H=3, lr=0.1), **options)
    assert torch.equal(ditto.strategy.cluster.weights, fedavg.strategy.cluster.weights)  # type: ignore[union-attr]
    assert list(ditto.ledger) == list(fedavg.ledger)


def test_what_fedrep_does_not_train_stays_to_the_bit() -> None:
    model, gradients = Parameters(*SHAPES), normal(10, 3, 25)
    run = started(FedRepStrategy(inner_optim="adamw", H=PostLocal(2, 4), head_steps=3, personal="p2"), model, 3)
    seen = [run.cluster.weights.clone(), *map(run.step, gradients)]
    changed = [
        torch.stack([a[:, own] != b[:, own] for own in (slice(0, 1), slice(19, 20))])
        for a, b in itertools.pairwise(seen)
    ]
    moved = [(bool(shared.any()), bool(head.any())) for shared, head in changed]
    assert moved[:2] == [(True, True)] * 2  # a warm-up trains both
    assert moved[2:] == [(False, True)] * 3 + [(True, False)] + [(False, True)] * 3 + [(True, False)]
    assert torch.equal(seen[6][:, :19], seen[6][:1, :19].expand(3, -1))


def test_personal_parameters_must_be_some_of_the_model_s() -> None:
    def set_up(make: Any, personal: Any) -> None:
        started(make(personal=personal), Parameters((2,), (3,)), 2)

    check_refusals(
        [
            (lambda: set_up(FedPerStrategy, "p9"), ValueError, ["personal='p9' is no trainable"]),
            *((lambda s=s: set_up(s, "p*"), ValueError, ["all parameters"]) for s in (FedPerStrategy, FedRepStrategy)),
            *((lambda odd=odd: set_up(FedPerStrategy, odd), TypeError, ["personal", odd]) for odd in ([], 3, [3])),
            (lambda: FedRepStrategy(H=3, head_steps=0), ValueError, ["head_steps", 0]),
        ]
    )


class Normed(nn.Module):
    """A classifier with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def forward(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def classes(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    return TensorDataset(X[rank].float(), (torch.arange(6) + rank) % 3)


PERSONAL = [
    FedPerStrategy(inner_optim="sgd", H=2, lr=0.1),
    FedBNStrategy(inner_optim="sgd", H=2, lr=0.1),
    FedRepStrategy(inner_optim="sgd", H=2, lr=0.1),
    DittoStrategy(inner_optim="sgd", H=2, lr=0.1, lam=0.5),
]


def measured(strategy: Any, **options: Any) -> Trainer:
    trainer = Trainer(Normed(), classes)
    trainer.fit(strategy=strategy, **{**COHORT, "max_steps": 7, "client_val_dataset": classes, **options})
    return trainer


def losses(trainer: Trainer) -> list[float]:
    found = []
    for k in range(len(trainer.history.client_val_losses)):
        model = trainer.client_model(k).eval()
        found.append(model(classes(k, 7, False)[:]).item())
    return found


@pytest.mark.parametrize("strategy", PERSONAL, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("options", [{}, {"participation": None}], ids=["cohorts", "all"])
def test_every_client_is_measured_with_its_own_model(strategy: Any, options: dict[str, Any]) -> None:
    trainer = measured(strategy, **options)
    assert len(trainer.history.client_val_losses) == (3 if options else 7)
    assert trainer.history.client_val_losses == pytest.approx(losses(trainer), rel=1e-5)
    unmeasured = measured(strategy, client_val_dataset=None, **options)
    ours, theirs = (t.strategy.cluster.weights for t in (trainer, unmeasured))  # type: ignore[union-attr]
    assert torch.equal(ours, theirs)


def compared(**options: Any) -> vsim.Comparison:
    strategies = {**{type(s).__name__: s for s in PERSONAL}, "FedAvg": FedAvgStrategy(inner_optim="sgd", H=2, lr=0.1)}
    given = {**COHORT, "max_steps": 7, "client_val_dataset": classes, **options}
    return vsim.compare(Normed(), classes, strategies=strategies, **given)


def test_runs_resume_after_their_clients_were_measured(tmp_path: Path) -> None:
    whole = compared(max_steps=11)
    compared(save_dir=tmp_path)
    for name, run in compared(save_dir=tmp_path, resume=True, max_steps=11).items():
        expected = whole[name].history.client_val_losses
        np.testing.assert_array_equal(run.history.client_val_losses, expected, name)


def test_runs_of_a_comparison_are_measured_as_if_alone() -> None:
    comparison = compared()
    for strategy in PERSONAL:
        run = comparison[type(strategy).__name__]
        alone = measured(strategy, seed=run.seed).history.client_val_losses
        assert run.history.client_val_losses == pytest.approx(alone, rel=1e-4), run


def test_which_clients_have_models() -> None:
    trainer = Trainer(Normed(), classes)
    with refused(ValueError, "fit"):
        trainer.client_model(0)
    trainer.fit(strategy=FedPerStrategy(H=2), participation=Schedule({4: [0, 2]}), **{**ALL, "max_steps": 6})
    trainer.client_model(2)
    with refused(ValueError, "node 1"):
        trainer.client_model(1)
    with refused(ValueError, "client … 3"):
        trainer.client_model(3)
    trainer.fit(strategy=FedAvgStrategy(H=2), **ALL, max_steps=4)
    one, other = (trainer.client_model(k).state_dict() for k in (0, 2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_processes_measure_the_same() -> None:
    ours, theirs = (
        measured(PERSONAL[-1], deterministic=True, **options).history.client_val_losses
        for options in ({}, {"backend": "process", "threads_per_process": 1})
    )
    np.testing.assert_array_equal(ours, theirs)


def of_clients(run: Any) -> list[dict[str, torch.Tensor]]:
    return [run.client_model(k).state_dict() for k in range(7)]


def assert_equal(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_comparison_has_the_clients_models(tmp_path: Path) -> None:
    """Each has the loss that was measured in the run, whether or not the client was drawn."""
    comparison = compared(max_steps=4)
    drawn = {client for segment in comparison["FedAvg"].ledger.attendance for client in segment.nodes}
    assert len(drawn) < 7
    for name, run in comparison.items():
        found = [run.client_model(k).eval()(classes(k, 7, False)[:]).item() for k in range(7)]
        assert found == pytest.approx(run.history.client_val_losses, rel=1e-5), name
        assert len(set(found)) == 7
        of_one = {tuple(state["layers.0.weight"].flatten().tolist()) for state in of_clients(run)}
        assert len(of_one) == (len(drawn) + 1 if name == "DittoStrategy" else 1)
    comparison.to_json(tmp_path / "read.json")
    with refused(ValueError, "client_model"):
        vsim.Comparison.from_json(tmp_path / "read.json")["FedAvg"].client_model(0)
    with refused(ValueError, "client … 7"):
        comparison["FedPerStrategy"].client_model(7)
    stored = Sample(3, of=7, store=tmp_path / "clients")
    with refused(ValueError, "store"):
        compared(participation=stored, max_steps=4)["DittoStrategy"].client_model(0)


def test_absent_nodes_have_no_model_in_a_comparison() -> None:
    options: dict[str, Any] = {**ALL, "participation": Schedule({4: [0, 2]}), "max_steps": 6}
    for strategy in (FedPerStrategy(H=2), FedAvgStrategy(H=2)):
        run = vsim.compare(Normed(), classes, strategies={"one": strategy}, **options)["one"]
        run.client_model(2)
        if strategy.is_personal:
            with refused(ValueError, "node 1"):
                run.client_model(1)


@pytest.mark.slow
def test_processes_give_back_the_clients_models(tmp_path: Path) -> None:
    options: dict[str, Any] = {"deterministic": True, "max_steps": 5}
    processes: dict[str, Any] = {"backend": "process", "threads_per_process": 1}
    for strategy in PERSONAL:
        whole = of_clients(measured(strategy, **options))
        assert_equal(of_clients(measured(strategy, **options, **processes)), whole)
    ours, theirs = (compared(**options, **own) for own in ({}, {**processes, "num_processes": 2}))
    for name, run in ours.items():
        assert_equal(of_clients(theirs[name]), of_clients(run))
    trainer = measured(PERSONAL[-1], **options, **processes, participation=Sample(3, of=7, store=tmp_path))
    with refused(ValueError, "store"):
        trainer.client_model(0)
