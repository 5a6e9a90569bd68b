"""Comparisons that are described, joined, extended, renamed and cut, and what must not be put together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import refused
from torch import nn

import vsim
from vsim.data import digits, partition
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy

TRAIN, VAL = digits()
OPTIONS: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "val_interval": 2, "progress": False}
ALL = {"AllReduce": SimpleReduceStrategy(lr=1e-3), "DiLoCo": DiLoCoStrategy(H=2, lr=1e-3), "alone": Strategy(lr=1e-3)}


def small(seed: int) -> nn.Module:
    return MLP(64, hidden=(8,), seed=seed)


def compared(*names: str, seeds: list[int] | None = None, **options: Any) -> vsim.Comparison:
    strategies = {name: ALL[name] for name in names}
    return vsim.compare(small, TRAIN, VAL, strategies=strategies, seeds=seeds or [1], **OPTIONS | options)


@pytest.fixture(scope="module")
def two() -> vsim.Comparison:
    return compared("AllReduce", "DiLoCo", seeds=[1, 2])


def losses(comparison: vsim.Comparison) -> dict[tuple[str, int], list[float]]:
    return {(n, r.seed): r.history["train_loss"].tolist()[1:] for n in comparison for r in comparison.runs(n)}


def test_a_comparison_says_what_was_compared(two: vsim.Comparison, tmp_path: Path) -> None:
    about = two.describe()
    assert about["strategies"] == {
        "AllReduce": "SimpleReduceStrategy(lr=0.001)",
        "DiLoCo": "DiLoCoStrategy(H=2, lr=0.001)",
    }
    assert about["seeds"] == [1, 2] and about["max_steps"] == 4 and about["num_nodes"] == 2
    assert about["model"]["class"] == "MLP" and len(set(about["model"]["digest"])) == 2  # two seeds' weights
    assert about["train_dataset"]["digest"] and about["machine"]["device"] == "cpu"
    assert "batch_size" not in about  # left at its default
    (computed,) = about["computed"]
    assert re.fullmatch(r"vmap, proved on nodes 0 and 7: losses [\de-]+, gradients [\de-]+", computed)
    assert two["DiLoCo"].history.computed == computed and computed in repr(two["DiLoCo"].history)
    assert about["calls"][0].startswith("vsim.compare(strategies={'AllReduce': SimpleReduceStrategy(lr=0.001)")
    two.to_json(tmp_path / "c.json")
    again = vsim.Comparison.from_json(tmp_path / "c.json")
    assert again.describe() == about and repr(about) in about._repr_html_().replace("&#x27;", "'")
    whole = json.loads((tmp_path / "c.json").read_text())["runs"][0]["history"]["config"]
    assert whole["batch_size"] == 16 and whole["strategy"]["optim_spec"] == {"class": "AdamW", "lr": 0.001}


def test_joined_comparisons_are_the_one_that_trained_all(two: vsim.Comparison, tmp_path: Path) -> None:
    compared("AllReduce", "alone", seeds=[2, 3]).to_json(tmp_path / "later.json")
    later = vsim.Comparison.from_json(tmp_path / "later.json")
    both = two | later
    assert {name: [run.seed for run in both.runs(name)] for name in both} == {
        "AllReduce": [1, 2, 3],
        "DiLoCo": [1, 2],
        "alone": [2, 3],
    }
    expected = losses(compared("AllReduce", "DiLoCo", "alone", seeds=[1, 2, 3], together=False, deterministic=True))
    found = losses(both)
    assert len(found) == 7
    for run, own in found.items():
        np.testing.assert_allclose(own, expected[run], rtol=1e-5)
    assert both.runs("AllReduce")[1] is two.runs("AllReduce")[1]  # equal runs once, the first
    assert "2 or 3 seeds" in repr(both) and both.calls == [*two.calls, *later.calls]
    assert both.describe()["seeds"] == {"AllReduce": [1, 2, 3], "DiLoCo": [1, 2], "alone": [2, 3]}


def test_extending_trains_only_what_is_new(two: vsim.Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    from vsim.runs.race import Race

    train = Race.train
    monkeypatch.setattr(Race, "train", lambda self: (trained.append(len(self.runs)), train(self))[1])
    more = compared("AllReduce", "DiLoCo", "alone", seeds=[1, 2, 3], extend=two)
    assert trained == [5]  # a third seed of two, and three of the third
    assert {name: [run.seed for run in more.runs(name)] for name in more} == {name: [1, 2, 3] for name in ALL}
    assert more.runs("DiLoCo")[0] is two.runs("DiLoCo")[0]
    assert losses(compared("AllReduce", seeds=[1], extend=two)) == losses(two) and trained == [5]


def of(model: Any = small, data: Any = TRAIN) -> vsim.Comparison:
    return vsim.compare(model, data, VAL, strategies={"b": ALL["alone"]}, seeds=[1], **OPTIONS)


def test_comparisons_of_different_problems_do_not_join(two: vsim.Comparison) -> None:
    for make, *said in (
        (lambda: compared("alone", max_steps=3), "max_steps is 4 and 3"),
        (lambda: compared("alone", num_nodes=3), "num_nodes is 2 and 3"),
        (lambda: compared("alone", batch_size=8), "batch_size is 16 and 8"),
        (lambda: compared("DiLoCo").renamed({"DiLoCo": "AllReduce"}), "'AllReduce'", "DiLoCoStrategy"),
        (lambda: of(small(9)), "initial weights of seed 1"),
        (lambda: of(MLP(64, hidden=(16,))), "model.parameters is"),
        (lambda: of(data=VAL), "train_dataset.examples is 1438 and 359"),
    ):
        with refused(ValueError, *said):
            two | make()


def test_extending_another_problem_is_an_error_before_training(two: vsim.Comparison) -> None:
    with refused(ValueError, "max_steps is 4 and 8"):
        compared("alone", max_steps=8, extend=two)
    strategies = {"DiLoCo": DiLoCoStrategy(H=3, lr=1e-3)}
    with pytest.raises(ValueError, match=r"'DiLoCo'.*H=2.*H=3"):
        vsim.compare(small, TRAIN, VAL, strategies=strategies, seeds=[5], extend=two, **OPTIONS)
    with pytest.raises(TypeError, match=r"extend must be a Comparison, got \{\}"):
        compared("alone", extend={})
    with pytest.raises(ValueError, match="tune"):
        compared("alone", extend=two, tune={"lr": [1e-3, 1e-2]})
    old = vsim.Comparison(two.allreduce_bytes)
    old.add("without", vsim.ComparedRun(vsim.History("without", 2)))
    with pytest.raises(ValueError, match="configuration"):
        two | old
    for given, hint in (({}, ""), ("saved.json", r"; read it with Comparison\.from_json")):
        with pytest.raises(TypeError, match=rf"must be a Comparison, got .*{hint}$"):
            two | given  # type: ignore[operator]


def test_hours_of_a_join_are_those_of_either(two: vsim.Comparison) -> None:
    priced, other = compared("alone", network="1 Gbit/s", compute=1.0), compared("alone", seeds=[2])
    assert (two | priced).network is priced.network and (priced | two).compute is priced.compute
    slower = compared("alone", seeds=[3], network="1 Mbit/s", compute=1.0)
    with pytest.raises(ValueError, match="different network"):
        priced | slower
    assert (two | other).network is None


def test_strategies_are_renamed_and_left_out(two: vsim.Comparison) -> None:
    one = two.without("AllReduce")
    assert list(one) == ["DiLoCo"] and one.looks().by_name["DiLoCo"] == two.looks().by_name["DiLoCo"]
    named = two.renamed({"DiLoCo": "DiLoCo, H = 2"})
    assert list(named) == ["AllReduce", "DiLoCo, H = 2"] and list(two) == ["AllReduce", "DiLoCo"]
    assert named["DiLoCo, H = 2"] is two["DiLoCo"]
    for act, said in (
        (lambda: two.without("FedAvg"), "FedAvg"),
        (lambda: two.without("AllReduce", "DiLoCo"), "nothing is left"),
        (lambda: two.renamed({"FedAvg": "x"}), "FedAvg"),
        (lambda: two.renamed({"DiLoCo": "AllReduce"}), "two strategies.*AllReduce"),
    ):
        with pytest.raises(ValueError, match=said):
            act()
    with pytest.raises(TypeError, match="names"):
        two.renamed({"DiLoCo": 3})  # type: ignore[dict-item]


def test_strategies_are_made_again_unless_a_default_has_changed(two: vsim.Comparison, tmp_path: Path) -> None:
    name, path = "DiLoCo", tmp_path / "two.json"

    def read(change: Callable[[dict[str, Any]], object]) -> Any:
        two.to_json(path)
        content = json.loads(path.read_text())
        for run in content["runs"]:
            change(run["history"]["config"]["strategy"])
        path.write_text(json.dumps(content))
        return vsim.Comparison.from_json(path)[name].strategy

    assert repr(read(lambda about: None)) == repr(two[name].strategy)
    assert read(lambda about: about.pop("max_norm", None)) is not None  # an attribute that another version has not
    assert read(lambda about: about.update(of_a_later_version=1)) is not None
    assert read(lambda about: about.update(max_norm=3.0)) is None


def test_sweeps_join_and_extend_as_sweeps(tmp_path: Path) -> None:
    def swept(H: list[int], seeds: list[int], **more: Any) -> vsim.Sweep:
        settings = {"H": H, "batch_size": [8, 16], "lr": 1e-3}
        options = OPTIONS | {"strategy": DiLoCoStrategy, "settings": settings} | more
        return vsim.sweep(small, TRAIN, VAL, seeds=seeds, **options)

    first = swept([1, 2], [1])
    first.to_json(tmp_path / "s.json")
    more = swept([2, 4], [1, 2], extend=vsim.Sweep.from_json(tmp_path / "s.json"))
    assert isinstance(more, vsim.Sweep)
    assert sorted({own["H"] for own in more.settings.values()}) == [1, 2, 4]
    assert [run.seed for run in more.runs("DiLoCo H=2, batch_size=8")] == [1, 2]
    assert [run.seed for run in more.runs("DiLoCo H=1, batch_size=8")] == [1]
    assert isinstance(first | swept([3, 4], [1]), vsim.Sweep)
    renamed = first.renamed({"DiLoCo H=1, batch_size=8": "small"})
    assert renamed.settings["small"]["H"] == 1
    fixed = {"settings": {"H": [3, 4], "batch_size": [8, 16], "lr": 2e-3}}
    assert type(first | swept([], [1], **fixed)) is vsim.Comparison  # their rates differ, and no column says so
    with pytest.raises(ValueError, match="halving"):
        swept([1, 2], [2], extend=first, halving=2)
    with pytest.raises(TypeError, match="extend must be a Sweep"):
        swept([1, 2], [2], extend=compared("alone"))


def test_a_strategy_of_its_own_is_told_apart(two: vsim.Comparison) -> None:
    class Mine(FedAvgStrategy):
        def __init__(self, share: float) -> None:
            super().__init__(H=2, lr=1e-3)
            self.share = share

    def mine(share: float, seed: int) -> vsim.Comparison:
        return vsim.compare(small, TRAIN, VAL, strategies={"mine": Mine(share)}, seeds=[seed], **OPTIONS)

    assert len((two | mine(0.5, 1) | mine(0.5, 2)).runs("mine")) == 2
    with pytest.raises(ValueError, match=r"'mine'.*0\.5.*0\.25"):
        mine(0.5, 1) | mine(0.25, 2)


def test_data_that_a_function_deals_are_told_apart() -> None:
    def comparison(alpha: float, seed: int) -> vsim.Comparison:
        dealt = partition(TRAIN, 2, "dirichlet", alpha=alpha, min_size=16)

        def of_client(rank: int, num_nodes: int, train_dataset: bool) -> Any:
            return dealt(rank, num_nodes, train_dataset)

        return vsim.compare(small, of_client, VAL, strategies={"alone": ALL["alone"]}, seeds=[seed], **OPTIONS)

    assert [run.seed for run in (comparison(0.3, 1) | comparison(0.3, 2)).runs("alone")] == [1, 2]
    with refused(ValueError, "train_dataset.dealt is Partition … alpha=0.3 … and Partition … alpha=100"):
        comparison(0.3, 1) | comparison(100.0, 2)
