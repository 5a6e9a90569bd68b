"""Fragments of a model: parameters that are synchronized separately, as columns of the matrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.cluster.replicas import Columns

Fragments = int | Sequence[Sequence[str]] | None
PATTERNS = ("strided", "sequential")


class Fragment:
    """A group of parameters, by their columns in the matrix.

    Attributes:
        parameters: the columns of each parameter, in ascending order.
        ranges: the same columns as ranges (start, stop), with adjacent parameters in one range.
    """

    def __init__(self, parameters: Sequence[Columns]) -> None:
        self.parameters = sorted(parameters, key=lambda c: c.start)
        self.ranges: list[tuple[int, int]] = []
        for c in self.parameters:
            begun = self.ranges.pop()[0] if self.ranges and self.ranges[-1][1] == c.start else c.start
            self.ranges.append((begun, c.stop))

    def views(self, matrix: Tensor) -> list[Tensor]:
        """Return views of the fragment's ranges, (…, n) each, in a stacked matrix (R, P) or a shared row (P,)."""
        return [matrix[..., start:stop] for start, stop in self.ranges]

    def tensors(self, row: Tensor) -> list[Tensor]:
        """Return views of the fragment's parameters, each in its own shape, in a shared row (P,)."""
        return [row[c.start : c.stop].view(c.shape) for c in self.parameters]

    def of(self, matrix: Tensor) -> Tensor:
        """Return the fragment's columns (…, N) of a matrix (…, P): a view if they are adjacent, otherwise a copy."""
        views = self.views(matrix)
        return views[0] if len(views) == 1 else torch.cat(views, dim=-1)

    def cut(self, values: Tensor) -> list[Tensor]:
        """Cut the fragment's columns (…, N), a result of `of`, into the fragment's ranges."""
        return list(values.split([stop - start for start, stop in self.ranges], dim=-1))

    def alone(self, cluster: Cluster) -> Cluster:
        """Return the cluster reduced to the fragment's parameters: views if their columns are adjacent, else copies."""
        layout, stop = [], 0
        for c in self.parameters:
            layout.append(Columns(c.name, c.shape, stop, stop + c.stop - c.start))
            stop = layout[-1].stop
        replicas = cluster.replicas
        own = replace(replicas, layout=layout, weights=self.of(replicas.weights), grads=self.of(replicas.grads))
        return replace(cluster, replicas=own)


def checked_fragments(fragments: Fragments, H: int) -> Fragments:
    """Return `fragments` after checks; there are 1 to H fragments, since each is sent once in H steps."""
    if not isinstance(fragments, list | tuple):
        return None if fragments is None else whole_number("fragments", fragments, at_most=H)
    whole_number("fragments: their number", len(fragments), at_most=H)
    for names in fragments:
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"fragments must be a number, or lists of names; got {names!r:.100} in place of a list")
    return fragments


def first_step(i: int, H: int, parts: int) -> int:
    """Return the step after which fragment i of `parts` is first sent: sends are spread over H steps."""
    return (i + 1) * H // parts


def fragments_of(layout: Sequence[Columns], wanted: Fragments, pattern: str) -> list[Fragment]:
    """Return the fragments of a model; every parameter is in exactly one.

    Args:
        layout: the columns of all parameters.
        wanted: the number of fragments; or one list per fragment, with names of parameters or of whole modules. None: a
            fragment for every layer. Layers are the numbered modules, such as blocks.3; parameters of no layer
            (embedding, final norm, head) are in the first fragment. With fewer layers than fragments, the modules that
            directly hold parameters take the layers' place, such as blocks.3.attention.
        pattern: "strided" (layer l is in fragment l mod n) or "sequential" (a fragment has neighbouring layers).

    Raises:
        ValueError: there are fewer modules than fragments; a name matches no parameter, or a parameter is in no list or
            in several.
    """
    if wanted is not None and not isinstance(wanted, int):
        return [Fragment(part) for part in _listed(layout, wanted)]
    unit_of = {c.name: _layer(c.name) for c in layout}
    number = max(1, len({*unit_of.values()} - {""})) if wanted is None else wanted
    if number > max(1, len({*unit_of.values()} - {""})):
        unit_of = {c.name: c.name.rpartition(".")[0] or c.name for c in layout}
    units = [unit for unit in dict.fromkeys(unit_of.values()) if unit]
    if number > max(1, len(units)):
        raise ValueError(f"fragments must be at most the number of layers or modules, got {number}; there are {units}")
    strided = pattern == "strided"
    place = {unit: i % number if strided else i * number // len(units) for i, unit in enumerate(units)}
    parts: list[list[Columns]] = [[] for _ in range(number)]
    for c in layout:
        parts[place.get(unit_of[c.name], 0)].append(c)
    return [Fragment(part) for part in parts]


def _layer(name: str) -> str:
    """Return "blocks.3" for "blocks.3.norm.weight", and "" for a parameter of no numbered module."""
    found = re.match(r"(?:.*?\.)??\d+(?=\.|$)", name)
    return found[0] if found else ""


def _listed(layout: Sequence[Columns], lists: Sequence[Sequence[str]]) -> list[list[Columns]]:
    parts = []
    for names in lists:
        for name in names:
            if not any(_is_in(c.name, name) for c in layout):
                raise ValueError(
                    f"fragments has {name!r}, the name of no parameter; there are {[c.name for c in layout]}"
                )
        parts.append([c for c in layout if any(_is_in(c.name, name) for name in names)])
    for c in layout:
        times = sum(part.count(c) for part in parts)
        if times != 1:
            raise ValueError(f"every parameter must be in one of the fragments, {c.name} is in {times or 'none'}")
    if not all(parts):
        raise ValueError(f"fragments must not be empty, got {lists!r}")
    return parts


def _is_in(parameter: str, name: str) -> bool:
    return parameter == name or parameter.startswith(f"{name}.")
