"""Fine-tuning: frozen weights are not sent, and take neither memory of a node nor state of an optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset

import vsim
from vsim.cluster.optimizers import torch_optimizers
from vsim.models import GPT
from vsim.strategy import (
    Algorithm,
    DiLoCoStrategy,
    FedAvgStrategy,
    ShuffledSequentialIndexSelector,
    SimpleReduceStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
)

RANK, NODES = 2, 3


class LoRA(nn.Module):
    """A linear layer that stays as it is, plus a trainable product of rank r that is 0 at first."""

    def __init__(self, linear: nn.Linear, rank: int, stream: torch.Generator) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features, generator=stream) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + x @ self.down.T @ self.up.T
        return found


def adapted() -> GPT:
    """A GPT whose weights are frozen, with adapters at the four linear layers of each block."""
    model, stream = GPT(31, 8, 2, 16, 2, seed=0).requires_grad_(False), torch.Generator().manual_seed(1)
    for block in model.blocks:
        for name, layer in [*block.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRA(layer, RANK, stream))
    return model


# By hand: (in + out) · rank of attention_in, attention_out, mlp_in and mlp_out, of two blocks.
ADAPTERS = 2 * RANK * ((16 + 48) + (16 + 16) + (16 + 64) + (64 + 16))
TOKENS = torch.randint(31, (24, 9), generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(TOKENS[:, :-1], TOKENS[:, 1:])


def trained(model: nn.Module, strategy: Algorithm, data: Dataset[Any] = DATA, **options: Any) -> vsim.Trainer:
    trainer = vsim.Trainer(model, data)
    given: dict[str, Any] = {"num_nodes": NODES, "max_steps": 4, "batch_size": 2, "progress": False, **options}
    trainer.last = trainer.fit(strategy=strategy, **given)  # type: ignore[attr-defined]
    return trainer


def stored(of: Any) -> int:
    """The numbers in memory of all tensors with a dimension; where several share a memory, it counts once."""
    memories = {t.data_ptr(): t.untyped_storage() for t in tree_leaves(of) if isinstance(t, Tensor) and t.dim()}
    return sum({s.data_ptr(): s.nbytes() for s in memories.values()}.values()) // 4


STRATEGIES: list[tuple[Algorithm, int, int]] = [  # steps with a message, outer rows
    (SimpleReduceStrategy(lr=1e-2), 4, 0),
    (FedAvgStrategy(H=2, lr=1e-2), 2, 0),
    (DiLoCoStrategy(H=2, lr=1e-2), 2, 3),  # outer weights, gradient and momentum
]


@pytest.mark.parametrize(("strategy", "syncs", "outer"), STRATEGIES, ids=lambda value: type(value).__name__)
def test_adapters_alone_are_sent_and_kept(strategy: Algorithm, syncs: int, outer: int) -> None:
    model = adapted()
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == ADAPTERS
    trainer = trained(model, strategy)
    assert [event.payload_bytes for event in trainer.ledger] == [4 * ADAPTERS] * syncs
    own = trainer.strategy
    assert own is not None
    replicas = own.cluster.replicas
    assert own.cluster.weights.shape == (NODES, ADAPTERS)
    assert stored(replicas.weights) == stored(replicas.grads) == NODES * ADAPTERS
    assert stored([dict(optimizer.state) for optimizer in torch_optimizers(own.optim)]) == 2 * NODES * ADAPTERS  # AdamW
    for module in own.parts:
        of_run = ("cluster", "optim", "schedulers")
        kept = [value for name, value in vars(module).items() if name not in of_run]
        assert stored([dict(x.state) if isinstance(x, Optimizer) else x for x in kept]) == outer * ADAPTERS
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert replicas.frozen.keys() == frozen.keys()
    for name, p in frozen.items():
        assert replicas.frozen[name].shape == p.shape  # one for all nodes
        assert torch.equal(trainer.last.get_parameter(name), p)  # type: ignore[attr-defined]


def test_sparse_and_streamed_adapters() -> None:
    quarters = ShuffledSequentialIndexSelector(0.25)
    sparse = trained(adapted(), SPARTAStrategy(index_selector=quarters, lr=1e-2), max_steps=8)
    assert sparse.ledger.payload_bytes == 2 * 4 * ADAPTERS
    streamed = trained(adapted(), StreamingDiLoCoStrategy(H=4, fragments=2, lr=1e-2), max_steps=8)
    assert streamed.ledger.payload_bytes <= 2 * 4 * ADAPTERS


def test_it_is_fine_tuning_in_plain_pytorch() -> None:
    """Nodes with the same batch: AllReduce is one model, whose adapters take steps of SGD."""
    model, same = adapted(), TensorDataset(*(t[:1].repeat(NODES, 1) for t in DATA.tensors))
    own = copy.deepcopy(model)
    trainer = trained(model, SimpleReduceStrategy(inner_optim="sgd", lr=0.5), same, batch_size=1, deterministic=True)
    adapters = [p for p in own.parameters() if p.requires_grad]
    for _ in range(4):
        gradients = torch.autograd.grad(own([t[:1] for t in DATA.tensors]), adapters)
        with torch.no_grad():
            for p, gradient in zip(adapters, gradients, strict=True):
                p -= 0.5 * gradient
    found = trainer.last.state_dict()  # type: ignore[attr-defined]
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
    assert not torch.equal(found["blocks.0.mlp_in.up"], model.state_dict()["blocks.0.mlp_in.up"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's and transformers', of each other
def test_adapters_of_peft() -> None:
    import test_models_of_others as others  # makes transformers importable

    peft = pytest.importorskip("peft")
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(others.FromDict("GPT2 LMHeadModel").model, peft.LoraConfig(r=RANK, **options))
    trainer = trained(model, DiLoCoStrategy(H=2, lr=1e-2), others.Sentences())
    size = 2 * RANK * (16 + 3 * 16)  # two layers
    assert [event.payload_bytes for event in trainer.ledger] == [4 * size] * 2
    assert trainer.history.executor == "vmap" and trainer.strategy is not None
    assert trainer.strategy.cluster.weights.shape == (NODES, size)
    assert type(trainer.last) is type(model)  # type: ignore[attr-defined]
