"""Choose how to compute the nodes: vectorized or compiled if this is proved right for the model, else by the loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from vsim.cluster.replicas import Views
from vsim.engine import batched
from vsim.engine.batched import VmapError
from vsim.engine.compiled import CompiledExecutor, CompileError
from vsim.engine.executor import Executor, minibatches
from vsim.engine.looped import LoopExecutor
from vsim.engine.objective import Objective
from vsim.engine.proof import OwnStateError, Proof
from vsim.engine.vmap import VmapExecutor, shapes_of

_STEPS_TO_REPLAY = 8  # steps until CUDA graphs, captured in the second and third step, are certainly replayed


@dataclass
class Decision:
    """The choice of an executor for a model: its class `kind`, the reason `why`, and the worst proof, `proved`.

    `kept` holds the attributes in which `forward` keeps tensors, see `vsim.engine.kept`. Three dicts have the shapes of
    a batch as key: `proofs` holds the proof, `left` the error of a failed proof, and `again` the step at which the
    proof is repeated on replayed CUDA graphs.
    """

    kind: Callable[..., Executor] | None = None
    why: str = ""
    proved: str = ""
    proofs: dict[Any, Proof] = field(default_factory=dict)
    left: dict[Any, VmapError] = field(default_factory=dict)
    again: dict[Any, int] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    followers: WeakSet[AutoExecutor] = field(default_factory=WeakSet)


class AutoExecutor(Executor):
    """Computes by `VmapExecutor`, or by `CompiledExecutor` with compile=True; uses the loop in four cases:

    1. deterministic=True on the CPU;
    2. nodes would be computed one at a time anyway, as with chunk_size=1;
    3. most convolutions, and most of a step's work, are so large that they are computed node by node anyway;
    4. a proof fails, with a warning. For a later shape of batch, the loop then computes only batches of that shape,
       unless nodes need Python state of their own.

    A model that cannot be compiled is vmapped, with a warning. The choice depends only on the model, shapes and
    settings, so that a resumed run chooses the same executor.

    Args:
        asked: the argument `executor` of `fit`; with "vmap", a failed proof is an error.
        decided: id of a model → decision, shared by all executors from one `executor_of`.

    Attributes:
        chosen: the executor that computes. A decision replaces it in all executors that share the decision.
    """

    def __init__(
        self, *args: Any, asked: str = "auto", decided: dict[int, Decision] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.asked, known = asked, {} if decided is None else decided
        self.decision = known.setdefault(id((*self.objective.originals, self.objective.model)[0]), Decision())
        if self.decision.kind is None:
            self._decide()
        self.chosen = self._made()
        self.decision.followers.add(self)

    def _decide(self) -> None:
        fast: type[Executor] = CompiledExecutor if self.settings.compile else VmapExecutor
        one_at_a_time = VmapExecutor.nodes_at_once(self.replicas, self.settings) == 1
        on_cpu = batched.is_cache_bound(self.replicas.weights.device)
        if self.settings.deterministic and on_cpu:
            self.decision.kind, self.decision.why = LoopExecutor, "deterministic=True"
        elif self.asked == "auto" and fast is VmapExecutor and one_at_a_time:
            self.decision.kind, self.decision.why = LoopExecutor, "nodes would be computed one at a time anyway"
        else:
            self.decision.kind = fast

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.chosen.name

    @property
    def draws_jointly(self) -> bool:
        return self.chosen.draws_jointly

    @property
    def preparing(self) -> str:  # type: ignore[override]
        return self.chosen.preparing

    @property
    def reason(self) -> str:  # type: ignore[override]
        proved = "" if isinstance(self.chosen, LoopExecutor) else self.decision.proved
        return "; ".join(filter(None, (self.decision.why, proved, self.chosen.reason)))

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        for piece, share in minibatches(batch, minibatch_size):
            self.prepare(piece, share)
        try:
            return self.chosen.losses_and_grads(batch, minibatch_size)
        except CompileError as error:  # the model has been recompiled too often
            self._choose_simpler(error)
            self._warn(error)
            self.rewind()
            return self.losses_and_grads(batch, minibatch_size)

    def prepare(self, batch: Any, share: float = 1.0) -> None:
        """Prove the executor for stacked batches shaped like `batch`, or choose a simpler executor."""
        if isinstance(self.chosen, LoopExecutor) or self.replicas.weights.is_meta:
            return
        shapes, proofs, step = shapes_of(batch), self.decision.proofs, self.settings.position.step
        key = shapes, share == 1.0
        if shapes in self.decision.left or (key in proofs and step < self.decision.again.get(key, math.inf)):
            return
        failed, proof = None, None
        while isinstance(fast := self.chosen, VmapExecutor) and proof is None:
            try:
                proof = fast.prove(batch, share)
                fast.has_worked = True
            except (VmapError, CompileError) as error:
                if proofs and isinstance(error, VmapError) and not isinstance(error, OwnStateError):
                    self.decision.left[shapes] = error
                    return
                failed = error
                self._choose_simpler(error)
        if failed is not None:
            self._warn(failed)
        if proof is None:
            return
        may_choose = not (proofs or self.settings.compile)
        if may_choose and self.asked == "auto" and proof.differing:
            warnings.warn(
                "forward reads a number that differs between nodes, so that vmap tries every step, and the loop "
                f"computes it again: {proof.differing.split(' — ')[0]}. Keep the number as a tensor, and nodes are "
                "computed together; or give executor='loop', which spares the attempts",
                UserWarning,
                stacklevel=5,
            )
        if may_choose and self.asked == "auto" and _convolves_alone(proof):
            self._choose(LoopExecutor, "convolutions of this size are computed node by node anyway")
        if fast.captures and key not in proofs:
            self.decision.again[key] = step + _STEPS_TO_REPLAY
        else:
            self.decision.again.pop(key, None)
        proofs[key] = proof
        self.decision.kept.update(proof.kept)
        self.decision.proved = str(max(proofs.values(), key=lambda proof: proof[1:3]))

    def _choose_simpler(self, error: Exception) -> None:
        """Replace an executor that cannot run this model by the next simpler one."""
        if self.asked != "auto":
            raise error
        several = VmapExecutor.nodes_at_once(self.replicas, self.settings) > 1
        self._choose(VmapExecutor if isinstance(error, CompileError) and several else LoopExecutor, str(error))

    def _warn(self, error: Exception) -> None:
        warnings.warn(f"executor='auto' continues with {self.chosen.name!r}: {error}", UserWarning, stacklevel=5)

    def _choose(self, kind: type[Executor], why: str) -> None:
        self.decision.kind, self.decision.why = kind, why
        for one in self.decision.followers:
            one.chosen = one._made()

    def _made(self) -> Executor:
        assert self.decision.kind is not None
        settings = replace(self.settings, compile=self.decision.kind is CompiledExecutor)
        made = self.decision.kind(self.replicas, self.objective, self.generators, settings)
        if isinstance(made, VmapExecutor):
            made.left, made.has_worked = self.decision.left, bool(self.decision.proofs)
            made.kept = self.decision.kept
        return made

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        return self.chosen._backward(batch, share, first)

    def _evaluate(
        self, objective: Objective, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        return self.chosen._evaluate(objective, weights, buffers, batch, stream)


def _convolves_alone(proof: Proof) -> bool:
    """Return whether vmap computes most convolutions, and most of a step, node by node; the loop is then faster.

    A vision transformer cuts its images into patches by one such convolution, and has most work elsewhere.
    """

    def convolved(counted: Mapping[tuple[str, str], int], way: str) -> int:
        return sum(count for (name, how), count in counted.items() if name.startswith("conv") and how == way)

    most = convolved(proof.calls, "node by node") > convolved(proof.calls, "batched")
    return most and 2 * convolved(proof.work, "node by node") > sum(proof.work.values())
