"""Collectives for nested data: the whole structure is checked once and travels together.

[Note: what may differ between ranks] `gather` joins along the first dimension, which may differ; `pad_across_processes` is there for
sizes that differ, so only the number of dimensions has to agree; everything else compares whole shapes. On one rank the data is checked
in the same way, and nothing is sent.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from acc_ops.callers import warn_caller
from acc_ops.exchange import Call, DistributedOperationException, MismatchError, agree, room_bytes, tried
from acc_ops.object_collectives import (
    broadcast_object_list,
    copy_tensor_to_devices,
    gather_object,
    gather_tensor_shape,
    scatter,
)
from acc_ops.packing import (
    Layout,
    layout_of,
    metas_of,
    pack,
    sizes_from_bytes,
    split_copy,
    unpack,
    unpack_combined,
    unpack_joined,
    unpack_ragged,
)
from acc_ops.padding import padded, padding_texts, ready_to_pad
from acc_ops.prepared import Arguments, MayDiffer, Prepared, prepare, root_name
from acc_ops.tree import flatten, leaves_with_paths, unflatten
from acc_ops.wire import (
    check_arithmetic,
    check_reduction,
    check_root,
    copyable,
    mean_of_shares,
    overwrite,
    same_memory,
    scaled,
    share_of_mean,
    shares_elements,
)
from acc_ops.world import World, chosen_world, current_world

__all__ = [
    "CannotPadNestedTensorWarning",
    "DistributedOperationException",
    "MismatchError",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "chained_operation",
    "copy_tensor_to_devices",
    "gather",
    "gather_object",
    "gather_tensor_shape",
    "pad_across_processes",
    "reduce",
    "scatter",
    "verify_operation",
]

P = ParamSpec("P")
R = TypeVar("R")

REDUCTIONS = ("mean", "sum", "max", "min", "none")


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor has no single size to pad to, and is passed on as it is."""


def gather(tensor: Any, world: World | None = None) -> Any:
    """Every rank's tensors joined along the first dimension, in rank order, the same on every rank.

    Sizes may differ between ranks in the first dimension only; a tensor without dimensions counts as one row. Results are
    detached. On one rank the very same object is returned. Raises TypeError for other leaves than tensors, MismatchError when the ranks'
    data does not fit together.
    """
    world = chosen_world(world)
    ready = prepare("gather", tensor, world, may_differ=MayDiffer.ROWS)
    if world.size == 1:
        _raise_error(ready)
        return tensor
    if not world.verify:
        _raise_error(ready)
        joined = unpack_joined(world.comm.all_gather(ready.packed()), ready.plan.layout)
        return ready.rebuilt(joined)
    agreement = agree(world, ready.call, ready.packed)
    rows = agreement.payloads
    if rows is None:  # nothing but empty tensors
        rows = torch.empty(world.size, 0, dtype=torch.uint8, device=ready.device)
    if agreement.same_sizes:
        joined = unpack_joined(rows, ready.plan.layout)
    else:
        sizes = _sizes_of_ranks(world, ready, agreement.sizes)
        joined = unpack_ragged(rows, [_layout_with_rows(ready, of_rank) for of_rank in sizes])
    return ready.rebuilt(joined)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, world: World | None = None) -> Any:
    """New tensors that combine every rank's by `reduction`: mean, sum, max, min, or none (copies of this rank's own).

    Dtypes stay, but the mean of integers and bools is a float, on any number of ranks; the sum of bools is `or`. A mean does not overflow
    where its result does not, and smaller dtypes than float32 are rounded once. `scale` multiplies the result on XLA devices only. Raises ValueError for
    another `reduction`, TypeError for other leaves than tensors, and MismatchError.
    """
    world = chosen_world(world)
    checked, error = tried(lambda: _check_arguments(reduction, scale, world.device))
    ready = prepare(f"reduce({reduction!r})", tensor, world, arguments=checked or (), error=error)
    if reduction == "none":
        if world.size == 1 or not world.verify:
            _raise_error(ready)
        else:
            agree(world, ready.call)
        return unflatten(
            ready.structure, [copyable(leaf.detach()).clone().view(leaf.dtype) for leaf in ready.leaves]
        )
    combined = _combined(world, ready, reduction)
    if reduction == "mean":
        combined = [
            mean_of_shares(total, world.size, leaf.dtype)
            for total, leaf in zip(combined, ready.leaves, strict=True)
        ]
    if scale != 1.0 and world.device.type == "xla":
        combined = [scaled(leaf, scale) for leaf in combined]
    return unflatten(ready.structure, combined)


def broadcast(tensor: Any, from_process: int = 0, world: World | None = None) -> Any:
    """Overwrite every tensor with rank `from_process`'s, in place, and return the same object.

    Raises ValueError when `from_process` is no rank or several elements of a tensor are one (`expand`, `unfold`), TypeError for other
    leaves than tensors, and MismatchError.
    """
    world = chosen_world(world)
    _, error = tried(lambda: check_root(from_process, world.size, "from_process"))
    ready = prepare("broadcast", tensor, world, root=from_process, error=error)
    if ready.call.error is None:
        _, error = tried(lambda: _check_writable(ready))
        ready = ready if error is None else ready._replace(call=ready.call._replace(error=error))
    if world.size == 1 or not world.verify:
        _raise_error(ready)
    if world.size == 1:
        return tensor
    is_root = world.rank == from_process
    into, _ = (None, None) if is_root else tried(ready.memory)
    if world.verify:
        payloads = agree(world, ready.call, ready.packed if is_root else None, into).payloads
        row = None if payloads is None else payloads[0]
    else:
        room = ready.packed() if is_root else into
        if room is None:
            room = torch.empty(ready.plan.layout.num_bytes, dtype=torch.uint8, device=ready.device)
        row = world.comm.broadcast(room, from_process)
    if row is None or is_root:
        return tensor
    if into is not None and same_memory(row, into):
        torch.autograd.graph.increment_version(ready.leaves[0])  # as copy_ would
        return tensor
    for leaf, value in zip(ready.leaves, unpack(row, ready.plan.layout, copy=False), strict=True):
        overwrite(leaf, value)
    return tensor


def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    world: World | None = None,
) -> Any:
    """Every tensor padded with `pad_index` in dimension `dim` to the largest size among the ranks, at the end or the start.

    Tensors without that dimension, and those that are large enough, stay the same objects; so do nested tensors, with a
    warning. Raises TypeError for other leaves than tensors, ValueError when a dtype cannot hold `pad_index`, and MismatchError.
    """
    world = chosen_world(world)
    checked, error = tried(
        lambda: (ready_to_pad(tensor, pad_index), padding_texts(dim, pad_index, pad_first))
    )
    plain, arguments = checked or (tensor, ())
    if plain is not tensor:
        warn_caller(
            "pad_across_processes passes nested tensors on unchanged: they have no single size to pad to",
            CannotPadNestedTensorWarning,
        )
    ready = prepare(
        "pad_across_processes",
        plain,
        world,
        may_differ=MayDiffer.SIZES,
        dim=dim,
        arguments=arguments,
        error=error,
    )
    if world.size == 1 or not world.verify:
        _raise_error(ready)
    if world.size == 1:
        return tensor
    told = agree(world, ready.call).sizes if world.verify else None
    targets = [max(sizes) for sizes in zip(*_sizes_of_ranks(world, ready, told), strict=True)]
    filled = [
        padded(leaf, target, dim, pad_index, pad_first)
        for leaf, target in zip(ready.leaves, targets, strict=True)
    ]
    if plain is tensor:
        return unflatten(ready.structure, filled)
    originals, structure = flatten(tensor)  # with the nested tensors, which stay
    kept = [old if old.is_nested else new for old, new in zip(originals, filled, strict=True)]
    return unflatten(structure, kept)


def barrier(world: World | None = None) -> None:
    """Return when every rank has come here; MismatchError on every rank when one of them calls another collective."""
    world = chosen_world(world)
    if world.size == 1:
        return
    if world.verify:
        agree(world, Call(name="barrier"))
    else:
        world.comm.barrier()


def verify_operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a collective of your own: before it runs, the ranks of its `world` compare its name and its first argument.

    Raises MismatchError on every rank when structure, shape, dtype or kind of device differ. Worlds of one rank or with
    `verify=False` run it at once.
    """
    name = getattr(function, "__name__", str(function))
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = {**kwargs, **signature.bind(*args, **kwargs).arguments}.get("world")
        world = given if isinstance(given, World) else current_world()
        if world.size > 1 and world.verify:
            first = next((value for key, value in kwargs.items() if key != "world"), ())
            data = args[0] if args else kwargs.get("tensor", first)
            agree(world, prepare(name, data, world).call)
        return function(*args, **kwargs)

    return checked


def chained_operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that calls collectives, so that their errors name it as well."""
    name = getattr(function, "__name__", str(function))

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise type(error)(f"in {name}: {error}") from error

    return named


def _raise_error(ready: Prepared) -> None:
    if ready.call.error is not None:
        raise ready.call.error


def _check_writable(ready: Prepared) -> None:
    for leaf in ready.leaves:
        if shares_elements(leaf):
            data = ready.structure.template
            paths = leaves_with_paths(data, root_name(data))
            path = next(path for path, other in paths if other is leaf)
            raise ValueError(
                f"broadcast writes into tensors, but in {path} several elements are one number in memory, as after expand or "
                f"unfold (shape {tuple(leaf.shape)}, strides {leaf.stride()}); pass a clone of it"
            )


def _sizes_of_ranks(world: World, ready: Prepared, told: list[bytes] | None) -> list[list[int]]:
    """Per rank, per leaf: the size the ranks told each other in the header, or do now where it had no room."""
    if told is None:
        own = torch.tensor(sizes_from_bytes(ready.call.sizes), dtype=torch.int64)
        rows: list[list[int]] = world.comm.all_gather(own.to(world.comm.control_device)).tolist()
        return rows
    return [sizes_from_bytes(sizes) for sizes in told]


def _layout_with_rows(ready: Prepared, sizes: list[int]) -> Layout:
    metas = [
        (dtype, torch.Size([size, *shape[1:]]) if shape else shape)
        for (dtype, shape), size in zip(ready.plan.metas, sizes, strict=True)
    ]
    return layout_of(tuple(metas))


def _check_arguments(reduction: str, scale: float, device: torch.device) -> Arguments:
    """What the ranks have to agree about."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not hasattr(scale, "__float__"):
        raise TypeError(f"scale must be a number, got {scale!r:.60}")
    if scale != 1.0 and device.type != "xla":
        warn_caller(f"reduce(scale={scale}) only acts on XLA devices, this is {device}")
    return (("scale", repr(float(scale))),)


def _combined(world: World, ready: Prepared, reduction: str) -> list[Tensor]:
    """Each leaf combined over the ranks by `reduction`, as new tensors; for the mean the sum of their shares."""
    op = "sum" if reduction == "mean" else reduction
    own, error = tried(lambda: _own_parts(ready, reduction, world.size))
    leaves = own or []
    layout = layout_of(metas_of(leaves))
    on_cpu = ready.device.type == "cpu" and not ready.on_several_devices
    inline = world.verify and layout.num_bytes <= room_bytes(world.size) and on_cpu
    flats: list[_Flat] | None = None
    if error is None and not inline and world.size > 1:
        flats, error = tried(lambda: _flattened(leaves))
    if error is not None and (world.size == 1 or not world.verify):
        raise error
    if world.size == 1:
        return [leaf.clone() for leaf in leaves]
    if world.verify:
        call = ready.call if error is None else ready.call._replace(error=error)
        rows = agree(
            world, call, functools.partial(pack, leaves, layout, ready.device) if inline else None
        ).payloads
        if rows is not None:
            return unpack_combined(rows, layout, op)
    return _combined_by_dtype(world, leaves, flats or _flattened(leaves), op)


def _own_parts(ready: Prepared, reduction: str, size: int) -> list[Tensor]:
    """What this rank brings to a reduction."""
    _raise_error(ready)
    if reduction == "mean":
        for leaf in ready.leaves:
            check_arithmetic(leaf.dtype)
        return [share_of_mean(leaf, size) for leaf in ready.leaves]
    for leaf in ready.leaves:
        check_reduction(reduction, leaf.dtype)
    return [leaf.detach() for leaf in ready.leaves]


_Flat = tuple[list[int], Tensor]  # which leaves, and their elements side by side


def _flattened(leaves: list[Tensor]) -> list[_Flat]:
    """The leaves of each dtype and device as one new tensor."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, leaf in enumerate(leaves):
        groups.setdefault((leaf.dtype, leaf.device), []).append(index)
    return [(indices, torch.cat([leaves[i].reshape(-1) for i in indices])) for indices in groups.values()]


def _combined_by_dtype(world: World, leaves: list[Tensor], flats: list[_Flat], op: str) -> list[Tensor]:
    combined = list(leaves)
    for indices, flat in flats:
        world.comm.all_reduce(flat, op)
        sizes = [leaves[i].numel() for i in indices]
        parts = [flat] if len(indices) == 1 else split_copy(flat, sizes)
        for index, part in zip(indices, parts, strict=True):
            combined[index] = part.view(leaves[index].shape)
    return combined
