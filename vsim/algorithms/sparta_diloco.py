"""SPARTA between the syncs of DiLoCo, each with its own interval."""

from __future__ import annotations

from vsim.algorithms.diloco import DiLoCoStrategy
from vsim.algorithms.selectors import IndexSelector
from vsim.algorithms.sparta import SPARTAStrategy
from vsim.core.algorithm import Composed, Optim
from vsim.core.average import Averaging
from vsim.core.fields import algorithm
from vsim.core.when import When, schedule_of


@algorithm
class SPARTADiLoCoStrategy(Composed):
    """SPARTA between the syncs of DiLoCo, each with its own interval [Beton et al. 2025,
    openreview.net/forum?id=stFPf3gzq1].

        θ_k ← inner optimizer(θ_k, g_k)
        after every `sparta_interval`-th step:  θ_k[S] ← mean_j θ_j[S]
        then, after every H-th step:  Δ = mean_k (φ − θ_k);  φ ← outer optimizer(φ, Δ);  θ_k ← φ

    SPARTA and DiLoCo are independent: with an `async_delay`, SPARTA's means from before a sync of DiLoCo are written
    after the sync, and "topk" treats the move of a sync like any other move.

    Args:
        index_selector: chooses S: `RandomIndexSelector(p)` (the default), `ShuffledSequentialIndexSelector(p)`,
            `PartitionedIndexSelector(p)` or a subclass of `IndexSelector`.
        p_sparta: p, the share of the entries, 0 < p ≤ 1; default 0.005. Give either this rate or an
            `index_selector`.
        sparta_interval: steps of a round, at least 1.
        async_delay: d, rounds until a mean is written: at the end of round r + d, the mean of round r overwrites the
            entries S of round r, and discards all changes since then. Means of a run's last d rounds are never written.
        compression_method: "random": the selector chooses S. "topk": in every tensor of n entries, every node nominates
            the ⌈p·n⌉ entries that have moved furthest since this module last shared them; S is the union.
        quantization_bits: b, 1 to 16: a node rounds its values to b bits, uniformly, with a scale for every tensor (see
            `vsim_kernels.quantize`), and an all-gather sends them. None: an all-reduce averages the exact values.
        mask: "seed": all nodes draw S from the run's seed, at no cost. "broadcast": node 0 sends a mask.
        H: inner steps between syncs, at least 1, or a schedule of `vsim.strategy.when`. The paper uses 500.
        outer_optim: the outer optimizer: an `OptimSpec`, class or name. Default SGD, lr 0.7, momentum 0.9, Nesterov.
        outer_lr: the outer learning rate.
        average: merges the φ − θ_k: "mean", "median", trimmed_mean(0.2), mean("examples") | clip("median"),
            compress(TopK(0.01)), …; see `vsim.strategy.average`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: 4·p·P bytes every `sparta_interval` steps on average, and all weights every H steps.

    Raises:
        TypeError: two arguments contradict each other.

    Deviations from the paper: the authors' code broadcasts a mask every round; mask="broadcast" counts its bytes. Here
    all nodes draw the same mask from a shared seed. "topk" and `quantization_bits` are additions.
    """

    family = "local steps"

    outer_optim: Optim = None
    p_sparta: float | None = None
    sparta_interval: int = 1
    H: int | When = 100
    index_selector: IndexSelector | None = None
    async_delay: int = 0
    compression_method: str = "random"
    quantization_bits: int | None = None
    mask: str = "seed"
    outer_lr: float | None = None
    average: Averaging = Averaging("mean")

    def __post_init__(self) -> None:
        self.composed = [self.part(SPARTAStrategy), self.part(DiLoCoStrategy)]
        if schedule_of(self.H).has_warmup:
            raise ValueError(
                f"SPARTADiLoCoStrategy(): H must be a number or a schedule without a warm-up, got {self.H!r}: "
                "SPARTA would send entries of weights that are equal then"
            )
        super().__post_init__()
