"""Numbers of a few bits in bytes: there and back, and against Python's whole numbers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vsim_kernels import pack_bits, unpack_bits
from vsim_kernels.packing import pack_bits_reference, unpack_bits_reference


@st.composite
def messages(draw: Any) -> tuple[list[torch.Tensor], list[int]]:
    nodes, widths = draw(st.integers(1, 4)), draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    stream = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return [torch.randint(2**w, (nodes, draw(st.integers(0, 9))), generator=stream) for w in widths], widths


@settings(max_examples=40)
@given(messages())
@example(([torch.zeros(2, 0, dtype=torch.int64)], [12]))
def test_there_and_back_and_against_the_reference(message: tuple[list[torch.Tensor], list[int]]) -> None:
    parts, widths = message
    counts = [part.shape[1] for part in parts]
    packed = pack_bits(parts, widths)
    bits = sum(count * width for count, width in zip(counts, widths, strict=True))
    assert packed.dtype == torch.uint8 and packed.shape == (len(parts[0]), -(-bits // 8))
    assert torch.equal(packed, pack_bits_reference(parts, widths))
    for unpack in (unpack_bits, unpack_bits_reference):
        for part, back in zip(parts, unpack(packed, counts, widths), strict=True):
            assert torch.equal(part, back)


def test_two_indices_of_twelve_bits_are_three_bytes() -> None:
    packed = pack_bits([torch.tensor([[0xABC, 0xDEF]])], [12])
    assert packed.tolist() == [[0xBC, 0xFA, 0xDE]]
    # Four codes of 2 bits are a byte, the lowest first: 0b11_10_01_00; of small types, too.
    assert pack_bits([torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8)], [2]).tolist() == [[0b11100100]]


def test_parts_follow_each_other_bit_by_bit() -> None:
    # 5 bits, then 3: one byte, 0b110_10001.
    assert pack_bits([torch.tensor([[0b10001]]), torch.tensor([[0b110]])], [5, 3]).tolist() == [[0b11010001]]
