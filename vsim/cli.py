"""The functions that carry out the commands of the command line. `vsim_cli` parses their options."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vsim import strategy as strategies_of_vsim
from vsim.analysis.columns import headings
from vsim.analysis.comparison import Comparison
from vsim.analysis.losses import measured_at, note
from vsim.analysis.report.page import report as page_of
from vsim.analysis.spent import amount
from vsim.analysis.summary import tuning
from vsim.analysis.swept import Sweep
from vsim.analysis.tables import HOURS, Heading, text_table
from vsim.arguments import naming, one_of, real_number, whole_number
from vsim.cluster.optim import OPTIMIZERS, OptimSpec
from vsim.cluster.participation import (
    DayNight,
    Deadline,
    Dropout,
    DropSlowest,
    OverCommit,
    Partial,
    Participation,
    Sample,
    Trace,
)
from vsim.core.fields import OPTIONS, parameters_of
from vsim.data import TextDataset, digits, docs_text, fashion_mnist, mnist, mnist1d, partition, text_file
from vsim.figures.words import in_short
from vsim.history.loggers import CSVLogger, Logger, TensorBoardLogger
from vsim.measuring import load_step
from vsim.measuring import measure as measure_cluster
from vsim.models import CNN, GPT, MLP
from vsim.network import Compute, Network
from vsim.network.cluster_file import names_file
from vsim.price import price
from vsim.processes import CollectiveFailure, ForkServerFailure, NodeFailure, under_torchrun, world_rank
from vsim.processes.launch import LOOPBACK
from vsim.processes.options import default_threads
from vsim.processes.world import world_size
from vsim.saved import files_at, read_comparisons
from vsim.search.compare import OF_RUNS
from vsim.search.compare import compare as compare_strategies
from vsim.search.sweep import sweep as sweep_settings
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
    restarts,
)
from vsim.verify import verify as verify_strategy
from vsim.watch import Watch
from vsim.writing import check_output
from vsim_cli import commands
from vsim_cli.commands import WINDOWS, Common, Output, Price, Problem, Training

# Learning rates of AdamW that train the built-in models well in some hundred steps.
LEARNING_RATES = {"gpt": 6e-4, "mlp": 2e-3, "cnn": 2e-3}
GPT_SHAPE = {"block_size": 32, "layers": 2, "width": 64, "heads": 4}
# The figures of a command's result, next to its data.
_FIGURES = {"comparison": ("comparison.png", "winners.png"), "sweep": ("sweep.png", "heatmap.png")}
PARTICIPATION: dict[str, type[Participation]] = {
    cls.__name__.lower(): cls for cls in (Dropout, DayNight, Trace, Deadline, DropSlowest, OverCommit, Partial, Sample)
}
# Functions that an option's value may call, such as topk(0.01); all other values are Python literals or text.
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
    "restarts": restarts,
}

# Errors that end a command with one line instead of a traceback.
_ERRORS = (
    *(ValueError, TypeError, OSError, ImportError, ArithmeticError, MemoryError),
    *(NodeFailure, CollectiveFailure, ForkServerFailure),
)
_COMMAND: ContextVar[str] = ContextVar("command")  # as typed, for the records


def run(command: commands.Command, argv: Sequence[str]) -> int:
    """Run a command, typed as `argv`; return the exit status."""
    in_ranks = isinstance(command, commands.Compare | commands.Sweep | commands.Measure)
    if under_torchrun() and not in_ranks:
        print(f"vsim: torchrun starts `vsim compare`, `sweep` and `measure`, not `vsim {argv[0]}`", file=sys.stderr)
        return 2
    _COMMAND.set(shlex.join(["vsim", *argv]))
    formatted = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"
    try:
        status = _COMMANDS[type(command)](command)
        sys.stdout.flush()  # here, since Python would report a closed pipe in its own words when it ends
        return status
    except _ERRORS as error:
        if isinstance(error, BrokenPipeError) and _pipe_is_closed():
            return 128 + signal.SIGPIPE
        if world_rank() == 0 or not isinstance(error, ValueError | TypeError):  # which all ranks find alike
            print(f"vsim {argv[0]}: {_said(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"vsim {argv[0]}: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = formatted


def _pipe_is_closed() -> bool:
    """Return whether nobody reads the output any more, as in `vsim strategies | head`; then drop what is left of it."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


# Arguments of `fit` and of classes in error messages → the options that give them.
_OPTIONS = {
    "seconds_per_step": "--compute",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in ("batch_size", "val_size", "val_interval", "checkpoint_interval")
    },
    **{name: f"--{name.replace('_', '-')}" for name in ("save_dir", "dollars_per_hour", "bytes_per_parameter")},
    **{"max_steps": "--steps", "num_nodes": "--nodes", "num_processes": "--processes"},
    **{f"{name}(?= is missing)": f"--{name}" for name in ("network", "compute")},
    "compute(?= has \\d+ nodes)": "--compute with --speeds or a file",
}


def _said(error: BaseException) -> str:
    """Return an error as a line, which names options instead of the arguments that they give."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror.lower()
        return f"{error.filename}: {why}"
    text = " ".join(str(error).split())
    text, valid, arguments = text.partition(" Valid: ")  # the arguments of a class
    if not text.startswith(("--", "strategy ")) and " unknown argument " not in text:  # of --set or of a strategy
        for name, option in _OPTIONS.items():
            text = re.sub(rf"(?<![\w-]){name}(?:=(?=[\w'\"]))", f"{option} ", text)
            text = re.sub(rf"(?<![\w-]){name}(?!\w)=?", option, text)
        text = re.sub(r"^((?!--).)*?: (?=--[\w-]+ must be )", "", text)  # a strategy has no part in an option's range
    return f"{text}{valid}{arguments}" or type(error).__name__


def compare(command: commands.Compare) -> int:
    problem, priced = command.problem, command.priced
    for text in command.choice.preset:
        one_of("--preset", text.partition(":")[0], PRESETS)
    named = [*command.strategies, *command.choice.preset] or COMPARED
    repeated = sorted({text for text in named if named.count(text) > 1})
    if repeated:
        raise ValueError(f"--strategies names {', '.join(repeated)} more than once")
    rate, tried = (
        _learning_rate(problem, named),
        parse_settings(command.choice.tune, "--tune") if command.choice.tune else None,
    )
    for name, values in (tried or {}).items():
        if len(values) < 2:
            raise ValueError(f"--tune {name}: give at least two values, such as {name}={values[0]},…")
    if tried is not None and "lr" in tried and problem.details.lr is not None:
        raise ValueError("--lr and --tune lr say the same thing; give one of them")
    made = {text: parse_strategy(text, rate) for text in named}
    options, (train, val), out = (
        _fit_options(command),
        _datasets(problem),
        _folder(problem, "comparison", _inputs(problem, command.training, command.choice.extend)),
    )
    comparison = compare_strategies(
        partial(_new_model, problem, train),
        _dealt(problem, train, options["participation"]),
        val,
        strategies=made,
        tune=tried,
        extend=None if command.choice.extend is None else Comparison.from_json(command.choice.extend),
        **options,
    )
    if world_rank() > 0:
        return 0  # the first rank shows and writes
    _print_table(comparison, priced.target_loss, problem)
    picture, winners = _FIGURES["comparison"]
    drawn = comparison.in_words()
    title = "; ".join([drawn.trained, *tuning(drawn)])
    figures: dict[str, Any] = {picture: drawn.figure(title, x="step" if problem.network is None else "time")}
    in_lockstep = not any(strategy.is_asynchronous for strategy in made.values())  # an asynchronous run has one network
    if problem.network is not None and priced.target_loss is not None and in_lockstep:
        figures[winners] = drawn.winners(priced.target_loss).plot()
    return _write(comparison, figures, out / "comparison")


def sweep(command: commands.Sweep) -> int:
    problem, priced = command.problem, command.priced
    varied = parse_settings(command.settings)
    cls, defaults, given = strategy_class(command.strategy, _learning_rate(problem, [command.strategy]))
    twice = given.keys() & varied.keys()
    if twice:
        raise ValueError(f"--strategy and --set both give {', '.join(sorted(twice))}")
    options, (train, val) = _fit_options(command), _datasets(problem)
    for key, option in (("num_nodes", problem.nodes), ("batch_size", problem.details.batch_size)):
        if key in varied:
            if option is not None:
                raise ValueError(f"--set gives {key}, and --{key.removeprefix('num_').replace('_', '-')} does, too")
            del options[key]
    out = _folder(problem, "sweep", _inputs(problem, command.training, command.extend))
    result = sweep_settings(
        partial(_new_model, problem, train),
        _dealt(problem, train, options["participation"]),
        val,
        strategy=cls,
        settings={**defaults, **given, **varied},
        halving=command.halving,
        extend=None if command.extend is None else Sweep.from_json(command.extend),
        **options,
    )
    if world_rank() > 0:
        return 0  # the first rank shows and writes
    _print_table(result, priced.target_loss, problem)
    picture, heatmap = _FIGURES["sweep"]
    figures: dict[str, Any] = {picture: result.figure()}
    if len(result.varied) > 1:
        figures[heatmap] = result.heatmap(*result.varied[:2])
    return _write(result, figures, out / "sweep")


def show(command: commands.Show) -> int:
    network, compute = priced_on(command.network, command.compute)
    for name, comparison in read_comparisons(command.paths).items():
        steps = {at for name, at in measured_at(comparison).items() if not note(comparison, name)}
        title = comparison.title + (f", losses at step {steps.pop()}" if len(steps) == 1 else "")
        table = comparison.table(loss=command.target_loss, network=network, compute=compute, width=_width())
        about = ", started ".join(filter(None, [comparison.trained, comparison.date]))
        print("\n".join(map(_filled, filter(None, [about, f"{name}: {title}"]))) + f"\n\n{table}\n")
    return 0


def report(command: commands.Report) -> int:
    network, compute = priced_on(command.network, command.compute)
    page = _path("--out", command.out)
    check_output("--out", page, (file for path in command.paths for file in files_at(Path(path))))
    print(f"report: {page_of(read_comparisons(command.paths), network, compute, command.title).save(page)}")
    return 0


def watch(command: commands.Watch) -> int:
    network, compute = priced_on(command.network, command.compute)
    server = Watch(command.paths, command.port, command.every, network, compute, command.only)
    with suppress(KeyboardInterrupt):
        print(f"{server.url}\nshows the runs to browsers on this machine; reading them now; Ctrl-C ends it", flush=True)
        server.serve()
    return 0


def time(command: commands.Time) -> int:
    network, compute = priced_on(command.network, command.compute)
    on, computing = Network.of(network).for_run(of_clients=False), _computing(compute, layers=command.layers)
    rows = []
    for text in command.strategies or COMPARED:
        line = price(
            parse_strategy(text, 1e-3),
            parameters=command.parameters,
            num_nodes=command.nodes,
            max_steps=command.steps,
            network=on,
            compute=computing,
            bytes_per_parameter=command.bytes_per_parameter,
        )
        hours, sent = float(line.seconds[-1]) / 3600, sum(event.payload_bytes for event in line.ledger)
        rows.append(
            {
                "strategy": text,
                "hours": hours,
                "hours per step": hours / command.steps,
                "utilization": line.utilization,
                "payload MB/node": sent / 1e6,
            }
        )
    size = in_short(command.parameters)
    print(f"{size} parameters, {command.nodes} nodes, {command.steps:,} steps\n{on!r}, {computing!r}\n")
    shown = [*headings("hours", "utilization", "payload MB/node"), Heading("{unit} per step", HOURS)]
    print(text_table(rows, "simple", ["strategy"], width=_width(), headings=shown))
    return 0


def verify(command: commands.Verify) -> int:
    problem = command.problem
    train, _ = _datasets(problem)
    report = verify_strategy(
        _new_model(problem, train, problem.details.seed),
        _dealt(problem, train),
        parse_strategy(command.strategy, _learning_rate(problem, [command.strategy])),
        problem.num_nodes,
        problem.num_steps,
        threads=command.threads,
        num_processes=command.processes,
        batch_size=problem.examples_per_step,
        seed=problem.details.seed,
        progress=not problem.details.quiet,
    )
    print(report)
    return 0 if report.identical else 1


def measure(command: commands.Measure) -> int:
    out = _path("--out", command.out)
    if world_rank() == 0 and out.exists():
        raise ValueError(f"--out {out} exists; give another path, or remove it")
    real_number("--seconds", command.seconds, above=0)
    if under_torchrun():
        if command.nodes not in (None, world_size()):
            raise ValueError(f"--nodes is {command.nodes}, but torchrun has started {world_size()} ranks: leave it out")
        measure_cluster(out, command.step, command.check, command.seconds)
        return 0
    if command.nodes is None:
        raise ValueError("--nodes K is missing, to measure K processes on this machine; or start it under torchrun")
    nodes = whole_number("--nodes", command.nodes, at_least=2, at_most=1000)
    if command.step is not None:
        load_step(command.step)  # here, where an error is one line
    with tempfile.TemporaryDirectory(prefix="vsim-") as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", f"{nodes}", "--log_dir", folder]
        own = {"OMP_NUM_THREADS": f"{default_threads(nodes)}", "GLOO_SOCKET_IFNAME": LOOPBACK}
        call = [sys.executable, *torchrun, "-m", "vsim", *shlex.split(_COMMAND.get())[1:]]
        return subprocess.run(call, env={**own, **os.environ}, check=False).returncode and 2


def atlas(command: commands.Atlas) -> int:
    from vsim.atlas import enter  # only here: nothing else in vsim needs the atlas

    return enter.command(command)


def _named(value: Any) -> str:
    return str(value.__name__) if inspect.isfunction(value) else repr(value)


def strategies(_: commands.Strategies) -> int:
    """Print the names, default arguments and descriptions of strategies and presets."""
    width = max(_width() or 100, 40)

    def filled(text: str, indent: int = 0) -> str:
        return textwrap.fill(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)

    print(
        filled(
            "A strategy is a name, or a name with arguments of its class: diloco:H=50,outer_lr=0.7. A value is a "
            "Python literal, text, an optimizer of torch.optim with its arguments, "
            "'diloco:inner_optim=adamw(weight_decay=0.1)', or one of these, "
            "'diloco:average=mean() | compress(topk(0.01))':"
        )
    )
    print(filled(", ".join(sorted(CALLABLES.keys() - OPTIMIZERS.keys())), 2))
    of_all = OPTIONS
    print(filled(f"Every strategy also takes {', '.join(of_all)}."))
    for title, table in (("strategies", STRATEGIES), ("presets", PRESETS)):
        print(f"\n{title}:")
        for name, (cls, own) in table.items():
            parameters = parameters_of(cls).values()
            known = {p.name: p.default for p in parameters if p.name not in of_all}
            shown = [key if value is None else f"{key}={_named(value)}" for key, value in (known | own).items()]
            summary = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
            print(f"  {name}", filled(summary, 4), *([filled(", ".join(shown), 4)] if shown else []), sep="\n")
    print(f"\n{filled('By default, compare and time take: ' + ' '.join(COMPARED))}")
    return 0


_COMMANDS: dict[type, Callable[[Any], int]] = {
    commands.Compare: compare,
    commands.Sweep: sweep,
    commands.Show: show,
    commands.Report: report,
    commands.Watch: watch,
    commands.Time: time,
    commands.Verify: verify,
    commands.Measure: measure,
    commands.Atlas: atlas,
    commands.Strategies: strategies,
}


def parse_strategy(text: str, lr: float) -> Algorithm:
    """Return the strategy for a text "name:argument=value,…".

    Args:
        text: the name is one of STRATEGIES or PRESETS; a value is a Python literal, a compressor, selector or optimizer
            with its arguments, or else text.
        lr: learning rate if neither the text nor the strategy's defaults set one.

    >>> parse_strategy("diloco:H=50,outer_lr=0.4", lr=1e-3).optim_spec
    OptimSpec(AdamW, lr=0.001)
    >>> parse_strategy("diloco:average=compress(topk(0.01)),inner_optim=sgd(momentum=0.9)", lr=1e-3).optim_spec
    OptimSpec(SGD, momentum=0.9, lr=0.001)
    """
    cls, defaults, given = strategy_class(text, lr)
    with naming(f"strategy {text}"):
        return cls(**defaults | given)


def strategy_class(text: str, lr: float) -> tuple[type[Algorithm], dict[str, Any], dict[str, Any]]:
    """Return the class for a text "name:argument=value,…", its default arguments, and the given arguments."""
    name, _, tail = text.partition(":")
    named = STRATEGIES | PRESETS
    cls, own_defaults = named[one_of("strategy", name, named)]
    return cls, {"lr": lr, **own_defaults}, _arguments(tail, f"strategy {text!r}")


def parse_settings(items: Sequence[str], option: str = "--set") -> dict[str, list[Any]]:
    """Return name → values for texts "name=value,value,…".

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
    """Return name → value for a text "argument=value,…"."""
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
    """Return the parts between commas outside of brackets and quotes."""
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
    """Return the value for a text: a literal, the result of name(arguments), or the text itself."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        joined = isinstance(parsed, ast.BinOp) and isinstance(parsed.op, ast.BitOr)
        if not (joined or isinstance(parsed, ast.Call)):
            return ast.literal_eval(parsed)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # all errors of parse and literal_eval
        return text
    return _called(parsed)


def _called(call: ast.expr) -> Any:
    """Return the result of name(arguments), or of such calls joined by |; an argument is a literal or a call."""
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
    """Call a class or function; the error for a missing argument names the argument as the command line does."""
    parameters = inspect.signature(make).parameters.values()
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [name for name in required[len(given) :] if name not in named]
    if missing:
        raise ValueError(f"{where}: {', '.join(f'{name}=' for name in missing)} is missing")
    with naming(where):
        return make(*given, **named)


def _datasets(problem: Problem) -> tuple[Any, Any]:
    """Return the training and the validation data."""
    if problem.details.mnist_folder is not None and problem.data not in ("mnist", "fashion_mnist"):
        raise ValueError("--mnist-folder has no effect without --data mnist or fashion_mnist")
    if problem.text is not None:
        if not Path(problem.text).is_file():
            raise FileNotFoundError(f"--text {problem.text}: no such file")
        return text_file(problem.text, block_size=GPT_SHAPE["block_size"])
    if problem.data == "digits":
        return digits()
    if problem.data == "mnist1d":
        return mnist1d()
    if problem.data == "docs":
        return docs_text(block_size=GPT_SHAPE["block_size"])
    if problem.data == "fashion_mnist":
        return fashion_mnist(problem.details.mnist_folder)
    if problem.details.mnist_folder is None:
        raise ValueError("--data mnist needs --mnist-folder DIR, the folder with the four IDX files")
    return mnist(problem.details.mnist_folder)


def _dealt(problem: Problem, train: Any, attending: Participation | None = None) -> Any:
    """Return the training data, split among the nodes by --partition."""
    if problem.details.partition is None:
        return train
    kind, _, tail = problem.details.partition.partition(":")
    clients = problem.num_nodes if attending is None else attending.population(problem.num_nodes)
    where = f"--partition {problem.details.partition}"
    with naming(where):
        return partition(train, clients, kind, **_arguments(tail, where))


def _new_model(problem: Problem, train: Any, seed: int) -> nn.Module:
    if isinstance(train, TextDataset):
        return GPT(train.vocabulary.size, seed=seed, **GPT_SHAPE)
    images = train.tensors[0]
    if problem.kind == "mlp":
        return MLP(images[0].numel(), seed=seed)
    return CNN(tuple(images.shape[1:]), seed=seed)


def _learning_rate(problem: Problem, named: Iterable[str]) -> float:
    """Return --lr or, without it, the model's rate. Raise an error for --lr if a strategy in `named` sets a rate."""
    names = [text.partition(":")[0] for text in named]
    own = [name for name in names if "lr" in (STRATEGIES | PRESETS).get(name, (None, {}))[1]]
    if own and problem.details.lr is not None:
        raise ValueError(f"--lr has no effect on {own[0]}, which has its own: give {own[0]}:lr={problem.details.lr:g}")
    return LEARNING_RATES[problem.kind] if problem.details.lr is None else problem.details.lr


def _backend(training: Training) -> dict[str, Any]:
    """Return the backend, and its number of processes."""
    processes = training.processes or ("auto" if under_torchrun() else None)
    if processes is None:
        return {}
    number = processes if processes == "auto" else _number_or_text(processes)
    whole = isinstance(number, float) and number.is_integer()
    return {"backend": "process", "num_processes": int(number) if whole else number}


def _clock(problem: Common, priced: Price) -> dict[str, Any]:
    """Return the network, compute and budget of `compare` and `sweep`."""
    network, compute = priced_on(problem.network, problem.compute)
    if network is not None and compute is None:
        raise ValueError("--network needs --compute SECONDS, the time that a node computes in a step")
    about = {"speeds": priced.speeds, "dollars_per_hour": priced.dollars_per_hour}
    for name in [name for name, value in about.items() if value is not None and compute is None]:
        raise ValueError(f"--{name.replace('_', '-')} has no effect without --compute SECONDS")
    try:
        speeds = None if priced.speeds is None else [float(one) for one in priced.speeds.split(",")]
    except ValueError as error:
        raise ValueError(f"--speeds must be numbers with commas between them, got {priced.speeds!r}") from error
    if any(value is not None for value in about.values()):
        compute = _computing(compute, speeds=speeds, dollars_per_hour=priced.dollars_per_hour)
    budget: dict[str, Any] = {}
    for item in priced.budget:
        kind, equals, most = item.partition("=")
        if not (kind and equals and most):
            raise ValueError(f"--budget {item!r}: expected KIND=AMOUNT, such as time=10h")
        if kind in budget:
            raise ValueError(f"--budget names {kind} more than once")
        budget[kind] = _number_or_text(most)
        amount(kind, budget[kind], "--budget", OF_RUNS)
    if {"time", "cost"} & budget.keys() and network is None:
        raise ValueError("--budget time and cost need --network and --compute")
    if "cost" in budget and priced.dollars_per_hour is None:
        raise ValueError("--budget cost needs --dollars-per-hour DOLLARS")
    return {"network": network, "compute": compute, "budget": budget or None, "at": priced.at}


def priced_on(network: str | None, compute: str | None) -> tuple[Any, Any]:
    """Return --network and --compute, checked; the network first."""
    if network is not None:
        try:
            Network.of(network)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("network", "--network", 1)) from error
    given = None if compute is None else _number_or_text(compute)
    if given is not None:
        Compute.of(given)
    return network, given


def _computing(given: Any, **options: Any) -> Compute:
    """Return the Compute of --compute, seconds or a file, with further arguments."""
    own = {name: value for name, value in options.items() if value is not None}
    in_file = isinstance(given, str) and names_file(given)
    return Compute.from_file(given, **own) if in_file else Compute(given, **own)


def _loggers(output: Output) -> list[Logger] | None:
    log_dir = "logs" if output.log_dir is None else output.log_dir
    loggers: list[Logger] = []
    if output.run_name is not None:
        loggers.append(CSVLogger(log_dir))
    if output.tensorboard:
        loggers.append(TensorBoardLogger(log_dir))
    if output.log_dir is not None and not loggers:
        raise ValueError("--log-dir has no effect without --run-name or --tensorboard")
    return loggers or None


def _folder(problem: Common, kind: str, inputs: Iterable[Path]) -> Path:
    """Make and return the folder for results; check before training that it is writable.

    Args:
        kind: "comparison" or "sweep"; if `out` already holds a result of this kind, make a numbered folder instead.
        inputs: files that the command reads, and must not overwrite.
    """
    first = out = _path("--out", problem.out)
    for number in itertools.count(2):
        if not (out / f"{kind}.json").exists():
            break
        out = first.with_name(f"{first.name}-{number}")
    if out != first and world_rank() == 0:
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


def _attending(text: str | None, num_nodes: int) -> Participation | None:
    """Return the participation that --participation describes; None without one."""
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
    if problem.details.mnist_folder is not None:
        yield from Path(problem.details.mnist_folder).iterdir()


def _fit_options(command: commands.Compare | commands.Sweep) -> dict[str, Any]:
    """Return the arguments common to `compare` and `sweep`."""
    problem, training, priced, output = command.problem, command.training, command.priced, command.output
    if output.resume and output.save_dir is None:
        raise ValueError("--resume needs --save-dir DIR")
    # A multiple of ten, because many strategies sync every ten steps by default; between syncs, the loss is higher.
    tenth = max(1, problem.num_steps // 10)
    every = (tenth if tenth < 10 else -(-tenth // 10) * 10) if training.val_interval is None else training.val_interval
    return {
        "num_nodes": problem.num_nodes,
        "max_steps": problem.steps if priced.budget else problem.num_steps,
        "batch_size": problem.examples_per_step,
        "seeds": list(problem.seeds) or [problem.details.seed],
        "val_size": WINDOWS if training.val_size is None and problem.is_text else training.val_size,
        "val_interval": every,
        "participation": _attending(training.participation, problem.num_nodes),
        **{name: getattr(training, name) for name in ("device", "executor", "deterministic", "autocast", "compile")},
        **_backend(training),
        **_clock(problem, priced),
        "logger": _loggers(output),
        "run_name": output.run_name,
        "wandb_project": output.wandb_project,
        "progress": False if problem.details.quiet else "table",
        "save_dir": None if output.save_dir is None else _path("--save-dir", output.save_dir),
        "checkpoint_interval": output.checkpoint_interval,
        "resume": output.resume,
    }


def _width() -> int | None:
    """Return the width of the terminal, or $COLUMNS; None, no limit, for files and pipes without $COLUMNS."""
    given = os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty()
    return shutil.get_terminal_size().columns if given else None


def _filled(text: str) -> str:
    return textwrap.fill(text, _width() or 10**6)


def _print_table(result: Comparison, loss: float | None, problem: Common) -> None:
    """Print the table below what was trained; in a terminal, the best line is green and bold, lines marked † green."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    lines = result.table(loss=loss, width=_width()).splitlines()
    first = 1 + next(i for i, line in enumerate(lines) if re.fullmatch(r"-[ -]*", line))
    names, best = list(result), ""
    with suppress(ValueError):  # no run is complete
        best = result.best()
    seeds = f", seeds {' '.join(map(str, problem.seeds))}" if len(problem.seeds) > 1 else ""
    computing = f"{problem.compute or ''}{' s' if (problem.compute or ' ')[-1].isdigit() else ''}"
    priced = ", ".join(filter(None, [problem.network, computing and f"{computing} of computing a step"]))
    console.print(f"\n{_filled('; '.join(filter(None, [result.trained + seeds, priced])))}\n")
    for i, line in enumerate(lines):
        name = result.order[i - first] if first <= i < first + len(names) else ""
        style = "bold green" if name and name == best else "green" if name and " †" in line else None
        console.print(line, style=style)
    console.print()


def _write(result: Comparison, figures: Mapping[str, Any], path: Path) -> int:
    """Write data and figures, and print their paths; return 0, or 2 if no run is complete."""
    from vsim.figures.paper import save  # here, because this import loads matplotlib

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
