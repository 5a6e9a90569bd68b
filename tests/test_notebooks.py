"""Every notebook runs top to bottom in a kernel of its own, and is kept with the outputs of such a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
# What must appear among the outputs, as regular expressions.
EXPECTED: dict[str, list[str]] = {
    "verify": [
        r"bit-identical over 20 steps \(2 nodes, 2,474 parameters: losses, weights, buffers, ",
        r"different after step 1, by more than rounding",
        r"first difference: step 1, node 0, weights, layers\.1\.weight",
        r"identical: False \| rounding: False \| \d+ entries, [\d,]+ ULPs",
    ],
}
# Nothing of the machine that a notebook was run on.
MACHINE = re.compile(r"/(home|root|tmp|Users|work)/|site-packages|Traceback")


def outputs(notebook: Any) -> str:
    """All text among a notebook's outputs."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts += [output.get("text", ""), *output.get("traceback", []), *output.get("data", {}).values()]
    return "\n".join(str(text) for text in texts)


def test_every_notebook_is_expected_to_show_something() -> None:
    assert sorted(EXPECTED) == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("name", EXPECTED)
# jupyter_client, pyzmq and ipykernel warn of what they will change between themselves, in other words every few months.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_notebooks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel, not the user's own
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    kept = outputs(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None

    run = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=run).execute()

    for text in (kept, outputs(notebook)):
        for pattern in EXPECTED[name]:
            assert re.search(pattern, text), pattern
    assert not MACHINE.search(kept)
