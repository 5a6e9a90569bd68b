"""Losses and gradients of all nodes: vectorized, compiled, node by node, or by a rule that chooses."""

from vsim.engine.auto import AutoExecutor
from vsim.engine.batched import VmapError
from vsim.engine.compiled import CompiledExecutor, CompileError
from vsim.engine.executor import Executor, Settings
from vsim.engine.loop import LoopExecutor
from vsim.engine.vmap import VmapExecutor

EXECUTORS: dict[str, type[Executor]] = {"auto": AutoExecutor, "vmap": VmapExecutor, "loop": LoopExecutor}


def executor_class(executor: str, compile: bool) -> type[Executor]:
    """Return the class of executor for `fit(executor=…, compile=…)`."""
    return CompiledExecutor if compile and executor == "vmap" else EXECUTORS[executor]


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
    "executor_class",
]
