"""The same losses, with the bytes and hours of a model of another size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from vsim.analysis.columns import times_less
from vsim.analysis.compared import Runs
from vsim.arguments import given, naming
from vsim.shapes import naming_layers, sizes_of, without_values

if TYPE_CHECKING:
    from torch import nn

Kind = TypeVar("Kind", bound=Runs)


def at(
    comparison: Kind,
    *,
    parameters: float | None = None,
    layers: int | None = None,
    model: nn.Module | None = None,
    bytes_per_parameter: int | None = None,
    strategies: Mapping[str, Any] | None = None,
) -> Kind:
    """Return the same losses with the bytes and hours of a model of another size; titles show both sizes.

    A comparison of a small model shows how many steps each strategy needs. The cost of these steps depends on the
    size of the target model: each strategy's own code runs on tensors of that size without values, see
    `vsim.price`.

    Args:
        parameters, layers, model, bytes_per_parameter: describe the target model, see `vsim.price`.
        strategies: name → strategy, for strategies of your own in a comparison that was read from a file. Files keep
            strategies that are made of vsim's own classes, numbers and text.

    Raises:
        ValueError: a strategy cannot be priced without training; or a node took part in only some of the steps.
        TypeError: a name has no strategy.
    """
    if not isinstance(strategies, Mapping | None):
        raise TypeError(f"strategies must be a dict of name → strategy, got {given(strategies)}")
    bare, nodes, compute = without_values(parameters, layers, model, bytes_per_parameter), comparison.num_nodes, None
    sizes = sizes_of(bare)
    if comparison.compute is not None:
        compute = comparison.compute.of_model(sizes)
    clock = None if compute is None or nodes is None else compute.totals(nodes)
    found: dict[str, Any] = {}
    for name in comparison:
        runs = comparison.runs(name)
        if any(run.ledger.attendance for run in runs):
            raise ValueError(
                f"{name}: at() prices runs in which all nodes take part in all steps, and this one had "
                "participation=; the report's slider of the model's size multiplies its bytes"
            )
        strategy = (strategies or {}).get(name, runs[0].strategy)
        if not hasattr(strategy, "dry_run"):
            raise TypeError(
                f"{name} was read from a file without strategies: give at(…, strategies={{{name!r}: …}}), got "
                f"{strategy!r:.100}"
            )
        most = max(1, *(run.ledger.steps for run in runs))
        with naming(name), naming_layers(bare):
            ledger = strategy.dry_run(bare, runs[0].history.num_nodes, most, runs[0].seed, clock)
        less = [run.measured_less or times_less(comparison, run) for run in runs]
        found[name] = [
            replace(
                run,
                history=run.history.with_ledger(ledger),
                measured_less=own if math.isfinite(own) else None,
            )
            for run, own in zip(runs, less, strict=True)
        ]
    size = sum(p.numel() * p.element_size() for p in bare.parameters() if p.requires_grad)
    measured = comparison.measured_bytes or comparison.allreduce_bytes
    return comparison.holding(found, allreduce_bytes=size, measured_bytes=measured, compute=compute, sizes=sizes)
