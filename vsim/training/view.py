"""What callbacks get: a run, seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vsim.arguments import one_of, whole_number
from vsim.cluster.cluster import Cluster
from vsim.cluster.ledger import Ledger
from vsim.history.history import ACCURACIES, COLUMNS, CONSENSUS, SPREAD, TESTED, VALIDATED, History
from vsim.strategy.base import Algorithm
from vsim.training.clients import OwnModels

if TYPE_CHECKING:
    from vsim.training.tracked import TrackedRun


class RunView:
    """One strategy with one seed on K nodes, as callbacks see it between two steps.

    To change the run, call `set_weights`, `freeze`, `unfreeze`, `each_model` or `stop`. Everything else is to be read:
    what is changed through `cluster` or `strategy` is not checked.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        own = sorted(known for known in dir(type(self)) if not known.startswith("_"))
        raise AttributeError(
            f"a callback's run has no {name!r}: it has {', '.join(own)}. Its nodes are in cluster, their state in "
            "cluster and strategy"
        )

    @property
    def label(self) -> str:
        """The name of the run: in a comparison the one that was given, with its seed if there are several."""
        return self._run.spec.label

    @property
    def seed(self) -> int:
        """The seed of everything random in the run."""
        return self._run.spec.seed

    # Where it stands ------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of the last completed step; the same as `done`."""
        return self._run.done

    @property
    def done(self) -> int:
        """The number of completed steps."""
        return self._run.done

    @property
    def max_steps(self) -> int:
        """The number of the last step; `stop` makes it the number of completed steps."""
        return self._run.max_steps

    @property
    def starts(self) -> bool:
        """Whether the run is new, and its first row is not in the history yet; False in a resumed run."""
        return self._run.starts

    @property
    def minibatch_size(self) -> int | None:
        """Examples per node whose gradients are computed at once; None: the whole batch."""
        minibatch_size: int | None = self._run.group.minibatch_size
        return minibatch_size

    # What it has measured -------------------------------------------------------------------------------------------

    @property
    def row(self) -> Mapping[str, float]:
        """The row of the history for the last step: column → number."""
        return self._run.recording.row

    @property
    def history(self) -> History:
        """The record of all steps."""
        return self._run.history

    @property
    def node_losses(self) -> list[float]:
        """The losses of the nodes (K,) in the last step; NaN for a client that rests."""
        return self._run.node_losses

    @property
    def lr(self) -> float:
        """The inner learning rate of the last step."""
        return self._run.lr

    @property
    def ledger(self) -> Ledger:
        """The record of the run's communication."""
        return self._run.ledger

    @property
    def columns(self) -> list[str]:
        """The columns of the history that this run measures, at some or all steps."""
        validated = self._run.measuring.evaluator is not None
        apart = self._run.spec.correlation_interval is not None
        absent = {
            *(() if validated else VALIDATED),
            *(() if apart else SPREAD),
            *(() if self._run.strategy.is_gossip else (CONSENSUS,)),
            *(ACCURACIES if self._run.spec.accuracy is False else ()),
            *TESTED,  # in the last row, when the run is over
        }
        own = [c for c in COLUMNS if c not in absent]
        return [*own, *self._run.strategy.columns(), *(self._run.spec.metrics or ())]

    # Its nodes and models -------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        """The nodes that take part now: weights and gradients (R, P) of those that this process holds."""
        return self._run.cluster

    @property
    def strategy(self) -> Algorithm:
        """The run's own copy of the strategy."""
        return self._run.strategy

    @property
    def model(self) -> nn.Module:
        """The live model, which computes the losses of all nodes; its own tensors belong to no node.

        To change its weights or buffers, call `set_weights`, `freeze` or `unfreeze`: a callback that changes a
        parameter or buffer here, if only by a forward pass that updates statistics, ends the run. To compute with a
        model, call `global_model`; to change attributes, `each_model`.
        """
        return self._run.objective.model

    @property
    def loss_fn(self) -> Any:
        """The live loss function, None without one."""
        return self._run.objective.loss_fn

    def mean_model(self) -> nn.Module:
        """Return the mean of the nodes' models as an ordinary module."""
        return self._run.mean_model()

    def global_model(self) -> nn.Module:
        """Return a copy of the validated global model as an ordinary module."""
        replicas, buffers = self._run.cluster.replicas, self._run.cluster.mean_buffers()
        with torch.no_grad(), self._run.strategy.evaluation():
            return replicas.as_module(self._run.evaluated_weights(), buffers, like=self._run.spec.model)

    def client_model(self, client: int) -> nn.Module:
        """Return a copy of the model that a node or client uses: the global model with the client's personal values."""
        whole_number("client", client, at_least=0, at_most=self._run.spec.population - 1)
        with torch.no_grad(), self._run.strategy.evaluation():
            models = OwnModels(self._run.strategy, self._run.cluster, self._run.presence.clients)
            own = models(client, self._run.evaluated_weights(), self._run.cluster.mean_buffers())
            return self._run.cluster.replicas.as_module(*own, like=self._run.spec.model)

    # Changes --------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the run here, as if `max_steps` had been the number of completed steps."""
        self._run.stop()

    @torch.no_grad()
    def set_weights(self, state: Mapping[str, Tensor]) -> None:
        """Set weights and buffers on all nodes, as if every rank called `model.load_state_dict(state, strict=False)`.

        Nothing is billed. Optimizers and strategies keep their own state: the outer weights of DiLoCo, for instance,
        do not change, so that its next sync counts the change as part of the nodes' progress.

        Args:
            state: name → tensor, for some or all parameters and buffers. A parameter that requires no gradient is
                shared with other runs, and cannot get another value.

        Raises:
            ValueError: a name is unknown, or a value does not fit. Then no value is set.
        """
        replicas, targets = self._run.cluster.replicas, {}
        rows = {**replicas.views(replicas.weights), **replicas.buffers}
        known = {name: first for name, first in self._first_names().items() if first in {**rows, **replicas.frozen}}
        for name, value in state.items():
            first = known[one_of("every name in set_weights", name, known)]
            shape = rows[first].shape[1:] if first in rows else replicas.frozen[first].shape
            if not isinstance(value, Tensor) or value.shape != shape:
                given = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"set_weights: {name} must be a tensor of shape {list(shape)}, got {given}")
            if first in rows:
                targets[name] = rows[first]
            elif not torch.equal(replicas.frozen[first], value.to(replicas.frozen[first])):
                raise ValueError(
                    f"set_weights: {name} requires no gradient in the model, so that nodes and runs share it, and it "
                    "cannot get another value: leave it out, or let it require one and freeze it by run.freeze"
                )
        for name, target in targets.items():
            target.copy_(state[name])

    def freeze(self, names: str | Iterable[str]) -> None:
        """Freeze parameters from the next step on, as if every rank called `requires_grad_(False)` on them.

        Gradients of frozen parameters are set to zero before communication, and the inner optimizer skips the
        parameters: weight decay and momentum do not change them. The strategy still communicates and bills frozen
        parameters, averages them at a sync if nodes differ, and moves them by the momentum of an outer optimizer.
        Buffers of a frozen module, such as running statistics, still change. With several processes, call this in every
        process.

        Args:
            names: names of parameters or modules; "encoder" stands for all parameters in `model.encoder`.

        Raises:
            ValueError: a name is unknown.
        """
        trained = {c.name for c in self._run.cluster.replicas.layout}
        self._run.cluster.frozen |= {name: True for name in self._parameters_in(names) if name in trained}

    def unfreeze(self, names: str | Iterable[str]) -> None:
        """Train frozen parameters from the next step on, with their optimizer state from when they were frozen.

        Args:
            names: see `freeze`.

        Raises:
            ValueError: a name is unknown, or a parameter requires no gradient in the model itself.
        """
        own = self._parameters_in(names)
        if never := [name for name in own if name in self._run.cluster.replicas.frozen]:
            raise ValueError(
                f"unfreeze: {', '.join(never)} requires no gradient in the model that was given, so that no node "
                "trains it: let it require one, and freeze it by run.freeze in on_start"
            )
        self._run.cluster.frozen |= {name: False for name in own if name in self._run.cluster.frozen}

    def _parameters_in(self, names: str | Iterable[str]) -> list[str]:
        """Return the parameters with these names, or in modules with these names."""
        replicas = self._run.cluster.replicas
        within: dict[str, list[str]] = {}
        of_model = {*(c.name for c in replicas.layout), *replicas.frozen}
        for name, first in self._first_names().items():
            for prefix in accumulate(name.split("."), "{}.{}".format) if first in of_model else ():
                within.setdefault(prefix, []).append(first)
        names = [names] if isinstance(names, str) else names
        return [first for name in names for first in within[one_of("every name", name, within)]]

    def _first_names(self) -> dict[str, str]:
        """Return name → first name of the same tensor, because parameters and buffers of the model may be tied."""
        module = self._run.cluster.replicas.module
        found: dict[int, str] = {}
        named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        return {name: found.setdefault(id(tensor), name) for name, tensor in chain(*named)}

    def each_model(self, f: Callable[[nn.Module], object]) -> None:
        """Call f(model) for every copy of the model with which this run computes.

        All nodes may share one copy, and so may other runs of a comparison unless `together=False`. `f` may change
        plain attributes, such as a temperature or a flag. Parameters and buffers of the copies belong to no node: call
        `set_weights` for them.
        """
        for own in self._run.objective.copies():
            f(own.model)
