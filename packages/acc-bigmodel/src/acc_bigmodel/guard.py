"""Moving a dispatched model by hand: said aloud, and refused while weights are offloaded."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from acc_bigmodel.placement import CPU
from acc_hooks.ties import every_tensor
from acc_ops.devices import present_kind

logger = logging.getLogger(__name__)


def guard_moves(model: nn.Module) -> None:
    """Replace `model.to` and the method of the present accelerator; removing the hooks takes this away."""
    kind = present_kind()
    for method in ("to", *([kind] if kind not in (CPU, "mps") and hasattr(model, kind) else [])):
        model.__dict__[method] = GuardedMove(model, method)


class GuardedMove:
    """`model.to` of a dispatched model: it warns, and refuses while weights are offloaded.

    It holds the model weakly, so that deleting the model frees it, and follows it through copies and pickles.
    """

    def __init__(self, model: nn.Module, method: str) -> None:
        self._model = weakref.ref(model)
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise RuntimeError(f"the model of this {self._method}() is gone")
        logger.warning(
            "This model was dispatched: moving it takes its parts from the devices of its device map."
        )
        offloaded = next((name for name, tensor in every_tensor(model) if tensor.device.type == "meta"), None)
        if offloaded is not None:
            raise RuntimeError(
                f"this model cannot be moved: {offloaded!r} and perhaps more are offloaded. Call "
                "remove_hook_from_module(model, recurse=True) first, which brings the weights back"
            )
        move: Callable[..., Any] = getattr(type(model), self._method)
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
