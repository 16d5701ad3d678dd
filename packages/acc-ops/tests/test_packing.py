"""Leaves as a row of bytes, aligned for their dtypes, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acc_ops.packing import layout_of, metas_of, pack, sizes_from_bytes, sizes_to_bytes, unpack, unpack_joined

CPU = torch.device("cpu")
leaf = st.builds(
    lambda dtype, shape: ((torch.arange(torch.Size(shape).numel()) * 5 + 1) % 7).to(dtype).reshape(shape),
    st.sampled_from([torch.bool, torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex128]),
    st.lists(st.integers(0, 3), max_size=3),
)


@given(st.lists(leaf, max_size=8))
def test_leaves_come_back_as_they_were(leaves: list[Tensor]) -> None:
    layout = layout_of(metas_of(leaves))
    row = pack(leaves, layout, CPU)
    assert row.numel() == layout.num_bytes == sum(t.numel() * t.element_size() for t in leaves)
    for old, new in zip(leaves, unpack(row, layout), strict=True):
        assert new.dtype == old.dtype
        assert torch.equal(new, old)


@given(st.lists(leaf, max_size=8))
def test_every_leaf_is_aligned_for_its_dtype(leaves: list[Tensor]) -> None:
    for section in layout_of(metas_of(leaves)).sections:
        for block in section.blocks:
            assert block.start % block.dtype.itemsize == 0


@given(st.lists(leaf, max_size=8) | st.lists(leaf, min_size=20, max_size=30), st.integers(1, 3))
def test_equal_rows_are_joined_along_the_first_dimension(leaves: list[Tensor], ranks: int) -> None:
    layout = layout_of(metas_of(leaves))
    rows = pack(leaves, layout, CPU).expand(ranks, -1)
    for old, new in zip(leaves, unpack_joined(rows, layout), strict=True):
        assert torch.equal(new, torch.cat([old if old.ndim else old.unsqueeze(0)] * ranks))


def test_a_single_contiguous_leaf_is_not_copied() -> None:
    tensor = torch.ones(1000)
    assert pack([tensor], layout_of(metas_of([tensor])), CPU).data_ptr() == tensor.data_ptr()


@given(st.lists(st.integers(0, 2**40)))
def test_sizes_are_numbers_again(sizes: list[int]) -> None:
    assert sizes_from_bytes(sizes_to_bytes(sizes)) == sizes
