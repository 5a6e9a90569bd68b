"""Steps before the rule: limit the length of vectors, and send them with fewer bytes."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from vsim.arguments import one_of, real_number
from vsim.cluster import Cluster
from vsim.cluster.state import Stateful
from vsim.core.average.base import Part, norms_of, positive
from vsim.core.average.robust import Median
from vsim.core.compressor import Compressor, by_node


@dataclass(frozen=True, repr=False)
class Clip(Part):
    """Scale down every node's vector whose 2-norm exceeds a limit.

    A vector whose norm is no longer a number of float32, such as one of entries of 1e19, becomes 0. NaN and ∞ stay NaN:
    add a rule that leaves such vectors out.

    Args:
        norm: the limit, above 0; or "median", the median of all nodes' norms, which are gathered at 4 bytes per node.
    """

    role = "limit"
    norm: float | str

    def __post_init__(self) -> None:
        if isinstance(self.norm, str):
            one_of("clip: norm", self.norm, ["median"])
        else:
            object.__setattr__(self, "norm", real_number("clip: norm", self.norm, above=0))

    def __call__(self, rows: Tensor, cluster: Cluster, label: str) -> None:
        """Scale stacked `rows` (R, P) in place."""
        norms = by_node(cluster, norms_of, rows)  # (R, 1)
        gathers = isinstance(self.norm, str)
        self.scale(rows, norms, cluster.collectives.all_gather(norms, label=f"{label}: norms") if gathers else norms)

    def scale(self, rows: Tensor, norms: Tensor, of_all: Tensor) -> None:
        """Scale stacked `rows` (n, P) in place, given their `norms` (n, 1) and all nodes' norms `of_all` (K, 1)."""
        limit = Median()(of_all) if isinstance(self.norm, str) else self.norm
        rows.mul_((limit / positive(norms)).clamp(max=1.0))


class Compress(Stateful, Part):
    """Send vectors with fewer bytes, and add each message's error to the next message.

        e_k ← β·e_k + v_k;  send C(e_k);  e_k ← e_k − C(e_k);  every node gets the average of the C(e_k)

    Args:
        compressor: C, and how its messages are averaged. A copy is used.
        error_feedback: β in [0, 1]. True is 1, False 0. Default: 1 for a contractive compressor; 0 for other
            compressors, whose errors would grow.

    Payload: the compressor's.

    Raises:
        ValueError: error feedback with a compressor that is not contractive.

    Source: error feedback [Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847].
    """

    role = "message"
    residual: list[Tensor]  # e_k, stacked, in the form of the compressor's `arrange`

    def __init__(self, compressor: Compressor, error_feedback: bool | float | None = None) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"compressor must be a Compressor object, got {compressor!r}")
        if error_feedback is None:
            error_feedback = compressor.contractive
        if isinstance(error_feedback, bool):
            error_feedback = float(error_feedback)
        self.error_feedback = real_number("error_feedback", error_feedback, at_least=0, at_most=1)
        if self.error_feedback and not compressor.contractive:
            raise ValueError(
                f"error_feedback={self.error_feedback:g} with {type(compressor).__name__}: its messages may be further "
                "from a vector than nothing is, so that the errors would grow; leave error_feedback out"
            )
        self.compressor = copy.deepcopy(compressor)

    def setup(self, cluster: Cluster) -> None:
        self.compressor.setup(cluster)
        zeros = torch.zeros_like(cluster.grads)
        self.keep_stacked(residual=self.compressor.arrange(zeros, cluster) if self.error_feedback else [])

    def __call__(self, rows: Tensor, cluster: Cluster, label: str) -> Tensor:
        """Return the average of stacked `rows` (R, P), which are overwritten, as a shared tensor (P,)."""
        arranged = self.compressor.arrange(rows, cluster)
        if self.error_feedback:
            for residual, new in zip(self.residual, arranged, strict=True):
                residual.mul_(self.error_feedback).add_(new)
            arranged = self.residual
        averages = self.compressor.exchange(arranged, cluster, label)
        name = type(self.compressor).__name__
        if not isinstance(averages, list | tuple) or len(averages) != len(arranged):
            given = type(averages).__name__ + (f" of {len(averages)}" if isinstance(averages, list | tuple) else "")
            raise TypeError(
                f"{name}.exchange() must return the averages of what it is given, a list of {len(arranged)} tensors; "
                f"got {given}"
            )
        average = self.compressor.restore([*averages])
        if average.shape != rows.shape[1:]:
            own, given = tuple(rows.shape[1:]), str(tuple(average.shape))
            raise ValueError(
                f"{name}.exchange() must return the average of the nodes, a shared tensor {own}; got {given}"
            )
        return average

    def __repr__(self) -> str:
        return f"compress({self.compressor!r}, error_feedback={self.error_feedback:g})"
