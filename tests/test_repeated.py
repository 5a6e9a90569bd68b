"""Steps that are called again from a recording: only where that is the same as the step itself.

Every model here is trained twice, as it is and with every step computed anew, while a hook changes between the steps
what the model's Python reads.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from separate import small_mlp, vectors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vsim import Trainer
from vsim.cluster.randomness import NODE, generator
from vsim.cluster.replicas import Replicas
from vsim.engine import Before, Settings, VmapError, VmapExecutor, repeated
from vsim.engine.guards import Calls, Guards, Unwatchable
from vsim.engine.objective import Objective
from vsim.models import CNN, GPT
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy

STEPS = 14
REPEATED, ANEW = "steps are repeated", "steps are not repeated"


class Model(nn.Module):
    """A linear layer and what is made of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)
        stream = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.4 * torch.randn(p.shape, generator=stream))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.scaled(self.layer(batch[0])), batch[1])

    def scaled(self, x: Tensor) -> Tensor:
        return x


def trained(make: Callable[[], nn.Module], change: Callable[[nn.Module, int], Any] | None, **options: Any) -> Trainer:
    """Train such a model; `change(model, step)` is called after every step."""
    SHARED.__dict__.clear()
    SHARED.scale, SHARED.table, SHARED.seen = 1.0, {"scale": 1.0}, []
    RememberingByDefault.scaled.__defaults__[0].clear()  # type: ignore[index]
    ramp.__dict__.clear()
    SEEN.clear()
    Metered.scale = 1.0
    if "scale" in vars(Derived):
        del Derived.scale
    torch.set_autocast_enabled("cpu", False)
    model = make()
    random.seed(0)
    trainer = Trainer(model, vectors(), loss_fn=options.pop("loss_fn", None))
    arguments = {"executor": "vmap", "num_nodes": 3, "batch_size": 4, "max_steps": STEPS, "progress": False}
    strategy = options.pop("strategy", None) or DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=5)
    # The nodes compute with a copy of the model, found where a hook would find it: among what the model itself keeps.
    hook = None if change is None else lambda step, _: change(Kept.newest, step)
    trainer.fit(strategy=strategy, train_loss_hook=hook, **{**arguments, **options})
    return trainer


def both(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module],
    change: Callable[[nn.Module, int], Any] | None = None,
    **options: Any,
) -> tuple[Trainer, bool]:
    """Train such a model as it is, and return whether it is the same when every step is computed anew."""
    ours = trained(make, change, **options)
    with monkeypatch.context() as patch:
        patch.setattr(repeated, "_somebody_watches", lambda: True)
        anew = trained(make, change, **options)
    return ours, np.array_equal(ours.history.node_losses, anew.history.node_losses)


# What a model may read. The names are looked up when it runs.
SHARED = types.SimpleNamespace()
SCALE = 1.0
FACTORS = {"scale": 1.0, "other": 2.0}


class Kept(Model):
    """A model of which the newest copy is known to whoever wants to change it."""

    newest: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        Kept.newest = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        import copy

        for name, value in vars(self).items():
            vars(copied)[name] = copy.deepcopy(value, memo)
        Kept.newest = copied
        return copied


class Attribute(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * x


class Global(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return SCALE * x


class GlobalTable(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return FACTORS["scale"] * x


class Namespace(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return SHARED.scale * x


class NestedTable(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.options = {"of": [{"scale": 1.0}]}

    def scaled(self, x: Tensor) -> Tensor:
        return self.options["of"][0]["scale"] * x


@dataclass
class Config:
    scale: float = 1.0
    flags: set[str] = field(default_factory=set)


class OfConfig(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def scaled(self, x: Tensor) -> Tensor:
        return self.config.scale * x if "off" not in self.config.flags else x


class OfClass(Kept):
    scale = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * x


class ByName(Kept):
    scale_of_output = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return getattr(self, "scale_of_" + "output") * x


class Property(Kept):
    @property
    def scale(self) -> float:
        return SCALE

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * x


class Static(Kept):
    scale: ClassVar[float] = 1.0

    @staticmethod
    def times(x: Tensor) -> Tensor:
        return SCALE * x

    @classmethod
    def and_times(cls, x: Tensor) -> Tensor:
        return cls.scale * x

    def scaled(self, x: Tensor) -> Tensor:
        return self.and_times(self.times(x))


class Within(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        def times(x: Tensor) -> Tensor:
            return sum(SCALE * x for _ in range(2))

        return times(x)


class Partial(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.options = {"negative_slope": 0.5}
        self.activation = functools.partial(F.leaky_relu, **self.options)

    def scaled(self, x: Tensor) -> Tensor:
        return self.activation(x)


class OwnTensor(Kept):
    """A tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(5)

    def scaled(self, x: Tensor) -> Tensor:
        return self.factor * x


class Enumerated(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.kind = Kind.ONCE

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.kind is Kind.ONCE else 2 * x


class Kind(enum.Enum):
    ONCE = 1
    TWICE = 2


class Dropping(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def scaled(self, x: Tensor) -> Tensor:
        return self.dropout(x)


class Hooked(Kept):
    pass


class Times(torch.autograd.Function):
    """The identity, whose gradient depends on a global number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return SCALE * grad


class OwnFunction(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return Times.apply(x)


class Scaling:
    """An object that is called like a function."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.scale * x.relu()


class SlottedScaling(Scaling):
    """One that keeps its number where it cannot be found."""

    __slots__ = ("hidden",)

    @property
    def scale(self) -> float:
        return self.hidden

    @scale.setter
    def scale(self, scale: float) -> None:
        self.hidden = scale


class OfTorchs(Kept):
    """A function of its own within a module of torch's."""

    kind = Scaling

    def __init__(self) -> None:
        super().__init__()
        self.function = self.kind()
        self.encoder = nn.TransformerEncoderLayer(5, 1, 7, 0.0, self.function, batch_first=True)
        stream = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in self.encoder.parameters():
                p.copy_(0.4 * torch.randn(p.shape, generator=stream))

    def scaled(self, x: Tensor) -> Tensor:
        return self.encoder(x[:, None])[:, 0]


class OfTorchsSlotted(OfTorchs):
    kind = SlottedScaling


FROM_STRING: dict[str, Any] = {"Kept": Kept, "SCALE": 1.0, "__name__": "__main__"}
exec("class FromString(Kept):\n    def scaled(self, x):\n        return SCALE * x\n", FROM_STRING)


class Listed(Kept):
    """A layer that is no submodule, so its weights stay."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(5, 5)]
        nn.init.eye_(self.layers[0].weight)
        nn.init.constant_(self.layers[0].bias, 0.0)

    def scaled(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def set_string(model: Any, step: int) -> None:
    FROM_STRING["SCALE"] = 0.5 if 9 <= step < STEPS else 1.0


def set_global(model: Any, step: int) -> None:
    global SCALE
    SCALE = 1.0 + step if step < STEPS else 1.0


def set_globals_table(model: Any, step: int) -> None:
    FACTORS["scale"] = 1.0 + step if step < STEPS else 1.0


def late(change: Callable[[Any], Any]) -> Callable[[Any, int], None]:
    """A change that comes once, when the steps have long been repeated."""

    def after(model: Any, step: int) -> None:
        if step == 9:
            change(model)

    return after


def put(**attributes: Any) -> Callable[[Any], None]:
    return lambda model: vars(model).update(attributes)


class Property2(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return 0.5 * x


class Derived(OfClass):
    """The attribute is its parent's."""


class Ordered(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.factors = {"a": 0.5, "b": 2.0}

    def scaled(self, x: Tensor) -> Tensor:
        for name, factor in self.factors.items():
            x = (x * factor).tanh() if name == "a" else x + factor * x.square()
        return x


class Square(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.arange(25.0).view(5, 5) / 10

    def scaled(self, x: Tensor) -> Tensor:
        return x @ self.factor


# Model, and what changes it.
CHANGED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], Any]]] = {
    "an attribute, once": (Attribute, late(put(scale=0.5))),
    "an attribute, always": (Attribute, lambda m, step: put(scale=1.0 + step)(m)),
    "a new attribute": (OfClass, late(put(scale=0.5))),
    "a global": (Global, set_global),
    "a global table": (GlobalTable, set_globals_table),
    "a namespace": (Namespace, late(lambda _: setattr(SHARED, "scale", 0.5))),
    "deep in a table": (NestedTable, late(lambda m: m.options["of"][0].update(scale=0.5))),
    "a list": (NestedTable, late(lambda m: m.options["of"].insert(0, {"scale": 0.5}))),
    "a dataclass": (OfConfig, late(lambda m: setattr(m.config, "scale", 0.5))),
    "a set": (lambda: OfConfig2(), late(lambda m: m.config.flags.add("off"))),
    "an attribute by name": (ByName, late(put(scale_of_output=0.5))),
    "a property": (Property, set_global),
    "static methods": (Static, set_global),
    "a function within": (Within, set_global),
    "a partial": (Partial, late(lambda m: m.activation.keywords.update(negative_slope=0.1))),
    "another tensor": (OwnTensor, late(lambda m: setattr(m, "factor", torch.full((5,), 0.5)))),
    "a tensor's values": (OwnTensor, late(lambda m: m.factor.fill_(0.5))),
    "a tensor's memory": (OwnTensor, late(lambda m: setattr(m.factor, "data", torch.full((5,), 0.5)))),
    "code of a string": (FROM_STRING["FromString"], set_string),
    "an object that torch calls": (OfTorchs, late(lambda m: setattr(m.function, "scale", 0.5))),
    "a layer in a list": (Listed, late(lambda m: setattr(m.layers[0].weight, "data", 0.5 * torch.eye(5)))),
    "another class": (Global, late(lambda m: setattr(m, "__class__", Property2))),
    "an attribute of a subclass": (Derived, late(lambda m: setattr(Derived, "scale", 0.5))),
    "the order of a table": (Ordered, late(lambda m: m.factors.update(a=m.factors.pop("a")))),
    "a tensor's strides": (Square, late(lambda m: m.factor.t_())),
    "autocast": (Hooked, late(lambda _: torch.set_autocast_enabled("cpu", True))),
    "an enumeration": (Enumerated, late(put(kind=Kind.TWICE))),
    "a layer's rate": (Dropping, late(lambda m: setattr(m.dropout, "p", 0.8))),
    "a layer's mode": (Dropping, late(lambda m: m.dropout.eval())),
    "another layer": (Dropping, late(lambda m: setattr(m, "dropout", nn.ReLU()))),
    "a method": (Hooked, late(lambda m: setattr(m, "scaled", lambda x: 0.5 * x))),
    "a hook": (Hooked, late(lambda m: m.layer.register_forward_hook(lambda *a: 0.5 * a[2]))),
    "a hook before": (Hooked, late(lambda m: m.layer.register_forward_pre_hook(lambda _, a: (0.5 * a[0],)))),
    "a function's gradient": (OwnFunction, set_global),
}


class OfConfig2(OfConfig):
    def scaled(self, x: Tensor) -> Tensor:
        return 2.0 * x if "off" not in self.config.flags else x


@pytest.mark.parametrize("name", CHANGED)
def test_what_changes_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, change = CHANGED[name]
    ours, same = both(monkeypatch, make, change)
    assert same
    # The change tells: without it the losses are others.
    still = trained(make, None)
    assert not np.array_equal(still.history.node_losses, ours.history.node_losses)
    assert still.history.executor_reason.startswith(REPEATED)


class Counting(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def scaled(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / self.count


class Remembering(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Any] = []

    def scaled(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return x


class RememberingByDefault(Kept):
    def scaled(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return x * (1 + len(seen) % 3)


class Setting(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        global FACTORS
        FACTORS = {**FACTORS, "count": FACTORS.get("count", 0.0) + 1}
        return x


class ByPythonsChance(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else 2 * x


class ByPythonsChanceInRange(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return random.uniform(0.5, 1.5) * x


class ByNumpysChance(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return x if np.random.rand() < 0.5 else 2 * x  # noqa: NPY002


class ByImportedChance(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        import numpy as numbers

        return x if numbers.random.rand() < 0.5 else 2 * x  # noqa: NPY002


class OwnChance(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random(3)

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.draws.random() < 0.5 else 2 * x


class Cycling(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([1.0, 2.0])

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        self.scales, scales = None, self.scales
        copied = super().__deepcopy__(memo)
        copied.scales = self.scales = scales
        return copied

    def scaled(self, x: Tensor) -> Tensor:
        return next(self.scales) * x


class Printing(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        print("a step")
        return x


class ByTheClock(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        SHARED.seen.append(time.perf_counter())
        return x


class ByTheEnvironment(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return x if os.environ.get("VSIM_TEST_SCALE") is None else 2 * x


@functools.lru_cache
def cached_factor(count: int) -> float:
    return SCALE * count


class OfACache(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return cached_factor(len(x)) * x


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class OfSlots(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slotted()

    def scaled(self, x: Tensor) -> Tensor:
        return self.slots.scale * x


class OfArray(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.ones(5, dtype=np.float32)

    def scaled(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.array) * x


class Recurrent(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(12, 5, batch_first=True)
        stream = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in self.rnn.parameters():
                p.copy_(0.4 * torch.randn(p.shape, generator=stream))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.rnn(batch[0][:, None])[0][:, 0], batch[1])


class Sparse(Kept):
    """Its gradient is sparse on the way."""

    def scaled(self, x: Tensor) -> Tensor:
        table = torch.sparse.mm(torch.eye(5).to_sparse(), self.layer.weight)
        return x + table.sum()


class Renormed(Kept):
    """It writes to its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 5, max_norm=0.5)
        nn.init.constant_(self.words.weight, 0.4)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.words((4 * x.abs()).long() % 9).mean(1)


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = np.ones(3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return float(self.table[0]) * self.scale * x


class OfChild(Kept):
    """What cannot be compared is deeper in the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.children_of_mine = nn.ModuleList([Child()])

    def scaled(self, x: Tensor) -> Tensor:
        return self.children_of_mine[0](x)


log = functools.partial(print, "a step")
SEEN: list[int] = []
note = SEEN.append


class PrintingByPartial(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        log()
        return x


class NotingByMethod(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        note(1)
        return x


def ramp(x: Tensor) -> Tensor:
    ramp.step = getattr(ramp, "step", 0) + 1  # type: ignore[attr-defined]
    return x / ramp.step  # type: ignore[attr-defined]


class Ramped(Kept):
    """Its number is an attribute of a function."""

    def scaled(self, x: Tensor) -> Tensor:
        return ramp(x)


def announced(x: Tensor) -> Tensor:
    print("warm")
    return 2 * x


class WarmingUp(Kept):
    """It takes another path when it has been called for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def scaled(self, x: Tensor) -> Tensor:
        if self.calls < 3:
            self.calls += 1
            return x
        return announced(x)


class OfNumbers(Kept):
    """It reads a tensor of its own in a way that PyTorch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(())

    def scaled(self, x: Tensor) -> Tensor:
        return torch.tensor([self.factor, self.factor]).mean() * x


class Metered(type):
    scale = 1.0


class OfMetaclass(Kept):
    def scaled(self, x: Tensor) -> Tensor:
        return METERED.scale * x


METERED = Metered("METERED", (), {})


class OwnMethod(Kept):
    """A method of a generator, which shows nothing of whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = random.Random(1).random

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.drawn()


# What is done, and what is said of it.
ANEW_ALWAYS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Any, int], Any] | None]] = {
    "counts": (Counting, "reads", None),
    "remembers": (Remembering, "reads", None),
    "remembers in a default": (RememberingByDefault, "reads", None),
    "sets a global": (Setting, "scaled sets FACTORS", None),
    "random": (ByPythonsChance, "it calls random", None),
    "random.uniform": (ByPythonsChanceInRange, "it calls random", None),
    "numpy.random": (ByNumpysChance, "it reads module numpy", None),
    "an import of numpy": (ByImportedChance, "scaled imports numpy", None),
    "a generator of its own": (OwnChance, "it calls random", None),
    "a method of a generator": (OwnMethod, "it calls random", None),
    "an iterator": (Cycling, "the model.scales is a cycle, which cannot be compared with what it was", None),
    "prints": (Printing, "it calls print", None),
    "the clock": (ByTheClock, "it calls perf_counter", None),
    "the environment": (ByTheEnvironment, "it reads module os", None),
    "a cache": (OfACache, "_lru_cache_wrapper", set_global),
    "slots": (OfSlots, "the model.slots is a Slotted", late(lambda m: setattr(m.slots, "scale", 0.5))),
    "slots that torch calls": (OfTorchsSlotted, "SlottedScaling", late(lambda m: setattr(m.function, "scale", 0.5))),
    "keeps tensors": (Recurrent, "is a tensor of a step", None),
    "sparse": (Sparse, "sparse", None),
    "changes its weights": (Renormed, "embedding_renorm_ writes to a tensor that is no buffer", None),
    "deep in the tree": (OfChild, "is a ndarray", late(lambda m: setattr(m.children_of_mine[0], "scale", 0.5))),
    "prints by a partial": (PrintingByPartial, "is print, which does more than compute", None),
    "a method of a list": (NotingByMethod, "is append, which does more than compute", None),
    "an attribute of a function": (Ramped, "reads", None),
    "warms up": (WarmingUp, "it calls print", None),
    "makes tensors of numbers": (OfNumbers, "it makes tensors of numbers", late(lambda m: m.factor.fill_(0.5))),
    "a metaclass": (OfMetaclass, "METERED is made by Metered", late(lambda _: setattr(Metered, "scale", 0.5))),
    "an array": (OfArray, "the model.array is a ndarray", late(lambda m: m.array.fill(0.5))),
}


@pytest.mark.parametrize("name", ANEW_ALWAYS)
def test_what_does_more_than_compute_is_computed_anew(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, why, change = ANEW_ALWAYS[name]
    ours, same = both(monkeypatch, make, change)
    assert ours.history.executor_reason.startswith(ANEW) and why in ours.history.executor_reason
    assert same or make is ByTheClock


def test_what_prints_prints_at_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    trained(Printing, None)
    assert capsys.readouterr().out == "a step\n" * STEPS


def test_effects_are_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    trained(PrintingByPartial, None)
    assert capsys.readouterr().out == "a step\n" * STEPS
    trained(NotingByMethod, None)
    assert len(SEEN) == STEPS
    trained(WarmingUp, None)
    assert capsys.readouterr().out == "warm\n" * (STEPS - 3)


class Looking(Kept):
    """What it looks up is not used, but has to be there."""

    def __init__(self) -> None:
        super().__init__()
        self.top = torch.tensor([2])

    def scaled(self, x: Tensor) -> Tensor:
        torch.arange(5)[self.top]
        return x


def test_an_error_of_what_is_not_used_is_not_lost() -> None:
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        trained(Looking, late(lambda m: m.top.fill_(7)))


def test_a_sparse_batch_is_computed_anew() -> None:
    engine = parts_of(small_mlp(0.0), 2)
    x, y = stacked_batch(0, 2)
    losses = engine.losses_and_grads([x.clone(), y])
    key = repeated._key([x, y, torch.eye(2).to_sparse()], 1.0, True)
    assert key is None and torch.equal(losses, engine.losses_and_grads([x, y]))


def test_a_closure_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = 1.0

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return scale * F.cross_entropy(outputs, y)

    def change(model: Any, step: int) -> None:
        nonlocal scale
        scale = 1.0 + step if step < STEPS else 1.0

    def make() -> nn.Module:
        return nn.Sequential(Attribute().layer)

    ours, same = both(monkeypatch, make, change, loss_fn=loss)
    assert same
    assert "something that the model reads has changed" in ours.history.executor_reason
    still = trained(make, None, loss_fn=loss)
    assert still.history.executor_reason.startswith(REPEATED)


def test_a_module_of_the_users_own_is_looked_into(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "layers_of_mine.py").write_text(
        "import torch\nSCALE = 1.0\n\ndef scaled(x):\n    return SCALE * torch.tanh(x)\n"
    )
    (tmp_path / "model_of_mine.py").write_text(
        "import layers_of_mine\nfrom torch import nn\nfrom torch.nn import functional as F\n\n"
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(12, 5)\n        nn.init.constant_(self.layer.weight, 0.1)\n"
        "        nn.init.constant_(self.layer.bias, 0.0)\n\n"
        "    def forward(self, batch):\n"
        "        return layers_of_mine.SCALE * F.cross_entropy(layers_of_mine.scaled(self.layer(batch[0])), batch[1])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import layers_of_mine
    import model_of_mine

    def change(model: Any, step: int) -> None:
        layers_of_mine.SCALE = 0.5 if 8 <= step < STEPS else 1.0

    ours, same = both(monkeypatch, model_of_mine.Model, change)
    assert same
    still = trained(model_of_mine.Model, None)
    assert still.history.executor_reason.startswith(REPEATED)
    assert not np.array_equal(still.history.node_losses, ours.history.node_losses)


class InPlace(Model):
    """It changes its batch, and what it makes of it."""

    def forward(self, batch: list[Tensor]) -> Tensor:
        batch[0].mul_(0.5)
        out = self.layer(batch[0])
        return F.cross_entropy(out.mul(2.0).add_(1.0).relu_(), batch[1])


class InnerGradient(Model):
    def forward(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        inner = torch.func.grad(lambda z: F.cross_entropy(self.layer(z), y))(x)
        return F.cross_entropy(self.layer(x), y) + inner.square().sum()


class NotingShapes(Kept):
    """It keeps something that is new at every step and yet the same."""

    def scaled(self, x: Tensor) -> Tensor:
        self.shape = x.shape[1:]
        return x


class Running(Model):
    """A buffer that is assigned anew, and one that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mean", torch.zeros(5))

    def scaled(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.norm(x) - self.mean


@pytest.mark.parametrize("make", [Model, InPlace, InnerGradient, Running, Dropping, NotingShapes])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_bits_are_those_of_steps_that_are_computed(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], deterministic: bool
) -> None:
    if make is InnerGradient and deterministic:
        pytest.skip("is refused there: test_unusual_models.py")
    ours, same = both(monkeypatch, make, deterministic=deterministic)
    assert same and ours.history.executor_reason.startswith(REPEATED)


@pytest.mark.parametrize("strategy", [DiLoCoStrategy(H=3), SimpleReduceStrategy(max_norm=1.0)])
@pytest.mark.parametrize("options", [{}, {"minibatch_size": 2}, {"minibatch_size": 1}, {"autocast": True}])
def test_shared_rows_minibatches_and_autocast(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, options: dict[str, Any]
) -> None:
    ours, same = both(monkeypatch, lambda: small_mlp(0.1), strategy=strategy, **options)
    assert same and ours.history.executor_reason.startswith(REPEATED)


def parts_of(model: nn.Module, num_nodes: int, **settings: Any) -> VmapExecutor:
    replicas = Replicas.of(model, num_nodes, torch.device("cpu"))
    streams = [generator(0, NODE, k) for k in range(num_nodes)]
    return VmapExecutor(replicas, Objective(replicas.module), streams, Settings(**settings))


def stacked_batch(seed: int, num_nodes: int = 3) -> list[Tensor]:
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(num_nodes, 4, 12, generator=stream)
    return [x, torch.randint(0, 5, (num_nodes, 4), generator=stream)]


def test_a_step_is_watched_recorded_proven_and_repeated() -> None:
    model = small_mlp(0.0)
    engine = parts_of(model, 3)
    calls = []
    engine.objective.model.register_forward_pre_hook(functools.partial(_note, calls))
    found = []
    for seed in range(7):
        engine.losses_and_grads(stacked_batch(seed))
        found.append((len(calls), engine.is_ready, engine.reason[:18]))
    # The hook is among what is watched: it changes a list, and the step is not repeated after all.
    assert [f[0] for f in found] == [1, 2, 3, 4, 5, 6, 7] and found[-1][2] != REPEATED
    engine = parts_of(model, 3)
    found = []
    for seed in range(7):
        engine.losses_and_grads(stacked_batch(seed))
        found.append((engine.is_ready, engine.reason[:18]))
    assert found == [(False, "")] * 3 + [(False, REPEATED)] + [(True, REPEATED)] * 3


def _note(calls: list[int], *_: Any) -> None:
    calls.append(1)


def ready(engine: VmapExecutor, batches: Iterator[list[Tensor]]) -> None:
    for batch in itertools.islice(batches, 6):
        engine.losses_and_grads(batch)
    assert engine.reason.startswith(REPEATED) and engine.is_ready


def test_a_step_that_is_repeated_calls_no_model() -> None:
    engine = parts_of(small_mlp(0.0), 3)
    ready(engine, map(stacked_batch, itertools.count()))
    batch = stacked_batch(99)
    expected = engine._computed(batch, 1.0, True)
    grads = engine.replicas.grads.clone()
    engine.replicas.grads.fill_(math.nan)
    engine._repeated.compute = None  # type: ignore[assignment]
    assert torch.equal(engine.losses_and_grads(batch), expected) and torch.equal(engine.replicas.grads, grads)


def test_whoever_counts_operations_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = parts_of(small_mlp(0.0), 3)
    with FlopCounterMode(display=False) as first:
        engine.losses_and_grads(stacked_batch(0))
    ready(engine, map(stacked_batch, itertools.count()))
    with FlopCounterMode(display=False) as later:
        engine.losses_and_grads(stacked_batch(1))
    assert first.get_total_flops() == later.get_total_flops() > 0


def test_under_a_debugger_the_model_is_called() -> None:
    engine = parts_of(small_mlp(0.0), 3)
    ready(engine, map(stacked_batch, itertools.count()))
    seen = set()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        seen.add(frame.f_code.co_name)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        engine.losses_and_grads(stacked_batch(1))
    finally:
        sys.settrace(before)
    assert "_computed" in seen


def test_an_error_is_that_of_the_model() -> None:
    torch.manual_seed(0)
    engine = parts_of(GPT(vocab_size=11, block_size=8, layers=1, heads=1, width=16, seed=0), 2)

    def batch(top: int) -> list[Tensor]:
        tokens = torch.arange(16).remainder(top).view(2, 1, 8)
        return [tokens, tokens.roll(1)]

    ready(engine, (batch(11) for _ in itertools.count()))
    with pytest.raises(VmapError, match="out of range for a table of 11 rows"):
        engine.losses_and_grads(batch(12))


def test_other_shapes_are_steps_of_their_own() -> None:
    engine = parts_of(small_mlp(0.0), 3)
    for seed in range(12):
        for size in (4, 3):
            batch = [t[:, :size] for t in stacked_batch(seed)]
            losses = engine.losses_and_grads(batch)
            grads = engine.replicas.grads.clone()
            assert torch.equal(losses, engine._computed([t.clone() for t in batch], 1.0, True))
            assert torch.equal(grads, engine.replicas.grads)
    assert len(engine._repeated._kinds) == 2 and all(k.is_proven for k in engine._repeated._kinds.values())


@pytest.mark.parametrize(
    "model", [CNN(batch_norm=True, dropout=0.2, seed=0), GPT(vocab_size=11, block_size=8, layers=2, heads=2, width=16)]
)
@pytest.mark.parametrize("exact", [False, True])
def test_of_larger_models(model: nn.Module, exact: bool) -> None:
    engine = parts_of(model, 3, exact=exact)

    def batch(seed: int) -> list[Tensor]:
        stream = torch.Generator().manual_seed(seed)
        if isinstance(model, CNN):
            shape = (3, 4, 1, 8, 8)
            return [torch.randn(shape, generator=stream), torch.randint(0, 10, (3, 4), generator=stream)]
        tokens = torch.randint(0, 11, (3, 4, 9), generator=stream)
        return [tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()]

    ready(engine, map(batch, itertools.count()))
    for seed in range(3):
        before = Before(engine)
        losses = engine.losses_and_grads(batch(seed))
        left = [engine.replicas.grads.clone(), *(b.clone() for b in engine.replicas.buffers.values())]
        states = [g.get_state() for g in engine.generators]
        before.restore()
        assert torch.equal(engine._computed(batch(seed), 1.0, True), losses)
        assert all(map(torch.equal, left, [engine.replicas.grads, *engine.replicas.buffers.values()]))
        assert all(map(torch.equal, states, [g.get_state() for g in engine.generators]))


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_of_one_node_and_of_other_numbers(num_nodes: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(12, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)).to(dtype)
    replicas = Replicas.of(model, num_nodes, torch.device("cpu"))
    streams = [generator(0, NODE, k) for k in range(num_nodes)]
    engine = VmapExecutor(replicas, Objective(replicas.module, F.cross_entropy), streams, Settings())
    batches = ([t.to(dtype) if t.is_floating_point() else t for t in stacked_batch(i, num_nodes)] for i in range(9))
    ready(engine, batches)
    batch = next(batches)
    losses, grads = engine.losses_and_grads(batch), engine.replicas.grads.clone()
    assert torch.equal(losses, engine._computed(batch, 1.0, True)) and torch.equal(grads, engine.replicas.grads)


def test_a_recording_that_has_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = parts_of(small_mlp(0.0), 3)
    for seed in range(3):
        engine.losses_and_grads(stacked_batch(seed))
    (kind,) = engine._repeated._kinds.values()
    recorded = kind.call
    assert recorded is not None
    kind.call = lambda *batch: recorded(*batch) + 1e-7
    losses = engine.losses_and_grads(stacked_batch(3))
    assert torch.equal(losses, engine._computed(stacked_batch(3), 1.0, True))
    assert "it would not have the same bits" in engine.reason and kind.is_given_up


def test_what_would_not_repay_its_cost_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_SECONDS_A_CALL", 1e-5)
    engine = parts_of(small_mlp(0.0), 3, num_steps=2)
    for seed in range(4):
        engine.losses_and_grads(stacked_batch(seed))
    assert engine.reason.endswith("that would save less than it costs to try")


def test_guards_of_a_step_with_nothing_to_watch() -> None:
    with Calls() as calls:
        sum([1, 2])
    assert Guards(calls, nn.Linear(2, 2), None).hold()
    with pytest.raises(Unwatchable, match=r"the model is a TextIOWrapper|the model is a"):
        Guards(calls, sys.__stdout__)
