"""What every rank checks of a collective, given the spec of everybody's data: the same for threads and real processes.

A check runs inside a rank. It builds what the other ranks hold from the spec, so its expectation is computed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from ops_data import Leaf, Node, Other, Spec, build, containers_of, leaves_of, make_tensor, raw, tensors_of
from torch import Tensor

from acc_ops.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    scatter,
)
from acc_ops.exchange import DistributedOperationException
from acc_ops.wire import REDUCTIONS
from acc_ops.world import current_world


def check_gather(spec: Spec) -> None:
    """Joined by hand, as bytes; detached, in memory of its own, and nothing of the user's is written to."""
    world = current_world()
    own = build(spec, world.rank)
    unchanged = watched(spec, own)
    result = gather(own)
    unchanged()
    if world.size == 1:
        assert result is own
        return
    found = leaves_of(spec, result)
    for leaf, tensor in found:
        assert_tensor(tensor, *joined(leaf, world.size), spec)
        assert not tensor.requires_grad, spec
    assert_own_memory([tensor for _, tensor in found], tensors_of(spec, own), spec)


def joined(leaf: Leaf, size: int) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of a leaf of every rank, one below the other; without dimensions it is a row."""
    rows = sum(leaf.shapes[rank][0] if leaf.shapes[rank] else 1 for rank in range(size))
    tensors = [make_tensor(leaf, rank, False) for rank in range(size)]
    return tensors[0].dtype, (rows, *leaf.shapes[0][1:]), b"".join(raw(tensor) for tensor in tensors)


def check_pad(spec: Spec, dim: int, pad_first: bool, pad_index: float = 1) -> None:
    """The largest size in one dimension, the old contents at one end and `pad_index` at the other; else the same object."""
    world = current_world()
    own = build(spec, world.rank)
    unchanged = watched(spec, own)
    result = pad_across_processes(own, dim, pad_index, pad_first)
    unchanged()
    for (leaf, old), new in zip(leaves_of(spec, own), tensors_of(spec, result), strict=True):
        target = largest(leaf, dim, world.size)
        if target is None or old.shape[dim] == target:
            assert new is old, spec
            continue
        size, added = old.shape[dim], target - old.shape[dim]
        shape = list(old.shape)
        shape[dim] = target
        assert (new.dtype, list(new.shape)) == (old.dtype, shape), spec
        assert raw(new.narrow(dim, added if pad_first else 0, size)) == raw(old), spec
        filled = new.narrow(dim, 0 if pad_first else size, added)
        assert raw(filled) == raw(torch.full(filled.shape, pad_index, dtype=torch.float64).to(old.dtype)), (
            spec
        )
    assert_shared(spec, own, result)


def largest(leaf: Leaf, dim: int, size: int) -> int | None:
    """The largest size of a leaf in dimension `dim` among the ranks; None when it has no such dimension."""
    shapes = leaf.shapes[:size]
    return max(shape[dim] for shape in shapes) if -len(shapes[0]) <= dim < len(shapes[0]) else None


def check_pad_gather_slice(spec: Spec, pad_first: bool) -> None:
    """Padded in every dimension, gathered, and cut out again: what each rank had."""
    world = current_world()
    padded = build(spec, world.rank)
    for dim in range(3):
        padded = pad_across_processes(padded, dim, pad_first=pad_first)
    result = gather(padded)
    everybody = [tensors_of(spec, build(spec, rank)) for rank in range(world.size)]
    for index, (leaf, tensor) in enumerate(leaves_of(spec, result)):
        for rank, tensors in enumerate(everybody):
            old = tensors[index]
            rows = tensor.shape[0] // world.size if tensor.ndim else 0
            part = tensor[rank * rows : (rank + 1) * rows] if old.ndim else tensor.reshape(-1)[rank]
            for dim, size in enumerate(old.shape):
                part = part.narrow(dim, part.shape[dim] - size if pad_first else 0, size)
            assert (part.shape, raw(part)) == (old.shape, raw(old)), (leaf, spec)


def check_broadcast_then_gather(spec: Spec, root: int) -> None:
    """The same objects with the root's contents, and then the same on every rank; nothing around a view is written to."""
    world = current_world()
    own = build(spec, world.rank)
    unchanged = watched(spec, own, tensors_too=world.rank == root)
    beside = [outside(tensor) for tensor in tensors_of(spec, own)]
    result = broadcast(own, root)
    assert result is own
    unchanged()
    for (leaf, tensor), before in zip(leaves_of(spec, result), beside, strict=True):
        wanted = make_tensor(leaf, root, False)
        assert_tensor(tensor, wanted.dtype, tuple(wanted.shape), raw(wanted), spec)
        assert outside(tensor) == before, spec
    for leaf, tensor in leaves_of(spec, gather(result)):
        wanted = make_tensor(leaf, root, False)
        if world.size > 1:
            rows = world.size * (leaf.shapes[0][0] if leaf.shapes[0] else 1)
            shape = (rows, *leaf.shapes[0][1:])
            assert_tensor(tensor, wanted.dtype, shape, raw(wanted) * world.size, spec)


def outside(tensor: Tensor) -> bytes:
    """What the memory of a view holds beside its elements."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    count = len(storage) // tensor.element_size()
    beside = torch.ones(count, dtype=torch.bool)
    beside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return bytes(storage.view(count, tensor.element_size())[beside].reshape(-1).tolist())


def check_reduce(spec: Spec, reduction: str) -> None:
    """Exact arithmetic with Python's numbers, rounded once; refused on all ranks where numbers have no such reduction."""
    world = current_world()
    own = build(spec, world.rank, numbers=True)
    unchanged = watched(spec, own)
    refused = refusal(spec, reduction)
    if refused is not None:
        check_refused_everywhere(f"reduce {reduction}", spec, refused)
        unchanged()
        return
    result = reduce(own, reduction)
    unchanged()
    found = leaves_of(spec, result)
    for leaf, tensor in found:
        wanted = reduced(leaf, reduction, world.rank, world.size)
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), (reduction, leaf)
        close = 2 * torch.finfo(tensor.dtype).eps if tensor.is_complex() and reduction == "mean" else 0.0
        for got, want in zip(plain(tensor), plain(wanted), strict=True):  # by value: 0.0 is -0.0
            assert abs(got - want) <= close * abs(want), (
                reduction,
                leaf,
            )  # torch's division of complex numbers
        assert not tensor.requires_grad, spec
    assert_own_memory([tensor for _, tensor in found], tensors_of(spec, own), spec)


def check_extremes(reduction: str, count: int, odd: int) -> None:
    """NaN on one rank is NaN in the result, whichever rank it is and however large the tensor; infinities have their order."""
    world = current_world()

    def numbers(rank: int) -> list[float]:
        special = [math.nan, math.inf, -math.inf, -0.5] if rank == odd else [1.0, 2.0, 3.0, -1.5]
        return [*special, *[float(rank % 2)] * count]

    columns = list(zip(*[numbers(rank) for rank in range(world.size)], strict=True))
    wanted = [sum(c) if any(map(math.isnan, c)) else {"max": max, "min": min}[reduction](c) for c in columns]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        result = reduce(torch.tensor(numbers(world.rank), dtype=dtype), reduction)
        assert result.dtype == dtype
        assert repr(result.tolist()) == repr(wanted), (dtype, odd, result[:5])


def refusal(spec: Spec, reduction: str) -> type[Exception] | None:
    """The error of a reduction that the dtypes do not have: the one of the first such leaf."""
    for leaf, _ in leaves_of(spec, build(spec)):
        if leaf.dtype == "uint64" and reduction in REDUCTIONS:
            return TypeError
        if leaf.dtype.startswith("complex") and reduction in ("max", "min"):
            return ValueError
    return None


def reduced(leaf: Leaf, reduction: str, rank: int, size: int) -> Tensor:
    """A leaf reduced by hand."""
    dtype = getattr(torch, leaf.dtype)
    columns = list(zip(*[values_of(leaf, r) for r in range(size)], strict=True))
    if reduction == "none":
        return make_tensor(leaf, rank, True)
    if reduction == "mean":
        numbers = [sum(column) / size for column in columns]
        whole = not (dtype.is_floating_point or dtype.is_complex)
        return exactly(numbers, torch.get_default_dtype() if whole else dtype, leaf)
    if dtype == torch.bool:
        numbers = [any(c) if reduction in ("sum", "max") else all(c) for c in columns]
    else:
        numbers = [{"sum": sum, "max": max, "min": min}[reduction](column) for column in columns]
    return exactly(numbers, dtype, leaf)


def values_of(leaf: Leaf, rank: int) -> list[Any]:
    """The numbers of a rank's tensor, in order, as it is seen through its view."""
    return plain(make_tensor(leaf, rank, True))


def plain(tensor: Tensor) -> list[Any]:
    """The elements in order, as Python's numbers."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).reshape(-1).tolist()


def exactly(numbers: list[Any], dtype: torch.dtype, leaf: Leaf) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.tensor(numbers, dtype=wide).to(dtype).reshape(leaf.shapes[0])


def check_scatter(parts: list[Spec], root: int) -> None:
    """Each rank's part arrives as it was, leaves that are no tensors included."""
    world = current_world()
    parts = parts[: world.size]
    data = [build(part, rank) for rank, part in enumerate(parts)] if world.rank == root else None
    unchanged = [watched(part, whole) for part, whole in zip(parts, data or [], strict=False)]
    result = scatter(data, root)
    for check in unchanged:
        check()
    own = parts[world.rank]
    for (leaf, got), (_, sent) in zip(
        leaves_of(own, result), leaves_of(own, build(own, world.rank)), strict=True
    ):
        if isinstance(leaf, Leaf):
            assert_tensor(got, sent.dtype, tuple(sent.shape), raw(sent), own)
        else:
            assert (type(got), got) == (type(sent), sent), own


def check_objects(objects: list[Any], root: int) -> None:
    """Lists are chained, other objects become items; the root's list replaces everybody's."""
    world = current_world()
    objects = objects[: world.size]
    own = objects[world.rank]
    assert gather_object([own, world.rank]) == [item for rank, o in enumerate(objects) for item in (o, rank)]
    assert gather_object({"object": own}) == [{"object": other} for other in objects]
    items = [own, None, world.rank]
    assert broadcast_object_list(items, root) is items
    assert items == [objects[root], None, root]


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "gather": lambda data, root: gather(data),
    **{
        f"reduce {reduction}": lambda data, root, reduction=reduction: reduce(data, reduction)
        for reduction in ("sum", "mean", "max", "min", "none")
    },
    "broadcast": broadcast,
    "pad": lambda data, root: pad_across_processes(data, root),
    "pad first": lambda data, root: pad_across_processes(data, root, pad_first=True),
    "pad with one": lambda data, root: pad_across_processes(data, root, pad_index=1),
    "gather_object": lambda data, root: gather_object(data),
    "broadcast_object_list": lambda data, root: broadcast_object_list([data], root),
    "scatter": lambda data, root: scatter([data] * current_world().size, root),
}


def check_mismatch(mine: tuple[str, Spec, int], other: tuple[str, Spec, int], odd: int) -> None:
    """Rank `odd` makes the `other` call (name, spec of the data, root): every rank raises the same, and they go on."""
    world = current_world()
    name, spec, root = other if world.rank == odd else mine
    data = build(spec, world.rank)
    unchanged = watched(spec, data)
    try:
        CALLS[name](data, root)
    except (DistributedOperationException, TypeError, ValueError) as error:
        said = (type(error).__name__, str(error))
    else:
        said = ("nothing", "")
    unchanged()
    everybody = gather_object([said])
    assert everybody == [said] * world.size, (everybody, mine, other)
    assert said[0] == "MismatchError", (said, mine, other)
    assert "rank 0 " in said[1], said
    assert f"rank {odd or 1} " in said[1], said
    assert gather(torch.tensor(world.rank)).tolist() == list(range(world.size))


def check_unpicklable(name: str, spec: Spec, odd: int) -> None:
    """What rank `odd` hands in cannot be pickled, which it alone meets."""
    broken = Node("list", (spec, Other(lambda: None)))
    check_mismatch((name, Node("list", (spec,)), odd), (name, broken, odd), odd)


def check_refused_everywhere(name: str, spec: Spec, kind: type[Exception], root: Any = 0) -> None:
    """Every rank makes the same wrong call: the same error on each, whatever the number of ranks."""
    try:
        CALLS[name](build(spec, numbers=True), root)
    except kind as error:
        said = str(error)
    else:
        said = ""
    assert said, (name, spec)
    assert gather_object([said]) == [said] * current_world().size, (name, spec)


def watched(spec: Spec, data: Any, tensors_too: bool = True) -> Callable[[], None]:
    """A check, for later, that neither the containers of `data` nor its tensors were written to."""
    containers = containers_of(spec, data)
    contents = [(value, raw(value)) for value in tensors_of(spec, data)] if tensors_too else []

    def check() -> None:
        now = containers_of(spec, data)
        assert [id(container) for container, _ in now] == [id(container) for container, _ in containers], spec
        for (_, before), (_, after) in zip(containers, now, strict=True):
            assert all(one is two for one, two in zip(before, after, strict=True)), spec
        assert all(raw(tensor) == content for tensor, content in contents), spec

    return check


def assert_tensor(
    tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], content: bytes, context: Any
) -> None:
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, tuple(shape)), context
    assert raw(tensor) == content, context


def assert_own_memory(made: list[Tensor], given: list[Tensor], context: Any) -> None:
    """Results share memory neither with each other nor with the input, and keep none alive that they do not need."""
    filled = [tensor for tensor in made if tensor.numel()]
    storages = {tensor.untyped_storage().data_ptr() for tensor in filled}
    assert len(storages) == len(filled), context
    assert not storages & {tensor.untyped_storage().data_ptr() for tensor in given if tensor.numel()}, context
    sizes = [(t.untyped_storage().nbytes(), t.numel() * t.element_size()) for t in filled]
    assert all(held == needed for held, needed in sizes), (sizes, context)


def assert_shared(spec: Spec, old: Any, new: Any) -> bool:
    """Where no leaf changed, the very same container was passed on; says whether that is so here."""
    if not isinstance(spec, Node):
        return old is new
    pairs = zip(spec.children, containers_of(spec, old)[0][1], containers_of(spec, new)[0][1], strict=True)
    same = [assert_shared(child, one, two) for child, one, two in pairs]
    assert (new is old) == all(same), spec
    return all(same)
