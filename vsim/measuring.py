"""What a cluster does: latency and bandwidth of every pair of ranks, all-reduces, and the seconds of a user's step."""

from __future__ import annotations

import importlib.util
import json
import math
import platform
import re
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from vsim.analysis.tables import text_table
from vsim.arguments import a_text
from vsim.engine.machine import devices_of_nodes
from vsim.models import MLP
from vsim.network import Compute, Network
from vsim.network.links import delay, rate
from vsim.price import price
from vsim.processes.distributed import completing
from vsim.processes.options import ProcessOptions, default_threads
from vsim.processes.world import joined_group, local_ranks
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy
from vsim.version import __version__
from vsim.writing import replacing

Step = Callable[[], Any]
# Seconds that a pair takes at most, about, and that all pairs together take at most, about.
_PAIR_SECONDS, _ALL_SECONDS = 4.0, 300.0
_SMALL, _FIRST, _LARGEST = 8, 1 << 18, 1 << 26  # bytes of messages: for the latency; the first large one; the largest
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_STEPS_SECONDS = 10.0  # of steps of the model, for their distribution
_MOST_FACTORS = 101


@dataclass(frozen=True)
class Ranks:
    """The ranks that torchrun started, as one of them sees them: its rank, their number, its device, the backend."""

    rank: int
    size: int
    device: torch.device
    backend: str

    def all(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self.size
        with completing("exchanging what was measured"):
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def joined(timeout_seconds: float = 600.0) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, each with its own GPU if there are enough."""
    here = local_ranks()[1]
    options = ProcessOptions(here, devices_of_nodes(None, None, here), default_threads(here), timeout_seconds)
    with joined_group(options) as device:
        backend = dist.get_backend()
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), device, backend)
        with completing("the first collective"):  # nccl connects all ranks in it
            dist.all_reduce(torch.zeros(1, device=device))
        yield ranks


def tournament(n: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs, in which each of n nodes meets each other once: n − 1 rounds, or n if n is odd.

    >>> tournament(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = [*range(n), *([-1] if n % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append(sorted((min(pair), max(pair)) for pair in pairs if -1 not in pair))
        places = [places[0], places[-1], *places[1:-1]]
    return found


# Links ----------------------------------------------------------------------------------------------------------------


def measured_links(ranks: Ranks) -> list[dict[str, Any]]:
    """Measure the links of all pairs, and return what was found of each, on all ranks."""
    rounds, found = tournament(ranks.size), []
    seconds = min(_PAIR_SECONDS, _ALL_SECONDS / len(rounds))
    if ranks.rank == 0:
        about = f"{sum(map(len, rounds))} pairs in {len(rounds)} rounds, about {len(rounds) * seconds:.0f} s"
        print(f"{ranks.size} nodes ({ranks.backend}): {about}", flush=True)
    for pairs_now in tqdm(rounds, "rounds", disable=None if ranks.rank == 0 else True, leave=False):
        for low, high in (pair for pair in pairs_now if ranks.rank in pair):
            own = _Pair(ranks, high if ranks.rank == low else low, leads=ranks.rank == low)
            with completing(f"measuring the link of ranks {low} and {high}"):
                link = own.measure(seconds)
            if link is not None:
                found.append(link)
    return sorted((link for own in ranks.all(found) for link in own), key=lambda link: link["pair"])


class _Pair:
    """A rank and its peer, which exchange messages; the rank that leads has the clock."""

    def __init__(self, ranks: Ranks, peer: int, leads: bool) -> None:
        self.ranks, self.peer, self.leads = ranks, peer, leads

    def measure(self, seconds: float) -> dict[str, Any] | None:
        """Measure the link within about these seconds; return what was found if this rank leads."""
        small = _SMALL, _SMALL
        self.exchange(3, *small)  # connections, buffers
        trip = self.agreed(_median(self.exchange(5, *small)))
        delays = self.exchange(int(min(200, max(10, seconds / 4 / max(trip, 1e-6)))), *small)
        latency = _median(delays) / 2
        bits = []
        for out in (True, False):  # there and back: the other way goes a small message, which confirms or asks

            def sizes(large: int, out: bool = out) -> tuple[int, int]:
                return (large, _SMALL) if out else (_SMALL, large)

            first = self.exchange(2, *sizes(_FIRST))
            bandwidth = self.agreed(_bits(_FIRST, min(first), latency))
            size = int(min(_LARGEST, max(_FIRST, bandwidth / 8 * seconds / 16)))
            times = self.exchange(6, *sizes(size))[1:]  # without the first, in which TCP finds the rate
            bits.append([_bits(size, one, latency) for one in times])
        if not self.leads:
            return None
        return {
            "pair": sorted((self.ranks.rank, self.peer)),
            "latency": _quantiles([one / 2 for one in delays]),
            "bandwidth": [_quantiles(one) for one in bits],  # from the lower rank to the higher, and back
        }

    def agreed(self, value: float) -> float:
        """Return the leader's value, on both ranks."""
        sent = torch.tensor([value], dtype=torch.float64, device=self.ranks.device)
        (dist.send if self.leads else dist.recv)(sent, self.peer)
        return float(sent)

    def exchange(self, count: int, there: int, back: int) -> list[float]:
        """Send `there` bytes from the leader, and `back` bytes to it, `count` times; return the seconds of each.

        gloo sends a message once the other side has asked for it, so both sides ask in advance. nccl handles the
        messages of a pair in their order, so there a receive before a send would wait forever.
        """
        out, into = (torch.zeros(size, dtype=torch.uint8, device=self.ranks.device) for size in (there, back))
        in_advance, found = self.ranks.backend != "nccl", []
        if not self.leads:
            coming = dist.irecv(out, self.peer) if in_advance else None
            for number in range(count):
                if coming is None:
                    dist.recv(out, self.peer)
                else:
                    coming.wait()
                    if number < count - 1:
                        coming = dist.irecv(out, self.peer)
                dist.send(into, self.peer)
            self.ranks.wait()
            return [math.nan] * count
        for _ in range(count):
            self.ranks.wait()
            began = time.perf_counter()
            coming = dist.irecv(into, self.peer) if in_advance else None
            dist.send(out, self.peer)
            if coming is None:
                dist.recv(into, self.peer)
            else:
                coming.wait()
            self.ranks.wait()
            found.append(time.perf_counter() - began)
        return found


def _bits(size: int, seconds: float, latency: float) -> float:
    """Return the bit/s of a message of `size` bytes that was answered after `seconds`."""
    return 8 * size / max(seconds - 2 * latency, seconds / 100)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"{share:g}": _rounded(float(np.quantile(values, share))) for share in _QUANTILES}


def network_of(links: Sequence[Mapping[str, Any]], size: int) -> dict[str, Any]:
    """Return the "network" of a file: the medians as matrices."""
    bits: list[list[float | None]] = [[None] * size for _ in range(size)]
    delays = [[0.0] * size for _ in range(size)]
    for link in links:
        low, high = link["pair"]
        bits[low][high], bits[high][low] = (one["0.5"] for one in link["bandwidth"])
        delays[low][high] = delays[high][low] = link["latency"]["0.5"]
    return {"bandwidth": bits, "latency": delays}


def links_table(links: Sequence[Mapping[str, Any]]) -> str:
    """Return the links as a table: medians, and the range from the 5th to the 95th percentile; slowest first."""

    def spread(one: Mapping[str, float], text: Callable[[float], str]) -> str:
        return f"{text(one['0.5'])} ({text(one['0.05'])} to {text(one['0.95'])})"

    slowest = sorted(links, key=lambda link: min(one["0.5"] for one in link["bandwidth"]))
    shown = [
        {
            "nodes": "{}, {}".format(*link["pair"]),
            "latency": spread(link["latency"], delay),
            **{f"bandwidth {way}": spread(one, rate) for way, one in zip("→←", link["bandwidth"], strict=True)},
        }
        for link in slowest[:_SHOWN]
    ]
    more = [f"and {len(links) - _SHOWN} faster pairs, in the file"] if len(links) > _SHOWN else []
    return text_table(shown, "simple", ["nodes"], notes=more, on_demand=())


_SHOWN = 10  # pairs
_IN_A_ROW = 8  # all-reduces


def measured_all_reduces(ranks: Ranks, network: Network) -> list[dict[str, float]]:
    """Measure all-reduces of three sizes, next to their prices as a ring; the smallest shows latency."""
    group, found = network.kind(range(ranks.size)), []
    one, large = (float(network.seconds("all_reduce", group, size)[0]) for size in (1e6, 64e6))
    largest = 64e6 if large <= 1 else max(1e5, 1e6 / one)
    for size in (4e3, largest / 10, largest):
        tensor = torch.zeros(int(size / 4), device=ranks.device)
        dist.all_reduce(tensor)
        dist.barrier()
        ranks.wait()
        began = time.perf_counter()
        for _ in range(_IN_A_ROW):  # so that it hardly matters that ranks leave the barrier at different times
            dist.all_reduce(tensor)
            ranks.wait()
        seconds = max(ranks.all((time.perf_counter() - began) / _IN_A_ROW))
        priced = float(network.seconds("all_reduce", group, 4 * len(tensor))[0])
        found.append({"bytes": 4 * len(tensor), "seconds": _rounded(seconds), "predicted": _rounded(priced)})
    return found


def calibrated(fields: Mapping[str, Any], sums: Sequence[Mapping[str, float]]) -> tuple[float, dict[str, Any]]:
    """Return how many latencies a message of the smallest all-reduce waited, from 1 to 10, and the "network" with it.

    A library may ask the receiver before it sends, as gloo does, which hides between pairs that ask in advance.
    """

    def scaled(factor: float) -> dict[str, Any]:
        return {**fields, "latency": [[_rounded(factor * one) for one in row] for row in fields["latency"]]}

    def short(factor: float) -> bool:
        network = Network.between(**scaled(factor))
        kind = network.kind(range(len(fields["latency"])))
        return float(network.seconds("all_reduce", kind, sums[0]["bytes"])[0]) < sums[0]["seconds"]

    tried = np.linspace(1, 10, 181)
    factor = float(tried[bisect_left(tried, True, hi=len(tried) - 1, key=lambda one: not short(one))])
    return factor, scaled(factor)


# Compute --------------------------------------------------------------------------------------------------------------


def load_step(text: str) -> tuple[nn.Module, Step]:
    """Return the model and the step that FILE.py:FUNCTION makes.

    Raises:
        OSError: there is no such file. ValueError, TypeError: it has no such function, or the function does not return
            a model and a function that trains it by one step.
    """
    place, _, name = a_text("--step", text).rpartition(":")
    path = Path(place)
    if path.suffix != ".py" or not name.isidentifier():
        raise ValueError(f"--step must be FILE.py:FUNCTION, got {text!r}")
    if not path.is_file():
        raise FileNotFoundError(f"--step {place}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` does
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        raise ValueError(f"--step {text}: {place} has no function {name!r}")
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise TypeError(
            f"--step {text}: {name}() must return the model and a function without arguments that trains it by one "
            f"step, got {made!r:.100}"
        )
    return made


def example_step(device: torch.device) -> tuple[nn.Module, Step]:
    """Return a small model and its step, for the check of a cluster whose user gives none."""
    model = MLP(64, hidden=(400, 400), seed=0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.zeros(64, 64, device=device), torch.zeros(64, dtype=torch.int64, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    return model, step


def measured_steps(ranks: Ranks, step: Step, seconds: float = _STEPS_SECONDS) -> dict[str, Any]:
    """Time steps on all nodes at once; return the "compute" of a file: each node's median, and the factors of all."""
    for _ in range(3):  # compilers, caches
        step()
    dist.barrier()
    times, began = list[float](), time.perf_counter()
    while len(times) < 10 or (len(times) < 1000 and time.perf_counter() - began < seconds):
        ranks.wait()
        start = time.perf_counter()
        step()
        ranks.wait()
        times.append(time.perf_counter() - start)
    of_nodes = ranks.all(times)
    medians = [_rounded(_median(own)) for own in of_nodes]
    factors = np.concatenate([np.array(own) / median for own, median in zip(of_nodes, medians, strict=True)])
    # As many equally likely values as needed: the middles of equal parts of the distribution.
    count = min(_MOST_FACTORS, len(factors))
    middles = np.quantile(factors, (np.arange(count) + 0.5) / count)
    return {"seconds_per_step": medians, "factors": [_rounded(one) for one in middles]}


# Check ----------------------------------------------------------------------------------------------------------------


def checked(
    ranks: Ranks, model: nn.Module, step: Step, network: Network, compute: Compute, seconds: float
) -> list[dict[str, Any]]:
    """Run AllReduce and DiLoCo, H = 10, on the cluster for about `seconds` each; return predicted and measured times.

    What is run is the communication of these strategies: after every step, or every tenth, an all-reduce of as many
    numbers as the model has. Steps are the user's; the weights are left alone.
    """
    weights = [p.detach() for p in model.parameters() if p.requires_grad]
    message = torch.zeros(sum(p.numel() for p in weights), dtype=weights[0].dtype, device=ranks.device)
    rows = []
    strategies = {"AllReduce": (SimpleReduceStrategy(), 1), "DiLoCo, H = 10": (DiLoCoStrategy(H=10), 10)}
    for name, (strategy, every) in strategies.items():

        def predicted(steps: int, strategy: Any = strategy) -> float:
            on: Any = {"network": network, "compute": compute, "num_nodes": ranks.size}
            return float(price(strategy, model=model, max_steps=steps, **on).seconds[-1])

        steps = 10 * int(min(100, max(1, seconds / predicted(10))))
        began = 0.0
        for number in range(-every, steps):  # a round before, for connections and caches
            if number == 0:
                dist.barrier()
                began = time.perf_counter()
            step()
            if (number + 1) % every == 0:
                with completing("an all-reduce of the check"):
                    dist.all_reduce(message)
                ranks.wait()
        taken = max(ranks.all(time.perf_counter() - began))
        priced = predicted(steps)
        times = {"predicted s": _rounded(priced), "measured s": _rounded(taken)}
        rows.append({"run": name, "steps": steps, **times, "off": _rounded(priced / taken - 1)})
    return rows


# The file -------------------------------------------------------------------------------------------------------------


def _table(columns: Mapping[str, Sequence[str]]) -> str:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return text_table(rows, "simple", [*columns][:1], on_demand=())


def measure(out: Path, step: str | None, check: bool, seconds: float) -> None:
    """Measure the ranks that torchrun started, print what was found, and write it to `out`, on the first rank."""
    with joined() as ranks:

        def say(text: str) -> None:
            if ranks.rank == 0:
                print(text, flush=True)

        if ranks.size < 2:
            raise ValueError("a cluster that is measured has at least 2 nodes, got 1")
        made = None if step is None else load_step(step)
        hosts = ranks.all(socket.gethostname())
        links = measured_links(ranks)
        fields = {"network": network_of(links, ranks.size)}
        network = Network.between(**fields["network"])
        say(f"\n{links_table(links)}\n")
        sums = measured_all_reduces(ranks, network)
        waited, fields["network"] = calibrated(fields["network"], sums)
        network = Network.between(**fields["network"])
        columns = {
            "all-reduce": [f"{row['bytes'] / 1e6:.3g} MB" for row in sums],
            "from the pairs": [delay(row["predicted"]) for row in sums],
            "measured": [delay(row["seconds"]) for row in sums],
        }
        say(_table(columns))
        say(f"a message of an all-reduce waits {waited:.3g} times the latency of its pair; the file has the product\n")
        if made is not None:
            fields["compute"] = measured_steps(ranks, made[1])
            say(f"{Compute(**fields['compute'])!r}\n")
        rows = None
        if check:
            model, own = example_step(ranks.device) if made is None else made
            compute = fields["compute"] if made is not None else measured_steps(ranks, own, _STEPS_SECONDS / 5)
            rows = checked(ranks, model, own, network, Compute(**compute), seconds)
            columns = {
                **{name: [f"{row[name]}" for row in rows] for name in ("run", "steps")},
                **{name: [f"{row[name]:.3g}" for row in rows] for name in ("predicted s", "measured s")},
                "off": [f"{row['off']:+.0%}".replace("-", "−") for row in rows],
            }
            say(f"{_table(columns)}\n")
        if ranks.rank == 0:
            about = {
                "date": datetime.now().astimezone().isoformat(timespec="seconds"),
                "versions": {"vsim": __version__, "torch": torch.__version__, "python": platform.python_version()},
                "backend": ranks.backend,
                "hosts": hosts,
                "pairs": links,
                "latencies_a_message": waited,
                "all_reduce": sums,
                **({} if rows is None else {"check": rows}),
            }
            text = json.dumps({**fields, "measured": about}, indent=1, allow_nan=False)
            text = re.sub(r"(?<=[\[{])\s+([^\[\]{}]*?)\s+(?=[\]}])", lambda row: " ".join(row[1].split()), text)  # rows
            with replacing(out) as part:
                part.write_text(f"{text}\n", encoding="utf-8")
            say(f"cluster: {out}")
