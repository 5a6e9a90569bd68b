"""GPA against a plain PyTorch loop, and the optimizer that it is without averaging."""

from __future__ import annotations

import copy
import itertools

import pytest
import test_strategies_common as common
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from vsim import Trainer
from vsim.strategy import GPAStrategy, OptimSpec, SimpleReduceStrategy

ADAMW = OptimSpec("adamw", lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_without_averaging_it_is_the_inner_optimizer_to_the_bit(deterministic: bool) -> None:
    gpa, plain = (
        common.weights(common.run(strategy, executor="auto", deterministic=deterministic))
        for strategy in (GPAStrategy(ADAMW, mu_x=0, mu_y=0.7), SimpleReduceStrategy(ADAMW))
    )
    assert torch.equal(gpa, plain)


def test_one_node_is_a_plain_loop() -> None:
    strategy = GPAStrategy(ADAMW, mu_x=0.9, mu_y=0.7, max_norm=0.5)
    trainer = common.run(strategy, num_nodes=1, data=common.examples(), executor="auto", deterministic=True)
    z, x, y = (copy.deepcopy(common.model()) for _ in range(3))
    optimizer = torch.optim.AdamW(z.parameters(), lr=1e-2, weight_decay=0.1)
    sampler = DistributedSampler(common.examples(), num_replicas=1, rank=0, seed=42)
    for batch in itertools.islice(DataLoader(common.examples(), batch_size=8, sampler=sampler), common.STEPS):
        y.zero_grad()
        y(batch).backward()
        nn.utils.clip_grad_norm_(y.parameters(), 0.5)
        for pz, py in zip(z.parameters(), y.parameters(), strict=True):
            pz.grad = py.grad
        optimizer.step()
        with torch.no_grad():
            for px, py, pz in zip(x.parameters(), y.parameters(), z.parameters(), strict=True):
                px.copy_(0.9 * px + 0.1 * pz)
                py.copy_(0.7 * px + 0.3 * pz)
    assert trainer.strategy is not None
    for held, module in ((common.weights(trainer)[0], y), (trainer.strategy.global_weights(), x)):
        torch.testing.assert_close(held, nn.utils.parameters_to_vector(module.parameters()).detach())


def test_what_is_evaluated_is_the_average() -> None:
    trainer = Trainer(common.model(), common.examples(), common.examples(16, seed=9))
    trainer.fit(strategy=GPAStrategy(ADAMW, mu_x=0.9), num_nodes=2, max_steps=common.STEPS, val_size=16, progress=False)
    assert trainer.strategy is not None
    model = common.model()
    nn.utils.vector_to_parameters(trainer.strategy.global_weights(), model.parameters())
    with torch.no_grad():
        loss = model(common.examples(16, seed=9).tensors).item()
    assert trainer.history.last("global_loss") == pytest.approx(loss) != trainer.history.last("average_loss")
