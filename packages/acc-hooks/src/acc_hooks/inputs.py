"""Arguments go to the device of the module that wants them, and a tensor given to many layers travels once.

The copies made during one outermost forward are remembered per thread, for as long as the original lives. A copy is used
again only if neither it nor the original was written to since, and not across a change of the gradient mode. Others, too,
can let go of something at the end of that forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acc_hooks.together import call_all
from acc_ops.tree import recursively_apply, send_to_device

# as arguments they are on every device
PLAIN_TYPES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})

_NOTHING: dict[Any, Any] = {}

_Copies = dict[tuple[int, torch.device, bool], tuple["weakref.ref[Tensor]", int, Tensor, int]]


class _Forward(threading.local):
    """What this thread's outermost forward remembers."""

    copies: _Copies | None = None
    at_end: tuple[Callable[[], None], ...] = ()


_forward = _Forward()


def begin_forward() -> bool:
    """Start to remember copies unless an outer forward of this thread does; True asks for `end_forward`."""
    if runs_forward():
        return False
    _forward.copies = {}
    return True


def runs_forward() -> bool:
    """Whether a hooked forward runs in this thread, or nobody may ask because torch.compile traces."""
    return torch.compiler.is_compiling() or _forward.copies is not None


def end_forward() -> None:
    """The outermost forward is over, also when it raised."""
    copies, at_end = _forward.copies, _forward.at_end
    _forward.copies, _forward.at_end = None, ()
    if copies:
        copies.clear()  # its weak references refer to it: a cycle would keep the copies on the device
    if at_end:
        call_all(at_end)


def at_end_of_forward(call: Callable[[], None]) -> bool:
    """Have `call()` called in `end_forward`; False if no hooked forward runs in this thread."""
    if _forward.copies is None:
        return False
    _forward.at_end += (call,)
    return True


def are_on(args: Sequence[Any], kwargs: Mapping[Any, Any], device: torch.device) -> bool:
    """Whether there are only tensors on `device` and numbers, also inside of plain lists, tuples and dicts."""
    for value in args:
        kind = type(value)
        if not (
            value.device == device
            if kind is Tensor
            else kind in PLAIN_TYPES or _are_inside_on(value, kind, device)
        ):
            return False
    for value in kwargs.values():  # the same; one loop over both costs a layer a tenth of a microsecond
        kind = type(value)
        if not (
            value.device == device
            if kind is Tensor
            else kind in PLAIN_TYPES or _are_inside_on(value, kind, device)
        ):
            return False
    return True


def _are_inside_on(value: Any, kind: type, device: torch.device) -> bool:
    if kind is dict:
        return are_on((), value, device)
    return (kind is list or kind is tuple) and are_on(value, _NOTHING, device)


def move(data: Any, device: torch.device, skip_keys: str | Sequence[str] | None = None) -> Any:
    """`data` with every tensor on `device`; the very same object where nothing had to move."""
    if type(data) is Tensor and data.device == device:
        return data
    copies = None if torch.compiler.is_compiling() else _forward.copies
    if copies is not None:
        data = _move_tensors(data, device, skip_keys, copies)
    return send_to_device(data, device, skip_keys=skip_keys)


def bring_back(output: Any, device: torch.device | None, skip_keys: str | list[str] | None) -> Any:
    """The output on the device of the input, if that is to be."""
    if device is None or (type(output) is Tensor and output.device == device):
        return output
    return move(output, device, skip_keys)


def _move_tensors(
    data: Any, device: torch.device, skip_keys: str | Sequence[str] | None, copies: _Copies
) -> Any:
    if isinstance(data, Mapping) and skip_keys and type(data) is dict:
        skipped = (skip_keys,) if isinstance(skip_keys, str) else skip_keys
        moved = {
            key: value if key in skipped else _move_tensors(value, device, skip_keys, copies)
            for key, value in data.items()
        }
        return data if all(moved[key] is value for key, value in data.items()) else moved
    if skip_keys and not isinstance(data, (Tensor, list, tuple)):
        return data  # send_to_device looks at the keys inside
    if skip_keys and type(data) in (list, tuple):
        items = [_move_tensors(item, device, skip_keys, copies) for item in data]
        return data if all(new is old for new, old in zip(items, data, strict=True)) else type(data)(items)
    return recursively_apply(lambda t: t if t.device == device else _copy_on(t, device, copies), data)


def _copy_on(tensor: Tensor, device: torch.device, copies: _Copies) -> Tensor:
    if tensor.is_inference():  # nothing tells whether it was written to
        return tensor.to(device)
    key = (id(tensor), device, torch.is_grad_enabled())
    made = copies.get(key)
    if made is not None:
        original, version, copy, copy_version = made
        if original() is tensor and tensor._version == version and copy._version == copy_version:
            return copy
    copy = tensor.to(device)
    if not copy.is_inference():
        forget = weakref.ref(tensor, lambda _: copies.pop(key, None))
        copies[key] = (forget, tensor._version, copy, copy._version)
    return copy
