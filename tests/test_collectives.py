"""The collectives by themselves: what they return, whom they bill, and when their results are taken."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked_processes
import pytest
import torch
import torch.distributed as dist
from errors import refused, warned
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_by_hand import apart
from torch import Tensor

from vsim import Ledger
from vsim.cluster.collectives import Collectives
from vsim.cluster.stacked import StackedCollectives
from vsim.engine.machine import devices_of_nodes
from vsim.processes import distributed
from vsim.processes.distributed import CollectiveFailure, ProcessCollectives, completing, open_group
from vsim.processes.options import backend_for


def test_what_a_collective_returns() -> None:
    rows = torch.tensor([[1.0, 5.0], [2.0, 1.0], [6.0, 0.0]])
    collectives = StackedCollectives(Ledger(3))
    for op, reduced in (("mean", [3, 2]), ("sum", [9, 6]), ("max", [6, 5]), ("min", [1, 0])):
        assert collectives.all_reduce(rows, op).tolist() == reduced
    # Weights 1, 1 and 2: (1 + 2 + 12)/4 and (5 + 1 + 0)/4.
    assert collectives.all_reduce(rows, "mean", weights=torch.tensor([1, 1, 2])).tolist() == [3.75, 1.5]
    grouped = collectives.all_reduce(rows, "mean", among=[[2, 0], [1]], weights=torch.tensor([1, 1, 2]))
    assert grouped.tolist() == [pytest.approx([13 / 3, 5 / 3]), [2.0, 1.0], pytest.approx([13 / 3, 5 / 3])]
    largest = collectives.merge(rows, lambda rows, weights: rows.amax(0))
    assert largest.tolist() == [6.0, 5.0]
    chosen = collectives.merge(rows, lambda rows, w: rows[w.argmax()], among=[[2, 0], [1]], weights=torch.arange(3))
    assert chosen.tolist() == [[6.0, 0.0], [2.0, 1.0], [6.0, 0.0]]
    assert [(e.collective, e.label) for e in collectives.ledger][-2:] == [("merge", "merge")] * 2
    assert collectives.broadcast(rows, 1).tolist() == [2.0, 1.0]
    assert torch.equal(collectives.all_gather(rows), rows)
    parts = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])  # of row i for column j
    assert collectives.all_to_all(parts).tolist() == [[11, 21, 31], [12, 22, 32], [13, 23, 33]]


def test_nodes_are_named_by_their_numbers() -> None:
    """Of six nodes 1, 3 and 4 are there, whose rows are 10, 30 and 40."""
    collectives = StackedCollectives(Ledger(6), (1, 3, 4))
    rows = torch.tensor([[10.0], [30.0], [40.0]])
    assert collectives.all_reduce(rows, "mean", among=[4, 1]).flatten().tolist() == [25, 30, 25]
    assert collectives.all_reduce(rows, "sum", among=[[1, 3], [4]]).flatten().tolist() == [40, 40, 40]
    assert collectives.all_gather(rows, among=[4, 3]).flatten(1).tolist() == [[10, 10], [40, 30], [40, 30]]
    assert collectives.broadcast(rows).tolist() == [10] and collectives.broadcast(rows, 4).tolist() == [40]
    assert collectives.broadcast(rows, among=[3, 4]).flatten().tolist() == [10, 30, 30]
    assert collectives.send(rows, [(4, 1), (1, 3)]).flatten().tolist() == [40, 10, 40]
    assert collectives.push(rows, among=[4]).tolist() == [[40]]
    assert collectives.pull(torch.zeros(1), rows, among=[3]).flatten().tolist() == [10, 0, 40]
    assert [event.groups for event in collectives.ledger][:2] == [((4, 1),), ((1, 3), (4,))]
    for call in (
        lambda: collectives.all_reduce(rows, "mean", among=[0, 1]),
        lambda: collectives.broadcast(rows, 0),
        lambda: collectives.send(rows, [(1, 2)]),
    ):
        with refused(ValueError, [1, 3, 4]):
            call()


def test_what_a_collective_refuses() -> None:
    rows, collectives = torch.ones(3, 2), StackedCollectives(Ledger(3))
    c: Any = collectives
    wrong: list[tuple[Callable[[], Any], tuple[Any, ...]]] = [
        (lambda: c.all_reduce(rows, "avg"), (ValueError, "op", "'mean', 'sum', 'max', 'min'", "avg")),
        (lambda: c.all_reduce(rows, "sum", weights=torch.ones(3)), (ValueError, "weights", "op='mean'", "sum")),
        (lambda: c.broadcast(rows, 3), (ValueError, "src", [0, 1, 2], 3)),
        (lambda: c.broadcast(rows, 0, among=[1, 2]), (ValueError, "src", [1, 2], 0)),
        (lambda: c.all_to_all(torch.ones(3, 3), among=[0, 2]), (ValueError, "all_to_all", "2 nodes", (3, 3))),
        (lambda: c.all_gather(rows, among=[[0], [1, 2]]), (ValueError, "among", [[0], [1, 2]])),
        (lambda: c.send(rows, [(0, 1, 2)]), (ValueError, "(source, destination)", [(0, 1, 2)])),
        (lambda: c.all_reduce(rows, "mean", summable=True), (TypeError, "summable=True", "payload_bytes=")),
        (lambda: c.start("reduce", rows), (ValueError, "collective", "'all_reduce'", "reduce")),
        (lambda: c.start("push", rows, delay=-1), (ValueError, "delay", ">= 0", -1)),
    ]
    for among in ([[0, 1], [1, 2]], [0, 0], [0, 3], [-1], [0, [1]], [[0.5]], torch.tensor([True, False, True])):
        wrong.append((lambda among=among: c.all_reduce(rows, "mean", among=among), (ValueError, "from 0 to 2")))
    for pairs in ([(0, 1), (0, 2)], [(0, 2), (1, 2)], [(0, 3)], [(0.5, 1)]):
        wrong.append((lambda pairs=pairs: c.send(rows, pairs), (ValueError, "from 0 to 2")))
    for name, more in [("all_reduce", ["sum"]), ("all_gather", []), ("broadcast", [0]), ("push", []), ("send", [[]])]:
        call = functools.partial(getattr(c, name), torch.ones(7), *more)  # a vector of one node, for instance
        wrong.append((call, (ValueError, name, "3 nodes", (7,))))
    for payload in (-1, float("nan"), float("inf")):
        call = functools.partial(c.all_gather, rows, payload_bytes=payload)
        wrong.append((call, (ValueError, "payload_bytes", ">= 0", payload)))
    for weights in (None, torch.ones(3)):
        call = functools.partial(c.all_reduce, rows.long(), "mean", weights=weights)
        wrong.append((call, (TypeError, "op='mean'", "floating-point", "torch.int64")))
    for length in (2, 4):
        call = functools.partial(c.all_reduce, rows, "mean", weights=torch.ones(length))
        wrong.append((call, (ValueError, "weights", (3,), (length,))))
    for none in ([0.0, 0.0, 1.0], [1.0, float("nan"), 1.0]):
        call = functools.partial(c.merge, rows, weighed_median, among=[[0, 1], [2]], weights=torch.tensor(none))
        wrong.append((call, (ValueError, "weights", "finite sum")))
    for call, parts in wrong:
        with refused(*parts):
            call()
    assert len(collectives.ledger) == 0


def test_a_result_has_memory_of_its_own() -> None:
    """As in processes: what is done to it changes no node's row, and what is done to the rows does not change it."""
    before = torch.tensor([[1.0, 5.0], [2.0, 1.0], [6.0, 0.0]])
    server = torch.tensor([7.0, 7.0])

    def all_of(rows: Tensor) -> list[Tensor]:
        collectives = StackedCollectives(Ledger(3))
        return [
            *(collectives.all_reduce(rows, op) for op in ("mean", "sum", "max", "min")),
            collectives.all_reduce(rows, "mean", among=[0]),
            collectives.all_gather(rows),
            collectives.all_gather(rows, among=[0]),
            collectives.broadcast(rows, 1),
            collectives.broadcast(rows, 1, among=[1]),
            collectives.push(rows),
            collectives.push(rows, among=[2]),
            collectives.pull(server),
            collectives.pull(server, rows, among=[2]),
            collectives.send(rows, []),
            collectives.merge(rows, lambda own, _: own.mul_(2)[0]),
            collectives.all_to_all(rows[:, :, None].expand(-1, -1, 3).transpose(1, 2)),
        ]

    rows = before.clone()
    expected, results = all_of(before.clone()), all_of(rows)
    rows.zero_()
    assert all(map(torch.equal, expected, results))
    rows.copy_(before)
    for result in results:
        result.zero_()
    assert torch.equal(rows, before)
    assert server.tolist() == [7.0, 7.0]


def test_whole_numbers_and_bools_are_counted() -> None:
    collectives = StackedCollectives(Ledger(3))
    votes = torch.tensor([[True, True], [True, False], [True, False]])
    for kind in (torch.bool, torch.uint8, torch.int32, torch.int64):
        assert collectives.all_reduce(votes.to(kind), "sum").tolist() == [3, 1]
        # Nodes 0 and 1 count theirs; node 2 keeps its row.
        assert collectives.all_reduce(votes.to(kind), "sum", among=[0, 1]).tolist() == [[2, 1], [2, 1], [1, 0]]
        assert collectives.all_reduce(votes.to(kind), "max", among=[2, 1])[2].tolist() == [1, 0]
    chosen = collectives.merge(votes.int(), lambda own, w: own[w.argmax()], weights=torch.tensor([0.2, 0.7, 0.1]))
    assert chosen.tolist() == [1, 0]
    assert collectives.ledger[0].payload_bytes == 2  # a byte a bool


def rows_of(num_nodes: int, *shape: int) -> Tensor:
    """Stacked (K, …): the digit k everywhere in row k."""
    return torch.arange(num_nodes, dtype=torch.float32).view(-1, *[1] * len(shape)).expand(-1, *shape).clone()


def test_who_is_not_among_keeps_its_row_and_pays_nothing() -> None:
    rows, collectives = rows_of(4, 2), StackedCollectives(Ledger(4))  # 8 bytes a row
    assert collectives.all_reduce(rows, "mean", among=torch.tensor([3, 0]))[:, 0].tolist() == [1.5, 1, 2, 1.5]
    assert collectives.all_reduce(rows, "sum", among=[[0, 1], [3]])[:, 0].tolist() == [1, 1, 2, 3]
    assert collectives.all_gather(rows, among=[2, 1])[..., 0].tolist() == [[0, 0], [2, 1], [2, 1], [3, 3]]
    two = StackedCollectives(Ledger(4)).all_to_all(torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), among=[3, 1])
    assert two.tolist() == [[1, 2], [8, 4], [5, 6], [7, 3]]
    assert collectives.broadcast(rows, 3, among=[0, 2, 3])[:, 0].tolist() == [3, 1, 3, 3]
    assert collectives.all_reduce(rows, "mean", among=[]).equal(rows) and len(collectives.ledger) == 4
    assert [event.groups for event in collectives.ledger] == [((3, 0),), ((0, 1), (3,)), ((2, 1),), ((3, 0, 2),)]
    # Pairs reduce with 8 bytes each; a gathering node sends its row to the other; 3 → 0 → 2 passes on.
    assert collectives.ledger.node_wire_bytes.tolist() == [8 + 8 + 8, 8 + 8, 8, 8 + 8]
    assert collectives.ledger.node_payload_bytes.tolist() == [16, 16, 8, 24]


def test_from_node_to_node_and_to_a_server() -> None:
    rows, collectives = rows_of(4, 2), StackedCollectives(Ledger(4))
    assert collectives.send(rows, [(0, 1), (1, 0), (3, 2)])[:, 0].tolist() == [1, 0, 3, 3]
    assert collectives.push(rows, among=[3, 1], payload_bytes=5)[:, 0].tolist() == [3, 1]
    assert collectives.push(rows).equal(rows)
    pulled = collectives.pull(torch.tensor([7.0, 7.0]), rows, among=[2, 1])
    assert pulled[:, 0].tolist() == [0, 7, 7, 3]
    assert [event.collective for event in collectives.ledger] == ["send", "push", "push", "pull"]
    assert collectives.ledger[0].groups == ((0, 1), (1, 0), (3, 2))
    assert collectives.ledger.node_wire_bytes.tolist() == [8 + 8, 8 + 5 + 8, 8, 8 + 5 + 8]
    assert collectives.ledger.server_wire_bytes == 16 and collectives.ledger.total_wire_bytes == 3 * 8 + 2 * 5 + 4 * 8
    assert collectives.send(rows, [(1, 1), (0, 0)]).equal(rows) and len(collectives.ledger) == 4  # nothing travels


def weighed_median(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows.median(0).values * (1 if weights is None else weights.amax())


@st.composite
def calls(draw: st.DrawFn, num_nodes: int) -> Callable[[Collectives, Tensor], Tensor]:
    """A call of any collective by any nodes, of the rows that a process holds."""
    order = draw(st.permutations(range(num_nodes)))
    among = draw(st.sampled_from([None, order[: draw(st.integers(0, num_nodes))]]))
    n = num_nodes if among is None else len(among)
    groups = draw(st.sampled_from([among, [order[:1], order[1:]]]))
    pairs = list(zip(order, [*order[1:], order[0]], strict=True))[: draw(st.integers(0, num_nodes))]
    op = draw(st.sampled_from(["mean", "sum", "max", "min"]))
    weights = torch.arange(1, num_nodes + 1) if op == "mean" and draw(st.booleans()) else None
    return draw(
        st.sampled_from(
            [
                lambda c, rows: c.all_reduce(rows, op, among=groups, weights=weights),
                lambda c, rows: c.merge(rows, weighed_median, among=groups, weights=weights),
                lambda c, rows: c.all_gather(rows, among=among),
                lambda c, rows: c.all_to_all(rows[:, None] + torch.arange(n)[:, None], among=among),
                lambda c, rows: c.broadcast(rows, order[0], among=None if among is None else among or order[:1]),
                lambda c, rows: c.send(rows, pairs),
                lambda c, rows: c.push(rows, among=among),
                lambda c, rows: c.pull(torch.ones(3), rows, among=among),
            ]
        )
    )


@settings(max_examples=40)
@given(st.data(), st.integers(1, 5), st.integers(0, 2**31))
def test_nodes_apart_get_the_bits_of_nodes_together(data: st.DataObject, num_nodes: int, seed: int) -> None:
    call = data.draw(calls(num_nodes))
    rows = torch.randn(num_nodes, 3, generator=torch.Generator().manual_seed(seed))
    before, together = rows.clone(), StackedCollectives(Ledger(num_nodes))
    expected = call(together, rows)
    ledger = together.ledger
    assert ledger.node_wire_bytes.sum() == pytest.approx(ledger.total_wire_bytes) and rows.equal(before)
    pending = apart(num_nodes, lambda c: (call(c, rows[c.nodes.start : c.nodes.stop]), list(c.ledger)))
    for node, (result, events) in enumerate(pending):
        assert events == list(ledger)
        is_stacked = expected.shape[:1] == (num_nodes,) and result.shape[:1] == (1,) and num_nodes > 1
        assert torch.equal(result, expected[node : node + 1] if is_stacked else expected)


def test_a_result_is_of_the_values_of_sending_and_taken_when_due() -> None:
    rows, collectives = rows_of(3, 2), StackedCollectives(Ledger(3))
    collectives.position.step = 4
    late = [
        collectives.start("all_reduce", rows, "mean", delay=2, label="late"),
        collectives.start("all_gather", stacked=rows, delay=2),
        collectives.start("send", rows, [(0, 1)], delay=2),
        collectives.start("broadcast", rows, 2, delay=2),
    ]
    at_once = collectives.start("push", rows)
    assert [(e.step, e.due) for e in collectives.ledger] == [(4, 6)] * 4 + [(4, 4)]
    rows.zero_()
    assert at_once.result()[:, 0].tolist() == [0, 1, 2] and at_once.due == 4
    for step in (5, 7):
        collectives.position.step = step
        with refused(RuntimeError, 6, step, "delay"):
            late[0].result()
    collectives.position.step = 6
    expected = [[1, 1], [0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 2, 2], [2, 2]]
    assert [pending.result().flatten().tolist() for pending in late] == expected
    collectives.all_reduce(rows, "mean")
    assert collectives.ledger[-1].due == 6 and len(collectives.ledger) == 6


# In processes ---------------------------------------------------------------------------------------------------------


def _rank(rank: int, folder: Path) -> None:
    """Start collectives before the other process has; that one waits until this process has gone on."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    collectives, row = ProcessCollectives(Ledger(2), True), torch.full((1, 2), float(rank + 1))
    if rank == 1:
        store.wait(["gone on"], timedelta(seconds=60))
    calls: list[tuple[Any, ...]] = [("all_reduce", "mean"), ("all_gather",), ("all_to_all",), ("broadcast", 1)]
    calls += [("send", [(1, 0), (0, 1)]), ("push",), ("send", [(1, 0)])]
    pending = [collectives.start(name, row, *arguments) for name, *arguments in calls]
    row.zero_()
    if rank == 0:
        store.set("gone on", "")
    results = [one.result() for one in pending]
    for kind in (torch.float16, torch.float32, torch.int64):  # nothing to send, of whatever kind
        nothing = torch.empty(1, 2, 0, dtype=kind)
        empty = [getattr(collectives, name)(nothing, *arguments) for name, *arguments in calls if arguments != ["mean"]]
        empty += [collectives.all_reduce(nothing, "sum"), collectives.all_reduce(nothing, "max", among=[0, 1])]
        assert all(result.dtype == kind and result.numel() == 0 for result in empty)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_processes_go_on_while_what_they_sent_is_on_its_way(tmp_path: Path) -> None:
    ranks = [forked_processes.started(_rank, rank, tmp_path) for rank in range(2)]
    assert [forked_processes.ended(process) for process in ranks] == [0, 0]
    for rank in range(2):
        results = [result.tolist() for result in torch.load(tmp_path / f"{rank}.pt")]
        ones, twos = [1.0, 1.0], [2.0, 2.0]
        assert results == [[1.5, 1.5], [ones, twos], [[1.0, 2.0]], twos, [[twos, ones][rank]], [ones, twos], [twos]]


def _every_collective(collectives: Collectives, rows: torch.Tensor) -> list[torch.Tensor]:
    """What the nodes held here get, as stacked rows in their order, from each collective."""
    held, n = len(rows), collectives.num_nodes
    parts = rows[:, :, None].expand(-1, -1, n).transpose(1, 2).contiguous()  # (R, K, 3)
    shared = [
        *[collectives.all_reduce(rows, op) for op in ("mean", "sum", "max", "min")],
        collectives.all_reduce(rows, "mean", weights=torch.arange(1.0, n + 1)),
        collectives.all_gather(rows),
        *[collectives.broadcast(rows, src) for src in (1, 4)],
        *[collectives.push(rows, among=among) for among in (None, [4, 0])],
    ]
    stacked = [
        collectives.all_reduce(rows, "mean", among=[[0, 3], [4, 1, 2]]),
        collectives.all_gather(rows, among=[4, 0, 1]),
        collectives.broadcast(rows, 3, among=[3, 0, 2]),
        collectives.all_to_all(parts),
        collectives.all_to_all(parts[:, :3].contiguous(), among=[0, 2, 4]),
        collectives.send(rows, [(0, 1), (1, 4), (4, 0), (2, 3)]),
        collectives.pull(rows[0] * 0, rows, among=[1, 2]),
    ]
    return [t.expand(held, *t.shape) for t in shared] + stacked


class _Nccl:
    """torch.distributed as a group of nccl would have it, on gloo: what nccl refuses is an error."""

    def __init__(self) -> None:
        self.connected = False
        self.gathered: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend(self) -> str:
        return "nccl"

    def all_reduce(self, *arguments: Any, **options: Any) -> Any:
        self.connected = True
        return dist.all_reduce(*arguments, **options)

    def batch_isend_irecv(self, messages: Any) -> Any:
        assert self.connected, "messages before the first collective of all ranks"
        return dist.batch_isend_irecv(messages)

    def all_gather_into_tensor(self, rows: Tensor, own: Tensor, async_op: bool) -> Any:
        self.gathered.append("into a tensor")
        return dist.all_gather_into_tensor(rows, own, async_op=async_op)

    def all_gather(self, parts: list[Tensor], own: Tensor, async_op: bool) -> Any:
        """gloo takes parts of one size only; nccl broadcasts parts of several sizes, as here."""
        self.gathered.append("parts")
        parts[dist.get_rank()].copy_(own)
        works: list[Any] = [dist.broadcast(part, src, async_op=True) for src, part in enumerate(parts)]
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])


def _share(rank: int, folder: Path, exact: bool, backend: str) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    nccl = _Nccl()
    if backend == "nccl":
        distributed.dist, distributed._DEVICES = nccl, {}  # type: ignore[assignment]
    rows = torch.load(folder / "rows.pt")
    collectives = ProcessCollectives(Ledger(len(rows)), exact)
    results = _every_collective(collectives, rows[collectives.nodes.start : collectives.nodes.stop])
    events = [str(e) for e in collectives.ledger]
    torch.save((list(collectives.nodes), results, events, set(nccl.gathered)), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "num_nodes", "exact"),
    [("gloo", 5, True), ("gloo", 5, False), *[pytest.param("nccl", n, True, marks=pytest.mark.slow) for n in (5, 6)]],
)
def test_a_process_may_hold_several_nodes(backend: str, num_nodes: int, exact: bool, tmp_path: Path) -> None:
    """Two and three of five, or three and three of six: the rows of the simulator's results, and its events.

    With nccl, an all-gather is one collective; with gloo, the ranks take turns.
    """
    rows = torch.randn(num_nodes, 3, generator=torch.Generator().manual_seed(0))
    torch.save(rows, tmp_path / "rows.pt")
    ranks = [forked_processes.started(_share, rank, tmp_path, exact, backend) for rank in range(2)]
    assert [forked_processes.ended(process) for process in ranks] == [0, 0]
    simulated = StackedCollectives(Ledger(num_nodes))
    expected = _every_collective(simulated, rows)
    half = num_nodes // 2
    for rank, own in enumerate([[*range(half)], [*range(half, num_nodes)]]):
        nodes, results, events, gathered = torch.load(tmp_path / f"{rank}.pt")
        assert nodes == own and events == [str(e) for e in simulated.ledger]
        assert gathered == (set() if backend == "gloo" else {"parts"} if num_nodes == 5 else {"into a tensor"})
        for result, whole in zip(results, expected, strict=True):
            tolerance = {"rtol": 0.0, "atol": 0.0 if exact else 1e-6}
            torch.testing.assert_close(result, whole[own], **tolerance)


def test_an_error_of_nccl_is_raised_with_its_own_reason() -> None:
    text = """NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3699, invalid usage, NCCL version 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"""
    message = r"the broadcast did not complete: NCCL error in.*; Duplicate GPU detected"
    with pytest.raises(CollectiveFailure, match=message), completing("the broadcast"):
        raise dist.DistBackendError(text)


def test_a_group_of_nccl_raises_an_error_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "TORCH_NCCL_BLOCKING_WAIT", []
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(name)))
    for backend in ("nccl", "gloo"):
        open_group(backend, dist.HashStore(), 0, 1, timedelta(seconds=1))
    assert seen == ["1", None] and name not in os.environ


def test_one_gpu_for_two_processes_is_for_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for devices, backend in [
        (["cuda:0", "cuda:0"], "gloo"),
        (["cuda", "cuda:0"], "gloo"),
        (["cuda"], "gloo"),
        (["cuda", "cuda:1"], "nccl"),
        (["cpu", "cuda:0"], "gloo"),
    ]:
        assert backend_for(devices_of_nodes(devices, None, 2), 2) == backend
    assert devices_of_nodes(None, "cuda", 2) == [torch.device("cuda", 0)]


def test_an_all_reduce_of_fewer_bytes_than_its_tensor_gets_one_warning_a_label() -> None:
    collectives: Collectives = StackedCollectives(Ledger(3))
    rows = torch.ones(3, 2, 4)
    for options in ({"payload_bytes": 31, "summable": True}, {"payload_bytes": 32}, {"payload_bytes": 40}, {}):
        collectives.all_reduce(rows, "mean", label="codes", **options)  # type: ignore[arg-type]
    collectives.all_gather(rows, label="codes", payload_bytes=31)
    with collectives.unbilled():
        collectives.all_reduce(rows, "mean", label="codes", payload_bytes=31)
    with warned("codes", "payload_bytes=31", 32):
        collectives.start("all_reduce", rows, "max", label="codes", payload_bytes=31, delay=2)
    collectives.all_reduce(rows, "mean", label="codes", payload_bytes=31)
    collectives.attend([0, 2])
    collectives.all_reduce(rows[:2], "mean", label="codes", payload_bytes=31)
    with warned("signs"):
        collectives.all_reduce(rows[:2], "mean", label="signs", payload_bytes=1)
    with pytest.warns(UserWarning, match="codes") as of_all:  # nodes apart: the first says it for all
        apart(3, lambda own: own.all_reduce(rows[:1], "mean", label="codes", payload_bytes=31))
    assert len(of_all) == 1
