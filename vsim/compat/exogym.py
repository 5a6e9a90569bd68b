"""EXO Gym's module paths for objects that vsim defines elsewhere: `from vsim.strategy.optim import OptimSpec` works.

Every path in `PATHS` becomes a module when vsim is imported, and importing a path imports vsim first. The objects are
identical to those in their defining modules, and are pickled under the defining modules.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

from vsim.cluster.optim import OptimSpec
from vsim.strategy import (
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    CommunicationModule,
    FedAvgStrategy,
    SimpleReduceStrategy,
    SPARTADiLoCoStrategy,
    Strategy,
)


def ensure_optim_spec(optim: OptimSpec | str | None, default: OptimSpec | None = None, **kwargs: Any) -> OptimSpec:
    """Return `optim`, a specification or a name, as a specification with `kwargs` added; if None, `default` or AdamW.

    >>> ensure_optim_spec("sgd", lr=0.1), ensure_optim_spec(OptimSpec("sgd", lr=0.1), lr=0.2)
    (OptimSpec(SGD, lr=0.1), OptimSpec(SGD, lr=0.2))
    """
    if optim is None:
        optim = default or OptimSpec("adamw")
    spec = optim if isinstance(optim, OptimSpec) else OptimSpec(optim)
    return OptimSpec(spec.cls, **{**spec.arguments, **kwargs})


PATHS: dict[str, list[Any]] = {
    "vsim.strategy.communicate_optimize_strategy": [CommunicateOptimizeStrategy, CommunicationModule],
    "vsim.strategy.federated_averaging": [AveragingCommunicator, FedAvgStrategy],
    "vsim.strategy.optim": [OptimSpec, ensure_optim_spec],
    "vsim.strategy.sparta_diloco": [SPARTADiLoCoStrategy],
    "vsim.strategy.strategy": [SimpleReduceStrategy, Strategy],
}


def register() -> None:
    """Make a module for every path in `PATHS`, so that Python can import it."""
    for path, things in PATHS.items():
        module = module_from_spec(ModuleSpec(path, None))
        module.__doc__ = "Under the path that EXO Gym has: " + ", ".join(thing.__name__ for thing in things)
        vars(module).update({thing.__name__: thing for thing in things}, __all__=[thing.__name__ for thing in things])
        parent, _, name = path.rpartition(".")
        sys.modules[path] = module
        setattr(sys.modules[parent], name, module)
