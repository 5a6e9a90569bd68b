"""How the house stands, computed from its code: which room imports which, and how many floors there are."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from vsim import Comparison, Ladder, Trainer
from vsim.strategy import DiLoCoStrategy

ROOT = Path(__file__).parents[1]
OWN = str(ROOT / "vsim")
LOOP = "vsim.core.group"
# Rooms are the packages and modules directly in vsim/. Its __init__ and __main__ only say what is public.
FACES = {"atlas", "cli", "compat", "logger", "measuring", "records", "scale", "scaling", "search", "trainer", "verify"}
BELOW_RUNS = "algorithms analysis arguments checkpoint cluster core data engine extras figures history network strategy"
MOST_FLOORS = 12
# From `fit` to the gradient a reader follows that many calls, in that many files.
MOST_CALLS, MOST_FILES_OF_CALLS = 14, 7
# What a newcomer loads to understand a gradient: the core, with everything that it imports.
MOST_FILES_OF_THE_CORE, MOST_LINES_OF_THE_CORE = 50, 9_500
MOST_LINES_OF_AN_ACT = 200
SHORT, MOST_LINES_OF_A_FILE = ("analysis", "history"), 440
# What was read when this was last written, by `python tests/test_house.py`: the functions that run before the model is
# called for the first time, which is in the proof; and the files that the training loop loads at once.
READ = Path(__file__).parent / "reading.json"
SLACK = 1.1  # lower it with the code, by writing again


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = sorted((ROOT / "vsim").rglob("*.py"))
MODULES = {module_name(path): path for path in FILES}
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))


def test_no_two_files_have_one_name() -> None:
    named_elsewhere = {"exogym", "strategy"}  # the names of another package's files, and import paths for users
    own = [path for path in FILES if path.stem not in ("__init__", "base") and named_elsewhere.isdisjoint(path.parts)]
    names = [path.stem for path in own]
    assert not [name for name in sorted(set(names)) if names.count(name) > 1]


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it, also for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    assert not relative or "kernels" in path.parts, f"{path} imports relatively"
    return imported_by(tree)


def imported_by(tree: ast.AST) -> set[str]:
    """The modules that some code imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
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


def test_only_the_command_line_imports_the_atlas_when_called() -> None:
    assert {name for name, uses in rooms().items() if "atlas" in uses} == {"cli"}
    code = "import sys, vsim, vsim.cli; sys.exit('vsim.atlas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_map_for_newcomers_names_every_file() -> None:
    """All but the algorithms and compressors, which are files named after themselves."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = page[page.index("```text") : page.index("Imports run downward")]
    named = set(re.findall(r"\b[a-z_0-9]+\.py\b", tree))
    files = {path for path in FILES if not path.name.startswith("__")}
    assert named <= {path.name for path in files}
    algorithms = {
        path
        for path in files
        if re.search(r"^class \w+(Strategy|Compressor|Quantizer)\(", path.read_text("utf-8"), re.M)
    }
    own_names = {path for path in files if path.parent.name == "compression"} | algorithms
    assert {path.name for path in files - own_names} <= named


def test_what_is_below_runs_does_not_import_them() -> None:
    above = {"runs", "processes", *FACES}
    found = {f"{name} imports {used}" for name in BELOW_RUNS.split() for used in rooms()[name] & above}
    assert not found


def test_the_record_of_a_run_knows_nothing_of_comparisons() -> None:
    assert rooms()["history"] <= {
        "arguments",
        "cluster",
        "extras",
        "figures",
        "network",
        "reading",
        "version",
        "writing",
    }


def test_a_question_to_a_comparison_is_a_file() -> None:
    """Named after the method, with a function of that name."""
    inside = {name.rpartition(".")[2]: name for name in MODULES if name.startswith("vsim.analysis.questions.")}
    assert len(inside) > 7
    for name, module in inside.items():
        method = getattr(Ladder if name == "decide" else Comparison, name)
        defined = [node.name for node in ast.parse(MODULES[module].read_text("utf-8")).body if hasattr(node, "name")]
        assert name in defined and method.__name__ == name
    shared = {(name, used) for name, module in inside.items() for used in inside if inside[used] in files()[module]}
    assert shared == {("cheapest", "best"), ("differences", "best"), ("decide", "winners")}


def test_files_of_records_and_comparisons_are_not_long() -> None:
    lines = {name: path.read_text("utf-8").count("\n") for name, path in MODULES.items() if room(f"{name}.") in SHORT}
    assert max(lines.values()) <= MOST_LINES_OF_A_FILE, max(lines, key=lines.__getitem__)


def test_the_core_knows_nothing_of_what_happens_between_its_steps() -> None:
    loaded = loaded_by(LOOP)
    assert {path.split("/")[1].removesuffix(".py") for path in loaded} <= {
        *("arguments", "cluster", "core", "data", "engine", "private_torch", "strategy", "trees"),
    }
    assert len(loaded) <= MOST_FILES_OF_THE_CORE and sum(loaded.values()) <= MOST_LINES_OF_THE_CORE


def test_acts_are_short_and_know_no_other_act() -> None:
    acts = {name: uses for name, uses in files().items() if name.startswith("vsim.runs.acts.")}
    assert len(acts) > 10 and {used for uses in acts.values() for used in uses & acts.keys()} == {
        "vsim.runs.acts.moment"
    }
    assert max(MODULES[name].read_text(encoding="utf-8").count("\n") for name in acts) <= MOST_LINES_OF_AN_ACT


def test_kernels_import_nothing_of_vsim() -> None:
    assert not {name for path in KERNELS for name in imported(path) if name.split(".")[0] == "vsim"}


# torch._C, torch.nn.modules._x, F._x, `from torch._functorch import`, and attributes of tensors, modules, optimizers.
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!foreach_|_)\w+|\bF\._\w+|from torch[\w.]* import .*\b_\w+"
    r"|\._(version|cdata|parameters|buffers|modules|\w+_hooks|opt_called|schema|op)\b|\bfunctorch\.\w"
)
ALLOWED = re.compile(r"from torch\.utils\._pytree import|torch\.ops\.\w+\._\w+|\baten\._\w+")


def test_private_functions_of_torch_stand_in_one_module() -> None:
    for line in ("torch._C._len()", "from torch.x import _y", "from torch._C import z", "m._buffers"):
        assert PRIVATE.search(ALLOWED.sub("", line))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*FILES, *KERNELS]
        if path.name != "private_torch.py"
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if PRIVATE.search(ALLOWED.sub("", line))
    ]
    assert len(FILES) > 80 and not found, "\n".join(found)


def own_calls(frame: FrameType | None) -> Iterator[CodeType]:
    """The functions of vsim that are being called, innermost first."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(OWN):
            yield frame.f_code
        frame = frame.f_back


def calls_of_fit() -> tuple[set[CodeType], list[CodeType]]:
    """The functions that run before the model is called first, and those that are being called at a gradient."""
    model = torch.nn.Linear(4, 1)
    trainer = Trainer(model, TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), loss_fn=torch.nn.functional.mse_loss)
    strategy = DiLoCoStrategy(H=2, lr=0.1)
    ran: set[CodeType] = set()
    before_forward: list[set[CodeType]] = []
    to_gradient: list[list[CodeType]] = []
    forward, grad = torch.nn.Linear.forward, torch.autograd.grad

    def noted_forward(*args: Any) -> Any:
        before_forward.append(set(ran))
        return forward(*args)

    def noted_grad(*args: Any, **kwargs: Any) -> Any:
        to_gradient.append([*own_calls(sys._getframe())])
        return grad(*args, **kwargs)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name[0] != "<" and code.co_filename.startswith(OWN):
            ran.add(code)

    profile = sys.getprofile()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", noted_forward)
        patch.setattr(torch.autograd, "grad", noted_grad)
        sys.setprofile(note)
        try:
            trainer.fit(strategy=strategy, num_nodes=2, max_steps=2, batch_size=2, progress=False)
        finally:
            sys.setprofile(profile)
    return before_forward[0], to_gradient[-1]  # of a step; the first gradients are the proof's


def loaded_by(module: str) -> dict[str, int]:
    """File → its lines, of all files of vsim that a module imports at its top, and they at theirs."""
    found: dict[str, int] = {}
    coming = [module]
    while coming:
        name = coming.pop()
        path = MODULES[name]
        if str(path.relative_to(ROOT)) in found:
            continue
        text = path.read_text(encoding="utf-8")
        found[str(path.relative_to(ROOT))] = text.count("\n")
        tree = ast.parse(text)
        tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        used = imported_by(tree)
        coming += used & MODULES.keys()
    return found


def reading() -> dict[str, Any]:
    """What a newcomer meets: the functions before the first call of the model, and what the loop loads."""
    functions = {f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}" for code in calls_of_fit()[0]}
    return {"functions": sorted(functions), "loaded": dict(sorted(loaded_by(LOOP).items()))}


def test_few_calls_lead_from_fit_to_the_gradient() -> None:
    calls = calls_of_fit()[1]
    assert len(calls) <= MOST_CALLS and len({code.co_filename for code in calls}) <= MOST_FILES_OF_CALLS


@pytest.mark.skipif(sys.version_info < (3, 11), reason="functions have no qualified names before Python 3.11")
def test_the_way_to_the_gradient_does_not_grow_unseen() -> None:
    known, now = json.loads(READ.read_text(encoding="utf-8")), reading()
    new = [*sorted({*now["functions"]} - {*known["functions"]}), *sorted({*now["loaded"]} - {*known["loaded"]})]
    for what, was, found in (
        ("functions before the model is called", len(known["functions"]), len(now["functions"])),
        (f"files that {LOOP} loads", len(known["loaded"]), len(now["loaded"])),
        (f"lines that {LOOP} loads", sum(known["loaded"].values()), sum(now["loaded"].values())),
    ):
        assert found <= was * SLACK, f"{found} {what}, which were {was}; new are:\n" + "\n".join(new)


if __name__ == "__main__":
    READ.write_text(json.dumps(reading(), indent=1) + "\n", encoding="utf-8")
