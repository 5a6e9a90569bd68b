"""When nodes synchronize: schedules of H by hand, against torch's averagers, in cohorts, prices and resumed runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import refused
from strategies_by_hand import Driven, Parameters, driven, driven_apart, normal, size, started
from test_strategies_common import TABLE, P, Row, model, uneven, weights
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import vsim
from vsim import Trainer
from vsim.cluster.participation import Dropout, Sample
from vsim.strategy import (
    QSR,
    Algorithm,
    DiLoCoStrategy,
    DittoStrategy,
    DPFedAvgStrategy,
    EagerDiLoCoStrategy,
    Every,
    FedAvgStrategy,
    FedBNStrategy,
    FedPerStrategy,
    FedProxStrategy,
    HierarchicalStrategy,
    NoLoCoStrategy,
    OptimSpec,
    PostLocal,
    Seconds,
    SimpleReduceStrategy,
    SlowMoStrategy,
    Strategy,
    TopK,
    When,
    clip,
    compress,
    edit,
    mean,
)
from vsim.strategy.average import average_of

PLAIN: dict[str, Any] = {"inner_optim": "sgd", "lr": 0.1}
SGD: dict[str, Any] = {"inner_optim": "sgd", "lr": 1e-2}


def run(strategy: Strategy, max_steps: int = 10, **options: Any) -> Trainer:
    trainer = Trainer(model(), uneven)
    trainer.fit(strategy=strategy, num_nodes=4, max_steps=max_steps, batch_size=8, progress=False, **options)
    return trainer


def steps_of(trainer: Trainer, label: str = "weights") -> list[int]:
    return [event.step for event in trainer.ledger if event.label == label]


def test_qsr_by_hand() -> None:
    # lr 0.4 / 2^(t − 1) in step t; α = 0.2, H ≥ 2: (0.2 / lr)² = 4^(t − 2). A round from step 1 has 1/4, so it takes 2
    # steps; from step 3 it has 4: to 6; from step 7 4^5 = 1024: the 18 that are left.
    halved = {"lr_scheduler": torch.optim.lr_scheduler.ExponentialLR, "lr_scheduler_kwargs": {"gamma": 0.5}}
    strategy = FedAvgStrategy(H=QSR(0.2, 2), inner_optim="sgd", lr=0.4, **halved)
    assert steps_of(run(strategy, 24)) == [2, 6, 24]
    # During the warm-up the minimum, whatever the rate.
    strategy = FedAvgStrategy(H=QSR(0.2, 2, warmup_steps=5), inner_optim="sgd", lr=0.4, **halved)
    assert steps_of(run(strategy, 24)) == [2, 4, 6, 24]
    # The rate falls after syncs: 0.1 in steps 1 … 8, 0.05 to 16, 0.025 to 24, then 0.0125, for 4, 16, 64 and 256 steps.
    strategy = FedAvgStrategy(
        H=QSR(0.2, 2),
        **PLAIN,
        lr_scheduler=torch.optim.lr_scheduler.StepLR,
        **{"lr_scheduler_kwargs": {"step_size": 8, "gamma": 0.5}},
    )
    assert steps_of(run(strategy, 32)) == [4, 8, 24, 32] == list(strategy.syncs(32, None))
    assert QSR(0.03, 1, power=3).after(7, 0.01, 100, None) == 7 + 27
    assert QSR(0.03, 1).after(7, 0.0, 100, None) == 107


class ByTheRate(When):
    """After 1 to 3 steps, by the digits of the learning rates that it gets; `seen` has them by the step of the sync."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def after(self, step: int, lr: float, steps_left: int, seconds: Any) -> int:
        self.seen[step] = lr
        return step + 1 + round(1e5 * lr) % 3


class Sequential(torch.optim.lr_scheduler.SequentialLR):
    def __init__(self, optimizer: Any) -> None:
        parts: list[Any] = [torch.optim.lr_scheduler.ExponentialLR(optimizer, g) for g in (0.5, 0.9)]
        super().__init__(optimizer, parts, [5])


class Chained(torch.optim.lr_scheduler.ChainedScheduler):
    def __init__(self, optimizer: Any) -> None:
        parts: list[Any] = [torch.optim.lr_scheduler.ExponentialLR(optimizer, g) for g in (0.5, 0.9)]
        super().__init__(parts, optimizer)


@pytest.mark.parametrize(
    ("scheduler", "kwargs"),
    [
        ("cosine", {"warmup_steps": 3}),
        (torch.optim.lr_scheduler.OneCycleLR, {"max_lr": 0.3, "total_steps": 12}),
        (Sequential, {}),
        (Chained, {}),
        (None, None),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("make", "inner"),
    [
        (FedAvgStrategy, OptimSpec("sgd", lr=0.1, momentum=0.9)),
        (EagerDiLoCoStrategy, OptimSpec("adam", lr=torch.tensor(0.1))),
    ],
    ids=str,
)
def test_a_schedule_gets_the_rate_of_the_step_that_begins(make: Any, inner: Any, scheduler: Any, kwargs: Any) -> None:
    strategy = make(inner_optim=inner, H=ByTheRate(), lr_scheduler=scheduler, lr_scheduler_kwargs=kwargs)
    shapes = Parameters((3,))
    course, rates, due = started(strategy, shapes, 2, max_steps=12), [], []
    for gradients in normal(12, 2, 3):
        rates.append(course.strategy.cluster.lr)
        course.step(gradients)
        due += [event.step for event in course.ledger[len(due) :]]
    seen = course.strategy.parts[0].when.seen
    assert list(seen) == [0, *due]
    assert {t: lr for t, lr in seen.items() if t < 12} == {t: rates[t] for t in seen if t < 12}
    assert due == list(strategy.syncs(12, None))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_post_local_sgd_is_torchs_averager(momentum: float) -> None:
    # torch averages after steps w, w + H, … counted from 0, vsim after w + H, w + 2H, …, counted from 1.
    w, H, K = 3, 2, 3
    shapes = Parameters((5, 3), (7,))
    gradients = normal(9, K, size(shapes), seed=4)
    inner = OptimSpec("sgd", lr=0.1, momentum=momentum)
    ours = driven(FedAvgStrategy(inner_optim=inner, H=PostLocal(w, H)), shapes, gradients, deterministic=True)
    nodes = [copy.deepcopy(shapes) for _ in range(K)]
    optims = [torch.optim.SGD(node.parameters(), lr=0.1, momentum=momentum) for node in nodes]
    averager = PeriodicModelAverager(period=H, warmup_steps=w + H - 1, process_group=object())  # type: ignore[arg-type]
    for step in range(1, 10):
        own = gradients[step - 1]
        if step <= w:
            own = own.mean(0).expand(K, -1)
        for node, optim, row in zip(nodes, optims, own, strict=True):
            for p, piece in zip(node.parameters(), row.split([p.numel() for p in node.parameters()]), strict=True):
                p.grad = piece.view_as(p).clone()
            optim.step()
        due = averager.step >= averager.warmup_steps and (averager.step - averager.warmup_steps) % averager.period == 0
        averager.step += 1
        if due:
            flat = torch.stack([torch.cat([p.detach().flatten() for p in node.parameters()]) for node in nodes]).mean(0)
            for node in nodes:
                torch.nn.utils.vector_to_parameters(flat.clone(), node.parameters())
    expected = torch.stack([torch.cat([p.detach().flatten() for p in node.parameters()]) for node in nodes])
    assert torch.equal(ours.cluster.weights, expected)
    sent = [(1, "gradients"), (2, "gradients"), (3, "gradients"), (5, "weights"), (7, "weights"), (9, "weights")]
    assert [(e.step, e.label) for e in ours.ledger] == sent


def test_outer_weights_follow_a_warm_up() -> None:
    # Gradients 1 and 3, rate 0.1: two steps of 0.2 together, then two alone and an outer step of the mean distance.
    strategy = DiLoCoStrategy(H=PostLocal(2, 2), outer_optim=OptimSpec("sgd", lr=1.0), **PLAIN)
    shapes = Parameters((1,))
    start = float(shapes.p0.detach())
    gradients = torch.tensor([[1.0], [3.0]]).expand(4, 2, 1)
    half = driven(strategy, shapes, gradients[:2])
    assert half.strategy.model_weights().tolist() == pytest.approx([start - 0.4])
    whole = driven(strategy, shapes, gradients)
    assert whole.cluster.weights.flatten().tolist() == pytest.approx([start - 0.8] * 2)


# Averages of a warm-up; and groups, whose H is no argument.
AVERAGES = ("krum", mean() | clip("median"), clip(0.5), edit(), compress(TopK(0.3)))
Warm = tuple[Callable[[Any], Algorithm], Any]  # made from H, and what averages in the warm-up


def _of_row(row: Row, **given: Any) -> Warm:
    average = {**row.arguments, **given}.get("average", "mean") if row.warm is None else row.warm
    inner = {"lr": SGD["lr"]} if row.refuses else SGD
    return lambda H: row.make(**{**inner, "H": H, **given}), average


def _hierarchy(**given: Any) -> Callable[[Any], Algorithm]:
    return lambda H: HierarchicalStrategy({5: H}, **SGD, **given)


def _fedavg(average: Any) -> Callable[[Any], Algorithm]:
    return lambda H: FedAvgStrategy(H=H, **SGD, average=average)


ROWS = [row for row in TABLE if row.schedules and row.cls is not DittoStrategy]  # Ditto computes gradients itself
WARM: dict[str, Warm] = {
    **{row.name: _of_row(row) for row in ROWS},
    **{
        f"{row.name}, {row.changes['average']}": _of_row(row, average=row.changes["average"])
        for row in ROWS
        if row.warm is None and "average" in row.changes
    },
    **{f"FedAvg, {average}": (_fedavg(average), average) for average in AVERAGES},
    "hierarchy": (_hierarchy(average="median"), "median"),
    "hierarchy of DiLoCo": (_hierarchy(outer="sgd", outer_lr=0.5), "mean"),
}
SHAPES = Parameters((4, 6), (5,))


def with_shards(strategy: Strategy, module: torch.nn.Module, gradients: torch.Tensor) -> Driven:
    """Take a step for each of `gradients`; the nodes have 1, 2, … examples."""
    course = started(strategy, module, gradients.shape[1])
    course.cluster.shard_sizes = torch.arange(1.0, 1 + gradients.shape[1])
    for given in gradients:
        course.step(given)
    return course


@pytest.mark.parametrize("name", [name for name, (make, _) in WARM.items() if not make(3).is_personal])
def test_a_warm_up_is_allreduce_and_what_follows_begins_afresh(name: str) -> None:
    make, average = WARM[name]
    w, gradients = 4, normal(12, 5, P)
    first = with_shards(SimpleReduceStrategy(**SGD, average=average), model(), gradients[:w])
    warm, whole = (with_shards(make(PostLocal(w, 3)), model(), own) for own in (gradients[:w], gradients))
    assert torch.equal(warm.cluster.weights, first.cluster.weights), f"TABLE: what averages in {name}? Give it warm=…"
    assert list(warm.ledger) == list(first.ledger) == list(whole.ledger)[: len(first.ledger)]
    between = model()
    torch.nn.utils.vector_to_parameters(first.cluster.weights[0], between.parameters())
    then = with_shards(make(3), between, gradients[w:])
    assert torch.equal(whole.cluster.weights, then.cluster.weights)
    assert torch.equal(whole.strategy.model_weights(), then.strategy.model_weights())
    later = [event._replace(step=event.step + w, due=event.due + w) for event in then.ledger]
    assert list(whole.ledger)[len(first.ledger) :] == later


@pytest.mark.parametrize("name", [*WARM, "FedBN"])
def test_a_warm_up_of_nodes_apart_and_its_price(name: str) -> None:
    make = WARM[name][0] if name in WARM else lambda H: FedBNStrategy(H=H, **SGD, average="median")
    module = Normalized() if name == "FedBN" else model()
    gradients = normal(7, 5, size(module))
    together = driven(make(PostLocal(3, 2)), module, gradients, deterministic=True)
    for rank, alone in enumerate(driven_apart(make(PostLocal(3, 2)), module, gradients)):
        assert torch.equal(alone.cluster.weights[0], together.cluster.weights[rank])
        assert list(alone.ledger) == list(together.ledger)
    priced = make(PostLocal(3, 2)).dry_run(copy.deepcopy(module).to("meta"), 5, 7, seed=5)
    # Its generator draws other islands and pairs.
    sent = [[event._replace(groups=len(event.groups)) for event in events] for events in (priced, together.ledger)]
    assert sent[0] == sent[1]


class Normalized(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def test_a_warm_up_in_groups_is_of_the_largest() -> None:
    course = driven(
        HierarchicalStrategy({2: 1, 4: PostLocal(2, 3)}, inner_optim="sgd"), SHAPES, normal(5, 4, size(SHAPES))
    )
    whole, small = (
        [(step, "gradients", 1) for step in (1, 2)],
        [(step, "gradients in groups of 2", 2) for step in (3, 4, 5)],
    )
    assert [(e.step, e.label, len(e.groups)) for e in course.ledger] == [*whole, *small, (5, "weights", 1)]


def test_a_module_of_ones_own_averages_by_its_average_and_follows() -> None:
    class Centre(Algorithm):
        def __init__(self) -> None:
            self.H, self.average, self.followed = PostLocal(3, 2), average_of("median", "Centre"), 0

        def follow(self, cluster: Any) -> None:
            self.followed += 1

    gradients = normal(3, 5, size(SHAPES))
    own, median = (
        driven(s, SHAPES, gradients)
        for s in (Strategy([Centre()], inner_optim="sgd"), SimpleReduceStrategy(inner_optim="sgd", average="median"))
    )
    assert torch.equal(own.cluster.weights, median.cluster.weights)
    assert own.strategy.parts[0].followed == 3


def test_a_warm_up_resumes_with_its_errors(tmp_path: Path) -> None:
    def make() -> Strategy:
        return FedAvgStrategy(H=PostLocal(5, 2), average=compress(TopK(0.1)), **PLAIN)

    options: dict[str, Any] = {"save_dir": tmp_path, "checkpoint_interval": 3}
    whole = run(make(), 9)
    run(make(), 3, **options)
    resumed = run(make(), 9, resume=True, **options)
    assert torch.equal(weights(resumed), weights(whole))
    assert list(resumed.ledger) == list(whole.ledger)


def test_a_warm_up_is_refused_where_it_breaks_a_promise() -> None:
    warm = PostLocal(4, 2)
    refusing = [row for row in TABLE if row.warm is False]
    assert len(refusing) > 2
    for make in (*(row.make for row in refusing), partial(DPFedAvgStrategy, noise_multiplier=0.0, clip=1.0)):
        with refused(ValueError, "H … PostLocal(warmup_steps=4, then=2)"):
            make(H=warm)
    DPFedAvgStrategy(inner_optim="sgd", H=QSR(0.1), noise_multiplier=0.0)
    with pytest.raises(ValueError, match=r"max_norm=1 .* H=PostLocal\(warmup_steps=4, then=2\)"):
        started(FedPerStrategy(inner_optim="sgd", H=warm, personal="p0", max_norm=1.0), SHAPES, 3)
    started(FedPerStrategy(inner_optim="sgd", H=2, personal="p0", max_norm=1.0), SHAPES, 3)


def test_seconds_are_those_of_the_slowest_node() -> None:
    # The slowest takes 0.4 s a step: two steps in 1 s; and one at least.
    compute = vsim.network.Compute([0.1, 0.1, 0.2, 0.4])
    for seconds, expected in ((1.0, [2, 4, 6, 8, 10]), (0.8, [2, 4, 6, 8, 10]), (0.1, list(range(1, 11)))):
        assert steps_of(run(FedAvgStrategy(H=Seconds(seconds), **PLAIN), compute=compute)) == expected
    with pytest.raises(TypeError, match=r"Seconds\(seconds=1\.0\) goes by compute seconds"):
        run(FedAvgStrategy(H=Seconds(1.0), **PLAIN))
    priced = vsim.price(
        FedAvgStrategy(H=Seconds(1.0)), model=model(), num_nodes=4, max_steps=10, network="1 Gbit/s", compute=compute
    )
    assert priced.seconds[-1] > 0.4 * 10


class Growing(When):
    """After 1, 3, 6, 10, … steps."""

    def after(self, step: int, lr: float, steps_left: int, seconds: Any) -> int:
        n = round(((1 + 8 * step) ** 0.5 - 1) / 2)
        return (n + 1) * (n + 2) // 2


def test_cohorts_and_dropouts_change_where_the_nodes_synchronize() -> None:
    for strategy in (FedAvgStrategy(H=Growing(), **PLAIN), FedProxStrategy(H=Growing(), **PLAIN)):
        trainer = run(strategy, participation=Sample(4, of=9))
        assert steps_of(trainer) == [1, 3, 6, 10]
        assert trainer.strategy is not None and trainer.strategy.cluster.plan is not None
        plan = trainer.strategy.cluster.plan
        assert [plan.segment(step)[:2] for step in (1, 2, 4, 7)] == [(1, 1), (2, 3), (4, 6), (7, 10)]
        assert len({plan.segment(step).nodes for step in (1, 2, 4, 7)}) > 1
    trainer = run(FedAvgStrategy(H=Growing(), **PLAIN), participation=Dropout(0.5))
    assert steps_of(trainer) == [1, 3, 6, 10]
    with pytest.raises(ValueError, match="rounds=2 has no effect where H is a schedule"):
        run(FedAvgStrategy(H=Growing(), **PLAIN), participation=Sample(4, of=9, rounds=2))


class Moves(Algorithm):
    H = 2
    derived = ("H",)

    def sync(self, cluster: Any) -> None:
        self.H = 3


def test_an_h_that_moves_by_itself_is_an_error_with_cohorts() -> None:
    run(Strategy([Moves()], lr=0.1))
    with pytest.raises(TypeError, match="H is 3, and rounds of clients have 2 steps"):
        run(Strategy([Moves()], lr=0.1), participation=Sample(4, of=9))


@pytest.mark.parametrize(
    "make",
    [DiLoCoStrategy, SlowMoStrategy, EagerDiLoCoStrategy, NoLoCoStrategy],
    ids=lambda cls: cls.__name__,
)
def test_a_resumed_run_goes_on_with_its_schedule(make: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_dir": tmp_path, "checkpoint_interval": 5}
    whole = run(make(H=Growing(), **PLAIN), 12)
    run(make(H=Growing(), **PLAIN), 5, **options)
    resumed = run(make(H=Growing(), **PLAIN), 12, resume=True, **options)
    assert torch.equal(weights(resumed), weights(whole))
    assert list(resumed.ledger) == list(whole.ledger)


def test_a_run_without_a_sync_gets_a_warning() -> None:
    with pytest.warns(UserWarning, match="first acts after step 10, and the run ends after 4"):
        run(FedAvgStrategy(H=10, **PLAIN), 4)

    class Late(When):
        def after(self, step: int, lr: float, steps_left: int, seconds: Any) -> int:
            return step + 7

    with pytest.warns(UserWarning, match="first acts after step 7, and the run ends after 4"):
        run(FedAvgStrategy(H=Late(), **PLAIN), 4)


def test_arguments_are_checked() -> None:
    cases: list[tuple[Callable[[], Any], Any, str]] = [
        *((make, ValueError, "must be") for make in (lambda: QSR(0), lambda: QSR(1, 0), lambda: PostLocal(0))),
        *((make, ValueError, "must be") for make in (lambda: Seconds(0), lambda: Every(0))),
        (lambda: FedAvgStrategy(H="often"), TypeError, "H must be a whole number … 'often'"),  # type: ignore[arg-type]
        (lambda: PostLocal(3, PostLocal(2)), TypeError, "has a warm-up of its own"),
    ]
    for make, kind, said in cases:
        with refused(kind, said):
            make()
    text = "FedAvgStrategy(H=PostLocal(warmup_steps=3, then=QSR"
    assert str(FedAvgStrategy(H=PostLocal(3, QSR(0.1)))).startswith(text)
