"""On a device the host hardly ever waits, launches do not grow with the nodes, and errors are the CPU's.

test_device.py runs this on the pretended one. What runs compute there is in any_device.py, for real devices too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from errors import refused, warned
from pretend import DEVICE, OTHER, Device, accelerator, launches, reads
from separate import images, small_cnn, small_gpt, small_mlp, tokens, vectors
from test_bad_input import MISFITS
from test_strategies_common import STEPS, Row, every_row, model, uneven
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vsim import Callback, Sample, Schedule, Trainer
from vsim.cluster.optim import OPTIMIZERS
from vsim.cluster.replicas import Replicas
from vsim.engine import CompiledExecutor, VmapExecutor
from vsim.engine.executor import Settings
from vsim.engine.machine import devices_of_nodes, moved
from vsim.models import MLP
from vsim.process.options import backend_for
from vsim.strategy import Average, DiLoCoStrategy, HierarchicalStrategy, ScaffoldStrategy, Strategy
from vsim.strategy.average import Edit

profiles = pytest.mark.parametrize("profile", ["cuda", "mps"])
pytestmark = pytest.mark.filterwarnings("ignore:(DCT|Tile)TopK:UserWarning")


@pytest.fixture(autouse=True)
def _unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count without the guard of `run.model`, which reads the parameters after steps 1, 2, 4, … for a callback."""
    monkeypatch.setattr("vsim.training.callbacks._values", lambda run: {})


class Counted(Callback):
    """Notes after each step how often the host had read from the device and waited for a copy to it, and launches."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.uploads: list[int] = []
        self.launches: list[Counter[str]] = []

    def on_step(self, run: Any) -> None:
        self.reads.append(reads())
        self.uploads.append(Device.uploads)
        self.launches.append(Device.launches.copy())

    def of_steps(self, noted: list[Any]) -> list[Any]:
        """Of each step but the first and the last, which do more."""
        return [after - before for before, after in pairwise(noted)][:-1]


def counted(
    strategy: Strategy,
    profile: str = "cuda",
    num_nodes: int = 4,
    module: Any = None,
    data: Any = uneven,
    **options: Any,
) -> Counted:
    counts, device = Counted(), OTHER if profile == "cuda" else DEVICE  # the current device is the first
    defaults = {"max_steps": STEPS, "batch_size": 8, "val_interval": None, "executor": "vmap", "progress": False}
    options = {**defaults, "callbacks": [counts], **options}
    val = data(9, 1, False) if callable(data) else data
    with accelerator(profile):
        trainer = Trainer(model() if module is None else module, data, val, device=device)
        trainer.fit(strategy=strategy, num_nodes=num_nodes, **options)
        assert trainer.strategy is not None and trainer.strategy.cluster.weights.device == device
        assert not Device.unrepeatable and "went to the loop" not in trainer.history.executor_reason
    return counts


def read(*given: Any, **options: Any) -> list[int]:
    counts = counted(*given, **options)
    return counts.of_steps(counts.reads)


def diloco() -> Strategy:
    return DiLoCoStrategy(H=3, lr=1e-2)


def reads_vectors(strategy: Strategy) -> bool:
    """Whether an average of it looks which vectors are finite, as robust rules and clip("median") do."""
    averages = [vars(part).get("average") for part in (strategy, *strategy.communication_modules)]
    own = [average for average in averages if isinstance(average, Average)]
    by_rule = any(average.rule.needs_rows and not isinstance(average.rule, Edit) for average in own)
    return by_rule or any(average.limit is not None and average.limit.norm == "median" for average in own)


# What some strategies copy to the device at a sync: numbers that all nodes draw on the CPU, rows that are not adjacent,
# shares of nodes; or in every step, the numbers of the rows of a second gradient.
COPIES = {"SPARTA, random": 1, "random-k": 1, "DP-FedAvg": 1, "FedNova": 2, "Ditto": 3}
COPIES |= dict.fromkeys(("FedAvg in islands", "FedAvg, median", "NoLoCo"), 4)
COPIES |= dict.fromkeys(("Gossip", "Gossip, one peer", "Gradient tracking"), 3)
MATRICES = {"Dion": 1, "PowerSGD": 2}  # of these sizes, which are orthogonalized on the CPU if the device cannot
# More nodes are more islands, each of which reduces by itself.
OF_ISLANDS = {"copy_", "index", "mean", "_index_put_impl_", "index_put_"}
OF_MEDIANS = {"cat", "ne", "sum", "eq", "abs", "mul", "_local_scalar_dense", "sort"}
GROW = {
    "FedAvg, median": OF_ISLANDS | OF_MEDIANS,
    **dict.fromkeys(["FedAvg in islands", "hierarchical", "modules in order", "sparse, islands, outer"], OF_ISLANDS),
    "QSGD": {"uniform_"},  # every node rounds by its own stream
}


@profiles
@every_row
def test_a_strategy_reads_losses_once_a_step(row: Row, profile: str) -> None:
    counts, matrices = counted(row.make(), profile), MATRICES.get(row.name, 0) if profile == "mps" else 0
    found = set(counts.of_steps(counts.reads))
    few = reads_vectors(row.make()) and min(found) >= 1 and max(found) <= 3
    assert found == {1 + matrices} or few, found
    # A batch of two tensors. CUDA gets them, and numbers of rows, from pinned memory without a wait.
    uploads = set(counts.of_steps(counts.uploads))
    assert uploads == {2 + matrices} or max(uploads) <= 2 + COPIES.get(row.name, 0), uploads


# The CNN has BatchNorm.
TASKS: dict[str, tuple[Callable[..., nn.Module], Any]] = {
    "MLP": (small_mlp, vectors),
    "CNN": (small_cnn, images),
    "GPT": (small_gpt, tokens),
}
every_task = pytest.mark.parametrize("task", TASKS)
WAYS = [
    {"executor": "vmap"},
    {"executor": "loop"},
    {"deterministic": True, "executor": "auto"},
    {"minibatch_size": 4},
    {"chunk_size": 2},
    {"autocast": True},
]


@profiles
@pytest.mark.parametrize("options", WAYS, ids=str)
@every_task
def test_a_model_reads_losses_once_a_step(task: str, options: dict[str, Any], profile: str) -> None:
    make, data = TASKS[task]
    assert set(read(diloco(), profile, module=make(0.2), data=data(96), **options)) == {1}


@profiles
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"adafactor", "lbfgs", "muon", "sparseadam"}))
def test_optimizers_read_nothing(name: str, profile: str) -> None:
    # torch's own ASGD reads the number of its step, and its Rprop writes to what three masks select.
    more = {("asgd", "cuda"): 1, ("asgd", "mps"): 1, ("rprop", "mps"): 3}.get((name, profile), 0)
    assert set(read(DiLoCoStrategy(inner_optim=name, H=3), profile)) == {1 + more}


@profiles
def test_validation_and_clients_read_few_numbers(profile: str) -> None:
    metric = {"two": lambda module, batch: 2 * module(batch)}
    more = read(diloco(), profile, val_interval=2, correlation_interval=3, metrics=metric)
    assert max(more) <= 16  # a number for each, not for each batch or parameter
    for plan in (Schedule({0: [0, 1], 3: [1, 2, 3]}), Sample(4, of=9, rounds=3)):
        assert set(read(diloco(), profile, participation=plan)) == {1}
    own = read(ScaffoldStrategy(H=2, lr=0.1), profile, participation=Sample(4, of=9, rounds=2))
    assert own == [1, 1 + 2, 1, 1 + 2]  # of two tensors each client has its own


# Launches -------------------------------------------------------------------------------------------------------------


def launched(strategy: Strategy, num_nodes: int, task: str, dropout: float = 0.0, **options: Any) -> list[Any]:
    make, data = TASKS[task]
    options = {"module": make(dropout), "data": data(8 * num_nodes), "batch_size": 4, **options}
    counts = counted(strategy, "cuda", num_nodes, **options)
    return counts.of_steps(counts.launches)


def growth(few: list[Counter[str]], many: list[Counter[str]]) -> set[str]:
    """Return the operations that are launched more often for more nodes."""
    return {name for one, other in zip(few, many, strict=True) for name in other - one}


def made(row: Row, num_nodes: int) -> Strategy:
    if row.name == "hierarchical":  # the largest level is all nodes
        return HierarchicalStrategy(levels={2: 1, num_nodes: 3})
    strategy: Strategy = row.make()
    return strategy


@every_row
def test_launches_do_not_grow_with_the_nodes(row: Row) -> None:
    few, many = (launched(made(row, num_nodes), num_nodes, "GPT") for num_nodes in (4, 16))
    if row.name in GROW:
        assert growth(few, many) and growth(few, many) <= GROW[row.name]
    else:
        assert not growth(few, many) and min(step.total() for step in few) > 0


@every_task
def test_launches_of_a_model_do_not_grow_with_the_nodes(task: str) -> None:
    for options in ({}, {"autocast": True}):
        few, many = (launched(diloco(), k, task, **options) for k in (4, 16))
        assert few == many
    few, many = (launched(diloco(), k, task, dropout=0.2) for k in (4, 16))
    assert growth(few, many) == {"native_dropout"}  # masks are drawn node by node


@pytest.mark.parametrize(
    ("task", "most"), [("MLP", 37), ("CNN", 71), ("GPT", 193)]
)  # measured, so that none is added unseen
def test_a_step_takes_so_many_launches(task: str, most: int) -> None:
    assert max(step.total() for step in launched(DiLoCoStrategy(H=10, lr=1e-2), 16, task)) <= most


class Reading(nn.Module):
    """A model whose Python reads values of its tensors, equal on all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, batch: list[Tensor]) -> Tensor:
        out = self.layer(batch[0])
        if out.isfinite().all() and int((batch[1] >= 0).sum()) == len(batch[1]):
            return nn.functional.cross_entropy(out, batch[1])
        return out.sum()


def test_values_of_all_nodes_are_read_at_once() -> None:
    for num_nodes in (4, 16):
        found = read(diloco(), num_nodes=num_nodes, module=Reading(), data=vectors(8 * num_nodes), batch_size=4)
        assert set(found) == {3}  # two values, and the losses


# Where things are -----------------------------------------------------------------------------------------------------


def test_processes_take_a_gpu_each_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert devices_of_nodes(None, None, 2) == gpus and backend_for(gpus, 2) == "nccl"
    with warned("3 processes", "CPU", "2 GPUs"):
        assert devices_of_nodes(None, None, 3) == [torch.device("cpu")]
    assert backend_for(gpus, 3) == backend_for([torch.device("cpu")], 1) == "gloo"


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_only_copies_of_pinned_memory_to_cuda_are_asynchronous(
    device: str, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: is_pinned)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: calls.append("pin") or self)
    monkeypatch.setattr(Tensor, "to", lambda self, *to, **how: calls.append((*to, how)) or self)
    moved({"x": torch.ones(2)}, torch.device(device))
    pins, how = ["pin"] * (device == "cuda" and not is_pinned), {"non_blocking": True} if device == "cuda" else {}
    assert calls == [*pins, (torch.device(device), how)]


def test_tables_that_mps_cannot_look_up_in() -> None:
    def at_once(rows: int, width: int, chunk_size: int | None = None, device: str = "mps", num_nodes: int = 64) -> int:
        module = nn.ModuleDict({"table": nn.Embedding(rows, width, device="meta"), "head": nn.Linear(2, 2)})
        replicas = Replicas.of(module.to("meta"), num_nodes, torch.device("meta"))
        replicas.weights = mock.Mock(device=torch.device(device), shape=replicas.weights.shape)
        return VmapExecutor.nodes_at_once(replicas, Settings(chunk_size=chunk_size))

    assert at_once(2**20, 2**6, chunk_size=31) == 31
    for too_many in (32, 64):
        with refused(ValueError, f"chunk_size={too_many}", "at most chunk_size=31"):
            at_once(2**20, 2**6, chunk_size=too_many)
    assert at_once(2**20, 2**6, chunk_size=64, device="cuda") == 64
    assert at_once(2**20, 2**11 - 1, num_nodes=2) == 1
    with refused(ValueError, "table.weight", 2147483648, "device='cpu'"):
        at_once(2**20, 2**11)


class Lookup(nn.Module):
    """The mean of a row for each of three indices, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 8), nn.Linear(8, 5)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.table(x).mean(1)), y)


def lookups(odd: str = "") -> TensorDataset:
    """Examples, one of which has an index, or a label, that there is not."""
    stream = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 7, (64, 3), generator=stream), torch.randint(0, 5, (64,), generator=stream)
    if odd:
        (x[41] if odd == "index" else y[41:42])[:] = 9
    y[5] = -100
    return TensorDataset(x, y)


@profiles
@pytest.mark.parametrize("odd", ["index", "label"])
@pytest.mark.parametrize("options", [{"executor": "vmap"}, {"executor": "loop"}, {"deterministic": True}], ids=str)
def test_an_index_out_of_range_is_the_error_of_the_cpu(profile: str, odd: str, options: dict[str, Any]) -> None:
    def fit(device: Any, data: Any, val: Any = None) -> None:
        trainer = Trainer(Lookup(), data, val, device=device)
        more = {"val_interval": None, "num_nodes": 4, "max_steps": 6, "batch_size": 4, "progress": False}
        trainer.fit(strategy=diloco(), **more, **options)

    def said(caught: Any) -> str:
        return re.sub(r" on node \d", "", str(caught.value)).partition(" given")[0]

    for data in ([lookups(odd)], [lookups(), lookups(odd)]):
        with pytest.raises(IndexError) as here:
            fit("cpu", *data)
        with accelerator(profile), pytest.raises(IndexError) as there:
            fit(DEVICE, *data)
        assert said(here) == said(there)
    with accelerator(profile) as device:  # which still works
        assert torch.ones(2, device=device).sum().item() == 2
        fit(DEVICE, lookups(), lookups())


@profiles
@pytest.mark.parametrize("name", ["in parts", "y of torch.bool", "y of torch.int32"])
def test_what_is_no_index_is_the_error_of_torch(profile: str, name: str) -> None:
    make, data, loss_fn, message = MISFITS[name]
    with accelerator(profile):
        trainer = Trainer(make(), data, loss_fn=loss_fn, device=DEVICE)
        with refused((TypeError, RuntimeError), message):
            trainer.fit(strategy=diloco(), num_nodes=2, max_steps=2, progress=False)


# The devices themselves -----------------------------------------------------------------------------------------------


def test_what_is_mixed_is_refused() -> None:
    with accelerator() as device:
        there, other, here = torch.ones(2, device=device), torch.ones(2, device=OTHER), torch.ones(2)
        for one, two in ((there, here), (here, there), (there, other)):
            with pytest.raises(RuntimeError, match="to be on the same device, but found at least two"):
                one + two
        assert (there * torch.tensor(2.0)).tolist() == [2, 2]  # a number from the host
        with pytest.raises(TypeError, match="to numpy"):
            there.numpy()


def test_what_is_counted() -> None:
    with accelerator() as device:
        x = torch.arange(6.0, device=device).view(2, 3)
        assert (x.shape, launches(), reads(), Device.uploads) == ((2, 3), 1, 0, 0)
        y = x[0] * 2
        assert (launches(), reads()) == (2, 0)
        for read in (
            y.tolist,
            y.sum().item,
            y.cpu,
            y.nonzero,
            lambda: bool(y[1]),
            lambda: y[y > 0],
            lambda: y.equal(y),
        ):
            before = reads()
            read()
            assert reads() == before + 1
        torch.ones(2).to(device)
        x[torch.tensor([0, 0])]
        assert Device.uploads == 2
        x.index_add_(0, torch.tensor([0, 0], device=device), x / 3)
        assert Device.unrepeatable == {"index_add_"}


@profiles
def test_generators_of_another_device_are_refused(profile: str) -> None:
    with accelerator(profile) as device:
        own, cpu, other = (torch.Generator(d).manual_seed(1) for d in (device, "cpu", OTHER))
        assert torch.rand(3, generator=own, device=device).tolist() == torch.rand(3, generator=cpu).tolist()
        for wrong in (cpu, other):
            with pytest.raises(RuntimeError, match=r"but found '(cpu|cuda:1|mps:1)'"):
                torch.empty(3, device=device).uniform_(generator=wrong)
    with pytest.raises(RuntimeError, match="Expected a 'cpu'"), accelerator(profile) as device:  # noqa: PT012
        own = torch.Generator(device)
        torch.rand(3, generator=own)


def test_what_mps_does_not_have_is_refused() -> None:
    with accelerator("mps") as device:
        for make in (
            lambda: torch.ones(2, dtype=torch.float64, device=device),
            lambda: torch.ones(2, dtype=torch.float64).to(device),
            lambda: torch.ones(2, device=device).double(),
        ):
            with pytest.raises(TypeError, match="the MPS framework doesn't support float64"):
                make()
        for call in (
            lambda: torch._assert_async(torch.ones(1, device=device)),
            lambda: torch.linalg.qr(torch.eye(2, device=device)),
        ):
            with pytest.raises(NotImplementedError, match="PYTORCH_ENABLE_MPS_FALLBACK=1"):
                call()
    with accelerator("cuda") as device:
        assert torch.ones(2, device=device).double().dtype == torch.float64


def test_an_index_out_of_range_is_an_error_of_later_operations_on_cuda_and_none_on_mps() -> None:
    for call in (
        lambda x, i: F.embedding(i, x),
        lambda x, i: x[i],
        lambda x, i: x.gather(0, i[:, None]),
        lambda x, i: F.cross_entropy(x[:1], i[:1]),
    ):
        with accelerator("mps") as device:
            call(torch.ones(2, 3, device=device), torch.tensor([7, 0], device=device))
            assert torch.ones(2, device=device).tolist() == [1, 1]
        with accelerator("cuda") as device:
            x = torch.ones(2, 3, device=device)
            call(x, torch.tensor([7, 0], device=device))
            for later in (x.exp, x.tolist, lambda: torch.ones(2, device=DEVICE)):
                with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
                    later()


def test_memory_that_is_still_to_be_copied_must_stay() -> None:
    with accelerator("mps") as device:
        source = torch.ones(2)
        there = source.to(device, non_blocking=True)
        assert there.tolist() == [1, 1]  # still here
        there = source.to(device, non_blocking=True)
        source.zero_()
        with pytest.raises(AssertionError, match="freed or written"):
            there.tolist()
        there = torch.full((2,), 3.0).to(device, non_blocking=True)
        with pytest.raises(AssertionError, match="freed or written"):
            there.tolist()
        here = torch.empty(2).copy_(there, non_blocking=True)
        assert here.isnan().all()  # not there yet
        torch.pretend.synchronize()  # type: ignore[attr-defined]
        assert here.tolist() == [3, 3]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
@pytest.mark.parametrize("share_of_the_graph", [1.0, 1.5])
def test_what_cuda_compiles_has_safe_options_and_is_proved_when_it_is_replayed(
    share_of_the_graph: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}
    proved: list[int] = []
    prove = CompiledExecutor.prove

    def uncompiled(function: Any, **given: Any) -> Any:
        options.update(given["options"])

        def replayed(weights: Any, grads: Any, *others: Any) -> Any:
            losses = function(weights, grads, *others)
            return losses * share_of_the_graph if len(proved) > 1 else losses  # a replay that is wrong

        return replayed

    def noted(executor: CompiledExecutor, *given: Any) -> Any:
        proved.append(executor.settings.position.step)
        return prove(executor, *given)

    monkeypatch.setattr(torch, "compile", uncompiled)
    monkeypatch.setattr(torch, "from_dlpack", Tensor.detach)  # knows no pretended device
    monkeypatch.setattr(CompiledExecutor, "captures", True)
    monkeypatch.setattr(CompiledExecutor, "prove", noted)
    wrong = share_of_the_graph != 1.0
    with accelerator("cuda"), warned("'vmap'", "losses", "differ") if wrong else nullcontext():
        draws = MLP(8, (16,), 4, dropout=0.5, seed=0)
        data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
        trainer = Trainer(draws, data, device=OTHER)
        trainer.fit(strategy=diloco(), num_nodes=2, max_steps=12, batch_size=4, compile=True, progress=False)
    assert trainer.history.executor == ("vmap" if wrong else "compiled")
    assert options["fallback_random"] and options["triton.cudagraphs"]
    assert options["triton.mix_order_reduction"] is False and "align_random_eager" not in options
    assert {*options} - {"guard_filter_fn"} <= {*torch._inductor.list_options()}
    assert proved == [1, 9]
