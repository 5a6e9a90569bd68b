"""The import path of loggers for users; the loggers are defined in `vsim.history.loggers`."""

from vsim.history.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger", "WandbLogger"]
