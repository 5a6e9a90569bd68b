"""Equal budgets: how many steps each strategy gets, and runs of different lengths in one comparison."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons_by_hand import check_refusals, never
from cut_runs import assert_same_comparison
from errors import refused
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_cluster import images, small_cnn, small_mlp, vectors
from test_ensemble import Killed, alone, assert_is_its_own_fit, killed_at
from torch import nn
from torch.utils.data import Dataset, Subset

import vsim
from vsim import Comparison, Compute, Network, Sample, Sweep
from vsim.price import steps_within
from vsim.strategy import (
    QSR,
    AloneStrategy,
    AsyncDiLoCoStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    PostLocal,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)
from vsim_cli import main

SCHEDULE: dict[str, Any] = {"lr": 1e-2, "lr_scheduler": "cosine", "warmup_steps": 2}
STRATEGIES: dict[str, Strategy] = {
    "AllReduce": SimpleReduceStrategy(**SCHEDULE),
    "FedAvg": FedAvgStrategy(H=3, **SCHEDULE),
    "DiLoCo": DiLoCoStrategy(H=4, **SCHEDULE),
}
STEPS = {"AllReduce": 3, "FedAvg": 9, "DiLoCo": 12}
PRICED: dict[str, Any] = {"network": "1 Mbit/s, 10 ms", "compute": Compute(0.1, dollars_per_hour=2.0)}
TOPK = SPARTAStrategy(compression_method="topk")
OPTIONS: dict[str, Any] = {"num_nodes": 2, "batch_size": 4, "val_interval": 2, "progress": False}


def compared(
    strategies: Any = STRATEGIES, data: Any = None, model: nn.Module | None = None, **options: Any
) -> Comparison:
    data, model = vectors() if data is None else data, small_mlp() if model is None else model
    return vsim.compare(model, data, vectors(), strategies=strategies, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def within() -> Comparison:
    budget = {"time": "2 s", "cost": 1, "wire": "20 kB", "examples": 200}
    return compared(budget=budget, seeds=[1, 2], **PRICED)


# How many steps a budget is enough for --------------------------------------------------------------------------------

PRICEABLE = [
    SimpleReduceStrategy(),
    FedAvgStrategy(H=7),
    DiLoCoStrategy(H=QSR(0.02, 2), lr=1e-2, lr_scheduler="cosine"),  # a longer run syncs at other steps
    DiLoCoStrategy(H=PostLocal(30, 4)),
    StreamingDiLoCoStrategy(H=6, fragments=2, delay=2),
    SPARTAStrategy(p_sparta=0.1),
    DeMoStrategy(),
    AloneStrategy(),
]


def spent(strategy: Strategy, steps: int, **options: Any) -> dict[str, float]:
    """What `vsim.price` says of a run."""
    line = vsim.price(strategy, model=small_mlp(), max_steps=steps, **options)
    examples = 3 * 2 * steps  # of three nodes
    return {"time": line.seconds[-1], "cost": line.dollars, "wire": line.ledger.wire_bytes, "examples": examples}


@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
@settings(max_examples=12)
@given(
    strategy=st.sampled_from(PRICEABLE),
    kinds=st.sets(st.sampled_from(["time", "cost", "wire", "examples"]), min_size=1),
    steps=st.integers(1, 120),
    slack=st.lists(st.floats(1.0, 1.5), min_size=4, max_size=4),
    network=st.builds(Network, st.floats(1e3, 1e8), st.floats(0, 0.1)),
    compute=st.builds(
        lambda seconds, jitter: Compute(seconds, jitter=jitter, dollars_per_hour=2.0),
        *(st.floats(0.001, 1.0), st.sampled_from([0.0, 0.3])),
    ),
)
def test_the_price_is_within_the_budget_and_that_of_one_more_step_is_not(
    strategy: Strategy, kinds: set[str], steps: int, slack: list[float], network: Network, compute: Compute
) -> None:
    on: dict[str, Any] = {"num_nodes": 3, "network": network, "compute": compute}
    prices = spent(strategy, steps, **on)
    budget = {of: prices[of] * more for of, more in zip(sorted(kinds), slack, strict=False)}
    assume(any(budget.values()))
    found = steps_within(budget, strategy, model=small_mlp(), examples=lambda n: 6.0 * n, **on)
    ours, more = (spent(strategy, n, **on) for n in (found, found + 1))
    assert all(ours[of] <= most * (1 + 1e-9) for of, most in budget.items())
    assert any(more[of] > most for of, most in budget.items())
    assert steps_within(budget, strategy, model=small_mlp(), examples=lambda n: 6.0 * n, most=3, **on) == min(3, found)


def test_steps_by_hand(within: Comparison) -> None:
    """Two nodes, and 1 Mbit/s: an all-reduce of S bytes sends S/2 and S/2, each after 10 ms. Time is used up first."""
    size = 4 * sum(p.numel() for p in small_mlp().parameters())
    sync = 2 * (0.01 + 8 * size / 2 / 1e6)
    every = {"AllReduce": 1, "FedAvg": 3, "DiLoCo": 4}
    by_hand = {name: max(n for n in range(30) if 0.1 * n + sync * (n // h) <= 2) for name, h in every.items()}
    assert {name: [run.history.last("step") for run in within.runs(name)] for name in within} == {
        name: [steps, steps] for name, steps in by_hand.items()
    }
    rows = {row["strategy"]: row for row in within.rows().to_dict("records")}
    assert rows["AllReduce"]["steps"] == by_hand["AllReduce"]
    assert rows["AllReduce"]["time used"] == pytest.approx(by_hand["AllReduce"] * (0.1 + sync) / 2)
    assert rows["AllReduce"]["wire used"] == pytest.approx(by_hand["AllReduce"] * size / 20_000)
    for name in ("FedAvg", "DiLoCo"):
        for of, limit in (("time", 2.0), ("cost", 1.0), ("wire", 20e3), ("examples", 200)):
            used, history = rows[name][f"{of} used"], within[name].history
            known = {"examples": history.last("examples"), "wire": history.last("wire_bytes")}
            known |= {"time": history.time(**PRICED).seconds[-1], "cost": history.time(**PRICED).dollars}
            assert used == pytest.approx(known[of] / limit) and used <= 1
    assert all(max(row[f"{of} used"] for of in within.budget) > 0.9 for row in rows.values())


@pytest.mark.parametrize("kwargs", [{}, {"drop_last": True}])
@pytest.mark.parametrize("sizes", [None, [30, 7]])
def test_examples_are_those_that_the_nodes_see(sizes: list[int] | None, kwargs: dict[str, Any]) -> None:
    def dealt(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
        return Subset(vectors(40), range((sizes or [])[rank]))

    options: dict[str, Any] = {"data": vectors(37) if sizes is None else dealt, "dataloader_kwargs": kwargs}
    run = compared({"a": STRATEGIES["DiLoCo"]}, budget={"examples": 150}, **options)["a"]
    longer = compared({"a": STRATEGIES["DiLoCo"]}, max_steps=run.ledger.steps + 1, **options)["a"]
    assert run.history.last("examples") <= 150 < longer.history.last("examples")


def test_a_larger_model_is_priced() -> None:
    options = {**PRICED, "network": "1 Gbit/s, 10 ms"}
    large = compared(budget={"wire": "5 GB"}, at=1e8, max_steps=40, **options)
    for name, run in large.items():
        steps = run.ledger.steps
        on = {"parameters": 1e8, "num_nodes": 2, **options}
        lines = [vsim.price(STRATEGIES[name], max_steps=n, **on) for n in (steps, steps + 1)]
        assert lines[0].ledger.wire_bytes <= 5e9 < lines[1].ledger.wire_bytes or steps == 40
        assert run.history.last("wire_bytes") == lines[0].ledger.wire_bytes
    assert large["AllReduce"].ledger.steps == 12 and large.allreduce_bytes == 4e8 and "losses of" in repr(large)
    assert "5 GB/node, priced for 100M parameters, at most 40 steps" in large.table()


@pytest.mark.parametrize(("make", "data", "together"), [(small_cnn, images(), True), (small_mlp, vectors(), False)])
def test_each_is_bitwise_its_own_fit(make: Any, data: Any, together: bool) -> None:
    options = {"deterministic": True, "callbacks": [lambda run: None], "correlation_interval": 3}
    both = {"max_steps": STEPS, "seeds": [1, 2], "together": together, **OPTIONS, **options}
    result = vsim.compare(make(), data, data, strategies=STRATEGIES, **both)
    for name, steps in STEPS.items():
        for run in result.runs(name):
            own = alone(STRATEGIES[name], make(), data, data, seed=run.seed, max_steps=steps, **OPTIONS, **options)
            assert_is_its_own_fit(run, own)
            np.testing.assert_array_equal(run.history["lr"], own.history["lr"])  # annealed over its own steps


@pytest.mark.parametrize("kill", [11, pytest.param(5, marks=pytest.mark.slow)])
def test_they_resume_to_the_bit(kill: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": STEPS, "deterministic": True, "checkpoint_interval": 2}
    whole = compared(save_dir=tmp_path / "whole", **options)
    with pytest.raises(Killed):
        compared(save_dir=tmp_path / "race", train_loss_hook=killed_at(kill), **options)
    for _ in range(2):  # the second time all have ended
        assert_same_comparison(compared(save_dir=tmp_path / "race", resume=True, **options), whole)


def test_one_of_them_is_continued(tmp_path: Path) -> None:
    constant = {"AllReduce": SimpleReduceStrategy(lr=1e-2), "DiLoCo": DiLoCoStrategy(H=2, lr=1e-2)}
    options: dict[str, Any] = {"strategies": constant, "deterministic": True}
    compared(save_dir=tmp_path / "race", max_steps={"AllReduce": 2, "DiLoCo": 4}, **options)
    steps = {"AllReduce": 2, "DiLoCo": 9}
    longer = compared(save_dir=tmp_path / "race", resume=True, max_steps=steps, **options)
    assert_same_comparison(longer, compared(max_steps=steps, **options))


def test_the_bar_counts_the_steps_of_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    compared(max_steps=STEPS, progress=True)
    assert f"{sum(STEPS.values())}/{sum(STEPS.values())}" in capsys.readouterr().err


# In tables, files and unions ------------------------------------------------------------------------------------------


def test_they_stand_in_one_table_figure_page_and_file(within: Comparison, tmp_path: Path) -> None:
    steps = {name: str(within[name].ledger.steps) for name in within}
    lines = within.table(columns=["steps", "wire used"]).splitlines()
    assert lines[0].split() == ["strategy", "steps", "wire", "used"]
    assert {line.split()[0]: line.split()[1] for line in lines[2:5]} == steps
    assert lines[-1] == "budget of each run: 2 s and $1 and 20 kB/node and 200 examples"
    within.to_json(tmp_path / "c.json")
    again = Comparison.from_json(tmp_path / "c.json")
    assert again.table() == within.table() == (within | again).table()
    assert again.budget == {"time": "2 s", "cost": 1, "wire": "20 kB", "examples": 200}
    assert {len(line.get_xdata()) for line in within.figure().axes[0].lines} == {9, 10}  # validations
    assert within.differences(to="DiLoCo")["seeds"].tolist() == [2, 2]
    page = within.report(tmp_path / "page.html").read_text()
    assert "wire used" in page and "budget of each run: 2 s and $1" in page
    assert within.describe()["budget"] == again.budget and "budget={'time': '2 s'" in within.calls[0]
    assert within.best(within.budget).uses["DiLoCo"].ended is False


def test_steps_by_name_stand_in_one_table() -> None:
    result = compared(max_steps=STEPS)
    assert result.budget == {} and [row["steps"] for row in result.rows().to_dict("records")] == list(STEPS.values())
    assert "budget" not in result.table() and "steps" not in compared(max_steps=3).table()


def test_what_joins_and_what_does_not() -> None:
    one, two = {"AllReduce": STRATEGIES["AllReduce"]}, {"DiLoCo": STRATEGIES["DiLoCo"]}
    short, long = compared(one, max_steps={"AllReduce": 2}), compared(two, max_steps={"DiLoCo": 4})
    extended, plain = compared(two, max_steps={"DiLoCo": 4}, extend=short), compared(two, max_steps=4)
    for joined in (short | long, extended, short | plain):
        assert [row["steps"] for row in joined.rows().to_dict("records")] == [2, 4]
    cheap, dear = {"wire": "20 kB"}, {"wire": "30 kB"}
    budgeted = compared(one, budget=cheap)
    equal = budgeted | compared(two, budget=cheap)
    assert len(equal) == 2 and equal.budget == cheap
    check_refusals(
        [
            (lambda: compared(one, max_steps=2) | plain, ValueError, ["max_steps is 2 and 4", "may be a dict of name"]),
            (
                lambda: short | compared(one, max_steps={"AllReduce": 3}, seeds=[5]),
                ValueError,
                ["max_steps is 2 and 3"],
            ),
            (lambda: budgeted | compared(two, budget=dear), ValueError, ["budget.wire is 20 kB and 30 kB"]),
            (lambda: budgeted | short, ValueError, ["budget is", "20 kB", "and absent"]),
        ]
    )


def test_the_budget_of_a_comparison_is_one_for_best() -> None:
    for more in ({}, {"max_steps": 50}, {"at": 1e5, "max_steps": 3}):
        runs = compared({"FedAvg": FedAvgStrategy(H=2, lr=1e-2)}, budget={"wire": "2 MB"}, **{"max_steps": 9, **more})
        assert runs.budget == {"wire": "2 MB"} and runs.best(within=runs.budget) == "FedAvg"
        assert f"at most {runs.limits['max_steps']} steps" in runs.table()


# Sweeps and tuning ----------------------------------------------------------------------------------------------------


def test_a_sweep_within_a_budget() -> None:
    options = {**OPTIONS, "strategy": DiLoCoStrategy, "settings": {"H": [1, 4], **SCHEDULE}}
    result = vsim.sweep(small_mlp(), vectors(), vectors(), budget={"wire": "20 kB"}, **options)
    steps = {name: run.ledger.steps for name, run in result.items()}
    assert isinstance(result, Sweep) and steps["DiLoCo H=4"] > 3 * steps["DiLoCo H=1"]
    assert {row["H"]: row["steps"] for row in result.rows().to_dict("records")} == {
        n[-1]: own for n, own in steps.items()
    }
    given = vsim.sweep(small_mlp(), vectors(), vectors(), max_steps={"DiLoCo H=1": 2, "DiLoCo H=4": 5}, **options)
    assert {name: run.ledger.steps for name, run in given.items()} == {"DiLoCo H=1": 2, "DiLoCo H=4": 5}
    with pytest.raises(ValueError, match=r"max_steps: a name must be one of 'DiLoCo H=1', 'DiLoCo H=4', got 'H=1'"):
        vsim.sweep(small_mlp(), vectors(), vectors(), max_steps={"H=1": 2}, **options)
    for steps_of in ({"budget": {"wire": "20 kB"}}, {"max_steps": {"DiLoCo H=1": 2, "DiLoCo H=4": 5}}):
        with pytest.raises(ValueError, match=r"halving .*one length"):
            vsim.sweep(small_mlp(), vectors(), vectors(), halving=2, **steps_of, **options)
    large = vsim.sweep(small_mlp(), vectors(), vectors(), budget={"wire": "5 GB"}, at=1e8, max_steps=20, **options)
    assert large.allreduce_bytes == 4e8 and max(row["wire used"] for row in large.rows().to_dict("records")) <= 1


def test_tuning_h_goes_by_the_budget() -> None:
    one, tune = {"DiLoCo": DiLoCoStrategy(lr=1e-2)}, {"H": [1, 4]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_steps = compared(one, tune=tune, max_steps=4)
        within = compared(one, tune=tune, budget={"wire": "20 kB"})
    told = [str(one.message) for one in caught]
    lengths = {name: run.ledger.steps for name, run in within.tuned["DiLoCo"].items()}
    assert lengths["DiLoCo H=4"] > lengths["DiLoCo H=1"] and within["DiLoCo"].ledger.steps in lengths.values()
    edge = [text for text in told if "best H is 1, the smallest" in text]
    assert by_steps.tuned["DiLoCo"].best() == "DiLoCo H=1"
    assert "a smaller one" not in edge[0] and "budget={'time': …}" in edge[0]
    with pytest.warns(UserWarning, match="DiLoCo: the best lr is .*; a (smaller|larger) one may be better"):
        by_name = compared(one, tune={"lr": [1e-3, 1e-2]}, max_steps={"DiLoCo": 3})
    assert {run.ledger.steps for run in [*by_name.values(), *by_name.tuned["DiLoCo"].values()]} == {3}


# What is refused ------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"budget": {"wire_bytes": 5}}, ValueError, ["'time', 'cost', 'wire', 'examples'", "'wire_bytes'"]),
    ({"budget": {"wire": "10 h"}}, ValueError, ["budget['wire']", "a number of bytes", "'10 h'"]),
    ({"budget": {"time": "10 h"}}, TypeError, ["AllReduce", "budget", "network is missing"]),
    ({"budget": {"cost": 5}, **PRICED, "compute": 0.1}, ValueError, ["cost", "dollars_per_hour"]),
    (
        {"budget": {"time": 0.05}, **PRICED},
        ValueError,
        ["AllReduce", "50 ms", "one step: it takes", " ms"],
    ),
    ({"budget": {"wire": 0}}, ValueError, ["AllReduce", "less than one step: it takes", "B/node"]),
    ({"strategies": {"a": AloneStrategy()}, "budget": {"wire": 9}}, ValueError, ["a:", "max_steps"]),
    ({"strategies": {"a": AsyncDiLoCoStrategy(H=2)}, "budget": {"time": 9}, **PRICED}, ValueError, ["max_steps= as"]),
    ({"budget": {"wire": "1 MB"}, "participation": Sample(2, of=4)}, ValueError, ["Sample", "max_steps= as a dict"]),
    ({"strategies": {"a": TOPK}, "budget": {"wire": "1 MB"}}, ValueError, ["a: budget", "max_steps= as a dict"]),
    ({"at": 1e9, "max_steps": 3}, TypeError, ["at=1000000000.0", "no effect", "budget"]),
    ({"max_steps": {"AllReduce": 3}}, ValueError, ["max_steps", "FedAvg, DiLoCo is missing"]),
    ({"max_steps": {**STEPS, "alone": 3}}, ValueError, ["max_steps", "'DiLoCo'", "'alone'"]),
    ({"max_steps": {**STEPS, "DiLoCo": 0}}, ValueError, ["DiLoCo", "max_steps", ">= 1", "got 0"]),
    ({"max_steps": STEPS, "budget": {"wire": "1 MB"}}, TypeError, ["budget and max_steps by name"]),
]


@pytest.mark.parametrize(("options", "kind", "words"), REFUSED)
def test_mistakes_are_named_before_training(options: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    with refused(kind, *words):
        compared(**{"train_loss_hook": never, **options})


def test_budgets_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["compare", "--data", "digits", "--model", "mlp", "--nodes", "2", "--quiet", "--val-size", "32"]
    small += ["--strategies", "allreduce", "diloco:H=2", "--out", str(tmp_path)]
    on = ["--network", "200 Mbit/s, 50 ms", "--compute", "0.5", "--at", "1e6", "--steps", "40"]
    assert main([*small, *on, "--budget", "time=5s", "examples=1e3"]) == 0
    printed = capsys.readouterr().out
    assert "time used" in printed and "budget of each run: 5 s and 1,000 examples" in printed
    assert "priced for 1M parameters, at most 40 steps" in printed
    steps = [run.ledger.steps for run in Comparison.from_json(tmp_path / "comparison.json").values()]
    assert steps[0] < steps[1] < 40
