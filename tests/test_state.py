"""What is declared and what is found in objects, and what is put back."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vsim import CheckpointError
from vsim.checkpoint.files import packed, unpacked
from vsim.checkpoint.tree import Restorer, Snapshot, cut, merged
from vsim.cluster.state import Stateful, of_clients


def saved(num_nodes: int = 3, **roots: Any) -> dict[str, Any]:
    """The tree as it comes out of a file."""
    tree = Snapshot({name: (value, None) for name, value in roots.items()}, {}, num_nodes).tree
    return unpacked(*packed(tree))  # type: ignore[no-any-return]


def put_back(tree: dict[str, Any], **live: Any) -> dict[str, Any]:
    restorer = Restorer({}, moved=False)
    return {name: restorer.root(tree[name], value, name, None) for name, value in live.items()}


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


def test_what_shares_memory_after_the_setup_does_so_again() -> None:
    base = torch.arange(12.0).view(3, 4)
    made = {"base": base, "row": base[0], "column": base[:, 2], "other": torch.ones(4), "same": base}
    live = {"base": (b := torch.zeros(3, 4)), "row": b[0], "column": b[:, 2], "other": torch.zeros(4), "same": b}
    for there in (live, dict.fromkeys(made)):
        back = put_back(saved(x=made), x=there)["x"]
        assert all(torch.equal(back[name], value) for name, value in made.items())
        assert back["same"] is back["base"]
        if there is live:
            assert back["base"] is b
            back["base"].mul_(2)
            assert torch.equal(back["row"], 2 * base[0]) and torch.equal(back["column"], 2 * base[:, 2])


def test_what_was_apart_is_apart_again() -> None:
    first, second = torch.ones(3), torch.zeros(3)
    one = torch.full((3,), 7.0)
    back = put_back(saved(x=[first, second], y=[[1], [2]]), x=[one, one], y=[(shared := [0]), shared])
    assert [t.tolist() for t in back["x"]] == [[1.0] * 3, [0.0] * 3] and back["y"] == [[1], [2]]


def test_a_tensor_is_written_in_place_and_a_view_of_a_larger_one_is_saved_alone() -> None:
    large, here = torch.arange(100.0).view(10, 10), torch.zeros(10, 10)
    shard = saved(x=large[4:6])
    assert [part.shape for part in shard["x"]["value"]] == [(2, 10)]
    rows = here[7:9]
    assert put_back(shard, x=rows)["x"] is rows
    assert torch.equal(here[7:9], large[4:6]) and not here[:7].any() and not here[9:].any()
    expanded = torch.zeros(10).expand(2, 10)  # cannot be written to
    assert torch.equal(put_back(shard, x=expanded)["x"], large[4:6])


def test_references_and_cycles() -> None:
    node = SimpleNamespace(value=1.5, items=[1])
    node.itself, node.again = node, node.items
    live = SimpleNamespace(value=0.0, items=[], itself=None, again=None, gone=3)
    back = put_back(saved(x=node), x=live)["x"]
    assert back is live and back.itself is live and back.again is back.items == [1] and not hasattr(back, "gone")


class Counting(nn.BatchNorm1d):
    """Has extra state besides parameters and buffers."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_modules() -> None:
    module, fresh = nn.Sequential(Counting(2)), nn.Sequential(Counting(2))
    module(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    module[0].calls = 3
    weight = fresh[0].weight
    put_back(saved(x=module), x=fresh)
    assert fresh[0].weight is weight and torch.equal(fresh[0].running_mean, module[0].running_mean)
    assert fresh[0].calls == 3


def test_generators_and_optimizers_are_filled() -> None:
    state = {
        "torch": torch.Generator().manual_seed(1),
        "numpy": np.random.default_rng(2),
        "old numpy": np.random.RandomState(3),
        "python": random.Random(4),
    }
    fresh = {
        "torch": torch.Generator(),
        "numpy": np.random.default_rng(),
        "old numpy": np.random.RandomState(),
        "python": random.Random(),
    }
    back = put_back(saved(x=state), x=fresh)["x"]
    assert all(back[name] is fresh[name] for name in fresh)

    def drawn(streams: dict[str, Any]) -> list[float]:
        own, numpy, old, python = streams.values()
        return [float(torch.rand((), generator=own)), numpy.normal(), old.normal(), python.random()]

    assert drawn(back) == drawn(state)
    optimizers = [torch.optim.Adam([nn.Parameter(torch.ones(3))], lr=lr) for lr in (0.1, 0.2)]
    parameter = optimizers[0].param_groups[0]["params"][0]
    parameter.grad = torch.ones(3)
    optimizers[0].step()
    there = optimizers[1].param_groups[0]["params"][0]
    moments = optimizers[1].state[there]["exp_avg"] = torch.zeros(3)
    put_back(saved(x=optimizers[0]), x=optimizers[1])
    assert optimizers[1].param_groups[0]["lr"] == 0.1 and torch.equal(there, parameter)
    assert optimizers[1].state[there]["exp_avg"] is moments  # in place, where it is there
    assert all(torch.equal(v, optimizers[1].state[there][k]) for k, v in optimizers[0].state[parameter].items())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (iter([1]), r"x\.held is a list_iterator, whose state cannot be saved; hold tensors, numbers"),
        ((i for i in "ab"), r"x\.held is a generator, whose state cannot be saved"),
        (object(), r"x\.held is a object, whose state cannot be saved"),
        ({torch.ones(1): 1}, r"x\.held holds the key tensor"),
        ({(1, torch.ones(1))}, r"x\.held holds the key \(1, tensor"),
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
    with pytest.raises(CheckpointError, match=r"x was a types.SimpleNamespace, and is a list here"):
        put_back(saved(x=SimpleNamespace(a=1)), x=[])
    with pytest.raises(CheckpointError, match=r"x was builtins\.max, and is a builtin_function_or_method here"):
        put_back(saved(x=max), x=min)
    sgd = torch.optim.SGD([torch.zeros(2)])
    with pytest.raises(CheckpointError, match=r"x cannot be filled .*: it had 1 parameters, and has 2 here"):
        put_back(saved(x=sgd), x=torch.optim.SGD([torch.zeros(2), torch.zeros(2)]))
    with pytest.raises(CheckpointError, match=r"x cannot .*: parameter 0 had another shape or place, and is \[3\]"):
        put_back(saved(x=sgd), x=torch.optim.SGD([torch.zeros(3)]))


# Nodes together and apart --------------------------------------------------------------------------------------------


def narrowed(value: Any, live: Any, node: int = 1) -> Any:
    """What a process has of a value that the simulator saved."""
    return Restorer({}, moved=True).root(cut(saved(x=value)["x"], [node], [3]), live, "x", None)


def gathered(values: list[Any]) -> Any:
    """What is saved of a value in each of three processes."""
    contents: dict[str, Tensor] = {}
    nodes = []
    for value in values:
        text, own = packed(Snapshot({"x": (value, None)}, {}, 1).tree["x"])
        nodes.append(json.loads(text))
        contents |= own
    return unpacked(json.dumps(merged(nodes)), contents)


def joined(values: list[Any], live: Any) -> Any:
    """What the simulator has of a value that three processes saved."""
    return Restorer({}, moved=True).root(cut(gathered(values), range(3), [1, 1, 1]), live, "x", None)


def rows(count: int = 3) -> Tensor:
    return torch.arange(2.0 * count).view(count, 2)


class Free(Stateful):
    """Declares nothing."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("value", [3, "text", None, torch.tensor(2.5)], ids=repr)
def test_numbers_move_without_a_declaration(value: Any) -> None:
    assert narrowed(Free(value), Free(0)).value == value == joined([Free(value)] * 3, Free(0)).value


@pytest.mark.parametrize(
    ("value", "after_setup"),
    [
        (rows(), torch.zeros(1, 2)),
        (rows(), torch.zeros(3, 2)),
        (rows(), None),
        ([1, 2, 3], [0]),
        ([1, 2, 3], [0, 0, 0]),
        ({"a": 1}, {}),
        ({1, 2}, {1}),
        (np.ones(2), np.zeros(2)),
        (random.Random(1), random.Random(2)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (torch.optim.SGD([torch.ones(2)], lr=0.1), torch.optim.SGD([torch.ones(2)], lr=0.2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_that_changed_must_be_declared(value: Any, after_setup: Any) -> None:
    with pytest.raises(CheckpointError, match=r"x\.value.* has changed .*not declared.*: declare it in the setup"):
        narrowed(Free(value), Free(after_setup))
    assert str(saved(x=narrowed(Free(value), Free(value)))) == str(saved(x=Free(value)))


def test_processes_that_differ_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"x\.value differs between the processes that saved it \(1, 1, 2\)"):
        joined([Free(1), Free(1), Free(2)], Free(0))
    with pytest.raises(CheckpointError, match=r"x\.value differs between the processes that saved it"):
        joined([Free(torch.ones(2)), Free(torch.ones(2)), Free(torch.zeros(2))], Free(torch.zeros(2)))


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
held = st.recursive(
    plain | st.builds(lambda n: torch.arange(float(n)), st.integers(0, 3)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=1), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=40)
@given(values=st.tuples(held, held, held), same=st.lists(held))
def test_every_process_has_its_own_again(values: tuple[Any, ...], same: list[Any]) -> None:
    whole = gathered([{"own": value, "same": same} for value in values])
    assert whole["items"][1][1]["kind"] == "object"  # what is equal is there once
    for node, value in enumerate(values):
        back = Restorer({}, moved=False).root(cut(whole, [node], [1] * len(values)), {}, "x", None)
        assert repr(back) == repr({"own": value, "same": same})


def test_rows_are_cut_from_processes_with_several() -> None:
    """Two rows in one process, one in another; each process has its own values, too."""
    contents: dict[str, Tensor] = {}
    nodes = []
    for own, name in zip(rows().split([2, 1]), ("first", "second"), strict=True):
        tree = Snapshot({"x": (own, "stacked"), "own": ([name], None)}, {}, len(own)).tree
        text, parts = packed(tree)
        nodes.append(json.loads(text))
        contents |= parts
    whole = {key: unpacked(json.dumps(merged([node[key] for node in nodes])), contents) for key in ("x", "own")}
    for own_rows in ([0, 1], [2], [1, 2], [0, 1, 2]):
        restored = Restorer({}, moved=False).root(cut(whole["x"], own_rows, [2, 1]), None, "x", "stacked")
        assert torch.equal(restored, rows()[own_rows])
    for own_rows, name in ([[0, 1], "first"], [[2], "second"]):
        assert Restorer({}, moved=False).root(cut(whole["own"], own_rows, [2, 1]), [], "own", None) == [name]
    with pytest.raises(CheckpointError, match="differs between the processes that saved it"):
        Restorer({}, moved=False).root(cut(whole["own"], [1, 2], [2, 1]), [], "own", None)


class Declared(Stateful):
    def setup(self, rows: int, shared: Any, stacked: Any) -> Declared:
        self.keep_shared(shared=shared)
        self.keep_stacked(stacked=stacked, counts=[0] * rows)
        self.keep_client(variate=torch.zeros(rows, 2))
        return self


def test_what_is_declared_is_moved_without_a_look_at_shapes() -> None:
    together = Declared().setup(3, [rows()], {"new": [rows(), (rows() + 1)]})
    together.counts = [5, 6, 7]
    apart = [Declared().setup(1, [rows()], {"new": [own, own + 1]}) for own in rows().split(1)]
    for own, count in zip(apart, (5, 6, 7), strict=True):
        own.counts = [count]
    assert of_clients(together) == {"variate"} and not of_clients(Declared()) and "variate" in together.state_dict()
    together.variate = rows()
    one = narrowed(together, Declared().setup(1, [], {}))
    assert torch.equal(one.variate, rows()[1:2])
    assert (one.counts, [t.tolist() for t in one.shared]) == ([6], [rows().tolist()])
    assert [t.tolist() for t in one.stacked["new"]] == [rows()[1:2].tolist(), (rows()[1:2] + 1).tolist()]
    all_three = joined(apart, Declared().setup(3, [], {}))
    assert (all_three.counts, [t.tolist() for t in all_three.shared]) == ([5, 6, 7], [rows().tolist()])
    assert [t.tolist() for t in all_three.stacked["new"]] == [rows().tolist(), (rows() + 1).tolist()]
    apart[1].shared = [rows() + 1]
    with pytest.raises(CheckpointError, match=r"x\.shared\[0\] differs between the processes that saved it"):
        joined(apart, Declared().setup(3, [], {}))
    with pytest.raises(ValueError, match=r"keep_stacked\(scale=…\): a scalar tensor has no row"):
        Declared().keep_stacked(scale=torch.ones(()))


def test_optimizers_of_rows_are_cut_with_their_state() -> None:
    def optimizer(start: int, stop: int) -> torch.optim.Optimizer:
        parameter = nn.Parameter(rows()[start:stop].clone())
        parameter.grad = rows()[start:stop] + 1
        made = torch.optim.Adam([parameter], lr=0.1)
        made.step()
        return made

    class Holder(Stateful):
        def __init__(self, start: int, stop: int) -> None:
            self.keep_stacked(inner=optimizer(start, stop))

    def state(holder: Holder) -> list[Any]:
        (parameter,) = holder.inner.param_groups[0]["params"]  # type: ignore[attr-defined]
        return [parameter.tolist(), *(t.tolist() for t in holder.inner.state[parameter].values())]  # type: ignore[attr-defined]

    fresh = Holder(0, 1)
    assert state(narrowed(Holder(0, 3), fresh)) == state(Holder(1, 2))
    assert state(joined([Holder(k, k + 1) for k in range(3)], Holder(0, 3))) == state(Holder(0, 3))


def test_an_optimizer_with_a_parameter_for_each_node_is_cut() -> None:
    def optimizer(nodes: range) -> torch.optim.Optimizer:
        parameters = [nn.Parameter(rows()[k].clone()) for k in nodes]
        for k, parameter in zip(nodes, parameters, strict=True):
            parameter.grad = rows()[k] + 1
        made = torch.optim.Adam(parameters, lr=0.1)
        made.step()
        return made

    def held(one: torch.optim.Optimizer) -> list[Any]:
        return [[p.tolist(), *(t.tolist() for t in own.values())] for p, own in one.state.items()]

    fresh = Declared().setup(1, 0, optimizer(range(1)))
    assert held(narrowed(Declared().setup(3, 0, optimizer(range(3))), fresh).stacked) == held(optimizer(range(1, 2)))
    apart = [Declared().setup(1, 0, optimizer(range(k, k + 1))) for k in range(3)]
    whole = Declared().setup(3, 0, optimizer(range(3)))
    assert held(joined(apart, whole).stacked) == held(optimizer(range(3)))


class Partial(Stateful):
    derived = ("again",)


def test_what_is_derived_is_not_saved() -> None:
    one, other = Partial(), Partial()
    one.number, one.again, other.again = 3, iter([1]), "kept"  # type: ignore[attr-defined]
    put_back(saved(x=one), x=other)
    assert vars(other) == {"number": 3, "again": "kept"}
