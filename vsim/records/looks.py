"""How lines are told apart: a colour, a dash pattern and a marker for each name, the same in every figure.

Told apart with any kind of colour vision, and in grey. A colour belongs to a name: it does not depend on what else is
compared, as far as seven colours last. Names that differ in settings alone are a family, of one colour; where there are
many, a legend says what colours and dashes stand for instead of naming every run.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Okabe and Ito's palette, made to be told apart with any kind of colour vision; its yellow is too pale for a line.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
MARKERS = ("o", "s", "^", "D", "v", "<", ">", "p", "h")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)), (0, (9, 2)))
# Names that have a look of their own, so that no two of them ever have the same, in letters and digits alone.
_KNOWN = ("allreduce", "fedavg", "diloco", "sparta", "spartadiloco", "demo", "alone")
# More lines than this have no legend of their own, if they belong to families.
MANY = 12
# A legend names at most so many values of one setting, evenly spaced among all.
_KEYS = 8

# "H=5" in a name, or "inner_optim=SGD(lr=0.1, momentum=0.9)".
_SETTING = re.compile(r"(\w+)=([^,(]*(?:\([^)]*\))?)")


@dataclass(frozen=True)
class Look:
    """How a line is drawn; `dash` "none": only its markers, `marker` "": only its line."""

    colour: str
    dash: Any = "-"
    marker: str = "o"


@dataclass(frozen=True)
class Looks:
    """The looks of several lines.

    Attributes:
        by_name: name → look.
        key: what a legend says instead of the names: title → (text, look) of each line below it; empty: the names.
    """

    by_name: Mapping[str, Look]
    key: Mapping[str, Sequence[tuple[str, Look]]] = field(default_factory=dict)


def looks_of(names: Sequence[str]) -> Looks:
    """Return looks for names: those that differ in settings alone are a family, of one colour.

    If all are of one family, the settings in their names say the look, as of `looks_by`.

    >>> [looks_of(names).by_name["DiLoCo"].colour for names in (["DiLoCo"], ["AllReduce", "DiLoCo"])]
    ['#56B4E9', '#56B4E9']
    >>> [text for text, _ in looks_of(["AllReduce", *(f"DiLoCo H={H}, lr=0.1" for H in range(20))]).key[""]]
    ['AllReduce', 'DiLoCo (20)']
    """
    # "DiLoCo H=5, lr=0.1", "DiLoCo, H = 5" and "diloco:H=5" are of the families DiLoCo, DiLoCo and diloco.
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(re.split(r"[\s,:]*\w+\s*=", name)[0], []).append(name)
    few = len(names) <= MANY
    if len(families) == 1 and len(names) > 1:
        settings = {name: dict(_SETTING.findall(name)) for name in names}
        if not few and len({tuple(own) for own in settings.values()}) == 1:
            return looks_by(settings, list(settings[names[0]]), names)
        if few:
            return Looks({name: _look(i) for i, name in enumerate(names)})
    looks, key = {}, []
    for family, place in _places(families).items():
        members = families[family]
        first = _look(place)
        key.append((family if len(members) == 1 else f"{family or 'runs'} ({len(members)})", first))
        for j, name in enumerate(members):
            own = _look(place + j)
            looks[name] = Look(
                _lighter(first.colour, 0.65 * j / len(members)), own.dash, own.marker if few else first.marker
            )
    return Looks(looks, {} if few else {"": key})


def _places(families: Iterable[str]) -> dict[str, int]:
    """Family → the number of its look: that of a known name, or one that follows from its letters, if it is free."""
    words = {family: re.sub(r"[^a-z0-9]", "", family.lower()) for family in families}
    known = {word: family for family, word in words.items() if word in _KNOWN}
    places = {family: _KNOWN.index(word) for word, family in known.items()}
    for family in sorted(words.keys() - places.keys()):
        wish = zlib.crc32(words[family].encode())
        order = [*((wish + i) % len(COLOURS) for i in range(len(COLOURS))), *range(len(COLOURS), 2 * len(words) + 7)]
        places[family] = next(place for place in order if place not in places.values())
    return {family: places[family] for family in words}


def _look(place: int) -> Look:
    return Look(COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)], MARKERS[place % len(MARKERS)])


def looks_by(settings: Mapping[str, Mapping[str, str]], order: Sequence[str], shown: Sequence[str]) -> Looks:
    """Return looks of which the colour says the first setting, the dashes the second, and the marker all others.

    Args:
        settings: name → setting → value, as text.
        order: settings, that which the colour says first.
        shown: names that are drawn: the key has their values alone.
    """

    def values(keys: Sequence[str], names: Iterable[str] = settings) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(tuple(settings[name][key] for key in keys) for name in names))

    first, second, others = order[:1], order[1:2], order[2:]
    # What colours, dashes and markers say: one setting alone is said by everything.
    said = (first, second or first, others or second or first)
    known = [values(keys) for keys in said]
    colours = _colours(len(known[0]))

    def look(said_by: Sequence[tuple[str, ...] | None]) -> Look:
        """The look in which colour, dashes and marker say these values; None: nothing."""
        c, d, m = (None if v is None else own.index(v) for v, own in zip(said_by, known, strict=True))
        colour, dash = ("#444444", "none") if c is None else (colours[c], "-")
        if d is not None:
            dash = DASHES[d % len(DASHES)]
            if second and len(known[1]) > len(DASHES):
                colour = _lighter(colour, 0.65 * d / len(known[1]))
        return Look(colour, dash, "" if m is None else MARKERS[m % len(MARKERS)])

    looks = {name: look([tuple(own[key] for key in keys) for keys in said]) for name, own in settings.items()}
    key: dict[str, list[tuple[str, Look]]] = {}
    for names in filter(None, (first, second, others)):
        there = values(names, sorted(shown, key=list(settings).index))
        if len(there) == 1 and len(shown) > 1:
            continue
        key[", ".join(names)] = lines = []
        for value in there[:: -(-len(there) // _KEYS)]:
            lines.append((", ".join(value), look([value if keys is names else None for keys in said])))
    return Looks(looks, key)


def _colours(count: int) -> Sequence[str]:
    """The palette, or of more than it has, colours in the order of a map that is perceptually uniform."""
    if count <= len(COLOURS):
        return COLOURS[:count]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.92 * i / (count - 1))) for i in range(count)]


def _lighter(colour: str, share: float) -> str:
    """Return "#RRGGBB" mixed with that share of white.

    >>> _lighter("#000080", 0.5)
    '#8080C0'
    """
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02X}" for c in channels)
