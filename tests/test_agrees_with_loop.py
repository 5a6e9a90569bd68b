"""A first vmapped step with operations that vsim has no rules for is compared with the nodes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from separate import Scaled, vectors
from torch import Tensor, nn
from torch.nn import functional as F

from vsim import Compute, Network, Trainer
from vsim.engine import VmapError, vmap
from vsim.engine.loop import agrees_with_loop
from vsim.strategy import AsyncDiLoCoStrategy, SimpleReduceStrategy, Strategy

OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": 4, "batch_size": 4, "progress": False}
STRATEGIES = {
    "rows of their own": Strategy(optim_spec="sgd", lr=0.1),
    "one row": SimpleReduceStrategy(optim_spec="sgd", lr=0.1),
}


class _Forward(torch.autograd.Function):
    """Doubles; vectorised, it gives every node what is another's."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return 2 * x.roll(1, in_dims[0]), in_dims[0]


class _Backward(_Forward):
    """Doubles, with the same values vectorised, but for the gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x.detach() + x, in_dims[0]


class Wrong(Scaled):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def scaled(self, x: Tensor) -> Tensor:
        result: Tensor = self.function.apply(x)
        return result


class Right(Scaled):
    """With an operation that vsim has no rule for, and all that a comparison must leave as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def scaled(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(x.erf().cumsum(1)), 0.4)


def trained(model: nn.Module, strategy: Strategy, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors())
    trainer.fit(strategy=strategy, **{**OPTIONS, **options})
    return trainer


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("function", [_Forward, _Backward])
def test_a_wrong_rule_is_found(function: type[torch.autograd.Function], strategy: str) -> None:
    by_loop = trained(Wrong(function), STRATEGIES[strategy], executor="loop")
    with pytest.warns(UserWarning, match=r"continues with 'loop': .* differ.*\(custom_function_call\)"):
        ours = trained(Wrong(function), STRATEGIES[strategy])
    np.testing.assert_array_equal(ours.history.node_losses, by_loop.history.node_losses)
    for options in ({}, {"chunk_size": 2}, {"minibatch_size": 2}):
        with pytest.raises(VmapError, match=r"differ.*\(custom_function_call\).*executor='loop'"):
            trained(Wrong(function), STRATEGIES[strategy], executor="vmap", **options)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (STRATEGIES["rows of their own"], {}),
        (STRATEGIES["one row"], {}),
        (STRATEGIES["rows of their own"], {"chunk_size": 2}),
        (STRATEGIES["rows of their own"], {"minibatch_size": 2}),
        (
            AsyncDiLoCoStrategy(H=2, optim_spec="sgd", lr=0.1),
            {"network": Network(1e9, 1e-3), "compute": Compute([1.0, 2.0, 3.0])},
        ),
    ],
)
def test_the_comparison_changes_nothing(
    strategy: Strategy, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def noted(executor: Any, *rest: Any) -> str:
        compared.append(executor.unproven)
        return agrees_with_loop(executor, *rest)

    monkeypatch.setattr(vmap, "agrees_with_loop", noted)
    ours = trained(Right(), strategy, executor="vmap", **options)
    assert compared and all({"erf", "cumsum"} <= names for names in compared)
    monkeypatch.setattr(vmap, "agrees_with_loop", lambda *_: "")
    without = trained(Right(), strategy, executor="vmap", **options)
    np.testing.assert_array_equal(ours.history.node_losses, without.history.node_losses)
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(tensor, without.model.state_dict()[name])
    by_loop = trained(Right(), strategy, executor="loop", **{**options, "chunk_size": None})
    np.testing.assert_allclose(ours.history.node_losses, by_loop.history.node_losses, rtol=1e-2)


def test_models_of_known_operations_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmap, "agrees_with_loop", lambda *_: pytest.fail("compared"))
    trained(Scaled(), STRATEGIES["rows of their own"], executor="vmap")
