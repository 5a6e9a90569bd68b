"""How the documentation is built: `sphinx-build -W -b html docs docs/_build`. Nothing is fetched, nor by readers."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "kernels"), str(HERE / "extensions")]

import vsim  # noqa: E402

project = "vsim"
author = "The vsim authors"
version = release = vsim.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "docstrings",
    "gallery",
    "llms",
    "mathml",
    "printed",
]
exclude_patterns = ["_build", "paper"]  # the paper has the form of its journal
templates_path = ["_templates"]
autosummary_ignore_module_all = False

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["width.css"]
html_logo = html_favicon = "_static/logo.svg"
html_title = f"vsim {version}"
html_show_copyright = False
html_show_sourcelink = False
html_math_renderer = "mathml"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 90
smartquotes_action = "D"  # dashes only: quotes in docstrings are code
default_role = "code"  # docstrings write `code` with single backticks
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [
    (title, "params_style")
    for title in (
        *("Columns", "Attributes during a run", "Attributes after or during a fit"),
        *(
            "Training",
            "Validation",
            "Cluster",
            "Computing",
            "Processes",
            "Saving",
            "Record and progress",
            "Your own code",
        ),  # of fit
    )
]
