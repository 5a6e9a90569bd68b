"""Averages: how the vectors of several nodes become one, wherever nodes average gradients, weights or moves.

    mean("examples") | clip("median") | compress(TopK(0.01), error_feedback=0.9)

A rule (`mean`, `median`, `krum`, …) says how vectors become one. `clip` scales every node's vector before, `compress`
sends it with fewer bytes. Without them: the mean, no limit, and vectors as they are. `mean()` returns a `Mean`, and so
on; an own rule is a subclass of `Rule`.
"""

from vsim.strategy.average.base import COUNTS, Average, Mean, Part, Rule
from vsim.strategy.average.functions import (
    RULES,
    AverageLike,
    average_of,
    centered_clip,
    clip,
    compress,
    edit,
    geometric_median,
    iso,
    krum,
    mean,
    median,
    rda,
    ties,
    trimmed_mean,
    tsv,
)
from vsim.strategy.average.merging import RDA, TIES, TSV, Edit, Iso
from vsim.strategy.average.robust import CenteredClip, GeometricMedian, Krum, Median, TrimmedMean
from vsim.strategy.average.sending import Clip, Compress

# fmt: off
__all__ = [
    "COUNTS", "RDA", "RULES", "TIES", "TSV", "Average", "AverageLike", "CenteredClip", "Clip", "Compress", "Edit",
    "GeometricMedian", "Iso", "Krum", "Mean", "Median", "Part", "Rule", "TrimmedMean", "average_of", "centered_clip",
    "clip", "compress", "edit", "geometric_median", "iso", "krum", "mean", "median", "rda", "ties", "trimmed_mean",
    "tsv",
]
