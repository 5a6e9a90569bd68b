"""Losses and gradients of all nodes: vectorized, node by node, compiled, or whichever is fastest."""

from vsim.engine.auto import AutoExecutor
from vsim.engine.base import Before, Executor, Settings, evaluating, minibatches
from vsim.engine.compiled import CompiledExecutor, CompileError
from vsim.engine.loop import LoopExecutor
from vsim.engine.vmap import VmapError, VmapExecutor

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
