"""DES-LOC: local steps, where weights and the optimizer's moments are averaged, each with its own period."""

from __future__ import annotations

import torch

from vsim.algorithms.fedavg import FedAvgStrategy
from vsim.arguments import a_text, whole_number
from vsim.cluster import Cluster
from vsim.cluster.optimizers import states_by_node
from vsim.core.algorithm import Algorithm, Composed
from vsim.core.fields import algorithm

# Names of the moments in torch's optimizers.
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "sum")


@algorithm
class StateAverage(Algorithm):
    """Average one kind of state s of the inner optimizer, after every H-th step: s_k ← mean_j s_j.

    Args:
        name: the optimizer's name for s, such as "exp_avg".
        H: steps between syncs.

    Payload: the bytes of the state, every H steps.

    Raises:
        ValueError: at a sync, the inner optimizer has no such state.
    """

    name: str
    H: int = 1

    def __post_init__(self) -> None:
        self.name = a_text("name", self.name)
        self.H = whole_number("H", self.H)
        super().__post_init__()

    def sync(self, cluster: Cluster) -> None:
        nodes = states_by_node(cluster.optim, self.name, cluster.replicas)
        sizes = [tensor.numel() for tensor in nodes[0]]
        flat = [[tensor.reshape(-1) for tensor in node] for node in nodes]
        rows = torch.stack([own[0] if len(own) == 1 else torch.cat(own) for own in flat])  # (R, P)
        with cluster.collectives.joined():  # one message with all other averages of this step
            mean = cluster.collectives.all_reduce(rows, "mean", label=self.name)
        parts = [part.view_as(tensor) for part, tensor in zip(mean.split(sizes), nodes[0], strict=True)]
        torch._foreach_copy_([tensor for node in nodes for tensor in node], parts * len(nodes))


@algorithm
class DESLOCStrategy(Composed):
    """Average weights and the optimizer's moments, each at its period: DES-LOC [Iacob et al. 2025, arXiv:2505.22549].

        θ_k, m_k, v_k ← inner optimizer(θ_k, g_k)
        θ_k ← mean_j θ_j after every H-th step, m_k ← mean_j m_j after every H_m-th, v_k ← mean_j v_j after every H_v-th

    m and v are the moments that the optimizer keeps: both in Adam and its variants, only m in SGD with momentum, only v
    in RMSprop or Adagrad. H = H_m = H_v is local Adam; without averages of the moments, this is FedAvg.

    v_k is 0 at an entry whose gradients on node k have all been 0 (a pixel that is black in its images, a token that it
    never met). If the other nodes' m arrives before their v, Adam steps by lr·m/eps, and weights explode. With sparse
    gradients, average v and m together, H_v = H_m, or choose a larger eps.

    Args:
        H: steps between averagings of the weights, at least 1. K_x in the paper.
        H_m: steps between averagings of the first moment; default 3 H. K_u in the paper.
        H_v: steps between averagings of the second moment; default 6 H. K_v in the paper.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: P entries at each averaging, on average P · (1/H + 1/H_m + 1/H_v) per step; averagings in the same step are
    one message. AMSGrad's maximum of the second moments is averaged with them, and costs as many bytes.

    Raises:
        TypeError: the inner optimizer keeps no moment, or not the moment for which a period is given; or it is two
            optimizers, each of which would need its own periods.

    Deviations from the paper: none in the update; `max_norm` clips by norm, but the paper's analysis clips by element.
    """

    family = "local steps"

    H: int = 32
    H_m: int | None = None
    H_v: int | None = None

    def __post_init__(self) -> None:
        self.H = whole_number("H", self.H)
        self.composed = [FedAvgStrategy(H=self.H)]
        super().__post_init__()
        if not self.optim_spec.is_single:
            raise TypeError(f"DESLOCStrategy(): {self.optim_spec} is two optimizers, each with moments of its own")
        first = self._averages("H_m", self.H_m, 3 * self.H, FIRST_MOMENTS)
        second = self._averages("H_v", self.H_v, 6 * self.H, SECOND_MOMENTS)
        if not (first or second):
            raise TypeError(
                f"DESLOCStrategy(): {self._keeps((*FIRST_MOMENTS, *SECOND_MOMENTS))}: there is nothing to average but "
                f"the weights, which FedAvgStrategy(H={self.H}) does"
            )
        self.composed += [*first, *second]

    def _averages(self, argument: str, given: int | None, default: int, names: tuple[str, ...]) -> list[StateAverage]:
        """Return modules that average, with the given period, those moments among `names` that the optimizer keeps."""
        H, kept = whole_number(argument, default if given is None else given), self.optim_spec.state_names()
        averages = [StateAverage(name=name, H=H) for name in names if name in kept]
        if given is not None and not averages:
            raise TypeError(f"DESLOCStrategy(): {argument}={given} has no effect: {self._keeps(names)}")
        return averages

    def _keeps(self, names: tuple[str, ...]) -> str:
        return f"{self.optim_spec} is not known to keep any of {', '.join(names)}"
