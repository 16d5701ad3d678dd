"""Nested data made ready for a collective: its leaves, where they lie in a row of bytes, and what the ranks compare."""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acc_ops.containers import container_of
from acc_ops.exchange import Call, Row, digest_of, tried
from acc_ops.packing import Layout, Meta, layout_of, pack, sizes_to_bytes
from acc_ops.tree import Structure, flatten, leaves_with_paths, unflatten
from acc_ops.wire import as_bytes, check_memory, from_bytes, has_memory, same_memory
from acc_ops.world import World

Arguments = tuple[
    tuple[str, str], ...
]  # name and text of what the ranks have to agree about besides the data


class MayDiffer(Enum):
    """What of the shapes may differ between ranks."""

    NOTHING = "nothing"
    ROWS = "rows"  # the size of the first dimension
    SIZES = "sizes"  # every size; the number of dimensions agrees


class Plan(NamedTuple):
    """What the structure of data and the facts about its leaves say: found out once, and known when the like is seen again."""

    digest: bytes  # of what has to agree
    sizes_digest: bytes
    sizes: bytes
    metas: tuple[Meta, ...]
    layout: Layout  # where each leaf lies in the row of bytes
    device: torch.device | None  # of all leaves; None when they are on several or there are none


class Prepared(NamedTuple):
    """Nested data, ready to travel."""

    call: Call
    leaves: list[Tensor]
    structure: Structure
    plan: Plan
    device: torch.device  # where the bytes are put together

    @property
    def on_several_devices(self) -> bool:
        """Whether the leaves have to be moved to `device` first, and back in the end."""
        return self.plan.device is None

    def packed(self) -> Tensor:
        """The row of bytes of this rank."""
        leaves = self.leaves
        if self.on_several_devices:
            leaves = [leaf.to(self.device) for leaf in leaves]
        return pack(leaves, self.plan.layout, self.device)

    def memory(self) -> Tensor | None:
        """The memory of the only leaf, where that is a row of bytes of this process: what is written there is in the leaf."""
        if len(self.leaves) != 1 or self.device.type != "cpu" or self.leaves[0].is_inference():
            return None  # copy_ says when an inference tensor may not be written to
        row = as_bytes(self.leaves[0])
        return row if row.data_ptr() and same_memory(row, self.leaves[0]) else None

    def rebuilt(self, leaves: Sequence[Tensor]) -> Any:
        """The nested data with `leaves`, which come from `device`, instead of its own, and on their devices."""
        if self.on_several_devices:
            leaves = [new.to(old.device) for new, old in zip(leaves, self.leaves, strict=True)]
        return leaves[0] if self.structure.key is None else unflatten(self.structure, leaves)


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
    return Prepared(
        call=Call(name=name, root=root, error=error),
        leaves=[],
        structure=Structure(None, None, 0),
        plan=_NO_PLAN,
        device=world.device,
    )


def check_dense(name: str, leaves: list[Tensor]) -> None:
    """Raise TypeError unless all leaves are dense tensors with data of their own."""
    for fact in _facts_of(name, leaves):
        _check(name, *fact)


def root_name(data: Any) -> str:
    """What errors call the data itself."""
    return "tensor" if container_of(data) is None else "batch"


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
    if structure.num_others:
        _refuse_others(name, structure.template)
    plan = _known_plan if structure.exact else _plan
    found = plan(name, structure.key, _facts_of(name, leaves), may_differ, dim, arguments)
    device = found.device or world.device
    call = Call(
        name=name,
        root=root,
        digest=found.digest,
        sizes_digest=found.sizes_digest,
        sizes=found.sizes,
        device=device,
        describe=functools.partial(_describe, data, may_differ, arguments),
    )
    return Prepared(call=call, leaves=leaves, structure=structure, plan=found, device=device)


Facts = tuple[torch.dtype, torch.Size, torch.device, torch.layout]  # all that a plan depends on in a leaf
_facts = operator.attrgetter("dtype", "shape", "device", "layout")
_is_nested = operator.attrgetter("is_nested")


def _refuse_others(name: str, data: Any) -> None:
    for path, leaf in leaves_with_paths(data, root_name(data)):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{name} takes tensors in nested containers, but {path} is {_an(type(leaf).__name__)}: {leaf!r:.60}; "
                "gather_object and broadcast_object_list take other things"
            )


def _facts_of(name: str, leaves: list[Tensor]) -> tuple[Facts, ...]:
    for kind in set(map(type, leaves)):
        if not has_memory(kind) and not any(leaf.is_nested for leaf in leaves if type(leaf) is kind):
            check_memory(name, kind)
    if any(map(_is_nested, leaves)):
        nested = next(filter(_is_nested, leaves))
        raise TypeError(f"{name} takes dense tensors with data, got one that is nested: {nested.dtype}")
    return tuple(map(_facts, leaves))


def _plan(
    name: str, key: Any, facts: tuple[Facts, ...], may_differ: MayDiffer, dim: int, arguments: Arguments
) -> Plan:
    for fact in facts:
        _check(name, *fact)
    metas = tuple([(dtype, shape) for dtype, shape, _, _ in facts])
    kinds = tuple([device.type for _, _, device, _ in facts])
    devices = {device for _, _, device, _ in facts}
    digest, sizes_digest, sizes = _digests(key, metas, kinds, may_differ, dim, arguments)
    return Plan(
        digest=digest,
        sizes_digest=sizes_digest,
        sizes=sizes,
        metas=metas,
        layout=layout_of(metas),
        device=devices.pop() if len(devices) == 1 else None,
    )


_known_plan = functools.lru_cache(maxsize=128)(_plan)
_NO_PLAN = Plan(b"", b"", b"", (), layout_of(()), None)


def _check(name: str, dtype: torch.dtype, _: torch.Size, device: torch.device, layout: torch.layout) -> None:
    if device.type == "meta":
        oddity = "on the meta device"
    elif str(dtype).startswith("torch.q"):  # qint8, quint4x2, ...
        oddity = "quantized"
    elif layout is not torch.strided:
        oddity = str(layout)
    else:
        return
    raise TypeError(f"{name} takes dense tensors with data, got one that is {oddity}: {dtype}")


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
    rows: list[Row] = [(name, text, f"has {text}") for name, text in arguments]
    _add_rows(rows, data, root_name(data), may_differ)
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


def _an(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
