"""State is encoded, joined over processes, cut to rows and put back as it was."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vsim import CheckpointError
from vsim.checkpoint.files import packed, unpacked
from vsim.checkpoint.tree import Filler, cut, encoded, joined
from vsim.cluster.collectives import Pending
from vsim.cluster.ledger import Ledger
from vsim.cluster.optimizers import JointOptimizers, NodeOptimizers
from vsim.cluster.stacked import StackedCollectives
from vsim.cluster.state import Stateful, of_clients, owners, placements_of

K = 3
COLLECTIVES = StackedCollectives(Ledger(K))


def written(value: Any, stacked: bool = False, rows: int = K) -> Any:
    """What comes out of a file."""
    return unpacked(*packed(encoded(value, "x", stacked, rows)))


def put_back(saved: Any, live: Any = None) -> Any:
    filler = Filler(COLLECTIVES, torch.device("cpu"))
    filled = filler.fill(saved, live, "x")
    filler.check()
    return filled


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and [*one] == [*other] and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple | deque):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text(max_size=2) | st.integers() | st.tuples(st.integers(), st.text(max_size=1))
tensors = st.builds(
    lambda shape, dtype: torch.arange(1.0, 1 + np.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from([(), (0, 3), (2,), (K, 2), (K,)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool]),
)


def containers(inner: Any) -> Any:
    lists = st.lists(inner, max_size=4)
    pairs = st.dictionaries(keys, inner, max_size=3)
    sets = st.sets(st.integers(), max_size=3)
    return lists | lists.map(tuple) | lists.map(deque) | pairs | pairs.map(OrderedDict) | sets | sets.map(frozenset)


values = st.recursive(plain | tensors, containers, max_leaves=8)


@settings(max_examples=80)
@given(value=values, stacked=st.booleans(), there=values)
def test_what_is_written_is_put_back(value: Any, stacked: bool, there: Any) -> None:
    """Whatever is there; in a stacked list with an item for each node, tensors are the items'."""
    saved = written(value, stacked)
    live = copy.deepcopy(there)
    back = put_back(saved, live if not isinstance(live, Tensor) or live.dim() == 0 else None)
    assert str(written(back, stacked)) == str(saved)
    if not stacked:
        assert same(value, back)


@settings(max_examples=80)
@given(parts=st.lists(values, min_size=2, max_size=3))
def test_every_process_has_its_own_again(parts: list[Any]) -> None:
    held = [1] * len(parts)
    for stacked in (False, True):
        trees = [written(part, stacked, 1) for part in parts]
        whole = joined(trees, held, stacked)
        if len({str(tree) for tree in trees}) > 1 and not stacked:
            assert set(whole) == {"each"}
            with pytest.raises(CheckpointError, match="x differs between the processes that saved it"):
                put_back(whole)


class Counting(nn.BatchNorm1d):
    """Has extra state besides parameters and buffers."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Own:
    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def rows(first: int = 0, last: int = K) -> Tensor:
    return torch.arange(5.0 * K).view(K, 5)[first:last].clone()


def stepped(*parameters: Tensor, lr: float = 0.1) -> torch.optim.Optimizer:
    own = [nn.Parameter(p) for p in parameters]
    for p in own:
        p.grad = p.detach() + 1
    made = torch.optim.Adam(own, lr=lr)
    made.step()
    return made


def moments(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [[t.tolist() for t in own.values()] for own in optimizer.state.values()]


def test_generators_optimizers_modules_and_objects_are_filled() -> None:
    module = nn.Sequential(Counting(2))
    module(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    module[0].calls = 3
    streams = (torch.Generator().manual_seed(1), np.random.default_rng(2), np.random.RandomState(3), random.Random(4))
    state = {"module": module, "own": Own(5), "streams": streams, "optimizer": stepped(torch.ones(3))}
    saved = written(state)
    others = (torch.Generator(), np.random.default_rng(), np.random.RandomState(), random.Random())
    fresh = {"module": nn.Sequential(Counting(2)), "own": Own(0), "streams": others}
    fresh["optimizer"] = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    weight = fresh["module"][0].weight  # type: ignore[index]
    back = put_back(saved, fresh)
    assert all(back[name] is fresh[name] for name in ("module", "own", "optimizer")) and back["own"].number == 5
    assert back["module"][0].weight is weight and back["module"][0].calls == 3
    assert torch.equal(back["module"][0].running_mean, module[0].running_mean)
    assert moments(back["optimizer"]) == moments(state["optimizer"]) and back["optimizer"].param_groups[0]["lr"] == 0.1
    assert all(one is other for one, other in zip(back["streams"], others, strict=True))

    def drawn(streams: Any) -> list[float]:
        own, numpy, old, python = streams
        return [float(torch.rand((), generator=own)), numpy.normal(), old.normal(), python.random()]

    assert drawn(others) == drawn(streams)


def test_what_is_on_its_way_arrives() -> None:
    pending = Pending(COLLECTIVES, 7, lambda: torch.ones(2))
    back = put_back(written([pending]))[0]
    assert back.due == 7 and torch.equal(back.arrived(), torch.ones(2))


def test_numbers_of_numpy_and_counters() -> None:
    value = [np.arange(3), np.float32(1.5), Counter("abca")]
    back = put_back(written(value))
    assert back[0].tolist() == [0, 1, 2] and type(back[1]) is np.float32 and back[2] == value[2]


def test_tensors_are_written_in_place_where_they_fit() -> None:
    large = torch.zeros(10, 10)
    own = large[7:9]
    assert put_back(written(torch.ones(2, 10)), own) is own and large.sum() == 20
    assert put_back(written(torch.ones(2, 9)), own).shape == (2, 9)
    expanded = torch.zeros(10).expand(2, 10)  # cannot be written to
    assert torch.equal(put_back(written(torch.ones(2, 10)), expanded), torch.ones(2, 10)) and not expanded.any()
    base = torch.zeros(4)
    filled = put_back(written([torch.arange(4.0), torch.arange(4.0)[1:3]]), [base, base[1:3]])
    assert filled[0] is base and base.tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match=r"x\[0\] shares memory with other state after the setup"):
        put_back(written([torch.ones(4), torch.zeros(4)]), [base, base])


UNSAVABLE: list[tuple[Any, str]] = [
    (iter([1]), "list_iterator"),
    (defaultdict(list), "defaultdict"),
    (max, "builtin_function_or_method"),
    ({torch.ones(1): 1}, "key tensor"),
    (np.array(["a"]), "<U1"),
    (torch.eye(2).to_sparse(), "torch.sparse_coo"),
]


@pytest.mark.parametrize(("value", "what"), UNSAVABLE, ids=lambda x: type(x).__name__)
def test_what_cannot_be_saved(value: Any, what: str) -> None:
    with refused(CheckpointError, "x['held']", what):
        encoded({"held": value}, "x")


UNFIT: list[tuple[Any, Any, tuple[Any, ...]]] = [
    (Own(1), None, ("x was a object", "NoneType", "setup")),
    (stepped(torch.ones(2)), stepped(torch.ones(2), torch.ones(2)), (1, "parameters", 2)),
    (stepped(torch.ones(2)), torch.optim.SGD([torch.ones(2)]), ("Adam", "SGD")),
    (nn.Linear(2, 2), nn.Linear(2, 3), ("weight", "shape")),
    (JointOptimizers([stepped(torch.ones(2))]), JointOptimizers([]), (1, "optimizers", 0)),
]


@pytest.mark.parametrize(("saved", "live", "parts"), UNFIT, ids=lambda x: type(x).__name__)
def test_what_does_not_fit(saved: Any, live: Any, parts: tuple[Any, ...]) -> None:
    with refused(CheckpointError, *parts):
        put_back(written(saved), live)
    with pytest.raises((TypeError, ValueError, AttributeError)):  # which become a CheckpointError in `resume`
        put_back(written(random.Random(1)), np.random.default_rng())


# Rows -----------------------------------------------------------------------------------------------------------------


def of(first: int, last: int) -> dict[str, Any]:
    """State of every kind that has rows, of the nodes from `first` to `last`."""
    own = range(first, last)
    return {
        "rows": rows(first, last),
        "list": [rows(first, last), (rows(first, last) + 1,)],
        "counts": [10 * k for k in own],
        "streams": [random.Random(k) for k in own],
        "matrix": stepped(rows(first, last)),
        "by node": stepped(*rows(first, last)),
        "nodes": NodeOptimizers(torch.optim.Adam, [rows(first, last)], {"lr": 0.1}),
        "joint": JointOptimizers([stepped(rows(first, last)), stepped(rows(first, last) + 1)]),
        "equal": 3,
    }


HELD = [[1, 1, 1], [2, 1], [1, 2], [3]]


@pytest.mark.parametrize("before", HELD, ids=str)
@pytest.mark.parametrize("after", HELD, ids=str)
def test_rows_move_between_any_numbers_of_processes(before: list[int], after: list[int]) -> None:
    def ranges(held: list[int]) -> list[tuple[int, int]]:
        return [(sum(held[:i]), sum(held[: i + 1])) for i in range(len(held))]

    whole = joined([written(of(*own), True, own[1] - own[0]) for own in ranges(before)], before, True)
    for first, last in ranges(after):
        live = of(first, last)
        live["rows"].zero_()
        own = put_back(cut(whole, range(first, last), before), live)
        assert str(written(own, True, last - first)) == str(written(of(first, last), True, last - first))


# Declarations ---------------------------------------------------------------------------------------------------------


class Part(Stateful):
    derived = ("again",)


def test_parts_are_named_by_class_and_declare_placements() -> None:
    whole, first, second = Part(), Part(), Part()
    whole.parts = [first, (second, first)]  # type: ignore[attr-defined]
    first.keep_shared(number=1)
    first.keep_client(variate=rows())
    assert owners(whole) == {"Part": whole, "Part 2": first, "Part 3": second}
    assert placements_of(first) == {"number": "shared", "variate": "stacked"} and of_clients(first) == {"variate"}
    with pytest.raises(ValueError, match=r"keep_stacked\(scale=…\): a scalar tensor has no row"):
        first.keep_stacked(scale=torch.ones(()))
