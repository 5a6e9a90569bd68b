"""The models that `vsim bench` times, and their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vsim.models import CNN, GPT, MLP

BATCH_SIZE = 16
LR = 1e-4
NODES = (1, 4, 16, 64)


class _Residual(nn.Module):
    """Two convolutions with BatchNorm, and what went in added to what comes out."""

    def __init__(self, depth: int, next_depth: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(depth, next_depth, 3, stride, 1, bias=False),
            nn.BatchNorm2d(next_depth),
            nn.ReLU(),
            nn.Conv2d(next_depth, next_depth, 3, 1, 1, bias=False),
            nn.BatchNorm2d(next_depth),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(depth, next_depth, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


class SmallResNet(nn.Module):
    """The layers of ResNet-18 [He et al. 2016, arXiv:1512.03385] with a quarter of its channels, for 32×32 images."""

    def __init__(self) -> None:
        super().__init__()
        depth = 16
        layers: list[nn.Module] = [nn.Conv2d(3, depth, 3, 1, 1, bias=False), nn.BatchNorm2d(depth), nn.ReLU()]
        for i, next_depth in enumerate((16, 32, 64, 128)):
            layers += [_Residual(depth, next_depth, 1 if i == 0 else 2), _Residual(next_depth, next_depth, 1)]
            depth = next_depth
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(depth, 10))

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def _vectors(count: int) -> list[Tensor]:
    return [torch.randn(count, 64), torch.randint(0, 10, (count,))]


def _tokens(count: int) -> list[Tensor]:
    return [torch.randint(0, 97, (count, 64)), torch.randint(0, 97, (count, 64))]


def _images(side: int, depth: int) -> Callable[[int], list[Tensor]]:
    return lambda count: [torch.randn(count, depth, side, side), torch.randint(0, 10, (count,))]


@dataclass(frozen=True)
class Workload:
    """A model to be timed: what it is, how it is made, its examples, the most nodes, and the rounds of a line."""

    title: str
    make: Callable[[], nn.Module]
    examples: Callable[[int], list[Tensor]]
    most_nodes: int
    rounds: int


MODELS: dict[str, Workload] = {
    "mlp": Workload("MLP 64-128-128-10", lambda: MLP(seed=0), _vectors, 1024, 60),
    "cnn": Workload("CNN 8×8, 32-64 channels", lambda: CNN(seed=0), _images(8, 1), 64, 30),
    "gpt": Workload("GPT 2 × 128, 64 tokens", lambda: GPT(97, seed=0), _tokens, 16, 9),
    "resnet": Workload("ResNet-18-like, 32×32", SmallResNet, _images(32, 3), 16, 7),
    "gpt-large": Workload("GPT 6 × 256, 64 tokens", lambda: GPT(97, layers=6, width=256, seed=0), _tokens, 4, 3),
}


def model_and_examples(workload: Workload, num_nodes: int) -> tuple[nn.Module, list[Tensor]]:
    """Return the model and BATCH_SIZE examples for every node, always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return workload.make().train(), workload.examples(num_nodes * BATCH_SIZE)
