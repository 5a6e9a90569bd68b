"""The page of measured clusters: the runs that it prices, the headline, and that it is what its command writes."""

from __future__ import annotations

from statistics import fmean

import pytest
from reproductions import measured_clusters as clusters


@pytest.mark.slow
def test_the_page_is_what_the_command_writes() -> None:
    assert clusters.PAGE.read_text(encoding="utf-8") == clusters.page(), (
        "run python -m tests.reproductions.measured_clusters"
    )


def test_strategies_sync_as_often_as_the_runs_did() -> None:
    assert len(clusters.runs()) == 73
    for run in clusters.runs():
        steps = {event.step for event in clusters.predicted(run).ledger}
        assert len(steps) == run.syncs, run


def test_a_sync_is_the_rings() -> None:
    """2 · 3/4 of four bytes a parameter over one line, without latency."""
    assert clusters.ring("1 Gbit/s") == pytest.approx(1.5 * 32 * 30_846_720 / 1e9) == pytest.approx(1.481, abs=1e-3)


def test_predictions_are_near_and_too_short() -> None:
    mean = {bandwidth: fmean(map(clusters.error, clusters.at(bandwidth))) for bandwidth in clusters.SHAPED}
    assert mean == pytest.approx(
        {"50 Mbit/s": -0.199, "200 Mbit/s": -0.099, "1 Gbit/s": -0.044, "5 Gbit/s": -0.08}, abs=2e-3
    )
    text = (clusters.DOCS / "accuracy.md").read_text(encoding="utf-8")
    assert "4 % too short on average at 1 Gbit/s, 8 % at 5 Gbit/s, 10 % at 200 Mbit/s, 20 % at 50 Mbit/s" in text
    assert all(clusters.error(run) < 0 for run in clusters.runs() if run.bandwidth != "unshaped")


def test_stated_numbers() -> None:
    lines = clusters.stated().splitlines()[2:]
    assert [line.endswith("**no** |") for line in lines] == [False, False, False, True, True, False]
    assert [line.split("|")[6].strip() for line in clusters.crashes().splitlines()[2:]] == [
        "718 s",
        "661 s",
        "660 s",
        "855 s",
        "446 s",
    ]
