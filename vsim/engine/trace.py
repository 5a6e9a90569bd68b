"""One step's operations, captured in place of the Python, functorch and autograd that led to them."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten
from vsim_kernels.alignment import ALIGNMENT

from vsim.engine.base import Before, Executor
from vsim.engine.stacked import VmapError
from vsim.engine.vmap import Piece, VmapExecutor
from vsim.private_torch import is_watched

CHECKED_EVERY = 100  # steps
_MOST_SHAPES = 16  # of batches that are captured; further ones run the model's Python
_TOLERANCE = 1e-3  # of the largest entry, on devices whose kernels may add up in another order every time


class TraceError(RuntimeError):
    """The operations of the model's step cannot be captured."""


class StaleTraceError(RuntimeError):
    """The model's Python no longer computes the operations that were captured."""


@dataclass
class _Trace:
    """The operations of a step.

    Attributes:
        call: calls them again.
        captured_at, compared_at: the steps of the capture and of the last comparison.
        called_from: the first step since then that they computed; 0: none.
    """

    call: Callable[..., Tensor]
    captured_at: int
    compared_at: int = 0
    called_from: int = 0


class TraceExecutor(VmapExecutor):
    """`VmapExecutor` whose model's Python runs once for every shape of batch, as under jax.jit or in CUDA graphs.

    The operations of that step (captured by torch's make_fx) are called from then on, with the same arguments, bitwise
    equal to `VmapExecutor`. Values that the model's Python read (numbers, attributes, branches) and tensors that it
    created from numbers stay as they were; all other tensors are read at every step.

    The next step, every hundredth from there on and the last are computed both ways, and must be bitwise equal in
    losses, gradients, weights, buffers and random streams; on devices other than a CPU, equal up to rounding.

    Raises, from `losses_and_grads`:
        TraceError: the step cannot be captured, or the first comparison fails. With compile="auto" the run continues
            without a trace instead, and `reason` has the message.
        StaleTraceError: a later comparison fails; the steps that the trace computed since the last one are named.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._traces: dict[Hashable, _Trace] = {}
        self._seconds = 0.0
        self._refusal = ""
        self._captures = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return "vmap" if self._refusal else "trace"

    @property
    def reason(self) -> str:  # type: ignore[override]
        traced = f"traced in {self._seconds:.1f} s" if self._traces else ""
        return "; ".join(filter(None, (self._refusal or traced, super().reason)))

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        self.is_ready = True
        return super().losses_and_grads(batch, minibatch_size)

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        leaves, structure = tree_flatten(batch)
        key = (structure, share, first, *_lie(leaves))
        trace = self._traces.get(key)
        if self._refusal or is_watched() or (trace is None and len(self._traces) == _MOST_SHAPES):
            return super()._backward(batch, share, first)
        if trace is None:
            return self._capture(key, batch, share, first)
        if not trace.compared_at and trace.captured_at == self.step:
            return super()._backward(batch, share, first)  # the first comparison wants other weights, too
        if self._is_due(trace):
            return self._compare(trace, batch, share, first)
        trace.called_from = trace.called_from or self.step
        try:
            with self._moved_up_to_date():
                return trace.call(*leaves)
        except Exception:
            super()._backward(batch, share, first)  # raises the error again, with its place in the model
            raise

    def _by_loop(self, piece: Piece, batch: Any, share: float, first: bool, error: VmapError) -> Tensor:
        if self._captures:  # which way each node goes belongs to this step alone
            raise error
        return super()._by_loop(piece, batch, share, first, error)

    def _is_due(self, trace: _Trace) -> bool:
        if not trace.compared_at:
            return True
        is_last = self.step == self.settings.num_steps
        return trace.compared_at < self.step and (is_last or self.step - trace.compared_at >= CHECKED_EVERY)

    def _capture(self, key: Hashable, batch: Any, share: float, first: bool) -> Tensor:
        """Compute a step, and keep its operations."""
        self.is_ready = False
        leaves, structure = tree_flatten(batch)
        before = _BeforePiece(self, leaves, first)
        losses = []

        def step(*leaves: Tensor) -> Tensor:
            losses.append(self._computed(tree_unflatten(leaves, structure), share, first))
            return losses[0]

        self._captures = True
        started = time.perf_counter()
        try:
            with self._moved_up_to_date():
                call = _operations(step, leaves)
        except Exception as error:
            self._captures = False
            before.restore()
            computed = super()._backward(batch, share, first)  # raises the error if it is the model's own
            why = str(error).strip().split("\n")[0]
            newer = ", as make_fx takes generators from torch 2.13 on" if ".Generator'" in why else ""
            self._refuse(why + newer, error)
            return computed
        self._captures = False
        self._seconds += time.perf_counter() - started
        self._traces[key] = _Trace(call, self.step)
        return losses[0]

    def _compare(self, trace: _Trace, batch: Any, share: float, first: bool) -> Tensor:
        """Compute a step both ways, and keep the result of the model's own Python."""
        self.is_ready = False
        leaves, _ = tree_flatten(batch)
        before = _BeforePiece(self, leaves, first)
        try:
            with self._moved_up_to_date():
                called = trace.call(*leaves)
        except Exception as error:
            before.restore()
            losses = super()._backward(batch, share, first)  # raises the error if it is the model's own
            if trace.compared_at:
                raise
            self._refuse(f"its operations cannot be called again: {str(error).strip().partition(chr(10))[0]}", error)
            return losses
        traced = self._left(called, clone=True)
        before.restore()
        losses = super()._backward(batch, share, first)
        ours = self._left(losses)
        odd = next((name for name, value in traced.items() if not _agree(value, ours[name])), None)
        if odd is None:
            trace.compared_at, trace.called_from = self.step, 0
            return losses
        in_question = [t.called_from for t in self._traces.values() if t.called_from]
        if in_question:
            raise StaleTraceError(
                "the model's Python no longer computes the operations that were captured at step "
                f"{trace.captured_at}: {odd} differs at step {self.step}. Under compile='trace' its Python runs once "
                f"for every shape of batch, so that the steps from {min(in_question)} on may be wrong; with "
                "compile=False it runs at every step"
            )
        self._refuse(
            f"{odd} differs between step {trace.captured_at}, called again, and its Python at step {self.step}"
        )
        return losses

    def _refuse(self, why: str, error: Exception | None = None) -> None:
        self._traces.clear()
        self._refusal = f"the model cannot be traced: {why}"
        if self.settings.compile != "auto":
            raise TraceError(f"{self._refusal}; with compile=False its Python runs at every step") from error

    def _left(self, losses: Tensor, clone: bool = False) -> dict[str, Tensor]:
        """Return the tensors that a step leaves, by name."""
        r = self.replicas
        kept = Tensor.clone if clone else Tensor.detach
        return {
            "the loss": losses,
            **{f"the gradient of {name}": g for name, g in r.views(kept(r.grads)).items()},
            **{f"buffer {name}": kept(b) for name, b in r.buffers.items()},
            **{f"weight {name}": w for name, w in r.views(kept(r.weights)).items()},
            **{f"the random stream of row {row}": g.get_state() for row, g in enumerate(self.generators)},
        }


class _BeforePiece(Before):
    """`Before` for a piece of a batch: with the gradients that are added to, and the examples, which may change."""

    def __init__(self, executor: Executor, leaves: list[Tensor], first: bool) -> None:
        super().__init__(executor)
        sums = [] if first else [executor.replicas.grads]
        self.others = [(t, t.clone()) for t in (*sums, *leaves)]

    def restore(self) -> None:
        super().restore()
        for tensor, value in self.others:
            if not _same_bits(tensor, value):
                tensor.copy_(value)


def _operations(step: Callable[..., Tensor], leaves: list[Tensor]) -> Callable[..., Tensor]:
    """Call `step`, and return the function that calls its operations again."""
    module = make_fx(step)(*leaves)
    _shorten(module)
    # As at the capture: some operations, an LSTM's, leave out under no_grad what their backward pass takes.
    return torch.enable_grad()(module.forward)


@torch.no_grad()
def _shorten(module: GraphModule) -> None:
    """Drop operations that a repeated step does not need: views of lasting tensors, such as weights, are made once.

    None of these tensors requires a gradient: the backward pass is among the operations.
    """
    graph, names = module.graph, itertools.count()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        delattr(module, name)
        module.register_buffer(name, tensor.detach())
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        elif getattr(node.target, "is_view", False) and node.args[0].op == "get_attr":
            view = node.target(getattr(module, node.args[0].target), *node.args[1:], **node.kwargs)
            if isinstance(view, Tensor):
                module.register_buffer(name := f"view_{next(names)}", view)
                with graph.inserting_before(node):
                    node.replace_all_uses_with(graph.get_attr(name))
    # Unused allocations and views go; asserts, which nothing uses, stay.
    graph.eliminate_dead_code(lambda node: node.is_impure() or "_assert" in str(node.target))
    for node in graph.nodes:
        node.target = _in_torch().get(node.target, node.target)
    module.recompile()
    vars(module).update(module.named_buffers())  # found faster than by the attribute access of modules


# Operations that torch has with the same arguments as torch.ops.aten, of those that small models call.
_SAME = """
    abs add addmm baddbmm bmm cat clamp clone div embedding eq exp full_like ge gt le log lt mean mm mul ne neg
    ones_like permute pow relu rsqrt select sigmoid sqrt squeeze stack sub sum tanh transpose unbind unsqueeze where
    zeros_like
"""


@functools.cache
def _in_torch() -> dict[Any, Callable[..., Any]]:
    """Return operation of torch.ops.aten → the function of torch that is the same, and called in half of the time."""
    packets = {getattr(torch.ops.aten, name): getattr(torch, name) for name in _SAME.split()}
    return {getattr(packet, own): function for packet, function in packets.items() for own in packet.overloads()}


def _lie(leaves: list[Tensor]) -> tuple[Hashable, ...]:
    """Return a key for batches on which the same operations work: their layouts, and which tensors are the same."""
    first_with = [next(i for i, other in enumerate(leaves) if other is leaf) for leaf in leaves]
    return tuple((t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNMENT) for t in leaves), tuple(first_with)


def _agree(traced: Tensor, computed: Tensor) -> bool:
    if computed.device.type == "cpu" or not computed.is_floating_point():
        return _same_bits(traced, computed)
    most = _TOLERANCE * computed.nan_to_num().abs().max().item() if computed.numel() else 0.0
    return torch.allclose(traced, computed, rtol=_TOLERANCE, atol=most, equal_nan=True)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are bitwise equal, NaNs included."""
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other)))
