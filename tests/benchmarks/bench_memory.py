"""Peak memory of a run in one process: of K = 1000 nodes in units of the node matrix, or of a node on any device.

MLP 64-128-128-10 (P = 26,122 parameters), batch 16 a node, AdamW, FedAvg every step or another --strategy. Weights,
gradients and AdamW's two moments are 4 matrices of K · P floats; everything else comes on top. Measured in a process of
its own. On the CPU: less the resident memory with the data made, vsim imported and torch in use, because torch's first
optimizer alone imports some 70 MB of its compiler, whatever the model. On CUDA: the allocator's tensors at the peak; on
MPS: its pool after the run.

    python tests/benchmarks/bench_memory.py
    python tests/benchmarks/bench_memory.py --device cuda --models mlp cnn gpt --nodes 16 64

With --models, the table has what `Trainer.explain` predicts for a node (weights, gradients, optimizer, activations) and
what was measured. The peak is often that of the proof before the first step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

PROBE = """
import json, sys
import torch
from torch.utils.data import TensorDataset
name, K, device, B = sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3]), int(sys.argv[6])
predicts = sys.argv[7] == "predict"
def peak():
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    with open("/proc/self/status") as status:  # of this program alone: getrusage's would be its parent's, if larger
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
sys.path.insert(0, sys.argv[4])
from bench_step import MODELS
torch.manual_seed(0)
model, examples = MODELS[name].make(), MODELS[name].examples(K * B * 2)
w = torch.zeros(8, 8, requires_grad=True, device=device)
(w @ w).sum().backward()  # cuBLAS takes 64 MiB for its first product on a large GPU
torch.optim.AdamW([w]).step()
torch_in_use = peak()
from vsim import Trainer
from vsim.cli import parse_strategy
def forget_the_first_step(step, loss):
    if step == 2 and device.type == "cuda":
        firsts.append(peak())
        torch.cuda.reset_peak_memory_stats(device)
firsts = []
trainer = Trainer(model, TensorDataset(*examples), device=device)
options = dict(strategy=parse_strategy(sys.argv[5], lr=0.01), num_nodes=K, batch_size=B, progress=False)
trainer.fit(max_steps=5, train_loss_hook=forget_the_first_step, **options)
later = peak() - torch_in_use
losses = trainer.history["train_loss"]
matrix = K * sum(p.numel() for p in model.parameters()) * 4
print(json.dumps({"matrix_bytes": matrix, "added_bytes": max([later, *(f - torch_in_use for f in firsts)]),
                  "later_bytes": later if firsts else None, "executor": trainer.history.executor,
                  "predicted_bytes": sum(trainer.explain(max_steps=3, **options).memory.values()) if predicts else None,
                  "first_loss": losses[1], "last_loss": losses[-1]}))
"""


def measure(
    num_nodes: int,
    model: str = "mlp",
    device: str = "cpu",
    strategy: str = "fedavg:H=1",
    batch_size: int = 16,
    predicts: bool = False,
) -> dict[str, Any]:
    """Return the bytes of the node matrix, and the bytes that a run adds at its peak.

    On CUDA, `later_bytes` are those after the first two steps. With `predicts`, there are also `predicted_bytes` of a
    node.
    """
    here = str(Path(__file__).parent)
    given = [model, str(num_nodes), device, here, strategy, str(batch_size), "predict" if predicts else ""]
    command = [sys.executable, "-c", PROBE, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{model} × {num_nodes} on {device}: {done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[], help="models of bench_step.py, for a table by node")
    parser.add_argument("--nodes", nargs="+", type=int, default=[100, 1000], metavar="K")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--strategy", default="fedavg:H=1", help="such as allreduce")
    parser.add_argument("--batch-size", type=int, default=16, help="of a node (default: 16)")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers, written after every line")
    options = parser.parse_args(argv)
    for num_nodes in options.nodes if not options.models else ():
        found = measure(num_nodes, "mlp", options.device, options.strategy, options.batch_size)
        matrix, added = found["matrix_bytes"], found["added_bytes"]
        print(
            f"K = {num_nodes}: matrix {matrix / 1e6:.1f} MB, peak {added / 1e6:.1f} MB above torch in use: "
            f"{added / matrix:.2f} matrices; loss {found['first_loss']:.3f} → {found['last_loss']:.3f}"
        )
    lines = []
    for model in options.models:
        for num_nodes in options.nodes:
            found = measure(num_nodes, model, options.device, options.strategy, options.batch_size, predicts=True)
            lines.append({"model": model, "num_nodes": num_nodes, **found})
            print(table(lines[-1:]), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(lines, indent=1), encoding="utf-8")


def table(lines: Sequence[dict[str, Any]], tablefmt: str = "simple") -> str:
    """Return megabytes a node: predicted, and measured at the peak of the first steps and of the later ones."""
    rows = []
    for line in lines:
        nodes, later = line["num_nodes"], line["later_bytes"]
        measured = [line["added_bytes"], later]
        cells = ["" if b is None else f"{b / nodes / 1e6:.3g}" for b in (nodes * line["predicted_bytes"], *measured)]
        matrices = f"{line['added_bytes'] / line['matrix_bytes']:.2f}"
        rows.append([line["model"], f"{nodes:,}", line["executor"], *cells, matrices])
    headers = ["model", "K", "executor", "predicted MB a node", "measured, at the peak", "after the first steps"]
    headers.append("times the weights")
    return tabulate(rows, headers, tablefmt=tablefmt, disable_numparse=True)


if __name__ == "__main__":
    main()
