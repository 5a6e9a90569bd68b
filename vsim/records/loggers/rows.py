"""The rows that loggers get: column → number, of a training step and of a validation."""

from __future__ import annotations

import math
from collections.abc import Mapping

from vsim.records.history import COLUMNS

Row = Mapping[str, float]
# Columns of History, in this order.
_TRAIN_COLUMNS = ("payload_bytes", "wire_bytes", "seconds", "memory_bytes", "divergence", "correlation")
_VALIDATION_COLUMNS = ("average_loss", "node_loss_min", "node_loss_max", "node_loss_std", "payload_bytes", "wire_bytes")
_ACCURACIES = ("local_accuracy", "global_accuracy")


def train_row(row: Row, before: Row) -> dict[str, float]:
    """Return the row of a training step.

    Args:
        row: the history's row of the step. before: that of the step that was logged before it.

    Returns:
        step, examples_trained (by all nodes), train_loss (the mean over the nodes' batches of this step),
        train_perplexity = exp(train_loss), lr, payload_bytes and wire_bytes (so far, per node), seconds (of training so
        far), memory_bytes, divergence and correlation (NaN where not measured), examples_per_second and
        tokens_per_second (of all nodes together, over the training time since the step logged before; tokens are NaN
        where batches do not hold token ids, see `vsim.data.batches.sizes_of`).
    """
    elapsed = row["seconds"] - before["seconds"]
    tokens_before = before.get("tokens", 0.0) if before["step"] else 0.0

    def per_second(count: float) -> float:
        return count / elapsed if elapsed > 0 else math.nan

    return {
        "step": row["step"],
        "examples_trained": row["examples"],
        "train_loss": row["train_loss"],
        "train_perplexity": perplexity(row["train_loss"]),
        "lr": row["lr"],
        **{name: row.get(name, math.nan) for name in _TRAIN_COLUMNS},
        "examples_per_second": per_second(row["examples"] - before["examples"]),
        "tokens_per_second": per_second(row.get("tokens", math.nan) - tokens_before),
    }


def validation_row(row: Row) -> dict[str, float]:
    """Return the row of a validation; see `History` for the columns.

    step, local_loss, local_perplexity, global_loss, global_perplexity, local_accuracy and global_accuracy where they
    are known, examples_trained, average_loss, node_loss_min, node_loss_max, node_loss_std, payload_bytes, wire_bytes,
    and the metrics of `fit`.
    """
    return {
        "step": row["step"],
        "local_loss": row["local_loss"],
        "local_perplexity": perplexity(row["local_loss"]),
        "global_loss": row["global_loss"],
        "global_perplexity": perplexity(row["global_loss"]),
        **{name: row[name] for name in _ACCURACIES if name in row},
        "examples_trained": row["examples"],
        **{name: row[name] for name in _VALIDATION_COLUMNS},
        **{name: value for name, value in row.items() if name not in COLUMNS},
    }


def perplexity(loss: float) -> float:
    """Return exp(loss), infinity where that is too large for a float.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf


def x_of(row: Row, axis: str) -> int:
    """Return where a row lies on the axis "step" or "examples"."""
    return int(row["examples_trained" if axis == "examples" else "step"])
