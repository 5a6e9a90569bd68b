"""The simulator against one process a node: weights, state, losses and ledger compared after every step."""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path

from vsim.arguments import reject_unknown, whole_number
from vsim.cluster.optim import NodeOptimizers, StackedOptimizer, torch_optimizers
from vsim.cluster.replicas import Columns, Replicas
from vsim.data.batches import Data
from vsim.engine.objective import LossFunction
from vsim.process import default_threads, under_torchrun
from vsim.process.difference import Difference, difference, largest_magnitude, unlike
from vsim.records.history import COLUMNS, OF_THE_MACHINE
from vsim.strategy.base import Strategy
from vsim.trainer import Trainer
from vsim.training.member import Member

# What is compared of a step, in this order.
KINDS = ("losses", "weights", "buffers", "optimizer state", "global weights", "ledger", "history")
_FIT_OPTIONS = (
    "batch_size",
    "minibatch_size",
    "gradient_accumulation",
    "shuffle",
    "val_size",
    "val_interval",
    "seed",
    "timeout_seconds",
    "correlation_interval",
    "dataloader_kwargs",
    "progress",
)
_MEASURED = tuple(c for c in COLUMNS if c not in ("step", *OF_THE_MACHINE))


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found. It prints itself.

    Attributes:
        num_nodes: K. num_parameters: P.
        steps: those that were compared and found equal.
        compared: what there was to compare, of KINDS.
        differences: all that differs at the first step at which anything does: by kind, then node, then name.
    """

    num_nodes: int
    num_parameters: int
    steps: int
    compared: tuple[str, ...]
    differences: tuple[Difference, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def first_difference(self) -> Difference | None:
        """The first of the differences, if there is one. Its `rounding` speaks for all of them."""
        if self.identical:
            return None
        return replace(self.differences[0], rounding=_only_rounding(self.differences))

    def __str__(self) -> str:
        what = f"{self.num_nodes} nodes, {self.num_parameters:,} parameters: {', '.join(self.compared)}"
        first = self.first_difference
        if first is None:
            return f"bit-identical over {self.steps} steps ({what})"
        verdict = "by no more than rounding" if first.rounding else "by more than rounding"
        lines = [f"different after step {first.step}, {verdict} ({what})", f"first difference: {first}"]
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


def verify(
    model: nn.Module,
    train_dataset: Data,
    strategy: Strategy,
    num_nodes: int,
    max_steps: int = 50,
    *,
    val_dataset: Data | None = None,
    loss_fn: LossFunction | None = None,
    threads: int | None = None,
    executor: str = "auto",
    chunk_size: int | None = None,
    **fit_options: Any,
) -> VerifyReport:
    """Train in the simulator, then in one process a node, and compare the two after every step.

    Both train on the CPU with `deterministic=True`, and should have the same bits: the simulator keeps all nodes in one
    matrix, the processes are ordinary PyTorch over torch.distributed. Compared are, in this order, the nodes' losses,
    weights, buffers, optimizer state (also that of optimizers which are attributes of the strategy or its modules),
    the global weights that the strategy evaluates, the ledger's events, and the measurements of the history. The
    processes are ended at the first step at which something differs. Equal are entries that compare equal or are both
    NaN: the sign of a zero is not looked at.

    Args:
        model, train_dataset, val_dataset, loss_fn: as of `Trainer`.
        strategy: yours or a built-in one. num_nodes: K, processes as well. max_steps: optimizer steps.
        threads: CPU threads of the simulator and of every process; default the machine's divided by K, at least 1.
        executor, chunk_size: of the simulator, as of `Trainer.fit`; "vmap" to have all nodes at once tested, say.
        fit_options: of `Trainer.fit`: batch_size, minibatch_size, gradient_accumulation, shuffle, val_size,
            val_interval, seed, correlation_interval, dataloader_kwargs, timeout_seconds, progress.

    The simulator's states wait for the processes' in a temporary folder: max_steps · K times the size of a node's
    weights, buffers and optimizer state.

    Returns:
        A `VerifyReport`.

    Raises:
        TypeError, ValueError, FloatingPointError: as `Trainer.fit`.
        RuntimeError: called under torchrun; it starts processes of its own.
        Exception: what fails in the processes only, caused by a NodeFailure with rank and traceback.

    Example:
        >>> import vsim
        >>> from vsim.data import digits
        >>> from vsim.models import MLP
        >>> from vsim.strategy import DiLoCoStrategy
        >>> vsim.verify(MLP(seed=0), digits()[0], DiLoCoStrategy(H=2), 2, max_steps=4, progress=False).identical
        True
    """
    reject_unknown(fit_options, _FIT_OPTIONS, "verify()")
    whole_number("num_nodes", num_nodes)
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
    with tempfile.TemporaryDirectory(prefix="vsim-verify-") as name:
        sides = {}
        for side in ("simulator", "processes"):
            trainer = sides[side] = Trainer(model, train_dataset, val_dataset, loss_fn=loss_fn)
            trainer.run_label = side
            folder = Path(name) / side
            folder.mkdir()
            trainer.after_step = StateWriter(folder)
        with _cpu_threads(threads):
            sides["simulator"].fit(**options, executor=executor, chunk_size=chunk_size)
        comparison = _Comparison(Path(name), sides["simulator"], sides["processes"], num_nodes)

        def compare_so_far(step: int, _: float) -> None:
            comparison.advance(step - 1)  # the losses of `step` are known, so that every node has completed step − 1
            if comparison.differences:
                raise _Different

        try:
            sides["processes"].fit(
                **options,
                backend="process",
                threads_per_process=threads,
                timeout_seconds=timeout_seconds,
                train_loss_hook=compare_so_far,
            )
            comparison.advance(max_steps)
        except _Different:
            pass
        except Exception:
            comparison.advance(max_steps)
            if not comparison.differences:
                raise
        return comparison.report()


class _Different(Exception):
    """The processes need not go on."""


@contextmanager
def _cpu_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# What is written after every step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateWriter:
    """Writes the state of the nodes held in a process to a file a step in `folder`: what `Trainer.after_step` calls.

    A file holds "matrices", "tensors": kind → name → stacked (R, …) or shared tensor, where the last dimension of the
    matrices is that of all parameters; and "events": the ledger's events of the step.
    """

    folder: Path

    def __call__(self, run: Member) -> None:
        cluster, strategy = run.cluster, run.strategy
        step, replicas = cluster.step, cluster.replicas
        matrices, tensors = _optimizer_state(strategy)
        state = {
            "matrices": {
                "weights": {"": replicas.weights},
                "optimizer state": matrices,
                "global weights": {"": strategy.global_weights()},
            },
            "tensors": {"buffers": replicas.buffers, "optimizer state": tensors},
        }
        # Copies, for of a view the whole of what it looks at would be written.
        stored: dict[str, Any] = {
            place: {kind: {n: t.detach().cpu().clone() for n, t in named.items()} for kind, named in kinds.items()}
            for place, kinds in state.items()
        }
        stored["events"] = [tuple(e) for e in run.ledger if e.step == step or e.step < step == 1]
        path = state_file(self.folder, step, replicas.first_node)
        torch.save(stored, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


def state_file(folder: Path, step: int, first_node: int) -> Path:
    """Return where a `StateWriter` puts the state of the nodes from `first_node` on after a step."""
    return folder / f"step-{step}-node-{first_node}.pt"


def _optimizer_state(strategy: Strategy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return name → tensor: the state that is shaped like all weights, (R, P) or (P,), and all other."""
    replicas = strategy.cluster.replicas
    matrices: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for prefix, optimizer in _optimizers(strategy):
        by_parameter = _states(optimizer, replicas)
        for j, (states, each) in enumerate(by_parameter):
            of = ""
            if len(by_parameter) > 1:
                of = f" of {replicas.layout[j].name if len(by_parameter) == len(replicas.layout) else f'parameter {j}'}"
            for key, first in states[0].items():
                value = torch.stack([state[key] for state in states]) if each else first
                if first.dim() and first.shape[-1] in (replicas.num_parameters, replicas.weights.stride(0)):
                    matrices[prefix + key] = value[..., : replicas.num_parameters]  # without the gaps between rows
                else:
                    tensors[prefix + key + of] = value
    return matrices, tensors


def _optimizers(strategy: Strategy) -> Iterator[tuple[str, StackedOptimizer]]:
    """Yield the optimizers that are attributes of a strategy or its modules, with what to call their state."""
    yield "", strategy.optim
    owners = [("", vars(strategy))]
    owners += [(f"communication_modules[{i}].", vars(m)) for i, m in enumerate(strategy.communication_modules)]
    for owner, attributes in owners:
        for name, value in attributes.items():
            if isinstance(value, Optimizer | NodeOptimizers) and value is not strategy.optim:
                yield f"{owner}{name} ", value


def _states(optimizer: StackedOptimizer, replicas: Replicas) -> list[tuple[list[dict[str, Tensor]], bool]]:
    """Return, by parameter, (the states of the nodes, True), or ([the one of all, or stacked], False)."""
    by_part = []
    for part in torch_optimizers(optimizer):
        parameters = [p for group in part.param_groups for p in group["params"]]
        by_part.append([_leaves(part.state.get(p, {})) for p in parameters])
    if isinstance(optimizer, NodeOptimizers):
        return [(list(states), True) for states in zip(*by_part, strict=True)]
    if [p.data_ptr() for p in parameters] == [row.data_ptr() for row in replicas.weights] and parameters[0].dim() == 1:
        return [(by_part[0], True)]
    return [([state], False) for state in by_part[0]]


def _leaves(state: Any) -> dict[str, Tensor]:
    """Name → tensor of the tensors and numbers in one parameter's state."""
    leaves = {}
    for path, leaf in tree_flatten_with_path(state)[0]:
        if isinstance(leaf, Tensor | int | float):
            leaves[".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)] = (
                leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, dtype=torch.float64)
            )
    return leaves


# How it is compared --------------------------------------------------------------------------------------------------


class _Comparison:
    """The comparison of two runs, as far as it has come.

    Args:
        folder: where the `StateWriter`s of the two write, each in a folder named after it.
        simulator, processes: the trainers. The first is done, the second may be in the middle of it.
    """

    def __init__(self, folder: Path, simulator: Trainer, processes: Trainer, num_nodes: int) -> None:
        assert simulator.strategy is not None
        replicas = simulator.strategy.cluster.replicas
        self.folder, self.num_nodes = folder, num_nodes
        self.simulator, self.processes = simulator, processes
        self.layout: list[Columns] = replicas.layout
        self.num_parameters, self.dtype = replicas.num_parameters, replicas.weights.dtype
        self.next_step = 0
        self.differences: list[Difference] = []
        self.compared: set[str] = {"losses", "ledger", "history"}

    def advance(self, last: int) -> None:
        """Compare the steps up to `last` that are known in full, until one differs; their files are deleted."""
        while self.next_step <= min(last, len(self.processes.history) - 1) and not self.differences:
            step = self.next_step
            files = [state_file(self.folder / "simulator", step, 0)]
            files += [state_file(self.folder / "processes", step, node) for node in range(self.num_nodes)]
            if step and not all(file.exists() for file in files):
                return
            found = self._step_zero() if step == 0 else self._step(step, files)
            self.differences = sorted(found, key=lambda d: (KINDS.index(d.what), d.node))
            self.next_step += 1
            for file in files:
                file.unlink(missing_ok=True)

    def report(self) -> VerifyReport:
        steps = max(0, self.next_step - 1 - bool(self.differences))
        compared = tuple(kind for kind in KINDS if kind in self.compared)
        return VerifyReport(self.num_nodes, self.num_parameters, steps, compared, tuple(self.differences))

    def _step_zero(self) -> list[Difference]:
        return list(self._of_history(0))

    def _step(self, step: int, files: Sequence[Path]) -> list[Difference]:
        simulator, *processes = (torch.load(file, weights_only=True) for file in files)
        found = [*self._of_losses(step), *self._of_history(step)]
        for node, process in enumerate(processes):
            found += self._of_states(step, node, simulator, process)
            found += _of_events(step, node, simulator["events"], process["events"])
        return found

    def _of_losses(self, step: int) -> Iterator[Difference]:
        pairs = zip(*(side.history.node_losses[step - 1] for side in (self.simulator, self.processes)), strict=True)
        for node, pair in enumerate(pairs):
            yield from self._of_numbers(step, node, "losses", "", *pair)

    def _of_history(self, step: int) -> Iterator[Difference]:
        for column in _MEASURED:
            pair = (side.history[column][step] for side in (self.simulator, self.processes))
            yield from self._of_numbers(step, 0, "history", column, *pair)

    def _of_numbers(
        self, step: int, node: int, what: str, name: str, simulator: float, process: float
    ) -> Iterator[Difference]:
        pair = torch.tensor([simulator, process], dtype=torch.float64)
        # As what it was computed in, for its ULPs.
        own = pair.to(self.dtype)
        if torch.equal(own.double(), pair):
            pair = own
        yield from difference(pair[0], pair[1], step, node, what, name)

    def _of_states(
        self, step: int, node: int, simulator: Mapping[str, Any], process: Mapping[str, Any]
    ) -> Iterator[Difference]:
        for place in ("matrices", "tensors"):
            for what, theirs in simulator[place].items():
                others = process[place][what]
                if theirs or others:
                    self.compared.add(what)
                for name in dict.fromkeys([*theirs, *others]):
                    if name not in theirs or name not in others:
                        has = ["present" if name in side else "absent" for side in (theirs, others)]
                        yield unlike(step, node, what, name, *has)
                        continue
                    pair = self._rows(theirs[name], others[name], node)
                    if pair[0].dtype == pair[1].dtype and torch.equal(*pair):
                        continue
                    # A layer's gradient may be nothing but rounding of larger ones: their scale is that of the state.
                    scale = largest_magnitude(*pair) if what == "optimizer state" else None
                    for part, own in self._parts(name, pair) if place == "matrices" else [(name, pair)]:
                        yield from difference(*own, step, node, what, part, scale)

    def _rows(self, simulator: Tensor, process: Tensor, node: int) -> tuple[Tensor, Tensor]:
        """Return a node's part of what the simulator has and of what its process has; shared tensors as they are."""
        if simulator.shape == (self.num_nodes, *process.shape[1:]) and process.shape[:1] == (1,):
            return simulator[node], process[0]
        return simulator, process

    def _parts(self, name: str, pair: tuple[Tensor, Tensor]) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Cut two rows (P,) into the parameters, by name."""
        for c in self.layout:
            cut = tuple(row[..., c.start : c.stop].reshape(c.shape) for row in pair)
            yield f"{name} of {c.name}" if name else c.name, (cut[0], cut[1])


def _of_events(
    step: int, node: int, simulator: Sequence[tuple[Any, ...]], process: Sequence[tuple[Any, ...]]
) -> Iterator[Difference]:
    count = max(len(simulator), len(process))
    padded = [[*events, *[None] * (count - len(events))] for events in (simulator, process)]
    unequal = [i for i, (ours, theirs) in enumerate(zip(*padded, strict=True)) if ours != theirs]
    if unequal:
        i = unequal[0]
        events = [side[i] for side in padded]
        label = next(event[2] for event in events if event is not None)
        shown = ["no event" if event is None else str(event) for event in events]
        yield replace(unlike(step, node, "ledger", label, *shown), entries=len(unequal), size=count, index=(i,))


def _only_rounding(differences: Sequence[Difference]) -> bool:
    """Whether all differences of a step can come from rounding alone.

    AdamW and its like divide a gradient by its own size: one that is nothing but rounding moves a weight by a whole
    step. Where the optimizer's state differs too, it tells instead of the weights how the gradients differed.
    """
    follow = ("weights", "global weights", "history")
    causes = [d for d in differences if d.what not in follow]
    if not any(d.what == "optimizer state" for d in causes):
        causes = list(differences)
    return all(d.rounding for d in causes)
