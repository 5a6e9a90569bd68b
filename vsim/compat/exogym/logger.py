"""EXO Gym's loggers."""

from vsim.logger import CSVLogger, Logger, WandbLogger

__all__ = ["CSVLogger", "Logger", "WandbLogger"]
