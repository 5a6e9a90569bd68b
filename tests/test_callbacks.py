"""Callbacks: what they hear, what they may change, how they end a run, and what is kept of them."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cut_runs import assert_same_comparison, assert_same_run, fit, weights
from errors import refused
from reference_cluster import Scaled, small_mlp, vectors
from test_ensemble import Killed, killed_at
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import vsim
from vsim import Callback, EarlyStopping, KeepBest, Trainer, load_checkpoint
from vsim.core.group import train
from vsim.runs.fit import steps
from vsim.runs.view import RunView
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, SimpleReduceStrategy, SPARTAStrategy, Strategy
from vsim.strategy.communicate import all_reduce

QUICK: dict[str, Any] = {"num_nodes": 2, "max_steps": 6, "batch_size": 5, "progress": False}


class Scales(Scaled):
    """Has a number, which a callback changes."""

    scale = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * x


class Heard(Callback):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def on_start(self, run: RunView) -> None:
        self.words.append(f"start {run.done} {run.starts}")

    def on_step(self, run: RunView) -> None:
        assert run.history is not None and run.history["step"][-1] == run.done == run.row["step"]
        self.words.append(f"step {run.done}")

    def on_evaluation(self, run: RunView) -> None:
        assert run.row["global_loss"] == run.history["global_loss"][-1]  # type: ignore[index]
        self.words.append(f"evaluation {run.done}")

    def on_end(self, run: RunView) -> None:
        self.words.append(f"end {run.done}")


def test_what_a_callback_hears() -> None:
    heard, after = Heard(), []
    options = {**QUICK, "max_steps": 3, "val_interval": 2, "strategy": Strategy(lr=0.01)}
    trainer = Trainer(small_mlp(0.0), vectors(), vectors(6))
    trainer.fit(**options, callbacks=[heard, lambda run: after.append(run.done)])
    words = "start 0 True,evaluation 0,step 1,step 2,evaluation 2,step 3,evaluation 3,end 3"
    assert ",".join(heard.words) == words and after == [1, 2, 3]
    heard.words.clear()
    trainer.fit(**{**options, "max_steps": 4}, callbacks=[heard], resume=True)
    assert heard.words == ["start 3 False", "step 4", "evaluation 4", "end 4"]


def test_hooks_are_the_short_form() -> None:
    heard: list[tuple[str, int, float]] = []
    trainer = Trainer(small_mlp(0.0), vectors(), vectors(6))
    hooks: dict[str, Any] = {
        f"{name}_loss_hook": lambda step, loss, name=name: heard.append((name, step, loss))
        for name in ("train", "eval")
    }
    trainer.fit(strategy=Strategy(lr=0.01), **{**QUICK, "max_steps": 2}, **hooks)
    train, val = trainer.history["train_loss"], trainer.history["global_loss"]
    assert heard == [("eval", 0, val[0]), ("train", 1, train[1]), ("train", 2, train[2]), ("eval", 2, val[2])]


# Changes of the weights


class PerNode(Strategy):
    """AllReduce, written as if for one node."""

    def step(self) -> None:
        for p in self.model.parameters():
            all_reduce(p.grad)
            p.grad.div_(self.num_nodes)  # type: ignore[union-attr]
        super().step()


# With equal data on all nodes each of them is the training of one node, but for rounding.
WAYS: dict[str, Callable[[OptimSpec], Strategy]] = {
    "allreduce": lambda optim: SimpleReduceStrategy(inner_optim=optim),
    "diloco": lambda optim: DiLoCoStrategy(H=2, outer_optim=OptimSpec("sgd", lr=1.0), inner_optim=optim),
    "per node": lambda optim: PerNode(inner_optim=optim),
}
MOMENTUM = OptimSpec("sgd", lr=0.1, momentum=0.9, weight_decay=0.1)
ADAMW = OptimSpec("adamw", lr=0.05, weight_decay=0.1)
FIRST = ["layers.0.weight", "layers.0.bias"]


def on_equal_data(strategy: Strategy, change: Any, **options: Any) -> Trainer:
    trainer = Trainer(small_mlp(), lambda rank, num_nodes, train: vectors())
    own = {**QUICK, "max_steps": 9, "batch_size": 2, "shuffle": False, "callbacks": [change], **options}
    trainer.final = trainer.fit(strategy=strategy, **own)  # type: ignore[attr-defined]
    return trainer


def alone(optim: OptimSpec, change: Callable[[int, nn.Module], None]) -> nn.Module:
    """Train one model in plain PyTorch; change(step, model) comes after every step."""
    model, parts = small_mlp(), []
    for spec, names in optim.parts(model):
        parts.append(spec.cls([p for n, p in model.named_parameters() if n in names], **spec.kwargs))
    change(0, model)
    for step, batch in enumerate(itertools.islice(DataLoader(vectors(), 2), 9)):
        for part in parts:
            part.zero_grad()
        model(batch).backward()
        for part in parts:
            part.step()
        change(step + 1, model)
    return model


def frozen_between(start: int, end: int, again: int = -1) -> tuple[Any, Any]:
    """Freeze the first layer after a step until after another, as callbacks of vsim and of `alone`."""

    class Freezes(Callback):
        def on_start(self, run: RunView) -> None:
            self.on_step(run)

        def on_step(self, run: RunView) -> None:
            if run.done in (start, again):
                run.freeze("layers.0")
            if run.done == end:
                run.unfreeze(FIRST)

    def freeze(step: int, model: nn.Module) -> None:
        if step in (start, end, again):
            model.layers[0].requires_grad_(step == end)

    return Freezes(), freeze


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def weights_set_after(step: int) -> tuple[Any, Any]:
    """Set all weights but one, as callbacks of vsim and of `alone`."""
    given = Trainer(small_mlp(), vectors()).fit(strategy=Strategy(lr=0.1), **QUICK).state_dict()
    part = {name: t for name, t in given.items() if name != "layers.3.bias"}

    def load(at: int, model: nn.Module) -> None:
        if at == step:
            model.load_state_dict(part, strict=False)

    return lambda run: run.set_weights(part) if run.done == step else None, load


COMPILED = pytest.param({"compile": True}, ADAMW, id="compiled", marks=pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
@pytest.mark.parametrize(
    ("options", "optim"), [({"executor": "vmap"}, MOMENTUM), ({"executor": "loop"}, ADAMW), COMPILED]
)
@pytest.mark.parametrize("way", WAYS)
def test_changes_are_those_of_every_rank(way: str, options: dict[str, Any], optim: OptimSpec) -> None:
    changes = [(optim, *frozen_between(*at)) for at in ((2, 5), (0, 4), (3, 6, 8))]
    # Of SGD, with which DiLoCo's sync after an odd step is not seen.
    changes += [(OptimSpec("sgd", lr=0.1, momentum=0.9), *weights_set_after(4))]
    for spec, ours, theirs in changes[:1] if "compile" in options else changes:
        trainer = on_equal_data(WAYS[way](spec), ours, **options)
        assert_close(trainer.final, alone(spec, theirs))  # type: ignore[attr-defined]
        assert trainer.history.executor == options.get("executor", "compiled")


OPTIMIZERS = [
    OptimSpec("sgd", lr=0.1, momentum=0.9, dampening=0.5),
    OptimSpec("adam", lr=0.05, amsgrad=True),
    OptimSpec("nadam", lr=0.05),
    OptimSpec("asgd", lr=0.1),
    OptimSpec("rprop", lr=0.01),
    OptimSpec("adagrad", lr=0.1),
    OptimSpec("adamw", lr=0.05, fused=True),
    OptimSpec("adafactor", lr=0.05),
    OptimSpec("muon", lr=0.05, only="layers.0.weight", rest="adamw"),
]


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: optim.cls.__name__)
def test_every_optimizer_skips_what_is_frozen(optim: OptimSpec) -> None:
    for deterministic, at in ((False, (2, 5)), (True, (0, 4))):
        ours, theirs = frozen_between(*at)
        trainer = on_equal_data(Strategy(inner_optim=optim), ours, deterministic=deterministic)
        assert_close(trainer.final, alone(optim, theirs))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*because its tiles are small", "ignore:too few steps")
def test_what_is_frozen_from_the_start_stays_in_every_strategy() -> None:
    strategies = {}
    for name in {*vsim.strategy.STRATEGIES} - {"sparseloco"}:  # its quantizer has no zero
        cls, options = vsim.strategy.STRATEGIES[name]
        more = {"H": 4} if "H" in {*options, *inspect.signature(cls).parameters} else {}
        strategies[name] = cls(**{**options, **more, **({"weight_decay": 0.1} if name == "demo" else {})})
    freezes = [frozen_between(0, -1)[0]]
    runs = vsim.compare(small_mlp(), vectors(), strategies=strategies, compute=1.0, callbacks=freezes, **QUICK)
    start = dict(small_mlp().named_parameters())
    for name, run in runs.items():
        for key, p in run.model.named_parameters():
            assert torch.equal(p, start[key]) == (key in FIRST), (name, key)


def test_a_run_that_resumes_is_frozen(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": 12,
        "val_interval": 1,
        "participation": vsim.Schedule({0: range(3), 8: range(1, 3)}),
    }

    def freezes() -> list[Any]:
        return [lambda run: run.freeze("features") if run.done == 3 else run.done == 9 and run.unfreeze("features")]

    def run(**more: Any) -> Trainer:
        return fit(DiLoCoStrategy(H=3, inner_optim=ADAMW), callbacks=freezes(), **{**options, **more})

    whole = run()
    run(save_dir=tmp_path, max_steps=5)
    assert_same_run(run(save_dir=tmp_path, resume=True), whole)
    run(save_dir=tmp_path / "late", max_steps=10)
    assert_same_run(run(save_dir=tmp_path / "late", resume=True), whole)


@pytest.mark.slow
@pytest.mark.usefixtures("processes_stay")
def test_weights_change_in_processes_as_in_the_simulator() -> None:
    def change(run: RunView) -> None:
        frozen_between(2, 5)[0].on_step(run)
        if run.done == 3:
            run.set_weights({"layers.3.bias": torch.arange(5.0)})
        run.each_model(lambda model: setattr(model, "seen", run.done))

    options = {"backend": "process", "deterministic": True, "threads_per_process": 1}
    for way, processes in zip(WAYS.values(), (None, 2, None), strict=True):
        one = on_equal_data(way(ADAMW), change, deterministic=True)
        other = on_equal_data(way(ADAMW), change, num_processes=processes, **options)
        assert one.history.node_losses.tolist() == other.history.node_losses.tolist()


def test_buffers_and_tied_weights_are_set() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.one, self.fixed = nn.BatchNorm1d(12), nn.Linear(12, 12), nn.Linear(12, 5)
            self.other = nn.Linear(12, 12)
            self.other.weight = self.one.weight
            self.fixed.requires_grad_(False)

        def forward(self, batch: list[Tensor]) -> Tensor:
            return F.cross_entropy(self.fixed(self.other(self.one(self.norm(batch[0])))), batch[1])

    model = Tied()

    def change(run: RunView) -> None:
        replicas = run.cluster.replicas
        run.set_weights({**model.state_dict(), "norm.running_mean": torch.ones(12), "other.weight": torch.eye(12)})
        assert all(torch.equal(row, torch.eye(12)) for row in replicas.views(replicas.weights)["one.weight"])
        with refused(ValueError, "set_weights … fixed.bias requires no gradient"):
            run.set_weights({"fixed.bias": torch.full((5,), 9.0), "norm.running_mean": torch.zeros(12)})
        assert replicas.buffers["norm.running_mean"].unique().tolist() == [1]
        run.freeze(["other", "fixed"])
        assert run.cluster.frozen == {"one.weight": True, "other.bias": True}
        with refused(ValueError, "unfreeze … fixed.weight, fixed.bias requires no gradient"):
            run.unfreeze("fixed")
        run.stop()

    trainer = Trainer(model, vectors())
    trainer.fit(strategy=Strategy(), **QUICK, callbacks=[change])
    assert len(trainer.history) == 2


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
def test_attributes_change_in_every_copy_of_the_model() -> None:
    class Counting(Scales):
        calls = 0

        def forward(self, batch: list[Tensor]) -> Tensor:
            self.calls += 1
            return super().forward(batch) / self.calls

    def losses(model: nn.Module, change: Any, executor: str) -> Any:
        trainer = Trainer(model, vectors())
        trainer.fit(strategy=Strategy(inner_optim="sgd", lr=0.1), **QUICK, executor=executor, callbacks=[change])
        return trainer.history.node_losses

    def halve(run: RunView) -> None:
        if run.done == 3:
            run.each_model(lambda model: setattr(model, "scale", 0.5))

    for model, executor in ((Scales(), "vmap"), (Scales(), "auto"), (Counting(), "auto")):
        halved, plain = losses(model, halve, executor), losses(model, lambda run: None, executor)
        assert np.array_equal(halved[:3], plain[:3]) and np.all(halved[3:] != plain[3:])
        np.testing.assert_allclose(halved, losses(model, halve, "loop"), rtol=1e-5)


@pytest.mark.parametrize(
    ("event", "change", "names", "steps"),
    [
        ("on_start", lambda model: nn.init.ones_(model.layers[0].weight), "layers.0.weight", 0),
        ("on_step", lambda model: setattr(model.layers[0].weight, "data", torch.ones(16, 12)), "layers.0.weight", 1),
        ("on_step", lambda model: setattr(model.layers, "3", nn.Linear(16, 5)), "layers.3.bias, layers.3.weight", 1),
        ("on_step", lambda model: model.layers[3].bias.data.add_(1), "layers.3.bias", 1),  # torch does not count it
        ("on_evaluation", lambda model: model.layers[0].weight.data.zero_(), "layers.0.weight", 0),
        ("on_end", lambda model: model.layers[0].weight.requires_grad_(False), "layers.0.weight", 6),
    ],
)
def test_a_change_of_the_models_own_parameters_is_an_error(event: str, change: Any, names: str, steps: int) -> None:
    callback = type("Own", (Callback,), {event: lambda self, run: change(run.model)})()
    trainer = Trainer(small_mlp(), vectors(), vectors(6))
    with refused(ValueError, names, "run.model … run.set_weights … run.freeze"):
        trainer.fit(strategy=Strategy(), **QUICK, callbacks=[callback])
    assert len(trainer.history) <= steps + 2  # values are compared at some steps


class Normed(nn.Module):
    """A model with statistics, and with a layer that may not train."""

    def __init__(self, trains: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.one, self.norm, self.two = nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)
        self.one.requires_grad_(trains)
        self.sets: bool | None = None  # what forward sets requires_grad to

    def forward(self, batch: list[Tensor]) -> Tensor:
        if self.sets is not None:
            self.one.requires_grad_(self.sets)
        return F.cross_entropy(self.two(self.norm(self.one(batch[0]))), batch[1])


EXECUTORS = [
    pytest.param({"executor": "vmap"}, id="vmap"),
    pytest.param({"executor": "loop"}, id="loop"),
    pytest.param({"deterministic": True}, id="deterministic"),
    pytest.param({"compile": True}, id="compiled", marks=pytest.mark.slow),
    pytest.param({"backend": "process"}, id="processes", marks=pytest.mark.slow),
    pytest.param({"backend": "process", "num_processes": 2}, id="ranges", marks=pytest.mark.slow),
]
of_buffers: dict[str, Callable[[RunView], Any]] = {
    "reset": lambda run: run.each_model(lambda model: model.norm.reset_running_stats()),
    "filled": lambda run: run.model.norm.running_mean.fill_(100.0),  # type: ignore[operator, union-attr]
    "assigned": lambda run: setattr(run.model.norm, "running_var", torch.ones(6)),
    "by data": lambda run: run.model.norm.running_mean.data.fill_(100.0),  # type: ignore[operator, union-attr]
    "by a forward pass": lambda run: run.model((torch.ones(2, 12), torch.zeros(2, dtype=torch.int64))),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
@pytest.mark.usefixtures("processes_stay")
@pytest.mark.parametrize("options", EXECUTORS)
def test_a_change_of_the_models_own_buffers_is_an_error(options: dict[str, Any]) -> None:
    error = AssertionError if "backend" in options else ValueError  # which `processes_stay` makes of it
    apart = options.get("backend") == "process" and "num_processes" not in options  # there .data belongs to a node
    for name, change in of_buffers.items():
        trainer = Trainer(Normed(), vectors())
        if not (apart and name == "by data"):
            with refused(error, "norm.", "run.model … run.set_weights"):
                trainer.fit(strategy=Strategy(), **QUICK, **options, callbacks=[change])


@pytest.mark.parametrize("options", EXECUTORS[:3])
def test_buffers_that_are_set_are_those_of_all_nodes(options: dict[str, Any]) -> None:
    found = []

    def reset(run: RunView) -> None:
        buffers = run.cluster.replicas.buffers
        assert buffers["norm.running_mean"].abs().amax(1).min() > 0
        run.set_weights({"norm.running_mean": torch.zeros(6), "norm.running_var": torch.ones(6)})
        found.append([b.unique().tolist() for b in buffers.values()])

    Trainer(Normed(), vectors()).fit(strategy=Strategy(), **QUICK, **options, callbacks=[reset])
    assert found == [[[0.0], [1.0], [step]] for step in range(1, 7)]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("options", EXECUTORS[:3])
def test_flags_of_the_model_that_was_given_have_no_effect_and_warn(trains: bool, options: dict[str, Any]) -> None:
    def trained(change: Callable[[nn.Module], object], **by: Any) -> nn.Module:
        model = Normed(trains)
        takers = {"callbacks": [lambda run: change(model)], "train_loss_hook": lambda step, loss: change(model)}
        own = {name: takers[name] for name in by}
        return Trainer(model, vectors()).fit(strategy=Strategy(inner_optim="adamw", lr=0.1), **QUICK, **options, **own)

    plain = trained(lambda model: None, callbacks=True)
    for taker in ("callbacks", "train_loss_hook"):
        with pytest.warns(UserWarning, match=rf"one.weight, one.bias.*run.{'' if trains else 'un'}freeze\(") as said:
            changed = trained(lambda model: model.one.requires_grad_(not trains), **{taker: True})
        assert len(said) == 1 and all(map(torch.equal, changed.parameters(), plain.parameters()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:executor='auto' continues")
@pytest.mark.usefixtures("processes_stay")
@pytest.mark.parametrize("options", EXECUTORS)
def test_flags_that_forward_sets(options: dict[str, Any]) -> None:
    def late(run: RunView) -> None:
        if run.done == 2:
            run.each_model(lambda model: setattr(model, "sets", True))

    error = AssertionError if "backend" in options else ValueError  # which `processes_stay` makes of it
    early = Normed(False)
    early.sets = True
    for model, callbacks in ((Normed(False), [late]), (early, [])):
        with refused(error, "one.", "requires_grad_(True) … run.freeze … on_start … run.unfreeze"):
            Trainer(model, vectors()).fit(strategy=Strategy(), **QUICK, **options, callbacks=callbacks)
    if "backend" in options:
        return
    late_frozen = [lambda run: run.done == 2 and run.each_model(lambda model: setattr(model, "sets", False))]
    with pytest.warns(UserWarning, match=r"forward .*one.weight.*run.freeze\(") as said:
        Trainer(Normed(), vectors()).fit(strategy=Strategy(), **QUICK, **options, callbacks=late_frozen)
    assert len([w for w in said if "forward" in str(w.message) and "freeze" in str(w.message)]) == 1


@pytest.mark.slow
def test_flags_of_the_model_that_was_given_warn_once_in_processes() -> None:
    model = Normed(False)
    thaw = [lambda run: model.one.requires_grad_(run.done > 2)]
    with pytest.warns(UserWarning, match=r"one.weight.*run.unfreeze\(names\)") as said:
        Trainer(model, vectors()).fit(strategy=Strategy(), **QUICK, backend="process", callbacks=thaw)
    assert len(said) == 1


# Early stopping


def test_a_stopped_run_is_one_of_so_many_steps(tmp_path: Path) -> None:
    options = {"val_interval": 1, "correlation_interval": None}
    short = fit(DiLoCoStrategy(H=2, lr=0.01), max_steps=5, **options)
    stopped = fit(
        DiLoCoStrategy(H=2, lr=0.01), callbacks=[lambda run: run.done == 5 and run.stop()], save_dir=tmp_path, **options
    )
    assert_same_run(stopped, short)
    assert load_checkpoint(tmp_path).step == 5


def worse_from(step: int) -> Any:
    """A metric of its own: it falls up to a step, and rises from there on."""
    calls = iter(range(1000))
    return lambda model, batch: abs(next(calls) - step)


def test_early_stopping_counts_measurements_without_improvement() -> None:
    stopping, best = EarlyStopping("v", patience=3), KeepBest("v")
    options = {"metrics": {"v": worse_from(4)}, "val_interval": 1, "callbacks": [stopping, best]}
    trainer = fit(Strategy(lr=0.01), **options)
    assert len(trainer.history) == 8 and (stopping.best, stopping.best_step, stopping.waited) == (0, 4, 3)
    assert (best.best, best.best_step) == (0, 4)
    final = fit(Strategy(lr=0.01), max_steps=4, val_interval=1).final.state_dict()  # type: ignore[attr-defined]
    assert final.keys() == best.weights.keys()
    assert all(torch.equal(t, final[name]) for name, t in best.weights.items())
    fit(Strategy(lr=0.01), **{**options, "metrics": {"v": worse_from(2)}})  # the second finds nothing of the first
    assert (stopping.best_step, best.best_step) == (2, 2)


@pytest.mark.parametrize(
    ("values", "options", "ends"),
    [
        ([3.0, 2.0, 2.0, 1.9, 1.9], {"patience": 2}, 5),
        ([3.0, 2.0, 2.0, 1.9, 1.8], {"patience": 2, "min_delta": 0.15}, 4),
        ([1.0, 2.0, 3.0, 2.0, 3.0], {"patience": 2, "mode": "max"}, 5),
        ([1.0, math.nan, math.nan, 0.5, 0.5], {"patience": 2}, 3),
    ],
)
def test_what_is_an_improvement(values: list[float], options: dict[str, Any], ends: int) -> None:
    found = iter([9.0 if options.get("mode") != "max" else -9.0, *values])
    trainer = Trainer(small_mlp(0.0), vectors(), vectors(6))
    stopping = EarlyStopping("v", **options)
    with_metric = {"metrics": {"v": lambda model, batch: next(found)}, "val_interval": 1, "callbacks": [stopping]}
    trainer.fit(strategy=Strategy(), **{**QUICK, "max_steps": 5}, **with_metric)
    assert len(trainer.history) - 1 == ends


def test_a_run_that_resumes_stops_where_the_other_did(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"val_interval": 1, "callbacks": [EarlyStopping(patience=2, min_delta=0.02), KeepBest()]}

    straight, resumed = options(), options()
    whole = fit(DiLoCoStrategy(H=3, lr=0.02), **straight)
    end = len(whole.history) - 1
    assert 1 < end < 14  # when depends on rounding
    fit(DiLoCoStrategy(H=3, lr=0.02), max_steps=end - 1, save_dir=tmp_path, **options())
    cut = fit(DiLoCoStrategy(H=3, lr=0.02), save_dir=tmp_path, resume=True, **resumed)
    assert_same_run(cut, whole)
    ours, theirs = (given["callbacks"][1] for given in (straight, resumed))
    assert ours.best_step == theirs.best_step
    assert all(torch.equal(t, theirs.weights[name]) for name, t in ours.weights.items())
    again = fit(DiLoCoStrategy(H=3, lr=0.02), save_dir=tmp_path, resume=True, **options())  # which had stopped
    assert len(again.history) - 1 == end
    on = fit(DiLoCoStrategy(H=3, lr=0.02), save_dir=tmp_path, resume=True, val_interval=1)  # without the callback
    assert_same_run(on, fit(DiLoCoStrategy(H=3, lr=0.02), val_interval=1))


@pytest.mark.slow
@pytest.mark.usefixtures("processes_stay")
def test_processes_stop_together_and_give_back_the_state() -> None:
    def run(**options: Any) -> tuple[Trainer, EarlyStopping, KeepBest]:
        stopping, best = EarlyStopping(patience=8), KeepBest("mean_logit")
        metrics = {"mean_logit": lambda model, batch: model.layers[-1].weight.mean()}
        trainer = Trainer(small_mlp(0.2), vectors(), vectors(9))
        given = {"callbacks": [stopping, best], "metrics": metrics, "val_interval": 1, "deterministic": True}
        trainer.fit(strategy=DiLoCoStrategy(H=3, lr=0.02), **{**QUICK, "max_steps": 30}, **given, **options)
        return trainer, stopping, best

    (one, *ours), (other, *theirs) = run(), run(backend="process", threads_per_process=1)
    assert 4 < len(one.history) < 31 and one.history["mean_logit"].tolist() == other.history["mean_logit"].tolist()
    assert one.history.node_losses.tolist() == other.history.node_losses.tolist()
    assert vars(ours[0]) == vars(theirs[0]) and ours[1].best_step == theirs[1].best_step
    assert all(torch.equal(t, theirs[1].weights[name]) for name, t in ours[1].weights.items())


# Runs of a comparison


STRATEGIES = {
    "slow": Strategy(inner_optim="sgd", lr=1e-3),
    "fast": SimpleReduceStrategy(lr=0.02),
    "DiLoCo": DiLoCoStrategy(H=1, outer_lr=0.5, lr=0.02),
}


OPTIONS: dict[str, Any] = {**QUICK, "max_steps": 12, "val_interval": 1, "deterministic": True}


def compared(**options: Any) -> vsim.Comparison:
    return vsim.compare(small_mlp(0.1), vectors(), vectors(), strategies=STRATEGIES, **{**OPTIONS, **options})


def callbacks() -> list[Any]:
    def freeze(run: RunView) -> None:  # one of the rows that train together
        if run.strategy.lr == 0.02 and run.done in (3, 7):
            run.freeze(FIRST) if run.done == 3 else run.unfreeze(FIRST)

    return [EarlyStopping(patience=1, min_delta=0.01), KeepBest(), freeze]


def test_every_member_has_callbacks_of_its_own() -> None:
    given = callbacks()
    together = compared(callbacks=given)
    assert given[0].waited == 0
    lengths = {name: len(together[name].history) - 1 for name in together}
    assert lengths["slow"] < 5 and max(lengths.values()) > 8 and all(together[name].ended for name in together)
    assert_same_comparison(together, compared(callbacks=callbacks(), together=False))
    for name, strategy in STRATEGIES.items():
        own, trainer = callbacks(), Trainer(small_mlp(0.1), vectors(), vectors())
        trainer.fit(strategy=strategy, **OPTIONS, callbacks=own)
        theirs: list[Any] = together[name].callbacks
        assert vars(own[0]) == vars(theirs[0]) and len(theirs) == 3
        assert all(torch.equal(t, theirs[1].weights[key]) for key, t in own[1].weights.items())


def test_a_comparison_resumes_with_a_member_that_had_stopped(tmp_path: Path) -> None:
    straight, saved = compared(callbacks=callbacks()), {"save_dir": tmp_path, "checkpoint_interval": 2}
    with pytest.raises(Killed):
        compared(callbacks=callbacks(), **saved, train_loss_hook=killed_at(6))
    assert_same_comparison(compared(callbacks=callbacks(), **saved, resume=True), straight)
    assert_same_comparison(compared(**saved, resume=True), straight)  # what has stopped stays so


def test_metrics_are_columns(tmp_path: Path) -> None:
    def spread(model: nn.Module, batch: Any) -> Tensor:
        assert not model.training and not torch.is_grad_enabled()
        return model(batch).exp()

    def of_first(model: nn.Module, batch: Any) -> float:
        return float(batch[0][:, 0].mean())

    def trained(**options: Any) -> Trainer:
        trainer = Trainer(small_mlp(0.3), vectors(), vectors(7))
        own = {**QUICK, "strategy": SimpleReduceStrategy(lr=0.01), "batch_size": 1, "val_interval": 3, **options}
        trainer.fit(**own)
        return trainer

    logs = {"run_name": "m", "logger": vsim.CSVLogger(tmp_path)}
    trainer = trained(**logs, metrics={"spread": spread, "first": of_first})
    history = trainer.history
    steps_, losses, spreads = history.measured("step", "global_loss", "spread")
    assert steps_.tolist() == [0, 3, 6] and np.all(spreads > np.exp(losses))  # a mean of exp in pieces of 4 examples
    assert history.last("first") == pytest.approx(float(vectors(7).tensors[0][:, 0].mean()))
    assert history.to_pandas()["spread"].notna().sum() == 3
    header = (tmp_path / "m" / "validation.csv").read_text().split("\n")[0]
    assert header.endswith(",spread,first")
    assert torch.equal(weights(trainer), weights(trained()))
    history.to_json(tmp_path / "h.json")
    assert vsim.History.from_json(tmp_path / "h.json")["spread"].tolist()[-1] == spreads[-1]
    options = {"metrics": {"one": lambda model, batch: 1}, "val_interval": 2, "save_dir": tmp_path}
    fit(Strategy(lr=0.01), max_steps=6, **options)
    assert int(np.nansum(fit(Strategy(lr=0.01), resume=True, **options).history["one"])) == 8


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"callbacks": [EarlyStopping]}, TypeError, "vsim.Callback … f(run)"),
        ({"callbacks": [KeepBest("val_loss")]}, ValueError, "KeepBest … val_loss … step"),
        ({"callbacks": [KeepBest("divergence")]}, ValueError, "KeepBest … divergence"),
        ({"metrics": {"lr": print}}, ValueError, "metrics … lr"),
        ({"metrics": {"v": lambda m, b: b}}, TypeError, "metrics['v'] … number … tuple"),
        ({"metrics": {"v": lambda m, b: 10**400}}, ValueError, "metrics['v'] … number"),
        ({"metrics": {"v": lambda m, b: b[0]}}, TypeError, "metrics['v'] … number … Tensor"),
        (lambda run: run.set_weights({"layers.0.wight": torch.ones(16, 12)}), ValueError, "wight … did you mean"),
        (lambda run: run.set_weights({FIRST[0]: torch.ones(12, 16)}), ValueError, "weight … [16, 12] … [12, 16]"),
        (lambda run: run.set_weights({FIRST[0]: 3.0}), ValueError, "layers.0.weight … tensor … 3.0"),
        (lambda run: run.freeze("layer.0"), ValueError, "layer.0 … did you mean 'layers.0'"),
        (lambda run: run.unfreeze([*FIRST, "encoder"]), ValueError, "encoder"),
    ],
)
def test_refused(options: Any, error: type[Exception], said: str) -> None:
    options = {"callbacks": [options]} if callable(options) else options
    with refused(error, said):
        Trainer(small_mlp(0.0), vectors(), vectors(6)).fit(strategy=Strategy(), **QUICK, **options)


class Syncs(Callback):
    """Writes down the steps in which nodes communicate."""

    def __init__(self, here: bool = False) -> None:
        self.here, self.steps = here, list[int]()

    def on_sync(self, run: Any, step: int) -> None:
        assert step == run.row["step"]
        self.steps.append(step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        (Strategy(), []),
        (SimpleReduceStrategy(), [1, 2, 3, 4, 5]),
        (FedAvgStrategy(H=2), [2, 4]),
        (SPARTAStrategy(p_sparta=0.5, sparta_interval=2, async_delay=1), [2, 4]),  # taken two steps later
    ],
)
@pytest.mark.parametrize("processes", [{}, {"backend": "process", "num_processes": 2, "threads_per_process": 1}])
def test_callbacks_hear_of_the_steps_in_which_nodes_communicate(
    strategy: Strategy, steps: list[int], processes: dict[str, Any]
) -> None:
    heard = [Syncs(), Syncs(here=True)]
    joins = vsim.Schedule({0: [0, 1], 2: [0, 1, 2]})  # whose copy, before step 3, is none of the strategy's
    options = {**QUICK, "num_nodes": 3, "max_steps": 5, "participation": joins}
    Trainer(small_mlp(0.0), vectors()).fit(strategy=strategy, **options, **processes, callbacks=heard)
    assert [one.steps for one in heard] == [steps, steps]


def test_only_the_steps() -> None:
    trainer, options = (
        Trainer(small_mlp(), vectors()),
        {**QUICK, "max_steps": 4, "strategy": FedAvgStrategy(H=2, lr=0.1)},
    )
    group = trainer.prepare(**options, callbacks=[heard := Heard()])
    (run,) = group.runs
    assert [(step.number, step.losses.shape) for step in train(group)] == [(i, (2,)) for i in (1, 2, 3, 4)]
    whole = trainer.fit(**options)
    assert not heard.words and len(run.history) == 0 and len(run.ledger) == len(trainer.ledger) == 2
    for ours, theirs in zip(run.mean_model().parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    group = trainer.prepare(**options, participation=vsim.Schedule({0: [0], 2: [0, 1]}))
    with refused(RuntimeError, "step 3 is of nodes [0, 1], and [0] are present", "vsim.runs.fit.steps"):
        list(train(group))


def test_without_validation_data_and_step_by_step() -> None:
    trainer, heard = Trainer(small_mlp(0.0), vectors()), Heard()
    with refused(ValueError, "metrics … val_dataset"):
        trainer.fit(strategy=Strategy(), **QUICK, metrics={"v": print})
    with refused(ValueError, "EarlyStopping … global_loss"):
        trainer.fit(strategy=Strategy(), **QUICK, callbacks=[EarlyStopping()])
    stopping = EarlyStopping("train_loss", patience=1, min_delta=9)
    options = {**QUICK, "strategy": Strategy(), "callbacks": [heard, stopping]}
    assert [moment.number for moment in steps([trainer.prepare(**options)])] == [1, 2] and heard.words[-1] == "end 2"
    heard.words.clear()
    trainer.explain(**options)
    assert not heard.words


def test_any_object_with_an_event_is_a_callback_and_hears_how_the_run_ended() -> None:
    def fail(run: RunView) -> None:
        raise RuntimeError("no more")

    heard: list[str] = []
    ends = SimpleNamespace(on_exit=heard.append)
    Trainer(small_mlp(), vectors()).fit(strategy=Strategy(), **QUICK, callbacks=[ends])
    with pytest.raises(RuntimeError, match="no more"):
        Trainer(small_mlp(), vectors()).fit(strategy=Strategy(), **QUICK, callbacks=[ends, fail])
    assert heard == ["", "RuntimeError: no more"]


def test_what_a_callback_does_not_get_is_named() -> None:
    def look(run: RunView) -> None:
        assert (run.step, run.done, run.max_steps, run.seed) == (1, 1, 1, 42) and "SimpleReduce" in run.label
        assert run.lr == 1e-2 and run.history is not None and run.history.last("lr") == run.lr and not run.starts
        with pytest.raises(AttributeError, match=r"no 'objective'.*each_model.*set_weights.*cluster"):
            run.objective  # noqa: B018

    fit(SimpleReduceStrategy(lr=1e-2), max_steps=1, callbacks=[look])
