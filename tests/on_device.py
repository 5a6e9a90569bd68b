"""Runs on a device that is not the CPU have its numbers, and the host hardly ever waits; test_device.py runs this."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pretend import DEVICE, OTHER, Device, accelerator, is_there, launches, on_cpu, reads
from test_bad_input import MISFITS
from test_strategies_common import STEPS, Row, every_row, examples, model, uneven
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from vsim_kernels import alignment, codebooks

import vsim
from vsim import Callback, Compute, Network, Sample, Schedule, Trainer, load_checkpoint
from vsim.cluster.optim import OPTIMIZERS
from vsim.cluster.replicas import Replicas
from vsim.engine import CompiledExecutor, LoopExecutor, VmapExecutor, batched
from vsim.engine.executor import Settings
from vsim.engine.machine import devices_of_nodes, moved
from vsim.engine.objective import Objective
from vsim.models import CNN, GPT, MLP
from vsim.process.options import backend_for
from vsim.records.history import OF_THE_MACHINE
from vsim.strategy import (
    AsyncDiLoCoStrategy,
    Average,
    DecoupledDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    ScaffoldStrategy,
    SimpleReduceStrategy,
    Strategy,
)
from vsim.strategy.average import Edit

profiles = pytest.mark.parametrize("profile", ["cuda", "mps"])
pytestmark = pytest.mark.filterwarnings("ignore:(DCT|Tile)TopK:UserWarning")


@pytest.fixture(autouse=True)
def _unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count without the guard of `run.model`, which reads the parameters after steps 1, 2, 4, … for a callback."""
    monkeypatch.setattr("vsim.training.callbacks._values", lambda run: {})


class Noting(Callback):
    """Notes how often the host had read from the device after each step, and had waited for a copy to it."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.uploads: list[int] = []

    def on_step(self, run: Any) -> None:
        self.counts.append(reads())
        self.uploads.append(Device.uploads)


def run(strategy: Strategy, device: Any = None, num_nodes: int = 4, module: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(model() if module is None else module, uneven, examples(40, seed=9), device=device)
    options = {"max_steps": STEPS, "batch_size": 8, "val_interval": None, "executor": "vmap", **options}
    trainer.fit(strategy=strategy, num_nodes=num_nodes, progress=False, **options)
    return trainer


def bits(trainer: Trainer) -> tuple[Any, ...]:
    assert trainer.strategy is not None
    weights = trainer.strategy.cluster.weights
    values = on_cpu(weights) if is_there(weights) else weights
    history = trainer.history
    rows = [history[name].tobytes() for name in history.columns if name not in OF_THE_MACHINE]
    return values.numpy().tobytes(), rows, history.node_losses.tobytes(), list(trainer.ledger)


def diloco() -> Strategy:
    return DiLoCoStrategy(H=3, lr=1e-2)


@contextmanager
def forms_of_accelerators() -> Iterator[None]:
    """Compute on the CPU as on an accelerator: vectorized if deterministic, too; `test_lowering.py` tests the forms."""
    with (
        mock.patch.object(batched, "favors_loops", return_value=False),
        mock.patch.object(alignment, "matters", return_value=False),
        mock.patch.object(codebooks, "_adds_in_order", return_value=False),
    ):
        yield


def on_both(make: Any, profile: str = "cuda", noting: Noting | None = None, **options: Any) -> list[int]:
    """Count the reads from the device in each step but the first and last, of a run bitwise equal to the CPU's."""
    with forms_of_accelerators():
        here = bits(run(make(), "cpu", **options))
    noting, device = noting or Noting(), OTHER if profile == "cuda" else DEVICE  # the current device is the first
    with accelerator(profile):
        there = run(make(), device, callbacks=[noting], **options)
        assert there.strategy is not None and there.strategy.cluster.weights.device == device
        assert not Device.unrepeatable
    assert bits(there) == here
    return np.diff(noting.counts)[:-1].tolist()  # type: ignore[no-any-return]


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


@profiles
@every_row
def test_every_strategy_reads_losses_once_a_step(row: Row, profile: str) -> None:
    noting, matrices = Noting(), MATRICES.get(row.name, 0) if profile == "mps" else 0
    reads = set(on_both(row.make, profile, noting))
    few = reads_vectors(row.make()) and min(reads) >= 1 and max(reads) <= 3
    assert reads == {1 + matrices} or few, reads
    # A batch of two tensors. CUDA gets them, and numbers of rows, from pinned memory without a wait.
    uploads = set(np.diff(noting.uploads)[:-1])
    assert uploads == {2 + matrices} or max(uploads) <= 2 + COPIES.get(row.name, 0), uploads


@profiles
@pytest.mark.parametrize(
    "options",
    [
        {"executor": "loop"},
        {"executor": "auto"},
        {"executor": "auto", "deterministic": True},
        {"minibatch_size": 4},
        {"chunk_size": 2},
    ],
    ids=str,
)
def test_executors(options: dict[str, Any], profile: str) -> None:
    assert set(on_both(diloco, profile, **options)) == {1}


@profiles
def test_validation(profile: str) -> None:
    metric = {"two": lambda module, batch: 2 * module(batch)}
    reads = on_both(diloco, profile, val_interval=2, correlation_interval=3, metrics=metric)
    assert max(reads) <= 16  # a number for each, not for each batch or parameter


@profiles
def test_runs_that_train_together(profile: str, tmp_path: Path) -> None:
    def compare(device: Any, **more: Any) -> vsim.Comparison:
        strategies = {"DiLoCo": diloco(), "AllReduce": SimpleReduceStrategy(lr=1e-2), "FedAvg": FedAvgStrategy(H=2)}
        kept = {"num_nodes": 3, "max_steps": STEPS, "batch_size": 8, "seeds": [0, 1], "progress": False}
        data = uneven, examples(40, seed=9)
        return vsim.compare(model(), *data, strategies=strategies, device=device, **kept, **more)

    with forms_of_accelerators():
        here = compare("cpu")
    with accelerator(profile):
        there, saved = compare(DEVICE), compare(DEVICE, together=False, save_dir=tmp_path)
    for comparison in (there, saved):
        for name in here:
            for one, other in zip(comparison.runs(name), here.runs(name), strict=True):
                np.testing.assert_allclose(one.history.node_losses, other.history.node_losses, rtol=1e-5)


def images(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    stream = torch.Generator().manual_seed(rank)
    return TensorDataset(torch.randn(24, 1, 8, 8, generator=stream), torch.randint(0, 10, (24,), generator=stream))


def texts(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    tokens = torch.randint(0, 11, (24, 9), generator=torch.Generator().manual_seed(rank))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def gpt(**more: Any) -> GPT:
    return GPT(11, block_size=8, layers=2, width=16, heads=2, seed=3, **more)


MODELS: dict[str, tuple[Any, Any]] = {
    "MLP, dropout": (lambda: MLP(hidden=(16,), dropout=0.3, seed=3), uneven),
    "CNN": (lambda: CNN(channels=(4, 8), seed=3), images),
    "CNN, batch norm": (lambda: CNN(channels=(4, 8), batch_norm=True, dropout=0.1, seed=3), images),
    "GPT": (gpt, texts),
    "GPT, dropout": (lambda: gpt(dropout=0.2), texts),
}


@profiles
@pytest.mark.parametrize(
    "options",
    [
        {"executor": "vmap"},
        {"executor": "loop"},
        {"deterministic": True, "executor": "auto"},
        {"minibatch_size": 4},
        {"autocast": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_reads_losses_once_a_step(name: str, options: dict[str, Any], profile: str) -> None:
    make, data = MODELS[name]

    def fit(device: Any, **more: Any) -> Trainer:
        trainer = Trainer(make(), data, data(9, 1, False), device=device)
        kept = {"max_steps": 6, "batch_size": 8, "val_interval": None, "executor": "vmap", "progress": False}
        trainer.fit(strategy=DiLoCoStrategy(H=3, lr=1e-3), num_nodes=4, **{**kept, **options, **more})
        return trainer

    with forms_of_accelerators():
        here, noting = fit("cpu").history, Noting()
    device = OTHER if profile == "cuda" else DEVICE
    with accelerator(profile):
        there = fit(device, callbacks=[noting])
        assert there.strategy is not None and there.strategy.cluster.weights.device == device
        tied = dict(there.strategy.cluster.replicas.module.named_parameters(remove_duplicate=False))
        assert name[:3] != "GPT" or tied["lm_head.weight"] is tied["tokens.weight"]
    assert set(np.diff(noting.counts)[:-1]) == {1}
    rtol = 1e-2 if "autocast" in options else 2e-5  # products of another order
    np.testing.assert_allclose(there.history.node_losses, here.node_losses, rtol=rtol)
    if name != "CNN, batch norm":  # whose biases before a norm have gradients of nothing but rounding
        np.testing.assert_allclose(there.history["global_loss"][-1], here["global_loss"][-1], rtol=rtol)


@profiles
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"adafactor", "lbfgs", "muon", "sparseadam"}))
def test_optimizers(name: str, profile: str) -> None:
    def fit(device: Any, **more: Any) -> Trainer:
        return run(DiLoCoStrategy(inner_optim=name, H=3), device, **more)

    here, noting = fit("cpu").history.node_losses, Noting()
    with accelerator(profile):
        there = fit(DEVICE, callbacks=[noting]).history.node_losses
    np.testing.assert_allclose(there, here, rtol=1e-4)  # separate operations round otherwise than fused ones
    # torch's own ASGD reads the number of its step, and its Rprop writes to what three masks select.
    more = {("asgd", "cuda"): 1, ("asgd", "mps"): 1, ("rprop", "mps"): 3}.get((name, profile), 0)
    assert set(np.diff(noting.counts)[:-1]) == {1 + more}


@profiles
def test_a_model_is_explained(profile: str) -> None:
    with accelerator(profile):
        found = Trainer(gpt(), texts, device=DEVICE).explain(strategy=diloco(), num_nodes=4, batch_size=8)
    assert found.executor == "vmap" and found.reason.startswith("proved on nodes 0 and 3: losses ")


@profiles
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_errors_of_a_model_are_those_of_the_cpu(executor: str, profile: str) -> None:
    def fit(device: Any) -> None:
        trainer = Trainer(MLP(in_features=63, hidden=(), seed=0).layers, uneven, loss_fn=F.cross_entropy, device=device)
        trainer.fit(strategy=diloco(), num_nodes=4, max_steps=2, batch_size=8, executor=executor, progress=False)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as here:
        fit("cpu")
    with accelerator(profile), pytest.raises(RuntimeError) as there:
        fit(DEVICE)
    assert str(there.value) == str(here.value)


@profiles
@pytest.mark.parametrize("kind", ["whole", "part", "two"])
def test_datasets_on_the_device(kind: str, profile: str) -> None:
    def fit(device: Any) -> Trainer:
        def placed(data: TensorDataset) -> TensorDataset:
            return TensorDataset(*[t.to(device) for t in data.tensors])

        def data(rank: int, num_nodes: int, train: bool) -> Any:
            own = placed(uneven(rank, num_nodes, train))
            return {"whole": own, "part": Subset(own, range(3, 20)), "two": ConcatDataset([own, own])}[kind]

        trainer = Trainer(model(), data, placed(examples(40, seed=9)), device=device)
        trainer.fit(strategy=diloco(), num_nodes=4, max_steps=STEPS, batch_size=8, executor="vmap", progress=False)
        return trainer

    with forms_of_accelerators():
        here = bits(fit("cpu"))
    with accelerator(profile):
        assert bits(fit(DEVICE)) == here


@pytest.mark.parametrize(
    "plan", [Schedule({0: [0, 1], 3: [1, 2, 3]}), Sample(4, of=9, rounds=3)], ids=lambda plan: type(plan).__name__
)
@profiles
def test_participation(plan: Any, profile: str) -> None:
    assert set(on_both(diloco, profile, participation=plan)) == {1}


@profiles
def test_state_of_clients_is_read_once_a_round(profile: str) -> None:
    reads = on_both(lambda: ScaffoldStrategy(H=2, lr=0.1), profile, participation=Sample(4, of=9, rounds=2))
    assert reads == [1, 1 + 2, 1, 1 + 2]  # of two tensors each client has its own


@pytest.mark.parametrize("cls", [AsyncDiLoCoStrategy, DecoupledDiLoCoStrategy])
@profiles
def test_asynchronous(cls: Any, profile: str) -> None:
    apart = Compute(0.8, speeds=[1, 2, 1, 4], jitter=0.3), Network("1 Mbit/s", "20 ms")
    on_both(lambda: cls(H=4, lr=1e-2), profile, compute=apart[0], network=apart[1])


@profiles
def test_resume_and_fork(profile: str, tmp_path: Path) -> None:
    with forms_of_accelerators():
        whole = run(diloco(), "cpu", max_steps=8)
    with accelerator(profile):
        run(diloco(), DEVICE, max_steps=5, save_dir=tmp_path)
        (saved,) = tmp_path.glob("**/*.safetensors")
        resumed = run(diloco(), DEVICE, max_steps=8, resume=saved)
    weights, _, losses, events = bits(resumed)  # the columns have the validation at step 5, too
    assert (weights, losses, events) == (bits(whole)[0], *bits(whole)[2:])
    with accelerator(profile):
        forked = run(FedAvgStrategy(H=2), DEVICE, num_nodes=3, max_steps=8, resume=load_checkpoint(saved).fork())
    with forms_of_accelerators():
        theirs = run(FedAvgStrategy(H=2), "cpu", num_nodes=3, max_steps=8, resume=load_checkpoint(saved).fork())
    assert bits(forked) == bits(theirs)


def test_processes_take_a_gpu_each_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert devices_of_nodes(None, None, 2) == gpus and backend_for(gpus, 2) == "nccl"
    with pytest.warns(UserWarning, match=r"3 processes train on the CPU, as there are 2 GPUs.*cuda:1"):
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
        with pytest.raises(ValueError, match=f"chunk_size={too_many} nodes .* at most chunk_size=31"):
            at_once(2**20, 2**6, chunk_size=too_many)
    assert at_once(2**20, 2**6, chunk_size=64, device="cuda") == 64
    assert at_once(2**20, 2**11 - 1, num_nodes=2) == 1
    with pytest.raises(ValueError, match=r"table.weight has 2147483648 entries.*device='cpu'"):
        at_once(2**20, 2**11)


def test_no_weights_are_copied_for_their_place_in_memory() -> None:
    with accelerator() as device:
        replicas = Replicas.of(MLP(in_features=3, hidden=(5,), num_classes=3, seed=0), 3, device)
        streams = [torch.Generator(device) for _ in range(3)]
        for executor in (VmapExecutor, LoopExecutor):
            assert executor(replicas, Objective(replicas.module), streams)._moved == []


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

    for data in ([lookups(odd)], [lookups(), lookups(odd)]):
        with pytest.raises(IndexError) as here:
            fit("cpu", *data)
        with accelerator(profile), pytest.raises(IndexError) as there:
            fit(DEVICE, *data)
        assert (
            re.sub(r" on node \d", "", str(there.value)).partition(" given")[0]
            == str(here.value).partition(" given")[0]
        )
    with accelerator(profile) as device:  # which still works
        assert torch.ones(2, device=device).sum().item() == 2
        fit(DEVICE, lookups(), lookups())


@profiles
@pytest.mark.parametrize("name", ["in parts", "y of torch.bool", "y of torch.int32"])
def test_what_is_no_index_is_the_error_of_torch(profile: str, name: str) -> None:
    make, data, loss_fn, message = MISFITS[name]
    with accelerator(profile):
        trainer = Trainer(make(), data, loss_fn=loss_fn, device=DEVICE)
        with pytest.raises((TypeError, RuntimeError), match=f"(?s){message}"):
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
    warned = pytest.warns(UserWarning, match="'vmap'.*losses.*differ") if wrong else nullcontext()
    with accelerator("cuda"), warned:
        draws = MLP(8, (16,), 4, dropout=0.5, seed=0)
        data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
        trainer = Trainer(draws, data, device=OTHER)
        trainer.fit(strategy=diloco(), num_nodes=2, max_steps=12, batch_size=4, compile=True, progress=False)
    assert trainer.history.executor == ("vmap" if wrong else "compiled")
    assert options["fallback_random"] and options["triton.cudagraphs"]
    assert options["triton.mix_order_reduction"] is False and "align_random_eager" not in options
    assert {*options} - {"guard_filter_fn"} <= {*torch._inductor.list_options()}
    assert proved == [1, 9]
