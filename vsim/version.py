"""The version of vsim, which a run's record names."""

__version__ = "0.1.0"
