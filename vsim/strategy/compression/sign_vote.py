"""signSGD with majority vote: one bit an entry."""

from __future__ import annotations

import torch
from torch import Tensor
from vsim_kernels import majority_vote

from vsim.cluster import Cluster
from vsim.strategy.compression.base import Compressor
from vsim.strategy.compression.messages import bits_to_bytes, gather_message


class SignVote(Compressor):
    """Every node sends its signs; the average is the sign that most of them have, 0 for a tie.

    One bit has no third value: a 0 is sent as +1. There is no error feedback, for a sign says nothing of size.

    Payload: ceil(P / 8) bytes. One all-gather.

    Source: signSGD with majority vote [Bernstein et al. 2018, arXiv:1810.05291].

    Deviation from the paper: every node counts the votes itself; there is no server.
    """

    contractive = False

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        (rows,) = arranged
        signs = (rows < 0).to(torch.int8).mul_(-2).add_(1)  # (R, P); torch.where takes ten times as long
        (votes,) = gather_message([signs], cluster, label, bits_to_bytes(rows.shape[1]))  # (K, P)
        return [majority_vote(votes).to(rows.dtype)]
