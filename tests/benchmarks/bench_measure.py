"""The output of `vsim measure --check` on docs/measure.md: namespaces on links of a known rate, latency and jitter.

python tests/benchmarks/bench_measure.py --nodes 3 --megabits 100 --latency 0.02 --jitter 0.004
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from links import relayed, under_torchrun

# Steps that sleep, log-normally distributed, since processes on a few cores would disturb each other's computing.
STEP = """
import random, time
import torch

def make():
    model, draw = torch.nn.Linear(500, 500), random.Random()
    return model, lambda: time.sleep(draw.lognormvariate(-3.0, 0.2))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    for name, default in (("megabits", 100.0), ("latency", 0.02), ("jitter", 0.004), ("seconds", 20.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        relayed(options.nodes, options.megabits, options.latency, options.jitter) as nodes,
    ):
        (Path(folder) / "train.py").write_text(STEP)
        call = ["vsim", "measure", "--step", "train.py:make", "--check", "--seconds", f"{options.seconds}"]
        print(under_torchrun(nodes, call, Path(folder)))


if __name__ == "__main__":
    main()
