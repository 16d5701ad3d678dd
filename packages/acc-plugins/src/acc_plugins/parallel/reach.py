"""How attention inside a user's model is reached: by a function mode that is there while one of the model's modules runs.

[Note: where the mode comes from] Nothing in torch is replaced. Hooks on every module that has children put a `TorchFunctionMode` on this thread
before it runs and take it away after it, on errors too; only the outermost does. Hooks on the root alone would not do: activation
checkpointing runs a block again within backward, on an accelerator in another thread.

[Note: a region] Context parallelism holds between the doors of `maybe_context_parallel`: `Reach.open` says so. What runs again within backward
does what it did the first time, also when the doors are closed meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from acc_plugins.parallel.attention import Attention
from acc_plugins.parallel.exchange import Line
from acc_plugins.parallel.inputs import fill_in, takes_tokens
from acc_plugins.parallel.losses import is_counted, mean_loss
from acc_plugins.parallel.masks import SequenceError

_ATTENTION = F.scaled_dot_product_attention
_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_here = (
    threading.local()
)  # `modes`: one entry for each module that runs in this thread, the mode it brought or None


class AverageLosses(TorchFunctionMode):
    """While it is on, the mean of a loss is over the targets of all ranks, divided evenly among them."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.line = line

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_counted(func):
            return mean_loss(func, self.line, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class SplitAttention(TorchFunctionMode):
    """While it is on, attention sees the whole sequence. Raises SequenceError for attention that it does not recognise as torch's own."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return self.attention(*args, **kwargs)
        if func in _SOFTMAX:
            self._refuse_by_hand(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            raise SequenceError(
                f"torch's {func.__name__} (nn.MultiheadAttention) attends to this rank's part of the sequence only: use a model that calls "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        return func(*args, **kwargs)

    def _refuse_by_hand(self, input: Tensor, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - softmax's own
        shape = input.shape
        if len(shape) > 2 and shape[-1] == shape[-2] and shape[-1] in self.attention.lengths:
            raise SequenceError(
                f"this model takes a softmax over scores of shape {tuple(shape)}, which is attention to this rank's part of the sequence only: let it "
                "call torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa' in transformers)"
            )


class Reach:
    """One model's attention, split over the ranks of a line while `open`."""

    def __init__(self, attention: Attention, *, open: bool) -> None:
        self.attention = attention
        self.open = open
        self._first_run: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Reach:
        return self  # the ranks are the same for a copy of the model

    def attach(self, model: nn.Module) -> None:
        """Put the hooks on `model`."""
        for module in model.modules():
            if next(module.children(), None) is None and module is not model:
                continue
            module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        modes = _modes()
        modes.append(None)
        if not self._is_on(module):
            return None
        if not any(modes):
            mode = SplitAttention(self.attention)
            mode.__enter__()
            modes[-1] = mode
        if takes_tokens(module):
            return args, fill_in(module, args, kwargs, self.attention)
        return None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002 - a hook's own
        modes = _modes()
        mode = modes.pop() if modes else None
        if mode is not None:
            mode.__exit__(None, None, None)

    def _is_on(self, module: nn.Module) -> bool:
        if torch._C._current_graph_task_id() != -1:  # within a backward: it runs again
            return self._first_run.get(module, self.open)
        self._first_run[module] = self.open
        return self.open


def _modes() -> list[SplitAttention | None]:
    modes: list[SplitAttention | None] | None = getattr(_here, "modes", None)
    if modes is None:
        modes = _here.modes = []
    return modes
