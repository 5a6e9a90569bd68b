"""What is asked of a comparison: arguments that several questions take, each with one meaning and one check.

A `loss` and `stays` are checked here; a network and compute, given or the comparison's, by `Runs.prices`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vsim.analysis.compared import Runs
from vsim.analysis.spent import AnyCompute, AnyNetwork, Priced
from vsim.arguments import real_number, true_or_false


def target(loss: float, stays: bool) -> float:
    """Check the loss that runs must reach: of validation or, without it, of training; see `Runs.loss_column`.

    Args:
        stays: whether the loss counts as reached only if no later measurement is above it.
    """
    true_or_false("stays", stays)
    return real_number("loss", loss)


@dataclass(frozen=True)
class Asked:
    """What was asked of a table, which says which columns it has.

    Attributes:
        runs: the comparison. loss: the target of the columns to a loss. stays: see `Comparison.steps_to`.
        priced: the network and compute from which hours are derived.
    """

    runs: Runs
    loss: float | None = None
    stays: bool = False
    priced: Priced = None

    @classmethod
    def of(
        cls,
        runs: Runs,
        loss: float | None = None,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
        *,
        stays: bool = False,
    ) -> Asked:
        """Check the arguments of a question.

        Args:
            loss, stays: see `target`; None: no loss.
            network, compute: what time and cost are derived from, see `Runs.prices`.

        Raises:
            TypeError: an argument has another type, `stays` has no effect, or one of network and compute is missing.
            ValueError: an argument is out of range.
        """
        if loss is not None:
            loss = target(loss, stays)
        elif true_or_false("stays", stays):
            raise TypeError("stays=True has no effect without loss=")
        return cls(runs, loss, stays, runs.pricing(network, compute))

    @cached_property
    def is_validated(self) -> bool:
        """Whether the loss that is compared is of validation."""
        return self.runs.loss_column == "global_loss"

    @cached_property
    def of_clients(self) -> bool:
        """Whether cohorts of a larger population trained."""
        return self.runs.of_clients

    @cached_property
    def on_clients(self) -> frozenset[str]:
        """What some run measured on each client's own data: "losses", "accuracies", "attacked"."""
        return frozenset().union(*(history.measured_on_clients for history in self.runs.all_histories))
