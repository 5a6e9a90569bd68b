"""executor="auto": the choice, what it may cost, and that it changes no bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from benchmarks.bench_step import SmallResNet
from separate import TASKS, small_mlp, vectors
from test_trace import captures_draws
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.cluster.randomness import NODE, generator
from vsim.cluster.replicas import Replicas
from vsim.data import digits
from vsim.engine import AutoExecutor, CompileError, LoopExecutor, Settings, auto
from vsim.engine.auto import _Candidate
from vsim.engine.objective import Objective
from vsim.models import CNN
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy
from vsim.training.loop import steps


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    auto._remembered.clear()
    auto._seconds_of_compiling.clear()
    yield
    auto._remembered.clear()
    auto._seconds_of_compiling.clear()


class Clock:
    """Time that passes only when an executor says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.took: list[str] = []  # who took each step

    def perf_counter(self) -> float:
        return self.now


class Timed(LoopExecutor):
    """The loop under another name, with steps of known length: the first, and the others."""

    def __init__(self, name: str, clock: Clock, seconds: tuple[float, float], *parts: Any) -> None:
        super().__init__(*parts)
        self.name, self.clock, self.seconds, self.steps = name, clock, seconds, 0
        self.took = clock.took

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        self.clock.now += self.seconds[min(self.steps, 1)]
        self.steps += 1
        self.took.append(self.name)
        return super().losses_and_grads(batch, minibatch_size)


Times = dict[str, tuple[float, float]]


def race(
    monkeypatch: pytest.MonkeyPatch, times: Times, num_steps: int | None, **settings: Any
) -> tuple[Any, list[str]]:
    """An AutoExecutor whose candidates take so long, after 40 steps; and what computed each step."""
    clock = Clock()
    monkeypatch.setattr(auto, "time", clock)
    replicas = Replicas.of(small_mlp(0.0), 2, torch.device("cpu"))
    parts = (replicas, Objective(replicas.module), [generator(0, NODE, k) for k in range(2)])
    engine = AutoExecutor(*parts, Settings(num_steps=num_steps, **settings))

    def candidate(name: str) -> Callable[[], Timed]:
        return lambda: Timed(name, clock, times[name], *parts, Settings())

    engine.candidates = [_Candidate(name, candidate(name)) for name in times if name != "compiled"]
    if "compiled" in times:
        monkeypatch.setattr(auto, "CompiledExecutor", lambda *_: candidate("compiled")())
    engine.chosen = engine._executor(engine.candidates[0])
    batch = [t[:8].view(2, 4, *t.shape[1:]) for t in vectors().tensors]
    for _ in range(40):
        engine.losses_and_grads(batch)
    return engine, clock.took


def test_the_fastest_of_three_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"vmap": (0.5, 0.010), "fewer": (0.1, 0.008), "loop": (0.1, 0.009)}
    engine, took = race(monkeypatch, times, 10_000)
    assert took == [*["vmap"] * 4, *["fewer"] * 4, *["loop"] * 4, *["fewer"] * 28]
    assert engine.reason == "measured a step: fewer 8 ms; loop 9 ms; vmap 10 ms"


def test_what_is_clearly_slower_is_tried_twice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    _, took = race(monkeypatch, {"vmap": (0.5, 0.010), "loop": (0.1, 0.030)}, 10_000)
    assert took == [*["vmap"] * 4, *["loop"] * 2, *["vmap"] * 34]


def test_small_steps_are_timed_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    _, took = race(monkeypatch, {"vmap": (0.5, 0.003), "loop": (0.1, 0.004)}, 10_000)
    assert took == [*["vmap"] * 8, *["loop"] * 6, *["vmap"] * 26]  # the first, then 7 · 3 ms and 5 · 4 ms


def test_nothing_is_tried_that_might_cost_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    # 3 % of 30 steps of 10 ms are 9 ms, less than one step.
    engine, took = race(monkeypatch, {"vmap": (0.5, 0.010), "loop": (0.1, 0.001)}, 30)
    assert set(took) == {"vmap"} and engine.reason.endswith("not tried, as it might cost too much: loop")


@pytest.mark.parametrize(("num_steps", "budget"), [(500, 0.15), (10_000, 1.0), (None, 1.0)])
def test_trying_stops_when_it_has_cost_its_share(
    monkeypatch: pytest.MonkeyPatch, num_steps: int | None, budget: float
) -> None:
    engine, took = race(monkeypatch, {"vmap": (0.5, 0.010), "loop": (1.2, 1.2)}, num_steps)
    assert took.count("loop") == 1 and engine.spent == pytest.approx(1.19)
    assert engine._budget(0.010) == pytest.approx(budget)


def test_the_choice_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"vmap": (0.5, 0.010), "loop": (0.1, 0.005)}
    race(monkeypatch, times, 10_000)
    engine, took = race(monkeypatch, times, 50)
    assert set(took) == {"loop"} and engine.reason == "as before; measured a step: loop 5 ms; vmap 10 ms"


def test_compiling_is_left_where_the_rest_does_not_repay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"vmap": (0.5, 0.010), "compiled": (30.0, 0.005)}
    engine, took = race(monkeypatch, times, 1000, compile="auto")
    assert set(took) == {"vmap"} and "not compiled: about 60 s, when 10 s of the run remain" in engine.reason


def test_compiling_is_tried_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"vmap": (0.5, 0.010), "compiled": (30.0, 0.005)}
    engine, took = race(monkeypatch, times, 100_000, compile="auto")
    assert took == [*["vmap"] * 4, *["compiled"] * 36]
    assert auto._seconds_of_compiling == [30.0]  # known from now on
    slower = {"vmap": (0.5, 0.010), "compiled": (30.0, 0.015)}
    auto._remembered.clear()
    engine, took = race(monkeypatch, slower, 100_000, compile="auto")
    assert took[-1] == "vmap" and "compiled 15 ms" in engine.reason


# In a run


def fit(model: nn.Module, strategy: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors(), vectors(8))
    trainer.fit(strategy=strategy or DiLoCoStrategy(H=3, lr=0.01), num_nodes=3, batch_size=4, progress=False, **options)
    return trainer


def test_however_it_ends_the_bits_are_the_same() -> None:
    runs = [fit(small_mlp(0.2), max_steps=60, executor=e) for e in ("auto", "vmap", "loop")]
    weights = [run.strategy.cluster.weights for run in runs if run.strategy is not None]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    assert runs[0].history.executor_reason.startswith("measured a step: ")
    assert runs[0].history.executor in ("vmap", "loop")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_an_exact_run_has_the_same_bits_in_every_way(task: Any) -> None:
    weights = []
    for executor in ("auto", "vmap", "loop"):
        trainer = Trainer(task.model(), task.data())
        trainer.fit(
            strategy=DiLoCoStrategy(H=2, lr=0.01),
            num_nodes=3,
            max_steps=5,
            batch_size=4,
            progress=False,
            executor=executor,
            deterministic=True,
        )
        assert trainer.strategy is not None
        weights.append(trainer.strategy.cluster.weights)
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_what_would_change_bits_is_not_tried() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, batch: list[Tensor]) -> Tensor:
            return self.linear(batch[0]).square().mean()

    history = fit(Squared(), max_steps=60).history
    assert history.executor == "vmap"
    assert "loop not tried: mean have fast forms with other last bits" in history.executor_reason
    history = fit(small_mlp(0.0), SimpleReduceStrategy(lr=0.01), max_steps=60).history
    assert "loop not tried: one product for all nodes' mean gradient" in history.executor_reason


def test_a_model_without_an_exact_vectorized_form_goes_on_in_the_loop_without_a_word() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, batch: list[Tensor]) -> Tensor:
            return self.linear(batch[0]).exp_().mean()

    history = fit(InPlace(), max_steps=4, deterministic=True).history
    assert history.executor == "loop" and "exp_ writes into a tensor" in history.executor_reason


# Compiled


compiling = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling


@compiling
@pytest.mark.slow
def test_compiled_steps_are_those_of_vmap() -> None:
    plain, compiled = (fit(small_mlp(0.0), max_steps=6, executor="vmap", compile=c) for c in (False, True))
    assert compiled.history.executor == "compiled" and compiled.history.executor_reason.startswith("compiled in ")
    assert plain.strategy is not None and compiled.strategy is not None
    ours, theirs = compiled.strategy.cluster.weights, plain.strategy.cluster.weights
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    again = fit(small_mlp(0.3), max_steps=6, compile=True), fit(small_mlp(0.3), max_steps=6, compile=True)
    assert all(run.strategy is not None and run.history.executor == "compiled" for run in again)
    assert torch.equal(*(run.strategy.cluster.weights for run in again if run.strategy is not None))


@compiling
@pytest.mark.slow
def test_what_breaks_the_graph_is_reported() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, batch: list[Tensor]) -> Tensor:
            torch._dynamo.graph_break()
            return self.linear(batch[0]).square().mean()

    with pytest.warns(UserWarning, match=r"cannot be compiled: .*graph_break") as caught:
        history = fit(Broken(), max_steps=4, compile=True).history
    assert len(caught) == 1 and history.executor == "vmap" and "test_auto.py" in history.executor_reason
    with pytest.raises(CompileError, match="cannot be compiled"):
        fit(Broken(), max_steps=4, compile=True, executor="vmap")


def test_large_convolutions_take_the_loop_from_the_first_step_on() -> None:
    stream = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 3, 32, 32, generator=stream), torch.randint(0, 10, (32,), generator=stream))

    def fitted(**options: Any) -> Trainer:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            trainer = Trainer(SmallResNet(), data)
        trainer.fit(strategy=DiLoCoStrategy(H=2, lr=1e-3), num_nodes=2, max_steps=3, batch_size=8, **options)
        return trainer

    chosen, again, loop = fitted(), fitted(), fitted(executor="loop")
    for each in (chosen, again):  # the second remembers
        assert each.history.executor == "loop"
        assert "convolutions of this size are computed node by node anyway" in each.history.executor_reason
        assert torch.equal(each.strategy.cluster.weights, loop.strategy.cluster.weights)


def test_small_convolutions_stay_together() -> None:
    train, _ = digits()
    trainer = Trainer(CNN(seed=0), train)
    run = trainer.prepare(strategy=DiLoCoStrategy(H=2), num_nodes=2, max_steps=2)
    assert list(steps(run)) == [1, 2]
    engine = run.stacks[0].executor
    assert isinstance(engine, AutoExecutor) and engine.name == "vmap"
    assert "conv2d" in engine.chosen.differing  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_nodes", "chunk_size"), [(1, None), (3, 1)])
def test_one_node_at_a_time_is_the_loop(num_nodes: int, chunk_size: int | None) -> None:
    def fitted(executor: str) -> Trainer:
        trainer = Trainer(small_mlp(), vectors())
        trainer.fit(
            strategy=DiLoCoStrategy(H=2), num_nodes=num_nodes, max_steps=4, chunk_size=chunk_size, executor=executor
        )
        return trainer

    chosen, vmap = fitted("auto"), fitted("vmap")
    assert chosen.history.executor == "loop" and "one at a time" in chosen.history.executor_reason
    torch.testing.assert_close(chosen.strategy.cluster.weights, vmap.strategy.cluster.weights)


# Traced


@captures_draws
def test_auto_traces_at_once_where_the_run_is_long_enough() -> None:
    plain = fit(small_mlp(0.2), max_steps=1000, executor="vmap", compile=False)
    for compile, count, deterministic in (("auto", 1000, False), ("auto", 999, False), ("trace", 3, True)):
        run = fit(small_mlp(0.2), max_steps=count, compile=compile, deterministic=deterministic)
        tried = run.history.executor_reason
        assert ("trace" in tried) is (count != 999)
        if count == 1000:
            assert torch.equal(run.strategy.cluster.weights, plain.strategy.cluster.weights)  # type: ignore[union-attr]


def test_an_exact_run_is_traced_but_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"trace": (0.5, 0.010), "compiled": (30.0, 0.005)}
    engine, took = race(monkeypatch, times, 100_000, compile="auto", exact=True)
    assert set(took) == {"trace"} and engine.reason == "measured a step: trace 10 ms"
