"""The workflows of the repository's host: their form, and that each of their commands is a line that calls `.ci/`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / ".ci").iterdir())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# A command: what it needs, and a script with arguments.
COMMAND = re.compile(r"(?:pip install -q [\w\" .,\[\]-]+ && )?\.ci/(\w+)(?: [\w.${} -]+)?")


def read(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_run(script: Path) -> None:
    assert script.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n") and os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_the_form_that_its_host_reads(path: Path) -> None:
    content = read(path)
    # YAML 1.1 reads the key "on" as True.
    assert content.keys() == {"name", True, "permissions", "jobs"} | (content.keys() & {"concurrency"})
    assert content["name"] == path.stem
    assert content[True].keys() <= {"push", "pull_request", "schedule", "workflow_dispatch"}
    for name, job in content["jobs"].items():
        assert job["runs-on"] and job["steps"], name
        assert set([job["needs"]] if "needs" in job else []) <= content["jobs"].keys()
        matrix = job.get("strategy", {}).get("matrix", {})
        assert set(re.findall(r"matrix\.(\w+)", str(job))) == matrix.keys()
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step["uses"])
            else:
                found = COMMAND.fullmatch(step["run"])
                assert found and (ROOT / ".ci" / found[1]) in SCRIPTS, step["run"]


def test_every_python_is_tested_with_the_oldest_and_the_newest_torch() -> None:
    job = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["versions"]
    (wanted,) = re.findall(r"wanted=\(3\.1\{([\d,]+)\}-\{([\w,]+)\}\)", (ROOT / ".ci" / "versions").read_text("utf-8"))
    assert job["strategy"]["matrix"] == {
        "python": [f"3.1{minor}" for minor in wanted[0].split(",")],
        "torch": wanted[1].split(","),
    }


def test_pages_and_metadata_say_which_versions_are_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (oldest, after), *_ = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', project)
    pythons = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["versions"]["strategy"]["matrix"]["python"]
    assert re.findall(r"Programming Language :: Python :: (3\.\d+)", project) == pythons
    assert f'requires-python = ">={pythons[0]}"' in project
    said = f"Python {pythons[0]} to {pythons[-1]} and torch 2.{oldest} to 2.{int(after) - 1}"
    for page in ("stability", "troubleshooting"):
        assert said in " ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split()), page


def test_a_container_runs_the_two_commands_of_the_readme() -> None:
    content = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    commands = re.findall(r"^```sh\n(.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [content["onCreateCommand"], content["postCreateCommand"]] == commands[:2]


def test_the_documentation_is_hosted_as_it_is_built_here(tmp_path: Path) -> None:
    build = read(ROOT / ".readthedocs.yaml")["build"]
    command, copy = build["commands"]
    assert COMMAND.fullmatch(command)[1] == "docs"
    assert command in (step.get("run") for step in read(WORKFLOWS[0])["jobs"]["build"]["steps"])
    made = tmp_path / "docs" / "_build"
    made.mkdir(parents=True)
    (made / "index.html").touch()
    environment = {**os.environ, "READTHEDOCS_OUTPUT": str(tmp_path / "out")}
    subprocess.run(["bash", "-c", copy], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "out" / "html" / "index.html").is_file()


def test_the_address_is_written_where_it_belongs(tmp_path: Path) -> None:
    places = [".ci/address", "pyproject.toml", "CITATION.cff", "README.md", "docs/index.md", "notebooks"]
    for place in places:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / place).is_dir() else shutil.copy)(ROOT / place, tmp_path / place)
    before = {
        path: path.read_text(encoding="utf-8")
        for path in tmp_path.rglob("*.*")
        if path.suffix != ".png" and path.is_file()
    }
    for name in ("ours/vsim", "others/v.sim"):
        subprocess.run([tmp_path / ".ci" / "address", name], check=True)
    changed = [path for path, text in before.items() if path.read_text(encoding="utf-8") != text]
    hosted = [path for path in (tmp_path / "notebooks").glob("*.ipynb") if path.stem != "decide"]
    assert {*changed} == {*(tmp_path / place for place in places[1:5]), *hosted}
    for path in changed:
        text = path.read_text(encoding="utf-8")
        assert (
            "https://github.com/others/v.sim" in text or f"github/others/v.sim/blob/main/notebooks/{path.name}" in text
        )
        assert "ours/vsim" not in text and text.count("colab.research.google.com/github/") <= 1
        if path.suffix == ".ipynb":
            old, new = json.loads(before[path]), json.loads(text)
            assert old["cells"][1:] == new["cells"][1:] and old["metadata"] == new["metadata"]
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert readme.count("badge.svg") == 3 and readme.count("\n") == before[tmp_path / "README.md"].count("\n")
    yaml.safe_load((tmp_path / "CITATION.cff").read_text(encoding="utf-8"))
    wrong = subprocess.run([tmp_path / ".ci" / "address", "nobody"], check=False, capture_output=True, text=True)
    assert wrong.returncode == 2 and "OWNER/NAME, not 'nobody'" in wrong.stderr


def test_before_a_commit_run_the_checks_of_ci() -> None:
    (repo,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    for hook in repo["hooks"]:
        entry = re.sub(r" README\.md.*", " ./*.md", hook["entry"])
        assert entry in script and hook["language"] == "system" and not hook["pass_filenames"], entry
