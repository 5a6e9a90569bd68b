"""Seconds to price a run of many nodes and events, all together and in islands that change from step to step; and
runs of a million steps that repeat.

They are the process's CPU seconds. The nodes are a multiple of 100.

    python tests/benchmarks/bench_timeline.py [--nodes 10000] [--events 10000]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from tabulate import tabulate

from vsim import Compute, Event, Ledger, Network, price, timeline
from vsim.strategy import DeMoStrategy, DiLoCoStrategy, SimpleReduceStrategy, SPARTADiLoCoStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=10_000)
    arguments = parser.parse_args()
    nodes, rows = arguments.nodes, []
    orders = [np.random.default_rng(i).permutation(nodes).reshape(-1, 100).tolist() for i in range(10)]
    islands = [tuple(map(tuple, order)) for order in orders]
    for who, draws in (("all", None), ("islands of 100", islands)):
        ledger = Ledger(nodes)
        for step in range(1, arguments.events + 1):
            groups = ledger.everyone if draws is None else draws[step % len(draws)]
            ledger.record(Event(step, step, "gradients", "all_reduce", "gradients", 4e6, groups))
        ledger.steps = arguments.events
        for speed, options in (("alike", {}), ("from 1 to 2", {"speeds": np.linspace(1, 2, nodes)})):
            began = time.process_time()
            timeline(ledger, Network("1 Gbit/s", "10 ms"), Compute(0.5, **options))
            rows.append([who, speed, time.process_time() - began])
    print(tabulate(rows, headers=["nodes meet", "speeds", "s"], floatfmt=".2f"))
    rows = []
    for strategy in (SimpleReduceStrategy(), DeMoStrategy(), DiLoCoStrategy(H=500), SPARTADiLoCoStrategy(H=100)):
        began = time.process_time()
        price(strategy, parameters=1e9, num_nodes=8, max_steps=10**6, network="1 Gbit/s", compute=0.5)
        rows.append([type(strategy).__name__, time.process_time() - began])
    print(tabulate(rows, headers=["a million steps of", "s"], floatfmt=".2f"))


if __name__ == "__main__":
    main()
