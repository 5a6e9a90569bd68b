"""Small cases of training, by the public names of vsim only, and what each comes to, to the bit; see `cases.py`.

A case is made of choices, one of every dimension below: its name lists those that are not the default. Which choices
meet is drawn from a seed, so that each pair of choices meets about as often as any other.
"""

from __future__ import annotations

import collections
import csv
import itertools
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset, TensorDataset

import vsim
from vsim import strategy as s
from vsim.data import partition
from vsim.models import GPT, MLP
from vsim.strategy.communicate import all_reduce

Options = dict[str, Any]
Record = dict[str, Any]  # field → array, number, text, or list of these
Choices = dict[str, str]  # dimension → choice; "" is the default

STEPS, CLASSES = 6, 5
NOT_NOTED = "not noted"  # the field of a case that went wrong in this file
# Columns of the history that are the machine's.
OF_THE_MACHINE = {"seconds", "validation_seconds", "memory_bytes"}

# Models and data ------------------------------------------------------------------------------------------------------


def examples(count: int = 30, seed: int = 0) -> TensorDataset:
    """Of 30 examples, the last batches of some nodes are smaller."""
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 12, generator=g), torch.randint(CLASSES, (count,), generator=g))


def tokens(count: int = 30, seed: int = 0) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(*torch.randint(11, (2, count, 4), generator=g))


def own(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    """Each node's own, of different sizes."""
    return examples((10, 14, 20)[rank % 3], seed=rank if train else 100 + rank)


class Listed(Dataset[Any]):
    """Examples that are fetched one by one; some are odd: they have a label that is none, or cannot be read."""

    def __init__(self, kind: str) -> None:
        self.kind, self.all = kind, examples(110)

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int) -> Any:
        x, y = self.all[index]
        if self.kind == "jittered":  # draws from torch's generator, as augmentations do
            return x + 0.1 * torch.randn(12), y
        if index % 50 == 20 and self.kind == "failing":
            raise OSError(f"example {index} cannot be read")
        return x, torch.tensor(CLASSES + 2) if index % 50 == 20 and self.kind == "mislabelled" else y


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


class Normed(nn.Module):
    """BatchNorm and Dropout; `frozen`: as one fine-tunes, with statistics and a layer that stay."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 5))
        if frozen:
            self.layers[0].requires_grad_(False)
            self.layers[1].eval()

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])


class Counting(nn.Module):
    """Counts its steps in Python, so that each node has its own copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(12, CLASSES), 0

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        if self.training:
            self.steps += 1
        return F.cross_entropy(self.layer(batch[0]) / (1 + 0.1 * self.steps), batch[1])

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = state


class Shaken(nn.Module):
    """Draws from Python's generator, which runs that train together share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, CLASSES)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]) * (1 + 0.1 * random.random()), batch[1])


def mlp(**more: Any) -> nn.Module:
    return MLP(12, (6,), CLASSES, seed=1, **more)


def partly_frozen() -> nn.Module:
    model = mlp()
    next(iter(model.parameters())).requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "": mlp,
    "dropped": lambda: mlp(dropout=0.3),
    "normed": lambda: seeded(Normed),
    "gpt": lambda: GPT(11, block_size=4, layers=1, width=8, heads=2, dropout=0.1, seed=1),
    "frozen": partly_frozen,
    "tuned": lambda: seeded(lambda: Normed(frozen=True)),
    "counting": lambda: seeded(Counting),
    "outputs": lambda: seeded(lambda: nn.Linear(12, CLASSES)),  # with a loss_fn
}
DATA: dict[str, Callable[[int], Any]] = {
    "": lambda num_nodes: examples(),
    "own": lambda num_nodes: own,
    "dealt": lambda num_nodes: partition(examples(60), num_nodes, "iid", labels=examples(60).tensors[1]),
    "jittered": lambda num_nodes: Listed("jittered"),
    "failing": lambda num_nodes: Listed("failing"),
    "mislabelled": lambda num_nodes: Listed("mislabelled"),
}

# Strategies -----------------------------------------------------------------------------------------------------------


class OwnStep(s.Strategy):
    """As if for one node, with state that lasts."""

    def _init_node(self, model: Any, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.keep_stacked(velocity=[torch.zeros_like(p) for p in model.parameters()])

    def step(self) -> None:
        for p, v in zip(self.model.parameters(), self.velocity, strict=True):
            v.mul_(0.9).add_(p.grad)
            p.grad.copy_(v)
            all_reduce(p.grad, "mean", label="momentum")
        super().step()


class Failing(s.FedAvgStrategy):
    """Averages, and fails in its third step."""

    def communicate(self, cluster: Any) -> None:
        if cluster.step == 3:
            raise ArithmeticError("this strategy fails in step 3")
        super().communicate(cluster)


def modules(*given: Any) -> Callable[..., s.Algorithm]:
    return lambda **more: s.CommunicateOptimizeStrategy(communication_modules=[*given], **more)


def made(cls: Callable[..., s.Algorithm], **arguments: Any) -> Callable[..., s.Algorithm]:
    return lambda **more: cls(**{**arguments, **more})


SGD = s.OptimSpec("sgd", momentum=0.9)
QUARTER = s.ShuffledSequentialIndexSelector(0.25)
OF_CLIENTS: dict[str, Callable[..., s.Algorithm]] = {  # also for cohorts of a population
    "fedavg": made(s.FedAvgStrategy, H=2),
    "fedavg-median": made(s.FedAvgStrategy, H=2, average="median"),
    "fedavg-clipped": made(s.FedAvgStrategy, H=2, average=s.mean("examples") | s.clip(0.5)),
    "diloco": made(s.DiLoCoStrategy, H=2, outer_lr=0.4),
    "fedadam": made(s.FedOptStrategy, H=2),
    "fedprox": made(s.FedProxStrategy, H=2, mu=0.1),
    "fedper": made(s.FedPerStrategy, H=2),
    "fedrep": made(s.FedRepStrategy, H=2),
    "fedbn": made(s.FedBNStrategy, H=2),
    "ditto": made(s.DittoStrategy, H=2),
    "fednova": made(s.FedNovaStrategy, H=2),
    "qfedavg": made(s.QFedAvgStrategy, H=2),
    "afl": made(s.AFLStrategy, H=2),
    "feddyn": made(s.FedDynStrategy, H=2),
    "scaffold": made(s.ScaffoldStrategy, H=2),
    "edit": made(s.EDiTStrategy, H=2, gate_after=1),
    "dpfedavg": made(s.DPFedAvgStrategy, H=2, clip=1.0, noise_multiplier=0.01),
}
ON_A_CLOCK: dict[str, Callable[..., s.Algorithm]] = {  # asynchronous
    "async-diloco": made(s.AsyncDiLoCoStrategy, H=2, outer_lr=0.4),
    "delayed-nesterov": made(s.DelayedNesterovStrategy, H=2, outer_lr=0.4),
    "decoupled": made(s.DecoupledDiLoCoStrategy, H=2, fragments=1, delay=1, outer_lr=0.4),
}
IN_GROUPS: dict[str, Callable[..., s.Algorithm]] = {  # for four nodes
    "islands": made(s.FedAvgStrategy, H=2, island_size=2),
    "hierarchical": made(s.HierarchicalStrategy, levels={2: 1, 4: 2}),
    "sparse-islands-outer": modules(
        s.SPARTAStrategy(index_selector=QUARTER), s.FedAvgStrategy(island_size=2, H=2), s.DiLoCoStrategy(H=3)
    ),
}
STRATEGIES: dict[str, Callable[..., s.Algorithm]] = {
    "allreduce": made(s.SimpleReduceStrategy),
    "allreduce-median": made(s.SimpleReduceStrategy, average="median"),
    "alone": made(s.AloneStrategy),
    **OF_CLIENTS,
    **IN_GROUPS,
    "fedavg-warm": made(s.FedAvgStrategy, H=s.PostLocal(2, 2)),
    "diloco-topk": made(s.DiLoCoStrategy, H=2, average=s.compress(s.TopK(0.2))),
    "sparta": made(s.SPARTAStrategy, p_sparta=0.3),
    "sparta-late": made(s.SPARTAStrategy, index_selector=QUARTER, async_delay=2),
    "sparta-diloco": made(s.SPARTADiLoCoStrategy, p_sparta=0.3, H=3),
    "streaming": made(s.StreamingDiLoCoStrategy, H=3, fragments=2, delay=1, mixing=0.5),
    "eager": made(s.EagerDiLoCoStrategy, H=2),
    "demo": made(s.DeMoStrategy),
    "dion": made(s.DionStrategy),
    "sparseloco": made(s.SparseLoCoStrategy, H=2),
    "muloco": made(s.MuLoCoStrategy, H=2),
    "noloco": made(s.NoLoCoStrategy, H=2),
    "gossip": made(s.GossipStrategy, H=2),
    "gossip-tracking": made(s.GossipStrategy, tracking=True),
    "slowmo": made(s.SlowMoStrategy, H=2),
    "desloc": made(s.DESLOCStrategy, H=1),
    "gpa": made(s.GPAStrategy, mu_x=0.9),
    "qsgd": modules(s.SimpleReduceStrategy(average=s.compress(s.QSGD()))),
    "powersgd": modules(s.SimpleReduceStrategy(average=s.compress(s.PowerSGD(2)))),
    "signs": modules(s.SimpleReduceStrategy(average=s.compress(s.ScaledSign()))),
    "attacked": made(s.FedAvgStrategy, H=2, average="median", attack=vsim.Attack("gaussian", nodes=[0])),
    "own-step": made(OwnStep),
    **ON_A_CLOCK,
}
PERSONAL = {"fedper", "fedrep", "fedbn", "ditto"}
OWN_OPTIMIZER = {"scaffold", "demo", "dion", "muloco", "desloc", "gpa"}  # which take no other

# What is varied -------------------------------------------------------------------------------------------------------

EXECUTORS: dict[str, Options] = {
    "vmap": {"executor": "vmap"},
    "loop": {"executor": "loop"},
    "exact": {"deterministic": True},
    "auto": {},
    "chunks": {"executor": "vmap", "chunk_size": 2},
}
NODES = {"K1": 1, "K2": 2, "K4": 4}
COMPUTE = vsim.Compute(0.8, jitter=0.5)


def halves(num_nodes: int) -> vsim.Schedule:
    return vsim.Schedule({0: range(num_nodes // 2), 2: range(num_nodes), 4: [num_nodes - 1]})


def fails_and_joins(num_nodes: int) -> vsim.Trace:
    last = num_nodes - 1
    return vsim.Trace([(2, last, "fail"), (3, 0, "leave"), (3, last, "join"), (5, 0, "join")])


COHORTS: dict[str, Callable[[int, Path], Options]] = {
    "cohorts": lambda K, folder: {"participation": vsim.Sample(K, of=2 * K + 1)},
    "stored": lambda K, folder: {"participation": vsim.Sample(K, of=2 * K + 1, store=folder / "clients")},
    "local-epochs": lambda K, folder: {"participation": vsim.Sample(K, of=2 * K + 1, rounds=4, epochs=0.5)},
    "overcommitted": lambda K, folder: {
        "participation": vsim.Sample(K, of=3 * K + 1, stragglers=vsim.OverCommit(1.5)),
        "compute": COMPUTE,
    },
}
PLANS: dict[str, Callable[[int, Path], Options]] = {
    "": lambda K, folder: {},
    "joins": lambda K, folder: {"participation": halves(K)},
    "fails": lambda K, folder: {"participation": fails_and_joins(K)},
    "drops": lambda K, folder: {"participation": vsim.Dropout(0.4)},
    "slow": lambda K, folder: {"participation": vsim.DropSlowest(0.5), "compute": COMPUTE},
    **COHORTS,
}
BATCHES: dict[str, Options] = {
    "": {"batch_size": 4},
    "pieces": {"batch_size": 4, "minibatch_size": 2},
    "accumulated": {"batch_size": 4, "gradient_accumulation": 4},
    "threes": {"batch_size": 3},
    "dropped-last": {"batch_size": 2, "dataloader_kwargs": {"drop_last": True}},
    "epochs": {"batch_size": 4, "num_epochs": 2, "max_steps": None},
    "unshuffled": {"batch_size": 4, "shuffle": False},
}
SCHEDULES: dict[str, Options] = {
    "": {},
    "cosine": {"lr_scheduler": "cosine"},
    "warmup": {"lr_scheduler": "cosine", "warmup_steps": 2},
    "stairs": {"lr_scheduler": StepLR, "lr_scheduler_kwargs": {"step_size": 2}},
    "clipped": {"max_norm": 0.5},
    "diverging": {"lr": 1e30},
}
OPTIMIZERS: dict[str, Options] = {
    "": {},
    "sgd": {"inner_optim": SGD},
    "adamw": {"inner_optim": s.OptimSpec("adamw", weight_decay=0.1)},
    "rmsprop": {"inner_optim": "rmsprop"},
}


def logit(model: nn.Module, batch: Any) -> Tensor:
    return batch[0].float().mean() + sum(p.sum() for p in model.parameters())


VALIDATIONS: dict[str, Options] = {
    "": {"val_interval": 2},
    "unvalidated": {},
    "at-ends": {"val_interval": None},
    "measured": {"val_interval": 3, "val_size": 5, "metrics": {"logit": logit}},
    "apart": {"val_interval": 4, "correlation_interval": 2},
}
ENDS: dict[str, Options] = {
    "": {},
    "tested": {"test_dataset": examples(7, seed=2)},
    "of-clients": {"client_val_dataset": own},
    "tuned-clients": {"client_val_dataset": own, "client_val_steps": 2, "test_dataset": examples(7, seed=2)},
}

# Callbacks ------------------------------------------------------------------------------------------------------------


def seen(event: str, run: Any) -> str:
    """What a callback sees of a run, in one text. Only this, and what acts, reads attributes of a run."""
    row = {name: float(value) for name, value in run.row.items() if name not in OF_THE_MACHINE}
    rows = None if run.history is None else len(run.history)
    return f"{event} {run.done}: {row} losses={[*run.node_losses]} rows={rows} events={len(run.ledger)}"


class Acts(vsim.Callback):
    """Notes what it hears, and acts at one event of the runs of some strategy."""

    def __init__(self, what: str = "", event: str = "on_step", step: int = 3, only: str = "") -> None:
        self.what, self.event, self.step, self.only = what, event, step, only
        self.heard: list[str] = []

    def _hear(self, event: str, run: Any) -> None:
        self.heard.append(seen(event, run))
        if (event, run.done) != (self.event, self.step) or self.only not in type(run.strategy).__name__:
            return
        if self.what == "interrupts":
            raise KeyboardInterrupt
        if self.what in ("presses", "insists"):
            for _ in range(1 + (self.what == "insists")):
                os.kill(os.getpid(), signal.SIGINT)
        if self.what == "raises":
            raise RuntimeError(f"a callback fails in {event}")
        if self.what == "stops":
            run.stop()

    def on_start(self, run: Any) -> None:
        self._hear("on_start", run)

    def on_step(self, run: Any) -> None:
        self._hear("on_step", run)

    def on_evaluation(self, run: Any) -> None:
        self._hear("on_evaluation", run)

    def on_end(self, run: Any) -> None:
        self._hear("on_end", run)

    def on_exit(self, failure: str) -> None:
        self.heard.append(f"on_exit: {failure}")


class Remembers(Acts):
    """Is saved with the run."""

    def state_dict(self) -> dict[str, Any]:
        return {"heard": self.heard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.heard = [*state["heard"]]


class Changes(Acts):
    """Changes the model while it trains."""

    def _hear(self, event: str, run: Any) -> None:
        super()._hear(event, run)
        if event == "on_start":
            self.first: dict[str, Tensor] = {}
        if event != "on_step":
            return
        names = [name for name, p in run.model.named_parameters() if p.requires_grad]
        if run.done == 1:
            self.first = {name: p.detach().clone() for name, p in run.mean_model().named_parameters()}
        if run.done == 2:
            run.freeze(names[-1])
        if run.done == 4:
            run.unfreeze(names[-1])
            run.set_weights({name: self.first[name] for name in names if name in self.first})


HOOKS: dict[str, Callable[[], list[Any]]] = {
    "": lambda: [],
    "heard": lambda: [Acts()],
    "remembers": lambda: [Remembers(), Remembers()],
    "changes": lambda: [Changes()],
    "stops": lambda: [Acts("stops", step=4)],
    "stops-at-once": lambda: [Acts("stops", "on_evaluation", 0)],
    "early": lambda: [vsim.EarlyStopping(patience=1, min_delta=0.05), vsim.KeepBest()],
    "raises": lambda: [Acts("raises")],
}


@dataclass
class Part:
    """One call of several that make a case.

    Attributes:
        act: a callback's act, if any. saves: whether to give a save_dir. options: of the call.
    """

    act: tuple[Any, ...] = ()
    saves: bool = True
    options: Options | Callable[[Path], Options] | None = None


EVERY: Options = {"checkpoint_interval": 2}
AGAIN: Options = {"checkpoint_interval": 2, "resume": True}
HALF: Options = {"max_steps": 3}


def oldest(folder: Path) -> Path:
    """The oldest checkpoint that is left, from which the last steps are taken again; the folder if there is none."""
    return min(folder.glob("run/step-*"), default=folder / "run")


def cut(*act: Any, saves: bool = True, more: Options | None = None) -> list[Part]:
    """Cut by an act of a callback, and resumed."""
    first, again = (EVERY, AGAIN) if saves else ({}, {"resume": True})
    return [Part(act, saves, {**first, **(more or {})}), Part((), saves, {**again, **(more or {})})]


CUTS = {
    "cut": cut("interrupts"),
    "pressed": cut("presses"),
    "insisted": cut("insists"),
    "cut-at-start": cut("interrupts", "on_start", 0),
    "cut-in-validation": cut("interrupts", "on_evaluation", 2),
    "cut-before-first": cut("presses", "on_evaluation", 0),
    "cut-in-last": cut("interrupts", "on_step", STEPS),
    "cut-at-end": cut("presses", "on_end", STEPS),
    "insisted-in-validation": cut("insists", "on_evaluation", 4),
    "broken": cut("raises", "on_step", 5),
}
WAYS: dict[str, list[Part]] = {
    "": [Part(saves=False)],
    "saved": [Part(options=EVERY)],
    "resumed": [Part(options=EVERY), Part(saves=False, options=lambda folder: {"resume": oldest(folder)})],
    "longer": [Part(options=HALF), Part(options={"resume": True})],
    "longer-in-memory": [Part(saves=False, options=HALF), Part(saves=False, options={"resume": True})],
    "forked": [
        Part(options=EVERY),
        Part(saves=False, options=lambda folder: {"resume": vsim.load_checkpoint(oldest(folder)).fork(), "seed": 7}),
    ],
    "forked-anew": [
        Part(options=EVERY),
        Part(
            saves=False,
            options=lambda folder: {
                "resume": vsim.load_checkpoint(oldest(folder)).fork(optimizer=False),
                "strategy": s.DiLoCoStrategy(H=2, lr=1e-2),
            },
        ),
    ],
    **CUTS,
    "cut-in-memory": cut("presses", saves=False),
}

# Runs of their own ----------------------------------------------------------------------------------------------------

FIT: dict[str, Sequence[str]] = {
    "strategy": [*STRATEGIES],
    "executor": ["vmap", "vmap", "loop", "exact", "exact", "auto", "chunks"],
    "nodes": ["K1", "K2", "K4", "K4"],
    "model": ["", "", *MODELS],
    "data": ["", "", "", "own", "own", "dealt", *DATA],
    "batches": ["", *BATCHES],
    "schedule": ["", "", *SCHEDULES],
    "optimizer": [*OPTIMIZERS],
    "plan": ["", "", "", *PLANS],
    "validation": [*VALIDATIONS],
    "ends": ["", "", *ENDS],
    "hooks": ["", "", *HOOKS],
    "way": ["", *WAYS],
}


def is_possible(case: Choices) -> bool:
    """Whether vsim accepts these choices together; what it refuses is tested elsewhere."""
    strategy, plan = case.get("strategy", ""), case["plan"]
    one = case["nodes"] == "K1"
    reads = case["data"] in ("jittered", "failing", "mislabelled")
    return not any(
        (
            one and (case["plan"] not in ("", *COHORTS) or case["validation"] == "apart"),
            one and strategy in (*ON_A_CLOCK, "noloco", "gossip", "gossip-tracking", "attacked"),
            strategy in IN_GROUPS and (case["nodes"] != "K4" or plan),
            plan in COHORTS and strategy and strategy not in OF_CLIENTS,
            plan and strategy in (*ON_A_CLOCK, "attacked"),
            plan == "slow" and strategy == "fedavg-warm",
            plan == "local-epochs" and strategy in ("fedrep",),
            strategy in OWN_OPTIMIZER and case["optimizer"],
            strategy in ("dion", "muloco") and case["model"] not in ("", "dropped", "normed", "gpt"),  # hidden matrices
            strategy == "fedbn" and case["model"] not in ("normed", "tuned"),
            strategy == "demo" and case["schedule"] == "clipped",
            case["model"] == "gpt" and (case["data"] or case["ends"]),
            case["ends"] == "tuned-clients" and case["data"] not in ("own", "dealt"),
            reads and plan in COHORTS,
            case["model"] == "counting" and case["executor"] in ("vmap", "chunks"),
            case["model"] in ("counting", "outputs") and strategy in ("fedper", "fedrep"),
            case["model"] in ("normed", "tuned") and case["batches"] in ("threes", "pieces", "accumulated"),
            "clients" in case["ends"] and plan not in ("", *COHORTS) and strategy in PERSONAL,
            (case["data"] in ("failing", "mislabelled") or case["schedule"] == "diverging")
            and case["way"] not in ("", "saved", "cut", "extended", "broken"),
            case["model"] in ("counting", "outputs") and strategy == "streaming",
            case["batches"] == "epochs" and plan and strategy == "fedavg-warm",
            case["validation"] == "unvalidated" and (case["hooks"] == "early" or "validation" in case["way"]),
            case["batches"] == "epochs" and case["way"].startswith("longer"),
            # A schedule over the run's steps is another one if the run is longer.
            case["schedule"] in ("cosine", "warmup") and case["way"].startswith("longer"),
            case["way"] != "" and case["hooks"] in ("raises", "stops-at-once"),
            case["way"].startswith("forked") and (plan in COHORTS or strategy in ON_A_CLOCK),
            plan == "stored" and case["way"] == "cut-in-memory",
        )
    )


def data_of(case: Choices, num_nodes: int) -> tuple[Any, Any]:
    population = {"cohorts": 2, "stored": 2, "local-epochs": 2, "overcommitted": 3}.get(case["plan"])
    everyone = num_nodes if population is None else population * num_nodes + 1
    if case["model"] == "gpt":
        train, val = tokens(), tokens(7, seed=1)
    else:
        train, val = DATA[case["data"]](everyone), examples(7, seed=1)
    return train, None if case["validation"] == "unvalidated" else val


def options_of(case: Choices, num_nodes: int, folder: Path) -> Options:
    """The options that a run and a comparison share."""
    options = {"num_nodes": num_nodes, "max_steps": STEPS, "progress": False, **EXECUTORS[case["executor"]]}
    options |= BATCHES[case["batches"]] | VALIDATIONS[case["validation"]] | ENDS[case["ends"]]
    options |= PLANS[case["plan"]](num_nodes, folder)
    return {name: value for name, value in options.items() if value is not None or name == "val_interval"}


def loss_of(case: Choices) -> Options:
    return {"loss_fn": F.cross_entropy} if case["model"] == "outputs" else {}


def strategy_of(name: str, **more: Any) -> s.Algorithm:
    if "inner_optim" not in more or "lr" not in more:
        more = {"lr": 1e-2, **more}
    return STRATEGIES[name](**more)


def fit(case: Choices, folder: Path, **more: Any) -> Record:
    record: Record = {}
    num_nodes = NODES[case["nodes"]]
    trainer: Any = None
    for number, part in enumerate(WAYS[case["way"]]):
        clock = {"compute": COMPUTE, "network": "1 Mbit/s"} if case["strategy"] in ON_A_CLOCK else {}
        in_memory = number > 0 and not part.saves and part.options == {"resume": True}
        train, val = data_of(case, num_nodes)
        trainer = trainer if in_memory else vsim.Trainer(MODELS[case["model"]](), train, val, **loss_of(case))
        act = [Acts(*part.act)] if part.act else []
        callbacks = [*HOOKS[case["hooks"]](), *act]
        with noted(record, f"{number}: "):
            options = options_of(case, num_nodes, folder) | clock | more
            options["strategy"] = strategy_of(
                case["strategy"], **{**OPTIMIZERS[case["optimizer"]], **SCHEDULES[case["schedule"]]}
            )
            options |= part.options(folder) if callable(part.options) else part.options or {}
            options |= {"save_dir": folder / "run"} if part.saves else {}
            model = trainer.fit(**options, callbacks=callbacks)
            record |= of_model(f"{number}: model", model)
        if trainer.history is not None:
            record |= of_history(f"{number}: ", trainer.history) | of_nodes(f"{number}: ", trainer)
        record[f"{number}: heard"] = [line for one in callbacks for line in heard_by(one)]
        record[f"{number}: files"] = names_in(folder)
    return record


# Comparisons ----------------------------------------------------------------------------------------------------------

SETS: dict[str, dict[str, tuple[str, Options]]] = {
    "pair": {"allreduce": ("allreduce", {}), "diloco": ("diloco", {})},
    "three": {name: (name, {}) for name in ("allreduce", "fedavg", "sparta")},
    "local": {name: (name, {}) for name in ("alone", "fedavg", "diloco", "streaming", "slowmo")},
    "rates": {f"lr={lr}": ("fedavg", {"lr": lr}) for lr in (1e-1, 1e-2, 1e-3)},
    "optimizers": {name: ("fedavg", more) for name, more in OPTIMIZERS.items() if name}
    | {"faster": ("diloco", {"inner_optim": SGD, "lr": 0.1})},
    "schedules": {name: ("diloco", more) for name, more in SCHEDULES.items() if name},
    "many": {
        name: (name, {}) for name in ("demo", "dion", "gpa", "noloco", "gossip", "edit", "sparta-late", "allreduce")
    },
    "federated": {name: (name, {}) for name in ("fedavg", "fedprox", "scaffold", "fedper", "ditto", "fednova")},
    "clocked": {name: (name, {}) for name in ("diloco", "async-diloco", "decoupled")},
    "drawing": {name: (name, {}) for name in ("sparta", "noloco", "qsgd", "dpfedavg")},
}
EVENTS: dict[str, Options] = {  # what goes wrong, or ends early
    "": {},
    "one-diverges": {"also": ("bad", lambda: s.FedAvgStrategy(H=3, inner_optim=SGD, lr=1e30))},
    "one-fails": {"also": ("bad", lambda: Failing(H=2, lr=1e-2))},
    "one-raises": {"callbacks": lambda: [Acts("raises", step=3, only="DiLoCo")]},
    "one-raises-at-end": {"callbacks": lambda: [Acts("raises", "on_end", STEPS, "FedAvg")]},
    "one-stops": {"callbacks": lambda: [Acts("stops", step=3, only="FedAvg")]},
    "all-stop": {"callbacks": lambda: [Remembers("stops", step=4)]},
    "early": {"callbacks": lambda: [vsim.EarlyStopping(patience=1, min_delta=0.02), vsim.KeepBest()]},
    "heard": {"callbacks": lambda: [Acts()]},
}
LENGTHS = {"": False, "by-name": True}
SEEDS: dict[str, Options] = {"": {}, "two-seeds": {"seeds": [1, 2]}}
TOGETHER: dict[str, Options] = {"": {}, "one-by-one": {"together": False}}
APART: Options = {"together": False}
OF_ALL: dict[str, list[Part]] = {
    "": [Part(saves=False)],
    "saved": [Part(options=EVERY)],
    "again": [Part(options=EVERY), Part(options=AGAIN)],
    "longer": [Part(options=HALF), Part(options={"resume": True})],
    "auto": [Part(options={"resume": "auto"}), Part(options={"resume": "auto"})],
    **CUTS,
    "cut-unsaved": [Part(("presses",), saves=False)],
    "cut-apart": cut("presses", "on_step", 3, "DiLoCo", more=APART),
    # Runs that are one after the other when they are cut are at different steps, and go on together.
    "cut-apart-then-together": [
        Part(("presses", "on_step", 3, "DiLoCo"), options={**EVERY, **APART}),
        Part(options=AGAIN),
    ],
    "broken-in-one": cut("raises", "on_step", 1, "DiLoCo"),
    "extended": [Part(saves=False, options=HALF), Part(saves=False, options={"extend": True})],
}
COMPARED: dict[str, Sequence[str]] = {
    "set": [*SETS],
    "executor": ["vmap", "vmap", "loop", "exact", "auto"],
    "nodes": ["K1", "K2", "K4"],
    "model": ["", "", *MODELS],
    "data": ["", "", "own", "dealt", *DATA],
    "batches": ["", *BATCHES],
    "plan": ["", "", "", "joins", "fails", "drops", "slow", "cohorts", "overcommitted"],
    "validation": [*VALIDATIONS],
    "ends": ["", *ENDS],
    "event": ["", *EVENTS],
    "lengths": ["", "", *LENGTHS],
    "seeds": ["", "", *SEEDS],
    "together": ["", "", *TOGETHER],
    "way": ["", "", *OF_ALL],
}


def is_comparable(case: Choices) -> bool:
    names = {name for name, _ in SETS[case["set"]].values()}
    one = case["nodes"] == "K1"
    return all(is_possible({**case, "hooks": "", "optimizer": "", "schedule": "", "strategy": n}) for n in names) and (
        not any(
            (
                case["event"] == "early" and case["validation"] == "unvalidated",
                case["way"] == "longer" and (case["set"] == "schedules" or case["lengths"]),
                case["way"] == "extended" and (case["lengths"] or case["batches"] == "epochs"),
                case["batches"] == "epochs" and case["lengths"],
                "apart" in case["way"] and case["together"],
                one and case["set"] in ("many", "drawing"),
                case["set"] == "clocked" and case["plan"],
                case["model"] == "counting" and case["set"] in ("many",),
            )
        )
    )


def compared(case: Choices, folder: Path, **more: Any) -> Record:
    record: Record = {}
    num_nodes, event = NODES[case["nodes"]], EVENTS[case["event"]]
    earlier: Any = None
    for number, part in enumerate(OF_ALL[case["way"]]):
        train, val = data_of(case, num_nodes)
        act = [Acts(*part.act)] if part.act else []
        with noted(record, f"{number}: "):
            strategies = {name: strategy_of(of, **own) for name, (of, own) in SETS[case["set"]].items()}
            if "also" in event:
                strategies[event["also"][0]] = event["also"][1]()
            options = options_of(case, num_nodes, folder) | SEEDS[case["seeds"]] | TOGETHER[case["together"]]
            if case["set"] == "clocked":
                options |= {"compute": COMPUTE, "network": "1 Mbit/s"}
            if case["lengths"]:
                options["max_steps"] = {name: STEPS - i % 3 for i, name in enumerate(strategies)}
            options |= more | loss_of(case)
            options |= part.options or {}  # type: ignore[operator]
            if options.get("extend"):
                options["extend"] = earlier
            elif case["way"] == "extended":
                strategies = dict(itertools.islice(strategies.items(), 1))
                options["max_steps"] = STEPS
            options |= {"save_dir": folder / "all"} if part.saves else {}
            callbacks = [*event.get("callbacks", list)(), *act]
            earlier = vsim.compare(
                MODELS[case["model"]](), train, val, strategies=strategies, **options, callbacks=callbacks
            )
            record |= of_comparison(f"{number}: ", earlier)
        record[f"{number}: files"] = names_in(folder)
    return record


# Sweeps and searches --------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Options] = {
    "H": {"H": [1, 2, 3]},
    "rates": {"lr": [1e-1, 1e-2, 1e-3, 1e-4]},
    "diverging": {"lr": [1e-2, 1e30, 1e-3], "inner_optim": SGD},
    "sizes": {"H": [1, 2], "batch_size": [2, 4]},
    "nodes": {"H": [2, 4], "num_nodes": [2, 3]},
}
SWEPT: dict[str, Sequence[str]] = {
    "settings": [*SETTINGS],
    "halving": ["halving", "halving", "thirds", ""],
    "strategy": ["fedavg", "diloco"],
    "executor": ["vmap", "exact", "auto"],
    "model": ["", "dropped", "normed", "counting"],
    "plan": ["", "", "joins", "drops", "cohorts"],
    "validation": ["", "unvalidated", "at-ends", "measured"],
    "ends": ["", "tested", "of-clients"],
    "event": ["", "", "all-stop", "early", "heard", "one-raises"],
    "seeds": ["", "two-seeds"],
    "way": ["", "saved", "again", "cut-before-rung", "cut-at-rung", "cut-after-rung", "insisted-at-rung"],
}
LONG, RUNG = 12, 6  # steps, and the last rung of halving; the first is 3
OF_SWEEPS: dict[str, list[Part]] = {
    "": [Part(saves=False)],
    "saved": [Part(options=EVERY)],
    "again": [Part(options=EVERY), Part(options=AGAIN)],
    "cut-before-rung": cut("presses", "on_step", RUNG - 1),
    "cut-at-rung": cut("interrupts", "on_step", RUNG),
    "cut-after-rung": cut("presses", "on_step", RUNG + 1),
    "insisted-at-rung": cut("insists", "on_step", RUNG),
}


def is_swept(case: Choices) -> bool:
    return not any(
        (
            case["event"] == "early" and case["validation"] == "unvalidated",
            case["model"] == "counting" and case["executor"] == "vmap",
            case["settings"] == "nodes" and case["plan"] == "cohorts",
            case["settings"] == "nodes" and case["ends"] == "of-clients",
            case["settings"] == "nodes" and case["plan"] == "joins",
        )
    )


def swept(case: Choices, folder: Path, **more: Any) -> Record:
    record: Record = {}
    case = {"nodes": "K2", "data": "", "batches": "", **case}
    cls = {"fedavg": s.FedAvgStrategy, "diloco": s.DiLoCoStrategy}[case["strategy"]]
    for number, part in enumerate(OF_SWEEPS[case["way"]]):
        train, val = data_of(case, 2)
        with noted(record, f"{number}: "):
            options = options_of(case, 2, folder) | SEEDS[case["seeds"]] | {"max_steps": LONG} | more
            settings = {"lr": 1e-2, **SETTINGS[case["settings"]]}
            for name in ("batch_size", "num_nodes"):
                if name in settings:
                    del options[name]
            options |= {"halving": {"halving": 2, "thirds": 3}.get(case["halving"])}
            options |= part.options or {}  # type: ignore[operator]
            options |= {"save_dir": folder / "all"} if part.saves else {}
            act = [Acts(*part.act)] if part.act else []
            callbacks = [*EVENTS[case["event"]].get("callbacks", list)(), *act]
            found = vsim.sweep(
                MODELS[case["model"]](), train, val, strategy=cls, settings=settings, callbacks=callbacks, **options
            )
            record |= of_comparison(f"{number}: ", found)
        record[f"{number}: files"] = names_in(folder)
    return record


def searched(folder: Path, pruned: bool, saves: bool) -> Record:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    record: Record = {}

    def space(trial: Any) -> s.Algorithm:
        return s.DiLoCoStrategy(H=trial.suggest_int("H", 1, 3), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))

    options: Options = {"num_nodes": 2, "max_steps": 6, "val_interval": 2, "batch_size": 4, "progress": False}
    if pruned:
        options["pruner"] = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=0)
    for number in range(1 + saves):
        with noted(record, f"{number}: "):
            own = {"save_dir": folder / "found", "trials": 4 + 4 * number} if saves else {"trials": 8}
            found = vsim.tune(mlp(), examples(), examples(7, seed=1), space=space, together=4, **options, **own)
            record |= of_comparison(f"{number}: ", found)
            record[f"{number}: trials"] = [str((t.number, t.params, t.values, t.state)) for t in found.study.trials]
    return record


def tuned(folder: Path, **more: Any) -> Record:
    record: Record = {}
    strategies = {"fedavg": s.FedAvgStrategy(H=2), "diloco": s.DiLoCoStrategy(H=2)}
    options: Options = {"num_nodes": 2, "max_steps": 6, "val_interval": 2, "batch_size": 4, "progress": False}
    with noted(record, ""):
        found = vsim.compare(
            mlp(),
            examples(),
            examples(7, seed=1),
            strategies=strategies,
            tune={"lr": [1e-3, 1e-2, 1e-1]},
            **{**options, **more},
        )
        record |= of_comparison("", found)
        for name, own in found.tuned.items():
            record |= of_comparison(f"tuned {name}: ", own)
    return record


def budgeted(folder: Path) -> Record:
    record: Record = {}
    with noted(record, ""):
        found = vsim.compare(
            mlp(),
            examples(),
            examples(7, seed=1),
            strategies={"allreduce": s.SimpleReduceStrategy(lr=1e-2), "fedavg": s.FedAvgStrategy(H=3, lr=1e-2)},
            num_nodes=2,
            budget={"wire": 2000},
            max_steps=12,
            batch_size=4,
            progress=False,
        )
        record |= of_comparison("", found)
    return record


def shaken(folder: Path, **more: Any) -> Record:
    """Runs that draw from Python's generator."""
    record: Record = {}
    with noted(record, ""):
        found = vsim.compare(
            seeded(Shaken),
            examples(),
            strategies={"fedavg": s.FedAvgStrategy(H=2, lr=1e-2), "alone": s.AloneStrategy(lr=1e-2)},
            **{"num_nodes": 2, "max_steps": 5, "batch_size": 4, "progress": False, **more},
        )
        record |= of_comparison("", found)
    return record


def logged(folder: Path, together: bool, **more: Any) -> Record:
    """Loggers and hooks of losses, in a run of its own or in a comparison."""
    record: Record = {}
    heard: list[str] = []
    options: Options = {"num_nodes": 2, "max_steps": 5, "val_interval": 2, "batch_size": 4, "progress": False, **more}
    options |= {"logger": vsim.CSVLogger(folder / "logs"), "run_name": "run"}
    options["train_loss_hook"] = lambda step, loss: heard.append(f"trained {step} {loss!r}")
    options["eval_loss_hook"] = lambda step, loss: heard.append(f"validated {step} {loss!r}")
    fedavg, diloco = s.FedAvgStrategy(H=2, lr=1e-2), s.DiLoCoStrategy(H=2, lr=1e-2)
    data = mlp(), examples(), examples(7, seed=1)
    with noted(record, ""):
        if together:
            found = vsim.compare(*data, strategies={"fedavg": fedavg, "diloco": diloco}, **options)
            record |= of_comparison("", found)
        else:
            vsim.Trainer(*data).fit(strategy=fedavg, **options)
    record["heard"] = sorted(heard)  # the order across runs is no promise
    for path in folder.rglob("*.csv"):
        with open(path, newline="", encoding="utf-8") as file:
            rows = [*csv.DictReader(file)]
        rows = [{n: value for n, value in row.items() if not re.search("second|memory", n)} for row in rows]
        record[f"file {path.relative_to(folder)}"] = [str(row) for row in rows]
    return record


def priced(strategy: str, folder: Path) -> Record:
    record: Record = {}
    with noted(record, ""):
        clock = {"network": "1 Mbit/s", "compute": 0.8}
        record["price"] = repr(vsim.price(strategy_of(strategy), model=mlp(), num_nodes=4, max_steps=7, **clock))
    return record


def verified(folder: Path, **more: Any) -> Record:
    record: Record = {}
    with noted(record, ""):
        options: Options = {"num_nodes": 2, "max_steps": 3, "batch_size": 4, "threads": 1}
        report = vsim.verify(mlp(), examples(), s.DiLoCoStrategy(H=2, lr=1e-2), **{**options, **more})
        record["identical"] = str(report.identical)
    return record


# What a case comes to -------------------------------------------------------------------------------------------------


class noted:
    """Note in a record how a call ended: the error, and the warnings."""

    def __init__(self, record: Record, prefix: str) -> None:
        self.record, self.prefix = record, prefix
        self.catching = warnings.catch_warnings(record=True)

    def __enter__(self) -> None:
        self.warned = self.catching.__enter__()
        warnings.simplefilter("always")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self.catching.__exit__(kind, error, trace)
        own = {str(one.message) for one in self.warned if issubclass(one.category, UserWarning)}
        self.record[f"{self.prefix}warnings"] = sorted(own)
        self.record[f"{self.prefix}error"] = ""
        if error is not None:
            self.record[f"{self.prefix}error"] = f"{type(error).__name__}: {error}"
        if isinstance(error, AssertionError | NameError | AttributeError):  # most likely of this file
            traceback.print_exception(error)
        return isinstance(error, Exception | KeyboardInterrupt)


def plain(value: Any, folder: Path) -> Any:
    """Return a field of a record; in texts, "…" is in place of what differs from process to process."""
    if isinstance(value, list):
        return [plain(one, folder) for one in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"0x[0-9a-f]+|(?<=compiled in )[\d.]+", "…", value.replace(str(folder), "…"))


def of_model(name: str, model: nn.Module | None) -> Record:
    if model is None:
        return {name: "none"}
    return {
        name: np.concatenate([torch.as_tensor(own).double().numpy().ravel() for own in model.state_dict().values()])
    }


def of_nodes(prefix: str, trainer: Any) -> Record:
    """The nodes' weights and some clients' models at the end: the only place that looks inside a strategy."""
    if trainer.strategy is None:
        return {}
    record: Record = {f"{prefix}weights": trainer.strategy.cluster.weights.detach().double().numpy().copy()}
    for client in (0, 1):
        try:
            record |= of_model(f"{prefix}model of client {client}", trainer.client_model(client))
        except ValueError as error:
            record[f"{prefix}model of client {client}"] = str(error)
    return record


def of_history(prefix: str, history: vsim.History) -> Record:
    columns = {name: history[name] for name in history.columns if name not in OF_THE_MACHINE}
    record: Record = {f"{prefix}column {name}": np.array(values) for name, values in columns.items()}
    ledger = history.ledger
    return {
        **record,
        f"{prefix}losses": np.array(history.node_losses),
        f"{prefix}losses of clients": np.array(history.client_val_losses),
        f"{prefix}accuracies of clients": np.array(history.client_val_accuracies),
        f"{prefix}events": [repr(tuple(event)) for event in ledger],
        f"{prefix}attendance": [repr(tuple(segment)) for segment in ledger.attendance],
        f"{prefix}bytes": np.array([ledger.payload_bytes, ledger.wire_bytes, ledger.total_wire_bytes, ledger.steps]),
        f"{prefix}computed": f"{history.executor}; {history.executor_reason}; {history.minibatch_size}",
    }


def of_comparison(prefix: str, comparison: Any) -> Record:
    record: Record = {f"{prefix}runs": [f"{name}: {len(comparison.runs(name))}" for name in comparison]}
    for name in comparison:
        for run in comparison.runs(name):
            own = f"{prefix}{name}, {run.seed}: "
            record[f"{own}ended"] = [run.failure, str(run.stopped_at), str(run.diverged_at), run.note]
            record |= of_model(f"{own}model", run.model) | of_history(own, run.history)
            record[f"{own}heard"] = [line for one in run.callbacks for line in heard_by(one)]
    return record


def heard_by(callback: Any) -> list[str]:
    if isinstance(callback, Acts):
        return callback.heard
    return [f"{type(callback).__name__} {callback.best} {callback.best_step}"]


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# The list of cases ----------------------------------------------------------------------------------------------------


def covering(number: int, dimensions: Mapping[str, Sequence[str]], allowed: Callable[[Choices], bool]) -> list[Choices]:
    """Draw different cases in which the pairs of choices meet about equally often."""
    stream, met, found = random.Random(0), collections.Counter[Any](), dict[str, Choices]()
    while len(found) < number:
        drawn = ({name: stream.choice(choices) for name, choices in dimensions.items()} for _ in range(60))
        candidates = [case for case in drawn if allowed(case) and name_of(case) not in found]
        if not candidates:
            continue
        best = max(candidates, key=lambda case: sum(1 / (1 + met[pair]) for pair in pairs(case)))
        met.update(pairs(best))
        found[name_of(best)] = best
    return [*found.values()]


def pairs(case: Choices) -> Iterator[Any]:
    return itertools.combinations(case.items(), 2)


def name_of(case: Choices) -> str:
    return "-".join(choice for choice in case.values() if choice)


PROCESSES: Options = {"backend": "process", "threads_per_process": 1, "timeout_seconds": 60}
TWO: Options = {**PROCESSES, "num_processes": 2}
PLAIN = dict.fromkeys(FIT, "") | {"strategy": "diloco", "executor": "vmap", "nodes": "K4"}
TOGETHER_PLAIN = dict.fromkeys(COMPARED, "") | {"set": "pair", "executor": "vmap", "nodes": "K4"}
SWEPT_PLAIN = dict.fromkeys(SWEPT, "") | {"settings": "H", "strategy": "fedavg", "executor": "vmap"}


def cases() -> dict[str, Callable[[Path], Record]]:
    """Return name → f(an empty folder) → what the case comes to."""
    found: dict[str, Callable[[Path], Record]] = {}

    def add(name: str, function: Callable[..., Record], *arguments: Any, **more: Any) -> None:
        assert name not in found, name
        found[name] = lambda folder: function(*arguments, folder=folder, **more)

    for case in covering(660, FIT, is_possible):
        add(name_of(case), fit, case)
    for case in covering(230, COMPARED, is_comparable):
        add(f"compare-{name_of(case)}", compared, case)
    for case in covering(60, SWEPT, is_swept):
        add(f"sweep-{name_of(case)}", swept, case)
    for name in STRATEGIES:
        if name not in (*ON_A_CLOCK, "fedbn"):
            add(f"price-{name}", priced, name)
    for pruned, saves in itertools.product((False, True), repeat=2):
        add("tune" + "-pruned" * pruned + "-saved" * saves, searched, pruned=pruned, saves=saves)
    add("compare-tuned", tuned)
    add("compare-tuned-two-seeds", tuned, seeds=[1, 2])
    add("compare-budget", budgeted)
    for together in (False, True):
        add("compare-logged" if together else "logged", logged, together=together)
        add("processes-logged" + "-together" * together, logged, together=together, **TWO)
    add("compare-drawing-from-python", shaken)
    add("compare-drawing-from-python-one-by-one", shaken, together=False)
    add("compile", fit, {**PLAIN, "executor": "auto"}, compile=True)
    add("compile-cut", fit, {**PLAIN, "executor": "auto", "strategy": "allreduce", "way": "cut"}, compile=True)
    add("compile-compare", compared, {**TOGETHER_PLAIN, "executor": "auto"}, compile=True)
    add("processes-one-each", fit, {**PLAIN, "executor": "auto", "nodes": "K2", "hooks": "remembers"}, **PROCESSES)
    for more in (
        {},
        {"strategy": "sparta", "model": "normed", "executor": "exact", "way": "resumed"},
        {"strategy": "fedavg", "plan": "joins", "way": "cut", "hooks": "remembers"},
        {"strategy": "fedavg", "plan": "cohorts", "data": "own", "ends": "of-clients", "way": "saved"},
        {"strategy": "fedadam", "plan": "fails", "executor": "exact", "ends": "tested", "data": "own"},
        {"strategy": "allreduce", "hooks": "stops", "validation": "apart", "way": "saved"},
        {"strategy": "demo", "data": "mislabelled"},
        {"strategy": "diloco", "optimizer": "sgd", "schedule": "diverging"},
    ):
        add(f"processes-{name_of({**PLAIN, **more})}", fit, {**PLAIN, **more}, **TWO)
    for more in (
        {},
        {"event": "one-diverges", "way": "saved"},
        {"set": "three", "plan": "drops", "seeds": "two-seeds"},
    ):
        add(f"processes-compare-{name_of({**TOGETHER_PLAIN, **more})}", compared, {**TOGETHER_PLAIN, **more}, **TWO)
    add("processes-sweep-halving", swept, {**SWEPT_PLAIN, "halving": "halving", "way": "saved"}, **TWO)
    add("verify", verified)
    add("verify-ranges", verified, num_nodes=3, num_processes=2)
    return found


def work(argv: Sequence[str]) -> None:
    """Compute the cases in argv[2:], or all, with the checkout argv[0], and write their records to the file argv[1]."""
    checkout, file, *names = argv
    if not Path(vsim.__file__).is_relative_to(Path(checkout).resolve()):
        raise SystemExit(f"vsim is imported from {vsim.__file__}, not from {checkout}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    torch.set_num_threads(1)
    every = cases()
    with open(file, "wb") as out:
        for number, name in enumerate(names or every, 1):
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002  # the global generator is what is set
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory(prefix="vsim-case-") as folder:
                try:
                    record = every[name](Path(folder))
                except Exception as error:  # a case that this file gets wrong
                    traceback.print_exc()
                    record = {NOT_NOTED: repr(error)}
                record = {field: plain(value, Path(folder)) for field, value in record.items()}
            pickle.dump((name, record), out)
            out.flush()
            if number % 100 == 0:
                print(f"{checkout}: {number} cases", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(*cases(), sep="\n")
