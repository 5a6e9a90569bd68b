"""The loggers under the path that users import them from; they live in `vsim.records.loggers`."""

from vsim.records.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger", "WandbLogger"]
