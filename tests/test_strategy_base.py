"""Strategies: code written for one node runs for all, runs leave no state, and both moments come in order."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from reference_cluster import TASKS, Task, small_cnn, small_mlp
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from vsim import Trainer
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.cluster.reductions import groups_of
from vsim.strategy import (
    Algorithm,
    AloneStrategy,
    AsyncDiLoCoStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    FedAvgStrategy,
    HierarchicalStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)
from vsim.strategy.communicate import all_gather, all_reduce, broadcast

SPEC = OptimSpec("sgd", lr=0.1, momentum=0.9)


def fit(strategy: Strategy, task: Task = TASKS[0], **options: Any) -> Trainer:
    trainer = Trainer(task.model(), task.data())
    options = {"num_nodes": 3, "max_steps": 5, "batch_size": 4, "progress": False, "executor": "loop", **options}
    trainer.fit(strategy=strategy, **options)
    return trainer


def trained(strategy: Strategy, task: Task = TASKS[0], **options: Any) -> Tensor:
    """The weights (K, P) after 5 steps."""
    trainer = fit(strategy, task, **options)
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights


# Code for one node


class AverageByHand(Strategy):
    """AllReduce, parameter by parameter."""

    def step(self) -> None:
        for p in self.model.parameters():
            all_reduce(p.grad)
            p.grad.div_(self.num_nodes)
        super().step()


class AssignThenStepMyself(Strategy):
    """Nothing in place, and the optimizer is stepped here: `super().step()` must not do it again."""

    def step(self) -> None:
        for p in self.model.parameters():
            mean = p.grad.clone()
            all_reduce(mean)
            p.grad = mean / self.num_nodes
        self.optim.step()
        self.optim.zero_grad()
        super().step()


class OwnOptimizer(Strategy):
    """As strategies of the predecessor do: the optimizer is built over the node's model, and stepped here."""

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        assert (rank, num_nodes) == (0, 3) and model is self.model
        self.optim = self.optim_spec.build(model)

    def step(self) -> None:
        if self.num_nodes > 1:
            for p in self.model.parameters():
                if p.grad is not None:
                    all_reduce(p.grad)
                    p.grad.div_(self.num_nodes)
        self.optim.step()
        self.optim.zero_grad()
        super().step()


# With an eps above rounding, so that no step is made of it.
ADAMW = OptimSpec("adamw", lr=0.01, eps=1e-3)
# Every way, every model, every optimizer.
CUSTOM = [
    (AverageByHand, TASKS[1], ADAMW),
    (AverageByHand, TASKS[2], OptimSpec("adafactor", lr=0.05, eps=(1e-6, 1e-3))),
]
CUSTOM += [(custom, TASKS[0], spec) for custom in (AssignThenStepMyself, OwnOptimizer) for spec in (SPEC, ADAMW)]


@pytest.mark.parametrize(("custom", "task", "spec"), CUSTOM)
def test_averaging_by_hand_is_allreduce(custom: type[Strategy], task: Task, spec: OptimSpec) -> None:
    options: dict[str, Any] = {"lr_scheduler": StepLR, "lr_scheduler_kwargs": {"step_size": 2}}
    ours = trained(custom(inner_optim=spec, **options), task, deterministic=True)
    ways: list[dict[str, Any]] = [{"deterministic": True}]
    if spec.cls is torch.optim.SGD:  # the others make steps out of rounding
        ways.append({"executor": "vmap"})
    for way in ways:
        theirs = trained(SimpleReduceStrategy(inner_optim=spec, **options), task, **way)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("promised", [("shares_weights",), ("shares_weights", "shares_grads")])
def test_a_promise_to_share_rows_is_an_error(promised: tuple[str, ...]) -> None:
    class Promising(SimpleReduceStrategy):
        pass

    for name in promised:
        setattr(Promising, name, True)
    with refused(TypeError, "Promising", *(f"{name} = True" for name in promised), "its own weights", "Remove it"):
        Promising(lr=0.1)


def test_a_custom_strategy_is_clipped_as_allreduce_is() -> None:
    ours = trained(AverageByHand(inner_optim=SPEC, max_norm=0.1), deterministic=True)
    clipped, free = (
        trained(SimpleReduceStrategy(inner_optim=SPEC, max_norm=norm), deterministic=True) for norm in (0.1, None)
    )
    torch.testing.assert_close(ours, clipped)
    assert not torch.allclose(ours, free)


class AverageWeightsByAssignment(Strategy):
    """FedAvg at every step, by `p.data = …`."""

    def step(self) -> None:
        super().step()
        for p in self.model.parameters():
            mean = p.data.clone()
            all_reduce(mean, "mean")
            p.data = mean


class AverageWeightsInPlace(Strategy):
    def step(self) -> None:
        super().step()
        for p in self.model.parameters():
            all_reduce(p, "mean")


@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("custom", [AverageWeightsByAssignment, AverageWeightsInPlace])
def test_assigned_weights_are_the_weights(custom: type[Strategy], executor: str) -> None:
    ours = trained(custom(inner_optim=SPEC), executor=executor)
    torch.testing.assert_close(ours, trained(FedAvgStrategy(inner_optim=SPEC), executor=executor))


def test_what_a_step_does_to_one_node_it_does_to_each() -> None:
    class Signs(Strategy):
        """Steps by signs, but leaves the first parameter without a gradient, and all others with a weight decay."""

        def step(self) -> None:
            first, *others = self.model.parameters()
            first.grad = None
            for p in others:
                p.grad = torch.sign(p.grad)
                p.mul_(0.9)
            super().step()

    together = trained(Signs(inner_optim=OptimSpec("sgd", lr=0.1)), max_steps=1)
    start = nn.utils.parameters_to_vector(small_mlp().parameters()).detach()
    assert torch.equal(together[:, :192], start[:192].expand(3, -1))
    moved = (together - 0.9 * start)[:, 192:].abs()
    assert torch.all((moved < 1e-6) | ((moved - 0.1).abs() < 1e-6))  # 0.9·θ ± lr, or 0.9·θ where g = 0
    assert len(together.unique(dim=0)) == 3

    class Follow(Strategy):
        def step(self) -> None:
            super().step()
            for p in self.model.parameters():
                broadcast(p.data, src=2)

    followed = trained(Follow(inner_optim=SPEC), max_steps=1)
    assert torch.equal(followed, trained(Strategy(inner_optim=SPEC), max_steps=1)[2:].expand(3, -1))


def test_a_master_copy_as_the_predecessors_strategies_keep_it() -> None:
    # DiLoCo written for one node: a deep copy of the model, an outer optimizer over it, gradients by assignment.
    class ByHand(Strategy):
        def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
            super()._init_node(model, rank, num_nodes)
            self.master = copy.deepcopy(model)
            self.outer = torch.optim.SGD(self.master.parameters(), lr=0.7, momentum=0.9, nesterov=True)

        def step(self) -> None:
            super().step()
            if self.local_step % 2 == 0:
                for own, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                    mean = own.data.clone()
                    all_reduce(mean, "mean", label="outer gradient")
                    master.grad = master.data - mean
                self.outer.step()
                for own, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                    own.data.copy_(master.data)

    by_hand = fit(ByHand(inner_optim=SPEC), deterministic=True)
    ours = fit(DiLoCoStrategy(H=2, inner_optim=SPEC), deterministic=True)
    assert by_hand.strategy is not None and ours.strategy is not None
    torch.testing.assert_close(by_hand.strategy.cluster.weights, ours.strategy.cluster.weights)
    assert by_hand.ledger.payload_bytes == ours.ledger.payload_bytes
    assert [e.step for e in by_hand.ledger] == [2] * 4 + [4] * 4  # one call for each of four parameters
    assert by_hand.strategy.local_step == by_hand.strategy.cluster.max_steps == 5 and by_hand.strategy.cluster.lr == 0.1
    assert by_hand.strategy.cluster.shard_sizes.tolist() == [10, 10, 10]  # 29 examples, padded


def test_the_stacked_model() -> None:
    class Look(Strategy):
        def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
            super()._init_node(model, rank, num_nodes)
            expected = dict(small_cnn().named_parameters())
            assert [n for n, _ in model.named_parameters(prefix="net")] == [f"net.{n}" for n in expected]
            for (name, p), kept in zip(model.named_parameters(), copy.deepcopy(model).parameters(), strict=True):
                assert isinstance(p, nn.Parameter) and p.shape == (num_nodes, *expected[name].shape)
                assert p.grad is not None and p.grad.shape == p.shape
                assert torch.equal(p, kept) and p.data_ptr() != kept.data_ptr()

    fit(Look(inner_optim=SPEC), TASKS[1])


@pytest.mark.parametrize("method", ["step", "before_optimizer", "after_optimizer", "_init_node"])
@pytest.mark.parametrize("base", [DiLoCoStrategy, AsyncDiLoCoStrategy])
def test_code_for_one_node_has_no_place_in_vsims_own_strategies(base: type[Algorithm], method: str) -> None:
    with pytest.raises(TypeError, match=rf"^Own defines {method}\(\), .* subclass"):
        type("Own", (base,), {method: lambda self: None})()


@pytest.mark.parametrize("base", [DiLoCoStrategy, Strategy])
def test_what_a_strategy_communicates_itself_is_communicated(base: type[Algorithm]) -> None:
    seen: list[int] = []

    class Own(base):  # type: ignore[misc, valid-type]
        def sync(self, cluster: Cluster) -> None:
            super().sync(cluster)
            seen.append(cluster.step)

        def measured(self, cluster: Cluster) -> dict[str, float]:
            return {"own": float(len(seen))}

    own = fit(Own(inner_optim=SPEC, **({"H": 2} if base is DiLoCoStrategy else {})))
    every = 2 if base is DiLoCoStrategy else 1
    assert seen == [step for step in range(1, 6) if step % every == 0] and own.history["own"][-1] == len(seen)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([DeMoStrategy()], "DeMoStrategy() … extends … gradients"),
        ([HierarchicalStrategy({3: 2})], "extends … parts"),
        ([AsyncDiLoCoStrategy()], "AsyncDiLoCoStrategy() … begin"),
        ([FedAvgStrategy(lr=0.1)], "FedAvgStrategy(lr=0.1) … takes no lr"),
        ([FedAvgStrategy(inner_optim="sgd")], "takes no inner_optim"),
        ([SimpleReduceStrategy(), SimpleReduceStrategy(average="median")], "the same SimpleReduceStrategy twice"),
    ],
    ids=str,
)
def test_what_cannot_be_a_part_is_refused(parts: list[Algorithm], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=".*".join(map(re.escape, words.split(" … ")))):
        CommunicateOptimizeStrategy(parts)


# Modules


class Recorder(Algorithm):
    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def __deepcopy__(self, memo: object) -> Recorder:
        return self  # so that the log can be read after the run

    def setup(self, cluster: Cluster) -> None:
        self.log.append((self.name, "setup", cluster.num_nodes, cluster.max_steps))

    def communicate_gradients(self, cluster: Cluster) -> None:
        self.log.append((self.name, "before", cluster.step))

    def communicate(self, cluster: Cluster) -> None:
        self.log.append((self.name, "after", cluster.step))


def test_modules_have_two_moments_in_their_order() -> None:
    log: list[Any] = []

    class Watched(CommunicateOptimizeStrategy):
        def clip_gradients(self) -> None:
            log.append("clip")
            super().clip_gradients()

    fit(Watched([Recorder("a", log), Recorder("b", log)]), max_steps=2)
    moments = [[(name, when, t) for name in "ab"] for t in (1, 2) for when in ("before", "after")]
    setups = [(name, "setup", 3, 2) for name in "ab"]
    assert log == [*setups, *moments[0], "clip", *moments[1], *moments[2], "clip", *moments[3]]


def test_a_strategy_is_its_module_whose_global_model_is_that_of_the_first_that_has_one() -> None:
    for module, strategy in (
        (FedAvgStrategy(island_size=2, H=2), FedAvgStrategy(H=2, island_size=2, inner_optim=SPEC)),
        (DiLoCoStrategy(H=2, outer_lr=0.5), DiLoCoStrategy(H=2, outer_lr=0.5, inner_optim=SPEC)),
    ):
        ours = fit(CommunicateOptimizeStrategy([module], inner_optim=SPEC), deterministic=True).strategy
        assert ours is not None
        assert torch.equal(ours.cluster.weights, trained(strategy, deterministic=True))
        outer = getattr(ours.parts[0], "outer_weights", ours.cluster.weights.mean(0))
        assert torch.equal(ours.model_weights(), outer)
    both = fit(CommunicateOptimizeStrategy([SimpleReduceStrategy(), DiLoCoStrategy(H=3)], inner_optim=SPEC)).strategy
    assert both is not None
    assert torch.equal(both.model_weights(), vars(both.parts[1])["outer_weights"])


# What mixes nodes


class ClipsAsOneNode(Strategy):
    """As strategies for EXO Gym clip."""

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        super().step()


def test_a_norm_over_all_nodes_is_an_error() -> None:
    sgd: dict[str, Any] = {"inner_optim": "sgd", "lr": 0.1}
    with pytest.raises(ValueError, match=r"clip_grad_norm_ .* one norm over all nodes.*; give the strategy max_norm="):
        fit(ClipsAsOneNode(**sgd))
    alone = trained(ClipsAsOneNode(**sgd), num_nodes=1)
    assert torch.allclose(alone, trained(Strategy(max_norm=0.5, **sgd), num_nodes=1), atol=1e-6)
    assert not torch.allclose(alone, trained(Strategy(**sgd), num_nodes=1), atol=1e-6)


MIXES: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.grad.norm(),
    "vector_norm": lambda p: torch.linalg.vector_norm(p.grad),
    "max": lambda p: p.grad.abs().max(),
    "sum": lambda p: (p.grad.clone() * p.detach()).sum(),
    "mean": lambda p: p.data.mean(),
    "square": lambda p: p.grad.square().mean(dim=0, keepdim=True),
    "quantile": lambda p: torch.quantile(p.grad.abs(), 0.9),
    "any": lambda p: p.grad.isnan().any(),
    "view": lambda p: p.grad.view(-1).abs().topk(2),
    "view of a copy": lambda p: p.grad.clone().view(-1).abs().topk(2),
    "flatten": lambda p: p.grad.flatten().sort(),
    "reshape, in place": lambda p: p.grad.reshape(-1).mul_(2),  # of a copy
    "cat": lambda p: torch.cat([p.grad, p]).norm(dim=1),
    "mask": lambda p: p.grad[p.grad > -1e9].mean(),
    "norm of norms": lambda p: p.grad.flatten(1).norm(dim=1).max(),
}
KEEPS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda p: p.grad.sign().mul_(2).add(p, alpha=0.5).clamp(min=0),
    "vmap": lambda p: torch.vmap(lambda g: g / g.norm() + g.view(-1).topk(1).values.sum())(p.grad),
    "dim": lambda p: p.grad.flatten(1).norm(dim=1).sqrt().view(-1, 1) * p.grad.flatten(1),
    "last dim": lambda p: p.grad.topk(1, dim=-1).values.softmax(-1),
    "cat": lambda p: torch.cat([p.grad.flatten(1), p.flatten(1)], dim=1).view(len(p), -1).sum(1),
    "one node": lambda p: p.grad[0].norm() + p.grad.unbind()[-1].max() + sum(row.sum() for row in p.grad),
    "stacked norms": lambda p: torch.stack([t.flatten(1).norm(dim=1) for t in (p, p.grad)]).norm(dim=0),
    "new": lambda p: p.new_zeros(()) + torch.zeros_like(p[0]).norm(),
    "no tensor": lambda p: (p.numel(), p.shape, p.grad.tolist()),
    "collectives": lambda p: (all_reduce(p.grad, "mean"), all_gather(None, p.grad.clone())),
    "optimizer": lambda p: torch.optim.Adamax([p.clone().requires_grad_()], foreach=False).step(),
}


class Tries(Strategy):
    """Calls functions of one node's tensor with stacked parameters, and counts how often they raise that nodes mix."""

    def step(self) -> None:
        self.raised = dict.fromkeys([*MIXES, *KEEPS], 0)
        for name, function in {**MIXES, **KEEPS}.items():
            for p in self.model.parameters():
                try:
                    function(p)
                except ValueError as error:
                    self.raised[name] += "mixes the nodes" in str(error)
        super().step()


def test_what_mixes_nodes_in_a_step_is_an_error() -> None:
    once, alone = (fit(Tries(inner_optim="sgd"), num_nodes=n, max_steps=1).strategy for n in (3, 1))
    assert isinstance(once, Tries) and isinstance(alone, Tries)
    number = len(list(once.model.parameters()))
    assert once.raised == {**dict.fromkeys(MIXES, number), **dict.fromkeys(KEEPS, 0)}
    assert set(alone.raised.values()) == {0}  # a node is on its own


@pytest.mark.parametrize("method", ["step", "before_optimizer", "after_optimizer"])
def test_the_error_names_the_operation_and_the_way_out(method: str) -> None:
    def scaled(self: Strategy) -> None:
        getattr(Strategy, method)(self)
        for p in self.model.parameters():
            p.div_(p.norm() if mixes else torch.vmap(torch.norm)(p).view(-1, *[1] * (p.dim() - 1)))

    strategy = type("Scales", (Strategy,), {method: scaled})(inner_optim="sgd")
    mixes = False
    assert torch.isfinite(trained(strategy)).all()
    mixes = True
    way_out = r"torch\.vmap\(function\)\(p\.grad\).*dim=1"
    with pytest.raises(ValueError, match=rf"^norm\(\) in {method}\(\) mixes the nodes.*{way_out}"):
        fit(strategy)


# Warnings and state


@pytest.mark.parametrize(
    ("strategy", "first"),
    [
        (DiLoCoStrategy(H=4), 4),
        (StreamingDiLoCoStrategy(H=6, fragments=2, delay=1), 4),
        (StreamingDiLoCoStrategy(H=6, fragments=None), 3),  # two layers, the first of which is sent after 3 steps
        (SPARTAStrategy(p_sparta=0.5, sparta_interval=2, async_delay=1), 4),
        (EagerDiLoCoStrategy(H=2, eager=False), 4),
        (CommunicateOptimizeStrategy([FedAvgStrategy(H=3), DiLoCoStrategy(H=4)]), 4),
    ],
    ids=lambda x: type(x).__name__,
)
def test_communication_that_never_acts_in_a_run_is_warned_of(strategy: Strategy, first: int) -> None:
    with pytest.warns(UserWarning, match=f"first acts after step {first}, and the run ends after {first - 1}$"):
        fit(strategy, max_steps=first - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(strategy, max_steps=first)
    if not isinstance(strategy, CommunicateOptimizeStrategy | EagerDiLoCoStrategy):
        losses, alone = (fit(s, max_steps=first + 1).history.node_losses for s in (strategy, AloneStrategy()))
        same = (losses == alone).all(1)
        assert same[:first].all() and not same[first]  # the loss of a step is that of the weights before it


@pytest.mark.parametrize(("way", "row"), [("stacked", 0), ("shared", slice(None))])
def test_stacked_state_has_a_row_for_each_node_and_shared_state_has_not(way: str, row: Any) -> None:
    class Momentum(Algorithm):
        def setup(self, cluster: Cluster) -> None:
            getattr(self, f"keep_{way}")(momentum=torch.zeros_like(cluster.weights[row]))

    with pytest.raises(ValueError, match=rf"Momentum: keep_{way}\(momentum=…\) .* for the 2 nodes"):
        fit(CommunicateOptimizeStrategy([Momentum()]), num_nodes=2, max_steps=1)


class LooksUpState(Strategy):
    """Reads momentum by parameter before every step, as scripts for EXO Gym do."""

    def step(self) -> None:
        self.seen = [self.optim.state.get(p) for p in self.model.parameters()]  # type: ignore[union-attr]
        super().step()


def test_state_of_the_optimizer_by_parameter() -> None:
    strategy = fit(LooksUpState(inner_optim=SPEC)).strategy
    assert isinstance(strategy, LooksUpState)
    matrix = strategy.optim.param_groups[0]["params"][0]
    buffer = strategy.optim.state[matrix]["momentum_buffer"]  # type: ignore[union-attr]
    parameters = list(strategy.model.parameters())
    for p, state, columns in zip(parameters, strategy.seen, strategy.cluster.replicas.layout, strict=True):
        assert state["momentum_buffer"].shape == p.shape
        view = buffer[:, columns.start : columns.stop].reshape(p.shape)
        assert torch.equal(state["momentum_buffer"], view)
        assert p in strategy.optim.state  # type: ignore[union-attr]
        with pytest.raises(TypeError, match="keep it in an attribute of the strategy"):
            strategy.optim.state[p] = {}  # type: ignore[union-attr]


def test_nodes_are_whole_numbers_of_any_library() -> None:
    for among in (np.array([0, 1]), [np.int64(0), torch.tensor(1)], torch.tensor([0, 1])):
        assert groups_of(among, range(3)) == [[0, 1]]
    with pytest.raises(ValueError, match="from 0 to 2"):
        groups_of([True, 2], range(3))
