"""The import path of loggers for users; the loggers are defined in `vsim.records.loggers`."""

from vsim.records.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger", "WandbLogger"]
