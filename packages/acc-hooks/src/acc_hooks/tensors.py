"""Put a tensor of a module on a device, keeping its class, its flags and what users hung on it.

A parameter class that cannot be rebuilt from its data alone is served by a placer; `register_placer` adds one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from acc_hooks.placeholder import attributes_of, is_placeholder, kind_of, value_behind
from acc_ops.devices import canonical_device, device_count, known_kinds
from acc_ops.memory import clear_device_cache

Placer = Callable[["TensorPlacement"], Tensor]
TiedParams = dict[int, dict[torch.device, Tensor]]


@dataclass(frozen=True, kw_only=True)
class TensorPlacement:
    """What a placer is asked for: `value`, as a new tensor on `device` in the place of `old`."""

    old: Tensor  # what the module holds now: class, requires_grad and attributes come from it
    value: Tensor  # the data, already in the right dtype
    device: torch.device
    non_blocking: bool = False


_BITSANDBYTES = ("Int8Params", "FP4Params", "Params4bit")

_placers: list[tuple[Callable[[TensorPlacement], bool], Placer]] = []


def register_placer(applies: Callable[[TensorPlacement], bool], placer: Placer) -> None:
    """Let `placer` rebuild the tensors for which `applies` is true; the one registered last is asked first."""
    _placers.insert(0, (applies, placer))


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedParams | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put the parameter or buffer `tensor_name` (dotted) of `module` on `device`, with a new `value` if one is given.

    The value takes `dtype`, or the dtype of what was there; integers and bools keep theirs. An offloaded tensor has its own
    value, and stays where it is put: its hook uses it there, until the model is offloaded anew. `fp16_statistics` become the
    attribute `SCB` of an 8-bit weight. `tied_params_map[address of the value][device]` is reused where it is filled, and
    filled where the address is known. `clear_cache` gives cached memory of an accelerator back.

    Raises AttributeError for an unknown submodule; ValueError for an unknown name, a value of another shape, a tensor on
    meta that should get a device and has no value, and a device this machine does not have.
    """
    target = canonical_device(device)
    if value is not None and not isinstance(value, Tensor):
        raise TypeError(
            f"{tensor_name!r}: the value must be a torch.Tensor, got {value!r}; torch.as_tensor makes one of it"
        )
    owner, name = owner_of(module, tensor_name)
    is_buffer = name in owner._buffers
    old = owner._buffers[name] if is_buffer else owner._parameters.get(name)
    if old is None and not is_buffer and name not in owner._parameters:
        raise ValueError(
            f"{tensor_name!r}: {type(owner).__name__} has no parameter or buffer {name!r}; "
            f"it has {', '.join([*owner._parameters, *owner._buffers]) or 'none'}"
        )
    if old is None:
        if value is None:
            return  # registered as None: nothing to move
        old = value if is_buffer else nn.Parameter(value, requires_grad=value.requires_grad)
    if value is None and is_placeholder(old) and target.type != "meta":
        value = value_behind(old)
    shared = shared_copies(tied_params_map, old if value is None else value)
    if shared is not None and target in shared:
        new = shared[target]
    else:
        wanted = None if dtype is None else _dtype(dtype)
        new = place(old, value, target, name=tensor_name, dtype=wanted, non_blocking=non_blocking)
        if shared is not None:
            shared[target] = new
    if new is not old or value is not None:
        put_tensor(owner, name, new)
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target, non_blocking=non_blocking)  # type: ignore[attr-defined]
    if clear_cache and new is not old and target.type not in ("cpu", "meta"):
        clear_device_cache()


def put_tensor(owner: nn.Module, name: str, tensor: Tensor) -> None:
    """Set `owner`'s own parameter or buffer `name` without the checks of attribute assignment."""
    (owner._buffers if name in owner._buffers else owner._parameters)[name] = tensor  # type: ignore[assignment]
    if isinstance(owner, nn.RNNBase):
        _refresh_flat_weights(owner, name, tensor)


def get_tensor(module: nn.Module, tensor_name: str) -> Tensor | None:
    """The parameter or buffer `tensor_name` (dotted) of `module`, or None if it is registered as None."""
    owner, name = owner_of(module, tensor_name)
    return owner._buffers[name] if name in owner._buffers else owner._parameters[name]


def buffer_names(module: nn.Module, recurse: bool) -> tuple[set[str], set[str]]:
    """All buffers, and those of them that a state dict holds."""
    every, lasting = set(), set()
    owners: Iterable[tuple[str, nn.Module]] = [("", module)]
    if recurse:
        owners = module.named_modules(remove_duplicate=False)
    for path, owner in owners:
        for name in owner._buffers:
            full = f"{path}.{name}" if path else name
            every.add(full)
            if name not in owner._non_persistent_buffers_set:
                lasting.add(full)
    return every, lasting


def place(
    old: Tensor,
    value: Tensor | None,
    device: torch.device,
    *,
    name: str,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
) -> Tensor:
    """`value` (default: `old`'s own) on `device` as a tensor that can take `old`'s place; `old` itself if nothing changes.

    `name` is for messages. Raises ValueError for another shape, and for a value that is on meta and should not be.
    """
    if value is None:
        if old.device == device and dtype in (None, old.dtype):
            return old
        value = old
    if value.is_meta or value.shape != old.shape:
        _check(old, value, device, name)
    if dtype is not None or value.dtype is not old.dtype:
        value = _cast(old, value, dtype)
    try:
        if is_plain(old) and is_plain(value):
            return _place_plain(old, value, device, non_blocking)
        placement = TensorPlacement(old=old, value=value, device=device, non_blocking=non_blocking)
        for applies, placer in _placers:
            if applies(placement):
                return placer(placement)
        return _place_plain(old, value, device, non_blocking)
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is one of the former
        if not _is_missing(device):
            raise
        raise ValueError(f"{name!r} cannot be put on {device}: this machine has no such device") from error


def shared_copies(tied_params_map: TiedParams | None, source: Tensor) -> dict[torch.device, Tensor] | None:
    """What `tied_params_map` has for the memory of `source`; None if nothing can be shared."""
    return None if not tied_params_map or source.is_meta else tied_params_map.get(source.data_ptr())


def is_plain(tensor: Tensor) -> bool:
    """Whether this is a tensor or parameter of torch's own class, or stands for one."""
    kind = type(tensor)
    if kind is not nn.Parameter and kind is not Tensor:
        kind = kind_of(tensor)
    return kind is nn.Parameter or kind is Tensor


def new_like(old: Tensor, data: Tensor) -> Tensor:
    """`data` as a parameter of `old`'s class, with its `requires_grad` and attributes; just `data` if `old` is a buffer."""
    kind = type(old)
    if kind is not nn.Parameter:
        if not isinstance(old, nn.Parameter):
            return data.detach()
        kind = kind_of(old)
    requires_grad = old.requires_grad and _is_float(data)
    if kind is nn.Parameter:
        new: Tensor = nn.Parameter(data, requires_grad)
    else:
        new = torch.Tensor._make_subclass(kind, data.detach(), requires_grad)
    if old.__dict__:
        new.__dict__.update(attributes_of(old))
    return new


def _cast(old: Tensor, value: Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """In the wanted dtype; integers and bools keep theirs if one was asked for, packed weights always."""
    if dtype is None:
        is_packed = kind_of(old).__name__ in _BITSANDBYTES and not _is_float(value)
        return value if is_packed else value.to(old.dtype)
    return value.to(dtype) if _is_float(value) else value


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _place_plain(old: Tensor, value: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
    if value.device != device:
        value = value.detach().to(device, non_blocking=non_blocking)
    return new_like(old, value)


def _place_bitsandbytes(placement: TensorPlacement) -> Tensor:
    """bitsandbytes quantises on the way to the accelerator: rebuild on the CPU with all attributes, then move."""
    kind = kind_of(placement.old)
    accepted = inspect.signature(kind.__new__).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    hung_on = attributes_of(placement.old)
    attributes = {k: v for k, v in hung_on.items() if takes_all or k in accepted}
    data = placement.value.detach()
    if placement.device.type == "meta":
        return new_like(placement.old, data.to("meta"))
    rebuilt: Any = kind
    new = rebuilt(data.to("cpu"), requires_grad=placement.old.requires_grad, **attributes)
    for name, attribute in hung_on.items():
        if name not in accepted:
            setattr(new, name, attribute)
    return new.to(placement.device, non_blocking=placement.non_blocking)


def _place_whole(placement: TensorPlacement) -> Tensor:
    """Tensor subclasses that wrap others (torchao, quanto, DTensor) move as one."""
    source = placement.value
    data = source.to(placement.device, non_blocking=placement.non_blocking)
    if not isinstance(placement.old, nn.Parameter):
        return data
    new = nn.Parameter(data.detach(), requires_grad=placement.old.requires_grad)
    for name, attribute in vars(placement.old).items():
        new.__dict__.setdefault(name, attribute)
    return new


def _is_bitsandbytes(placement: TensorPlacement) -> bool:
    return kind_of(placement.old).__name__ in _BITSANDBYTES


def _is_wrapper(placement: TensorPlacement) -> bool:
    return any(is_traceable_wrapper_subclass(tensor) for tensor in (placement.old, placement.value))


register_placer(_is_wrapper, _place_whole)
register_placer(_is_bitsandbytes, _place_bitsandbytes)


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """The submodule that holds the tensor, and the tensor's name in it. AttributeError for an unknown submodule."""
    if not isinstance(tensor_name, str):
        raise TypeError(f"a tensor name is a str, got {tensor_name!r}")
    path, _, name = tensor_name.rpartition(".")
    if not path:
        return module, name
    try:
        return module.get_submodule(path), name
    except AttributeError as error:
        raise AttributeError(f"{tensor_name!r}: {error}") from None


def _check(old: Tensor, value: Tensor, device: torch.device, name: str) -> None:
    if value.is_meta and device.type != "meta":
        raise ValueError(
            f"{name!r} is on the meta device and has no data: a value is needed to put it on {device}"
        )
    if value.shape != old.shape and kind_of(old).__name__ != "Params4bit":
        raise ValueError(
            f"{name!r}: the value has the shape {tuple(value.shape)}, the module needs {tuple(old.shape)}; "
            "is it the weight of another model or configuration?"
        )


def _is_missing(device: torch.device) -> bool:
    return device.type in known_kinds() and device_count(device) <= (device.index or 0)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} does not name a dtype of torch; give torch.float16 or 'float16'")
    return found


def _refresh_flat_weights(module: nn.RNNBase, name: str, tensor: Tensor) -> None:
    """Recurrent modules keep a second list of their weights; it must name the current ones, placeholders too."""
    names, flat = module._flat_weights_names, list(module._flat_weights)
    if name in names and len(flat) == len(names):
        flat[names.index(name)] = tensor
        module._flat_weights = flat
