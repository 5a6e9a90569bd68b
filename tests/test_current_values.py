"""Values that a model's Python reads are the current ones at every step; under compile="trace" a change is noticed."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from separate import Scaled, vectors
from torch import Tensor, nn
from torch.nn import functional as F

from vsim import Trainer
from vsim.engine import StaleTraceError, TraceError
from vsim.strategy import DiLoCoStrategy
from vsim.training.run import Run

CONFIG = types.ModuleType("config")
PARTIAL = functools.partial(F.relu)
CHANGED_AFTER = 5


class Model(Scaled):
    """A linear layer, whose outputs are multiplied by a number: 1, and 2 from a step on."""


class Buffer(Model):
    """The reference, which any way of computing reads anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * x


def times(x: Tensor, config: Any) -> Tensor:
    return config.scale * x


class ModuleAsArgument(Model):
    def scaled(self, x: Tensor) -> Tensor:
        return times(x, CONFIG)


def closed_over(config: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: config.scale * x


class ModuleInClosure(Model):
    scale_of = staticmethod(closed_over(CONFIG))

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale_of(x)


class LaterName(Model):
    def scaled(self, x: Tensor) -> Tensor:
        return 2 * x if hasattr(self, "late") else x


class OfModules(Model):
    def scaled(self, x: Tensor) -> Tensor:
        return nn.Module.own_scale * x  # type: ignore[operator]


class OfTensors(Model):
    def scaled(self, x: Tensor) -> Tensor:
        return torch.Tensor.own_scale * x  # type: ignore[attr-defined]


class OfTorch(Model):
    def scaled(self, x: Tensor) -> Tensor:
        return torch.nn.functional.own_scale * x  # type: ignore[attr-defined]


class Leaky(nn.LeakyReLU):
    """Its class attribute is read by torch's code alone."""

    negative_slope, inplace = 1.0, False

    def __init__(self) -> None:
        nn.Module.__init__(self)


class ReadByTorch(Model):
    def __init__(self) -> None:
        super().__init__()
        self.leaky = Leaky()

    def scaled(self, x: Tensor) -> Tensor:
        return -self.leaky(x.new_full((), -1.0)) * x


def scaled_by_config(module: nn.Module, x: Tensor, power: int = 1) -> Tensor:
    return CONFIG.scale**power * x  # type: ignore[attr-defined,no-any-return]


class Cached(nn.Module):
    forward = functools.lru_cache(maxsize=1)(scaled_by_config)


class Partial(nn.Module):
    forward = functools.partialmethod(scaled_by_config, power=1)  # type: ignore[assignment]


class InCache(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Cached()

    def scaled(self, x: Tensor) -> Tensor:
        return self.inner(x)


class InPartialMethod(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Partial()

    def scaled(self, x: Tensor) -> Tensor:
        return self.inner(x)


class OfPartial(Model):
    def scaled(self, x: Tensor) -> Tensor:
        return PARTIAL.scale * x  # type: ignore[attr-defined,no-any-return]


class Formatted(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return float(f"{self.scale}") * x


class FrozenInside(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def scaled(self, x: Tensor) -> Tensor:
        return torch.tensor([self.scale]) * x


class Handled(FrozenInside):
    """A recording cannot take the number, and takes the other branch."""

    def scaled(self, x: Tensor) -> Tensor:
        try:
            return float(self.scale) * x
        except Exception:
            return 0.5 * x


def to_attribute(owner: Any, name: str, run: Run, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(owner, name, 2.0)


def to_model(name: str, run: Run, patch: pytest.MonkeyPatch) -> None:
    setattr(run.model, name, 2.0)


def to_frozen(run: Run, patch: pytest.MonkeyPatch) -> None:
    run.cluster.replicas.frozen["scale"].fill_(2.0)


def of(owner: Any, name: str = "own_scale") -> Callable[..., None]:
    return functools.partial(to_attribute, owner, name)


WAYS: list[tuple[type[Model], Callable[..., None]]] = [
    (ModuleAsArgument, of(CONFIG, "scale")),
    (ModuleInClosure, of(CONFIG, "scale")),
    (LaterName, functools.partial(to_model, "late")),
    (OfModules, of(nn.Module)),
    (OfTensors, of(torch.Tensor)),
    (OfTorch, of(torch.nn.functional)),
    (ReadByTorch, of(Leaky, "negative_slope")),
    (InCache, of(CONFIG, "scale")),
    (InPartialMethod, of(CONFIG, "scale")),
    (OfPartial, of(PARTIAL, "scale")),
    (Formatted, functools.partial(to_model, "scale")),
    (FrozenInside, to_frozen),
    (Handled, to_frozen),
]


@pytest.fixture(autouse=True)
def _at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((CONFIG, "scale"), (PARTIAL, "scale")):
        monkeypatch.setattr(owner, name, 1.0, raising=False)
    for owner in (nn.Module, torch.Tensor, torch.nn.functional):
        monkeypatch.setattr(owner, "own_scale", 1.0, raising=False)
    monkeypatch.setattr(Leaky, "negative_slope", 1.0)


def losses(model: nn.Module, change: Callable[[Run], None], **options: Any) -> Any:
    """Those of a run in which `change` is called once."""
    trainer = Trainer(model, vectors())
    at = [lambda run: change(run) if run.done == CHANGED_AFTER else None]
    given = {"num_nodes": 2, "max_steps": 12, "batch_size": 5, "progress": False, "callbacks": at, **options}
    trainer.fit(strategy=DiLoCoStrategy(H=4, inner_optim="sgd", lr=0.1), **given)
    return trainer.history.node_losses


@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize(("kind", "change"), WAYS, ids=[kind.__name__ for kind, _ in WAYS])
def test_by_default_every_step_reads_anew(
    kind: type[Model], change: Callable[..., None], executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses(Buffer(), lambda run: run.cluster.replicas.buffers["scale"].fill_(2.0), executor="loop")
    ours = losses(kind(), lambda run: change(run, monkeypatch), executor=executor)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize(("kind", "change"), WAYS, ids=[kind.__name__ for kind, _ in WAYS])
def test_a_trace_notices_the_change_or_is_refused(
    kind: type[Model], change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((StaleTraceError, TraceError)) as caught:
        losses(kind(), lambda run: change(run, monkeypatch), executor="vmap", compile="trace")
    if caught.type is StaleTraceError:  # at the last step at the latest
        assert "differs at step 12" in str(caught.value) and "the steps from 3 on" in str(caught.value)


def test_a_trace_reads_buffers_anew() -> None:
    def change(run: Run) -> None:
        run.cluster.replicas.buffers["scale"].fill_(2.0)

    np.testing.assert_array_equal(*(losses(Buffer(), change, executor="vmap", compile=c) for c in ("trace", False)))
