"""`vsim compare`, `train`, `verify`, `doctor` and `bench`: the main jobs from the command line."""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import nn

import vsim
from vsim import bench
from vsim.arguments import one_of, whole_number
from vsim.compare import Comparison, compare
from vsim.data import TextDataset, digits, docs_text, mnist, text_file
from vsim.doctor import machine
from vsim.engine import EXECUTORS
from vsim.models import CNN, GPT, MLP
from vsim.process import NodeFailure
from vsim.records.loggers import CSVLogger, Logger, TensorBoardLogger
from vsim.records.plots import save
from vsim.strategy import STRATEGIES, Strategy
from vsim.trainer import Trainer
from vsim.verify import verify

DATA = ("docs", "digits", "mnist")
MODELS = ("gpt", "mlp", "cnn")
# For each built-in model what trains it well in some hundred steps: AdamW's learning rate, examples a node and step.
LEARNING_RATES = {"gpt": 6e-4, "mlp": 2e-3, "cnn": 2e-3}
BATCH_SIZES = {"gpt": 8, "mlp": 16, "cnn": 16}
# What `vsim bench` times by default, the first as the measure of the others.
BENCHED = ["allreduce", "diloco:H=10", "sparta", "demo"]
GPT_SHAPE = {"block_size": 64, "layers": 2, "width": 64, "heads": 4}

_EXAMPLES = """
examples:
  vsim compare                                              K = 4 small GPTs on English text, all strategies
  vsim compare --data digits --model cnn --nodes 8          images instead
  vsim compare --text notes.txt --steps 500 --seeds 1 2 3   your own text, mean and band over three seeds
  vsim compare --strategies allreduce fedavg:H=50,island_size=2 diloco:H=50,outer_lr=0.7 diloco:H=200 --steps 400
  vsim train --strategy diloco:H=20 --nodes 16              one strategy, and its model
  vsim train --save-dir run1 --checkpoint-interval 50       the same, saved; with --resume it goes on where it stopped
  vsim verify --strategy diloco:H=5                         the simulator against 4 processes, bit by bit
  vsim doctor --data digits --nodes 16                      how this machine computes it
"""


def _epilog() -> str:
    """What --help says of strategies: their names, what is given to them by default, and what they are."""
    lines = [
        "strategies:",
        "  A name, or a name with arguments of its class: diloco:H=50,outer_lr=0.7. Beside --lr they are given:",
    ]
    for name, (cls, own) in STRATEGIES.items():
        given = ", ".join(f"{key}={value}" for key, value in own.items())
        summary = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        lines += [
            f"  {name:14} {given}",
            *textwrap.wrap(summary, 100, initial_indent=17 * " ", subsequent_indent=17 * " "),
        ]
    return "\n".join(lines) + "\n" + _EXAMPLES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="vsim",
        description="Simulate distributed training of K nodes in one process, and count every byte they would send.",
    )
    parser.add_argument("--version", action="version", version=f"vsim {vsim.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="compare | train | verify | doctor | bench")
    _add_compare(commands)
    _add_train(commands)
    _add_verify(commands)
    _add_doctor(commands)
    _add_bench(commands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError, NodeFailure) as error:
        print(f"vsim {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"vsim {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _add_compare(commands: Any) -> None:
    purpose = "train the same model with several strategies, and compare loss and bytes"
    command = _command(commands, "compare", purpose, several_seeds=True)
    command.add_argument(
        "--strategies", nargs="+", default=list(STRATEGIES), metavar="NAME", help="what to compare (default: all)"
    )
    _add_outcome(command)
    command.set_defaults(run=_compare)


def _add_train(commands: Any) -> None:
    command = _command(commands, "train", "train with one strategy, and keep the model")
    command.add_argument("--strategy", default="diloco", metavar="NAME", help="default: diloco")
    _add_outcome(command)
    saving = command.add_argument_group("checkpoints")
    saving.add_argument("--save-dir", type=Path, metavar="DIR", help="save at the end, and when interrupted (Ctrl-C)")
    saving.add_argument("--checkpoint-interval", type=int, metavar="STEPS", help="save every so many steps too")
    saving.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="PATH",
        help="go on with the run in --save-dir, or with the checkpoint at PATH",
    )
    command.set_defaults(run=_train)


def _add_verify(commands: Any) -> None:
    purpose = "train in the simulator and in one process a node, and compare the bits after every step"
    command = _command(commands, "verify", purpose)
    command.add_argument("--strategy", default="diloco", metavar="NAME", help="default: diloco")
    command.add_argument("--threads", type=int, help="CPU threads of every process (default: the machine's / K)")
    command.add_argument("--executor", choices=EXECUTORS, default="auto", help="of the simulator (default: auto)")
    command.set_defaults(run=_verify, steps=50)


def _add_doctor(commands: Any) -> None:
    purpose = "tell how this machine would compute a run: forms of operations, memory, executor, share of the peak"
    command = _command(commands, "doctor", purpose)
    command.add_argument("--strategy", default="diloco", metavar="NAME", help="default: diloco")
    _add_computing(command)
    command.set_defaults(run=_doctor)


def _add_bench(commands: Any) -> None:
    purpose = "time a step against K, beside K separate modules and beside its floor, and by strategy"
    command = commands.add_parser("bench", help=purpose, description=f"{purpose.capitalize()}.")
    models = list(bench.MODELS)
    command.add_argument("--models", nargs="+", choices=models, default=models[:3], help="default: the first three")
    command.add_argument("--nodes", nargs="+", type=int, default=[1, 4, 16], metavar="K", help="default: 1 4 16")
    command.add_argument(
        "--strategies",
        nargs="*",
        default=BENCHED,
        metavar="NAME",
        help=f"beside the first of these; none to leave them out (default: {' '.join(BENCHED)})",
    )
    command.add_argument("--compile", action="store_true", help="time a compiled step, too")
    command.add_argument("--rounds", type=int, help="turns that every candidate takes (default: by model)")
    command.add_argument("--out", type=Path, default=Path("vsim-out"), metavar="DIR", help="default: vsim-out")
    command.set_defaults(run=_bench)


def _command(commands: Any, name: str, purpose: str, several_seeds: bool = False) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = command.add_argument_group("data and model")
    source = data.add_mutually_exclusive_group()
    source.add_argument("--data", choices=DATA, default="docs", help="docs: Python's manual, always there (default)")
    source.add_argument("--text", type=Path, metavar="FILE", help="characters of a text file")
    data.add_argument("--mnist-folder", type=Path, metavar="DIR", help="where --data mnist finds its four files")
    data.add_argument("--model", choices=MODELS, help="default: gpt for text, cnn for images")
    run = command.add_argument_group("the run")
    run.add_argument("--nodes", type=int, default=4, metavar="K", help="nodes (default: 4)")
    run.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    run.add_argument("--batch-size", type=int, help="examples a node and step (default: by model)")
    run.add_argument("--lr", type=float, help="inner learning rate of AdamW (default: by model)")
    seed = run.add_mutually_exclusive_group()
    seed.add_argument("--seed", type=int, default=42, help="default: 42")
    if several_seeds:
        repeat = "train with each of them, instead of one --seed: mean, deviation and bands"
        seed.add_argument("--seeds", nargs="+", type=int, metavar="N", help=repeat)
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    return command


def _add_computing(command: argparse.ArgumentParser) -> None:
    how = command.add_argument_group("how it is computed")
    how.add_argument("--device", help="cuda, mps or cpu (default: the first of them that is there)")
    how.add_argument("--executor", choices=EXECUTORS, default="auto", help="default: auto")
    how.add_argument("--deterministic", action="store_true", help="the bits of separate processes; slower")
    how.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    how.add_argument(
        "--compile",
        choices=["none", "trace", "full", "auto"],
        help="trace: capture a step's operations; full: compile losses, gradients and kernels, in ten seconds or more; "
        "auto, the default but for an --executor: trace, and compile if the run is long enough for it",
    )


def _computing(arguments: argparse.Namespace) -> dict[str, Any]:
    chosen = arguments.compile or ("auto" if arguments.executor == "auto" else "none")
    named = {name: getattr(arguments, name) for name in ("device", "executor", "deterministic", "autocast")}
    return {**named, "compile": {"none": False, "full": True}.get(chosen, chosen)}


def _add_outcome(command: argparse.ArgumentParser) -> None:
    validation = command.add_argument_group("validation")
    validation.add_argument("--val-size", type=int, default=256, help="validation examples (default: %(default)s)")
    validation.add_argument("--val-interval", type=int, metavar="STEPS", help="default: ten times in a run")
    _add_computing(command)
    logs = command.add_argument_group("logs, beside what --out gets at the end")
    logs.add_argument("--run-name", metavar="NAME", help="log every step to LOG_DIR/NAME/<strategy>/*.csv")
    logs.add_argument("--tensorboard", action="store_true", help="write TensorBoard events to LOG_DIR, too")
    logs.add_argument("--wandb-project", metavar="NAME", help="log to this project of Weights & Biases")
    logs.add_argument("--log-dir", type=Path, metavar="LOG_DIR", help="default: logs")
    command.add_argument("--out", type=Path, default=Path("vsim-out"), metavar="DIR", help="default: vsim-out")


def parse_strategy(text: str, lr: float) -> Strategy:
    """Return the strategy that "name:argument=value,…" says.

    Args:
        text: the name is one of STRATEGIES; values are Python literals, or else strings.
        lr: learning rate, unless the text or the strategy's own defaults have one.

    >>> parse_strategy("diloco:H=50,outer_lr=0.4", lr=1e-3).optim_spec
    OptimSpec(AdamW, lr=0.001)
    """
    name, _, tail = text.partition(":")
    cls, own_defaults = STRATEGIES[one_of("strategy", name, STRATEGIES)]
    options: dict[str, Any] = {"lr": lr, **own_defaults}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"strategy {text!r}: expected argument=value after the colon, got {item!r}")
        try:
            options[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key.strip()] = value
    return cls(**options)


def _compare(arguments: argparse.Namespace) -> int:
    comparison = _run(arguments, arguments.strategies, arguments.seeds)
    print(f"\n{comparison.table()}\n")
    arguments.out.mkdir(parents=True, exist_ok=True)
    comparison.to_csv(arguments.out / "comparison.csv")
    save(comparison.figure(_title(arguments)), arguments.out / "comparison.png")
    print(f"figure: {arguments.out / 'comparison.png'}\ndata:   {arguments.out / 'comparison.csv'}")
    return 0


def _train(arguments: argparse.Namespace) -> int:
    if arguments.resume is True and arguments.save_dir is None:
        raise ValueError("--resume needs --save-dir DIR, or the PATH of a checkpoint")
    comparison = _run(
        arguments,
        [arguments.strategy],
        save_dir=arguments.save_dir,
        checkpoint_interval=arguments.checkpoint_interval,
        resume=arguments.resume,
    )
    ((name, run),) = comparison.items()
    if run.failure.startswith("interrupted"):
        raise KeyboardInterrupt
    if run.model is None:
        raise FloatingPointError(f"{name}: {run.failure}")
    print(f"\n{comparison.table()}\n")
    arguments.out.mkdir(parents=True, exist_ok=True)
    run.history.to_csv(arguments.out / "history.csv")
    save(comparison.figure(_title(arguments)), arguments.out / "history.png")
    save_model(run.model, str(arguments.out / "model.safetensors"))
    for what in ("history.png", "history.csv", "model.safetensors"):
        print(arguments.out / what)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    train, _ = _data(arguments)
    report = verify(
        _model(_model_kind(arguments), train, arguments.seed),
        train,
        parse_strategy(arguments.strategy, _lr(arguments)),
        arguments.nodes,
        arguments.steps,
        threads=arguments.threads,
        executor=arguments.executor,
        batch_size=_batch_size(arguments),
        seed=arguments.seed,
        progress=not arguments.quiet,
    )
    print(report)
    return 0 if report.identical else 1


def _doctor(arguments: argparse.Namespace) -> int:
    train, _ = _data(arguments)
    trainer = Trainer(_model(_model_kind(arguments), train, arguments.seed), train)
    explanation = trainer.explain(
        strategy=parse_strategy(arguments.strategy, _lr(arguments)),
        num_nodes=arguments.nodes,
        max_steps=arguments.steps,
        batch_size=_batch_size(arguments),
        seed=arguments.seed,
        **_computing(arguments),
    )
    print(f"{machine()}\n\n{_title(arguments)}\n{explanation}")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    for name in ("nodes", "rounds"):
        for value in getattr(arguments, name) if name == "nodes" else filter(None, [arguments.rounds]):
            whole_number(f"--{name}", value)
    strategies = {text: partial(parse_strategy, text, 1e-4) for text in arguments.strategies}
    for make in strategies.values():
        make()  # before minutes of measuring
    lines = bench.bench(
        arguments.models,
        arguments.nodes,
        compile=arguments.compile,
        rounds=arguments.rounds,
        progress=lambda line: print(f"{line.model}, K = {line.num_nodes}: done", file=sys.stderr),
    )
    print(f"\n{bench.table(lines)}\n")
    by_strategy = []
    if strategies:
        by_strategy = bench.bench_strategies(arguments.models, arguments.nodes, strategies, rounds=arguments.rounds)
        print(f"{bench.strategy_table(by_strategy)}\n")
    for path in bench.save(lines, arguments.out, by_strategy):
        print(path)
    return 0


def _run(
    arguments: argparse.Namespace, strategies: Sequence[str], seeds: Sequence[int] | None = None, **checkpoints: Any
) -> Comparison:
    repeated = sorted({s for s in strategies if list(strategies).count(s) > 1})
    if repeated:
        raise ValueError(f"--strategies names {', '.join(repeated)} more than once")
    if arguments.out.exists() and not arguments.out.is_dir():  # before an hour of training
        raise NotADirectoryError(f"--out {arguments.out} is a file; give a folder")
    train, val = _data(arguments)
    lr = _lr(arguments)
    return compare(
        lambda seed: _model(_model_kind(arguments), train, seed),
        train,
        val,
        strategies={text: parse_strategy(text, lr) for text in strategies},
        num_nodes=arguments.nodes,
        max_steps=arguments.steps,
        batch_size=_batch_size(arguments),
        val_size=arguments.val_size,
        val_interval=max(1, arguments.steps // 10) if arguments.val_interval is None else arguments.val_interval,
        seeds=[arguments.seed] if seeds is None else seeds,
        **_computing(arguments),
        logger=_loggers(arguments),
        run_name=arguments.run_name,
        wandb_project=arguments.wandb_project,
        progress=not arguments.quiet,
        **checkpoints,
    )


def _loggers(arguments: argparse.Namespace) -> list[Logger] | None:
    log_dir = arguments.log_dir or Path("logs")
    loggers: list[Logger] = []
    if arguments.run_name is not None:
        loggers.append(CSVLogger(log_dir))
    if arguments.tensorboard:
        loggers.append(TensorBoardLogger(log_dir))
    if arguments.log_dir is not None and not loggers:
        raise ValueError("--log-dir has no effect without --run-name or --tensorboard")
    return loggers or None


def _data(arguments: argparse.Namespace) -> tuple[Any, Any]:
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


def _is_text(arguments: argparse.Namespace) -> bool:
    return arguments.text is not None or arguments.data == "docs"


def _model_kind(arguments: argparse.Namespace) -> str:
    kind = arguments.model or ("gpt" if _is_text(arguments) else "cnn")
    if (kind == "gpt") != _is_text(arguments):
        fitting = "gpt" if _is_text(arguments) else "mlp or cnn"
        raise ValueError(f"--model {kind} does not fit the data; --model may be {fitting} here")
    return str(kind)


def _lr(arguments: argparse.Namespace) -> float:
    return LEARNING_RATES[_model_kind(arguments)] if arguments.lr is None else float(arguments.lr)


def _batch_size(arguments: argparse.Namespace) -> int:
    return BATCH_SIZES[_model_kind(arguments)] if arguments.batch_size is None else int(arguments.batch_size)


def _model(kind: str, train: Any, seed: int) -> nn.Module:
    if isinstance(train, TextDataset):
        return GPT(train.vocabulary.size, seed=seed, **GPT_SHAPE)
    images = train.tensors[0]
    if kind == "mlp":
        return MLP(images[0].numel(), seed=seed)
    return CNN(tuple(images.shape[1:]), seed=seed)


def _title(arguments: argparse.Namespace) -> str:
    data = arguments.text.name if arguments.text is not None else arguments.data
    kind = _model_kind(arguments).upper()
    return f"{kind} on {data}, {arguments.nodes} nodes × batch {_batch_size(arguments)}, {arguments.steps} steps"
