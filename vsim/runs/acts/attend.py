"""Between steps, let nodes leave and join, deal rows to the clients of a new round, and drop runs that have ended."""

from __future__ import annotations

from collections.abc import Sequence

from vsim.arguments import naming
from vsim.cluster.plan import Nodes
from vsim.core.group import Group
from vsim.runs.acts.moment import Moment
from vsim.runs.choosing import choose
from vsim.runs.feeding import feed
from vsim.runs.moving import arrange, join, kept_view, move_to
from vsim.runs.rounds import begin_round, end_round
from vsim.runs.tracked import TrackedRun

# A compiled executor is compiled again for another number of rows. Therefore, with `compile`, rows of ended runs are
# still computed until they reach this share of the present rows.
_SHARE = 0.2


class Attend:
    """Switches every run to its plan's nodes in the next step; nothing after the last step."""

    def __call__(self, moment: Moment) -> None:
        runs = [run for group in moment.groups for run in group.runs if run.trains]
        if running := [run.done for run in runs if run.is_running]:
            _attend(moment.groups, runs, min(running) + 1)


def _attend(groups: Sequence[Group[TrackedRun]], runs: Sequence[TrackedRun], step: int) -> None:
    """Switch every run to its plan's nodes from step `step` on, and drop the rows of runs that have ended.

    Staying nodes keep their state. A joining node copies its peer (see `Plan.peer`), and draws from its own random
    stream. In a round of clients, every row starts from the global weights.

    What nodes send in between, in this order, and where it counts (t is the step before, t + 1 is `step`):

    | | event of step | in the row of step |
    | --- | --- | --- |
    | clients of the old round push (`end_round`) | t | t + 1, as row t is recorded |
    | candidates pull and report losses, clients of the new round pull (`begin_round`) | t + 1 | t + 1 |
    | joining nodes copy their peer (`join`) | t + 1 | t + 1 |
    | what the strategy sends when nodes change (`change_nodes`) | t + 1 | t + 1 |

    Raises:
        CheckpointError: the model or a strategy has state that cannot move with the rows.
    """
    for group in groups:
        beginning = [run for run in group.runs if run.begins_segment(step)]
        if beginning or not all(run.is_running for run in group.present):
            _change_rows(group, beginning, step)
    for run in runs:
        if run.begins_segment(step):
            _tell_strategy(run, step)


def _change_rows(group: Group[TrackedRun], beginning: Sequence[TrackedRun], step: int) -> None:
    """Give a group the rows of `step`, in which a segment of these runs' plans begins."""
    # 1. A round ends with its rows where they are; only then do rows move, which may be fewer or more.
    moving, candidates = {}, dict[TrackedRun, Nodes]()
    for run in beginning:
        with naming(run.spec.label if group.several else ""):
            if run.presence.clients is not None:
                end_round(run)
                candidates[run] = choose(run, step)
            if _changes(run, step):
                moving[run] = move_to(run, step)
    if is_new := bool(moving) or _are_to_go(group):
        arrange(group, step, moving)
    # 2. From here on, what nodes send is billed at the start of the coming step.
    for run in beginning:
        run.ledger.position.begin(step, "start")
        if run.presence.clients is not None:
            begin_round(run, step, candidates[run])
    # 3. Fetch the batches of the nodes that are present now. A new run's first nodes have theirs since the setup.
    if is_new or any(candidates[run] or not run.starts for run in candidates):
        feed(group)


def _tell_strategy(run: TrackedRun, step: int) -> None:
    """Bill the copies of joining nodes, and tell the run's strategy and ledger which nodes take part from `step` on."""
    if not run.starts and run.presence.clients is None:
        join(run, step)
    before, now = (run.plan.segment(at) for at in (max(1, step - 1), step))
    if run.starts:  # the setup gave all nodes the same state, so that no node has to send it
        with run.collectives.unbilled():
            run.strategy.change_nodes(len(now.nodes) < run.spec.num_nodes)
    else:
        run.strategy.change_nodes(run.presence.clients is not None or before.nodes != now.nodes)
    run.ledger.attend(now)


def _are_to_go(group: Group[TrackedRun]) -> bool:
    """Return whether to stop computing the rows of runs that have ended."""
    left = [len(run.nodes) for run in group.present if not run.is_running]
    if len(left) in (0, len(group.present)):
        return False
    run, computed = group.runs[0], sum(len(run.nodes) for run in group.present)
    bound = (run.spec.dataloader_kwargs or {}).get("num_workers") or run.objective.unsaved()
    bound = bound or any(map(kept_view, group.runs))
    return not bound and (not run.spec.compile or sum(left) >= _SHARE * computed)


def _changes(run: TrackedRun, step: int) -> bool:
    """Return whether the segment from `step` on needs other rows than the segment before."""
    now = run.plan.segment(step).nodes
    if run.presence.clients is None:
        return now != run.cluster.active
    return len(now) != run.cluster.num_nodes
