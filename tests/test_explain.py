"""How a run computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors import refused
from torch import nn

from vsim import Trainer
from vsim.data import digits
from vsim.engine.explain import Explanation, peak_flops
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy


def explain(model: nn.Module, **options: Any) -> Explanation:
    options = {"strategy": DiLoCoStrategy(H=5, lr=1e-3), "num_nodes": 4, "max_steps": 20, "batch_size": 8, **options}
    return Trainer(model, digits()[0]).explain(**options)


def test_an_mlp_is_explained() -> None:
    model = MLP(seed=0)
    size = 4 * sum(p.numel() for p in model.parameters())
    found = explain(model, executor="vmap")
    assert {(o.name, o.calls, o.form) for o in found.operations} >= {
        ("linear", 3, "batched"),
        ("relu", 2, "functorch"),
        ("cross_entropy", 1, "batched"),
    }
    assert found.reason.startswith("proved on nodes 0 and 3: losses ")
    assert found.memory["weights"] == found.memory["gradients"] == size
    assert found.memory["optimizer"] == pytest.approx(2 * size, rel=0.01)
    assert 0 < found.memory["activations"] < size
    # Every weight once forward, once for its gradient, and the last two layers' for their inputs'; 8 examples.
    products = [64 * 128, 128 * 128, 128 * 10]
    assert found.gradient_flops == 4 * 8 * 2 * (2 * sum(products) + sum(products[1:]))
    assert 0 < found.share_of_peak < 1.5
    assert "one call for all nodes" in str(found) and "% of the" in str(found) and "<pre>" in found._repr_html_()


def test_the_loop_is_explained() -> None:
    exact, found = (explain(MLP(seed=0), **how) for how in ({"deterministic": True}, {"executor": "loop"}))
    assert (exact.executor, exact.reason, exact.operations) == ("loop", "deterministic=True", [])
    assert found.executor == "loop" and not found.operations
    assert peak_flops(torch.device("cpu")) > 1e8


def test_explaining_leaves_the_trainer_as_it_was() -> None:
    trainer = Trainer(MLP(seed=0), digits()[0])
    trainer.fit(strategy=SimpleReduceStrategy(lr=1e-3), num_nodes=2, max_steps=3, progress=False)
    kept = trainer.history, trainer.ledger, trainer.strategy
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    trainer.explain(strategy=DiLoCoStrategy(H=5), num_nodes=4, max_steps=5)
    assert torch.equal(torch.rand(3), expected)
    assert all(a is b for a, b in zip(kept, (trainer.history, trainer.ledger, trainer.strategy), strict=True))
    with refused(ValueError, "explain()", "simulator"):
        trainer.explain(strategy=DiLoCoStrategy(H=5), num_nodes=2, max_steps=5, backend="process")
