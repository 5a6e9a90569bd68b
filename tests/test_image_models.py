"""Image models of other libraries: tiny random ones of timm, vectorized, node by node and in processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from test_models_of_others import assert_close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vsim
from vsim import Trainer
from vsim.strategy import DiLoCoStrategy

CLASSES, SIDE = 5, 32
# Architecture → its arguments. Normalized are: batches, batches, groups, and twice the channels of a position.
MODELS: dict[str, dict[str, Any]] = {
    "test_resnet": {},
    "test_efficientnet": {},
    "test_efficientnet_gn": {},
    "test_convnext": {},
    "test_vit": {"img_size": SIDE},
}
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", MODELS)]


class Classifier(nn.Module):
    """Returns the loss of [images, classes]; in training it leaves out whole branches at random, if `drop_path` > 0."""

    def __init__(self, name: str, drop_path: float) -> None:
        super().__init__()
        import timm

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            sizes = {"num_classes": CLASSES, "drop_path_rate": drop_path, **MODELS[name]}
            self.model = timm.create_model(name, pretrained=False, **sizes)

    def forward(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])


def images(dtype: torch.dtype = torch.float32) -> TensorDataset:
    stream = torch.Generator().manual_seed(0)
    pixels = torch.randn(24, 3, SIDE, SIDE, generator=stream).to(dtype)
    return TensorDataset(pixels, torch.randint(CLASSES, (24,), generator=stream))


def trained(name: str, drop_path: float = 0.5, dtype: torch.dtype = torch.float32, **options: Any) -> Trainer:
    trainer = Trainer(Classifier(name, drop_path).to(dtype), images(dtype))
    strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.01, H=2)
    trainer.fit(strategy=strategy, num_nodes=2, max_steps=3, batch_size=4, progress=False, **options)
    return trainer


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_it_is_vectorized(name: str, drop_path: float) -> None:
    # In float64, as batches of one position a channel make much of what rounding leaves.
    vectorized, loop = (trained(name, drop_path, torch.float64, executor=executor) for executor in ("vmap", "loop"))
    assert vectorized.history.executor == "vmap"
    assert_close(vectorized, loop, rtol=1e-9, atol=1e-11)


def test_it_is_that_of_the_processes(
    name: str, ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_close(trained(name, deterministic=True), trained(name, executor="loop"), rtol=0, atol=0)
    monkeypatch.setattr("vsim.trainer.train_in_processes", ranks_of(2).train)
    strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.01, H=2)
    report = vsim.verify(Classifier(name, 0.5), images(), strategy, 2, max_steps=3, batch_size=4, threads=1)
    assert report.identical, report
