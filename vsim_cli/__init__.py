"""The command line: `vsim compare`, `sweep`, `show`, `report`, `watch`, `time` and `verify`.

This is a separate package because importing `vsim` loads PyTorch, and help, errors in options and the version should
not wait for that. A function of `vsim.cli` with the name of the command does the work.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any, get_args, get_origin, get_type_hints

import tyro

from vsim_cli.commands import Command, Compare, Sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(f"vsim {version('vsim')}")
        return 0
    try:
        _reject_repeated(argv)
        _reject_empty(argv)
        command: Command = tyro.cli(
            Command,
            prog="vsim",
            description="Simulate distributed training of K nodes in one process, and count every byte they would "
            f"send. Version {version('vsim')} (--version).",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            args=argv,
        )
    except SystemExit as end:
        if argv and argv[0] in ("compare", "sweep", "time", "verify") and not end.code:
            print(_EXAMPLES, flush=True)
            from vsim.cli import about_strategies  # loads PyTorch

            print(about_strategies())
        raise
    except ValueError as error:
        print(f"vsim {argv[0]}: {error}", file=sys.stderr)
        return 2
    if isinstance(command, Compare | Sweep) and not command.problem.quiet and sys.stderr.isatty():
        with suppress(ValueError):  # the command reports the error
            print(f"{command.problem.title(command.priced.budget)} …", file=sys.stderr)
    from vsim.cli import run

    return run(command, argv)


def _reject_repeated(argv: Sequence[str]) -> None:
    """Raise a ValueError for an option that is given twice, because only the last one would count."""
    options = [word.partition("=")[0] for word in argv if word.startswith("--")]
    for option in options:
        if options.count(option) > 1:
            raise ValueError(f"{option} is given more than once; give all of its values after one {option}")


def _reject_empty(argv: Sequence[str]) -> None:
    """Raise a ValueError for an option of several values that is given none, because it would have no effect."""
    several = {f"--{name.replace('_', '-')}" for kind in get_args(Command) for name in _of_several(kind)}
    for word, after in pairwise([*argv, "--"]):
        if word in several and after.startswith("--"):
            raise ValueError(f"{word} needs at least one value; leave it out for its default")


def _of_several(kind: Any) -> Iterator[str]:
    """Yield the names of options that take any number of values, which parse none as an empty tuple."""
    plain, hints = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        if get_origin(plain[one.name]) is tuple:
            names = [name for about in get_args(hints[one.name])[1:] if (name := getattr(about, "name", None))]
            yield from names or [one.name]
        elif is_dataclass(plain[one.name]):
            yield from _of_several(plain[one.name])


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
