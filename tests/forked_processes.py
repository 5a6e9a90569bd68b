"""Processes that tests start many of: forks of the interpreter that the nodes' processes are forks of."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from vsim.processes.launch import PRELOAD, _starting


def context() -> ForkServerContext:
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(PRELOAD)
    with _starting(1):
        forkserver.ensure_running()
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
