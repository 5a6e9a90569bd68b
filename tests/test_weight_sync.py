"""Weights for rollouts: the codec, receivers that are equal to the bit, bytes, hours, and the share that changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from strategies_by_hand import Parameters, normal, started
from torch import Tensor
from torch.utils.data import TensorDataset

import vsim
from vsim import Network
from vsim.algorithms.weight_sync import HEADER, decoded, encoded, expected_bytes
from vsim.models import MLP
from vsim.strategy import WeightSyncStrategy


def bits(weights: Tensor) -> Tensor:
    return weights.bfloat16().view(torch.int16)


def changed(old: Tensor, share: float, seed: int = 0) -> Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.where(torch.rand(old.shape, generator=stream) < share, old * 2 + 1, old)


@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-4, 1e-3, 0.01, 0.3, 0.6, 0.99, 1.0])
def test_a_message_restores_every_bit(share: float) -> None:
    old = normal(200_000).bfloat16()
    new = changed(old, share)
    message = encoded(new, old)
    assert torch.equal(bits(decoded(message, old)), bits(new))
    assert len(message) == pytest.approx(expected_bytes(len(old), share), rel=0.05, abs=60)
    # 2 bytes a value and a byte or two for its place, or all values.
    sent = int((bits(new) != bits(old)).sum())
    assert len(message) <= HEADER + min(2 * len(old), sent * (2 + 2) + 2 * (len(old) // 65535))


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 65533, 65534, 65535, 65536, 131_070, 131_071])
@pytest.mark.parametrize("others", [0, 30_000])
def test_gaps_at_the_limits_of_codes(gap: int, others: int) -> None:
    """With others, one byte a code is shorter; without, two."""
    old = torch.zeros(gap + 3 * others + 1000, dtype=torch.bfloat16)
    new = old.clone()
    new[gap] = 1.5
    new[gap + 1 : gap + 3 * others : 3] = -2.0
    assert torch.equal(bits(decoded(encoded(new, old), old)), bits(new))


def test_values_that_compare_unlike_their_bits() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, float("inf")] * 20).bfloat16()
    new = old.clone()
    new[0] = -0.0
    assert torch.equal(bits(decoded(encoded(new, old), old)), bits(new)) and len(encoded(new, old)) == HEADER + 3
    assert len(encoded(old, old)) == HEADER  # NaN has not changed


@pytest.mark.parametrize(("H", "staleness"), [(1, 0), (3, 0), (1, 2), (2, 3), (3, 1)])
def test_receivers_have_the_bits_of_some_steps_ago(H: int, staleness: int) -> None:
    model = Parameters((40, 30), (17,))
    strategy = WeightSyncStrategy(receivers=5, H=H, staleness=staleness, inner_optim="sgd", lr=1e-3)
    run = started(strategy, model, 1)
    seen = [bits(run.cluster.weights[0])]
    sizes = []
    for step in range(1, 11):
        before = bits(run.strategy.sent_weights)  # type: ignore[attr-defined]
        seen.append(bits(run.step(normal(*run.cluster.weights.shape, seed=step))[0]))
        last = max(0, (step - staleness) // H * H)  # the last message that has arrived
        assert torch.equal(bits(run.strategy.receiver_weights), seen[last])  # type: ignore[attr-defined]
        if step % H == 0:
            sizes.append(len(encoded(seen[-1].view(torch.bfloat16), before.view(torch.bfloat16))))
            share = float((seen[-1] != before).double().mean())
            assert run.strategy.columns() == {"changed_share": pytest.approx(share)} and 0 < share < 1
    events = [(e.step, e.due, e.collective, e.payload_bytes) for e in run.ledger]
    assert events == [(H * i, H * i + staleness, "push", 5 * n) for i, n in enumerate(sizes, 1)]


STREAM = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(256, 64, generator=STREAM), torch.randint(10, (256,), generator=STREAM))
OPTIONS: dict[str, Any] = {"num_nodes": 1, "max_steps": 12, "batch_size": 16, "progress": False}


def shares(lr: float) -> np.ndarray[Any, Any]:
    trainer = vsim.Trainer(MLP(hidden=(64,), seed=0), DATA)
    trainer.fit(strategy=WeightSyncStrategy(lr=lr), **OPTIONS)
    return trainer.history.measured("changed_share")[0]


def test_few_weights_change_at_the_learning_rates_of_fine_tuning() -> None:
    """Adam's step is about lr, and the next bfloat16 is 2⁻⁸ away: of weights near 0.1, 1e-6 changes 1 in 200."""
    found = {lr: float(shares(lr)[4:].mean()) for lr in (1e-6, 3e-6, 1e-4, 1e-2)}
    assert 0.97 < 1 - found[3e-6] < 1 - found[1e-6] < 0.999
    assert found[1e-6] * 2 < found[3e-6] < found[1e-4] / 8 and found[1e-2] > 0.8


def test_a_resumed_run_has_the_same_receivers(tmp_path: Any) -> None:
    def fitted(**options: Any) -> WeightSyncStrategy:
        trainer = vsim.Trainer(MLP(hidden=(8,), seed=0), DATA)
        trainer.fit(strategy=WeightSyncStrategy(H=2, staleness=3, lr=1e-3), **{**OPTIONS, **options})
        assert isinstance(trainer.strategy, WeightSyncStrategy)
        return trainer.strategy

    whole = fitted()
    fitted(max_steps=7, save_dir=tmp_path)
    resumed = fitted(save_dir=tmp_path, resume=True)
    assert torch.equal(bits(resumed.receiver_weights), bits(whole.receiver_weights))
    assert resumed.cluster.collectives.ledger[:] == whole.cluster.collectives.ledger[:]


def test_hours_and_utilization_as_published() -> None:
    """PULSE: 14 GB of all weights take 5.6 s at 20 Gbit/s, 90 % of the time is compute where a step takes 50.4 s."""
    options: dict[str, Any] = {"parameters": 7e9, "num_nodes": 1, "max_steps": 4, "compute": 50.4}
    whole = vsim.price(WeightSyncStrategy(changed_share=1.0), network=Network("20 Gbit/s"), **options)
    assert whole.utilization == pytest.approx(0.9, abs=0.001)
    assert whole.seconds[-1] == pytest.approx(4 * (50.4 + 5.6), rel=0.01)
    # 1 % in three bytes each, and a gap of 255 or more before 8 % of them: 216 MB.
    sparse = vsim.price(WeightSyncStrategy(changed_share=0.01), network=Network("0.308 Gbit/s"), **options)
    assert sparse.utilization == pytest.approx(0.9, abs=0.005)
    hidden = vsim.price(WeightSyncStrategy(changed_share=1.0, staleness=1), network=Network("20 Gbit/s"), **options)
    assert hidden.utilization > 0.97


def test_what_does_not_fit_is_refused() -> None:
    for name, value in {"receivers": 0, "H": 0, "staleness": -1, "changed_share": 1.5}.items():
        with refused(ValueError, name, value):
            WeightSyncStrategy(**{name: value})
    with refused(ValueError, "WeightSyncStrategy … one node … num_nodes=2"):
        started(WeightSyncStrategy(), Parameters((3,)), 2)
    with refused(ValueError, "WeightSyncStrategy cannot be priced without training"):
        vsim.price(WeightSyncStrategy(), parameters=1e6, num_nodes=1, max_steps=1, network="1 Gbit/s", compute=1.0)
