"""Importing vsim is quiet, and light beside torch."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import sys, time, torch
before = set(sys.modules)
started = time.perf_counter()
import vsim
print(time.perf_counter() - started)
print([name for name in ("matplotlib", "pandas", "sklearn", "tqdm") if name in sys.modules and name not in before])
"""


def test_import_prints_nothing_and_loads_nothing_heavy() -> None:
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import vsim"], capture_output=True, text=True, check=True
    )
    assert out.stdout == "" and out.stderr == ""
    out = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[1] == "[]"
