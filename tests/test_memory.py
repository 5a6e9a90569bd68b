"""K = 1000 nodes fit in one process: the four matrices that AdamW needs, and less than one more."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent / "benchmarks" / "bench_memory.py"


@pytest.mark.slow
def test_a_thousand_nodes_take_less_than_five_matrices() -> None:
    spec = importlib.util.spec_from_file_location("bench_memory", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    found = benchmark.measure(1000)
    assert found["added_bytes"] <= 5 * found["matrix_bytes"]
    assert found["last_loss"] < found["first_loss"]
