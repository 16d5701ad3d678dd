"""A safetensors file laid out in memory: what is copied to its places there is the file, to be written as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from acc_bigmodel.save import checked_items, identity_of
from acc_bigmodel.stores.safetensors import header_of

ImageKey = tuple[tuple[str, str, torch.dtype, torch.Size], ...]


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """`header` opens the file; `places` says where in it, in bytes, each tensor begins. Of names that share a tensor only the first has a place."""

    header: bytes
    places: Mapping[str, int]
    nbytes: int


def image_key(state: Mapping[str, torch.Tensor]) -> ImageKey:
    """Equal for states whose files differ only in the values: names, which of them share a tensor, dtypes and shapes.

    Raises TypeError and RuntimeError as `save_weights` does.
    """
    homes: dict[Any, str] = {}
    return tuple(
        (name, homes.setdefault(identity_of(name, tensor), name), tensor.dtype, tensor.shape)
        for name, tensor in state.items()
    )


def plan_image(state: Mapping[str, torch.Tensor]) -> ImagePlan:
    """Where everything lies in the file that `save_weights` would write. Raises ValueError for a dtype that the format cannot hold."""
    items = checked_items(state)
    shared = {alias: item.name for item in items for alias in item.aliases}
    header, places = header_of({item.name: item.entry for item in items}, shared)
    return ImagePlan(
        header=header,
        places={name: len(header) + at for name, at in places.items()},
        nbytes=len(header) + sum(item.nbytes for item in items),
    )
