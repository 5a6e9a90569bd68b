"""The version of vsim, saved in records of runs."""

__version__ = "0.2.0"
