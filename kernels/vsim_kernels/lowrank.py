"""Low-rank messages: one step of power iteration per round, PowerSGD [1905.13727].

For matrices M_k (n, m) on K nodes and a *shared* Q (m, r) kept from the round before:

    P  = mean_k M_k Q          `left_factor`, then the caller's all-reduce of n · r numbers
    P̂  = orthogonalize(P)      on every node, with equal results
    Q' = mean_k M_kᵀ P̂         `right_factor`, then the caller's all-reduce of m · r numbers
    mean_k M_k ≈ P̂ Q'ᵀ         `low_rank`
"""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import working_dtype

# Devices on which some supported version of torch lacks QR; for these devices, QR runs on the CPU.
_WITHOUT_QR = frozenset({"mps"})


def left_factor(matrices: Tensor, q: Tensor) -> Tensor:
    """Return each node's M_k Q, before the mean over nodes.

    Args:
        matrices: *stacked* (K, n, m), or (K, L, n, m) for L parameters of one shape.
        q: *shared* (m, r), or (L, m, r).

    Returns:
        *stacked* (K, n, r), or (K, L, n, r).
    """
    return matrices @ q


def right_factor(matrices: Tensor, p: Tensor) -> Tensor:
    """Return each node's M_kᵀ P̂, before the mean over nodes.

    Args:
        matrices: *stacked* (K, n, m), or (K, L, n, m).
        p: *shared* (n, r) with orthonormal columns, or (L, n, r).

    Returns:
        *stacked* (K, m, r), or (K, L, m, r).
    """
    return matrices.transpose(-1, -2) @ p


def low_rank(p: Tensor, q: Tensor) -> Tensor:
    """Return P̂ Q'ᵀ: (n, r), (m, r) → (n, m), with any leading dimensions."""
    return p @ q.transpose(-1, -2)


def orthogonalize(p: Tensor) -> Tensor:
    """Return orthonormal columns; column i is in the span of the first i columns of p.

    The method is QR with a positive diagonal of R: in exact arithmetic, Gram-Schmidt; with rounding, more orthogonal
    than Gram-Schmidt. A column that depends linearly on earlier columns is replaced by an arbitrary orthonormal column,
    which does not harm the approximation; if P = 0, by a column of the identity.

    Args:
        p: (…, n, r), r ≤ n, floating; 16-bit types are factorized in float32.

    Returns:
        The shape and dtype of p; bitwise equal for equal input.

    Raises:
        ValueError: r > n.

    Source: PowerSGD [1905.13727], algorithm 1, line 5.
    """
    n, r = p.shape[-2:]
    if r > n:
        raise ValueError(f"rank {r} is more than the {n} rows allow")
    work = p.to(working_dtype(p.dtype))
    if p.device.type in _WITHOUT_QR:
        work = work.cpu()
    q, upper = torch.linalg.qr(work)
    i = torch.arange(r, device=work.device)  # not .diagonal(), in which torch.compile meets a deprecated check
    flip = torch.where(upper[..., i, i] < 0, -1.0, 1.0).to(work.dtype)
    return (q * flip[..., None, :]).to(p.dtype).to(p.device)


def left_factor_reference(matrices: Tensor, q: Tensor) -> Tensor:
    """`left_factor` of (K, n, m), node by node and row by row."""
    return torch.stack([torch.stack([(row[:, None] * q).sum(0) for row in m]) for m in matrices])


def right_factor_reference(matrices: Tensor, p: Tensor) -> Tensor:
    """`right_factor` of (K, n, m), node by node and column by column."""
    return torch.stack([torch.stack([(column[:, None] * p).sum(0) for column in m.T]) for m in matrices])


def low_rank_reference(p: Tensor, q: Tensor) -> Tensor:
    """`low_rank` of (n, r) and (m, r), as a sum of outer products."""
    out = p.new_zeros(p.shape[0], q.shape[0])
    for a, b in zip(p.T, q.T, strict=True):
        out = out + torch.outer(a, b)
    return out


def orthogonalize_reference(p: Tensor) -> Tensor:
    """`orthogonalize` of one (n, r) of full rank by two passes of Gram-Schmidt in float64."""
    done: list[Tensor] = []
    for column in p.double().T:
        for _ in range(2):  # the second pass removes the rounding errors of the first
            for other in done:
                column = column - (other @ column) * other
        done.append(column / column.norm())
    return torch.stack(done, dim=1).to(p.dtype)
