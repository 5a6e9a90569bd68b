"""What a model changes in forward besides parameters and buffers is each node's; test_separate_modules.py has kinds."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from errors import refused, warned
from separate import Scaled, vectors
from test_models_of_others import FromDict, Sentences
from torch import Tensor, nn
from torch.nn import functional as F

import vsim
from vsim import Trainer
from vsim.cluster.state import CheckpointError
from vsim.engine.objective import Objective, listed, plain_attributes
from vsim.private_torch import register_recorders
from vsim.strategy import AsyncDiLoCoStrategy, SimpleReduceStrategy, Strategy

OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": 6, "batch_size": 5, "val_interval": 2, "progress": False}
SGD = Strategy(optim_spec="sgd", lr=0.5)


def trained(model: nn.Module, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors(), vectors(7))
    trainer.fit(**{"strategy": SGD, **OPTIONS, **options})
    return trainer


class Counter(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def number(self) -> Any:
        self.calls += 1
        return self.calls

    def scaled(self, x: Tensor) -> Tensor:
        return x / self.number() if self.training else x


class InObject(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(calls=0)

    def number(self) -> Any:
        self.config.calls += 1
        return self.config.calls


class Average(Counter):
    """Outputs less their running mean, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(5)

    def scaled(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def test_a_validation_reads_each_nodes_own() -> None:
    class Buffer(Average):
        def __init__(self) -> None:
            super().__init__()
            del self.mean
            self.register_buffer("mean", torch.zeros(5))

    ours, theirs = (trained(kind(), executor="loop").history for kind in (Average, Buffer))
    for column in ("local_loss", "node_loss_min", "node_loss_max"):
        np.testing.assert_allclose(ours[column], theirs[column], rtol=1e-6)


def test_asynchronous_workers_have_their_own() -> None:
    options: dict[str, Any] = {
        "strategy": AsyncDiLoCoStrategy(H=2, optim_spec="sgd", lr=0.1),
        "network": vsim.Network(1e9, 1e-3),
        "compute": vsim.Compute([1.0, 2.0, 3.0]),
        "max_steps": 9,
        "executor": "loop",
    }

    class Buffer(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def scaled(self, x: Tensor) -> Tensor:
            self.calls += self.training
            return x / self.calls if self.training else x

    ours, expected = trained(Counter(), **options), trained(Buffer(), **options)
    np.testing.assert_allclose(ours.history.node_losses, expected.history.node_losses, rtol=1e-5)


def test_a_loss_may_count() -> None:
    class Loss:
        calls = 0

        def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return F.cross_entropy(outputs / self.calls, y)

    trainer = Trainer(Counter().layer, vectors(), loss_fn=Loss())
    with warned("continues with 'loop'", "the losses"):
        trainer.fit(strategy=SGD, **{**OPTIONS, "val_interval": None})
    theirs = trained(Counter(), executor="loop").history
    np.testing.assert_allclose(trainer.history.node_losses, theirs.node_losses, rtol=1e-6)


def test_a_callback_sees_the_first_nodes_and_changes_all() -> None:
    seen = []

    def restart(run: Any) -> None:
        seen.append(run.model.calls)
        if run.done == 3:
            run.each_model(lambda model: setattr(model, "calls", 0))

    losses = trained(Counter(), executor="loop", callbacks=[restart]).history.node_losses
    assert seen == [1, 2, 3, 1, 2, 3]
    before = trained(Counter(), executor="loop").history.node_losses
    assert np.array_equal(losses[:3], before[:3]) and not np.isclose(losses[3:], before[3:], rtol=1e-3).any()


# What is refused


def test_a_hook_that_names_the_model_is_refused() -> None:
    class Closure(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(()))
            self.layer.register_forward_hook(lambda m, i, o: self.n.add_(1) and None)

    for options in ({}, {"executor": "loop"}, {"executor": "vmap"}):
        with refused(ValueError, "names the model", "bound method"):
            trained(Closure(), val_interval=None, **options)

    class Reading(Scaled):  # which does no harm
        def __init__(self) -> None:
            super().__init__()
            self.factor = 2.0
            self.layer.register_forward_hook(lambda m, i, o: o * self.factor)

    assert trained(Reading()).history.executor == "vmap"


class Remembered(Counter):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_what_a_checkpoint_does_not_hold_is_said_once(tmp_path: Path) -> None:
    whole = trained(Counter(), executor="loop").history.node_losses
    with warned("calls", "checkpoint") as caught:
        trained(Counter(), executor="loop", save_dir=tmp_path, max_steps=3, checkpoint_interval=1)
    assert len(caught) == 1
    with warned("calls", "checkpoint"):
        resumed = trained(Counter(), executor="loop", save_dir=tmp_path, resume=True).history.node_losses
    assert np.array_equal(resumed[:3], whole[:3]) and not np.array_equal(resumed[3:], whole[3:])


def test_extra_state_and_a_flag_that_is_written_once_need_no_word(tmp_path: Path) -> None:
    class Both(Remembered):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()

        def number(self) -> Any:
            self.inner.seen = True
            return super().number()

    whole = trained(Both(), executor="loop").history.node_losses
    trained(Both(), executor="loop", max_steps=3, save_dir=tmp_path)
    resumed = trained(Both(), executor="loop", resume=vsim.load_checkpoint(tmp_path))
    np.testing.assert_array_equal(resumed.history.node_losses, whole)


@pytest.mark.parametrize(
    "plan", [vsim.Schedule({0: [0, 1, 2], 2: [0, 2], 4: [0, 1, 2]}), vsim.Sample(2, of=3)], ids=repr
)
def test_nodes_that_come_and_go_are_refused_without_extra_state(plan: Any) -> None:
    num_nodes = 2 if isinstance(plan, vsim.Sample) else 3
    with refused(CheckpointError, "calls", "cannot be moved"):
        trained(Counter(), participation=plan, num_nodes=num_nodes, executor="loop")


def test_extra_state_moves_with_its_node() -> None:
    plan = vsim.Schedule({0: [0, 1, 2], 2: [0, 2]})
    ours = trained(Remembered(), participation=plan, executor="loop").history.node_losses
    whole = trained(Counter(), participation=vsim.Schedule({0: [0, 1, 2]}), executor="loop").history.node_losses
    np.testing.assert_array_equal(ours[:, [0, 2]], whole[:, [0, 2]])


# Evaluation


class MaxNorm(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=0.5)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(20.0).view(5, 4))

    def forward(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = super().forward(batch)
        return loss + (0.1 * self.table(batch[1]).square().mean() if not self.training else 0 * self.table.weight.sum())


class Clamped(Scaled):
    def scaled(self, x: Tensor) -> Tensor:
        if not self.training:
            self.layer.weight.data.clamp_(-0.01, 0.01)
        return x


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("kind", [MaxNorm, Clamped])
@pytest.mark.parametrize("strategy", [SGD, SimpleReduceStrategy(optim_spec="sgd", lr=0.5)], ids=["rows", "one row"])
def test_weights_that_evaluation_writes_to_are_restored(kind: Any, executor: str, strategy: Strategy) -> None:
    validated, plain = (
        trained(kind(), executor=executor, strategy=strategy, val_interval=n, metrics={"m": lambda model, b: model(b)})
        for n in (1, None)
    )
    np.testing.assert_array_equal(validated.history.node_losses, plain.history.node_losses)
    assert validated.strategy is not None and plain.strategy is not None
    assert torch.equal(validated.strategy.cluster.weights, plain.strategy.cluster.weights)


# Recurrent models


class Recurrent(nn.Module):
    def __init__(self, kind: str, packed: bool = False, **options: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.rnn = getattr(nn, kind)(4, 6, batch_first=True, **options)
            self.out = nn.Linear(12 if options.get("bidirectional") else 6, 5)
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 4)
        if not self.packed:
            return self.out(self.rnn(x)[0].mean(1))
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 3), batch_first=True)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(outputs.mean(1))


RECURRENT = [
    Recurrent("RNN"),
    Recurrent("GRU", bidirectional=True),
    Recurrent("LSTM", num_layers=2, dropout=0.3),
    Recurrent("LSTM", packed=True, bidirectional=True),
]


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")  # packed sequences
@pytest.mark.parametrize("strategy", [SGD, SimpleReduceStrategy(optim_spec="sgd", lr=0.5)], ids=["rows", "one row"])
@pytest.mark.parametrize("model", RECURRENT, ids=lambda m: f"{m.rnn}{' packed' * m.packed}")
def test_recurrent_models(model: nn.Module, strategy: Strategy) -> None:
    losses = []
    for executor in ("auto", "loop"):
        trainer = Trainer(copy.deepcopy(model), vectors(), vectors(7), loss_fn=F.cross_entropy)
        trainer.fit(**OPTIONS, strategy=strategy, executor=executor)
        losses.append(trainer.history.node_losses)
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_a_recurrent_model_has_the_same_bits_in_processes() -> None:
    options = {"num_nodes": 2, "max_steps": 4, "val_dataset": vectors(7), "val_interval": 2}
    assert vsim.verify(RECURRENT[2], vectors(), SGD, loss_fn=F.cross_entropy, **options).identical


class Routed(FromDict):
    """With the load-balancing loss, for which transformers installs hooks at the first call."""

    def __init__(self) -> None:
        super().__init__("Mixtral ForCausalLM")

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch, output_router_logits=True)


@pytest.mark.slow
def test_router_logits_are_computed_in_the_loop_as_by_eager_pytorch() -> None:
    trainer = Trainer(Routed(), Sentences())
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 3, "batch_size": 4, "shuffle": False, "progress": False}
    with pytest.warns(UserWarning, match="executor='auto' continues with 'loop'"):
        trainer.fit(strategy=Strategy(optim_spec="sgd", lr=0.1), **options)
    for node in range(2):
        model, losses = Routed(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            examples = [Sentences()[8 * step + 2 * i + node] for i in range(4)]
            optimizer.zero_grad()
            loss = model({name: torch.stack([e[name] for e in examples]) for name in examples[0]}).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        np.testing.assert_array_equal(trainer.history.node_losses[:, node], losses)


def test_recorders_of_an_unpickled_model_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recording(nn.Linear):
        _can_record_outputs: ClassVar = {"router_logits": "gate"}

    registry: dict[nn.Module, Any] = {}
    library = SimpleNamespace(_CAN_RECORD_REGISTRY=registry)
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", library)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(2, 2), Recording(2, 2))
    register_recorders(model)
    assert registry == {model[1]: {"router_logits": "gate"}}


# Plain attributes


def test_which_attributes_differ() -> None:
    model = InObject()
    model.itself, model.layer.lines = [model.__dict__], (line for line in "ab")  # type: ignore[assignment]
    model.config.itself = model.shared = model.layer.shared = model.config  # type: ignore[assignment]
    before = plain_attributes(model)
    assert plain_attributes(model) == before and "layer.lines" not in before  # a generator cannot be read
    model.config.calls, model.layer.new = 3, torch.tensor(float("nan"))  # type: ignore[assignment]
    model.layer.register_buffer("mask", torch.ones(2))
    after = plain_attributes(model)
    found = {name for name in after if after[name] != before.get(name)}
    assert found == {"config", "shared", "layer.shared", "layer.new", "layer.mask", "itself"}
    model.layer.new.fill_(1)  # type: ignore[operator]
    assert plain_attributes(model) != after
    assert listed(list("abcdef")) == "a, b, c, d and 2 more"


def test_copies_share_tensors_and_nothing_else() -> None:
    model = Average()
    objective = Objective(model)
    copy_ = objective.copied()
    assert copy_.model.layer.weight is model.layer.weight and copy_.model.mean is not model.mean  # type: ignore[union-attr]
