"""Averages: merge the vectors of several nodes into one, wherever nodes average gradients, weights or moves.

    mean("examples") | clip("median") | compress(TopK(0.01), error_feedback=0.9)

A rule (`mean`, `median`, `krum`, …) merges the vectors. Before the rule, `clip` limits the length of every node's
vector, and `compress` sends the vector with fewer bytes. Default: the mean alone. `mean()` returns a `Mean`, `median()`
a `Median`, and so on; for a rule of your own, subclass `Rule`.
"""

from vsim.core.average.base import COUNTS, Average, Mean, Part, Rule
from vsim.core.average.functions import (
    RULES,
    AverageLike,
    Averaging,
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
from vsim.core.average.merging import RDA, TIES, TSV, Edit, Iso
from vsim.core.average.robust import CenteredClip, GeometricMedian, Krum, Median, TrimmedMean
from vsim.core.average.sending import Clip, Compress

# fmt: off
__all__ = [
    "COUNTS", "RDA", "RULES", "TIES", "TSV", "Average", "AverageLike", "Averaging", "CenteredClip", "Clip",
    "Compress", "Edit", "GeometricMedian", "Iso", "Krum", "Mean", "Median", "Part", "Rule", "TrimmedMean",
    "average_of", "centered_clip", "clip", "compress", "edit", "geometric_median", "iso", "krum", "mean", "median",
    "rda", "ties", "trimmed_mean", "tsv",
]
