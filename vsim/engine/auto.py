"""Whichever is fastest for this model, found on the run's own first steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vsim.cluster.replicas import Views
from vsim.engine.base import Before, Executor, cloned, minibatches
from vsim.engine.compiled import CompiledExecutor, CompileError
from vsim.engine.loop import LoopExecutor
from vsim.engine.nodes import InexactError
from vsim.engine.products import batches_agree
from vsim.engine.trace import TraceError, TraceExecutor
from vsim.engine.vmap import VmapError, VmapExecutor
from vsim.private_torch import unwatched

# The budget for trying other executors than the best: in seconds, and as a share of the run.
BUDGET_SECONDS, BUDGET_SHARE = 1.0, 0.03
# Timed of each at least, after the first step and those in which it prepares. Small steps vary: hence the seconds.
_TIMED_STEPS, _TIMED_SECONDS = 3, 0.02
# Seconds that compiling is expected to take until one has been measured in this process, and the share of the remaining
# run that it may take. If the compiled steps turn out to be no faster, that is what is lost.
_FIRST_GUESS_OF_COMPILING, _COMPILING_SHARE = 60.0, 0.1
_FEWEST_STEPS_TO_TRACE = 1000  # with compile="auto": what a step saves repays its capture after 400 to 1000

_remembered: dict[Any, tuple[str, str]] = {}  # what was computed → (the choice, why)
_seconds_of_compiling: list[float] = []


@dataclass
class _Candidate:
    """An executor on trial: how to make it, and the seconds of its steps; those in which it prepares are not timed."""

    label: str
    make: Callable[[], Executor]
    executor: Executor | None = None
    seconds: list[float] = field(default_factory=list)
    first: float | None = None  # seconds of its very first step

    @property
    def best(self) -> float:
        """Its fastest step; infinite before there is one."""
        return min(self.seconds, default=float("inf"))


class AutoExecutor(Executor):
    """Tries vmap, with all nodes at once and with fewer, and the loop on the first steps; continues with the fastest.

    Runs with the same seed are bitwise equal, however the trial ends: there is a trial only where all candidates are
    bitwise equal (see `vsim.engine.lowering`; with deterministic=True for every model). For other models the choice is
    by rule: vmap, whose fast forms of convolutions, reductions and the like differ from the loop in the last bits, or
    the loop where the convolutions are so large that they have no faster form, or where vmap would take one node at a
    time.

    Every step of a trial counts as training. A trial that is expected to cost more than BUDGET_SECONDS, or more than
    BUDGET_SHARE of the run, is not begun, and one that does is broken off. The choice is remembered in this process for
    the same model, shapes and settings. A run whose model cannot be vmapped continues with the loop, with a warning
    that says why. With compile="trace" or "auto" a trace, bitwise equal to vmap, is the first candidate; "auto" then
    compiles, if the remaining steps are expected to repay it and deterministic is False, and keeps the faster of both,
    on which the last bits may depend. compile=True has no other candidate.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.settings
        self.at_once = at_once = VmapExecutor.nodes_at_once(self.replicas, settings)
        self.candidates = [_Candidate("vmap", self._maker(VmapExecutor))]
        long_enough = settings.num_steps is None or settings.num_steps >= _FEWEST_STEPS_TO_TRACE
        if settings.compile == "trace" or (settings.compile == "auto" and long_enough):
            self.candidates.insert(0, _Candidate("trace", self._maker(TraceExecutor)))
        if settings.compile is True:
            self.candidates = [_Candidate("compiled", self._maker(CompiledExecutor))]
        else:
            if settings.chunk_size is None and at_once >= 4 and not self.replicas.shares_grads:
                fewer = -(-at_once // 4)
                make_fewer = self._maker(VmapExecutor, chunk_size=fewer)
                self.candidates.append(_Candidate(f"vmap, {fewer} nodes at a time", make_fewer))
            self.candidates.append(_Candidate("loop", self._maker(LoopExecutor)))
        self.on_trial = 0
        self.spent = 0.0
        self.is_first = False  # the first step of this process is being computed
        self.by_rule = ""
        self.why = ""
        self.key: Any = None
        self.proven: set[Any] = set()  # what has been managed once: by an executor, a kind of work, of these shapes
        self.chosen = self._executor(self.candidates[0])
        self.settled = len(self.candidates) == 1

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.chosen.name

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        return self.settled and self.chosen.is_ready

    @property
    def preparing(self) -> str:  # type: ignore[override]
        return self.chosen.preparing

    @property
    def reason(self) -> str:  # type: ignore[override]
        return "; ".join(filter(None, (self.why, self.chosen.reason)))

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        self.step += 1
        self.is_first = self.key is None
        if self.is_first:
            self._recall(batch, minibatch_size)
            if not self.settled:
                self._take_the_loop_by_rule(batch, minibatch_size)
        if self.settled:
            return self._attempt("losses_and_grads", batch, minibatch_size)
        candidate = self.candidates[self.on_trial]
        self.chosen = self._executor(candidate)
        self._synchronize()
        started = time.perf_counter()
        losses = self._attempt("losses_and_grads", batch, minibatch_size)
        self._synchronize()
        seconds = time.perf_counter() - started
        if candidate.first is None:
            candidate.first = seconds
        elif self.chosen.is_ready:
            candidate.seconds.append(seconds)
        if self.is_first and isinstance(self.chosen, VmapExecutor) and not self.settled:
            self._leave_out_what_differs(self.chosen)
        if not self.settled:
            self._go_on(seconds)
        return losses

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        return self._attempt("_backward", batch, share, first)

    def _evaluate(
        self, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        return self._attempt("_evaluate", weights, buffers, batch, stream)

    def _maker(self, kind: type[Executor], **changes: Any) -> Callable[[], Executor]:
        settings = replace(self.settings, **changes)
        return lambda: kind(self.replicas, self.objective, self.generators, settings)

    def _executor(self, candidate: _Candidate) -> Executor:
        if candidate.executor is None:
            candidate.executor = candidate.make()
        return candidate.executor

    def _go_on(self, seconds: float) -> None:
        """Choose the executor of the next step, after a step of so many seconds by the candidate on trial."""
        candidate, best = self.candidates[self.on_trial], min(c.best for c in self.candidates)
        if best == float("inf"):
            return
        self.spent += max(0.0, seconds - best) if candidate is not self.candidates[0] else 0.0
        # What compiling may cost was decided before it began.
        over = candidate.label != "compiled" and self.spent > self._budget(best)
        timed = sum(candidate.seconds) >= _TIMED_SECONDS
        known = timed and (len(candidate.seconds) >= _TIMED_STEPS or candidate.best > 1.2 * best)
        if not (known or over):
            return
        self.on_trial += 1
        if over or self.on_trial == len(self.candidates) or best > self._budget(best):
            self._settle()

    def _take_the_loop_by_rule(self, batch: Any, minibatch_size: int | None) -> None:
        if self.settings.compile in (True, "trace"):
            return
        if self.at_once == 1:
            why = "by rule: nodes would be computed one at a time anyway"
        elif self._convolves_alone(batch, minibatch_size):
            why = "by rule: convolutions of this size are computed node by node anyway"
        else:
            return
        if self.settings.compile == "auto":  # which compiles next, if that pays
            self.candidates, self.by_rule = self.candidates[-1:], f"; {why}"
        else:
            self._settle_on(self.candidates[-1], why)

    def _convolves_alone(self, batch: Any, minibatch_size: int | None) -> bool:
        """Whether vmap would compute most convolutions node by node, where it costs more than the loop.

        That is a property of the model and its shapes, found by a forward pass: the answer is always the same, so that
        a resumed run takes the same executor.
        """
        vmap = self.chosen
        has_kernels = any(len(c.shape) > 2 for c in self.replicas.layout)
        if not (has_kernels and isinstance(vmap, VmapExecutor)) or isinstance(vmap, CompiledExecutor):
            return False
        if self.settings.exact or self.replicas.shares_grads:
            return False
        before = Before(self)
        try:
            forms = vmap.forms(next(minibatches(batch, minibatch_size))[0])
        except VmapError:  # which the first step will raise, too
            return False
        finally:
            before.restore()
        alone, together = (
            sum(count for (name, how), count in forms.items() if name.startswith("conv") and how == way)
            for way in ("node by node", "batched")
        )
        return alone > together

    def _leave_out_what_differs(self, vmap: VmapExecutor) -> None:
        """Drop the candidates that are not bitwise equal to the others."""
        if not self.settings.exact and not batches_agree():
            self.candidates = [c for c in self.candidates if c.label in ("trace", "vmap")]
            self.by_rule = "; others not tried: with these threads products may have other last bits in batches"
            return
        why = ""
        if self.replicas.shares_grads:
            why = "one product for all nodes' mean gradient"
        elif vmap.differing and not self.settings.exact:
            why = f"{', '.join(sorted(vmap.differing))} have fast forms with other last bits"
        if why:
            self.candidates = [c for c in self.candidates if c.label != "loop"]
            self.by_rule = f"; loop not tried: {why}"

    def _budget(self, best: float) -> float:
        steps = self.settings.num_steps
        return BUDGET_SECONDS if steps is None else min(BUDGET_SECONDS, BUDGET_SHARE * steps * best)

    def _settle(self) -> None:
        tried = [c for c in self.candidates if c.seconds]
        best = min(tried, key=lambda c: c.best)
        self.chosen = self._executor(best)
        times = "; ".join(f"{c.label} {1e3 * c.best:.3g} ms" for c in sorted(tried, key=lambda c: c.best))
        untried = [c.label for c in self.candidates if c.first is None]
        not_tried = f"; not tried, as it might cost too much: {', '.join(untried)}" if untried else ""
        self.why = f"measured a step: {times}{not_tried}{self.by_rule}"
        if self.settings.compile == "auto" and best.label != "compiled" and self._compiling_pays(best.best):
            self.on_trial = len(self.candidates)
            self.candidates.append(_Candidate("compiled", self._maker(CompiledExecutor)))
            return
        compiled = self.candidates[-1]
        if compiled.label == "compiled" and compiled.first is not None:
            _seconds_of_compiling.append(compiled.first)
        self._settle_on(best, self.why)

    def _settle_on(self, best: _Candidate, why: str) -> None:
        for candidate in self.candidates:
            if candidate is not best:
                candidate.executor = None
        self.proven.clear()  # an executor that is made from now on may have the id of one that is gone
        self.chosen, self.settled, self.why = self._executor(best), True, why
        _remembered[self.key] = best.label, why

    def _compiling_pays(self, seconds_a_step: float) -> bool:
        known = self.settings.exact or any(c.label == "compiled" for c in self.candidates)
        if self.settings.num_steps is None or known:
            return False
        expected = max(_seconds_of_compiling, default=_FIRST_GUESS_OF_COMPILING)
        remaining = (self.settings.num_steps - self.step) * seconds_a_step
        if expected <= _COMPILING_SHARE * remaining:
            return True
        self.why += f"; not compiled: about {expected:.0f} s, when {remaining:.0f} s of the run remain"
        return False

    def _recall(self, batch: Any, minibatch_size: int | None) -> None:
        """Take the choice that was made before for the same work."""
        r = self.replicas
        self.key = (
            type(self.objective.model),
            tuple((c.name, c.shape) for c in r.layout),
            (r.num_held, r.shares_weights, r.shares_grads, r.weights.dtype, r.weights.device),
            tuple((t.shape, t.dtype) for t in tree_leaves(batch) if isinstance(t, Tensor)),
            (minibatch_size, torch.get_num_threads(), replace(self.settings, num_steps=None)),
        )
        label, reason = _remembered.get(self.key, (None, ""))
        for candidate in self.candidates:
            if candidate.label == label:
                self.chosen, self.settled = self._executor(candidate), True
                self.why = f"as before; {reason.removeprefix('as before; ')}"

    def _synchronize(self) -> None:
        if self.replicas.weights.device.type == "cuda":
            torch.cuda.synchronize(self.replicas.weights.device)

    def _attempt(self, work: str, *arguments: Any) -> Any:
        if work == "losses_and_grads":
            self.chosen.step = self.step - 1
        known = (id(self.chosen), work, tuple(t.shape for t in tree_leaves(arguments) if isinstance(t, Tensor)))
        if known in self.proven:
            try:
                return getattr(self.chosen, work)(*arguments)
            except CompileError as error:  # before anything was computed: the model changes too often
                self._give_up(error)
                return self._attempt(work, *arguments)
        with unwatched():  # a mode that counts the operations of a step must not see this
            # Of the weights in the very first step only: later there is the optimizer's state beside them.
            first = self.is_first and work == "losses_and_grads"
            before = Before(self, [a for a in arguments if isinstance(a, torch.Generator)], weights=first)
        try:
            # The batch may be needed again, and the model may change it in place.
            given = cloned(arguments) if work == "losses_and_grads" else arguments
            outcome = getattr(self.chosen, work)(*given)
        except (VmapError, InexactError, CompileError) as error:
            before.restore()
            self._give_up(error)
            outcome = self._attempt(work, *arguments)
        self.proven.add(known)
        return outcome

    def _give_up(self, error: Exception) -> None:
        """Continue with the next simpler executor, after one that cannot run this model."""
        if self.settings.compile == "trace":
            raise TraceError(f"the model cannot be traced: {error}") from error
        compiles = isinstance(error, CompileError)
        make = self._maker(VmapExecutor, compile=False) if compiles else self._maker(LoopExecutor)
        self.chosen = make()
        self.settled = True
        self.why = str(error)
        if not isinstance(error, InexactError):  # that the loop is taken changes no bit of an exact run
            warnings.warn(f"executor='auto' continues with {self.chosen.name!r}: {error}", UserWarning, stacklevel=2)
