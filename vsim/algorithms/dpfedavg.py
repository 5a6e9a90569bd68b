"""DP-FedAvg: federated averaging with differential privacy for clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vsim.algorithms.fedavg import RoundAverage
from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.core.average import Averaging
from vsim.core.average import clip as limit
from vsim.core.fields import algorithm, state
from vsim.core.when import When, schedule_of, sync_interval
from vsim.extras import extra

LEAST_NOISE = 1e-3  # with a smaller z, ε is meaningless, and its computation overflows


@algorithm
class DPFedAvgStrategy(RoundAverage):
    """FedAvg with differential privacy of clients; ε is in the history [McMahan et al. 2017, arXiv:1710.06963].

        θ_k ← optimizer(θ_k, g_k)
        after every H-th step, for n nodes:
            φ ← φ + 1/n · (Σ_k (θ_k − φ) · min(1, C / ‖θ_k − φ‖) + noise),  θ_k ← φ
            noise ~ N(0, (z·C)²) in every entry

    The history's column "epsilon" is the ε of (ε, δ)-differential privacy spent so far. ε limits what the weights sent
    to clients reveal about whether a given client, with all its data, took part.

    Args:
        H: local steps of a round, at least 1, or a schedule of `vsim.strategy.when` that has no warm-up.
        clip: C, the largest 2-norm of a node's move; above 0, and finite where there is noise.
        noise_multiplier: z, at least 0.001; or 0, for no noise and no ε.
        delta: δ in (0, 1), well below 1 / (number of clients).
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights every H steps.

    Raises:
        ImportError: with noise, if Google's dp-accounting is not installed.

    The noise simulates the noise of a trusted server. It is drawn from the nodes' shared generator, which is not
    cryptographic: simulated models are no more private than their seed. Buffers, such as BatchNorm's statistics,
    and the losses in the history are not protected.

    ε is computed by Rényi differential privacy. ε assumes Poisson sampling, where every client joins a round
    independently with probability q, and neighbouring populations that differ by one client added or removed. With
    participation=Sample(n, of=N), q is n/N, as is common, though cohorts have a fixed size. For fixed cohorts and one
    replaced client, ε is larger (10 of 100 clients, z = 1, 100 rounds: 83.9 in place of 7.90). Clients that are drawn
    but arrive too late count in q. Without Sample, or if rounds= keeps a cohort for several averagings, q is 1.

    Deviations from the paper: n is the round's number of nodes, not its expectation; the paper uses the moments
    accountant.
    """

    family = "federated"
    carried = ("rounds",)

    H: int | When = 10
    clip: float = 1.0
    noise_multiplier: float = 1.0
    delta: float = 1e-5
    average: Averaging = state(default=Averaging("mean"))

    # (q, z) → the number of rounds with sampling probability q and noise z
    rounds: dict[tuple[float, float], int] = state()
    begun: int = state()  # the step of the last sync

    def __post_init__(self) -> None:
        self.average = "mean" if isinstance(self.clip, float) and self.clip == math.inf else limit(self.clip)
        if sync_interval(self.H) and schedule_of(self.H).has_warmup:
            raise ValueError(
                f"DP-FedAvg: H must be a number of steps or a schedule without a warm-up, got {self.H!r}: in its "
                "warm-up gradients would be sent without noise"
            )
        self.clip = float(self.clip)
        self.noise_multiplier = real_number("noise_multiplier", self.noise_multiplier, at_least=0)
        self.delta = real_number("delta", self.delta, above=0, below=1)
        if self.noise_multiplier:
            real_number("noise_multiplier", self.noise_multiplier, at_least=LEAST_NOISE)
            _accounting()  # raises now if dp-accounting is missing
            if self.clip == math.inf:
                raise ValueError("clip must be finite where there is noise, whose size it sets; or noise_multiplier=0")
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        if self.noise_multiplier and cluster.plan is not None and cluster.plan.favours:
            raise ValueError(
                "DP-FedAvg: ε assumes that all clients are drawn alike: give Sample(select='uniform'), or no noise"
            )
        self.keep_shared(rounds={}, begun=0)

    def sync(self, cluster: Cluster) -> None:
        super().sync(cluster)
        if not self.noise_multiplier:
            return
        self.outer_weights.add_(self._noise(cluster))
        cluster.weights.copy_(self.outer_weights)
        kind = _share(cluster, self.begun), self.noise_multiplier
        self.begun = cluster.step
        self.rounds[kind] = self.rounds.get(kind, 0) + 1

    def _noise(self, cluster: Cluster) -> Tensor:
        """Draw the server's noise, shared (P,), from the shared generator; zeros on the meta device."""
        phi = self.outer_weights
        if phi.is_meta:
            return torch.zeros_like(phi)
        std = self.noise_multiplier * self.clip / cluster.num_nodes
        return torch.randn(phi.shape, generator=cluster.generator, dtype=phi.dtype).mul_(std).to(phi.device)

    def measured(self, cluster: Cluster) -> Mapping[str, float]:
        """Return the ε spent so far as the column "epsilon"; no column without noise."""
        if not self.noise_multiplier:
            return {}
        return {"epsilon": epsilon(self.rounds, self.delta)}


def _share(cluster: Cluster, begun: int) -> float:
    """Return the probability with which a client was drawn for this round: 1 if cohorts are not drawn."""
    if cluster.plan is None or not cluster.plan.renews:
        return 1.0
    segment = cluster.plan.segment(cluster.step)
    if segment.first - 1 < begun or segment.last > cluster.step:  # one cohort for several averagings
        return 1.0
    return (len(segment.nodes) + len(segment.late)) / cluster.population  # late clients were drawn, too


def epsilon(rounds: Mapping[tuple[float, float], int], delta: float) -> float:
    """Return ε for `rounds`: (q, z) → the number of rounds that have noise z and sampling probability q.

    Source: Rényi differential privacy of the subsampled Gaussian mechanism [Mironov et al. 2019, arXiv:1908.10530], by
    Google's dp-accounting.
    """
    if not rounds:
        return 0.0
    spent = sum(count * _renyi(*kind).rdp for kind, count in rounds.items())
    (first, *_) = rounds
    least, _ = _accounting().rdp.compute_epsilon(_renyi(*first).orders, spent, delta)
    return float(least)


@cache
def _renyi(share: float, noise_multiplier: float) -> Any:
    """Return an accountant of one round."""
    dp = _accounting()
    event = dp.GaussianDpEvent(noise_multiplier)
    return dp.rdp.RdpAccountant().compose(dp.PoissonSampledDpEvent(share, event))


def _accounting() -> Any:
    return extra("dp_accounting", "DPFedAvgStrategy", "dp-accounting", "privacy")
