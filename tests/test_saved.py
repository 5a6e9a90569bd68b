"""What was saved is read again: whole, growing, torn and forged; and served to this machine alone."""

from __future__ import annotations

import http.client
import json
import math
import random
import shutil
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from comparisons_by_hand import comparison as made
from comparisons_by_hand import run as one_run
from errors import refused
from shared_comparisons import compared, three_strategies

import vsim
from vsim.analysis.cache import Cache
from vsim.analysis.report.page import data_of, report
from vsim.checkpoint.folder import locked
from vsim.history.loggers import CSVLogger
from vsim.runs.race_folder import write_whole
from vsim.saved import read_comparison, read_comparisons, read_log, select
from vsim.strategy import DiLoCoStrategy, GossipStrategy, SimpleReduceStrategy
from vsim.strategy.remade import remade
from vsim.watch import Watch
from vsim_cli import main

STEPS = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[vsim.Comparison, Path]:
    """A comparison, and the folder with its checkpoints in `saved` and its logs in `logs/run`."""
    folder = tmp_path_factory.mktemp("trained")
    comparison = compared(
        {"AllReduce": SimpleReduceStrategy(lr=1e-3), "DiLoCo, H = 2": DiLoCoStrategy(H=2, lr=1e-3)},
        max_steps=STEPS, val_interval=2, seeds=[1, 2], save_dir=folder / "saved", checkpoint_interval=2,
        logger=[CSVLogger(folder / "logs")], run_name="run",
    )  # fmt: skip
    comparison.to_json(folder / "comparison.json")
    return comparison, folder


@pytest.mark.parametrize("where", ["comparison.json", "saved", "logs/run"])
def test_runs_are_read_wherever_they_are(trained: tuple[vsim.Comparison, Path], where: str) -> None:
    comparison, folder = trained
    again = read_comparison(folder / where)
    for name, other in zip(sorted(comparison), sorted(again), strict=True):
        for run, its in zip(comparison.runs(name), sorted(again.runs(other), key=lambda run: run.seed), strict=True):
            assert its.seed == run.seed
            for column in ("step", "examples", "global_loss", "wire_bytes", "divergence"):
                assert its.history[column].tolist() == pytest.approx(run.history[column].tolist(), nan_ok=True), column
            if where != "logs/run":
                assert list(its.ledger) == list(run.ledger)
    assert again.loss_column == "global_loss"
    about, its = comparison.describe(), again.describe()
    assert list(its["strategies"].values()) == [about["strategies"][name] for name in sorted(comparison)]
    assert its["model"] == about["model"] and its["num_nodes"] == about["num_nodes"] and its["seeds"] == [1, 2]
    if where != "logs/run":
        sent = [
            {row["wire MB/node"] for row in one.at(parameters=1e6).rows().to_dict("records")}
            for one in (again, comparison)
        ]
        assert sent[0] == sent[1]


def test_a_log_has_losses_and_no_hours(trained: tuple[vsim.Comparison, Path]) -> None:
    _, folder = trained
    logs = read_comparison(folder / "logs" / "run")
    with pytest.raises(ValueError, match="no hours"):
        logs.rows(network="1 Gbit/s", compute=1).to_dict("records")
    page = json.loads(report({"logs": logs}).html.split('id="data">')[1].split("</script>")[0])[0]
    assert all(planes == [None] for ledger in page["ledgers"] for planes in ledger["planes"])
    assert "no hours" in page["ledgers"][0]["fixed"]
    sent = {run["name"]: page["ledgers"][run["seeds"][0]["ledger"]]["wire"][-1] for run in page["runs"]}
    assert sent == {name: pytest.approx(logs[name].history["wire_bytes"][-1]) for name in logs}
    assert len(set(sent.values())) == 2


def test_runs_that_go_on_say_so(trained: tuple[vsim.Comparison, Path], tmp_path: Path) -> None:
    shutil.copytree(trained[1] / "saved", tmp_path / "saved")
    for end in (tmp_path / "saved").glob("*/end.json"):
        end.unlink()
    for newest in (tmp_path / "saved").glob(f"*/step-{STEPS:08d}.safetensors"):
        newest.write_bytes(newest.read_bytes()[:1000])  # half written: the one before is whole
    with locked(tmp_path / "saved"):
        running = read_comparison(tmp_path / "saved")
        with pytest.raises(vsim.CheckpointError, match="in use"), locked(tmp_path / "saved"):
            pass
    assert {run.note for name in running for run in running.runs(name)} == {f"running, step {STEPS - 2}"}
    stopped = read_comparison(tmp_path / "saved")
    assert {run.note for name in stopped for run in stopped.runs(name)} == {f"interrupted, step {STEPS - 2}"}
    assert "interrupted" in stopped.table()


def test_the_loss_before_training_is_no_result(tmp_path: Path) -> None:
    log = tmp_path / "run" / "early"
    log.mkdir(parents=True)
    (log / "train.csv").write_text("step,train_loss,wire_bytes,payload_bytes,seconds\n1,2.0,4,4,0.1\n")
    (log / "validation.csv").write_text("step,global_loss,global_accuracy\n0,2.3,0.1\n")
    (row,) = read_comparison(tmp_path / "run").rows().to_dict("records")
    assert math.isnan(row["validation loss"]) and math.isnan(row["accuracy"])
    early, late = one_run([2.0, math.nan], 5, stopped=5), one_run([2.0, 2.0, math.nan], 3, stopped=5)
    table = made(early=[early], late=[late]).table()
    assert "step 5 (no loss yet)" in table and "step 5 (loss of step 3)" in table


def test_only_runs_that_changed_are_read(trained: tuple[vsim.Comparison, Path], tmp_path: Path) -> None:
    shutil.copytree(trained[1] / "saved", tmp_path / "saved")
    end, cache = min((tmp_path / "saved").glob("*/end.json")), Cache()

    def page(cache: Cache) -> tuple[list[vsim.History], str]:
        runs = read_comparison(tmp_path / "saved", cache)
        shown = data_of({"saved": runs}, "1 Gbit/s", 1, cache)
        cache.end_round()
        return [run.history for name in runs for run in runs.runs(name)], shown

    before, shown = page(cache)
    again, as_shown = page(cache)
    assert as_shown == shown and all(own is other for own, other in zip(before, again, strict=True))
    content = json.loads(end.read_text())
    content["history"]["ledger"]["events"].pop()
    end.write_text(json.dumps(content))
    after, other_page = page(cache)
    assert sorted(own is other for own, other in zip(before, after, strict=True)) == [False, True, True, True]
    assert shown != other_page == page(Cache())[1]


def test_runs_are_chosen_by_words_of_their_names(
    trained: tuple[vsim.Comparison, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    read = read_comparisons([trained[1] / "comparison.json", trained[1] / "saved"])
    for only, names in {
        "allreduce": ["AllReduce"],
        "h=2 DILOCO": ["DiLoCo, H = 2"],
        "*d*": list(read["saved"]),
    }.items():
        assert [list(one) for one in select(read, [only]).values()] == [names, names]
    assert select(read, []) == read
    with refused(ValueError, "'H=20' … 'AllReduce', 'DiLoCo, H = 2'"):
        select(read, ["allreduce", "H=20"])
    assert main(["watch", str(trained[1] / "saved"), "--only", "H=20"]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("http://127.0.0.1:") and "'DiLoCo, H = 2'" in printed.err
    assert main(["watch", str(trained[1] / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_a_line_that_is_half_written_is_not_read(trained: tuple[vsim.Comparison, Path], tmp_path: Path) -> None:
    shutil.copytree(next((trained[1] / "logs" / "run").iterdir()), tmp_path / "log")
    whole = read_log(tmp_path / "log")
    with open(tmp_path / "log" / "train.csv", "a") as file:
        file.write("99,1")
    assert read_log(tmp_path / "log")["step"].tolist() == whole["step"].tolist()


def test_show_prints_tables(trained: tuple[vsim.Comparison, Path], capsys: pytest.CaptureFixture[str]) -> None:
    comparison, folder = trained
    places = [str(folder / "comparison.json"), str(folder / "saved")]
    assert main(["show", *places, "--network", "1 Gbit/s", "--compute", "1"]) == 0
    printed = capsys.readouterr().out
    assert comparison.table(network="1 Gbit/s", compute=1) in printed and f"losses at step {STEPS}\n" in printed
    assert printed.count("utilization") == 2
    for wrong in ([], [str(folder / "no")], 2 * [str(folder / "saved")]):
        assert main(["show", *wrong]) == 2
        assert capsys.readouterr().err.startswith("vsim show: ")


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_damaged_and_forged_files_are_errors_or_pages(tmp_path: Path, count: int) -> None:
    rng, path, read = random.Random(count), tmp_path / "comparison.json", 0
    three_strategies().to_json(path)
    text = path.read_text()
    for i in range(count):
        content = json.loads(text)
        if i % 3 == 0:  # bytes
            cut = bytearray(text.encode())
            for _ in range(rng.randint(1, 4)):
                cut[rng.randrange(len(cut))] = rng.randrange(256)
            path.write_bytes(bytes(cut[: rng.choice([len(cut), rng.randrange(len(cut))])]))
        else:  # values of any kind, deep inside
            for _ in range(rng.randint(1, 3)):
                _replace(content, rng)
            path.write_text(json.dumps(content))
        try:
            page = report(read_comparisons([path]), "1 Gbit/s", 1).html
        except ValueError:
            continue
        read += 1
        assert page.count("<script") == 2 == page.count("</script>") and "<img" not in page
    assert read > count / 20


def _replace(content: object, rng: random.Random) -> None:
    """Put something else somewhere into a tree of lists and dicts."""
    odd = [None, -1, 1e308, 10**30, "</script><img src=x onerror=alert(1)>", [], {}, [[1]], True, "NaN", "inf", 0.5]
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))  # type: ignore[arg-type, call-overload]
        if not keys:
            return
        key = rng.choice(keys)
        below = content[key]  # type: ignore[index]
        if not isinstance(below, dict | list) or not below or rng.random() < 0.15:
            content[key] = rng.choice(odd)  # type: ignore[index]
            return
        content = below


def test_a_record_keeps_edges_and_opens_no_file(tmp_path: Path) -> None:
    networkx, path, out = pytest.importorskip("networkx"), tmp_path / "edges.csv", tmp_path / "comparison.json"
    path.write_text("0,1\n1,2\n2,3\n")
    graphs: dict[str, Any] = {"file": path, "text": str(path), "graph": networkx.path_graph(4)}
    strategies = {name: GossipStrategy(topology=graph, lr=1e-3) for name, graph in graphs.items()}
    assert {repr(one) for one in strategies.values()} == {"GossipStrategy(topology=[[0, 1], [1, 2], [2, 3]], lr=0.001)"}
    trained = compared({**strategies}, max_steps=2, num_nodes=4)
    path.unlink()
    trained.to_json(out)
    text = out.read_text()
    assert str(path) not in text and all(run.strategy is not None for run in read_comparison(out).all_runs)
    path.write_text("0,1\n1,2\n2,3\n")
    forged = text.replace("topology=[[0, 1], [1, 2], [2, 3]]", f"topology={str(path)!r}")
    assert forged != text
    out.write_text(forged)
    assert all(run.strategy is None for run in read_comparison(out).all_runs)


@pytest.mark.parametrize(
    "call",
    [
        "SimpleReduceStrategy(average=geometric_median(rounds=1000000000))",
        "SimpleReduceStrategy(average=centered_clip(radius=1.0, rounds=1000000000))",
        f"GossipStrategy(topology=[{', '.join(['[0, 1]'] * 2000)}])",
        f"SimpleReduceStrategy(lr={'-' * 9000}1)",
    ],
)
def test_a_saved_call_of_endless_work_is_not_made(call: str) -> None:
    assert remade("SimpleReduceStrategy(average=geometric_median(rounds=100))") is not None
    assert remade(call) is None


def test_a_folder_without_its_description_says_so(tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategies": {"a": SimpleReduceStrategy(lr=1e-3)}, "max_steps": 2, "save_dir": tmp_path}
    compared(**options)
    write_whole(tmp_path / "race.json", {"configs": []})
    with refused(vsim.CheckpointError, "race.json does not describe a comparison: it lacks runs and rungs"):
        compared(**options, resume=True)
    (tmp_path / "race.json").unlink()
    for resume in (True, "auto", False):
        with refused(vsim.CheckpointError, "race.json, which describes", "is missing: restore the file"):
            compared(**options, resume=resume)


def test_a_record_that_was_copied_from_another_run_is_recognized(tmp_path: Path) -> None:
    strategies: dict[str, vsim.strategy.Strategy] = {"AllReduce": SimpleReduceStrategy(lr=1e-3)}
    options: dict[str, Any] = {"strategies": strategies, "max_steps": STEPS, "save_dir": tmp_path, "seeds": [1, 2]}
    compared(**options)
    first, second = (tmp_path / f"AllReduce,_seed_{seed}" for seed in (1, 2))
    for name in ("step-00000006.safetensors", "end.json"):
        kept = (second / name).read_bytes()
        shutil.copy(first / name, second / name)
        with pytest.raises(vsim.CheckpointError, match=r"is of (the run 'AllReduce, seed 1', not|another run: seed)"):
            compared(**options, resume=True)
        if name == "end.json":
            with refused(ValueError, str(first), str(second), "hold the record of one run, 'AllReduce, seed 1'"):
                read_comparison(tmp_path)
        (second / name).write_bytes(kept)


# Watching -------------------------------------------------------------------------------------------------------------


@contextmanager
def served(*paths: Path) -> Iterator[Watch]:
    watch = Watch(paths, every=0.1)
    thread = threading.Thread(target=watch.serve)
    thread.start()
    try:
        yield watch
    finally:
        watch.close()
        thread.join()


def asked(watch: Watch, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    where = urlsplit(watch.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_only_who_has_the_address_is_answered(trained: tuple[vsim.Comparison, Path]) -> None:
    with served(trained[1] / "comparison.json") as watch:
        path = urlsplit(watch.url).path
        status, page = asked(watch, path)
        assert status == 200 and b"connect-src 'self'" in page
        assert watch.url.startswith("http://127.0.0.1:") and len(path) > 30
        inside = (path[:-2] + "/", path + "../", path + "%2e%2e/etc/passwd", path + "/data", path[:-1])
        for other in ("/", "/data", *inside):
            assert asked(watch, other) == (404, b"not found\n"), other
        for host in ("evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil.example:80", ""):
            assert asked(watch, path, Host=host) == (403, b"another host\n")
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert asked(watch, path, method)[0] == 501


def data_with(watch: Watch, text: str) -> dict[str, object]:
    """The data that the page gets, once they hold a text."""
    for _ in range(100):
        status, answer = asked(watch, urlsplit(watch.url).path + "data")
        assert status == 200
        if text in answer.decode():
            found: dict[str, object] = json.loads(answer)
            return found
        threading.Event().wait(0.05)
    raise AssertionError(f"no {text} in 5 s")


def test_data_follow_files_that_grow(trained: tuple[vsim.Comparison, Path], tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    shutil.copy(trained[1] / "comparison.json", path)
    with served(tmp_path) as watch:
        first = data_with(watch, "AllReduce")
        assert data_with(watch, "AllReduce") == first
        path.write_text("{")
        assert "comparison.json" in str(data_with(watch, '"error"')["error"])
        three_strategies().to_json(path)
        assert data_with(watch, "alone")["digest"] != first["digest"]


@pytest.mark.parametrize("kind", ["forged", "device", "not shown"])
def test_a_bad_file_is_a_line_and_cuts_no_connection(
    kind: str, trained: tuple[vsim.Comparison, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "comparison.json"
    shutil.copy(trained[1] / "comparison.json", path)
    with served(path) as watch:
        where = urlsplit(watch.url)
        data_with(watch, "AllReduce")
        if kind == "forged":
            content = json.loads(path.read_text())
            content["runs"][0]["history"]["population"] = 10**15
            path.write_text(json.dumps(content))
        elif kind == "device":
            path.unlink()
            path.symlink_to("/dev/zero")
        else:
            monkeypatch.setattr("vsim.watch.data_of", lambda *_: {}["of no kind that is expected"])
            path.write_text(path.read_text() + " ")
        assert "comparison.json" in str(data_with(watch, '"error"')["error"])
        with socket.create_connection((where.hostname, where.port)) as browser:  # which goes before it is answered
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            browser.sendall(f"GET {where.path}data HTTP/1.1\r\nHost: {where.netloc}\r\n".encode())
        assert asked(watch, where.path + "data")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_ends_it(
    trained: tuple[vsim.Comparison, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(self: socketserver.BaseServer, poll_interval: float = 0.5) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(socketserver.BaseServer, "serve_forever", press)
    assert main(["watch", str(trained[1] / "saved")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("http://127.0.0.1:") and printed.err == ""
