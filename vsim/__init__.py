"""vsim: simulate a training run on K machines, and find out how many bytes and hours it would take."""

import sys

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) - 1 :][:2] == ["-m", "vsim"]:
    # `python -m vsim` imports this package first; help and errors in options end it here, before PyTorch is loaded.
    import vsim_cli

    if isinstance(status := vsim_cli.parsed(sys.argv[1:]), int):
        sys.exit(status)

from vsim import saved, scaling
from vsim.checkpoint.files import Checkpoint, CheckpointError, latest_checkpoint, load_checkpoint
from vsim.cluster.ledger import Event, Ledger
from vsim.cluster.participation import (
    Availability,
    ByLabel,
    DayNight,
    Deadline,
    Dropout,
    DropSlowest,
    OverCommit,
    Sample,
    Schedule,
    Trace,
)
from vsim.compare import compare
from vsim.compat import exogym
from vsim.compat.diloco_sim import DilocoSimulator
from vsim.from_trainer import from_trainer
from vsim.grid import grid
from vsim.ladder import Ladder, ladder, load_ladder
from vsim.network import Compute, Network, Timeline, timeline
from vsim.price import price, required_bandwidth
from vsim.process.bitwise import Difference
from vsim.records.compared import ComparedRun
from vsim.records.comparison import Comparison
from vsim.records.history import History
from vsim.records.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from vsim.records.search import Search
from vsim.records.swept import Sweep
from vsim.strategy.attack import Attack
from vsim.sweep import sweep
from vsim.trainer import LocalTrainer, Trainer
from vsim.training.callbacks import Callback, EarlyStopping, KeepBest
from vsim.tune import tune
from vsim.verify import VerifyReport, verify
from vsim.version import __version__

exogym.register()
del exogym

__all__ = [
    "Attack",
    "Availability",
    "ByLabel",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "ComparedRun",
    "Comparison",
    "Compute",
    "DayNight",
    "Deadline",
    "Difference",
    "DilocoSimulator",
    "DropSlowest",
    "Dropout",
    "EarlyStopping",
    "Event",
    "History",
    "KeepBest",
    "Ladder",
    "Ledger",
    "LocalTrainer",
    "Network",
    "OverCommit",
    "Sample",
    "Schedule",
    "Search",
    "Sweep",
    "TensorBoardLogger",
    "Timeline",
    "Trace",
    "Trainer",
    "VerifyReport",
    "WandbLogger",
    "__version__",
    "compare",
    "from_trainer",
    "grid",
    "ladder",
    "latest_checkpoint",
    "load_checkpoint",
    "load_ladder",
    "price",
    "required_bandwidth",
    "saved",
    "scaling",
    "sweep",
    "timeline",
    "tune",
    "verify",
]
