"""Steps of all candidates, timed in turn."""

from __future__ import annotations

import itertools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from vsim.bench.floor import Floor
from vsim.bench.jax_step import jax_step, load_jax
from vsim.bench.peers import bare, check_agreement, separate
from vsim.bench.workloads import BATCH_SIZE, LR, MODELS, NODES, Workload, model_and_examples
from vsim.cluster.optim import OptimSpec
from vsim.doctor import peak_flops
from vsim.engine import VmapExecutor
from vsim.engine.memory import activation_bytes, optimizer_bytes, step_moments
from vsim.strategy import Strategy
from vsim.trainer import Trainer
from vsim.training.loop import steps
from vsim.training.run import Ensemble

_MOST_STEPS_TO_SETTLE = 40  # executor="auto" makes its trials, and steps are traced
_MOST_STEPS_A_TURN = 10  # strategies take so many whatever they last, so that a sync every 10 steps takes part once
_TURN_SECONDS = 0.02
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
_OPTIMIZERS = {"exact, fused": OptimSpec("adamw", lr=LR, fused=True)}
_ADAMW = OptimSpec("adamw", lr=LR)


@dataclass
class Line:
    """One model and K: seconds a step by candidate, their ratios, the share of the machine's peak, and the memory."""

    model: str
    num_nodes: int
    steps_a_turn: int
    seconds: dict[str, float]
    ratios: dict[str, dict[str, float]]  # base → candidate → ratio, round by round; bases are the peers and the floor
    share_of_peak: float
    memory_ratio: float  # of the vectorized step's peak, in tensors, to matrices and activations
    chosen: str


def bench(
    models: Iterable[str],
    nodes: Sequence[int] = NODES,
    *,
    compile: bool = False,
    jax: bool = False,
    rounds: int | None = None,
    progress: Callable[[Line], None] | None = None,
) -> list[Line]:
    """Time a step of every model at every K that it is meant for. The nodes train alone, as separate modules do.

    A turn takes as many steps, at most ten, as last 20 ms with the fastest candidate: the steps of a small model find
    in the caches what the step before has left there, as in training.

    Args:
        models: names among MODELS. nodes: values of K.
        compile: a compiled step and the bare one take their turns, too; compiling, some twenty seconds a line, is not
            counted.
        jax: so does JAX, with the models that have a form there.
        rounds: of taking turns; default: by model. progress: gets every line when it is done.

    Raises:
        ImportError: JAX is asked for and not installed.
        RuntimeError: a peer computes other losses than K separate modules.
    """
    if jax:
        load_jax()
    lines = []
    for name in models:
        workload = MODELS[name]
        for num_nodes in (k for k in nodes if k <= workload.most_nodes):
            line = _measure(name, workload, num_nodes, compile, jax, rounds)
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
            step_of = {label: partial(next, steps(run)) for label, run in runs.items()}
            for label, run in runs.items():
                _settle(step_of[label], run)
            times = in_turn(step_of, turns, _MOST_STEPS_A_TURN)
            line = StrategyLine(name, num_nodes)
            line.seconds = {label: statistics.median(values) for label, values in times.items()}
            line.ratios = _ratios(times, next(iter(times)))
            for label, ensemble in runs.items():
                one, _ = ensemble.only
                replicas = one.cluster.replicas
                held = replicas.weights.nbytes + replicas.grads.nbytes
                line.held_bytes[label] = held + optimizer_bytes(one.strategy.optim)
            lines.append(line)
    return lines


def _settle(step: Callable[[], object], ensemble: Ensemble) -> None:
    """Take steps until the next ones are going to be computed in the same way."""
    for _ in range(_MOST_STEPS_TO_SETTLE):
        step()
        run, stack = ensemble.only
        if run.done > 1 and stack.executor.is_ready:
            return


def in_turn(candidates: Mapping[str, Callable[[], object]], rounds: int, steps: int = 1) -> dict[str, list[float]]:
    """Return label → the seconds a step of every round, in which each takes so many. A first round is a warm-up.

    What another has computed before leaves its traces in the caches: every round has an order of its own, and half as
    many steps that are not timed begin a turn. A step that returns seconds, a float, has timed itself.
    """
    times: dict[str, list[float]] = {label: [] for label in candidates}
    orders = random.Random(0)
    for round_number in range(rounds + 1):
        for label in orders.sample(list(candidates), len(candidates)):
            for _ in range(steps // 2):
                candidates[label]()
            started = time.perf_counter()
            returned = [candidates[label]() for _ in range(steps)]
            seconds = (time.perf_counter() - started) / steps
            own = [value for value in returned if isinstance(value, float)]
            if round_number:
                times[label].append(statistics.fmean(own) if own else seconds)
    return times


def _ratios(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """Return label → the median over the rounds of its time to that of `base`."""
    pairs = {label: zip(values, times[base], strict=True) for label, values in times.items()}
    return {label: statistics.median(own / theirs for own, theirs in both) for label, both in pairs.items()}


def _measure(name: str, workload: Workload, num_nodes: int, compile: bool, jax: bool, rounds: int | None) -> Line:
    model, examples = model_and_examples(workload, num_nodes)
    batch = [t.unflatten(0, (num_nodes, BATCH_SIZE)) for t in examples]
    peers = {"separate": separate(model, batch)}
    if compile:
        peers["bare"] = bare(model, batch)
    if jax and (in_jax := jax_step(model, batch)) is not None:
        peers["jax"] = in_jax
    check_agreement(peers)
    runs = {
        label: run_of(model, examples, num_nodes, Strategy(optim_spec=_OPTIMIZERS.get(label, _ADAMW)), options)
        for label, options in _CANDIDATES.items()
        if compile or label != "compiled"
    }
    candidates: dict[str, Callable[[], object]] = {**peers}
    for label, run in runs.items():
        candidates[label] = partial(next, steps(run))
        _settle(candidates[label], run)
    candidates["floor"] = Floor(run_of(model, examples, num_nodes, Strategy(optim_spec=_ADAMW), _CANDIDATES["vmap"]))
    fastest = min(seconds for label, (seconds,) in in_turn(candidates, 1).items() if label != "floor")
    steps_a_turn = min(_MOST_STEPS_A_TURN, max(1, round(_TURN_SECONDS / fastest)))
    times = in_turn(candidates, rounds or max(5, round(workload.rounds * min(1, 8 / num_nodes))), steps_a_turn)
    seconds = {label: statistics.median(values) for label, values in times.items()}
    with FlopCounterMode(display=False) as counter:  # of the loop: convolutions in groups are counted wrongly
        runs["loop"].stacks[0].executor.losses_and_grads(batch)
    return Line(
        name,
        num_nodes,
        steps_a_turn,
        seconds,
        ratios={base: _ratios(times, base) for base in (*peers, "floor")},
        share_of_peak=counter.get_total_flops() / seconds["vmap"] / peak_flops(batch[0].device),
        memory_ratio=memory_ratio(runs["vmap"], batch),
        chosen=runs["auto"].stacks[0].executor.name,
    )


def memory_ratio(ensemble: Ensemble, batch: list[Tensor]) -> float:
    """Return the most that the tensors of a step hold, to weights, gradients, optimizer and activations.

    Activations are what eager PyTorch keeps for a backward pass of the nodes that are computed at once.
    """
    run, stack = ensemble.only
    executor, replicas = stack.executor, run.cluster.replicas
    assert isinstance(executor, VmapExecutor)
    matrices = replicas.weights.nbytes + replicas.grads.nbytes + optimizer_bytes(run.strategy.optim)
    at_once = max(piece.rows.stop - piece.rows.start for piece in executor.pieces)
    activations = at_once * activation_bytes(executor, [t[0] for t in batch])
    return (matrices + max(step_moments(executor, batch))) / (matrices + activations)


def run_of(
    model: nn.Module, examples: list[Tensor], num_nodes: int, strategy: Strategy, options: dict[str, Any]
) -> Ensemble:
    """A run whose every epoch is one step on the same batch."""
    trainer = Trainer(model, TensorDataset(*examples))
    ensemble = trainer.prepare(
        strategy=strategy,
        num_nodes=num_nodes,
        max_steps=10_000,  # so long that "auto" may try everything
        batch_size=BATCH_SIZE,
        shuffle=False,
        progress=False,
        **options,
    )
    _, stack = ensemble.only
    (batch,) = itertools.islice(stack.batches, 1)
    stack.batches = itertools.repeat(batch)
    return ensemble
