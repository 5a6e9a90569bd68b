"""The strategy that reaches a loss with the fewest bytes, and the strategies that are tied with it."""

from __future__ import annotations

import math
import warnings

import numpy as np

from vsim.analysis.asked import target
from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.crossings import never, racers
from vsim.analysis.questions.best import uses
from vsim.analysis.racing import Race
from vsim.analysis.spent import AnyCompute, AnyNetwork, Floats, until, unused
from vsim.analysis.statistics import contenders
from vsim.arguments import real_number
from vsim.figures.words import brief_list, quoted
from vsim.history.reached import Crossing


class Cheapest(str):
    """The name of the strategy that reaches a loss with the fewest bytes, displayed as a sentence that names ties.

    Attributes:
        loss: the target. megabytes: MB on the wire until the loss is reached, averaged over the seeds.
        tied: strategies that may be as cheap, because seeds are too few or validation is too rare to tell.
    """

    loss: float
    megabytes: float
    tied: tuple[str, ...]

    def __repr__(self) -> str:
        tied = f"; tied with {', '.join(quoted(self.tied).values())}" if self.tied else ""
        return f"{self}: {self.megabytes:.3g} MB to loss {self.loss:g}{tied}"


def cheapest(
    comparison: Runs,
    loss: float,
    hours: float | None = None,
    network: AnyNetwork = None,
    compute: AnyCompute = None,
    *,
    stays: bool = False,
) -> Cheapest:
    """Return the strategy that reaches a loss within `hours` with the fewest bytes on the wire.

    The name is displayed as a sentence, which names tied strategies (see `Race`) and, without `hours`, strategies that
    reach the loss with only some seeds. Of equal strategies, return the first in alphabetical order. A warning names
    strategies that are tied only because validation is too rare, and strategies that ended before `hours` were over
    without reaching the loss.

    Args:
        loss: the target, which every seed must reach. hours: the most hours on `network`; default: no limit.
        network, compute: see `vsim.timeline`; default: the comparison's.
        stays: see `steps_to`.

    Raises:
        ValueError: no strategy reaches the loss. TypeError: hours need network and compute.
    """
    loss, hours = target(loss, stays), None if hours is None else real_number("hours", hours, above=0)
    priced = comparison.pricing(network, compute, needed=hours is not None)
    found, ended, took = racers(comparison, loss, stays), "", dict[str, float]()
    within = whole = {name: own for name, own in found.items() if not any(math.isnan(at.step) for _, at, _ in own)}
    if hours is not None:
        clocks = {run: comparison.spent(run, "time", priced) / 3600 for run in comparison.all_runs}
        took = contenders(
            {n: {run.seed: until(run.history, at, clocks[run]) for run, at, _ in own} for n, own in whole.items()}
        )
        found = within = {name: own for name, own in whole.items() if took[name] <= hours}
        used = uses(comparison, {run: [(own, hours)] for run, own in clocks.items()})
        ended = unused({name: own for name, own in used.items() if name not in whole})
        ended = f"not all runs had {hours:g} hours to reach loss {loss:g}: {ended}" if ended else ""
    if not within:
        hint = "".join(f"; the first is {name}, in {own:.3g} hours" for name, own in list(took.items())[:1])
        hint += f"; {ended}" if ended else ""
        some = {name: own for name, own in never(comparison, loss, stays).items() if own != "never"}
        partly = brief_list([f"{name} ({some[own]})" for own, name in quoted(some).items()])
        hint = f" with all seeds: {partly}{hint}" if partly and not whole else hint
        limit = "" if hours is None else f" within {hours:g} hours"
        raise ValueError(f"no strategy reaches loss {loss:g}{limit}{hint}")
    if ended:
        warnings.warn(ended, stacklevel=2)
    race = Race({n: {one[0].seed: _megabytes(comparison, *one) for one in own} for n, own in found.items()})
    names = list(race.means)
    best = Cheapest(names[int(race.first)])
    best.loss, best.megabytes = loss, float(race.means[best][0])
    best.tied = tuple(name for name, ahead in zip(names, race.ahead, strict=True) if ahead and name != best)
    if others := [name for name, left_open in zip(names, race.left_open, strict=True) if left_open]:
        warnings.warn(
            f"validation is too coarse to tell {best}, which takes {best.megabytes:.3g} MB to loss {loss:g}, from "
            f"{', '.join(quoted(others).values())}; a smaller val_interval would settle it",
            stacklevel=2,
        )
    return best


def _megabytes(runs: Runs, run: ComparedRun, at: Crossing, might: float) -> Floats:
    """Return the three costs (3,) of a run in a `Race`, in MB on the wire."""
    sent = run.history.bytes_per_node("wire") / 1e6
    if math.isnan(at.step):
        return np.array([math.inf, math.inf, math.inf if math.isnan(might) else sent[-1]])
    reached = until(run.history, at, runs.spent(run, "wire")) / 1e6
    first, least = sent[np.searchsorted(run.history["step"], [at.first, might])]
    return np.array([reached, reached if at.first == at.step else first, reached if might == at.step else least])
