"""Step the inner optimizers of several runs; optimizers with equal settings share a call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.cluster.optim import ELEMENTWISE
from vsim.private_torch import mark_stepped
from vsim.strategy.base import Algorithm
from vsim.training.alike import is_vsims


class Optimizers:
    """Steps the optimizers of runs whose rows are adjacent in one matrix.

    With few rows, the call of an optimizer takes longer than its arithmetic. Therefore one joint optimizer steps all
    rows of adjacent runs whose optimizers have the same class and equal options. Each run still has its own optimizer,
    whose state is a view of the run's rows in the joint state. Schedules, checkpoints and runs that continue alone use
    only the run's optimizer.

    Args:
        strategies: the runs' strategies, in the order of their rows.
    """

    def __init__(self, strategies: Sequence[Algorithm]) -> None:
        self._together: list[tuple[list[Algorithm], _Together]] = []
        for _, same in groupby(_runs(strategies) if len(strategies) > 1 else (), key=lambda pair: pair[0]):
            neighbours = [strategy for _, strategy in same]
            if len(neighbours) > 1:
                self._together.append((neighbours, _Together(neighbours)))

    def separate(self) -> None:
        """Dissolve all joint optimizers, so that every strategy's optimizer continues alone."""
        for _, optimizer in self._together:
            optimizer.separate()
        self._together = []

    def step(self, taking: set[Algorithm]) -> set[Algorithm]:
        """Step the joint optimizers of strategies in `taking`; return the strategies that were stepped."""
        remaining = []
        for strategies, optimizer in self._together:
            if not (optimizer.agree() and taking.issuperset(strategies)):
                optimizer.separate()
            else:
                optimizer.step()
                remaining.append((strategies, optimizer))
        self._together = remaining
        return {strategy for strategies, _ in remaining for strategy in strategies}


class _Together:
    """Elementwise optimizers of one class over adjacent rows of a matrix, stepped by one optimizer over all rows."""

    def __init__(self, strategies: Sequence[Algorithm]) -> None:
        self.parts: list[Optimizer] = [s.optim for s in strategies]  # type: ignore[misc]
        self.parameters = [_parameter(part) for part in self.parts]
        upper = strategies[0]
        weights, grads = upper.cluster.replicas.weights, upper.cluster.replicas.grads
        size = (sum(map(len, self.parameters)), weights.shape[1])
        self.whole = upper.optim_spec.build_over(
            weights.as_strided(size, weights.stride()),
            grads.as_strided(size, grads.stride()),
            upper.cluster.deterministic,
        )
        self.parameter = _parameter(self.whole)
        self.whole.state.clear()  # Adagrad begins with state; the parts' state replaces it
        for part in self.parts:
            mark_stepped(part)

    def agree(self) -> bool:
        """Return whether all parts have equal options and the same number of steps.

        A schedule or hook may have changed the options of one part, or reset its state.
        """
        parts = zip(self.parts, self.parameters, strict=True)
        first, *others = ({**one.param_groups[0], "params": None, "state": _of_all_rows(one, p)} for one, p in parts)
        return all(other == first for other in others)

    def step(self) -> None:
        """Step all parts."""
        options = self.parts[0].param_groups[0]
        self.whole.param_groups[0].update({key: value for key, value in options.items() if key != "params"})
        if not self.parts[0].state.get(self.parameters[0]):
            self.whole.state.clear()
        if not self.whole.state:
            self._gather()
        self.whole.step()
        self._share()

    def _gather(self) -> None:
        """Build the joint state from the states of the parts, which may come from a checkpoint."""
        states = [part.state[p] for part, p in zip(self.parts, self.parameters, strict=True) if part.state.get(p)]
        if len(states) == len(self.parts):
            rows = [len(p) for p in self.parameters]
            self.whole.state[self.parameter] = {
                key: torch.cat([s[key] for s in states]) if _is_stacked(value, rows[0]) else value
                for key, value in states[0].items()
            }

    def _share(self) -> None:
        """Make the state of every part a view of its rows in the joint state."""
        state, start = self.whole.state[self.parameter], 0
        size = len(self.parameter)
        for part, parameter in zip(self.parts, self.parameters, strict=True):
            stop, own = start + len(parameter), part.state[parameter]
            for key, value in state.items():
                if not _is_stacked(value, size):
                    own[key] = value
                elif key not in own or own[key].data_ptr() != value[start].data_ptr():
                    own[key] = value[start:stop]
            start = stop

    def separate(self) -> None:
        """Dissolve the joint optimizer, so that every part continues alone with its state."""
        for part, parameter in zip(self.parts, self.parameters, strict=True):
            own = part.state[parameter]
            for key, value in own.items():
                if isinstance(value, Tensor) and not _is_stacked(value, len(parameter)):
                    own[key] = value.clone()  # the number of steps, a tensor that all parts shared


def _runs(strategies: Sequence[Algorithm]) -> list[tuple[int, Algorithm]]:
    """Number the strategies; adjacent strategies that can be stepped together get the same number."""
    numbered, number = [(0, strategies[0])], 0
    for before, strategy in pairwise(strategies):
        number += not _can_join(before, strategy)
        numbered.append((number, strategy))
    return numbered


def _can_join(upper: Algorithm, lower: Algorithm) -> bool:
    if not (_is_plain(upper) and _is_plain(lower)) or type(upper.optim) is not type(lower.optim):
        return False
    above, below = _parameter(upper.optim), _parameter(lower.optim)  # type: ignore[arg-type]
    for first, second in ((above, below), (above.grad, below.grad)):
        assert first is not None
        assert second is not None
        follows = second.data_ptr() == first.data_ptr() + first.numel() * first.element_size()
        if first.shape[1:] != second.shape[1:] or not follows or not first.is_contiguous():
            return False
    options = [{**s.optim.param_groups[0], "params": None} for s in (upper, lower)]
    return options[0] == options[1]


def _is_plain(strategy: Algorithm) -> bool:
    """Return whether an optimizer is exactly what the strategy's `OptimSpec` builds, and is stepped once per step.

    A user's strategy class may change its optimizer, for instance by resetting the state or adding hooks.
    """
    optimizer = strategy.optim
    if not is_vsims(type(strategy)) or not isinstance(optimizer, Optimizer) or type(optimizer) not in ELEMENTWISE:
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    weights = strategy.cluster.replicas.weights
    is_matrix = len(parameters) == 1 and parameters[0].dim() == 2 and parameters[0].data_ptr() == weights.data_ptr()
    return is_matrix and type(optimizer) is strategy.optim_spec.cls


def _parameter(optimizer: Optimizer) -> Tensor:
    parameter: Tensor = optimizer.param_groups[0]["params"][0]
    return parameter


def _of_all_rows(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return an optimizer's state, to compare parts; None replaces every tensor that has a row for each node."""
    state = optimizer.state.get(parameter) or {}
    return {key: None if _is_stacked(value, len(parameter)) else value for key, value in state.items()}


def _is_stacked(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and len(value) == rows
