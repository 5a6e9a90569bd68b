"""How the house stands, computed from its code: which room imports which, and how many floors there are."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Rooms are the packages and modules directly in vsim/. Its __init__ and __main__ only say what is public.
FACES = {"cli", "compare", "compat", "grid", "logger", "sweep", "trainer", "verify"}
BELOW_TRAINING = [
    "arguments",
    "checkpoint",
    "cluster",
    "data",
    "engine",
    "extras",
    "figures",
    "network",
    "records",
    "strategy",
]
MOST_FLOORS = 10


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = sorted((ROOT / "vsim").rglob("*.py"))
MODULES = {module_name(path): path for path in FILES}
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it, also for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or "kernels" in path.parts, f"{path} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found


@cache
def files() -> dict[str, set[str]]:
    """Module → the modules of vsim that it imports."""
    return {name: (imported(path) & MODULES.keys()) - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    return module.split(".")[1]


@cache
def rooms() -> dict[str, set[str]]:
    """Room → the rooms that it imports."""
    inside = {name: uses for name, uses in files().items() if name not in ("vsim", "vsim.__main__")}
    graph: dict[str, set[str]] = {room(name): set() for name in inside}
    for name, uses in inside.items():
        graph[room(name)] |= {room(used) for used in uses if used != "vsim"} - {room(name)}
    return graph


def chain(graph: dict[str, set[str]]) -> list[str]:
    """The longest chain of imports, from top to bottom; an AssertionError shows a circle."""
    longest: dict[str, list[str]] = {}

    def below(name: str, above: list[str]) -> list[str]:
        assert name not in above, " → ".join([*above[above.index(name) :], name])
        if name not in longest:
            chains = [below(used, [*above, name]) for used in sorted(graph[name])]
            longest[name] = [name, *max(chains, key=len, default=[])]
        return longest[name]

    return max((below(name, []) for name in sorted(graph)), key=len)


def test_no_file_is_imported_in_a_circle() -> None:
    assert chain(files())


def test_no_room_is_imported_in_a_circle_and_the_floors_are_few() -> None:
    longest = chain(rooms())
    assert len(longest) <= MOST_FLOORS, " → ".join(longest)


def test_only_faces_import_faces() -> None:
    assert {name for name, uses in rooms().items() if uses & FACES} <= FACES
    assert {name for name, uses in files().items() if "vsim" in uses} <= {"vsim.__main__"}


@pytest.mark.parametrize("name", BELOW_TRAINING)
def test_what_is_below_training_does_not_import_it(name: str) -> None:
    assert not rooms().get(name, set()) & {"training", "process", *FACES}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_import_nothing_of_vsim(path: Path) -> None:
    assert not {name for name in imported(path) if name.split(".")[0] == "vsim"}
