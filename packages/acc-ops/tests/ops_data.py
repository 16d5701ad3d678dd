"""Nested data for properties: plain, picklable specs that every rank builds its own tensors from.

Shared by the tests of this package and by integration-tests; both find it by the path that their conftest.py adds.
"""

from __future__ import annotations

import math
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

MAX_RANKS = 5
DTYPES = tuple(
    name
    for name in [
        "float32",
        "int64",
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "float16",
        "bfloat16",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
    if hasattr(torch, name)
)
WITH_GRAD = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


class Leaf(NamedTuple):
    """A tensor on each rank."""

    dtype: str
    shapes: tuple[tuple[int, ...], ...]  # of each rank
    view: str = "plain"
    seed: int = 0


class Other(NamedTuple):
    """A leaf that is no tensor."""

    value: Any


class Node(NamedTuple):
    """A container; `keys` are those of a mapping."""

    kind: str
    children: tuple[Any, ...]
    keys: tuple[Any, ...] = ()


Spec = Any  # Leaf | Other | Node


class Color(Enum):
    RED = 1


Pair = namedtuple("Pair", "left right")


class Rows(list):
    """A list that carries something."""

    note = ""


class Output(OrderedDict):
    """Like transformers' ModelOutput: keys are attributes, too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Encoding(UserDict):
    """Like transformers' BatchEncoding: a UserDict with other attributes."""

    note = ""


class Wrapped(Mapping[Any, Any]):
    """A Mapping of a user; a plain copy of it would share what it wraps."""

    def __init__(self, data: Mapping[Any, Any]) -> None:
        self.inner = dict(data)

    def __getitem__(self, key: Any) -> Any:
        return self.inner[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


@dataclass
class Batch:
    ids: Any
    mask: Any


@dataclass(frozen=True)
class Frozen:
    ids: Any
    mask: Any


@dataclass(frozen=True)
class Slotted:
    __slots__ = ("ids", "mask")
    ids: Any
    mask: Any


class Cache:
    """Registered with torch's pytree by its author."""

    def __init__(self, states: list[Any], note: str) -> None:
        self.states = states
        self.note = note


pytree.register_pytree_node(Cache, lambda c: (c.states, c.note), lambda v, note: Cache(list(v), note))


@dataclass(frozen=True)
class Kind:
    """How a container is made of its keys and values, and read again without the help of what is tested."""

    make: Callable[[tuple[Any, ...], list[Any]], Any]
    read: Callable[[Any], list[Any]] = list
    keys: str = ""  # "any" or "names": it is a mapping
    size: int | None = None  # None: any
    kept: Callable[[Any], Any] = lambda data: None  # what else has to stay


def _named(container: Any) -> Any:
    container.note = "kept"
    return container


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and bool(one == other))


def _mapping(make: Callable[[Any], Any], keys: str = "any", kept: Callable[[Any], Any] = bool) -> Kind:
    def read(data: Any) -> list[Any]:
        return [data[key] for key in data]

    return Kind(lambda k, v: make(dict(zip(k, v, strict=True))), read, keys, None, kept)


def _fields(kind: Any) -> Kind:
    return Kind(lambda _, v: kind(*v), lambda data: [data.ids, data.mask], size=2)


KINDS: dict[str, Kind] = {
    "list": Kind(lambda _, v: list(v)),
    "tuple": Kind(lambda _, v: tuple(v)),
    "rows": Kind(lambda _, v: _named(Rows(v)), kept=lambda data: data.note),
    "deque": Kind(lambda _, v: deque(v)),
    "pair": Kind(lambda _, v: Pair(*v), lambda data: [data.left, data.right], size=2),
    "max": Kind(
        lambda _, v: torch.return_types.max(v),
        lambda data: [data.values, data.indices],
        size=2,
    ),
    "cache": Kind(lambda _, v: Cache(list(v), "kept"), lambda data: data.states, kept=lambda data: data.note),
    "batch": _fields(Batch),
    "frozen": _fields(Frozen),
    "slotted": _fields(Slotted),
    "dict": _mapping(dict),
    "ordered": _mapping(OrderedDict),
    "default": _mapping(lambda d: defaultdict(list, d), kept=lambda data: data.default_factory),
    "user": _mapping(UserDict),
    "encoding": _mapping(lambda d: _named(Encoding(d)), kept=lambda data: data.note),
    "output": _mapping(Output, "names", lambda data: [_same(getattr(data, key), data[key]) for key in data]),
    "wrapped": _mapping(Wrapped),
    "proxy": _mapping(types.MappingProxyType),
}


def build(spec: Spec, rank: int = 0, numbers: bool = False) -> Any:
    """This rank's data: tensors of any bytes, NaN and infinities among them, or of small `numbers`."""
    if isinstance(spec, Leaf):
        return make_tensor(spec, rank, numbers)
    if isinstance(spec, Other):
        return spec.value
    return KINDS[spec.kind].make(spec.keys, [build(child, rank, numbers) for child in spec.children])


def leaves_of(spec: Spec, data: Any) -> list[tuple[Any, Any]]:
    """(Leaf or Other, what `data` has there) in order; AssertionError unless `data` is of the types and keys of `spec`."""
    if not isinstance(spec, Node):
        return [(spec, data)]
    kind = KINDS[spec.kind]
    model = kind.make(spec.keys, [build(child) for child in spec.children])
    assert type(data) is type(model), (type(data), spec)
    if kind.keys:
        assert list(data) == list(spec.keys), (list(data), spec)
    assert kind.kept(data) == kind.kept(model), spec
    values = kind.read(data)
    assert len(values) == len(spec.children), (values, spec)
    return [
        found for child, value in zip(spec.children, values, strict=True) for found in leaves_of(child, value)
    ]


def tensors_of(spec: Spec, data: Any) -> list[Tensor]:
    """The tensors of `data`, which is of the types and keys of `spec`."""
    return [value for leaf, value in leaves_of(spec, data) if isinstance(leaf, Leaf)]


def containers_of(spec: Spec, data: Any) -> list[tuple[Any, list[Any]]]:
    """Every container in `data` with what it contains."""
    if not isinstance(spec, Node):
        return []
    values = list(KINDS[spec.kind].read(data))
    inner = [
        c for child, value in zip(spec.children, values, strict=True) for c in containers_of(child, value)
    ]
    return [(data, values), *inner]


def raw(tensor: Tensor) -> bytes:
    """The elements of a tensor as bytes, in order: what tells NaN from NaN."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(plain.view(-1).view(torch.uint8).tolist()) if plain.numel() else b""


def make_tensor(leaf: Leaf, rank: int, numbers: bool) -> Tensor:
    """This rank's tensor of a leaf."""
    shape = leaf.shapes[rank]
    dtype = getattr(torch, leaf.dtype)
    count = math.prod(shape)
    if numbers:
        plain = torch.tensor(numbers_of(leaf, rank), dtype=torch.float64).to(dtype)
    else:
        steps = torch.arange(count * dtype.itemsize) * 37 + leaf.seed * 101 + rank * 59 + 13
        content = (steps % (2 if dtype == torch.bool else 256)).to(torch.uint8)
        plain = content.view(dtype) if count else torch.empty(0, dtype=dtype)
    return _VIEWS.get(leaf.view, _plain)(plain.reshape(shape), leaf)


def numbers_of(leaf: Leaf, rank: int) -> list[int]:
    """Small numbers that every dtype with a sign or without holds: exact sums, whatever the order."""
    count = math.prod(leaf.shapes[rank])
    low = 0 if leaf.dtype.startswith(("uint", "bool")) or leaf.dtype.endswith("e8m0fnu") else -4
    if leaf.dtype.endswith("e8m0fnu"):
        return [2 ** ((i + rank + leaf.seed) % 3) for i in range(count)]
    top = 2 if leaf.dtype == "bool" else 9
    return [(i * 7 + rank * 5 + leaf.seed) % top + low for i in range(count)]


def _plain(tensor: Tensor, leaf: Leaf) -> Tensor:
    return tensor


def _transposed(tensor: Tensor, leaf: Leaf) -> Tensor:
    order = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def _strided(tensor: Tensor, leaf: Leaf) -> Tensor:
    if not tensor.ndim:
        return tensor
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=tensor.dtype)
    return wide[..., ::2].copy_(tensor)


def _offset(tensor: Tensor, leaf: Leaf) -> Tensor:
    return torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)[2:-1].view(tensor.shape).copy_(tensor)


def _expanded(tensor: Tensor, leaf: Leaf) -> Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.ndim and tensor.numel() else tensor


def _neg(tensor: Tensor, leaf: Leaf) -> Tensor:
    if leaf.dtype not in ("float16", "float32", "float64"):
        return tensor
    return torch.view_as_complex(torch.stack([tensor, tensor], -1)).conj().imag


def _grad(tensor: Tensor, leaf: Leaf) -> Tensor:
    return tensor.clone().requires_grad_(leaf.dtype in WITH_GRAD)


def _result(tensor: Tensor, leaf: Leaf) -> Tensor:
    return _grad(tensor, leaf).clone()


def _parameter(tensor: Tensor, leaf: Leaf) -> Tensor:
    return nn.Parameter(tensor, requires_grad=leaf.dtype in WITH_GRAD)


def _inference(tensor: Tensor, leaf: Leaf) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


_VIEWS: dict[str, Callable[[Tensor, Leaf], Tensor]] = {
    "transposed": _transposed,
    "strided": _strided,
    "offset": _offset,
    "expanded": _expanded,
    "conj": lambda tensor, leaf: tensor.conj(),
    "neg": _neg,
    "grad": _grad,
    "result": _result,
    "parameter": _parameter,
    "inference": _inference,
}
