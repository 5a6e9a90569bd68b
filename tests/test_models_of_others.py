"""Models of other libraries: tiny random ones of transformers, vectorized, node by node and in processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

import vsim
from vsim import Trainer
from vsim.strategy import DiLoCoStrategy

# timm imports torchvision, and so does transformers where it can. That registers forms of two operators of its compiled
# library, which a build of torch for another device than torchvision's cannot load: there they are declared.
if torchvision := importlib.util.find_spec("torchvision"):
    try:
        for library in Path(str(torchvision.origin)).parent.glob("_C*.so"):  # newer ones: _C_stable.so
            torch.ops.load_library(library)
    except OSError:
        OPERATORS = torch.library.Library("torchvision", "DEF")  # declared as long as it lives
        for operator in ("nms", "qnms"):
            OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

WORDS, LENGTH = 61, 12
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}
# Class of the model (of its configuration without the last word, see `made`) → sizes.
MODELS: dict[str, dict[str, Any]] = {
    "GPT2 LMHeadModel": {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "Llama ForCausalLM": GROUPED,
    "Qwen2 ForCausalLM": GROUPED,
    "Qwen3 ForCausalLM": {**GROUPED, "head_dim": 8},
    "Mixtral ForCausalLM": {**GROUPED, "num_local_experts": 3},
    "Bert ForMaskedLM": SIZES,
    "T5 ForConditionalGeneration": {
        **{"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        "decoder_start_token_id": 0,
    },
}
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", MODELS)]


class FromDict(nn.Module):
    """Takes a batch that is a dict by its keywords, as scripts with these models do; returns outputs with a loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        family, task = name.split()
        configuration = getattr(transformers, f"{family}Config")(**MODELS[name], bos_token_id=0, eos_token_id=0)
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


def trained(name: str, padded: bool = False, **options: Any) -> Trainer:
    trainer = Trainer(FromDict(name), Sentences(padded))
    strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=4)
    trainer.fit(strategy=strategy, num_nodes=3, max_steps=6, batch_size=4, progress=False, **options)
    assert trainer.strategy is not None
    return trainer


def assert_close(one: Trainer, other: Trainer, **tolerance: float) -> None:
    assert one.strategy is not None and other.strategy is not None
    np.testing.assert_allclose(one.history.node_losses, other.history.node_losses, **{"rtol": 1e-5, **tolerance})
    torch.testing.assert_close(one.strategy.cluster.weights, other.strategy.cluster.weights, **tolerance)


def test_it_is_vectorized_where_no_sentence_is_padded(name: str) -> None:
    vectorized, loop = trained(name, executor="vmap"), trained(name, executor="loop")
    assert vectorized.history.executor == "vmap"
    assert_close(vectorized, loop)


def test_it_goes_to_the_loop_where_some_nodes_have_padding(name: str) -> None:
    vectorized, loop = (trained(name, padded=True, executor=executor) for executor in ("vmap", "loop"))
    assert "padding_mask" in vectorized.history.executor_reason
    assert_close(vectorized, loop)


@pytest.mark.parametrize("padded", [False, True])
def test_it_is_that_of_the_processes(
    name: str, padded: bool, ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = trained(name, padded, deterministic=True)
    assert_close(exact, trained(name, padded, executor="loop"), rtol=0, atol=0)
    monkeypatch.setattr("vsim.trainer.train_in_processes", ranks_of(2).train)
    strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=2)
    report = vsim.verify(FromDict(name), Sentences(padded), strategy, 2, max_steps=3, batch_size=4, threads=1)
    assert report.identical, report
