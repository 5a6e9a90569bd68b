"""Predictions of a simulated run against real processes, on links whose rate the kernel limits."""

from __future__ import annotations

import pytest
from benchmarks.bench_network import Measured, measure

TRIES = 3  # other work on this machine disturbs a measurement, and no prediction


def is_near(m: Measured) -> bool:
    """Within a quarter, as other tests share the machine; the benchmark tells how near it is on a quiet one."""
    seconds, num_bytes = m.errors
    return abs(seconds) < 0.25 and abs(num_bytes) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_seconds_and_bytes_are_those_of_real_links(num_nodes: int) -> None:
    wrong: set[tuple[float, str]] = set()
    for tried in range(TRIES):
        off = [m for m in measure(num_nodes, [50]) if not is_near(m)]
        here = {(m.megabits, m.strategy) for m in off}
        wrong = wrong & here if tried else here
        if not wrong:
            return
    pytest.fail(f"in each of {TRIES} measurements: {[m for m in off if (m.megabits, m.strategy) in wrong]}")
