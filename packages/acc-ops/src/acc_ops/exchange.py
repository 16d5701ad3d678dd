"""The one exchange in which the ranks see that they mean the same thing, before or together with the data.

[Note: the header] Every collective starts with one all-gather of a fixed number of bytes: a digest of what is called, with which root and
what structure of data, and how many bytes of payload this rank has. The rest of the header is room for that payload: when every rank's
fits, the call is over. Otherwise one more collective carries it. As every rank sees every header, all of them notice a difference at once,
all send a description, and all raise the same error; the group can be used afterwards. The header's size depends on nothing
but the size of the world, so that ranks that disagree about everything else agree about it.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acc_ops.wire import to_bytes
from acc_ops.world import World

Row = tuple[str, Any, str]  # where, what has to agree there, and how to say it


class DistributedOperationException(Exception):
    """A collective was called in a way in which the ranks cannot take part."""


class MismatchError(DistributedOperationException):
    """The ranks called different collectives, or with different data; every rank raises the same one."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one rank is about to do, in the form in which the ranks compare it."""

    name: str  # "gather", "reduce('sum')"
    root: int = -1  # -1: no rank is special
    digest: bytes = b""  # of what has to agree
    exact: bytes = b""  # of what may differ, where `sizes` tells how
    sizes: bytes = b""  # as many on every rank that agrees
    device: torch.device | None = None  # where payloads live; None: the control device
    describe: Callable[[], list[Row]] = list  # made only to explain a difference
    error: Exception | None = None  # why this rank cannot take part


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the ranks handed in, once they agree."""

    payloads: (
        Tensor | None
    )  # (ranks, bytes), padded to the longest; with a root only its row; None: nobody has one
    lengths: list[int]  # bytes of each row
    exact: bool  # whether `Call.exact` is the same everywhere
    sizes: list[bytes] | None  # every rank's `Call.sizes`; None: they did not fit


def agree(world: World, call: Call, payload: Tensor | None = None) -> Agreement:
    """Every rank's `payload` (flat uint8) after the ranks saw that they make the same `call`; with a root only its own.

    Ranks other than the root pass None. Raises MismatchError on every rank when the calls differ, and `call.error` when
    every rank has the same one. Not for worlds with `verify=False`.
    """
    room = room_bytes(world.size)
    sizes = call.sizes if len(call.sizes) <= room // 2 else b""
    room -= len(sizes)
    num_bytes = 0 if payload is None else payload.numel()
    inline = num_bytes <= room and (payload is None or payload.device.type == "cpu")
    head = _HEAD.pack(_agreed(call), call.exact, num_bytes, inline, call.error is not None) + sizes
    header = torch.empty(_HEAD.size + room_bytes(world.size), dtype=torch.uint8)
    header[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if inline and payload is not None:
        header[len(head) : len(head) + num_bytes] = payload
    headers = world.comm.all_gather(header.to(world.comm.control_device)).cpu()  # (size, bytes)
    raw = [to_bytes(row[: len(head)]) for row in headers]
    if call.error is not None or any(other[:_AGREED_BYTES] != head[:_AGREED_BYTES] for other in raw):
        _explain(world, call)
    heads = [_HEAD.unpack_from(other) for other in raw]
    senders = list(range(world.size)) if call.root < 0 else [call.root]
    lengths = [heads[rank][2] for rank in senders]
    payloads: Tensor | None = None
    if max(lengths) > 0:
        if all(heads[rank][3] for rank in senders):
            payloads = headers[senders[0] : senders[-1] + 1, len(head) : len(head) + max(lengths)]
        else:
            payloads = _carry(world, call, payload, max(lengths))
    return Agreement(
        payloads=payloads,
        lengths=lengths,
        exact=all(other[1] == heads[0][1] for other in heads),
        sizes=[other[_HEAD.size :] for other in raw] if len(sizes) == len(call.sizes) else None,
    )


@functools.lru_cache(maxsize=256)
def room_bytes(size: int) -> int:
    """How many bytes of payload and sizes travel inside the header in a world of this size."""
    return max(1024, min(16 * 1024, 256 * 1024 // size))


def digest_of(*parts: Any) -> bytes:
    """16 bytes that are the same in every process for the same parts: types, texts, numbers, dtypes, nested tuples of them."""
    return hashlib.blake2b("\n".join(_texts(parts)).encode(), digest_size=16).digest()


_HEAD = struct.Struct("=16s16sqBB")  # agreed, exact, payload bytes, payload is inside, this rank has an error
_AGREED_BYTES = 16


@functools.lru_cache(maxsize=1024)
def _agreed_digest(name: str, root: int, digest: bytes) -> bytes:
    return digest_of(name, root, digest)


def _agreed(call: Call) -> bytes:
    if call.error is not None:  # equal to nobody's, so that all explain themselves
        return b"error".ljust(_AGREED_BYTES)
    return _agreed_digest(call.name, call.root, call.digest)


def _carry(world: World, call: Call, payload: Tensor | None, num_bytes: int) -> Tensor:
    """The payloads that did not fit, as (ranks, bytes); with a root only its own."""
    if payload is None:
        payload = torch.empty(
            num_bytes if call.root >= 0 else 0,
            dtype=torch.uint8,
            device=call.device or world.comm.control_device,
        )
    if call.root >= 0:
        return world.comm.broadcast(payload, call.root).unsqueeze(0)
    if payload.numel() < num_bytes:
        payload = torch.cat([payload, payload.new_zeros(num_bytes - payload.numel())])
    return world.comm.all_gather(payload)


def _explain(world: World, call: Call) -> None:
    """Raise the error all ranks agree on; every rank comes here."""
    rows: list[Row] = [("operation", call.name, call.name)]
    if call.error is not None:
        text = f"cannot take part: {type(call.error).__name__}: {call.error}"
        rows = [("operation", text, text)]
    elif call.root >= 0:
        rows.append(("root", call.root, str(call.root)))
    described: list[list[Row]] = world.comm.all_gather_object(rows + list(call.describe()))
    first = described[0]
    for rank, other in enumerate(described):
        for one, two in zip(first, other, strict=False):
            if one[:2] != two[:2]:
                where = one[0] if one[0] == two[0] else f"{one[0]} and {two[0]}"
                raise MismatchError(f"{where}: rank 0 {one[2]}, rank {rank} {two[2]}")
    if call.error is not None:
        raise call.error
    raise MismatchError(f"{call.name}: the ranks hand in different data: {described}")


def _texts(parts: Iterable[Any]) -> Iterable[str]:
    for part in parts:
        if isinstance(part, tuple):
            yield "("
            yield from _texts(part)
            yield ")"
        elif isinstance(part, type):
            yield f"{part.__module__}.{part.__qualname__}"
        elif isinstance(part, (str, bytes, int, float, torch.dtype)) or part is None:
            yield repr(part)
        else:  # its repr may hold an address
            yield f"a {type(part).__module__}.{type(part).__qualname__}"
