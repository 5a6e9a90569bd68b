"""Which error ends what: one run, all runs that share what has failed, or all training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from vsim.cluster.randomness import fingerprints
from vsim.cluster.state import CheckpointError
from vsim.core.run import Diverged, Run

DRAW_FROM_NODES = "draw from cluster.generator in a strategy, or by torch's functions in a model"


class Requests(Protocol):
    """Whether the user has asked to stop after the current step; see `vsim.runs.interrupt`."""

    requested: bool
    insisted: bool

    def explains(self, error: Exception) -> bool:
        """Return whether an error may come of the request, so that it must not become the outcome of a run."""
        ...


class Sharing(Protocol):
    """What is asked here of a `Group`, which documents it."""

    requests: Requests
    isolates_failures: bool
    raises_first: bool
    several: bool
    apart: str
    rng_check_steps: int


def leave(group: Sharing, run: Run, error: Exception) -> None:
    """End a run that has failed, so that the others continue; or raise the error.

    | the error | group.isolates_failures | otherwise |
    | --- | --- | --- |
    | may come of a request to stop | the run is cut: the others complete the step, and all can be resumed; raised after a second request, and with several processes | raised |
    | losses or weights that are not finite | the run ends, at the same time in all processes | raised |
    | any other, in several processes | raised, as the other processes may not have it | raised |
    | any other, in the first step; state that cannot be saved | raised if `group.raises_first` | raised |
    | any other, later | the run ends | raised |

    `group.raises_first` holds while no run has made progress that would be lost.
    """  # noqa: E501
    if group.requests.explains(error):
        if group.requests.insisted or not (group.isolates_failures and run.is_alone):
            raise error
        warnings.warn(
            f"{run.spec.label}: interrupted {_when(run)}: {error!r}",
            UserWarning,
            stacklevel=2,
        )
        run.cut = True
        return
    nothing_lost = group.raises_first and (run.done == 0 or isinstance(error, CheckpointError))
    if not group.isolates_failures or not (isinstance(error, Diverged) or (run.is_alone and not nothing_lost)):
        raise error
    run.error = error


def _when(run: Run) -> str:
    if run.done == run.cluster.step:
        return f"after step {run.done}, which is not recorded as a whole"
    return f"in step {run.cluster.step}, which was not completed"


def all_leave(group: Sharing, runs: Sequence[Run], error: Exception) -> None:
    """End these runs, which share what has failed: the data or the model."""
    for run in runs:
        leave(group, run, error)


class Guard(AbstractContextManager[None]):
    """A context for the code of one run, in which an error ends that run only; see `leave`."""

    def __init__(self, group: Sharing, run: Run) -> None:
        self.group, self.run = group, run

    def __enter__(self) -> None:
        self.before = states_for_trial(self.group, self.run)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None and self.before:
            who = f"{self.run.spec.label}: its strategy or a callback"
            check_draws(self.group, self.before, self.run, who)
        if not isinstance(error, Exception) or not self.group.isolates_failures:
            return False
        leave(self.group, self.run, error)
        return True


# Draws from global random generators, which runs that train together would share --------------------------------------


def states_for_trial(group: Sharing, run: Run) -> dict[str, bytes]:
    """Return the states of the global random generators, if `run` is one of several and in its first steps."""
    return fingerprints(run.cluster.weights.device) if group.rng_check_steps > 0 and group.several else {}


def check_draws(group: Sharing, before: Mapping[str, bytes], run: Run, who: str) -> None:
    """Raise a ValueError if `who` has drawn from global random generators since `states_for_trial` gave `before`.

    The numbers of one run would depend on the others.
    """
    now = states_for_trial(group, run) if before else {}
    if found := [name for name, state in before.items() if state != now[name]]:
        raise ValueError(
            f"{who} draws from the global random generators ({', '.join(found)}), which runs that train together "
            f"would share: {group.apart}{DRAW_FROM_NODES}"
        )
