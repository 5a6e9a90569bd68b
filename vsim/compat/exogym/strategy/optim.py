"""EXO Gym's specification of optimizers."""

from __future__ import annotations

from typing import Any

from vsim.cluster.optim import OptimSpec

__all__ = ["OptimSpec", "ensure_optim_spec"]


def ensure_optim_spec(optim: OptimSpec | str | None, default: OptimSpec | None = None, **kwargs: Any) -> OptimSpec:
    """Return `optim`, a specification or a name, as a specification with `kwargs` added; if None, `default` or AdamW.

    >>> ensure_optim_spec("sgd", lr=0.1), ensure_optim_spec(OptimSpec("sgd", lr=0.1), lr=0.2)
    (OptimSpec(SGD, lr=0.1), OptimSpec(SGD, lr=0.2))
    """
    if optim is None:
        optim = default or OptimSpec("adamw")
    spec = optim if isinstance(optim, OptimSpec) else OptimSpec(optim)
    return OptimSpec(spec.cls, **{**spec.arguments, **kwargs})
