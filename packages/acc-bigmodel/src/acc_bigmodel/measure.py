"""How many bytes a model takes: by tensor, by module, by layer, counted without touching a value."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from acc_bigmodel.stores.dtypes import dtype_named
from acc_ops.enums import CustomDtype

DtypeLike = str | torch.dtype | CustomDtype

# bits of one element of what torch has no dtype for
_CUSTOM_BITS = {CustomDtype.FP8: 8, CustomDtype.INT4: 4, CustomDtype.INT2: 2}


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Everything the planner wants to know of a model, from one pass over its tensors.

    `sizes` has every parameter and buffer by name, in the order of the modules, names that share a tensor included, in
    bytes. `ties` are the groups of names that share one. `blocks` are the modules that must stay whole.
    """

    sizes: dict[str, int]
    ties: tuple[tuple[str, ...], ...]
    buffers: frozenset[str]
    blocks: frozenset[str]


def take_inventory(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
) -> Inventory:
    """The inventory of `model` as it would be in `dtype` (see `compute_module_sizes`). Linear in modules and tensors."""
    bits = _Bits(dtype, special_dtypes)
    whole = frozenset(as_class_names(no_split_module_classes))
    sizes: dict[str, int] = {}
    first_name: dict[int, str] = {}
    shared: dict[
        str, list[str]
    ] = {}  # only for tensors with several names: a list for each costs garbage collections
    buffers: set[str] = set()
    blocks: set[str] = set()
    for path, module in modules_in_order(model):
        if whole and type(module).__name__ in whole:
            blocks.add(path)
        prefix = f"{path}." if path else ""
        for tensors in (module._parameters, module._buffers):
            for local, tensor in tensors.items():
                if tensor is None:
                    continue
                name = prefix + local
                sizes[name] = bits.size_of(name, tensor)
                first = first_name.setdefault(id(tensor), name)
                if first is not name:
                    shared.setdefault(first, [first]).append(name)
                if tensors is module._buffers:
                    buffers.add(name)
    ties = tuple(map(tuple, shared.values()))
    return Inventory(sizes=sizes, ties=ties, buffers=frozenset(buffers), blocks=frozenset(blocks))


def compute_module_sizes(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    buffers_only: bool = False,
) -> defaultdict[str, int]:
    """The bytes of every tensor and of every module by name; "" is the whole model, a tied tensor counts once.

    `dtype` caps floating tensors at its size; integers and bools keep theirs. `special_dtypes` (by tensor name) go
    before both. Names that are not there count 0.
    """
    inventory = take_inventory(model, dtype, special_dtypes)
    tied = {name for group in inventory.ties for name in group[1:]}
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, nbytes in inventory.sizes.items():
        if name in tied or (buffers_only and name not in inventory.buffers):
            continue
        sizes[""] += nbytes
        at = name.find(".")
        while at >= 0:
            sizes[name[:at]] += nbytes
            at = name.find(".", at + 1)
        sizes[name] += nbytes
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
) -> int:
    """The bytes of all buffers."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: str | Sequence[str] | None,
) -> tuple[int, list[str]]:
    """The bytes of the largest piece that cannot be split, and the names of all pieces of that size.

    A piece is a tensor, a module without children, or one whose class is in `no_split_module_classes`.
    """
    whole = frozenset(as_class_names(no_split_module_classes))
    largest, names = 0, []
    for name, _ in _pieces(modules, whole):
        nbytes = module_sizes.get(name, 0)
        if nbytes > largest:
            largest, names = nbytes, [name]
        elif nbytes == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """(bytes of the model, (bytes of its largest layer, names)); `model._no_split_modules` stay whole."""
    sizes = compute_module_sizes(model)
    return sizes[""], get_max_layer_size(
        direct_members(model), sizes, getattr(model, "_no_split_modules", None)
    )


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """The names in `module_sizes` that are nobody's parent, without ""."""
    parents = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name and name not in parents]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module | torch.Tensor]],
) -> tuple[int, list[str], list[nn.Module | torch.Tensor]]:
    """The bytes of a module together with the modules tied to it, the names of those, and the modules.

    `tied_params` are the names, outside the module, that share a tensor with it: their bytes are counted once. Raises
    ValueError for a name that is in none of `modules_to_treat`.
    """
    total = module_size
    found: dict[str, nn.Module | torch.Tensor] = {}
    for tied in tied_params:
        home = next(
            (item for item in modules_to_treat if tied == item[0] or tied.startswith(item[0] + ".")), None
        )
        if home is None:
            raise ValueError(
                f"{tied!r} is in none of the modules {', '.join(name for name, _ in modules_to_treat)}"
            )
        if home[0] not in found:
            total += module_sizes.get(home[0], 0)
            found[home[0]] = home[1]
        total -= module_sizes.get(tied, 0)
    return total, list(found), list(found.values())


def modules_in_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module by its dotted name, parents first; one that is registered twice comes twice."""
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        path, module = stack.pop()
        yield path, module
        if module._modules:
            prefix = f"{path}." if path else ""
            stack.extend(
                (prefix + name, child)
                for name, child in reversed(module._modules.items())
                if child is not None
            )


def direct_members(module: nn.Module) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """The module's own parameters, its children and its own buffers, by name."""
    return [
        *((name, tensor) for name, tensor in module._parameters.items() if tensor is not None),
        *((name, child) for name, child in module._modules.items() if child is not None),
        *((name, tensor) for name, tensor in module._buffers.items() if tensor is not None),
    ]


def as_class_names(no_split_module_classes: str | Sequence[str] | None) -> list[str]:
    """The class names in any of the forms in which they are given."""
    if no_split_module_classes is None:
        return []
    return (
        [no_split_module_classes]
        if isinstance(no_split_module_classes, str)
        else list(no_split_module_classes)
    )


def is_piece(module: nn.Module | torch.Tensor, whole: frozenset[str]) -> bool:
    """Whether a module is placed as one."""
    return isinstance(module, torch.Tensor) or not module._modules or type(module).__name__ in whole


def below(name: str, module: nn.Module) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """The direct members of a module, with their full names."""
    return [(f"{name}.{local}" if name else local, member) for local, member in direct_members(module)]


def _pieces(
    modules: Sequence[tuple[str, Any]], whole: frozenset[str]
) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    stack = list(reversed(modules))
    while stack:
        name, module = stack.pop()
        if is_piece(module, whole):
            yield name, module
        else:
            stack.extend(reversed(below(name, module)))


class _Bits:
    """The size of a tensor as it would be in other dtypes."""

    def __init__(self, dtype: DtypeLike | None, special: Mapping[str, DtypeLike] | None) -> None:
        self.cap = None if dtype is None else _bits_of(dtype)
        self.special = {name: _bits_of(kind) for name, kind in (special or {}).items()}

    def size_of(self, name: str, tensor: torch.Tensor) -> int:
        if name in self.special:
            return math.ceil(tensor.numel() * self.special[name] / 8)
        nbytes = tensor.numel() * tensor.element_size()
        if self.cap is not None and tensor.is_floating_point():
            return min(nbytes, math.ceil(tensor.numel() * self.cap / 8))
        return nbytes


def _bits_of(dtype: DtypeLike) -> int:
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BITS[dtype]
    if isinstance(dtype, str) and dtype in CustomDtype._value2member_map_:
        return _CUSTOM_BITS[CustomDtype(dtype)]
    return dtype_named(dtype).itemsize * 8
