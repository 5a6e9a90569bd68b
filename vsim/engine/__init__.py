"""Losses and gradients of all nodes: vectorized, compiled (both proved for the model first), or node by node."""

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
    """Return a function that makes executors for `fit(executor=name)`; these executors share their proofs."""
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
