"""Losses and gradients of all nodes: vectorized, traced, compiled, node by node, or whichever is fastest."""

from vsim.engine.auto import AutoExecutor
from vsim.engine.base import Executor, Settings
from vsim.engine.compiled import CompiledExecutor, CompileError
from vsim.engine.loop import LoopExecutor
from vsim.engine.stacked import VmapError
from vsim.engine.trace import StaleTraceError, TraceError, TraceExecutor
from vsim.engine.vmap import VmapExecutor

EXECUTORS: dict[str, type[Executor]] = {"auto": AutoExecutor, "vmap": VmapExecutor, "loop": LoopExecutor}
COMPILE = (True, False, "trace", "auto")


def executor_class(executor: str, compile: bool | str) -> type[Executor]:
    """Return what computes for `fit(executor=…, compile=…)`."""
    if executor != "vmap" or compile is False:
        return EXECUTORS[executor]
    return TraceExecutor if compile == "trace" else CompiledExecutor


__all__ = [
    "COMPILE",
    "EXECUTORS",
    "AutoExecutor",
    "CompileError",
    "CompiledExecutor",
    "Executor",
    "LoopExecutor",
    "Settings",
    "StaleTraceError",
    "TraceError",
    "TraceExecutor",
    "VmapError",
    "VmapExecutor",
    "executor_class",
]
