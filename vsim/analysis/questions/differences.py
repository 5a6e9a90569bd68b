"""How strategies differ from a chosen one in any measured number, and whether seeds can tell."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vsim.analysis.asked import Asked
from vsim.analysis.columns import columns_of
from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.losses import by_seed
from vsim.analysis.questions.best import Best, best
from vsim.analysis.result import Result
from vsim.analysis.statistics import Difference
from vsim.analysis.statistics import differences as paired_differences
from vsim.arguments import one_of

if TYPE_CHECKING:
    import pandas as pd


def differences(comparison: Runs, to: str | None = None, of: str = "global_loss", level: float = 0.95) -> pd.DataFrame:
    """Return how strategies differ from the strategy `to` in a column's last value, paired by seed.

    Args:
        to: the strategy to compare with, if you chose it before you saw the results; p is then adjusted for the pairs
            with `to`. Default: the best. Because the results choose the best, p is then adjusted for all pairs of
            strategies, as it is for `to=comparison.best()`.
        of: a column of `History`, whose last value is compared, or a column of `rows`, such as "client accuracy, worst
            tenth". A run that diverged or failed has no value.
        level: the confidence level of all tests together, in (0, 1).

    Returns:
        A DataFrame `strategy, to, difference, low, high, p, seeds, seeds_needed`. to: the name of the strategy `to`.
        difference: the strategy's mean minus that of `to`, over the seeds with which both have a value. p: p-value of
        the paired t-test, adjusted by Holm. low, high: the interval of the difference, by Student's t, at the level
        that Holm leaves to this test: it excludes 0 exactly if p ≤ 1 - level. Each interval holds the true difference
        at least at `level`; all intervals of a table together do so a little less often, at a level of 0.95 in 90 to 96
        %. seeds_needed: the number of seeds with which the test would find such a difference with a chance of 80 %;
        infinite without a difference. With one seed there are no intervals and no p.

    Raises:
        ValueError: there is no such strategy or column.
    """
    import pandas as pd

    to = best(comparison) if to is None else one_of("to", to, comparison)
    asked = Asked.of(comparison)
    measured = dict.fromkeys(column for history in comparison.all_histories for column in history.columns)
    computed = {column.name: column for column in columns_of(asked)}
    one_of("of", of, [*measured, *computed])

    def value(run: ComparedRun) -> float:
        if of not in measured:
            return computed[of].of(Result(asked, run))
        return run.history.last(of) if of in run.history.columns else math.nan

    rows = paired_differences(by_seed(comparison, value), to, level, chosen=isinstance(to, Best))
    frame = pd.DataFrame(rows, columns=["strategy", *Difference._fields, "seeds", "seeds_needed"])
    frame.insert(1, "to", str(to))
    needed = [row["seeds_needed"] for row in rows]
    if not all(map(math.isfinite, needed)):
        frame["seeds_needed"] = pd.Series(needed, dtype=object)  # so that all other values stay integers
    return frame
