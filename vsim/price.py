"""Prices without training: a strategy's code runs on tensors without values, and the ledger records its messages."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vsim.analysis.spent import amount_text
from vsim.arguments import a_list, countable, known_keywords, real_number, whole_number
from vsim.cluster.ledger import BYTES_OF_A_STEP, Ledger
from vsim.network import Compute, Network, Pipeline, Timeline, timeline
from vsim.network.links import MOST_NODES, bits_per_second
from vsim.shapes import naming_layers, sizes_of, without_values
from vsim.strategy import Algorithm


@known_keywords
def price(
    strategy: Algorithm,
    *,
    parameters: float | None = None,
    layers: int | None = None,
    model: nn.Module | None = None,
    num_nodes: int,
    max_steps: int,
    network: Network | str | float | None = None,
    compute: Compute | float | str | None = None,
    bytes_per_parameter: int | None = None,
    seed: int = 42,
    stages: int = 1,
    microbatches: int = 1,
    experts: int = 1,
    tokens: int | None = None,
    compression: float = 1.0,
    within: Network | str | float | None = None,
) -> Timeline:
    """Return the timeline of a run without training it. Tensors have no values, so that 10¹² parameters cost nothing.

    Where steps repeat, a few are run and multiplied; see `Algorithm.rounds_repeat`. Otherwise every step is run, with a
    bar.

    Random sizes are replaced by their expectation: a share p of N random entries counts as p·N entries. Random steps,
    at which a strategy sends, are one draw, by `seed`.

    Args:
        strategy: the strategy, whose code runs except for the inner optimizer, which sends nothing.
        parameters: the model's number of parameters, up to 10¹⁵, in the shapes of a GPT (see `gpt_of`); or give
            `model`.
        layers: layers of this GPT. Default: the layers of `compute`, or else the usual number for a GPT of that size.
        model: the model to price, instead of a GPT with `parameters`; it may be on the meta device, and is not changed.
        num_nodes: K, up to 10⁶. max_steps: steps of the run. network, compute: see `timeline`.
        bytes_per_parameter: 1, 2, 4 or 8. Default: 4, or as in the model.
        seed: seed of random decisions that all nodes share, such as the draw of islands.
        stages, microbatches, experts: each node is a pipeline of this many stages, through which its examples pass in
            this many parts; each stage has this many machines, to which the tokens of every layer travel and back. See
            `Pipeline`, which these keywords make: `Compute(…, pipeline=…)` says the same, and takes the sizes of other
            models. Waits inside a node count as waits. The ledger has only the messages between nodes.
        tokens: tokens of a node's step, batch · sequence. compression: how many times smaller activations travel; they
            have `bytes_per_parameter`.
        within: the network inside a node. Default: `network`.

    Raises:
        TypeError: neither or both of parameters and model are given; network or compute is missing; or stages or
            experts lack tokens, have a model of unknown width, or are given twice.
        ValueError: the strategy's messages depend on values (such as the union of entries that nodes nominate).
    """
    network, compute = Network.of(network), Compute.of(compute)
    max_steps = whole_number("max_steps", max_steps)
    num_nodes = whole_number("num_nodes", num_nodes, at_most=MOST_NODES)
    network.check(num_nodes)
    seed = whole_number("seed", seed, at_least=0)
    bare = without_values(parameters, overlapped(layers, compute, model), model, bytes_per_parameter)
    inside = {"stages": stages, "microbatches": microbatches, "experts": experts}
    inside = {name: whole_number(name, value) for name, value in inside.items()}
    if any(value > 1 for value in inside.values()):
        if compute.pipeline is not None:
            raise TypeError(f"stages= and experts= have no effect with {compute!r}, which has a pipeline; give one")
        if tokens is None:
            raise TypeError("stages= and experts= take tokens=, those of a node's step: batch · sequence")
        if within is None and network.num_nodes is not None:
            raise TypeError(f"{network!r} has different links: give within=, the network inside a node")
        near = network if within is None else within
        compute = compute.inside(Pipeline(**inside, tokens=tokens, within=near, compression=compression))
    elif tokens is not None or within is not None or real_number("compression", compression, at_least=1) != 1:
        raise TypeError("tokens=, within= and compression= have no effect without stages= or experts=")
    compute = compute.of_model(sizes_of(bare))
    ledger = _dry_run(strategy, bare, num_nodes, max_steps, seed, compute)
    return timeline(ledger, network, compute)


@known_keywords
def required_bandwidth(
    strategy: Algorithm,
    *,
    parameters: float | None = None,
    layers: int | None = None,
    model: nn.Module | None = None,
    num_nodes: int,
    compute: Compute | float | str | None = None,
    utilization: Sequence[float] = (0.5, 0.8, 0.9, 0.95, 0.99),
    latency: float | str = 0,
    collective: str | None = None,
    bytes_per_parameter: int | None = None,
    grid: Sequence[float | str] | None = None,
    max_steps: int = 1000,
) -> dict[float, float]:
    """Return the bandwidth between the nodes, in bit/s, at which nodes compute for a given share of the time.

    Args:
        strategy, parameters, layers, model, num_nodes, compute, bytes_per_parameter: see `price`.
        utilization: shares of the time in which nodes compute, in (0, 1]. latency, collective: see `Network`.
        grid: bandwidths to choose from, in bit/s or text. Default: 50 bandwidths from 0.1 to 1000 Gbit/s, evenly spaced
            in their logarithm.
        max_steps: steps that may send messages; the run is priced until the last message is due.

    Returns:
        Utilization → the smallest sufficient bandwidth of the grid, inf if none suffices.

    Raises:
        ValueError: nothing is sent in `max_steps` steps; or see `price`.
    """
    compute = Compute.of(compute)
    shares = [real_number("utilization", share, above=0, at_most=1) for share in a_list("utilization", utilization)]
    given = a_list("grid", np.logspace(8, 12, 50) if grid is None else grid)
    bits = sorted(bits_per_second("grid", one) for one in given)
    model = without_values(parameters, overlapped(layers, compute, model), model, bytes_per_parameter)
    num_nodes = whole_number("num_nodes", num_nodes, at_most=MOST_NODES)
    compute = compute.of_model(sizes_of(model))
    ledger = _dry_run(strategy, model, num_nodes, whole_number("max_steps", max_steps), 42, compute)
    if not ledger.total_wire_bytes + ledger.server_wire_bytes:
        hint = "one node has no other to send to" if num_nodes == 1 else "a larger max_steps shows more"
        raise ValueError(f"{type(strategy).__name__} sends nothing in {max_steps} steps; {hint}")
    ledger.steps = ledger.last_due  # whole rounds

    @cache
    def reached(bandwidth: float) -> float:
        return timeline(ledger, Network(bandwidth, latency, collective=collective), compute).utilization

    places = {share: bisect_left(bits, share, key=reached) for share in shares}
    return {share: bits[place] if place < len(bits) else math.inf for share, place in places.items()}


Floats = NDArray[np.float64]
_FIRST_STEPS, _MOST_STEPS = 64, 10**6  # steps to price first; the most steps that are priced
_FAR = 10  # a pace that leads this many times beyond is beyond


def steps_within(
    budget: Mapping[str, float],
    strategy: Algorithm,
    *,
    parameters: float | None = None,
    model: nn.Module | None = None,
    num_nodes: int,
    examples: Callable[[NDArray[np.int64]], Floats],
    network: Network | None = None,
    compute: Compute | None = None,
    most: int | None = None,
    seed: int = 42,
) -> int:
    """Return the largest number of steps whose price is within the budget: one more step exceeds the budget.

    Args:
        budget: kind → limit. Kinds: "time" (seconds), "cost" (dollars), "wire" (bytes per node), and "examples".
        strategy, parameters, model, num_nodes, network, compute, seed: see `price`; time and cost need the network.
        examples: f(number of steps) → examples that all nodes together see. most: the largest allowed result.

    Raises:
        ValueError: one step exceeds the budget; nothing limits the steps; or the strategy cannot be priced.
    """
    layers = None if compute is None else overlapped(None, compute, model)
    bare = without_values(parameters, layers, model, None)
    compute = None if compute is None else compute.of_model(sizes_of(bare))

    def costs(steps: int) -> dict[str, Floats]:
        """Return kind → cost (steps + 1,) after each step of a run of this length."""
        found = {"examples": examples(np.arange(steps + 1))} if "examples" in budget else {}
        if budget.keys() - found.keys():
            try:
                ledger = _dry_run(strategy, bare, num_nodes, steps, seed, compute)
            except ValueError as error:
                raise ValueError(f"{error}; or give max_steps= as a dict of name → steps, without budget") from error
            found["wire"] = _sent(ledger)
        if {"time", "cost"} & budget.keys():
            line = timeline(ledger, network, compute)
            found |= {"time": line.seconds, "cost": line.seconds * (line.dollars / line.seconds[-1])}
        return {of: found[of] for of in budget}

    within, beyond, first, tries = 0, math.inf if most is None else most + 1, _FIRST_STEPS, 0
    hint = None  # steps within the budget, of the last priced run that exceeds it
    while within + 1 < beyond:
        if hint is None:
            steps = int(min(first, beyond - 1))
        else:  # a shorter run mostly costs the same until then, but a schedule may depend on its length
            steps = hint if hint > within else within + 1 if hint == within else int(within + beyond) // 2
        if steps > _MOST_STEPS > within and steps < _FAR * _MOST_STEPS:
            steps = _MOST_STEPS
        if steps > _MOST_STEPS:
            raise ValueError(
                f"the budget is enough for more than {_MOST_STEPS:,} steps, the most that are priced: limit them by "
                "max_steps="
            )
        found = costs(steps)
        fits = min(int((own <= budget[of] * (1 + 1e-12)).sum()) - 1 for of, own in found.items())
        if not fits:
            one = " and ".join(amount_text(of, float(own[1])) for of, own in found.items())
            allowed = " and ".join(amount_text(of, amount) for of, amount in budget.items())
            raise ValueError(f"the budget is {allowed}, which is less than one step: it takes {one}")
        if fits < steps:
            beyond, hint = steps, fits
        else:
            within = steps
            share = max(float(own[-1]) / budget[of] if budget[of] else 0.0 for of, own in found.items())
            pace = 1 / share if share else 8.0
            if within * pace < _FAR * _MOST_STEPS:  # else even a run that costs far more later is too long to price
                pace = min(pace, 8)
            first, tries = 1 + int(min(within * (pace if tries < 3 else max(pace, 2)), 2.0**62)), tries + 1
    return within


def _sent(ledger: Ledger) -> Floats:
    """Return the bytes (steps + 1,) on the wire that the busiest node has sent after each step."""
    again, sent, done = Ledger(ledger.num_nodes, ledger.of_clients), np.zeros(ledger.steps + 1), 0
    by_node: dict[int, Floats] = {}  # place of an event → bytes (K,) that each node has sent then
    for stop, repeat in [*((own.stop, own) for own in ledger.repeats), (len(ledger.recorded), None)]:
        for place, event in enumerate(ledger.recorded[done:stop], done):
            if repeat is not None and place == repeat.first:
                before = again.node_wire_bytes
            again.record(event)
            sent[event.step] = again.wire_bytes
            if repeat is not None and place >= repeat.first:
                by_node[place] = again.node_wire_bytes
        if repeat is not None and repeat.copies:
            for place in by_node:
                event = ledger.recorded[place]
                copies = np.arange(1, repeat.times(event) + 1)
                # Nodes that have sent as much at the event, and send as much in a period, are one.
                lines = np.unique(np.stack([by_node[place], again.node_wire_bytes - before], 1), axis=0).tolist()
                most = np.max([start + copies * each for start, each in lines], axis=0)
                sent[event.step + copies * repeat.period] = most
            again.repeat(repeat.first, repeat.begin, repeat.period, repeat.last)
            by_node.clear()
        done = stop
    return np.maximum.accumulate(sent)


def overlapped(layers: int | None, compute: Compute, model: nn.Module | None) -> int | None:
    """Return `layers`; by default the layers of `compute`, if there are several and no model is given."""
    return compute.layers if layers is None and model is None and compute.layers > 1 else layers


def _dry_run(
    strategy: Algorithm, model: nn.Module, num_nodes: int, max_steps: int, seed: int, compute: Compute | None
) -> Ledger:
    if not isinstance(strategy, Algorithm):
        raise TypeError(f"strategy must be a Strategy, got {strategy!r}")
    countable("max_steps", max_steps, "steps", BYTES_OF_A_STEP)
    with naming_layers(model):
        seconds = None if compute is None else compute.totals(num_nodes)
        return strategy.dry_run(model, num_nodes, max_steps, seed, seconds)
