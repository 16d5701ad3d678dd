"""Placeholders where somebody else put them: under another name, in another module, in a state dict, and after their hook.

Tying, pruning and parametrizing move a placeholder. While its hook is there it works wherever it is. When the hook is
removed the placeholder is settled: it stands for the tensor that the weight has become, which it keeps alive, and what
`remove_hook_from_module` finds of it below the module is replaced by that tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from acc_hooks.origin import Home, Source, is_settled, origin_of, root_of
from acc_hooks.placeholder import is_placeholder, kind_of, value_behind
from acc_hooks.tensors import put_tensor


def settle(placeholder: Tensor, source: Source | None, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`source` answers for the placeholder no longer; `make` gives the tensor that it became, and is asked once.

    Returns what gives that tensor.
    """
    settled = _Settled(make)
    origin = origin_of(placeholder)
    if origin is not None:
        for reference in origin.sources:
            if reference() is source:
                origin.sources.remove(reference)
                break
        origin.settled = settled
    return settled


def home_behind(placeholder: Tensor) -> Home:
    """Where the value of a placeholder is kept: a tensor that stays, or a weights map and the key in it. Nothing is read.

    OffloadedWeightError if nobody has it.
    """
    root = root_of(placeholder)
    origin = None if root is None else origin_of(root)
    if root is None or origin is None:  # a view of a part
        return value_behind(placeholder)
    for source in origin.living_sources():
        home = source._home_behind(root)
        if home is not None:
            return home
    return value_behind(root)


def bring_home(module: nn.Module) -> None:
    """Put the tensors that settled placeholders became into `module` and the modules below it."""
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and is_settled(tensor):
                    put_tensor(owner, name, _became(tensor))


def fill_state_dict(destination: dict[str, Any], prefix: str) -> None:
    """Replace the placeholders among the last entries, those under `prefix`, by the values that they stand for."""
    for key in reversed(destination):
        if not key.startswith(prefix):
            break
        entry = destination[key]
        if is_placeholder(entry):
            destination[key] = value_behind(entry).detach()


class _Settled:
    """Makes a tensor when it is asked for the first time, and lets go of what it is made from."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make: Callable[[], Tensor] | None = make
        self._tensor: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._make is not None:
            self._tensor, self._make = self._make(), None
        assert self._tensor is not None
        return self._tensor


def _became(placeholder: Tensor) -> Tensor:
    value = value_behind(placeholder)
    if kind_of(placeholder) is nn.Parameter and not isinstance(value, nn.Parameter):
        return nn.Parameter(value, placeholder.requires_grad)
    return value
