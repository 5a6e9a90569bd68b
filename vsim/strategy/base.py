"""The base of strategies: an inner optimizer, and communication of the nodes before and after it.

    gradients ─► optimize ─► advance

A strategy object holds arguments, but no state: every run works on a copy, so that one object serves many runs. For
code written as if for one node, see `vsim.strategy.per_node`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import Parameter
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import Unpack

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
from vsim.cluster.schedule import LRSchedule
from vsim.cluster.stacked import StackedCollectives
from vsim.private_torch import mark_stepped
from vsim.strategy.attack import Attack
from vsim.strategy.average import Average
from vsim.strategy.configured import SPELLINGS, Configured
from vsim.strategy.of_modules import docstring_of, init_of
from vsim.strategy.when import When, schedule_of, syncs


class CommunicationModule(Configured):
    """One kind of communication. A subclass defines `sync`, which is called after the steps that H selects.

    Attributes:
        H: steps from one sync to the next, or a schedule of `vsim.strategy.when`; 1 if a subclass sets none.
        average: merges the nodes' vectors, and in a warm-up their gradients; the mean if a subclass sets none.
        only_once: whether a second module of the same class, whatever its settings, would have nothing to do.
        is_gossip: whether nodes meet few others only, so that the history has their `consensus_distance`.
    """

    H: int | When = 1
    average: Average = Average()
    only_once = False
    is_gossip = False

    warmup: Average  # averages gradients in a warm-up, with separate compression errors; unset without a warm-up

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

    @property
    def first_step(self) -> int:
        """The first step at which the module has an effect, known after `setup`. A shorter run gets a warning."""
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
        """Record the clients' state now; for modules that otherwise record it only at a sync. Default: no-op."""

    def personalize(self, weights: Tensor, buffers: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Turn copies of the global weights (P,) and buffers into a client's model, in place.

        Default: no-op, since clients use the global model.

        Args:
            own: name → the client's row, for every tensor that this module declares by `keep_client`.
        """

    def shared_weights(self, weights: Tensor) -> Tensor:
        """Return the columns (…, p) of weights (…, P) that clients have in common after a sync; default: all."""
        return weights

    def check_nodes(self, cluster: Cluster) -> None:
        """Raise a ValueError if too few nodes take part. Default: ask the rule of `average`."""
        self.average.rule.check(cluster.num_nodes)

    def check_optim(self, optim: OptimSpec) -> None:
        """Raise an error if the module does not allow this inner optimizer. Default: no-op."""

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
        """Return the shared weights (P,) that this module keeps as the global model, or None."""
        return None

    def measured(self, cluster: Cluster) -> Mapping[str, float]:
        """Return columns of the history for this module: name → number, with the same names in every call.

        Called before the first step and after every step. An override must not change or send anything.
        """
        return {}

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context that swaps in the weights to evaluate, if the outer optimizer keeps such weights."""
        return nullcontext()


Optim = OptimSpec | type[Optimizer] | str | None


class StrategyOptions(TypedDict, total=False):
    """The arguments that all strategies take, besides inner_optim, with EXO Gym's spellings; see `Algorithm`."""

    optim_spec: Optim
    lr: float | None
    inner_lr: float | None
    max_norm: float | None
    lr_scheduler: type[LRScheduler] | str | None
    lr_scheduler_kwargs: dict[str, Any] | None
    warmup_steps: int | None
    cosine_anneal: bool | None
    max_steps: int | None
    attack: Attack | None


OPTIONS = tuple(
    Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind.__forward_arg__)
    for name, kind in StrategyOptions.__annotations__.items()
    if name not in SPELLINGS
)


# A module's hook → what an algorithm has in its place, which whoever trains calls.
_IN_PLACE_OF_HOOKS = {
    "setup": "begin",
    "communicate_gradients": "gradients",
    "sync": "advance",
    "attend": "change_nodes",
    "measured": "columns",
    "evaluating": "evaluation",
    "global_weights": "model_weights",
}


class Algorithm(Configured):
    """An inner optimizer and an ordered list of communication modules. The base of all of vsim's strategies.

    A run calls `begin` once, and in every step `gradients`, `optimize` and `advance`; then it advances the schedules
    and counts the step. A subclass that extends one of these methods calls `super()`. For code that is written as if
    for one node, subclass `Strategy`.

    A strategy of fixed modules names their classes in its class statement. It inherits the modules' arguments,
    docstring and checks, in addition to the options below:

        class DiLoCoStrategy(Algorithm, of=DiLoCoCommunicator, positions=("inner_optim", "outer_optim", "H")):

    `of` is one module class or several; `positions` are the arguments that may be positional, by default inner_optim;
    `names` maps a module's argument to the strategy's name for it, or to None to drop it.

    Args:
        communication_modules: communicate in this order. Default: none; the nodes do not communicate.
        inner_optim: the inner optimizer: an `OptimSpec`, a torch.optim class or its lower-case name. Default
            AdamW. EXO Gym's name, optim_spec, is accepted as well.
        lr: the inner learning rate. EXO Gym's name, inner_lr, is accepted as well.
        max_norm: clip every node's gradient to this 2-norm before its optimizer step.
        lr_scheduler: a torch.optim.lr_scheduler class, or "cosine" or "lambda_cosine". Both multiply the peak rate at
            step s = 0, 1, … of T by s / w while s < w (warm-up), and then, with cosine_anneal, by
            0.1 + 0.45 · (1 + cos(π (s − w) / (T − w))).
        lr_scheduler_kwargs: arguments of the scheduler.
        attack: makes some nodes send other vectors to `average`, or train on wrong labels; see `vsim.Attack`.
        warmup_steps: w, default 0. cosine_anneal: default True for "cosine", else False. max_steps: T, by default the
            run's number of steps.

    Attributes during a run:
        cluster: the nodes. optim: the inner optimizer.
        settings: the strategy's arguments, which a resumed run must repeat.

    `str(strategy)` is the call that makes the strategy. `family` is its section in docs/strategies.md.
    """

    derived: ClassVar[tuple[str, ...]] = ("_period", "settings", "schedulers")
    common = (Parameter("inner_optim", Parameter.KEYWORD_ONLY, default=None, annotation="Optim"), *OPTIONS)

    # Whether nodes train on a virtual clock, at different speeds; see `vsim.strategy.asynchronous`.
    is_asynchronous = False
    # Methods of `Strategy` that this class never calls.
    uncalled: ClassVar[tuple[str, ...]] = ("step", "before_optimizer", "after_optimizer", "_init_node")

    def __init_subclass__(
        cls,
        of: type[CommunicationModule] | tuple[type[CommunicationModule], ...] | None = None,
        positions: Sequence[str] = ("inner_optim",),
        names: Mapping[str, str | None] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        if of is not None:
            modules = of if isinstance(of, tuple) else (of,)
            cls.__init__ = init_of(modules, names, positions, OPTIONS, Algorithm._compose)  # type: ignore[method-assign]
            cls.__doc__ = docstring_of(cls.__doc__ or "", modules, names)
        super().__init_subclass__(**kwargs)

    if TYPE_CHECKING:  # with `of`, `__init__` takes the modules' arguments

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    else:

        def __init__(
            self,
            communication_modules: Sequence[CommunicationModule] = (),
            inner_optim: Optim = None,
            **options: Unpack[StrategyOptions],
        ) -> None:
            self._compose(communication_modules, inner_optim, options)

    def _compose(
        self, communication_modules: Sequence[CommunicationModule], inner_optim: Optim, options: StrategyOptions
    ) -> None:
        where = f"{type(self).__name__}()"
        if uncalled := [f"{name}()" for name in self.uncalled if hasattr(self, name)]:
            raise TypeError(
                f"{type(self).__name__} defines {', '.join(uncalled)}, called only in subclasses of Strategy and "
                "CommunicateOptimizeStrategy: subclass one of these, or extend begin(), gradients() or advance()"
            )
        if hooks := [name for name in _IN_PLACE_OF_HOOKS if hasattr(self, name)]:
            raise TypeError(
                f"{type(self).__name__} defines {', '.join(f'{name}()' for name in hooks)}, called only in "
                f"CommunicationModules: extend {', '.join(f'{_IN_PLACE_OF_HOOKS[name]}()' for name in hooks)}"
            )
        if not isinstance(communication_modules, list | tuple):
            raise TypeError(
                f"{where}: communication_modules must be a list of CommunicationModules, got {communication_modules!r}"
            )
        for module in communication_modules:
            if not isinstance(module, CommunicationModule):
                raise TypeError(f"{where}: communication_modules must be CommunicationModules, got {module!r}")
        for i, module in enumerate(communication_modules):
            for other in communication_modules[:i]:  # a module holds one state; a second module may do nothing
                again = module.only_once or not (vars(module) or vars(other))
                if module is other or (type(module) is type(other) and again):
                    raise ValueError(f"{where}: communication_modules has the same {type(module).__name__} twice")
        self.settings: dict[str, Any] = {}
        self.communication_modules = list(communication_modules)
        self.attack = options.get("attack")
        if self.attack is not None:
            self.communication_modules = self._attacked(self.attack)
        given_optim, rates = {"inner_optim": inner_optim}, {"lr": options.get("lr")}
        self.optim_spec = resolve_optim(where, given_optim, rates, default=self.default_inner_optim())
        for module in self.communication_modules:
            with naming(where):
                module.check_optim(self.optim_spec)
        max_norm = options.get("max_norm")
        self.max_norm = None if max_norm is None else real_number("max_norm", max_norm, above=0)
        given: Mapping[str, Any] = options
        of_schedule = ("lr_scheduler", "lr_scheduler_kwargs", "warmup_steps", "cosine_anneal", "max_steps")
        self.schedule = LRSchedule(*map(given.get, of_schedule))

    def _attacked(self, attack: Attack) -> list[CommunicationModule]:
        """Return copies of the modules, with the attack in their averages."""
        name = type(self).__name__
        if not isinstance(attack, Attack):
            raise TypeError(f"{name}: attack must be a vsim.Attack, got {attack!r}")
        modules = [copy.copy(module) for module in self.communication_modules]
        if attack.kind == "label_flip":
            return modules
        taking = [isinstance(vars(module).get("average"), Average) or hasattr(module, "attack") for module in modules]
        if not any(taking):
            raise ValueError(f"{name}: {attack} attacks messages of an average= or of gossip, and there are none")
        for module in (own for own, takes in zip(modules, taking, strict=True) if takes):
            holder = module if hasattr(module, "attack") else copy.deepcopy(module.average)
            if holder.refuses_attack:
                raise ValueError(f"{name}: {attack} cannot act, as {holder.refuses_attack}")
            holder.attack = attack
            if holder is not module:
                module.average = holder
        return modules

    @classmethod
    def default_inner_optim(cls) -> OptimSpec:
        """Return the default inner optimizer."""
        return OptimSpec(torch.optim.AdamW)

    def check(self) -> None:
        if "communication_modules" not in vars(self):
            raise TypeError(
                f"{type(self).__name__}.__init__() must call super().__init__(…), with the options of every strategy"
            )
        if shared := [f"{name} = True" for name in ("shares_weights", "shares_grads") if getattr(self, name, False)]:
            raise TypeError(
                f"{type(self).__name__} has {' and '.join(shared)}, but nodes do not share rows: each has its own "
                "weights and gradients. Remove it"
            )

    # A run -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, cluster: Cluster) -> None:
        """Start a run on `cluster`. Called once, on the run's own copy of the strategy."""
        self.cluster = cluster
        self.optim = cluster.optim = self.inner_optimizer()
        self.schedulers = [self.schedule.build(part, cluster.max_steps) for part in parts_of(self.optim)]
        cluster.schedulers = [*chain(*self.schedulers)]
        self._period = self.period
        for module in self.communication_modules:
            module.when.setup(cluster)
            module.setup(cluster)
            if module.when.has_warmup:
                if self.max_norm is not None and module.personal_bytes:
                    raise ValueError(
                        f"max_norm={self.max_norm:g} scales each node's gradient by a norm that includes its personal "
                        f"layers, so that shared ones would drift apart in the warm-up of H={module.H!r}: leave out "
                        "max_norm, or take average=mean() | clip(…), or an H without a warm-up"
                    )
                module.setup_warmup(cluster)

    def inner_optimizer(self) -> StackedOptimizer:
        """Return the inner optimizer of the nodes of `cluster`."""
        return self.optim_spec.build_for(self.cluster.replicas, self.cluster.deterministic)

    def change_nodes(self, changed: bool = True) -> None:
        """Continue with the nodes that take part in step `cluster.step`.

        Args:
            changed: whether the set of nodes changed before the step.
        """
        for module in self.communication_modules:
            module.check_nodes(self.cluster)
            if changed:
                module.attend(self.cluster)

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
        self.clip()

    def gradient(self, at: Tensor, batch: Any = None) -> Tensor:
        """Return the nodes' gradients (R, P) at the weights `at` (R, P); see `Cluster.gradient`."""
        return self.cluster.gradient(at, batch)

    def _communicate_gradients(self) -> None:
        """Call `communicate_gradients` of all modules."""
        for module in self.communication_modules:
            known = len(self.cluster.collectives.ledger)
            module.communicate_gradients(self.cluster)
            if len(self.cluster.collectives.ledger) > known and self.cluster.resting_nodes:
                raise TypeError(
                    f"{type(self).__name__}: {type(module).__name__} communicates gradients, and with Sample(epochs=…) "
                    f"or Partial(…) clients that rest have none at step {self.cluster.step}; leave them out"
                )

    def clip(self) -> None:
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
        for module in self.communication_modules:
            module.communicate(cluster)
        position.has_communicated = True

    @property
    def lr(self) -> float:
        """The learning rate of the next optimizer step."""
        return self.cluster.lr

    def columns(self) -> Mapping[str, float]:
        """Return columns of the history, from all modules' `measured`: name → number. A subclass may add its own."""
        return {name: float(v) for m in self.communication_modules for name, v in m.measured(self.cluster).items()}

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Return a context that swaps in the weights to evaluate, if optimizers keep such weights."""
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.optim, self.cluster.replicas.weights))
            for module in self.communication_modules:
                stack.enter_context(module.evaluating())
            yield

    # The global model ------------------------------------------------------------------------------------------------

    def model_weights(self) -> Tensor:
        """Return the shared weights (P,) to evaluate as the global model: a module's, or the mean replica."""
        for module in self.communication_modules:
            weights = module.global_weights(self.cluster)
            if weights is not None:
                return weights
        return self.cluster.mean_weights()

    @property
    def evaluates_mean(self) -> bool:
        """Whether the global model is the mean replica, because neither the strategy nor a module defines another."""
        modules = (type(module).global_weights for module in self.communication_modules)
        replaced = any(own is not CommunicationModule.global_weights for own in modules)
        return type(self).model_weights is Algorithm.model_weights and not replaced

    @property
    def is_gossip(self) -> bool:
        """Whether a module lets nodes meet few others only."""
        return any(module.is_gossip for module in self.communication_modules)

    @property
    def is_personal(self) -> bool:
        """Whether clients use personal models in place of the global model."""
        modules = (type(module).personalize for module in self.communication_modules)
        return any(own is not CommunicationModule.personalize for own in modules)

    def has_global_model(self, mean: Tensor | None = None) -> bool:
        """Return whether a server has the global model now: a module keeps it, or all nodes are equal after a sync.

        Args:
            mean: the mean replica (P,), if known. Nodes then compare their weights with it, and no node sends weights.
        """
        cluster, collectives = self.cluster, self.cluster.collectives
        held = type(self).model_weights is not Algorithm.model_weights
        if held or any(module.global_weights(cluster) is not None for module in self.communication_modules):
            return True
        with collectives.unbilled():
            same = cluster.weights == (collectives.broadcast(cluster.weights) if mean is None else mean)  # (R, P)
            for module in self.communication_modules:
                same = module.shared_weights(same)
            return bool(collectives.all_reduce(same.all(1).float(), "min"))

    # Before a run ----------------------------------------------------------------------------------------------------

    @property
    def period(self) -> int:
        """Steps from one sync to the next: the longest period of the communication modules."""
        return max((module.when.period or 1 for module in self.communication_modules), default=1)

    @property
    def needs_compute(self) -> bool:
        """Whether a schedule of syncs depends on compute seconds."""
        return any(module.when.needs_compute for module in self.communication_modules)

    def syncs(self, max_steps: int | None, seconds: ComputeSeconds | None) -> tuple[int, ...]:
        """Return the steps of all syncs of a run whose H is a schedule; empty if H is a number.

        Raises:
            TypeError: modules have several schedules, or the run's number of steps is unknown.
        """
        schedules = [module.when for module in self.communication_modules if module.when.period is None]
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
        self, model: nn.Module, num_nodes: int, max_steps: int, seed: int = 42, seconds: ComputeSeconds | None = None
    ) -> Ledger:
        """Return the ledger of a run without training: the strategy's code runs on tensors without values.

        Args:
            model: on the meta device. seconds: the nodes' compute seconds, for schedules that depend on them.

        Raises:
            ValueError: the strategy is asynchronous, or its messages depend on values.
        """
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
                for step in range(1, max_steps + 1):
                    ledger.position.begin(step)
                    if step > 1 and strategy._repeats:
                        for event in ledger[: len(ledger) // (step - 1)]:
                            ledger.record(event._replace(step=step, due=step))
                        continue
                    take_step(strategy)
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"{name} cannot be priced without training: what it sends depends on values, and here tensors have "
                f"none (step {cluster.step}: {str(error).splitlines()[0]}). Train it with a small model, and price its "
                "ledger"
            ) from error
        return ledger

    @property
    def _repeats(self) -> bool:
        """Whether every step certainly sends the same as the first, so that a dry run takes only one step."""
        return False


def take_step(strategy: Algorithm, after_optimizer: Callable[[], object] | None = None) -> None:
    """Take an algorithm's part of a step, once the gradients are computed, and count the step.

    Frozen parameters have gradients of zero, and the optimizer skips them.

    Args:
        after_optimizer: called between the optimizer step and the communication of weights.

    Raises:
        TypeError: a method of a subclass does not call `super()`, so that the modules have not communicated.
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
