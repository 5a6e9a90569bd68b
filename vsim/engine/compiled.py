"""Compute the losses and gradients of all nodes by one compiled graph."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from vsim.cluster.randomness import default_generator, drawing_from
from vsim.cluster.replicas import Views
from vsim.engine.batched import VmapError
from vsim.engine.casting import Casting, Casts
from vsim.engine.executor import cloned, undone
from vsim.engine.memory import activation_bytes
from vsim.engine.proof import DifferError, Proof, Step, compared, prove
from vsim.engine.vmap import Piece, VmapExecutor
from vsim.private_torch import (
    allow_saved_tensors_hooks,
    guarding_hooks,
    is_of_compiler,
    is_watched,
    mark_static_address,
    recompile_limit,
    what_changed,
    without_guards_on_torch,
    without_messages,
    without_performance_warnings,
)
from vsim.trees import mapped, tensors_of

# Upper bound of the activations' bytes in one compiled call. Activations of few nodes stay in the caches, and more
# calls cost little: one call instead of two takes 0.94 (16 GPTs) or 0.95 (4 ResNets) of a step's time.
ACTIVATIONS_AT_ONCE = 40_000_000
_COMPILING = "compiling: some 10 to 60 s the first time, seconds where torch's cache on disk has it"
_MOST_GRAPHS = 256  # torch's own limit for one process
_MOST_CHANGES = 8  # recompilations after which a model is assumed to change at every step
# CUDA's attention kernels whose gradient works under vmap. Under vmap, no tensor has requires_grad, and other kernels
# then save nothing for the backward pass.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


_KEEPS = "it keeps a tensor that it has computed, as in self.part = …, which has no place outside of the graph"
_WIDTHS = {"AVX2": 256, "AVX512": 512}  # bits of vectors by CPU capability

# Finds the failed operation and the reason in a compiler's error, whose first line names neither.
_OF_OPERATION = re.compile(
    r"FX node .*?: call_\w+ (?P<name>[\w.]+)\(.*?: got \w+\((?P<q>['\"])(?P<reason>.*?)(?P=q)\)", re.S
)


class _Operands(NamedTuple):
    """The weights and gradients of a piece, by name, as arguments of a graph.

    Each tensor has its own storage. If a graph wrote to views of one storage, the compiler would merge the views into
    one argument, and would end this argument before the gap after the matrix's last row.
    """

    weights: Views
    grads: Views

    @classmethod
    def of(cls, piece: Piece) -> _Operands:
        weights = {name: torch.from_dlpack(leaf.detach()) for name, leaf in piece.leaves.items()}
        return cls(weights, dict(zip(weights, map(torch.from_dlpack, piece.grads), strict=True)))


class CompileError(RuntimeError):
    """torch.compile cannot compile the model's vmapped loss on this machine."""


class CompiledExecutor(VmapExecutor):
    """`VmapExecutor` whose losses and gradients are one graph of torch.compile, with functorch's rules, not vsim's.

    On a CPU, a call computes as many nodes as keep at most ACTIVATIONS_AT_ONCE bytes, or `settings.chunk_size` nodes.
    On CUDA, PyTorch captures the graph as a CUDA graph, see `captures`. The model's random operations draw different
    numbers for each node from one generator. They are reproducible, but differ from those of other executors.

    Attributes:
        compile_seconds: the duration of the first step; None before it.

    Raises:
        CompileError: in the first step, the model breaks the graph (the message names the operation and its line), the
            graph is wrong, or no compiler is installed; in later steps, the model's Python state changes too often.
    """

    name = "compiled"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compile_seconds: float | None = None
        self.known: set[Any] = set()  # compiled graphs: (number of nodes, whether the batch is whole, shapes)
        self._added: dict[tuple[float, bool], tuple[Tensor, Tensor]] = {}  # cache of `_added_of`
        self._draws = False  # whether the model draws random numbers; the loop draws other numbers
        self.changes = 0  # recompilations because the model's Python state changed
        self._cuts_by_batch = self.settings.chunk_size is None
        for module in self.objective.model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.register_forward_hook(_without_gradient_of_padding)

        def of_node(own: Views, buffers: Views, batch: Any) -> Tensor:
            with (
                self._precision(),
                Casting() if self.casts else nullcontext(),
                self.objective.with_tensors(own, buffers),
            ):
                return self.objective(batch, False)[0]

        def total(weights: Views, buffers: Views, batch: Any, share: Tensor | None) -> tuple[Tensor, Tensor]:
            losses = vmap(of_node, in_dims=(0, 0, 0), randomness="different")(weights, buffers, batch)
            return (losses if share is None else losses * share).sum(), losses

        def losses_and_grads(
            weights: Views,
            grads: Views,
            buffers: Views,
            batch: Any,
            added: tuple[Tensor, Tensor] | None,
        ) -> Tensor:
            """Return losses; write gradients to `grads`. With added=(share, adds), write or add share · gradients."""
            share, adds = added or (None, None)
            own, (_, losses) = grad_and_value(total, has_aux=True)(weights, buffers, batch, share)
            for name, place in grads.items():
                place.copy_(own[name] if adds is None else torch.where(adds, place, 0) + own[name])
            return losses

        # Compile forward and backward as one graph. With two graphs, autograd's overhead between them exceeds the
        # arithmetic of a small model. The graph also writes the gradients to their places while they are in the
        # caches. Require fullgraph, because a graph break within vmap would silently leave everything uncompiled.
        self._function = losses_and_grads
        self.compiled: Callable[..., Tensor] = torch.compile(
            losses_and_grads, dynamic=False, fullgraph=True, options=self.options
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options of torch.compile."""
        # Draw random numbers as uncompiled operations do, so that `prove` can compare the two. By default, fused
        # kernels on CUDA repeat masks of dropout since PyTorch 2.13 [github.com/pytorch/pytorch/issues/198333].
        options: dict[str, Any] = {"guard_filter_fn": without_guards_on_torch, "fallback_random": True}
        if width := _WIDTHS.get(torch.backends.cpu.get_cpu_capability()):
            # PyTorch's own kernels use vectors of this width: skip the test program that inductor would compile.
            options |= {"cpp.simdlen": width, "cpp.vec_isa_ok": True}
        if self.captures:
            options["triton.cudagraphs"] = True  # mode="reduce-overhead" cannot be given with options
            if torch.__version__ < "2.15":  # fused sums over rows and columns may be wrong [issues/193061]
                options["triton.mix_order_reduction"] = False
        return options

    @property
    def draws_jointly(self) -> bool:
        stream = self.generators[0]
        before = self.settings.undrawn.get(stream)
        return before is not None and not torch.equal(before, stream.get_state())

    @property
    def captures(self) -> bool:  # type: ignore[override]
        """Whether PyTorch captures the graph as a CUDA graph, which it replays in one launch from the third step on.

        A CUDA graph needs tensors at fixed addresses. Weights, gradients and buffers stay where they are (`_cut`), the
        batch is copied to a fixed address, and losses are copied before the next call overwrites them.
        """
        return self.replicas.weights.device.type == "cuda"

    def uncompiled(self, *args: Any) -> Tensor:
        """Compute the function of the graph in eager PyTorch."""
        with self._attending(), without_performance_warnings():
            return self._function(*args)

    def _attending(self) -> AbstractContextManager[Any]:
        """Return the context in which attention has a gradient under vmap."""
        return sdpa_kernel(_ATTENTION) if self.captures else nullcontext()

    @property
    def reason(self) -> str:  # type: ignore[override]
        return "" if self.compile_seconds is None else f"compiled in {self.compile_seconds:.1f} s"

    @property
    def preparing(self) -> str:  # type: ignore[override]
        return _COMPILING if self.compile_seconds is None else ""

    def prove(self, batch: Any, share: float = 1.0) -> Proof:
        """Prove in two halves that the graph is right for batches shaped like `batch`, see `vsim.engine.proof`:

        1. a step of the graph agrees with the uncompiled function, from the same state of the generators;
        2. steps of the uncompiled function agree with the loop's, in evaluation mode if the model draws.

        Args:
            share: the share of a step's examples that `batch` holds; a whole step, share=1.0, has a separate graph.
        """
        self._look(tree_map(lambda t: t[0], batch))
        started = time.perf_counter()
        ours = self._tried(batch, share)
        if self.compile_seconds is None:
            self.compile_seconds = time.perf_counter() - started
        compiled, self.compiled = self.compiled, self.uncompiled
        theirs = self._tried(batch, share)
        self.compiled = compiled
        try:
            compared(self, ours, theirs)
            proof = prove(self, self._made_uncompiled, batch, evaluating=self._draws)
            if proof.kept:
                raise VmapError(_KEEPS)
            return proof
        except (DifferError, VmapError) as error:
            raise CompileError(f"the model cannot be compiled: {error}") from error

    def _made_uncompiled(self, *args: Any) -> CompiledExecutor:
        made = type(self)(*args)
        made.casts, made.compiled = self.casts, made.uncompiled
        return made

    def _tried(self, batch: Any, share: float) -> Step:
        """Take a step, restore the earlier state, and return the step."""
        with undone(self), self.objective.untouched():
            losses = self._backward(cloned(batch), share, True)
            return Step(losses, self.replicas.grads, self.replicas.buffers).copied()

    def _look(self, batch: Any) -> None:
        """Detect, with one node's batch, whether the model draws random numbers, turns autocast on, or sets flags."""
        generator = default_generator(self.replicas.weights.device)
        with self.first_node(batch) as (objective, tensors, own), Casts() as casts:
            state = generator.get_state()
            objective(own, False)
            self._check_untrained()
            self._warn_of_frozen({c.name: tensors[c.name] for c in self.replicas.layout})
            self.casts = self.casts or casts.seen
            self._draws = not torch.equal(generator.get_state(), state)

    def _cut(self, pieces: list[slice]) -> None:
        super()._cut(pieces)
        self._operands = [_Operands.of(piece) for piece in self.pieces]
        for piece, (weights, grads) in zip(self.pieces, self._operands, strict=True):
            for tensor in (*weights.values(), *grads.values(), *piece.buffers.values()) if self.captures else ():
                mark_static_address(tensor)

    def _at_once_for(self, batch: Any) -> int:
        if self._fits_memory:
            at_once = super()._at_once_for(batch)
        else:
            at_once = min(self.at_once, max(1, ACTIVATIONS_AT_ONCE // max(1, activation_bytes(self, batch))))
        # Prefer pieces of equal size, which share a graph.
        equal = max(n for n in range(1, at_once + 1) if self.replicas.num_held % n == 0)
        return equal if 2 * equal >= at_once else at_once

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        batch = mapped(torch.Tensor.contiguous, batch)
        shapes = tuple(t.shape for t in tensors_of(batch))
        if self._cuts_by_batch:
            self._cut_for(batch)
        if is_watched():  # a compiled graph would hide operations and memory from a mode that counts them
            return super()._backward(batch, share, first)
        if self.captures:
            torch.compiler.cudagraph_mark_step_begin()
        losses, python = [], self._attributes.noted()
        try:
            with drawing_from(self.generators[0]) as before, torch.no_grad():
                self.settings.undrawn.setdefault(self.generators[0], before)
                for number, piece in enumerate(self.pieces):
                    if number:
                        python()
                    own = self._called(number, self._own_batch(batch, piece), shapes, share, not first)
                    losses.append(own.clone() if self.captures else own)
        except Exception as error:
            if self.compile_seconds is not None and not is_of_compiler(error):
                raise
            allow_saved_tensors_hooks()
            if self.captures:
                torch.compiler.reset()  # the remains of a failed CUDA graph would make later graphs fail
            raise CompileError(f"the model cannot be compiled: {_summary(error)}") from error
        stacked = losses[0] if len(losses) == 1 else torch.cat(losses)
        return stacked if share == 1.0 else stacked * share

    def _called(self, number: int, batch: Any, shapes: Any, share: float, adds: bool) -> Tensor:
        """Return the losses of piece `number`; write share · gradients to `grads`, or add them if `adds`."""
        piece, (weights, grads) = self.pieces[number], self._operands[number]
        whole = share == 1.0 and not adds
        added = None if whole else self._added_of(share, adds)
        call = partial(self.compiled, weights, grads, piece.buffers, batch, added)
        graph = (piece.size, whole, shapes)
        if graph in self.known:
            try:
                with torch.compiler.set_stance("fail_on_recompile"):
                    return call()
            except RuntimeError as error:
                if (change := what_changed(error)) is None:
                    raise
                self.changes += 1
                if self.changes > _MOST_CHANGES:
                    raise CompileError(
                        f"the model cannot be compiled: it has been another {self.changes} times since the first step, "
                        f"and every time it takes seconds; what no longer held: {change}"
                    ) from error
                self._look(tree_map(lambda t: t[0], batch))
        # Raise torch's limit on graphs, which counts the graphs of all runs of this process.
        with (
            self._attending(),
            recompile_limit(_MOST_GRAPHS),
            guarding_hooks(),
            without_messages(),
            without_performance_warnings(),
        ):
            losses: Tensor = call()
        self.known.add(graph)
        return losses

    def _added_of(self, share: float, adds: bool) -> tuple[Tensor, Tensor]:
        """Return the share and `adds` as tensors on the device; cached."""
        if (share, adds) not in self._added:
            grads = self.replicas.grads
            precise = torch.promote_types(grads.dtype, torch.float32)  # some devices lack float64
            numbers = torch.tensor(share, dtype=precise, device=grads.device), torch.tensor(adds, device=grads.device)
            self._added[share, adds] = numbers
        return self._added[share, adds]


def _without_gradient_of_padding(module: Any, inputs: tuple[Tensor], outputs: Tensor) -> Tensor:
    """Stop the gradient of padding; functorch's rule would stop this gradient only in the first node's table."""
    return torch.where((inputs[0] == module.padding_idx)[..., None], outputs.detach(), outputs)


def _summary(error: Exception) -> str:
    """Return the first line of a compiler's error, and the line of the model that caused the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any("storage of BatchedTensorImpl" in line for line in lines[:2]):
        return _KEEPS
    where = [line for line in lines if line.startswith("File ") and "site-packages" not in line]
    summary = f"{type(error).__name__}: {lines[0] if lines else ''}"
    if of_operation := _OF_OPERATION.search(str(error)):
        summary = f"{of_operation['name']}: {of_operation['reason'].partition('. ')[0]}"
    return summary + (f" ({where[-1]})" if where else "")
