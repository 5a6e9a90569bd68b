"""The objective: the user's model and loss as one module that maps a batch to a scalar.

A model is a function of its parameters, buffers, batch and torch's generators. In the loop, every node also has a copy
of the model's Python state, such as a counter in a plain attribute: see `Objective.separate`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Real
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from vsim.arguments import retold
from vsim.cluster.randomness import preserved
from vsim.cluster.state import CheckpointError, with_extra_state
from vsim.engine.attributes import (
    Attributes,
    Outside,
    Owner,
    changed,
    content_of,
    contents_of,
    owners,
    plain_values,
    set_values,
    shown,
    tensors_in,
)
from vsim.engine.indices import InRange, is_off_cpu
from vsim.private_torch import is_wrapped, tensor_tables, unwatched

LossFunction = Callable[[Any, Any], Tensor]
Accuracy = Callable[[Any, Any], Any]  # (outputs, targets) → a boolean per prediction, or the share of right predictions


class Objective(nn.Module):
    """The mean loss of a batch: `model(batch)`, or `loss_fn(model(x), y)` of a batch (x, y) if `loss_fn` is given.

    A model whose `forward` names the batch's parts gets the parts as separate arguments: `model(x, y)` if the second
    argument is called `target` or `targets`, `model(**batch)` if the keys of a dict are arguments. A model always gets
    a pair as a tuple, even if a DataLoader has turned the pair into a list. The loss is the field or key `loss` of the
    outputs, or the only scalar in a tuple of outputs.

    Accuracy is known in three cases:

    - `accuracy` is a function;
    - the model has a method `loss_and_accuracy(batch)` that returns two scalars;
    - `loss_fn` compares outputs with labels, see `right_predictions`.

    Args:
        accuracy: f(outputs, targets), see `Trainer.fit`; without a `loss_fn`, f(outputs of the model, batch). None: use
            the other two cases. False: no accuracy.

    Attributes:
        originals: the user's models, of which this model is a copy.
        node_of_row: the node of each row; None if row k is the row of node k.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction | None = None, accuracy: Accuracy | bool | None = None
    ) -> None:
        super().__init__()
        if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
            raise ValueError("loss_fn has trainable parameters: make them part of the model, or freeze them")
        self.model = model
        self.loss_fn = loss_fn
        self.accuracy = accuracy
        self.originals: tuple[nn.Module, ...] = ()
        self.node_of_row: Sequence[int] | None = None
        self.places = TensorSlots(model)
        self._arguments = _arguments_of(model)  # not a cached property, which the compiler cannot trace
        self._of_nodes: dict[int, Objective] = {}  # copies of all nodes but the first
        self._at_first: Objective | None = None  # the source of these copies
        self._before: dict[str, bytes] = {}  # contents of attributes before the first step
        self._plain_before: dict[str, Any] = {}
        self._modules_before: dict[str, type] = {}
        self._after_first_step: dict[str, bytes] | None = None
        self.warned_of_frozen: list[bool] = []  # [True] after a warning about parameters that `forward` freezes
        self.has_warned = False  # whether a warning about attributes that are not saved was given

    # Nodes with their own Python

    def copied(self) -> Objective:
        """Return a deep copy that shares only parameters, buffers, and tensors with an autograd graph."""
        tensors = [t for m in self.modules() for table in tensor_tables(m) for t in table.values() if t is not None]
        memo: dict[int, Any] = {id(t): t for t in (*tensors, *(t for _, t in self.attached()))}
        model, loss_fn = copy.deepcopy((self.model, self.loss_fn), memo)
        other = Objective(model, loss_fn, self.accuracy)
        other.originals, other.warned_of_frozen = self.originals, self.warned_of_frozen
        return other

    def copies(self) -> list[Objective]:
        """Return all copies: this one and, after `separate`, those of the nodes and their original."""
        return [self, *self._of_nodes.values(), *filter(None, [self._at_first])]

    def separate(self) -> None:
        """From now on, give every node its own copy of the model's Python state; node 0 uses this objective's state."""
        self._at_first = self._at_first or self.copied()

    def of_row(self, row: int) -> Objective:
        """Return the objective that computes a row: this objective or, after `separate`, the copy of the row's node."""
        node = row if self.node_of_row is None else self.node_of_row[row]
        if self._at_first is None or node == 0:
            return self
        if node not in self._of_nodes:
            self._of_nodes[node] = self._at_first.copied()
        return self._of_nodes[node]

    # Attributes

    def owners(self) -> list[Owner]:
        """Return the modules and objects whose attributes are the Python state of model and loss."""
        return owners(self.model, self.loss_fn)

    @property
    def contents(self) -> dict[str, bytes]:
        """Path → comparable content of the attributes of model and loss."""
        buffers = {f"model.{name}" for name in self.places.names}
        if isinstance(self.loss_fn, nn.Module):
            buffers |= {f"loss_fn.{name}" for name, _ in self.loss_fn.named_buffers()}
        return contents_of(self.owners(), buffers)

    def attached(self) -> list[tuple[str, Tensor]]:
        """Return (path, tensor) for attributes and buffers that hold tensors of an earlier call's autograd graph."""
        found = ((owner, name, t) for owner in self.owners() for name, t in tensors_in(owner.value))
        return [
            (shown(f"{owner.path}.{name}"), t) for owner, name, t in found if is_wrapped(t) or t.grad_fn is not None
        ]

    def untouched(self) -> Outside:
        """Return a context that restores at its end what calls of copies change outside of the copies."""
        return Outside(self.owners(), filter(None, [self.loss_fn]))

    def noted(self) -> Callable[[], None]:
        """Return a function that restores the present attributes of all copies, and drops later copies."""
        restored, made = (
            [Attributes(own.owners()).noted() for own in self.copies()],
            (self._at_first, {**self._of_nodes}),
        )

        def restore() -> None:
            for one in restored:
                one()
            self._at_first, self._of_nodes = made

        return restore

    @property
    def differs(self) -> bool:
        """Whether attributes differ between the nodes' copies."""
        own = self.contents if self._of_nodes else {}
        return any(other.contents != own for other in self._of_nodes.values())

    @property
    def is_shared(self) -> bool:
        """Whether all nodes share one copy of the Python state."""
        return self._at_first is None

    def begin(self) -> None:
        """Record the attributes before the first step, with which `attributes` and `unsaved` compare later ones."""
        self._before, self._plain_before = self.contents, copy.deepcopy(plain_values(self.owners()))
        self._modules_before = {path: type(module) for path, module in self.model.named_modules()}

    def note(self) -> None:
        """Record the attributes after the first step, for the same purpose."""
        if self._after_first_step is None:
            self._after_first_step = self.contents

    def unsaved(self, movable: bool = True) -> list[str]:
        """Return the attributes that have changed since the first step, and that a checkpoint does not hold.

        These are attributes that are neither plain nor saved by `get_extra_state`.

        Args:
            movable: whether plain attributes are left out, which move with the rows.
        """
        after = self._after_first_step
        if after is None:
            return []
        holding = {f"model.{path}".rstrip(".") for path, _ in with_extra_state(self.model)}
        saved = {*self._hidden(), *(plain_values(self.owners()) if movable else ())}
        found = [path for path in changed(after, self.contents) if path not in saved]
        return [shown(path) for path in found if path.rpartition(".")[0] not in holding]

    def _hidden(self) -> set[str]:
        """Return the paths of the tensors of modules that PyTorch does not register."""
        modules = [(owner.path, tensor_tables(owner.value)) for owner in self.owners() if owner.is_hidden]
        return {f"{path}.{name}" for path, tables in modules for table in tables for name in table}

    def check_savable(self) -> None:
        """Check that a checkpoint would hold the tensors that steps change.

        Raises:
            CheckpointError: tensors of modules that PyTorch does not register have changed, without `get_extra_state`.
        """
        hidden = self._hidden()
        holding = [f"model.{path}".rstrip(".") for path, _ in with_extra_state(self.model)]
        found = [path for path in changed(self._before, self.contents) if path in hidden] if hidden else []
        if found := [shown(path) for path in found if not any(path.startswith(f"{own}.") for own in holding)]:
            raise CheckpointError(
                f"the model changes {listed(found)} in forward, of modules that PyTorch does not register, so that no "
                "checkpoint would hold them, and no node would take them along: register the modules (nn.ModuleList, "
                "or an attribute), or define get_extra_state and set_extra_state"
            )

    def check_portable(self, movable: bool = True) -> None:
        """Check that a row's state can move to another row.

        Args:
            movable: see `unsaved`.

        Raises:
            CheckpointError: the model changes attributes that would not move.
        """
        self.check_savable()
        if unsaved := self.unsaved(movable):
            raise CheckpointError(
                f"the model changes {listed(unsaved)} in forward, which cannot be moved when nodes leave and join: "
                "make it a buffer (register_buffer), or define get_extra_state and set_extra_state"
            )

    # The state of rows

    def extra_states(self, rows: Iterable[int]) -> list[dict[str, Any]]:
        """Return, for each row, module path → result of `get_extra_state()`, for modules that define this method."""
        return [{p: m.get_extra_state() for p, m in with_extra_state(self.of_row(row).model)} for row in rows]

    def attributes(self, rows: Iterable[int]) -> list[dict[str, Any]]:
        """Return, for each row, path → value of the plain attributes that differ from those before the first step.

        Tensors that the first step alone has set belong to what this step noted in flags, and come along. Where these
        are buffers, which a resumed run has to make again, the flags of their module are left out; where forward has
        replaced modules, all flags.
        """
        now, after = self.contents, self._after_first_step or {}
        made = {path for path in changed(self._before, now) if now[path] == after.get(path)}
        buffers = [
            (o.path, name)
            for o in self.owners()
            if isinstance(o.value, nn.Module)
            for name in tensor_tables(o.value)[1]
        ]
        again = {path for path, name in buffers if f"{path}.{name}" in made}
        replaced = {path: type(module) for path, module in self.model.named_modules()} != self._modules_before
        left_out = {path for path in made if replaced or path.rpartition(".")[0] in again}
        found: dict[int, dict[str, Any]] = {}

        def of(own: Objective) -> dict[str, Any]:
            if id(own) not in found:
                plain, values = plain_values(own.owners()), plain_values(own.owners(), tensors=True)
                paths = [path for path in changed(self._before, own.contents) if path not in left_out]
                found[id(own)] = {path: values[path] for path in paths if path in plain or path in values.keys() & made}
            return copy.deepcopy(found[id(own)])

        return [of(self.of_row(row)) for row in rows]

    def set_states(
        self, rows: Sequence[int], extra: Sequence[Mapping[str, Any]], attributes: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Restore the outputs of `extra_states` and `attributes`, in a resumed run or after rows have moved.

        Args:
            attributes: None leaves them as they are.
        """
        no_attributes: list[Mapping[str, Any] | None] = [None] * len(rows)
        states = [*zip(rows, extra, attributes or no_attributes, strict=True)]
        if self.is_shared and len({content_of(state[1:]) for state in states}) > 1:
            self.separate()
        if self.is_shared:
            states = states[:1]
            now = (self.extra_states([0])[0], self.attributes([0])[0] if attributes is not None else None)
            if states and content_of(states[0][1:]) == content_of(now):
                return
        for row, own_extra, own_attributes in states:
            own = self if self.is_shared else self.of_row(row)
            if own_attributes is not None:
                own._set_attributes(own_attributes, self._before, self._plain_before)
            for path, module in with_extra_state(own.model):
                if path in own_extra:  # a fork's model may have other modules
                    module.set_extra_state(own_extra[path])

    def _set_attributes(
        self, values: Mapping[str, Any], before: Mapping[str, bytes], plain_before: Mapping[str, Any]
    ) -> None:
        """Set plain attributes to these values, and others that have changed to their values before the first step."""
        found = self.owners()
        others = {path for path in changed(before, self.contents) if path not in values} & plain_values(found).keys()
        set_values(
            found, {**{p: plain_before[p] for p in others & plain_before.keys()}, **values}, others - before.keys()
        )

    # One call

    @contextmanager
    def with_tensors(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Put one node's tensors in the model for a block; then copy values assigned to buffers into the buffers."""
        before = self.places.put({**parameters, **buffers})
        try:
            yield
        finally:
            after = self.places.put(before)
        for name, buffer in buffers.items():
            if after[name] is not buffer:
                keep_assigned(name, buffer, after[name])

    def forward(self, batch: Any, with_accuracy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return a scalar loss, and counts (2,): how many predictions are right, and how many count.

        Counts are None unless accuracy is requested and known.
        """
        batch = as_given(batch)
        in_range = InRange() if is_off_cpu(batch) else None
        outputs = counts = None
        with in_range or nullcontext():
            if self.loss_fn is not None:
                x, y = _inputs_and_targets(batch)
                outputs = self.model(x)
                loss = self.loss_fn(outputs, y)
            elif with_accuracy and self.accuracy is None and (both := getattr(self.model, "loss_and_accuracy", None)):
                loss, share = both(batch)
                counts = _counts(_scalar(share, "the accuracy"), batch)
            else:
                loss = outputs = self._outputs(batch)
                y = batch
            what = "the loss" if self.model.training or self.loss_fn else "the loss, in evaluation mode too,"
            loss = _scalar(_loss_of(loss), what)
            if with_accuracy and callable(self.accuracy):
                counts = _counts_of_user(self.accuracy, outputs, y, batch)
            elif with_accuracy and self.accuracy is None and self.loss_fn is not None:
                counts = right_predictions(outputs, y, self.loss_fn)
        return loss if in_range is None else in_range.spoiled(loss), counts

    def check_indices(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any) -> None:
        """Compute one node's loss on the CPU, which raises an IndexError if an index is out of range.

        Args:
            parameters, buffers: the node's tensors by name. batch: the node's batch (B, …).
        """
        tensors = [t for m in self.modules() for t in tree_leaves([*tensor_tables(m), *vars(m).values()])]
        memo: dict[int, Any] = {id(t): t.detach().cpu() for t in tensors if isinstance(t, Tensor)}
        own = Objective(*copy.deepcopy((self.model, self.loss_fn), memo))
        parameters, buffers = ({n: t.detach().cpu() for n, t in named.items()} for named in (parameters, buffers))
        with preserved(), unwatched(), torch.no_grad(), own.with_tensors(parameters, buffers):
            try:
                own(tree_map(lambda t: t.cpu(), batch), False)
            except IndexError:
                raise
            except Exception:  # the CPU may lack an operation
                return

    def _outputs(self, batch: Any) -> Any:
        """Call the model with a batch, or with the batch's parts if `forward` names them."""
        names = self._arguments
        if isinstance(batch, Mapping) and len(names) > 1 and names[0] in batch and set(batch) <= set(names):
            return self.model(**batch)
        if isinstance(batch, tuple) and len(batch) == 2 and names[1:2] in (["target"], ["targets"]):
            return self.model(*batch)
        return self.model(batch)


def _arguments_of(model: nn.Module) -> list[str]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a function of C code
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def as_given(batch: Any) -> Any:
    """Return a batch as models and metrics get it: a list, into which a DataLoader turns tuples, becomes a tuple."""
    return tuple(batch) if type(batch) is list else batch


def _inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, Sequence) or len(batch) != 2:
        given = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, Sequence) else "")
        raise ValueError(f"with loss_fn= a batch must be a pair (x, y); the dataset gives {given}")
    return batch[0], batch[1]


def _loss_of(outputs: Any) -> Any:
    """Return the loss among a model's outputs: the field or key `loss`, or the only scalar of a tuple."""
    if isinstance(outputs, Tensor):
        return outputs
    if type(outputs) in (tuple, list):
        scalars = [part for part in outputs if isinstance(part, Tensor) and part.dim() == 0]
        return scalars[0] if len(scalars) == 1 and len(outputs) > 1 else outputs
    has_key = isinstance(outputs, Mapping) and "loss" in outputs
    return outputs["loss"] if has_key else getattr(outputs, "loss", outputs)


def _scalar(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        parts = value if isinstance(value, tuple | list) else ()
        of = f" of ({', '.join(type(part).__name__ for part in parts)})" if parts else ""
        raise ValueError(
            f"{what} must be a scalar tensor, or outputs with one called loss, got {type(value).__name__}{of}; return "
            "the loss alone, or give loss_fn= if the model returns outputs"
        )
    if value.dim() != 0:
        raise ValueError(
            f"{what} must be a scalar (the mean over the batch), got a tensor of shape {tuple(value.shape)}; "
            "reduce it with .mean(), or give loss_fn= if the model returns outputs"
        )
    if value.is_complex():
        raise ValueError(f"{what} must be a real number, got one of dtype {value.dtype}")
    return value


# Accuracy -------------------------------------------------------------------------------------------------------------

_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss)
_OF_LOGITS = (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits)
_OF_PROBABILITIES = (nn.BCELoss, F.binary_cross_entropy)


def right_predictions(outputs: Any, targets: Any, loss_fn: Any) -> Tensor | None:
    """Return (2,): how many predictions are right, and how many count. None if nothing is classified.

    - Outputs (B, C ≥ 2, …) with whole-numbered targets (B, …): predict the argmax over C. Labels outside 0 … C − 1, and
      the `ignore_index` of the loss, do not count. If the last dimension could also be the classes, as in (B, T, T),
      the loss must be PyTorch's cross-entropy or negative log-likelihood, whose classes are dimension 1.
    - One column of outputs, (B,) or (B, 1, …), if the loss is PyTorch's binary cross-entropy: predict 1 for a positive
      logit, or for a probability above 1/2. Targets other than 0 and 1 do not count.

    A user's function that calls one of these losses is not recognized.
    """
    ignored = -100
    while isinstance(loss_fn, functools.partial):
        loss_fn, ignored = loss_fn.func, loss_fn.keywords.get("ignore_index", ignored)
    ignored = getattr(loss_fn, "ignore_index", ignored)
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or outputs.is_complex():
        return None
    whole = not (targets.is_floating_point() or targets.is_complex())
    if whole and outputs.dim() > 1 and outputs.shape[1] > 1 and outputs.shape[:1] + outputs.shape[2:] == targets.shape:
        if outputs.dim() > 2 and outputs.shape[:-1] == targets.shape and not _is_one_of(loss_fn, _OF_CLASSES):
            return None
        labels, predicted = targets.long(), outputs.argmax(1)
        counted = (labels >= 0) & (labels < outputs.shape[1]) & (labels != ignored)
    elif outputs.dim() and outputs.shape[1:2] in ((), (1,)) and outputs.numel() == targets.numel():
        logits = _is_one_of(loss_fn, _OF_LOGITS)
        if not (logits or _is_one_of(loss_fn, _OF_PROBABILITIES)):
            return None
        labels, predicted = targets.flatten(), outputs.flatten() > (0 if logits else 0.5)
        counted = (labels == 0) | (labels == 1)
    else:
        return None
    return torch.stack([((predicted == labels) & counted).sum(), counted.sum()]).float()


def _is_one_of(loss_fn: Any, kinds: tuple[Any, ...]) -> bool:
    return any(isinstance(loss_fn, kind) if isinstance(kind, type) else loss_fn is kind for kind in kinds)


def _counts(share: Tensor, batch: Any) -> Tensor:
    """Return the counts (2,) of a batch from its share of right examples; (0, 0) if the share is NaN."""
    share, examples = share.float(), len(tree_leaves(batch)[0])
    return torch.stack([share.nan_to_num(), (~share.isnan()).float()]) * examples


def _counts_of_user(accuracy: Accuracy, outputs: Any, targets: Any, batch: Any) -> Tensor:
    """Return the counts (2,) from the result of a user's function `accuracy`.

    Raises:
        TypeError: the result is neither booleans nor a number. Errors that the function raises get the prefix
            "accuracy".
    """
    try:
        found = accuracy(outputs, targets)
    except Exception as error:
        raise retold(error, f"accuracy: {error}") from error
    if isinstance(found, Tensor) and found.dtype == torch.bool and found.dim():
        return torch.stack([found.sum(), torch.full_like(found.sum(), found.numel())]).float()
    if (isinstance(found, Tensor) and (found.dim() or found.is_complex())) or not isinstance(found, Tensor | Real):
        given = f"a tensor of {found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise TypeError(
            "accuracy must return booleans, one for each prediction that counts, or the share of right predictions as "
            f"a number from 0 to 1, got {given}"
        )
    share = torch.as_tensor(found, dtype=torch.float32, device=tree_leaves(batch)[0].device)
    return _counts(share, batch)


class TensorSlots:
    """The places of a model's tensors in its modules' tables; `put` replaces the tensors.

    Does the same as torch.func.functional_call, but searches the modules once instead of at every call.
    """

    def __init__(self, module: nn.Module) -> None:
        tables = [table for m in module.modules() for table in tensor_tables(m)]
        where: dict[int, list[tuple[Any, str]]] = {}
        for table in tables:
            for key, tensor in table.items():
                where.setdefault(id(tensor), []).append((table, key))
        named = itertools.chain(module.named_parameters(), module.named_buffers())
        self._of = {name: where[id(tensor)] for name, tensor in named}  # tied tensors have several places
        self.names = self._of.keys()

    def put(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put tensors in the places that their names denote, and return the tensors that were there."""
        before = {}
        for name, tensor in tensors.items():
            for table, key in self._of[name]:
                before[name], table[key] = table[key], tensor
        return before


def keep_assigned(name: str, buffer: Tensor, value: Any) -> None:
    """Copy a value that the model has assigned to a buffer's name into the buffer.

    Raises:
        ValueError: the value has another shape or dtype, or is not a tensor.
    """
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
        now = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"the model assigns buffer {name}, which is {buffer.dtype} {list(buffer.shape)}, again as {now}: the "
            "nodes' buffers are stacked, so register it with its final dtype and shape"
        )
    buffer.copy_(value.detach())


def described_stranger(objective: Objective, parameter: Tensor) -> str:
    """Describe a parameter that belongs to no model: its path and shape, and how to make nodes train it."""
    names: dict[int, str] = {}
    for path, owner, _ in objective.owners():
        own = [*(tensor_tables(owner)[0].items() if isinstance(owner, nn.Module) else ()), *tensors_in(owner)]
        names |= {id(p): f" {shown(path)}.{name}" for name, p in own if id(p) not in names}
    return (
        f"the parameter{names.get(id(parameter), '')} of shape {list(parameter.shape)}, which the model does not have, "
        "so that no node trains it: make the module that has it part of the model, with an nn.ModuleList in place of a "
        "list, or freeze it by requires_grad_(False)"
    )


def listed(paths: Sequence[str]) -> str:
    """Return the first few of several paths as text."""
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


# Errors of the model --------------------------------------------------------------------------------------------------


def explained(error: Exception, objective: Objective, batch: Any, nodes: int, when: str) -> Exception:
    """Return the error, with a description of the batch added if the model or its loss raised it.

    Args:
        batch: the batch that was computed. nodes: its number of node dimensions, 1 for (K, B, …) or 0 for (B, …).
        when: text that names the step.
    """
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    while len(frames) > 1 and frames[-1].co_name == "__torch_function__":  # the operation itself has no frame
        frames.pop()
    kept = [*dict(objective.attached())] if re.search("escaped|graph a second time", str(error)) else []
    raised_there = Objective.forward.__code__ in frames and Path(frames[-1].co_filename).parent != Path(__file__).parent
    if not (kept or raised_there) or type(error).__module__ != "builtins":
        return error
    batch = as_given(batch)
    given = [f"batch{keystr(path)}: {_described(t, nodes)}" for path, t in tree_flatten_with_path(batch)[0]]
    advice = _advice(error, objective, batch, kept)
    return retold(error, f"{error} — the model or its loss raised this {when}, given {', '.join(given)}{advice}")


def _advice(error: Exception, objective: Objective, batch: Any, kept: list[str]) -> str:
    model, loss_fn = objective.model, objective.loss_fn
    if kept:
        return f". {advice_on(kept)}"
    takes_other = r"forward\(\) (missing|takes|got)|(list|tuple|dict)'? object|argument .* must be Tensor, not"
    if isinstance(error, TypeError | AttributeError):
        if not re.search(takes_other, str(error)):
            return ""
        if loss_fn is not None:
            return f". With loss_fn= the model is called as model(x), with x as the dataset has it: {_kind(batch[0])}"
        parameters = inspect.signature(model.forward).parameters.values()
        takes = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        call = f". Without loss_fn= the model is called as model(batch), with {_kind(batch)}, and returns the loss"
        by_name = isinstance(batch, Mapping) and bool(set(takes) & set(batch))
        if by_name and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            others = [repr(name) for name in batch if name not in takes]
            way = f"drop or rename the field {', '.join(others)}" if others else f"give the field {takes[0]!r}, too"
            return f"{call}, or by the names of its fields; this one takes {', '.join(takes[:4])}: {way}"
        if by_name or len(takes) > 1:
            own = "model(**batch).loss" if by_name else "the loss of model(*batch)"
            return f"{call}; this one takes {', '.join(takes[:4])}: give a module whose forward(batch) returns {own}"
        return f"{call}; a model that is called as model(x) needs loss_fn=, such as torch.nn.functional.cross_entropy"
    name, weight = next(iter(model.named_parameters()))
    if re.search("dtype|scalar type|same type|should be the same", str(error)):
        labels = "class labels are torch.int64 (y.long())"
        return f". The weights are {weight.dtype}, and so is what they multiply (x.to({weight.dtype})); {labels}"
    if re.search(
        r"Target -?\d+ is out of bounds|index out of range in self|embedding: an index|num_classes", str(error)
    ):
        return ". Labels and token ids count from 0, and stay below the number of classes, or of rows of an embedding"
    return f". The first weight, {name}, has shape {tuple(weight.shape)}" if re.search("shape|size", str(error)) else ""


def advice_on(kept: list[str]) -> str:
    """Return advice about attributes and buffers that hold tensors of an earlier autograd graph."""
    return (
        f"{', '.join(kept)} keeps a tensor of an earlier call, which cannot be computed with again: make it a buffer "
        "(register_buffer), and detach what is written there"
    )


def _described(tensor: Tensor, nodes: int) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape[nodes:])}"
    whole = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()
    return f"{text} from {int(tensor.min())} to {int(tensor.max())}" if whole else text


def _kind(value: Any) -> str:
    of = f" of {len(value)}" if isinstance(value, list | tuple | Mapping) else ""
    return f"a {type(value).__name__}{of}"
