"""Adaptive federated optimization: clients take H local steps, then a server's optimizer steps the shared weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.algorithms.diloco import DiLoCoStrategy
from vsim.arguments import given, one_of, real_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec, resolve_optim
from vsim.cluster.optimizers import forget
from vsim.core.algorithm import Optim
from vsim.core.fields import algorithm
from vsim.core.when import When


class FedAdam(Optimizer):
    """m ← β₁ m + (1 − β₁) Δ;  v ← β₂ v + (1 − β₂) Δ²;  φ ← φ − lr · m / (√v + τ),  from m = 0 and v = τ².

    Differences in torch's Adam: m is divided by 1 − β₁ᵗ and v by 1 − β₂ᵗ, v starts at 0, and eps (τ here) is 1e-8.

    Args:
        lr: at least 0. betas: (β₁, β₂), each in [0, 1]. tau: τ, above 0; the larger, the less adaptive.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.03,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
    ) -> None:
        real_number("lr", lr, at_least=0)
        real_number("tau", tau, above=0)
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {given(betas)}")
        for beta in betas:
            real_number("betas", beta, at_least=0, at_most=1)
        super().__init__(params, {"lr": lr, "betas": betas, "tau": tau})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step with the current gradients."""
        for group in self.param_groups:
            lr, (beta1, beta2), tau = group["lr"], group["betas"], group["tau"]
            for p in group["params"]:
                state: dict[str, Any] = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.full_like(p, tau**2))
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                self.adapt_(state["exp_avg_sq"], p.grad.square(), beta2)
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(tau), value=-lr)

    def adapt_(self, v: Tensor, squares: Tensor, beta: float) -> None:
        """Update v in place, given `squares` = Δ²."""
        v.mul_(beta).add_(squares, alpha=1 - beta)


class FedYogi(FedAdam):
    """FedAdam with  v ← v − (1 − β₂) Δ² sign(v − Δ²)."""

    def adapt_(self, v: Tensor, squares: Tensor, beta: float) -> None:
        v.sub_(squares * torch.sign(v - squares), alpha=1 - beta)


class FedAdagrad(FedAdam):
    """FedAdam with  v ← v + Δ²,  and β₁ = 0 unless `beta` is given."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1, beta: float = 0.0, tau: float = 1e-3) -> None:
        super().__init__(params, lr, (beta, 1.0), tau)

    def adapt_(self, v: Tensor, squares: Tensor, beta: float) -> None:
        v.add_(squares)


SERVERS = {
    "adam": OptimSpec(FedAdam),
    "yogi": OptimSpec(FedYogi),
    "adagrad": OptimSpec(FedAdagrad),
    "sgd": OptimSpec("sgd", lr=1.0),
    "momentum": OptimSpec("sgd", lr=1.0, momentum=0.9),
}


@algorithm
class FedOptStrategy(DiLoCoStrategy):
    """FedAvg whose server steps the shared weights with an optimizer: FedAdam, FedYogi, FedAdagrad, FedAvgM
    [Reddi et al. 2020, arXiv:2003.00295].

        θ_k ← inner optimizer(θ_k, g_k)
        after every H-th step:  Δ = Σ_k w_k (φ − θ_k);  φ ← server optimizer(φ, Δ);  θ_k ← φ

    Unlike in DiLoCo, the inner optimizers begin every round without state, because a round may have other clients.

    Args:
        H: local steps of a round, at least 1, or a schedule of `vsim.strategy.when`.
        outer_optim: "adam" (`FedAdam`), "yogi" (`FedYogi`), "adagrad" (`FedAdagrad`), "sgd" (lr 1: FedAvg),
            "momentum" (lr 1, momentum 0.9: FedAvgM), or an `OptimSpec` such as OptimSpec(FedYogi, tau=1e-2).
        outer_lr: the outer learning rate, above 0. Default: 0.03; 0.1 for "adagrad", 1 for "sgd" and "momentum".
        average: merges the φ − θ_k; see `vsim.strategy.average`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights, or the messages of `average`, every H steps.

    Deviations from the paper: Δ has the opposite sign, so that it acts as a gradient. H counts steps, not epochs.
    """

    family = "federated"

    H: int | When = 10
    outer_optim: Optim = "adam"

    def outer_spec(self) -> OptimSpec:
        if self.outer_lr is not None:
            real_number("outer_lr", self.outer_lr, above=0)
        given = self.outer_optim
        if isinstance(given, str):
            given = SERVERS[one_of("outer_optim", given, SERVERS)]
            return given if self.outer_lr is None else OptimSpec(given.cls, **{**given.kwargs, "lr": self.outer_lr})
        return resolve_optim("FedOpt", "outer_optim", given, "outer_lr", self.outer_lr, SERVERS["adam"])

    def sync(self, cluster: Cluster) -> None:
        super().sync(cluster)
        forget(cluster.optim)
