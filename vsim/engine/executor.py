"""The base class of executors, which compute the nodes' losses and gradients in training and evaluation."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from vsim_kernels.alignment import aligned, empty_rows, is_aligned

from vsim.cluster.ledger import Position
from vsim.cluster.randomness import default_generator, drawing_from, preserved
from vsim.cluster.replicas import Replicas, Views
from vsim.engine.objective import Objective, as_given, described_stranger, listed
from vsim.private_torch import unwatched, version, versions


@dataclass(frozen=True)
class Settings:
    """How a run is computed.

    Attributes:
        autocast: compute in bfloat16 where torch.autocast does.
        deterministic: make runs bitwise repeatable; on the CPU, also bitwise equal to eager PyTorch node by node.
        chunk_size: the number of nodes computed at once; default: the executor's choice.
        compile: compile the loss and its gradient.
        position: the current position of the run.
        undrawn: generator → its state before the current step's first draw, for the generators that the step draws
            from; shared by all executors of a stack.
    """

    autocast: bool = False
    deterministic: bool = False
    chunk_size: int | None = None
    compile: bool = False
    position: Position = field(default_factory=Position, compare=False)
    undrawn: dict[torch.Generator, Tensor] = field(default_factory=dict, compare=False)


class Executor(ABC):
    """Computes the loss and gradient of every node on its own batch.

    Args:
        replicas: the nodes. Gradients are written to `replicas.grads`, and buffers are updated in place.
        objective: the user's model (`replicas.module`) and loss.
        generators: one for each node, from which the node's model draws.
        settings: how to compute.

    Attributes:
        name: the executor's name in the history.
        reason: why this executor was chosen, if there was a choice.
        preparing: text for a progress bar if the next step begins with long preparations, such as compilation.
        captures: whether the first steps are captured as CUDA graphs, and later steps replay the graphs.
        has_given_threads: whether the user chose the number of threads.
        casts: whether the settings or the model itself turn autocast on; the proof detects whether the model does.
    """

    name: str
    reason: str = ""
    preparing: str = ""
    captures: bool = False
    has_given_threads: bool = False

    def __init__(
        self,
        replicas: Replicas,
        objective: Objective,
        generators: list[torch.Generator],
        settings: Settings | None = None,
    ) -> None:
        self.replicas = replicas
        self.objective = objective
        self.generators = generators
        self.settings = settings or Settings()
        self.casts = self.settings.autocast
        self._moved: list[tuple[Tensor, Tensor]] = []
        self._has_checked = False  # whether `_loss` has checked the first loss
        models = (objective.model, *objective.originals)
        self._strangers = {id(p): name for model in models for name, p in model.named_parameters()}
        self._untrained = {n: p for n, p in replicas.module.named_parameters() if n in replicas.frozen}
        self._writes_in_evaluation: bool | None = None  # whether the model writes to its weights in evaluation
        self._differentiates: list[Callable[..., Any] | None] = []  # functions that need gradients in evaluation

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        """Return stacked losses (K,) of a stacked batch (K, B, …), and write the gradients to `replicas.grads`.

        With a `minibatch_size`, the batch is cut into pieces of that many examples per node. The gradients of the
        pieces are summed, each weighted by its share of the batch.
        """
        shared = {name: (id(t), version(t)) for name, t in self._shared_tensors().items()}
        total: Tensor | None = None
        for piece, share in minibatches(batch, minibatch_size):
            losses = self._backward(piece, share, first=total is None)
            total = losses if total is None else total + losses
        assert total is not None
        now = self._shared_tensors()
        if changed := [name for name, t in now.items() if shared.get(name) != (id(t), version(t))]:
            raise ValueError(
                f"the model or its loss changes {listed(changed)} in forward, a frozen parameter or a buffer of the "
                "loss, which nodes share: make it a buffer of the model (register_buffer), of which each has its own"
            )
        self._check_untrained()
        self.objective.note()
        return total

    def _check_untrained(self) -> None:
        """Raise a ValueError if `forward` has set `requires_grad_(True)` of parameters that no node trains."""
        if names := [name for name, p in self._untrained.items() if p.requires_grad]:
            raise ValueError(
                f"forward sets requires_grad_(True) of {listed(names)}, but no node trains what requires no gradient "
                "in the model that was given: let it require one there, freeze it by run.freeze(names) in a callback's "
                "on_start, and train it from a later step on by run.unfreeze(names)"
            )

    def _warn_of_frozen(self, parameters: Mapping[str, Tensor]) -> None:
        """Warn once if `forward` has left some of a node's parameters (name → tensor) without a gradient."""
        frozen = [name for name, p in parameters.items() if not p.requires_grad]
        if frozen and not self.objective.warned_of_frozen:
            self.objective.warned_of_frozen.append(True)
            warnings.warn(
                f"forward sets requires_grad_(False) of {listed(frozen)}, but the optimizer steps them all the same, "
                "with a gradient of 0: call run.freeze(names) in a callback",
                UserWarning,
                stacklevel=3,
            )

    def prepare(self, batch: Any) -> None:  # noqa: B027  # by default a no-op
        """Prepare for stacked batches (K, B, …) shaped like `batch`; `losses_and_grads` calls this method itself."""

    def _shared_tensors(self) -> dict[str, Tensor]:
        """Return name → tensor, for tensors that nodes share and that `forward` must not change."""
        loss_fn, several = self.objective.loss_fn, self.replicas.num_held > 1
        of_loss = dict(loss_fn.named_buffers()) if isinstance(loss_fn, nn.Module) and several else {}
        return {**self.replicas.frozen, **{f"loss_fn.{name}": buffer for name, buffer in of_loss.items()}}

    @property
    def draws_jointly(self) -> bool:
        """Whether the random numbers of a node depend on the other nodes of a call."""
        return False

    def rewind(self) -> None:
        """Restore the generators to their states before the current step's first draw."""
        for stream in self.generators:
            if (before := self.settings.undrawn.get(stream)) is not None:
                stream.set_state(before)

    @contextmanager
    def first_node(self, batch: Any) -> Iterator[tuple[Objective, Views, Any]]:
        """Place copies of the first node's tensors in a copy of the model; yield this model, the tensors, and a batch.

        Computations within the block change no weights, buffers, attributes or random streams of the run.

        Args:
            batch: one node's batch (B, …); a copy is yielded.
        """
        node, device = self.replicas.rows(0, 1), self.replicas.weights.device
        weights = {name: w[0].clone().requires_grad_() for name, w in node.views(node.weights).items()}
        buffers = {name: b[0].clone() for name, b in node.buffers.items()}
        objective, stream = self.objective.of_row(0).copied(), torch.Generator(device)
        stream.set_state((*self.generators, default_generator(device))[0].get_state())
        placed = objective.with_tensors(weights, buffers)
        untouched = self.objective.untouched()
        with (
            unwatched(),
            preserved(device),
            untouched,
            drawing_from(stream),
            torch.enable_grad(),
            self._precision(),
            placed,
        ):
            yield objective, {**weights, **buffers}, cloned(batch)

    def _loss(self, objective: Objective, batch: Any) -> Tensor:
        """Return the loss of one node's batch; the first loss must use and change only tensors of the node.

        A node's module is a copy of the user's model. Parameters in lists and closures are not copied, so no node
        trains them. A function that refers to the user's model by a variable changes that model, not the copy.

        Raises:
            ValueError: the loss depends on parameters that no node trains, or a function changes the original.
        """
        if self._has_checked:
            return objective(batch, False)[0]
        self._has_checked, before = True, self._state_of_originals()
        changed = ValueError(
            "a function that names the model changes the model that was given, not the copies that a run trains: take "
            "the module from a hook's arguments, or use a bound method (self.register_forward_hook(self.f))"
        )
        try:
            loss: Tensor = objective(batch, False)[0]
        except Exception as error:
            if self._state_of_originals() != before:
                raise changed from error
            raise
        if self._state_of_originals() != before:
            raise changed
        self._check_untrained()
        for leaf in leaves_of(loss):
            if isinstance(leaf, nn.Parameter) and not self._trains(leaf):
                name = self._strangers.get(id(leaf))
                if name is None:
                    raise ValueError(f"the loss depends on {described_stranger(objective, leaf)}")
                raise ValueError(
                    f"the loss depends on {name} not by the module that has it but by another way, such as a list, a "
                    "closure or a global variable, where it belongs to no node and is never trained: take it from "
                    "its module, in forward"
                )
        return loss

    def _state_of_originals(self) -> list[Any]:
        """Return a value that changes when tensors or attributes of the user's models change."""
        modules = [module for model in self.objective.originals for module in model.modules()]
        tensors = [t for module in modules for t in (*module.parameters(False), *module.buffers(False))]
        values = [value for module in modules for value in vars(module).values()]
        sizes = [(id(value), len(value) if isinstance(value, list | dict | set) else 0) for value in values]
        return [*versions(tensors), *sizes]

    def _trains(self, parameter: Tensor) -> bool:
        """Return whether a node trains this nn.Parameter. By default no node does: nodes train plain tensors."""
        return False

    def _leaf(self, rows: Tensor) -> Tensor:
        """Return a parameter or buffer (R, *shape) to place in the model: `rows`, or a copy if `rows` is not aligned.

        `_moved_up_to_date` updates the copies before a step, and copies the model's writes back after it.
        `vsim_kernels.alignment` says why alignment matters.

        Args:
            rows: a part of the replicas' tensors.
        """
        if is_aligned(rows):
            # Not detach(): all parameters would share one version counter, and after an in-place change of one
            # parameter, a backward pass would take all of them for changed.
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
        # Always copy back: a tensor's version does not show writes through `.data` or by BatchNorm.
        torch._foreach_copy_(places, copies)

    def evaluate(
        self,
        weights: Tensor,
        buffers: Views,
        batch: Any,
        stream: torch.Generator,
        objective: Objective | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Evaluate weights (R, P) on one shared batch (B, …); return stacked losses (R,) and counts (R, 2).

        The model draws the same numbers from `stream` for every row. The training state does not change. Counts are the
        numbers of right predictions and of predictions that count; None if the objective has no accuracy. If the model
        computes gradients in `forward`, rows are computed one by one.

        Args:
            objective: the result of `for_evaluation`, to reuse it for several batches; default: a new one.
        """
        objective = objective or self.for_evaluation()

        def compute(differentiates: bool) -> tuple[Tensor, Tensor | None]:
            evaluate = partial(Executor._evaluate, self) if differentiates else self._evaluate
            return evaluate(objective, weights, buffers, batch, stream)

        with self._restored(weights):
            return self._without_graph(compute, stream)

    def apply(
        self,
        function: Callable[[nn.Module, Any], Any],
        weights: Tensor,
        buffers: Views,
        batch: Any,
        stream: torch.Generator,
        objective: Objective | None = None,
    ) -> Any:
        """Return function(model, batch) for a model in evaluation mode with the weights (P,) and buffers of one row."""
        objective = objective or self.for_evaluation()

        def compute(differentiates: bool) -> Any:
            with self._placed(objective, weights.clone(), buffers, stream, requires_grad=differentiates):
                return function(objective.model, as_given(cloned(batch)))

        return self._without_graph(compute, stream, function)

    def _without_graph(
        self, compute: Callable[[bool], Any], stream: torch.Generator, of: Callable[..., Any] | None = None
    ) -> Any:
        """Return compute(False) without autograd or, if that fails for lack of gradients, compute(True) with autograd.

        Args:
            stream: the generator from which `compute` draws.
            of: the user's function that `compute` calls; None: only the objective. A function that has once needed
                gradients always gets them; if the objective has, every function does.
        """
        differentiates = any(one is None or one is of for one in self._differentiates)
        if not differentiates:
            state = stream.get_state()
            try:
                with torch.no_grad():
                    return compute(False)
            except Exception as error:
                if "grad" not in str(error):
                    raise
            stream.set_state(state)
        with torch.enable_grad():
            found = compute(True)
        if not differentiates:
            self._differentiates.append(of)
        return tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, found)

    def for_evaluation(self, row: int = 0) -> Objective:
        """Return a copy of the model and loss in evaluation mode.

        Args:
            row: the row of the node whose copy to take, if each node has its own copy of the module.
        """
        objective = self.objective.of_row(row).copied()
        objective.model.eval()
        return objective

    @contextmanager
    def _restored(self, weights: Tensor) -> Iterator[None]:
        """Restore the weights at the end of a block if the model, like nn.Embedding(max_norm=…), writes to them.

        The first evaluation detects whether the model writes to its weights.
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
            weights.copy_(copies)

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
                loss, own_counts = objective(cloned(batch), True)
            outcomes.append((loss.detach(), own_counts))
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
        """Place weights (P,) and copies of buffers in a model for a block, in which the model draws from `stream`.

        Args:
            requires_grad: whether parameters require gradients; some operations, such as recurrent ones, depend on it.
        """
        views = self.replicas.views(weights)
        parameters = {name: aligned(w).detach().requires_grad_(requires_grad) for name, w in views.items()}
        own_buffers = {name: b.clone() for name, b in buffers.items()}
        with drawing_from(stream), self._precision(), objective.with_tensors(parameters, own_buffers):
            yield

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.settings.autocast:
            return nullcontext()
        # Disable autocast's cache, so that the next node does not get casts of this node's weights.
        return torch.autocast(self.replicas.weights.device.type, torch.bfloat16, cache_enabled=False)


def bits_of(t: Tensor) -> Tensor:
    """Return a floating-point tensor reinterpreted as integers, so that == compares bits, including NaNs."""
    return t.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def cloned(batch: Any) -> Any:
    """Return a copy of a batch, because a model may change its batch in place."""
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

    Tensors without examples in this dimension, such as class weights or sequences (T, B), must not be cut.
    """
    lengths = {keystr(path): t.shape[dim] for path, t in tree_flatten_with_path(batch)[0] if t.dim() > dim}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "a batch is cut into smaller ones along the first dimension of all its tensors, which differs here: "
            f"{', '.join(f'batch{path}: {length}' for path, length in lengths.items())}; put the examples first"
        )


@contextmanager
def undone(executor: Executor) -> Iterator[None]:
    """Restore weights, buffers, attributes and random generators at the end of a block that computes losses."""
    replicas = executor.replicas
    restore_python = executor.objective.noted()
    default = torch.default_generator, default_generator(replicas.weights.device)
    streams = [(stream, stream.get_state()) for stream in (*executor.generators, *default)]
    tensors = [(t, t.clone()) for t in (replicas.weights, *replicas.buffers.values())]
    try:
        yield
    finally:
        restore_python()
        for stream, state in streams:
            stream.set_state(state)
        for tensor, value in tensors:
            tensor.copy_(value)


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the leaf tensors of the autograd graph of a loss."""
    nodes, found = [loss.grad_fn], []
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        following = {other for other, _ in getattr(node, "next_functions", ()) if other is not None}
        nodes += following - seen
        seen |= following
    return found


def write_gradients(losses: Tensor, leaves: list[Tensor], grads: list[Tensor], share: float, first: bool) -> None:
    """Write or add the gradients of share · sum(losses) to `grads`."""
    check_depends(losses)
    # The gradient of the summed losses contains each node's gradient, because no node's loss reads another node's
    # weights.
    shares = torch.full_like(losses, share)
    pieces = torch.autograd.grad(losses, leaves, shares, allow_unused=True, materialize_grads=True)
    write_or_add(grads, pieces, first)


def check_depends(losses: Tensor) -> None:
    """Raise a ValueError for losses that have no gradient."""
    if not losses.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter")


def write_or_add(grads: list[Tensor], pieces: Sequence[Tensor], first: bool) -> None:
    """Write (if first) or add `pieces` to `grads`. A piece may already be a view of its gradient."""
    pieces = [p.to_dense() if p.is_sparse else p for p in pieces]  # Embedding(sparse=True) has sparse gradients
    if not first:
        torch._foreach_add_(grads, pieces)
        return
    elsewhere = [(g, p) for g, p in zip(grads, pieces, strict=True) if g.data_ptr() != p.data_ptr()]
    if elsewhere:
        torch._foreach_copy_([g for g, _ in elsewhere], [p for _, p in elsewhere])
