"""The state of the nodes held in a process, written to a file after every step, for `vsim.verify` to compare."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path

from vsim.cluster.optimizers import (
    JointOptimizers,
    NodeOptimizers,
    StackedOptimizer,
    parts_of,
    stepped_tensors,
    torch_optimizers,
)
from vsim.cluster.replicas import Replicas
from vsim.strategy.base import Strategy
from vsim.training.run import Run


@dataclass(frozen=True)
class StateWriter:
    """Writes the state of the nodes held in a process to a file a step in `folder`: a callback.

    A file holds "matrices", "tensors": kind → name → stacked (R, …) or shared tensor, where the last dimension of the
    matrices is that of all parameters; and "events": label and text of the ledger's events of the step.
    """

    folder: Path

    def __call__(self, run: Run) -> None:
        cluster, strategy = run.cluster, run.strategy
        step, replicas = cluster.step, cluster.replicas
        matrices, tensors = _optimizer_state(strategy)
        state = {
            "matrices": {
                "weights": {"": replicas.weights},
                "optimizer state": matrices,
                "global weights": {"": strategy.global_weights()},
            },
            "tensors": {"buffers": replicas.buffers, "optimizer state": tensors},
        }
        # Copies: torch.save writes the whole storage behind a view.
        stored: dict[str, Any] = {
            place: {kind: {n: t.detach().cpu().clone() for n, t in named.items()} for kind, named in kinds.items()}
            for place, kinds in state.items()
        }
        stored["events"] = [(e.label, str(e)) for e in run.ledger if e.step == step or e.step < step == 1]
        path = state_file(self.folder, step, replicas.first_node)
        torch.save(stored, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


def state_file(folder: Path, step: int, first_node: int) -> Path:
    """Return where a `StateWriter` puts the state of the nodes from `first_node` on after a step."""
    return folder / f"step-{step}-node-{first_node}.pt"


def _optimizer_state(strategy: Strategy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return name → tensor: the state that is shaped like all weights, (R, P) or (P,), and all other."""
    replicas = strategy.cluster.replicas
    matrices: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for prefix, optimizer in _optimizers(strategy):
        by_parameter = _states(optimizer, replicas)
        starts = {view.data_ptr(): name for name, view in replicas.views(replicas.weights).items()}
        for j, (tensor, (states, each)) in enumerate(zip(stepped_tensors(optimizer), by_parameter, strict=False)):
            of = ""
            if len(by_parameter) > 1:
                by_place = replicas.layout[j].name if len(by_parameter) == len(replicas.layout) else f"parameter {j}"
                of = f" of {starts.get(tensor.data_ptr(), by_place)}"
            for key, first in states[0].items():
                value = torch.stack([state[key] for state in states]) if each else first
                if first.dim() and first.shape[-1] in (replicas.num_parameters, replicas.weights.stride(0)):
                    matrices[prefix + key] = value[..., : replicas.num_parameters]  # without the gaps between rows
                else:
                    tensors[prefix + key + of] = value
    return matrices, tensors


def _optimizers(strategy: Strategy) -> Iterator[tuple[str, StackedOptimizer]]:
    """Yield the optimizers that are attributes of a strategy or its modules, with what to call their state."""
    yield "", strategy.optim
    owners = [("", vars(strategy))]
    owners += [(f"communication_modules[{i}].", vars(m)) for i, m in enumerate(strategy.communication_modules)]
    for owner, attributes in owners:
        for name, value in attributes.items():
            listed = {f"{name}[{j}]": one for j, one in enumerate(value)} if isinstance(value, list) else {name: value}
            for called, one in listed.items():
                if isinstance(one, Optimizer | JointOptimizers) and one is not strategy.optim:
                    yield f"{owner}{called} ", one


def _states(optimizer: StackedOptimizer, replicas: Replicas) -> list[tuple[list[dict[str, Tensor]], bool]]:
    """Return, by parameter, (the states of the nodes, True), or ([the one of all, or stacked], False)."""
    parts = parts_of(optimizer)
    if len(parts) > 1:
        return [states for part in parts for states in _states(part, replicas)]
    by_part = []
    for part in torch_optimizers(optimizer):
        parameters = [p for group in part.param_groups for p in group["params"]]
        by_part.append([_leaves(part.state.get(p, {})) for p in parameters])
    if isinstance(parts[0], NodeOptimizers):
        return [(list(states), True) for states in zip(*by_part, strict=True)]
    if [p.data_ptr() for p in parameters] == [row.data_ptr() for row in replicas.weights] and parameters[0].dim() == 1:
        return [(by_part[0], True)]
    return [([state], False) for state in by_part[0]]


def _leaves(state: Any) -> dict[str, Tensor]:
    """Name → tensor of the tensors and numbers in one parameter's state."""
    leaves = {}
    for path, leaf in tree_flatten_with_path(state)[0]:
        if isinstance(leaf, Tensor | int | float):
            leaves[".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)] = (
                leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, dtype=torch.float64)
            )
    return leaves
