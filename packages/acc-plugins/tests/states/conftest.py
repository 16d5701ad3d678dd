"""A folder of shards as torch.distributed.checkpoint writes it, made by hand: any chunks, any values, without any process group."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

Chunks = list[tuple[tuple[int, ...], tuple[int, ...]]]
WriteShards = Callable[..., Path]


def _write(
    folder: Path, state: Mapping[tuple[Any, ...], Any], chunks: Mapping[tuple[Any, ...], Chunks] | None = None
) -> Path:
    """`state` by the place of its entries; `chunks` are offsets and sizes by place, a whole tensor where there are none. A file for every chunk."""
    folder.mkdir(parents=True)
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    places = {}
    for place, value in state.items():
        flat = ".".join(map(str, place))
        places[flat] = place
        pieces: list[tuple[Any, Any]] = [(None, value)]
        described[flat] = BytesStorageMetadata()
        if isinstance(value, Tensor):
            boxes = (chunks or {}).get(place, [((0,) * value.dim(), tuple(value.shape))])
            parts = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
            described[flat] = TensorStorageMetadata(
                TensorProperties.create_from_tensor(value), value.shape, parts
            )
            pieces = [
                (offsets, value[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone())
                for offsets, sizes in boxes
            ]
        for offsets, piece in pieces:
            out = io.BytesIO()
            torch.save(piece, out)
            file = f"__{len(stored)}_0.distcp"
            (folder / file).write_bytes(b"before" + out.getvalue() + b"after")
            stored[MetadataIndex(flat, offsets)] = _StorageInfo(file, 6, len(out.getvalue()))
    meta = StorageMeta(checkpoint_id=folder, save_id="1")
    content = Metadata(described, planner_data=places, storage_data=stored, storage_meta=meta)
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    return folder


@pytest.fixture(scope="session")
def write_shards() -> WriteShards:
    return _write
