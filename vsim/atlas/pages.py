"""The results as Markdown, which replaces the part of a page between two marks, and the figure of profiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vsim.atlas.entries import NO_LIMIT, SHARES, TRIALS
from vsim.atlas.scores import SINGLE, Entries, label, profile, ratios, standings, tuning
from vsim.atlas.tasks import NETWORKS, TASKS
from vsim.figures.legends import LEGEND, line_style
from vsim.figures.looks import looks_of
from vsim.figures.style import STYLE, literal, styled
from vsim.writing import replacing

BEGIN, END = "<!-- made by vsim atlas -->", "<!-- end -->"
_PANELS = [("10 %", NO_LIMIT), (NO_LIMIT, "1 Gbit/s, 10 ms"), (NO_LIMIT, NO_LIMIT)]
_FACTORS = np.geomspace(1, 10, 400)
_LINES, _LEAST_TASKS = 8, 4
_TIED = 'In the first tables, "+ 3" after a strategy says that three others are tied with it.\n'
_PROFILES = """A line shows the share of tasks on which a strategy's loss is at most x times the task's lowest, within
the limit above the panel: further up and left is better.
"""


def write(by_task: Mapping[str, Entries], path: Path) -> None:
    """Write tables and figure: the text between the marks of a page is replaced, all other text stays.

    Raises:
        ValueError: the page lacks the marks.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} must have the lines {BEGIN} and {END}, between which results go")
    image = path.parent / "images" / "atlas.png"
    image.parent.mkdir(exist_ok=True)
    figure(by_task).savefig(image, dpi=200)
    with replacing(path) as new:
        new.write_text(f"{before}{BEGIN}\n\n{results(by_task)}\n{END}{after}", encoding="utf-8")


def results(by_task: Mapping[str, Entries]) -> str:
    parts = [_TIED, _where(by_task), "![Profiles over the tasks](images/atlas.png)\n", _PROFILES]
    parts += [_of_task(task, entries) for task, entries in by_task.items()]
    return "\n".join([*parts, _tuning(by_task)])


def _where(by_task: Mapping[str, Entries]) -> str:
    """Return, for each task, the first strategy by bytes and network, with the number of strategies tied with it."""
    lines = ["### Which strategy, where", ""]
    for task, entries in by_task.items():
        rows = []
        for share in (*SHARES, NO_LIMIT):
            row = {task: f"{share} of the bytes" if share != NO_LIMIT else "any bytes"}
            for network in (*NETWORKS, NO_LIMIT):
                first, *others = standings(entries, (share, network))
                tied = sum(own.is_tied for own in others)
                row[network if network != NO_LIMIT else "any time"] = first.strategy + (f" + {tied}" if tied else "")
            rows.append(row)
        lines += [_table(rows), ""]
    return "\n".join(lines)


def _of_task(task: str, entries: Entries) -> str:
    """Return the losses of all strategies at all scores with one limit; bold: the first and those tied with it."""
    places = {score: {own.strategy: own for own in standings(entries, score)} for score in SINGLE}
    order = [own.strategy for own in standings(entries, (NO_LIMIT, NO_LIMIT))]
    rows = []
    for name in order:
        row = {"": name}
        for score in SINGLE:
            own = places[score].get(name)
            text = (
                ""
                if own is None
                else f"{own.loss:.3g} ± {own.half:.1g}" + (f" ({own.diverged} div.)" if own.diverged else "")
            )
            row[label(score)] = f"**{text}**" if own is not None and own.is_tied else text
        of_steps = places[NO_LIMIT, NO_LIMIT][name]
        row["accuracy"] = f"{100 * of_steps.accuracy:.1f} %" if np.isfinite(of_steps.accuracy) else ""
        rows.append(row)
    return f"### {task.capitalize()}\n\n{TASKS[task].about}.\n\n{_table(rows)}\n"


def _tuning(by_task: Mapping[str, Entries]) -> str:
    """Return how much a strategy loses with a middling trial: the median over tasks, and its diverged trials."""
    found: dict[str, list[tuple[float, int]]] = {}
    for entries in by_task.values():
        for name, own in entries.items():
            found.setdefault(name, []).append(tuning(own))
    middle = {name: float(np.median([own[0] for own in of_tasks])) for name, of_tasks in found.items()}
    rows = [
        {
            "strategy": name,
            "median trial / best trial": f"{middle[name]:.3g}",
            "diverged": f"{sum(own[1] for own in found[name])} of {TRIALS * len(found[name])}",
            "tasks": f"{len(found[name])}",
        }
        for name in sorted(middle, key=middle.__getitem__)
    ]
    return f"### The cost of tuning\n\n{_table(rows)}\n"


def _table(rows: list[dict[str, str]]) -> str:
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([row[head] for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def figure(by_task: Mapping[str, Entries]):  # type: ignore[no-untyped-def]
    """Draw the share of tasks within a factor of the best loss, for the strategies of most tasks."""
    from matplotlib.figure import Figure

    by_panel = []
    for score in _PANELS:
        own = {name: r for name, r in ratios(by_task, score).items() if len(r) >= min(_LEAST_TASKS, len(by_task))}
        area = {name: float(profile(r, _FACTORS).mean()) for name, r in own.items()}
        by_panel.append({name: own[name] for name in sorted(area, key=area.__getitem__, reverse=True)[:_LINES]})
    # A strategy has one look in all panels. Colours are too few for all; most of those in several panels differ.
    panels = Counter(name for own in by_panel for name in own)
    looks = looks_of(sorted(panels), [name for name in panels if panels[name] > 1 or name == "AllReduce"])
    drawn = Figure(figsize=(7.0, 6.4), layout="constrained")
    for axes, score, own in zip(drawn.subplots(len(_PANELS), 1, sharex=True), _PANELS, by_panel, strict=True):
        for i, (name, r) in enumerate(own.items()):
            # Lines that cover each other have their markers at different points.
            marks = (i * len(_FACTORS) // 64, len(_FACTORS) // 8)
            style = line_style(looks.by_name[name])
            axes.step(_FACTORS, profile(r, _FACTORS), where="post", label=literal(name), markevery=marks, **style)
        styled(axes)
        axes.set(xscale="log", ylim=(0, 1.03), title=label(score), ylabel="share of tasks")
        axes.title.set_fontsize(STYLE["axes.labelsize"])
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), **LEGEND)
    axes.set(
        xlabel="loss divided by the task's lowest",
        xlim=(1, 10),
        xticks=[1, 2, 3, 5, 10],
        xticklabels=["1", "2", "3", "5", "10"],
    )
    return drawn
