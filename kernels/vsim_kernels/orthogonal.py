"""Orthogonal factors of many matrices at once, by Newton–Schulz iteration: the steps of Muon."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]


def newton_schulz(matrices: Sequence[Tensor], coefficients: Coefficients, steps: int, eps: float) -> list[Tensor]:
    """Move the singular values of matrices towards 1; keep the singular vectors.

        X ← M / max(‖M‖, eps);  `steps` times:  G = X Xᵀ,  X ← a·X + (b·G + c·G²) X

    Matrices of one shape or its transpose are multiplied in one call, in bfloat16 as in torch.optim.Muon.

    Args:
        matrices: each *stacked* (K, n, m).
        coefficients: a, b, c.
        steps: number of iterations. eps: lower bound of the norm that divides M.

    Returns:
        The factor of each matrix, (K, n, m) in bfloat16.

    Source: Muon [Jordan et al. 2024, kellerjordan.github.io/posts/muon].
    """
    a, b, c = coefficients
    lying = [m.mT if m.shape[1] > m.shape[2] else m for m in matrices]
    factors = list(matrices)
    for shape in {m.shape[1:] for m in lying}:
        alike = [i for i, m in enumerate(lying) if m.shape[1:] == shape]
        x = torch.cat([lying[i].bfloat16() for i in alike])
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        for i, own in zip(alike, x.split([len(lying[i]) for i in alike]), strict=True):
            factors[i] = own if own.shape[1:] == matrices[i].shape[1:] else own.mT
    return factors


def newton_schulz_reference(matrix: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """`newton_schulz` of one (n, m), on the singular values themselves, in float64."""
    a, b, c = coefficients
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm().clamp(min=eps)
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return left * values @ right
