"""The operations of the fake accelerator: torch's own CPU ones on its memory; used by `fake_accelerator.py` only.

[Note: how an operation runs] Torch calls `_run` for every operation that has a tensor of the kind among its arguments and does not consist of smaller ones.
Views need no computation: the CPU's function makes them, since it never looks at the data. Else the tensors' memory is shown to the CPU's
function as CPU tensors, and its new results are copied into memory of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from acc_ops.fake_driver import DISPATCH_KEY, KIND, allocate, current_index, host_view

_CPU = DispatchKeySet(DispatchKey.CPU)
_aten = torch.ops.aten


class Device(Protocol):
    """What the kernels tell and ask. 1 before memory is taken, 2 after, 3 after a copy, 4 where memory shall be kept for a stream, 5 around
    an operation that draws random numbers."""

    def reserve(self, nbytes: int, index: int) -> None: ...
    def took(self, memory: torch.UntypedStorage, index: int) -> None: ...
    def copied(self, source: torch.device, target: torch.device, nbytes: int, non_blocking: bool) -> None: ...
    def keep(self, memory: torch.UntypedStorage, stream: torch.Stream) -> None: ...
    def own_random_numbers(self, index: int) -> AbstractContextManager[None]: ...


_libraries: list[torch.library.Library] = []  # torch forgets the kernels of a library that is dropped
_active: list[Device] = []


def install(device: Device) -> None:
    """Let the kind's operations work, and tell `device` of them."""
    if not _libraries:
        _register()
    _active.append(device)


def uninstall() -> None:
    """Let the kind's operations raise."""
    _active.clear()


def to_host(tensor: Tensor) -> Tensor:
    """A CPU tensor that shares the memory of one of the device."""
    memory = tensor.untyped_storage()
    row = host_view(memory.data_ptr(), memory.nbytes())
    view = torch.empty(0, dtype=tensor.dtype).set_(
        row.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    if tensor.is_conj():
        view = torch._conj(view)
    return torch._neg_view(view) if tensor.is_neg() else view


def _device() -> Device:
    if not _active:
        raise RuntimeError(f"there is no {KIND} device: fake_accelerator() has ended")
    # torch would run a backward on a thread of the device's driver; this belongs to the thread, and every thread comes by here
    torch._C._set_multithreading_enabled(False)
    return _active[-1]


def _index(device: torch.device | None) -> int:
    return current_index() if device is None or device.index is None else device.index


def _like(host: Tensor, index: int) -> Tensor:
    """New memory on the device for a tensor like the CPU tensor `host`, not filled."""
    device = _device()
    nbytes = host.untyped_storage().nbytes()
    nbytes += -nbytes % max(host.element_size(), 1)
    device.reserve(nbytes, index)
    row = allocate(nbytes, index)
    device.took(row.untyped_storage(), index)
    if host.dtype != torch.uint8:
        row = _aten.view.dtype.redispatch(_CPU, row, host.dtype)
    new: Tensor = _aten.as_strided.default.redispatch(
        _CPU, row, host.size(), host.stride(), host.storage_offset()
    )
    return new


def _moved(host: Tensor, index: int) -> Tensor:
    """A tensor on the device with what the CPU tensor `host` holds."""
    if host.numel() < host.untyped_storage().nbytes() // max(host.element_size(), 1):
        host = host.clone()  # a part of something bigger
    new = _like(host, index)
    to_host(new).copy_(host)
    return new


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    schema = op._schema
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return op.redispatch(_CPU, *args, **kwargs)  # a view
    names = [argument.name for argument in schema.arguments]
    named = dict(zip(names, args, strict=False), **kwargs)
    index = _one_device(op, named)
    wide = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in _tensors(args))
    hosts = {
        argument.name: _to_hosts(named[argument.name], argument.type, wide)
        for argument in schema.arguments
        if argument.name in named
    }
    draws = torch.Tag.nondeterministic_seeded in op.tags and hosts.get("generator") is None
    with _device().own_random_numbers(index) if draws else nullcontext():
        results = op(*[hosts[name] for name in names[: len(args)]], **{name: hosts[name] for name in kwargs})
    if op is _aten._local_scalar_dense.default:
        _device().copied(torch.device(KIND, index), torch.device("cpu"), args[0].element_size(), False)
    written = {}  # the name of an alias -> the argument
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named:
            _write_back(named[argument.name], hosts[argument.name])
            written[frozenset(argument.alias_info.before_set)] = named[argument.name]
    single = len(schema.returns) == 1
    answers = [
        written[frozenset(place.alias_info.before_set)] if place.alias_info else _result(result, index)
        for result, place in zip([results] if single else results or (), schema.returns, strict=True)
    ]
    return answers[0] if single else tuple(answers) if answers else None


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _one_device(op: Any, named: dict[str, Any]) -> int:
    """The index of the device that all arguments are on. RuntimeError as torch raises it on real devices."""
    found: torch.device | None = next((v for v in named.values() if isinstance(v, torch.device)), None)
    loose = (
        ("indices",) if op.name().startswith(("aten::index", "aten::_index", "aten::_unsafe_index")) else ()
    )
    for name, value in named.items():
        for tensor in _tensors(value):
            if tensor.device.type == "cpu" and (tensor.ndim == 0 or name in loose):
                continue
            if found is None:
                found = tensor.device
            elif found != tensor.device:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{found} and {tensor.device}! (argument {name} of {op.name()})"
                )
    return _index(found)


def _to_hosts(value: Any, type_: Any, wide: bool) -> Any:
    if isinstance(value, Tensor):
        return to_host(value) if value.device.type == KIND else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return [_to_hosts(part, None, wide) for part in value]
    if isinstance(type_, torch.TensorType) and isinstance(value, (bool, int, float, complex)):
        # torch hands a number that it had made a tensor of over as a number
        return torch.tensor(value, dtype=torch.float64 if wide and isinstance(value, float) else None)
    return value


def _write_back(value: Any, host: Any) -> None:
    """Give what an operation resized its new shape, and memory where it took some."""
    if isinstance(value, (list, tuple)):
        for one, other in zip(value, host, strict=True):
            _write_back(one, other)
    elif isinstance(value, Tensor) and value.device.type == KIND:
        if (
            host.untyped_storage().nbytes()
            and host.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
        ):
            new = _moved(host, value.device.index)
            _set(value, new.untyped_storage(), new.storage_offset(), new.size(), new.stride())
        elif host.size() != value.size() or host.stride() != value.stride():
            _set(value, value.untyped_storage(), host.storage_offset(), host.size(), host.stride())


def _result(result: Any, index: int) -> Any:
    if isinstance(result, Tensor):
        return _moved(result, index)
    if isinstance(result, (list, tuple)):
        return type(result)([_result(part, index) for part in result])
    return result


def _set(
    tensor: Tensor, memory: Any, offset: Any, size: Sequence[int], stride: Sequence[int] = ()
) -> Tensor:  # torch leaves the stride out where it is ()
    _aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, memory, offset, size, stride)
    return tensor


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return _like(torch.empty_strided(size, stride, dtype=dtype), _index(device))


def _empty(
    size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
) -> Tensor:
    format_ = torch.contiguous_format if memory_format is None else memory_format
    return _like(torch.empty(size, dtype=dtype, memory_format=format_), _index(device))


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    there = to_host(target) if target.device.type == KIND else target
    here = to_host(source) if source.device.type == KIND else source
    there.copy_(here)
    if source.device != target.device:
        _device().copied(source.device, target.device, source.numel() * source.element_size(), non_blocking)
    return target


def _resize(tensor: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    format_ = torch.contiguous_format if memory_format is None else memory_format
    wanted = torch.empty(size, dtype=tensor.dtype, memory_format=format_)
    memory, offset = tensor.untyped_storage(), tensor.storage_offset()
    if (offset + wanted.numel()) * tensor.element_size() > memory.nbytes():
        more = torch.empty(offset + wanted.numel(), dtype=tensor.dtype)
        row = more.view(torch.uint8)
        row[: memory.nbytes()] = host_view(memory.data_ptr(), memory.nbytes())
        memory = _moved(more, tensor.device.index).untyped_storage()
    return _set(tensor, memory, offset, wanted.size(), wanted.stride())


def _record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    _device().keep(tensor.untyped_storage(), stream)


def _set_to_tensor(tensor: Tensor, source: Tensor) -> Tensor:
    return _set(tensor, source.untyped_storage(), source.storage_offset(), source.size(), source.stride())


def _set_to_memory(tensor: Tensor, source: Any) -> Tensor:
    return _set(tensor, source, 0, [source.nbytes() // tensor.element_size()], [1])


def _convolution(*args: Any) -> Any:
    return _run(_aten.convolution.default, *args)


def _convolution_backward(grad: Tensor, data: Tensor, weight: Tensor, *args: Any) -> Any:
    transposed, groups = args[3], args[5]
    biases = weight.shape[1] * groups if transposed else weight.shape[0]
    return _run(_aten.convolution_backward.default, grad, data, weight, [biases], *args)


def _register() -> None:
    operations = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "copy_": _copy,
        "resize_": _resize,
        "record_stream": _record_stream,
        "set_.source_Tensor": _set_to_tensor,
        "set_.source_Storage": _set_to_memory,
        "set_.source_Storage_storage_offset": _set,
        "convolution_overrideable": _convolution,
        "convolution_backward_overrideable": _convolution_backward,
    }.items():
        operations.impl(name, kernel, DISPATCH_KEY)
    others = torch.library.Library("_", "IMPL")
    others.fallback(_run, DISPATCH_KEY)
    _libraries.extend((operations, others))
