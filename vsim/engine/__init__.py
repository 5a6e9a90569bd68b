"""Executors, which compute the losses and gradients of all nodes: vectorized, compiled, or node by node."""

from collections.abc import Callable
from functools import partial

from vsim.engine.batched import VmapError
from vsim.engine.choose import AutoExecutor
from vsim.engine.compiled import CompiledExecutor, CompileError
from vsim.engine.executor import Executor, Settings
from vsim.engine.looped import LoopExecutor
from vsim.engine.vmap import VmapExecutor

EXECUTORS = ("auto", "vmap", "loop")


def executor_of(name: str) -> Callable[..., Executor]:
    """Return a factory of executors for `fit(executor=name)`; all executors from one factory share their proofs."""
    return LoopExecutor if name == "loop" else partial(AutoExecutor, asked=name, decided={})


__all__ = [
    "EXECUTORS",
    "AutoExecutor",
    "CompileError",
    "CompiledExecutor",
    "Executor",
    "LoopExecutor",
    "Settings",
    "VmapError",
    "VmapExecutor",
    "executor_of",
]
