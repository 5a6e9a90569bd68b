"""Measure runs: on the validation data, how far their replicas are apart, and at the end on clients' and test data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from vsim.core.failing import Guard, all_leave, check_draws, states_for_trial
from vsim.core.group import Group
from vsim.runs.acts.moment import Moment
from vsim.runs.evaluate import validate
from vsim.runs.final import measured_on
from vsim.runs.spread import replica_spread
from vsim.runs.tracked import TrackedRun


class Validate:
    """Writes columns of the runs that are due, and ends the steps' time before that.

    Args:
        again: measure only the runs that a callback has stopped in this step, so that their last row has a validation,
            and, as in every last row, its standard error.
    """

    def __init__(self, again: bool = False) -> None:
        self.again = again

    def __call__(self, moment: Moment) -> None:
        runs = moment.training
        if self.again:
            runs = [run for run in moment.over if run.trains and moment.number < moment.reports[run].max_steps]
        if any(run.is_over or run.validation_is_due for run in runs):
            for group, own in moment.by_group(runs):
                self._measure(moment, group, own, [run for run in own if run.validation_is_due])
        for run in runs:
            if run.spread_is_due:
                with run.cluster.collectives.unbilled():
                    weights = run.cluster.collectives.all_gather(run.cluster.weights)
                moment.columns.setdefault(run, {}).update(replica_spread(weights))

    def _measure(
        self, moment: Moment, group: Group[TrackedRun], runs: Sequence[TrackedRun], due: Sequence[TrackedRun]
    ) -> None:
        group.settle(runs)
        started = time.perf_counter()
        for run in due:
            with Guard(group, run), torch.no_grad(), run.strategy.evaluation():
                run.measuring.weights = run.evaluated_weights()
        own = [run for run in due if run.trains]
        if not own:
            return
        before = states_for_trial(group, own[0])
        try:
            with ExitStack() as evaluating, torch.no_grad():
                for run in own:
                    evaluating.enter_context(run.strategy.evaluation())
                found = validate(own)
        except Exception as error:  # an error of the model or the data, which all these runs share
            all_leave(group, own, error)
        else:
            check_draws(group, before, own[0], "the model or a metric")
            for run, columns in found.items():
                moment.columns.setdefault(run, {}).update(columns)
        seconds, num_nodes = time.perf_counter() - started, sum(run.cluster.num_nodes for run in own)
        for run in own:
            run.measuring.weights = None
            run.measuring.seconds += seconds * run.cluster.num_nodes / num_nodes


class MeasureEnded:
    """Measures the global models of ended runs on their clients' and test data.

    Args:
        briefly: measure some examples of runs that begin, and keep no result: raises before training if that fails.
    """

    def __init__(self, briefly: bool = False) -> None:
        self.briefly = briefly

    def __call__(self, moment: Moment) -> None:
        if self.briefly:
            starting = [run for run in moment.reached if self._has_data(run)]
            moment.each(lambda run: self._measure(moment, run.group, [run]), starting)
            return
        for group, runs in moment.by_group([run for run in moment.over if self._has_data(run)]):
            try:
                self._measure(moment, group, runs)
            except Exception as error:  # an error of the model or the data, which all these runs share
                all_leave(group, runs, error)

    @staticmethod
    def _has_data(run: TrackedRun) -> bool:
        return len(run.measuring.client_data) > 0 or len(run.measuring.test_data) > 0

    def _measure(self, moment: Moment, group: Group[TrackedRun], runs: Sequence[TrackedRun]) -> None:
        started = time.perf_counter()
        with ExitStack() as evaluating, torch.no_grad():
            for run in runs:
                evaluating.enter_context(run.strategy.evaluation())
                run.measuring.weights = run.evaluated_weights()
            of_clients = measured_on("client", group, [r for r in runs if r.measuring.client_data], self.briefly)
            of_tests = measured_on("test", group, [r for r in runs if r.measuring.test_data], self.briefly)
        for run in runs:
            run.measuring.weights = None
            run.measuring.seconds += (time.perf_counter() - started) / len(runs)
        names = {"losses": "test_loss", "accuracies": "test_accuracy"}
        for run in () if self.briefly else runs:
            tested = {names[name]: value for name, (value,) in of_tests.get(run, {}).items()}
            moment.client_val[run] = own = of_clients.get(run, {})
            if own and run.strategy.attack is not None:
                bad = run.strategy.attack.attackers(run.cluster.population)
                own["attacked"] = [float(client in bad) for client in range(run.cluster.population)]
            moment.columns.setdefault(run, {}).update(tested, validation_seconds=run.measuring.seconds)
