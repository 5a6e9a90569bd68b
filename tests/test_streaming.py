"""Streaming DiLoCo against its formula, and how a model is cut into fragments."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from reproductions import formulas
from reproductions.formulas import Streaming
from strategies_by_hand import driven, normal
from torch import nn

import vsim
from vsim.core.fragments import fragments_of
from vsim.models import GPT
from vsim.strategy import DiLoCoStrategy, OptimSpec, StreamingDiLoCoStrategy, TopK, compress

SGD = OptimSpec("sgd", lr=0.1)


class Layered(nn.Module):
    """An embedding of 3 entries, layers of 2, 4, 1 and 3, and a head of 2: P = 15."""

    def __init__(self) -> None:
        super().__init__()
        shapes = itertools.chain([3], (2, 4, 1, 3), [2])
        made = [nn.Parameter(normal(n, seed=n, dtype=torch.float64)) for n in shapes]
        self.embedding, *layers, self.head = made
        self.blocks = nn.ModuleList(nn.ParameterDict({"weight": p}) for p in layers)


# Columns by hand: named_parameters() has embedding 0–2, head 3–4, then the layers 5–6, 7–10, 11, 12–14.
EMBEDDING_AND_HEAD = [*range(5)]
LAYERS = [[5, 6], [7, 8, 9, 10], [11], [12, 13, 14]]


def columns(number: int, pattern: str) -> list[list[int]]:
    """The columns of every fragment, by the definition."""
    parts: list[list[int]] = [[] for _ in range(number)]
    for layer, own in enumerate(LAYERS):
        parts[layer % number if pattern == "strided" else layer * number // len(LAYERS)] += own
    return [sorted([*EMBEDDING_AND_HEAD, *parts[0]]), *parts[1:]]


@settings(max_examples=30)
@given(
    number=st.integers(1, 4),
    pattern=st.sampled_from(["strided", "sequential"]),
    H=st.integers(4, 7),
    delay=st.integers(0, 3),
    mixing=st.sampled_from([0.0, 0.3, 1.0]),
    reading=st.sampled_from(["due", "send"]),
    num_nodes=st.integers(1, 3),
)
def test_every_fragment_has_the_update_rule(
    number: int, pattern: str, H: int, delay: int, mixing: float, reading: str, num_nodes: int
) -> None:
    gradients = normal(15, num_nodes, 15, dtype=torch.float64)
    outer = OptimSpec("sgd", lr=0.5, momentum=0.9, nesterov=True)
    options: dict[str, Any] = {"H": H, "fragments": number, "delay": delay, "mixing": mixing}
    outer_step = reading if delay else "due"
    strategy = StreamingDiLoCoStrategy(
        inner_optim=SGD, outer_optim=outer, pattern=pattern, outer_step=outer_step, **options
    )
    run = driven(strategy, Layered(), gradients)
    start = nn.utils.parameters_to_vector(Layered().parameters()).detach().numpy()
    sent = []
    for i, own in enumerate(columns(number, pattern)):
        formula = Streaming(0.1, outer_lr=0.5, fragment=i, **options)
        state, pending = formula.start(np.tile(start[own], (num_nodes, 1))), False
        for t, gradient in enumerate(gradients.numpy(), start=1):
            formula.step(t, state, gradient[:, own])
            if formula.sent(t, 1):
                sent.append((t, t + delay, 8.0 * len(own)))
                pending = t + delay > 15
        np.testing.assert_allclose(run.cluster.weights[:, own].numpy(), state["θ"], rtol=1e-12, atol=1e-12)
        if pending and outer_step == "send":  # φ has moved already
            formulas.outer_step(formula, state, state["Δ"])
        np.testing.assert_allclose(run.strategy.model_weights()[own].numpy(), state["φ"][0], rtol=1e-12, atol=1e-12)
    assert [(e.step, e.due, e.payload_bytes) for e in run.ledger] == sorted(sent)


def test_one_fragment_is_diloco() -> None:
    streaming, diloco = (
        driven(strategy, Layered(), normal(9, 3, 15, dtype=torch.float64)).cluster.weights
        for strategy in (StreamingDiLoCoStrategy(H=3, fragments=[["embedding", "head", "blocks"]]), DiLoCoStrategy(H=3))
    )
    torch.testing.assert_close(streaming, diloco)


def test_a_compressor_sees_a_fragment_as_if_it_were_the_model() -> None:
    # Half of the entries of each fragment, by the fragment's own size: 5 + 2 + 1 = 8 and 7 of 15.
    strategy = StreamingDiLoCoStrategy(H=4, fragments=2, average=compress(TopK(0.5)), lr=0.01)
    run = driven(strategy, Layered(), normal(4, 2, 15, dtype=torch.float64))
    assert [(e.step, e.payload_bytes) for e in run.ledger] == [(2, 4 * (8 + 8)), (4, 4 * (8 + 8))]


def test_a_muon_steps_the_outer_weights_in_their_shapes() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)).double()
    spec = OptimSpec("muon", lr=0.1)
    run = driven(
        StreamingDiLoCoStrategy(inner_optim=OptimSpec("sgd", lr=0.1), outer_optim=spec, H=2, fragments=1),
        model,
        gradients := normal(2, 3, 18, dtype=torch.float64),
    )
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    moved = 0.1 * gradients.sum(0).mean(0)
    for p, part in zip(model.parameters(), moved.split([12, 6]), strict=True):
        p.grad = part.view_as(p)
    optimizer.step()
    expected = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(run.strategy.model_weights(), expected.detach())


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"fragments": 7, "H": 8}, ValueError, "layers … 7 … 'embedding', 'head', 'blocks.0', 'blocks.1'"),
        ({"fragments": 9, "H": 8}, ValueError, "fragments … from 1 to 8 … 9"),
        ({"H": 3}, ValueError, "H … fragments … 4 … 3"),
        ({"fragments": [["embedding"], ["blocks"]]}, ValueError, "head"),
        ({"fragments": [["embedding", "head", "blocks"], ["blocks.1"]]}, ValueError, "blocks.1.weight … 2"),
        ({"fragments": [["embedding", "haed"]]}, ValueError, "haed"),
        ({"fragments": ["embedding"]}, TypeError, "embedding … list"),
        ({"fragments": 2.0}, TypeError, "fragments"),
        ({"pattern": "stride"}, ValueError, "did you mean 'strided'"),
        ({"H": 4, "delay": 4}, ValueError, "delay … H"),
        ({"outer_step": "send"}, TypeError, "outer_step='send' … delay"),
        ({"outer_step": "late", "delay": 1}, ValueError, "outer_step … 'due', 'send'"),
    ],
    ids=str,
)
def test_refused(arguments: dict[str, Any], kind: type[Exception], said: str) -> None:
    with refused(kind, said):
        driven(StreamingDiLoCoStrategy(**{"H": 6, **arguments}), Layered(), normal(1, 2, 15, dtype=torch.float64))


def test_layers_are_numbered_modules() -> None:
    model = GPT(17, block_size=8, layers=3, width=16, heads=2)
    layout = vsim.cluster.replicas.Replicas.of(model, 1, torch.device("cpu")).layout
    first, second = fragments_of(layout, 2, "strided")
    assert {c.name.split(".")[1] for c in second.parameters} == {"1"}
    assert {"blocks.0", "blocks.2"} <= {".".join(c.name.split(".")[:2]) for c in first.parameters}
    assert len(first.parameters) + len(second.parameters) == len(layout)
    several = fragments_of(layout, 8, "strided")  # more than layers: module by module
    modules = list(dict.fromkeys(c.name.rpartition(".")[0] for c in layout))
    assert [sorted({c.name.rpartition(".")[0] for c in one.parameters}) for one in several] == [
        sorted(modules[i::8]) for i in range(8)
    ]
