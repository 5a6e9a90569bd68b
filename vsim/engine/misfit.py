"""Why a model or its loss did not take a batch: what they were given, and what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from vsim.arguments import retold
from vsim.engine.objective import Objective
from vsim.private_torch import is_wrapped


def explained(error: Exception, objective: Objective, batch: Any, nodes: int, when: str) -> Exception:
    """Return an error that names what the model and its loss were given, for one that they raised; others as they are.

    Args:
        batch: what was computed, (K, B, …), or (B, …) with `nodes` 0.
        nodes: the number of dimensions before those of a node's own batch.
        when: names the step.
    """
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    kept = _kept(objective.model) if re.search("escaped|graph a second time", str(error)) else []
    raised_there = Objective.forward.__code__ in frames and Path(frames[-1].co_filename).parent != Path(__file__).parent
    if not (kept or raised_there) or type(error).__module__ != "builtins":
        return error
    given = [f"batch{keystr(path)}: {_described(t, nodes)}" for path, t in tree_flatten_with_path(batch)[0]]
    advice = _advice(error, objective, batch, kept)
    return retold(error, f"{error} — the model or its loss raised this {when}, given {', '.join(given)}{advice}")


def _advice(error: Exception, objective: Objective, batch: Any, kept: list[str]) -> str:
    model, loss_fn = objective.model, objective.loss_fn
    if kept:
        return (
            f". {', '.join(kept)} keeps a tensor of an earlier call, which cannot be computed with again: make it a "
            "buffer (register_buffer), and detach what is written there"
        )
    if isinstance(error, TypeError | AttributeError):
        if loss_fn is not None:
            return f". With loss_fn= the model is called as model(x), with x as the dataset has it: {_kind(batch[0])}"
        parameters = inspect.signature(model.forward).parameters.values()
        takes = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        call = f". Without loss_fn= the model is called as model(batch), with {_kind(batch)}, and returns the loss"
        by_name = isinstance(batch, Mapping) and bool(set(takes) & set(batch))
        if by_name or len(takes) > 1:
            own = "model(**batch).loss" if by_name else "the loss of model(*batch)"
            return f"{call}; this one takes {', '.join(takes[:4])}: give a module whose forward(batch) returns {own}"
        return f"{call}; a model that is called as model(x) needs loss_fn=, such as torch.nn.functional.cross_entropy"
    name, weight = next(iter(model.named_parameters()))
    if re.search("dtype|scalar type|same type", str(error)):
        labels = "class labels are torch.int64 (y.long())"
        return f". The weights are {weight.dtype}, and so is what they multiply (x.float()); {labels}"
    if isinstance(error, IndexError) or "out of" in str(error):
        return ". Labels and token ids count from 0, and stay below the number of classes, or of rows of an embedding"
    return f". The first weight, {name}, has shape {tuple(weight.shape)}"


def _described(tensor: Tensor, nodes: int) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape[nodes:])}"
    whole = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()
    return f"{text} from {int(tensor.min())} to {int(tensor.max())}" if whole else text


def _kind(value: Any) -> str:
    of = f" of {len(value)}" if isinstance(value, list | tuple | Mapping) else ""
    return f"a {type(value).__name__}{of}"


def _kept(model: nn.Module) -> list[str]:
    """Return the names of modules' attributes that hold tensors of an earlier call."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
        and any(isinstance(t, Tensor) and (is_wrapped(t) or t.grad_fn is not None) for t in tree_leaves(value))
    ]
