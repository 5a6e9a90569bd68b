"""The recipes of CONTRIBUTING.md: a place that lacks something new, or still has what was removed, is named."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest
import test_average
import test_compression
import test_network
import test_one_price
import test_partition
from page_code import ROOT
from test_strategies_common import TABLE, of_families

import vsim
import vsim.algorithms
import vsim.compat.exogym.strategy
import vsim.core
import vsim.strategy
from vsim.analysis.report.data import _COLLECTIVES
from vsim.data.partition import KINDS
from vsim.network.cost import ALGORITHMS
from vsim.runs.spec import EVENTS
from vsim.strategy import STRATEGIES, Algorithm, Compressor, IndexSelector, Rule, When, remade
from vsim_cli.commands import Command


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def lacking(page: str, *words: str) -> list[str]:
    """The words that a file lacks, each a whole word."""
    return [word for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text(page))]


# Strategies, averages, compressors -----------------------------------------------------------------------------------

HIDDEN = {
    "BlockQuantizer": "a base, in vsim.algorithms.compression",
    "Own": "made by average_of",
    "RandomBasisTopK": "of DeMo alone; tests/test_demo.py",
}


def defined() -> Iterator[type]:
    """The public classes of the rooms of strategies: with a family, or what their arguments may be."""
    rooms = (vsim.algorithms, vsim.core)
    for module in (one for room in rooms for one in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")):
        for name, one in vars(importlib.import_module(module.name)).items():
            if not isinstance(one, type) or one.__module__ != module.name or name[0] == "_" or name in HIDDEN:
                continue
            if issubclass(one, Compressor | Rule | IndexSelector | When) or (
                issubclass(one, Algorithm) and "family" in vars(one)
            ):
                yield one


def test_what_is_defined_is_exported() -> None:
    assert len([*defined()]) > 50
    for cls in defined():
        made_by = vars(cls).get("made_by")
        if issubclass(cls, Rule) and cls is not Rule:
            assert made_by, f"vsim/core/average/functions.py: make a function of {cls.__name__} by function_of"
        name, path = (made_by, "vsim.core.average") if made_by else (cls.__name__, cls.__module__)
        line = f"from {path} import {name} as {name}"
        assert name in vsim.strategy.__all__, f"vsim/strategy/__init__.py: {line}"


def test_the_command_line_offers_each_strategy_under_a_name_of_its_own() -> None:
    offered = [cls for cls, _ in STRATEGIES.values()]
    for cls in {*of_families()} - {*vsim.strategy._NOT_OFFERED, *offered}:
        raise AssertionError(f"{cls.__name__} needs a file of its own, whose name is its name on the command line")


@pytest.mark.parametrize("page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_pages_name_strategies_that_exist(page: str) -> None:
    own = {*vars(vsim.strategy), *vars(vsim.compat.exogym.strategy), "MyStrategy"}
    own |= {*re.findall(r"class (\w+)", text(page))}
    assert not {*re.findall(r"\b\w+Strategy\b", text(page))} - own, f"{page} names strategies that are gone"


def test_calls_of_earlier_versions_are_of_strategies_that_exist() -> None:
    gone = {old for old, (name, _) in remade._PARTS.items() if name not in vsim.strategy.__all__}
    assert not gone, f"vsim/strategy/remade.py, _PARTS: remove {gone}"
    calls = text("tests/earlier/calls.txt").splitlines()
    lines = [f"line {i}: {call}" for i, call in enumerate(calls, 1) if remade.remade(call) is None]
    assert not lines, f"tests/earlier/calls.txt: the strategies of these lines are gone: {lines}"


def test_rules_and_compressors_are_tried_and_in_the_reference() -> None:
    rules = [cls for cls in defined() if issubclass(cls, Rule) and cls is not Rule]
    tried = {type(rule) for rule in test_average.ALL} | test_average.ROBUST.keys()
    for cls in rules:
        assert cls in tried, f"tests/test_average.py: add {cls.__name__} to REFERENCES, or to ALL and a test by hand"
        needless = all(p.default is not p.empty for p in inspect.signature(cls).parameters.values())
        by_name = cls.made_by in vsim.strategy.RULES or not needless
        assert by_name, f"vsim/core/average/functions.py: add {cls.made_by} to RULES"
    assert not (left := lacking("docs/strategies.md", *(cls.made_by for cls in rules))), f"docs/strategies.md: {left}"
    made = {name: type(make()) for name, make in test_compression.ALL.items()}
    by_hand = {made[name] for name in (*test_compression.BY_HAND, "dct")}
    sizes = {type(one) for one, _ in test_compression.PAYLOADS} | {
        type(module.average.message.compressor)
        for row in TABLE
        for module in row.arguments.get("communication_modules", ())
        if module.average.message is not None
    }
    for cls in [cls for cls in defined() if issubclass(cls, Compressor) and cls is not Compressor]:
        for what, known in (("ALL", made.values()), ("BY_HAND", by_hand), ("PAYLOADS", sizes)):
            assert cls in known, f"tests/test_compression.py: add {cls.__name__} to {what}"
        name = f"vsim.strategy.{cls.__name__}"
        assert not lacking("docs/api/compressors.md", name), f"docs/api/compressors.md: add {name}"


# Collectives, data, options, callbacks, command line -----------------------------------------------------------------


def test_an_algorithm_for_collectives_has_all_its_places() -> None:
    assert set(test_network.ALGORITHMS) == {*ALGORITHMS}, "tests/test_network.py: a price by hand in ALGORITHMS"
    assert test_one_price.PRICES.keys() == {*ALGORITHMS}, "tests/test_one_price.py, PRICES: seconds by hand"
    named = {name for name in _COLLECTIVES if name is not None}
    assert named == {*ALGORITHMS}, "vsim/analysis/report/data.py, _COLLECTIVES: the words of the page"
    for page in ("docs/time.md", "vsim/network/links.py", "vsim_cli/commands.py"):
        assert not (left := lacking(page, *ALGORITHMS)), f"{page}: name {left}"


def test_a_partition_has_all_its_places() -> None:
    assert test_partition.KINDS.keys() == KINDS.keys(), "tests/test_partition.py, KINDS: what each kind promises"
    pages = {"vsim/data/partition.py, the docstring": vsim.data.partition.__doc__, "docs/data.md": text("docs/data.md")}
    for name, page in pages.items():
        assert not (left := [kind for kind in KINDS if f'"{kind}"' not in str(page)]), f"{name}: name {left}"


def test_an_option_of_a_run_is_documented() -> None:
    page = inspect.getdoc(vsim.Trainer.fit) or ""
    left = [name for name in inspect.signature(vsim.Trainer.fit).parameters if not re.search(rf"\b{name}\b", page)]
    assert left == ["self"], f"vsim/trainer.py: the docstring of fit lacks {left[1:]}"


def test_an_event_has_all_its_places() -> None:
    methods = [name for name in vars(vsim.Callback) if name.startswith("on_")]
    assert methods == [*EVENTS], "vsim/runs/spec.py, EVENTS: the methods of vsim.Callback, in their order"
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "vsim" / "runs").rglob("*.py"))
    told = set(re.findall(r"notify\(\w+, \"(\w+)\"", code))
    assert told == {*EVENTS}, f"vsim/runs/acts/tell.py, callbacks.py: notify callbacks of { ({*EVENTS} - told) }"
    rows = re.findall(r"^\| `(on_\w+)\(", text("docs/callbacks.md"), re.MULTILINE)
    assert rows == [*EVENTS], f"docs/callbacks.md: a row for each of {EVENTS}"


def options(command: type) -> Iterator[tuple[type, str]]:
    """Class and name of the options of a command."""
    hints = get_type_hints(command)
    for one in fields(command):
        if is_dataclass(hints[one.name]):
            yield from options(hints[one.name])
        else:
            yield next(base for base in command.__mro__ if one.name in vars(base).get("__annotations__", {})), one.name


@pytest.mark.parametrize("command", get_args(Command), ids=lambda command: command.__name__)
def test_an_option_of_the_command_line_is_read_and_explained(command: Any) -> None:
    code = "".join(map(text, ("vsim/cli.py", "vsim/atlas/enter.py", "vsim_cli/commands.py", "vsim_cli/__init__.py")))
    module = ast.parse(text("vsim_cli/commands.py"))
    classes = {node.name: node.body for node in module.body if isinstance(node, ast.ClassDef)}
    for cls, name in options(command):
        assert re.search(rf"\.{name}\b|\"{name}\"", code), f"vsim/cli.py: nothing reads {cls.__name__}.{name}"
        body = classes[cls.__name__]
        annotated = [isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name for node in body]
        help = [*body, None][annotated.index(True) + 1]
        explained = isinstance(help, ast.Expr) and isinstance(help.value, ast.Constant)
        assert explained, f"vsim_cli/commands.py: {cls.__name__}.{name} needs a text below, which --help shows"
