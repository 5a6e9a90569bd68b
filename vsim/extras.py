"""Packages that vsim can do without: imported where they are needed, with a word on how to get them."""

from __future__ import annotations

import importlib
import random
from typing import Any


def extra(module: str, user: str, package: str, name: str) -> Any:
    """Return a module of an optional package. Python's generator is left as it was by what the import draws.

    Args:
        module: as Python imports it. user: what needs it, for the message.
        package: as pip knows it. name: the extra of vsim that installs it.

    Raises:
        ImportError: the package is not installed; the message says how to get it.
    """
    state = random.getstate()  # scikit-learn imports rich, where it is installed, which draws a number
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{user} needs {package}: pip install "vsim[{name}]"') from error
    finally:
        random.setstate(state)
