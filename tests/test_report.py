"""The page of a comparison: what it holds, and that nothing in it runs but its own script."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons_by_hand import check_refusals, of_finals
from comparisons_by_hand import comparison as made
from comparisons_by_hand import run as made_run
from shared_comparisons import compared, three_strategies

import vsim
from vsim import Compute, Network
from vsim.analysis.report.page import report
from vsim.cluster.participation import Sample
from vsim.data import digits
from vsim.models import MLP
from vsim.strategy import AsyncDiLoCoStrategy, DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, SPARTAStrategy
from vsim_cli import main

NETWORK, COMPUTE = "200 Mbit/s, 50 ms", 0.8


def held(page: str) -> list[dict[str, Any]]:
    """The data of a page, as a browser takes them from it."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.S)
    pages: list[dict[str, Any]] = json.loads(text)
    return pages


def hours(page: dict[str, Any], seed: dict[str, Any], step: float, network: Network, compute: float) -> float:
    """What the script computes: the largest of the planes, linear between two of the steps."""
    ledger, plain = page["ledgers"][seed["ledger"]], network.as_plain()
    at = compute, plain["latency"][0][0], 1 / float(plain["bits_per_second"][0][0])
    own = [max(np.reshape(planes, (-1, 3)) @ at) for planes in ledger["planes"]]
    return float(np.interp(step, ledger["steps"], own)) / 3600


def test_hours_are_those_of_the_table() -> None:
    comparison = three_strategies()
    (page,) = held(comparison.report(network=NETWORK, compute=COMPUTE).html)
    for network, compute in ((Network.of(NETWORK), COMPUTE), (Network("3 Mbit/s", "200 ms"), 0.01)):
        rows = comparison.rows(network=network, compute=compute).to_dict("records")
        for run, row in zip(page["runs"], rows, strict=True):
            (seed,) = run["seeds"]
            assert hours(page, seed, 20, network, compute) == pytest.approx(row["hours"], rel=1e-3)
            # At every step, including steps that the page leaves out.
            exact = comparison[run["name"]].history.time(network, compute).seconds / 3600
            assert [hours(page, seed, t, network, compute) for t in range(21)] == pytest.approx(exact, rel=1e-3)


def test_the_page_is_small_and_written_where_asked(tmp_path: Path) -> None:
    comparison = three_strategies()
    path = comparison.report(tmp_path / "a page.html", network=NETWORK, compute=COMPUTE, title="Three")
    page = path.read_text(encoding="utf-8")
    assert path.name == "a page.html" and page.startswith("<!doctype html>") and len(page) < 200_000
    assert "<title>Three</title>" in page
    assert not re.search(r"https?://(?!www\.w3\.org)", page)  # an address of a namespace, and no other
    for wrong in ("", tmp_path, tmp_path / "absent" / "report.html"):
        with pytest.raises(ValueError, match=r"path must (name a file in a folder that exists|be a path), got '"):
            comparison.report(str(wrong))


def test_the_title_says_what_was_trained_and_when_and_nothing_of_the_sender(tmp_path: Path) -> None:
    out, saved, home = tmp_path / "results of me", tmp_path / "runs", Path.cwd()
    command = ["compare", "--data", "digits", "--model", "mlp", "--nodes", "2", "--steps", "4", "--seeds", "0", "1"]
    strategies = ["--strategies", "allreduce", "sparta_diloco:H=2,outer_lr=0.4"]
    assert main([*command, *strategies, "--out", str(out), "--save-dir", str(saved), "--quiet"]) == 0
    assert main(["report", str(out), "--out", str(tmp_path / "page.html"), "--network", NETWORK, "--compute", "1"]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    trained = "MLP on digits, 2 nodes × batch 16, 4 steps"
    assert f"<title>{trained}</title>" in text
    (page,) = held(text)
    assert page["trained"] == trained and re.fullmatch(r"\d{1,2} [A-Z][a-z]+ 20\d\d", page["date"])
    assert [run["name"] for run in page["runs"]] == ["AllReduce", "SPARTA-DiLoCo, H = 2, outer_lr = 0.4"]
    assert [run["labels"]["strategy"] for run in page["runs"]] == [run["name"] for run in page["runs"]]
    about = dict(page["about"])
    assert about["data"] == "digits, 1,438 examples" and about["validated on"] == "359 examples"
    system = platform.release(), platform.platform(terse=True)
    for own in (tmp_path, out.name, home, Path.home(), *system, "--out", "save-dir"):
        assert str(own) not in text, own
    assert "vsim compare --data digits" in about["provenance"]  # the rest of the command


def test_a_sentence_says_which_is_lowest_and_whether_seeds_decide_it() -> None:
    ends = "B ends with the lowest validation loss, 1.0000."
    said: dict[str, dict[str, list[float]]] = {
        f"{ends} One seed does not show whether that is chance: train several.": {"A": [2.0], "B": [1.0]},
        f"{ends} These 3 seeds tell it from all others (p ≤ 0.05).": {"A": [2.0, 2.1, 2.2], "B": [0.9, 1.0, 1.1]},
        f'{ends} These 3 seeds do not tell it from "A, wide" and C.': {
            "A, wide": [1.0, 0.9, 1.2],
            "B": [0.9, 1.0, 1.1],
            "C": [1.3, 0.7, 1.05],
        },
        "": {"A": [1.0, 2.0]},
    }
    for sentence, finals in said.items():
        (page,) = held(of_finals(**finals).report().html)
        assert page["answer"] == sentence


def test_names_as_on_the_command_line_are_in_words() -> None:
    kinds = {
        "allreduce": (SimpleReduceStrategy(lr=1e-3), "AllReduce"),
        "diloco:H=2,inner_optim=sgd(lr=0.1,momentum=0.9)": (
            DiLoCoStrategy(H=2),
            "DiLoCo, H = 2, inner_optim = sgd(lr=0.1,momentum=0.9)",
        ),
        "My own: H=3": (DiLoCoStrategy(H=3), "My own: H=3"),
        "mine": (DiLoCoStrategy(H=4), "mine"),
    }
    comparison = compared({name: strategy for name, (strategy, _) in kinds.items()}, max_steps=2)
    words = comparison.in_words()
    assert list(words) == [word for _, word in kinds.values()] and list(comparison) == list(kinds)
    assert [look.colour for look in words.looks().by_name.values()] == [
        look.colour for look in comparison.looks().by_name.values()
    ]


class EveryStep(DiLoCoStrategy):
    """Meet at every step.

    This is not for the page.
    """


def test_the_page_says_what_each_strategy_does(tmp_path: Path) -> None:
    averaged = "AllReduce (DDP): average the gradients at every step, so that all nodes stay equal."
    outer = "Take H local steps, then step shared weights with an outer optimizer: DiLoCo ["
    strategies = {
        "mine": EveryStep(H=1),
        "AllReduce": SimpleReduceStrategy(lr=1e-3),
        "DiLoCo": DiLoCoStrategy(H=2),
        "b, H = 3": DiLoCoStrategy(H=3),
    }
    comparison = compared(strategies, max_steps=2)
    (page,) = held(comparison.report().html)
    assert sorted(page["strategies"])[0] == ["AllReduce", averaged, "lr=0.001"]
    assert sorted(page["strategies"])[-1] == ["mine", "Meet at every step.", "H=1"]
    names, text, settings = next(own for own in page["strategies"] if "DiLoCo" in own[0])
    assert {"DiLoCo", '"b, H = 3"'} == set(names.split(" and ")) and text.startswith(outer)
    assert sorted(settings.splitlines()) == ["DiLoCo: H=2", "b, H = 3: H=3"]
    comparison.to_json(tmp_path / "comparison.json")  # a file has no class of the user
    (read,) = held(vsim.Comparison.from_json(tmp_path / "comparison.json").report().html)
    assert read["strategies"] == [own for own in page["strategies"] if own[0] != "mine"]


HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>\u2028 {{data}}"


def test_hostile_names_stay_text() -> None:
    comparison = compared({HOSTILE: SimpleReduceStrategy(lr=1e-3)}, max_steps=2)
    page = report({HOSTILE: comparison}, NETWORK, COMPUTE, HOSTILE)
    assert page.html.count("<script") == 2 == page.html.count("</script>")
    assert "<img" not in page.html
    assert html.escape(HOSTILE) in page.html
    (content,) = held(page.html)
    assert content["runs"][0]["name"] == content["name"] == HOSTILE
    inline = page._repr_html_()
    assert inline.count("<iframe") == 1
    assert "<script" not in inline
    assert 'sandbox="allow-scripts allow-downloads"' in inline


def test_only_the_pages_own_script_may_run() -> None:

    page = three_strategies().report(network=NETWORK, compute=COMPUTE).html
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_sliders_stand_where_asked_and_say_what_was_assumed() -> None:
    comparison = three_strategies()
    (page,) = held(comparison.report().html)
    assert page["assumed"] == ["network", "compute"]
    assert page["network"]["bandwidth"] == 1e9
    assert [text for title, text in page["about"] if title in ("network", "compute")] == ["none given"] * 2
    assert all(run["timeline"] is None for run in page["runs"])
    (page,) = held(comparison.report(network="3 Mbit/s, 7 ms", compute=Compute(2, dollars_per_hour=1.5)).html)
    assert page["assumed"] == []
    assert (page["network"]["bandwidth"], page["network"]["latency"]) == (3e6, 0.007)
    assert (page["compute"]["seconds"], page["compute"]["price"]) == (2, 1.5)
    regions = Network.regions({"a": 1, "b": 2}, inside="1 Gbit/s", between="10 Mbit/s, 50 ms")
    (page,) = held(comparison.report(network=regions, compute=1).html)
    assert not page["network"]["equal"]
    assert page["network"]["bandwidth"] == page["network"]["latency"] == 1


@pytest.mark.parametrize(
    ("ends", "target"),
    [
        ([1.7, 4.88], 1.7),  # of two runs, one learns nothing
        ([1.7214, 1.7], 1.73),
        ([1.7, 1.8, 1.9, 4.9, 4.9], 1.8),  # the median of those that learn
        ([1.7, 4.0, 4.1, 4.2, 4.3], 4.1),  # after few steps, others have only begun
        ([4.9, 4.9], 4.9),
    ],
)
def test_the_target_is_a_loss_that_tells_runs_apart(ends: list[float], target: float) -> None:
    comparison = made(**{f"run {i}": [made_run([4.9, 3.0 if end < 3 else 4.9, end])] for i, end in enumerate(ends)})
    (page,) = held(comparison.report().html)
    assert page["target"] == [pytest.approx(min(ends)), pytest.approx(4.9), pytest.approx(target)]
    assert sum(end <= page["target"][2] for end in ends) >= len([end for end in ends if end < 4.5]) / 2


def test_the_bars_of_the_front_are_those_of_python() -> None:
    comparison = compared({"AllReduce": SimpleReduceStrategy(lr=1e-3)}, max_steps=2, seeds=[0, 1])
    for one in (comparison, three_strategies()):
        (page,) = held(one.report().html)
        low_high = one.pareto().frame[["low", "high"]].to_numpy()
        assert [run["interval"] for run in page["runs"]] == [pytest.approx(ends) for ends in low_high]


def test_the_cost_of_forming_a_model_follows_the_sliders() -> None:
    comparison = compared({"SPARTA": SPARTAStrategy(lr=1e-3)}, num_nodes=4, max_steps=6, val_interval=2)
    links: Any = {"inside": "10 Gbit/s, 1 ms", "between": "200 Mbit/s, 80 ms"}
    for collective in ("ring", "tree", "server"):
        regions = Network.regions({"a": 1, "b": 3}, **links, collective=collective)
        for network in (regions, Network("200 Mbit/s", "80 ms", collective=collective)):
            (page,) = held(comparison.report(network=network, compute=1).html)
            unit = (1.0, 1.0) if network is regions else (1 / 2e8, 0.08)
            ((seed,),) = (run["seeds"] for run in page["runs"])
            own = np.array(seed["forming"]["planes"]).reshape(-1, 3)
            for slower, later in ((1, 1), (1e3, 1), (1, 1e3), (0.1, 3)):
                exact = network.scaled(np.array([slower]), np.array([later]))
                price = exact.seconds("all_reduce", network.kind(range(4)), comparison.allreduce_bytes)
                assert (own @ [0, later * unit[1], slower * unit[0]]).max() == pytest.approx(price.item(), rel=1e-3)


def test_what_cannot_be_reported_is_an_error() -> None:
    four = Network.between([[1e6] * 4] * 4)
    check_refusals(
        [
            (vsim.Comparison(1).report, ValueError, ["no run"]),
            (lambda: report({}), ValueError, ["no comparison"]),
            (lambda: three_strategies().report(title=3), TypeError, ["title"]),  # type: ignore[call-overload]
            (lambda: three_strategies().report(network=four, compute=1), ValueError, ["4 nodes"]),
        ]
    )


def test_a_sweep_has_its_settings() -> None:
    settings: dict[str, Any] = {"H": [1, 2], "outer_lr": [0.4, 0.7]}
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "seeds": [0, 1], "progress": False}
    model = MLP(hidden=(8,), seed=0)
    sweep = vsim.sweep(model, *digits(), strategy=DiLoCoStrategy, settings=settings, **options)
    (page,) = held(sweep.report(network=NETWORK, compute=COMPUTE).html)
    ((name, text, own),) = page["strategies"]
    assert (name, own) == ("DiLoCo", "") and text.startswith("Take H local steps")
    assert page["varied"] == ["H", "outer_lr"]
    assert page["values"] == {"H": ["1", "2"], "outer_lr": ["0.4", "0.7"]}
    assert len(page["runs"]) == 4
    assert len(page["ledgers"]) == 2  # what is sent depends on H alone


def test_what_a_network_decided_keeps_its_hours() -> None:
    made = {"async": AsyncDiLoCoStrategy(H=3, lr=1e-3), "DiLoCo": DiLoCoStrategy(H=3, lr=1e-3)}
    comparison = compared(made, max_steps=6, network=NETWORK, compute=COMPUTE)
    (page,) = held(comparison.report().html)
    decided = [page["ledgers"][run["seeds"][0]["ledger"]]["decided"] for run in page["runs"]]
    assert decided == ["both", ""]
    (page,) = held(comparison.report(network="1 Mbit/s", compute=COMPUTE).html)
    own = page["ledgers"][page["runs"][0]["seeds"][0]["ledger"]]
    assert "asynchronous" in own["fixed"]
    exact = comparison["async"].history.time(comparison.network, comparison.compute).seconds[-1]
    assert own["planes"][-1][0] * own["seconds"] == pytest.approx(exact)


def test_cohorts_go_through_a_server() -> None:
    comparison = compared({"FedAvg": FedAvgStrategy(H=2, lr=1e-3)}, max_steps=4, participation=Sample(2, of=6))
    (page,) = held(comparison.report(network=NETWORK, compute=COMPUTE).html)
    assert page["clients"]
    assert page["network"]["collective"] == "through a server"
    (seed,) = page["runs"][0]["seeds"]
    assert seed["rounds"][-1] == 2
    (row,) = comparison.rows(network=NETWORK, compute=COMPUTE).to_dict("records")
    assert hours(page, seed, 4, Network.of(NETWORK), COMPUTE) == pytest.approx(row["hours"], rel=1e-3)


def test_a_loss_that_is_no_number_is_no_number_of_json() -> None:
    with pytest.warns(UserWarning, match="non-finite"):
        comparison = compared({"DiLoCo": DiLoCoStrategy(H=2, lr=1e12, outer_lr=1e30)}, max_steps=4)
    (page,) = held(comparison.report(network=NETWORK, compute=COMPUTE).html)
    assert page["runs"][0]["diverged"]
    assert not any(isinstance(value, float) and math.isnan(value) for value in page["runs"][0]["row"].values())


def test_the_command_line_writes_a_page_of_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("monday", "tuesday"):
        (tmp_path / folder).mkdir()
        three_strategies().to_json(tmp_path / folder / "comparison.json")
    places, out = [str(tmp_path / "monday"), str(tmp_path / "tuesday" / "comparison.json")], str(tmp_path / "page.html")
    assert main(["report", *places, "--out", out, "--network", NETWORK, "--compute", "0.8"]) == 0
    assert out in capsys.readouterr().out
    monday, tuesday = held(Path(out).read_text(encoding="utf-8"))
    assert (monday["name"], tuesday["name"]) == ("monday", "tuesday") and monday["runs"] == tuesday["runs"]
    (tmp_path / "odd.json").write_text('{"runs": 3, "allreduce_bytes": "x"}')
    for wrong in ([], [tmp_path], [tmp_path / "odd.json"], [places[0], places[0]], [tmp_path / "no.json"]):
        assert main(["report", *map(str, wrong), "--out", out]) == 2
        assert capsys.readouterr().err.startswith("vsim report: ")
