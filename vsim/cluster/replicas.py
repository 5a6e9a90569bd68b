"""The replicas of a model as a matrix: row k is node k, column j is parameter j."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from vsim_kernels.alignment import ALIGNMENT

from vsim.private_torch import has_gradient_hooks, hooks_of, storage_key

Copied = TypeVar("Copied")
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
        module: a private copy of the user's model, for its code and module tree; the tensors in it are not used.
        layout: the column range of every trainable parameter, in the order of `model.named_parameters()`.
            Tied parameters share one range, under the first of their names.
        weights: stacked (K, P), one row per node. Rows are contiguous and begin at multiples of 64 bytes, followed by
            gaps of zeros if needed (see `vsim_kernels.alignment`, and `with_gaps`).
        grads: stacked (K, P). Entries of parameters that the loss does not depend on are zero.
        buffers: name → stacked (K, *shape), such as BatchNorm statistics; dense, with a row for every node.
        frozen: name → shared tensor, for parameters that do not require a gradient.
        first_node: the number of the node in row 0.

    Replicas that are a slice of rows of larger Replicas (see `rows`) share memory with the larger ones.
    """

    module: nn.Module
    layout: list[Columns]
    weights: Tensor
    grads: Tensor
    buffers: Views
    frozen: Views
    first_node: int = 0

    @classmethod
    def of(cls, model: nn.Module, num_nodes: int, device: torch.device) -> Replicas:
        """Put `num_nodes` copies of `model` on `device`; see `of_several`."""
        return cls.of_several([model], [num_nodes], device)

    @classmethod
    def of_several(cls, models: Sequence[nn.Module], counts: Sequence[int], device: torch.device) -> Replicas:
        """Stack copies of several models in one matrix; every copy starts from the weights of its model.

        Args:
            models: models that differ only in the values of weights and buffers; the first model's code is used.
            counts: the number of copies of each model.

        Raises:
            ValueError: no parameter is trainable; a parameter is not initialised yet, is not floating-point or has
                gradient hooks; or trainable parameters differ in dtype or device. The message names the parameters.
        """
        trainable = {name: p for name, p in models[0].named_parameters() if p.requires_grad}
        _check_trainable(trainable)
        _check_present(models[0], device)
        module = copied(models[0], "the model").to(device)
        layout, start = [], 0
        for name, p in trainable.items():
            layout.append(Columns(name, p.shape, start, start + p.numel()))
            start += p.numel()
        num_held, dtype = sum(counts), next(iter(trainable.values())).dtype
        weights = matrix(num_held, start, dtype, device)
        grads = matrix(num_held, start, dtype, device)
        buffers = {n: b.new_empty(num_held, *b.shape) for n, b in module.named_buffers()}
        first = 0
        with torch.no_grad():
            for model, count in zip(models, counts, strict=True):
                rows = slice(first, first + count)
                own = dict(model.named_parameters())
                weights[rows] = torch.cat([own[c.name].detach().reshape(-1).to(device) for c in layout])
                for name, buffer in model.named_buffers():
                    buffers[name][rows] = buffer.to(device)
                first += count
        frozen = {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}
        return cls(module, layout, weights, grads, buffers, frozen)

    @property
    def num_held(self) -> int:
        """The number of nodes held here: K in the simulator."""
        return self.weights.shape[0]

    @property
    def num_parameters(self) -> int:
        """P: the number of trainable parameters of one node."""
        return self.weights.shape[1]

    @property
    def embeddings(self) -> set[str]:
        """The names of embedding tables: parameters of nn.Embedding, and parameters tied to such a table."""
        tables = {id(m.weight) for m in self.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        return {name for name, p in self.module.named_parameters() if id(p) in tables}

    @property
    def nodes(self) -> range:
        """The numbers of the nodes held here, row by row."""
        return range(self.first_node, self.first_node + self.num_held)

    def views(self, matrix: Tensor) -> Views:
        """Return name → view (R, *shape) of a stacked (R, P) matrix, or view (*shape) of a shared (P,) row."""
        lead = matrix.shape[:-1]
        return {c.name: matrix[..., c.start : c.stop].view((*lead, *c.shape)) for c in self.layout}

    def rows(self, start: int, stop: int, first_node: int | None = None) -> Replicas:
        """Return rows start … stop − 1 as views; number their nodes from `first_node`, if given."""
        return replace(
            self,
            weights=self.weights[start:stop],
            grads=self.grads[start:stop],
            buffers={name: buffer[start:stop] for name, buffer in self.buffers.items()},
            first_node=self.first_node + start if first_node is None else first_node,
        )

    def moved_view(self, view: Tensor, earlier: Replicas) -> Tensor:
        """Return a view of the columns of `view`, which are columns of `earlier`, in the rows of this object.

        Args:
            view: stacked (R, …), of weights or gradients of `earlier`. Tensors in other memory are returned unchanged.
            earlier: other rows of the same matrix.
        """
        pairs = ((earlier.weights, self.weights), (earlier.grads, self.grads))
        found = [pair for pair in pairs if storage_key(pair[0]) == storage_key(view)]
        if not found:
            return view
        ((before, now),) = found
        offset = now.storage_offset() + view.storage_offset() - before.storage_offset()
        size, strides = (len(self.weights), *view.shape[1:]), (now.stride(0), *view.stride()[1:])
        return now.as_strided(size, strides, offset)

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


def kept_in_evaluation(model: nn.Module) -> list[str]:
    """Return the paths of the modules that are in evaluation mode within a model in training mode."""
    return [path for path, module in model.named_modules() if model.training and not module.training]


def idle_dropout(model: nn.Module) -> list[str]:
    """Return the paths of trainable parts whose dropout is off, because they are in evaluation mode.

    `from_pretrained` returns models in evaluation mode, in which they stay as parts of a new module.
    """
    kept = kept_in_evaluation(model)
    idle = [m for path in kept if isinstance(m := model.get_submodule(path), nn.modules.dropout._DropoutNd) and m.p > 0]
    parts = {path: model.get_submodule(path) for path in kept if not any(path.startswith(f"{one}.") for one in kept)}
    return [
        path
        for path, part in parts.items()
        if any(own in idle for own in part.modules()) and any(p.requires_grad for p in part.parameters())
    ]


def matrix(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a (num_rows, num_columns) matrix of zeros whose rows begin at multiples of 64 bytes, with gaps if needed.

    The gaps are zeros, too, because files include the gaps, and optimizers step them.
    """
    unit = ALIGNMENT // dtype.itemsize
    pitch = -(-num_columns // unit) * unit
    return torch.zeros(num_rows, pitch, dtype=dtype, device=device)[:, :num_columns]


def with_gaps(rows: Tensor) -> Tensor:
    """Return rows (R, P) of a `matrix` as a dense (R, pitch) that includes the gaps; a single row (P,) unchanged."""
    if rows.dim() < 2:
        return rows
    return rows.as_strided((len(rows), rows.stride(0)), rows.stride())


def _check_trainable(trainable: Mapping[str, nn.Parameter]) -> None:
    if not trainable:
        raise ValueError("the model has no trainable parameter (requires_grad=True)")
    sparse_or_fixed = [f"{name}: {p.dtype}" for name, p in trainable.items() if not p.is_floating_point()]
    if sparse_or_fixed:
        raise ValueError(f"trainable parameters must be floating-point, got {', '.join(sparse_or_fixed)}")
    hooked = [n for n, p in trainable.items() if has_gradient_hooks(p)]
    if hooked:
        raise ValueError(
            f"parameters {hooked} have gradient hooks, which the nodes' own would not have: change gradients in a "
            "part (its communicate_gradients), or in forward"
        )
    _check_one("dtype", {name: str(p.dtype) for name, p in trainable.items()})
    _check_one("device", {name: str(p.device) for name, p in trainable.items()})


def _check_present(model: nn.Module, device: torch.device) -> None:
    """Raise a ValueError if tensors of a model have no values, unless the nodes are on the meta device."""
    kinds: dict[str, dict[str, Tensor]] = {
        "parameter": dict(model.named_parameters()),
        "buffer": dict(model.named_buffers()),
    }
    for what, tensors in kinds.items():
        lazy = [
            name for name, t in tensors.items() if isinstance(t, nn.UninitializedParameter | nn.UninitializedBuffer)
        ]
        if lazy:
            raise ValueError(f"{what}s {lazy} are not initialised yet: run the model once on a batch first")
        on_meta = [name for name, t in tensors.items() if t.is_meta]
        if on_meta and device.type != "meta":
            raise ValueError(
                f"{what}s {on_meta} are on the meta device and have no values: model.to_empty() gives some"
            )


def copied(module: Copied, what: str) -> Copied:
    """Return a deep copy of a model or loss, or raise a TypeError with advice about old parametrizations of torch."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        # Old parametrizations of torch.nn.utils keep a computed weight as an attribute, which deepcopy rejects.
        named = module.named_modules() if isinstance(module, nn.Module) else ()
        hooks = {path: hooks_of(m)["forward pre-hook"].values() for path, m in named}
        old = [path for path, own in hooks.items() for h in own if type(h).__name__ in ("WeightNorm", "SpectralNorm")]
        advice = (
            f". In {', '.join(old)}, use torch.nn.utils.parametrizations.weight_norm or spectral_norm" if old else ""
        )
        raise TypeError(f"{what} cannot be copied by copy.deepcopy, which every node needs: {error}{advice}") from error


def _check_one(what: str, of: Mapping[str, str]) -> None:
    kinds: list[str] = list(of.values())
    usual = max(dict.fromkeys(kinds), key=kinds.count)
    odd: Iterable[str] = [f"{name}: {kind}" for name, kind in of.items() if kind != usual]
    if odd:
        raise ValueError(f"trainable parameters must share one {what}; most are {usual}, but not {', '.join(odd)}")
