"""`executor="auto"`: compute all nodes together, or one by one if that is as fast, or the only way."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vsim.cluster.replicas import Views
from vsim.engine.compiled import CompiledExecutor, CompileError
from vsim.engine.executor import Before, Executor, cloned, minibatches
from vsim.engine.loop import LoopExecutor
from vsim.engine.objective import Objective, listed
from vsim.engine.rules import InexactError
from vsim.engine.vmap import VmapError, VmapExecutor
from vsim.private_torch import unwatched


class AutoExecutor(Executor):
    """`VmapExecutor`, or `CompiledExecutor` with compile=True. Four cases, known at the first step, take the loop:

    1. the model changes plain attributes in `forward`, so that each node needs a copy of the module;
    2. nodes would be computed one at a time anyway, as with chunk_size=1;
    3. most convolutions are so large that they are computed node by node anyway;
    4. the model cannot be vmapped (a warning says why), or with deterministic=True not exactly (the history's
       `executor_reason` says why).

    A model that cannot be compiled is vmapped, with a warning. The choice depends only on the model, shapes and
    settings, so that a resumed run chooses the same executor.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kind = CompiledExecutor if self.settings.compile else VmapExecutor
        self.chosen: Executor = self._made(kind)
        self._why = ""
        self._has_begun = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.chosen.name

    @property
    def preparing(self) -> str:  # type: ignore[override]
        return self.chosen.preparing

    @property
    def reason(self) -> str:  # type: ignore[override]
        return "; ".join(filter(None, (self._why, self.chosen.reason)))

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        self.step += 1
        if not self._has_begun:
            self.prepare(next(minibatches(batch, minibatch_size))[0])
        self.chosen.step = self.step - 1
        if isinstance(self.chosen, LoopExecutor):
            return self.chosen.losses_and_grads(batch, minibatch_size)
        with unwatched():  # a mode that counts the operations of a step must not see this
            before = None if self._has_begun else Before(self)
        given = (
            batch if self._has_begun else cloned(batch)
        )  # the batch may be needed again, and a model may change its batch in place
        try:
            losses = self.chosen.losses_and_grads(given, minibatch_size)
        except (VmapError, InexactError, CompileError) as error:
            if before is not None:
                before.restore()
            self._continue_simpler(error)
            return self._again(batch, minibatch_size)
        self._has_begun = True
        return losses

    def _again(self, batch: Any, minibatch_size: int | None) -> Tensor:
        self.step -= 1
        return self.losses_and_grads(batch, minibatch_size)

    def prepare(self, batch: Any) -> None:
        """Choose the loop in cases 1 to 3."""
        if isinstance(self.chosen, LoopExecutor):
            return
        if self.objective.changes is None:
            self.objective.changes = self._changes(batch)
        if self.objective.changes:
            why = ""  # the loop's own `reason` says why
            if self.settings.compile:
                warnings.warn(
                    f"compile=True has no effect: the model changes {listed(self.objective.changes)} in forward, and "
                    "is computed node by node; make it a buffer (register_buffer)",
                    UserWarning,
                    stacklevel=3,
                )
        elif self.settings.compile:
            return
        elif VmapExecutor.nodes_at_once(self.replicas, self.settings) == 1:
            why = "nodes would be computed one at a time anyway"
        elif self._convolves_alone(batch):
            why = "convolutions of this size are computed node by node anyway"
        else:
            return
        self.chosen, self._why = self._made(LoopExecutor), why

    def _convolves_alone(self, batch: Any) -> bool:
        """Return whether vmap would compute most convolutions node by node, which takes longer than the loop."""
        vmap = self.chosen
        has_kernels = any(len(c.shape) > 2 for c in self.replicas.layout)
        if not (has_kernels and isinstance(vmap, VmapExecutor)) or self.settings.exact or self.replicas.shares_grads:
            return False
        before = Before(self)
        try:
            forms = vmap.forms(batch)
        except VmapError:  # the first step will raise it again
            return False
        finally:
            before.restore()
        alone, together = (
            sum(count for (name, how), count in forms.items() if name.startswith("conv") and how == way)
            for way in ("node by node", "batched")
        )
        return alone > together

    def _continue_simpler(self, error: Exception) -> None:
        """Replace an executor that cannot run this model by the next simpler one."""
        compiled = isinstance(error, CompileError)
        self.chosen = self._made(VmapExecutor if compiled else LoopExecutor)
        self._why = str(error)
        if not isinstance(error, InexactError):  # an exact run is bitwise the same with the loop
            warnings.warn(f"executor='auto' continues with {self.chosen.name!r}: {error}", UserWarning, stacklevel=4)

    def _made(self, kind: type[Executor]) -> Executor:
        settings = self.settings if kind is CompiledExecutor else replace(self.settings, compile=False)
        return kind(self.replicas, self.objective, self.generators, settings)

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        try:
            return self.chosen._backward(batch, share, first)
        except (VmapError, CompileError) as error:  # in a probe of memory
            self._continue_simpler(error)
            return self.chosen._backward(batch, share, first)

    def _evaluate(
        self, objective: Objective, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        return self.chosen._evaluate(objective, weights, buffers, batch, stream)
