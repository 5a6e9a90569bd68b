"""Importing vsim prints nothing, and adds little to importing torch."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from vsim.extras import extra

PROBE = """
import sys, torch
before = set(sys.modules)
import vsim
heavy = "matplotlib", "optuna", "pandas", "sklearn", "sympy", "torch._dynamo", "tqdm"
vsim.strategy.DiLoCoStrategy(lr=0.1, lr_scheduler="cosine", warmup_steps=1)  # checked without torch.compile
print([name for name in heavy if name in sys.modules and name not in before])
"""


def test_import_prints_nothing_and_loads_nothing_heavy() -> None:
    out = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n" and out.stderr == ""


def test_the_import_of_an_extra_leaves_pythons_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draws_at_import.py").write_text("import random\nnumber = random.getrandbits(24)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = random.getstate()
    assert extra("draws_at_import", "a test", "nothing", "none").number >= 0
    assert random.getstate() == before
