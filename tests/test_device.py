"""The tests on a pretended accelerator, in a process of their own: it stays registered with PyTorch to the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_runs_on_another_device() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", "on_device.py"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
