"""Collectives for what is not a tensor of a known shape: any picklable object, and a batch only one rank has."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acc_ops.exchange import (
    Agreement,
    Call,
    MismatchError,
    Row,
    agree,
    digest_of,
    room_bytes,
    tried,
)
from acc_ops.packing import layout_of, metas_of, pack, unpack
from acc_ops.prepared import check_dense, pickled
from acc_ops.tree import flatten, recursively_apply
from acc_ops.wire import check_parts, check_root, copyable, from_bytes, to_bytes
from acc_ops.world import World, chosen_world

# The numbers of the specification; other dtypes have none and are named instead.
TENSOR_TYPE_TO_INT = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


def gather_object(object: Any, world: World | None = None) -> list[Any]:
    """Every rank's objects as one list, in rank order: lists and tuples are chained, anything else becomes one item.

    On one rank a list is returned as it is. Raises MismatchError when some ranks give a list and others do not, and whatever
    kept an object from being pickled.
    """
    world = chosen_world(world)
    if world.size == 1:
        if isinstance(object, list):
            return object
        return list(object) if isinstance(object, tuple) else [object]
    objects = all_objects(world, "gather_object", object)
    chained = [isinstance(other, (list, tuple)) for other in objects]
    if all(chained):
        return [item for other in objects for item in other]
    if any(chained):
        odd = chained.index(not chained[0])
        kinds = f"rank 0 {type(objects[0]).__name__}, rank {odd} {type(objects[odd]).__name__}"
        raise MismatchError(f"gather_object: every rank gives a list or none does: {kinds}")
    return objects


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, world: World | None = None
) -> list[Any]:
    """Overwrite the items of `object_list` with rank `from_process`'s, in place, and return the same list.

    Raises ValueError when `from_process` is no rank, TypeError for anything but a list, and MismatchError when the lists are not
    of the same length.
    """
    world = chosen_world(world)
    num, error = tried(lambda: _count(object_list, from_process, world.size))
    if world.size == 1 or not world.verify:
        if error is not None:
            raise error
        if world.size > 1:
            object_list[:] = world.comm.broadcast_object(object_list, from_process)
        return object_list
    received = _object_from(
        world,
        "broadcast_object_list",
        object_list,
        from_process,
        error,
        [("object_list", num, f"has {num} items")],
    )
    if world.rank != from_process:
        object_list[:] = received
    return object_list


def scatter(parts: Sequence[Any] | None, from_process: int = 0, world: World | None = None) -> Any:
    """This rank's of the nested batches that rank `from_process` gives, one for each rank; other ranks pass None.

    The parts may differ in structure and shape; leaves that are no tensors travel, too. Tensors arrive where the root's were:
    on the CPU or on this rank's device. Raises on every rank: ValueError when `from_process` is no rank or gives another number of
    parts (None, for one), TypeError for tensors that are not dense or have no data of their own.
    """
    world = chosen_world(world)
    if world.size == 1:
        check_root(from_process, 1, "from_process")
        return _checked_parts(parts, 1, from_process)[0][0]
    made, error = tried(lambda: _parts_to_send(parts, from_process, world))
    sent, rows = made or (None, None)
    told: _Scattered | Exception = _object_from(world, "scatter", sent, from_process, error, [])
    if isinstance(told, Exception):
        raise told
    if told.blobs is not None:
        row = from_bytes(told.blobs[world.rank])
    else:
        device = torch.device("cpu") if told.on_cpu else world.device
        row = torch.empty(told.num_bytes, dtype=torch.uint8, device=device)
        world.comm.scatter(rows, row, from_process)
    skeleton = told.skeletons[world.rank]
    slots: list[_Slot] = []
    recursively_apply(slots.append, skeleton, test_type=_is_slot)
    leaves = unpack(row, layout_of(tuple([(slot.dtype, slot.shape) for slot in slots])))
    supply = iter(
        [leaf.to("cpu" if slot.on_cpu else world.device) for slot, leaf in zip(slots, leaves, strict=True)]
    )
    return recursively_apply(lambda _: next(supply), skeleton, test_type=_is_slot)


def gather_tensor_shape(tensor: Tensor | None, world: World | None = None) -> tuple[torch.Size, int]:
    """Shape, and dtype as a number of TENSOR_TYPE_TO_INT, of the tensor that some ranks have and the others (None) do not.

    Raises on every rank: TypeError for anything else, ValueError when no rank has one or its dtype has no number, MismatchError when several
    differ.
    """
    shape, dtype, _ = _shared_tensor("gather_tensor_shape", tensor, chosen_world(world))
    if dtype not in TENSOR_TYPE_TO_INT:
        raise ValueError(
            f"{dtype} has no number in TENSOR_TYPE_TO_INT; copy_tensor_to_devices does not need one"
        )
    return shape, TENSOR_TYPE_TO_INT[dtype]


def copy_tensor_to_devices(tensor: Tensor | None = None, world: World | None = None) -> Tensor:
    """On every rank, on its device: the tensor that one rank has while the others pass None; the sum where several have one.

    Raises on every rank: TypeError for anything else, ValueError when no rank has one, MismatchError when several differ.
    """
    world = chosen_world(world)
    copied, error = tried(lambda: _copy_to_share(tensor, world.device))
    shape, dtype, holders = _shared_tensor("copy_tensor_to_devices", tensor, world, error)
    own = torch.zeros(shape, dtype=dtype, device=world.device) if copied is None else copied
    if world.size == 1:
        return own
    if len(holders) == 1:
        return world.comm.broadcast(copyable(own), holders[0]).view(dtype)
    return world.comm.all_reduce(own, "sum")


def all_objects(world: World, name: str, obj: Any) -> list[Any]:
    """Every rank's `obj`, in rank order, for a collective that is called `name` when the ranks do not make the same one."""
    if not world.verify:
        return world.comm.all_gather_object(obj)
    agreement = agree(world, Call(name=name), lambda: pickled(obj))
    return list(_unpickled(agreement))


class _Slot(NamedTuple):
    """Where a scattered tensor goes."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


class _Scattered(NamedTuple):
    """What the root tells every rank before, or with, the bytes of the tensors."""

    skeletons: list[Any]  # per rank: the part with slots instead of tensors
    blobs: list[bytes] | None  # per rank: the tensors' bytes, when they are few
    num_bytes: int  # of the longest row
    on_cpu: bool


def _checked_parts(
    parts: Sequence[Any] | None, size: int, root: int
) -> tuple[Sequence[Any], list[list[Tensor]]]:
    """Rank `root`'s parts, and the tensors of each."""
    parts = check_parts(parts, size, root)
    flat = [flatten(part)[0] for part in parts]
    for leaves in flat:
        check_dense("scatter", leaves)
    return parts, flat


def _parts_to_send(
    parts: Sequence[Any] | None, root: int, world: World
) -> tuple[_Scattered | Exception | None, list[Tensor] | None]:
    """What rank `root` tells every rank, and a row of bytes for each where they are sent apart; nothing on other ranks.

    Where its parts are wrong, it tells the error for every rank to raise.
    """
    check_root(root, world.size, "from_process")
    if world.rank != root:
        return None, None
    try:
        parts, flat = _checked_parts(parts, world.size, root)
    except (ValueError, TypeError) as error:
        return error, None
    on_cpu = all(leaf.device.type == "cpu" for leaves in flat for leaf in leaves)
    device = torch.device("cpu") if on_cpu else world.device
    flat = [[leaf.to(device) for leaf in leaves] for leaves in flat]
    rows = [pack(leaves, layout_of(metas_of(leaves)), device) for leaves in flat]
    num_bytes = max(row.numel() for row in rows)
    small = on_cpu and sum(row.numel() for row in rows) <= room_bytes(world.size) // 2
    told = _Scattered(
        skeletons=[recursively_apply(_slot_for, part) for part in parts],
        blobs=[to_bytes(row) for row in rows] if small else None,
        num_bytes=num_bytes,
        on_cpu=on_cpu,
    )
    if small:
        return told, []
    return told, [torch.cat([row, row.new_zeros(num_bytes - row.numel())]) for row in rows]


def _slot_for(tensor: Tensor) -> _Slot:
    return _Slot(tensor.shape, tensor.dtype, tensor.device.type == "cpu")


def _is_slot(data: Any) -> bool:
    return isinstance(data, _Slot)


def _count(object_list: Any, root: int, size: int) -> int:
    check_root(root, size, "from_process")
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list overwrites a list, got {object_list!r:.60}")
    return len(object_list)


def _copy_to_share(tensor: Any, device: torch.device) -> Tensor | None:
    if not isinstance(tensor, Tensor):
        return None
    check_dense("copy_tensor_to_devices", [tensor])
    return copyable(tensor.detach()).to(device, copy=True).contiguous().view(tensor.dtype)


def _shared_tensor(
    name: str, tensor: Any, world: World, error: Exception | None = None
) -> tuple[torch.Size, torch.dtype, list[int]]:
    """Shape and dtype of the tensor some ranks have, and which ranks; `error` is why this rank cannot send its own."""
    told: Any = None
    if isinstance(tensor, Tensor) and error is None:
        told = (tensor.shape, tensor.dtype)
    elif tensor is not None:
        text, _ = tried(lambda: f"{tensor!r:.60}")
        told = f"{type(tensor).__name__}: {error or text}"
    infos = all_objects(world, name, told) if world.size > 1 else [told]
    holders = [rank for rank, info in enumerate(infos) if info is not None]
    for rank in holders:
        if isinstance(infos[rank], str):
            raise TypeError(f"{name} takes a tensor or None, rank {rank} gives a {infos[rank]}")
        if infos[rank] != infos[holders[0]]:
            one, two = (f"{tuple(infos[r][0])} {infos[r][1]}" for r in (holders[0], rank))
            raise MismatchError(f"tensor: rank {holders[0]} {one}, rank {rank} {two}")
    if not holders:
        raise ValueError(f"{name}: no rank has a tensor, all of them passed None")
    return (*infos[holders[0]], holders)


def _object_from(
    world: World, name: str, obj: Any, root: int, error: Exception | None, rows: list[Row]
) -> Any:
    """Rank `root`'s `obj`; `rows` have to agree."""
    if not world.verify:
        if error is not None:
            raise error
        return world.comm.broadcast_object(obj, root)
    call = Call(
        name=name,
        root=root,
        digest=digest_of(*[(where, compared) for where, compared, _ in rows]),
        describe=lambda: rows,
        error=error,
    )
    return next(_unpickled(agree(world, call, (lambda: pickled(obj)) if world.rank == root else None)))


def _unpickled(agreement: Agreement) -> Iterator[Any]:
    rows = agreement.payloads
    if rows is None:
        raise AssertionError("a pickle is never empty")
    for row, length in zip(rows.cpu(), agreement.lengths, strict=True):
        yield pickle.loads(to_bytes(row[:length].contiguous()))
