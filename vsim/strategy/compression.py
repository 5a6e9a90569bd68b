"""The import path of compressors for users; they are defined in `vsim.algorithms.compression`."""

from vsim.algorithms.compression import *  # noqa: F403
from vsim.algorithms.compression import __all__ as __all__
