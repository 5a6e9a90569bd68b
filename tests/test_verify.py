"""`verify` finds nothing where there is nothing, and names step, node and parameter of what is planted on one side."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import refused
from reference_cluster import Noisy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vsim
from vsim import Difference, VerifyReport
from vsim.cluster import Cluster
from vsim.cluster.optimizers import torch_optimizers
from vsim.cluster.randomness import NODE, generator
from vsim.models import MLP
from vsim.processes import NodeFailure
from vsim.processes.bitwise import KINDS, ROUNDING_ULPS, difference, ulps
from vsim.strategy import (
    Algorithm,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    Strategy,
)
from vsim.strategy.communicate import all_reduce
from vsim_cli import main

PARAMETERS = [f"layers.{i}.{name}" for i in (0, 1, 3) for name in ("weight", "bias")]  # the first bias does nothing


def examples(count: int = 40) -> TensorDataset:
    stream = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=stream), torch.randint(3, (count,), generator=stream))


def verified(strategy: Strategy, num_nodes: int = 2, max_steps: int = 4, **options: Any) -> VerifyReport:
    model = options.pop("model", None) or Noisy()
    return vsim.verify(model, examples(), strategy, num_nodes, max_steps, batch_size=6, progress=False, **options)


def in_simulator(cluster: Cluster) -> bool:
    """Where the planted faults are."""
    return cluster.replicas.num_held > 1


SGD = OptimSpec("sgd", lr=0.1, momentum=0.9)


# Nothing to find -----------------------------------------------------------------------------------------------------


class AverageSigns(Strategy):
    """Per-node code, and state of its own that decides what is done."""

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.residuals = [torch.zeros_like(p) for p in model.parameters()]

    def step(self) -> None:
        for p, residual in zip(self.model.parameters(), self.residuals, strict=True):
            residual.mul_(0.9).add_(p.grad)
            sign = residual.sign()
            residual.sub_(0.01 * sign)
            p.grad = sign
            all_reduce(p.grad)
            p.grad.div_(self.num_nodes)
        super().step()


def test_a_custom_strategy_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = Noisy()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random_state = torch.get_rng_state()
    torch.set_num_threads(2)

    report = verified(
        AverageSigns(lr=1e-2, max_norm=1.0, lr_scheduler="cosine", warmup_steps=2),
        model=model,
        val_dataset=examples(20),
        threads=1,
        minibatch_size=3,
        val_interval=2,
        correlation_interval=3,
    )

    assert report.identical and report.first_difference is None and report.steps == 4
    assert (
        str(report)
        == repr(report)
        == (
            "bit-identical over 4 steps (2 nodes, 99 parameters: losses, weights, buffers, optimizer state, "
            "global weights, ledger, history)"
        )
    )
    assert "bit-identical" in report._repr_html_()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)  # as for all tests
    assert not list(tmp_path.glob("vsim*"))


# Faults planted in the simulator only --------------------------------------------------------------------------------


class AscendingDiLoCo(DiLoCoStrategy):
    """The outer gradient has the wrong sign."""

    def communicate(self, cluster: Cluster) -> None:
        if cluster.step % self.H == 0:
            mean = cluster.collectives.all_reduce(cluster.weights, "mean", label="outer gradient")
            self.outer_gradient.copy_(self.outer_weights - mean)
            if in_simulator(cluster):
                self.outer_gradient.neg_()
            self.outer.step()
            cluster.weights.copy_(self.outer_weights)


def test_the_wrong_sign_of_the_outer_gradient_is_found() -> None:
    report = verified(CommunicateOptimizeStrategy([AscendingDiLoCo(H=3)], inner_optim=SGD))

    first = report.first_difference
    assert first is not None and not report.identical
    assert (first.step, first.node, first.what, first.name) == (3, 0, "weights", "layers.0.weight")
    assert first.entries == first.size == 48 and not first.rounding and first.ulps is not None
    assert first.ulps > 10_000 and first.relative > 1e-3
    assert report.steps == 2
    kinds = {d.what: {e.name for e in report.differences if e.what == d.what} for d in report.differences}
    assert kinds == {
        "weights": set(PARAMETERS),
        "optimizer state": {f"parts[0].outer momentum_buffer of {name}" for name in PARAMETERS},
        "global weights": set(PARAMETERS),
    }
    assert {d.node for d in report.differences} == {0, 1}
    assert str(report).startswith("different after step 3, by more than rounding (2 nodes, 99 parameters: ")
    assert "first difference: step 3, node 0, weights, layers.0.weight\n  48 of 48 entries differ" in str(report)
    assert "\nall that differs then:\n  weights: nodes [0, 1], layers.0.weight, layers.0.bias, " in str(report)


class HastyDiLoCo(DiLoCoStrategy):
    """The sync comes one step too early."""

    def communicate(self, cluster: Cluster) -> None:
        H = self.H
        if in_simulator(cluster):  # where a sync is due at the next step, it is due at this one
            self.H = 1 if (cluster.step + 1) % H == 0 else 10**6
        super().communicate(cluster)
        self.H = H


class BufferAverage(Algorithm):
    """BatchNorm's statistics are averaged every third step: in the simulator after every second."""

    def communicate(self, cluster: Cluster) -> None:
        if cluster.step % (2 if in_simulator(cluster) else 3) == 0:
            for buffer in cluster.replicas.buffers.values():
                if buffer.is_floating_point():
                    buffer.copy_(cluster.collectives.all_reduce(buffer, "mean", label="statistics"))


class AnotherOrder(SimpleReduceStrategy):
    """The same mean, summed from the last node to the first."""

    def communicate_gradients(self, cluster: Cluster) -> None:
        rows = cluster.grads.flip(0) if in_simulator(cluster) else cluster.grads
        cluster.grads.copy_(cluster.collectives.all_reduce(rows, "mean", label="gradients"))


class Forgetful(Strategy):
    """The last node forgets the first moments of its last bias."""

    def step(self) -> None:
        super().step()
        if in_simulator(self.cluster):
            moments = [state["exp_avg"] for o in torch_optimizers(self.optim) for state in o.state.values()]
            last = moments[-1] if moments[-1].dim() == 1 else moments[-1][-1, : self.cluster.replicas.num_parameters]
            last[-3:].zero_()


def of_node_0(seed: int, *key: int, **options: Any) -> torch.Generator:
    """A shared dropout stream."""
    return generator(seed, *((NODE, 0) if key[0] == NODE else key), **options)


def composed(*modules: Any, spec: OptimSpec = SGD) -> Strategy:
    return CommunicateOptimizeStrategy([*modules], inner_optim=spec)


def check_early_sync(report: VerifyReport) -> None:
    (event,) = [d for d in report.differences if d.what == "ledger" and d.node == 0]
    assert event.process == "no event" and event.simulator.startswith("Event(step=2, due=2, moment='weights'")
    assert [d.name for d in report.differences if d.what == "history"] == ["payload_bytes", "wire_bytes"]


def check_dropout(report: VerifyReport) -> None:
    moved = {d.name for d in report.differences if d.what == "weights" and d.node == 1}
    assert moved >= {*PARAMETERS} - {"layers.0.bias"}  # whose gradient is too small to move it


def check_statistics(report: VerifyReport) -> None:
    found = [(d.what, d.name) for d in report.differences]
    assert [name for what, name in found if what == "buffers"] == 2 * ["layers.1.running_mean", "layers.1.running_var"]
    assert not {what for what, _ in found} & {"losses", "weights", "optimizer state"}


def check_rounding(report: VerifyReport) -> None:
    first = report.differences[0]
    assert first.ulps is not None and first.ulps > 0 and 0 < first.relative < ROUNDING_ULPS * 1.2e-7
    assert str(report).startswith("different after step 1, by no more than rounding (3 nodes, 99 parameters: ")


SUMMED = composed(AnotherOrder(), spec=OptimSpec("sgd", lr=0.1))
# Strategy, nodes; step, node, what and (where one is first) name of the first difference; a check of all of them.
PLANTED: dict[str, tuple[Strategy, int, tuple[Any, ...], Any]] = {
    "early sync": (composed(HastyDiLoCo(H=3)), 2, (2, 0, "weights", "layers.0.weight"), check_early_sync),
    "shared dropout": (FedAvgStrategy(H=3, inner_optim=SGD), 2, (1, 1, "losses", ""), check_dropout),
    "early statistics": (
        composed(SimpleReduceStrategy(), BufferAverage()),
        2,
        (2, 0, "buffers", "layers.1.running_mean"),
        check_statistics,
    ),
    "another order": (SUMMED, 3, (1, 0, "weights", None), check_rounding),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_that_is_planted_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, num_nodes, (step, node, what, name), check = PLANTED[fault]
    if fault == "shared dropout":  # here; the processes import the original
        monkeypatch.setattr("vsim.runs.acts.place.generator", of_node_0)
    report = verified(strategy, num_nodes, max_steps=step)
    first = report.first_difference
    assert first is not None and not report.identical and report.steps == step - 1
    assert (first.step, first.node, first.what) == (step, node, what) and name in (None, first.name)
    assert first.rounding == (fault == "another order")
    check(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "hidden"),
    [  # with many hidden units the rows of the matrix are long, and optimizers hold their states apart
        pytest.param(OptimSpec("adamw"), 100, id="one matrix"),
        pytest.param(OptimSpec("adamw"), 12_000, id="rows apart"),
        pytest.param(OptimSpec("adamw", fused=True), 12_000, id="fused, rows apart"),
    ],
)
def test_a_state_that_one_node_loses_is_found(spec: OptimSpec, hidden: int) -> None:
    """However the state of an optimizer is held: without a fault it is equal."""
    options: dict[str, Any] = {"num_nodes": 3, "loss_fn": F.cross_entropy}
    report = verified(DiLoCoStrategy(H=2, inner_optim=spec), model=MLP(6, (hidden,), 3, seed=0), max_steps=2, **options)
    assert report.identical and "optimizer state" in report.compared, report
    report = verified(Forgetful(inner_optim=spec), model=MLP(6, (hidden,), 3, seed=0), max_steps=1, **options)
    first = report.first_difference
    assert first is not None
    assert (first.step, first.node, first.what, first.name) == (1, 2, "optimizer state", "exp_avg of layers.3.bias")
    assert len(report.differences) == 1 and first.entries == 3 and not first.rounding


class FailsAlone(Strategy):
    """Does not run on one node."""

    def step(self) -> None:
        if not in_simulator(self.cluster) and self.cluster.step == 3:
            raise KeyError("row 1")
        super().step()


@pytest.mark.slow
def test_a_failure_in_the_processes_only_is_raised() -> None:
    with pytest.raises(KeyError, match="row 1") as caught:
        verified(FailsAlone(inner_optim=SGD))
    assert isinstance(caught.value.__cause__, NodeFailure)


class Explodes(Algorithm):
    """A difference at step 2, because of which the processes fail at step 3."""

    def communicate(self, cluster: Cluster) -> None:
        if not in_simulator(cluster) and cluster.step == 2:
            cluster.weights.fill_(math.nan)


@pytest.mark.slow
def test_a_difference_is_told_before_the_failure_that_follows_from_it() -> None:
    report = verified(CommunicateOptimizeStrategy([Explodes()], inner_optim=SGD))

    first = report.first_difference
    assert first is not None and (first.step, first.node, first.what) == (2, 0, "weights")
    assert first.ulps is None and not first.rounding and first.process == "nan"


@pytest.mark.parametrize(
    ("dtype", "smallest", "largest_bits"),
    [
        (torch.float32, 2.0**-149, 0x7F7FFFFF),
        (torch.float64, 2.0**-1074, 0x7FEFFFFFFFFFFFFF),
        (torch.bfloat16, 2.0**-133, 0x7F7F),
        (torch.float16, 2.0**-24, 0x7BFF),
    ],
)
def test_ulps(dtype: torch.dtype, smallest: float, largest_bits: int) -> None:
    # By hand: −0 is +0, and the numbers smallest, 0, −smallest are neighbours. From −largest to largest it is twice the
    # bit pattern of the largest, which does not fit into a signed integer.
    largest, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    a = torch.tensor([0.0, smallest, smallest, -largest, 1.0, -1.0, -2.0], dtype=dtype)
    b = torch.tensor([-0.0, 0.0, -smallest, largest, 1 + eps, -1 - eps, -2.0], dtype=dtype)
    assert ulps(a, b).tolist() == ulps(b, a).tolist() == [0, 1, 2, 2 * largest_bits, 1, 1, 0]


def measured(simulator: Any, process: Any) -> list[Difference]:
    sides = (t if isinstance(t, Tensor) else torch.tensor(t) for t in (simulator, process))
    return list(difference(*sides, step=1, node=0, what="weights", name="w"))


def test_what_is_equal() -> None:
    for value in ([1.0, math.nan, math.inf], [0, 1], [True], 2.0, [[1j, 2]]):
        assert measured(value, value) == []
    assert measured([0.0], [-0.0]) == []


def test_a_difference_is_measured() -> None:
    (found,) = measured([[1.0, 4.0], [0.0, 2.0]], [[1.0, 4.000001], [0.0, 2.0000002]])
    # Between 4 and 8 neighbours are 2⁻²¹ apart: 4.000001 is 4 + 2 · 2⁻²¹.
    assert (found.entries, found.size, found.ulps, found.index) == (2, 4, 2, (0, 1))
    assert found.rounding and found.relative == pytest.approx(2.0**-20 / 4, rel=1e-6)
    assert (found.simulator, found.process) == ("4", "4.00000095")
    # Many ULPs near zero are few on the scale of the tensor.
    (near_zero,) = measured([1.0, 1e-9], [1.0, -1e-9])
    assert near_zero.rounding and near_zero.ulps is not None and near_zero.ulps > 10**6
    (large,) = measured([1.0, 0.5], [1.0, 0.5001])
    assert not large.rounding


@pytest.mark.parametrize(
    ("simulator", "process"),
    [
        ([1.0, math.nan], [1.0, 2.0]),
        ([math.inf], [-math.inf]),
        ([3], [4]),
        ([True], [False]),
        ([1.0, 2.0], [1.0]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    ],
)
def test_what_has_no_ulps_is_more_than_rounding(simulator: Any, process: Any) -> None:
    (found,) = measured(simulator, process)
    assert found.ulps is None and not found.rounding
    assert "ULP" not in str(found) and f"{found.simulator} in the simulator" in str(found)


def test_a_report_speaks_for_all_differences_of_its_step() -> None:
    small = measured([1.0], [1.0000001])[0]
    large = replace(measured([1.0], [2.0])[0], what="weights")

    def rounding(*differences: Difference) -> bool:
        first = VerifyReport(2, 1, 0, KINDS, differences).first_difference
        assert first is not None
        return first.rounding

    state = replace(small, what="optimizer state", name="exp_avg of w")
    assert rounding(small) and rounding(small, state)
    assert not rounding(large) and not rounding(small, large)
    assert rounding(large, state)  # as AdamW does with a gradient that is only rounding
    assert not rounding(large, replace(state, rounding=False))
    assert not rounding(small, replace(small, what="ledger", rounding=False))


def test_a_report_shows_itself() -> None:
    (found,) = measured([1.0, 2.0], [1.0, 3.0])
    report = VerifyReport(2, 1_234, 0, ("weights",), (replace(found, name="<w>"),))
    assert str(report).splitlines() == [
        "different after step 1, by more than rounding (2 nodes, 1,234 parameters: weights)",
        "first difference: step 1, node 0, weights, <w>",
        "  1 of 2 entries differ",
        "  by up to 4,194,304 ULPs; at most by 3.3e-01 of the largest entry",
        "  entry [1]: 2 in the simulator, 3 in the process",
        "all that differs then:",
        "  weights: nodes [0], <w>",
    ]
    assert report._repr_html_().startswith("<pre><b>different after step 1") and "&lt;w&gt;" in report._repr_html_()
    with refused(TypeError, ".identical"):
        bool(report)


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for strategy, options, kind, *parts in (
        (Strategy(), {"batchsize": 3}, TypeError, "verify()", "'batchsize'", "'batch_size'"),
        (Strategy(), {"deterministic": False}, TypeError, "'deterministic'"),
    ):
        with refused(kind, *parts):
            verified(strategy, **options)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with refused(RuntimeError, "torchrun"):
        verified(Strategy())


# The command line ----------------------------------------------------------------------------------------------------

COMMAND = ["verify", "--data", "digits", "--model", "mlp", "--nodes", "2", "--quiet"]


@pytest.mark.slow
def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--steps", "3", "--strategy", "diloco:H=2"]) == 0
    assert capsys.readouterr().out.startswith("bit-identical over 3 steps (2 nodes, ")


def test_the_exit_status_tells_of_a_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def found(model: nn.Module, train: Any, strategy: Strategy, *counts: int, **options: Any) -> VerifyReport:
        given.update(options, strategy=strategy, counts=counts)
        return VerifyReport(2, 1, 0, KINDS, tuple(measured([1.0], [2.0])))

    monkeypatch.setattr("vsim.cli.verify_strategy", found)
    assert main([*COMMAND, "--strategy", "diloco:H=7", "--threads", "2", "--seed", "5"]) == 1
    assert "first difference: step 1, node 0, weights, w" in capsys.readouterr().out
    assert isinstance(given["strategy"], DiLoCoStrategy) and given["counts"] == (2, 50)
    assert (given["threads"], given["seed"], given["progress"]) == (2, 5, False)
