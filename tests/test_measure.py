"""Clusters that are measured: pairs and rounds, a user's step, and links whose rate and latency are known."""

from __future__ import annotations

import itertools
import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from links import relayed, under_torchrun

from vsim import Compute, Network
from vsim.measuring import calibrated, load_step, network_of, tournament
from vsim_cli import main

STEP = """
    import time

    import torch

    def make():
        model = torch.nn.Linear(500, 500)
        return model, lambda: time.sleep(0.02)

    def wrong():
        return torch.nn.Linear(2, 2)
"""


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "train_step.py"
    path.write_text(textwrap.dedent(STEP))
    return path


@pytest.mark.parametrize("n", range(2, 10))
def test_in_a_tournament_all_meet_once_and_none_twice_in_a_round(n: int) -> None:
    rounds = tournament(n)
    assert sorted(pair for own in rounds for pair in own) == [*itertools.combinations(range(n), 2)]
    assert len(rounds) == n - (n % 2 == 0)
    assert all(len({node for pair in own for node in pair}) == 2 * len(own) for own in rounds)


def test_medians_become_a_network() -> None:
    links = [
        {"pair": [low, high], "latency": {"0.5": 0.01 * high}, "bandwidth": [{"0.5": 1e8 * high}, {"0.5": 5e7}]}
        for low, high in itertools.combinations(range(3), 2)
    ]
    found = Network.between(**network_of(links, 3))
    expected = Network.between(
        [[0, 1e8, 2e8], [5e7, 0, 2e8], [5e7, 5e7, 0]], [[0, 0.01, 0.02], [0.01, 0, 0.02], [0.02, 0.02, 0]]
    )
    assert found.as_plain() == expected.as_plain()


@pytest.mark.parametrize("factor", [0.5, 1, 1.85, 30])
def test_an_all_reduce_that_waits_longer_scales_the_latency(factor: float) -> None:
    bits, delays = [[0, 1e8, 2e8], [5e7, 0, 2e8], [5e7, 5e7, 0]], [[0, 0.01, 0.02], [0.01, 0, 0.02], [0.02, 0.02, 0]]
    slower = Network.between(bits, [[factor * one for one in row] for row in delays])
    (seconds,) = slower.seconds("all_reduce", slower.kind(range(3)), 1000)
    fields = {"bandwidth": bits, "latency": delays}
    found, scaled = calibrated(fields, [{"bytes": 1000, "seconds": float(seconds)}])
    expected = min(10, max(1, factor))
    assert found == pytest.approx(expected, abs=0.051) and scaled["latency"][0][2] == pytest.approx(0.02 * found)


def test_mistakes_are_errors_before_anything_is_measured(
    tmp_path: Path, step: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").touch()
    for options, said in (
        ([], "--nodes K is missing"),
        (["--nodes", "1"], "--nodes must be a whole number from 2 to 1000"),
        (["--nodes", "2", "--out", "there.json"], "--out there.json exists"),
        (["--nodes", "2", "--seconds", "0"], "--seconds must be > 0"),
        (["--nodes", "2", "--step", "make"], "--step must be FILE.py:FUNCTION"),
        (["--nodes", "2", "--step", "none.py:make"], "--step none.py: no such file"),
        (["--nodes", "2", "--step", f"{step}:mak"], "has no function 'mak'"),
        (["--nodes", "2", "--step", f"{step}:wrong"], "wrong() must return the model and a function"),
    ):
        assert main(["measure", *options]) == 2
        assert said in capsys.readouterr().err
    model, own = load_step(f"{step}:make")
    assert sum(p.numel() for p in model.parameters()) == 250_500 and own() is None


@pytest.mark.slow
def test_links_of_known_rate_and_latency_are_found_and_runs_take_what_was_predicted(tmp_path: Path, step: Path) -> None:
    """The relay counts headers, and adds 20 ms and up to 4 ms to a packet."""
    with relayed(3, 100, 0.02, 0.004) as nodes:
        options = ["--step", f"{step}:make", "--check", "--seconds", "6"]
        said = under_torchrun(nodes, ["vsim", "measure", *options], tmp_path)
    assert "3 pairs in 3 rounds" in said and "DiLoCo, H = 10" in said
    path = tmp_path / "cluster.json"
    content = json.loads(path.read_text())
    network, compute = Network.from_file(path), Compute.from_file(path)
    assert network.num_nodes == compute.num_nodes == 3
    own = ~np.eye(3, dtype=bool)
    plain = network.as_plain()
    delays, bits = (np.array(plain[key], dtype=float)[own] for key in ("latency", "bits_per_second"))
    delays /= content["measured"]["latencies_a_message"]
    assert np.all((delays > 0.02) & (delays < 0.03)), delays  # 22 ms, and what two cores take
    assert np.all((bits > 75e6) & (bits < 105e6)), bits
    assert np.all((compute.node_seconds > 0.02) & (compute.node_seconds < 0.03))
    assert compute.factors is not None and np.median(compute.factors) == pytest.approx(1, abs=0.05)
    measured = content["measured"]
    assert measured["backend"] == "gloo" and len(measured["hosts"]) == 3
    assert measured["versions"].keys() == {"vsim", "torch", "python"}
    assert [link["pair"] for link in measured["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    by_run = {row["run"]: row for row in measured["check"]}
    assert abs(by_run["AllReduce"]["off"]) < 0.3 and abs(by_run["DiLoCo, H = 10"]["off"]) < 0.4


@pytest.mark.slow
def test_processes_of_one_machine_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "--nodes", "2", "--out", "here.json"]) == 0
    assert Network.of("here.json").num_nodes == 2
    with pytest.raises(ValueError, match="has network, measured, but not 'compute'"):
        Compute.of("here.json")
