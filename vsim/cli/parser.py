"""The options of the commands, and what --help says."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any, NoReturn

from vsim import bench
from vsim.arguments import one_of
from vsim.cli import commands
from vsim.cli.problem import MADE
from vsim.cluster.optim import OPTIMIZERS
from vsim.data.dealing import KINDS
from vsim.engine import EXECUTORS
from vsim.strategy import COMPARED, PRESETS, STRATEGIES
from vsim.version import __version__

_OF_PAPERS = f"with the paper's hyperparameters: {', '.join(PRESETS)}"
DATA = ("docs", "digits", "mnist")
MODELS = ("gpt", "mlp", "cnn")
# What `vsim bench` times by default, the first as the measure of the others.
BENCHED = ["allreduce", "diloco:H=10", "sparta", "demo"]

_COMPARED = f"default: {' '.join(COMPARED)}"

_EXAMPLES = """
examples:
  vsim compare                                              K = 4 small GPTs on English text, seven strategies
  vsim compare --data digits --model cnn --nodes 8          images instead
  vsim compare --text notes.txt --steps 500 --seeds 1 2 3   your own text, mean and band over three seeds
  vsim compare --preset diloco-paper --strategies allreduce --steps 2000   as the paper has it, beside AllReduce
  vsim compare --strategies allreduce fedavg:H=50,island_size=2 diloco:H=50,outer_lr=0.7 diloco:H=200 --steps 400
  vsim compare --strategies diloco:H=30 streaming:H=30,fragments=4,delay=2 eager:H=30     the newer ones
  vsim sweep --strategy diloco --set H=5,10,50 outer_lr=0.4,0.7,1.0 --seeds 1 2 3   nine settings, three seeds each
  vsim train --strategy diloco:H=20 --nodes 16              one strategy, and its model
  vsim train --save-dir run1 --checkpoint-interval 50       the same, saved; with --resume it goes on where it stopped
  vsim time --parameters 10e9 --nodes 8 --network "1 Gbit/s, 20 ms" --compute 0.8   hours on a network, not trained
  vsim verify --strategy diloco:H=5                         the simulator against 4 processes, bit by bit
  vsim doctor --data digits --nodes 16                      how this machine computes it
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    whole = _Parser(
        prog="vsim",
        description="Simulate distributed training of K nodes in one process, and count every byte they would send.",
    )
    whole.add_argument("--version", action="version", version=f"vsim {__version__}")
    names = "compare | sweep | train | time | verify | doctor | bench"
    kinds = whole.add_subparsers(dest="command", required=True, metavar=names)
    for add in (_add_compare, _add_sweep, _add_train, _add_time, _add_verify, _add_doctor, _add_bench):
        add(kinds)
    return whole


def _preset(text: str) -> str:
    """Return the text of a preset, with or without further arguments."""
    try:
        one_of("it", text.partition(":")[0], PRESETS)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as those of the commands are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


def _epilog() -> str:
    """What --help says of strategies: their names, what is given to them by default, and what they are."""
    made = textwrap.wrap(", ".join(sorted(MADE.keys() - OPTIMIZERS.keys())), 100)
    lines = [
        "strategies:",
        "  A name, or a name with arguments of its class: diloco:H=50,outer_lr=0.7. A value is a Python literal, text,",
        "  an optimizer of torch.optim with its arguments, 'diloco:inner_optim=adamw(weight_decay=0.1)', or likewise",
        "  one of these, 'diloco:compressor=topk(0.01)':",
        *(f"    {line}" for line in made),
        "  Beside --lr the strategies are given:",
    ]
    for title, table in (("", STRATEGIES), ("presets, which --preset names:", PRESETS)):
        lines += ["", title] if title else []
        for name, (cls, own) in table.items():
            given = ", ".join(f"{key}={value}" for key, value in own.items())
            summary = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
            lines += [f"  {name:14} {given}"]
            lines += textwrap.wrap(summary, 100, initial_indent=17 * " ", subsequent_indent=17 * " ")
    return "\n".join(lines) + "\n" + _EXAMPLES


def _add_compare(kinds: Any) -> None:
    purpose = "train the same model with several strategies, and compare loss and bytes"
    command = _command(kinds, "compare", purpose, one_strategy=False, several_seeds=True)
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "NAME"}
    command.add_argument("--strategies", help=f"what to compare ({_COMPARED}; with --preset only that)", **several)
    command.add_argument("--preset", dest="strategies", type=_preset, help=f"{_OF_PAPERS}, beside them", **several)
    _add_target(command)
    _add_outcome(command)
    command.set_defaults(run=commands.run_compare)


def _add_sweep(kinds: Any) -> None:
    purpose = "train with every combination of some settings of a strategy, and find the best"
    command = _command(kinds, "sweep", purpose, several_seeds=True)
    command.add_argument(
        "--set",
        nargs="+",
        required=True,
        metavar="NAME=V,V,…",
        help="arguments of the strategy, num_nodes or batch_size, with the values to try",
    )
    command.add_argument(
        "--halving", type=int, metavar="F", help="at each of several rungs, let only the best 1/F of the settings go on"
    )
    _add_target(command)
    _add_outcome(command)
    command.set_defaults(run=commands.run_sweep, nodes=None)


def _add_target(command: argparse.ArgumentParser) -> None:
    priced = command.add_argument_group("what it takes")
    purpose = "show the steps and bytes, and with --network the hours, that each takes to this validation loss"
    priced.add_argument("--target-loss", type=float, metavar="LOSS", help=purpose)
    _add_clock(priced, 'show hours on it: "200 Mbit/s, 50 ms"')


def _add_clock(group: Any, of_network: str) -> None:
    group.add_argument("--network", metavar="'BANDWIDTH, LATENCY'", help=of_network)
    purpose = "that a node computes in a step: 0.8, or '800 ms'; asynchronous strategies need it"
    group.add_argument("--compute", type=_number_or_text, metavar="SECONDS", help=purpose)
    group.add_argument("--speeds", type=_numbers, metavar="V,V,…", help="of the nodes, relative to --compute: 1,1,1,4")


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def _add_train(kinds: Any) -> None:
    command = _command(kinds, "train", "train with one strategy, and keep the model")
    _add_clock(
        command.add_argument_group("the clock of an asynchronous strategy"), "that its messages take: '1 Gbit/s'"
    )
    _add_outcome(command, of_one_run=True)
    command.set_defaults(run=commands.run_train)


def _add_time(kinds: Any) -> None:
    purpose = "tell how long runs would take on a network, without training"
    command = _command_without_data(kinds, "time", purpose, _epilog())
    command.add_argument(
        "--strategies", nargs="+", default=COMPARED, metavar="NAME", help=f"default: {' '.join(COMPARED)}"
    )
    command.add_argument("--parameters", type=float, default=1e9, metavar="N", help="of the model (default: 1e9)")
    command.add_argument("--bytes-per-parameter", type=int, default=4, metavar="B", help="1, 2, 4 (default) or 8")
    command.add_argument("--nodes", type=int, default=4, metavar="K", help="default: 4")
    command.add_argument("--steps", type=int, default=1000, help="optimizer steps (default: %(default)s)")
    purpose = "bandwidth, latency, algorithm of collectives, such as '1 Gbit/s, 5 ms, tree'"
    command.add_argument("--network", default="200 Mbit/s, 50 ms", help=f"{purpose} (default: '%(default)s', a ring)")
    purpose = "that a node computes in a step: 0.8, or '800 ms'"
    command.add_argument("--compute", type=_number_or_text, required=True, metavar="SECONDS", help=purpose)
    purpose = "overlap what is sent with the backward pass, layer by layer (default: no overlap)"
    command.add_argument("--layers", type=int, metavar="L", help=purpose)
    command.set_defaults(run=commands.run_time)


def _add_saving(command: argparse.ArgumentParser, of_one_run: bool) -> None:
    saving = command.add_argument_group("checkpoints")
    saving.add_argument("--save-dir", type=Path, metavar="DIR", help="save at the end, and when interrupted (Ctrl-C)")
    saving.add_argument("--checkpoint-interval", type=int, metavar="STEPS", help="save every so many steps too")
    if of_one_run:
        purpose = "go on with the run in --save-dir, or with the checkpoint at PATH"
        saving.add_argument("--resume", nargs="?", const=True, default=False, metavar="PATH", help=purpose)
    else:
        saving.add_argument("--resume", action="store_true", help="go on with what is in --save-dir")


def _add_verify(kinds: Any) -> None:
    purpose = "train in the simulator and in one process a node, and compare the bits after every step"
    command = _command(kinds, "verify", purpose)
    command.add_argument("--threads", type=int, help="CPU threads of every process (default: the machine's / K)")
    command.add_argument("--executor", choices=EXECUTORS, default="auto", help="of the simulator (default: auto)")
    command.set_defaults(run=commands.run_verify, steps=50)


def _add_doctor(kinds: Any) -> None:
    purpose = "tell how this machine would compute a run: forms of operations, memory, executor, share of the peak"
    command = _command(kinds, "doctor", purpose)
    _add_computing(command)
    command.set_defaults(run=commands.run_doctor)


def _add_bench(kinds: Any) -> None:
    purpose = "time a step against K, beside K separate modules and beside its floor, and by strategy"
    command = _command_without_data(kinds, "bench", purpose)
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
    command.add_argument("--compile", action="store_true", help="time a compiled step and the bare one, too")
    command.add_argument(
        "--jax", action="store_true", help='beside JAX, except resnet (needs pip install "vsim[bench]")'
    )
    command.add_argument("--rounds", type=int, help="turns that every candidate takes (default: by model)")
    command.add_argument("--out", type=Path, default=Path("vsim-out"), metavar="DIR", help="default: vsim-out")
    command.set_defaults(run=commands.run_bench)


def _command_without_data(kinds: Any, name: str, purpose: str, epilog: str | None = None) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = kinds.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return command


def _command(
    kinds: Any, name: str, purpose: str, one_strategy: bool = True, several_seeds: bool = False
) -> argparse.ArgumentParser:
    command = _command_without_data(kinds, name, purpose, _epilog())
    data = command.add_argument_group("data and model")
    source = data.add_mutually_exclusive_group()
    source.add_argument("--data", choices=DATA, default="docs", help="docs: Python's manual, always there (default)")
    source.add_argument("--text", type=Path, metavar="FILE", help="characters of a text file")
    data.add_argument("--mnist-folder", type=Path, metavar="DIR", help="where --data mnist finds its four files")
    purpose = (
        f"deal the examples to the nodes, such as dirichlet:alpha=0.1 ({', '.join(KINDS)}); default: all share them"
    )
    data.add_argument("--partition", metavar="KIND", help=purpose)
    data.add_argument("--model", choices=MODELS, help="default: gpt for text, cnn for images")
    run = command.add_argument_group("the run")
    run.add_argument("--nodes", type=int, default=4, metavar="K", help="nodes (default: 4)")
    purpose = "who takes part: sample:of=200, dropout:p=0.2, trace:file=events.csv, deadline:seconds=30 (default: all)"
    run.add_argument("--participation", metavar="KIND", help=purpose)
    run.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    run.add_argument("--batch-size", type=int, help="examples a node and step (default: by model)")
    run.add_argument("--lr", type=float, help="inner learning rate of AdamW (default: by model)")
    seed = run.add_mutually_exclusive_group()
    seed.add_argument("--seed", type=int, default=42, help="default: 42")
    if several_seeds:
        repeat = "train with each of them, instead of one --seed: mean, deviation and bands"
        seed.add_argument("--seeds", nargs="+", type=int, metavar="N", help=repeat)
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    if one_strategy:
        strategy = command.add_mutually_exclusive_group()
        strategy.add_argument("--strategy", default="diloco", metavar="NAME", help="default: diloco")
        strategy.add_argument("--preset", dest="strategy", type=_preset, metavar="NAME", help=_OF_PAPERS)
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


def _add_outcome(command: argparse.ArgumentParser, of_one_run: bool = False) -> None:
    validation = command.add_argument_group("validation")
    validation.add_argument("--val-size", type=int, metavar="N", help="validation examples (default: up to 2048)")
    validation.add_argument("--val-interval", type=int, metavar="STEPS", help="default: ten times in a run")
    _add_computing(command)
    logs = command.add_argument_group("logs, beside what --out gets at the end")
    logs.add_argument("--run-name", metavar="NAME", help="log every step to LOG_DIR/NAME/<strategy>/*.csv")
    logs.add_argument("--tensorboard", action="store_true", help="write TensorBoard events to LOG_DIR, too")
    logs.add_argument("--wandb-project", metavar="NAME", help="log to this project of Weights & Biases")
    logs.add_argument("--log-dir", type=Path, metavar="LOG_DIR", help="default: logs")
    command.add_argument("--out", type=Path, default=Path("vsim-out"), metavar="DIR", help="default: vsim-out")
    _add_saving(command, of_one_run)
