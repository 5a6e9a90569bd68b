"""The script for a device: on the CPU it writes its page, and a part that fails does not end it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_real_device import Part, page, run_parts

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
    outcomes = re.findall(r"^\| (\w+) \| (\w+) \| \d+ \|$", text, re.M)
    assert outcomes == [("tests", "ok"), ("memory", "ok"), ("steps", "ok")]
    passed = re.search(r"^(\d+) of (\d+) tests", text, re.M)
    assert passed is not None and passed[1] == passed[2] and int(passed[1]) > 30
    steps = re.findall(r"^ *mlp +4 +([\d.]+) .*?([\d.]+) +\([\d.]+\)$", text, re.M)
    (memory,) = re.findall(r"^mlp +4 +vmap +([\d.]+) +([\d.]+)", text, re.M)
    assert len(steps) == 2 and 0 < float(memory[0]) < float(memory[1])


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
    assert "## hangs: stopped after 1 s" in written[-1] and "\nbegun\n" in written[-1] and "\nwell\n" in written[-1]
    late = [python("late", "print('too late')")]
    assert not run_parts(late, 0.0, write) and late[0].outcome == "no time left"
