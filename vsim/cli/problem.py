"""What the arguments of the command line stand for: data, model, strategies, loggers."""

from __future__ import annotations

import argparse
import ast
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vsim import strategy as strategies
from vsim.arguments import naming, one_of
from vsim.cluster.optim import OPTIMIZERS, OptimSpec
from vsim.cluster.participation import Deadline, Dropout, DropSlowest, OverCommit, Participation, Sample, Trace
from vsim.data import TextDataset, digits, docs_text, mnist, partition, text_file
from vsim.models import CNN, GPT, MLP
from vsim.network import Compute
from vsim.records.loggers import CSVLogger, Logger, TensorBoardLogger
from vsim.strategy import MERGERS, PRESETS, STRATEGIES, Compressor, IndexSelector, Strategy

# For each built-in model what trains it well in some hundred steps: AdamW's learning rate, examples a node and step.
LEARNING_RATES = {"gpt": 6e-4, "mlp": 2e-3, "cnn": 2e-3}
BATCH_SIZES = {"gpt": 8, "mlp": 16, "cnn": 16}
PARTICIPATION: dict[str, type[Participation]] = {
    cls.__name__.lower(): cls for cls in (Dropout, Trace, Deadline, DropSlowest, OverCommit, Sample)
}
# What a value may be beside literals and text, with its arguments: topk(0.01), adamw(weight_decay=0.1).
MADE: dict[str, Callable[..., Any]] = {
    **PARTICIPATION,
    **{name: partial(OptimSpec, name) for name in OPTIMIZERS},
    **{
        name.lower(): cls
        for name, cls in vars(strategies).items()
        if isinstance(cls, type)
        and issubclass(cls, Compressor | IndexSelector)
        and cls not in (Compressor, IndexSelector)
    },
    **MERGERS,
}
GPT_SHAPE = {"block_size": 64, "layers": 2, "width": 64, "heads": 4}


def parse_strategy(text: str, lr: float) -> Strategy:
    """Return the strategy that "name:argument=value,…" says.

    Args:
        text: the name is one of STRATEGIES or PRESETS; values are Python literals, a compressor, selector or optimizer
            with its arguments, or else strings.
        lr: learning rate, unless the text or the strategy's own defaults have one.

    >>> parse_strategy("diloco:H=50,outer_lr=0.4", lr=1e-3).optim_spec
    OptimSpec(AdamW, lr=0.001)
    >>> parse_strategy("diloco:compressor=topk(0.01),inner_optim=sgd(momentum=0.9)", lr=1e-3).optim_spec
    OptimSpec(SGD, momentum=0.9, lr=0.001)
    """
    cls, defaults, given = strategy_class(text, lr)
    return cls(**defaults | given)


def strategy_class(text: str, lr: float) -> tuple[type[Strategy], dict[str, Any], dict[str, Any]]:
    """Return the class that "name:argument=value,…" says, its arguments by default, and those given."""
    name, _, tail = text.partition(":")
    named = STRATEGIES | PRESETS
    cls, own_defaults = named[one_of("strategy", name, named)]
    return cls, {"lr": lr, **own_defaults}, _arguments(tail, f"strategy {text!r}")


def _arguments(text: str, where: str) -> dict[str, Any]:
    """Return name → value of "argument=value,…"."""
    given = {}
    for item in filter(None, _split(text)):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{where}: expected argument=value after the colon, got {item!r}")
        if key.strip() in given:
            raise ValueError(f"{where} names {key.strip()} more than once")
        given[key.strip()] = _value(value)
    return given


def parse_settings(items: Sequence[str]) -> dict[str, list[Any]]:
    """Return name → values of "name=value,value,…".

    >>> parse_settings(["H=5,10", "lr=1e-3", "inner_optim=sgd,adamw", "pairs=(1,2),(3,4)"])
    {'H': [5, 10], 'lr': [0.001], 'inner_optim': ['sgd', 'adamw'], 'pairs': [(1, 2), (3, 4)]}
    """
    settings: dict[str, list[Any]] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not (key and equals and text):
            raise ValueError(f"--set {item!r}: expected name=value,value,…")
        if key in settings:
            raise ValueError(f"--set names {key} more than once")
        try:
            settings[key] = list(ast.literal_eval(f"[{text}]"))
        except (ValueError, SyntaxError):
            settings[key] = [_value(one) for one in _split(text)]
    return settings


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
    """Return what the text of a value says: a literal, name(arguments) of something made, or the text itself."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(parsed, ast.Call):
            return ast.literal_eval(parsed)
    except (ValueError, SyntaxError):
        return text
    return _made(parsed)


def _made(call: ast.Call) -> Any:
    """Return what name(arguments) says; an argument is a literal, or made likewise."""
    text = ast.unparse(call)
    make = MADE[one_of("a value with arguments", ast.unparse(call.func), MADE)]

    def value(argument: ast.expr) -> Any:
        if isinstance(argument, ast.Call):
            return _made(argument)
        try:
            return ast.literal_eval(argument)
        except ValueError as error:
            raise ValueError(f"{text}: its arguments must be Python literals, or made likewise") from error

    given = [value(argument) for argument in call.args]
    named = {str(keyword.arg): value(keyword.value) for keyword in call.keywords}
    with naming(text):
        return make(*given, **named)


def writable(out: Path) -> Path:
    """Return the folder for results, made and tried: an hour of training is not for nothing.

    Raises:
        OSError: nothing can be written there.
    """
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out {out} is a file; give a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OSError(f"--out {out} cannot be written: {error.strerror}") from error
    return out


def loggers(arguments: argparse.Namespace) -> list[Logger] | None:
    log_dir = arguments.log_dir or Path("logs")
    loggers: list[Logger] = []
    if arguments.run_name is not None:
        loggers.append(CSVLogger(log_dir))
    if arguments.tensorboard:
        loggers.append(TensorBoardLogger(log_dir))
    if arguments.log_dir is not None and not loggers:
        raise ValueError("--log-dir has no effect without --run-name or --tensorboard")
    return loggers or None


def data(arguments: argparse.Namespace) -> tuple[Any, Any]:
    if arguments.mnist_folder is not None and arguments.data != "mnist":
        raise ValueError("--mnist-folder has no effect without --data mnist")
    if arguments.text is not None:
        return text_file(arguments.text, block_size=GPT_SHAPE["block_size"])
    if arguments.data == "docs":
        return docs_text(block_size=GPT_SHAPE["block_size"])
    if arguments.data == "digits":
        return digits()
    if arguments.mnist_folder is None:
        raise ValueError("--data mnist needs --mnist-folder DIR, the folder with the four IDX files")
    return mnist(arguments.mnist_folder)


def dealt(arguments: argparse.Namespace, train: Any) -> Any:
    """Return the training data as --partition deals them to the nodes."""
    if arguments.partition is None:
        return train
    kind, _, tail = arguments.partition.partition(":")
    taking_part = attending(arguments)
    nodes = arguments.nodes or 4
    everyone = nodes if taking_part is None else taking_part.population(nodes)
    return partition(train, everyone, kind, **_arguments(tail, f"--partition {arguments.partition}"))


def attending(arguments: argparse.Namespace) -> Participation | None:
    """Return who takes part in which steps, by --participation."""
    text = getattr(arguments, "participation", None)
    if text is None:
        return None
    name, _, tail = text.partition(":")
    where = f"--participation {text}"
    given = _arguments(tail, where)
    cls = PARTICIPATION[one_of(where, name, PARTICIPATION)]
    try:
        return cls(**({"n": arguments.nodes or 4} | given if name == "sample" else given))
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def clock(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the network and compute of `fit`, `compare` and `sweep`."""
    compute = arguments.compute
    if arguments.speeds is not None:
        if compute is None:
            raise ValueError("--speeds has no effect without --compute SECONDS")
        compute = Compute(compute, speeds=arguments.speeds)
    return {"network": arguments.network, "compute": compute}


def _is_text(arguments: argparse.Namespace) -> bool:
    return arguments.text is not None or arguments.data == "docs"


def model_kind(arguments: argparse.Namespace) -> str:
    kind = arguments.model or ("gpt" if _is_text(arguments) else "cnn")
    if (kind == "gpt") != _is_text(arguments):
        fitting = "gpt" if _is_text(arguments) else "mlp or cnn"
        raise ValueError(f"--model {kind} does not fit the data; --model may be {fitting} here")
    return str(kind)


def lr(arguments: argparse.Namespace) -> float:
    named = arguments.strategies if arguments.command == "compare" else [arguments.strategy]
    given = [text.partition(":")[0] for text in named]
    own = [name for name in given if "lr" in (STRATEGIES | PRESETS).get(name, (None, {}))[1]]
    if own and arguments.lr is not None:
        raise ValueError(f"--lr has no effect on {own[0]}, which has its own: give {own[0]}:lr={arguments.lr:g}")
    return LEARNING_RATES[model_kind(arguments)] if arguments.lr is None else float(arguments.lr)


def batch_size(arguments: argparse.Namespace) -> int:
    return BATCH_SIZES[model_kind(arguments)] if arguments.batch_size is None else int(arguments.batch_size)


def model(kind: str, train: Any, seed: int) -> nn.Module:
    if isinstance(train, TextDataset):
        return GPT(train.vocabulary.size, seed=seed, **GPT_SHAPE)
    images = train.tensors[0]
    if kind == "mlp":
        return MLP(images[0].numel(), seed=seed)
    return CNN(tuple(images.shape[1:]), seed=seed)


def title(arguments: argparse.Namespace) -> str:
    data = arguments.text.name if arguments.text is not None else arguments.data
    kind = model_kind(arguments).upper()
    data += f" ({arguments.partition})" if arguments.partition else ""
    return f"{kind} on {data}, {arguments.nodes} nodes × batch {batch_size(arguments)}, {arguments.steps} steps"


def computing(arguments: argparse.Namespace) -> dict[str, Any]:
    chosen = arguments.compile or ("auto" if arguments.executor == "auto" else "none")
    named = {name: getattr(arguments, name) for name in ("device", "executor", "deterministic", "autocast")}
    return {**named, "compile": {"none": False, "full": True}.get(chosen, chosen)}
