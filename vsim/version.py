"""The version of vsim, which records of runs name."""

__version__ = "0.2.0"
