"""The base of strategies: an inner optimizer, and communication of the nodes before and after it.

    gradients ─► optimize ─► advance

A strategy object holds arguments, but no state: every run works on a copy, so that one object serves many runs. For
code written as if for one node, see `vsim.algorithms.per_node`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vsim.arguments import naming, real_number
from vsim.cluster import Cluster
from vsim.cluster.frozen import clear_gradients, skipping
from vsim.cluster.ledger import Ledger
from vsim.cluster.optim import OptimSpec, clip_by_node, resolve_optim
from vsim.cluster.optimizers import (
    StackedOptimizer,
    evaluating,
    move,
    nodes_of,
    parts_of,
    stepped_tensors,
    torch_optimizers,
)
from vsim.cluster.plan import ComputeSeconds
from vsim.cluster.randomness import SHARED, generator
from vsim.cluster.replicas import Replicas
from vsim.cluster.schedule import LRSchedule, restarts
from vsim.cluster.stacked import StackedCollectives
from vsim.core.attack import Attack
from vsim.core.average import Average, Averaging
from vsim.core.fields import OPTIONS, Given, algorithm, state
from vsim.core.when import When, schedule_of, syncs
from vsim.private_torch import mark_stepped

Part = TypeVar("Part", bound="Algorithm")
Optim = OptimSpec | type[Optimizer] | str | None


@algorithm
class Algorithm(Given):
    """An inner optimizer, and what the nodes communicate before and after its steps. The base of all strategies.

        @algorithm
        class LocalSGD(Algorithm):
            H: int | When = 10

            def sync(self, cluster: Cluster) -> None:
                cluster.weights.copy_(cluster.collectives.all_reduce(cluster.weights, "mean"))

    A subclass defines what is communicated: `sync`, which is called after the steps that H selects, or `communicate`,
    `communicate_gradients`, …, and `setup`, which makes their state. An algorithm is also a part: parts communicate in
    turn around one inner optimizer, as in `CommunicateOptimizeStrategy([SPARTAStrategy(), DiLoCoStrategy()])`. An
    algorithm that does more than to communicate extends `begin`, `gradients`, `optimize` or `advance`, and calls
    `super()`; it is not a part. For code that is written as if for one node, subclass `Strategy`.

    A run calls `begin` once, and in every step `gradients`, `optimize` and `advance`; then it advances the schedules
    and counts the step.

    Args:
        inner_optim: the inner optimizer: an `OptimSpec`, a torch.optim class or its lower-case name. Default AdamW.
        lr: the inner learning rate.
        max_norm: clip every node's gradient to this 2-norm before its optimizer step.
        lr_scheduler: a torch.optim.lr_scheduler class; "cosine" or "lambda_cosine", which multiply the peak rate at
            step s = 0, 1, … of T by s / w while s < w (warm-up), and then, with cosine_anneal, by
            0.1 + 0.45 · (1 + cos(π (s − w) / (T − w))); or `restarts(steps)`, which restarts it after every sync.
        lr_scheduler_kwargs: arguments of the scheduler.
        warmup_steps: w, default 0. cosine_anneal: default True for "cosine", else False. max_steps: T, by default the
            run's number of steps.
        attack: makes some nodes send other vectors to `average`, or train on wrong labels; see `vsim.Attack`.

    Attributes:
        H: steps from one sync to the next, or a schedule of `vsim.strategy.when`; 1 if a subclass sets none.
        average: merges the nodes' vectors, and in a warm-up their gradients; the mean if a subclass sets none.
        family: the section in docs/strategies.md.
        is_asynchronous: whether nodes train on a virtual clock, at different speeds; see
            `vsim.algorithms.asynchronous`.
        communicates: whether nodes send anything at all.
        only_once: whether a second part of the same class, whatever its settings, would have nothing to do.
        uncalled: methods of `Strategy` that this class never calls.
        optim_spec, schedule: the inner optimizer and its schedule, from the options.

    Attributes during a run:
        cluster: the nodes. optim: the inner optimizer.
        settings: the strategy's arguments, which a resumed run must repeat.

    `str(strategy)` is the call that makes the strategy.
    """

    derived: ClassVar[tuple[str, ...]] = ("_period", "settings", "schedulers")
    resolved: ClassVar[tuple[str, ...]] = tuple(name for name in OPTIONS if name not in ("max_norm", "attack"))
    uncalled: ClassVar[tuple[str, ...]] = ("step", "before_optimizer", "after_optimizer", "_init_node")
    is_asynchronous: ClassVar[bool] = False
    communicates: ClassVar[bool] = True
    only_once: ClassVar[bool] = False

    inner_optim: Optim = None
    lr: float | None = None
    max_norm: float | None = None
    lr_scheduler: type[LRScheduler] | restarts | str | None = None
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: int | None = None
    cosine_anneal: bool | None = None
    max_steps: int | None = None
    attack: Attack | None = None

    H: int | When = state(default=1)
    average: Averaging = state(default=Averaging("mean"))
    warmup: Average = state()  # averages gradients in a warm-up, with separate compression errors
    cluster: Cluster = state()
    optim: StackedOptimizer = state()
    optim_spec: OptimSpec = state()
    schedule: LRSchedule = state()
    settings: dict[str, Any] = state()
    synced: int = state()  # completed steps before the last sync; with lr_scheduler=restarts(…)

    def __post_init__(self) -> None:
        """Check the arguments. An override ends with `super().__post_init__()`, which checks the options."""
        where = f"{type(self).__name__}()"
        if uncalled := [f"{name}()" for name in self.uncalled if hasattr(self, name)]:
            raise TypeError(
                f"{type(self).__name__} defines {', '.join(uncalled)}, called only in subclasses of Strategy and "
                "CommunicateOptimizeStrategy: subclass one of these, or extend begin(), gradients() or advance()"
            )
        if shared := [f"{name} = True" for name in ("shares_weights", "shares_grads") if getattr(self, name, False)]:
            raise TypeError(
                f"{type(self).__name__} has {' and '.join(shared)}, but nodes do not share rows: each has its own "
                "weights and gradients. Remove it"
            )
        self.settings = {}
        if self.attack is not None:
            self._take_attack(self.attack)
        self.optim_spec = resolve_optim(
            where, "inner_optim", self.inner_optim, "lr", self.lr, self.default_inner_optim()
        )
        for part in self.parts:
            with naming(where):
                part.check_optim(self.optim_spec)
        self.max_norm = None if self.max_norm is None else real_number("max_norm", self.max_norm, above=0)
        self.schedule = LRSchedule(
            self.lr_scheduler, self.lr_scheduler_kwargs, self.warmup_steps, self.cosine_anneal, self.max_steps
        )

    @property
    def parts(self) -> Sequence[Algorithm]:
        """The algorithms that communicate, in this order: the algorithm itself, or those it is composed of."""
        return (self,)

    @classmethod
    def default_inner_optim(cls) -> OptimSpec:
        """Return the default inner optimizer."""
        return OptimSpec(torch.optim.AdamW)

    def _take_attack(self, attack: Attack) -> None:
        name = type(self).__name__
        if not isinstance(attack, Attack):
            raise TypeError(f"{name}: attack must be a vsim.Attack, got {attack!r}")
        if attack.kind == "label_flip":
            return
        taken = [part.take_attack(attack, name) for part in self.parts]
        if not any(taken):
            raise ValueError(f"{name}: {attack} attacks messages of an average= or of gossip, and there are none")

    # What a subclass defines -------------------------------------------------------------------------------------

    def setup(self, cluster: Cluster) -> None:
        """Prepare for a run on `cluster`: create and declare the state that lasts from step to step."""

    def setup_warmup(self, cluster: Cluster) -> None:
        """Prepare to average gradients, in a run whose schedule has a warm-up; called after `setup`."""
        self.warmup = Average(self.average)
        self.warmup.setup(cluster)

    @property
    def when(self) -> When:
        """H as a schedule."""
        return schedule_of(self.H)

    def syncs_now(self, step: int) -> bool:
        """Return whether step number `step` ends with a sync; called before `communicate`."""
        return self.when.ends_with(step) and not self.when.is_warmup(step)

    @property
    def first_step(self) -> int:
        """The first step at which the algorithm has an effect, known after `setup`. A shorter run gets a warning."""
        return self.when.period or self.when.next

    @property
    def personal_bytes(self) -> int:
        """Bytes of a client's personal weights, which are not pulled with the shared weights."""
        return 0

    @property
    def personal_buffers(self) -> Sequence[str]:
        """Names of the personal buffers of a client, which the server does not see."""
        return ()

    def remember(self, cluster: Cluster) -> None:
        """Record the clients' state now; for algorithms that otherwise record it only at a sync. Default: no-op."""

    def personalize(self, weights: Tensor, buffers: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Turn copies of the global weights (P,) and buffers into a client's model, in place.

        Default: no-op, since clients use the global model.

        Args:
            own: name → the client's row, for every tensor that this algorithm declares by `keep_client`.
        """

    def shared_weights(self, weights: Tensor) -> Tensor:
        """Return the columns (…, p) of weights (…, P) that clients have in common after a sync; default: all."""
        return weights

    def check_nodes(self, cluster: Cluster) -> None:
        """Raise a ValueError if too few nodes take part. Default: ask the rule of `average`."""
        self.average.rule.check(cluster.num_nodes)

    def check_optim(self, optim: OptimSpec) -> None:
        """Raise an error if the algorithm does not allow this inner optimizer. Default: no-op."""

    def take_attack(self, attack: Attack, name: str) -> bool:
        """Let `attack` act on the vectors that nodes send, and return whether there are any. Default: on `average`.

        Args:
            name: the class of the strategy, for errors.
        """
        if "average" not in vars(self):
            return False
        if self.average.refuses_attack:
            raise ValueError(f"{name}: attack={attack} cannot act, as {self.average.refuses_attack}")
        self.average = copy.deepcopy(self.average)
        self.average.attack = attack
        return True

    def attend(self, cluster: Cluster) -> None:
        """Called when the set of nodes that take part changes, before step `cluster.step`. Default: no-op."""

    def communicate_gradients(self, cluster: Cluster) -> None:
        """Change `cluster.grads` in place, before clipping and the optimizer step number `cluster.step`.

        Default: merge the gradients by `average` in the warm-up of a `PostLocal` schedule.
        """
        if self.when.is_warmup(cluster.step):
            cluster.grads.copy_(self.warmup(cluster.grads, cluster, "gradients"))

    def communicate(self, cluster: Cluster) -> None:
        """Change `cluster.weights` in place, after the optimizer step number `cluster.step`.

        Default: call `sync` after the steps that H selects, and `follow` in a warm-up.
        """
        due = self.when.is_due(cluster)
        if self.when.is_warmup(cluster.step):
            self.follow(cluster)
        elif due:
            self.sync(cluster)

    def follow(self, cluster: Cluster) -> None:
        """Called in place of `sync` in a warm-up, while nodes are equal. Default: copy weights to `outer_weights`."""
        if isinstance(outer := vars(self).get("outer_weights"), Tensor):
            outer.copy_(self.shared_weights(cluster.weights)[0])

    def sync(self, cluster: Cluster) -> None:
        """Change `cluster.weights` in place, after a step that H selects. Default: no-op."""

    def global_weights(self, cluster: Cluster) -> Tensor | None:
        """Return the shared weights (P,) that this algorithm keeps as the global model, or None."""
        return None

    def measured(self, cluster: Cluster) -> Mapping[str, float]:
        """Return columns of the history for this algorithm: name → number, with the same names in every call.

        Called before the first step and after every step. An override must not change or send anything.
        """
        return {}

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context that swaps in the weights to evaluate, if the outer optimizer keeps such weights."""
        return nullcontext()

    # A run -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, cluster: Cluster) -> None:
        """Start a run on `cluster`. Called once, on the run's own copy of the strategy."""
        self.cluster = cluster
        self.optim = cluster.optim = self.inner_optimizer()
        if self.schedule.restarts is not None:
            if self.is_asynchronous or all(part.when.period == 1 for part in self.parts):
                often = "is asynchronous" if self.is_asynchronous else "communicates at every step"
                raise ValueError(f"lr_scheduler={self.schedule.restarts}: {type(self).__name__} {often}")
            self.keep_shared(synced=0)
        optims, synced = parts_of(self.optim), partial(getattr, self, "synced")
        self.schedulers = [self.schedule.build(part, cluster.max_steps, synced) for part in optims]
        cluster.schedulers = [*chain(*self.schedulers)]
        self._period = self.period
        for part in self.parts:
            part.when.setup(cluster)
            part.setup(cluster)
            if part.when.has_warmup:
                if self.max_norm is not None and part.personal_bytes:
                    raise ValueError(
                        f"max_norm={self.max_norm:g} scales each node's gradient by a norm that includes its personal "
                        f"layers, so that shared ones would drift apart in the warm-up of H={part.H!r}: leave out "
                        "max_norm, or take average=mean() | clip(…), or an H without a warm-up"
                    )
                part.setup_warmup(cluster)

    def inner_optimizer(self) -> StackedOptimizer:
        """Return the inner optimizer of the nodes of `cluster`."""
        return self.optim_spec.build_for(self.cluster.replicas, self.cluster.deterministic)

    def change_nodes(self, changed: bool = True) -> None:
        """Continue with the nodes that take part in step `cluster.step`.

        Args:
            changed: whether the set of nodes changed before the step.
        """
        for part in self.parts:
            part.check_nodes(self.cluster)
            if changed:
                part.attend(self.cluster)

    def move_rows(self, earlier: Replicas) -> None:
        """Make the optimizer step the nodes' current rows, `cluster.replicas`, in place of their `earlier` rows."""
        move(self._stacked_parameters(), earlier, self.cluster.replicas)
        for own in nodes_of(self.optim):
            own.attend()

    def _stacked_parameters(self) -> list[Tensor]:
        return stepped_tensors(self.optim)

    def gradients(self) -> None:
        """Communicate the gradients in `cluster.grads`, then clip them."""
        self._communicate_gradients()
        self.clip_gradients()

    def gradient(self, at: Tensor, batch: Any = None) -> Tensor:
        """Return the nodes' gradients (R, P) at the weights `at` (R, P); see `Cluster.gradient`."""
        return self.cluster.gradient(at, batch)

    def _communicate_gradients(self) -> None:
        """Call `communicate_gradients` of all parts."""
        for part in self.parts:
            known = len(self.cluster.collectives.ledger)
            part.communicate_gradients(self.cluster)
            if len(self.cluster.collectives.ledger) > known and self.cluster.resting_nodes:
                raise TypeError(
                    f"{type(self).__name__}: {type(part).__name__} communicates gradients, and with Sample(epochs=…) "
                    f"or Partial(…) clients that rest have none at step {self.cluster.step}; leave them out"
                )

    def clip_gradients(self) -> None:
        """Clip every node's gradient to `max_norm`, if set. Called before every optimizer step."""
        if self.max_norm is not None:
            clip_by_node(self.cluster.replicas, self.max_norm, exact=self.cluster.deterministic)

    def optimize(self) -> None:
        """Step the inner optimizer."""
        if not self.cluster.weights.is_meta:
            self.optim.step()
            return
        for optimizer in torch_optimizers(self.optim):
            mark_stepped(optimizer)

    def advance(self) -> None:
        """Communicate the weights, after the optimizer step."""
        cluster, position = self.cluster, self.cluster.collectives.position
        position.moment = "weights"
        if cluster.plan is not None and cluster.plan.renews and self.period != self._period:
            raise TypeError(
                f"{type(self).__name__}: H is {self.period}, and rounds of clients have {self._period} steps; where H "
                "moves in a run, give a schedule of vsim.strategy.when"
            )
        for part in self.parts:
            if self.schedule.restarts is not None and part.syncs_now(cluster.step):
                self.synced = cluster.step
            part.communicate(cluster)
        position.has_communicated = True

    def columns(self) -> Mapping[str, float]:
        """Return columns of the history, from all parts' `measured`: name → number. A subclass may add its own."""
        return {name: float(v) for part in self.parts for name, v in part.measured(self.cluster).items()}

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Return a context that swaps in the weights to evaluate, if optimizers keep such weights."""
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.optim, self.cluster.replicas.weights))
            for part in self.parts:
                stack.enter_context(part.evaluating())
            yield

    # The global model ------------------------------------------------------------------------------------------------

    def model_weights(self) -> Tensor:
        """Return the shared weights (P,) to evaluate as the global model: a part's, or the mean replica."""
        for part in self.parts:
            weights = part.global_weights(self.cluster)
            if weights is not None:
                return weights
        return self.cluster.mean_weights()

    @property
    def evaluates_mean(self) -> bool:
        """Whether the global model is the mean replica, because neither the strategy nor a part defines another."""
        replaced = any(type(part).global_weights is not Algorithm.global_weights for part in self.parts)
        return type(self).model_weights is Algorithm.model_weights and not replaced

    @property
    def is_gossip(self) -> bool:
        """Whether nodes meet few others only, so that the history has their `consensus_distance`."""
        return any(part.is_gossip for part in self.parts if part is not self)

    @property
    def is_personal(self) -> bool:
        """Whether clients use personal models in place of the global model."""
        return any(type(part).personalize is not Algorithm.personalize for part in self.parts)

    def has_global_model(self, mean: Tensor | None = None) -> bool:
        """Return whether a server has the global model now: a part keeps it, or all nodes are equal after a sync.

        Args:
            mean: the mean replica (P,), if known. Nodes then compare their weights with it, and no node sends weights.
        """
        cluster, collectives = self.cluster, self.cluster.collectives
        held = type(self).model_weights is not Algorithm.model_weights
        if held or any(part.global_weights(cluster) is not None for part in self.parts):
            return True
        with collectives.unbilled():
            same = cluster.weights == (collectives.broadcast(cluster.weights) if mean is None else mean)  # (R, P)
            for part in self.parts:
                same = part.shared_weights(same)
            return bool(collectives.all_reduce(same.all(1).float(), "min"))

    # Before a run ----------------------------------------------------------------------------------------------------

    @property
    def period(self) -> int:
        """Steps from one sync to the next: the longest period of the parts."""
        return max((part.when.period or 1 for part in self.parts), default=1)

    @property
    def needs_compute(self) -> bool:
        """Whether a schedule of syncs depends on compute seconds."""
        return any(part.when.needs_compute for part in self.parts)

    def syncs(self, max_steps: int | None, seconds: ComputeSeconds | None) -> tuple[int, ...]:
        """Return the steps of all syncs of a run whose H is a schedule; empty if H is a number.

        Raises:
            TypeError: parts have several schedules, or the run's number of steps is unknown.
        """
        schedules = [part.when for part in self.parts if part.when.period is None]
        if not schedules:
            return ()
        if max_steps is None:
            raise TypeError(f"rounds of participation= follow H={schedules[0]!r}, which takes max_steps=")
        if any(other != schedules[0] for other in schedules):
            raise TypeError(
                f"{type(self).__name__}: H is {schedules[0]} and {schedules[-1]}; rounds follow one of them"
            )
        spec = OptimSpec(self.optim_spec.cls, **self.optim_spec.kwargs)
        rates = self.schedule.rates(spec.build_shared([torch.zeros(2, 2)], [torch.zeros(2, 2)], True), max_steps)
        return tuple(syncs(copy.copy(schedules[0]), rates, max_steps, seconds)) or (max_steps,)

    def dry_run(
        self,
        model: nn.Module,
        num_nodes: int,
        max_steps: int,
        seed: int = 42,
        seconds: ComputeSeconds | None = None,
        at_end: Callable[[Algorithm], object] | None = None,
    ) -> Ledger:
        """Return the ledger of a run without training: the strategy's code runs on tensors without values.

        Args:
            model: on the meta device. seconds: the nodes' compute seconds, for schedules that depend on them.
            at_end: called with the run's copy of the strategy after the last step.

        Raises:
            ValueError: the strategy is asynchronous, or its messages depend on values.
        """
        from vsim.core.repeating import dry_steps

        name = type(self).__name__
        if self.is_asynchronous:
            raise ValueError(
                f"{name} is asynchronous: what it sends depends on how long nodes compute. Train it with compute= and "
                "network=; history.time(network, compute) has its seconds"
            )
        ledger, draws = Ledger(num_nodes), generator(seed, SHARED)
        ledger.steps = max_steps
        replicas = Replicas.of(model, num_nodes, torch.device("meta"))
        cluster = Cluster(replicas, StackedCollectives(ledger), draws, torch.ones(num_nodes), max_steps)
        cluster.seconds = seconds
        strategy = copy.deepcopy(self)
        try:
            strategy.begin(cluster)
            with torch.no_grad():
                dry_steps(strategy, partial(take_step, strategy), Algorithm)
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"{name} cannot be priced without training: what it sends depends on values, and here tensors have "
                f"none (step {cluster.step}: {str(error).splitlines()[0]}). Train it with a small model, and price its "
                "ledger"
            ) from error
        if at_end is not None:
            at_end(strategy)
        return ledger

    def rounds_repeat(self, num_nodes: int) -> int | None:
        """Return the number of syncs after which K nodes send the same again: always 1 by default.

        A dry run takes a few times as many syncs, and multiplies. None: messages may vary, as between random pairs of
        nodes, and a dry run takes every step, as it does with a user's class that does not itself define this method.
        """
        return 1


@algorithm
class Composed(Algorithm):
    """Base of algorithms that are composed of other algorithms.

    Attributes:
        composed: the parts, in the order in which they communicate; set before `super().__post_init__()`.
    """

    composed: list[Algorithm] = state()

    @property
    def parts(self) -> Sequence[Algorithm]:
        return self.composed

    def part(self, cls: type[Part]) -> Part:
        """Return an algorithm of class `cls`, with the arguments that this one has in common with it."""
        own = {f.name for f in fields(cls) if f.init and f.name not in OPTIONS}
        return cls(**{name: value for name, value in vars(self).items() if name in own})


def take_step(strategy: Algorithm, after_optimizer: Callable[[], object] | None = None) -> None:
    """Take an algorithm's part of a step, once the gradients are computed, and count the step.

    Frozen parameters have gradients of zero, and the optimizer skips them.

    Args:
        after_optimizer: called between the optimizer step and the communication of weights.

    Raises:
        TypeError: a method of a subclass does not call `super()`, so that the parts have not communicated.
    """
    cluster = strategy.cluster
    clear_gradients(cluster)
    with skipping(cluster):
        strategy.gradients()
        strategy.optimize()
        if after_optimizer is not None:
            after_optimizer()
        strategy.advance()
        if not cluster.collectives.position.has_communicated:
            name = type(strategy).__name__
            raise TypeError(f"{name}.step() must end with super().step(), or advance() with super().advance()")
        cluster.complete_step()
