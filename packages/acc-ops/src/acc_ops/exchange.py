"""The one exchange in which the ranks see that they mean the same thing, before or together with the data.

[Note: the header] Every collective starts with one all-gather of a fixed number of bytes: a digest of what is called, with which root and
what structure of data, and how many bytes of payload this rank has. The rest of the header is room for that payload: when every rank's
fits, the call is over. Otherwise one more collective carries it. As every rank sees every header, all of them notice a difference at once,
all send a description, and all raise the same error; the group can be used afterwards. The header's size depends on nothing
but the size of the world, so that ranks that disagree about everything else agree about it. A rank that fails while it makes its part ready
sends its error in the header's place: `tried` keeps what it raised until then. `together` is for work that no collective follows.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from acc_ops.wire import to_bytes
from acc_ops.world import World

R = TypeVar("R")
Row = tuple[str, Any, str]  # where, what has to agree there, and how to say it


class DistributedOperationException(Exception):
    """A collective was called in a way in which the ranks cannot take part."""


class MismatchError(DistributedOperationException):
    """The ranks called different collectives, or with different data; every rank raises the same one."""


class Call(NamedTuple):
    """What one rank is about to do, in the form in which the ranks compare it."""

    name: str  # "gather", "reduce('sum')"
    root: int = -1  # -1: no rank is special
    digest: bytes = b""  # of what has to agree
    sizes_digest: bytes = b""  # of what may differ, where `sizes` tells how
    sizes: bytes = b""  # as many on every rank that agrees
    device: torch.device | None = None  # where payloads live; None: the control device
    describe: Callable[[], list[Row]] = list  # made only to explain a difference
    error: Exception | None = None  # why this rank cannot take part


class Agreement(NamedTuple):
    """What the ranks handed in, once they agree."""

    payloads: (
        Tensor | None
    )  # (ranks, bytes), padded to the longest; with a root only its row; None: nobody has one
    lengths: list[int]  # bytes of each row
    same_sizes: bool  # whether `Call.sizes_digest` is the same everywhere
    sizes: list[bytes] | None  # every rank's `Call.sizes`; None: they did not fit


def tried(work: Callable[[], R]) -> tuple[R | None, Exception | None]:
    """What `work` returns, or what it raises: the error of a `Call`, so that nobody waits for a rank that failed before it could speak."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        return None, error


def together(world: World, work: Callable[[], R]) -> R:
    """What `work` returns here; when it raises on any rank, every rank raises the error of the first of them. Every rank calls it."""
    result, error = tried(work)
    raise_together(world, error)
    return result  # type: ignore[return-value]  # without an error it is what `work` returned


def raise_together(world: World, error: Exception | None) -> None:
    """Raise the error of the first rank that has one, on every rank, whose `__cause__` names that rank elsewhere; every rank calls it."""
    raise_first(world.comm.all_gather_object(portable(error)), world.rank, error)


def raise_first(told: Sequence[bytes | None], here: int, error: Exception | None) -> None:
    """Raise the first error that the ranks told by `portable`, where there is one; `here` is this rank, `error` its own."""
    for rank, text in enumerate(told):
        if text is not None:
            first: Exception = pickle.loads(text)
            raise first from (
                error if rank == here else DistributedOperationException(f"rank {rank} raised this")
            )


def portable(error: Exception | None) -> bytes | None:
    """The error as bytes from which it can be made again; one that cannot becomes a RuntimeError with its text. None for None."""
    if error is None:
        return None
    try:
        text = pickle.dumps(error)
        pickle.loads(text)
    except Exception:  # noqa: BLE001 - any class may refuse, in any way
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return text


def agree(
    world: World, call: Call, pack: Callable[[], Tensor] | None = None, into: Tensor | None = None
) -> Agreement:
    """Every rank's payload, which `pack` makes (flat uint8), after the ranks saw that they make the same `call`; with a root only its own.

    Ranks other than the root pass None; they may say `into` which memory, as long as the root's payload, one that did not fit into the
    header is to be received. Raises MismatchError on every rank when the calls differ or one cannot pack, and the error of the
    call when every rank has the same one. Not for worlds with `verify=False`.
    """
    payload: Tensor | None = None
    if pack is not None and call.error is None:
        payload, error = tried(pack)
        call = call if error is None else call._replace(error=error)
    room = room_bytes(world.size)
    sizes = call.sizes if len(call.sizes) <= room // 2 else b""
    room -= len(sizes)
    num_bytes = 0 if payload is None else payload.numel()
    inline = num_bytes <= room and (payload is None or payload.device.type == "cpu")
    head = _HEAD.pack(_agreed(call), call.sizes_digest, num_bytes, inline, call.error is not None) + sizes
    content = bytearray(_HEAD.size + room_bytes(world.size))
    content[: len(head)] = head
    if inline and payload is not None:
        content[len(head) : len(head) + num_bytes] = to_bytes(payload)
    header = torch.frombuffer(content, dtype=torch.uint8)
    if world.comm.control_device.type != "cpu":
        header = header.to(world.comm.control_device)
    headers = world.comm.all_gather(header).cpu()  # (size, bytes)
    told = to_bytes(headers)
    raw = [told[start : start + len(head)] for start in range(0, len(told), len(content))]
    if call.error is not None or {other[:_AGREED_BYTES] for other in raw} != {head[:_AGREED_BYTES]}:
        _explain(world, call)
    heads = [_HEAD.unpack_from(other) for other in raw]
    senders = list(range(world.size)) if call.root < 0 else [call.root]
    lengths = [heads[rank][2] for rank in senders]
    payloads: Tensor | None = None
    if max(lengths) > 0:
        if all(heads[rank][3] for rank in senders):
            rows = headers if call.root < 0 else headers[call.root : call.root + 1]
            payloads = rows[:, len(head) : len(head) + max(lengths)]
        else:
            payloads = _carry(world, call, into if payload is None else payload, max(lengths))
    return Agreement(
        payloads=payloads,
        lengths=lengths,
        same_sizes=len({other[1] for other in heads}) == 1,
        sizes=[other[_HEAD.size :] for other in raw] if len(sizes) == len(call.sizes) else None,
    )


@functools.lru_cache(maxsize=256)
def room_bytes(size: int) -> int:
    """How many bytes of payload and sizes travel inside the header in a world of this size."""
    return max(1024, min(16 * 1024, 256 * 1024 // size))


def digest_of(*parts: Any) -> bytes:
    """16 bytes that are the same in every process for the same parts, and only for them.

    Parts are types, texts, numbers, dtypes, enum members, tuples and frozensets of them, and objects compared by value that can be
    pickled. Raises TypeError for others, such as objects that are equal only to themselves.
    """
    return hashlib.blake2b("\n".join(_texts(parts)).encode(), digest_size=16).digest()


# agreed, digest of the sizes, payload bytes, payload is inside, this rank has an error; filled up, so that what follows is aligned
_HEAD = struct.Struct("=16s16sqBB6x")
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


def _explain(world: World, call: Call) -> NoReturn:
    """Raise the error all ranks agree on; every rank comes here."""
    rows, failure = tried(lambda: _rows_of(call))
    if rows is None:  # an error or a key whose own text cannot be made
        text = f"cannot be described: {type(failure).__name__}"
        rows = [("operation", text, text)]
    described: list[list[Row]] = world.comm.all_gather_object(rows)
    first = described[0]
    for rank, other in enumerate(described):
        for one, two in zip(first, other, strict=False):
            if one[:2] != two[:2]:
                where = one[0] if one[0] == two[0] else f"{one[0]} and {two[0]}"
                raise MismatchError(f"{where}: rank 0 {one[2]}, rank {rank} {two[2]}") from call.error
    if call.error is not None:
        raise call.error
    raise MismatchError(f"{call.name}: the ranks hand in different data: {described}")


def _rows_of(call: Call) -> list[Row]:
    if call.error is not None:
        text = f"cannot take part: {type(call.error).__name__}: {call.error}"
        return [("operation", text, text)]
    rows: list[Row] = [("operation", call.name, call.name)]
    if call.root >= 0:
        rows.append(("root", call.root, f"has {call.root}"))
    return rows + list(call.describe())


_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None), torch.dtype})  # their repr says all


def _texts(parts: Iterable[Any]) -> Iterator[str]:
    """Texts that tell parts apart; never the repr of a class that may put an address into it."""
    for part in parts:
        if type(part) in _PLAIN:
            yield repr(part)
        elif isinstance(part, Enum):
            yield f"{_full_name(type(part))}.{part.name or part.value}"  # a combined Flag has no name
        elif isinstance(part, tuple):
            yield "(" if type(part) is tuple else f"{_full_name(type(part))}("
            yield from _texts(part)
            yield ")"
        elif isinstance(part, list):
            yield from ("[", *_texts(part), "]")
        elif isinstance(part, (frozenset, set)):  # their order depends on the process
            yield from ("{", *sorted("\n".join(_texts((item,))) for item in part), "}")
        elif isinstance(part, dict):
            yield from ("{", *sorted("\n".join(_texts(item)) for item in part.items()), "}")
        elif isinstance(part, (type, FunctionType, BuiltinFunctionType)):
            yield _full_name(part)
        else:
            yield from ("<", *_texts((_value_of(part),)), ">")


_REMEDY = "use a str, a number, an enum member, or a tuple of them"


def _full_name(part: Any) -> str:
    if part.__qualname__.endswith("<lambda>"):
        raise TypeError(f"{part!r} has no name by which ranks could compare it; {_REMEDY}")
    return f"{part.__module__}.{part.__qualname__}"


def _value_of(part: Any) -> Any:
    """What pickle would keep of an object, or the name under which it finds it."""
    if isinstance(part, Tensor):
        raise TypeError(
            f"a tensor ({tuple(part.shape)}) as a key cannot be compared between ranks; {_REMEDY}"
        )
    own_eq: Any = type(part).__eq__
    try:
        value = part.__reduce_ex__(4)
    except Exception as error:
        raise TypeError(f"{part!r:.60} cannot be compared between ranks: {error}; {_REMEDY}") from error
    if own_eq is object.__eq__ and not isinstance(value, str):
        raise TypeError(f"{part!r:.60} is equal only to itself, so ranks cannot compare it; {_REMEDY}")
    return value
