"""The simulated cluster: K nodes as the rows of one matrix, their communication, and its ledger."""

from vsim.cluster.cluster import Cluster

__all__ = ["Cluster"]
