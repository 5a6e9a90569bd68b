"""Descriptions of runs without what concerns only the sender of a page: folders, files and operating system."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vsim.analysis.provenance import Provenance

# Options of commands whose values are paths, and entries of a description that say where the sender's files are.
_OF_PATHS = ("--out", "--extend", "--save-dir", "--log-dir", "--text", "--mnist-folder")
_OF_SENDER = ("save_dir", "resume")
_PATH = re.compile(r"(?<![\w/.~<-])(?:[A-Za-z]:[\\/]+|~[\\/]|\.{0,2}/)(?:[^\s'\"/\\,;:()]+[\\/]+)*([^\s'\"/\\,;:()]+)")


def to_send(about: Provenance) -> Provenance:
    """Return a description of runs without what concerns only the sender: folders, files and operating system."""
    kept = {name: value for name, value in about.items() if name not in _OF_SENDER}
    if isinstance(kept.get("machine"), Mapping):
        kept["machine"] = {name: value for name, value in kept["machine"].items() if name != "system"}
    kept["calls"] = [_without_options(str(call)) for call in about["calls"]]
    return Provenance(kept)


def _without_options(call: str) -> str:
    """Return a command, or a call in Python, without the options that say where files are.

    >>> _without_options("vsim compare --out vsim-out --steps 40 --text=notes.txt")
    'vsim compare --steps 40'
    >>> _without_options("vsim.compare(num_nodes=4, save_dir='runs', max_steps=40)")
    'vsim.compare(num_nodes=4, max_steps=40)'
    """
    options, entries = "|".join(_OF_PATHS), "|".join(_OF_SENDER)
    call = re.sub(rf" (?:{options})(?:=| +)(?:'[^']*'|\S+)", "", call)
    return re.sub(rf"(?:, )?\b(?:{entries})=(?:'[^']*'|\w+\('[^']*'\)|\w+)", "", call)


def without_paths(text: str) -> str:
    """Return text with only the last part of each path.

    >>> without_paths("no space left: '/home/me/runs/a.json', at 1 Gbit/s")
    "no space left: 'a.json', at 1 Gbit/s"
    """
    return _PATH.sub(r"\1", text)
