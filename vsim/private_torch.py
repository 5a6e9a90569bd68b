"""Private names of torch and transformers that vsim uses, each with the reason.

"A stopgap for X" means: replace the name once torch offers X. Other files use only public functions,
`torch.utils._pytree` and `torch._foreach_*`, on which torch's ecosystem depends; `tests/test_house.py` checks this.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._functorch.vmap import lazy_load_decompositions
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

# vmap from within. An executor wraps nodes' tensors and unwraps their losses; a lowering unwraps batched tensors and
# wraps its result. torch.library's register_vmap supports this for user-defined operators. A public way to replace
# functorch's rule for an operator of torch would replace these functions.
batch_level = _functorch.maybe_get_level
batch_dim = _functorch.maybe_get_bdim
unwrapped = _functorch.get_unwrapped
is_wrapped = _functorch.is_functorch_wrapped_tensor
add_batch_dim = _functorch._add_batch_dim
remove_batch_dim = _functorch._remove_batch_dim
_load_decompositions = cache(lazy_load_decompositions)


@contextmanager
def within_vmap(size: int, randomness: str) -> Iterator[int]:
    """Compute a block as torch.func.vmap computes a function; yield functorch's level, an argument of `add_batch_dim`.

    vmap itself inspects arguments and results, which takes 300 Python calls. A vmap without inspection would replace
    this function.
    """
    _load_decompositions()
    with without_performance_warnings():
        level: int = _functorch._vmap_increment_nesting(size, randomness)
        try:
            yield level
        finally:
            _functorch._vmap_decrement_nesting()


class outside_of_vmap(AbstractContextManager[None]):
    """Leave vmap within a block, to compute with plain stacked tensors; replaceable together with `within_vmap`."""

    def __enter__(self) -> None:
        self.levels: list[Any] = []
        while _functorch.peek_interpreter_stack() is not None:
            self.levels.append(_functorch.pop_dynamic_layer_stack())

    def __exit__(self, *_: object) -> None:
        while self.levels:
            _functorch.push_dynamic_layer_stack(self.levels.pop())


# Names in pickle's errors about operators that a script defines. A stopgap for a public class of operators.
NAMES_OF_OPERATORS = ("torch._C", "torch._ops", "'_Ops'", "'_OpNamespace'")

# Context that hides computations, such as proofs and measurements, from dispatch modes, which count or record
# operations. A stopgap for a public way to leave all dispatch modes.
unwatched = _disable_current_modes


def is_watched() -> bool:
    """Return whether a dispatch mode sees called operations. A stopgap for public access to the stack of modes."""
    return bool(_get_current_dispatch_mode_stack())


@contextmanager
def without_performance_warnings() -> Iterator[None]:
    """Silence functorch's warnings about operations that it computes node by node.

    functorch's switch cannot be read; this function assumes that it was on. A warnings filter, the public way, would be
    set and reset every step, and each reset makes Python repeat warnings that it has already shown.
    """
    _functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


def recompile_limit(graphs: int) -> AbstractContextManager[Any]:
    """Allow torch.compile this many graphs within a block. A stopgap for an argument of torch.compile."""
    return torch._dynamo.config.patch(recompile_limit=graphs)


def what_changed(error: RuntimeError) -> str | None:
    """Return the failed guard if an error reports a recompilation, else None. A stopgap for a public class of error."""
    if "fail_on_recompile" not in str(error):
        return None
    guards = [line.partition(": ")[2] for line in str(error).splitlines() if line.strip().startswith("- ")]
    return next((guard.partition("  #")[0].strip() for guard in guards), "known")


def guarding_hooks() -> AbstractContextManager[Any]:
    """Recompile a block's code when modules get hooks. A stopgap for an argument of torch.compile."""
    return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)


def without_messages() -> AbstractContextManager[Any]:
    """Compile a block's code without its prints, warnings and logs. A stopgap for an argument of torch.compile."""
    logs = {f for name, f in vars(logging.Logger).items() if name.startswith(_LOGS)}
    names = ("ignore_logging_functions", "ignore_logger_methods")  # the latter in older versions of torch
    name = next(name for name in names if hasattr(torch._dynamo.config, name))
    return torch._dynamo.config.patch({name: {print, warnings.warn, *logs}})


# Prefixes of loggers' methods; methods that libraries add also match, such as transformers' warning_once.
_LOGS = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log", "isEnabledFor")


def without_guards_on_torch(guards: Sequence[Any]) -> list[bool]:
    """Return which guards of a compiled graph to check at every step: all except guards on torch's transforms.

    Guards on the code of torch's transforms are half of a small model's guards, and take twice as long as the other
    half. They are recognized by private names. The public torch.compiler.skip_guard_on_globals_unsafe would also leave
    out guards on the user's globals.
    """
    return [not any(name in guard.name for name in _TRANSFORMS) for guard in guards]


_TRANSFORMS = ("_dot__functorch", "_dot__dynamo", "_pytree", "__import_contextlib", "__builtins_dict__")


def mark_static_address(tensor: Tensor) -> None:
    """Declare that a tensor's address is fixed, so that a CUDA graph may write to the tensor without a copy.

    PyTorch's page on CUDAGraph Trees names this function. A stopgap for an argument of torch.compile.
    """
    torch._dynamo.mark_static_address(tensor)


def is_of_compiler(error: Exception) -> bool:
    """Return whether torch.compile itself has raised an error. A stopgap for a public base class of its errors."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def allow_saved_tensors_hooks() -> None:
    """Allow hooks on saved tensors again if compiling checkpointed code has failed. A stopgap for a fix in PyTorch."""
    torch._C._autograd._saved_tensors_hooks_enable()


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's mutable tables, name → parameter and name → buffer, without its submodules' tensors.

    torch.func.functional_call is the public way to put tensors in a model, but it searches the tree at every call.
    """
    return module._parameters, module._buffers


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether a leaf tensor has hooks, which copies would lack. A stopgap for public access to hooks."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def has_backward_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether modules have hooks on gradients of inputs or outputs. A stopgap for public access to hooks."""
    of_all = nn.modules.module._global_backward_hooks, nn.modules.module._global_backward_pre_hooks
    return any((*of_all, *[m._backward_hooks or m._backward_pre_hooks for m in modules]))


def version(tensor: Tensor) -> int:
    """Return the number of in-place writes to a tensor, or 0 for tensors made in inference mode, which lack a counter.

    A stopgap for a public counter.
    """
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the `version` of each tensor."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors of one storage. A stopgap for a public comparison of storages."""
    key: int = tensor.untyped_storage()._cdata
    return key


def verify_batch_size(size: torch.Size) -> None:
    """Raise BatchNorm's error if a batch has one value per channel. A stopgap for a public form of the check."""
    functional._verify_batch_size(size)  # type: ignore[attr-defined]


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as stepped, so that schedulers do not warn. A stopgap for a way to set a schedule's step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# Methods by which an optimizer's step asks CUDA whether a graph is being captured, in torch up to 2.12 and from 2.13
# on. After a process has queried CUDA, processes forked from it cannot use CUDA. A check that looks only at the
# parameters' devices would replace these names.
CHECKS_OF_CAPTURE = ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check")


def default_mps_generator() -> torch.Generator:
    """Return the default generator of MPS. A stopgap for public access, which other devices have."""
    return torch.mps._get_default_mps_generator()


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """Return name → hooks that a module calls around its forward. A stopgap for public access to hooks."""
    return {"forward hook": module._forward_hooks, "forward pre-hook": module._forward_pre_hooks}


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wraps, or the module. A stopgap for a public attribute."""
    return getattr(model, "_orig_mod", model)


def register_recorders(model: nn.Module) -> None:
    """Register the outputs that models of transformers can record; their constructor does, but unpickling does not.

    Without registration, a Mixtral with `output_router_logits` finds no router logits in another process. Registration
    in `PreTrainedModel.__setstate__` would replace this function.
    """
    registry: Any = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", None)
    for module in model.modules() if registry is not None else ():
        if getattr(module, "_can_record_outputs", None) is not None:
            registry[module] = module._can_record_outputs
