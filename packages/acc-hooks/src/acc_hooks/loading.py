"""Loading a state dict into hooked modules: the weights of a block are there until what is below it is loaded, too.

torch loads a module and then each of its children, to which a block's hook is not asked again: only who began the whole
call knows when a block is done. So a block stays loaded until the next one, or until the end of that call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

_running = threading.local()


@contextlib.contextmanager
def whole_load() -> Iterator[None]:
    """Around `load_state_dict` of a hooked module; inside of another one it does nothing."""
    if getattr(_running, "block", None) is not None:
        yield
        return
    with contextlib.ExitStack() as block:
        _running.block = block
        try:
            yield
        finally:
            _running.block = None


def around_load(
    visit: Callable[[], AbstractContextManager[None]], is_block: bool
) -> AbstractContextManager[None]:
    """What is around the loading of a module's own entries: a `visit`, which for a block goes on after them.

    Children of a block that is loaded outside of a `whole_load` write through their placeholders, and torch, which sees
    meta tensors, warns that they do not.
    """
    block: contextlib.ExitStack | None = getattr(_running, "block", None)
    if block is None or not is_block:
        return visit()
    block.close()
    block.enter_context(visit())
    return contextlib.nullcontext()
