"""The cast copies of one module's tensors, where attribute access finds them first, for as long as a call uses them.

[Note: how a cast is lent]
During a forward the cast copies lie in the module's instance dictionary, where attribute access finds them before the
parameters. `_parameters`, `parameters()` and `state_dict()` show the stored weights throughout, and a gradient flows
through the cast to the stored parameter. The calls of one module are counted under a lock, so that threads share one copy.

An interrupt or an error may come anywhere: what is lent is written down before it is lent, taking back may begin again, and
whoever comes in between goes on where the other one stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn


class CastLoan:
    """What is lent now, and to whom."""

    __slots__ = ("buffers", "convert_back", "held", "is_ready", "lock", "parameters", "users")

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may call the module while it is held
        self.users: set[object] = set()
        self.is_ready = False
        self.parameters: LentParameters = []
        self.buffers: list[LentBuffer] = []
        self.convert_back: Callable[[], object] | None = None  # where the module itself was converted
        self.held: list[AbstractContextManager[None]] = []  # offloaded weights, which are here meanwhile

    def use(
        self, make_ready: Callable[[nn.Module], None], module: nn.Module, storage: torch.dtype
    ) -> Generator[None, None, None]:
        """One call: `next` begins it, `close` ends it, and a call that is lost in between is closed when it is freed.

        `make_ready(module)` is called, under the lock, if nothing is lent. The last call takes back what is.
        """
        user = object()
        try:
            with self.lock:
                self.users.add(user)
                if not self.is_ready:
                    make_ready(module)
                    self.is_ready = True
            yield
        finally:
            try:
                self._end(user, storage)
            except BaseException:  # an interrupt, before it was done
                self._end(user, storage)
                raise

    def _end(self, user: object, storage: torch.dtype) -> None:
        with self.lock:
            self.users.discard(user)
            if self.users:
                return
            self.is_ready = False
            take_back(self.parameters, self.buffers, storage)
            if self.convert_back is not None:
                self.convert_back()
                self.convert_back = None
            self.let_go()

    def hold(self, context: AbstractContextManager[None]) -> None:
        """Until `let_go`. What an interrupt keeps from being noted, or left, is left when it is freed.

        Not in an ExitStack, which keeps the frames of an interrupted call in a cycle.
        """
        context.__enter__()
        self.held.append(context)

    def let_go(self) -> None:
        """Leave what is held."""
        while self.held:
            self.held[-1].__exit__(None, None, None)
            self.held.pop()


LentParameters = list[tuple[dict[str, object], str]]  # instance dictionary, name
LentBuffer = tuple[nn.Module, str, Tensor, Tensor, int]  # owner, name, stored, its copy, the copy's version


def lend(
    module: nn.Module,
    storage: torch.dtype,
    compute: torch.dtype,
    parameters: LentParameters,
    buffers: list[LentBuffer],
) -> bool:
    """Put cast copies where attribute access finds them first, and add them to the lists.

    False at the first weight that has no value now; `take_back` then, and after an exception, too.
    """
    cast = _SHORT_CASTS.get(compute) or (lambda tensor: tensor.to(compute))
    is_recording = torch.is_grad_enabled()
    for owner in module.modules() if module._modules else (module,):
        names = owner.__dict__
        for leaf, stored in owner._parameters.items():
            if stored is None or (dtype := stored.dtype) is compute or leaf in names:
                continue
            if dtype is not storage and not dtype.is_floating_point:
                continue
            if stored.is_meta:  # another hook brings it later
                return False
            parameters.append((names, leaf))
            if is_recording or not stored.requires_grad:
                names[leaf] = cast(stored)
            else:
                # another thread's forward may share the copy, and want its gradient
                with torch.enable_grad():
                    names[leaf] = cast(stored)
        for leaf, buffer in owner._buffers.items():
            if buffer is None or (dtype := buffer.dtype) is compute or leaf in names:
                continue
            if dtype is not storage and not dtype.is_floating_point:
                continue
            copy = cast(buffer)
            buffers.append((owner, leaf, buffer, copy, 0 if copy.is_inference() else copy._version))
            names[leaf] = copy
    return True


def take_back(parameters: LentParameters, buffers: list[LentBuffer], storage: torch.dtype) -> None:
    """Undo `lend`, and keep what was written to buffers; may be called again if it was interrupted."""
    for names, leaf in parameters:
        names.pop(leaf, None)  # it is gone if the forward assigned a parameter
    for owner, leaf, stored, copy, version in buffers:
        owner.__dict__.pop(leaf, None)
        if owner._buffers.get(leaf) is not stored:  # the forward assigned another one
            current = owner._buffers.get(leaf)
            if current is not None:
                owner._buffers[leaf] = current.to(storage)
        elif owner.training or copy.is_inference() or copy._version != version:
            # the forward may have written into it; running statistics are written without being counted
            with torch.no_grad():
                stored.copy_(copy)
    parameters.clear()
    buffers.clear()


# half the cost of `.to(dtype)`
_SHORT_CASTS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float64: torch.Tensor.double,
    torch.float32: torch.Tensor.float,
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
}
