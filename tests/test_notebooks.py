"""Every notebook runs top to bottom, and is kept with the outputs of such a run.

Here they take only a few steps: the metadata `quick` of a cell, which readers do not see, maps lines of code to
others. The kept outputs are of whole runs.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
# Regular expressions that must match the kept outputs, and the outputs of a quick run.
PICTURE = r"iVBORw0KGgo"  # a PNG in base64, of which every notebook shows some
EXPECTED: dict[str, list[str]] = {
    "adapters": [
        r"rank 2\nstrategy .*\n-.*\nFedIT +\d",
        r"FedIT 1\.000, FFA 0\.473, FedSA 0\.527, FLoRA 1\.000, FedEx 1\.000",  # shares of A (r, m) and B (n, r)
    ],
    "adaptive_communication": [
        r"every step +\d.*\nH = 4 +\d",
        r"\d +QSR +H = 4 +-?0\.\d+",
        r"two levels, outer step +\d",
    ],
    "atlas": [
        r"\d+ strategies on strokes",
        r"A sync takes .*; 0\.084 s at 1 Gbit/s, 10 ms; 0\.74 s at 100 Mbit/s, 50 ms",  # 4 MB, up and down
        r"all steps +\d+ of \d+ +(ahead|behind|not decided)",
    ],
    "attacks": [r"none +label flip +sign flip", r"\ncentered clipping +\d+\.\d", r"Partition\(dirichlet"],
    "compression_quality": [
        r"<table>\n",
        r"DiLoCo, H = (\d+) +</td><td>\1× .*(holds|open|fails)",  # averages every H-th step: H times less
        r"<td>AllReduce +</td><td>1× +</td><td>100\.0 ± 0\.0 %",
        r"1 \+0 · 2⁻²³ +</td><td>\d\.\d{4} ",
    ],
    "decide": [r"5 of 6 pairs came out", r"extrapolated: .* for 1\.3B parameters", r"too few for a probability"],
    "demo": [r"<table>\n", r"of the entries", r"sign, top-k of tiles, lr = .*×"],
    "first_comparison": [r"<table>\n", r"FedAvg, H = 10 .*10\.0×", r"SPARTA, p = 0\.5 % .*(19|20)\d"],
    "diloco_scaling": [r"<td>AllReduce +</td><td>1 .*\n<tr><td>AllReduce +</td><td>2 ", r"<td>DiLoCo, H = \d+ *</td>"],
    "federated": [r"SCAFFOLD, shards +\d", r"K = 3,400 with 2 to", r"client accuracy, worst"],
    "fine_tuning": [
        r"DiLoCo, LoRA .* 10\.0×",
        r"AllReduce: 25,376 bytes = 4 · 6,344",  # (in + out) · rank of four layers: 4 · (296 + 512 + 512 + 266)
    ],
    "gossip": [r"<table>\n", r"one peer exponential +1\.0000", r"ring, tracking +0\.0507"],
    "penalty": [
        r"N = +5,472  M = 2  H = +\d+  outer rate 0\.\d+: ",
        r"at P = 1,000,000,000: α =  0\.08, ratios 1\.\d\d",
    ],
    "personal_models": [r"FedAvg, fine-tuned +\d", r"Ditto +\d", r"split\(0\.2, seed=0\) to test"],
    "report": [r"interrupted after step \d+", r"16 runs, of which 6 were not trained again", r"report\.html: \d+ kB"],
    "state_of_the_art": [
        r"<table>\n",
        r"<td>MuLoCo</td>\s*<td>is better than DiLoCo</td>\s*<td>[+-][\d.]+ % \([+-][\d.]+ to [+-][\d.]+\)</td>\s*"
        r"<td>(shows|does not show|not decided)</td>",
        r"SparseLoCo sends \d+ times less than DiLoCo",
    ],
    "stragglers_and_failures": [
        r"all wait +\d+\.\d min, +\d+% compute",
        r"Delayed Nesterov, DyLU +\d+\.\d min, +(100|9\d)% compute",
        r"half are gone +loss \d\.\d+ after [\d,]+ examples",
    ],
    "sweep": [
        r"<table>\n",
        r"DiLoCo H=\d+, .* after \d+ % of the steps; of all: ",
        r"AllReduce lr=0\.3 *</td>.* 1\.0×",
    ],
    "which_strategy_on_my_network": [
        r"time used\n-.*\nAllReduce +\d.* 9\d\.\d %",
        r"budget of each run: 10? s\n",
        r"DiLoCo H=\d+\n",
    ],
    "your_own_strategy": [
        r"label='votes', payload_bytes=512.0",
        r"ring, pairs: bit-identical",
        r"different after step 1",
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


def pictures(notebook: Any) -> list[int]:
    """The cells that show a picture."""
    return [i for i, cell in enumerate(notebook.cells) if PICTURE in str(cell.get("outputs"))]


def make_quick(cell: Any) -> None:
    """Replace lines of a cell's code as its metadata say."""
    shorter = dict(cell.metadata.get("quick", {}))
    lines = cell.source.split("\n")
    assert shorter.keys() <= {line.strip() for line in lines}, f"not in the cell: {shorter}"
    for i, line in enumerate(lines):
        lines[i] = line.replace(line.strip(), shorter.get(line.strip(), line.strip()))
    cell.source = "\n".join(lines)


def complaints(notebook: Any) -> str:
    """What a notebook wrote to standard error: warnings and progress bars."""
    streams = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in streams if output.get("name") == "stderr")


def test_every_notebook_is_expected_to_show_something() -> None:
    assert sorted(EXPECTED) == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def test_a_hosted_notebook_installs_vsim() -> None:
    cells = {}
    for path in NOTEBOOKS.glob("*.ipynb"):
        sources = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        in_clone_only = "beside this notebook" in "".join(sources)
        assert ("pip install" in sources[1]) is not in_clone_only, path
        cells |= {} if in_clone_only else {sources[1]: path}
    (cell,) = cells  # the same everywhere; tests/test_packages.py tries its command
    assert 'if importlib.util.find_spec("vsim") is None:\n    %pip install ' in cell


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One kernel for all notebooks, which are emptied of names in between: importing takes longer than most of them."""
    client = pytest.importorskip("jupyter_client")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel, not the user's own
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        patch.delenv("MPLBACKEND", raising=False)  # conftest's keeps figures that a cell draws from being shown
        patch.setenv("PYTHONWARNINGS", "ignore:too few steps")  # quick ones take fewer than some of their H
        patch.setenv("OMP_NUM_THREADS", "1")  # two threads wait for each other where tests share the cores
        patch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
        manager = client.AsyncKernelManager(kernel_name="python3")
        yield manager
        client.utils.run_sync(manager.shutdown_kernel)(now=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
# jupyter_client, pyzmq and ipykernel warn of what they will change between themselves, in other words every few months.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_notebooks_run(name: str, kernel: Any, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    kept, kept_pictures = outputs(notebook), pictures(notebook)
    assert not complaints(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            make_quick(cell)
    for kept_beside in NOTEBOOKS.glob(f"{name}_*.json"):
        shutil.copy(kept_beside, tmp_path)
    begin = f"%reset -f\nimport os\nos.chdir({str(tmp_path)!r})\ndel os"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(begin))
    client = nbclient.NotebookClient(notebook, timeout=300, km=kernel)
    client.execute()
    client.kc.stop_channels()
    del notebook.cells[0]

    for text in (kept, outputs(notebook)):
        for pattern in EXPECTED[name]:
            assert re.search(pattern, text), pattern
    assert pictures(notebook) == kept_pictures != []
    assert not complaints(notebook)
    assert not MACHINE.search(kept)
