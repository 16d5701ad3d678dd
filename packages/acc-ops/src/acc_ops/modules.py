"""Look into modules: their tensors, buffers, children and devices. Also the door to the sizes, regions and wrappers of a module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import nn

from acc_ops.unwrap import extract_model_from_parallel


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the parameters, then of the buffers; those of submodules too with `recurse`.

    `remove_non_persistent` leaves out the buffers that no state dict holds.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else ()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """The names of buffers that are not in the state dict, in a new set; with `fqns` the names have their modules' paths."""
    if not recurse:
        return set(module._non_persistent_buffers_set)
    names: set[str] = set()
    for path, submodule in module.named_modules():
        prefix = f"{path}." if fqns and path else ""
        names.update(prefix + name for name in submodule._non_persistent_buffers_set)
    return names


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """(device, storage pointer, storage bytes): equal exactly for tensors that share their storage.

    Where the storage has no address (meta, empty) the pointer is that of torch's storage object; a tensor subclass without a storage has its own
    identity.
    """
    local = getattr(tensor, "_local_tensor", None)  # a DTensor's shard on this rank
    if isinstance(local, torch.Tensor):
        tensor = local
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return tensor.device, id(tensor), tensor.nbytes
    try:
        pointer = 0 if tensor.device.type == "meta" else storage.data_ptr()
    except RuntimeError:  # a fake tensor's storage has no memory behind it
        pointer = 0
    return tensor.device, pointer or storage._cdata, storage.nbytes()


def check_device_same(
    first_device: torch.device | str | int, second_device: torch.device | str | int
) -> bool:
    """Whether two devices are one; a missing index counts as 0, and the CPU's index does not count."""
    first, second = torch.device(first_device), torch.device(second_device)
    if first.type != second.type:
        return False
    return first.type == "cpu" or (first.index or 0) == (second.index or 0)


@overload
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: Literal[False] = False
) -> list[nn.Module]: ...
@overload
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: Literal[True]
) -> list[tuple[str, nn.Module]]: ...
def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules, each once, children before their parents and the model last; with `return_fqns` as (path, module), the model's path being ''."""
    ordered: list[tuple[str, nn.Module]] = []
    seen = {model}
    # (path, module, its children still to be walked); a stack, so that depth does not end at Python's recursion limit
    stack = [("", model, iter(list(model.named_children())))]
    while stack:
        path, module, children = stack[-1]
        for name, child in children:
            if child not in seen:
                seen.add(child)
                stack.append((f"{path}.{name}" if path else name, child, iter(list(child.named_children()))))
                break
        else:
            stack.pop()
            ordered.append((path, module))
    return list(ordered) if return_fqns else [module for _, module in ordered]


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether any parameter is a DTensor."""
    tensor = sys.modules.get("torch.distributed.tensor")  # without that module there can be none
    if tensor is None:
        return False
    return any(isinstance(parameter, tensor.DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """The tensor-parallel size a model says it was loaded with (`tp_size`, or its config's `distributed_config`), or None."""
    size = getattr(model, "tp_size", None)
    if size is None:
        config = getattr(getattr(model, "config", None), "distributed_config", None)
        size = config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)
    return size


def is_peft_model(model: Any) -> bool:
    """Whether the model, out of its wrappers, is a PeftModel."""
    peft = sys.modules.get("peft")  # without that module there can be none
    if peft is None or not hasattr(peft, "PeftModel"):
        return False
    return isinstance(extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel)
