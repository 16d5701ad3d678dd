"""How each kind of container is taken apart and put together again, without ever writing to the user's own.

[Note: containers and leaves] A container is a list, a tuple (also a namedtuple or one of torch's struct sequences), any Mapping
(transformers' ModelOutput and BatchEncoding are some), a dataclass instance, or anything registered with torch's pytree. Everything
else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree  # torch has no public name for the registry; the module is the one it documents
from torch import nn


class Container:
    """How one type of container is read and rebuilt. The calls: 1 `values`, 2 `names` or `key`, 3 `rebuild`."""

    def values(self, data: Any) -> list[Any]:
        """What it contains, in order."""
        return list(data)

    def names(self, data: Any) -> list[str]:
        """How to reach each value from `data`: `[0]`, `['labels']`, `.logits`."""
        return [f"[{i}]" for i in range(len(self.values(data)))]

    def key(self, data: Any) -> Any:
        """Hashable; what must agree for two containers of one type to have the same structure, besides the values."""
        return len(data)

    def rebuild(self, data: Any, values: list[Any]) -> Any:
        """A new container like `data` with other `values`. Raises TypeError where its class cannot be made of them."""
        return _made(type(data), values)


class _List(Container):
    def rebuild(self, data: Any, values: list[Any]) -> Any:
        new = copy.copy(data)  # a subclass keeps its attributes
        new[:] = values
        return new


class _NamedTuple(Container):
    def names(self, data: Any) -> list[str]:
        return [f".{name}" for name in data._fields]

    def rebuild(self, data: Any, values: list[Any]) -> Any:
        return type(data)._make(values)


class _Mapping(Container):
    def values(self, data: Any) -> list[Any]:
        return [data[key] for key in data]

    def names(self, data: Any) -> list[str]:
        return [f"[{key!r}]" for key in data]

    def key(self, data: Any) -> Any:
        return tuple(data)

    def rebuild(self, data: Any, values: list[Any]) -> Any:
        new_items = dict(zip(data, values, strict=True))
        # A copy keeps a default factory and attributes; but a plain copy of an unknown class may share what it wraps.
        if isinstance(data, (dict, UserDict)) or hasattr(type(data), "__copy__"):
            try:
                new = copy.copy(data)
                for key, value in new_items.items():
                    if value is not data[key]:
                        new[key] = value
                return new
            except TypeError:  # it is immutable
                pass
        return _made(type(data), new_items)


class _Dataclass(Container):
    def values(self, data: Any) -> list[Any]:
        return [getattr(data, name) for name in self.key(data)]

    def names(self, data: Any) -> list[str]:
        return [f".{name}" for name in self.key(data)]

    def key(self, data: Any) -> Any:
        return tuple(field.name for field in dataclasses.fields(data) if hasattr(data, field.name))

    def rebuild(self, data: Any, values: list[Any]) -> Any:
        new = _copy_of(data)  # not dataclasses.replace: some fields have no init, and __post_init__ has run
        for name, value in zip(self.key(data), values, strict=True):
            object.__setattr__(new, name, value)  # also where it is frozen
        return new


class _Registered(Container):
    """Whatever its author registered with torch's pytree."""

    def values(self, data: Any) -> list[Any]:
        return list(_registered(data).flatten_fn(data)[0])

    def names(self, data: Any) -> list[str]:
        with_keys = _registered(data).flatten_with_keys_fn
        if with_keys is None:
            return super().names(data)
        return [str(key) for key, _ in with_keys(data)[0]]

    def key(self, data: Any) -> Any:
        return len(self.values(data))

    def rebuild(self, data: Any, values: list[Any]) -> Any:
        node = _registered(data)
        return node.unflatten_fn(values, node.flatten_fn(data)[1])


def container_of(data: Any) -> Container | None:
    """How to take `data` apart, or None when it is a leaf."""
    kind: Any = type(data)
    if kind in _ATOMS:
        return None
    return _container_for(kind)


LEAF_DATACLASSES: set[type] = set()  # dataclasses of ours that are leaves

# [Note: torch.compile] follows what is here: a tuple, as older tracers know no `in` of a frozenset of types; and no cache, as a
# compiled function would be compiled again each time the cache grows.
_ATOMS = (torch.Tensor, int, float, bool, str, bytes, type(None), torch.device, torch.dtype)
_LIST = _List()
_MAPPING = _Mapping()
_PLAIN = Container()
_NAMED_TUPLE = _NamedTuple()
_DATACLASS = _Dataclass()
_REGISTERED = _Registered()


def _container_for(kind: type) -> Container | None:
    # A mapping even where it is registered, as transformers' ModelOutput is: there its keys have no names.
    if issubclass(kind, Mapping):
        return _MAPPING
    if issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
        return _NAMED_TUPLE
    is_struct_sequence = hasattr(kind, "n_sequence_fields")
    if kind in (list, tuple, torch.Size) or is_struct_sequence:
        return _PLAIN
    if kind in pytree.SUPPORTED_NODES:  # asked every time: it may be registered later
        return _REGISTERED
    if issubclass(kind, tuple):
        return _PLAIN
    if issubclass(kind, list):
        return _LIST
    if dataclasses.is_dataclass(kind) and kind not in LEAF_DATACLASSES and not issubclass(kind, nn.Module):
        return _DATACLASS
    return None


def _made(kind: type[Any], content: Any) -> Any:
    try:
        return kind(content)
    except TypeError as error:
        raise TypeError(
            f"a {kind.__name__} cannot be rebuilt with other values: {kind.__name__}({type(content).__name__} of its values) raises "
            f"{error}; give a mapping a __copy__, or register the class with torch.utils._pytree.register_pytree_node"
        ) from error


def _copy_of(data: Any) -> Any:
    try:
        return copy.copy(data)
    except dataclasses.FrozenInstanceError:  # copy sets slots in the way that is frozen
        make, arguments, state = data.__reduce_ex__(4)[:3]
        new = make(*arguments)
        for attributes in state:  # those in __dict__, or None, and those in slots
            for name, value in (attributes or {}).items():
                object.__setattr__(new, name, value)
        return new


def _registered(data: Any) -> Any:
    return pytree.SUPPORTED_NODES[type(data)]
