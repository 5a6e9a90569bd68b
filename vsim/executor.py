"""Losses and gradients of all nodes: vectorised with vmap, or node by node in a loop."""

from __future__ import annotations

import itertools
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves, tree_map

from vsim.lowering import NodeDropout
from vsim.objective import Objective
from vsim.randomness import default_generator, drawing_from
from vsim.replicas import Replicas, Views

EXECUTORS = ("auto", "vmap", "loop")
# A vmapped call takes as many nodes at once as have this many weights together. Larger pieces gain nothing (their
# arithmetic is already in large kernels) and their temporaries fall out of the caches.
WEIGHTS_AT_ONCE = 2**22


class VmapError(RuntimeError):
    """The model works on one node but not under torch.func.vmap."""


class Executor(ABC):
    """Computes the loss and gradient of every node on its own batch.

    Args:
        replicas: the nodes. Gradients are written to `replicas.grads`, buffers are updated in place.
        objective: the user's model (that of `replicas.module`) and loss.
        generators: one for each node, for what is random inside its model.
        autocast: compute in bfloat16 where torch.autocast does.
    """

    name: str

    def __init__(
        self,
        replicas: Replicas,
        objective: Objective,
        generators: Sequence[torch.Generator],
        autocast: bool = False,
    ) -> None:
        self.replicas = replicas
        self.objective = objective
        self.generators = generators
        self.autocast = autocast

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        """Return stacked losses (K,) of a stacked batch (K, B, …) and leave the gradients in `replicas.grads`.

        With a `minibatch_size` the batch is cut into pieces of so many examples a node, whose gradients are summed,
        each weighted by its part of the batch.
        """
        total: Tensor | None = None
        for piece, share in minibatches(batch, minibatch_size):
            losses = self._backward(piece, share, first=total is None)
            total = losses if total is None else total + losses
        assert total is not None
        return total

    @torch.no_grad()
    def evaluate(
        self, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """Return stacked (losses, accuracies), both (R,), of weights (R, P) on one shared batch (B, …).

        The model is in evaluation mode meanwhile, and what it draws comes from `stream`, the same for every row.
        Nothing of the training state changes. `accuracies` is None where the objective knows none.
        """
        with evaluating(self.objective):
            return self._evaluate(weights, buffers, batch, stream)

    @abstractmethod
    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        """Return share · losses (K,); write (if first) or add share · gradients to `replicas.grads`."""

    @abstractmethod
    def _evaluate(
        self, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]: ...

    def _outcome(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any, with_accuracy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The loss and accuracy of one node, from its own tensors."""
        own = {f"model.{name}": t for part in (parameters, buffers) for name, t in part.items()}
        outcome: tuple[Tensor, Tensor | None] = functional_call(self.objective, own, (batch, with_accuracy))
        for name, buffer in buffers.items():  # functional_call leaves in `own` what the model has assigned anew
            if own[f"model.{name}"] is not buffer:
                buffer.copy_(own[f"model.{name}"].detach())
        return outcome

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.autocast:
            return nullcontext()
        # No cache: casts of one node's weights must not be kept for the next node's.
        return torch.autocast(self.replicas.weights.device.type, torch.bfloat16, cache_enabled=False)


class LoopExecutor(Executor):
    """Node after node, in ordinary eager PyTorch: the bits of K separate processes, for any model."""

    name = "loop"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        r = self.replicas
        self.nodes = [
            ([w.detach().requires_grad_() for w in views], grads, {n: b[row] for n, b in r.buffers.items()})
            for row, (views, grads) in enumerate(
                zip(_by_row(r, r.weights), _by_row(r, r.grads), strict=True),
            )
        ]
        self.names = [c.name for c in r.layout]

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        losses = []
        for row, (leaves, grads, buffers) in enumerate(self.nodes):
            own_batch = tree_map(lambda t, row=row: t[row], batch)
            with drawing_from(self.generators[row]), self._precision():
                loss, _ = self._outcome(dict(zip(self.names, leaves, strict=True)), buffers, own_batch, False)
            losses.append(_write_gradients(loss, leaves, grads, share, first))
        return torch.stack(losses)

    def _evaluate(
        self, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        outcomes = []
        state = stream.get_state()
        for row, views in enumerate(_by_row(self.replicas, weights)):
            own_buffers = {n: b[row].clone() for n, b in buffers.items()}
            stream.set_state(state)
            with drawing_from(stream), self._precision():
                outcomes.append(self._outcome(dict(zip(self.names, views, strict=True)), own_buffers, batch, True))
        accuracies = [a for _, a in outcomes if a is not None]
        return torch.stack([loss for loss, _ in outcomes]), torch.stack(accuracies) if accuracies else None


class VmapExecutor(Executor):
    """All nodes together: `torch.func.vmap` over `functional_call`, in as many pieces as keep it in the caches."""

    name = "vmap"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        r = self.replicas
        self.at_once = max(1, WEIGHTS_AT_ONCE // r.num_parameters)
        self.pieces = []
        for rows in self._pieces(r.num_rows):
            part = r.rows(rows.start, rows.stop)
            leaves = {name: w.detach().requires_grad_() for name, w in part.views(part.weights).items()}
            grads = list(part.views(part.grads).values())
            self.pieces.append((rows, leaves, grads, part.buffers))

    def _pieces(self, num_rows: int) -> list[slice]:
        # As even as possible: a last piece of one node would run at a fraction of the speed.
        count = -(-num_rows // self.at_once)
        bounds = [num_rows * i // count for i in range(count + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(bounds)]

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        losses = []
        for rows, leaves, grads, buffers in self.pieces:
            with NodeDropout(self.generators[rows]) as dropout, self._precision():

                def loss_of_node(
                    own: Views, buffers: Views, batch: Any, node: Tensor, dropout: NodeDropout = dropout
                ) -> Tensor:
                    dropout.node = node
                    return self._outcome(own, buffers, batch, False)[0]

                node_ids = torch.arange(rows.stop - rows.start)
                arguments = (leaves, buffers, tree_map(lambda t, rows=rows: t[rows], batch), node_ids)
                stacked = self._vmapped(loss_of_node, (0, 0, 0, 0), arguments)
            losses.append(_write_gradients(stacked, list(leaves.values()), grads, share, first))
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def _evaluate(
        self, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        def outcome_of_node(own: Views, buffers: Views, batch: Any) -> tuple[Tensor, ...]:
            return tuple(x for x in self._outcome(own, buffers, batch, True) if x is not None)

        outcomes = []
        state = stream.get_state()
        for rows in self._pieces(len(weights)):
            own_buffers = {name: b[rows].clone() for name, b in buffers.items()}
            arguments = (self.replicas.views(weights[rows]), own_buffers, batch)
            stream.set_state(state)
            with drawing_from(stream), self._precision():
                outcomes.append(self._vmapped(outcome_of_node, (0, 0, None), arguments, randomness="same"))
        columns = [torch.cat(column) for column in zip(*outcomes, strict=True)]
        return columns[0], columns[1] if len(columns) > 1 else None

    def _vmapped(
        self,
        of_node: Callable[..., Any],
        in_dims: tuple[int | None, ...],
        arguments: Any,
        randomness: str = "different",
    ) -> Any:
        try:
            with _without_performance_warnings():
                return vmap(of_node, in_dims=in_dims, randomness=randomness)(*arguments)
        except Exception as error:
            if self._works_alone(in_dims, arguments):
                raise VmapError(_explain_vmap_failure(error)) from error
            raise

    def _works_alone(self, in_dims: tuple[int | None, ...], arguments: Any) -> bool:
        """Whether the first node's own model runs on its own batch: then vmap is what failed."""
        own, buffers, batch = (
            tree_map(lambda t: t[0].detach().clone(), part) if dim == 0 else part
            for part, dim in zip(arguments[:3], in_dims, strict=False)
        )
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._outcome(own, buffers, batch, with_accuracy=False)
        except Exception:
            return False
        return True


class AutoExecutor(Executor):
    """`vmap`, or `loop` for a model that cannot be vmapped, with a warning that says why."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chosen: Executor = VmapExecutor(*args, **kwargs)
        self.proven: set[str] = set()  # the kinds of work that vmap has managed once

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.chosen.name

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        return self._attempt("_backward", batch, share, first)

    def _evaluate(
        self, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        return self._attempt("_evaluate", weights, buffers, batch, stream)

    def _attempt(self, work: str, *arguments: Any) -> Any:
        if work in self.proven:
            return getattr(self.chosen, work)(*arguments)
        kept = {name: buffer.clone() for name, buffer in self.replicas.buffers.items()}
        drawn_from = [*self.generators, default_generator(self.replicas.weights.device)]
        drawn_from += [argument for argument in arguments if isinstance(argument, torch.Generator)]
        states = [stream.get_state() for stream in drawn_from]
        try:
            outcome = getattr(self.chosen, work)(*arguments)
        except VmapError as error:
            warnings.warn(f"executor='auto' goes on with 'loop': {error}", UserWarning, stacklevel=2)
            for name, buffer in kept.items():
                self.replicas.buffers[name].copy_(buffer)
            for stream, state in zip(drawn_from, states, strict=True):
                stream.set_state(state)
            self.chosen = LoopExecutor(self.replicas, self.objective, self.generators, self.autocast)
            outcome = getattr(self.chosen, work)(*arguments)
        self.proven.add(work)
        return outcome


def minibatches(batch: Any, size: int | None) -> Iterator[tuple[Any, float]]:
    """Yield (piece, its share of the batch) of a stacked batch (K, B, …), each of at most `size` examples a node."""
    num_examples = next((t.shape[1] for t in tree_leaves(batch) if t.dim() > 1), None)
    if size is None or num_examples is None or size >= num_examples:
        yield batch, 1.0
        return
    for start in range(0, num_examples, size):
        stop = min(start + size, num_examples)
        piece = tree_map(lambda t, a=start, b=stop: t[:, a:b] if t.dim() > 1 else t, batch)
        yield piece, (stop - start) / num_examples


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


def _by_row(replicas: Replicas, matrix: Tensor) -> Iterator[list[Tensor]]:
    for row in matrix:
        yield list(replicas.views(row).values())


def _write_gradients(losses: Tensor, leaves: list[Tensor], grads: list[Tensor], share: float, first: bool) -> Tensor:
    """Write or add the gradients of share · losses to `grads`; return share · losses without their graph."""
    if share != 1.0:
        losses = losses * share
    if not losses.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter")
    # The gradient of a sum over nodes is every node's own gradient: no node's loss reads another's weights.
    pieces = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
    if first:
        torch._foreach_copy_(grads, list(pieces))
    else:
        torch._foreach_add_(grads, list(pieces))
    return losses.detach()


@contextmanager
def _without_performance_warnings() -> Iterator[None]:
    # By functorch's own switch (there is no way to read it; it is on unless somebody turned it off): a warnings
    # filter that comes and goes every step would make Python forget which of the user's warnings it has shown.
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


def _explain_vmap_failure(error: Exception) -> str:
    where = [f for f in traceback.extract_tb(error.__traceback__) if "torch" not in f.filename.split("/")]
    where = [f for f in where if not f.filename.startswith(__file__.rsplit("/", 1)[0])]
    at = f" at {where[-1].filename}:{where[-1].lineno}, `{where[-1].line}`" if where else ""
    reason = str(error).strip().split("\n")[0]
    return f"the model cannot be vectorised over nodes{at}: {reason} — executor='loop' runs it node by node"
