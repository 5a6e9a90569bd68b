"""Loggers: a run's record in files, on Weights & Biases, in TensorBoard, or where a user's own logger puts it.

A logger is any object with the four methods of `Logger`. `RunLog` calls the loggers of a run. It decides which rows are
logged, and ensures that a logger neither changes training nor ends the run. Users import from `vsim.logger`, as from
EXO Gym.
"""

from vsim.records.loggers.base import Logger, check_run_name, date_and_time, folder_name
from vsim.records.loggers.csv import CSVLogger
from vsim.records.loggers.run_log import RunLog, for_one_run, run_loggers
from vsim.records.loggers.tensorboard import TensorBoardLogger
from vsim.records.loggers.wandb import WandbLogger

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
