"""`compile=True`: the kernels for which it pays are compiled, and the training is the same but for rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vsim_kernels import COMPILING_PAYS, compiled, scatter_mean

from vsim import Trainer
from vsim.data import digits
from vsim.models import MLP
from vsim.strategy import (
    QSGD,
    CommunicateOptimizeStrategy,
    CompressedAverage,
    DeMoStrategy,
    OptimSpec,
    Strategy,
    TopK,
    UniformQuantizer,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
SGD = OptimSpec("sgd", lr=0.1)


def losses(strategy: Strategy, compile: bool) -> np.ndarray:
    train, _ = digits()
    trainer = Trainer(MLP(hidden=(32,), seed=0), train)
    trainer.fit(strategy=strategy, num_nodes=3, max_steps=8, compile=compile, progress=False)
    assert trainer.strategy is not None and trainer.strategy.cluster.compile is compile
    return trainer.history.node_losses


def test_only_what_pays_is_compiled() -> None:
    assert compiled(scatter_mean) is scatter_mean
    assert all(compiled(kernel) is not kernel and compiled(kernel) is compiled(kernel) for kernel in COMPILING_PAYS)


def test_it_is_refused_where_bits_are_promised() -> None:
    with pytest.raises(ValueError, match="deterministic=True promises the bits of eager float32; compile=True"):
        Trainer(MLP(), digits()[0]).fit(strategy=Strategy(), num_nodes=2, compile=True, deterministic=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
@pytest.mark.parametrize(
    "strategy",
    [
        DeMoStrategy(lr=1e-3),
        CommunicateOptimizeStrategy([CompressedAverage(TopK(0.1))], optim_spec=SGD),
        CommunicateOptimizeStrategy([CompressedAverage(QSGD())], optim_spec=SGD),
        CommunicateOptimizeStrategy([CompressedAverage(UniformQuantizer(8))], optim_spec=SGD),
    ],
    ids=["DeMo", "top-k", "QSGD", "int8"],
)
def test_compiled_kernels_train_alike(strategy: Strategy) -> None:
    eager = losses(strategy, compile=False)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    fast = losses(strategy, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled, and used
    assert not torch._dynamo.utils.counters["graph_break"]
    np.testing.assert_allclose(fast, eager, rtol=2e-3)
