"""Strategies as their papers define them, in NumPy: one step of all K nodes, from given gradients.

Nothing here is from vsim. Weights θ are (K, n); what nodes share, such as φ, is (1, n). The formulas hold column by
column, unless a class says otherwise. Steps count from 1, and "every H" is after the steps t with t % H == 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
State = dict[str, Array]


@dataclass(frozen=True)
class Formula:
    """Local SGD with rate `lr`; a subclass says what follows.

    `own` and `shared` name the arrays besides θ, (K, n) and (1, n), which begin at 0; φ begins at θ.
    """

    lr: float = 0.1
    own: ClassVar[tuple[str, ...]] = ()
    shared: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[int] = 1  # equally probable ways to take a step, of those that draw

    def start(self, weights: Array) -> State:
        """The state before step 1, from equal weights (K, n)."""
        zero = np.zeros_like(weights)
        state = {"θ": weights} | dict.fromkeys(self.own, zero) | dict.fromkeys(self.shared, zero[:1])
        return state | ({"φ": weights[: len(state["φ"])]} if "φ" in state else {})

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        """Take step t with the gradients g (K, n) at θ."""
        s["θ"] = s["θ"] - self.lr * g
        self.sync(t, s, choice)

    def sync(self, t: int, s: State, choice: int = 0) -> None:
        """What nodes do after their local step."""

    def sent(self, t: int, n: int) -> float:
        """Bytes that a node hands to collectives after step t, for n weights of 4 bytes."""
        return 0.0


@dataclass(frozen=True)
class AllReduce(Formula):
    """g = mean_k g_k."""

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        s["θ"] = s["θ"] - self.lr * mean(g)

    def sent(self, t: int, n: int) -> float:
        return 4 * n


@dataclass(frozen=True)
class Periodic(Formula):
    """All weights, every H steps."""

    H: int = 4

    def sync(self, t: int, s: State, choice: int = 0) -> None:
        if t % self.H == 0:
            self.meet(s, choice)

    def meet(self, s: State, choice: int) -> None:
        raise NotImplementedError

    def sent(self, t: int, n: int) -> float:
        return 4 * n if t % self.H == 0 else 0


@dataclass(frozen=True)
class FedAvg(Periodic):
    """McMahan et al. 2016, Stich 2018: θ_k ← mean_j θ_j."""

    def meet(self, s: State, choice: int) -> None:
        s["θ"] = all_of(s, mean(s["θ"]))


@dataclass(frozen=True)
class DiLoCo(Periodic):
    """Douillard et al. 2023: Δ = φ − mean_k θ_k; v ← μ v + Δ; φ ← φ − ε (Δ + μ v), or φ − ε v: heavy ball; θ_k ← φ."""

    outer_lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    shared = ("φ", "v")

    def meet(self, s: State, choice: int) -> None:
        outer_step(self, s, s["φ"] - mean(s["θ"]))
        s["θ"] = all_of(s, s["φ"])


@dataclass(frozen=True)
class SlowMo(Periodic):
    """Wang et al. 2019: u ← β u + (φ − mean_k θ_k) / lr; φ ← φ − α lr u; θ_k ← φ."""

    alpha: float = 1.0
    beta: float = 0.5
    shared = ("φ", "u")

    def meet(self, s: State, choice: int) -> None:
        s["u"] = self.beta * s["u"] + (s["φ"] - mean(s["θ"])) / self.lr
        s["φ"] = s["φ"] - self.alpha * self.lr * s["u"]
        s["θ"] = all_of(s, s["φ"])


@dataclass(frozen=True)
class Streaming(DiLoCo):
    """Douillard et al. 2025, one fragment of P: sends Δ at (i + 1) H / P and every H from there.

    τ steps later φ ← outer(φ, Δ), θ_k ← α θ_k + (1 − α) φ.
    """

    fragment: int = 0
    fragments: int = 2
    delay: int = 1
    mixing: float = 0.5
    shared = ("φ", "v", "Δ")

    def sync(self, t: int, s: State, choice: int = 0) -> None:
        if self._sends(t):
            s["Δ"] = s["φ"] - mean(s["θ"])
        if t > self.delay and self._sends(t - self.delay):
            outer_step(self, s, s["Δ"])
            s["θ"] = self.mixing * s["θ"] + (1 - self.mixing) * s["φ"]

    def _sends(self, t: int) -> bool:
        return (t - (self.fragment + 1) * self.H // self.fragments) % self.H == 0

    def sent(self, t: int, n: int) -> float:
        return 4 * n if self._sends(t) else 0


@dataclass(frozen=True)
class Eager(DiLoCo):
    """Kale et al. 2025: d_k = φ_k − θ_k, D = mean_k d_k. Delayed: φ_k ← outer(φ_k, D of the round before).

    Eager: a node puts its own fresh d_k / K in place of its old one.
    """

    eager: bool = True
    own = ("φ", "v", "d")
    shared = ("D",)

    def meet(self, s: State, choice: int) -> None:
        fresh = s["φ"] - s["θ"]
        outer_step(self, s, s["D"] + ((fresh - s["d"]) / len(fresh) if self.eager else 0 * fresh))
        s["d"], s["D"], s["θ"] = fresh, mean(fresh), s["φ"]


@dataclass(frozen=True)
class Hierarchical(Formula):
    """Lin et al. 2018: groups of neighbouring nodes average weights at periods of their own: ((size, H), …)."""

    levels: Sequence[tuple[int, int]] = ((2, 2), (4, 4))

    def sync(self, t: int, s: State, choice: int = 0) -> None:
        for size, H in self.levels:
            if t % H == 0:
                groups = s["θ"].reshape(-1, size, s["θ"].shape[1])
                s["θ"] = np.repeat(groups.mean(1), size, 0)

    def sent(self, t: int, n: int) -> float:
        return 4 * n if any(t % H == 0 for _, H in self.levels) else 0  # where several are due, only the largest


@dataclass(frozen=True)
class NoLoCo(Periodic):
    """Kolehmainen et al. 2025: Δ_k = θ_k − φ_k; m_k ← α m_k + β mean_pair(Δ) + β (mean_pair(φ) − φ_k); φ_k ← φ_k + m_k.

    `choices` are the three ways to pair four nodes.
    """

    alpha: float = 0.5
    beta: float = 0.7
    own = ("φ", "m")
    choices = 3
    pairings: ClassVar = ((1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0))

    def meet(self, s: State, choice: int) -> None:
        other = list(self.pairings[choice])[: len(s["θ"])]  # of two nodes there is one way, the first
        moved, phi = s["θ"] - s["φ"], s["φ"]
        pull = (phi + phi[other]) / 2 - phi
        s["m"] = self.alpha * s["m"] + self.beta * (moved + moved[other]) / 2 + self.beta * pull
        s["θ"] = s["φ"] = phi + s["m"]


@dataclass(frozen=True)
class Sparta(Formula):
    """After every step an entry becomes its mean over the nodes, with probability 1 / `choices`: the first choice."""

    choices = 4

    def sync(self, t: int, s: State, choice: int = 0) -> None:
        if choice == 0:
            s["θ"] = all_of(s, mean(s["θ"]))


def mean(rows: Array) -> Array:
    """(K, n) → (1, n)."""
    return rows.mean(0, keepdims=True)


def all_of(s: State, shared: Array) -> Array:
    """(1, n) → (K, n)."""
    return np.repeat(shared, len(s["θ"]), 0)


def outer_step(by: DiLoCo, s: State, delta: Array) -> None:
    """torch.optim.SGD with momentum: v ← μ v + Δ; φ ← φ − ε (Δ + μ v) by Nesterov, else φ − ε v."""
    s["v"] = by.momentum * s["v"] + delta
    s["φ"] = s["φ"] - by.outer_lr * (delta + by.momentum * s["v"] if by.nesterov else s["v"])
