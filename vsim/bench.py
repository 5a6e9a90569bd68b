"""`vsim bench`: the time of a step against K, beside K separate modules and beside its floor, and by strategy.

The floor of a step is the sum of what it cannot do without: its matrix products, convolutions, attention, norms,
activations, losses and its optimizer, each timed alone, over and over on the same data, in the same run. The operations
are those that the vectorized step calls; what is left above the floor is Python, autograd, copies and memory that has
to be fetched.

All candidates of a line take turns, in another order every round, so that a machine whose speed drifts is the same for
all. What is reported are medians, and medians of ratios.
"""

from __future__ import annotations

import copy
import itertools
import json
import platform
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from vsim.doctor import peak_flops
from vsim.executor import VmapExecutor
from vsim.loop import Run, steps
from vsim.memory import activation_bytes, optimizer_bytes, step_moments
from vsim.models import CNN, GPT, MLP
from vsim.strategy import Strategy
from vsim.trainer import Trainer

BATCH_SIZE = 16
NODES = (1, 4, 16, 64)
# Steps in which executor="auto" has settled, whatever it tries.
_SETTLING = 13
_STEPS_A_TURN = 10  # of a strategy, so that a sync every 10 steps takes part once
_CANDIDATES: dict[str, dict[str, Any]] = {
    "vmap": {"executor": "vmap"},
    "loop": {"executor": "loop"},
    "auto": {"executor": "auto"},
    "exact": {"executor": "vmap", "deterministic": True},
}
_COMPILED: dict[str, dict[str, Any]] = {"compiled": {"executor": "vmap", "compile": True}}


class _Residual(nn.Module):
    """Two convolutions with BatchNorm, and what went in added to what comes out."""

    def __init__(self, depth: int, next_depth: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(depth, next_depth, 3, stride, 1, bias=False),
            nn.BatchNorm2d(next_depth),
            nn.ReLU(),
            nn.Conv2d(next_depth, next_depth, 3, 1, 1, bias=False),
            nn.BatchNorm2d(next_depth),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(depth, next_depth, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


class SmallResNet(nn.Module):
    """The layers of ResNet-18 [He et al. 2016, arXiv:1512.03385] with a quarter of its channels, for 32×32 images."""

    def __init__(self, channels: Sequence[int] = (16, 32, 64, 128), num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels[0], 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels[0]),
            nn.ReLU(),
        ]
        depth = channels[0]
        for i, next_depth in enumerate(channels):
            layers += [_Residual(depth, next_depth, 1 if i == 0 else 2), _Residual(next_depth, next_depth, 1)]
            depth = next_depth
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(depth, num_classes))

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def _vectors(count: int) -> list[Tensor]:
    return [torch.randn(count, 64), torch.randint(0, 10, (count,))]


def _tokens(count: int) -> list[Tensor]:
    return [torch.randint(0, 97, (count, 64)), torch.randint(0, 97, (count, 64))]


def _images(side: int, depth: int) -> Callable[[int], list[Tensor]]:
    return lambda count: [torch.randn(count, depth, side, side), torch.randint(0, 10, (count,))]


@dataclass(frozen=True)
class Workload:
    """A model to be timed: what it is, how it is made, its examples, the most nodes, and the rounds of a line."""

    title: str
    make: Callable[[], nn.Module]
    examples: Callable[[int], list[Tensor]]
    most_nodes: int
    rounds: int


MODELS: dict[str, Workload] = {
    "mlp": Workload("MLP 64-128-128-10", lambda: MLP(seed=0), _vectors, 1024, 60),
    "cnn": Workload("CNN 8×8, 32-64 channels", lambda: CNN(seed=0), _images(8, 1), 64, 30),
    "gpt": Workload("GPT 2 × 128, 64 tokens", lambda: GPT(97, seed=0), _tokens, 16, 9),
    "resnet": Workload("ResNet-18-like, 32×32", SmallResNet, _images(32, 3), 16, 7),
    "gpt-large": Workload("GPT 6 × 256, 64 tokens", lambda: GPT(97, layers=6, width=256, seed=0), _tokens, 4, 3),
}


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
    strategy: Callable[[], Strategy] | None = None,
    compile: bool = False,
    rounds: int | None = None,
    progress: Callable[[Line], None] | None = None,
) -> list[Line]:
    """Time a step of every model at every K that it is meant for.

    Args:
        models: names among MODELS. nodes: values of K.
        strategy: makes the strategy; default: nodes that train alone, which is what separate modules do.
        compile: a compiled step takes its turns, too; compiling, some ten seconds a line, is not counted.
        rounds: of taking turns; default: by model. progress: gets every line when it is done.
    """
    lines = []
    for name in models:
        for num_nodes in nodes:
            workload = MODELS[name]
            if num_nodes > workload.most_nodes:
                continue
            line = _measure(name, workload, num_nodes, strategy or (lambda: Strategy(lr=1e-4)), compile, rounds)
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
    progress: Callable[[StrategyLine], None] | None = None,
) -> list[StrategyLine]:
    """Time ten steps of every strategy in turn, for every model at every K that it is meant for.

    Args:
        models: names among MODELS. nodes: values of K. strategies: label → what makes it; ratios are to the first.
        rounds: of taking turns; default: by model. progress: gets every line when it is done.
    """
    lines = []
    for name in models:
        workload = MODELS[name]
        for num_nodes in (k for k in nodes if k <= workload.most_nodes):
            model, examples = _model_and_examples(workload, num_nodes)
            turns = rounds or max(3, round(workload.rounds / 3 * min(1, 8 / num_nodes)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of DeMo, on models with small tensors
                runs = {
                    label: _run(model, examples, num_nodes, make(), {"executor": "vmap"})
                    for label, make in strategies.items()
                }
            times = _in_turn({label: partial(_steps_of, steps(run)) for label, run in runs.items()}, turns)
            line = StrategyLine(name, num_nodes)
            line.seconds = {label: statistics.median(t) / _STEPS_A_TURN for label, t in times.items()}
            line.ratios = _ratios(times, next(iter(times)))
            for label, run in runs.items():
                replicas = run.cluster.replicas
                held = replicas.weights.nbytes + replicas.grads.nbytes
                line.held_bytes[label] = held + optimizer_bytes(run.strategy.optim)
            lines.append(line)
            if progress is not None:
                progress(line)
    return lines


def _steps_of(run: Iterator[int]) -> None:
    for _ in range(_STEPS_A_TURN):
        next(run)


def _in_turn(turns: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
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


def _model_and_examples(workload: Workload, num_nodes: int) -> tuple[nn.Module, list[Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return workload.make().train(), workload.examples(num_nodes * BATCH_SIZE)


def _measure(
    name: str, workload: Workload, num_nodes: int, strategy: Callable[[], Strategy], compile: bool, rounds: int | None
) -> Line:
    model, examples = _model_and_examples(workload, num_nodes)
    batch = [t.unflatten(0, (num_nodes, BATCH_SIZE)) for t in examples]
    rounds = rounds or max(3, round(workload.rounds * min(1, 8 / num_nodes)))
    turns: dict[str, Callable[[], object]] = {"separate": _separate(model, batch)}
    runs = {}
    for label, options in (_CANDIDATES | _COMPILED if compile else _CANDIDATES).items():
        if label == "exact" and batch[0].device.type != "cpu":
            continue
        runs[label] = _run(model, examples, num_nodes, strategy(), options)
        turns[label] = partial(next, steps(runs[label]))
    for _ in range(_SETTLING):  # executor="auto" makes its trials
        turns["auto"]()
    turns["floor"] = _Floor(_run(model, examples, num_nodes, strategy(), _CANDIDATES["vmap"]))
    times = _in_turn(turns, rounds)
    line = Line(name, num_nodes)
    to_floor = _ratios(times, "floor")
    line.floor_ratios = {label: to_floor[label] for label in ("vmap", "compiled") if label in to_floor}
    line.floor_seconds = statistics.median(times.pop("floor"))
    line.seconds = {label: statistics.median(values) for label, values in times.items()}
    line.ratios = _ratios(times, "separate")
    line.chosen = runs["auto"].executor.name
    with FlopCounterMode(display=False) as counter:  # of the loop: convolutions in groups are counted wrongly
        runs["loop"].executor.losses_and_grads(batch)
    flops = counter.get_total_flops()
    line.share_of_peak = flops / line.seconds["vmap"] / peak_flops(batch[0].device)
    line.memory_ratio = _memory_ratio(runs["vmap"], batch)
    return line


def _memory_ratio(run: Run, batch: list[Tensor]) -> float:
    """Return the most that the tensors of a step hold, to weights, gradients, optimizer and activations.

    Activations are what eager PyTorch keeps for a backward pass of the nodes that are computed at once.
    """
    executor, replicas = run.executor, run.cluster.replicas
    assert isinstance(executor, VmapExecutor)
    matrices = replicas.weights.nbytes + replicas.grads.nbytes + optimizer_bytes(run.strategy.optim)
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


def _run(model: nn.Module, examples: list[Tensor], num_nodes: int, strategy: Strategy, options: dict[str, Any]) -> Run:
    """A run whose every epoch is one step on the same batch."""
    trainer = Trainer(model, TensorDataset(*examples))
    run = trainer.set_up(
        strategy=strategy,
        num_nodes=num_nodes,
        max_steps=10_000,  # so long that "auto" may try everything
        batch_size=BATCH_SIZE,
        shuffle=False,
        progress=False,
        **options,
    )
    assert run is not None
    (batch,) = itertools.islice(run.batches, 1)
    run.batches = itertools.repeat(batch)
    return run


# What a step cannot do without. What only moves data, adds or allocates is not counted.
_FLOOR = frozenset(
    {
        *("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"),
        *(f"_scaled_dot_product_flash_attention{on}{to}" for on in ("", "_for_cpu") for to in ("", "_backward")),
        *(f"_scaled_dot_product_efficient_attention{to}" for to in ("", "_backward")),
        *("gelu", "gelu_backward", "native_layer_norm", "native_layer_norm_backward"),
        *("native_batch_norm", "native_batch_norm_backward"),
        *("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "_fused_adamw_"),
    }
)


class _Calls(TorchDispatchMode):
    """Counts the operations of a step that belong to its floor, and keeps the arguments of one call of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.samples: dict[Any, Callable[[], Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _FLOOR:
            leaves, spec = tree_flatten((args, kwargs))
            kinds = [(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else repr(t) for t in leaves]
            key = (func, tuple(kinds), str(spec))
            self.counts[key] += 1
            self.samples.setdefault(key, partial(func, *args, **kwargs))
        return func(*args, **kwargs)


class _Floor:
    """What a step cannot do without, to be timed: every operation by itself, as often as the step calls it."""

    def __init__(self, run: Run) -> None:
        with _Calls() as calls:
            run.executor.losses_and_grads(next(run.batches))
            run.strategy.take_step()
        self.calls = [(calls.samples[kind], count) for kind, count in calls.counts.items()]

    @torch.no_grad()
    def __call__(self) -> float:
        """Return its seconds."""
        seconds = 0.0
        for call, count in self.calls:
            call()  # what it reads is in the caches
            started = time.perf_counter()
            for _ in range(count):
                call()
            seconds += time.perf_counter() - started
        return seconds


def table(lines: Sequence[Line]) -> str:
    """Return the lines as a table: milliseconds a step, ratios to K separate modules, to the floor, and of memory."""
    compiled = ["compiled"] if any("compiled" in line.seconds for line in lines) else []
    timed, compared = ["separate", "vmap", "loop", "exact", *compiled], ["vmap", "exact", "auto", *compiled]
    to_floor = ["vmap", *compiled]
    rows = [
        [
            line.model,
            line.num_nodes,
            *(f"{1e3 * line.seconds[c]:.3g}" if c in line.seconds else "" for c in timed),
            *(f"{line.ratios[c]:.2f}" if c in line.ratios else "" for c in compared),
            line.chosen,
            *(f"{line.floor_ratios[c]:.2f}" if c in line.floor_ratios else "" for c in to_floor),
            f"{line.share_of_peak:.0%}",
            f"{line.memory_ratio:.2f}",
        ]
        for line in lines
    ]
    header = ["model", "K", "K modules ms", *(f"{c} ms" for c in timed[1:]), *(f"{c} ×" for c in compared), "auto is"]
    header += [*(f"{c} / floor" for c in to_floor), "of peak", "memory"]
    return tabulate(rows, header, disable_numparse=True, stralign="right")


def strategy_table(lines: Sequence[StrategyLine]) -> str:
    """Return the lines as a table, one row a model, K and strategy."""
    rows = [
        [
            line.model,
            line.num_nodes,
            label,
            f"{1e3 * seconds:.3g}",
            f"{line.ratios[label]:.2f}",
            f"{line.held_bytes[label] / 1e6:.3g}",
        ]
        for line in lines
        for label, seconds in line.seconds.items()
    ]
    first = next(iter(lines[0].seconds)) if lines else ""
    return tabulate(
        rows,
        ["model", "K", "strategy", "ms/step", f"× {first}", "weights, gradients, optimizer MB"],
        disable_numparse=True,
        colalign=("left", "right", "left", "right", "right", "right") if rows else None,
    )


def figure(lines: Sequence[Line]) -> Figure:
    """Draw the time of a node's step against K, beside that of a separate module."""
    models = list(dict.fromkeys(line.model for line in lines))
    with matplotlib.rc_context({"font.size": 9}):
        drawing = Figure(figsize=(3.1 * len(models), 3.0), layout="constrained")
        for ax, model in zip(drawing.subplots(1, len(models), squeeze=False)[0], models, strict=True):
            own = [line for line in lines if line.model == model]
            nodes = [line.num_nodes for line in own]
            for label, style in (("separate", "k:"), ("loop", "C1--"), ("vmap", "C0-"), ("compiled", "C2-")):
                if any(label not in line.seconds for line in own):
                    continue
                a_node = [1e3 * line.seconds[label] / line.num_nodes for line in own]
                name = "separate modules" if label == "separate" else label
                ax.plot(nodes, a_node, style, marker="o", markersize=3, label=name)
            floor = [1e3 * line.floor_seconds / line.num_nodes for line in own]
            ax.fill_between(nodes, floor, color="0.9", label="floor", linewidth=0)
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_locator(FixedLocator(nodes))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.set(title=MODELS[model].title, xlabel="nodes", ylim=(0, None))
        drawing.axes[0].set_ylabel("ms a node and step")
        drawing.axes[0].legend(frameon=False)
    return drawing


def save(lines: Sequence[Line], folder: Path, by_strategy: Sequence[StrategyLine] = ()) -> list[Path]:
    """Write bench.json and bench.png, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.platform(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "lines": [asdict(line) for line in lines],
        "by_strategy": [asdict(line) for line in by_strategy],
    }
    paths = [folder / "bench.json", folder / "bench.png"]
    paths[0].write_text(json.dumps(record, indent=1), encoding="utf-8")
    figure(lines).savefig(paths[1], dpi=200)
    return paths
