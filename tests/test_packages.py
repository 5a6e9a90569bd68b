"""The packages as users get them: what is in them, and the wheel alone in an environment of its own.

Nothing is downloaded: the environment of the tests has what vsim needs, and the new one reads it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from test_readme import README

import vsim

ROOT = Path(__file__).parents[1]
PACKAGES = {"vsim": ROOT / "vsim", "vsim_cli": ROOT / "vsim_cli", "vsim_kernels": ROOT / "kernels" / "vsim_kernels"}
NAME = f"vsim_torch-{vsim.__version__}"
pytestmark = pytest.mark.slow


def run(*command: object, folder: Path, errors: bool = False) -> str:
    """Run a command without this checkout on its path; return what it prints, with `errors` what it complains of."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stderr if errors else result.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is made from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    return folder


def files(folder: Path) -> set[str]:
    """The files below a folder that are not made by running them."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*.*") if "__pycache__" not in path.parts}


def test_the_wheel_has_the_three_packages_and_nothing_else(packages: Path) -> None:
    with zipfile.ZipFile(packages / f"{NAME}-py3-none-any.whl") as wheel:
        found = set(wheel.namelist())
        metadata = wheel.read(f"{NAME}.dist-info/METADATA").decode()
    own = {f"{name}/{file}" for name, folder in PACKAGES.items() for file in files(folder)}
    assert {name for name in found if not name.startswith(f"{NAME}.dist-info/")} == own
    assert "vsim/analysis/report/page.html" in own and "vsim/py.typed" in own
    assert "\nName: vsim-torch\n" in metadata and f"\nVersion: {vsim.__version__}\n" in metadata
    # Extras of its own have become what they hold; "vsim" on the package index is another project.
    assert re.search(r"^Requires-Dist: scikit-learn\S*; extra == .examples.$", metadata, re.MULTILINE)
    assert not re.search(r"^Requires-Dist: vsim", metadata, re.MULTILINE)


def test_the_sdist_has_what_the_tests_need(packages: Path) -> None:
    with tarfile.open(packages / f"{NAME}.tar.gz") as sdist:
        found = {name.partition("/")[2] for name in sdist.getnames()}
    for part in ("vsim", "vsim_cli", "kernels", "tests", "notebooks", ".ci", ".github"):
        assert {f"{part}/{file}" for file in files(ROOT / part)} <= found
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "docs/index.md", "docs/conf.py"} <= found
    assert not [name for name in found if "__pycache__" in name or "_build" in name]


def test_the_wheel_alone_runs_the_main_job(packages: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "own", with_pip=False, symlinks=os.name != "nt")
    own = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "own")}))
    python = Path(sysconfig.get_path("scripts", vars={"base": str(tmp_path / "own")})) / Path(sys.executable).name
    # A path in a .pth file brings packages, but not the .pth files there, one of which may bring this checkout.
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    wheel = packages / f"{NAME}-py3-none-any.whl"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    run(*install, "--force-reinstall", wheel, folder=tmp_path)
    assert Path(run(python, "-c", "import vsim; print(vsim.__file__)", folder=tmp_path).strip()).is_relative_to(own)
    # The command of a hosted notebook finds all that it asks for: the name, and what the extra holds.
    notebook = (ROOT / "notebooks" / "first_comparison.ipynb").read_text(encoding="utf-8")
    (asked,) = re.findall(r"%pip install -q (.*?)\"\n", notebook.replace("\\", ""))
    found = run(*install[:-2], "--no-index", "--find-links", packages, asked.strip('"'), folder=tmp_path, errors=True)
    assert "does not provide" not in found, found
    script = python.with_name("vsim")
    assert run(script, "--version", folder=tmp_path) == f"vsim {vsim.__version__}\n"
    # The README's command, of few steps.
    command = re.search(r"^```sh\n.* && (vsim compare)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert command
    quick = ["--steps", "3", "--val-size", "16", "--quiet", "--out", "out"]
    run(script, *command[1].split()[1:], *quick, folder=tmp_path)
    run(script, "report", "out/comparison.json", "--out", "report.html", folder=tmp_path)
    assert {"comparison.json", "comparison.csv", "comparison.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")
