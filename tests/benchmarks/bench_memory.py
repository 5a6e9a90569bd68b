"""Peak memory of K = 1000 nodes in one process, in units of the node matrix.

MLP 64-128-128-10 (P = 26,122 parameters), batch 16 a node, FedAvg every step, AdamW. Weights, gradients and AdamW's two
moments are 4 matrices of K · P floats; everything else comes on top. Measured in a process of its own, less the
resident memory with the data made and torch in use: torch's first optimizer alone imports some 70 MB of its compiler,
whatever the model.

    python tests/benchmarks/bench_memory.py
"""

from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
import json, sys
import torch
from torch.utils.data import TensorDataset
K, B = int(sys.argv[1]), 16
def peak():  # of this program alone: getrusage's would be its parent's, if that was larger
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
torch.manual_seed(0)
x, y = torch.randn(K * B * 2, 64), torch.randint(0, 10, (K * B * 2,))
w = torch.zeros(8, requires_grad=True)
w.sum().backward()
torch.optim.AdamW([w]).step()
torch_in_use = peak()
from vsim import Trainer
from vsim.models import MLP
from vsim.strategy import FedAvgStrategy
model = MLP(seed=0)
trainer = Trainer(model, TensorDataset(x, y))
trainer.fit(strategy=FedAvgStrategy(H=1, lr=0.01), num_nodes=K, max_steps=5, batch_size=B, progress=False)
losses = trainer.history["train_loss"]
matrix = K * sum(p.numel() for p in model.parameters()) * 4
print(json.dumps({"matrix_bytes": matrix, "added_bytes": peak() - torch_in_use,
                  "first_loss": losses[1], "last_loss": losses[-1]}))
"""


def measure(num_nodes: int) -> dict[str, float]:
    """Return the bytes of the node matrix, and the bytes that a run adds to the process at its peak."""
    out = subprocess.run(
        [sys.executable, "-c", PROBE, str(num_nodes)], capture_output=True, text=True, check=True
    ).stdout
    return dict(json.loads(out))


def main() -> None:
    for num_nodes in (100, 1000):
        found = measure(num_nodes)
        matrix, added = found["matrix_bytes"], found["added_bytes"]
        print(
            f"K = {num_nodes}: matrix {matrix / 1e6:.1f} MB, peak {added / 1e6:.1f} MB above torch in use: "
            f"{added / matrix:.2f} matrices; loss {found['first_loss']:.3f} → {found['last_loss']:.3f}"
        )


if __name__ == "__main__":
    main()
