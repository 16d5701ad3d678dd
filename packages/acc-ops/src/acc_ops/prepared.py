"""Nested data made ready for a collective: its leaves, where they lie in a row of bytes, and what the ranks compare."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from acc_ops.containers import container_of
from acc_ops.exchange import Call, Row, digest_of
from acc_ops.packing import Layout, Meta, layout_of, metas_of, pack, sizes_to_bytes
from acc_ops.tree import Structure, flatten, leaves_with_paths
from acc_ops.wire import from_bytes
from acc_ops.world import World


class MayDiffer(Enum):
    """What of the shapes may differ between ranks."""

    NOTHING = "nothing"
    ROWS = "rows"  # the size of the first dimension
    SIZES = "sizes"  # every size; the number of dimensions agrees


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Nested data, ready to travel."""

    call: Call
    leaves: list[Tensor]
    structure: Structure
    metas: tuple[Meta, ...]
    device: torch.device  # where the bytes are put together
    on_several_devices: bool = False

    @property
    def layout(self) -> Layout:
        """Where each leaf lies in the row of bytes of this rank."""
        return layout_of(self.metas)

    def packed(self) -> Tensor:
        """The row of bytes of this rank."""
        return pack(self.leaves, self.layout, self.device)

    def back_to_devices(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Each of `leaves` on the device of the one it answers to; they come from `device`."""
        if not self.on_several_devices:
            return leaves
        return [new.to(old.device) for new, old in zip(leaves, self.leaves, strict=True)]


def prepare(
    name: str,
    data: Any,
    world: World,
    *,
    root: int = -1,
    may_differ: MayDiffer = MayDiffer.NOTHING,
    dim: int = 0,
    error: Exception | None = None,
) -> Prepared:
    """`data` ready for the collective `name`; what makes it unfit is kept as the call's error, for all ranks to see.

    `dim` is the dimension whose sizes the ranks tell each other with `MayDiffer.SIZES`.
    """
    leaves, structure = flatten(data)
    problem = error or _problem(name, structure, leaves)
    if problem is not None:
        call = Call(name=name, root=root, error=problem)
        return Prepared(call=call, leaves=[], structure=structure, metas=(), device=world.device)
    metas = metas_of(leaves)
    devices = {leaf.device for leaf in leaves}
    kinds = tuple([leaf.device.type for leaf in leaves])
    device = next(iter(devices)) if len(devices) == 1 else world.device
    digest, exact, sizes = _digests(structure.key, metas, kinds, may_differ, dim)
    call = Call(
        name=name,
        root=root,
        digest=digest,
        exact=exact,
        sizes=sizes,
        device=device,
        describe=functools.partial(_describe, data, may_differ),
    )
    return Prepared(
        call=call,
        leaves=leaves,
        structure=structure,
        metas=metas,
        device=device,
        on_several_devices=len(devices) > 1,
    )


def pickled(obj: Any) -> tuple[Tensor | None, Exception | None]:
    """`obj` as flat uint8, or what keeps it from travelling."""
    try:
        return from_bytes(pickle.dumps(obj)), None
    except Exception as error:  # noqa: BLE001 - whatever a user's class raises; the other ranks must hear of it
        return None, error


def _problem(name: str, structure: Structure, leaves: list[Tensor]) -> Exception | None:
    if structure.num_others:
        for path, leaf in leaves_with_paths(structure.template, _root_name(structure.template)):
            if not isinstance(leaf, Tensor):
                return TypeError(
                    f"{name} takes tensors in nested containers, but {path} is {_an(type(leaf).__name__)}: {leaf!r:.60}; "
                    "gather_object and broadcast_object_list take other things"
                )
    for leaf in leaves:
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta or leaf.is_quantized:
            what = "on the meta device" if leaf.is_meta else f"{leaf.layout}"
            return TypeError(f"{name} takes dense tensors with data, got one that is {what}: {leaf.dtype}")
    return None


@functools.lru_cache(maxsize=512)
def _digests(
    key: Any, metas: tuple[Meta, ...], kinds: tuple[str, ...], may_differ: MayDiffer, dim: int
) -> tuple[bytes, bytes, bytes]:
    """Digest of what has to agree, digest of the sizes, and the sizes."""
    fixed: tuple[Any, ...]
    if may_differ is MayDiffer.NOTHING:
        return digest_of(key, metas, kinds), b"", b""
    if may_differ is MayDiffer.ROWS:
        fixed = tuple([(dtype, len(shape), shape[1:]) for dtype, shape in metas])
        sizes = [shape[0] if shape else 1 for _, shape in metas]
    else:
        fixed = tuple([(dtype, len(shape)) for dtype, shape in metas])
        sizes = [shape[dim] if -len(shape) <= dim < len(shape) else 0 for _, shape in metas]
    return digest_of(key, fixed, kinds, may_differ.value, dim), digest_of(tuple(sizes)), sizes_to_bytes(sizes)


def _describe(data: Any, may_differ: MayDiffer) -> list[Row]:
    rows: list[Row] = []
    _add_rows(rows, data, _root_name(data), may_differ)
    return rows


def _add_rows(rows: list[Row], data: Any, path: str, may_differ: MayDiffer) -> None:
    kind = type(data).__name__
    if isinstance(data, Tensor):
        shape = tuple(data.shape)
        compared = {MayDiffer.NOTHING: shape, MayDiffer.ROWS: (len(shape), shape[1:])}.get(
            may_differ, len(shape)
        )
        on = "" if data.device.type == "cpu" else f" on {data.device.type}"
        text = f"{str(data.dtype).removeprefix('torch.')} {shape}{on}"
        rows.append((path, (str(data.dtype), compared, data.device.type), text))
        return
    container = container_of(data)
    if container is None:
        rows.append((path, kind, kind))
        return
    key = container.key(data)
    inside = f"with {', '.join(map(repr, key))}" if isinstance(key, tuple) else f"of {key}"
    rows.append((path, (kind, digest_of(type(data), key)), f"{kind} {inside}"))
    for name, value in zip(container.names(data), container.values(data), strict=True):
        _add_rows(rows, value, path + name, may_differ)


def _root_name(data: Any) -> str:
    return "tensor" if container_of(data) is None else "batch"


def _an(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
