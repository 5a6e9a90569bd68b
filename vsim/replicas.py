"""A cluster is a matrix: row k is node k, column j is parameter j."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

Views = dict[str, Tensor]


class Columns(NamedTuple):
    """The column range of one parameter in the matrix."""

    name: str
    shape: torch.Size
    start: int
    stop: int


@dataclass
class Replicas:
    """The replicas of one model on K nodes.

    Attributes:
        module: a private copy of the user's model: the code and the module tree. Its own tensors are not used.
        layout: the column range of every trainable parameter, in the order of `model.named_parameters()`.
            Tied parameters are one range, under the first of their names.
        weights: stacked (K, P), one row a node; rows are contiguous.
        grads: stacked (K, P), likewise. Entries of parameters that the loss does not reach are zero.
        buffers: name → stacked (K, *shape): BatchNorm statistics and the like, a copy for every node.
        frozen: name → shared tensor of the parameters that do not require a gradient.
        first_node: the number of the node that row 0 holds.

    A Replicas may be a row slice of a larger one (see `rows`) and then shares its memory.
    """

    module: nn.Module
    layout: list[Columns]
    weights: Tensor
    grads: Tensor
    buffers: Views
    frozen: Views
    first_node: int = 0

    @classmethod
    def of(cls, model: nn.Module, num_nodes: int, device: torch.device, first_node: int = 0) -> Replicas:
        """Put `num_nodes` copies of `model` on `device`; all start from its weights and buffers.

        Raises:
            ValueError: nothing is trainable, a parameter is not initialised yet, or the trainable parameters
                do not share one floating-point dtype and one device; the odd ones are named.
        """
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check_trainable(trainable)
        module = copy.deepcopy(model).to(device)

        layout, start = [], 0
        for name, p in trainable.items():
            layout.append(Columns(name, p.shape, start, start + p.numel()))
            start += p.numel()
        with torch.no_grad():
            row = torch.cat([p.detach().reshape(-1).to(device) for p in trainable.values()])  # (P,)
            weights = row.expand(num_nodes, start).clone(memory_format=torch.contiguous_format)  # (K, P)
            buffers = {n: b.expand(num_nodes, *b.shape).clone() for n, b in module.named_buffers()}
        frozen = {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}
        return cls(module, layout, weights, torch.zeros_like(weights), buffers, frozen, first_node)

    @property
    def num_rows(self) -> int:
        """The number of nodes held here: K in the simulator."""
        return self.weights.shape[0]

    @property
    def num_parameters(self) -> int:
        """P: the number of trainable parameters of one node."""
        return self.weights.shape[1]

    @property
    def nodes(self) -> range:
        """The numbers of the nodes held here, row by row."""
        return range(self.first_node, self.first_node + self.num_rows)

    def views(self, matrix: Tensor) -> Views:
        """Return name → view of a stacked (R, P) matrix as (R, *shape), or of a shared (P,) row as (*shape)."""
        lead = matrix.shape[:-1]
        return {c.name: matrix[..., c.start : c.stop].view((*lead, *c.shape)) for c in self.layout}

    def rows(self, start: int, stop: int) -> Replicas:
        """Return the nodes in rows start … stop − 1, sharing memory with this one."""
        return Replicas(
            self.module,
            self.layout,
            self.weights[start:stop],
            self.grads[start:stop],
            {name: buffer[start:stop] for name, buffer in self.buffers.items()},
            self.frozen,
            self.first_node + start,
        )

    def as_module(self, weights: Tensor, buffers: Mapping[str, Tensor], like: nn.Module) -> nn.Module:
        """Return an ordinary copy of the model `like` that holds shared `weights` (P,) and `buffers`."""
        model = copy.deepcopy(like)
        with torch.no_grad():
            parameters = dict(model.named_parameters())
            for name, value in self.views(weights).items():
                parameters[name].copy_(value)
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        return model


def _check_trainable(trainable: Mapping[str, nn.Parameter]) -> None:
    if not trainable:
        raise ValueError("the model has no trainable parameter (requires_grad=True)")
    lazy = [name for name, p in trainable.items() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise ValueError(f"parameters {lazy} are not initialised yet: run the model once on a batch first")
    sparse_or_fixed = [f"{name}: {p.dtype}" for name, p in trainable.items() if not p.is_floating_point()]
    if sparse_or_fixed:
        raise ValueError(f"trainable parameters must be floating-point, got {', '.join(sparse_or_fixed)}")
    _check_one("dtype", {name: str(p.dtype) for name, p in trainable.items()})
    _check_one("device", {name: str(p.device) for name, p in trainable.items()})


def _check_one(what: str, of: Mapping[str, str]) -> None:
    kinds: list[str] = list(of.values())
    usual = max(dict.fromkeys(kinds), key=kinds.count)
    odd: Iterable[str] = [f"{name}: {kind}" for name, kind in of.items() if kind != usual]
    if odd:
        raise ValueError(f"trainable parameters must share one {what}; most are {usual}, but not {', '.join(odd)}")
