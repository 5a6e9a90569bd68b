"""The base of executors, which compute the losses and gradients of all nodes, in training and in evaluation."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from vsim_kernels.alignment import aligned, empty_rows, is_aligned, rows_apart

from vsim.cluster.randomness import default_generator, drawing_from
from vsim.cluster.replicas import Replicas, Views
from vsim.engine.objective import Objective
from vsim.engine.own_state import OwnState
from vsim.private_torch import storage_key, tensor_tables


@dataclass(frozen=True)
class Settings:
    """How a run is to be computed.

    Attributes:
        autocast: compute in bfloat16 where torch.autocast does.
        exact: every node is bitwise equal to eager PyTorch on that node alone.
        chunk_size: nodes computed at once, where that is a choice; None: the best number.
        compile: compile the loss and its gradient; "trace": capture their operations; "auto": trace, and compile if the
            remaining steps repay it.
        num_steps: the steps of the run, for choices that have to be repaid; None: unknown.
    """

    autocast: bool = False
    exact: bool = False
    chunk_size: int | None = None
    compile: bool | str = False
    num_steps: int | None = None


class Executor(ABC):
    """Computes the loss and gradient of every node on its own batch.

    Args:
        replicas: the nodes. Gradients are written to `replicas.grads`, buffers are updated in place. Where the nodes
            share one row of weights, it is everyone's; where they share one row of gradients, that gets their mean.
        objective: the user's model (that of `replicas.module`) and loss.
        generators: one for each node, for randomness inside its model.
        settings: how to compute.

    Attributes:
        name: its name in the history.
        reason: why it was chosen, if there was a choice.
        is_ready: whether the last step took as long as the next ones of its kind will.
        preparing: what the next step does beside computing, if that takes long: for those who wait.
        has_given_threads: whether the user has said how many threads compute it.
        step: the number of the run's step that is computed, from 1; a run that resumes sets the completed steps.
    """

    name: str
    reason: str = ""
    is_ready: bool = True
    preparing: str = ""
    has_given_threads: bool = False
    step: int = 0

    def __init__(
        self,
        replicas: Replicas,
        objective: Objective,
        generators: Sequence[torch.Generator],
        settings: Settings | None = None,
    ) -> None:
        self.replicas = replicas
        self.objective = objective
        self.generators = generators
        self.settings = settings or Settings()
        self._moved: list[tuple[Tensor, Tensor]] = []
        self._places = Places(objective.model)
        self._own_state = OwnState(replicas, objective)

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        """Return stacked losses (K,) of a stacked batch (K, B, …) and leave the gradients in `replicas.grads`.

        With a `minibatch_size` the batch is cut into pieces of so many examples a node, whose gradients are summed,
        each weighted by its part of the batch.
        """
        self.step += 1
        self._own_state.begin()
        total: Tensor | None = None
        for piece, share in minibatches(self._laid_out(batch), minibatch_size):
            losses = self._backward(piece, share, first=total is None)
            total = losses if total is None else total + losses
        assert total is not None
        self._own_state.check()
        return total

    @staticmethod
    def _laid_out(batch: Any) -> Any:
        """Return a stacked batch with its rows where a node's own tensors could begin."""
        return tree_map(rows_apart, batch)

    def _leaf(self, rows: Tensor) -> Tensor:
        """Return a parameter or buffer (R, *shape) for the model: itself, or a copy if it begins at an odd place.

        The copy is brought up to date within `_moved_up_to_date`, and whatever the model writes to it is copied back.
        `vsim_kernels.alignment` says why odd places matter.

        Args:
            rows: a part of the replicas' tensors.
        """
        if is_aligned(rows):
            # Not detach(), after which all parameters would share one version counter: a model that changes one of them
            # in place would appear to have changed another, which a backward pass needs.
            return rows.data
        copy = empty_rows(len(rows), rows.shape[1:], rows.dtype, rows.device)
        self._moved.append((copy, rows))
        return copy

    @contextmanager
    def _moved_up_to_date(self) -> Iterator[None]:
        if not self._moved:
            yield
            return
        copies, places = zip(*self._moved, strict=True)
        torch._foreach_copy_(copies, places)
        yield
        # Always: writes through `.data`, or by BatchNorm, leave no trace in a tensor's version.
        torch._foreach_copy_(places, copies)

    @torch.no_grad()
    def _bits_of_row(self, weights: Iterable[Tensor]) -> Tensor | None:
        """Return a number for the bits of the row of weights that nodes share; None if they share none.

        Args:
            weights: those that the model is given: views of the row, or copies.
        """
        if not self.replicas.shares_weights or self.replicas.weights.is_meta:
            return None
        moved = [w for w in weights if storage_key(w) != storage_key(self.replicas.weights)]
        return torch.stack([bits_of(w).sum() for w in (self.replicas.weights, *moved)])

    def _check_row(self, weights: Iterable[Tensor], after_first: Tensor | None) -> None:
        """Check that no node has changed the row of weights that nodes share after the first one has.

        Raises:
            ValueError: one has. What all nodes do alike, such as clamping, does no harm.
        """
        after_last = self._bits_of_row(weights)
        if after_first is not None and after_last is not None and not torch.equal(after_first, after_last):
            raise ValueError(
                "the model changes its weights in forward, and with this strategy all nodes share one row of them, "
                "which each would change again: with deterministic=True every node has a row of its own"
            )

    @torch.no_grad()
    def evaluate(
        self, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """Return stacked (losses, accuracies), both (R,), of weights (R, P) on one shared batch (B, …).

        The model is in evaluation mode meanwhile, and draws from `stream`, the same numbers for every row. Nothing of
        the training state changes. `accuracies` is None where the objective knows none.
        """
        with evaluating(self.objective), self._own_state.untouched():
            return self._evaluate(weights, buffers, batch, stream)

    @torch.no_grad()
    def apply(
        self,
        function: Callable[[nn.Module, Any], Any],
        weights: Tensor,
        buffers: Views,
        batch: Any,
        stream: torch.Generator,
    ) -> Any:
        """Return function(model, batch) of the model as in `evaluate`, with shared weights (P,) and buffers."""
        own_buffers = {name: b.clone() for name, b in buffers.items()}
        parameters = {name: aligned(w) for name, w in self.replicas.views(weights).items()}
        placed, own_state = self._placed(parameters, own_buffers), self._own_state.untouched()
        with evaluating(self.objective), own_state, drawing_from(stream), self._precision(), placed:
            return function(self.objective.model, cloned(batch))

    @abstractmethod
    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        """Return share · losses (K,); write (if first) or add share · gradients to `replicas.grads`."""

    def _evaluate(
        self, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the results of `evaluate`; here row by row, in ordinary eager PyTorch."""
        outcomes = []
        state = stream.get_state()
        for row, own_weights in enumerate(weights):
            own_buffers = {n: b[row].clone() for n, b in buffers.items()}
            stream.set_state(state)
            with drawing_from(stream), self._precision(), self._own_state.untouched():
                # Parameters, also to an operation that asks whether they need a gradient, as recurrent ones do.
                parameters = {
                    name: aligned(w).detach().requires_grad_() for name, w in self.replicas.views(own_weights).items()
                }
                outcomes.append(self._outcome(parameters, own_buffers, cloned(batch), True))
        accuracies = [a for _, a in outcomes if a is not None]
        return torch.stack([loss for loss, _ in outcomes]), torch.stack(accuracies) if accuracies else None

    def _outcome(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any, with_accuracy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The loss and accuracy of one node, from its own tensors."""
        with self._placed(parameters, buffers):
            outcome: tuple[Tensor, Tensor | None] = self.objective(batch, with_accuracy)
        return outcome

    @contextmanager
    def _placed(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model compute with the tensors of one node."""
        before = self._places.put({**parameters, **buffers})
        try:
            yield
        finally:
            after = self._places.put(before)
        for name, buffer in buffers.items():
            if after[name] is not buffer:
                keep_assigned(name, buffer, after[name])

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.settings.autocast:
            return nullcontext()
        # No cache: casts of one node's weights must not be kept for the next node.
        return torch.autocast(self.replicas.weights.device.type, torch.bfloat16, cache_enabled=False)


def bits_of(t: Tensor) -> Tensor:
    """Return a floating-point tensor's bits as whole numbers: equal where it is, NaNs included."""
    return t.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


class Places:
    """The places of a module's tensors in its tree, where other tensors can take their place.

    As torch.func.functional_call, which searches the tree at every call, while here it is searched once.
    """

    def __init__(self, module: nn.Module) -> None:
        tables = [table for m in module.modules() for table in tensor_tables(m)]
        where: dict[int, list[tuple[Any, str]]] = {}
        for table in tables:
            for key, tensor in table.items():
                where.setdefault(id(tensor), []).append((table, key))
        named = itertools.chain(module.named_parameters(), module.named_buffers())
        self._of = {name: where[id(tensor)] for name, tensor in named}  # of tied tensors, several

    def put(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put tensors in the places of these names, and return the tensors that were there."""
        before = {}
        for name, tensor in tensors.items():
            for table, key in self._of[name]:
                before[name], table[key] = table[key], tensor
        return before


def cloned(batch: Any) -> Any:
    """Return a copy of a batch that is needed again after a call: a model may change its batch in place."""
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, batch)


def minibatches(batch: Any, size: int | None) -> Iterator[tuple[Any, float]]:
    """Yield (piece, its share of the batch) of a stacked batch (K, B, …), each of at most `size` examples a node.

    Raises:
        ValueError: it is to be cut, and does not hold the same number of examples everywhere.
    """
    num_examples = None if size is None else next((t.shape[1] for t in tree_leaves(batch) if t.dim() > 1), None)
    if size is None or num_examples is None or size >= num_examples:
        yield batch, 1.0
        return
    check_examples(batch, 1)
    for start in range(0, num_examples, size):
        stop = min(start + size, num_examples)
        piece = tree_map(lambda t, a=start, b=stop: t[:, a:b] if t.dim() > 1 else t, batch)
        yield piece, (stop - start) / num_examples


def check_examples(batch: Any, dim: int) -> None:
    """Raise a ValueError for a batch that cannot be cut, as its tensors differ in the length of their dimension `dim`.

    Such as of class weights, or of sequences with the time in front: a part of these is no part of the examples.
    """
    lengths = {keystr(path): t.shape[dim] for path, t in tree_flatten_with_path(batch)[0] if t.dim() > dim}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "a batch is cut into smaller ones along the first dimension of all its tensors, which differs here: "
            f"{', '.join(f'batch{path}: {length}' for path, length in lengths.items())}; put the examples first"
        )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` in evaluation mode for a block; every submodule gets back the mode that it had."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, training in modes.items():
            m.training = training


class Before:
    """A snapshot of the state that a step changes beside gradients: buffers, random streams, a model's own numbers.

    Args:
        executor: the executor that takes the step.
        streams: other generators that are drawn from.
        weights: keep the weights as well, which takes a matrix of memory.
    """

    def __init__(self, executor: Executor, streams: Sequence[torch.Generator] = (), weights: bool = True) -> None:
        replicas = executor.replicas
        default = default_generator(replicas.weights.device)
        self.streams = [(g, g.get_state()) for g in [*executor.generators, default, *streams]]
        self.objective = executor.objective
        objective = self.objective
        self.numbers = objective.read(), dict(objective.numbers), objective.others, objective.left
        changed = [*([replicas.weights] if weights else []), *replicas.buffers.values()]
        self.tensors = [(t, t.clone()) for t in changed]

    def restore(self) -> None:
        """Restore the snapshot."""
        for stream, state in self.streams:
            stream.set_state(state)
        for tensor, value in self.tensors:
            tensor.copy_(value)
        now, of_nodes, self.objective.others, self.objective.left = self.numbers
        self.objective.write(now)
        self.objective.numbers.clear()
        self.objective.numbers.update(of_nodes)


def keep_assigned(name: str, buffer: Tensor, value: Any) -> None:
    """Write to a buffer the tensor that the model has assigned in its place.

    Raises:
        ValueError: it has another shape or dtype, or is no tensor.
    """
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
        now = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"the model assigns buffer {name}, which is {buffer.dtype} {list(buffer.shape)}, anew as {now}: the nodes' "
            "buffers are stacked, so register it with the dtype and shape that it is going to have"
        )
    buffer.copy_(value.detach())


@contextmanager
def undone(executor: Executor) -> Iterator[None]:
    """Restore buffers and random streams, which computing losses changes, at the end of a block."""
    before = Before(executor, [torch.default_generator])
    try:
        yield
    finally:
        before.restore()


def write_gradients(losses: Tensor, leaves: list[Tensor], grads: list[Tensor], share: float, first: bool) -> None:
    """Write or add the gradients of share · sum(losses) to `grads`."""
    check_depends(losses)
    # The gradient of a sum over nodes is every node's own gradient: no node's loss reads another's weights. Where nodes
    # share their weights, it is the sum over the nodes.
    shares = torch.full_like(losses, share)
    pieces = torch.autograd.grad(losses, leaves, shares, allow_unused=True, materialize_grads=True)
    write_or_add(grads, pieces, first)


def check_depends(losses: Tensor) -> None:
    """Raise a ValueError for losses that have no gradient."""
    if not losses.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter")


def write_or_add(grads: list[Tensor], pieces: Sequence[Tensor], first: bool) -> None:
    """Write (if first) or add tensors to those of `grads`, in whose memory they may lie already."""
    pieces = [p.to_dense() if p.is_sparse else p for p in pieces]  # sparse ones are of Embedding(sparse=True)
    if not first:
        torch._foreach_add_(grads, pieces)
        return
    elsewhere = [(g, p) for g, p in zip(grads, pieces, strict=True) if g.data_ptr() != p.data_ptr()]
    if elsewhere:
        torch._foreach_copy_([g for g, _ in elsewhere], [p for _, p in elsewhere])
