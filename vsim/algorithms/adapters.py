"""Federated fine-tuning with low-rank adapters: five rules by which the clients' pairs become one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vsim.algorithms.fedavg import RoundAverage
from vsim.arguments import one_of, real_number
from vsim.cluster import Cluster
from vsim.cluster.replicas import Columns
from vsim.core.attack import Attack
from vsim.core.fields import algorithm, state
from vsim.core.fragments import Fragment
from vsim.core.when import When

RULES = ("fedit", "ffa", "fedsa", "flora", "fedex")
OF_PRODUCTS = ("flora", "fedex")  # which change W₀


class Pair(NamedTuple):
    """The adapter of one weight: A (r, m) and B (n, r), and trainable weights (n, m) of its module."""

    a: Columns
    b: Columns
    bases: list[Columns]


@algorithm
class AdapterStrategy(RoundAverage):
    """Train low-rank adapters on clients, and merge them by one of five rules: FedIT [Zhang et al. 2023,
    arXiv:2305.05644], FFA-LoRA [Sun et al. 2024, arXiv:2403.12313], FedSA-LoRA [Guo et al. 2024, arXiv:2410.01463],
    FLoRA [Wang et al. 2024, arXiv:2409.05976] and FedEx-LoRA [Singhal et al. 2024, arXiv:2410.09432].

    A weight of client k is W = W₀ + s·B_k A_k, with B_k (n, r) and A_k (r, m). After every H-th step, by `rule`:

        "fedit"   A_k ← mean A_j;  B_k ← mean B_j, whose product is not the mean of the products
        "ffa"     B_k ← mean B_j;  A stays at its initial value
        "fedsa"   A_k ← mean A_j;  B_k stays with its client
        "flora"   W₀ ← W₀ + s·mean (B_j A_j);  A is drawn again with the spread of its initial values, and B_k ← 0
        "fedex"   W₀ ← W₀ + s·(mean (B_j A_j) − mean B_j · mean A_j), and as "fedit"

    Adapters are the parameters with `lora_A` and `lora_B` in their names, as in peft. Other trainable parameters, such
    as a classifier, are averaged in all rules. "flora" and "fedex" change W₀, which therefore must be trainable in the
    model (requires_grad=True), so that each node has its own: the strategy keeps it from training, in all rules.

    Args:
        rule: see above.
        scaling: s, for "flora" and "fedex". Default: the attribute `scaling` of the module that has the adapter.
        H: local steps between merges, at least 1, or a schedule of `vsim.strategy.when` without a warm-up.
        average: merges what is averaged; a plain mean with "flora" and "fedex". See `FedAvgStrategy`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: 4·r·(n + m) bytes for each adapter every H steps; 4·r·n with "ffa", 4·r·m with "fedsa". With "flora" and
    "fedex" all nodes gather the adapters, K times as many bytes as they send.

    Raises:
        ValueError: at setup, the model has no adapters, or "flora" or "fedex" do not find one trainable W₀ and s.

    Deviations from the papers: H counts steps, not epochs; all clients have one rank; optimizers keep their moments
    when adapters are merged or drawn again. FedEx-LoRA's server sends the residual in factors of rank K·r; here nodes
    gather the adapters, which are as large.
    """

    family = "federated"
    derived: ClassVar[tuple[str, ...]] = ("pairs", "scales", "adapters", "sent", "personal", "unpulled_bytes")

    rule: str = "fedit"
    scaling: float | None = None
    H: int | When = 10

    personal_adapters: Tensor = state()  # "fedsa": each client's B, as last recorded, stacked (R, p)
    spread: dict[str, Tensor] = state()  # "flora": name of each A → standard deviation of its initial values

    def __post_init__(self) -> None:
        self.rule = one_of("rule", self.rule, RULES)
        if self.scaling is not None:
            self.scaling = real_number("scaling", self.scaling)
            if self.rule not in OF_PRODUCTS:
                raise TypeError(f"scaling={self.scaling:g} has no effect with rule={self.rule!r}; remove it")
        if self.rule in OF_PRODUCTS and not (self.average.is_mean and self.average.rule.by == "nodes"):
            raise TypeError(f"rule={self.rule!r} merges by a plain mean, got average={self.average!r}; remove it")
        super().__post_init__()

    def take_attack(self, attack: Attack, name: str) -> bool:
        return self.rule not in OF_PRODUCTS and super().take_attack(attack, name)

    def setup(self, cluster: Cluster) -> None:
        layout = cluster.replicas.layout
        if self.when.has_warmup:
            raise ValueError(f"AdapterStrategy: H={self.H!r} begins with a warm-up; take a number of steps")
        self.pairs = pairs_of(layout)
        if not self.pairs:
            raise ValueError(f"AdapterStrategy: no names have lora_A and lora_B: {[c.name for c in layout]}")
        a, b = [pair.a for pair in self.pairs], [pair.b for pair in self.pairs]
        fixed = [base for pair in self.pairs for base in pair.bases] + a * (self.rule == "ffa")
        cluster.frozen |= dict.fromkeys((c.name for c in fixed), True)
        unsent = fixed + b * (self.rule == "fedsa") + (a + b) * (self.rule in OF_PRODUCTS)
        self.adapters, self.personal = Fragment(a + b), Fragment(b)
        self.sent = Fragment([c for c in layout if c not in unsent])
        unpulled = 0 if self.rule in OF_PRODUCTS else sum(c.stop - c.start for c in unsent)
        self.unpulled_bytes = unpulled * cluster.weights.element_size()
        if self.rule in OF_PRODUCTS:
            self.scales = {p.a.name: scaling_of(p, cluster.replicas.module, self) for p in self.pairs}
        if self.rule == "flora":
            views = cluster.replicas.views(cluster.weights)
            self.keep_shared(spread={c.name: views[c.name][0].std(correction=0) for c in a})
        if self.rule == "fedsa":
            self.keep_client(personal_adapters=self.personal.of(cluster.weights).clone())
        if self.sent.ranges:
            super().setup(self.sent.alone(cluster))

    def sync(self, cluster: Cluster) -> None:
        self.remember(cluster)
        if self.rule in OF_PRODUCTS:
            self._merge(cluster)
        if self.sent.ranges:
            super().sync(part := self.sent.alone(cluster))
            for view, averaged in zip(self.sent.views(cluster.weights), self.sent.cut(part.weights), strict=True):
                view.copy_(averaged)

    def _merge(self, cluster: Cluster) -> None:
        """Add to W₀ what the mean of the products has more than the new adapters, which "flora" and "fedex" set."""
        part, rows = self.adapters.alone(cluster), cluster.replicas.views(cluster.weights)
        gathered = part.replicas.views(cluster.collectives.all_gather(part.weights, label="adapters"))
        for pair in self.pairs:
            a, b, (base,) = gathered[pair.a.name], gathered[pair.b.name], pair.bases  # (K, r, m), (K, n, r)
            change = torch.cat([*b], dim=1) @ torch.cat([*a]) / len(a)  # (n, K·r) · (K·r, m)
            new_a, new_b = a.mean(0), b.mean(0)
            if self.rule == "flora":
                drawn = torch.randn(a.shape[1:], generator=cluster.generator).to(a)
                new_a, new_b = drawn * self.spread[pair.a.name], torch.zeros_like(new_b)
            change -= new_b @ new_a
            rows[base.name].add_(change, alpha=self.scales[pair.a.name])
            rows[pair.a.name].copy_(new_a)
            rows[pair.b.name].copy_(new_b)

    @property
    def is_personal(self) -> bool:
        return self.rule == "fedsa"

    @property
    def personal_bytes(self) -> int:
        return self.unpulled_bytes

    def shared_weights(self, weights: Tensor) -> Tensor:
        return self.sent.of(weights) if self.rule == "fedsa" else weights

    def attend(self, cluster: Cluster) -> None:
        if self.rule == "fedsa" and cluster.plan is not None and cluster.plan.renews:
            self.personalize(cluster.weights, {}, {"personal_adapters": self.personal_adapters})

    def remember(self, cluster: Cluster) -> None:
        if self.rule == "fedsa":
            self.personal_adapters.copy_(self.personal.of(cluster.weights))

    def personalize(self, weights: Tensor, buffers: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        if self.rule == "fedsa":
            kept = self.personal.cut(own["personal_adapters"])
            for view, mine in zip(self.personal.views(weights), kept, strict=True):
                view.copy_(mine)


def pairs_of(layout: list[Columns]) -> list[Pair]:
    """Return the adapters of a model, each with the trainable weights of its shape in the same module."""
    by_name, pairs = {c.name: c for c in layout}, []
    for a in layout:
        found = re.fullmatch(r"((?:.*\.)?)lora_A((?:\..*)?)", a.name)
        b = by_name.get(f"{found[1]}lora_B{found[2]}") if found else None
        if found is None or b is None:
            continue
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise ValueError(f"{a.name} must be (r, m) and {b.name} (n, r), got {[*a.shape]} and {[*b.shape]}")
        shape = torch.Size([b.shape[0], a.shape[1]])
        near = [c for c in layout if c.name.startswith(found[1]) and "lora_" not in c.name and c.shape == shape]
        pairs.append(Pair(a, b, near))
    return pairs


def scaling_of(pair: Pair, model: nn.Module, strategy: AdapterStrategy) -> float:
    """Return s of an adapter whose W₀ can be changed."""
    prefix, _, rest = pair.a.name.rpartition("lora_A")
    module = model.get_submodule(prefix.rstrip("."))
    if len(pair.bases) != 1 or getattr(module, "fan_in_fan_out", False):
        place, shape = prefix.rstrip(".") or "the model", [pair.b.shape[0], pair.a.shape[1]]
        raise ValueError(
            f"rule={strategy.rule!r} changes the weight of {pair.a.name}: {place} must have one trainable parameter of "
            f"shape {shape}, not transposed, and has {[c.name for c in pair.bases]}. Set its requires_grad=True: the "
            "strategy keeps it from training"
        )
    own: Any = getattr(module, "scaling", None) if strategy.scaling is None else strategy.scaling
    own = own.get(rest.split(".")[1]) if isinstance(own, dict) and rest else own  # of peft: adapter → scaling
    if not isinstance(own, int | float):
        raise ValueError(f"rule={strategy.rule!r}: the module of {pair.a.name} has no attribute scaling; give scaling=")
    return float(own)
