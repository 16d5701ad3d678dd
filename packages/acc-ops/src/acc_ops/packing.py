"""Many tensors as one row of bytes, and back: what a collective for a whole structure really sends.

[Note: the order in a row] Leaves of the same dtype lie side by side (a section), and in it leaves of the same shape (a block), so that they
are taken apart in a few operations whatever their number; wider dtypes come first, so that every leaf is aligned for its dtype.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acc_ops.wire import UNCOPIED, as_bytes, combine, copyable, in_shape

Meta = tuple[torch.dtype, torch.Size]


class Block(NamedTuple):
    """Leaves of one dtype and shape that lie side by side in a row."""

    dtype: torch.dtype
    shape: torch.Size
    indices: tuple[int, ...]  # of the leaves
    start: int  # byte where the first one starts
    stop: int


class Section(NamedTuple):
    """The blocks of one dtype, which lie side by side in a row."""

    dtype: torch.dtype
    carrier: torch.dtype  # in which its elements are moved: uint8 for a dtype that torch cannot copy
    blocks: tuple[Block, ...]
    indices: tuple[int, ...]  # of the leaves, block after block
    shapes: tuple[torch.Size, ...]  # of each of those leaves
    counts: tuple[int, ...]  # elements of each of those leaves
    start: int
    stop: int


class Layout(NamedTuple):
    """Where each of some leaves lies in a row of bytes."""

    sections: tuple[Section, ...]
    num_leaves: int
    num_bytes: int


@functools.lru_cache(maxsize=128)
def layout_of(metas: tuple[Meta, ...]) -> Layout:
    """The layout for leaves of these dtypes and shapes, in this order."""
    by_dtype: dict[torch.dtype, dict[torch.Size, list[int]]] = {}
    for index, (dtype, shape) in enumerate(metas):
        by_dtype.setdefault(dtype, {}).setdefault(shape, []).append(index)
    sections: list[Section] = []
    for dtype, by_shape in sorted(by_dtype.items(), key=lambda item: -item[0].itemsize):
        start = stop = sections[-1].stop if sections else 0
        blocks: list[Block] = []
        for shape, indices in by_shape.items():
            stop += dtype.itemsize * shape.numel() * len(indices)
            blocks.append(Block(dtype, shape, tuple(indices), blocks[-1].stop if blocks else start, stop))
        order = tuple([index for block in blocks for index in block.indices])
        shapes = tuple([metas[index][1] for index in order])
        counts = tuple([shape.numel() for shape in shapes])
        carrier = torch.uint8 if dtype in UNCOPIED else dtype
        sections.append(Section(dtype, carrier, tuple(blocks), order, shapes, counts, start, stop))
    return Layout(tuple(sections), len(metas), sections[-1].stop if sections else 0)


def metas_of(leaves: Sequence[Tensor]) -> tuple[Meta, ...]:
    """Dtype and shape of each leaf."""
    return tuple([(leaf.dtype, leaf.shape) for leaf in leaves])


def pack(leaves: Sequence[Tensor], layout: Layout, device: torch.device) -> Tensor:
    """All leaves, which are on one device, as flat uint8 on `device`; shares memory when it is a single contiguous leaf there."""
    if not layout.num_bytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if len(leaves) == 1:
        row = as_bytes(leaves[0])
        return row if row.device == device else row.to(device)
    row = torch.empty(layout.num_bytes, dtype=torch.uint8, device=leaves[0].device)
    with torch.no_grad():
        for section in layout.sections:
            if section.start == section.stop:
                continue
            flat = row[section.start : section.stop].view(section.carrier)
            if section.carrier != section.dtype:
                leaves = [copyable(leaf) for leaf in leaves]
            if len(section.blocks) > _MANY_BLOCKS:
                torch.cat([leaves[i].reshape(-1) for i in section.indices], out=flat)
                continue
            for block, part in zip(section.blocks, flat.split(_block_counts(section)), strict=True):
                members = [leaves[i] for i in block.indices]
                if part.numel():
                    torch.stack(members, out=part.view(len(members), *block.shape))
    return row.to(device)


def unpack(row: Tensor, layout: Layout, *, copy: bool = True) -> list[Tensor]:
    """The leaves of one row of bytes, each with memory of its own; with `copy=False` they may be views of the row."""
    leaves: list[Tensor] = [row] * layout.num_leaves
    for section in layout.sections:
        members = _elements(row.unsqueeze(0), section)
        lone = len(section.indices) == 1
        _take_apart(members.clone() if copy and lone else members, section, section.shapes, leaves, copy=copy)
    return leaves


def unpack_joined(rows: Tensor, layout: Layout) -> list[Tensor]:
    """The leaves of equal rows of bytes (ranks, bytes), joined over the ranks along the first dimension; a lone leaf may be the rows' memory."""
    leaves: list[Tensor] = [rows] * layout.num_leaves
    for section in layout.sections:
        _take_apart(_elements(rows, section), section, _joined_shapes(section.shapes, rows.shape[0]), leaves)
    return leaves


def unpack_ragged(rows: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    """The leaves of rows with a layout each, joined over the ranks along the first dimension."""
    ranks = [
        unpack(row[: layout.num_bytes], layout, copy=False) for row, layout in zip(rows, layouts, strict=True)
    ]
    return [_cat(members) for members in zip(*ranks, strict=True)]


def unpack_combined(rows: Tensor, layout: Layout, op: str) -> list[Tensor]:
    """The leaves of equal rows of bytes (ranks, bytes), combined over the ranks by `op`."""
    leaves: list[Tensor] = [rows] * layout.num_leaves
    for section in layout.sections:
        combined = combine(_elements(rows, section).unbind(), op)
        _take_apart(combined.unsqueeze(0), section, section.shapes, leaves)
    return leaves


def sizes_to_bytes(sizes: Sequence[int]) -> bytes:
    """One int64 per leaf."""
    return struct.pack(f"={len(sizes)}q", *sizes)


def sizes_from_bytes(data: bytes) -> list[int]:
    """The int64 of each leaf."""
    return list(struct.unpack(f"={len(data) // 8}q", data))


# Blocks are packed and taken apart one by one while they are few; many blocks are all their leaves, one by one.
_MANY_BLOCKS = 4


@functools.lru_cache(maxsize=128)
def _joined_shapes(shapes: tuple[torch.Size, ...], num_ranks: int) -> tuple[torch.Size, ...]:
    """The shapes of leaves joined along the first dimension; one without dimensions counts as one row."""
    return tuple([torch.Size([num_ranks * (shape[0] if shape else 1), *shape[1:]]) for shape in shapes])


def _cat(members: Sequence[Tensor]) -> Tensor:
    dtype = members[0].dtype
    rows = [leaf if leaf.ndim else leaf.unsqueeze(0) for leaf in members]
    return torch.cat([copyable(row) for row in rows]).view(dtype) if dtype in UNCOPIED else torch.cat(rows)


def _block_counts(section: Section) -> list[int]:
    """Elements of each block."""
    return [block.shape.numel() * len(block.indices) for block in section.blocks]


def _elements(rows: Tensor, section: Section) -> Tensor:
    """What rows of bytes (ranks, bytes) hold of a section, as (ranks, elements) of its carrier; a view where alignment allows."""
    if section.start == section.stop:
        return torch.empty((rows.shape[0], 0), dtype=section.carrier, device=rows.device)
    part = rows
    if section.stop - section.start < rows.shape[1]:
        part = rows[:, section.start : section.stop]
    if section.carrier == torch.uint8:
        return part
    itemsize = section.carrier.itemsize
    if part.storage_offset() % itemsize or part.stride(0) % itemsize:
        part = part.clone(memory_format=torch.contiguous_format)  # contiguous() may keep offset and stride
    return part.view(section.carrier)


# torch's stubs say that these return nothing
split_copy: Any = torch.split_with_sizes_copy
_unbind_copy: Any = torch.unbind_copy


def _take_apart(
    members: Tensor,
    section: Section,
    shapes: Sequence[torch.Size],
    leaves: list[Tensor],
    *,
    copy: bool = True,
) -> None:
    """Put the leaves of a section, given as (ranks, elements), where they belong among `leaves`, in their final `shapes`.

    With `copy` they share no memory with each other: saving one must not save all. A lone leaf may be the memory of `members`.
    """
    if len(shapes) == 1:
        leaves[section.indices[0]] = in_shape(members.contiguous(), shapes[0])
    elif len(section.blocks) > _MANY_BLOCKS:
        parts = (split_copy if copy else torch.split_with_sizes)(members, section.counts, 1)
        for index, part, shape in zip(section.indices, parts, shapes, strict=True):
            leaves[index] = (
                part.resize_(*shape) if shape else part.resize_(())
            )  # what nobody else has needs no view
    else:
        _take_blocks_apart(members, section, shapes, leaves, _unbind_copy if copy else torch.unbind)
    if section.carrier != section.dtype:
        for index in section.indices:
            leaves[index] = leaves[index].view(section.dtype)


def _take_blocks_apart(
    members: Tensor, section: Section, shapes: Sequence[torch.Size], leaves: list[Tensor], unbind: Any
) -> None:
    first = 0
    for block, together in zip(section.blocks, members.split(_block_counts(section), 1), strict=True):
        count = len(block.indices)
        by_leaf = together.view(members.shape[0], count, block.shape.numel()).transpose(0, 1)
        by_leaf = by_leaf.reshape(count, *shapes[first])
        for index, leaf in zip(block.indices, unbind(by_leaf), strict=True):
            leaves[index] = leaf
        first += count
