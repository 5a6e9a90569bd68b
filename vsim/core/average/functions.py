"""Averages as users give them: by functions that make parts, by the name of a rule, or by a function of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from vsim.arguments import a_function, one_of
from vsim.cluster.collectives import Merge
from vsim.core.average.base import COUNTS, Average, Mean, Own, Part, Rule
from vsim.core.average.merging import RDA, TIES, TSV, Edit, Iso
from vsim.core.average.robust import CenteredClip, GeometricMedian, Krum, Median, TrimmedMean
from vsim.core.average.sending import Clip, Compress

Given = ParamSpec("Given")
Made = TypeVar("Made")


def function_of(cls: Callable[Given, Made], name: str) -> Callable[Given, Made]:
    """Return a function with this name that makes a part of an average; `cls` gives its arguments and docstring."""

    def make(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        return cls(*args, **kwargs)

    cls.made_by = name  # type: ignore[attr-defined]
    make.__name__ = make.__qualname__ = name
    make.__doc__, make.__module__ = cls.__doc__, "vsim.strategy"
    make.__signature__ = inspect.signature(cls).replace(return_annotation=cls.__name__)  # type: ignore[attr-defined]
    return make


mean = function_of(Mean, "mean")
median = function_of(Median, "median")
trimmed_mean = function_of(TrimmedMean, "trimmed_mean")
krum = function_of(Krum, "krum")
geometric_median = function_of(GeometricMedian, "geometric_median")
centered_clip = function_of(CenteredClip, "centered_clip")
rda = function_of(RDA, "rda")
iso = function_of(Iso, "iso")
ties = function_of(TIES, "ties")
tsv = function_of(TSV, "tsv")
edit = function_of(Edit, "edit")
clip = function_of(Clip, "clip")
compress = function_of(Compress, "compress")

# The rules that users may give by name, since they need no arguments.
RULES: dict[str, Callable[[], Rule]] = {
    make.__name__: make for make in (mean, median, trimmed_mean, krum, geometric_median, rda, iso, ties, tsv, edit)
}


AverageLike = Part | Callable[..., Part] | Merge | str


def average_of(
    average: AverageLike, where: str, *, by: tuple[str, ...] = COUNTS[:2], origin: bool = True, arrivals: bool = False
) -> Average:
    """Return a new average, made from an average, a part of one, the name of a rule, or a function.

    Args:
        where: name of the argument's owner, for errors.
        by: the values of `Rule.by` that are allowed.
        origin: whether the vectors are gradients or moves from an origin that all nodes share.
        arrivals: whether vectors arrive one by one at a server, without a collective.
    """
    made: Any = RULES[one_of("average", average, RULES)] if isinstance(average, str) else average
    if any(made is rule for rule in RULES.values()) or (isinstance(made, type) and issubclass(made, Rule)):
        made = made()
    if not isinstance(made, Part):
        if not callable(made) or isinstance(made, type):
            raise TypeError(
                f"{where}: average must be an average such as trimmed_mean(0.2) or mean() | clip(1.0), the name of a "
                f"rule ({', '.join(RULES)}), or a function of (rows, weights), got {average!r}"
            )
        a_function(f"{where}: average", made, "rows, weights")
        made = Own(made)
    result = Average(made)
    result.refuses_attack = made.refuses_attack if isinstance(made, Average) else ""
    if result.rule.by not in by:
        raise ValueError(f"{where}: average={result} counts by {result.rule.by!r}, and here it may be one of {by}")
    if result.of_moves and not origin:
        raise ValueError(
            f"{where}: average={result} takes lengths or directions of moves from weights that all nodes shared, and "
            "here they share none"
        )
    if isinstance(result.rule, CenteredClip) and arrivals:
        raise ValueError(f"{where}: average={result} begins at the last average of all nodes, and here one arrives")
    if arrivals or not origin:
        result.refuses_attack = f"{where} averages " + ("what arrives one by one" if arrivals else "in groups")
    if result.message is not None and arrivals:
        raise ValueError(f"{where}: average={result}: messages arrive one by one here; leave out compress()")
    return result


class Averaging:
    """An attribute `average` that is set to what users write ("mean", clip(1.0), …), and holds an `Average`.

    Args:
        default: the average of objects that are given none. options: see `average_of`.
    """

    def __init__(self, default: AverageLike = "mean", **options: Any) -> None:
        self.default, self.options = default, options

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.of_class = name, average_of(self.default, owner.__name__, **self.options)

    @overload
    def __get__(self, owner: None, cls: type) -> Averaging: ...

    @overload
    def __get__(self, owner: object, cls: type | None = None) -> Average: ...

    def __get__(self, owner: object | None, cls: type | None = None) -> Any:
        return self.default if owner is None else vars(owner).get(self.name, self.of_class)

    def __set__(self, owner: object, value: AverageLike) -> None:
        vars(owner)[self.name] = average_of(value, type(owner).__name__, **self.options)
