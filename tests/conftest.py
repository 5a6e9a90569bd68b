"""What holds for all tests: one thread, no figure windows."""

from __future__ import annotations

import os

os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Small models gain nothing from a second thread, and wait for each other's when tests share the machine.
    torch.set_num_threads(1)
