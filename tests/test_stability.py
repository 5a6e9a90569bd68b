"""What users may rely on: the calls in public.json, which `python tests/test_stability.py` writes anew at a release.

A name that vanishes, or whose call changes, needs an entry under [Unreleased] in the changelog. New names need none.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest

import vsim
from vsim.cluster import Cluster
from vsim.logger import Logger
from vsim.network import Compute, Network
from vsim.strategy import Algorithm, Compressor, Strategy

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).parent / "public.json"
# The modules that users import from. Their public names are in `__all__`; a module without one defines all of its own.
MODULES = ("vsim", "vsim.data", "vsim.logger", "vsim.models", "vsim.network", "vsim.strategy")
WHOLE = ("vsim.saved", "vsim.scaling", "vsim.strategy.communicate", "vsim.strategy.compression")
# Classes whose attributes and methods users call, or override: results, what a strategy gets, and bases.
OPEN = (
    *(vsim.Callback, vsim.Checkpoint, vsim.ComparedRun, vsim.Comparison, vsim.History, vsim.Ladder, vsim.Ledger),
    *(vsim.Search, vsim.Sweep, vsim.Timeline, vsim.Trainer, vsim.data.Partition, vsim.scaling.Law, Logger),
    *(Algorithm, Cluster, Algorithm, Compressor, Compute, Network, Strategy),
)
# Name → its call without annotations, such as "(a, *, b=1)"; "" for what is not called.
Surface: TypeAlias = Mapping[str, str]


def surface() -> Surface:
    """Return the public names as they are now."""
    found = dict[str, str]()
    for path in (*MODULES, *WHOLE):
        module = importlib.import_module(path)
        own = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == path and name[0] != "_"]
        found |= {f"{path}.{name}": call(getattr(module, name)) for name in getattr(module, "__all__", own)}
    for cls in OPEN:
        inside = [base for base in cls.__mro__ if base.__module__.startswith("vsim")]
        for name in sorted({name for base in inside for name in vars(base) if name[0] != "_"}):
            static = inspect.getattr_static(cls, name)
            found[f"{cls.__name__}.{name}"] = "" if inspect.isclass(static) else call(getattr(cls, name, None))
    return dict(sorted(found.items()))


def call(one: Any) -> str:
    """Return the signature of a function, method or class without annotations; "" if there is none."""
    try:
        signature = inspect.signature(one)
    except (TypeError, ValueError):  # not callable, or of C
        return ""
    own = [p.replace(annotation=p.empty, default=shown(p.default)) for p in signature.parameters.values()]
    return str(signature.replace(parameters=own, return_annotation=inspect.Signature.empty)).replace("Ellipsis", "...")


def shown(default: Any) -> Any:
    """Return a default if its text is Python; else an ellipsis."""
    plain = default is inspect.Parameter.empty or default is None or isinstance(default, (bool, int, float, str))
    return default if plain and not (isinstance(default, float) and repr(default) in ("inf", "nan")) else ...


def parameters(text: str) -> dict[str, tuple[str, str]]:
    """Parse a call: parameter → how it is given ("place", "name", "*"), and its default or ""."""
    (function,) = ast.parse(f"def f{text or '()'}: ...").body
    assert isinstance(function, ast.FunctionDef)
    own, found = function.args, dict[str, tuple[str, str]]()
    places = [*own.posonlyargs, *own.args]
    defaults = [None] * (len(places) - len(own.defaults)) + [*own.defaults]
    for kind, names, given in (("place", places, defaults), ("name", own.kwonlyargs, own.kw_defaults)):
        for name, default in zip(names, given, strict=True):
            found[name.arg] = kind, "" if default is None else ast.unparse(default)
    for rest in filter(None, (own.vararg, own.kwarg)):
        found[rest.arg] = "*", "..."
    return found


def breaks(old: Surface, new: Surface) -> Iterator[tuple[str, str]]:
    """Yield a name of `old` that calls may miss in `new`, and the word of it, or of a parameter, that changed."""
    for name, text in old.items():
        if name not in new or bool(text) != bool(new[name]):
            yield name, name.rpartition(".")[2]
            continue
        before, after = parameters(text), parameters(new[name])
        by_place = [[one for one, (kind, _) in own.items() if kind == "place"] for own in (before, after)]
        for i, one in enumerate(before):
            moved = one in by_place[0] and by_place[1][i : i + 1] != [one]
            if one not in after or moved or before[one][1] not in ("", after[one][1]):
                yield name, one
        yield from ((name, one) for one in after.keys() - before.keys() if after[one][1] == "")


def unsaid(found: Iterator[tuple[str, str]], changelog: str) -> list[str]:
    """Return the breaks that no entry of the changelog's unreleased part names, by the name and what happened to it.

    A word in backticks with a star at one end names all that match, such as every `*Strategy`.
    """
    unreleased = changelog.partition("## [Unreleased]")[2].partition("\n## [")[0]
    entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=- |#)", unreleased)]
    said = []
    for name, word in found:
        words = {name.rpartition(".")[2], word}
        if not any(all(names(entry, one) for one in words) for entry in entries):
            said.append(f"{name}: {word}")
    return sorted(said)


def names(entry: str, word: str) -> bool:
    """Return whether an entry names a word."""
    stars = re.findall(r"`(\*\w+|\w+\*)`", entry)
    return bool(re.search(rf"\b{re.escape(word)}\b", entry)) or any(fnmatchcase(word, star) for star in stars)


def stored() -> Surface:
    own: Surface = json.loads(STORED.read_text(encoding="utf-8"))
    return own


def test_what_users_call_stays_or_is_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    missing = unsaid(breaks(stored(), surface()), changelog)
    assert not missing, f"each of these needs an entry under [Unreleased] in CHANGELOG.md: {missing}"


OLD = {"vsim.f": "(a, b=1, *, c=None, **more)", "vsim.C": "()", "C.m": "(self)"}


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ({}, []),
        ({"vsim.g": "()"}, []),
        ({"vsim.f": "(a, b=1, d=2, *, c=None, e=3, **more)"}, []),
        ({"vsim.f": "(a=0, b=1, *, c=None, **more)"}, []),
        ({"C.m": None}, ["C.m: m"]),
        ({"vsim.f": ""}, ["vsim.f: f"]),
        ({"vsim.f": "(a, *, c=None, **more)"}, ["vsim.f: b"]),
        ({"vsim.f": "(a, b=2, *, c=None, **more)"}, ["vsim.f: b"]),
        ({"vsim.f": "(a, b, *, c=None, **more)"}, ["vsim.f: b"]),
        ({"vsim.f": "(a, *, b=1, c=None, **more)"}, ["vsim.f: b"]),
        ({"vsim.f": "(b, a=1, *, c=None, **more)"}, ["vsim.f: a", "vsim.f: b"]),
        ({"vsim.f": "(a, b=1, *, c=None)"}, ["vsim.f: more"]),
        ({"vsim.f": "(a, b=1, *, c=None, d, **more)"}, ["vsim.f: d"]),
    ],
)
def test_a_break_needs_an_entry(new: dict[str, str | None], expected: list[str]) -> None:
    now = {name: text for name, text in (OLD | new).items() if text is not None}
    released = "\n## [1.0] - 2026-01-01\n\n- `f` lost `a`, `b`, `d`, `more`; `C` lost `m`.\n"
    assert unsaid(breaks(OLD, now), "## [Unreleased]\n\n- Nothing.\n" + released) == expected
    assert not unsaid(breaks(OLD, now), "## [Unreleased]\n\n- `f` lost a, b,\n  d, more; `C.m` is gone.\n" + released)


def test_a_star_names_what_it_matches() -> None:
    broken = [("vsim.strategy.AStrategy", "lr"), ("vsim.strategy.Strategy", "lr"), ("vsim.strategy.Mean", "lr")]
    assert unsaid(iter(broken), "## [Unreleased]\n\n- Give `lr` of every `*Strategy` by name.\n") == [
        "vsim.strategy.Mean: lr"
    ]
    assert len(unsaid(iter(broken), "## [Unreleased]\n\n- Every `*Strategy` is new.\n- `lr` and `*` too.\n")) == 3


def test_the_surface_has_what_users_call() -> None:
    now = surface()
    assert now["vsim.strategy.DiLoCoStrategy"].startswith("(*, inner_optim=None, lr=None, max_norm=")
    assert now["Comparison.table"].startswith("(comparison, ") and now["vsim.strategy.communicate.all_reduce"]
    assert now["Callback.on_step"] == "(self, run)" and not now["Cluster.weights"]


OUTGOING = """
from vsim.deprecated import deprecated

def compare(*, seeds=(0,), seed=None):
    if seed is not None:
        deprecated("compare(seed=…)", "compare(seeds=[…])", removed="0.5")
        seeds = (seed,)
    return seeds

def __getattr__(name):
    if name != "contrast":
        raise AttributeError(name)
    deprecated("vsim.contrast", "vsim.compare", removed="0.5")
    return compare
"""


@pytest.mark.parametrize(
    ("use", "old", "new"),
    [
        ("one.compare(seed=3)", "compare(seed=…)", "compare(seeds=[…])"),
        ("[one.compare(seed=3) for _ in range(1)][0]", "compare(seed=…)", "compare(seeds=[…])"),
        ("one.contrast(seeds=(3,))", "vsim.contrast", "vsim.compare"),
    ],
)
def test_a_name_that_goes_works_and_warns_at_the_line_of_the_user(use: str, old: str, new: str) -> None:
    module = ModuleType("vsim.outgoing")
    exec(compile(OUTGOING, str(Path(vsim.__file__).with_name("outgoing.py")), "exec"), vars(module))
    with pytest.warns(DeprecationWarning, match="goes with vsim") as caught:
        assert eval(compile(use, "script.py", "eval"), {"one": module}) == (3,)
    (warning,) = caught
    assert str(warning.message) == f"{old} is deprecated and goes with vsim 0.5; use {new}"
    assert (warning.filename, warning.lineno) == ("script.py", 1)
    assert module.compare() == (0,)  # nothing old, and so no warning


def test_the_page_names_the_modules() -> None:
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    part = page.partition("## What is public")[2].partition("All other modules")[0]
    assert set(re.findall(r"`(vsim(?:\.\w+)*)`", part)) == {*MODULES, *WHOLE}


if __name__ == "__main__":
    STORED.write_text(json.dumps(surface(), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
