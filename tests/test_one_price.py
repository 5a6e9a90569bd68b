"""One network has one price: every question about the same run takes the same seconds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import refused

import vsim
from vsim import ComparedRun, Comparison, Event, History, Network
from vsim.analysis.questions.winners import Winners
from vsim.analysis.report.data import content
from vsim.analysis.tables import HOURS
from vsim.data import digits
from vsim.models import MLP
from vsim.network.planes import planes
from vsim.strategy import FedAvgStrategy, SimpleReduceStrategy
from vsim_cli import main

K, OF, S, B, A, COMPUTE = 4, 10, 600_000, 12e6, 0.25, 1.0  # nodes, clients, bytes, bit/s, seconds; s = 0.4
STEPS, H = 10, 2
PRICES = {  # seconds by hand of an all-reduce, and of a merge
    "ring": (6 * (A + 0.1), 3 * (A + 0.4)),
    "tree": (4 * (A + 0.4), 4 * A + 3 * 0.4 + 2 * 4 * 0.4),
    "halving-doubling": (4 * A + 1.5 * 0.4, 2 * A + 3 * 0.4),
    "server": (2 * 4 * 0.4, 2 * 4 * 0.4),
}
NETWORKS: dict[str, tuple[str | Network, str | None]] = {  # the algorithm that each names
    "text": ("12 Mbit/s, 250 ms", None),
    "network": (Network(B, A), None),
    **{name: (f"12 Mbit/s, 250 ms, {name}", name) for name in PRICES},
    "network, ring": (Network(B, A, collective="ring"), "ring"),
    "network, tree": (Network(B, A, collective="tree"), "tree"),
}


def made(collective: str, of_clients: bool) -> Comparison:
    """A run of nodes, or of cohorts, with a collective in every second step, which reaches a loss of 1 in the last."""
    history, nodes = History("made", K, OF if of_clients else None), range(K)
    ledger = history.ledger
    for step in range(STEPS + 1):
        if of_clients and step % H == 1:
            ledger.record(Event(step, step, "start", "pull", "pull", S, (nodes,), server=True))
        if step and step % H == 0:
            ledger.record(Event(step, step, "weights", collective, "weights", S, (nodes,), server=ledger.server))
        row = {"step": step, "examples": step, "global_loss": 2.0 - (step == STEPS), "train_loss": 1.0}
        history.append(row | {"wire_bytes": ledger.wire_bytes}, [1.0] * K if step else None)
    comparison = Comparison(S)
    comparison.add("made", ComparedRun(history))
    return comparison


def by_history(c: Comparison, network: Any) -> float:
    return float(c["made"].history.time(network, COMPUTE).seconds[-1])


def by_rows(c: Comparison, network: Any) -> float:
    (row,) = c.rows(1.0, network, COMPUTE).to_dict("records")
    assert row["hours"] == row["hours to 1"]
    return 3600 * float(row["hours"])


def by_table(c: Comparison, network: Any) -> float:
    table = c.table(columns=["hours"], digits=9, network=network, compute=COMPUTE)
    _, unit = table.splitlines()[0].split()
    return {name: size for name, size, _ in HOURS.units}[unit] * 3600 * float(table.splitlines()[2].split()[-1])


def by_map(c: Comparison, network: Any) -> float:
    c.network = Network.of(network)
    return float(c.winners(1.0, [B], [A], COMPUTE).seconds["made"].item())


def by_page(c: Comparison, network: Any) -> float:
    page = content(c, network, COMPUTE)
    return max(np.reshape(page["ledgers"][0]["planes"][-1], (-1, 3)) @ [COMPUTE, A, 1 / B])


def by_front(c: Comparison, network: Any) -> float:
    """As `vsim.tune` reports it to optuna."""
    return 3600 * float(c.pareto("time", network=network, compute=COMPUTE).frame["hours"].item())


def by_cheapest(c: Comparison, network: Any) -> float:
    own = by_history(c, network)
    with refused(ValueError, "within"):
        c.cheapest(1.0, hours=0.9999 * own / 3600, network=network, compute=COMPUTE)
    assert c.cheapest(1.0, hours=1.0001 * own / 3600, network=network, compute=COMPUTE) == "made"
    return own


def by_plot(c: Comparison, network: Any) -> float:
    axes = c.plot(x="time", network=network, compute=COMPUTE)
    (unit,) = re.findall(r"\((.*)\)", axes.get_xlabel())
    return float(axes.get_lines()[0].get_xdata()[-1]) * {"seconds": 1, "minutes": 60}[unit]  # type: ignore[index]


FACES: list[Callable[[Comparison, Any], float]] = [
    *(by_history, by_rows, by_table, by_map, by_page, by_front, by_cheapest, by_plot),
]


@pytest.mark.parametrize("of_clients", [False, True], ids=["nodes", "clients"])
@pytest.mark.parametrize("given", NETWORKS)
def test_every_answer_takes_the_same_seconds(given: str, of_clients: bool) -> None:
    network, named = NETWORKS[given]
    for i, collective in enumerate(("all_reduce", "merge")):
        expected = STEPS * COMPUTE + STEPS / H * PRICES[named or ("server" if of_clients else "ring")][i]
        expected += STEPS / H * 4 * 0.4 * of_clients  # pulls
        for face in FACES:
            found = face(made(collective, of_clients), network)
            assert found == pytest.approx(expected, rel=1e-3), (collective, face.__name__)


def test_the_line_of_a_server_is_everywhere() -> None:
    network = Network(B, A, server="3 Mbit/s")  # four times as slow as a client's: 1.6 s a message
    for face in FACES:
        assert face(made("all_reduce", True), network) == pytest.approx(10 + 5 * 3 * 4 * 1.6, rel=1e-3), face.__name__


def test_a_map_of_other_collectives_than_the_networks() -> None:
    comparison = made("all_reduce", True)
    comparison.network = Network.of("12 Mbit/s, 250 ms, tree")
    found = comparison.winners(1.0, [B], [A], COMPUTE, collective="ring").seconds["made"].item()
    assert found == pytest.approx(STEPS + 5 * (PRICES["ring"][0] + 1.6))


@pytest.mark.parametrize("of_clients", [False, True], ids=["nodes", "clients"])
@pytest.mark.parametrize("given", ["text", "tree"])
def test_on_the_command_line(given: str, of_clients: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, _ = NETWORKS[given]
    comparison = made("all_reduce", of_clients)
    comparison.to_json(tmp_path / "comparison.json")
    saved = [str(tmp_path / "comparison.json"), "--network", str(network), "--compute", "1"]
    assert main(["show", *saved, "--target-loss", "1"]) == 0
    printed, seconds = capsys.readouterr().out, by_history(comparison, network)
    shown = f"{seconds:.2f}" if "seconds to 1" in printed else f"{seconds / 60:.2f}"
    assert printed.count(f" {shown} ") + printed.count(f" {shown}\n") == 2  # to the end, and to the loss
    assert main(["report", *saved, "--out", str(tmp_path / "page.html")]) == 0
    (data,) = re.findall(r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text(encoding="utf-8"), flags=re.S)
    seconds = max(np.reshape(json.loads(data)[0]["ledgers"][0]["planes"][-1], (-1, 3)) @ [COMPUTE, A, 1 / B])
    assert seconds == pytest.approx(by_history(comparison, network), rel=1e-3)


@pytest.mark.parametrize(
    ("network", "participation"),
    [
        ("10 Mbit/s, 100 ms, halving-doubling", []),
        ("10 Mbit/s, 100 ms", ["--participation", "sample:of=8"]),
    ],
    ids=["nodes", "clients"],
)
def test_the_map_of_the_command_line(
    network: str, participation: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Winners] = []

    def keep(self: Winners) -> Any:
        drawn.append(self)
        return original(self)

    original = Winners.plot
    monkeypatch.setattr(Winners, "plot", keep)
    options = ["--data", "digits", "--model", "mlp", "--steps", "2", "--val-size", "16", "--quiet", "--compute", "0.1"]
    options += ["--strategies", "fedavg:H=1", "--target-loss", "9", "--val-interval", "2", "--out", str(tmp_path)]
    assert main(["compare", *options, "--network", network, *participation]) == 0
    (found,) = drawn
    history = Comparison.from_json(tmp_path / "comparison.json")["fedavg:H=1"].history
    cell = list(found.latencies).index(0.1), list(found.bandwidths).index(1e7)
    reached = int(history.crossing(9, "global_loss").step)
    expected = history.time(network, 0.1).seconds[reached]
    assert found.seconds["FedAvg, H = 1"][cell] == pytest.approx(expected)


@pytest.mark.parametrize("named", ["", ", tree"])
@pytest.mark.parametrize("of_clients", [False, True], ids=["nodes", "clients"])
def test_a_search_minimizes_the_same_seconds(named: str, of_clients: bool) -> None:
    pytest.importorskip("optuna")
    train, val = digits()
    network, own = f"12 Mbit/s, 250 ms{named}", {"participation": vsim.Sample(K, of=OF)} if of_clients else {}
    search = vsim.tune(
        *(MLP(hidden=(4,), seed=0), train, val),
        **{"space": lambda trial: FedAvgStrategy(H=1, lr=trial.suggest_float("lr", 1e-3, 1e-2)), "trials": 1},
        **{"objectives": ["loss", "time"], "network": network, "compute": COMPUTE, "num_nodes": K, "max_steps": 2},
        **{"progress": False, "val_size": 16, **own},
    )
    (trial,) = search.study.trials
    assert trial.values[1] == pytest.approx(search["trial 0"].history.time(network, COMPUTE).seconds[-1])


@pytest.mark.parametrize("named", [None, "ring", "halving-doubling"])
def test_a_budget_pays_for_the_same_seconds(named: str | None) -> None:
    train, val = digits()
    model = MLP(hidden=(4,), seed=0)
    s = 8 * 4 * sum(p.numel() for p in model.parameters()) / 1e4
    a_step = 1 + (4 * A + 1.5 * s if named == "halving-doubling" else 6 * (A + s / 4))
    network = "10 kbit/s, 250 ms" + (f", {named}" if named else "")
    comparison = vsim.compare(
        model, train, val, strategies={"a": SimpleReduceStrategy(lr=1e-2)}, num_nodes=K, progress=False, val_size=16,
        budget={"time": 3.5 * a_step}, network=network, compute=1.0,
    )  # fmt: skip
    (row,) = comparison.rows().to_dict("records")
    assert row["steps"] == 3 and row["time used"] == pytest.approx(3 / 3.5)


def test_planes_are_of_the_run() -> None:
    for of_clients in (False, True):
        comparison = made("merge", of_clients)
        run = comparison["made"]
        found = planes(run.ledger, Network(B, A), vsim.Compute(1.0), [STEPS]).seconds(1.0, A, B).item()
        assert found == pytest.approx(by_history(comparison, Network(B, A)), rel=1e-3)


@pytest.mark.parametrize("of_clients", [False, True], ids=["nodes", "clients"])
def test_comparisons_are_joined_if_their_networks_mean_the_same(of_clients: bool) -> None:
    train, val = digits()
    own = {"participation": vsim.Sample(2, of=4)} if of_clients else {}
    options = {"num_nodes": 2, "max_steps": 1, "val_size": 16, "progress": False, **own}
    one, other = (
        vsim.compare(MLP(hidden=(4,), seed=0), train, val, strategies={name: FedAvgStrategy(H=1)}, **options)
        for name in ("one", "other")
    )
    one.network, other.network = Network(B, A), Network(B, A, collective="server" if of_clients else "ring")
    assert (one | other).network is one.network
    other.network = Network(B, A, collective="tree")
    with refused(ValueError, "different network", "tree"):
        one | other


# Clients --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["mean", "median", "geometric_median", "rda"])
def test_a_client_sends_its_vector_once_and_pulls_the_result(average: str) -> None:
    train, val = digits()
    trainer = vsim.Trainer(MLP(hidden=(4,), seed=0), train, val)
    size = sum(4 * p.numel() for p in trainer.model.parameters())
    strategy = FedAvgStrategy(H=2, lr=1e-2, average=average)
    trainer.fit(strategy=strategy, num_nodes=3, max_steps=4, participation=vsim.Sample(3, of=9), progress=False)
    ledger, (*_, event) = trainer.ledger, trainer.ledger
    assert event.collective == ("all_reduce" if average == "mean" else "merge")
    assert (event.wire_bytes, event.total_wire_bytes, event.server_wire_bytes) == (size, 3 * size, 3 * size)
    assert ledger.total_wire_bytes == 2 * 3 * size and ledger.server_wire_bytes == 4 * 3 * size  # with pulls
    assert sorted(ledger.node_wire_bytes)[-1] == size * max(
        sum(client in own.nodes for own in ledger.attendance) for client in range(9)
    )
    s = 8 * size / 1e5
    assert trainer.history.time("100 kbit/s, 10 ms", 1.0).seconds[-1] == pytest.approx(4 + 2 * 3 * 3 * s)


def test_a_client_alone_in_its_round_sends_to_the_server_too() -> None:
    train, val = digits()
    trainer = vsim.Trainer(MLP(hidden=(4,), seed=0), train, val)
    trainer.fit(
        strategy=FedAvgStrategy(H=2, lr=1e-2), num_nodes=1, max_steps=4, participation=vsim.Sample(1, of=5),
        progress=False,
    )  # fmt: skip
    size = sum(4 * p.numel() for p in trainer.model.parameters())
    assert (trainer.ledger.total_wire_bytes, trainer.ledger.server_wire_bytes) == (2 * size, 4 * size)
    message = 0.01 + 8 * size / 1e5
    assert trainer.history.time("100 kbit/s, 10 ms", 1.0).seconds[-1] == pytest.approx(4 + 2 * 3 * message)


def test_files_of_an_earlier_version_keep_their_bytes() -> None:
    """Version 0.2.0 counted the bytes of a ring among clients, and a median as an all-gather."""
    plain = made("all_gather", True)["made"].history.as_plain()
    del plain["ledger"]["server"]
    read = History.from_plain(json.loads(json.dumps(plain)))
    assert read.ledger.total_wire_bytes == STEPS / H * K * (K - 1) * S
    assert read.ledger.server_wire_bytes == STEPS / H * K * S  # pulls
    again = History.from_plain(json.loads(json.dumps(read.as_plain())))
    assert list(again.ledger) == list(read.ledger) and again.ledger.wire_bytes == read.ledger.wire_bytes
    # Its hours were those of a server, through which an all-gather sends all rows back.
    seconds = read.time("12 Mbit/s, 250 ms", COMPUTE).seconds[-1]
    assert seconds == pytest.approx(STEPS + STEPS / H * (1.6 + 1.6 + 3 * 1.6))
    # A run that continues from it goes on counting as the file does, and is compared with the AllReduce of its kind.
    comparison = Comparison(S)
    comparison.add("made", ComparedRun(read))
    (row,) = comparison.rows().to_dict("records")
    assert row["fewer bytes than AllReduce"] == pytest.approx(2 * (K - 1) * STEPS / (STEPS / H * K * (K - 1)))
    more = History("made", K, OF)
    more.continue_from(read)
    assert not more.ledger.server and math.isclose(more.ledger.wire_bytes, read.ledger.wire_bytes)
