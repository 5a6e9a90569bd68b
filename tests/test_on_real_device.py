"""The script for a device: on the CPU it writes its page, and a part that fails does not end it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_real_device import Part, page, run_parts, step_table

SCRIPT = Path(__file__).parent / "on_real_device.py"


@pytest.mark.slow
def test_a_page_about_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    command = [sys.executable, str(SCRIPT), "cpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = out.read_text(encoding="utf-8")
    assert done.returncode == 0, text
    assert "1 of 3: tests" in done.stdout and str(out) in done.stdout
    assert text.startswith("# vsim on cpu") and f"torch {torch.__version__}" in text and "- date: 20" in text
    assert re.findall(r"^\| (\w+) \| (\w+) \| \d+ \|$", text, re.M) == [
        ("tests", "ok"),
        ("memory", "ok"),
        ("steps", "ok"),
    ]
    passed = re.search(r"^(\d+) of (\d+) tests", text, re.M)
    assert passed is not None and passed[1] == passed[2] and int(passed[1]) > 30
    (steps,) = re.findall(r"^\| mlp \| 4 \| float32 \| (.+) \|$", text, re.M)
    assert all(float(cell) > 0 for cell in steps.split(" | ")) and len(steps.split(" | ")) == 4
    (memory,) = re.findall(r"^\| mlp +\| 4 +\| vmap +\| ([\d.]+) +\| ([\d.]+)", text, re.M)
    assert 0 < float(memory[0]) < float(memory[1])
    assert "Output of" not in text


@pytest.mark.slow
def test_the_tests_of_a_device_run_on_a_pretended_one() -> None:
    """Except processes, which do not know of it."""
    tests = [str(SCRIPT.with_name("any_device.py")), "-k", "not processes"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", *tests]
    environment = {**os.environ, "VSIM_DEVICE": "pretend", "VSIM_QUICK": "1"}
    done = subprocess.run(command, cwd=SCRIPT.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 30


def python(name: str, code: str, limit: float = 60.0) -> Part:
    return Part(name, [sys.executable, "-c", code], limit)


def test_a_part_that_fails_is_reported_and_the_others_run() -> None:
    tests = "print('any_device.py::test_one PASSED [50%]\\nany_device.py::test_two[a + b] FAILED [99%]'); exit(1)"
    parts = [
        python("tests", tests),
        python("hangs", "print('begun', flush=True); import time; time.sleep(60)", limit=0.7),
        python("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        python("fine", "print('well')"),
    ]
    written: list[str] = []

    def write() -> None:
        written.append(page({"date": "today", "device": "cpu"}, parts, "python script"))

    assert not run_parts(parts, 1.0, write)
    outcomes = [part.outcome for part in parts]
    assert outcomes == ["failed (exit status 1)", "stopped after 1 s", "killed by SIGSEGV", "ok"]
    assert len(written) == 4 and "1 of 2 tests that ended have passed." in written[-1]
    assert "- failed: `test_two[a + b]`" in written[-1] and "| fine | ok | " in written[-1]
    assert "## Output of hangs: stopped after 1 s" in written[-1] and "begun" in written[-1]
    late = [python("late", "print('too late')")]
    assert not run_parts(late, 0.0, write) and late[0].outcome == "no time left"


def test_lines_of_several_parts_are_one_table() -> None:
    line = {"model": "mlp", "num_nodes": 1024, "autocast": False}
    text = step_table([{**line, "seconds": {"vmap": 0.0025}}, {**line, "seconds": {"vmap": 0.003, "compiled": 0.001}}])
    assert text.splitlines()[-1] == "| mlp | 1,024 | float32 | 2.5 | 1 |"
