"""Clipping what every node sends, before it is merged with what the others send."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.arguments import one_of, real_number
from vsim.cluster import Cluster
from vsim.strategy.compression.base import by_node
from vsim.strategy.mergers import median, positive

MaxNodeNorm = float | str | None


def checked_node_norm(max_node_norm: MaxNodeNorm) -> MaxNodeNorm:
    """Return the 2-norm that what a node sends is held to: a number, "median" or None."""
    if max_node_norm is None or isinstance(max_node_norm, str):
        return max_node_norm and one_of("max_node_norm", max_node_norm, ["median"])
    return real_number("max_node_norm", max_node_norm, above=0)


def clip_rows_(rows: Tensor, max_node_norm: MaxNodeNorm, cluster: Cluster, label: str) -> None:
    """Scale every row of stacked `rows` (R, P) to at most this 2-norm; "median": that of all nodes' norms, which they
    gather.
    """
    if max_node_norm is None:
        return
    limit: float | Tensor
    norms = by_node(cluster, _norms, rows)  # (R, 1)
    if isinstance(max_node_norm, str):
        limit = median()(cluster.collectives.all_gather(norms, label=f"{label}: norms"))  # (1,)
    else:
        limit = max_node_norm
    rows.mul_((limit / positive(norms)).clamp(max=1.0))


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True)
