"""How a module with placeholders is copied and pickled: they come back as placeholders, and ties as ties.

A placeholder alone is copied and pickled as its real value, so that `torch.save(dict(model.named_parameters()))` saves
weights. A hooked module stores `again` for its own. Its children without hooks, whose weights it offloads too, are stored
by code that is not ours; so it has their placeholders stored first, between two marks, and copy and pickle, which store no
object twice, refer to what was stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acc_hooks.origin import is_settled, origin_of, root_of, stored_form
from acc_hooks.placeholder import attributes_of, kind_of, make_placeholder


def again(tensor: Any) -> Any:
    """What is stored for `tensor` so that it comes back as a placeholder; anything else is itself.

    So are a view of one, and one whose hook was removed: they are stored as their values.
    """
    origin = origin_of(tensor)
    if origin is None or root_of(tensor) is None or is_settled(tensor):
        return tensor
    if origin.stored is None:
        origin.stored = _Again()
    origin.stored.recipe = (
        kind_of(tensor),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        attributes_of(tensor),
        origin.name,
    )
    return origin.stored


def without_placeholders(state: dict[str, Any], held: Mapping[int, Tensor]) -> dict[str, Any]:
    """The instance dictionary of a module with `again` in the place of each placeholder, and of each tensor in `held`.

    The same dictionary if there is none. `held`: id of a tensor -> its placeholder.
    """

    def stored(tensor: Any) -> Any:
        return again(held.get(id(tensor), tensor))

    changed: dict[str, Any] = {}
    for key in ("_parameters", "_buffers"):
        tensors = state.get(key) or {}
        new = {name: stored(tensor) for name, tensor in tensors.items()}
        if any(new[name] is not tensor for name, tensor in tensors.items()):
            changed[key] = type(tensors)(new)
    flat = state.get("_flat_weights") or ()
    if any(stored(tensor) is not tensor for tensor in flat):
        changed["_flat_weights"] = [stored(tensor) for tensor in flat]
    return {**state, **changed} if changed else state


def placeholders_below(module: nn.Module, is_hooked: Callable[[nn.Module], bool]) -> list[Any]:
    """What is stored before a module so that its children without hooks keep their placeholders."""
    found: dict[int, Tensor] = {}
    waiting = list(module._modules.values())
    while waiting:
        child = waiting.pop()
        if child is None or is_hooked(child):
            continue
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None and again(tensor) is not tensor:
                found[id(tensor)] = tensor
        waiting += child._modules.values()
    return [part for tensor in found.values() for part in (_Mark(tensor), tensor, _Mark(None))]


class _Again:
    """Copies and pickles as a new placeholder; there is one for each placeholder, so that ties stay ties."""

    recipe: tuple[Any, ...] = ()

    def __reduce__(self) -> Any:
        return _make_again, self.recipe


class _Mark:
    """When it is stored, the placeholder is stored as a placeholder from now on; None: none is any more."""

    def __init__(self, placeholder: Tensor | None) -> None:
        self._placeholder = placeholder

    def __reduce__(self) -> Any:
        stored_form.placeholder, stored_form.stored = self._placeholder, again(self._placeholder)
        return _nothing, ()


def _nothing() -> None:
    """What is left of a mark."""


def _make_again(
    kind: type[Tensor],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    requires_grad: bool,
    attributes: Mapping[str, Any],
    name: str,
) -> Tensor:
    data = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return make_placeholder(kind, data, requires_grad, attributes, name)
