"""Which names of a module stand for one tensor, found in one pass; and how they go on standing for one when tensors are replaced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def tied_groups(module: nn.Module) -> list[list[str]]:
    """The names, of parameters and buffers, that share one tensor: one list for each such tensor, in the module's order.

    Two names share a tensor when they hold the same object, or views of the same memory with the same shape, strides and
    dtype. A module registered under two names makes groups too. Linear in the number of names.
    """
    return group_by_tensor(every_tensor(module))


def group_by_tensor(named: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """The groups among (name, tensor) pairs, as `tied_groups` gives them.

    A list is made for a group only: one for every tensor would set off the garbage collector, which costs more than the rest.
    """
    first: dict[Hashable, str] = {}
    groups: dict[Hashable, list[str]] = {}
    for name, tensor in named:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet, it belongs to a lazy module: call the model once before it is offloaded or "
                "given hooks"
            )
        identity = _identity(tensor)
        if identity in groups:
            groups[identity].append(name)
        elif identity in first:
            groups[identity] = [first[identity], name]
        else:
            first[identity] = name
    return [groups[identity] for identity in first if identity in groups]


def every_tensor(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all parameters and buffers, tied ones under each of their names."""
    owners = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    for path, owner in owners:
        prefix = f"{path}." if path else ""
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield prefix + name, tensor


class Place(NamedTuple):
    """Where a parameter stands: in which module, as which of its attributes, and where that module is."""

    module: nn.Module
    attribute: str
    path: str

    @property
    def name(self) -> str:
        """The parameter's whole name."""
        return f"{self.path}.{self.attribute}".lstrip(".")


def shared_parameters(module: nn.Module) -> list[list[Place]]:
    """The places of each parameter that several modules hold, in the module's order. A module under two names is one module."""
    places: dict[int, list[Place]] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append(Place(owner, attribute, path))
    return [found for found in places.values() if len(found) > 1]


def tie_again(places: Sequence[Place]) -> None:
    """Let all `places` hold the parameter of the first one."""
    (first, attribute, _), *others = places
    for other, name, _ in others:
        other._parameters[name] = first._parameters[attribute]


def replace_tensors(module: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
    """Put `replacement(tensor)` in the place of every parameter and buffer; it is called once for a tensor, so that ties hold."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one: its id must not be given away
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = (replacement(tensor), tensor)
                tensors[name] = made[id(tensor)][0]  # type: ignore[assignment]


def _identity(tensor: Tensor) -> Hashable:
    """Equal for the same object and for the same view of the same memory."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)  # no memory
    try:
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # fake, sparse, opaque tensors
        return id(tensor)
    if address == 0:  # subclasses that wrap other tensors
        return id(tensor)
    return (tensor.device, address, tensor.dtype, tuple(tensor.shape), tensor.stride())
