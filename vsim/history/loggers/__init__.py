"""Loggers: a run's record in files, on Weights & Biases, in TensorBoard, or where a user's own logger puts it.

A logger is any object with the four methods of `Logger`. `RunLog` calls the loggers of a run. It decides which rows are
logged, and ensures that a logger neither changes training nor ends the run. Users import from `vsim.logger`, as from
EXO Gym.
"""

from vsim.history.loggers.base import Logger, check_run_name, date_and_time, folder_name
from vsim.history.loggers.csv import CSVLogger
from vsim.history.loggers.run_log import RunLog, for_one_run, run_loggers
from vsim.history.loggers.tensorboard import TensorBoardLogger
from vsim.history.loggers.wandb import WandbLogger

__all__ = [
    "CSVLogger",
    "Logger",
    "RunLog",
    "TensorBoardLogger",
    "WandbLogger",
    "check_run_name",
    "date_and_time",
    "folder_name",
    "for_one_run",
    "run_loggers",
]
