"""Nested data: change, move, cut, join and measure the tensors inside without touching what holds them.

What is a container and what is a leaf is said in `containers.py`. No container is ever written to: it is rebuilt only when one of its
leaves changed, else the very same object is passed on.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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


def flatten(data: Any) -> tuple[list[Tensor], Structure]:
    """The tensors of `data` in order, and the structure around them.

    >>> leaves, structure = flatten({"a": torch.ones(2), "b": [torch.zeros(1)]})
    >>> unflatten(structure, [leaf + 1 for leaf in leaves])
    {'a': tensor([2., 2.]), 'b': [tensor([1.])]}
    """
    leaves: list[Tensor] = []
    others: list[Any] = []
    key = _flatten(data, leaves, others)
    return leaves, Structure(data, key, len(others))


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
    target = device if isinstance(device, torch.device) else canonical_device(device)
    if target.type == "cpu":
        non_blocking = False
    moved: dict[int, Any] = {}

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device == target:
            return leaf
        new = moved.get(id(leaf))
        if new is None:
            new = moved[id(leaf)] = _to(leaf, target, non_blocking)
        return new

    if skip_keys is None:
        skip: frozenset[Any] = frozenset()
    else:
        skip = frozenset((skip_keys,) if isinstance(skip_keys, str) else skip_keys)
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


def find_batch_size(data: Any) -> int:
    """The first dimension of the first tensor that has one, whatever comes before it.

    Raises TypeError when `data` is a leaf but no tensor, and ValueError when no tensor in it has a dimension.
    """
    for _, leaf in leaves_with_paths(data):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
    if isinstance(data, Tensor) or container_of(data) is not None:
        raise ValueError("no batch size: the data has no tensor with at least one dimension")
    raise TypeError(f"no batch size: expected tensors or containers of tensors, got {type(data).__name__}")


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None where that finds none."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor, or None."""
    return next((leaf.device for _, leaf in leaves_with_paths(data) if isinstance(leaf, Tensor)), None)


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,  # noqa: ARG001 - for slice functions of users, which get all four
    num_processes: int | None = None,  # noqa: ARG001
) -> Any:
    """`tensor[tensor_slice]` for every tensor; one without dimensions belongs to the whole batch and stays."""
    return recursively_apply(lambda tensor: tensor[tensor_slice] if tensor.ndim else tensor, data)


def listify(data: Any) -> Any:
    """The same nesting with plain Python numbers and lists instead of tensors."""

    def plain(tensor: Tensor) -> Any:
        tensor = tensor.detach().cpu()
        return (
            tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
        ).tolist()

    return recursively_apply(plain, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """One batch out of several of the same structure.

    Tensors are joined along `dim` (those without dimensions are stacked), lists and tuples without tensors are chained, and
    other leaves must be equal and stay. Raises TypeError where they are not, naming the place.
    """
    if not isinstance(data, (list, tuple)) or not data:
        raise TypeError(f"concatenate takes a non-empty list of batches, got {data!r:.100}")
    return _concatenate(data, dim, "batch")


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Tensors of size `batch_size` in dimension `dim`, zero-padded there to the next multiple of `num_processes`."""
    if batch_size < 1 or num_processes < 1:
        raise ValueError(
            f"batch_size and num_processes must be at least 1, got {batch_size} and {num_processes}"
        )
    missing = -batch_size % num_processes

    def pad(leaf: Tensor) -> Tensor:
        if not missing or not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != batch_size:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def _mapper(
    func: Callable[[Any], Any],
    test: Callable[[Any], bool],
    other: Callable[[Any], Any] | None = None,
    skip: frozenset[Any] = frozenset(),
) -> Callable[[Any], Any]:
    """The walk that puts `func(leaf)` for leaves that pass `test` and `other(leaf)` for the rest; `skip` names keys to leave."""

    def walk(data: Any) -> Any:
        kind = type(data)
        if kind is dict:
            new_dict = None
            for key, value in data.items():
                new = value if key in skip else walk(value)
                if new is not value:
                    if new_dict is None:
                        new_dict = data.copy()
                    new_dict[key] = new
            return data if new_dict is None else new_dict
        if kind is list or kind is tuple:
            news = [walk(value) for value in data]
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


def _flatten(data: Any, leaves: list[Tensor], others: list[Any]) -> Any:
    kind = type(data)
    if isinstance(data, Tensor):
        leaves.append(data)
        return None
    if kind is dict:
        return (dict, tuple(data), tuple([_flatten(value, leaves, others) for value in data.values()]))
    container = container_of(data)
    if container is None:
        others.append(data)
        return kind
    values = tuple([_flatten(value, leaves, others) for value in container.values(data)])
    return (kind, container.key(data), values)


def _moves_itself(data: Any) -> bool:
    """Tensors, and objects with a `.to` of their own; dicts of transformers have one too, but it writes to them."""
    if isinstance(data, Tensor):
        return True
    return hasattr(data, "to") and not isinstance(data, (dict, UserDict, type))


def _to(leaf: Any, device: torch.device, non_blocking: bool) -> Any:
    if non_blocking:
        try:
            return leaf.to(device, non_blocking=True)
        except TypeError:  # an object whose `.to` only knows devices
            return leaf.to(device)
    return leaf.to(device)


def _concatenate(batches: Sequence[Any], dim: int, path: str) -> Any:
    first = batches[0]
    if len(batches) == 1:
        return first
    kinds = {type(batch) for batch in batches}
    if isinstance(first, Tensor):
        if not all(isinstance(batch, Tensor) for batch in batches):
            raise TypeError(f"{path} cannot be concatenated: its types are {_kind_names(kinds)}")
        return torch.cat([batch if batch.ndim else batch.unsqueeze(0) for batch in batches], dim)
    if len(kinds) > 1:
        raise TypeError(f"{path} cannot be concatenated: its types are {_kind_names(kinds)}")
    container = container_of(first)
    if container is None:
        if all(_equal(first, batch) for batch in batches[1:]):
            return first
        raise TypeError(
            f"{path} cannot be concatenated: it is no tensor and differs ({batches[0]!r:.50}, {batches[1]!r:.50}, ...); "
            "put it into a list of one item per sample"
        )
    plain = isinstance(first, (list, tuple)) and not hasattr(first, "_fields")
    if plain and not any(
        isinstance(leaf, Tensor) for batch in batches for _, leaf in leaves_with_paths(batch)
    ):
        return container.rebuild(first, [item for batch in batches for item in batch])
    if isinstance(first, Mapping):
        keys = {frozenset(batch) for batch in batches}
        rows = [[batch[key] for key in first if key in batch] for batch in batches]
    else:
        keys = {container.key(batch) for batch in batches}
        rows = [container.values(batch) for batch in batches]
    if len(keys) > 1:
        raise TypeError(f"{path} cannot be concatenated: its keys or lengths differ ({keys})")
    columns = zip(*rows, strict=True)
    joined = [
        _concatenate(c, dim, path + name) for c, name in zip(columns, container.names(first), strict=True)
    ]
    return container.rebuild(first, joined)


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (ValueError, RuntimeError):  # an array has no single truth value
        return False


def _kind_names(kinds: Iterable[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))
