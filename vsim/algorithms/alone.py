"""Training without communication: the control that every comparison needs."""

from __future__ import annotations

from torch import Tensor

from vsim.core.algorithm import Algorithm
from vsim.core.fields import algorithm


@algorithm
class AloneStrategy(Algorithm):
    """Train every node without communication: the control of a comparison.

        θ_k ← optimizer(θ_k, g_k)

    The global model is node 0's, since the mean of independently trained models is not a trained model.

    Payload: none; with cohorts, every client's weights at the end of a round, since the next cohort starts from the
    first client's weights.
    """

    family = "local steps"
    communicates = False

    def model_weights(self) -> Tensor:
        """Return the shared weights (P,) of node 0."""
        collectives = self.cluster.collectives
        with collectives.unbilled():
            return collectives.broadcast(self.cluster.weights)

    def has_global_model(self, mean: Tensor | None = None) -> bool:
        """Return False: no server knows node 0's weights."""
        return False
