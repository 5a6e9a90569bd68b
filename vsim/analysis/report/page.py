"""A comparison as one HTML file, which needs no network, no server and no Python."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from vsim.analysis.cache import Cache
from vsim.analysis.compared import Runs
from vsim.analysis.report.data import content
from vsim.analysis.spent import AnyCompute, AnyNetwork
from vsim.arguments import a_path
from vsim.version import __version__
from vsim.writing import replacing

# The parts of the script, in their order.
_PARTS = ("numbers", "prices", "drawing", "curves", "map", "front", "nodes", "settings", "table", "controls", "page")
_SCRIPT = [f"script/{name}.js" for name in _PARTS]
_HEIGHT = 900  # of the frame in a notebook, in pixels


class Report:
    """The page of one or several comparisons, which a notebook displays.

    Attributes:
        html: the whole page.
    """

    def __init__(self, html: str) -> None:
        self.html = html

    def save(self, path: str | Path) -> Path:
        """Write the page to a file; return its path.

        Raises:
            ValueError: the path is a folder, or its folder does not exist.
        """
        path = a_path("path", path)
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"path must name a file in a folder that exists, got {str(path)!r}")
        with replacing(path) as part:
            part.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        # The frame is a separate origin, so that the page cannot read or change the notebook.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-downloads" title="report of a '
            f'comparison" width="100%" height="{_HEIGHT}" style="border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Report({len(self.html) / 1e6:.2f} MB of HTML; save(path) writes it)"


def report(
    comparisons: Mapping[str, Runs],
    network: AnyNetwork = None,
    compute: AnyCompute = None,
    title: str | None = None,
    section: tuple[str, str] | None = None,
) -> Report:
    """Return the page of comparisons or sweeps; with several, a list on the page selects one.

    Args:
        comparisons: name on the page → comparison.
        network, compute: initial values of the sliders; default: each comparison's. Without them, the page has no hours
            until a slider moves.
        title: the title of the page; default: what was trained or, with several comparisons, their names.
        section: heading and HTML of a section above all others; its images must be data URLs.

    Raises:
        TypeError: the title is not text.
        ValueError: there is no comparison, or one without a run; the network has another number of nodes.
    """
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title must be a text, got {title!r}")
    if len(comparisons) == 1:  # its name, such as that of a folder, tells it from no other
        ((name, only),) = comparisons.items()
        title = title or only.trained or name
        comparisons = {title: only}
    title = title or ", ".join(comparisons)
    data = data_of(comparisons, network, compute)
    return _page(title, data, watch="", server="'none'", section=section)


def served(title: str, every: float) -> Report:
    """Return a page without data, which asks its server for data every `every` seconds."""
    return _page(title, "[]", watch=f' data-watch="{every:g}"', server="'self'")


def data_of(
    comparisons: Mapping[str, Runs],
    network: AnyNetwork = None,
    compute: AnyCompute = None,
    cache: Cache | None = None,
) -> str:
    """Return the data of the page of comparisons as JSON; see `report`."""
    if not comparisons:
        raise ValueError("there is no comparison to report")
    pages = [{"name": name, **content(one, network, compute, cache)} for name, one in comparisons.items()]
    # "<" could end the script that holds the data; json escapes everything that is not ASCII.
    return json.dumps(pages, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _page(title: str, data: str, watch: str, server: str, section: tuple[str, str] | None = None) -> Report:
    # One function, so that nothing of the page's is seen from outside.
    style, script = _part("page.css"), f'"use strict";\n(() => {{\n{"".join(map(_part, _SCRIPT))}}})();\n'
    parts = {
        "title": html.escape(title),
        "version": html.escape(__version__),
        "policy": _policy(style, script, server),
        "watch": watch,
        "style": style,
        "script": script,
        "data": data,
        "section": _section(*section) if section else "",
    }
    return Report(re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html")))


def _section(heading: str, content: str) -> str:
    return (
        '    <section aria-labelledby="more-title">\n'
        f'      <h2 id="more-title">{html.escape(heading)}</h2>\n      <div class="extra">{content}</div>\n'
        "    </section>"
    )


def _policy(style: str, script: str, server: str) -> str:
    """Return the content security policy: only this script may run, and only data from the server may load.

    Images may be data URLs, which are part of the page.
    """
    hashes = [base64.b64encode(hashlib.sha256(own.encode()).digest()).decode() for own in (style, script)]
    rules = (
        "default-src 'none'",
        "img-src data:",
        f"style-src 'sha256-{hashes[0]}'",
        f"script-src 'sha256-{hashes[1]}'",
    )
    return "; ".join([*rules, f"connect-src {server}", "base-uri 'none'", "form-action 'none'"])


@cache
def _part(name: str) -> str:
    return files("vsim.analysis.report").joinpath(name).read_text(encoding="utf-8")
