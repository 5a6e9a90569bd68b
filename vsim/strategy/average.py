"""The import path of averages for users; they are defined in `vsim.core.average`."""

from vsim.core.average import *  # noqa: F403
from vsim.core.average import __all__ as __all__
