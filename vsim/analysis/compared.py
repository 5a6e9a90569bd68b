"""The content of a comparison: runs by name, and the model size, network and compute that price the runs."""

from __future__ import annotations

import calendar
import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from vsim.analysis.conditions import BY_NAME
from vsim.analysis.spent import BUDGETS, AnyCompute, AnyNetwork, Floats, Priced, amount_text, spent
from vsim.cluster.ledger import Ledger
from vsim.figures.looks import MANY, SETTING, Looks, looks_of
from vsim.figures.words import brief_list, quoted, size_text
from vsim.history.curves import Y_LABELS
from vsim.history.describe import describe
from vsim.history.history import History
from vsim.network import Compute, Network

if TYPE_CHECKING:
    from torch import nn

# Classes of datasets that say nothing of the data.
_UNNAMED = ("", "TensorDataset", "Subset", "ConcatDataset", "Dataset", "TextDataset", "FlippedLabels")
# Names of classes, if not their names without "Strategy".
_IN_WORDS = {"SimpleReduce": "AllReduce", "SPARTADiLoCo": "SPARTA-DiLoCo"}
# Attributes of a run that files hold besides its history.
_PLAIN = ("failure", "seed", "diverged_at", "stopped_at")


@dataclass(eq=False)
class ComparedRun:
    """One strategy's run.

    Attributes:
        model: the mean of the nodes' final models; None if the run did not end, or was read from a file.
        failure: why the run did not end, or "".
        seed: the seed of everything random in the run.
        error: the error, if the run failed.
        callbacks: the run's own copies of the callbacks that were given.
        diverged_at: the first step with a loss or weights that are not finite; None if there was none.
        stopped_at: the step after which a sweep with `halving` stopped the run; None if it was not stopped.
        trained: the strategy that was trained; None if the run was read from a file.
        measured_less: if `Comparison.at` has priced the run for another size: AllReduce's bytes divided by the run's,
            at the trained size; else None.
        client_models: the models of the clients; see `client_model`.
    """

    history: History
    model: nn.Module | None = None
    failure: str = ""
    seed: int = 42
    error: Exception | None = None
    diverged_at: int | None = None
    stopped_at: int | None = None
    callbacks: Sequence[Any] = ()
    trained: Any = None
    measured_less: float | None = None
    client_models: Any = field(default=None, kw_only=True)

    def client_model(self, client: int) -> nn.Module:
        """Return the model of a node, or of any client of a population, at the end of the run; see `Trainer`.

        Args:
            client: the number of the node or client, 0 to N − 1.

        Raises:
            ValueError: the run did not end, was read from a file, or keeps the clients' state in the folder of
                Sample(store=…); or the node was absent at the end.
        """
        if self.client_models is None or self.model is None:
            raise ValueError(
                "client_model() needs a run that has ended since Python started, and whose clients' state is not in "
                "the folder of Sample(store=…)"
            )
        return self.client_models.model(client, like=self.model)

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run's communication."""
        return self.history.ledger

    @property
    def ended(self) -> bool:
        """Whether the run reached its last step."""
        return not self.failure and self.stopped_at is None

    @property
    def failed(self) -> bool:
        """Whether the run diverged or raised an error; interrupted runs and runs stopped by `halving` did not fail."""
        return bool(self.failure) and not self.failure.startswith("interrupted")

    @property
    def note(self) -> str:
        """Why the run did not reach its last step, or ""."""
        return f"stopped after step {self.stopped_at}" if self.stopped_at is not None else self.failure

    def as_plain(self) -> dict[str, Any]:
        """Return everything but the model and the error as dicts, lists, numbers and text, which JSON can hold."""
        plain = {key: getattr(self, key) for key in _PLAIN}
        less = {} if self.measured_less is None else {"measured_less": self.measured_less}
        return {**plain, **less, "history": self.history.as_plain()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ComparedRun:
        """Make a run from the output of `as_plain`."""
        run = cls(History.from_plain(plain["history"]), **{key: plain[key] for key in _PLAIN})
        run.measured_less = plain.get("measured_less")
        return run

    @cached_property
    def strategy(self) -> Any:
        """The strategy. If the run was read from a file, it is made again from the call in the configuration.

        None if that call uses other classes than vsim's, or if a default has changed since.
        """
        if self.trained is not None:
            return self.trained
        from vsim.strategy.remade import (  # loads all algorithms, and few readers of a file need them
            in_present_names,
            remade,
        )

        about = self.history.config.get("strategy")
        about = in_present_names(about) if isinstance(about, Mapping) else {}
        strategy = remade(call) if isinstance(call := about.get("call"), str) else None
        return strategy if strategy is not None and _agree(describe(strategy), about) else None


class Runs(Mapping[str, ComparedRun]):
    """The data of a comparison: runs by name, one for each seed, and what prices them. Functions of `records` read it.

    Attributes:
        allreduce_bytes, network, compute, tuned, calls: see `vsim.Comparison`.
        measured_bytes: bytes of the trained model's weights, if `at` priced the runs for another size; else None.
        sizes: sizes of the model for which `at` priced the runs, that a `Pipeline` takes; empty if it did not.
        names: the names of all runs, even if only some are selected, so that each keeps its colour.
    """

    def __init__(self, allreduce_bytes: int) -> None:
        self.allreduce_bytes = allreduce_bytes
        self.measured_bytes: int | None = None
        self.sizes: dict[str, int] = {}
        self.network: Network | None = None
        self.compute: Compute | None = None
        self.tuned: dict[str, Any] = {}  # values are Sweeps, whose module imports this one
        self.calls: list[str] = []
        self.names: list[str] = []
        self._runs: dict[str, list[ComparedRun]] = {}

    def add(self, name: str, run: ComparedRun) -> None:
        """Add a run of one seed."""
        if name not in self._runs:
            self.names.append(name)
        self._runs.setdefault(name, []).append(run)

    def holding(self, runs: Mapping[str, list[ComparedRun]], **changed: Any) -> Self:
        """Return a copy with these runs, and with the attributes in `changed`."""
        other = copy.copy(self)
        vars(other).update(changed, _runs=dict(runs))
        return other

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def runs(self, name: str) -> list[ComparedRun]:
        """Return the runs of one strategy, one for each seed."""
        if not isinstance(name, str) or name not in self._runs:
            raise KeyError(f"no run {name!r}; there are {', '.join(self._runs)}")
        return self._runs[name]

    @property
    def all_runs(self) -> list[ComparedRun]:
        """The runs of all strategies."""
        return [run for runs in self._runs.values() for run in runs]

    @property
    def all_histories(self) -> list[History]:
        """The histories of all runs."""
        return [run.history for run in self.all_runs]

    @property
    def histories(self) -> dict[str, list[History]]:
        """Name → histories, one for each seed, for `vsim.history.curves.bands`."""
        return {name: [run.history for run in runs] for name, runs in self._runs.items()}

    @property
    def order(self) -> list[str]:
        """The names in the order of the table."""
        return list(self)

    @property
    def num_nodes(self) -> int | None:
        """K; None if runs have different numbers of nodes."""
        numbers = {history.num_nodes for history in self.all_histories}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def of_clients(self) -> bool:
        """Whether cohorts of a larger population trained."""
        return any(history.is_of_cohorts for history in self.all_histories)

    @property
    def budget(self) -> dict[str, Any]:
        """The budget of every run, as given to `compare` and as `best(within=…)` takes it; empty without one."""
        return {of: most for of, most in self.limits.items() if of in BUDGETS}

    @property
    def limits(self) -> dict[str, Any]:
        """The `budget`, and the `at` and `max_steps` that were given with it."""
        budgets = (history.config.get("budget") for history in self.all_histories)
        return next((dict(own) for own in budgets if own and own != BY_NAME), {})

    @property
    def strategies(self) -> dict[str, Any]:
        """Name → strategy, to train again: `vsim.compare(…, strategies=comparison.strategies)`.

        Raises:
            ValueError: the comparison was read from a file, and a strategy is not made of vsim's own classes, numbers
                and text.
        """
        found = {name: self.runs(name)[0].strategy for name in self}
        if lost := quoted(name for name, own in found.items() if own is None):
            who = brief_list([*lost.values()])
            raise ValueError(
                f"the file does not hold the strategy of {who}, which is not made of vsim's own "
                "classes, numbers and text: make it again, and select the others by comparison[[…]].strategies"
            )
        return found

    def has(self, column: str) -> bool:
        """Return whether some run has measured a column."""
        return any(not math.isnan(history.last(column)) for history in self.all_histories)

    @property
    def loss_column(self) -> str:
        """The column of the loss that is compared: the validation loss or, without validation, the training loss."""
        return "global_loss" if self.has("global_loss") else "train_loss"

    @property
    def loss_title(self) -> str:
        """The title of `loss_column`."""
        return Y_LABELS[self.loss_column]

    @property
    def sampled(self) -> list[str]:
        """The numbers of validation examples, such as "2,048 of 50,000", if only a sample is used."""
        return list(dict.fromkeys(h.validated_on for h in self.all_histories if " of " in h.validated_on))

    @property
    def trained(self) -> str:
        """The model, data, nodes and steps, such as "MLP on digits, 4 nodes × batch 16, 40 steps"; "" if unknown."""
        configs = [history.config for history in self.all_histories]
        config = next((own for own in configs if isinstance(own.get("model"), Mapping)), None)
        if config is None:
            return ""
        data = config["train_dataset"] if isinstance(config.get("train_dataset"), Mapping) else {}
        name, examples = str(data.get("name", data.get("class", ""))), data.get("examples")
        named = name if name not in _UNNAMED else f"{examples:,} examples" if isinstance(examples, int) else "own data"
        if dealt := re.match(r"Partition\((.+?)(?:, min_size=\d+)?(?:, seed=\d+)?:", str(data.get("partition", ""))):
            named += f" ({dealt[1]})"
        batch = f" × batch {config['batch_size']}" if isinstance(config.get("batch_size"), int) else ""
        asked = {run: run.history.config.get("max_steps") for run in self.all_runs}
        steps = sorted({most if isinstance(most, int) else run.ledger.steps for run, most in asked.items()})
        length = f"{steps[0]:,} to {steps[-1]:,} steps" if len(steps) > 1 else f"{steps[0]:,} steps"
        if self.budget:
            length = f"within {' and '.join(amount_text(of, most) for of, most in self.budget.items())}"
        return f"{config['model'].get('class', 'a model')} on {named}, {self._nodes}{batch}, {length}"

    @property
    def date(self) -> str:
        """The day on which the first run started, such as "28 November 2026"; "" if unknown."""
        started = sorted(str(history.config.get("started", "")) for history in self.all_histories)
        found = re.match(r"(\d{4})-(\d\d)-(\d\d)", next(filter(None, started), ""))
        if found is None or not 1 <= int(found[2]) <= 12:
            return ""
        return f"{int(found[3])} {calendar.month_name[int(found[2])]} {found[1]}"

    @property
    def _nodes(self) -> str:
        nodes = " or ".join(map(str, sorted({history.num_nodes for history in self.all_histories})))
        if not self.of_clients:
            return f"{nodes} nodes"
        clients = sorted({history.ledger.num_nodes for history in self.all_histories})
        return f"cohorts of {nodes} of {' or '.join(f'{n:,}' for n in clients)} clients"

    def in_words(self) -> Self:
        """Return the same runs with names in words, where names are spelled as on the command line.

        For example, "sparta_diloco:H=10,outer_lr=0.4" becomes "SPARTA-DiLoCo, H = 10, outer_lr = 0.4".
        """
        new = {name: name for name in self.names}
        for name in self:
            kind, _, settings = name.partition(":")
            about = self.runs(name)[0].history.config.get("strategy")
            cls = str(about.get("class", "")).removesuffix("Strategy") if isinstance(about, Mapping) else ""
            cls, own = _IN_WORDS.get(cls, cls), re.sub("[_-]", "", kind)
            whole = re.sub("[_-]", "", cls).lower()
            is_its = own == whole or (len(own) > 4 and whole.startswith(own))
            parts = SETTING.findall(settings)
            if ",".join(f"{key}={value}" for key, value in parts) == settings:
                new[name] = ", ".join([cls if is_its else kind, *(f"{key} = {value}" for key, value in parts)])
        if len(set(new.values())) < len(new):  # two spellings of one strategy
            return self
        tuned = {new[name]: sweep for name, sweep in self.tuned.items()}
        return self.holding({new[name]: self.runs(name) for name in self}, names=[*new.values()], tuned=tuned)

    @property
    def title(self) -> str:
        """Nodes, size of the model and number of seeds, as text."""
        numbers = sorted({len(runs) for runs in self._runs.values()})
        seeds = " or ".join(map(str, numbers))
        spread = f"{seeds} seeds: mean ± standard deviation" if len(self) <= MANY else f"mean of {seeds} seeds"
        repeated = f", {spread}" if max(numbers, default=1) > 1 else ""
        size = size_text(self.allreduce_bytes)
        if self.measured_bytes is not None:
            size += f" (losses of {size_text(self.measured_bytes)})"
        sampled = "".join(f", validated on {examples} examples" for examples in self.sampled)
        return f"{self._nodes}, {size} of weights each{repeated}{sampled}"

    def labels(self, name: str) -> dict[str, Any]:
        """Return the first columns of a row of the table: title → text."""
        chosen = {name: sweep.labels(sweep.chosen()) for name, sweep in self.tuned.items()}
        settings = dict.fromkeys(key for own in chosen.values() for key in own)
        return {"strategy": name, **{key: chosen.get(name, {}).get(key, "–") for key in settings}}

    def looks(self, first: str | None = None) -> Looks:
        """Return the looks of the lines. A selection keeps those of all runs, unless colours are too few for all."""
        looks = looks_of(self.names, list(self))
        return Looks(looks.by_name) if len(self) <= MANY else looks

    def spent(self, run: ComparedRun, of: str, priced: Priced = None) -> Floats:
        """Return the cost (T,) of a run up to every row; see `vsim.analysis.spent.spent`."""
        return spent(run.history, of, self.allreduce_bytes, priced)

    def prices(self, network: AnyNetwork, compute: AnyCompute) -> tuple[AnyNetwork, AnyCompute]:
        """Return what time and cost are derived from: what a question was given, or else the comparison's."""
        compute = self.compute if compute is None else Compute.of(compute).of_model(self.sizes)
        return self.network if network is None else network, compute

    def pricing(self, network: AnyNetwork = None, compute: AnyCompute = None, needed: bool = False) -> Priced:
        """Return the network and compute for deriving hours: the given ones, or else the comparison's.

        If both are missing, return None unless they are `needed`. Otherwise, a TypeError names a missing argument.
        """
        network, compute = self.prices(network, compute)
        if network is None and compute is None and not needed:
            return None
        return Network.of(network), Compute.of(compute)

    def pricing_of(self, costs: Sequence[str], network: AnyNetwork, compute: AnyCompute) -> Priced:
        """Return `pricing` for these kinds of cost; None if none of them is time or money."""
        if {"time", "cost"}.intersection(costs):
            return self.pricing(network, compute, needed=True)
        if network is not None or compute is not None:
            given = ", ".join(costs) or "the final loss, which is compared without within="
            raise TypeError(f"network and compute have no effect on {given}; time and cost follow from them")
        return None


def _agree(made: Any, saved: Any) -> bool:
    """Return whether two descriptions agree in the names that both have; other versions of vsim may lack a name."""
    if isinstance(made, dict) and isinstance(saved, dict):
        return all(_agree(made[name], saved[name]) for name in made.keys() & saved.keys())
    if isinstance(made, list) and isinstance(saved, list):
        return len(made) == len(saved) and all(map(_agree, made, saved))
    return bool(made == saved)
