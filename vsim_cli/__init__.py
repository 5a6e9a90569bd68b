"""The command line: `vsim compare`, `sweep`, `show`, `report`, `watch`, `time`, `verify`,
`measure`, `atlas` and `strategies`.

This is a separate package because importing `vsim` loads PyTorch, and help, errors in options and the version should
not wait for that. A function of `vsim.cli` with the name of the command does the work.
"""

from __future__ import annotations

import difflib
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from runpy import run_path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from vsim_cli.commands import Command, Compare, Sweep


@dataclass
class _Line:
    """Simulate distributed training of K nodes in one process, and count every byte they would send."""

    command: Annotated[Command, tyro.conf.arg(name="")]
    version: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """show the version and exit"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = parsed(argv)
    if isinstance(command, int):
        return command
    if isinstance(command, Compare | Sweep) and not command.problem.details.quiet and sys.stderr.isatty():
        with suppress(ValueError):  # the command reports the error
            print(f"{command.problem.title(command.priced.budget)} …", file=sys.stderr)
    from vsim.cli import run

    return run(command, argv)


def _version() -> str:
    """Return the version of the vsim that would be imported, from its file, as importing it loads PyTorch."""
    found = find_spec("vsim")
    assert found is not None and found.origin is not None
    return str(run_path(str(Path(found.origin).with_name("version.py")))["__version__"])


def parsed(argv: Sequence[str]) -> Command | int:
    """Return the command; or, if there is none to run, its exit status. Raise SystemExit after help and errors of the
    parser."""
    if list(argv) == ["--version"]:
        print(f"vsim {_version()}")
        return 0
    name = argv[0] if argv else ""
    try:
        _reject_unknown(name)
        _reject_repeated(argv)
        _reject_both(argv)
        _reject_empty(argv)
        own = {command.__name__.lower(): command for command in get_args(Command)}.get(name)
        line = tyro.cli(  # a command by itself, so that suggestions for a misspelled option are this command's
            _Line if own is None else own,
            prog="vsim" if own is None else f"vsim {name}",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            args=argv if own is None else argv[1:],
        )
    except SystemExit as end:
        if name in _EXAMPLES and not end.code:
            print(_examples(name), flush=True)
        raise
    except ValueError as error:
        print(f"vsim {name}: {error}", file=sys.stderr)
        return 2
    return line.command if isinstance(line, _Line) else line


_NAMES = [command.__name__.lower() for command in get_args(Command)]
# Options of which a command takes one.
_EITHER = (("--data", "--text"), ("--seed", "--seeds"))


def _reject_unknown(name: str) -> None:
    """Raise a ValueError for a command that does not exist."""
    if name and not name.startswith("-") and name not in _NAMES:
        nearest = difflib.get_close_matches(name, _NAMES, n=1)
        hint = f"did you mean {nearest[0]!r}? The" if nearest else "the"
        raise ValueError(f"no such command; {hint} commands are {', '.join(_NAMES)}")


def _reject_both(argv: Sequence[str]) -> None:
    """Raise a ValueError for two options of which a command takes one."""
    options = {word.partition("=")[0] for word in argv}
    for one, other in _EITHER:
        if {one, other} <= options:
            raise ValueError(f"{one} and {other} are both given; give one of these")


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


def _examples(name: str) -> str:
    """Return a command's examples as text, as wide as the terminal."""
    width = shutil.get_terminal_size().columns
    lines = ["examples:"]
    for about, call in _EXAMPLES[name].items():
        lines += textwrap.wrap(f"# {about}", width - 2, initial_indent="  ", subsequent_indent="  # ")
        words = textwrap.wrap(f"vsim {name} {call}", width - 4, subsequent_indent="  ", break_on_hyphens=False)
        lines += [f"  {line}" for line in " \\\n".join(words).splitlines()]
    return "\n".join(lines)


# Command → what an example does → its options.
_EXAMPLES = {
    "compare": {
        "K = 4 small GPTs on English text, seven strategies": "",
        "images instead": "--data digits --model cnn --nodes 8",
        "your own text, mean and band over three seeds": "--text notes.txt --steps 500 --seeds 1 2 3",
        "the paper's settings, next to AllReduce": "--preset diloco-paper --strategies allreduce --steps 2000",
        "strategies with arguments": "--strategies allreduce diloco:H=50,outer_lr=0.7 fedavg:H=50 --steps 400",
        "two more seeds for what has been compared": "--extend vsim-out/comparison.json --seeds 42 1 2",
        "equal hours instead of equal steps": '--network "200 Mbit/s, 50 ms" --compute 0.8 --budget time=10min',
        "saved; with --resume it continues where it stopped": "--save-dir run1 --checkpoint-interval 50",
    },
    "sweep": {
        "nine settings, three seeds each": "--strategy diloco --set H=5,10,50 outer_lr=0.4,0.7,1.0 --seeds 1 2 3",
        "only the better half of the settings continues at each rung": "--set outer_lr=0.2,0.4,0.7,1.0 --halving 2",
    },
    "time": {
        "hours of a model that is not trained here": "--parameters 10e9 --nodes 8 --network "
        '"1 Gbit/s, 20 ms" --compute 0.8',
    },
    "show": {"the table so far of runs that still train": "run1"},
    "watch": {"a page that follows runs in this machine's browser": "run1"},
    "report": {"a page to send, with sliders for the network": "vsim-out --out report.html"},
    "measure": {
        "four processes on this machine": "--nodes 4",
        "with the steps of your model, and runs next to their predictions": "--nodes 4 --step train.py:step --check",
    },
    "atlas": {
        "your own strategy next to all others, on two tasks": "--mine my_module:MyStrategy --tasks digits strokes",
    },
    "verify": {"the simulator against 4 processes, bit by bit": "--strategy diloco:H=5"},
}
