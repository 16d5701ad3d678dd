"""Which DeepSpeed plugin a run uses. The run's state is the trainer's, which lies above and says here where to ask for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_ASK: list[Callable[[], Any]] = []  # one at most


def answer_with(ask: Callable[[], Any]) -> None:
    """Let `ask()` give the state of the run from now on: an object with `distributed_type`, or None while there is no run."""
    _ASK[:] = [ask]


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The plugin in use of the run with that `state`, None for one of DeepSpeed's without plugins.

    Raises ValueError where the run does not use DeepSpeed, or none of its plugins was selected.
    """
    if _kind(state) != "DEEPSPEED":
        raise ValueError(
            f"there is no active DeepSpeed plugin: this run is {_kind(state)}. Give the Accelerator a deepspeed_plugin"
        )
    if state.deepspeed_plugins is None:
        return None
    selected = [plugin for plugin in state.deepspeed_plugins.values() if plugin.selected]
    if not selected:
        raise ValueError(
            f"none of the DeepSpeed plugins is selected: call state.select_deepspeed_plugin with one of {', '.join(state.deepspeed_plugins)}"
        )
    return selected[0]


def deepspeed_required(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: calling `func` raises ValueError in a run that does not use DeepSpeed; while there is no run it is called."""

    @functools.wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        state = _ASK[0]() if _ASK else None
        if state is not None and _kind(state) != "DEEPSPEED":
            raise ValueError(
                f"{func.__qualname__} needs a run with DeepSpeed, and this one is {_kind(state)}: give the Accelerator a "
                "deepspeed_plugin before calling it"
            )
        return func(*args, **kwargs)

    return checked


def _kind(state: Any) -> str:
    return str(getattr(state.distributed_type, "value", state.distributed_type))
