"""Two levels or more: neighbouring machines communicate often, all machines rarely."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from vsim.algorithms.allreduce import SimpleReduceStrategy
from vsim.algorithms.diloco import DiLoCoStrategy
from vsim.algorithms.fedavg import FedAvgStrategy
from vsim.arguments import naming, whole_number
from vsim.cluster import Cluster
from vsim.core.algorithm import Algorithm, Composed, Optim
from vsim.core.average import AverageLike, Averaging
from vsim.core.fields import algorithm
from vsim.core.when import When, sync_interval


@algorithm
class GroupAverage(Algorithm):
    """Average in groups of neighbouring nodes: gradients at every step if H is 1, else weights every H steps.

    Args:
        size: nodes in a group: 0 … size − 1, size … 2·size − 1, and so on.
        H: steps between averagings.
        larger: algorithms that average over more nodes; if one of them averages weights after the same step, or
            gradients before it, this one skips the step.
        average: a rule of `vsim.strategy.average`.
    """

    size: int
    H: int = 1
    average: Averaging = Averaging("mean", origin=False)
    larger: tuple[Algorithm, ...] = ()

    def __post_init__(self) -> None:
        self.size, self.H = whole_number("size", self.size, at_least=2), whole_number("H", self.H)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        self.check_nodes(cluster)
        self.average.setup(cluster)

    def check_nodes(self, cluster: Cluster) -> None:
        self.average.rule.check(self.size)

    def communicate_gradients(self, cluster: Cluster) -> None:
        if self.H == 1 and not any(module.when.is_warmup(cluster.step) for module in self.larger):
            cluster.grads.copy_(self._averaged(cluster.grads, cluster, "gradients"))

    def sync(self, cluster: Cluster) -> None:
        if self.H != 1 and not any(module.when.ends_with(cluster.step) for module in self.larger):
            cluster.weights.copy_(self._averaged(cluster.weights, cluster, "weights"))

    def _averaged(self, rows: Any, cluster: Cluster, what: str) -> Any:
        groups: dict[int, list[int]] = {}
        for node in cluster.active:
            groups.setdefault(node // self.size, []).append(node)
        return self.average(rows, cluster, f"{what} in groups of {self.size}", list(groups.values()))


@algorithm
class HierarchicalStrategy(Composed):
    """Average nested groups of nodes, each level at its own period, such as machines in a DiLoCo worker: hierarchical
    local SGD [Lin et al. 2018, arXiv:1808.07217].

        levels = {4: 1, 16: 50}:  g_k ← mean of the gradients in k's group of 4, at every step;
                                  θ_k ← mean of all 16 nodes' weights, after every 50th step

    A group has neighbouring nodes, in the numbering of `Network.regions`: an inner level then uses the links inside a
    region. If several levels would average weights after the same step, or gradients in a warm-up, only the largest
    level does.

    Args:
        levels: number of nodes in a group → H. Each size is a multiple of the next smaller size, and has a larger H;
            the largest size is the number of all nodes. H = 1 averages gradients, H > 1 weights. The largest level's H
            may be a schedule of `vsim.strategy.when`.
        outer: an outer optimizer for the largest level, which is then DiLoCo: an `OptimSpec`, class or name.
        outer_lr: the outer learning rate.
        average: merges vectors: one average for all levels, or a dict: number of nodes in a group → average. Only the
            largest level takes clip(), compress(), and rules that need moves.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all gradients or weights at each level, in its groups.

    Deviations from torch.distributed's `HierarchicalModelAverager`: nodes average after H, 2H, … steps, not after
    1, 1 + H, …; and if H is 1, gradients are sent in place of weights, as in DDP.
    """

    family = "local steps"

    levels: Mapping[int, int | When] = field(kw_only=False)
    outer: Optim = None
    outer_lr: float | None = None
    average: Any = "mean"  # AverageLike | Mapping[int, AverageLike]

    def __post_init__(self) -> None:
        self.sizes = _checked(self.levels)
        averages = _by_size(self.average, self.sizes)
        *inner, last = self.sizes
        with naming(f"levels[{last}]"):
            H = sync_interval(self.levels[last])
        of_all = averages[last]
        top: Algorithm
        if self.outer is not None or self.outer_lr is not None:
            with naming("outer"):
                top = DiLoCoStrategy(H=H, outer_optim=self.outer, outer_lr=self.outer_lr, average=of_all)
        else:
            top = SimpleReduceStrategy(average=of_all) if H == 1 else FedAvgStrategy(H=H, average=of_all)
        self.composed = [top]
        for size in reversed(inner):
            own, larger = int(self.levels[size]), tuple(self.composed)  # type: ignore[arg-type]
            with naming(f"a group of {size}"):
                self.composed.insert(0, GroupAverage(size=size, H=own, average=averages[size], larger=larger))
        super().__post_init__()

    def begin(self, cluster: Cluster) -> None:
        if cluster.plan is not None and cluster.plan.renews:
            raise ValueError("HierarchicalStrategy has groups of machines, and participation=Sample(…) draws clients")
        if self.sizes[-1] != cluster.population:
            raise ValueError(f"the largest level must be all {cluster.population} nodes, got levels of {self.sizes}")
        super().begin(cluster)


def _checked(levels: Any) -> list[int]:
    """Return the sizes of groups, in ascending order, after checking that larger groups have longer periods."""
    if not isinstance(levels, Mapping) or not levels:
        raise TypeError(f"levels must be a dict, nodes in a group → H, such as {{4: 1, 16: 50}}, got {levels!r}")
    sizes = sorted(whole_number("levels: nodes in a group", size, at_least=2) for size in levels)
    for size, larger in itertools.pairwise(sizes):
        if larger % size:
            raise ValueError(f"levels: groups of {larger} cannot be made of groups of {size}")
        H, above = whole_number(f"levels[{size}]", levels[size]), levels[larger]
        if not isinstance(above, When) and whole_number(f"levels[{larger}]", above) <= H:
            raise ValueError(f"levels: larger groups average less often, got {dict(levels)}")
    return sizes


def _by_size(average: AverageLike | Mapping[int, AverageLike], sizes: list[int]) -> dict[int, AverageLike]:
    """Return size → average, for groups of all sizes."""
    averages = dict(average) if isinstance(average, Mapping) else dict.fromkeys(sizes, average)
    if odd := [size for size in averages if size not in sizes]:
        raise ValueError(f"average is for groups of {odd}, and levels has {sizes}")
    return {size: averages.get(size, "mean") for size in sizes}
