"""The base of executors, which compute the losses and gradients of all nodes, in training and in evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from vsim_kernels.alignment import aligned, empty_rows, is_aligned, rows_apart

from vsim.cluster.randomness import default_generator, drawing_from, preserved
from vsim.cluster.replicas import Replicas, Views
from vsim.engine.objective import (
    Objective,
    as_given,
    changed,
    functions_naming,
    global_generators,
    kept_in_python,
    listed,
    versions,
)
from vsim.private_torch import is_wrapped, storage_key, unwatched, version


@dataclass(frozen=True)
class Settings:
    """How a run is computed.

    Attributes:
        autocast: compute in bfloat16 where torch.autocast does.
        exact: every node is bitwise equal to eager PyTorch on that node alone.
        chunk_size: nodes computed at once, for executors that can choose; None: the best number.
        compile: compile the loss and its gradient.
    """

    autocast: bool = False
    exact: bool = False
    chunk_size: int | None = None
    compile: bool = False


class Executor(ABC):
    """Computes the loss and gradient of every node on its own batch.

    Args:
        replicas: the nodes. Gradients are written to `replicas.grads`, and buffers are updated in place. If the nodes
            share one row of weights, every node uses it; if they share one row of gradients, it gets their mean.
        objective: the user's model (`replicas.module`) and loss.
        generators: one for each node, for randomness inside its model.
        settings: how to compute.

    Attributes:
        name: its name in the history.
        reason: why this executor was chosen, if there was a choice.
        preparing: text for a progress bar, if the next step does other long work first.
        has_given_threads: whether the user chose the number of threads.
        step: the number of the run's current step, from 1; a resumed run sets it to the completed steps.
    """

    name: str
    reason: str = ""
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
        self._steps = 0  # steps that this executor has taken
        self._shared = SharedState(replicas, objective)
        self._writes_in_evaluation: bool | None = None  # whether the model writes to its weights in evaluation

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        """Return stacked losses (K,) of a stacked batch (K, B, …), and write the gradients to `replicas.grads`.

        With a `minibatch_size`, the batch is cut into pieces of that many examples per node. The gradients of the
        pieces are summed, each weighted by its share of the batch.
        """
        self.step += 1
        self._steps += 1
        self.prepare(batch)
        looks = not self.objective.changes and self._steps > 1 and self._steps.bit_count() == 1  # 2, 4, 8, …
        before = self._kept() if looks else {}
        self._shared.begin()
        total: Tensor | None = None
        for piece, share in minibatches(self._laid_out(batch), minibatch_size):
            losses = self._backward(piece, share, first=total is None)
            total = losses if total is None else total + losses
        assert total is not None
        self._shared.check()
        if looks and (found := changed(before, self._kept())):
            raise ValueError(
                f"the model changes {listed(found)} in forward, but not in its first step, so that the nodes share it: "
                "make it a buffer (register_buffer), or change it from the first step on"
            )
        return total

    def prepare(self, batch: Any) -> None:
        """Before the first step, find out what the model changes besides parameters and buffers."""
        if self.objective.changes is None:
            self.objective.changes = self._changes(batch)
        self._use_python(self.objective.changes)

    def _kept(self) -> dict[str, Any]:
        own = {id(t) for t in (*self.objective.parameters(), *self.objective.buffers())}
        return kept_in_python(self.objective.model, self.objective.loss_fn, own)

    def _use_python(self, changes: list[str]) -> None:  # noqa: B027  # by default a no-op
        """Prepare for a model that changes these attributes in `forward`; `changes` may be empty."""

    @contextmanager
    def first_node(self, batch: Any) -> Iterator[tuple[Objective, Views, Any]]:
        """Place copies of the first node's tensors in a copy of the model; yield the model, the tensors, and a batch.

        Computations within the block change no weights, buffers, attributes or random streams of the run.

        Args:
            batch: one node's batch (B, …); a copy is yielded.
        """
        node, device = self.replicas.rows(0, 1), self.replicas.weights.device
        weights = {name: w[0].clone().requires_grad_() for name, w in node.views(node.weights).items()}
        buffers = {name: b[0].clone() for name, b in node.buffers.items()}
        objective, stream = self.objective.of_row(0).copied(), torch.Generator(device)
        stream.set_state((*self.generators, default_generator(device))[0].get_state())
        placed = objective.placed(weights, buffers)
        with unwatched(), preserved(device), drawing_from(stream), torch.enable_grad(), self._precision(), placed:
            yield objective, {**weights, **buffers}, cloned(batch)

    def _changes(self, batch: Any) -> list[str]:
        """Try one node, and return what the model changes in `forward` besides parameters and buffers.

        Raises:
            ValueError: a function that names the user's own model changes it.
        """
        originals = self.objective.originals

        def of_originals() -> Any:
            return [kept_in_python(m) for m in originals], versions(originals)

        theirs = of_originals()
        with self.first_node(tree_map(lambda t: t[0], batch)) as (objective, tensors, own_batch):
            own = {id(t) for t in (*tensors.values(), *objective.parameters(), *objective.buffers())}
            before, drawn = kept_in_python(objective.model, objective.loss_fn, own), global_generators()
            try:
                loss, _ = objective(own_batch, False)
                self._shared.check_reached(loss)
            except ValueError:
                raise
            except Exception:  # the step itself will raise it again, with more details
                return []
            found = changed(before, kept_in_python(objective.model, objective.loss_fn, own))
            if global_generators() != drawn:
                found.append("the global random generator of Python or NumPy")
        if of_originals() != theirs:
            by = functions_naming(self.objective.model, originals) or ["a function that names it"]
            raise ValueError(
                f"{listed(by)} changes the model that was given, not the copies that a run trains: take the module "
                "from the hook's arguments, or use a bound method (self.register_forward_hook(self.method))"
            )
        return found

    @staticmethod
    def _laid_out(batch: Any) -> Any:
        """Return a stacked batch whose rows begin where tensors of a single node could begin in memory."""
        return tree_map(rows_apart, batch)

    def _leaf(self, rows: Tensor) -> Tensor:
        """Return a parameter or buffer (R, *shape) for the model: `rows`, or a copy if `rows` is not aligned.

        `_moved_up_to_date` updates the copies before a step, and copies back what the model writes to them.
        `vsim_kernels.alignment` says why alignment matters.

        Args:
            rows: a part of the replicas' tensors.
        """
        if is_aligned(rows):
            # detach() would give all parameters one version counter: if a model changed one parameter in place, a
            # backward pass would take the others for changed, too.
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
        # Copy back always, because writes through `.data` or by BatchNorm do not change a tensor's version.
        torch._foreach_copy_(places, copies)

    @torch.no_grad()
    def _bits_of_row(self, weights: Iterable[Tensor]) -> Tensor | None:
        """Return a checksum of the row of weights that nodes share, bit by bit; None if they share none.

        Args:
            weights: the tensors that the model gets: views of the row, or copies.
        """
        if not self.replicas.shares_weights or self.replicas.weights.is_meta:
            return None
        moved = [w for w in weights if storage_key(w) != storage_key(self.replicas.weights)]
        return torch.stack([bits_of(w).sum() for w in (self.replicas.weights, *moved)])

    def _check_row(self, weights: Iterable[Tensor], after_first: Tensor | None) -> None:
        """Check that no node after the first has changed the row of weights that nodes share.

        Raises:
            ValueError: a node has. An idempotent change by all nodes, such as clamping, is allowed.
        """
        after_last = self._bits_of_row(weights)
        if after_first is not None and after_last is not None and not torch.equal(after_first, after_last):
            raise ValueError(
                "the model changes its weights in forward, and with this strategy all nodes share one row of them, "
                "which each would change again: with deterministic=True every node has a row of its own"
            )

    @torch.no_grad()
    def evaluate(
        self,
        weights: Tensor,
        buffers: Views,
        batch: Any,
        stream: torch.Generator,
        objective: Objective | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return stacked losses (R,) and counts (R, 2) of weights (R, P) on one shared batch (B, …).

        The model draws from `stream`, the same numbers for every row. The training state does not change. Counts are
        the right predictions and those that count, None if the objective has no accuracy.

        Args:
            objective: the result of `for_evaluation`, to reuse it for several batches; default: a new one.
        """
        objective = objective or self.for_evaluation()
        with self._restored(weights):
            return self._evaluate(objective, weights, buffers, batch, stream)

    @torch.no_grad()
    def apply(
        self,
        function: Callable[[nn.Module, Any], Any],
        weights: Tensor,
        buffers: Views,
        batch: Any,
        stream: torch.Generator,
        objective: Objective | None = None,
    ) -> Any:
        """Return function(model, batch), with the model as in `evaluate` and shared weights (P,) and buffers."""
        objective = objective or self.for_evaluation()
        with self._placed(objective, weights.clone(), buffers, stream, requires_grad=False):
            return function(objective.model, as_given(cloned(batch)))

    def for_evaluation(self, row: int = 0) -> Objective:
        """Return a copy of the model and loss in evaluation mode.

        Args:
            row: the node that is copied, if each node has its own copy of the module.
        """
        objective = self.objective.of_row(row).copied()
        objective.model.eval()
        return objective

    @contextmanager
    def _restored(self, weights: Tensor) -> Iterator[None]:
        """Restore the weights at the end of a block if the model writes to them in evaluation.

        nn.Embedding(max_norm=…) does, for instance. The first evaluation finds out.
        """
        if self._writes_in_evaluation is False:
            at_first = version(weights)
            yield
            if version(weights) != at_first:
                raise ValueError("the model writes to its weights in evaluation, but not in the first one")
            return
        at_first, copies = version(weights), weights.clone()
        yield
        self._writes_in_evaluation = version(weights) != at_first or not torch.equal(bits_of(weights), bits_of(copies))
        if self._writes_in_evaluation:
            shared = weights.stride(0) == 0  # one row for all
            (weights[:1] if shared else weights).copy_(copies[:1] if shared else copies)

    @abstractmethod
    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        """Return share · losses (K,); write (if first) or add share · gradients to `replicas.grads`."""

    def _evaluate(
        self, objective: Objective, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the results of `evaluate`. Default: row by row, in ordinary eager PyTorch."""
        outcomes = []
        state = stream.get_state()
        for row, own_weights in enumerate(weights):
            stream.set_state(state)
            with self._placed(objective, own_weights, {n: b[row] for n, b in buffers.items()}, stream):
                outcomes.append(objective(cloned(batch), True))
        counts = [own for _, own in outcomes if own is not None]
        return torch.stack([loss for loss, _ in outcomes]), torch.stack(counts) if counts else None

    @contextmanager
    def _placed(
        self,
        objective: Objective,
        weights: Tensor,
        buffers: Views,
        stream: torch.Generator,
        requires_grad: bool = True,
    ) -> Iterator[None]:
        """Place weights (P,) and copies of buffers in a model, which draws from `stream` within the block.

        Args:
            requires_grad: whether the parameters require gradients; some operations, such as recurrent ones, read it.
        """
        views = self.replicas.views(weights)
        parameters = {name: aligned(w).detach().requires_grad_(requires_grad) for name, w in views.items()}
        own_buffers = {name: b.clone() for name, b in buffers.items()}
        with drawing_from(stream), self._precision(), objective.placed(parameters, own_buffers):
            yield

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.settings.autocast:
            return nullcontext()
        # Disable the cache, so that the next node does not get casts of this node's weights.
        return torch.autocast(self.replicas.weights.device.type, torch.bfloat16, cache_enabled=False)


def bits_of(t: Tensor) -> Tensor:
    """Return a floating-point tensor reinterpreted as integers, so that == compares bits, including NaNs."""
    return t.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def cloned(batch: Any) -> Any:
    """Return a copy of a batch that is needed again after a call, as a model may change its batch in place."""
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, batch)


def minibatches(batch: Any, size: int | None) -> Iterator[tuple[Any, float]]:
    """Cut a stacked batch (K, B, …) into pieces of at most `size` examples per node; yield (piece, share of batch).

    Raises:
        ValueError: the batch must be cut, but its tensors have different numbers of examples.
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
    """Raise a ValueError if a batch cannot be cut because its tensors differ in the length of dimension `dim`.

    Examples of such tensors are class weights, and sequences with time as the first dimension: cutting these does not
    select examples.
    """
    lengths = {keystr(path): t.shape[dim] for path, t in tree_flatten_with_path(batch)[0] if t.dim() > dim}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "a batch is cut into smaller ones along the first dimension of all its tensors, which differs here: "
            f"{', '.join(f'batch{path}: {length}' for path, length in lengths.items())}; put the examples first"
        )


class Before:
    """A snapshot of the state that a step changes besides gradients: buffers, random streams, nodes' own Python.

    Args:
        executor: the executor that takes the step.
        streams: further generators that the step draws from.
        weights: keep the weights, too, at the cost of a matrix of memory.
    """

    def __init__(self, executor: Executor, streams: Sequence[torch.Generator] = (), weights: bool = True) -> None:
        replicas = executor.replicas
        default = default_generator(replicas.weights.device)
        self.streams = [(g, g.get_state()) for g in [*executor.generators, default, *streams]]
        self.objective = executor.objective
        self.of_nodes = self.objective.snapshot()
        written = [*([replicas.weights] if weights else []), *replicas.buffers.values()]
        self.tensors = [(t, t.clone()) for t in written]

    def restore(self) -> None:
        """Restore the snapshot."""
        for stream, state in self.streams:
            stream.set_state(state)
        for tensor, value in self.tensors:
            tensor.copy_(value)
        self.objective.restore(self.of_nodes)


@contextmanager
def undone(executor: Executor) -> Iterator[None]:
    """Undo the changes that computing losses makes to buffers and random streams, at the end of a block."""
    before = Before(executor, [torch.default_generator])
    try:
        yield
    finally:
        before.restore()


def write_gradients(losses: Tensor, leaves: list[Tensor], grads: list[Tensor], share: float, first: bool) -> None:
    """Write or add the gradients of share · sum(losses) to `grads`."""
    check_depends(losses)
    # The gradient of the summed losses holds every node's own gradient, because no node's loss reads another node's
    # weights. If nodes share their weights, the gradient is the sum over the nodes.
    shares = torch.full_like(losses, share)
    pieces = torch.autograd.grad(losses, leaves, shares, allow_unused=True, materialize_grads=True)
    write_or_add(grads, pieces, first)


def check_depends(losses: Tensor) -> None:
    """Raise a ValueError for losses that have no gradient."""
    if not losses.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter")


def write_or_add(grads: list[Tensor], pieces: Sequence[Tensor], first: bool) -> None:
    """Write `pieces` to `grads` (if first) or add them. A piece may already lie in the memory of its gradient."""
    pieces = [p.to_dense() if p.is_sparse else p for p in pieces]  # Embedding(sparse=True) has sparse gradients
    if not first:
        torch._foreach_add_(grads, pieces)
        return
    elsewhere = [(g, p) for g, p in zip(grads, pieces, strict=True) if g.data_ptr() != p.data_ptr()]
    if elsewhere:
        torch._foreach_copy_([g for g, _ in elsewhere], [p for _, p in elsewhere])


class SharedState:
    """Rejects changing state that nodes would share silently: frozen parameters, loss buffers, parameters in closures.

    Args:
        replicas: the nodes. objective: the model and loss that hold the state.
    """

    def __init__(self, replicas: Replicas, objective: Objective) -> None:
        self.replicas, self.objective = replicas, objective
        self._strangers = {
            id(p): name for model in (objective.model, *objective.originals) for name, p in model.named_parameters()
        }
        self._made: dict[str, tuple[int, int]] | None = None  # buffers made in forward; None before the first step
        self._may_make = True

    def begin(self) -> None:
        """Record the state before a step."""
        self._frozen = {name: (t, version(t)) for name, t in self.replicas.frozen.items()}
        self._of_loss = {n: (b, version(b)) for n, b in self._loss_buffers() if self.replicas.num_held > 1}

    def check_reached(self, losses: Tensor) -> None:
        """Raise a ValueError if losses depend on parameters of the model that belong to no node.

        During a step, a node's own tensors replace the module's parameters. But a parameter held elsewhere, in a list
        or in a loss function that names the trainer's model, is still the original.
        """
        nodes = [losses.grad_fn]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            name = self._strangers.get(id(getattr(node, "variable", None)))
            if name is not None:
                raise ValueError(
                    f"the loss depends on {name} not by the module that has it but by another way, such as a list, a "
                    "closure or a global variable, where it belongs to no node and is never trained: take it from "
                    "its module, in forward"
                )
            found = {following for following, _ in getattr(node, "next_functions", ()) if following is not None}
            nodes += found - seen
            seen |= found

    def check(self) -> None:
        """Check the state after a step.

        Raises:
            ValueError: a frozen parameter or a buffer of the loss has changed, or forward has created a buffer that
                differs between nodes or steps. Created buffers are checked in the first two steps; a constant buffer,
                such as a mask, is allowed.
        """
        for name, (tensor, at_first) in self._frozen.items():
            if version(tensor) != at_first:
                raise ValueError(
                    f"the model changes {name} in forward, a parameter that requires no gradient and that the nodes "
                    "share: make it a buffer (register_buffer), of which every node has its own"
                )
        for name, buffer in self._loss_buffers() if self._of_loss else ():
            tensor, at_first = self._of_loss.get(name, (buffer, version(buffer)))
            if buffer is not tensor or version(tensor) != at_first:
                raise ValueError(
                    f"loss_fn changes its buffer {name}, which all nodes that are computed together share: make it "
                    "a buffer of the model, which returns its loss itself, so that every node has its own"
                )
        if not self._may_make:
            return
        made = {n: b for n, b in self.objective.model.named_buffers() if n not in self.replicas.buffers}
        now = {name: (id(b), version(b)) for name, b in made.items()}
        own = [name for name, b in made.items() if is_wrapped(b)]
        if self._made is not None:
            own += [name for name in now if now[name] != self._made.get(name)]
        if own:
            raise ValueError(
                f"the model makes buffers in forward: {', '.join(own)}; register them with a tensor of their shape, so "
                "that every node has its own"
            )
        self._may_make, self._made = bool(made) and self._made is None, now

    def _loss_buffers(self) -> list[tuple[str, Tensor]]:
        loss_fn = self.objective.loss_fn
        return list(loss_fn.named_buffers()) if isinstance(loss_fn, nn.Module) else []
