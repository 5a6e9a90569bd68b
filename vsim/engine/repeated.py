"""A step that is called again from its recording, where nothing can have changed but the numbers."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_flatten
from vsim_kernels.alignment import ALIGNMENT

from vsim.engine.base import Before, Executor, cloned
from vsim.engine.guards import Calls, Guards, Unwatchable
from vsim.engine.recording import Recorder

# What Python, functorch and autograd take for an operation, about. That has to repay what recording costs, some two
# steps.
_SECONDS_A_CALL = 1e-5
_STEPS_UNLESS_KNOWN = 1000
_MOST_ATTEMPTS = 3  # to record a step that cannot be recorded yet, or whose recording is no longer true
_MOST_KINDS = 16  # of steps that are recorded, for batches of varying shapes


@dataclass
class _Kind:
    """How far it has come with the steps on batches of the same shapes: each of these is found in a step of its own."""

    guards: Guards | None = None
    call: Callable[..., Tensor] | None = None
    is_proven: bool = False
    attempts: int = 0

    @property
    def is_given_up(self) -> bool:
        return self.attempts >= _MOST_ATTEMPTS

    def give_up(self, forever: bool) -> None:
        self.guards, self.call, self.is_proven = None, None, False
        self.attempts = _MOST_ATTEMPTS if forever else self.attempts + 1


class Repeated:
    """Computes a step, and from the fifth one with a batch of the same shapes on only calls its operations again.

    In the second such step it is seen which functions the model calls and what they can read (`Guards`), the third is
    recorded (`Recorder`), and the fourth computed both ways: losses, gradients, buffers and random streams have to be
    the same to the bit. From then on the guards are asked at every step whether anything has changed that the model's
    Python reads. A step that does more than compute (it prints, counts, draws from generators of its own) is computed
    anew every time, and so is one under a debugger, a profiler or a mode that wants to see its operations.

    Args:
        executor: whose step it is.
        compute: the step: (batch, share, first) → losses. Gradients and buffers are all that it may write to.

    Attributes:
        reason: whether steps are repeated, and why not.
        is_ready: the last step was computed as the next ones are going to be.
    """

    def __init__(self, executor: Executor, compute: Callable[[Any, float, bool], Tensor]) -> None:
        self.executor = executor
        self.compute = compute
        self.reason = ""
        self.is_ready = True
        self._kinds: dict[Any, _Kind] = {}

    def forget(self) -> None:
        """Forget what was recorded: the executor computes with other tensors from now on."""
        self._kinds.clear()

    def __call__(self, batch: Any, share: float, first: bool) -> Tensor:
        """Return share · losses (K,) of a stacked batch, and leave gradients and buffers, as `compute` does."""
        self.is_ready = True
        if self.executor.replicas.weights.device.type != "cpu" or _somebody_watches():
            return self.compute(batch, share, first)
        key = _key(batch, share, first)
        if key is None or (key not in self._kinds and len(self._kinds) == _MOST_KINDS):
            return self.compute(batch, share, first)
        is_new = key not in self._kinds
        kind = self._kinds.setdefault(key, _Kind())
        self.is_ready = kind.is_given_up
        if is_new or kind.is_given_up:
            return self.compute(batch, share, first)
        if kind.guards is None:
            return self._watch(kind, batch, share, first)
        if not kind.guards.hold():
            self._give_up(kind, "something that the model reads has changed")
            return self.compute(batch, share, first)
        if kind.call is None:
            return self._record(kind, batch, share, first)
        if not kind.is_proven:
            return self._prove(kind, batch, share, first)
        self.is_ready = True
        try:
            return kind.call(*tree_flatten(batch)[0])
        except Exception:
            self.compute(batch, share, first)  # raises it again, in a way that says where in the model
            raise

    def _give_up(self, kind: _Kind, why: str, forever: bool = False) -> None:
        kind.give_up(forever)
        self.reason = f"steps are not repeated from a recording: {why}"

    def _watch(self, kind: _Kind, batch: Any, share: float, first: bool) -> Tensor:
        with Calls() as calls:
            losses = self.compute(batch, share, first)
        try:
            kind.guards = Guards(calls, self.executor.objective.model, self.executor.objective.loss_fn)
        except Exception as error:  # an object may do anything when it is looked at
            self._give_up(kind, str(error) if isinstance(error, Unwatchable) else f"looking at the model: {error!r}")
        return losses

    def _record(self, kind: _Kind, batch: Any, share: float, first: bool) -> Tensor:
        r = self.executor.replicas
        written = [r.grads, *r.buffers.values()]
        recorder = Recorder(tree_flatten(batch)[0], written, self._staying(kind), self.executor.generators)
        started = time.perf_counter()
        with recorder:
            losses = self.compute(batch, share, first)
        seconds = time.perf_counter() - started
        saved = len(recorder.calls) * _SECONDS_A_CALL * (self.executor.settings.num_steps or _STEPS_UNLESS_KNOWN)
        kind.call = recorder.step(losses)
        if kind.call is None:
            self._give_up(kind, recorder.reason)
        elif recorder.makes_constants and self._has_own_tensors(kind):
            self._give_up(kind, "it makes tensors of numbers, and has tensors that are no parameters or buffers")
        elif saved < seconds:
            self._give_up(kind, "that would save less than it costs to try", forever=True)
        self._look_at(kind)
        return losses

    def _prove(self, kind: _Kind, batch: Any, share: float, first: bool) -> Tensor:
        """Compute a step in both ways. What counts is the step itself."""
        assert kind.call is not None
        before = Before(self.executor, weights=False)
        grads = self.executor.replicas.grads
        sums = None if first else grads.clone()
        try:
            repeated = self._bits(kind.call(*tree_flatten(cloned(batch))[0]))
        except Exception:  # which the step itself is going to raise, in a way that says where in the model
            repeated = []
        before.restore()
        if sums is not None:
            grads.copy_(sums)
        with Calls() as calls:
            losses = self.compute(batch, share, first)
        if repeated != self._bits(losses):
            self._give_up(kind, "it would not have the same bits", forever=True)
        elif kind.guards is not None and not kind.guards.cover(calls):
            self._give_up(kind, "the model calls other functions than before")
        self._look_at(kind)
        if kind.call is not None:
            kind.is_proven = True
            self.reason = "steps are repeated from a recording of their operations"
        return losses

    def _staying(self, kind: _Kind) -> list[Tensor]:
        """Return the tensors that are known to stay where they are, to be read anew at every step."""
        r, objective = self.executor.replicas, self.executor.objective
        own = [tensor for tensor, _ in kind.guards.tensors] if kind.guards is not None else []
        copies = [copy for copy, _ in self.executor._moved]
        return [r.weights, r.grads, *r.buffers.values(), *objective.parameters(), *objective.buffers(), *copies, *own]

    def _has_own_tensors(self, kind: _Kind) -> bool:
        objective = self.executor.objective
        registered = {id(t) for t in (*objective.parameters(), *objective.buffers())}
        return kind.guards is not None and any(id(tensor) not in registered for tensor, _ in kind.guards.tensors)

    def _look_at(self, kind: _Kind) -> None:
        """Give up if the model has changed what it reads."""
        if kind.guards is not None and not kind.guards.hold():
            self._give_up(kind, "the model changes something that it reads")

    def _bits(self, losses: Tensor) -> list[int]:
        """Return checksums of everything that a step leaves."""
        r = self.executor.replicas
        tensors = [losses, *r.grads, *r.buffers.values(), *(g.get_state() for g in self.executor.generators)]
        in_order = (t.detach().contiguous().as_strided((t.numel(),), (1,)) for t in tensors)
        return [zlib.crc32(t.view(torch.uint8).numpy()) for t in in_order]


def _key(batch: Any, share: float, first: bool) -> Any:
    """Return what has to be equal for a step to be the same; None for a batch of more than tensors."""
    leaves, structure = tree_flatten(batch)
    shapes = []
    for leaf in leaves:
        if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_nested:
            return None
        shapes.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.data_ptr() % ALIGNMENT))
    if len({id(leaf) for leaf in leaves}) < len(leaves):
        return None
    switches = (
        *(torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    )
    return tuple(shapes), structure, share, first, switches


def _somebody_watches() -> bool:
    """Whether somebody wants to see what a step does: how, and not only what comes out."""
    return bool(
        sys.gettrace() is not None
        or sys.getprofile() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.is_anomaly_enabled()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or _has_any_global_hook()
    )
