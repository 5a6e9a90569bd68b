"""Losses and gradients of all nodes: vectorized, node by node, compiled, or whichever is fastest."""

from vsim.executor.auto import AutoExecutor
from vsim.executor.base import Before, Executor, Settings, evaluating, minibatches
from vsim.executor.compiled import CompiledExecutor, CompileError
from vsim.executor.loop import LoopExecutor
from vsim.executor.vmap import VmapError, VmapExecutor

EXECUTORS: dict[str, type[Executor]] = {"auto": AutoExecutor, "vmap": VmapExecutor, "loop": LoopExecutor}

__all__ = [
    "EXECUTORS",
    "AutoExecutor",
    "Before",
    "CompileError",
    "CompiledExecutor",
    "Executor",
    "LoopExecutor",
    "Settings",
    "VmapError",
    "VmapExecutor",
    "evaluating",
    "minibatches",
]
