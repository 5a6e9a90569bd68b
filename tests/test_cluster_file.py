"""The file of a cluster: read wherever a network or a compute is given, and errors that name a field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_cluster import small_mlp, vectors
from torch.nn import functional as F

import vsim
from vsim import Compute, Network
from vsim.strategy import AsyncDiLoCoStrategy, DiLoCoStrategy, SimpleReduceStrategy
from vsim_cli import main

RATES = [[None, "100 Mbit/s", 2e8], [1e8, None, 1e8], [1e8, 1e8, None]]
DELAYS = [[0, "30 ms", 0.01], [0.03, 0, 0.02], [0.01, 0.02, 0]]
COMPUTE = {"seconds_per_step": [0.8, 1.0, 0.9], "factors": [0.9, 1.0, 1.4], "seed": 3}


def written(folder: Path, content: Any) -> str:
    path = folder / "cluster.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    return written(tmp_path, {"network": {"bandwidth": RATES, "latency": DELAYS}, "compute": COMPUTE})


NETWORK, COMPUTING = Network.between(RATES, DELAYS), Compute(**COMPUTE)  # type: ignore[arg-type]


def test_a_file_is_its_values(cluster: str) -> None:
    assert Network.of(cluster).as_plain() == Network.from_file(Path(cluster)).as_plain() == NETWORK.as_plain()
    assert Compute.of(cluster).as_plain() == COMPUTING.as_plain()
    assert Compute.from_file(cluster, layers=4, dollars_per_hour=2).layers == 4
    drawn = Compute.of(cluster).steps(3).next(400) / [0.8, 1.0, 0.9]
    assert np.allclose(np.unique(drawn.round(9)), [0.9, 1.0, 1.4]) and COMPUTING.varies
    blocks = Compute.of(cluster).steps(3)
    assert np.array_equal(np.concatenate([blocks.next(n) for n in (1, 7, 92)]), drawn[:100] * [0.8, 1.0, 0.9])
    again = Compute.from_plain(json.loads(json.dumps(COMPUTING.as_plain())))
    assert again.decides_as(COMPUTING) and not again.decides_as(Compute(COMPUTE["seconds_per_step"]))  # type: ignore[arg-type]


def test_a_file_by_hand_can_be_short(tmp_path: Path) -> None:
    path = written(tmp_path, {"network": "200 Mbit/s, 30 ms, tree", "compute": "800 ms"})
    assert repr(Network.of(path)) == "Network(200 Mbit/s, 30 ms, tree)" and Compute.of(path).node_seconds == [0.8]
    path = written(tmp_path, {"network": {"bandwidth": "1 Gbit/s", "latency": 0.01, "server": "5 Gbit/s"}})
    assert Network.of(path).as_plain() == Network("1 Gbit/s", "10 ms", server="5 Gbit/s").as_plain()


def test_it_is_read_wherever_a_network_is_given(cluster: str, tmp_path: Path) -> None:
    trainer = vsim.Trainer(small_mlp(), vectors(), loss_fn=F.cross_entropy)
    trainer.fit(strategy=DiLoCoStrategy(H=2, lr=0.1), num_nodes=3, max_steps=4, batch_size=2, progress=False)
    expected = vsim.timeline(trainer, NETWORK, COMPUTING).seconds
    assert np.array_equal(vsim.timeline(trainer, cluster, cluster).seconds, expected)
    assert np.array_equal(trainer.history.time(cluster, cluster).seconds, expected)
    line = vsim.price(DiLoCoStrategy(H=2), parameters=1e6, num_nodes=3, max_steps=4, network=cluster, compute=cluster)
    assert repr(line.network) == "Network(3 nodes at 3 places, 100 Mbit/s … 200 Mbit/s, 10 ms … 30 ms, ring)"


def test_a_record_holds_the_values(cluster: str, tmp_path: Path) -> None:
    comparison = vsim.compare(
        small_mlp(),
        vectors(),
        vectors(8),
        loss_fn=F.cross_entropy,
        strategies={"all": SimpleReduceStrategy(lr=0.1), "async": AsyncDiLoCoStrategy(H=2, lr=0.1)},
        num_nodes=3,
        max_steps=4,
        batch_size=2,
        network=cluster,
        compute=cluster,
        progress=False,
    )
    comparison.to_json(tmp_path / "comparison.json")
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert "cluster.json" in content.pop("calls")[0]  # the call as it was written
    assert "cluster.json" not in json.dumps(content)
    Path(cluster).unlink()
    again = vsim.Comparison.from_json(tmp_path / "comparison.json")
    assert again.network is not None and again.network.as_plain() == NETWORK.as_plain()
    assert again.compute is not None and again.compute.as_plain() == COMPUTING.as_plain()
    assert again.table() == comparison.table()


def test_the_command_line_reads_it(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ["time", "--nodes", "3", "--steps", "20", "--strategies", "allreduce", "--network", cluster]
    assert main([*call, "--compute", cluster, "--layers", "4"]) == 0
    shown = capsys.readouterr().out
    assert "100 Mbit/s … 200 Mbit/s" in shown and "0.8 … 1 s a step, 4 layers, × 0.9 … 1.4" in shown
    assert main([*call[:-1], str(tmp_path / "none.json"), "--compute", "1"]) == 2
    assert capsys.readouterr().err.endswith("none.json: no such file\n")
    assert main([*call, "--compute", written(tmp_path, {"network": "1 Gbit/s"})]) == 2
    assert "has network, but not 'compute'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "error", "named"),
    [
        ("{", ValueError, "cluster.json is not a JSON file"),
        ("[" * 100_000, ValueError, "cluster.json is not a JSON file"),
        ("[]", TypeError, "must hold an object with the fields network, compute, measured"),
        ({"netwrk": {}}, TypeError, "'netwrk'; did you mean 'network'"),
        ({"compute": 1}, ValueError, "has compute, but not 'network'"),
        ({"network": 5}, TypeError, "network: must be text, or an object"),
        ({"network": "fast"}, ValueError, "network: bandwidth must be a rate"),
        ({"network": {"latency": 1}}, ValueError, "network: bandwidth is missing"),
        ({"network": {"bandwith": 1}}, TypeError, "'bandwith'; did you mean 'bandwidth'"),
        ({"network": {"bandwidth": "10 MB"}}, ValueError, "network: bandwidth must be a rate in bits"),
        ({"network": {"bandwidth": 1e6, "latency": "-1 s"}}, ValueError, "network: latency must be >= 0"),
        ({"network": {"bandwidth": [[0, 1], [-5, 0]]}}, ValueError, r"network: bandwidth\[1, 0\] must be > 0"),
        ({"network": {"bandwidth": [[0, 1]]}}, ValueError, "bandwidth must be a .K, K. matrix"),
        ({"network": {"bandwidth": 1e6, "latency": [[0]]}}, TypeError, "bandwidth must be a .K, K. matrix"),
        ({"network": {"bandwidth": 1e6, "collective": "star"}}, ValueError, "collective must be one of"),
    ],
)
def test_a_bad_network_is_an_error_that_names_the_field(
    content: Any, error: type[Exception], named: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=named):
        Network.of(written(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "error", "named"),
    [
        ({"network": "1 Gbit/s"}, ValueError, "has network, but not 'compute': measure it with vsim measure --step"),
        ({"compute": [1]}, TypeError, "compute: must be seconds, or an object with seconds_per_step"),
        ({"compute": {"jitter": 0.1}}, ValueError, "compute: seconds_per_step is missing"),
        ({"compute": {"seconds_per_step": 0}}, ValueError, "compute: seconds_per_step must be > 0"),
        ({"compute": {"seconds_per_step": 1, "factors": []}}, ValueError, "compute: factors must have at least one"),
        ({"compute": {"seconds_per_step": 1, "factors": [0]}}, ValueError, "compute: factors must be > 0"),
        ({"compute": {"seconds_per_step": 1, "factors": [1], "jitter": 1}}, TypeError, "give one of them"),
        ({"compute": {"seconds_per_step": 1, "layer": 3}}, TypeError, "'layer'; did you mean 'layers'"),
    ],
)
def test_a_bad_compute_is_an_error_that_names_the_field(
    content: Any, error: type[Exception], named: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=named):
        Compute.of(written(tmp_path, content))
