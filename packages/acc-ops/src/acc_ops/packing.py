"""Many tensors as one row of bytes, and back: what a collective for a whole structure really sends.

[Note: the order in a row] Leaves of the same dtype lie side by side (a section), and in it leaves of the same shape (a block), so that they
are taken apart in a few operations whatever their number; wider dtypes come first, so that every leaf is aligned for its dtype.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from acc_ops.wire import as_bytes, combine

Meta = tuple[torch.dtype, torch.Size]


class Block(NamedTuple):
    """Leaves of one dtype and shape that lie side by side in a row."""

    dtype: torch.dtype
    shape: torch.Size
    indices: tuple[int, ...]  # of the leaves
    start: int  # byte where the first one starts
    leaf_bytes: int

    @property
    def stop(self) -> int:
        """The byte after the last leaf."""
        return self.start + self.leaf_bytes * len(self.indices)

    @property
    def rows(self) -> int:
        """The size of the first dimension; a leaf without dimensions counts as one row."""
        return self.shape[0] if self.shape else 1


class Section(NamedTuple):
    """The blocks of one dtype, which lie side by side in a row."""

    dtype: torch.dtype
    blocks: tuple[Block, ...]
    indices: tuple[int, ...]  # of the leaves, block after block
    counts: tuple[int, ...]  # elements of each of those leaves
    start: int
    stop: int


class Layout(NamedTuple):
    """Where each of some leaves lies in a row of bytes."""

    sections: tuple[Section, ...]
    num_leaves: int
    num_bytes: int


@functools.lru_cache(maxsize=512)
def layout_of(metas: tuple[Meta, ...]) -> Layout:
    """The layout for leaves of these dtypes and shapes, in this order."""
    by_dtype: dict[torch.dtype, dict[torch.Size, list[int]]] = {}
    for index, (dtype, shape) in enumerate(metas):
        by_dtype.setdefault(dtype, {}).setdefault(shape, []).append(index)
    sections = []
    start = 0
    for dtype, by_shape in sorted(by_dtype.items(), key=lambda item: -item[0].itemsize):
        blocks: list[Block] = []
        for shape, indices in by_shape.items():
            stop = blocks[-1].stop if blocks else start
            blocks.append(Block(dtype, shape, tuple(indices), stop, dtype.itemsize * shape.numel()))
        sections.append(
            Section(
                dtype,
                tuple(blocks),
                tuple([index for block in blocks for index in block.indices]),
                tuple([block.shape.numel() for block in blocks for _ in block.indices]),
                start,
                blocks[-1].stop,
            )
        )
        start = blocks[-1].stop
    return Layout(tuple(sections), len(metas), start)


def metas_of(leaves: Sequence[Tensor]) -> tuple[Meta, ...]:
    """Dtype and shape of each leaf."""
    return tuple([(leaf.dtype, leaf.shape) for leaf in leaves])


@torch.no_grad()
def pack(leaves: Sequence[Tensor], layout: Layout, device: torch.device) -> Tensor:
    """All leaves as flat uint8 on `device`; shares memory when it is a single contiguous leaf there."""
    if not layout.num_bytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    parts = []
    for section in layout.sections:
        if section.start < section.stop:
            members = [leaves[i].reshape(-1) for i in section.indices]
            parts.append(as_bytes(members[0] if len(members) == 1 else torch.cat(members)).to(device))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(row: Tensor, layout: Layout) -> list[Tensor]:
    """The leaves of one row of bytes, each with memory of its own."""
    leaves: list[Tensor] = [row] * layout.num_leaves
    for section in layout.sections:
        flat = _typed(row[section.start : section.stop].clone(), section.dtype, (sum(section.counts),))
        _take_apart(flat, section, leaves)
    return leaves


def unpack_joined(rows: Tensor, layout: Layout) -> list[Tensor]:
    """The leaves of equal rows of bytes (ranks, bytes), joined over the ranks along the first dimension."""
    num_ranks = rows.shape[0]
    leaves: list[Tensor] = [rows] * layout.num_leaves
    for section in layout.sections:
        total = sum(section.counts)
        if len(section.blocks) > _MANY_BLOCKS and total <= _SMALL_SECTION:
            flat = _typed(
                rows[:, section.start : section.stop].contiguous(), section.dtype, (num_ranks * total,)
            )
            flat = flat.index_select(0, _leaf_by_leaf(section.counts, num_ranks).to(flat.device))
            parts = _split_copy(flat, [count * num_ranks for count in section.counts])
            blocks = (block for block in section.blocks for _ in block.indices)
            for index, part, block in zip(section.indices, parts, blocks, strict=True):
                leaves[index] = part.view(num_ranks * block.rows, *block.shape[1:])
            continue
        for block in section.blocks:
            count = len(block.indices)
            part = rows[:, block.start : block.stop]
            if count > 1:
                part = part.reshape(num_ranks, count, block.leaf_bytes).transpose(0, 1)
            shape = (count, num_ranks * block.rows, *block.shape[1:])
            joined = _separate(_typed(part.contiguous(), block.dtype, shape))
            for index, leaf in zip(block.indices, joined, strict=True):
                leaves[index] = leaf
    return leaves


def unpack_ragged(rows: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    """The leaves of rows with a layout each, joined over the ranks along the first dimension."""
    ranks = [unpack(row[: layout.num_bytes], layout) for row, layout in zip(rows, layouts, strict=True)]
    return [
        torch.cat([leaf if leaf.ndim else leaf.unsqueeze(0) for leaf in members])
        for members in zip(*ranks, strict=True)
    ]


def unpack_combined(rows: Tensor, layout: Layout, op: str) -> list[Tensor]:
    """The leaves of equal rows of bytes (ranks, bytes), combined over the ranks by `op`."""
    num_ranks = rows.shape[0]
    leaves: list[Tensor] = [rows] * layout.num_leaves
    for section in layout.sections:
        shape = (num_ranks, sum(section.counts))
        members = _typed(rows[:, section.start : section.stop].contiguous(), section.dtype, shape)
        flat = combine(list(members), op)
        _take_apart(flat, section, leaves)
    return leaves


def sizes_to_bytes(sizes: Sequence[int]) -> bytes:
    """One int64 per leaf."""
    return struct.pack(f"={len(sizes)}q", *sizes)


def sizes_from_bytes(data: bytes) -> list[int]:
    """The int64 of each leaf."""
    return list(struct.unpack(f"={len(data) // 8}q", data))


def _typed(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data.numel():
        return torch.empty(shape, dtype=dtype, device=data.device)
    data = data.reshape(-1)
    return (data if dtype == torch.uint8 else data.view(dtype)).view(shape)


# Blocks are taken apart one by one while they are few; many small ones together, by an index that orders their elements.
_MANY_BLOCKS = 4
_SMALL_SECTION = 1 << 16


@functools.lru_cache(maxsize=64)
def _leaf_by_leaf(counts: tuple[int, ...], num_ranks: int) -> Tensor:
    """Where the elements of (rank, leaf, element) are, in the order (leaf, rank, element)."""
    total = sum(counts)
    starts = torch.tensor([0, *counts]).cumsum(0)[:-1].tolist()
    pieces = [
        torch.arange(rank * total + start, rank * total + start + count)
        for start, count in zip(starts, counts, strict=True)
        for rank in range(num_ranks)
    ]
    return torch.cat(pieces)


_split_copy: Any = torch.split_with_sizes_copy
_unbind_copy: Any = torch.unbind_copy  # torch's stubs say that both return nothing


def _take_apart(flat: Tensor, section: Section, leaves: list[Tensor]) -> None:
    """Put the leaves of a section, given as its elements in order, where they belong among `leaves`."""
    if len(section.blocks) > _MANY_BLOCKS:
        shapes = (block.shape for block in section.blocks for _ in block.indices)
        for index, part, shape in zip(
            section.indices, _split_copy(flat, section.counts), shapes, strict=True
        ):
            leaves[index] = part.view(shape)
        return
    sizes = [block.shape.numel() * len(block.indices) for block in section.blocks]
    for block, part in zip(section.blocks, flat.split(sizes), strict=True):
        members = part.view(len(block.indices), *block.shape)
        if members.shape[0] == 1 and len(sizes) > 1:
            members = members.clone()
        for index, leaf in zip(block.indices, _separate(members), strict=True):
            leaves[index] = leaf


def _separate(members: Tensor) -> Sequence[Tensor]:
    """(count, ...) as tensors that share no memory: saving one must not save all."""
    if members.shape[0] == 1:
        return (members[0],)
    return cast(Sequence[Tensor], _unbind_copy(members))
