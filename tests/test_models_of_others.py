"""Models of other libraries: tiny random ones of transformers and timm, vectorized, node by node and in processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import loadable_torchvision  # noqa: F401
import numpy as np
import pytest
import torch
from standing_ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import vsim
from vsim import Trainer
from vsim.strategy import DiLoCoStrategy

pytestmark = pytest.mark.slow

# Of transformers ------------------------------------------------------------------------------------------------------

WORDS, LENGTH = 61, 12
SIZES = {
    **{"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 16},
}
GROUPED = {**SIZES, "num_key_value_heads": 1}
# Class of the model (of its configuration without the last word) → sizes.
TEXTS: dict[str, dict[str, Any]] = {
    "GPT2 LMHeadModel": {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "Llama ForCausalLM": GROUPED,
    "Qwen3 ForCausalLM": {**GROUPED, "head_dim": 8},
    "Mixtral ForCausalLM": {**GROUPED, "num_local_experts": 3},
    "Bert ForMaskedLM": SIZES,
    "T5 ForConditionalGeneration": {
        **{"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        "decoder_start_token_id": 0,
    },
}
every_text = pytest.mark.parametrize("name", TEXTS)


class FromDict(nn.Module):
    """Takes a batch that is a dict by its keywords, as scripts with these models do; returns outputs with a loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        family, task = name.split()
        configuration = getattr(transformers, f"{family}Config")(**TEXTS[name], bos_token_id=0, eos_token_id=0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = getattr(transformers, family + task)(configuration)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch)


class Sentences(Dataset[dict[str, Tensor]]):
    """Random tokens; of some examples the last four are padding if it is so `padded`."""

    def __init__(self, padded: bool = False) -> None:
        self.padded = padded

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(1, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        mask = torch.ones_like(tokens)
        if self.padded and index % 5 == 0:
            mask[-4:] = 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask == 1, tokens, -100)}


def trained(model: nn.Module, data: Any, **options: Any) -> Trainer:
    trainer = Trainer(model, data)
    strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.05, H=2)
    trainer.fit(strategy=strategy, num_nodes=3, max_steps=4, batch_size=4, progress=False, **options)
    return trainer


def assert_close(one: Trainer, other: Trainer, **tolerance: float) -> None:
    assert one.strategy is not None and other.strategy is not None
    np.testing.assert_allclose(one.history.node_losses, other.history.node_losses, **{"rtol": 1e-5, **tolerance})
    torch.testing.assert_close(one.strategy.cluster.weights, other.strategy.cluster.weights, **tolerance)


def assert_exact(model: nn.Module, data: Any, train_in_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `deterministic=True` a run has the bits of the processes."""
    monkeypatch.setattr("vsim.trainer.train_in_processes", train_in_ranks)
    strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.05, H=2)
    report = vsim.verify(model, data, strategy, 2, max_steps=3, batch_size=4, threads=1)
    assert report.identical, report


@every_text
def test_it_is_vectorized_where_no_sentence_is_padded(name: str) -> None:
    for padded in (False, True):
        vectorized, loop = (trained(FromDict(name), Sentences(padded), executor=how) for how in ("vmap", "loop"))
        if padded:  # it goes to the loop where some nodes have padding
            assert "padding_mask" in vectorized.history.executor_reason
        else:
            assert vectorized.history.executor == "vmap"
        assert_close(vectorized, loop)


@every_text
def test_it_is_that_of_the_processes(
    name: str, ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_exact(FromDict(name), Sentences(padded=True), ranks_of(2).train, monkeypatch)


# Of timm --------------------------------------------------------------------------------------------------------------

CLASSES, SIDE = 5, 32
# Architecture → its arguments. Normalized are: batches, batches, groups, and twice the channels of a position.
IMAGES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("test_resnet", "test_efficientnet", "test_efficientnet_gn", "test_convnext")},
    "test_vit": {"img_size": SIDE},
}
every_image = pytest.mark.parametrize("name", IMAGES)


class Classifier(nn.Module):
    """Returns the loss of [images, classes]; in training it leaves out whole branches at random."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import timm

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            sizes = {"num_classes": CLASSES, "drop_path_rate": 0.5, **IMAGES[name]}
            self.model = timm.create_model(name, pretrained=False, **sizes)

    def forward(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])


def images(dtype: torch.dtype = torch.float32) -> TensorDataset:
    stream = torch.Generator().manual_seed(0)
    pixels = torch.randn(24, 3, SIDE, SIDE, generator=stream).to(dtype)
    return TensorDataset(pixels, torch.randint(CLASSES, (24,), generator=stream))


@every_image
def test_an_image_model_is_vectorized(name: str) -> None:
    # In float64, as batches of one position a channel make much of what rounding leaves.
    model, data = Classifier(name).to(torch.float64), images(torch.float64)
    vectorized, loop = (trained(model, data, executor=executor) for executor in ("vmap", "loop"))
    assert vectorized.history.executor == "vmap"
    assert_close(vectorized, loop, rtol=1e-9, atol=1e-11)


@every_image
def test_an_image_model_is_that_of_the_processes(
    name: str, ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_exact(Classifier(name), images(), ranks_of(2).train, monkeypatch)
