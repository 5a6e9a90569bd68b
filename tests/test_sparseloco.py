"""SparseLoCo: by hand, against DiLoCo, and its bytes."""

from __future__ import annotations

import pytest
import torch
from driven import Parameters, driven, normal, size, started

from vsim.strategy import DeMoStrategy, DiLoCoStrategy, OptimSpec, SparseLoCoStrategy, Strategy

PLAIN = OptimSpec("sgd", lr=1.0)


def test_two_rounds_by_hand() -> None:
    # A vector of 4 is one tile; k = 2, H = 1, β = 0.5, α = 0.5, lr 1, φ = 0, and the same gradients in every round,
    # which are φ − θ_k after one step: (4, −2, 1, 0) on node 0 and (2, 1, 0, 3) on node 1.
    #     round 1  sent (4, −2, –, –) and (2, –, –, 3), the mean over the senders is (3, −2, 0, 3), so that φ is
    #              −(1.5, −1, 0, 1.5); left (0, 0, 1, 0) and (0, 1, 0, 0)
    #     round 2  e = (4, −2, 1.5, 0) and (2, 1.5, 0, 3): the same are sent, 1.5 are left
    #     round 3  e = (4, −2, 1.75, 0) and (2, 1.75, 0, 3): as in round 2
    gradients = torch.tensor([[4.0, -2.0, 1.0, 0.0], [2.0, 1.0, 0.0, 3.0]])
    strategy = SparseLoCoStrategy(
        H=1, topk=2, quantization_bits=None, error_feedback=0.5, outer_lr=0.5, inner_optim=PLAIN
    )
    run = started(strategy, Zeros(4), 2)
    (module,) = run.strategy.communication_modules
    left = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    for number, share in ((1, 1.0), (2, 1.5), (3, 1.75)):
        run.step(gradients)
        assert run.cluster.weights.tolist() == 2 * [(-number * torch.tensor([1.5, -1.0, 0.0, 1.5])).tolist()]
        (residual,) = module.average.message.residual
        assert torch.equal(residual.view(2, 4), share * left)


class Zeros(Parameters):
    """One vector of zeros."""

    def __init__(self, count: int) -> None:
        super().__init__((count,))
        torch.nn.init.zeros_(self.p0)


def test_two_bits_by_hand() -> None:
    # One tile, all of it sent; the bins are derived in test_kernels_codebooks: −1, 0, 1 and 2 fall into one, mean 0.5.
    gradients = torch.tensor([[[-3.0, -1.0, 0.0, 1.0, 2.0, 7.0]]])
    run = driven(SparseLoCoStrategy(H=1, inner_optim=PLAIN), Zeros(6), gradients)
    torch.testing.assert_close(run.cluster.weights[0], -torch.tensor([-3.0, 0.5, 0.5, 0.5, 0.5, 7.0]))


@pytest.mark.filterwarnings("ignore:TileTopK:UserWarning")
@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_it_is_diloco_with_plain_sgd_where_all_is_sent_and_nothing_kept(num_nodes: int) -> None:
    model = Parameters((128, 96), (67, 3), (40,), (4, 3, 3, 3))
    gradients = normal(6, num_nodes, size(model))
    options = {"H": 2, "outer_lr": 0.7, "inner_optim": OptimSpec("adamw", lr=0.01)}
    sparse = SparseLoCoStrategy(topk=64 * 64, quantization_bits=None, error_feedback=0.0, **options)
    outer = OptimSpec("sgd")
    usual = driven(DiLoCoStrategy(outer_optim=outer, **options), model, gradients)
    torch.testing.assert_close(driven(sparse, model, gradients).cluster.weights, usual.cluster.weights)


def test_payload_by_hand() -> None:
    # 128 tiles of 64 × 64 send 64 · 128 = 8192 values with 12-bit indices and 2-bit codes, in 8 blocks of 1024 with
    # 4 values each: 14 · 64 / 4096 bits a parameter and 128 bytes, 145 times fewer than float32.
    model = Parameters((1024, 512))
    ledger = driven(SparseLoCoStrategy(H=2), model, normal(2, 2, size(model))).ledger
    (event,) = ledger
    assert (event.step, event.collective, event.label) == (2, "all_gather", "outer gradient")
    assert event.payload_bytes == size(model) * 14 * 64 // 4096 // 8 + 128
    assert 4 * size(model) / event.payload_bytes == pytest.approx(145, abs=1)


def test_what_travels_are_the_bytes_that_are_billed(monkeypatch: pytest.MonkeyPatch) -> None:
    # But for the codes of the values, which travel as a byte each: 12-bit indices of 64 values are 96 bytes a tile.
    model = Parameters((128, 64), (100,))
    run = started(SparseLoCoStrategy(H=1), model, 2)
    sent: list[torch.Tensor] = []
    gather = run.cluster.collectives._all_gather
    monkeypatch.setattr(run.cluster.collectives, "_all_gather", lambda rows: sent.append(rows) or gather(rows))
    run.step(normal(2, size(model)))
    index, codes, table = sent
    # (100,) is two tiles of 50, with 6 bits an index.
    assert index.dtype == torch.uint8 and index.shape == (2, 2 * 96 + 75)
    assert codes.dtype == torch.uint8 and codes.numel() == 2 * (2 * 64 + 100) and table.shape == (2, 1, 4)
    (event,) = run.ledger
    assert event.payload_bytes == index[0].numel() + codes[0].numel() * 2 / 8 + 4 * table[0].numel()


@pytest.mark.parametrize("strategy", [SparseLoCoStrategy(H=2), DeMoStrategy()], ids=lambda s: type(s).__name__)
@pytest.mark.filterwarnings("ignore:DCTTopK|TileTopK")
def test_a_parameter_without_entries_changes_nothing(strategy: Strategy) -> None:
    models, gradients = (Parameters((4, 3), (10,)), Parameters((4, 3), (10,), (3, 0), (0,))), normal(4, 2, 22)
    without, with_it = (driven(strategy, model, gradients) for model in models)
    assert torch.equal(with_it.cluster.weights, without.cluster.weights)
    assert [*with_it.ledger] == [*without.ledger]
