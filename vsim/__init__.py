"""vsim: simulate a training run on K machines, and find out how many bytes and hours it would take."""

import sys

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) - 1 :][:2] == ["-m", "vsim"]:
    # `python -m vsim` imports this package first; help and errors in options end it here, before PyTorch is loaded.
    import vsim_cli

    if isinstance(status := vsim_cli.parsed(sys.argv[1:]), int):
        sys.exit(status)

from vsim import saved, scaling
from vsim.analysis.compared import ComparedRun
from vsim.analysis.comparison import Comparison
from vsim.analysis.search import Search
from vsim.analysis.swept import Sweep
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
    Partial,
    Sample,
    Schedule,
    Trace,
)
from vsim.compat.diloco_sim import DilocoSimulator
from vsim.core.attack import Attack
from vsim.from_trainer import from_trainer
from vsim.history.history import History
from vsim.history.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from vsim.network import Compute, Network, Pipeline, Timeline, timeline
from vsim.price import price, required_bandwidth
from vsim.processes.bitwise import Difference
from vsim.runs.callbacks import Callback, EarlyStopping, KeepBest
from vsim.scale.ladder import Ladder, ladder, load_ladder
from vsim.search.compare import compare
from vsim.search.grid import grid
from vsim.search.sweep import sweep
from vsim.search.tune import tune
from vsim.trainer import LocalTrainer, Trainer
from vsim.verify import VerifyReport, verify
from vsim.version import __version__

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
    "Partial",
    "Pipeline",
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
