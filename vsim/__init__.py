"""vsim: what would this training run have done on K machines, and how many bytes would it have sent?"""

from vsim.compare import ComparedRun, Comparison, compare
from vsim.history import History
from vsim.ledger import Event, Ledger
from vsim.trainer import LocalTrainer, Trainer

__version__ = "0.1.0"

__all__ = [
    "ComparedRun",
    "Comparison",
    "Event",
    "History",
    "Ledger",
    "LocalTrainer",
    "Trainer",
    "__version__",
    "compare",
]
