"""The base of compressors, and averaging with one: error feedback."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from vsim_kernels.alignment import rows_apart

from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.cluster.state import Stateful
from vsim.strategy.base import CommunicationModule

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


class Compressor(Stateful):
    """How nodes average vectors with fewer bytes. A subclass defines `exchange`.

    Attributes:
        contractive: whether a message is nearer to the vector than 0 is. Only then do errors die away when they are
            sent later (error feedback).
    """

    contractive = True

    def setup(self, cluster: Cluster) -> None:
        """Prepare for a run on `cluster`: create and declare the state that lasts from step to step."""

    def arrange(self, rows: Tensor, cluster: Cluster) -> list[Tensor]:
        """Return stacked `rows` (R, P) in the form that this compressor works on, and the error is kept in.

        Returns:
            Stacked tensors (R, …), with P entries a node together; they may share the memory of `rows`.
        """
        return [rows]

    def restore(self, arranged: list[Tensor]) -> Tensor:
        """The inverse of `arrange`, for stacked tensors or shared ones: (R, P) or (P,)."""
        (rows,) = arranged
        return rows

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        """Send what the nodes hold, and return the average of what arrives.

        Args:
            arranged: from `arrange`. It is overwritten: if contractive, by the errors of the messages.
            cluster: the nodes.
            label: its name in the ledger.

        Returns:
            Shared tensors (…), arranged alike.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no exchange()")


class CompressedAverage(CommunicationModule):
    """Average the gradients with compression before every optimizer step.

    Args:
        compressor: what is sent, and how it is averaged. A copy is used, so that one may be given to several modules.
        error_feedback: β in [0, 1], the share of what a node has not sent that it adds to its next message. True is 1,
            False 0. Default: 1 for a contractive compressor, 0 for the others, with which it would diverge.

    Raises:
        ValueError: error feedback with a compressor that is not contractive.

    Source: error feedback [Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847].

    Payload: the compressor's, every step.
    """

    residual: list[Tensor]  # e_k, stacked, as the compressor arranges it

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

    def communicate_gradients(self, cluster: Cluster) -> None:
        cluster.grads.copy_(self.average(cluster.grads, cluster, "gradients"))

    def average(self, rows: Tensor, cluster: Cluster, label: str) -> Tensor:
        """Return the average of stacked `rows` (R, P), which are overwritten, as a shared tensor (P,)."""
        arranged = self.compressor.arrange(rows, cluster)
        if self.error_feedback:
            for residual, new in zip(self.residual, arranged, strict=True):
                residual.mul_(self.error_feedback).add_(new)
            arranged = self.residual
        averages = self.compressor.exchange(arranged, cluster, label)
        if not isinstance(averages, list | tuple) or len(averages) != len(arranged):
            raise TypeError(
                f"{type(self.compressor).__name__}.exchange() must return the averages of what it is given, a list of "
                f"{len(arranged)} tensors; got {_told(averages)}"
            )
        average = self.compressor.restore([*averages])
        if average.shape != rows.shape[1:]:
            name, own, given = type(self.compressor).__name__, tuple(rows.shape[1:]), tuple(average.shape)
            raise ValueError(
                f"{name}.exchange() must return the average of the nodes, a shared tensor {own}; got {given}"
            )
        return average


def _told(value: object) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


def by_node(cluster: Cluster, function: Callable[..., Result], *stacked: Tensor) -> Result:
    """Return function(*stacked), a stacked tensor or a tuple of them.

    In a deterministic run it is called node by node, on tensors that begin where a node's own would: matrix products
    and sums may round a row differently when there are more of them or when it lies elsewhere, and results must not
    depend on how many nodes are held here.
    """
    if not cluster.deterministic:
        return function(*stacked)
    results = [function(*rows) for rows in zip(*(rows_apart(t).split(1) for t in stacked), strict=True)]
    return tree_map(lambda *rows: torch.cat(rows), *results)
