"""A run that is resumed equals the run that was not interrupted, to the bit: for every strategy, at every step."""

from __future__ import annotations

import copy
import pickle
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_runs import (
    ADAMW,
    PROCESSES,
    SCHEDULE,
    assert_it_moves,
    assert_same_model,
    assert_same_run,
    fit,
    in_processes,
    saved_at_every_step,
    trainer_of,
    weights,
)
from errors import refused, warned
from reference_cluster import images, small_cnn, small_gpt, small_mlp, tokens, vectors
from test_process_exactness import BY_NAME, ROWS, Row, nodes_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, OneCycleLR
from torch.utils.data import Dataset

import vsim
from vsim import Checkpoint, CheckpointError, Dropout, Schedule, Trainer, load_checkpoint
from vsim.checkpoint.folder import checkpoints_in
from vsim.cluster import Cluster
from vsim.data import epoch_indices
from vsim.models import MLP
from vsim.runs.saving import captured
from vsim.strategy import (
    Algorithm,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    Strategy,
)

pytestmark = pytest.mark.filterwarnings("ignore:(DCT|RandomBasis)TopK:UserWarning")
STEPS = 14


def scheduled(row: Row, **more: Any) -> Strategy:
    return row.make(**SCHEDULE, **more)


def check_resumed(
    make: Callable[[], Strategy], folder: Path, steps: Iterable[int], trainer: Any = trainer_of, **options: Any
) -> None:
    """A run that is cut at a step and resumed is the run that was not cut."""
    straight, at = saved_at_every_step(make(), folder, trainer(), **options)
    for step in steps:
        assert_same_run(fit(make(), trainer(), resume=at(step), **options), straight)


class Augmented(Dataset[Any]):
    """Draws from all global generators, as augmentation does."""

    def __init__(self, count: int = 29, seed: int = 0) -> None:
        self.inner = vectors(count, seed)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.inner[i]
        return x + torch.randn(12) * random.random() + float(np.random.rand()), y  # noqa: NPY002


def uneven(count: int = 29, seed: int = 0) -> Any:
    return lambda rank, num_nodes, train: vectors(10 + 7 * rank, seed)


def diloco(**options: Any) -> Callable[[], Strategy]:
    return lambda: DiLoCoStrategy(**{"H": 4, "outer_optim": "adam", **options})


def of(name: str) -> Callable[[], Strategy]:
    return lambda: scheduled(BY_NAME[name])


MUON = OptimSpec("muon", lr=0.02, rest=OptimSpec("adamw", lr=3e-3))
EXACT: dict[str, Any] = {"deterministic": True}
ONE_CYCLE = {"lr_scheduler": OneCycleLR, "lr_scheduler_kwargs": {"max_lr": 0.1, "total_steps": 30}}
RESTARTED = {"lr_scheduler": CosineAnnealingWarmRestarts, "lr_scheduler_kwargs": {"T_0": 3}}
EPOCHS: dict[str, Any] = {"max_steps": None, "num_epochs": 3, "executor": "vmap"}
# Strategy, model and data, options.
CUT: dict[str, tuple[Callable[[], Strategy], Any, dict[str, Any]]] = {
    "SPARTA, delayed": (of("SPARTA, delayed, 4 bits"), trainer_of, {}),
    "islands": (of("sparse, islands, outer"), trainer_of, EXACT),
    "DeMo": (of("DeMo"), trainer_of, {}),
    "one cycle": (diloco(inner_optim="adam", **ONE_CYCLE), trainer_of, {}),
    "adafactor": (diloco(inner_optim=OptimSpec("adafactor", lr=0.01), warmup_steps=12), trainer_of, {}),
    "augmentation": (of("SPARTA, delayed, 4 bits"), lambda: trainer_of(lambda: small_mlp(0.2), Augmented), EXACT),
    "uneven data": (of("SPARTA, delayed, 4 bits"), lambda: trainer_of(lambda: small_mlp(0.2), uneven), EXACT),
    "tied weights": (diloco(inner_optim=ADAMW), lambda: trainer_of(small_gpt, tokens), EPOCHS),
    "AllReduce": (lambda: SimpleReduceStrategy(inner_optim=MUON), lambda: trainer_of(small_gpt, tokens), {}),
    "of every kind": (lambda: Eccentric(inner_optim="sgd", lr=0.01), trainer_of, {}),
}
SLOWLY_CUT = {
    "restarts": diloco(**RESTARTED),
    "amsgrad": diloco(inner_optim=OptimSpec("adamw", amsgrad=True)),
    **{name: diloco(inner_optim=OptimSpec(name, lr=0.01)) for name in ("nadam", "asgd")},
}


@pytest.mark.parametrize("name", [*CUT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWLY_CUT)])
def test_a_run_that_is_cut_is_the_same_run(name: str, tmp_path: Path) -> None:
    make, trainer, options = CUT[name] if name in CUT else (SLOWLY_CUT[name], trainer_of, {})
    check_resumed(make, tmp_path, [4], trainer, **options)


def some_nodes(row: Row, i: int) -> dict[str, Any]:
    """A third of the rows each with all nodes, with some of them at every step, and with nodes that leave and join."""
    nodes = nodes_of(row)
    if i % 3 == 0 or row.name in ("per-node code", "point to point"):  # whose own code names nodes
        return {}
    plan = Schedule({0: range(nodes), 4: [1, nodes - 1], 9: range(nodes)})
    return {"participation": Dropout(0.3) if i % 3 == 1 else plan}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_run_of_every_strategy_that_is_cut_is_the_same_run(row: Row, tmp_path: Path) -> None:
    """The rows resume at different steps, and many are exact, so that all are covered together.

    Where nodes come and go, a resumed run lays its rows out anew, which vmap does not compute to the same bit.
    """
    i = ROWS.index(row)
    steps, own = (1 + i % 7, 8 + i % 7), some_nodes(row, i)
    exact = bool(own or i // 4 % 2)
    check_resumed(lambda: scheduled(row), tmp_path, steps, deterministic=exact, num_nodes=nodes_of(row), **own)


# Strategies of a user's own ------------------------------------------------------------------------------------------


class Eccentric(Strategy):
    """Declares state of every kind."""

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        slow = torch.zeros_like(cluster.weights)
        self.keep_stacked(anchor=copy.deepcopy(self.model), slow=slow, alias=slow[:, 3:7])
        self.keep_shared(count=0, best=float("nan"), label="", flags={"odd": False, 3: None}, seen=set())
        self.keep_shared(window=deque(maxlen=3), arrays=[np.zeros(2), np.float32(1)], later=None, halves=[])
        self.keep_shared(draws=(np.random.default_rng(3), random.Random(4), torch.Generator().manual_seed(5)))
        own = nn.Parameter(torch.ones(4))
        self.keep_shared(own=own, own_optim=torch.optim.Adam([own], lr=0.1))
        self.function = max

    def step(self) -> None:
        with torch.enable_grad():
            self.own_optim.zero_grad()
            (self.own_optim.param_groups[0]["params"][0] ** 2).sum().backward()
        self.own_optim.step()
        super().step()
        self.count += 1
        self.seen.add(self.count % 4)
        self.window.append(float(self.cluster.weights.mean()))
        self.best = self.function(self.window)
        self.label += str(self.count % 2)
        self.flags["odd"] = not self.flags["odd"]
        self.slow.lerp_(self.cluster.weights, 0.1)
        self.alias.mul_(0.5)
        numpy, python, own = self.draws
        noise = float(numpy.normal()) + python.random() + float(torch.rand((), generator=own))
        self.arrays[0] += noise
        if self.later is None or self.count % 5 == 0:
            self.later = torch.full((self.count,), noise)
            self.halves = list(torch.arange(6.0).add(noise).split(2))
        self.later.mul_(1.01)
        shift = noise + float(self.later[0]) + self.best + float(self.arrays[0][0]) + float(sum(self.halves).sum())
        for p, anchor in zip(self.model.parameters(), self.anchor.parameters(), strict=True):
            p.data.lerp_(anchor, 0.01).add_(shift * 1e-3 + len(self.seen) * 1e-4)
            anchor.data.lerp_(p, 0.1)
        self.cluster.weights.add_(self.slow, alpha=0.01).add_(float(self.own_optim.param_groups[0]["params"][0][0]))


class Growing(Algorithm):
    """Changes an attribute that it does not declare, from a step on; and nothing else depends on it."""

    def __init__(self, value: Any, step: int = 1) -> None:
        self.value, self.step = value, step

    def communicate(self, cluster: Cluster) -> None:
        if cluster.step >= self.step:
            self.value = self.value + 1


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize(
    ("kind", "value"),
    [("shared", 0), ("shared", torch.zeros(2)), ("shared", np.zeros(2)), ("stacked", torch.zeros(3, 2))],
    ids=str,
)
def test_state_that_is_not_declared_is_an_error_after_the_first_step(
    kind: str, value: Any, saves: bool, tmp_path: Path
) -> None:
    """Where the run is saved, or nodes join."""
    options: dict[str, Any] = {"save_dir": tmp_path} if saves else {"participation": Dropout(0.01)}
    trainer = trainer_of()
    with refused(CheckpointError, "Growing.value", f"self.keep_{kind}(value=…)"):
        fit(CommunicateOptimizeStrategy([Growing(value)]), trainer, **options)
    assert len(trainer.history) == 2  # step 0 and the first


@pytest.mark.filterwarnings("ignore:step .* could not be saved:UserWarning")
def test_state_that_changes_later_is_a_warning_and_the_run_is_kept(tmp_path: Path) -> None:
    strategy = CommunicateOptimizeStrategy([SimpleReduceStrategy(), Growing(0, step=3)])
    trainer = trainer_of()
    with warned("step 14 could not be saved", "Growing.value"):
        kept = fit(strategy, trainer, save_dir=tmp_path, checkpoint_interval=2)
    assert_same_run(kept, fit(strategy))
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000002.safetensors"]
    with refused(CheckpointError, "Growing.value"):
        fit(strategy, trainer, max_steps=20, resume=True)


@pytest.mark.parametrize("value", [iter([1]), object(), defaultdict(list)], ids=lambda x: type(x).__name__)
def test_state_that_cannot_be_saved_is_said_before_training(value: Any, tmp_path: Path) -> None:
    class Odd(Algorithm):
        def setup(self, cluster: Cluster) -> None:
            self.keep_shared(value=value)

    steps: list[int] = []
    odd = CommunicateOptimizeStrategy([Odd()])
    with refused(CheckpointError, f"Odd.value is a {type(value).__name__}"):
        fit(odd, save_dir=tmp_path, train_loss_hook=lambda step, loss: steps.append(step))
    assert not steps


# Folders -------------------------------------------------------------------------------------------------------------


def diloco3() -> Strategy:
    return DiLoCoStrategy(H=3, inner_optim=ADAMW)


def test_the_newest_two_are_kept_and_resume_true_takes_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    fit(diloco3(), save_dir=folder, checkpoint_interval=6)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-000000{step}.safetensors" for step in (12, 14)]
    longer = fit(diloco3(), save_dir=folder, checkpoint_interval=6, resume=True, max_steps=21)
    assert np.array_equal(longer.history["step"], np.arange(22))
    assert torch.equal(weights(longer), weights(fit(diloco3(), max_steps=21)))
    assert [load_checkpoint(path).step for path in checkpoints_in(folder)] == [18, 21]


def test_save_dir_alone_is_a_checkpoint_at_the_end(tmp_path: Path) -> None:
    straight = fit(FedAvgStrategy(H=2), save_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000014.safetensors"]
    assert_same_run(fit(FedAvgStrategy(H=2), resume=True, save_dir=tmp_path), straight)  # nothing is left to do
    folder = tmp_path / "run"
    for steps in (5, 9):  # starts, or continues
        fit(FedAvgStrategy(H=2), max_steps=steps, save_dir=folder, resume=vsim.latest_checkpoint(folder))
    assert load_checkpoint(folder).step == 9
    for more in ({}, {"resume": load_checkpoint(folder).fork()}):  # what another run has saved is not overwritten
        with refused(CheckpointError, "holds the checkpoints of a run", "step-00000009.safetensors"):
            fit(FedAvgStrategy(H=2), save_dir=folder, **more)


def test_a_file_says_all_without_running_anything(tmp_path: Path) -> None:
    trainer = fit(diloco3(), max_steps=7, save_dir=tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert repr(checkpoint).startswith("Checkpoint(step 7, 3 nodes, vsim.DiLoCoStrategy from ")
    assert (checkpoint.step, checkpoint.num_nodes, checkpoint.held) == (7, 3, [3])
    assert torch.equal(checkpoint.weights, weights(trainer))
    assert len(checkpoint.history) == 8 and list(checkpoint.ledger) == list(trainer.ledger)
    assert_same_model(checkpoint.model(small_cnn()), trainer.final)  # type: ignore[attr-defined]
    own = checkpoint.model(small_cnn(), node=1)
    assert torch.equal(torch.cat([p.detach().flatten() for p in own.parameters()]), weights(trainer)[1])
    with refused(CheckpointError, "another model", "layers.0.weight", "[16, 12]"):
        checkpoint.model(small_mlp())
    with refused(ValueError, "node", "from 0 to 2", 3):
        checkpoint.model(small_cnn(), node=3)
    again = tmp_path / "again.safetensors"
    checkpoint.save(again)
    assert torch.equal(load_checkpoint(again).weights, checkpoint.weights)


# What must be the same -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at_seven(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("seven")
    fit(diloco3(), max_steps=7, save_dir=folder)
    return load_checkpoint(folder)


ANOTHER: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"num_nodes": 4}, ("num_nodes was 3 and is 4",)),
    ({"batch_size": 6}, ("batch_size was 4 and is 6",)),
    ({"minibatch_size": None}, ("minibatch_size was 2 and is absent",)),
    ({"seed": 1}, ("seed was 42 and is 1",)),
    ({"shuffle": False}, ("shuffle was True and is False",)),
    ({"deterministic": True}, ("deterministic was False and is True",)),
    ({"dataloader_kwargs": {"drop_last": True}}, ("drop_last was False and is True",)),
    ({"strategy": FedAvgStrategy(H=3)}, ("strategy was vsim.", "DiLoCoStrategy and is vsim.", "FedAvgStrategy")),
    (
        {"strategy": DiLoCoStrategy(H=4, inner_optim=ADAMW)},
        ("step 7", "strategy.H was 3 and is 4", "resume=load_checkpoint(", ".fork()"),
    ),
    ({"strategy": DiLoCoStrategy(H=3, inner_optim="adamw", lr=0.02)}, ("optim_spec.lr was 0.01 and is 0.02",)),
    ({"strategy": DiLoCoStrategy(H=3, inner_optim="sgd")}, ("optim_spec was", "AdamW and is", "SGD")),
    (
        {"trainer": trainer_of(data=lambda count=28, seed=0: images(count, seed))},
        ("train_dataset[0].examples was 29 and is 28",),
    ),
    ({"trainer": trainer_of(lambda: small_cnn(dropout=0.1))}, ("module.dropout was", "p=0.3", "and is", "p=0.1")),
    ({"trainer": trainer_of(small_mlp, vectors)}, ("parameter", "'torch.float32'] and is absent")),
    ({"max_steps": 6}, ("step 7", "max_steps=6")),
]


def test_another_run_is_an_error_that_names_what_differs(at_seven: Checkpoint) -> None:
    for options, parts in ANOTHER:
        with refused(CheckpointError, *parts):
            fit(resume=at_seven, **{"strategy": diloco3(), **options})
    other = fit(diloco3(), resume=at_seven, max_steps=11, val_interval=None, executor="loop")  # which may differ
    assert other.history["step"][-1] == 11


def test_a_schedule_that_would_change_is_an_error(tmp_path: Path) -> None:
    def strategy(**more: Any) -> Strategy:
        return FedAvgStrategy(H=2, lr_scheduler="cosine", **more)

    first = fit(strategy(), max_steps=8, save_dir=tmp_path)
    with refused(CheckpointError, "over 8 steps", "over 12", "max_steps=8"):
        fit(strategy(), max_steps=12, resume=tmp_path)
    longer = fit(strategy(max_steps=8), max_steps=12, resume=tmp_path)
    assert longer.history["lr"][-1] == pytest.approx(0.1 * 1e-3)
    assert longer.history["lr"][8] == first.history["lr"][8]
    warm = fit(FedAvgStrategy(H=2, warmup_steps=10), max_steps=8, save_dir=tmp_path / "warm")
    assert warm.history["lr"][8] == pytest.approx(0.7e-3)
    fit(FedAvgStrategy(H=2, warmup_steps=10), max_steps=12, resume=tmp_path / "warm")  # no annealing: no length


# Forks ---------------------------------------------------------------------------------------------------------------


def test_a_fork_goes_on_with_the_nodes_and_their_optimizers() -> None:
    # Nothing communicates, so that a fork with the same settings is the same run.
    strategy = Strategy(inner_optim=ADAMW, warmup_steps=9)
    straight = fit(strategy)
    half = fit(strategy, trainer_of(), max_steps=8)
    forked = fit(strategy, resume=captured(half._last).fork())  # type: ignore[arg-type]
    assert torch.equal(weights(forked), weights(straight))
    assert forked.history["step"].tolist() == list(range(8, 15))
    for column in ("lr", "train_loss", "examples"):
        np.testing.assert_array_equal(forked.history[column][1:], straight.history[column][9:])
    assert forked.history["examples"][0] == straight.history["examples"][8]
    for column in ("local_loss", "global_loss", "node_loss_std"):  # a curve of the fork begins where the other ended
        assert forked.history[column][0] == half.history.last(column) > 0
    anew = fit(strategy, resume=captured(half._last).fork(optimizer=False))  # type: ignore[arg-type]
    assert not torch.equal(weights(anew), weights(straight))


def test_a_fork_into_another_strategy_starts_it_from_the_mean(at_seven: Checkpoint) -> None:
    phis = []
    keep = [lambda run: phis.append(run.strategy.parts[0].outer_weights.clone())]
    still = DiLoCoStrategy(H=50, inner_optim=OptimSpec("sgd", lr=0.0))
    trainer = fit(still, resume=at_seven.fork(), max_steps=9, callbacks=keep)
    torch.testing.assert_close(phis[0], at_seven.weights.mean(0))
    assert torch.equal(weights(trainer), at_seven.weights)  # its own rows, and a rate of 0
    assert trainer.ledger.payload_bytes == 0 and len(at_seven.ledger) == 2


def test_a_fork_with_another_number_of_nodes_starts_from_the_mean(at_seven: Checkpoint) -> None:
    hooked: list[int] = []
    other: dict[str, Any] = {"num_nodes": 5, "max_steps": 8, "seed": 3, "batch_size": 2, "progress": True}
    hook = {"train_loss_hook": lambda step, loss: hooked.append(step)}
    trainer = fit(Strategy(inner_optim=OptimSpec("sgd", lr=0.0)), resume=at_seven.fork(), **other, **hook)
    assert hooked == [8]
    assert torch.equal(weights(trainer), at_seven.mean_weights().expand(5, -1))
    assert trainer.history.node_losses.shape == (1, 5)
    with refused(CheckpointError, "step 7", "max_steps=7"):
        fit(Strategy(), resume=at_seven.fork(), max_steps=7)
    with refused(CheckpointError, "another model", "parameter"):
        fit(Strategy(), trainer_of(small_mlp, vectors), resume=at_seven.fork())


def test_a_fork_goes_on_in_its_own_order_of_the_data(at_seven: Checkpoint) -> None:
    seen, order = list[int](), list[int]()

    class Noting(Dataset[Any]):
        def __len__(self) -> int:
            return 29

        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return images()[index]

    run: dict[str, Any] = {"batch_size": 2, "minibatch_size": None, "seed": 3, "num_nodes": 4, "max_steps": 8}
    run |= {"val_interval": None, "train_loss_hook": lambda *_: order.extend(seen[-8:])}
    fit(Strategy(), Trainer(small_cnn(), Noting()), resume=at_seven.fork(), **run)
    # 8 examples a node in batches of 2 are 4 steps an epoch: 0-based step 7 is the last of epoch 1.
    assert order == epoch_indices(29, 4, True, 3, 1)[:, 6:8].flatten().tolist()


@pytest.mark.parametrize(("name", "more"), [("adam", {"amsgrad": True}), ("sgd", {"momentum": 0.9})])
def test_a_fork_whose_optimizer_keeps_more_starts_it_anew(name: str, more: dict[str, Any]) -> None:
    plain, half = Strategy(inner_optim=OptimSpec(name, lr=1e-3)), trainer_of()
    fit(plain, half, max_steps=4)

    def forked(strategy: Strategy, **options: Any) -> Trainer:
        return fit(strategy, max_steps=6, resume=captured(half._last).fork(**options))  # type: ignore[arg-type]

    assert len(forked(Strategy(inner_optim=OptimSpec(name, lr=1e-3, **more))).history) == 3
    anew, kept = forked(plain, optimizer=False), forked(plain)
    assert torch.equal(weights(anew), weights(kept)) == (name == "sgd")  # which keeps nothing


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_fork_of_equal_nodes_has_an_optimizer_for_each_node(name: str, tmp_path: Path) -> None:
    matrices = Trainer(nn.Linear(12, 5, bias=False), vectors(), loss_fn=nn.functional.cross_entropy)
    fit(
        SimpleReduceStrategy(inner_optim=OptimSpec(name, lr=1e-2)),
        matrices,
        max_steps=4,
        val_interval=None,
        save_dir=tmp_path,
    )
    forked = load_checkpoint(tmp_path).fork()
    options = {"max_steps": 8, "val_interval": None, "resume": forked}
    fit(FedAvgStrategy(H=100, inner_optim=OptimSpec(name, lr=1e-2)), matrices, **options)
    assert len(weights(matrices).unique(dim=0)) == 3


def test_a_fork_can_be_saved_and_resumed(at_seven: Checkpoint, tmp_path: Path) -> None:
    strategy = FedAvgStrategy(H=2, inner_optim="sgd", lr=0.1)
    straight = fit(strategy, resume=at_seven.fork(), num_nodes=2, save_dir=tmp_path, checkpoint_interval=11)
    assert_same_run(fit(strategy, resume=checkpoints_in(tmp_path)[0], num_nodes=2), straight)


# Processes -----------------------------------------------------------------------------------------------------------


def check_across(row: Row, folder: Path, first: dict[str, Any], then: dict[str, Any]) -> None:
    """Save with one backend, resume with another."""
    options = {"deterministic": True, "max_steps": 12, "num_nodes": nodes_of(row)}
    straight = fit(scheduled(row), save_dir=folder, checkpoint_interval=7, **options, **first)
    assert_same_run(fit(scheduled(row), resume=checkpoints_in(folder)[0], **options, **then), straight)


@pytest.mark.usefixtures("processes_stay")
def test_processes_and_simulator_resume_each_other(tmp_path: Path) -> None:
    check_across(BY_NAME["SPARTA, delayed, 4 bits"], tmp_path, in_processes(None), {})  # the other way is slow


@pytest.mark.slow
@pytest.mark.usefixtures("processes_stay")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_processes_and_simulator_resume_each_other_with_every_strategy(row: Row, tmp_path: Path) -> None:
    """A third of the rows each from processes to the simulator, back, and between processes."""
    backends = [in_processes(None), {}, in_processes(None)]
    i = ROWS.index(row) % 3
    check_across(row, tmp_path, backends[i], backends[i - 2])


@pytest.mark.slow
@pytest.mark.usefixtures("processes_stay")
@pytest.mark.parametrize(
    ("spec", "hidden"), [(OptimSpec("adamw"), 4000), (OptimSpec("adamw", fused=True), 100)], ids=repr
)
def test_however_the_state_of_an_optimizer_is_held(spec: OptimSpec, hidden: int, tmp_path: Path) -> None:
    """The rows of 4,000 hidden units are long, and an optimizer holds their states apart."""

    def train(**options: Any) -> Trainer:
        trainer = trainer_of(lambda: MLP(12, (hidden,), 5, dropout=0.2, seed=1), vectors)
        return fit(FedAvgStrategy(H=3, inner_optim=spec), trainer, **{"deterministic": True, "max_steps": 8, **options})

    assert_it_moves(train, tmp_path, ({}, {}))


@pytest.mark.slow
@pytest.mark.usefixtures("processes_stay")
def test_a_fork_moves_between_processes_and_simulator_too(tmp_path: Path) -> None:
    strategy = Strategy(inner_optim=ADAMW)  # nothing communicates, so that a fork is the same run
    straight = fit(strategy, deterministic=True)
    half = fit(strategy, max_steps=8, save_dir=tmp_path, **PROCESSES)
    for options in ({"deterministic": True}, PROCESSES):
        forked = fit(strategy, resume=load_checkpoint(tmp_path).fork(), **options)
        assert all(map(torch.equal, forked.final.state_dict().values(), straight.final.state_dict().values()))  # type: ignore[attr-defined]
    assert half.strategy is None and load_checkpoint(tmp_path).held == [1] * 3


def test_errors_are_shipped() -> None:
    error = pickle.loads(pickle.dumps(CheckpointError("torn")))
    assert type(error) is CheckpointError and str(error) == "torn" and isinstance(error, ValueError)


WRONG: list[tuple[dict[str, Any], Any, tuple[Any, ...]]] = [
    ({"checkpoint_interval": 5}, ValueError, ("checkpoint_interval", "save_dir")),
    ({"checkpoint_interval": 0, "save_dir": "x"}, ValueError, ("checkpoint_interval", ">= 1", 0)),
    ({"save_dir": __file__}, CheckpointError, ("save_dir", "test_checkpoint.py", "folder")),
    ({"save_dir": f"{__file__}/sub"}, CheckpointError, ("save_dir", "Not a directory")),
    ({"save_dir": "/proc/vsim"}, CheckpointError, ("save_dir", "'/proc/vsim'")),
    ({"resume": 3}, TypeError, ("resume", "path", 3)),
    ({"resume": True}, CheckpointError, ("this trainer's last run",)),
    ({"resume": "no/such"}, CheckpointError, ("no/such",)),
]


@pytest.mark.parametrize(("options", "kind", "parts"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], parts: tuple[Any, ...]) -> None:
    with refused(kind, *parts):
        fit(Strategy(), **options)


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "notes.safetensors").touch()
    assert vsim.latest_checkpoint(tmp_path) is None and vsim.latest_checkpoint(tmp_path / "absent") is None
    with refused(CheckpointError, "no checkpoint in the folder"):
        fit(Strategy(), resume=True, save_dir=tmp_path)
