"""What a result costs: at the event that makes it, done and paid, however often a run is validated."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_comparisons import compared

import vsim
from vsim.analysis.spent import forming_bytes, forming_seconds
from vsim.cluster.ledger import Event
from vsim.network import Network, timeline
from vsim.strategy import (
    AloneStrategy,
    DESLOCStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    NoLoCoStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
)
from vsim.strategy.average import compress, mean
from vsim.strategy.compression import TopK

NETWORK, COMPUTE = "1 Mbit/s, 20 ms", 0.1
STEPS = 24
STRATEGIES = {
    "AllReduce": SimpleReduceStrategy(lr=1e-2),
    "DiLoCo": DiLoCoStrategy(H=6, lr=1e-2),
    "Streaming": StreamingDiLoCoStrategy(H=6, delay=2, lr=1e-2),
    "FedAvg": FedAvgStrategy(H=6, lr=1e-2),
    "compressed": FedAvgStrategy(H=6, lr=1e-2, average=mean() | compress(TopK(0.05))),
    "islands": FedAvgStrategy(H=4, island_size=2, lr=1e-2),
    "NoLoCo": NoLoCoStrategy(H=6, lr=1e-2),
    "DES-LOC": DESLOCStrategy(H=6, lr=1e-2),
    "SPARTA": SPARTAStrategy(p_sparta=0.05, lr=1e-2),
    "alone": AloneStrategy(lr=1e-2),
}


@pytest.fixture(scope="module")
def fine() -> vsim.Comparison:
    """All strategies with a loss at every step."""
    return compared(STRATEGIES, num_nodes=4, max_steps=STEPS, val_interval=1)


def coarser(comparison: vsim.Comparison, every: int) -> vsim.Comparison:
    """The same runs, with the losses that `val_interval=every` would have measured."""
    made = vsim.Comparison(comparison.allreduce_bytes)
    for name in comparison:
        history = copy.deepcopy(comparison[name].history)
        for column in ("global_loss", "global_formed"):
            values = history._columns[column]
            values[:] = [v if t % every == 0 or t == STEPS else math.nan for t, v in enumerate(values)]
        made.add(name, vsim.ComparedRun(history))
    return made


@pytest.mark.slow
def test_a_run_validated_less_often_is_the_same_run(fine: vsim.Comparison) -> None:
    real = compared(STRATEGIES, num_nodes=4, max_steps=STEPS, val_interval=5)
    for name, run in coarser(fine, 5).items():
        for column in ("global_loss", "global_formed", "wire_bytes"):
            np.testing.assert_allclose(real[name].history[column], run.history[column], rtol=1e-4)


@pytest.mark.filterwarnings("ignore:validation is too rare")
@settings(max_examples=20)
@given(every=st.integers(2, STEPS), share=st.floats(0, 1))
def test_rarer_measurements_never_make_a_result_cheaper(fine: vsim.Comparison, every: int, share: float) -> None:
    losses = np.concatenate([run.history["global_loss"] for run in fine.values()])
    target = float(losses.min() + share * (losses.max() - losses.min()))
    rare = coarser(fine, every)
    for name, row, other in zip(
        fine, *(c.rows(target, NETWORK, COMPUTE).to_dict("records") for c in (fine, rare)), strict=True
    ):
        for column in (f"steps to {target:g}", f"wire MB to {target:g}", f"hours to {target:g}"):
            assert other[column] >= row[column] or math.isnan(other[column]), (name, column)
    one, other_map = (c.winners(target, [1e6], [0.02], COMPUTE) for c in (fine, rare))
    known, seen = one.first[0][0], other_map.first[0][0]
    if len(known) == len(seen) == 1 and one.never == other_map.never:
        assert known == seen  # without a tie, the first is the first


def test_measurements_at_every_step_leave_nothing_open(fine: vsim.Comparison) -> None:
    for target in (1.0, 1.5, 2.0):
        assert fine.winners(target, compute=COMPUTE).left_open == 0


def test_whose_model_exists(fine: vsim.Comparison) -> None:
    formed = {name: run.history["global_formed"].astype(bool).tolist() for name, run in fine.items()}
    syncs = [step % 6 == 0 for step in range(STEPS + 1)]
    assert formed["FedAvg"] == formed["compressed"] == formed["DES-LOC"] == syncs
    assert formed["islands"] == formed["NoLoCo"] == formed["SPARTA"] == [True] + [False] * STEPS
    assert all(all(formed[name]) for name in ("AllReduce", "DiLoCo", "Streaming", "alone"))
    note = "islands, NoLoCo, SPARTA: loss of the averaged model"
    assert note in fine.table() and note not in fine.table(columns=["wire MB/node"])


@pytest.mark.filterwarnings("ignore:validation is too rare")
def test_a_sync_makes_the_result_by_hand() -> None:
    """FedAvg of four nodes, H = 4: all weights, 1 MB, after steps 4, 8 and 12. Losses fall by 1 a step from 20.

    On a ring of 12 Mbit/s an all-reduce sends 1.5 MB, in 1 s; a step takes 1 s. The loss of 14 is reached at step 6 by
    a mean that no node has: the second all-reduce would form it there. At step 8 it was formed.
    """
    made = vsim.Comparison(1_000_000)
    for name, every, formed in (("all", 1, True), ("rare", 5, True), ("never", 1, False)):
        history = vsim.History(name, 4)
        for step in range(13):
            sent = step // 4 * 1e6 * formed
            row = {"step": step, "examples": step, "wire_bytes": 1.5 * sent, "payload_bytes": sent}
            if step % every == 0:
                row |= {"global_loss": 20.0 - step, "global_formed": step % 4 == 0 and (formed or not step)}
            history.append(row)
            if step and step % 4 == 0 and formed:
                history.ledger.record(Event(step, step, "weights", "all_reduce", "weights", 1e6, (range(4),)))
        made.add(name, vsim.ComparedRun(history))
    rows = {row["strategy"]: row for row in made.rows(14.0, "12 Mbit/s", 1.0).to_dict("records")}
    results = {name: [row[f"{what} to 14"] for what in ("steps", "wire MB", "hours")] for name, row in rows.items()}
    assert results["all"] == [6, 3.0, pytest.approx(8 / 3600)]  # 6 steps, 2 all-reduces
    assert results["rare"] == [10, 4.5, pytest.approx(13 / 3600)]  # measured at 10, which a third one would form
    assert results["never"] == [6, 1.5, pytest.approx(7 / 3600)]
    assert made.steps_to(14.0, of="payload_bytes") == {"all": [2e6], "rare": [3e6], "never": [1e6]}
    winners = made.winners(14.0, [12e6], [0.0], 1.0)
    assert {name: float(own[0, 0]) for name, own in winners.seconds.items()} == {"all": 8, "rare": 13, "never": 7}
    within = {name: made[[name]].best({"wire": "3 MB"}).loss for name in made}
    assert within == {"all": 20 - 8, "rare": 20 - 5, "never": 20 - 12}  # step 8 is paid, 9 to 11 want a third one
    assert made.pareto().frame["wire MB"].tolist() == [4.5, 6.0 - 1.5, 1.5]
    assert made[["all"]].best({"time": "10 s"}, "12 Mbit/s", 1.0).loss == 20 - 8


def test_to_form_a_mean_is_no_step_of_a_run(fine: vsim.Comparison) -> None:
    """SPARTA's end costs one all-reduce more than it has sent; a further step would cost a small message only."""
    history = fine["SPARTA"].history
    sent, more = history["wire_bytes"], forming_bytes(history, "wire", fine.allreduce_bytes)
    end, step = sent[-1] + more, np.diff(sent).max()
    assert step < more / 5
    for budget, ended in ((end + 1.01 * step, True), (end + 0.9 * more, True), (end + 0.5 * step, False)):
        assert fine.best({"wire": float(budget)}).uses["SPARTA"].ended == ended


@pytest.mark.parametrize("collective", ["ring", "tree", "server"])
def test_to_form_a_mean_takes_what_one_more_all_reduce_takes(fine: vsim.Comparison, collective: str) -> None:
    network = Network(NETWORK.split(",")[0], 0.02, collective=collective)
    for name in ("FedAvg", "SPARTA"):
        history = fine[name].history
        for step in (3, STEPS):
            ledger, everyone = vsim.Ledger(4), (range(4),)
            for event in history.ledger:
                if event.step <= step:
                    ledger.record(event)
            ledger.steps = step
            before, sent = timeline(ledger, network, COMPUTE).seconds[-1], ledger.wire_bytes
            ledger.record(Event(step, step, "weights", "all_reduce", "more", fine.allreduce_bytes, everyone))
            after = timeline(ledger, network, COMPUTE).seconds[-1]
            assert after - before == pytest.approx(forming_seconds(history, network, fine.allreduce_bytes)[0])
            assert ledger.wire_bytes - sent == forming_bytes(history, "wire", fine.allreduce_bytes)
