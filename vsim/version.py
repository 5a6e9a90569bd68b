"""The version of vsim, saved in records of runs."""

__version__ = "0.3.0.dev0"  # of the release that the changelog announces
