"""What a run would have taken on a network: seconds, derived from its ledger at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.network.clock import Clock, Record
from vsim.network.compute import Compute
from vsim.network.gantt import gantt, window
from vsim.network.links import Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Timeline:
    """A run in time.

    Attributes:
        seconds: (T + 1,) when the last node is done with step t; the first is 0.
        compute_seconds: (T,) what a node computed in step t + 1. stalls: (T,) what it waited: for others, and for what
            was sent; that of the last step includes the wait for the last node. Both in the mean of the nodes, and
            their sum over all steps is `seconds[-1]`.
        ledger, network, compute: what all of it follows from.
    """

    seconds: NDArray[np.float64]
    compute_seconds: NDArray[np.float64]
    stalls: NDArray[np.float64]
    ledger: Record
    network: Network
    compute: Compute

    @property
    def utilization(self) -> float:
        """The share of the time in which nodes compute; 1 before the first step."""
        total = float(self.seconds[-1])
        return float(self.compute_seconds.sum()) / total if total else 1.0

    def plot(
        self, steps: tuple[int, int] | None = None, nodes: Sequence[int] | None = None, ax: Axes | None = None
    ) -> Axes:
        """Draw what nodes compute, what their lines carry and where they wait; needs matplotlib.

        Args:
            steps: the first and the last that are drawn. Default: those around the first event.
            nodes: which; by default the first four.
            ax: where to draw; default the axes of a new figure.

        Raises:
            ValueError: there are no such steps or nodes.
        """
        if self.ledger.clock is not None:
            raise ValueError("the timeline of an asynchronous run has no picture: its nodes are at no common step")
        first, last = window(self.ledger) if steps is None else steps
        total, num_nodes = self.ledger.steps, self.ledger.num_nodes
        if not 1 <= first <= last <= total:
            raise ValueError(f"steps must be the first and the last that are drawn, of 1 … {total}, got {steps}")
        shown = range(min(4, num_nodes)) if nodes is None else nodes
        odd = [node for node in shown if not 0 <= node < num_nodes]
        if odd or not len(shown):
            raise ValueError(f"nodes must be some of 0 … {num_nodes - 1}, got {nodes}")
        return gantt(self.ledger, self.network, self.compute, (first, last), shown, ax)

    def __repr__(self) -> str:
        return (
            f"Timeline({len(self.stalls)} steps in {duration(float(self.seconds[-1]))}, {self.utilization:.1%} of it "
            f"compute, on {self.network!r})"
        )


def timeline(
    run: Any, network: Network | str | float | None = None, compute: Compute | float | str | None = None
) -> Timeline:
    """Return when a run would have done its steps.

        a step     every node computes, and sends what the strategy hands in: at the end, or layer by layer as the
                   backward pass reaches it
        an event   starts when the last of its nodes is ready and their lines are free, and takes the time of its
                   collective on this network
        its end    is waited for in the step in which it is due, at the same moment

    Args:
        run: a ledger, or what has one: a Trainer, a History, a run of a Comparison.
        network: a `Network`, or text: "200 Mbit/s, 50 ms". compute: a `Compute`, or the seconds of a step.

    Raises:
        TypeError: `run` has no ledger; network or compute is missing.
        ValueError: the run has taken no step; the network or the compute is that of another number of nodes, or not
            that of the run, if it is asynchronous.
    """
    ledger = getattr(run, "ledger", run)
    if not isinstance(ledger, Record):
        raise TypeError(f"run must be a ledger, a Trainer, a History or a run of a Comparison, got {run!r}")
    if ledger is not run and not ledger.steps:
        raise ValueError(f"run has taken no step yet: train it first, or see vsim.price; got {run!r}")
    network, compute = Network.of(network), Compute.of(compute)
    if ledger.clock is not None:
        return _recorded(ledger, network, compute)
    clock = Clock(ledger, network, compute).run()
    return Timeline(clock.seconds, clock.compute, clock.stalls, ledger, network, compute)


def _recorded(ledger: Record, network: Network, compute: Compute) -> Timeline:
    """Return the timeline of an asynchronous run, whose course depended on its network and compute."""
    of_run: dict[str, Any] = ledger.clock or {}
    given: dict[str, Any] = {"network": network, "compute": compute}
    odd = [name for name, one in given.items() if one.as_plain() != of_run[name]]
    if odd:
        own = {"network": Network.from_plain(of_run["network"]), "compute": Compute.from_plain(of_run["compute"])}
        raise ValueError(
            f"the run is asynchronous, so that another {' or '.join(odd)} is another run: this one has the seconds of "
            f"{own['network']!r} and {own['compute']!r}; train it on what is asked for, {network!r} and {compute!r}"
        )
    seconds, computed = np.array([(0.0, 0.0), *ledger.seconds]).T
    return Timeline(seconds, np.diff(computed), np.diff(seconds - computed), ledger, network, compute)


def duration(seconds: float) -> str:
    """Return a duration as one says it.

    >>> [duration(s) for s in (0.0123, 12.3, 4000, 1e6)]
    ['12.3 ms', '12.3 s', '1.11 h', '11.6 days']
    """
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= (3 if unit == 86400 else 1) * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e3:.3g} ms"
