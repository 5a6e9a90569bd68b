"""vsim: what would this training run have done on K machines, and how many bytes would it have sent?"""

from vsim.compare import ComparedRun, Comparison, compare
from vsim.difference import Difference
from vsim.history import History
from vsim.ledger import Event, Ledger
from vsim.trainer import LocalTrainer, Trainer
from vsim.verify import VerifyReport, verify

__version__ = "0.1.0"

__all__ = [
    "ComparedRun",
    "Comparison",
    "Difference",
    "Event",
    "History",
    "Ledger",
    "LocalTrainer",
    "Trainer",
    "VerifyReport",
    "__version__",
    "compare",
    "verify",
]
