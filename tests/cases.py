"""Train about a thousand small cases with two checkouts of vsim on this machine, and compare them to the bit.

    python tests/cases.py                   the commit START, in a worktree made for it, against this checkout
    python tests/cases.py OLD               another checkout against this one
    python tests/cases.py OLD NEW --only 'sparta.*resumed'

Compared are the weights of nodes and the models, losses, columns of the history but those of the machine, events and
attendance, warnings, errors, what callbacks hear, and the names of the files in the folders of checkpoints. The cases
are in `small_cases.py`; both checkouts train those of this one. Nothing is kept. It takes minutes.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

START = "860a2bf"  # the commit that is compared with if none is given
SHOWN = 12  # fields of a case
TESTS = Path(__file__).resolve().parent
CALL = "import sys, small_cases; small_cases.work(sys.argv[1:])"


def environment(checkout: Path) -> dict[str, str]:
    paths = [str(checkout), str(checkout / "kernels"), str(TESTS)]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    return {**os.environ, **own}


def names_of_cases(checkout: Path) -> list[str]:
    command = [sys.executable, str(TESTS / "small_cases.py")]
    return subprocess.run(
        command, env=environment(checkout), check=True, capture_output=True, text=True
    ).stdout.splitlines()


def records(checkouts: Sequence[Path], names: Sequence[str], folder: Path, jobs: int) -> list[dict[str, Any]]:
    """Return for each checkout name of a case → its record; a case in which a worker died is missing."""
    shares = max(1, jobs // len(checkouts))
    files: list[list[Path]] = [[] for _ in checkouts]
    waiting, running = [], list[subprocess.Popen[bytes]]()
    for share in range(shares):
        for number, checkout in enumerate(checkouts):
            files[number].append(folder / f"{number}-{share}")
            own = names[share::shares]
            waiting.append(([sys.executable, "-c", CALL, str(checkout), str(files[number][-1]), *own], checkout))
    while waiting or running:
        while waiting and len(running) < jobs:
            command, checkout = waiting.pop(0)
            running.append(subprocess.Popen(command, env=environment(checkout), cwd=folder))
        running.pop(0).wait()
    return [dict(pair for file in of_one for pair in read(file)) for of_one in files]


def read(file: Path) -> Iterator[tuple[str, Any]]:
    with open(file, "rb") as records:
        while True:
            try:
                yield pickle.load(records)
            except EOFError:
                return


def difference(old: Any, new: Any) -> str:
    """Return how two values of a field differ; "" if their bits are equal."""
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        if old.shape != new.shape:
            return f"shape {list(old.shape)} → {list(new.shape)}"
        if old.tobytes() == new.tobytes():
            return ""
        same = (old == new) | (np.isnan(old) & np.isnan(new))
        apart = float(np.abs(old - new)[~same].max(initial=0.0))
        return f"{apart:.1e} at most, in {int((~same).sum())} of {old.size}"
    if isinstance(old, list) and isinstance(new, list):
        places = [i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other]
        first = min([*places, len(old), len(new)])
        if old == new:
            return ""
        lengths = "" if len(old) == len(new) else f"{len(old)} → {len(new)} items; "
        return (
            f"{lengths}item {first}: {' → '.join(cut(own[first]) if first < len(own) else '–' for own in (old, new))}"
        )
    alike = type(old) is type(new) and not isinstance(old, np.ndarray) and old == new
    return "" if alike else f"{cut(old)} → {cut(new)}"


def cut(value: Any) -> str:
    return f"{value!r:.300}"


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Return field → how it differs, texts first."""
    fields = sorted({*old, *new}, key=lambda name: (isinstance(old.get(name), np.ndarray), name))
    found = {name: difference(old.get(name, "not there"), new.get(name, "not there")) for name in fields}
    return {name: text for name, text in found.items() if text}


def compare(old: Path, new: Path, only: str, jobs: int) -> int:
    """Print which cases differ; return how many."""
    names = [name for name in names_of_cases(new) if re.search(only, name)]
    if not names:
        raise SystemExit(f"no case's name matches {only!r}")
    with tempfile.TemporaryDirectory(prefix="vsim-cases-") as folder:
        before, after = records([old, new], names, Path(folder), jobs)
    odd, failed = 0, 0
    for name in names:
        lacking = [str(own) for own, known in ((old, before), (new, after)) if name not in known]
        found = {"": f"not trained by {' and '.join(lacking)}"} if lacking else differences(before[name], after[name])
        found |= {field: text for field, text in after.get(name, {}).items() if field == "not noted"}
        odd += bool(found)
        failed += any(field.endswith("error") and text for field, text in after.get(name, {}).items())
        if found:
            print(name, *(f"    {field}: {text}" for field, text in [*found.items()][:SHOWN]), sep="\n")
        if len(found) > SHOWN:
            print(f"    and {len(found) - SHOWN} other fields")
    print(f"{len(names)} cases, of which {failed} end with an error or by Ctrl-C: {odd} differ between {old} and {new}")
    return odd


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", type=Path, help=f"a checkout; default: a new worktree of {START}")
    parser.add_argument("new", nargs="?", type=Path, default=TESTS.parent, help="a checkout; default: this one")
    parser.add_argument("--only", default="", metavar="PATTERN", help="the cases whose names match, by re.search")
    parser.add_argument("--jobs", type=int, default=2, help="processes that train at the same time")
    given = parser.parse_args()
    new = given.new.resolve()
    if given.old is not None:
        return min(1, compare(given.old.resolve(), new, given.only, given.jobs))
    with tempfile.TemporaryDirectory(prefix="vsim-start-") as folder:
        old = Path(folder).resolve() / START
        git = ["git", "-C", str(TESTS.parent), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), START], check=True)
        try:
            return min(1, compare(old, new, given.only, given.jobs))
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)


if __name__ == "__main__":
    sys.exit(main())
