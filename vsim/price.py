"""Prices without training: a strategy's own code runs on tensors without values, and the ledger has what it sends."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from numbers import Real

import numpy as np
import torch
from torch import Tensor, nn

from vsim.arguments import known_keywords, one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.ledger import Ledger
from vsim.cluster.optimizers import torch_optimizers
from vsim.cluster.randomness import SHARED, generator
from vsim.cluster.replicas import Replicas
from vsim.cluster.stacked import StackedCollectives
from vsim.network import Compute, Network, Timeline, timeline
from vsim.network.links import bits_per_second
from vsim.private_torch import mark_stepped
from vsim.strategy import Strategy

_DTYPES = {1: torch.float8_e5m2, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_META = torch.device("meta")


@known_keywords
def price(
    strategy: Strategy,
    *,
    parameters: float | None = None,
    model: nn.Module | None = None,
    num_nodes: int,
    max_steps: int,
    network: Network | str | float | None = None,
    compute: Compute | float | str | None = None,
    bytes_per_parameter: int | None = None,
    seed: int = 42,
) -> Timeline:
    """Return how long a run would take, without training: nothing has values, so that 10¹² parameters cost nothing.

    What depends on drawn numbers is taken as expected: a share p of N random entries is p·N of them.

    Args:
        strategy: its own code runs, but for the inner optimizer, which sends nothing.
        parameters: N, up to 10¹⁵, in as many layers of equal size as `compute` has, each a matrix as square as its
            divisors allow. Or give a model.
        model: whose parameters it is; strategies that look at shapes (DeMo, PowerSGD) need it. It may be on the meta
            device, and is not changed.
        num_nodes, max_steps: of the run. network, compute: as of `timeline`.
        bytes_per_parameter: 1, 2, 4 or 8; default 4, of a model those of its own.
        seed: of what the nodes decide together, such as islands.

    Raises:
        TypeError: neither or both of parameters and model are given; network or compute is missing.
        ValueError: what the strategy sends depends on values (the union of entries that nodes nominate, for instance).
    """
    network, compute = Network.of(network), Compute.of(compute)
    max_steps = whole_number("max_steps", max_steps)
    num_nodes = whole_number("num_nodes", num_nodes)
    network.check(num_nodes)
    seed = whole_number("seed", seed, at_least=0)
    model = _model(parameters, model, bytes_per_parameter, compute.layers)
    return timeline(_communicated(strategy, model, num_nodes, max_steps, seed, compute), network, compute)


@known_keywords
def required_bandwidth(
    strategy: Strategy,
    *,
    parameters: float | None = None,
    model: nn.Module | None = None,
    num_nodes: int,
    compute: Compute | float | str | None = None,
    utilization: Sequence[float] = (0.5, 0.8, 0.9, 0.95, 0.99),
    latency: float | str = 0,
    collective: str = "ring",
    bytes_per_parameter: int | None = None,
    grid: Sequence[float | str] | None = None,
    max_steps: int = 1000,
) -> dict[float, float]:
    """Return the bandwidth between the nodes, in bit/s, at which they compute so much of the time.

    Args:
        strategy, parameters, model, num_nodes, compute, bytes_per_parameter: as of `price`.
        utilization: shares of the time, in (0, 1].
        latency, collective: of the `Network`.
        grid: bandwidths to choose from, in bit/s or text. Default: 50 from 0.1 to 1000 Gbit/s, evenly spaced in their
            logarithm.
        max_steps: steps in which something is sent; looked at until the last of it is due.

    Returns:
        Utilization → the smallest bandwidth of the grid that suffices, inf where none does.

    Raises:
        ValueError: nothing is sent in `max_steps` steps; and as of `price`.
    """
    compute = Compute.of(compute)
    for name, several in (("utilization", utilization), ("grid", grid)):
        if isinstance(several, str | Real) or (several is not None and not len(several)):
            raise TypeError(f"{name} must be several numbers, got {several!r}")
    shares = [real_number("utilization", share, above=0, at_most=1) for share in utilization]
    given = np.logspace(8, 12, 50).tolist() if grid is None else grid
    bits = sorted(bits_per_second("grid", one) for one in given)
    model = _model(parameters, model, bytes_per_parameter, compute.layers)
    ledger = _communicated(
        strategy, model, whole_number("num_nodes", num_nodes), whole_number("max_steps", max_steps), 42, compute
    )
    if not ledger.total_wire_bytes + ledger.server_wire_bytes:
        hint = "one node has nobody to send to" if num_nodes == 1 else "a larger max_steps shows more"
        raise ValueError(f"{type(strategy).__name__} sends nothing in {max_steps} steps; {hint}")
    ledger.steps = max(event.due for event in ledger)  # whole rounds, with all that is waited for

    @cache
    def reached(bandwidth: float) -> float:
        return timeline(ledger, Network(bandwidth, latency, collective=collective), compute).utilization

    places = {share: bisect_left(bits, share, key=reached) for share in shares}
    return {share: bits[place] if place < len(bits) else math.inf for share, place in places.items()}


def _model(
    parameters: float | None, model: nn.Module | None, bytes_per_parameter: int | None, layers: int
) -> nn.Module:
    """Return a model on the meta device."""
    if (parameters is None) == (model is None):
        raise TypeError("give either parameters=, how many there are, or a model=")
    if bytes_per_parameter is not None:
        bytes_per_parameter = int(one_of("bytes_per_parameter", str(bytes_per_parameter), map(str, _DTYPES)))
    if model is not None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {model!r}")
        values = {id(t): t for t in (*model.parameters(), *model.buffers())}
        bare = copy.deepcopy(model, {key: _without_values(t) for key, t in values.items()})  # copies no value
        return bare if bytes_per_parameter is None else bare.to(_DTYPES[bytes_per_parameter])
    number = real_number("parameters", parameters)
    size = whole_number("parameters", int(number) if number.is_integer() else parameters, at_most=10**15)
    if size < layers:
        raise ValueError(f"parameters must be at least the number of layers that compute has, {layers}, got {size}")
    dtype = _DTYPES[bytes_per_parameter or 4]
    bare = nn.ParameterList()
    for layer in range(layers):
        own = size // layers + (layer < size % layers)
        width = next(w for w in range(math.isqrt(own), 0, -1) if own % w == 0)
        bare.append(nn.Parameter(torch.empty(own // width, width, dtype=dtype, device=_META)))
    return bare


def _without_values(tensor: Tensor) -> Tensor:
    bare = torch.empty_like(tensor, device=_META)
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def _communicated(
    strategy: Strategy, model: nn.Module, num_nodes: int, max_steps: int, seed: int, compute: Compute
) -> Ledger:
    """Return the ledger of a run without values."""
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be a Strategy, got {strategy!r}")
    if strategy.is_asynchronous:
        raise ValueError(
            f"{type(strategy).__name__} is asynchronous: what it sends depends on how long nodes compute. Train it "
            "with compute= and network=; history.time(network, compute) has its seconds"
        )
    ledger = Ledger(num_nodes)
    replicas = Replicas.of(model, num_nodes, _META)
    cluster = Cluster(replicas, StackedCollectives(ledger), generator(seed, SHARED), torch.ones(num_nodes), max_steps)
    cluster.seconds = compute.totals(num_nodes)
    name = type(strategy).__name__
    strategy = copy.deepcopy(strategy)
    try:
        strategy.setup(cluster)
        optimizers = torch_optimizers(strategy.optim)
        for step in range(1, max_steps + 1):
            cluster.step = ledger.steps = step
            if strategy.is_per_node:
                strategy.take_step()
                continue
            with torch.no_grad():
                strategy.begin_step()
                for optimizer in optimizers:
                    mark_stepped(optimizer)
                strategy.finish_step()
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{name} cannot be priced without training: what it sends depends on values, and here tensors have none "
            f"(step {cluster.step}: {str(error).splitlines()[0]}). Train it with a small model, and price its ledger"
        ) from error
    return ledger
