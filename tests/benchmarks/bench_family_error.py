"""How often a table tells apart strategies that do not differ, and finds those that do, by ways to test.

    python tests/benchmarks/bench_family_error.py [--comparisons 4000]

Losses are normal: a part that all strategies of a seed share, and one of their own, both of deviation 1; where spreads
differ, a third of the strategies has eight times as much of its own. Each strategy is compared with the one of lowest
mean, which the data choose. Printed are the share of comparisons that tell an equal strategy from it, and the share of
worse strategies that are told from it.
"""

from __future__ import annotations

import argparse
import math
from functools import cache

import numpy as np
from scipy import stats

from vsim.analysis.statistics import holm

WAYS = ("Holm, the best as if given", "Holm, all pairs", "Tukey", "Hsu")
CASES = {  # means of K strategies, and the spread of the last third
    "all equal": (lambda k: np.zeros(k), 1.0),
    "all equal, spreads differ": (lambda k: np.zeros(k), 8.0),
    "half worse by 2": (lambda k: np.where(np.arange(k) < (k + 1) // 2, 0.0, 2.0), 1.0),
    "half worse by 6": (lambda k: np.where(np.arange(k) < (k + 1) // 2, 0.0, 6.0), 1.0),
    "1.5 from one to the next": (lambda k: 1.5 * np.arange(k), 1.0),
}


def told(losses: np.ndarray) -> np.ndarray:
    """Return (ways, K) which strategies of (seeds, K) are told from that of the lowest mean, at 5 %."""
    n, k = losses.shape
    means = losses.mean(0)
    best = int(means.argmin())
    i, j = np.triu_indices(k, 1)
    apart = losses[:, i] - losses[:, j]
    p = 2 * stats.t.sf(abs(apart.mean(0)) / (apart.std(0, ddof=1) / math.sqrt(n)), n - 1)
    found = np.zeros((len(WAYS), k), dtype=bool)
    of_best = (i == best) | (j == best)
    other = np.where(i == best, j, i)[of_best]
    found[0, other] = holm(p[of_best])[0] <= 0.05
    found[1, other] = holm(p)[0][of_best] <= 0.05
    rest = losses - means - losses.mean(1, keepdims=True) + losses.mean()
    freedom = (k - 1) * (n - 1)
    error = math.sqrt((rest**2).sum() / freedom / n)
    tukey, hsu = limits(k, freedom)
    found[2:] = means - means[best] > np.array([[tukey], [hsu]]) * error
    return found


@cache
def limits(k: int, freedom: int) -> tuple[float, float]:
    """Return the ranges, in standard errors of a mean, that Tukey and Hsu (by Bonferroni) allow equal strategies."""
    tukey = float(stats.studentized_range.ppf(0.95, k, freedom))
    return tukey, math.sqrt(2) * float(stats.t.isf(0.05 / (k - 1), freedom))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=4000)
    number = parser.parse_args().comparisons
    print(f"{'case':28}{'K':>3}{'seeds':>7}", *(f"{way:>28}" for way in WAYS))
    for case, (means_of, spread) in CASES.items():
        for k, n in ((3, 5), (8, 3), (8, 5), (17, 5), (8, 10)):
            rng, means, own = np.random.default_rng(k + n), means_of(k), np.ones(k)
            own[-(k // 3) :] = spread
            wrong, right = np.zeros((2, len(WAYS)))
            for _ in range(number):
                losses = means + rng.normal(size=(n, 1)) + own * rng.normal(size=(n, k))
                found = told(losses)
                worse = means > means[losses.mean(0).argmin()]
                wrong += (found & ~worse).any(1)
                right += (found & worse).sum(1) / max(1, worse.sum())
            cells = [f"{w / number:.1%} told, {r / number:.0%} found" for w, r in zip(wrong, right, strict=True)]
            print(f"{case:28}{k:3}{n:7}", *(f"{text:>28}" for text in cells), flush=True)


if __name__ == "__main__":
    main()
