"""What is found in objects, and what is put back: memory that is shared stays shared, and what is apart stays apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vsim import CheckpointError
from vsim.checkpoint.restore import Restorer
from vsim.cluster.state import Shard, Snapshot, Stateful


def saved(**roots: Any) -> Shard:
    return Snapshot(roots, {}, {}).shard()


def put_back(shard: Shard, **live: Any) -> dict[str, Any]:
    restorer = Restorer([shard], None, 3, {}, {}, torch.device("cpu"))
    return {name: restorer.restore(name, value) for name, value in live.items()}


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        float("inf"),
        "text",
        (1, (2.5, None)),
        [1, [2, {"a": 3, (1, "b"): [4]}]],
        {1, 2, "c"},
        frozenset({3}),
        torch.Size([2, 3]),
        {0: {"nested": (1,)}},
    ],
    ids=lambda value: type(value).__name__,  # not repr: the order of a set is another in every process
)
def test_plain_values(value: Any) -> None:
    back = put_back(saved(x=value), x=None if not isinstance(value, torch.Size) else torch.Size([1]))["x"]
    assert back == value and type(back) is type(value)


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("there", [True, False])
def test_tensors_of_every_dtype_and_shape(dtype: torch.dtype, there: bool) -> None:
    for shape in ((), (0, 3), (4, 5)):
        value = torch.ones(shape, dtype=torch.float64).cumsum(-1).to(dtype) if shape else torch.tensor(1).to(dtype)
        value = value.mT if len(shape) == 2 else value
        live = torch.zeros(value.shape, dtype=dtype) if there else None
        back = put_back(saved(x=value), x=live)["x"]
        assert torch.equal(back, value) and back.dtype == dtype and (back is live) == there


def test_what_shared_memory_shares_it_again() -> None:
    base = torch.arange(12.0).view(3, 4)
    made = {"base": base, "row": base[1], "column": base[:, 2], "other": torch.ones(4), "same": base}
    # Whether they are all there, or made anew, or there but with memory of their own.
    for live in (
        {"base": (b := torch.zeros(3, 4)), "row": b[1], "column": b[:, 2], "other": torch.zeros(4), "same": b},
        dict.fromkeys(made),
        {"base": torch.zeros(3, 4), "row": torch.zeros(4), "column": torch.zeros(3), "other": None, "same": None},
    ):
        back = put_back(saved(x=made), x=dict(live))["x"]
        assert all(torch.equal(back[name], value) for name, value in made.items())
        assert back["same"] is back["base"]
        back["base"].mul_(2)
        assert torch.equal(back["row"], 2 * base[1]) and torch.equal(back["column"], 2 * base[:, 2])
        assert torch.equal(back["other"], torch.ones(4))


def test_what_was_apart_is_apart_again() -> None:
    first, second = torch.ones(3), torch.zeros(3)
    one = torch.full((3,), 7.0)
    back = put_back(saved(x=[first, second], y=[[1], [2]]), x=[one, one], y=[(shared := [0]), shared])
    assert [t.tolist() for t in back["x"]] == [[1.0] * 3, [0.0] * 3] and back["y"] == [[1], [2]]


def test_a_small_view_of_large_memory_is_saved_small() -> None:
    large = torch.arange(10_000.0)
    shard = saved(x=large[5000:5010], y=large[5020:5021])
    assert [t.numel() for t in shard.storages] == [21]
    assert put_back(shard, x=None, y=None)["y"].tolist() == [5020.0]


def test_references_and_cycles() -> None:
    node = SimpleNamespace(value=1.5, items=[1])
    node.itself, node.again = node, node.items
    live = SimpleNamespace(value=0.0, items=[], itself=None, again=None, gone=3)
    back = put_back(saved(x=node), x=live)["x"]
    assert back is live and back.itself is live and back.again is back.items == [1] and not hasattr(back, "gone")


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: int) -> None:
        self.a = a


class Module(Stateful):
    def __init__(self) -> None:
        self.inner, self.scale = nn.BatchNorm1d(2), Slotted(3)


def test_modules_and_slots() -> None:
    module = Module()
    module.inner(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    module.scale.a, module.scale.b = 5, torch.ones(2)
    fresh = Module()
    weight = fresh.inner.weight
    put_back(saved(x=module), x=fresh)
    assert fresh.inner.weight is weight and torch.equal(fresh.inner.running_mean, module.inner.running_mean)
    assert fresh.scale.a == 5 and torch.equal(fresh.scale.b, torch.ones(2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (iter([1]), r"x\.held is a list_iterator, whose state cannot be saved; hold tensors, numbers"),
        ((i for i in "ab"), r"x\.held is a generator, whose state cannot be saved"),
        (object(), r"x\.held is a object, whose state cannot be saved"),
        ({torch.ones(1): 1}, r"x\.held is a dict with the key tensor"),
        (np.array(["a"]), r"x\.held is an array of <U1"),
        (torch.eye(2).to_sparse(), r"x\.held is a tensor of layout torch\.sparse_coo"),
        (open(__file__), r"x\.held is a _io\.TextIOWrapper"),  # noqa: SIM115
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_cannot_be_saved(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        saved(x=SimpleNamespace(held=value))
    if hasattr(value, "close"):
        value.close()


def test_what_does_not_fit() -> None:
    with pytest.raises(
        CheckpointError, match=r"x was made during the run|x was a types.SimpleNamespace, and is a list"
    ):
        put_back(saved(x=SimpleNamespace(a=1)), x=[])
    with pytest.raises(CheckpointError, match=r"x was builtins\.max, and is a builtin_function_or_method here"):
        put_back(saved(x=max), x=min)
    with pytest.raises(CheckpointError, match="the checkpoint holds no y"):
        put_back(saved(x=1), y=1)
    sgd = torch.optim.SGD([torch.zeros(2)])
    with pytest.raises(CheckpointError, match="x had 1 parameters, and has 2 here"):
        put_back(saved(x=sgd), x=torch.optim.SGD([torch.zeros(2), torch.zeros(2)]))
    with pytest.raises(CheckpointError, match=r"x\.state\[0\]: the parameter had another shape or place, and is \[3\]"):
        put_back(saved(x=sgd), x=torch.optim.SGD([torch.zeros(3)]))


# Nodes together and apart --------------------------------------------------------------------------------------------


def narrowed(value: Any, live: Any, node: int = 1) -> Any:
    return Restorer([saved(x=value)], node, 3, {}, {}, torch.device("cpu")).restore("x", live)


def joined(values: list[Any], live: Any) -> Any:
    shards = [saved(x=value) for value in values]
    return Restorer(shards, None, 3, {}, {}, torch.device("cpu")).restore("x", live)


def rows(count: int = 3) -> Tensor:
    return torch.arange(2.0 * count).view(count, 2)


def test_a_node_takes_its_row() -> None:
    assert torch.equal(narrowed(rows(), torch.zeros(1, 2)), rows()[1:2])
    assert torch.equal(narrowed(rows(), torch.zeros(3, 2)), rows())  # shared, by its shape here
    assert torch.equal(narrowed(rows(4), None), rows(4))
    streams = [torch.Generator().manual_seed(i) for i in range(3)]
    (own,) = narrowed(streams, [torch.Generator()])
    assert own.initial_seed() == 1
    with pytest.raises(
        CheckpointError, match=r"x may be stacked, a row for every node, or be shared by all .* shared_sta"
    ):
        narrowed(rows(), None)
    with pytest.raises(CheckpointError, match=r"x has an entry for each of 3 nodes, or by chance as many"):
        narrowed([rows(), rows(), rows()], [rows()])


def test_rows_are_put_together() -> None:
    apart = list(rows().split(1))
    assert torch.equal(joined(apart, torch.zeros(3, 2)), rows())
    assert torch.equal(joined(apart, None), rows())  # they differ, so that they are the nodes' own
    assert torch.equal(joined([rows(4)] * 3, None), rows(4))
    streams = joined([[torch.Generator().manual_seed(i)] for i in range(3)], [torch.Generator() for _ in range(3)])
    assert [stream.initial_seed() for stream in streams] == [0, 1, 2]
    with pytest.raises(CheckpointError, match="x may be stacked"):
        joined([torch.ones(1, 2)] * 3, None)
    with pytest.raises(CheckpointError, match=r"x differs between the nodes' processes \(1, 1, 2\)"):
        joined([1, 1, 2], 0)
    with pytest.raises(CheckpointError, match="x differs between the nodes' processes"):
        joined([torch.ones(2), torch.ones(2), torch.zeros(2)], torch.zeros(2))


class Declared(Stateful):
    shared_state = ("log",)

    def __init__(self, log: list[Tensor]) -> None:
        self.log = log


def test_what_is_declared_shared_is_taken_as_it_is() -> None:
    assert [t.tolist() for t in narrowed(Declared([rows()]), Declared([])).log] == [rows().tolist()]
    assert [t.tolist() for t in joined([Declared([rows(1)])] * 3, Declared([])).log] == [rows(1).tolist()]


def test_views_of_a_shard_in_memory_are_where_they_were() -> None:
    memory = torch.arange(10.0)
    shard = saved(x=memory[4:6], y=memory[7:9])
    assert shard.tensor(shard.tree["y"]).tolist() == [7.0, 8.0]
    assert put_back(shard, x=None, y=None)["y"].tolist() == [7.0, 8.0]
