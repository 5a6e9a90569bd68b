"""Optional packages: imported when needed, with an error that says how to install them."""

from __future__ import annotations

import importlib
import random
from typing import Any


def extra(module: str, user: str, package: str, name: str) -> Any:
    """Return a module of an optional package. The import leaves the state of Python's random generator unchanged.

    Args:
        module: name of the module. user: the caller that needs the module, for the message.
        package: name of the package for pip. name: the extra of vsim that installs the package.

    Raises:
        ImportError: the package is not installed; the message says how to install it.
    """
    state = random.getstate()  # scikit-learn imports rich, if installed, which draws a number
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{user} needs {package}: pip install "vsim-torch[{name}]"') from error
    finally:
        random.setstate(state)
