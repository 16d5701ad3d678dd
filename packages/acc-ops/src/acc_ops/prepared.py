"""Nested data made ready for a collective: its leaves, where they lie in a row of bytes, and what the ranks compare."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acc_ops.containers import container_of
from acc_ops.exchange import Call, Row, digest_of, tried
from acc_ops.packing import Layout, Meta, layout_of, metas_of, pack, sizes_to_bytes
from acc_ops.tree import Structure, flatten, leaves_with_paths
from acc_ops.wire import from_bytes
from acc_ops.world import World

Arguments = tuple[
    tuple[str, str], ...
]  # name and text of what the ranks have to agree about besides the data


class MayDiffer(Enum):
    """What of the shapes may differ between ranks."""

    NOTHING = "nothing"
    ROWS = "rows"  # the size of the first dimension
    SIZES = "sizes"  # every size; the number of dimensions agrees


class Prepared(NamedTuple):
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
    arguments: Arguments = (),
    error: Exception | None = None,
) -> Prepared:
    """`data` ready for the collective `name`; whatever makes it unfit is kept as the call's error, for all ranks to see.

    `arguments` are compared, too. `dim` is the dimension whose sizes the ranks tell each other with `MayDiffer.SIZES`.
    """
    ready: Prepared | None = None
    if error is None:
        ready, error = tried(lambda: _prepare(name, data, world, root, may_differ, dim, arguments))
    if ready is not None:
        return ready
    call = Call(name=name, root=root, error=error)
    return Prepared(call=call, leaves=[], structure=Structure(None, None, 0), metas=(), device=world.device)


def pickled(obj: Any) -> Tensor:
    """`obj` as flat uint8."""
    return from_bytes(pickle.dumps(obj))


def _prepare(
    name: str,
    data: Any,
    world: World,
    root: int,
    may_differ: MayDiffer,
    dim: int,
    arguments: Arguments,
) -> Prepared:
    leaves, structure = flatten(data)
    _check_leaves(name, structure, leaves)
    metas = metas_of(leaves)
    devices = {leaf.device for leaf in leaves}
    kinds = tuple([leaf.device.type for leaf in leaves])
    device = next(iter(devices)) if len(devices) == 1 else world.device
    digest, exact, sizes = _digests(structure.key, metas, kinds, may_differ, dim, arguments)
    call = Call(
        name=name,
        root=root,
        digest=digest,
        exact=exact,
        sizes=sizes,
        device=device,
        describe=functools.partial(_describe, data, may_differ, arguments),
    )
    return Prepared(
        call=call,
        leaves=leaves,
        structure=structure,
        metas=metas,
        device=device,
        on_several_devices=len(devices) > 1,
    )


def _check_leaves(name: str, structure: Structure, leaves: list[Tensor]) -> None:
    if structure.num_others:
        for path, leaf in leaves_with_paths(structure.template, _root_name(structure.template)):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{name} takes tensors in nested containers, but {path} is {_an(type(leaf).__name__)}: {leaf!r:.60}; "
                    "gather_object and broadcast_object_list take other things"
                )
    for leaf in leaves:
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta or leaf.is_quantized:
            raise TypeError(
                f"{name} takes dense tensors with data, got one that is {_oddity(leaf)}: {leaf.dtype}"
            )


def _oddity(leaf: Tensor) -> str:
    if leaf.is_meta:
        return "on the meta device"
    if leaf.is_nested:
        return "nested"
    return "quantized" if leaf.is_quantized else f"{leaf.layout}"


@functools.lru_cache(maxsize=512)
def _digests(
    key: Any,
    metas: tuple[Meta, ...],
    kinds: tuple[str, ...],
    may_differ: MayDiffer,
    dim: int,
    arguments: Arguments,
) -> tuple[bytes, bytes, bytes]:
    """Digest of what has to agree, digest of the sizes, and the sizes."""
    fixed: tuple[Any, ...]
    if may_differ is MayDiffer.NOTHING:
        return digest_of(key, metas, kinds, arguments), b"", b""
    if may_differ is MayDiffer.ROWS:
        fixed = tuple([(dtype, len(shape), shape[1:]) for dtype, shape in metas])
        sizes = [shape[0] if shape else 1 for _, shape in metas]
    else:
        fixed = tuple([(dtype, len(shape)) for dtype, shape in metas])
        sizes = [shape[dim] if -len(shape) <= dim < len(shape) else 0 for _, shape in metas]
    agreed = digest_of(key, fixed, kinds, may_differ.value, arguments)
    return agreed, digest_of(tuple(sizes)), sizes_to_bytes(sizes)


def _describe(data: Any, may_differ: MayDiffer, arguments: Arguments) -> list[Row]:
    rows: list[Row] = [(name, text, text) for name, text in arguments]
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
