"""The simulator against processes: weights, state, losses and ledger compared after every step."""

from __future__ import annotations

import html
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from vsim.arguments import reject_unknown, whole_number
from vsim.core.algorithm import Algorithm
from vsim.data.batches import Data
from vsim.engine.machine import using_threads
from vsim.engine.objective import LossFunction
from vsim.processes import default_threads, under_torchrun
from vsim.processes.bitwise import (
    KINDS,
    CompareStates,
    Difference,
    KeepStates,
    compared_kinds,
    differences_at,
    only_rounding,
)
from vsim.trainer import Trainer

_FIT_OPTIONS = (
    *("batch_size", "minibatch_size", "gradient_accumulation", "shuffle", "val_size", "val_interval", "seed"),
    *("timeout_seconds", "correlation_interval", "dataloader_kwargs", "progress", "participation", "compute"),
    "accuracy",
)


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`, which prints itself.

    Attributes:
        num_nodes: K. num_parameters: P.
        steps: the number of steps found equal.
        compared: the kinds of values that were compared, from KINDS.
        differences: all differences at the first step with a difference, sorted by kind, then node, then name.
        num_processes: the number of processes in the last comparison; None: a process for every node.
        agreed: the numbers of processes, as text, of earlier comparisons without a difference.
    """

    num_nodes: int
    num_parameters: int
    steps: int
    compared: tuple[str, ...]
    differences: tuple[Difference, ...] = ()
    num_processes: int | None = None
    agreed: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether there are no differences."""
        return not self.differences

    @property
    def first_difference(self) -> Difference | None:
        """The first difference, or None; its attribute `rounding` says whether rounding can explain all differences."""
        if self.identical:
            return None
        return replace(self.differences[0], rounding=only_rounding(self.differences))

    def __str__(self) -> str:
        what = f"{self.num_nodes} nodes, {self.num_parameters:,} parameters: {', '.join(self.compared)}"
        first = self.first_difference
        against = ["the simulator", *self.agreed, _backend(self.num_processes)]
        others = "" if against[1:] == [_backend(None)] else f": {', '.join(against)}"
        if first is None:
            return f"bit-identical over {self.steps} steps ({what}){others}"
        verdict = "by no more than rounding" if first.rounding else "by more than rounding"
        lines = [f"different after step {first.step}, {verdict} ({what}){others}", f"first difference: {first}"]
        for kind in KINDS:
            own = [d for d in self.differences if d.what == kind]
            if own:
                nodes, names = sorted({d.node for d in own}), list(dict.fromkeys(d.name for d in own if d.name))
                shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
                lines.append(f"  {kind}: nodes {nodes}" + (f", {shown}" if shown else ""))
        lines.insert(-len({d.what for d in self.differences}), "all that differs then:")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rest = html.escape(str(self)).split("\n")
        return f"<pre>{chr(10).join([f'<b>{head}</b>', *rest])}</pre>"

    def __bool__(self) -> bool:
        raise TypeError("a VerifyReport is neither true nor false: ask for its .identical")


def _backend(num_processes: int | None) -> str:
    return "a process for every node" if num_processes is None else f"num_processes={num_processes}"


def verify(
    model: nn.Module,
    train_dataset: Data,
    strategy: Algorithm,
    num_nodes: int,
    max_steps: int = 50,
    *,
    val_dataset: Data | None = None,
    loss_fn: LossFunction | None = None,
    threads: int | None = None,
    num_processes: int | None = None,
    **fit_options: Any,
) -> VerifyReport:
    """Train in the simulator, then with a process for every node, and compare the two after every step.

    Both train on the CPU with `deterministic=True`, and should be bitwise equal: the simulator keeps all nodes in one
    matrix; the processes are ordinary PyTorch over torch.distributed. With `num_processes`, the run is also trained in
    this number of processes, which compute ranges of the nodes as the simulator does.

    The comparison covers, in this order, the nodes' losses, weights, buffers, optimizer state (also of optimizers that
    are attributes of the strategy or its modules), the global weights that the strategy evaluates, the ledger's events,
    and the measurements of the history. The processes end at the first step with a difference. Two entries are equal
    if they compare equal or are both NaN; the sign of a zero is ignored.

    Args:
        model, train_dataset, val_dataset, loss_fn: see `Trainer`.
        strategy: your strategy or a built-in one. num_nodes: K, also the number of processes. max_steps: optimizer
            steps.
        threads: CPU threads of the simulator and of every process; default: the machine's cores divided by K, at least
            1.
        num_processes: also compare with this number of processes, from 1 to K; default: only with a process for every
            node.
        fit_options: options of `Trainer.fit`: batch_size, minibatch_size, gradient_accumulation, shuffle, val_size,
            val_interval, seed, participation, compute, correlation_interval, dataloader_kwargs, timeout_seconds,
            progress, accuracy.

    The simulator's states are kept in a temporary folder until the processes reach the same steps. The states take
    max_steps · K times the size of a node's weights, buffers and optimizer state.

    Returns:
        A `VerifyReport`.

    Raises:
        TypeError, ValueError, FloatingPointError: see `Trainer.fit`.
        RuntimeError: called under torchrun, although verify starts its processes itself.
        Exception: an error that occurs only in the processes; its cause is a NodeFailure with rank and traceback.

    Example:
        >>> import vsim
        >>> from vsim.data import digits
        >>> from vsim.models import MLP
        >>> from vsim.strategy import DiLoCoStrategy
        >>> vsim.verify(MLP(seed=0), digits()[0], DiLoCoStrategy(H=2), 2, max_steps=4, progress=False).identical
        True
    """
    reject_unknown(fit_options, _FIT_OPTIONS, "verify()")
    if isinstance(strategy, Algorithm) and strategy.is_asynchronous:
        raise ValueError(f"{type(strategy).__name__}: asynchronous strategies are simulated only, not in processes")
    whole_number("num_nodes", num_nodes)
    whole_number("max_steps", max_steps)
    threads = default_threads(num_nodes) if threads is None else whole_number("threads", threads)
    if under_torchrun():
        raise RuntimeError("verify() starts processes of its own: call it without torchrun")
    timeout_seconds = fit_options.pop("timeout_seconds", None)
    options: dict[str, Any] = {
        **fit_options,
        "strategy": strategy,
        "num_nodes": num_nodes,
        "max_steps": max_steps,
        "deterministic": True,
        "device": "cpu",
    }
    if num_processes is not None:
        whole_number("num_processes", num_processes, at_most=num_nodes)
    simulator = Trainer(model, train_dataset, val_dataset, loss_fn=loss_fn)
    simulator.run_label = "simulator"
    of_processes = {"backend": "process", "threads_per_process": threads, "timeout_seconds": timeout_seconds}
    if num_processes is not None:
        simulator.spec(**options, **of_processes, num_processes=num_processes)  # raises an error for invalid options
    agreed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vsim-verify-") as name:
        folder = Path(name)
        with using_threads(threads):
            simulator.fit(**options, callbacks=[KeepStates(folder)])
        assert simulator.strategy is not None
        replicas = simulator.strategy.cluster.replicas
        for number in [None] if num_processes is None else [None, num_processes]:
            own = {} if number is None else {"num_processes": number}
            processes = Trainer(model, train_dataset, val_dataset, loss_fn=loss_fn)
            processes.run_label = "processes"
            steps, found = _compared(simulator, processes, folder, max_steps, {**options, **of_processes, **own})
            if found or number == num_processes:
                break
            agreed.append(_backend(number))
        equal = max(0, steps - 1 - bool(found))
        kinds = compared_kinds(folder)
    return VerifyReport(num_nodes, replicas.num_parameters, equal, kinds, tuple(found), number, tuple(agreed))


def _compared(
    simulator: Trainer, processes: Trainer, folder: Path, max_steps: int, options: dict[str, Any]
) -> tuple[int, list[Difference]]:
    """Train in processes; return the number of steps compared, including the start, and the differences."""
    assert simulator.strategy is not None
    dtype = simulator.strategy.cluster.replicas.weights.dtype
    found: list[Difference] = []
    steps = 0

    def compare_through(last: int) -> None:
        nonlocal steps, found
        while not found and steps <= min(last, len(processes.history) - 1):
            found = differences_at(steps, simulator.history, processes.history, dtype, folder)
            steps += 1

    def compare_so_far(step: int, _: float) -> None:
        compare_through(step - 1)  # the losses of `step` are known: every node has completed step − 1
        if found:
            raise _Different

    try:
        processes.fit(**options, callbacks=[CompareStates(folder)], train_loss_hook=compare_so_far)
        compare_through(max_steps)
    except _Different:
        pass
    except Exception:
        compare_through(max_steps)
        if not found:
            raise
    return steps, found


class _Different(Exception):
    """Raised to end the processes when a difference is found."""
