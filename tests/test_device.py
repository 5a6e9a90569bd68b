"""The tests on a pretended accelerator, in processes of their own: it stays registered with PyTorch to the end."""

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


@pytest.mark.slow
def test_each_process_computes_on_its_own_device(tmp_path: Path) -> None:
    """Two processes with a device each: no tensor is on the other's, and runs have the CPU's weights."""
    commands = [[sys.executable, "on_two_devices.py", str(rank), str(tmp_path)] for rank in range(2)]
    ranks = [subprocess.Popen(command, cwd=Path(__file__).parent, stderr=subprocess.PIPE) for command in commands]
    errors = [rank.communicate()[1].decode()[-3000:] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["[0]", "[1]"]
