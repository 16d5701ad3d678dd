"""Where offloaded values are kept: reading a weights map, bringing a changed value home, telling whether one was changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from acc_hooks.origin import OffloadedWeightError
from acc_hooks.prefixed import PrefixedDataset, home_of, innermost, is_writable
from acc_hooks.tensors import is_plain


def read_home(weights_map: Mapping[str, Tensor], name: str, full: str) -> Tensor:
    """The value of `name`; OffloadedWeightError, with the `full` name, if the map has no tensor for it."""
    home, key = home_of(weights_map, name)
    try:
        value: object = weights_map[name]
    except KeyError:
        raise OffloadedWeightError(
            f"{full} is offloaded and its weights map ({type(home).__name__}) has no entry {key!r}"
        ) from None
    if not isinstance(value, Tensor):
        raise OffloadedWeightError(
            f"{full} is offloaded and its weights map ({type(home).__name__}) gave an object of the type "
            f"{type(value).__name__} for {key!r}: a weights map gives a torch.Tensor, or raises KeyError"
        )
    return value


def write_home(
    weights_map: Mapping[str, Tensor], name: str, full: str, tensor: Tensor, fetched: Tensor | None
) -> None:
    """Keep `tensor` as the value of `name`, in place if the map still holds the object that was `fetched` from it.

    OffloadedWeightError for a read-only map, unless the tensor is the map's own.
    """
    device = torch.device("cpu")
    if fetched is not None:
        home = read_home(weights_map, name, full)
        if same_memory(tensor, home):
            return  # it never left
        device = home.device
        keeps_object = home is fetched and home.dtype == tensor.dtype and home.shape == tensor.shape
        if keeps_object and is_writable(weights_map) and not home.is_inference():  # the map's own ties stay
            with torch.no_grad():
                home.copy_(tensor)
            return
    if not is_writable(weights_map):
        raise _refuse_read_only(weights_map, full)
    weights_map[name] = tensor.to(device, copy=True)  # type: ignore[index]  # asked above: is_writable


def entry_of(
    weights_map: Mapping[str, Tensor], path: str, full: str
) -> tuple[Mapping[str, Tensor], str] | None:
    """The map and the key of another tensor of the model, seen from the map of the module at `path`; None if it has none."""
    prefix = f"{path}." if path else ""
    if isinstance(weights_map, PrefixedDataset) and weights_map.prefix == prefix:
        weights_map, key = weights_map.dataset, full
    elif full.startswith(prefix):
        key = full[len(prefix) :]
    else:
        return None
    return (weights_map, key) if key in weights_map else None


def others_that_differ(
    weights_map: Mapping[str, Tensor], path: str, names: Iterable[str], value: Tensor
) -> Iterator[tuple[Mapping[str, Tensor], str, str]]:
    """(map, key, name) of the `names` of a tie under which another value than `value` is kept.

    As far as the map of the module at `path` reaches them.
    """
    for name in names:
        entry = entry_of(weights_map, path, name)
        if entry is None:
            continue
        its_map, key = entry
        kept = read_home(its_map, key, name)
        if not same_memory(kept, value) and (kept.dtype != value.dtype or differs(kept, value)):
            yield its_map, key, name


def write_others(weights_map: Mapping[str, Tensor], path: str, names: Iterable[str], value: Tensor) -> None:
    """Keep `value`, which the map keeps under one name of a tie, under its other names: the same tensor, not a copy."""
    for its_map, key, name in others_that_differ(weights_map, path, names, value):
        if not is_writable(its_map):
            raise _refuse_read_only(its_map, name)
        its_map[key] = value  # type: ignore[index]  # asked above: is_writable


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """What is made inside can be used in a later training step too; no gradients are recorded where none were."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # leaving inference mode switches gradients on
        yield


def differs(tensor: Tensor, value: Tensor) -> bool:
    """Whether two tensors of the same dtype hold different bytes: NaN equals itself, float8 can be compared."""
    if not is_plain(tensor) or not is_plain(value) or tensor.dtype != value.dtype:
        return False
    tensor, value = tensor.detach(), value.detach()
    return tensor.shape != value.shape or not torch.equal(_bytes(tensor.to(value.device)), _bytes(value))


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() == 1:  # contiguous whatever its stride is, and a view of bytes wants a stride of one
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether a change in one is a change in the other."""
    if tensor is other:
        return True
    if tensor.device != other.device or tensor.is_meta or not (is_plain(tensor) and is_plain(other)):
        return False
    return (
        tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape and tensor.dtype == other.dtype
    )


def version_of(tensor: Tensor) -> int | None:
    """The count of its changes; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version


def add_statistics(
    tensor: Tensor, name: str, weights_map: Mapping[str, Tensor], device: torch.device
) -> None:
    """The statistics of an 8-bit weight are kept under its name with SCB for `weight`."""
    if tensor.dtype == torch.int8 and name.split(".")[-1] == "weight":
        statistics = name[: -len("weight")] + "SCB"
        if statistics in weights_map:
            tensor.SCB = weights_map[statistics].to(device)  # type: ignore[attr-defined]


def _refuse_read_only(weights_map: Mapping[str, Tensor], full: str) -> OffloadedWeightError:
    return OffloadedWeightError(
        f"{full} was changed while it was loaded, but its weights come from a read-only "
        f"{type(innermost(weights_map)).__name__}: the change would be lost. Change the weights before "
        "offloading them, or offload to memory"
    )
