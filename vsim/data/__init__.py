"""Data: the order of examples on every node, stacked batches, partitions, and datasets that need no download."""

from vsim.data.batches import Batches
from vsim.data.federated import fcube, synthetic_federated
from vsim.data.order import Order, epoch_indices
from vsim.data.partition import Partition, partition
from vsim.data.sources import TextDataset, Vocabulary, digits, docs_text, fashion_mnist, mnist, mnist1d, text_file

__all__ = [
    "Batches",
    "Order",
    "Partition",
    "TextDataset",
    "Vocabulary",
    "digits",
    "docs_text",
    "epoch_indices",
    "fashion_mnist",
    "fcube",
    "mnist",
    "mnist1d",
    "partition",
    "synthetic_federated",
    "text_file",
]
