"""The strategies that docs/plain.md has in plain PyTorch, under torchrun, against vsim's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from page_code import blocks
from test_torchrun import free_port, torchrun
from torch import Tensor, nn

import vsim
from vsim.cluster import Cluster
from vsim.data import digits
from vsim.strategy import Algorithm, DiLoCoStrategy, FedAvgStrategy, IndexSelector, SPARTAStrategy

PAGE = Path(__file__).parents[1] / "docs" / "plain.md"
STEPS, BATCH = 25, 48  # 1,437 examples of two ranks are 15 batches an epoch, the last a smaller one

SCRIPT = """
import sys

import torch
from torch import nn

from vsim.data import digits

if __name__ == "__main__":
    dist.init_process_group("gloo")
    train, _ = digits()
    cross_entropy, found = nn.functional.cross_entropy, {}
    options = {"fedavg": {"H": 5}, "diloco": {"H": 10, "outer_lr": 0.5}, "sparta": {"p_sparta": 0.3}}
    for name, own in options.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        globals()[name](model, batches_of(train, STEPS, BATCH), cross_entropy, lr=1e-2, **own)
        found[name] = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.save(found, f"{sys.argv[1]}/{dist.get_rank()}.pt")
    dist.destroy_process_group()
"""


class Drawn(IndexSelector):
    """Entries drawn as the page draws them."""

    def setup(self, cluster: Cluster) -> None:
        self.keep_shared(stream=torch.Generator().manual_seed(0))

    def select(self, cluster: Cluster, round: int) -> Tensor:
        drawn = torch.rand(cluster.replicas.num_parameters, generator=self.stream) < self.p  # type: ignore[attr-defined]
        return drawn.nonzero().flatten()


def simulated(strategy: Algorithm) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    train, _ = digits()
    trainer = vsim.Trainer(model, train, loss_fn=nn.functional.cross_entropy)
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": STEPS, "batch_size": BATCH, "progress": False}
    trainer.fit(strategy=strategy, **options)
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights


@pytest.mark.slow
def test_the_pages_functions_train_as_vsim_does(tmp_path: Path) -> None:
    code = "\n".join(block.text for block in blocks(PAGE) if block.kind == "python")
    script = tmp_path / "train.py"
    script.write_text(f"STEPS, BATCH = {STEPS}, {BATCH}\n{code}\n{SCRIPT}", encoding="utf-8")
    run = torchrun("--nproc_per_node=2", "--master_port", str(free_port()), str(script), str(tmp_path))
    said, _ = run.communicate(timeout=100)
    assert run.returncode == 0, said
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    strategies = {
        "fedavg": FedAvgStrategy(H=5, lr=1e-2),
        "diloco": DiLoCoStrategy(H=10, outer_lr=0.5, lr=1e-2),
        "sparta": SPARTAStrategy(index_selector=Drawn(0.3), lr=1e-2),
    }
    for name, strategy in strategies.items():
        for rank, row in zip(ranks, simulated(strategy), strict=True):
            assert (rank[name] - row).abs().max() < 1e-5, name
        assert not torch.allclose(ranks[0][name], ranks[1][name], atol=1e-2) or name == "fedavg"
