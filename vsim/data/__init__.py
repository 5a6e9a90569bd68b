"""Data: what every node sees in which order, stacked batches, and datasets that need no download."""

from vsim.data.batches import Batches
from vsim.data.order import Order, epoch_indices
from vsim.data.partition import Partition, partition
from vsim.data.sources import TextDataset, Vocabulary, digits, docs_text, mnist, text_file

__all__ = [
    "Batches",
    "Order",
    "Partition",
    "TextDataset",
    "Vocabulary",
    "digits",
    "docs_text",
    "epoch_indices",
    "mnist",
    "partition",
    "text_file",
]
