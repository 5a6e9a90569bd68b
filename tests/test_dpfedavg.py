"""DP-FedAvg: FedAvg without its noise, the size of the noise, and the budget against closed forms and known numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from cut_runs import fit, trainer_of
from reference_cluster import small_mlp, vectors
from strategies_by_hand import Parameters, driven, normal

from vsim import Callback, Compute, EarlyStopping, OverCommit, Sample, Schedule
from vsim.algorithms.dpfedavg import epsilon
from vsim.cluster import Cluster
from vsim.cluster.participation import Participation
from vsim.runs.saving import captured
from vsim.runs.view import RunView
from vsim.strategy import Algorithm, CommunicateOptimizeStrategy, DPFedAvgStrategy, FedAvgStrategy, OptimSpec

SGD = OptimSpec("sgd", lr=0.5)


def test_without_a_clip_and_noise_it_is_fedavg() -> None:
    model, gradients = Parameters((5, 3)), normal(8, 3, 15)
    ours = driven(DPFedAvgStrategy(inner_optim="adamw", H=2, clip=math.inf, noise_multiplier=0), model, gradients)
    plain = driven(FedAvgStrategy(inner_optim="adamw", H=2), model, gradients)
    torch.testing.assert_close(ours.cluster.weights, plain.cluster.weights)
    assert ours.strategy.columns() == {}


def test_the_noise_of_a_round_is_as_large_as_it_should_be() -> None:
    # No gradients: after two rounds all that has moved φ is noise, of variance 2 · (z·C / n)², on all nodes the same.
    # Of 40000 draws the standard deviation is known to 1 / √80000 = 0.35 %, and the mean to a 200th of it.
    model = Parameters((200, 200))
    run = driven(
        DPFedAvgStrategy(inner_optim=SGD, H=2, clip=0.3, noise_multiplier=1.5), model, torch.zeros(4, 5, 40_000)
    )
    noise = run.cluster.weights - model.p0.detach().flatten()
    std = math.sqrt(2) * 1.5 * 0.3 / 5
    assert torch.equal(noise, noise[:1].expand(5, -1))
    assert noise[0].std().item() == pytest.approx(std, rel=0.015) and abs(noise[0].mean()) < 4 * std / 200
    assert (noise[0].abs() < 2 * std).double().mean().item() == pytest.approx(0.9545, abs=0.005)  # it is Gaussian


@pytest.mark.parametrize(
    ("share", "noise", "rounds", "published"),
    [(0.01, 4.0, 10_000, 1.26), (256 / 60_000, 1.1, 14_063, 3.01), (256 / 60_000, 1.3, 3_516, 1.19)],
)
def test_epsilon_of_published_runs(share: float, noise: float, rounds: int, published: float) -> None:
    # Abadi et al. 2016 [arXiv:1607.00133], section 3.2, and the tutorial of TensorFlow Privacy, all with δ = 1e-5 and
    # the conversion of that time, ε = min over α of R(α) + ln(1 / δ) / (α − 1). That of today is smaller.
    dp = dp_accounting
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(dp.PoissonSampledDpEvent(share, dp.GaussianDpEvent(noise)), rounds)
    assert (accountant.rdp + math.log(1e5) / (accountant.orders - 1)).min() == pytest.approx(published, abs=0.005)
    assert 0.75 * published < epsilon({(share, noise): rounds}, 1e-5) < published
    assert epsilon({(share, noise): rounds}, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5))
    accountant.compose(dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(noise)), 7)
    assert epsilon({(share, noise): rounds, (0.2, noise): 7}, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5))


def test_epsilon_where_all_nodes_take_part_is_the_gaussian_mechanism_s() -> None:
    # T rounds of noise z have α T / (2 z²) of order α; ε = that + ln((α − 1) / α) − (ln δ + ln α) / (α − 1), the least.
    z, rounds, delta = 3.0, 20, 1e-6
    alpha = np.linspace(1.01, 60, 100_000)
    least = alpha * rounds / (2 * z**2) + np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1)
    assert least.min() <= epsilon({(1.0, z): rounds}, delta) < 1.01 * least.min()


def test_the_history_has_what_is_spent() -> None:
    class Budget(Callback):
        def on_step(self, run: RunView) -> None:
            if run.row["epsilon"] > 4:
                run.stop()

    strategy = DPFedAvgStrategy(inner_optim=SGD, H=3, noise_multiplier=2.0)
    trainer = fit(strategy, trainer_of(small_mlp, vectors), max_steps=40, callbacks=[Budget()])
    spent = trainer.history["epsilon"]
    assert spent[:4].tolist() == [0, 0, 0, epsilon({(1.0, 2.0): 1}, 1e-5)] and (np.diff(spent[::3]) > 0).all()
    assert spent[-1] > 4 >= spent[-2] and len(spent) < 40


def test_a_fork_has_spent_what_its_beginning_has() -> None:
    trainer = fit(
        DPFedAvgStrategy(inner_optim=SGD, H=3, noise_multiplier=2.0), trainer_of(small_mlp, vectors), max_steps=6
    )
    other = DPFedAvgStrategy(inner_optim=SGD, H=3, noise_multiplier=4.0)
    forked = fit(other, trainer_of(small_mlp, vectors), max_steps=9, resume=captured(trainer._last).fork())  # type: ignore[arg-type]
    spent = forked.history["epsilon"]
    assert spent[0] == trainer.history["epsilon"][-1] > 0
    assert spent[-1] == epsilon({(1.0, 2.0): 2, (1.0, 4.0): 1}, 1e-5) > spent[0]


def test_chance_is_counted_where_clients_are_drawn() -> None:
    strategy = DPFedAvgStrategy(inner_optim=SGD, H=3, noise_multiplier=2.0, delta=1e-3)

    def spent(num_nodes: int, participation: Participation, **more: Any) -> float:
        options = {"num_nodes": num_nodes, "participation": participation, "max_steps": 9, **more}
        return fit(strategy, trainer_of(small_mlp, vectors), **options).history.last("epsilon")

    assert spent(2, Sample(2, of=7)) == epsilon({(2 / 7, 2.0): 3}, 1e-3) < epsilon({(1.0, 2.0): 3}, 1e-3) / 2
    # Four are drawn for two, and the two fastest count: of these it was not by chance that they came first.
    late = Sample(2, of=7, stragglers=OverCommit(2.0))
    assert spent(2, late, compute=Compute(1.0, speeds=[1.0] * 7)) == epsilon({(4 / 7, 2.0): 3}, 1e-3)
    assert spent(2, Sample(2, of=7, rounds=6)) == epsilon({(1.0, 2.0): 3}, 1e-3)  # twice of the same clients
    assert spent(3, Schedule({0: [0, 1]})) == epsilon({(1.0, 2.0): 3}, 1e-3)


def test_what_a_module_measures_is_a_column() -> None:
    class Length(Algorithm):
        def __init__(self, name: str = "length") -> None:
            self.name = name

        def measured(self, cluster: Cluster) -> Mapping[str, float]:
            return {self.name: float(cluster.weights[0].norm())}

    def run(name: str) -> list[float]:
        strategy = CommunicateOptimizeStrategy([Length(name)], inner_optim=SGD)
        patience = EarlyStopping(name, mode="max", patience=10)
        trainer = fit(strategy, trainer_of(small_mlp, vectors), max_steps=3, callbacks=[patience])
        return trainer.history[name].tolist()

    lengths = run("length")
    assert len(lengths) == 4 and len(set(lengths)) == 4
    with pytest.raises(ValueError, match=r"CommunicateOptimizeStrategy measures \['lr'\], which name columns"):
        run("lr")


def test_without_the_accountant_there_is_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    DPFedAvgStrategy(noise_multiplier=0)
    with pytest.raises(ImportError, match=r'DPFedAvgStrategy needs dp-accounting: pip install "vsim-torch\[privacy\]"'):
        DPFedAvgStrategy()
