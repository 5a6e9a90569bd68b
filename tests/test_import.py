"""Importing vsim is quiet, and light beside torch."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import sys, torch
before = set(sys.modules)
import vsim
print([name for name in ("matplotlib", "pandas", "sklearn", "tqdm") if name in sys.modules and name not in before])
"""


def test_import_prints_nothing_and_loads_nothing_heavy() -> None:
    out = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n" and out.stderr == ""
