"""What was saved is read again: comparisons and sweeps, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vsim.records.comparison import Comparison
from vsim.records.history import file_path, holding_a_record, read_json
from vsim.records.sweep import Sweep

# What `vsim compare` and `vsim sweep` call them.
NAMES = ("comparison.json", "sweep.json")


def read_comparison(path: str | Path) -> Comparison:
    """Read what `to_json` of a `Comparison` or a `Sweep` wrote.

    Args:
        path: the file, or a folder with one of `NAMES`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    path = file_path(path)
    if path.is_dir():
        found = [path / name for name in NAMES if (path / name).is_file()]
        if len(found) != 1:
            what = "both, name one" if found else "none, name the file"
            raise FileNotFoundError(f"{path} is a folder that should have {' or '.join(NAMES)}; it has {what}")
        path = found[0]
    content = read_json(path, "Comparison", Comparison._keys)
    kind = Sweep if all(key in content for key in Sweep._keys) else Comparison
    with holding_a_record(path, kind.__name__):
        return kind._from_plain(content)


def read_comparisons(paths: Sequence[str | Path]) -> dict[str, Comparison]:
    """Read several comparisons; return name → comparison, the names as short as they can be while they differ.

    Raises:
        ValueError: a file is named twice, or holds something else. FileNotFoundError: there is no such file.
    """
    places = [file_path(path).resolve() for path in paths]
    if len(set(places)) < len(places):
        raise ValueError(f"a file is named more than once: {', '.join(map(str, paths))}")
    told = [place.parent if place.name in NAMES else place.parent / place.stem for place in places]
    if len(set(told)) < len(told):  # a comparison and a sweep of one folder
        told = places
    names = next(
        names
        for depth in range(1, 1 + max((len(one.parts) for one in told), default=1))
        if len(set(names := ["/".join(one.parts[-depth:]) for one in told])) == len(told)
    )
    return {name: read_comparison(path) for name, path in zip(names, paths, strict=True)}
