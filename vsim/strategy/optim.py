"""Under the name that EXO Gym has it: optimizer specifications, which live in `vsim.cluster.optim`."""

from typing import Any

from vsim.cluster.optim import OptimSpec

__all__ = ["OptimSpec", "ensure_optim_spec"]


def ensure_optim_spec(optim: OptimSpec | str | None, default: OptimSpec | None = None, **kwargs: Any) -> OptimSpec:
    """Return `optim` as a specification: a name becomes one, None the `default` or AdamW; `kwargs` are added to it.

    >>> ensure_optim_spec("sgd", lr=0.1), ensure_optim_spec(OptimSpec("sgd", lr=0.1), lr=0.2)
    (OptimSpec(SGD, lr=0.1), OptimSpec(SGD, lr=0.2))
    """
    if optim is None:
        optim = default or OptimSpec("adamw")
    spec = optim if isinstance(optim, OptimSpec) else OptimSpec(optim)
    return OptimSpec(spec.cls, **{**spec.kwargs, **kwargs})
