"""State that lasts from step to step, as its owners declare it on a run.

Nodes, strategy, model, clients and callbacks declare theirs. Saving, resuming and moving rows iterate over the
declarations, and know no owner.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from vsim.cluster.state import Lasting, Stateful, Values, owners, placements_of
from vsim.core.algorithm import Algorithm

if TYPE_CHECKING:
    from vsim.runs.tracked import TrackedRun

EXTRA, ATTRIBUTES = PYTHON = "extra state", "attributes"  # names of the Python state of models


def stacked_state(run: TrackedRun) -> dict[str, Any]:
    """Return name → declared state with a row for each node held here."""
    return {name: value for own in run.keeping.lasting for name, value in own.stacked().items()}


def shared_state(run: TrackedRun) -> dict[str, Any]:
    """Return name → declared state that is equal on all nodes."""
    return {name: value for own in run.keeping.lasting for name, value in own.shared().items()}


def restore(run: TrackedRun, filled: Values) -> None:
    """Give the owners their values, name → value."""
    for own in run.keeping.lasting:
        own.restore(filled)


# The owners that every run has ----------------------------------------------------------------------------------------


def of_nodes(run: TrackedRun) -> Lasting:
    """Return the declaration of the nodes' weights, buffers, random streams and shared decisions."""

    def stacked() -> Values:
        replicas = run.cluster.replicas
        buffers = {f"buffer {name}": buffer for name, buffer in replicas.buffers.items()}
        return {"weights": replicas.weights, **buffers, "streams": run.generators[: len(run.rows)]}

    def shared() -> Values:
        return {"generator": run.cluster.generator, "frozen": run.cluster.frozen}

    def restored(filled: Values) -> None:
        run.cluster.frozen = filled.get("frozen", run.cluster.frozen)

    return Lasting(stacked, shared, restored)


def of_strategy(run: TrackedRun) -> Lasting:
    """Return the declaration of the optimizers, their schedules, and what the strategy and its parts declare."""
    strategy = run.strategy

    def stacked() -> Values:
        return {"optimizer": strategy.optim, **declared(strategy, "stacked")}

    def shared() -> Values:
        # If nodes have separate optimizers, their schedules are equal: save the first node's.
        return {"schedules": [own[0] for own in strategy.schedulers if own], **declared(strategy, "shared")}

    def restored(filled: Values) -> None:
        for name, owner, attribute, _ in attributes_of(strategy):
            if name in filled:
                setattr(owner, attribute, filled[name])
        for own in strategy.schedulers if "schedules" in filled else ():
            for other in own[1:]:
                other.load_state_dict(copy.deepcopy(own[0].state_dict()))

    return Lasting(stacked, shared, restored)


def attributes_of(strategy: Algorithm) -> Iterator[tuple[str, Stateful, str, str]]:
    """Yield (name, part, attribute, placement) for all state that a strategy and its parts declare."""
    for part, owner in owners(strategy).items():
        for attribute, placement in placements_of(owner).items():
            yield f"{part}.{attribute}", owner, attribute, placement


def declared(strategy: Algorithm, placement: str) -> dict[str, Any]:
    """Return name → value of the state that a strategy and its parts declare as "stacked" or "shared"."""
    return {name: getattr(owner, own) for name, owner, own, where in attributes_of(strategy) if where == placement}


def of_model(run: TrackedRun) -> Lasting:
    """Return the declaration of the Python state of the model of each row, and of the loss, if it is a module."""

    def shared() -> Values:
        loss_fn = run.objective.loss_fn
        return {"loss": loss_fn} if isinstance(loss_fn, nn.Module) else {}

    def restored(filled: Values) -> None:
        if any(name in filled for name in PYTHON):
            set_python(run, filled)

    return Lasting(lambda: python_of(run), shared, restored)


def python_of(run: TrackedRun) -> Values:
    """Return the Python state of the model of each row: two names → a list item for each row."""
    own = (run.objective.extra_states(run.rows), run.objective.attributes(run.rows))
    return {name: [(state,) for state in states] for name, states in zip(PYTHON, own, strict=True)}


def set_python(run: TrackedRun, state: Values) -> None:
    """Restore the output of `python_of`."""
    extra, attributes = ([own for (own,) in state[name]] if name in state else None for name in PYTHON)
    run.objective.set_states(run.rows, extra or [{}] * len(run.rows), attributes)
