"""Restore a run from its checkpoint."""

from __future__ import annotations

import warnings

import torch

from vsim.checkpoint.files import Checkpoint
from vsim.checkpoint.tree import Filler, cut, own_of
from vsim.cluster.randomness import set_global_states
from vsim.cluster.state import CheckpointError
from vsim.history.agreement import CHANGED, HORIZON, VERSIONS, differences
from vsim.training.fork import continue_as_fork
from vsim.training.lasting import restore
from vsim.training.row_state import fill_rows
from vsim.training.saving import kept_settings
from vsim.training.tracked import TrackedRun


def resume(run: TrackedRun, checkpoint: Checkpoint) -> None:
    """Restore the checkpoint's state in a newly set up run, including the global random generators.

    Raises:
        CheckpointError: the checkpoint is from another run (the message names the differences), or from a step beyond
            this run's last step.
    """
    if not checkpoint.forks:
        _check_same(run, checkpoint)
    if checkpoint.step > run.max_steps or (checkpoint.forks and checkpoint.step == run.max_steps):
        raise CheckpointError(
            f"the checkpoint is at step {checkpoint.step}, and max_steps={run.max_steps} is not beyond it; give a "
            "larger max_steps"
        )
    last = checkpoint.history.last
    run.starts = checkpoint.forks
    run.ledger.position.begin(checkpoint.step, "end")
    run.examples = int(last("examples"))
    run.tokens = int(tokens) if (tokens := last("tokens")) == tokens else 0  # NaN: no tokens
    try:
        if checkpoint.forks:
            continue_as_fork(run, checkpoint)
            return
        run.seconds, run.measuring.seconds = last("seconds"), last("validation_seconds")
        _restore(run, checkpoint)
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"the state in the checkpoint at step {checkpoint.step} cannot be restored: {error!r}"
        ) from error
    run.ledger.continue_from(checkpoint.ledger)


def _restore(run: TrackedRun, checkpoint: Checkpoint) -> None:
    cluster, rows, held = run.cluster, [*run.cluster.replicas.nodes], checkpoint.held
    filler = Filler(cluster.collectives, cluster.weights.device)
    fill_rows(run, {name: cut(own, rows, held) for name, own in checkpoint.stacked.items()}, filler)
    filled = {
        name: filler.fill(own_of(checkpoint.shared[name], rows, held), live, name)
        for own in run.keeping.lasting
        for name, live in own.shared().items()
        if name in checkpoint.shared or not own.may_be_new
    }
    filler.check()
    restore(run, filled)
    if held == [len(nodes) for nodes in cluster.collectives.ranges]:  # every process holds as many nodes as before
        states = own_of(checkpoint.shared["process"], [*run.nodes], held)
        set_global_states(
            Filler(cluster.collectives, torch.device("cpu")).fill(states, None, "process"), cluster.weights.device
        )


def _check_same(run: TrackedRun, checkpoint: Checkpoint) -> None:
    saved, given = dict(checkpoint.settings), dict(kept_settings(run))
    (before, now), versions = ([side.pop(name, None) for side in (saved, given)] for name in (HORIZON, VERSIONS))
    changes = list(differences(saved, given, CHANGED))
    if before != now:
        changes.append(
            f"the learning-rate schedule was over {before} steps and is over {now} (max_steps of the run, or the "
            f"strategy's; with max_steps={before} given to the strategy it stays as it was)"
        )
    if changes:
        where = f"load_checkpoint({str(checkpoint.path)!r})" if checkpoint.path else "the checkpoint"
        raise CheckpointError(
            f"the checkpoint at step {checkpoint.step} is of another run: {'; '.join(changes)}. To start from its "
            f"weights all the same, fork: resume={where}.fork()"
        )
    if versions[0] != versions[1] and run.is_first:
        warnings.warn(f"saved with {versions[0]}, resumed with {versions[1]}: bits may differ", UserWarning, 2)
