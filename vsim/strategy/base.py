"""The base of strategies: an inner optimizer, and communication of the nodes before and after it.

    gradients ─► modules' communicate_gradients ─► clip ─► optimizer ─► modules' communicate ─► schedule ─► t + 1
                └────────── before_optimizer ──────────┘              └───── after_optimizer ─────┘

A strategy is configured when it is made and holds no state then: a run works on a copy of its own, so that one object
can be used for many runs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import Unpack

from vsim.arguments import real_number, reject_unknown
from vsim.cluster import Cluster
from vsim.cluster.ledger import Ledger
from vsim.cluster.muon import StackedMuon
from vsim.cluster.optim import ELEMENTWISE, OptimSpec, clip_by_node, resolve_optim
from vsim.cluster.optimizers import StackedOptimizer, evaluating, parts_of, stepped_tensors, torch_optimizers
from vsim.cluster.plan import Seconds
from vsim.cluster.randomness import SHARED, generator
from vsim.cluster.replicas import Replicas
from vsim.cluster.schedule import Schedule
from vsim.cluster.stacked import StackedCollectives
from vsim.private_torch import mark_stepped
from vsim.strategy.average import Average
from vsim.strategy.communicate import communicating_through
from vsim.strategy.configured import Configured
from vsim.strategy.mixing import NoMixing
from vsim.strategy.node import PerNodeStep, StackedModel, StateByParameter
from vsim.strategy.when import When, schedule_of, syncs


class CommunicationModule(Configured):
    """One way of communicating. A subclass defines `sync`, which is called after the steps that its H says.

    Attributes:
        H: a number of steps, or a schedule of `vsim.strategy.when`; 1 where a subclass sets none.
        average: how the nodes' vectors become one, in a warm-up their gradients; the mean where a subclass sets none.
        only_once: whether a second one of its kind, whatever its settings, would find nothing to do.
    """

    H: int | When = 1
    average: Average = Average()
    only_once = False

    warmup: Average  # of gradients, with errors of its own; where the schedule has a warm-up

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
        """The first step that it changes anything at, known after the setup. A shorter run gets a warning."""
        return self.when.period or self.when.next

    @property
    def personal_bytes(self) -> int:
        """Bytes of a node's weights that are its client's own, and that it does not pull with the others."""
        return 0

    @property
    def personal_buffers(self) -> Sequence[str]:
        """Names of the buffers that are a client's own, and that the server does not see."""
        return ()

    def shared_weights(self, weights: Tensor) -> Tensor:
        """Return the columns (…, p) of weights (…, P) that clients have in common after a sync; default: all."""
        return weights

    def attend(self, cluster: Cluster) -> None:
        """Called when the set of nodes that take part changes, before step `cluster.step`. Default: no-op."""

    def communicate_gradients(self, cluster: Cluster) -> None:
        """Change `cluster.grads` in place, before clipping and the optimizer step number `cluster.step`.

        Default: `average` them in the warm-up of a `PostLocal` schedule.
        """
        if self.when.is_warmup(cluster.step):
            cluster.grads.copy_(self.warmup(cluster.grads, cluster, "gradients"))

    def communicate(self, cluster: Cluster) -> None:
        """Change `cluster.weights` in place, after the optimizer step number `cluster.step`.

        Default: `sync` when H says so; in a warm-up, `follow`.
        """
        due = self.when.is_due(cluster)
        if self.when.is_warmup(cluster.step):
            self.follow(cluster)
        elif due:
            self.sync(cluster)

    def follow(self, cluster: Cluster) -> None:
        """Called in place of `sync` in a warm-up, when weights are equal. Default: outer weights follow them."""
        if isinstance(outer := vars(self).get("outer_weights"), Tensor):
            outer.copy_(self.shared_weights(cluster.weights)[0])

    def sync(self, cluster: Cluster) -> None:
        """Change `cluster.weights` in place, after a step that H says. Default: no-op."""

    def global_weights(self, cluster: Cluster) -> Tensor | None:
        """Return the shared weights (P,) that this module holds as the global model, if it does."""
        return None

    def measured(self, cluster: Cluster) -> Mapping[str, float]:
        """Return name → number, the same names at any time: columns of the history, besides every run's.

        It is asked after every step, and before the first. Nothing is to be changed or sent.
        """
        return {}

    def evaluating(self) -> AbstractContextManager[None]:
        """Make a context in which these are the weights to evaluate, where an outer optimizer has others."""
        return nullcontext()


Optim = OptimSpec | type[Optimizer] | str | None


class StrategyOptions(TypedDict, total=False):
    """The arguments that all strategies take, besides inner_optim; see `Strategy`."""

    optim_spec: Optim
    lr: float | None
    inner_lr: float | None
    max_norm: float | None
    lr_scheduler: type[LRScheduler] | str | None
    lr_scheduler_kwargs: dict[str, Any] | None
    warmup_steps: int | None
    cosine_anneal: bool | None
    max_steps: int | None


class Strategy(Configured):
    """An inner optimizer and an ordered list of communication modules. The base to subclass.

    Args:
        communication_modules: communicate in this order. Without any, every node trains alone.
        inner_optim: the inner optimizer: an `OptimSpec`, a torch.optim class or its name in small letters. Default
            AdamW. EXO Gym's name for it, optim_spec, is the same argument.
        lr: its learning rate; also inner_lr.
        max_norm: clip every node's gradient to this 2-norm before its optimizer step.
        lr_scheduler: a torch.optim.lr_scheduler class, or "cosine" or "lambda_cosine": the peak rate times s / w while
            s < w (warm-up), then, with cosine_anneal, times 0.1 + 0.45 · (1 + cos(π (s − w) / (T − w))), at 0-based
            step s of T.
        lr_scheduler_kwargs: arguments of the scheduler.
        warmup_steps: w. cosine_anneal: on for "cosine", off for "lambda_cosine". max_steps: T; default the run's.

    Attributes during a run:
        model: the stacked model: `parameters()` yields tensors (K, *shape) with stacked `.grad`.
        optim: the inner optimizer. num_nodes: K. local_step: completed steps. cluster: everything else.
        settings: what it was made with, which must be the same in a run that resumes.

    `str(strategy)` is the call that makes it. Strategies that vsim has name their `family`, the section of
    docs/strategies.md, whose tables are made from the classes.

    A subclass may override `before_optimizer` or `after_optimizer`, or `step` with code written as if for one node,
    which must end with `super().step()`:

        class AverageGradients(Strategy):
            def step(self):
                for p in self.model.parameters():
                    all_reduce(p.grad)
                    p.grad.div_(self.num_nodes)
                super().step()
    """

    derived: ClassVar[tuple[str, ...]] = ("_period", "_stepped", "settings", "schedulers")

    # Whether all nodes have equal weights at every step by construction, so that one row serves them all, and whether
    # only the mean of their gradients is used. Promises of one class; its subclasses have to repeat them.
    shares_weights = False
    shares_grads = False
    # Whether its nodes train on a virtual clock, each at its own speed; see `vsim.strategy.asynchronous`.
    is_asynchronous = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for promise in ("shares_weights", "shares_grads"):
            setattr(cls, promise, cls.__dict__.get(promise, False))

    def __init__(
        self,
        communication_modules: Sequence[CommunicationModule] = (),
        *,
        inner_optim: Optim = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        of_all = ("inner_optim", *StrategyOptions.__annotations__)
        own = [n for n in inspect.signature(type(self).__init__).parameters if n not in ("self", "options", *of_all)]
        where = f"{type(self).__name__}()"
        reject_unknown(options, [*own, *of_all], where)
        if not isinstance(communication_modules, list | tuple):
            raise TypeError(
                f"{where}: communication_modules must be a list of CommunicationModules, got {communication_modules!r}"
            )
        for module in communication_modules:
            if not isinstance(module, CommunicationModule):
                raise TypeError(f"{where}: communication_modules must be CommunicationModules, got {module!r}")
        for i, module in enumerate(communication_modules):
            for other in communication_modules[:i]:  # a module holds state, or does the same again
                again = module.only_once or not (vars(module) or vars(other))
                if module is other or (type(module) is type(other) and again):
                    raise ValueError(f"{where}: communication_modules has the same {type(module).__name__} twice")
        self.settings: dict[str, Any] = {}
        self.communication_modules = list(communication_modules)
        self.optim_spec = resolve_optim(
            where,
            {"inner_optim": inner_optim},
            {"lr": options.get("lr")},
            default=OptimSpec(torch.optim.AdamW),
        )
        max_norm = options.get("max_norm")
        self.max_norm = None if max_norm is None else real_number("max_norm", max_norm, above=0)
        self.schedule = Schedule(
            options.get("lr_scheduler"),
            options.get("lr_scheduler_kwargs"),
            options.get("warmup_steps"),
            options.get("cosine_anneal"),
            options.get("max_steps"),
        )

    # A run -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def setup(self, cluster: Cluster) -> None:
        """Start a run on `cluster`. Called once, on the run's own copy of the strategy."""
        self.cluster = cluster
        self.model = StackedModel(cluster.replicas)
        self._init_node(self.model, cluster.replicas.first_node, cluster.num_nodes)
        self._check_optimizer()
        cluster.optim = self.optim
        self._stepped = [(p, p.grad) for p in stepped_tensors(self.optim)]
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

    def _check_made(self) -> None:
        if "communication_modules" not in vars(self):
            raise TypeError(
                f"{type(self).__name__}.__init__() must call super().__init__(…), with the options of every strategy"
            )

    def _check_optimizer(self) -> None:
        """Raise a TypeError if `_init_node` made an optimizer that is not the nodes' own optimizers side by side."""
        for optimizer in torch_optimizers(self.optim):
            name = type(optimizer).__name__
            if optimizer is self.optim and type(optimizer) not in (*ELEMENTWISE, StackedMuon):
                raise TypeError(
                    f"{name} may mix the elements of a tensor, so over stacked parameters it would mix nodes; "
                    f"build it with OptimSpec(torch.optim.{name}, …).build(self.model), one for each node"
                )
            for group in optimizer.param_groups:
                if group.get("fused") and not all(p.is_contiguous() for p in group["params"]):
                    raise TypeError(
                        f"a fused {name} takes tensors for contiguous, and stacked parameters are not; build it with "
                        f"OptimSpec(torch.optim.{name}, fused=True, …).build(self.model), one for each node"
                    )

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Prepare the nodes; a subclass may extend this, and may set `self.optim`.

        Args:
            model: the stacked model, also `self.model`.
            rank: the number of the first node held here: 0 in the simulator, where all nodes are held together.
            num_nodes: K.
        """
        self.optim: StackedOptimizer = self.optim_spec.build_for(self.cluster.replicas, self.cluster.deterministic)

    def _setup_scheduler(self) -> None:
        """Nothing: the schedule is built when `_init_node` is done. Strategies written for EXO Gym call this there."""

    @property
    def num_nodes(self) -> int:
        """K."""
        return self.cluster.num_nodes

    @property
    def period(self) -> int:
        """Steps from one sync to the next: the longest period of its communication modules."""
        return max((module.when.period or 1 for module in self.communication_modules), default=1)

    def syncs(self, max_steps: int | None, seconds: Seconds | None) -> tuple[int, ...]:
        """Return the steps of all syncs of a run whose H is a schedule; none where it is a number.

        Raises:
            TypeError: modules have several schedules, or it is not known how many steps the run has.
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
        tensors = [[torch.zeros(2, 2)] for _ in range(2)]
        optimizer = OptimSpec(self.optim_spec.cls, **self.optim_spec.kwargs).build_shared(tensors[0], tensors[1], True)
        schedulers = self.schedule.build(optimizer, max_steps)
        rates = [float(optimizer.param_groups[0]["lr"])]
        for _ in range(max_steps):
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return tuple(syncs(copy.copy(schedules[0]), rates, max_steps, seconds)) or (max_steps,)

    @property
    def needs_compute(self) -> bool:
        """Whether a schedule of syncs goes by compute seconds."""
        return any(module.when.needs_compute for module in self.communication_modules)

    @property
    def local_step(self) -> int:
        """Completed steps: 0 during the first."""
        return self.cluster.completed

    @property
    def _is_matrix(self) -> bool:
        """Whether one torch optimizer steps all nodes as one matrix."""
        if not isinstance(self.optim, Optimizer):
            return False
        stepped = [p for group in self.optim.param_groups for p in group["params"]]
        return len(stepped) == 1 and stepped[0].data_ptr() == self.cluster.replicas.weights.data_ptr()

    @property
    def is_per_node(self) -> bool:
        """Whether a subclass defines `step`, which may call the optimizer itself."""
        return type(self).step is not Strategy.step

    @torch.no_grad()
    def take_step(self) -> None:
        """Take step number `cluster.step`, whose gradients are in `cluster.grads`."""
        for parameter, grad in self._stepped:
            if parameter.grad is None:  # after self.optim.zero_grad() in the last step
                parameter.grad = grad
        optimizers = torch_optimizers(self.optim) if self.is_per_node else []
        if self.is_per_node and self._is_matrix and not isinstance(self.optim.state, StateByParameter):  # type: ignore[union-attr]
            self.optim.state = StateByParameter(self.optim.state, self.optim, self.model)  # type: ignore[union-attr, arg-type]
        with (
            communicating_through(self.cluster.collectives),
            PerNodeStep(self.model, optimizers, self.clip, self._note_step),
            self._watching("step"),
        ):
            self.step()
        self.model.write_back()

    def begin_step(self) -> None:
        """Take the part of a step before the optimizer; for the training loop, which steps many optimizers together."""
        with communicating_through(self.cluster.collectives), self._watching("before_optimizer"):
            self.before_optimizer()

    def finish_step(self) -> None:
        """Take the part of a step after the optimizer."""
        with communicating_through(self.cluster.collectives), self._watching("after_optimizer"):
            self.after_optimizer()
        self.model.write_back()

    def _watching(self, name: str) -> AbstractContextManager[object]:
        """Make a context in which a subclass's own method must not mix nodes.

        The same code runs at every step, so that the first step is enough. Nodes that share weights have no stacked
        parameters.
        """
        replicas, is_own = self.cluster.replicas, getattr(type(self), name) is not getattr(Strategy, name)
        shared = len(replicas.weights) != len(replicas.grads)
        if not is_own or shared or self.cluster.compile or self.cluster.completed > 0:
            return nullcontext()
        return NoMixing(list(self.model.parameters()), name)

    def step(self) -> None:
        """One step of all nodes: gradients → communicate → clip → optimizer → communicate → schedule."""
        self.before_optimizer()
        if self.cluster.collectives.moment == "gradients":  # per-node code may have stepped
            self.optim.step()
        self.after_optimizer()

    def before_optimizer(self) -> None:
        """Communicate the gradients, then clip them; per-node code clips where it steps its optimizer."""
        self.model.write_back()
        for module in self.communication_modules:
            known = len(self.cluster.collectives.ledger)
            module.communicate_gradients(self.cluster)
            if len(self.cluster.collectives.ledger) > known and self.cluster.resting_nodes:
                raise TypeError(
                    f"{type(self).__name__}: {type(module).__name__} communicates gradients, and with Sample(epochs=…) "
                    f"clients that have done their epochs have none at step {self.cluster.step}; give no epochs="
                )
        if not self.is_per_node:
            self.clip()

    def after_optimizer(self) -> None:
        """Communicate the weights, move on in the schedule, and count the step."""
        if 0 < self.cluster.completed == self.cluster.step:
            raise TypeError(f"{type(self).__name__}: step {self.cluster.step} is counted twice; call super() once")
        self._note_step()
        if self.cluster.plan is not None and self.cluster.plan.renews and self.period != self._period:
            raise TypeError(
                f"{type(self).__name__}: H is {self.period}, and rounds of clients have {self._period} steps; where H "
                "moves in a run, give a schedule of vsim.strategy.when"
            )
        for module in self.communication_modules:
            module.communicate(self.cluster)
        for scheduler in chain(*self.schedulers):
            scheduler.step()
        self.cluster.completed = self.cluster.step

    def _note_step(self) -> None:
        """From here on, what is communicated comes after the optimizer step."""
        self.cluster.collectives.moment = "weights"

    def clip(self) -> None:
        """Clip every node's gradient to `max_norm`, if there is one. Happens before every optimizer step."""
        if self.max_norm is not None:
            clip_by_node(self.cluster.replicas, self.max_norm, exact=self.cluster.deterministic)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Make a context in which all weights are those to evaluate, where an optimizer has others."""
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.optim, self.cluster.replicas.weights))
            for module in self.communication_modules:
                stack.enter_context(module.evaluating())
            yield

    def dry_run(
        self, model: nn.Module, num_nodes: int, max_steps: int, seed: int = 42, seconds: Seconds | None = None
    ) -> Ledger:
        """Return what a run would send, without training: the strategy's own code runs on tensors without values.

        Args:
            model: on the meta device. seconds: how long nodes compute, for schedules that depend on it.

        Raises:
            ValueError: the strategy is asynchronous, or what it sends depends on values.
        """
        name = type(self).__name__
        if self.is_asynchronous:
            raise ValueError(
                f"{name} is asynchronous: what it sends depends on how long nodes compute. Train it with compute= and "
                "network=; history.time(network, compute) has its seconds"
            )
        ledger, draws = Ledger(num_nodes), generator(seed, SHARED)
        replicas = Replicas.of(model, num_nodes, torch.device("meta"))
        cluster = Cluster(replicas, StackedCollectives(ledger), draws, torch.ones(num_nodes), max_steps)
        cluster.seconds = seconds
        strategy = copy.deepcopy(self)
        try:
            strategy.setup(cluster)
            optimizers = torch_optimizers(strategy.optim)
            for step in range(1, max_steps + 1):
                cluster.step = ledger.steps = step
                if step > 1 and strategy._repeats:
                    for event in ledger[: len(ledger) // (step - 1)]:
                        ledger.record(event._replace(step=step, due=step))
                    continue
                if strategy.is_per_node:
                    strategy.take_step()
                    continue
                with torch.no_grad():
                    strategy.begin_step()
                    for optimizer in optimizers:
                        mark_stepped(optimizer)
                    strategy.finish_step()
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"{name} cannot be priced without training: what it sends depends on values, and here tensors have "
                f"none (step {cluster.step}: {str(error).splitlines()[0]}). Train it with a small model, and price its "
                "ledger"
            ) from error
        return ledger

    @property
    def _repeats(self) -> bool:
        """Whether every step is known to send what the first one sends: a dry run takes one step then."""
        return False

    @property
    def lr(self) -> float:
        """The learning rate of the next optimizer step."""
        return self.cluster.lr

    def measured(self) -> Mapping[str, float]:
        """Return name → number, for columns of the history, from all modules. A subclass may add its own."""
        return {name: float(v) for m in self.communication_modules for name, v in m.measured(self.cluster).items()}

    def global_weights(self) -> Tensor:
        """Return the shared weights (P,) to evaluate as the global model: a module's own, or the mean replica."""
        for module in self.communication_modules:
            weights = module.global_weights(self.cluster)
            if weights is not None:
                return weights
        return self.cluster.mean_weights()

    @property
    def evaluates_mean(self) -> bool:
        """Whether the global model is the mean replica: neither the strategy nor a module says otherwise."""
        modules = (type(module).global_weights for module in self.communication_modules)
        replaced = (own is not CommunicationModule.global_weights for own in modules)
        return type(self).global_weights is Strategy.global_weights and not any(replaced)

    def has_global_model(self, mean: Tensor | None = None) -> bool:
        """Return whether a server has the global model now: kept by a module, or equal on all nodes after a sync.

        Args:
            mean: the mean replica (P,), if it is known: equal nodes have it, so that none has to send its weights.
        """
        cluster, collectives = self.cluster, self.cluster.collectives
        if any(module.global_weights(cluster) is not None for module in self.communication_modules):
            return True
        if type(self).global_weights is not Strategy.global_weights or cluster.replicas.shares_weights:
            return True
        with collectives.unbilled():
            same = cluster.weights == (collectives.broadcast(cluster.weights) if mean is None else mean)  # (R, P)
            for module in self.communication_modules:
                same = module.shared_weights(same)
            return bool(collectives.all_reduce(same.all(1).float(), "min"))


class CommunicateOptimizeStrategy(Strategy):
    """Any communication modules in order around one inner optimizer; see `Strategy` for the arguments."""

    def __init__(
        self,
        communication_modules: Sequence[CommunicationModule],
        inner_optim: Optim = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(communication_modules, inner_optim=inner_optim, **options)
