"""Prove an executor right for a model: on copies, two steps of two nodes must agree with the loop's steps.

A model must be a function of its parameters, buffers, batch and torch's generators. `prove` runs before the first step
with each shape of batch. Losses, gradients and buffers must agree up to rounding. An attribute that the second step
changes again, such as a counter, or a draw from a generator of Python or NumPy is each node's own, which only the loop
computes; a tensor of the step that `forward` keeps is not, if no later step computes with it (`vsim.engine.kept`). The
proof restores what its calls change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vsim.arguments import retold
from vsim.cluster.randomness import fingerprints, preserved
from vsim.cluster.replicas import Replicas, Views, matrix
from vsim.engine import kept as keeping
from vsim.engine.attributes import Outside, changed, shown
from vsim.engine.batched import VmapError
from vsim.engine.casting import Casts
from vsim.engine.executor import Executor, cloned
from vsim.engine.looped import LoopExecutor
from vsim.engine.objective import Objective, advice_on, listed
from vsim.private_torch import unwatched

# Largest allowed relative differences of (losses, gradients, buffers). Each difference is divided by
# - the absolute loss, at least 1;
# - the norm of the parameter's gradient, at least _LEAST_SHARE of the norm of all gradients;
# - the norm of the buffer, at least the norm of a buffer with 0.01 in every entry.
# Without these lower bounds, gradients and means that cancel to mere rounding errors would fail. A wrong rule causes
# differences of about 1. In bfloat16 on a GPU, correct gradients of an MLP differed by 0.13.
_BOUNDS, _BOUNDS_OF_BFLOAT16 = (1e-4, 1e-2, 1e-3), (0.1, 0.3, 0.1)
_LEAST_SHARE = 0.05


class DifferError(Exception):
    """A step differs from the reference by more than rounding; the message names the loss, gradient or buffer."""


class OwnStateError(VmapError):
    """Calls change what each node has of its own in Python; the message names it."""


class Proof(NamedTuple):
    """The compared nodes, and the largest differences of losses, and of gradients.

    Attributes:
        calls, work: see `Lowering`. differing, kept: see `VmapExecutor`.
    """

    nodes: Sequence[int]
    losses: float
    gradients: float
    calls: Mapping[tuple[str, str], int]
    work: Mapping[tuple[str, str], int] = MappingProxyType({})
    differing: str = ""
    kept: Sequence[str] = ()

    def __str__(self) -> str:
        nodes = " and ".join(map(str, self.nodes))
        of = "nodes" if len(self.nodes) > 1 else "node"
        return f"proved on {of} {nodes}: losses {self.losses:.0g}, gradients {self.gradients:.0g}"


class Step(NamedTuple):
    """A step of n nodes: losses (n,); gradients (n, P), or their mean (1, P); buffers (n, …); the rest: see `Proof`."""

    losses: Tensor
    grads: Tensor
    buffers: Views
    calls: Mapping[tuple[str, str], int] = MappingProxyType({})
    work: Mapping[tuple[str, str], int] = MappingProxyType({})
    differing: str = ""

    def copied(self) -> Step:
        """Return a step with copies of the tensors."""
        buffers = {name: b.clone() for name, b in self.buffers.items()}
        return self._replace(grads=self.grads.clone(), buffers=buffers)


def prove(executor: Executor, uncompiled: Callable[..., Any], batch: Any, evaluating: bool = False) -> Proof:
    """Compare two steps of the first and the last node, computed by an executor and by the loop, on copies.

    In the second step, the two nodes exchange their batches, and each node is computed by a separate call, because
    results must not depend on the number of nodes in a call.

    Args:
        uncompiled: makes an uncompiled executor of the class to prove.
        batch: a stacked batch (K, B, …).
        evaluating: whether to compare in evaluation mode, for models whose draws differ from the loop's.

    Raises:
        VmapError: the executor cannot compute the model, or disagrees with the loop; the message names the difference.
        OwnStateError: nodes need Python state of their own; the message names it.
        Exception: the model itself raises an error in the loop.
    """
    if executor.objective.differs:  # after a resume
        raise OwnStateError(f"the model cannot be vectorised over nodes: its attributes differ by node — {_LOOP}")
    whole = executor.replicas
    finite = torch.linalg.vector_norm(whole.weights, dim=1).isfinite()
    alive = finite.nonzero().flatten().tolist()  # a diverged run may still have rows here
    rows = sorted({alive[0], alive[-1]} if alive else {0, whole.num_held - 1})
    batches = [tree_map(lambda t, of=of: t[of], batch) for of in (rows, rows[::-1])]
    apart, differing, objective = [], "", executor.objective.copied()
    with unwatched(), preserved(whole.weights.device), executor.objective.untouched() as outside:
        reference = objective.copied()
        try:
            with Casts() as casts:
                loop, own, kept = _in_loop(executor, reference, outside, rows, batches)
                if evaluating:
                    objective.eval()
                    reference = objective.copied()
                    loop, *_ = _in_loop(executor, reference, outside, rows, batches)
        except RuntimeError as error:
            if attached := [*dict(reference.attached())]:
                raise retold(error, f"{error}. {advice_on(attached)}") from error
            raise
        executor.casts = executor.casts or casts.seen
        fast, failure = _steps(uncompiled, executor, objective, rows, batches, kept), None
        try:
            for theirs in loop:
                ours = next(fast)
                differing = differing or ours.differing
                apart.append(compared(executor, ours, theirs))
        except Exception as error:  # the steps differ, or an earlier call has changed attributes of the model
            failure = error
        if failure is None:
            carried: Sequence[str] = keeping.differing(objective, reference, kept)
        else:
            carried = kept if isinstance(failure, DifferError) else []
        if carried and not own:
            own = (
                f"a step computes with what {listed([shown(path) for path in carried])} keeps from the step before, "
                "which is each node's own: make it a buffer (register_buffer), and its nodes are computed together"
            )
        if why := _kept_in(objective) or own:
            raise OwnStateError(f"the model cannot be vectorised over nodes: {why} — {_LOOP}") from failure
        if isinstance(failure, VmapError):
            raise failure
        if failure is not None:
            raise VmapError(f"the model cannot be vectorised over nodes: {failure} — {_LOOP}") from failure
    losses, gradients = map(max, zip(*apart, strict=True))
    return Proof([whole.first_node + row for row in rows], losses, gradients, ours.calls, ours.work, differing, kept)


def compared(executor: Executor, ours: Step, theirs: Step) -> tuple[float, float]:
    """Return the largest difference of the losses, and of the gradients, between a step and the reference step.

    Raises:
        DifferError: losses, gradients or buffers differ by more than rounding.
    """
    whole = executor.replicas
    precise = whole.weights.dtype in (torch.float32, torch.float64) and not executor.casts
    of_losses, of_gradients, of_buffers = _BOUNDS if precise else _BOUNDS_OF_BFLOAT16
    losses = _losses_apart(ours.losses, theirs.losses, of_losses)
    gradients = _gradients_apart(whole, ours.grads, theirs.grads, of_gradients)
    for name, buffer in ours.buffers.items():
        _check_buffer(name, buffer, theirs.buffers[name], of_buffers)
    return losses, gradients


def _in_loop(
    executor: Executor, objective: Objective, outside: Outside, rows: list[int], batches: Sequence[Any]
) -> tuple[list[Step], str, Sequence[str]]:
    """Return the loop's steps; why every node needs Python state of its own, if it does; and which tensors it keeps."""
    device, steps, contents = executor.replicas.weights.device, list[Step](), list[list[dict[str, bytes]]]()
    before = fingerprints(device)
    for step in _steps(LoopExecutor, executor, objective, rows, batches):
        steps.append(step.copied())
        contents.append([own.contents for own in objective.copies()])
    pairs = zip(*contents, strict=True)
    again = [*dict.fromkeys(path for first, second in pairs for path in changed(first, second))]
    kept = keeping.of_step(objective, again)
    if own := [shown(path) for path in again if path not in kept]:
        why = (
            f"forward changes {listed(own)} in every step, which each node has of its own: make it a buffer "
            "(register_buffer), and its nodes are computed together"
        )
        return steps, why, kept
    now = fingerprints(device)
    if drawn := [*(name for name in ("random", "numpy.random") if before.get(name) != now.get(name)), *outside.drawn()]:
        why = f"forward draws from {listed(drawn)}, of which nodes have none of their own: draw by torch's functions"
        return steps, why, kept
    return steps, "", kept


def _steps(
    make: Callable[..., Any],
    executor: Executor,
    objective: Objective,
    rows: list[int],
    batches: Sequence[Any],
    kept: Sequence[str] = (),
) -> Iterator[Step]:
    """Yield a step for each batch, computed by a new executor on copies of `rows`; weights are not updated.

    Args:
        make: makes an executor.
        kept: attributes that the executor keeps for the first node; no step may compute with those of the one before.
    """
    whole, like = executor.replicas, executor.replicas.weights
    weights, grads = (matrix(len(rows), whole.num_parameters, like.dtype, like.device) for _ in range(2))
    weights.copy_(like[rows])
    buffers = {name: b[rows].clone() for name, b in whole.buffers.items()}
    own = replace(whole, weights=weights, grads=grads, buffers=buffers, first_node=0)
    streams = [torch.Generator(like.device).set_state(executor.generators[row].get_state()) for row in rows]
    for batch, at_once in zip(batches, (None, 1), strict=True):
        engine = make(own, objective, streams, replace(executor.settings, chunk_size=at_once, compile=False))
        if kept:
            engine.kept = kept
        losses = engine.losses_and_grads(cloned(batch))
        known = {name: getattr(engine, name) for name in ("calls", "work", "differing") if hasattr(engine, name)}
        yield Step(losses, grads, buffers, **known)
        keeping.spoil(objective, kept)  # unless this was the last step


def _kept_in(objective: Objective) -> str:
    kept = [*dict(objective.attached())]
    return f"{listed(kept)} keeps a tensor that the model has computed for all nodes" if kept else ""


def _losses_apart(ours: Tensor, theirs: Tensor, bound: float) -> float:
    """Return the largest difference of losses; raise a DifferError if it exceeds the bound."""
    apart = float(((ours - theirs).abs() / theirs.abs().clamp(min=1)).nan_to_num(0.0).max())
    if apart > bound or not torch.equal(ours.isfinite(), theirs.isfinite()):
        raise DifferError(f"the losses {ours.tolist()} differ from {theirs.tolist()} in eager PyTorch")
    return apart


def _gradients_apart(replicas: Replicas, ours: Tensor, theirs: Tensor, bound: float) -> float:
    """Return the largest relative difference of gradients (R, P); raise a DifferError if it exceeds the bound."""
    own, other = replicas.views(ours), replicas.views(theirs)
    least, largest = float(_LEAST_SHARE * theirs.norm()), 0.0
    floor = 100 * torch.finfo(theirs.dtype).eps
    for name, gradient in own.items():
        apart, norm = float((gradient - other[name]).norm()), float(other[name].norm())
        if apart == apart:
            largest = max(largest, apart / max(norm, least, floor))
        if largest > bound or not torch.equal(gradient.isnan(), other[name].isnan()):
            off = f"by {apart:.2g} where its norm is {norm:.2g}"
            raise DifferError(f"the gradient of {name} differs from that of eager PyTorch, {off}")
    return largest


def _check_buffer(name: str, ours: Tensor, theirs: Tensor, bound: float) -> None:
    if not (ours.is_floating_point() or ours.is_complex()):
        same = torch.equal(ours, theirs)
    else:
        same = bool(
            (ours - theirs).norm().nan_to_num(0.0) <= bound * max(float(theirs.norm()), 0.01 * theirs.numel() ** 0.5)
        )
    if not same:
        raise DifferError(f"the buffer {name} differs from that of eager PyTorch")


_LOOP = "executor='loop' runs it node by node"
