"""Moving a dispatched model by hand: said aloud, and refused while weights are offloaded."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from acc_hooks.hook import attached_hook
from acc_hooks.ties import every_tensor
from acc_ops.devices import present_kind

logger = logging.getLogger(__name__)


def guard_moves(model: nn.Module) -> None:
    """Replace `model.to`, `cpu`, `to_empty` and the method of the present accelerator; without hooks they are as before."""
    for method in ("to", "cpu", "to_empty", present_kind()):
        if hasattr(type(model), method):
            model.__dict__[method] = GuardedMove(model, method)


class GuardedMove:
    """`model.to` of a dispatched or offloaded model: it warns if dispatched, and refuses while weights are offloaded.

    A change of dtype alone is no move. Once the hooks are gone it does what the model's own method does.

    It holds the model weakly, so that deleting the model frees it, and follows it through copies and pickles.
    """

    goes_with_hooks = True  # acc_hooks.remove_hook_from_module takes it away

    def __init__(self, model: nn.Module, method: str) -> None:
        self._model = weakref.ref(model)
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise RuntimeError(f"the model of this {self._method}() is gone")
        move: Callable[..., Any] = getattr(type(model), self._method)
        if not any(attached_hook(module) for module in model.modules()):
            model.__dict__.pop(self._method, None)  # the hooks are gone: there is nothing to guard
            return move(model, *args, **kwargs)
        if "hf_device_map" in model.__dict__:
            logger.warning(
                "This model was dispatched: moving it takes its parts from the devices of its device map."
            )
        elif self._method == "to" and not _names_device(args, kwargs):
            return move(model, *args, **kwargs)
        offloaded = next((name for name, tensor in every_tensor(model) if tensor.device.type == "meta"), None)
        if offloaded is not None:
            raise RuntimeError(
                f"this model cannot be moved: {offloaded!r} and perhaps more are offloaded. Call "
                "remove_hook_from_module(model, recurse=True) first, which brings the weights back"
            )
        return move(model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedMove:
        model: Any = self._model()
        return GuardedMove(
            memo.get(id(model), model), self._method
        )  # the copy is begun before what hangs on it

    def __reduce__(self) -> tuple[Any, ...]:
        return GuardedMove.__new__, (GuardedMove,), {"model": self._model(), "method": self._method}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = weakref.ref(state["model"])
        self._method = state["method"]


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `to` ask for a device, by itself or as that of a tensor, and not only for a dtype."""
    wishes = [*args, kwargs.get("device"), kwargs.get("tensor")]
    return any(
        isinstance(wish, (str, int, torch.device, torch.Tensor))
        for wish in wishes
        if wish is not None and not isinstance(wish, bool)
    )
