"""Mean and covariance of a linear strategy on quadratics with additive noise, step by step.

Node k has f_k(w) = a_k (w − b_k)² / 2 and takes the gradient a_k (w − b_k) + ξ_k, ξ_k ~ N(0, σ²), in every coordinate.
All arrays of a formula below each other are its state x (n,), and a step is x ← M x + c + N ξ. So

    E x ← M E x + c        Cov x ← M Cov x Mᵀ + σ² N Nᵀ

and where a step is drawn, the same for E x and E x xᵀ, averaged over the draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .formulas import Array, Formula, State


@dataclass(frozen=True)
class Quadratics:
    """f_k(w) = a_k (w − b_k)² / 2, with noise of deviation σ in every gradient, from the weight `start`."""

    a: tuple[float, ...] = (0.4, 0.8, 1.2, 1.6)
    b: tuple[float, ...] = (1.0, -0.5, 0.25, -1.0)
    sigma: float = 1.0
    start: float = 2.0


def step_of(formula: Formula, t: int, problem: Quadratics, choice: int = 0) -> tuple[Array, Array, Array]:
    """Return M (n, n), c (n,) and N (n, K) of step t: the formula, applied to every unit vector of x, 1 and ξ."""
    K = len(problem.a)
    shapes = {name: len(rows) for name, rows in formula.start(np.zeros((K, 1))).items()}
    n = sum(shapes.values())
    unit = np.eye(n + 1 + K)
    x, one, noise = unit[:n], unit[n], unit[n + 1 :]
    state: State = dict(zip(shapes, np.split(x, np.cumsum([*shapes.values()])[:-1]), strict=True))
    a, b = np.array(problem.a)[:, None], np.array(problem.b)[:, None]
    formula.step(t, state, a * (state["θ"] - b * one) + noise, choice)
    after = np.concatenate([state[name] for name in shapes])
    return after[:, :n], after[:, n], after[:, n + 1 :]


def moments(formula: Formula, problem: Quadratics, steps: int) -> Iterator[tuple[Array, Array]]:
    """Yield E θ (K,) and Cov θ (K, K) before step 1 and after each step."""
    K = len(problem.a)
    x = np.concatenate([*formula.start(np.full((K, 1), problem.start)).values()])[:, 0]
    second = np.outer(x, x)
    for t in range(1, steps + 2):
        yield x[:K], (second - np.outer(x, x))[:K, :K]
        draws = [step_of(formula, t, problem, choice) for choice in range(formula.choices)]
        second = np.mean(
            [
                M @ second @ M.T + np.outer(M @ x, c) + np.outer(c, M @ x) + np.outer(c, c) + problem.sigma**2 * N @ N.T
                for M, c, N in draws
            ],
            axis=0,
        )
        x = np.mean([M @ x + c for M, c, _ in draws], axis=0)
