"""What is simulated: K nodes as the rows of one matrix, how they communicate, and what they have sent."""

from vsim.cluster.cluster import Cluster

__all__ = ["Cluster"]
