"""The looks of lines: colours, dashes and markers. A name has the same colour in every figure of a comparison.

A reserved name has it in every comparison, too; any other name, where no other has the same by its hash. Black, which
readers take for the baseline, is AllReduce's; another name has it only if all other colours are taken.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Okabe and Ito's palette, distinct for every kind of colour vision. Its yellow is left out, because it is too pale for
# a line. The purple at the end is added; it differs more from all other colours than these do from each other.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#A020F0")
MARKERS = ("o", "s", "^", "D", "v", "<", ">", "p", "h")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)), (0, (9, 2)))
# Names with a reserved look, so that no two of them share one; only letters and digits are compared.
_KNOWN = ("allreduce", "fedavg", "diloco", "sparta", "spartadiloco", "demo", "alone", "streamingdiloco")
# Added to other names before they are hashed: chosen so that few of vsim's strategies share a colour.
_SALT = 663
# With more lines than this, a legend lists families, not lines.
MANY = 12
# A legend names at most this many values of one setting, evenly spaced among all.
_KEYS = 8
# A setting in a name, such as "H=5" or "inner_optim=SGD(lr=0.1, momentum=0.9)".
SETTING = re.compile(r"(\w+)=([^,(]*(?:\([^)]*\))?)")


@dataclass(frozen=True)
class Look:
    """The look of a line. With dash="none", only markers are drawn; with marker="", only the line."""

    colour: str
    dash: Any = "-"
    marker: str = "o"


@dataclass(frozen=True)
class Looks:
    """The looks of several lines.

    Attributes:
        by_name: name → look.
        key: the content of a legend: title → (text, look) of each line below it; empty: the legend lists the names.
    """

    by_name: Mapping[str, Look]
    key: Mapping[str, Sequence[tuple[str, Look]]] = field(default_factory=dict)


def looks_of(names: Sequence[str], shown: Sequence[str] | None = None) -> Looks:
    """Return looks for names: a colour each, as long as there are enough.

    A reserved name always has the same colour. So has any other name, unless it shares that with another of `names`.
    Where colours are too few for all of `names`, those in `shown`, which are drawn together, still differ.

    Names that differ only in settings, or that begin with the same reserved name, are a family and share a colour, in
    tints. If all names are of one family, the settings in the names decide the look, see `looks_by`.

    >>> [looks_of(names).by_name["DiLoCo, small"].colour for names in (["DiLoCo, small"], ["mine", "DiLoCo, small"])]
    ['#56B4E9', '#56B4E9']
    >>> [text for text, _ in looks_of(["AllReduce", *(f"DiLoCo H={H}, lr=0.1" for H in range(20))]).key[""]]
    ['AllReduce', 'DiLoCo (20)']
    """
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(_family(name), []).append(name)
    few = len(names) <= MANY
    if len(families) == 1 and len(names) > 1:
        settings = {name: dict(SETTING.findall(name)) for name in names}
        if not few and len({tuple(own) for own in settings.values()}) == 1:
            return looks_by(settings, list(settings[names[0]]), names)
        if few:
            return Looks({name: _look(i, i, i) for i, name in enumerate(names)})
    looks, key = {}, []
    for family, places in _places(families, {_family(name) for name in (names if shown is None else shown)}).items():
        members = families[family]
        first = _look(*places)
        key.append((family if len(members) == 1 else f"{family or 'runs'} ({len(members)})", first))
        for j, name in enumerate(members):
            own = _look(*(place + j for place in places))
            looks[name] = Look(
                _lighter(first.colour, 0.65 * j / len(members)), own.dash, own.marker if few else first.marker
            )
    return Looks(looks, {} if few else {"": key})


def _family(name: str) -> str:
    """Return the strategy in a name: a reserved name that it is or begins with, else the name before its settings.

    >>> [_family(name) for name in ("DiLoCo H=5", "AllReduce, all", "SPARTA + DiLoCo", "diloco:H=5", "mine, H = 5")]
    ['DiLoCo', 'AllReduce', 'SPARTA + DiLoCo', 'diloco', 'mine']
    """
    family = re.split(r"[\s,:]*\w+\s*=", name)[0]
    first = re.split(r"[^\w-]", family)[0]
    return family if _plain(family) in _KNOWN or _plain(first) not in _KNOWN else first


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return "streamingdiloco" if plain == "streaming" else plain


def _places(families: Iterable[str], shown: Collection[str]) -> dict[str, tuple[int, int, int]]:
    """Return family → numbers of its colour, dash and marker: reserved for known names, else from a hash of the name.

    Other names get a dash that no family has, if one is left, and never the dash of a family with the same colour.
    """
    words = {family: _plain(family) for family in families}
    order = sorted(words, key=lambda one: (words[one] not in _KNOWN, one))
    codes = {family: zlib.crc32(f"{_SALT}{words[family]}".encode()) for family in order}
    colours = {one: _KNOWN.index(words[one]) if words[one] in _KNOWN else _hashed(codes[one]) for one in order}
    colours = _apart(colours)
    # Among those shown, black may be given back.
    starts = {one: colours[one] or (0 if words[one] in _KNOWN else _hashed(codes[one])) for one in order}
    colours |= _apart({one: start for one, start in starts.items() if one in shown})
    places, taken = {}, set[tuple[int, int]]()
    for family in order:
        colour = shift = colours[family]
        if words[family] not in _KNOWN:
            shift = colour + 1 + codes[family] // len(COLOURS) % (len(DASHES) - 1)  # not the dash of the known name
            used = {dash for _, dash in taken}
            used = used if len(used) < len(DASHES) else {dash for other, dash in taken if other == colour}
            shift += next((i for i in range(len(DASHES)) if (shift + i) % len(DASHES) not in used), 0)
        taken.add((colour, shift % len(DASHES)))
        places[family] = colour, shift, shift
    return {family: places[family] for family in words}


def _hashed(code: int) -> int:
    """Return the number of a colour for a hash: any but that of AllReduce."""
    return code % len(COLOURS) or 1 + code // 256 % (len(COLOURS) - 1)  # the bits between decide the dash


def _apart(colours: Mapping[str, int]) -> dict[str, int]:
    """Return colours no two of which are equal, while there are enough: of equal ones, the first family's stays.

    >>> _apart({"DiLoCo": 2, "ring": 2, "torus": 1, "star": 2})
    {'DiLoCo': 2, 'ring': 3, 'torus': 1, 'star': 4}
    """
    owners = {colour: family for family, colour in reversed([*colours.items()])}
    free = [colour for colour in range(len(COLOURS)) if colour not in owners]
    apart = dict(colours)
    for family, colour in colours.items():
        if owners[colour] != family and free:
            apart[family] = min(free, key=lambda one: (one == 0, (one - colour) % len(COLOURS)))
            free.remove(apart[family])
    return apart


def _look(colour: int, dash: int, marker: int) -> Look:
    return Look(COLOURS[colour % len(COLOURS)], DASHES[dash % len(DASHES)], MARKERS[marker % len(MARKERS)])


def looks_by(settings: Mapping[str, Mapping[str, str]], order: Sequence[str], shown: Sequence[str]) -> Looks:
    """Return looks that show the first setting by colour, the second by dashes, and all others by markers.

    Args:
        settings: name → setting → value, as text.
        order: the settings; colour stands for the first.
        shown: the names that are drawn; the key lists only their values.
    """

    def values(keys: Sequence[str], names: Iterable[str] = settings) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(tuple(settings[name][key] for key in keys) for name in names))

    first, second, others = order[:1], order[1:2], order[2:]
    # The settings that colours, dashes and markers stand for; a single setting uses all three.
    said = (first, second or first, others or second or first)
    known = [values(keys) for keys in said]
    colours = _colours(len(known[0]))

    def look(said_by: Sequence[tuple[str, ...] | None]) -> Look:
        """Return the look whose colour, dashes and marker stand for these values; None stands for no value."""
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
        found = values(names, sorted(shown, key=list(settings).index))
        if len(found) == 1 and len(shown) > 1:
            continue
        key[", ".join(names)] = lines = []
        for value in found[:: -(-len(found) // _KEYS)]:
            lines.append((", ".join(value), look([value if keys is names else None for keys in said])))
    return Looks(looks, key)


def _colours(count: int) -> Sequence[str]:
    """Return colours of the palette or, if it has too few, of a perceptually uniform colour map in order."""
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
