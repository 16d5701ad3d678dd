"""Nested data: change, move, cut, join and measure the tensors inside without touching what holds them.

What is a container and what is a leaf is said in `containers.py`. No container is ever written to: it is rebuilt only when one of its
leaves changed, else the very same object is passed on.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acc_ops.containers import LEAF_DATACLASSES, container_of
from acc_ops.devices import DeviceLike, canonical_device


@dataclass
class TensorInformation:
    """What must travel to rebuild a tensor elsewhere."""

    shape: torch.Size
    dtype: torch.dtype


LEAF_DATACLASSES.add(TensorInformation)


def is_torch_tensor(tensor: Any) -> bool:
    """Whether this is a tensor."""
    return isinstance(tensor, Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether this is a tensor on an Intel GPU."""
    return isinstance(tensor, Tensor) and tensor.device.type == "xpu"


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether this is a TensorInformation."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether this is an instance of a namedtuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items of `generator` in a list, tuple, namedtuple or struct sequence of the type of `obj`."""
    kind = type(obj)
    return kind(*generator) if is_namedtuple(obj) else kind(list(generator))


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """`data` with `func(leaf, *args, **kwargs)` instead of every leaf that passes `test_type`.

    Other leaves stay, or raise TypeError with `error_on_other_type=True`.
    """
    if args or kwargs:
        plain = func

        def func(leaf: Any) -> Any:
            return plain(leaf, *args, **kwargs)

    if not error_on_other_type:
        return _mapper(func, test_type)(data)

    def refuse(leaf: Any) -> Any:
        raise TypeError(
            f"{getattr(func, '__name__', func)} works on nested containers of tensors; got a leaf of "
            f"{type(leaf).__name__}: {leaf!r:.100}"
        )

    return _mapper(func, test_type, refuse)(data)


class Structure(NamedTuple):
    """Nested data without its tensors: what `unflatten` needs to put others in their place."""

    template: Any
    key: Any  # hashable; equal for data of the same nesting, types and keys, with tensors in the same places
    num_others: int  # leaves that are no tensors
    exact: bool = True  # whether equal keys are the same: not where a dict has a key like 1.0, equal to 1


def flatten(data: Any) -> tuple[list[Tensor], Structure]:
    """The tensors of `data` in order, and the structure around them.

    >>> leaves, structure = flatten({"a": torch.ones(2), "b": [torch.zeros(1)]})
    >>> unflatten(structure, [leaf + 1 for leaf in leaves])
    {'a': tensor([2., 2.]), 'b': [tensor([1.])]}
    """
    flat = _Flat([], [], [])
    key = _flatten(data, flat)
    return flat.leaves, Structure(data, key, len(flat.others), not flat.inexact)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """The nested data of `structure` with `leaves` in the places of its tensors. Raises ValueError for too few or too many."""
    supply = iter(leaves)
    end = object()

    def take(_: Tensor) -> Any:
        leaf = next(supply, end)
        if leaf is end:
            raise ValueError("there are fewer leaves than the structure has tensors")
        return leaf

    data = _mapper(take, is_torch_tensor)(structure.template)
    if next(supply, end) is not end:
        raise ValueError("there are more leaves than the structure has tensors")
    return data


def leaves_with_paths(data: Any, root: str = "batch") -> Iterator[tuple[str, Any]]:
    """Every leaf, tensor or not, with where it is: `batch['labels'][3]`."""
    container = container_of(data)
    if container is None:
        yield root, data
        return
    for name, value in zip(container.names(data), container.values(data), strict=True):
        yield from leaves_with_paths(value, root + name)


def send_to_device(
    tensor: Any,
    device: DeviceLike,
    non_blocking: bool = False,
    skip_keys: str | Collection[str] | None = None,
) -> Any:
    """`tensor`, or nested data, with its tensors and whatever else has a `.to` on `device`.

    What is there already is passed on as it is. Values under `skip_keys` (a str is one key) stay, at every depth. A tensor that
    several places share moves once. Copies to the CPU always wait, as nothing would tell when they are readable.
    """
    if skip_keys is None and isinstance(device, torch.device) and _is_there(tensor, device):
        return tensor
    target = canonical_device(device)
    if target.type == "cpu":
        non_blocking = False
    moved: dict[
        int, tuple[Any, Any]
    ] = {}  # what was moved is kept, as the id of one that has gone may come again

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device == target:
            return leaf
        known = moved.get(id(leaf))
        if known is None:
            known = moved[id(leaf)] = (leaf, _to(leaf, target, non_blocking))
        return known[1]

    if skip_keys is None:
        skip: Collection[Any] = ()
    elif isinstance(skip_keys, Collection):
        skip = frozenset((skip_keys,) if isinstance(skip_keys, str) else skip_keys)
    else:
        raise TypeError(
            f"skip_keys is a key or a collection of keys, got {skip_keys!r:.60}; write [{skip_keys!r:.60}]"
        )
    return _mapper(move, _moves_itself, skip=skip)(tensor)


def get_data_structure(data: Any) -> Any:
    """The same nesting with TensorInformation instead of tensors."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The same nesting with shapes, as lists, instead of tensors."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The same nesting with uninitialised CPU tensors instead of TensorInformation."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def first_tensor(data: Any, ndim: int) -> Tensor | None:
    """The first tensor in `data` with at least `ndim` dimensions."""
    if isinstance(data, Tensor):
        return data if data.ndim >= ndim else None
    if type(data) is dict:
        values: Iterable[Any] = data.values()
    else:
        container = container_of(data)
        if container is None:
            return None
        values = container.values(data)
    for value in values:
        found = first_tensor(value, ndim)
        if found is not None:
            return found
    return None


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor, or None."""
    found = first_tensor(data, 0)
    return None if found is None else found.device


def listify(data: Any) -> Any:
    """The same nesting with plain Python numbers and lists instead of tensors."""

    def plain(tensor: Tensor) -> Any:
        tensor = tensor.detach().cpu()
        return (
            tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
        ).tolist()

    return recursively_apply(plain, data)


def _mapper(
    func: Callable[[Any], Any],
    test: Callable[[Any], bool],
    other: Callable[[Any], Any] | None = None,
    skip: Collection[Any] = (),
) -> Callable[[Any], Any]:
    """The walk that puts `func(leaf)` for leaves that pass `test` and `other(leaf)` for the rest; `skip` names keys to leave."""

    def tensor_or_other(leaf: Tensor) -> Any:
        if test(leaf):
            return func(leaf)
        return leaf if other is None else other(leaf)

    # what becomes of plain tensors, which are most of the leaves, in one call
    change = func if test is is_torch_tensor or test is _moves_itself else tensor_or_other

    def walk(data: Any) -> Any:
        kind = type(data)
        if kind is Tensor:
            return change(data)
        if kind is dict:
            new_dict = None
            for key, value in data.items():
                if skip and key in skip:
                    continue
                new = change(value) if type(value) is Tensor else walk(value)
                if new is not value:
                    if new_dict is None:
                        new_dict = data.copy()
                    new_dict[key] = new
            return data if new_dict is None else new_dict
        if kind is list or kind is tuple:
            news = [change(value) if type(value) is Tensor else walk(value) for value in data]
            for new, value in zip(news, data, strict=True):
                if new is not value:
                    return news if kind is list else tuple(news)
            return data
        if test(data):
            return func(data)
        container = container_of(data)
        if container is None:
            return data if other is None else other(data)
        values = container.values(data)
        names = container.key(data) if skip else ()
        if isinstance(names, tuple) and names:
            news = [value if name in skip else walk(value) for name, value in zip(names, values, strict=True)]
        else:
            news = [walk(value) for value in values]
        same = all(new is value for new, value in zip(news, values, strict=True))
        return data if same else container.rebuild(data, news)

    return walk


class _Flat(NamedTuple):
    """What `_flatten` finds on its way."""

    leaves: list[Tensor]
    others: list[Any]
    inexact: list[Any]  # containers whose key may equal another's that is not the same


# Of these types, equal means the same: no bool, no float and no class of the user's is among them.
_EXACT = frozenset({str, bytes, int})


def _flatten(data: Any, flat: _Flat) -> Any:
    """Put the leaves of `data` where they belong; the key of its structure."""
    kind = type(data)
    if kind is dict:
        key: Any = tuple(data)
        values = data.values()
    elif kind is list or kind is tuple:
        key, values = len(data), data
    elif isinstance(data, Tensor):
        flat.leaves.append(data)
        return None
    else:
        container = container_of(data)
        if container is None:
            flat.others.append(data)
            return kind
        key, values = container.key(data), container.values(data)
        if type(kind).__eq__ is not object.__eq__:  # a class that may equal another one
            flat.inexact.append(data)
    if not isinstance(key, int) and not _EXACT.issuperset(map(type, key)):
        flat.inexact.append(data)
    inside: list[Any] = []
    for value in values:
        if type(value) is Tensor:
            flat.leaves.append(value)
            inside.append(None)
        else:
            inside.append(_flatten(value, flat))
    return (kind, key, tuple(inside))


def _moves_itself(data: Any) -> bool:
    """Tensors, and objects with a `.to` of their own; dicts of transformers have one too, but it writes to them."""
    if isinstance(data, Tensor):
        return True
    return hasattr(data, "to") and not isinstance(data, (dict, UserDict, type))


def _is_there(data: Any, target: torch.device) -> bool:
    """Whether there is nothing to move in plain containers of plain tensors; False where only a closer look tells."""
    kind = type(data)
    if kind is dict:
        data = data.values()
    elif kind is not list and kind is not tuple:
        return kind is Tensor and data.device == target
    for value in data:
        if type(value) is Tensor:
            if value.device != target:
                return False
        elif type(value) not in _IMMOVABLE and not _is_there(value, target):
            return False
    return True


_IMMOVABLE = (int, float, bool, str, bytes, type(None))


def _to(leaf: Any, device: torch.device, non_blocking: bool) -> Any:
    if non_blocking:
        try:
            return leaf.to(device, non_blocking=True)
        except TypeError:  # an object whose `.to` only knows devices
            return leaf.to(device)
    return leaf.to(device)
