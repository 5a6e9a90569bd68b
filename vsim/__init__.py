"""vsim: what would this training run have done on K machines, and how many bytes would it have sent?"""

from vsim.checkpoint.files import Checkpoint, CheckpointError, latest_checkpoint, load_checkpoint
from vsim.cluster.ledger import Event, Ledger
from vsim.compare import ComparedRun, Comparison, compare
from vsim.compat import exogym
from vsim.compat.diloco_sim import DilocoSimulator
from vsim.process.difference import Difference
from vsim.records.history import History
from vsim.records.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from vsim.trainer import LocalTrainer, Trainer
from vsim.verify import VerifyReport, verify
from vsim.version import __version__

exogym.register()
del exogym

__all__ = [
    "CSVLogger",
    "Checkpoint",
    "CheckpointError",
    "ComparedRun",
    "Comparison",
    "Difference",
    "DilocoSimulator",
    "Event",
    "History",
    "Ledger",
    "LocalTrainer",
    "TensorBoardLogger",
    "Trainer",
    "VerifyReport",
    "WandbLogger",
    "__version__",
    "compare",
    "latest_checkpoint",
    "load_checkpoint",
    "verify",
]
