"""A ladder: each size is its comparison, steps follow tokens, it resumes; and what is decided from it."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_runs import assert_same_comparison
from reference_cluster import vectors
from test_ensemble import Killed, killed_at
from torch import nn
from torch.utils.data import TensorDataset

import vsim
from vsim import Compute, Ladder
from vsim.analysis.questions.decide import Decision, _advice, _fits_on_map, _with_size, decide
from vsim.analysis.questions.winners import BANDWIDTHS, LATENCIES
from vsim.analysis.size_order import order
from vsim.figures.words import in_short
from vsim.models import GPT, MLP
from vsim.network.timeline import duration, seconds_on
from vsim.scale.ladder import _Remaining
from vsim.strategy import (
    AloneStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
)

vsim_ladder = importlib.import_module("vsim.scale.ladder")  # vsim.ladder is the function
SIZES, SEEDS = [2, 4, 8, 16], [1, 2]
STRATEGIES = {
    "AllReduce": SimpleReduceStrategy(lr=1e-2),
    "FedAvg": FedAvgStrategy(H=2, lr=1e-2),
    "DiLoCo": DiLoCoStrategy(H=2, lr=1e-2),
    "SPARTA": SPARTAStrategy(p_sparta=0.1, lr=1e-2),
}
OPTIONS: dict[str, Any] = {"num_nodes": 2, "batch_size": 4, "val_interval": 100, "progress": False}
TARGET: dict[str, Any] = {"parameters": 1e6, "num_nodes": 4, "network": "100 Mbit/s, 1 ms", "max_steps": 20}


def mlp(width: int) -> nn.Module:
    return MLP(12, (width,), 5, seed=width)


def climbed(model: Any = mlp, data: Any = None, **options: Any) -> Ladder:
    given = {"sizes": SIZES, "strategies": STRATEGIES, "seeds": SEEDS, **OPTIONS, **options}
    return vsim.ladder(model, vectors() if data is None else data, vectors(), **given)


@pytest.fixture(scope="module")
def ladder() -> Ladder:
    return climbed(tokens_per_parameter=0.5)


def test_each_size_is_its_comparison_and_steps_follow_the_tokens(ladder: Ladder) -> None:
    assert list(ladder.comparisons) == SIZES and ladder.unit == "examples"
    for size in SIZES:
        assert ladder.parameters[size] == 12 * size + size + 5 * size + 5
        examples = ladder.comparisons[size]["AllReduce"].history["examples"]  # epochs of 29 end in small batches
        assert examples[-1] >= 0.5 * ladder.parameters[size] > examples[-2]
    steps = len(examples) - 1
    options = {"strategies": STRATEGIES, "seeds": SEEDS, "max_steps": steps, **OPTIONS}
    largest = vsim.compare(mlp(16), vectors(), vectors(), **options)
    assert_same_comparison(ladder.largest, largest)
    frame = ladder.to_pandas()
    assert len(frame) == 4 * 4 * 2 and (frame["steps"][frame["size"] == 16] == steps).all()
    row = frame[(frame["size"] == 16) & (frame["strategy"] == "FedAvg") & (frame["seed"] == 2)]
    assert row["loss"].item() == largest.runs("FedAvg")[1].history.last("global_loss")


def test_token_ids_count_as_tokens() -> None:
    ids = torch.randint(7, (40, 9), generator=torch.Generator().manual_seed(0))
    text = TensorDataset(ids[:, :-1], ids[:, 1:])
    found = vsim.ladder(
        lambda width: GPT(7, 8, 1, width, 1),
        text,
        text,
        sizes=[4, 2],
        strategies={"AllReduce": SimpleReduceStrategy()},
        tokens_per_parameter=2,
        **OPTIONS,
    )
    assert list(found.comparisons) == [2, 4] and found.tokens_per_example == 8 and found.unit == "tokens"
    for size, comparison in found.comparisons.items():
        tokens = comparison["AllReduce"].history["tokens"]
        assert tokens[-1] >= 2 * found.parameters[size] > tokens[-2]


def test_every_seed_has_its_weights_and_the_global_generator_is_left_alone() -> None:
    drawn: list[torch.Tensor] = []

    def model(width: int) -> nn.Module:
        own = MLP(12, (width,), 5)
        drawn.append(own.layers[0].weight.detach().clone())
        return own

    state = torch.random.get_rng_state()
    climbed(model, sizes=[2, 3], max_steps=2)
    assert torch.equal(state, torch.random.get_rng_state())
    widths = [own for own in drawn if len(own) == 3]
    assert any(not torch.equal(widths[0], own) for own in widths) and any(own.equal(widths[0]) for own in widths[1:])


def test_tuned_at_each_size_within_a_budget() -> None:
    with pytest.warns(UserWarning, match="the best lr is"):
        found = climbed(
            sizes=[2, 4],
            strategies={"AllReduce": STRATEGIES["AllReduce"], "DiLoCo": STRATEGIES["DiLoCo"]},
            tune={"lr": [1e-3, 1e-1]},
            budget={"examples": 40},
        )
    assert all(sorted(own.tuned) == ["AllReduce", "DiLoCo"] for own in found.comparisons.values())
    assert found.tokens_per_parameter is None and (found.to_pandas()["steps"] == 5).all()
    assert "each tuned at its size" in repr(found)
    decision = found.decide(**{**TARGET, "max_steps": None}, compute=1, within={"time": "10 h"})
    assert "5 steps, as at the largest size" in decision.assumptions[0]
    assert "tuned at the largest size" in decision.assumptions[1]


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path, ladder: Ladder) -> None:
    options: dict[str, Any] = {"tokens_per_parameter": 0.5, "save_dir": tmp_path / "ladder", "checkpoint_interval": 2}
    last = int(ladder.largest["AllReduce"].history.last("step"))
    with pytest.raises(Killed):
        climbed(**options, train_loss_hook=killed_at(last - 1))
    assert list(vsim.load_ladder(tmp_path / "ladder").comparisons) == SIZES[:3]
    resumed = climbed(**options, resume=True)
    for size in SIZES:
        assert_same_comparison(resumed.comparisons[size], ladder.comparisons[size])
    assert repr(vsim.load_ladder(tmp_path / "ladder")) == repr(ladder) == repr(resumed)
    steps: list[int] = []
    again = climbed(**options, train_loss_hook=lambda step, loss: steps.append(step), resume=True)
    assert repr(again) == repr(ladder) and not steps  # sizes that have ended are not trained again
    with pytest.raises(vsim.CheckpointError, match="holds"):
        climbed(**options)


def test_an_interrupt_keeps_the_sizes_that_have_ended(tmp_path: Path) -> None:
    calls: list[int] = []

    def model(width: int) -> nn.Module:
        calls.append(width)
        if calls.count(4) > 1 and width == 4:
            raise KeyboardInterrupt
        return mlp(width)

    with pytest.warns(UserWarning, match=r"interrupted at size 4: the ladder has 2; resume=True"):
        found = climbed(model, sizes=[2, 4, 8], max_steps=3, save_dir=tmp_path)
    assert list(found.comparisons) == [2]
    with pytest.raises(KeyboardInterrupt):
        climbed(lambda width: model(4) if calls.count(4) < 9 else mlp(width), sizes=[2, 4], max_steps=3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:too few steps")
def test_sizes_at_which_a_strategy_never_communicated_are_named_and_left_out(tmp_path: Path) -> None:
    """41 and 77 parameters take 3 and 5 steps, 149 take 10; a strategy that never does communicate stays."""
    strategies = {**STRATEGIES, "FedAvg": FedAvgStrategy(H=8, lr=1e-2), "Alone": AloneStrategy(lr=1e-2)}
    with pytest.warns(UserWarning, match="never communicated") as warned:
        found = climbed(strategies=strategies, tokens_per_parameter=0.5, save_dir=tmp_path)
    said = [str(one.message) for one in warned if "never communicated" in str(one.message)]
    sent = found.to_pandas().query("strategy == 'FedAvg'").groupby("size")["wire_bytes"].max()
    assert list(sent[sent == 0].index) == [2, 4] and found.silent == {"FedAvg": [2, 4]}
    assert len(said) == 1 and said[0].startswith("FedAvg never communicated at size 2 (41 parameters, ")
    assert "size 4 (77 parameters, " in said[0]
    for own in (found, vsim.load_ladder(tmp_path)):
        table = own.table().splitlines()
        (line,) = (line for line in table if line.startswith("FedAvg"))
        assert line.count("‡") == 2 and sum("‡" in other for other in table) == 2  # the note is the second
        order = own.order(1e3)
        assert order.silent == {"FedAvg": [41, 77]} and len(order.pair("Alone", "AllReduce").sizes) == 4
        assert len(order.pair("FedAvg", "AllReduce").sizes) == 2
        assert "FedAvg: left out at 41, 77, where it never communicated" in repr(order)
    assert "‡ never communicated" in found.report().html
    with pytest.warns(UserWarning, match="FedAvg never communicated at size 2 .*, size 3 "):  # at any size
        climbed(sizes=[2, 3], strategies=strategies, max_steps=2)


def test_the_time_left_follows_the_sizes_that_have_ended() -> None:
    left = _Remaining({2: 100, 4: 1000, 8: 10_000}, {2: 10, 4: 20, 8: 40})
    assert left.text([2, 4, 8]) == ""
    left.seconds[2] = 30.0  # 3 s a step: at most 30 s a step of the second size, 300 s of the third
    assert left.text([4, 8]) == f", about {duration(20 * 30 + 40 * 300)} left"
    left.seconds[4] = 120.0  # 6 s a step, twice as much
    assert left.text([8]) == f", about {duration(40 * 12)} left"


def test_each_size_says_how_long_the_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []

    def compared(*args: Any, title: str, **options: Any) -> Any:
        titles.append(title)
        return compare(*args, title=title, **options)

    compare = vsim_ladder._compare
    monkeypatch.setattr(vsim_ladder, "_compare", compared)
    climbed(sizes=[2, 3], max_steps=2)
    assert titles[0] == "size 1 of 2, 41 parameters: "
    assert re.fullmatch(r"size 2 of 2, 59 parameters, about .* left: ", titles[1])


def test_table_figure_and_file(ladder: Ladder, tmp_path: Path) -> None:
    table = ladder.table()
    frame = ladder.to_pandas()
    means = frame[frame["size"] == 16].groupby("strategy")["loss"].mean().sort_values()
    assert f"1. {means.iloc[0]:.4f} ± " in table and f"4. {means.iloc[3]:.4f} ± " in table
    assert "sizes 2 (41), 4 (77), 8 (149), 16 (293); 0.5 examples a parameter, 2 seeds, 2 nodes" in table
    assert table.count("†") > 1  # two seeds tell little
    ax = ladder.plot()
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert sorted(lines) == sorted(STRATEGIES) and (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    np.testing.assert_allclose(lines["FedAvg"].get_ydata()[-1], means["FedAvg"])
    assert len(ax.collections) == 4  # bands
    assert "<table" in ladder._repr_html_() and "image/png" in ladder._repr_html_()
    paths = {whole: tmp_path / f"{whole}.json" for whole in (True, False)}
    for whole, path in paths.items():
        ladder.save(path, whole=whole)
        read = vsim.load_ladder(path)
        assert repr(read) == repr(ladder) and read.to_pandas().equals(frame)
        assert repr(read.order(1e4)) == repr(ladder.order(1e4)) == repr(order(frame, 1e4))
    assert paths[False].stat().st_size < paths[True].stat().st_size
    for broken in ({}, {"sizes": [1], "parameters": [2], "comparisons": [{}]}, {"sizes": [1], "parameters": [2]}):
        (tmp_path / "broken.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=r"broken\.json"):
            vsim.load_ladder(tmp_path / "broken.json")


def test_the_largest_size_held_out(ladder: Ladder) -> None:
    below = ladder.without(16)
    assert list(below.comparisons) == [2, 4, 8] and below.order(ladder.parameters[16]).factor == pytest.approx(
        293 / 149
    )
    for sizes, said in (([3], "3"), (SIZES, "nothing is left")):
        with pytest.raises(ValueError, match=said):
            ladder.without(*sizes)


# What is decided ------------------------------------------------------------------------------------------------------


def test_costs_are_those_of_price(ladder: Ladder) -> None:
    compute = Compute(0.1, dollars_per_hour=3.0)
    decision = ladder.decide(**TARGET, compute=compute, within={"time": "4 s", "cost": "$1", "wire": "1 GB"})
    for name, own in decision.costs.items():
        options = {"max_steps": 20, "network": TARGET["network"], "compute": compute}
        line = vsim.price(STRATEGIES[name], parameters=1e6, num_nodes=4, seed=1, **options)
        assert own.seconds == line.seconds[-1] and own.wire_bytes == line.ledger.wire_bytes
        assert own.dollars == line.dollars and own.utilization == line.utilization
        assert own.share == pytest.approx(max(own.seconds / 4, own.dollars, own.wire_bytes / 1e9))
        assert own.fits == (own.seconds <= 4)
    assert {own.fits for own in decision.costs.values()} == {True, False}
    found = order(ladder.to_pandas(), 1e6)
    fitting = [name for name in found.names if decision.costs[name].fits]
    assert decision.first == fitting[0] and repr(decision.order) == repr(found)
    assert set(decision.undecided) == {name for name in fitting[1:] if not found.pair(fitting[0], name).decided}
    frame = decision.to_pandas().set_index("strategy")
    assert frame["fits"].to_dict() == {name: own.fits for name, own in decision.costs.items()}
    assert math.isnan(frame["ahead"][decision.first])


def test_what_does_not_fit_a_node_is_never_first(ladder: Ladder) -> None:
    """AdamW: weights, gradients and two moments of 4 MB each; DiLoCo has φ and its momentum besides."""
    options: dict[str, Any] = {**TARGET, "within": {"time": "1 h"}}
    held = {name: 24e6 if name == "DiLoCo" else 16e6 for name in STRATEGIES}
    free, less = ladder.decide(**options, compute=0.1), ladder.decide(**options, compute=Compute(0.1, memory="20 MB"))
    assert {name: own.memory_bytes for name, own in less.costs.items()} == pytest.approx(held, rel=1e-4)
    assert {name for name, own in less.costs.items() if not own.fits} == {"DiLoCo"}
    assert less.first == next(name for name in free.order.names if name != "DiLoCo")
    assert not any("DiLoCo" in names for row in less.map.first for names in row)
    assert "DiLoCo" not in less.undecided and "does not fit: needs 24.00 MB of 20.00 MB of memory" in repr(less)
    assert "activations" in less.assumptions[-1] and len(less.assumptions) == len(free.assumptions) + 1
    assert less.to_pandas().set_index("strategy")["memory_bytes"].to_dict() == pytest.approx(held, rel=1e-4)
    none = ladder.decide(**options, compute=Compute(0.1, memory=1e6))
    assert none.first == "" and "needs 16.00 MB of 1.00 MB of memory" in none.answer()


def test_a_node_of_several_machines_is_priced_as_by_price(ladder: Ladder) -> None:
    inside: dict[str, Any] = {"stages": 4, "microbatches": 8, "tokens": 2**14, "within": "1 Gbit/s, 1 ms"}
    pipeline = vsim.Pipeline(**inside, layers=8, width=64)
    compute = Compute(0.1, memory="5 MB", pipeline=pipeline)
    decision = ladder.decide(**TARGET, compute=compute, within={"time": "1 h"})
    for name, own in decision.costs.items():
        options = {"max_steps": 20, "network": TARGET["network"], "compute": compute}
        line = vsim.price(STRATEGIES[name], parameters=1e6, num_nodes=4, seed=1, **options)
        assert own.seconds == line.seconds[-1] and own.utilization == line.utilization
        assert own.memory_bytes == pytest.approx(6e6 if name == "DiLoCo" else 4e6, rel=1e-4)  # a quarter, a machine
        assert own.fits == (name != "DiLoCo")
    plain = ladder.decide(**TARGET, compute=0.1, within={"time": "1 h"})
    assert all(own.seconds < decision.costs[name].seconds for name, own in plain.costs.items())
    large: dict[str, Any] = {**TARGET, "parameters": 2e7}
    compute = Compute(1.0, pipeline=vsim.Pipeline(**inside | {"stages": 2}))
    decision = ladder.decide(**large, compute=compute, within={"time": "1 h"})
    (line,) = (
        vsim.price(
            STRATEGIES["FedAvg"], parameters=2e7, num_nodes=4, seed=1, max_steps=20, network=TARGET["network"],
            compute=1.0, **inside | {"stages": 2},
        ),
    )  # fmt: skip
    assert decision.costs["FedAvg"].seconds == line.seconds[-1]
    with pytest.raises(TypeError, match="pipeline: layers and width"):
        ladder.decide(**TARGET, compute=compute, within={"time": "1 h"})


def test_a_state_of_unknown_size_has_no_price(ladder: Ladder) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            float(self.param_groups[0]["params"][0].sum())

    own = {"FedAvg": FedAvgStrategy(H=5, inner_optim=OptimSpec(Odd, lr=0.1))}
    options: dict[str, Any] = {**TARGET, "within": {"time": "1 h"}, "strategies": own}
    decision = ladder.decide(**options, compute=Compute(0.1, memory="1 GB"))
    assert "memory" in decision.costs["FedAvg"].why and decision.first != "FedAvg"
    assert ladder.decide(**options, compute=0.1).costs["FedAvg"].fits


def test_the_map_is_that_of_each_network(ladder: Ladder) -> None:
    decision = ladder.decide(**TARGET, compute=0.1, within={"time": "4 s"})
    chart = decision.map
    for i, j in ((0, 0), (0, 60), (20, 24), (40, 60), (24, 32)):
        network = vsim.Network(chart.bandwidths[j], chart.latencies[i])
        again = ladder.decide(**{**TARGET, "network": network}, compute=0.1, within={"time": "4 s"})
        expected = {again.first, *again.undecided} - {""}
        assert set(chart.first[i][j]) == expected
    regions = {names for row in chart.first for names in row}
    assert () in regions and len(regions) > 2  # none fits somewhere
    ax = decision.plot()
    assert ax.get_title(loc="left") == "ahead within 4 s"


@pytest.mark.parametrize("limit", [2.0, 2.01, 2.5, 4.0, 20.0, 1e9])
def test_every_cell_of_the_map_is_priced_also_close_to_the_limit(limit: float) -> None:
    """Of 20 steps of 0.1 s; where communication overlaps computation, the time has a kink between any two networks."""
    overlapped = StreamingDiLoCoStrategy(H=5, delay=2)
    compute = Compute(0.1)
    grid = np.tile(BANDWIDTHS, len(LATENCIES)), np.repeat(LATENCIES, len(BANDWIDTHS)), {}
    for strategy in (STRATEGIES["AllReduce"], overlapped):
        ledger = vsim.price(strategy, parameters=1e6, num_nodes=4, max_steps=20, network="1 Gbit/s", compute=0.1).ledger
        seconds = seconds_on(ledger, *grid, compute, [20]).reshape(len(LATENCIES), len(BANDWIDTHS))
        fits = _fits_on_map(ledger, vsim.Network("1 Gbit/s"), compute, limit)
        np.testing.assert_array_equal(fits, seconds <= limit)


def test_a_bar_shows_which_strategy_is_priced(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Bar(list[str]):
        def __init__(self, names: Any, **options: Any) -> None:
            super().__init__(names)
            shown.append((len(self), options["disable"]))

        def set_postfix_str(self, name: str) -> None:
            shown.append(name)

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    options: dict[str, Any] = {**TARGET, "compute": 0.1, "within": {"time": "4 s"}}
    ladder.decide(**options)
    assert shown == [(4, None), *STRATEGIES]  # None: on terminals
    ladder.decide(**options, progress=False)
    assert shown[5] == (4, True)


def test_the_page_has_all_sizes_and_the_decision(ladder: Ladder, tmp_path: Path) -> None:
    decision = ladder.decide(**TARGET, compute=0.1, within={"time": "8 s"})
    page = ladder.report(tmp_path / "ladder.html", decision=decision).read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.S)
    sizes = [f"{in_short(ladder.parameters[size])} parameters" for size in reversed(SIZES)]
    assert [one["name"] for one in json.loads(data)] == sizes
    assert decision._repr_html_() in page and ladder._repr_html_() in page and "img-src data:" in page
    alone = ladder.report(title="Four <sizes>").html
    assert "Four &lt;sizes&gt;" in alone and decision.answer() not in alone
    with pytest.raises(TypeError, match=r"decision .*decide"):
        ladder.report(decision="AllReduce")  # type: ignore[call-overload]


def test_text_and_notebook(ladder: Ladder) -> None:
    def decide(**within: str) -> Decision:
        return ladder.decide(**TARGET, compute=0.1, within=within)

    decision = decide(time="8 s")
    text = repr(decision)
    assert text.startswith("extrapolated: ") and decision.order.factor > 100
    assert "not decided for 1M parameters within 8 s" in text and len(decision.assumptions) == 3
    assert "4 nodes, where the losses are of 2 nodes" in text and "next: to tell " in text and "does not fit" in text
    page = decision._repr_html_()
    assert page.startswith("<p><b>extrapolated") and "image/png" in page and page.count("<table") == 2
    assert repr(decide(time="4 s")).startswith("extrapolated: SPARTA for 1M parameters, the only one within 4 s")
    none = decide(time="1 s")
    assert none.first == "" and not none.decided
    assert "none for 1M parameters" in repr(none) and "raise the budget" in repr(none)
    assert none.plot().get_title(loc="left").startswith("none ahead")
    tokens = ladder.decide(**{**TARGET, "max_steps": None}, tokens_per_step=5e4, compute=0.1, within={"time": "1 h"})
    assert "500k examples, 0.5 a parameter, in 10 steps of 50,000 of all nodes" in repr(tokens)


def synthetic(ladder: Ladder, gap: float, noise: float = 0.001) -> Decision:
    """The decision with losses of parallel laws, in the order of the strategies, each so much above the one before."""
    stream, frame = np.random.default_rng(0), ladder.to_pandas()
    place = {name: i for i, name in enumerate(STRATEGIES)}
    frame["loss"] = [
        2 * size**-0.1 * math.exp(gap * place[name] + noise * stream.standard_normal())
        for name, size in zip(frame["strategy"], frame["parameters"], strict=True)
    ]
    steps = dict.fromkeys(STRATEGIES, 10)
    limits = {"time": "1 h"}
    network, compute = vsim.Network("1 Gbit/s"), Compute(0.1)
    return decide(
        ladder.largest, frame, 2000, 4, network, compute, limits, steps, "10 steps", False, None, {}, ladder._looks()
    )


def test_what_is_sure_is_decided_and_what_to_train_next_decides(ladder: Ladder) -> None:
    sure = synthetic(ladder, 0.3)
    assert sure.decided and sure.first == "AllReduce" and sure.advice == "nothing, it is decided"
    assert "AllReduce for 2k parameters within 1 h, ahead of all others that fit with at least 9" in repr(sure)
    assert {names for row in sure.map.first for names in row} >= {("AllReduce",)}
    noisy = synthetic(ladder, 0.02, noise=0.03)
    assert not noisy.decided and f"that {noisy.first} is ahead" in repr(noisy)
    assert noisy.advice.startswith(("to tell ", "no single size below 2k"))


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.03])
def test_the_advice_is_the_cheapest_that_decides_and_is_found_in_few_orders(
    ladder: Ladder, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = ladder.to_pandas()
    stream, place = np.random.default_rng(3), {name: i for i, name in enumerate(STRATEGIES)}
    frame["loss"] = [
        2 * size**-0.1 * math.exp(0.02 * place[name] + noise * stream.standard_normal())
        for name, size in zip(frame["strategy"], frame["parameters"], strict=True)
    ]
    target = 3e5
    found = order(frame, target)
    first, *others = found.names
    undecided = {name: found.probability(first, name) for name in others if not found.pair(first, name).decided}
    rival = min(undecided, key=lambda name: (not math.isnan(undecided[name]), undecided[name]))
    sizes = [293 * 10 ** (i / 2) for i in range(1, 40) if 293 * 10 ** (i / 2) < target]
    deciding = [
        (size * seeds, in_short(size), seeds)
        for size in sizes
        for seeds in (2, 4, 8)
        if order(_with_size(found, frame, size, seeds), target).pair(first, rival).decided
    ]
    orders: list[int] = []
    monkeypatch.setattr("vsim.analysis.questions.decide.order", lambda *args: [orders.append(0), order(*args)][1])
    said = _advice(found, frame, first, undecided, list(STRATEGIES))
    if deciding:
        _, size, seeds = min(deciding)
        assert f"to tell {first} from {rival}, train a size of about {size} with {seeds} seeds" in said
    else:
        assert said.startswith("no single size below 300k would tell")
    assert len(orders) <= (3 * (1 + math.ceil(math.log2(len(sizes)))) if deciding else 3)


def test_what_seeds_leave_open_at_a_measured_size_takes_more_seeds(ladder: Ladder) -> None:
    frame = ladder.to_pandas()
    frame["loss"] = 2 + np.random.default_rng(0).random(len(frame))
    found = order(frame, 293)
    first, *others = found.names
    undecided = {name: found.probability(first, name) for name in others if not found.pair(first, name).decided}
    said = _advice(found, frame, first, undecided, list(STRATEGIES))
    assert undecided and said.endswith("train more seeds at 293")


def test_a_strategy_without_a_price_is_named(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> Any:
        raise ValueError("it depends on values")

    monkeypatch.setattr(FedAvgStrategy, "dry_run", refused)
    decision = ladder.decide(**TARGET, compute=0.1, within={"time": "1 h"})
    assert decision.costs["FedAvg"].why.startswith("it depends on values") and not decision.costs["FedAvg"].fits
    assert "it depends on values" in repr(decision) and decision.first != "FedAvg"
    monkeypatch.setattr(ladder.largest["FedAvg"], "strategy", None)
    with pytest.raises(TypeError, match="FedAvg was read from a file"):
        ladder.decide(**TARGET, compute=0.1, within={"time": "1 h"})
    own = {"FedAvg": STRATEGIES["AllReduce"]}
    decision = ladder.decide(**TARGET, compute=0.1, within={"time": "1 h"}, strategies=own)
    assert decision.costs["FedAvg"] == decision.costs["AllReduce"]


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"sizes": [4]}, ValueError, r"sizes .*\[4\]"),
        ({"sizes": [4, 4]}, ValueError, r"sizes .*\[4, 4\]"),
        ({"max_steps": 3, "tokens_per_parameter": 2}, TypeError, "tokens_per_parameter and max_steps"),
        ({"budget": {"examples": 9}, "tokens_per_parameter": 2}, TypeError, "tokens_per_parameter and budget"),
        ({"num_epochs": 2}, TypeError, "tokens_per_parameter and num_epochs"),
        ({"model": lambda width: width}, TypeError, r"model\(2\) .*int"),
        ({"model": lambda width: mlp(2)}, ValueError, "parameters.*41"),
        ({"extend": None}, TypeError, "extend"),
        ({"sises": [2, 4]}, TypeError, "sises.*sizes"),
    ],
)
def test_what_is_refused_before_training(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        climbed(**given)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"within": {"steps": 3}}, ValueError, "within.*time.*steps"),
        ({"within": {"cost": 3}}, ValueError, "cost.*dollars_per_hour"),
        ({"tokens_per_step": 100}, TypeError, "tokens_per_step.*max_steps"),
        ({"strategies": {"fedavg": None}}, ValueError, "strategies.*fedavg.*FedAvg"),
        ({"compute": Compute([0.1, 0.2])}, ValueError, "2 nodes.*4"),
    ],
)
def test_what_decide_refuses(ladder: Ladder, given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        ladder.decide(**{**TARGET, "compute": 0.1, "within": {"time": "1 h"}, **given})
