"""The time of a step against K: vsim's executors, K separate modules in a loop, and other ways to compute the same.

    python tests/benchmarks/bench_step.py --models mlp cnn gpt resnet --nodes 4 16 64 [--compile] [--device cuda]

Candidates:

- `separate`: K modules with an optimizer each, in a loop, in plain PyTorch.
- `vmap`, `loop`, `auto`, `exact` (deterministic: on a CPU, the loop), `exact, fused` (with torch's fused AdamW), and
  with --compile `compiled`: `Trainer.fit` of nodes that train alone. Only the public interface is used, so that the
  script measures any version of vsim that is installed: the seconds of a step are differences of the history's column.
- `floor`: the products, convolutions, attention, norms, activations, losses and optimizer of the vectorized step, each
  timed alone, over and over on the same data. The rest of a step's time is Python, autograd, copies and
  fetching memory. A compiler, which fuses operations, can get below.
- `bare`, with --compile: the vmapped gradients compiled by torch.compile, one fused AdamW over the stacked weights, and
  the losses read. A researcher who needs no strategy, record or checkpoint would write that.
- `jax`, with --jax (pip install jax): the same model, batch and AdamW in JAX, under its own jit.

All candidates compute on one device, by default the best of this machine. With --autocast, `separate` and vsim compute
in bfloat16. All candidates of a line take turns, in another order every round, so that a machine whose speed drifts is
the same for all. The report has medians of seconds a step, and medians of ratios to `separate` round by round. With
--strategies, ten steps of every strategy are timed in turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.models import CNN, GPT, MLP
from vsim.strategy import OptimSpec, Strategy

BATCH_SIZE, LR = 16, 1e-4
MOST_APART = 1e-4  # of losses, in nats; roundings of float32 differ by 1e-6
WARM_UP = 3  # steps of a fit that are not counted
EPOCH = 8  # steps in an epoch; the same examples are dealt again and again
VMAP = {"executor": "vmap"}
EXECUTORS: dict[str, dict[str, Any]] = {
    "vmap": VMAP,
    "loop": {"executor": "loop"},
    "auto": {"executor": "auto"},
    "exact": {"deterministic": True},
    "exact, fused": {"deterministic": True},
    "compiled": {"executor": "vmap", "compile": True},
}
# What a step cannot do without. What only moves data, adds or allocates is not counted.
FLOOR = frozenset(
    {
        *("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"),
        *(f"_scaled_dot_product_flash_attention{on}{to}" for on in ("", "_for_cpu") for to in ("", "_backward")),
        *(f"_scaled_dot_product_efficient_attention{to}" for to in ("", "_backward")),
        *("gelu", "gelu_backward", "native_layer_norm", "native_layer_norm_backward"),
        *("native_batch_norm", "native_batch_norm_backward"),
        *("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "_fused_adamw_"),
    }
)

_CPU = torch.device("cpu")

Step = Callable[[], list[float]]  # takes a step and returns the loss of every node before it


# Models


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and the input added to their output."""

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

    def __init__(self) -> None:
        super().__init__()
        depth = 16
        layers: list[nn.Module] = [nn.Conv2d(3, depth, 3, 1, 1, bias=False), nn.BatchNorm2d(depth), nn.ReLU()]
        for i, next_depth in enumerate((16, 32, 64, 128)):
            layers += [Residual(depth, next_depth, 1 if i == 0 else 2), Residual(next_depth, next_depth, 1)]
            depth = next_depth
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(depth, 10))

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def vectors(count: int) -> list[Tensor]:
    return [torch.randn(count, 64), torch.randint(0, 10, (count,))]


def tokens(count: int) -> list[Tensor]:
    return [torch.randint(0, 97, (count, 64)), torch.randint(0, 97, (count, 64))]


def images(side: int, depth: int) -> Callable[[int], list[Tensor]]:
    return lambda count: [torch.randn(count, depth, side, side), torch.randint(0, 10, (count,))]


class Workload(NamedTuple):
    """A model: how it and its examples are made, the steps that a turn of a fit takes, and the rounds of a line."""

    make: Callable[[], nn.Module]
    examples: Callable[[int], list[Tensor]]
    steps: int
    rounds: int


MODELS = {
    "mlp": Workload(lambda: MLP(seed=0), vectors, 100, 15),
    "cnn": Workload(lambda: CNN(seed=0), images(8, 1), 30, 9),
    "gpt": Workload(lambda: GPT(97, seed=0), tokens, 6, 7),
    "resnet": Workload(SmallResNet, images(32, 3), 4, 5),
    "gpt-10m": Workload(lambda: GPT(97, layers=6, width=368, seed=0), tokens, 2, 3),
    "gpt-large": Workload(lambda: GPT(97, layers=6, width=256, seed=0), tokens, 3, 3),
}


def model_and_examples(name: str, num_nodes: int) -> tuple[nn.Module, list[Tensor]]:
    """Return the model and EPOCH * BATCH_SIZE examples for every node, always the same ones."""
    workload = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return workload.make().train(), workload.examples(num_nodes * BATCH_SIZE * EPOCH)


# Peers


def separate(model: nn.Module, batch: Sequence[Tensor], autocast: bool = False) -> Step:
    """K modules with an optimizer each, as torch has it by default."""
    device = batch[0].device
    nodes = [copy.deepcopy(model).to(device) for _ in batch[0]]
    optimizers = [torch.optim.AdamW(node.parameters(), lr=LR) for node in nodes]

    def step() -> list[float]:
        losses = []
        for node, optimizer, *own in zip(nodes, optimizers, *batch, strict=True):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = node(own)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return step


def bare(model: nn.Module, batch: Sequence[Tensor]) -> Step:
    """The vmapped gradients of stacked weights, compiled, and one fused optimizer over the stacked weights."""

    def stacked(tensor: Tensor) -> Tensor:
        return tensor.detach().to(batch[0].device).expand(len(batch[0]), *tensor.shape).clone()

    weights = {name: stacked(parameter) for name, parameter in model.named_parameters()}  # (K, *shape)
    buffers = {name: stacked(buffer) for name, buffer in model.named_buffers()}
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, fused=True)

    def loss(own: dict[str, Tensor], own_buffers: dict[str, Tensor], own_batch: Sequence[Tensor]) -> Tensor:
        return functional_call(model, (own, own_buffers), (own_batch,))

    gradients = torch.compile(vmap(grad_and_value(loss)), dynamic=False, fullgraph=True)
    # The limit on recompilations also counts the recompilations of earlier lines.
    with torch.no_grad(), warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=256):
        warnings.simplefilter("ignore")  # attention has no vmapped form
        gradients(weights, buffers, batch)

    @torch.no_grad()
    def step() -> list[float]:
        grads, losses = gradients(weights, buffers, batch)
        for name, weight in weights.items():
            weight.grad = grads[name]
        optimizer.step()
        return losses.tolist()

    return step


def check_agreement(peers: Mapping[str, Step]) -> None:
    """Take two steps with every peer; the second tells whether gradients and optimizers are the same, too.

    Raises:
        RuntimeError: a node's losses differ from the first peer's by more than rounding.
    """
    (first, step), *others = peers.items()
    for number in (1, 2):
        expected = torch.tensor(step())
        for name, other in others:
            apart = (torch.tensor(other()) - expected).abs().max().item()
            if not apart <= MOST_APART:
                raise RuntimeError(
                    f"{name} cannot be compared: at step {number} its losses differ by up to {apart:.2g} from {first}'s"
                )


# vsim


def fitted(
    model: nn.Module, examples: Sequence[Tensor], num_nodes: int, strategy: Strategy, max_steps: int, **options: Any
) -> Trainer:
    trainer = Trainer(model, TensorDataset(*examples))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeMo on small tensors; few steps for an interval; torch itself, compiling
        trainer.fit(
            strategy=strategy,
            num_nodes=num_nodes,
            max_steps=max_steps,
            batch_size=BATCH_SIZE,
            shuffle=False,
            progress=False,
            **options,
        )
    return trainer


def fit_turn(make: Callable[[int], Trainer], steps: int, device: torch.device = _CPU) -> float:
    """Return the seconds of a step, of `steps` steps of a fit after its first ones.

    On the CPU, the median; elsewhere the mean, because the device may be behind the host when a single step ends.
    """
    seconds = torch.tensor(make(WARM_UP + steps).history["seconds"]).diff()[WARM_UP:]
    return (seconds.median() if device.type == "cpu" else seconds.mean()).item()


def synchronize(device: torch.device) -> None:
    """Wait until the device has computed all that was issued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":  # there is one
        getattr(torch, device.type).synchronize()


class Calls(TorchDispatchMode):
    """Counts the operations of a step that belong to its floor, and keeps the arguments of one call of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.samples: dict[Any, Callable[[], Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in FLOOR:
            leaves, spec = tree_flatten((args, kwargs))
            kinds = [(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else repr(t) for t in leaves]
            key = (func, tuple(kinds), str(spec))
            self.counts[key] += 1
            self.samples.setdefault(key, partial(func, *args, **kwargs))
        return func(*args, **kwargs)


def floor(
    model: nn.Module, examples: Sequence[Tensor], num_nodes: int, device: torch.device = _CPU, **options: Any
) -> Callable[[], float]:
    """Return what times the operations of the vectorized step: each by itself, as often as the step calls it."""
    calls = Calls()

    def record_the_last_step(step: int, loss: float) -> None:
        if step == WARM_UP:
            calls.__enter__()

    trainer = partial(fitted, model, examples, num_nodes, Strategy(inner_optim=OptimSpec("adamw", lr=LR)))
    try:
        trainer(WARM_UP + 1, train_loss_hook=record_the_last_step, device=device, **VMAP, **options)
    finally:
        calls.__exit__(None, None, None)

    @torch.no_grad()
    def seconds() -> float:
        total = 0.0
        for key, count in calls.counts.items():
            call = calls.samples[key]
            call()  # what it reads is in the caches
            synchronize(device)
            started = time.perf_counter()
            for _ in range(count):
                call()
            synchronize(device)
            total += time.perf_counter() - started
        return total

    return seconds


# Measuring


def step_turn(step: Step, steps: int) -> float:
    """Return the median seconds of `steps` steps, after as many warm-up steps as a fit has."""
    times = []
    for _ in range(WARM_UP + steps):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])


def in_turn(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return label → seconds of every round. A first round is a warm-up; every round has an order of its own."""
    times: dict[str, list[float]] = {label: [] for label in candidates}
    orders = random.Random(0)
    for round_number in range(rounds + 1):
        for label in orders.sample(list(candidates), len(candidates)):
            seconds = candidates[label]()
            if round_number:
                times[label].append(seconds)
    return times


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """Return label → the median over the rounds of its time to that of `base`."""
    pairs = {label: zip(values, times[base], strict=True) for label, values in times.items()}
    return {label: statistics.median(own / theirs for own, theirs in both) for label, both in pairs.items()}


def measure(
    name: str,
    num_nodes: int,
    compile: bool,
    jax: bool,
    rounds: int | None,
    device: torch.device = _CPU,
    autocast: bool = False,
    only: Sequence[str] = (),
    steps: int | None = None,
) -> dict[str, Any]:
    """Return seconds and ratios of one model and K.

    Args:
        only: the candidates to measure; default: all. steps: of a turn; default: by model.
    """
    workload = MODELS[name]
    steps = steps or workload.steps

    def wanted(label: str) -> bool:
        return not only or label in only

    model, examples = model_and_examples(name, num_nodes)
    batch = [t[: num_nodes * BATCH_SIZE].unflatten(0, (num_nodes, BATCH_SIZE)).to(device) for t in examples]
    peers: dict[str, Step] = {}
    if wanted("separate"):
        peers["separate"] = separate(model, batch, autocast)
    if compile and wanted("bare") and not autocast:
        peers["bare"] = bare(model, batch)
    if jax:
        from jax_step import jax_step

        in_jax = jax_step(model, batch, LR)
        if in_jax is not None:
            peers["jax"] = in_jax
    if len(peers) > 1:
        check_agreement(peers)
    candidates: dict[str, Callable[[], float]] = {
        label: partial(step_turn, step, steps) for label, step in peers.items()
    }
    for label, options in EXECUTORS.items():
        is_exact = "deterministic" in options
        if wanted(label) and (label != "compiled" or compile) and not (is_exact and autocast):
            fused = {"fused": True} if label == "exact, fused" else {}  # without deterministic vsim takes it anyway
            strategy = Strategy(inner_optim=OptimSpec("adamw", lr=LR, **fused))
            own = {**options, "device": device, "autocast": autocast}
            make = partial(fitted, model, examples, num_nodes, strategy, **own)
            candidates[label] = partial(fit_turn, make, steps, device)
    if wanted("floor"):
        candidates["floor"] = floor(model, examples, num_nodes, device, autocast=autocast)
    times = in_turn(candidates, rounds or workload.rounds)
    seconds = {label: statistics.median(values) for label, values in times.items()}
    return {
        "model": name,
        "num_nodes": num_nodes,
        "device": str(device),
        "autocast": autocast,
        "seconds": seconds,
        "ratios": ratios(times, "separate") if "separate" in times else {},
    }


def measure_strategies(
    name: str, num_nodes: int, texts: Sequence[str], rounds: int | None, device: torch.device = _CPU
) -> dict[str, Any]:
    """Return the seconds of a step by strategy, in the mean of ten steps, and the ratios to the first strategy."""
    from vsim.cli import parse_strategy

    model, examples = model_and_examples(name, num_nodes)

    def turn(text: str) -> float:
        strategy = parse_strategy(text, LR)
        trainer = fitted(model, examples, num_nodes, strategy, WARM_UP + 20, device=device, **VMAP)
        seconds = trainer.history["seconds"]
        return float(seconds[-1] - seconds[-11]) / 10  # with a sync, if there is one every ten steps

    times = in_turn({text: partial(turn, text) for text in texts}, rounds or MODELS[name].rounds)
    seconds = {label: statistics.median(values) for label, values in times.items()}
    return {"model": name, "num_nodes": num_nodes, "seconds": seconds, "ratios": ratios(times, texts[0])}


def table(lines: Sequence[Mapping[str, Any]], base: str) -> str:
    """Return milliseconds a step, and the ratio to `base` in brackets."""
    labels = list(dict.fromkeys(label for line in lines for label in line["seconds"]))
    rows = [["model", "K", *labels]]
    for line in lines:
        ratio = {k: f" ({r:.2f})" for k, r in line["ratios"].items()}
        cells = {k: f"{1e3 * s:.3g}{ratio.get(k, '')}" for k, s in line["seconds"].items()}
        rows.append([line["model"], str(line["num_nodes"]), *(cells.get(label, "") for label in labels)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return f"ms a step (ratio to {base})\n{text}"


# The lines of the figure: name of a candidate → label, number of a colour of the palette, dash.
_LINES = {
    "separate": ("K modules", 0, ":"),
    "auto": ("auto", 4, "-"),
    "vmap": ("vmap", 2, "-"),
    "compiled": ("compiled", 3, "-"),
    "bare": ("bare", 1, "--"),
    "jax": ("JAX", 6, "--"),
}
_TITLES = {"mlp": "MLP", "cnn": "CNN", "gpt": "GPT", "resnet": "ResNet-18-like"}


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw milliseconds per node and step against K, a panel a model, with the floor as an area."""
    from vsim.figures.legends import LEGEND
    from vsim.figures.looks import COLOURS, MARKERS
    from vsim.figures.paper import new_figure, plain_ticks, save
    from vsim.figures.style import styled

    names = list(dict.fromkeys(line["model"] for line in lines))
    figure = new_figure(1.7 * len(names), 2.6)
    for ax, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = [line for line in lines if line["model"] == name]

        def times(label: str, own: Sequence[Mapping[str, Any]] = own) -> tuple[list[int], list[float]]:
            known = [line for line in own if label in line["seconds"]]
            return [one["num_nodes"] for one in known], [
                1e3 * one["seconds"][label] / one["num_nodes"] for one in known
            ]

        for i, (label, (said, colour, dash)) in enumerate(_LINES.items()):
            look: Any = {"color": COLOURS[colour], "linestyle": dash, "marker": MARKERS[i], "markerfacecolor": "white"}
            ax.plot(*times(label), label=said, linewidth=1.3, markersize=4, **look)
        ax.set(xscale="log", yscale="log", xlabel="nodes", title=_TITLES.get(name, name))
        ax.title.set_fontsize(8.5)
        x, floors = times("floor")
        if floors:
            ax.fill_between(x, floors, ax.get_ylim()[0] / 2, color="0.9", label="floor", linewidth=0)
            ax.set_ylim(0.8 * min(floors), None)
        styled(ax)
        plain_ticks(ax.yaxis)
        ax.set_xticks(x or times("separate")[0], [str(k) for k in x or times("separate")[0]])
        ax.minorticks_off()
    figure.axes[0].set_ylabel("ms per node and step")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    measured = [
        (handle, label)
        for handle, label in zip(handles, labels, strict=True)
        if label == "floor" or len(handle.get_xdata())
    ]
    figure.legend(*zip(*measured, strict=True), loc="outside lower center", ncols=len(measured), **LEGEND)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["mlp", "cnn", "gpt", "resnet"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[4, 16, 64], metavar="K")
    parser.add_argument("--strategies", nargs="*", default=[], metavar="NAME", help="such as allreduce diloco:H=10")
    parser.add_argument("--compile", action="store_true", help="measure compiled and bare, too")
    parser.add_argument("--jax", action="store_true", help="measure JAX, too, except with resnet")
    parser.add_argument("--device", help="such as cuda or mps (default: the best of this machine)")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16, without exact and bare")
    parser.add_argument("--only", nargs="+", default=[], metavar="CANDIDATE", help="leave out all others")
    parser.add_argument("--rounds", type=int, help="turns that every candidate takes (default: by model)")
    parser.add_argument("--steps", type=int, help="steps of a turn (default: by model)")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers, written after every line")
    parser.add_argument("--figure", type=Path, help="a figure of the numbers, for a page")
    options = parser.parse_args(argv)
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(options.device or best)
    versions = {package: version(package) for package in ("torch", *(["jax"] if options.jax else []))}
    record: dict[str, Any] = {"versions": versions, "threads": torch.get_num_threads(), "machine": platform.platform()}
    record |= {"lines": [], "by_strategy": []}
    lines, by_strategy = record["lines"], record["by_strategy"]
    how = (options.compile, options.jax, options.rounds, device, options.autocast, options.only, options.steps)
    for name in options.models:
        for num_nodes in options.nodes:
            lines.append(measure(name, num_nodes, *how))
            print(table(lines[-1:], "separate"), flush=True)
            if options.strategies:
                by_strategy.append(measure_strategies(name, num_nodes, options.strategies, options.rounds, device))
            if options.out is not None:
                options.out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"\n{table(lines, 'separate')}\n")
    if by_strategy:
        print(f"{table(by_strategy, options.strategies[0])}\n")
    if options.figure is not None:
        draw(lines, options.figure)
    print(f"{device}; {versions}; {torch.get_num_threads()} threads; {torch.backends.cpu.get_cpu_capability()}")


if __name__ == "__main__":
    main()
