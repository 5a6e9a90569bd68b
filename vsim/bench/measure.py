"""Steps of all candidates, timed in turn."""

from __future__ import annotations

import copy
import itertools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from vsim.bench.floor import Floor
from vsim.bench.workloads import BATCH_SIZE, MODELS, NODES, Workload, model_and_examples
from vsim.cluster.optim import OptimSpec
from vsim.doctor import peak_flops
from vsim.engine import VmapExecutor
from vsim.engine.memory import activation_bytes, optimizer_bytes, step_moments
from vsim.strategy import Strategy
from vsim.trainer import Trainer
from vsim.training.loop import steps
from vsim.training.member import Run

_MOST_STEPS_TO_SETTLE = 40  # executor="auto" makes its trials, and steps are traced
_STEPS_A_TURN = 10  # of a strategy, so that a sync every 10 steps takes part once
_CANDIDATES: dict[str, dict[str, Any]] = {
    "vmap": {"executor": "vmap"},
    "trace": {"executor": "vmap", "compile": "trace"},
    "loop": {"executor": "loop"},
    "auto": {"executor": "auto"},
    "exact": {"executor": "vmap", "deterministic": True},
    "exact, fused": {"executor": "vmap", "deterministic": True},
    "compiled": {"executor": "vmap", "compile": True},
}
# Without `deterministic` torch's fused kernel is taken anyway.
_OPTIMIZERS = {"exact, fused": OptimSpec("adamw", lr=1e-4, fused=True)}
_ADAMW = OptimSpec("adamw", lr=1e-4)


@dataclass
class Line:
    """One model and K: seconds a step by candidate, the floor, the share of the machine's peak, and the memory."""

    model: str
    num_nodes: int
    seconds: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)  # to K separate modules, round by round
    floor_seconds: float = float("nan")
    floor_ratios: dict[str, float] = field(default_factory=dict)  # to the floor of the vectorized step
    share_of_peak: float = float("nan")
    memory_ratio: float = float("nan")  # of the vectorized step's peak, in tensors, to matrices and activations
    chosen: str = ""


def bench(
    models: Iterable[str],
    nodes: Sequence[int] = NODES,
    *,
    compile: bool = False,
    rounds: int | None = None,
    progress: Callable[[Line], None] | None = None,
) -> list[Line]:
    """Time a step of every model at every K that it is meant for. The nodes train alone, as separate modules do.

    Args:
        models: names among MODELS. nodes: values of K.
        compile: a compiled step takes its turns, too; compiling, some ten seconds a line, is not counted.
        rounds: of taking turns; default: by model. progress: gets every line when it is done.
    """
    lines = []
    for name in models:
        workload = MODELS[name]
        for num_nodes in (k for k in nodes if k <= workload.most_nodes):
            line = _measure(name, workload, num_nodes, compile, rounds)
            lines.append(line)
            if progress is not None:
                progress(line)
    return lines


@dataclass
class StrategyLine:
    """The times of one model and K by strategy: seconds a step, ratios to the first strategy, and bytes held.

    held_bytes: weights, gradients and the state of the inner optimizer, of all nodes together.
    """

    model: str
    num_nodes: int
    seconds: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    held_bytes: dict[str, int] = field(default_factory=dict)


def bench_strategies(
    models: Iterable[str],
    nodes: Sequence[int],
    strategies: Mapping[str, Callable[[], Strategy]],
    *,
    rounds: int | None = None,
) -> list[StrategyLine]:
    """Time ten steps of every strategy in turn, for every model at every K that it is meant for.

    Args:
        models: names among MODELS. nodes: values of K. strategies: label → what makes it; ratios are to the first.
        rounds: of taking turns; default: by model.
    """
    lines = []
    for name in models:
        workload = MODELS[name]
        for num_nodes in (k for k in nodes if k <= workload.most_nodes):
            model, examples = model_and_examples(workload, num_nodes)
            turns = rounds or max(3, round(workload.rounds / 3 * min(1, 8 / num_nodes)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of DeMo, on models with small tensors
                runs = {
                    label: run_of(model, examples, num_nodes, make(), {"executor": "vmap"})
                    for label, make in strategies.items()
                }
            ten_steps = {label: partial(_steps_of, steps(run)) for label, run in runs.items()}
            for label, run in runs.items():
                _settle(ten_steps[label], run)
            times = in_turn(ten_steps, turns)
            line = StrategyLine(name, num_nodes)
            line.seconds = {label: statistics.median(t) / _STEPS_A_TURN for label, t in times.items()}
            line.ratios = _ratios(times, next(iter(times)))
            for label, run in runs.items():
                member, _ = run.only
                replicas = member.cluster.replicas
                held = replicas.weights.nbytes + replicas.grads.nbytes
                line.held_bytes[label] = held + optimizer_bytes(member.strategy.optim)
            lines.append(line)
    return lines


def _steps_of(run: Iterator[int]) -> None:
    for _ in range(_STEPS_A_TURN):
        next(run)


def _settle(turn: Callable[[], object], run: Run) -> None:
    """Take turns until the next ones are going to be computed in the same way."""
    for _ in range(_MOST_STEPS_TO_SETTLE):
        turn()
        member, group = run.only
        if member.done > 1 and group.executor.is_ready:
            return


def in_turn(turns: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return label → the seconds of every round, in which each takes its turn. A first round is a warm-up.

    Every round has an order of its own: what was computed before leaves its traces in the caches. A turn that returns
    seconds, a float, has timed itself.
    """
    times: dict[str, list[float]] = {label: [] for label in turns}
    orders = random.Random(0)
    for round_number in range(rounds + 1):
        for label in orders.sample(list(turns), len(turns)):
            started = time.perf_counter()
            own = turns[label]()
            seconds = own if isinstance(own, float) else time.perf_counter() - started
            if round_number:
                times[label].append(seconds)
    return times


def _ratios(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """Return label → the median over the rounds of its time to that of `base`."""
    pairs = {label: zip(values, times[base], strict=True) for label, values in times.items()}
    return {label: statistics.median(own / theirs for own, theirs in both) for label, both in pairs.items()}


def _measure(name: str, workload: Workload, num_nodes: int, compile: bool, rounds: int | None) -> Line:
    model, examples = model_and_examples(workload, num_nodes)
    batch = [t.unflatten(0, (num_nodes, BATCH_SIZE)) for t in examples]
    rounds = rounds or max(3, round(workload.rounds * min(1, 8 / num_nodes)))
    turns: dict[str, Callable[[], object]] = {"separate": _separate(model, batch)}
    runs = {}
    for label, options in _CANDIDATES.items():
        if label == "compiled" and not compile:
            continue
        strategy = Strategy(optim_spec=_OPTIMIZERS.get(label, _ADAMW))
        runs[label] = run_of(model, examples, num_nodes, strategy, options)
        turns[label] = partial(next, steps(runs[label]))
    for label, run in runs.items():
        _settle(turns[label], run)
    turns["floor"] = Floor(run_of(model, examples, num_nodes, Strategy(optim_spec=_ADAMW), _CANDIDATES["vmap"]))
    times = in_turn(turns, rounds)
    line = Line(name, num_nodes)
    to_floor = _ratios(times, "floor")
    line.floor_ratios = {label: to_floor[label] for label in ("vmap", "compiled") if label in to_floor}
    line.floor_seconds = statistics.median(times.pop("floor"))
    line.seconds = {label: statistics.median(values) for label, values in times.items()}
    line.ratios = _ratios(times, "separate")
    line.chosen = runs["auto"].groups[0].executor.name
    with FlopCounterMode(display=False) as counter:  # of the loop: convolutions in groups are counted wrongly
        runs["loop"].groups[0].executor.losses_and_grads(batch)
    flops = counter.get_total_flops()
    line.share_of_peak = flops / line.seconds["vmap"] / peak_flops(batch[0].device)
    line.memory_ratio = memory_ratio(runs["vmap"], batch)
    return line


def memory_ratio(run: Run, batch: list[Tensor]) -> float:
    """Return the most that the tensors of a step hold, to weights, gradients, optimizer and activations.

    Activations are what eager PyTorch keeps for a backward pass of the nodes that are computed at once.
    """
    member, group = run.only
    executor, replicas = group.executor, member.cluster.replicas
    assert isinstance(executor, VmapExecutor)
    matrices = replicas.weights.nbytes + replicas.grads.nbytes + optimizer_bytes(member.strategy.optim)
    at_once = max(piece.rows.stop - piece.rows.start for piece in executor.pieces)
    activations = at_once * activation_bytes(executor, [t[0] for t in batch])
    return (matrices + max(step_moments(executor, batch))) / (matrices + activations)


def _separate(model: nn.Module, batch: list[Tensor]) -> Callable[[], None]:
    """K modules with an optimizer each, as torch has it by default."""
    nodes = [copy.deepcopy(model) for _ in batch[0]]
    optimizers = [torch.optim.AdamW(node.parameters(), lr=1e-4) for node in nodes]

    def step() -> None:
        for node, optimizer, *own in zip(nodes, optimizers, *batch, strict=True):
            optimizer.zero_grad()
            loss = node(own)
            loss.backward()
            optimizer.step()
            loss.item()

    return step


def run_of(
    model: nn.Module, examples: list[Tensor], num_nodes: int, strategy: Strategy, options: dict[str, Any]
) -> Run:
    """A run whose every epoch is one step on the same batch."""
    trainer = Trainer(model, TensorDataset(*examples))
    run = trainer.prepare(
        strategy=strategy,
        num_nodes=num_nodes,
        max_steps=10_000,  # so long that "auto" may try everything
        batch_size=BATCH_SIZE,
        shuffle=False,
        progress=False,
        **options,
    )
    _, group = run.only
    (batch,) = itertools.islice(group.batches, 1)
    group.batches = itertools.repeat(batch)
    return run
