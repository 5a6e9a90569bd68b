"""The rows of a group: the nodes of all its runs below each other in one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from vsim.cluster.replicas import Replicas, matrix
from vsim.engine.executor import bits_of
from vsim.training.part import Part

# Models of at most so many weights are computed with a row per node also where the nodes are equal: a call of its own
# would take longer than the copies of the row.
_SMALL = 2**16


def can_join(part: Part) -> bool:
    """Whether a part can be computed with others: in lockstep, its nodes with rows of their own or one soon copied."""
    if part.spec.strategy.is_asynchronous:
        return False
    trainable = sum(p.numel() for p in part.spec.model.parameters() if p.requires_grad)
    return not any(part.shares) or trainable <= _SMALL


@dataclass
class Rows:
    """The rows that are computed, and those that the runs hold.

    Attributes:
        whole: all nodes. parts: those of every run, views of `whole`; but runs whose nodes are equal by
            construction hold one row of weights, and of gradients if only their mean is wanted.
        spread: such runs among others, with their rows of `whole`.
    """

    whole: Replicas
    parts: list[Replicas]
    spread: list[tuple[Replicas, slice]] = field(default_factory=list)

    def copy_out(self) -> None:
        """Copy the one row of runs with equal nodes to all their rows."""
        for own, rows in self.spread:
            self.whole.weights[rows].copy_(own.weights)

    def gather_gradients(self) -> None:
        """Write the mean gradient of runs that use only the mean, and the row of weights, if forward changed it.

        Raises:
            ValueError: it changed the copies of the row in different ways.
        """
        for own, rows in self.spread:
            copies = self.whole.weights[rows]
            own.weights.copy_(copies[:1])
            if not torch.equal(bits_of(own.weights).expand_as(copies), bits_of(copies)):
                raise ValueError(
                    "the model changes its weights in forward, on each node in another way, and with this strategy all "
                    "nodes share one row of them: with deterministic=True every node has a row of its own"
                )
            if own.shares_grads:
                torch.mean(self.whole.grads[rows], 0, keepdim=True, out=own.grads)


def rows_of(parts: Sequence[Part], device: torch.device) -> Rows:
    """Lay out the rows of parts that are computed together, in their order."""
    models, counts = [part.spec.model for part in parts], [len(part.nodes) for part in parts]
    if len(parts) == 1:
        share_weights, share_grads = parts[0].shares
        whole = Replicas.of_several(models, counts, device, share_weights, share_grads)
        whole.first_node = parts[0].nodes.start
        return Rows(whole, [whole])
    whole = Replicas.of_several(models, counts, device)
    # Below each other, so that their optimizers can be stepped in one call, too.
    num_shared = sum(part.shares[0] for part in parts), sum(part.shares[1] for part in parts)
    weights, grads = (matrix(n, whole.num_parameters, whole.weights.dtype, device) for n in num_shared)
    found, start, next_weights, next_grads = Rows(whole, []), 0, 0, 0
    for part, count in zip(parts, counts, strict=True):
        rows = slice(start, start + count)
        own = whole.rows(rows.start, rows.stop, part.nodes.start)
        share_weights, share_grads = part.shares
        if share_weights:
            row = weights[next_weights : next_weights + 1].copy_(own.weights[:1])
            own, next_weights = replace(own, weights=row), next_weights + 1
        if share_grads:
            own, next_grads = replace(own, grads=grads[next_grads : next_grads + 1]), next_grads + 1
        if share_weights or share_grads:
            found.spread.append((own, rows))
        found.parts.append(own)
        start += count
    return found
