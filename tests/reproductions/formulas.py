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

    def sent(self, t: int, n: int) -> float:
        return 2 * super().sent(t, n)  # Δ_k, and the new φ_k for the next round


@dataclass(frozen=True)
class Gossip(Periodic):
    """Lian et al. 2017, on a ring of four: θ ← W θ, a third of a node and of each neighbour."""

    H: int = 1
    W: ClassVar = np.array([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]) / 3

    def meet(self, s: State, choice: int) -> None:
        s["θ"] = self.W @ s["θ"]

    def sent(self, t: int, n: int) -> float:
        return 2 * super().sent(t, n)


@dataclass(frozen=True)
class Tracking(Gossip):
    """DIGing, Nedić et al. 2017: y ← W y + g − g_before, at first g; θ ← W θ − η y."""

    own = ("y", "g")

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        s["y"], s["g"] = self.W @ s["y"] + g - s["g"], g
        s["θ"] = self.W @ s["θ"] - self.lr * s["y"]

    def sent(self, t: int, n: int) -> float:
        return 2 * super().sent(t, n)


@dataclass(frozen=True)
class D2(Gossip):
    """Tang et al. 2018, and Yuan et al. 2017 with W̃ = (W + I) / 2: θ ← W (2 θ − θ_before − η (g − g_before)).

    At first θ ← W (θ − η g).
    """

    lazy: bool = False
    own = ("θ_before", "g_before")

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        moved = s["θ"] - self.lr * g
        if t > 1:
            moved = moved + s["θ"] - s["θ_before"] + self.lr * s["g_before"]
        s["θ_before"], s["g_before"] = s["θ"], g
        s["θ"] = ((self.W + np.eye(len(g))) / 2 if self.lazy else self.W) @ moved


@dataclass(frozen=True)
class AdaptThenCombine(Tracking):
    """Xu et al. 2015: y ← W y + g − g_before, at first g; θ ← W (θ − η y)."""

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        s["y"] = self.W @ s["y"] + g - s["g"]
        s["g"] = g
        s["θ"] = self.W @ (s["θ"] - self.lr * s["y"])


@dataclass(frozen=True)
class QuasiGlobal(Gossip):
    """Lin et al. 2021, as in RelaySGD's code: θ' = W (θ − η (μ m + g) / (1 + μ)); m ← μ m + (1 − μ) (θ − θ') / η."""

    momentum: float = 0.9
    own = ("m",)

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        mu, before = self.momentum, s["θ"]
        s["θ"] = self.W @ (before - self.lr * (mu * s["m"] + g) / (1 + mu))
        s["m"] = mu * s["m"] + (1 - mu) * (before - s["θ"]) / self.lr


@dataclass(frozen=True)
class PushedSums(Formula):
    """Assran et al. 2018 on the arrows 0 → 1 → 2 → 0, 2 → 1: x ← P (x − η g(z)); w ← P w; z = x / w; θ is z."""

    own = ("x", "w")
    P: ClassVar = np.array([[1 / 2, 0, 1 / 3], [1 / 2, 1 / 2, 1 / 3], [0, 1 / 2, 1 / 3]])

    def start(self, weights: Array) -> State:
        return {"θ": weights, "x": weights, "w": np.ones_like(weights[:, :1])}

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        s["x"], s["w"] = self.P @ (s["x"] - self.lr * g), self.P @ s["w"]
        s["θ"] = s["x"] / s["w"]

    def sent(self, t: int, n: int) -> float:
        return 2 * 4 * (n + 1)


@dataclass(frozen=True)
class Relay(Formula):
    """Vogels et al. 2021 on a chain: node k has the vector v_j of node j of step t − (|k − j| − 1), if there is one.

    Models: v = θ − η g, and θ_k ← (Σ_j v_j) / n, with θ_0 for vectors that have not arrived. Gradients: v = g, and θ_k
    ← θ_k − η (Σ_j v_j) / n. A node has its own vector and its neighbours' of this step.
    """

    gradients: bool = False

    def start(self, weights: Array) -> State:
        return {"θ": weights, "θ_0": weights}

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        s[f"v {t}"] = g if self.gradients else s["θ"] - self.lr * g
        n, late = len(g), np.zeros_like(g) if self.gradients else s["θ_0"]
        total = np.zeros_like(g)
        for k in range(n):
            for j in range(n):
                total[k] += s.get(f"v {t - max(0, abs(k - j) - 1)}", late)[j]
        s["θ"] = s["θ"] - self.lr * total / n if self.gradients else total / n

    def sent(self, t: int, n: int) -> float:
        return 2 * 4 * (n + (not self.gradients))


@dataclass(frozen=True)
class DelayedNesterov(Periodic):
    """Liu et al. 2024, with equal speeds and N = K: workers arrive one after the other, and each takes the newest φ.

    g = φ_k − θ_k; Δ ← Δ + g. The N-th: m ← β m + Δ / N; φ ← φ − ε ((1 − c N + c) β m + g / N); Δ ← 0. The others:
    φ ← φ − ε (c β m + g / N).
    """

    outer_lr: float = 0.7
    momentum: float = 0.9
    c: float = 0.0
    own = ("φ_k",)
    shared = ("φ", "m")

    def start(self, weights: Array) -> State:
        return super().start(weights) | {"φ_k": weights}

    def meet(self, s: State, choice: int) -> None:
        N, theta, taken, total = len(s["θ"]), list(s["θ"]), list(s["φ_k"]), 0 * s["φ"]
        for k in range(N):
            g, share = taken[k] - theta[k], self.c
            total = total + g
            if k == N - 1:
                s["m"], share = self.momentum * s["m"] + total / N, 1 - self.c * N + self.c
            s["φ"] = s["φ"] - self.outer_lr * (share * self.momentum * s["m"] + g / N)
            theta[k] = s["φ"][0]
        s["θ"] = s["φ_k"] = np.stack(theta)


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


TENSORS = ((0, 1), (2,))  # columns of each parameter, where a formula treats parameters one by one


@dataclass(frozen=True)
class DesLoc(Formula):
    """Iacob et al. 2025: Adam without weight decay, whose θ, m and v are averaged every H, H_m and H_v steps."""

    periods: Sequence[int] = (2, 3, 6)
    betas: tuple[float, float] = (0.9, 0.999)
    own = ("m", "v")

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        b1, b2 = self.betas
        s["m"], s["v"] = b1 * s["m"] + (1 - b1) * g, b2 * s["v"] + (1 - b2) * g**2
        s["θ"] = s["θ"] - self.lr * (s["m"] / (1 - b1**t)) / (np.sqrt(s["v"] / (1 - b2**t)) + 1e-8)
        for name, H in zip(("θ", "m", "v"), self.periods, strict=True):
            if t % H == 0:
                s[name] = all_of(s, mean(s[name]))

    def sent(self, t: int, n: int) -> float:
        return 4 * n * sum(t % H == 0 for H in self.periods)


@dataclass(frozen=True)
class GPA(AllReduce):
    """Defazio et al. 2025: z ← z − lr mean_k g_k, g at y; x ← μ_x x + (1 − μ_x) z; y = μ_y x + (1 − μ_y) z. θ is y."""

    mu_x: float = 0.5
    mu_y: float = 0.75

    def start(self, weights: Array) -> State:
        return {"θ": weights, "x": weights, "z": weights}

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        s["z"] = s["z"] - self.lr * mean(g)
        s["x"] = self.mu_x * s["x"] + (1 - self.mu_x) * s["z"]
        s["θ"] = self.mu_y * s["x"] + (1 - self.mu_y) * s["z"]


@dataclass(frozen=True)
class FedOpt(Periodic):
    """Reddi et al. 2020, algorithm 2: Δ = mean_k θ_k − φ; m ← β₁ m + (1 − β₁) Δ; φ ← φ + η m / (√v + τ), from v = τ².

    "adam": v ← β₂ v + (1 − β₂) Δ²; "yogi": v ← v − (1 − β₂) Δ² sign(v − Δ²); "adagrad": v ← v + Δ².
    """

    kind: str = "adam"
    server_lr: float = 0.03
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3
    shared = ("φ", "m", "v")

    def start(self, weights: Array) -> State:
        state = super().start(weights)
        return state | {"v": state["v"] + self.tau**2}

    def meet(self, s: State, choice: int) -> None:
        (b1, b2), delta, v = self.betas, mean(s["θ"]) - s["φ"], s["v"]
        s["m"] = b1 * s["m"] + (1 - b1) * delta
        s["v"] = {
            "adam": b2 * v + (1 - b2) * delta**2,
            "yogi": v - (1 - b2) * delta**2 * np.sign(v - delta**2),
            "adagrad": v + delta**2,
        }[self.kind]
        s["φ"] = s["φ"] + self.server_lr * s["m"] / (np.sqrt(s["v"]) + self.tau)
        s["θ"] = all_of(s, s["φ"])


@dataclass(frozen=True)
class FedProx(FedAvg):
    """Li et al. 2018: FedAvg with gradients of f_k(θ) + μ/2 ‖θ − φ‖²."""

    mu: float = 0.5
    shared = ("φ",)

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        super().step(t, s, g + self.mu * (s["θ"] - s["φ"]))

    def meet(self, s: State, choice: int) -> None:
        super().meet(s, choice)
        s["φ"] = mean(s["θ"])


@dataclass(frozen=True)
class Scaffold(Periodic):
    """Karimireddy et al. 2019, option II: θ_k ← θ_k − lr (g_k − c_k + c).

    Every H steps c_k⁺ = c_k − c + (φ − θ_k) / (H lr), c ← c + mean_k (c_k⁺ − c_k), φ ← φ + η_g mean_k (θ_k − φ).
    """

    server_lr: float = 1.0
    own = ("c_k",)
    shared = ("φ", "c")

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        super().step(t, s, g - s["c_k"] + s["c"])

    def meet(self, s: State, choice: int) -> None:
        fresh = s["c_k"] - s["c"] + (s["φ"] - s["θ"]) / (self.H * self.lr)
        s["c"], s["c_k"] = s["c"] + mean(fresh - s["c_k"]), fresh
        s["φ"] = s["φ"] + self.server_lr * (mean(s["θ"]) - s["φ"])
        s["θ"] = all_of(s, s["φ"])

    def sent(self, t: int, n: int) -> float:
        return 2 * super().sent(t, n)


@dataclass(frozen=True)
class FedNova(FedAvg):
    """Wang et al. 2020: φ ← φ + (Σ_k p_k τ_k) Σ_k p_k (θ_k − φ) / τ_k, here with equal τ_k, which are sent, too."""

    def sent(self, t: int, n: int) -> float:
        return super().sent(t, n) + (4 if t % self.H == 0 else 0)


@dataclass(frozen=True)
class FedDyn(Periodic):
    """Acar et al. 2021: gradients of f_k(θ) − ⟨h_k, θ⟩ + α/2 ‖θ − φ‖².

    Every H steps h_k ← h_k − α (θ_k − φ), h ← h − α mean_k (θ_k − φ), φ ← mean_k θ_k − h / α.
    """

    alpha: float = 0.5
    own = ("h_k",)
    shared = ("φ", "h")

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        super().step(t, s, g - s["h_k"] + self.alpha * (s["θ"] - s["φ"]))

    def meet(self, s: State, choice: int) -> None:
        moved = s["θ"] - s["φ"]
        s["h_k"], s["h"] = s["h_k"] - self.alpha * moved, s["h"] - self.alpha * mean(moved)
        s["φ"] = mean(s["θ"]) - s["h"] / self.alpha
        s["θ"] = all_of(s, s["φ"])


@dataclass(frozen=True)
class Personal(FedAvg):
    """FedPer [Arivazhagan et al. 2019], FedBN [Li et al. 2021]: FedAvg of the first parameter; the others stay."""

    def meet(self, s: State, choice: int) -> None:
        shared = list(TENSORS[0])
        s["θ"][:, shared] = mean(s["θ"][:, shared])

    def sent(self, t: int, n: int) -> float:
        return super().sent(t, len(TENSORS[0]))


@dataclass(frozen=True)
class Clipped(Periodic):
    """McMahan et al. 2017, without noise: φ ← φ + mean_k (θ_k − φ) min(1, C / ‖θ_k − φ‖)."""

    clip: float = 0.5
    shared = ("φ",)

    def meet(self, s: State, choice: int) -> None:
        moved = s["θ"] - s["φ"]
        norms = np.linalg.norm(moved, axis=1, keepdims=True)
        s["φ"] = s["φ"] + mean(moved * np.minimum(1, self.clip / norms))
        s["θ"] = all_of(s, s["φ"])


@dataclass(frozen=True)
class EDiT(DiLoCo):
    """Cheng et al. 2024, while no norm is judged: Δ = Σ_k w_k D_k, w_k = softmax_k(−‖D_k‖) of each parameter.

    ‖Δ‖ is at most `clip`. A norm of each parameter is sent besides the weights.
    """

    clip: float = 10.0

    def meet(self, s: State, choice: int) -> None:
        moved, delta = s["φ"] - s["θ"], np.zeros_like(s["φ"])
        for columns in map(list, TENSORS):
            weights = np.exp(-np.linalg.norm(moved[:, columns], axis=1))
            delta[0, columns] = weights @ moved[:, columns] / weights.sum()
        outer_step(self, s, delta * min(1, self.clip / np.linalg.norm(delta)))
        s["θ"] = all_of(s, s["φ"])

    def sent(self, t: int, n: int) -> float:
        return super().sent(t, n) + (4 * len(TENSORS) if t % self.H == 0 else 0)


@dataclass(frozen=True)
class SparseLoCo(Periodic):
    """Sarfi et al. 2025, without quantization, and the largest entry of each parameter.

    e_k ← β e_k + φ − θ_k; q_k = top(e_k); e_k ← e_k − q_k; φ ← φ − α mean(q_k), of an entry over those who sent it.
    Indices of packed bits: one of the first parameter's two entries, none of the second's one.
    """

    error_feedback: float = 0.95
    outer_lr: float = 1.0
    own = ("e",)
    shared = ("φ",)

    def meet(self, s: State, choice: int) -> None:
        s["e"] = self.error_feedback * s["e"] + s["φ"] - s["θ"]
        kept = largest(s["e"])
        s["φ"] = s["φ"] - self.outer_lr * mean_of_senders(np.where(kept, s["e"], 0), kept)
        s["e"] = np.where(kept, 0, s["e"])
        s["θ"] = all_of(s, s["φ"])

    def sent(self, t: int, n: int) -> float:
        return 1 + 4 * len(TENSORS) if t % self.H == 0 else 0


@dataclass(frozen=True)
class DeMo(Formula):
    """Peng et al. 2024: θ ← (1 − lr λ) θ; δ_k ← β δ_k + lr g_k; q_k = the largest DCT coefficient of each parameter.

    δ_k ← δ_k − DCT⁻¹(q_k); θ ← θ − lr sign(DCT⁻¹(mean of the q_k, of each coefficient over those who sent it)). An
    index of 8 bytes and a value of 4 for each parameter.
    """

    decay: float = 0.9
    weight_decay: float = 0.0
    own = ("δ",)

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        basis = np.eye(g.shape[1])  # rows: the orthonormal DCT-II of two entries, and that of one
        basis[:2, :2] = np.array([[1, 1], [1, -1]]) / np.sqrt(2)
        coefficients = (self.decay * s["δ"] + self.lr * g) @ basis.T
        kept = largest(coefficients)
        s["δ"] = np.where(kept, 0, coefficients) @ basis
        step = np.sign(mean_of_senders(np.where(kept, coefficients, 0), kept) @ basis)
        s["θ"] = (1 - self.lr * self.weight_decay) * s["θ"] - self.lr * step

    def sent(self, t: int, n: int) -> float:
        return 12 * len(TENSORS)


@dataclass(frozen=True)
class DeMo2(DeMo):
    """Peng et al. 2026: as `DeMo`, but δ_k ← β δ_k + (1 − β) g_k; δ_k ← δ_k − α DCT⁻¹(q_k); and no sign.

    The mean of the q_k is over all nodes.
    """

    alpha: float = 0.25

    def step(self, t: int, s: State, g: Array, choice: int = 0) -> None:
        basis = np.eye(g.shape[1])
        basis[:2, :2] = np.array([[1, 1], [1, -1]]) / np.sqrt(2)
        coefficients = (self.decay * s["δ"] + (1 - self.decay) * g) @ basis.T
        sent = np.where(largest(coefficients), coefficients, 0)
        s["δ"] = (coefficients - self.alpha * sent) @ basis
        step = sent.mean(0, keepdims=True) @ basis
        s["θ"] = (1 - self.lr * self.weight_decay) * s["θ"] - self.lr * step


def largest(rows: Array) -> NDArray[np.bool_]:
    """Where each row has its largest magnitude of each parameter."""
    kept = np.zeros(rows.shape, bool)
    for columns in map(np.array, TENSORS):
        kept[np.arange(len(rows)), columns[abs(rows[:, columns]).argmax(1)]] = True
    return kept


def mean_of_senders(sent: Array, kept: NDArray[np.bool_]) -> Array:
    """(K, n) → (1, n): of each column the mean over the rows that sent it, 0 where none did."""
    return sent.sum(0, keepdims=True) / np.maximum(kept.sum(0, keepdims=True), 1)
