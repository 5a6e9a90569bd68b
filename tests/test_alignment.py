"""A node's tensors begin in memory where they would if it were alone: its products then have its bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from vsim_kernels.alignment import ALIGNMENT, aligned, are_apart, empty_rows, rows_apart

from vsim import Trainer
from vsim.private_torch import is_wrapped
from vsim.strategy import OptimSpec, Strategy


def begins(rows: Tensor) -> list[int]:
    return [row.data_ptr() % ALIGNMENT for row in rows]


@settings(max_examples=200)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    num_nodes=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
    data=st.data(),
)
def test_rows_lie_as_a_node_alone_has_them(
    shape: list[int], num_nodes: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    dense = torch.randint(0, 2, (num_nodes, *shape), generator=torch.Generator().manual_seed(0)).to(dtype)
    stacked, alone = dense, [aligned(row.clone()) for row in dense]
    order = data.draw(st.permutations(range(len(shape))))
    dim = data.draw(st.sampled_from(range(len(shape))))
    first = data.draw(st.integers(0, shape[dim] - 1))
    expand = data.draw(st.booleans())

    def a_view(t: Tensor, lead: int) -> Tensor:
        t = t.narrow(dim + lead, first, shape[dim] - first)
        t = t.permute([*range(lead), *(d + lead for d in order)])
        return t.unsqueeze(-1).expand(*t.shape, 3) if expand else t

    apart = rows_apart(a_view(stacked, 1))
    assert are_apart(apart)
    assert torch.equal(apart, a_view(stacked, 1))
    for row, own in zip(apart, (a_view(own, 0) for own in alone), strict=True):
        assert row.stride() == own.stride()
        assert row.data_ptr() % ALIGNMENT == own.data_ptr() % ALIGNMENT
    assert rows_apart(apart) is apart


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (2, 0), (16,)])
def test_empty_rows_are_dense_and_aligned(shape: tuple[int, ...]) -> None:
    rows = empty_rows(3, shape, torch.float32, torch.device("cpu"))
    assert rows.shape == (3, *shape)
    assert all(row.is_contiguous() for row in rows)
    if rows.numel():
        assert begins(rows) == [0, 0, 0]


SEEN: list[list[int]] = []  # where the tensors of `Odd`'s calls begin; its own attribute would be each node's


class Odd(nn.Module):
    """Every parameter but the first begins at an odd place in a row; the forward pass also writes to one."""

    def __init__(self) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(0)
        self.scale = nn.Parameter(torch.ones(()))
        self.first = nn.Parameter(0.3 * torch.randn(7, 5, generator=stream))
        self.second = nn.Parameter(0.3 * torch.randn(3, 7, generator=stream))

    def forward(self, batch: Tensor) -> Tensor:
        plain = [t for t in (batch, self.first, self.second) if not is_wrapped(t)]
        SEEN.append(begins(plain))  # type: ignore[arg-type]
        with torch.no_grad():
            self.second.clamp_(-0.25, 0.25)
        return (self.scale * torch.tanh(batch @ self.first.T) @ self.second.T).square().mean()


@pytest.mark.parametrize("backend", ["loop", "vmap", pytest.param("process", marks=pytest.mark.slow)])
def test_parameters_and_batches_begin_aligned_and_can_be_written_to(backend: str) -> None:
    data = torch.randn(30, 5, generator=torch.Generator().manual_seed(1))
    model = Odd()
    trainer = Trainer(model, data)
    SEEN.clear()
    place = {"backend": "process"} if backend == "process" else {"executor": backend}
    ended = trainer.fit(
        strategy=Strategy(inner_optim=OptimSpec("sgd", lr=0.0)),
        num_nodes=3,
        max_steps=2,
        batch_size=3,
        progress=False,
        **place,  # type: ignore[arg-type]
    )
    torch.testing.assert_close(ended.second, model.second.clamp(-0.25, 0.25), rtol=1e-6, atol=0)  # a mean of equal ones
    assert (model.second.abs() > 0.25).any()
    if backend == "loop":
        assert len(SEEN) >= 6 and all(places == [0, 0, 0] for places in SEEN)
