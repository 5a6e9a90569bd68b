"""Figures: told apart in colour and in grey, readable on a logarithmic axis, and written as a publisher wants them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from comparisons_by_hand import comparison as comparison_of
from comparisons_by_hand import run as made_run
from matplotlib.colors import to_rgb

from vsim import History, scaling
from vsim.analysis.overview import overview
from vsim.figures.looks import COLOURS, DASHES, MARKERS, looks_of
from vsim.figures.paper import plain_ticks, save
from vsim.figures.style import sized, wrapped
from vsim.history.curves import bands


def history(points: int, first_payload: float = 1e6, last_payload: float = 8e6) -> History:
    made = History()
    for i, payload in enumerate(np.linspace(first_payload, last_payload, points)):
        made.append({"step": i, "global_loss": 2 / (1 + i), "payload_bytes": payload})
    return made


def test_every_line_differs_by_dash_and_marker_or_colour() -> None:
    names = [f"{letter}{i}" for letter in "abcdefgh" for i in range(4)]
    looks = looks_of(names).by_name
    assert len({(look.colour, look.dash, look.marker) for look in looks.values()}) == len(names)
    assert len({(look.colour, look.dash) for look in looks.values()}) >= 30
    assert {look.colour for look in looks.values()} == set(COLOURS)
    lines = bands({name: history(5) for name in names[:8]}).get_lines()
    assert [line.get_color() for line in lines] == [looks[name].colour for name in names[:8]]
    # No two of the first many lines of one family look alike.
    assert len({(i % len(COLOURS), i % len(DASHES), i % len(MARKERS)) for i in range(60)}) == 60


def test_black_is_left_to_allreduce_while_colours_are_free() -> None:
    for names in (["FedProx"], ["QSR", "FedAvg"], ["FedAvg", "FedProx", "SCAFFOLD", "FedAdam", "a", "b", "c"]):
        colours = [look.colour for look in looks_of(names).by_name.values()]
        assert "#000000" not in colours and len({*colours}) == len(names)
    names = [f"{letter}{i}" for letter in "abc" for i in range(4)]
    for start in range(0, len(names), 6):  # a figure of some of them
        shown = names[start : start + 6]
        colours = [looks_of(names, shown).by_name[name].colour for name in shown]
        assert "#000000" not in colours and len({*colours}) == len(shown)


@pytest.mark.parametrize("points", [2, 4, 9, 12])
def test_steps_have_whole_numbers(points: int) -> None:
    ax = bands({"a": history(points)})
    ax.figure.canvas.draw()
    low, high = ax.get_xlim()
    shown = [
        text.get_text() for at, text in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True) if low <= at <= high
    ]
    assert len(shown) > 1 and all(text.isdecimal() for text in shown)


def test_settings_stay_whole_where_names_are_wrapped() -> None:
    names = ["SPARTA, p = 1 %, H = 10", "DiLoCo, H = 10, outer_lr = 0.4", "SPARTA-DiLoCo at 200 Mbit/s"]
    for width in range(12, 30):
        lines = "\n".join(wrapped(name, width) for name in names)
        assert not re.search(r"=\n|\n=|\d\n%|\d\nMbit|-\n", lines) and "\xa0" not in lines


def test_long_lines_are_marked_at_few_points() -> None:
    short, long = bands({"short": history(10), "long": history(1000)}).get_lines()
    assert short.get_markevery() == 1
    start, spacing = long.get_markevery()
    assert start < spacing and len(range(start, 1000, spacing)) <= 12


@pytest.mark.parametrize(("last", "labels"), [(8e6, ["1", "2", "5"]), (900e6, ["1", "10", "100", "1000"])])
def test_bytes_have_plain_labels(last: float, labels: list[str]) -> None:
    ax = bands({"a": history(5, 1e6, last)}, "payload")
    ax.figure.canvas.draw()
    low, high = ax.get_xlim()
    places = [*ax.get_xticks(), *ax.xaxis.get_minorticklocs()]
    ticks = zip(places, [*ax.get_xticklabels(), *ax.get_xticklabels(minor=True)], strict=True)
    shown = [(at, text.get_text()) for at, text in ticks if low <= at <= high and text.get_text()]
    assert [text for _, text in sorted(shown)] == labels


@pytest.mark.parametrize("suffix", ["png", "svg", pytest.param("pdf", marks=pytest.mark.slow)])
def test_save(suffix: str, tmp_path: Path) -> None:
    figure = overview({"a": history(5), "b": [history(6), history(6)]}, "two runs")
    once, again = tmp_path / f"once.{suffix}", tmp_path / f"again.{suffix.upper()}"
    save(figure, once)
    save(figure.axes[0], again)
    content = once.read_bytes()
    assert content == again.read_bytes()  # nothing of the date
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
        width = int.from_bytes(content[16:20], "big")
        assert width == pytest.approx(6.8 * 300, abs=1)
    elif suffix == "pdf":
        assert b"/FontFile2" in content and b"/Type3" not in content  # TrueType, embedded
    else:
        assert b"<svg" in content and b"<text" not in content and b"date" not in content.lower()


def test_other_files_and_widths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must end in .png, .svg, .pdf, got 'figure.jpg'"):
        save(overview({}), "figure.jpg")
    for width in (-1, 0, float("nan"), 1e4):
        with pytest.raises(ValueError, match=r"width must be >= 1 and <= 100, got"):
            overview({}, width=width)


def test_curves_begin_where_asked_and_divergence_at_its_first_value() -> None:
    one = history(12)
    (line,) = bands({"a": one}, from_step=3).get_lines()
    assert line.get_xdata().tolist() == list(range(3, 12))
    figure = overview({"a": one}, from_step=3)
    assert figure.axes[0].get_lines()[0].get_ydata()[0] == pytest.approx(0.5)
    apart = History()
    for step, value in enumerate([0.0, 0.02, 0.3, 0.0, 4.0]):
        apart.append({"step": step, "divergence": value})
    ax = bands({"a": apart}, y="divergence")
    assert ax.get_yscale() == "log" and ax.get_lines()[0].get_xdata().tolist() == [1, 2, 4]
    for wrong in (-1, 0.5):
        with pytest.raises((ValueError, TypeError), match="from_step"):
            bands({"a": one}, from_step=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 4, 5, 9])
@pytest.mark.parametrize("width", [3.3, 6.8])
def test_a_legend_on_the_callers_axes_is_whole_in_two_columns(count: int, width: float) -> None:
    names = [f"strategy {i}, H = 10" for i in range(count)]
    figure, ax = plt.subplots(figsize=(width, 2.6))
    legend = bands({name: history(5) for name in names}, ax=ax).get_legend()
    figure.draw_without_rendering()
    assert legend is not None and [text.get_text().replace("\n", " ") for text in legend.get_texts()] == names
    box, whole = legend.get_window_extent(), figure.bbox
    assert box.x0 >= whole.x0 and box.x1 <= whole.x1 and legend._ncols == (2 if count > 4 else 1)
    assert ax.get_window_extent().height > 0.3 * whole.height
    texts = [text.get_window_extent() for text in legend.get_texts()]
    assert not any(one.overlaps(other) for i, one in enumerate(texts) for other in texts[:i])
    assert bands({name: history(5) for name in names}, legend=False).get_legend() is None


@pytest.mark.parametrize("ends", [(1e6, 1e11), (20, 40), (27, 33), (5, 60), (0.02, 5.0), (900, 20000)])
@pytest.mark.parametrize("size", [(1.2, 1.0), (3.3, 2.4), (6.8, 3.1)])
def test_ticks_of_a_logarithmic_axis_do_not_touch(ends: tuple[float, float], size: tuple[float, float]) -> None:
    figure, ax = plt.subplots(figsize=size)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (ax.xaxis, ax.yaxis):
        plain_ticks(axis)
    sized(ax)
    figure.draw_without_rendering()
    for axis in (ax.xaxis, ax.yaxis):
        shown = [tick.label1 for tick in axis.get_major_ticks() if ends[0] <= tick.get_loc() <= ends[1]]
        boxes = [label.get_window_extent() for label in shown]
        assert boxes and not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


def is_of_the_palette(colour: Any) -> bool:
    """Whether a colour is grey, or one of the palette mixed with white."""
    own = np.array(to_rgb(colour))
    bases = [np.array(to_rgb(base)) for base in COLOURS]
    shares = np.linspace(0, 1, 256)[:, None]
    return bool(np.ptp(own) < 0.01 or any(np.abs(1 - shares * (1 - base) - own).max(1).min() < 0.01 for base in bases))


def test_figures_have_the_colours_of_the_palette() -> None:
    names = ["AllReduce", "mine", "DiLoCo H=5", "DiLoCo H=20", "ring, pairs", "ring, all-gather", "majority vote", "b"]
    runs = {name: [made_run([2.0, 1.5 - i / 20, 1.2], nodes=2, payload=10.0**i)] for i, name in enumerate(names)}
    comparison = comparison_of(1000, **runs)
    law = scaling.fit(
        {"N": [1e5, 1e6, 1e7] * 2, "M": [1] * 3 + [2] * 3, "loss": [3.0, 2, 1, 4, 3, 2]}, "power", bootstrap=0
    )
    drawn = [comparison.plot(), comparison.pareto().plot(), comparison.winners(1.4, compute=1.0).plot(), law.plot()]
    colours = [line.get_color() for ax in drawn for line in ax.get_lines()]
    for ax in drawn:
        for part in ax.collections:
            colours += [*part.get_facecolor(), *part.get_edgecolor()]
            if part.get_cmap() is not None and part.get_array() is not None:
                colours += [part.get_cmap()(0)]
    assert (
        len(colours) > 30
        and [colour for colour in colours if not is_of_the_palette(colour[:3] if len(colour) == 4 else colour)] == []
    )
    assert not is_of_the_palette("tab:red") and not is_of_the_palette("green") and is_of_the_palette("0.5")


def test_the_callers_style_is_left_alone() -> None:
    before = dict(matplotlib.rcParams)
    overview({"a": history(3)}, "title")
    bands({"a": history(3)})
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("silent", [["silent"], [f"a setting that sends nothing, {i}" for i in range(9)]])
def test_nothing_of_a_figure_overlaps(silent: list[str]) -> None:
    runs = {f"a strategy with a long name, {i}": history(12) for i in range(9)}
    figure = overview(runs | {name: history(3, 0, 0) for name in silent}, "title")
    figure.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in figure.axes] + [figure.legends[0].get_window_extent()]
    inside = figure.bbox
    for i, box in enumerate(boxes):
        assert box.x0 >= inside.x0 and box.x1 <= inside.x1 and box.y0 >= inside.y0 and box.y1 <= inside.y1
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])


@pytest.mark.parametrize("legend", [5, 7, 13])  # inside, below, and of families
def test_names_are_drawn_as_they_are(legend: int) -> None:
    """A figure of names that are no mathematics, or hidden from legends, must not fail once the runs are over."""
    names = [r"$\nope$", "$5 or $6", "_own", "50 % {a}^b", "a_b", *map(str, range(legend - 5))]
    runs = {name: history(3) for name in names}
    ax, figure = bands(runs), overview(runs)
    for shown in (figure, ax.figure):
        shown.draw_without_rendering()
    for shown in (ax.get_legend(), figure.legends[0]):
        drawn = [text.get_text() for text in shown.get_texts()]
        assert not any(map(matplotlib.cbook.is_math_text, drawn))
        assert set(names) <= {text.replace(r"\$", "$").strip() for text in drawn}


@pytest.mark.parametrize(("count", "width"), [(2, 7.0), (8, 3.3)])
def test_names_may_be_sentences(count: int, width: float) -> None:
    """They take lines, not the axes' place: matplotlib warns where axes collapse."""
    sentence = f"DiLoCo with H = 10, an outer learning rate of 0.7, and {'more ' * 20}"
    runs = {f"{i}: {sentence}": history(3) for i in range(count)}
    ax, figure = bands(runs), overview(runs, width=width)
    for _ in range(2):  # as a file is written
        figure.draw_without_rendering()
    for shown, axes in ((ax.get_legend(), ax), (figure.legends[0], figure.axes[0])):
        axes.figure.canvas.draw()
        legend, whole = shown.get_window_extent(), axes.figure.bbox
        assert legend.x0 >= whole.x0 - 1 and legend.x1 <= whole.x1 + 1
        assert axes.get_window_extent().width > 0.3 * whole.width
        assert not legend.overlaps(axes.get_window_extent())


@pytest.mark.parametrize(("count", "layout"), [(3, None), (7, "tight"), (7, "constrained")])
def test_the_callers_axes_keep_labels_and_legend_in_a_column(count: int, layout: Any) -> None:
    figure, ax = plt.subplots(figsize=(3.25, 2.4), layout=layout)
    bands({f"DiLoCo {i}, a setting {'of many letters ' * 5 * (i == 1)}": history(3) for i in range(count)}, ax=ax)
    figure.draw_without_rendering()
    for part in (ax.get_legend(), ax.xaxis.label, ax.yaxis.label):
        box = part.get_window_extent()  # type: ignore[union-attr]
        assert min(box.x0, box.y0) > -1 and box.x1 < figure.bbox.x1 + 1 and box.y1 < figure.bbox.y1 + 1
    assert ax.get_window_extent().height > 0.3 * figure.bbox.height
    assert [*figure.get_size_inches()] == [3.25, 2.4]
