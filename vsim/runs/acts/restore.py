"""Give runs that resume, or that fork another run, the state of their checkpoints; `Place` gives forks its weights."""

from __future__ import annotations

from dataclasses import replace

from vsim.arguments import naming
from vsim.runs.acts.moment import Moment
from vsim.runs.resume import resume


class Resume:
    """Restores the runs that have a checkpoint.

    Raises:
        CheckpointError: a checkpoint does not fit its run.
    """

    def __call__(self, moment: Moment) -> None:
        for group in moment.groups:
            for run in group.runs:
                if run.spec.start is not None:
                    with run.fetching(), naming(run.spec.label if group.several else ""):
                        resume(run, run.spec.start)
                    run.spec = replace(run.spec, start=None)  # free the checkpoint's memory
                if not run.starts:
                    run.recording.events_reported = len(run.ledger)
            if len({run.done for run in group.runs}) > 1:
                raise ValueError(f"runs that train together are at different steps: {[r.done for r in group.runs]}")
