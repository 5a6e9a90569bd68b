"""The command line: `vsim compare`, `sweep`, `show`, `watch`, `report`, `time` and `verify`.

A command is a function: its signature and docstring are its options and its help. `@app.command` adds one. Options that
commands share are the dataclasses of their groups.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import nn
from tyro.conf import arg
from tyro.extras import SubcommandApp

from vsim import strategy as strategies_of_vsim
from vsim.arguments import naming, one_of
from vsim.cluster.optim import OPTIMIZERS, OptimSpec
from vsim.cluster.participation import (
    DayNight,
    Deadline,
    Dropout,
    DropSlowest,
    OverCommit,
    Participation,
    Sample,
    Trace,
)
from vsim.compare import compare as compare_strategies
from vsim.data import TextDataset, digits, docs_text, fashion_mnist, mnist, mnist1d, partition, text_file
from vsim.models import CNN, GPT, MLP
from vsim.network import Compute, Network
from vsim.network.timeline import duration
from vsim.price import price
from vsim.process import CollectiveFailure, ForkServerFailure, NodeFailure, under_torchrun
from vsim.records.comparison import Comparison
from vsim.records.loggers import CSVLogger, Logger, TensorBoardLogger
from vsim.records.report.page import report as page_of
from vsim.records.sweep import Sweep
from vsim.records.tables import text_table
from vsim.saved import files_at, read_comparisons
from vsim.strategy import (
    COMPARED,
    PRESETS,
    RULES,
    STRATEGIES,
    Algorithm,
    Attack,
    Compressor,
    IndexSelector,
    RandomGraph,
    When,
    centered_clip,
    clip,
    compress,
)
from vsim.sweep import sweep as sweep_settings
from vsim.verify import verify as verify_strategy
from vsim.version import __version__
from vsim.watch import Watch
from vsim.writing import check_output

# For each built-in model what trains it well in some hundred steps: AdamW's learning rate, examples a node and step.
LEARNING_RATES = {"gpt": 6e-4, "mlp": 2e-3, "cnn": 2e-3}
BATCH_SIZES = {"gpt": 8, "mlp": 16, "cnn": 16}
GPT_SHAPE = {"block_size": 32, "layers": 2, "width": 64, "heads": 4}
WINDOWS = 256  # of text, to validate on
# The figures of a command's result, next to its data.
_FIGURES = {"comparison": ("comparison.png", "winners.png"), "sweep": ("sweep.png", "heatmap.png")}
PARTICIPATION: dict[str, type[Participation]] = {
    cls.__name__.lower(): cls for cls in (Dropout, DayNight, Trace, Deadline, DropSlowest, OverCommit, Sample)
}
# What a value may be besides a literal and text, with its arguments: topk(0.01), adamw(weight_decay=0.1).
CALLABLES: dict[str, Callable[..., Any]] = {
    **PARTICIPATION,
    **{name: partial(OptimSpec, name) for name in OPTIMIZERS},
    **{
        name.lower(): cls
        for name, cls in vars(strategies_of_vsim).items()
        if isinstance(cls, type)
        and issubclass(cls, Compressor | IndexSelector | When | Attack | RandomGraph)
        and cls not in (Compressor, IndexSelector, When)
    },
    **RULES,
    "centered_clip": centered_clip,
    "clip": clip,
    "compress": compress,
}

app = SubcommandApp()
_COMMAND: ContextVar[str] = ContextVar("command")  # as it was typed, for the records


def _optional(metavar: str | None = None, default: str = "") -> Any:
    """Return how --help shows an option that may be left out: its value, and what happens without it."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


_Names = Annotated[tuple[str, ...], arg(metavar="NAME …", help_behavior_hint=f"(default: {' '.join(COMPARED)})")]
_OF_PROCESSES = NodeFailure, CollectiveFailure, ForkServerFailure
_DATA, _SEED = tyro.conf.create_mutex_group(required=False), tyro.conf.create_mutex_group(required=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(f"vsim {__version__}")
        return 0
    command = argv[0] if argv else ""
    if under_torchrun():
        print("vsim: torchrun starts scripts that call vsim.compare or Trainer.fit, not this command", file=sys.stderr)
        return 2
    _COMMAND.set(shlex.join(["vsim", *argv]))
    try:
        _reject_repeated(argv)
        return app.cli(
            prog="vsim",
            description="Simulate distributed training of K nodes in one process, and count every byte they would "
            f"send. Version {__version__} (--version).",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            args=argv,
        )
    except SystemExit as end:
        if command in ("compare", "sweep", "time", "verify") and not end.code:
            print(_about_strategies())
        raise
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError, MemoryError, *_OF_PROCESSES) as error:
        print(f"vsim {command}: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"vsim {command}: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130


@dataclass
class Problem:
    """data and model"""

    data: Annotated[Literal["docs", "digits", "mnist1d", "mnist", "fashion_mnist"], _DATA] = "docs"
    """docs: Python's manual, always there; mnist1d: strokes, made on the spot"""
    text: Annotated[str | None, _DATA, _optional("FILE")] = None
    """characters of a text file"""
    mnist_folder: Annotated[str | None, _optional("DIR")] = None
    """where --data mnist or fashion_mnist finds its four files; fashion_mnist: where Debian puts them"""
    partition: Annotated[str | None, _optional("KIND", "all nodes share them")] = None
    """how to deal the examples to the nodes, such as dirichlet:alpha=0.1"""
    model: Annotated[
        Literal["gpt", "mlp", "cnn"] | None, _optional(default="gpt for text, mlp for mnist1d, cnn for images")
    ] = None
    """what to train"""
    nodes: Annotated[int | None, _optional("K", "4")] = None
    """number of nodes"""
    steps: Annotated[int | None, _optional("T", "160; with --budget as many as it is enough for")] = None
    """optimizer steps"""
    batch_size: Annotated[int | None, _optional(default="by model")] = None
    """examples per node and step"""
    lr: Annotated[float | None, _optional(default="by model")] = None
    """inner learning rate of AdamW"""
    seed: Annotated[int, _SEED] = 42
    """of everything random"""
    quiet: bool = False
    """show no progress"""

    @property
    def num_nodes(self) -> int:
        return 4 if self.nodes is None else self.nodes

    @property
    def is_text(self) -> bool:
        return self.text is not None or self.data == "docs"

    @property
    def kind(self) -> str:
        """The kind of model."""
        fitting = ["gpt"] if self.is_text else ["mlp"] if self.data == "mnist1d" else ["cnn", "mlp"]
        kind = self.model or fitting[0]
        if kind not in fitting:
            raise ValueError(f"--model {kind} does not fit the data; --model may be {' or '.join(fitting)} here")
        return kind

    @property
    def examples_per_step(self) -> int:
        return BATCH_SIZES[self.kind] if self.batch_size is None else self.batch_size

    @property
    def num_steps(self) -> int:
        return 160 if self.steps is None else self.steps

    def title(self, budget: Sequence[str]) -> str:
        """Return what a figure shows, within a budget if there is one."""
        data = Path(self.text).name if self.text is not None else self.data
        data += f" ({self.partition})" if self.partition else ""
        nodes = f"{self.num_nodes} nodes × batch {self.examples_per_step}"
        length = f"within {', '.join(budget)}" if budget else f"{self.num_steps} steps"
        return f"{self.kind.upper()} on {data}, {nodes}, {length}"

    def datasets(self) -> tuple[Any, Any]:
        """Return the training and the validation data."""
        if self.mnist_folder is not None and self.data not in ("mnist", "fashion_mnist"):
            raise ValueError("--mnist-folder has no effect without --data mnist or fashion_mnist")
        if self.text is not None:
            return text_file(self.text, block_size=GPT_SHAPE["block_size"])
        if self.data == "digits":
            return digits()
        if self.data == "mnist1d":
            return mnist1d()
        if self.data == "docs":
            return docs_text(block_size=GPT_SHAPE["block_size"])
        if self.data == "fashion_mnist":
            return fashion_mnist(self.mnist_folder)
        if self.mnist_folder is None:
            raise ValueError("--data mnist needs --mnist-folder DIR, the folder with the four IDX files")
        return mnist(self.mnist_folder)

    def dealt(self, train: Any, attending: Participation | None = None) -> Any:
        """Return the training data as --partition deals them to the nodes."""
        if self.partition is None:
            return train
        kind, _, tail = self.partition.partition(":")
        clients = self.num_nodes if attending is None else attending.population(self.num_nodes)
        return partition(train, clients, kind, **_arguments(tail, f"--partition {self.partition}"))

    def new_model(self, train: Any, seed: int) -> nn.Module:
        if isinstance(train, TextDataset):
            return GPT(train.vocabulary.size, seed=seed, **GPT_SHAPE)
        images = train.tensors[0]
        if self.kind == "mlp":
            return MLP(images[0].numel(), seed=seed)
        return CNN(tuple(images.shape[1:]), seed=seed)

    def learning_rate(self, named: Iterable[str]) -> float:
        """Return --lr, or that of the model; `named` are strategies, none of which may also have its own."""
        names = [text.partition(":")[0] for text in named]
        own = [name for name in names if "lr" in (STRATEGIES | PRESETS).get(name, (None, {}))[1]]
        if own and self.lr is not None:
            raise ValueError(f"--lr has no effect on {own[0]}, which has its own: give {own[0]}:lr={self.lr:g}")
        return LEARNING_RATES[self.kind] if self.lr is None else self.lr


@dataclass
class Training:
    """training and validation"""

    seeds: Annotated[tuple[int, ...], _SEED, _optional("N …")] = ()
    """train with each of these seeds, instead of one --seed: mean, deviation and bands"""
    participation: Annotated[str | None, _optional("KIND", "all nodes")] = None
    """which nodes take part: sample:of=200, dropout:p=0.2, trace:file=events.csv, deadline:seconds=30"""
    val_size: Annotated[int | None, _optional("N", f"{WINDOWS} windows of text; up to 2048 images")] = None
    """validation examples"""
    val_interval: Annotated[int | None, _optional("STEPS", "up to ten times in --steps")] = None
    """steps between validations"""
    device: Annotated[str | None, _optional(default="the first of cuda, mps and cpu that is there")] = None
    """where to train"""
    executor: Literal["auto", "vmap", "loop"] = "auto"
    """how gradients are computed"""
    deterministic: bool = False
    """bitwise equal to separate processes; slower"""
    autocast: bool = False
    """compute in bfloat16"""
    compile: bool = False
    """compile losses, gradients and kernels, which takes ten seconds or more"""
    processes: Annotated[str | None, _optional("N", "1")] = None
    """share the nodes out to this number of processes, or 'auto'"""

    def backend(self) -> dict[str, Any]:
        """Return the backend, and the number of its processes."""
        if self.processes is None:
            return {}
        number = self.processes if self.processes == "auto" else _number_or_text(self.processes)
        whole = isinstance(number, float) and number.is_integer()
        return {"backend": "process", "num_processes": int(number) if whole else number}


@dataclass
class Price:
    """network and targets"""

    target_loss: Annotated[float | None, _optional("LOSS")] = None
    """show the steps and bytes, and with --network the hours, that each run takes to this validation loss"""
    network: Annotated[str | None, _optional("'BANDWIDTH, LATENCY'")] = None
    """show hours on it: "200 Mbit/s, 50 ms" """
    compute: Annotated[str | None, _optional("SECONDS")] = None
    """time that a node computes in a step: 0.8, or '800 ms'; asynchronous strategies need it"""
    speeds: Annotated[str | None, _optional("V,V,…")] = None
    """speeds of the nodes, relative to --compute: 1,1,1,4"""
    dollars_per_hour: Annotated[float | None, _optional("DOLLARS", "no price")] = None
    """what a node costs"""
    budget: Annotated[tuple[str, ...], _optional("KIND=AMOUNT …", "equal steps")] = ()
    """each trains as many steps as it is enough for: time=10h, cost=500 (dollars), wire=2GB (per node), examples=1e6"""
    at: Annotated[float | None, _optional("N", "the model that is trained")] = None
    """parameters of the model whose prices count for --budget; bytes and hours are those of this model then"""

    def clock(self) -> dict[str, Any]:
        """Return the network, compute and budget of `compare` and `sweep`."""
        compute: Any = None if self.compute is None else _number_or_text(self.compute)
        about = {"speeds": self.speeds, "dollars_per_hour": self.dollars_per_hour}
        for name in [name for name, value in about.items() if value is not None and compute is None]:
            raise ValueError(f"--{name.replace('_', '-')} has no effect without --compute SECONDS")
        try:
            speeds = None if self.speeds is None else [float(one) for one in self.speeds.split(",")]
        except ValueError as error:
            raise ValueError(f"--speeds must be numbers with commas between them, got {self.speeds!r}") from error
        if any(value is not None for value in about.values()):
            compute = Compute(compute, speeds=speeds, dollars_per_hour=self.dollars_per_hour)
        budget: dict[str, Any] = {}
        for item in self.budget:
            kind, equals, most = item.partition("=")
            if not (kind and equals and most):
                raise ValueError(f"--budget {item!r}: expected KIND=AMOUNT, such as time=10h")
            if kind in budget:
                raise ValueError(f"--budget names {kind} more than once")
            budget[kind] = _number_or_text(most)
        return {"network": self.network, "compute": compute, "budget": budget or None, "at": self.at}


@dataclass
class Output:
    """results, logs and checkpoints"""

    out: Annotated[str, arg(metavar="DIR")] = "vsim-out"
    """folder for figures and data"""
    run_name: Annotated[str | None, _optional("NAME")] = None
    """log every step to LOG_DIR/NAME/<strategy>/*.csv"""
    tensorboard: bool = False
    """write TensorBoard events to LOG_DIR, too"""
    wandb_project: Annotated[str | None, _optional("NAME")] = None
    """log to this project of Weights & Biases"""
    log_dir: Annotated[str | None, _optional("LOG_DIR", "logs")] = None
    """folder of all logs"""
    save_dir: Annotated[str | None, _optional("DIR")] = None
    """save all runs there at the end, and when interrupted (Ctrl-C)"""
    checkpoint_interval: Annotated[int | None, _optional("STEPS")] = None
    """steps between checkpoints; default: only at the end"""
    resume: bool = False
    """continue with what is in --save-dir"""

    def loggers(self) -> list[Logger] | None:
        log_dir = "logs" if self.log_dir is None else self.log_dir
        loggers: list[Logger] = []
        if self.run_name is not None:
            loggers.append(CSVLogger(log_dir))
        if self.tensorboard:
            loggers.append(TensorBoardLogger(log_dir))
        if self.log_dir is not None and not loggers:
            raise ValueError("--log-dir has no effect without --run-name or --tensorboard")
        return loggers or None

    def folder(self, kind: str, inputs: Iterable[Path]) -> Path:
        """Return the folder for results, made; check before training that files can be written there.

        Args:
            kind: "comparison" or "sweep": a folder that holds one is left as it is, and the next gets a number.
            inputs: files that the command reads, none of which may be overwritten.
        """
        first = out = _path("--out", self.out)
        for number in itertools.count(2):
            if not (out / f"{kind}.json").exists():
                break
            out = first.with_name(f"{first.name}-{number}")
        if out != first:
            print(f"{first} holds a {kind} already; this one goes to {out}", file=sys.stderr)
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(f"--out {out} is a file; give a folder")
        try:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                pass
        except OSError as error:
            raise OSError(f"--out {out} cannot be written: {error.strerror}") from error
        read = list(inputs)
        for name in (f"{kind}.csv", f"{kind}.json", *_FIGURES[kind]):
            check_output("--out", out / name, read)
        return out


@app.command
def compare(
    problem: Problem,
    training: Training,
    priced: Price,
    output: Output,
    strategies: _Names = (),
    preset: Annotated[tuple[str, ...], _optional("NAME …", "none")] = (),
    tune: Annotated[tuple[str, ...], _optional("NAME=V,V,… …", "none")] = (),
    extend: Annotated[str | None, _optional("FILE", "train all")] = None,
) -> int:
    """Train the same model with several strategies, and compare loss and bytes.

    Args:
        strategies: what to compare, see below; with --preset these alone are added to it
        preset: strategies with the hyperparameters of their papers, see below
        tune: values to try for arguments; each strategy is compared with its own best, found with other seeds
        extend: a comparison.json of the same problem: train only strategies and seeds that it does not have
    """
    for text in preset:
        one_of("--preset", text.partition(":")[0], PRESETS)
    named = [*strategies, *preset] or COMPARED
    repeated = sorted({text for text in named if named.count(text) > 1})
    if repeated:
        raise ValueError(f"--strategies names {', '.join(repeated)} more than once")
    rate, tried = problem.learning_rate(named), parse_settings(tune, "--tune") if tune else None
    if tried is not None and "lr" in tried and problem.lr is not None:
        raise ValueError("--lr and --tune lr say the same thing; give one of them")
    made = {text: parse_strategy(text, rate) for text in named}
    options, (train, val), out = (
        _fit_options(problem, training, priced, output),
        problem.datasets(),
        output.folder("comparison", _inputs(problem, training, extend)),
    )
    comparison = compare_strategies(
        partial(problem.new_model, train),
        problem.dealt(train, options["participation"]),
        val,
        strategies=made,
        tune=tried,
        extend=None if extend is None else Comparison.from_json(extend),
        **options,
    )
    _print_table(comparison, priced.target_loss)
    picture, winners = _FIGURES["comparison"]
    title = "; ".join([problem.title(priced.budget), *comparison._tuning()])
    figures: dict[str, Any] = {picture: comparison.figure(title, x="step" if priced.network is None else "time")}
    in_lockstep = not any(strategy.is_asynchronous for strategy in made.values())  # others train on one network
    if priced.network is not None and priced.target_loss is not None and in_lockstep:
        figures[winners] = comparison.winners(priced.target_loss).plot()
    return _write(comparison, figures, out / "comparison")


@app.command
def sweep(
    problem: Problem,
    training: Training,
    priced: Price,
    output: Output,
    settings: Annotated[tuple[str, ...], arg(name="set", metavar="NAME=V,V,… …")],
    strategy: str = "diloco",
    halving: Annotated[int | None, _optional("F")] = None,
    extend: Annotated[str | None, _optional("FILE", "train all")] = None,
) -> int:
    """Train with every combination of some settings of a strategy, and find the best.

    Args:
        settings: arguments of the strategy, num_nodes or batch_size, with the values to try
        strategy: what to train
        halving: at each of several rungs, let only the best 1/F of the settings continue
        extend: a sweep.json of the same problem: train only settings and seeds that it does not have
    """
    varied = parse_settings(settings)
    cls, defaults, given = strategy_class(strategy, problem.learning_rate([strategy]))
    twice = given.keys() & varied.keys()
    if twice:
        raise ValueError(f"--strategy and --set both give {', '.join(sorted(twice))}")
    options, (train, val) = _fit_options(problem, training, priced, output), problem.datasets()
    for key, option in (("num_nodes", problem.nodes), ("batch_size", problem.batch_size)):
        if key in varied:
            if option is not None:
                raise ValueError(f"--set gives {key}, and --{key.removeprefix('num_').replace('_', '-')} does, too")
            del options[key]
    out = output.folder("sweep", _inputs(problem, training, extend))
    result = sweep_settings(
        partial(problem.new_model, train),
        problem.dealt(train, options["participation"]),
        val,
        strategy=cls,
        settings={**defaults, **given, **varied},
        halving=halving,
        extend=None if extend is None else Sweep.from_json(extend),
        **options,
    )
    _print_table(result, priced.target_loss)
    picture, heatmap = _FIGURES["sweep"]
    figures: dict[str, Any] = {picture: result.figure()}
    if len(result.varied) > 1:
        figures[heatmap] = result.heatmap(*result.varied[:2])
    return _write(result, figures, out / "sweep")


@app.command
def show(
    paths: Annotated[tuple[str, ...], tyro.conf.Positional, arg(metavar="PATH …")],
    target_loss: Annotated[float | None, _optional("LOSS")] = None,
    network: Annotated[str | None, _optional("'BANDWIDTH, LATENCY'", "that of the comparison")] = None,
    compute: Annotated[str | None, _optional("SECONDS", "that of the comparison")] = None,
) -> int:
    """Print the tables of runs that were saved, or that are still going on.

    Args:
        paths: comparison.json or sweep.json, or their folders; a --save-dir; or a folder of CSV logs, LOG_DIR/NAME
        target_loss: show what each run took to this validation loss
        network: show hours on it: "200 Mbit/s, 50 ms"
        compute: time that a node computes in a step: 0.8, or '800 ms'
    """
    given = None if compute is None else _number_or_text(compute)
    for name, comparison in read_comparisons(paths).items():
        steps = {at for name, at in comparison._measured_at().items() if not comparison._note(name)}
        title = comparison._title() + (f", losses at step {steps.pop()}" if len(steps) == 1 else "")
        print(f"{name}: {title}\n\n{comparison.table(loss=target_loss, network=network, compute=given)}\n")
    return 0


@app.command
def report(
    paths: Annotated[tuple[str, ...], tyro.conf.Positional, arg(metavar="PATH …")],
    out: Annotated[str, arg(metavar="FILE")] = "report.html",
    network: Annotated[str | None, _optional("'BANDWIDTH, LATENCY'", "that of the comparison")] = None,
    compute: Annotated[str | None, _optional("SECONDS", "that of the comparison")] = None,
    title: Annotated[str | None, _optional("TEXT", "the names of the files")] = None,
) -> int:
    """Write a page of comparisons that were saved: curves, table and maps, with sliders for network and compute.

    Args:
        paths: comparison.json or sweep.json, or their folders; or a --save-dir, also of runs that still train
        out: the page, one HTML file
        network: where the sliders stand at first, "200 Mbit/s, 50 ms"
        compute: time that a node computes in a step: 0.8, or '800 ms'
        title: of the page
    """
    given, page = None if compute is None else _number_or_text(compute), _path("--out", out)
    check_output("--out", page, (file for path in paths for file in files_at(Path(path))))
    print(f"report: {page_of(read_comparisons(paths), network, given, title).save(page)}")
    return 0


@app.command
def watch(
    paths: Annotated[tuple[str, ...], tyro.conf.Positional, arg(metavar="PATH …")],
    port: int = 0,
    every: Annotated[float, arg(metavar="SECONDS")] = 5.0,
    network: Annotated[str | None, _optional("'BANDWIDTH, LATENCY'", "that of the comparison")] = None,
    compute: Annotated[str | None, _optional("SECONDS", "that of the comparison")] = None,
    only: Annotated[tuple[str, ...], arg(metavar="WORDS …", help_behavior_hint="(default: all)")] = (),
) -> int:
    """Show a page of runs in this machine's browser, which follows as they train; Ctrl-C ends it.

    Args:
        paths: a --save-dir or a folder of CSV logs, LOG_DIR/NAME; or comparison.json, or its folder
        port: where to listen; 0 is any that is free
        every: how often to look at the files
        network: where the sliders stand at first, "200 Mbit/s, 50 ms"
        compute: time that a node computes in a step: 0.8, or '800 ms'
        only: show runs with these words in their names, such as diloco, 'H=10 lr=0.001' or '*avg'
    """
    given = None if compute is None else _number_or_text(compute)
    server = Watch(paths, port, every, network, given, only)
    with suppress(KeyboardInterrupt):
        print(f"{server.url}\nshows the runs to browsers on this machine; reading them now; Ctrl-C ends it", flush=True)
        server.serve()
    return 0


@app.command
def time(
    compute: Annotated[str, arg(metavar="SECONDS")],
    strategies: _Names = (),
    parameters: Annotated[float, arg(metavar="N")] = 1e9,
    bytes_per_parameter: Annotated[int, arg(metavar="B")] = 4,
    nodes: Annotated[int, arg(metavar="K")] = 4,
    steps: int = 1000,
    network: Annotated[str, arg(metavar="'BANDWIDTH, LATENCY'")] = "200 Mbit/s, 50 ms",
    layers: Annotated[int | None, _optional("L", "no overlap")] = None,
) -> int:
    """Tell how long runs would take on a network, without training.

    Args:
        compute: time that a node computes in a step: 0.8, or '800 ms'
        strategies: what to price, see below
        parameters: number of parameters of the model
        bytes_per_parameter: 1, 2, 4 or 8
        nodes: number of nodes
        steps: optimizer steps
        network: bandwidth, latency, algorithm of collectives, such as '1 Gbit/s, 5 ms, tree'; a ring if none is named
        layers: overlap messages with the backward pass, layer by layer
    """
    on, computing = Network.parse(network), Compute(_number_or_text(compute), layers=layers)
    rows = []
    for text in strategies or COMPARED:
        line = price(
            parse_strategy(text, 1e-3),
            parameters=parameters,
            num_nodes=nodes,
            max_steps=steps,
            network=on,
            compute=computing,
            bytes_per_parameter=bytes_per_parameter,
        )
        seconds, sent = float(line.seconds[-1]), sum(event.payload_bytes for event in line.ledger) / 1e9
        rows.append(
            {
                "strategy": text,
                "time": duration(seconds),
                "a step": duration(seconds / steps),
                "compute": f"{line.utilization:.1%}",
                "payload per node": f"{sent:.3g} GB" if sent < 1000 else f"{sent / 1000:,.2f} TB",
            }
        )
    print(f"{parameters:.4g} parameters, {nodes} nodes, {steps} steps\n{on!r}, {computing!r}\n")
    print(text_table(rows, "simple", ["strategy"]))
    return 0


@app.command
def verify(
    problem: Problem = Problem(steps=50),  # noqa: B008
    strategy: str = "diloco:H=10",
    threads: Annotated[int | None, _optional(default="the machine's / K")] = None,
    processes: Annotated[int | None, _optional("N", "none")] = None,
) -> int:
    """Train in the simulator and in one process per node, and compare the bits after every step.

    Args:
        strategy: what to verify
        threads: CPU threads of every process
        processes: compare with this number of processes, too, which hold several nodes each
    """
    train, _ = problem.datasets()
    report = verify_strategy(
        problem.new_model(train, problem.seed),
        problem.dealt(train),
        parse_strategy(strategy, problem.learning_rate([strategy])),
        problem.num_nodes,
        problem.num_steps,
        threads=threads,
        num_processes=processes,
        batch_size=problem.examples_per_step,
        seed=problem.seed,
        progress=not problem.quiet,
    )
    print(report)
    return 0 if report.identical else 1


def parse_strategy(text: str, lr: float) -> Algorithm:
    """Return the strategy that "name:argument=value,…" says.

    Args:
        text: the name is one of STRATEGIES or PRESETS; values are Python literals, a compressor, selector or optimizer
            with its arguments, or else strings.
        lr: learning rate, unless the text or the strategy's own defaults have one.

    >>> parse_strategy("diloco:H=50,outer_lr=0.4", lr=1e-3).optim_spec
    OptimSpec(AdamW, lr=0.001)
    >>> parse_strategy("diloco:average=compress(topk(0.01)),inner_optim=sgd(momentum=0.9)", lr=1e-3).optim_spec
    OptimSpec(SGD, momentum=0.9, lr=0.001)
    """
    cls, defaults, given = strategy_class(text, lr)
    return cls(**defaults | given)


def strategy_class(text: str, lr: float) -> tuple[type[Algorithm], dict[str, Any], dict[str, Any]]:
    """Return the class that "name:argument=value,…" says, its arguments by default, and those given."""
    name, _, tail = text.partition(":")
    named = STRATEGIES | PRESETS
    cls, own_defaults = named[one_of("strategy", name, named)]
    return cls, {"lr": lr, **own_defaults}, _arguments(tail, f"strategy {text!r}")


def parse_settings(items: Sequence[str], option: str = "--set") -> dict[str, list[Any]]:
    """Return name → values of "name=value,value,…".

    >>> parse_settings(["H=5,10", "lr=1e-3", "inner_optim=sgd,adamw", "pairs=(1,2),(3,4)"])
    {'H': [5, 10], 'lr': [0.001], 'inner_optim': ['sgd', 'adamw'], 'pairs': [(1, 2), (3, 4)]}
    """
    settings: dict[str, list[Any]] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not (key and equals and text):
            raise ValueError(f"{option} {item!r}: expected name=value,value,…")
        if key in settings:
            raise ValueError(f"{option} names {key} more than once")
        settings[key] = [_value(one) for one in _split(text) if one]
    return settings


def _arguments(text: str, where: str) -> dict[str, Any]:
    """Return name → value of "argument=value,…"."""
    given: dict[str, Any] = {}
    for item in filter(None, _split(text)):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise ValueError(f"{where}: expected argument=value after the colon, got {item!r}")
        if key in given:
            raise ValueError(f"{where} names {key} more than once")
        given[key] = _value(value)
    return given


def _split(text: str) -> list[str]:
    """Return the parts between the commas that are in no brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if character in "'\"" and quote in ("", character):
            quote = "" if quote else character
        elif not quote:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _value(text: str) -> Any:
    """Return what the text of a value says: a literal, name(arguments) of a callable, or the text itself."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        joined = isinstance(parsed, ast.BinOp) and isinstance(parsed.op, ast.BitOr)
        if not (joined or isinstance(parsed, ast.Call)):
            return ast.literal_eval(parsed)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # all that the two functions raise
        return text
    return _called(parsed)


def _called(call: ast.expr) -> Any:
    """Return what name(arguments) says, or several joined by |; an argument is a literal, or a call itself."""
    text = ast.unparse(call)
    if isinstance(call, ast.BinOp) and isinstance(call.op, ast.BitOr):
        return _called(call.left) | _called(call.right)
    if not isinstance(call, ast.Call):
        raise ValueError(f"{text}: expected name(arguments), or several of them joined by |")
    make = CALLABLES[one_of("a value with arguments", ast.unparse(call.func), CALLABLES)]

    def value(argument: ast.expr) -> Any:
        if isinstance(argument, ast.Call | ast.BinOp):
            return _called(argument)
        try:
            return ast.literal_eval(argument)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(f"{text}: its arguments must be Python literals, or calls themselves") from error

    given = [value(argument) for argument in call.args]
    named = {str(keyword.arg): value(keyword.value) for keyword in call.keywords}
    return _new(make, given, named, text)


def _new(make: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any], where: str) -> Any:
    """Call a class; an argument that is missing gets an error that names it as the command line does."""
    parameters = inspect.signature(make).parameters.values()
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [name for name in required[len(given) :] if name not in named]
    if missing:
        raise ValueError(f"{where}: {', '.join(f'{name}=' for name in missing)} is missing")
    with naming(where):
        return make(*given, **named)


def _attending(text: str | None, num_nodes: int) -> Participation | None:
    """Return which nodes take part in which steps, by --participation."""
    if text is None:
        return None
    name, _, tail = text.partition(":")
    where = f"--participation {text}"
    cls = PARTICIPATION[one_of(where, name, PARTICIPATION)]
    return _new(cls, (), ({"n": num_nodes} if name == "sample" else {}) | _arguments(tail, where), where)


def _inputs(problem: Problem, training: Training, extend: str | None) -> Iterator[Path]:
    """Yield the files that `compare` and `sweep` read."""
    _, _, tail = (training.participation or "").partition(":")
    given = (problem.text, extend, _arguments(tail, "--participation").get("file"))
    yield from (Path(one) for one in given if isinstance(one, str))
    if problem.mnist_folder is not None:
        yield from Path(problem.mnist_folder).iterdir()


def _fit_options(problem: Problem, training: Training, priced: Price, output: Output) -> dict[str, Any]:
    """Return the arguments that `compare` and `sweep` have in common."""
    if output.resume and output.save_dir is None:
        raise ValueError("--resume needs --save-dir DIR")
    # In steps of ten, as many strategies sync every ten steps by default, and are worse in between.
    tenth = max(1, problem.num_steps // 10)
    every = (tenth if tenth < 10 else -(-tenth // 10) * 10) if training.val_interval is None else training.val_interval
    return {
        "num_nodes": problem.num_nodes,
        "max_steps": problem.steps if priced.budget else problem.num_steps,
        "batch_size": problem.examples_per_step,
        "seeds": list(training.seeds) or [problem.seed],
        "val_size": WINDOWS if training.val_size is None and problem.is_text else training.val_size,
        "val_interval": every,
        "participation": _attending(training.participation, problem.num_nodes),
        **{name: getattr(training, name) for name in ("device", "executor", "deterministic", "autocast", "compile")},
        **training.backend(),
        **priced.clock(),
        "logger": output.loggers(),
        "run_name": output.run_name,
        "wandb_project": output.wandb_project,
        "progress": False if problem.quiet else "table",
        "save_dir": None if output.save_dir is None else _path("--save-dir", output.save_dir),
        "checkpoint_interval": output.checkpoint_interval,
        "resume": output.resume,
    }


def _print_table(result: Comparison, loss: float | None) -> None:
    """Print the table; in a terminal the best line is green and bold, and lines marked † are green."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    lines = result.table(loss=loss).splitlines()
    names, best = list(result), ""
    with suppress(ValueError):  # no run got to its end
        best = result.best()
    console.print()
    for i, line in enumerate(lines):
        name = result._ordered()[i - 2] if 2 <= i < 2 + len(names) else ""
        style = "bold green" if name and name == best else "green" if name and " †" in line else None
        console.print(line, style=style)
    console.print()


def _write(result: Comparison, figures: Mapping[str, Any], path: Path) -> int:
    """Write data and figures, and say where they are; return 0, or 2 if no run got to its end."""
    from vsim.figures.paper import save  # here, as it loads matplotlib

    result.calls[-1:] = [_COMMAND.get()]
    result.to_csv(path.with_suffix(".csv"))
    result.to_json(path.with_suffix(".json"))
    for name, figure in figures.items():
        save(figure, path.with_name(name))
        print(f"figure: {path.with_name(name)}")
    print(f"data:   {path.with_suffix('.csv')}, {path.with_suffix('.json')}")
    if all(run.failed for name in result for run in result.runs(name)):
        print("no run got to its end", file=sys.stderr)
        return 2
    return 0


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _path(option: str, text: str) -> Path:
    if not text.strip():
        raise ValueError(f"{option} must name a folder, got {text!r}")
    return Path(text)


def _reject_repeated(argv: Sequence[str]) -> None:
    """Raise a ValueError for an option that is given twice; only the last would count."""
    options = [word.partition("=")[0] for word in argv if word.startswith("--")]
    for option in options:
        if options.count(option) > 1:
            raise ValueError(f"{option} is given more than once; give all of its values after one {option}")


def _about_strategies() -> str:
    """Return what --help says of strategies: names, default arguments, and what they are."""
    callables = textwrap.wrap(", ".join(sorted(CALLABLES.keys() - OPTIMIZERS.keys())), 100)
    lines = [
        "strategies:",
        "  A name, or a name with arguments of its class: diloco:H=50,outer_lr=0.7. A value is a Python literal, text,",
        "  an optimizer of torch.optim with its arguments, 'diloco:inner_optim=adamw(weight_decay=0.1)', or one of",
        "  these, 'diloco:average=mean() | compress(topk(0.01))':",
        *(f"    {line}" for line in callables),
        "  Besides --lr, and but for the defaults of their classes, the strategies are given:",
    ]
    for title, table in (("", STRATEGIES), ("presets:", PRESETS)):
        lines += ["", title] if title else []
        for name, (cls, own) in table.items():
            parameters = inspect.signature(cls).parameters
            steps = {"H": parameters["H"].default} if "H" in parameters else {}
            given = ", ".join(f"{key}={value}" for key, value in (steps | own).items())
            summary = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
            lines += [f"  {name:14} {given}"]
            lines += textwrap.wrap(summary, 100, initial_indent=17 * " ", subsequent_indent=17 * " ")
    return "\n".join(lines) + "\n" + _EXAMPLES


_EXAMPLES = """
examples:
  vsim compare                                              K = 4 small GPTs on English text, seven strategies
  vsim compare --data digits --model cnn --nodes 8          images instead
  vsim compare --text notes.txt --steps 500 --seeds 1 2 3   your own text, mean and band over three seeds
  vsim compare --preset diloco-paper --strategies allreduce --steps 2000   the paper's settings, next to AllReduce
  vsim compare --strategies allreduce fedavg:H=50,island_size=2 diloco:H=50,outer_lr=0.7 diloco:H=200 --steps 400
  vsim compare --strategies diloco:H=20 --nodes 16          one strategy
  vsim compare --extend vsim-out/comparison.json --seeds 42 1 2   two more seeds for what has been compared
  vsim compare --network "200 Mbit/s, 50 ms" --compute 0.8 --budget time=10min   equal hours instead of equal steps
  vsim compare --save-dir run1 --checkpoint-interval 50     saved; with --resume it continues where it stopped
  vsim sweep --strategy diloco --set H=5,10,50 outer_lr=0.4,0.7,1.0 --seeds 1 2 3   nine settings, three seeds each
  vsim time --parameters 10e9 --nodes 8 --network "1 Gbit/s, 20 ms" --compute 0.8   hours on a network, not trained
  vsim show run1                                            the table so far of runs that still train
  vsim watch run1                                           a page that follows them, in this machine's browser
  vsim report vsim-out --out report.html                    a page to send: sliders for the network, in any browser
  vsim verify --strategy diloco:H=5                         the simulator against 4 processes, bit by bit
"""
