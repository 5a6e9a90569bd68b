"""Every collective call is in the ledger: the exact sequence of steps, names and bytes."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given
from hypothesis import strategies as st
from reference_cluster import small_mlp, vectors

from vsim import Event, Ledger, Trainer
from vsim.cluster.stacked import StackedCollectives
from vsim.cluster.traffic import traffic
from vsim.strategy import (
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    SimpleReduceStrategy,
    Strategy,
    mean,
)
from vsim.strategy.communicate import all_gather, all_reduce, broadcast

S = 4 * 293  # bytes of small_mlp's weights: 12·16 + 16 + 16·5 + 5 = 293 numbers of 4 bytes


def trained(strategy: Strategy, num_nodes: int, max_steps: int = 6, **options: Any) -> Trainer:
    trainer = Trainer(small_mlp(), vectors(), vectors(8))
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=max_steps, batch_size=4, progress=False, **options)
    return trainer


def of_all(step: int, label: str, num_nodes: int) -> Event:
    """An all-reduce of all weights, or gradients, over all nodes."""
    moment = "gradients" if label == "gradients" else "weights"
    return Event(step, step, moment, "all_reduce", label, S, (range(num_nodes),))


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "label", "steps"),
    [
        (SimpleReduceStrategy(), "gradients", [1, 2, 3, 4, 5, 6]),
        (FedAvgStrategy(), "weights", [1, 2, 3, 4, 5, 6]),
        (FedAvgStrategy(H=4, average=mean("examples")), "weights", [4]),
        (DiLoCoStrategy(H=3), "outer gradient", [3, 6]),  # after 3 and 6 steps, not after 4 or 7
        (DiLoCoStrategy(), "outer gradient", []),  # H = 100
    ],
    ids=["allreduce", "fedavg-1", "fedavg-4", "diloco-3", "diloco-100"],
)
def test_the_events_of_a_strategy(strategy: Strategy, label: str, steps: list[int], num_nodes: int) -> None:
    measured = {"val_interval": 1, **({"correlation_interval": 1} if num_nodes > 1 else {})}  # which is not billed
    for options in (measured, {"executor": "loop", "deterministic": True, "minibatch_size": 2}):
        found = trained(strategy, num_nodes, **options).ledger
        assert list(found) == [of_all(step, label, num_nodes) for step in steps]


def test_modules_communicate_in_their_order() -> None:
    strategy = CommunicateOptimizeStrategy([FedAvgStrategy(H=2), DiLoCoStrategy(H=3)])
    found = [(e.step, e.label) for e in trained(strategy, 2).ledger]
    assert found == [(2, "weights"), (3, "outer gradient"), (4, "weights"), (6, "weights"), (6, "outer gradient")]


@pytest.mark.parametrize(
    ("num_nodes", "island_size", "sizes", "wire", "total"),
    [
        # Groups of 2 send 2·(1/2)·S = S a node; two such groups 4·S together, the node alone sends nothing.
        (5, 2, (2, 2, 1), S, 4 * S),
        # The group of 3 is the busier: 2·(2/3)·S a node, 4·S together, and 2·S of the group of 2.
        (5, 3, (3, 2), pytest.approx(4 / 3 * S), pytest.approx(6 * S)),
        (3, 1, (1, 1, 1), 0, 0),
        (4, 4, (4,), 1.5 * S, 6 * S),
    ],
)
def test_the_events_of_islands(num_nodes: int, island_size: int, sizes: Any, wire: float, total: float) -> None:
    ledger = trained(FedAvgStrategy(H=2, island_size=island_size), num_nodes).ledger
    for step, event in zip((2, 4, 6), ledger, strict=True):
        assert event == Event(step, step, "weights", "all_reduce", "weights", S, event.groups)
        assert tuple(map(len, event.groups)) == sizes
        assert sorted(node for group in event.groups for node in group) == list(range(num_nodes))
        assert (event.wire_bytes, event.total_wire_bytes) == (wire, total)


def test_totals_are_those_of_the_events_and_of_the_history() -> None:
    trainer = trained(FedAvgStrategy(H=2, island_size=2), 3, max_steps=5)
    ledger, history = trainer.ledger, trainer.history
    assert ledger is history.ledger and ledger.num_nodes == 3 and ledger.steps == 5
    assert ledger.payload_bytes == 2 * S == history["payload_bytes"][-1]
    assert ledger.wire_bytes == 2 * S == history["wire_bytes"][-1]
    alone = [sum([k] in map(list, e.groups) for e in ledger) for k in range(3)]
    assert ledger.node_wire_bytes.tolist() == [S * (2 - own) for own in alone]
    assert history["payload_bytes"].tolist() == [0, 0, S, S, 2 * S, 2 * S]
    assert ledger.by_label() == {"weights": 2 * S}
    assert repr(ledger) == "Ledger(2 events, payload 0.002 MB a node, wire 0.002 MB a node)"
    assert ledger[0].step == 2 and ledger[-1].step == 4 and len(ledger[:]) == len(ledger) == 2
    frame = ledger.to_pandas()
    assert list(frame.columns) == [*Event._fields, "wire_bytes", "total_wire_bytes", "server_wire_bytes"]
    assert frame["wire_bytes"].tolist() == [S, S] and frame["step"].tolist() == [2, 4]


# Custom strategies


class Custom(Strategy):
    """Every collective there is, on the parameters, and on something of its own."""

    def step(self) -> None:
        first = next(iter(self.model.parameters()))  # (K, 16, 12)
        all_reduce(first.grad, "mean", label="first layer")
        values = torch.arange(self.num_nodes * 10, dtype=torch.float64).view(self.num_nodes, 10)
        broadcast(values, src=1)
        self.broadcasted = values
        half = values.to(torch.float16)
        self.gathered = all_gather(None, half, label="half")
        self.optim.step()
        self.into = [torch.empty_like(half) for _ in range(self.num_nodes)]
        assert all_gather(self.into, half) is self.into
        super().step()


def test_a_custom_strategy_is_billed() -> None:
    trainer = trained(Custom(), 3, max_steps=2)
    layer = 16 * 12 * 4
    for step in (1, 2):
        assert [e for e in trainer.ledger if e.step == step] == [
            Event(step, step, "gradients", "all_reduce", "first layer", layer, (range(3),)),
            Event(step, step, "gradients", "broadcast", "broadcast", 80, ((1, 2, 0),)),
            Event(step, step, "gradients", "all_gather", "half", 20, (range(3),)),
            Event(step, step, "weights", "all_gather", "all_gather", 20, (range(3),)),
        ]
    strategy = trainer.strategy
    assert isinstance(strategy, Custom)
    source = torch.arange(10.0, 20.0, dtype=torch.float64)
    assert torch.equal(strategy.broadcasted, source.expand(3, 10))
    # Position j holds what node j sent, on every node: here all sent the broadcast row.
    for gathered in (strategy.gathered, strategy.into):
        assert len(gathered) == 3 and all(torch.equal(g, source.half().expand(3, 10)) for g in gathered)


def test_gathering_keeps_the_order_of_the_ranks() -> None:
    class Gather(Strategy):
        def step(self) -> None:
            own = torch.arange(self.num_nodes)[:, None]  # node k sends k
            gathered = all_gather(None, own)
            assert [g.flatten().tolist() for g in gathered] == [[j] * self.num_nodes for j in range(self.num_nodes)]
            with refused(ValueError, "one tensor for each of 4 nodes", 2):
                all_gather([own, own], own)
            for op, expected in (("sum", 6), ("max", 3), ("min", 0)):
                reduced = own.clone()
                all_reduce(reduced, op)
                assert reduced.flatten().tolist() == [expected] * 4
            with refused(ValueError, "all_reduce()", "stacked tensor"):
                all_reduce(torch.tensor(1.0))
            super().step()

    trained(Gather(), 4, max_steps=1)


@pytest.mark.parametrize(
    "call", [all_reduce, broadcast, lambda t: all_gather(None, t)], ids=["reduce", "cast", "gather"]
)
def test_communicating_outside_of_a_step(call: Callable[[Any], Any]) -> None:
    with refused(RuntimeError, "call it in a strategy's step()"):
        call(torch.ones(2, 3))


# The collectives alone


@st.composite
def events(draw: st.DrawFn, server: bool, num_nodes: int = 7) -> Event:
    collectives = [
        "all_reduce",
        "merge",
        "all_gather",
        "all_to_all",
        "reduce_scatter",
        "broadcast",
        "send",
        "push",
        "pull",
    ]
    collective = draw(st.sampled_from(collectives))
    order = draw(st.permutations(range(num_nodes)))
    groups: tuple[Sequence[int], ...] = ((*order[:3],), (*order[3:5],), (*order[5:],))[: draw(st.integers(0, 3))]
    if collective == "send":
        groups = tuple(itertools.pairwise(order))[: draw(st.integers(0, 3))]
    elif draw(st.booleans()):
        groups = (range(num_nodes),)
    step = draw(st.integers(1, 9))
    payload = draw(st.sampled_from([0, 0.5, 3, 4096]))
    moment, label = draw(st.sampled_from(["gradients", "weights"])), draw(st.sampled_from(["a", "b"]))
    return Event(step, step + draw(st.integers(0, 2)), moment, collective, label, payload, groups, server=server)


@given(st.data(), st.booleans())
def test_the_totals_are_sums_over_nodes_and_events(data: st.DataObject, of_clients: bool) -> None:
    ledger, recorded = Ledger(7, of_clients), data.draw(st.lists(events(of_clients), max_size=6))
    payload, wire, by_server = np.zeros(7), np.zeros(7), 0.0
    for event in recorded:
        ledger.record(event)
        for group in event.groups:
            n, S = len(group), event.payload_bytes
            if event.collective == "pull" or of_clients:
                back = {"all_reduce": n, "merge": n, "all_gather": n * (n - 1), "reduce_scatter": 1, "pull": n}
                by_server += S * (back | {"all_to_all": n - 1, "broadcast": n - 1}).get(event.collective, 0)
            for place, node in enumerate(group):
                first, last = place == 0, place == n - 1
                payload[node] += {"broadcast": first, "send": first, "pull": False}.get(event.collective, True) * S
                sent = {
                    "all_reduce": 2 * (n - 1) / n,
                    "merge": n - 1,
                    "all_gather": n - 1,
                    "reduce_scatter": (n - 1) / n,
                    "all_to_all": (n - 1) / n,
                    "broadcast": first if of_clients else not last,  # to the server, or passed on along a chain
                    "send": first,
                    "push": 1,
                    "pull": 0,  # the server transmits
                }
                if of_clients:  # a client sends what it hands in to the server, once
                    sent |= dict.fromkeys(("all_reduce", "merge", "all_gather", "reduce_scatter"), 1)
                wire[node] += S * sent[event.collective]
    assert ledger.node_payload_bytes == pytest.approx(payload) and ledger.node_wire_bytes == pytest.approx(wire)
    assert (ledger.payload_bytes, ledger.wire_bytes) == pytest.approx((payload.max(), wire.max()))
    assert ledger.total_wire_bytes == pytest.approx(wire.sum())
    assert ledger.server_wire_bytes == pytest.approx(by_server)
    read = Ledger.from_plain(json.loads(json.dumps(ledger.as_plain())), 7, of_clients)
    assert list(read) == list(ledger) and read.wire_bytes == ledger.wire_bytes
    assert [list(map(type, event)) for event in read] == [list(map(type, event)) for event in ledger]


def test_calls_that_join_the_message_before() -> None:
    ledger, rows = Ledger(3), torch.ones(3, 2)
    collectives = StackedCollectives(ledger)
    with collectives.joined():
        collectives.all_reduce(rows, "sum", label="nothing before")
        collectives.all_reduce(rows, "sum", label="joined")
        collectives.all_gather(rows, label="another collective")
        collectives.all_reduce(rows, "sum", among=[0, 1], label="of other nodes")
    collectives.all_reduce(rows, "sum", among=[0, 1], label="outside")
    with collectives.joined():
        collectives.all_reduce(rows, "sum", among=[0, 1], label="joined")
        collectives.start("all_reduce", rows, "sum", among=[0, 1], delay=1, label="due later")
        collectives.position.step = 1
        collectives.all_reduce(rows, "sum", among=[0, 1], label="at another step")
    assert [(event.label, event.joined) for event in ledger if event.joined] == [("joined", True)] * 2
    read = Ledger.from_plain(json.loads(json.dumps(ledger.as_plain())), 3)
    assert list(read) == list(ledger)
    assert ledger.by_label()["joined"] == 16 and ledger.total_wire_bytes == sum(e.total_wire_bytes for e in ledger)


def test_events_of_all_nodes_cost_nothing_for_each_node() -> None:
    """A thousand events of ten thousand nodes; every node's number written out would be 50 megabytes."""
    ledger = Ledger(10_000)
    everyone = pickle.loads(pickle.dumps(ledger.everyone))
    for step in range(1, 1001):
        ledger.record(Event(step, step, "gradients", "all_reduce", "gradients", 4, everyone))
    assert all(event.groups is ledger.everyone for event in ledger)
    assert len(json.dumps(ledger.as_plain())) < 25_000
    assert ledger.node_wire_bytes == pytest.approx(np.full(10_000, 1000 * 4 * 2 * 9999 / 10_000))


def test_what_traffic_refuses() -> None:
    with refused(ValueError, "collective", "'all_reduce'", "shout"):
        traffic("shout", 3)
    with refused(ValueError, "n must", ">= 1", 0):
        traffic("all_reduce", 0)


def test_unbilled_is_only_for_its_block() -> None:
    rows, collectives = torch.ones(3, 2), StackedCollectives(Ledger(3))
    with collectives.unbilled():
        with collectives.unbilled():
            collectives.all_reduce(rows, "mean")
        collectives.all_reduce(rows, "mean")
    with pytest.raises(KeyError), collectives.unbilled():
        raise KeyError
    assert len(collectives.ledger) == 0
    collectives.all_reduce(rows, "mean")
    assert len(collectives.ledger) == 1
