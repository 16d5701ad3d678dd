"""Leaves as a row of bytes, aligned for their dtypes, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acc_ops.packing import (
    layout_of,
    metas_of,
    pack,
    sizes_from_bytes,
    sizes_to_bytes,
    unpack,
    unpack_combined,
    unpack_joined,
    unpack_ragged,
)

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


@given(st.lists(leaf, max_size=8) | st.lists(leaf, min_size=20, max_size=30))
def test_views_of_a_row_have_the_values_of_copies(leaves: list[Tensor]) -> None:
    layout = layout_of(metas_of(leaves))
    row = pack(leaves, layout, CPU)
    for old, new in zip(leaves, unpack(row, layout, copy=False), strict=True):
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


def in_headers(leaves: list[Tensor], ranks: int, first: int) -> Tensor:
    """The rows of `leaves` as part of wider ones, the first byte at `first`, as they come back in headers."""
    row = pack(leaves, layout_of(metas_of(leaves)), CPU)
    headers = torch.zeros(ranks, first + row.numel() + 100, dtype=torch.uint8)
    rows = headers[:, first : first + row.numel()]
    rows.copy_(row)
    return rows


FEW = [torch.ones(3), torch.ones(2, 2), torch.ones(3), torch.ones(()), torch.ones(5, dtype=torch.bool)]
MANY = [torch.full((i % 4, i), i, dtype=torch.int16) for i in range(9)] + [torch.tensor(3, dtype=torch.int16)]


@pytest.mark.parametrize("leaves", [FEW, MANY, FEW[:1], FEW[4:], MANY[9:]])
@pytest.mark.parametrize("first", [0, 48, 49, 50, 52])
def test_what_is_unpacked_keeps_no_more_memory_than_it_needs(leaves: list[Tensor], first: int) -> None:
    layout = layout_of(metas_of(leaves))
    rows = in_headers(leaves, 2, first)
    both = [torch.cat([old if old.ndim else old.unsqueeze(0)] * 2) for old in leaves]
    for expected, made in (
        (leaves, unpack(rows[1], layout)),
        (both, unpack_joined(rows, layout)),
        (both, unpack_ragged(rows, [layout, layout])),
        (leaves, unpack_combined(rows, layout, "max")),
    ):
        for old, new in zip(expected, made, strict=True):
            assert torch.equal(new, old)
            assert new.untyped_storage().nbytes() == new.nbytes
        storages = {new.untyped_storage().data_ptr() for new in made if new.numel()}
        assert len(storages) == sum(1 for new in made if new.numel())


@pytest.mark.parametrize("copies", [1, 2, 6])
def test_leaves_are_packed_by_value_whatever_they_are_views_of(copies: int) -> None:
    numbers = torch.arange(24.0).reshape(2, 3, 2, 2)
    views = [
        numbers.transpose(0, 1),
        numbers.contiguous(memory_format=torch.channels_last),
        torch.view_as_complex(numbers).conj(),
        torch.view_as_complex(numbers).conj().imag,
        torch.ones(1).expand(4),
        numbers[:, 1:, ::2],
        torch.nn.Parameter(numbers),
    ]
    leaves = [view for view in views for _ in range(copies)]
    layout = layout_of(metas_of(leaves))
    for old, new in zip(leaves, unpack(pack(leaves, layout, CPU), layout), strict=True):
        assert torch.equal(new, old)
    for view in views:
        layout = layout_of(metas_of([view]))
        (back,) = unpack(pack([view], layout, CPU), layout)
        assert torch.equal(back, view)
        assert not back.requires_grad


def test_a_single_contiguous_leaf_is_not_copied() -> None:
    tensor = torch.ones(1000)
    assert pack([tensor], layout_of(metas_of([tensor])), CPU).data_ptr() == tensor.data_ptr()


@given(st.lists(st.integers(0, 2**40)))
def test_sizes_are_numbers_again(sizes: list[int]) -> None:
    assert sizes_from_bytes(sizes_to_bytes(sizes)) == sizes
