"""Networks and time: links, prices of collectives, compute times, and the clock of a run."""

from vsim.network.compute import Compute
from vsim.network.links import Network
from vsim.network.pipeline import Pipeline
from vsim.network.timeline import Timeline, timeline

__all__ = ["Compute", "Network", "Pipeline", "Timeline", "timeline"]
