"""Processes that tests start many of: forks of an interpreter that has imported vsim, and nothing of the test's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch


def context() -> ForkServerContext:
    forking = multiprocessing.get_context("forkserver")
    # An optimizer's first step imports torch._dynamo, for as long as torch itself.
    forking.set_forkserver_preload(["vsim.process.child", "torch._dynamo", "resumed"])
    return forking


def started(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a process that calls a function of a module."""
    process = context().Process(target=_call, args=(function, *arguments))
    process.start()
    return process


def ended(process: BaseProcess) -> int:
    """Wait for a process to end, and return its exit code."""
    process.join()
    code = process.exitcode
    process.close()
    assert code is not None
    return code


def _call(function: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    function(*arguments)
