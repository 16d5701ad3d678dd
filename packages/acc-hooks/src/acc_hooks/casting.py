"""Weights stored in a small dtype and cast for each forward.

[Note: how a cast is lent]
During a forward the cast copies lie in the module's instance dictionary, where attribute access finds them before the
parameters. `_parameters`, `parameters()` and `state_dict()` show the stored weights throughout, and a gradient flows
through the cast to the stored parameter. A lock counts the forwards of one module, so that threads share one copy.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from acc_hooks.borrowing import converting
from acc_hooks.hook import ModelHook, add_hook_to_module, attached_hook, iterate_hooks

SUPPORTED_CLASSES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook, own_calls=True):
    """Keeps the floating tensors of a module, and of those below it, in `storage_dtype`, and computes in `compute_dtype`.

    Removing the hook gives each tensor the dtype it had. Gradients arrive on the stored parameters, in `storage_dtype`.
    `pre_forward` and `post_forward` called by hand cast the module itself.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        for name, dtype in (("storage_dtype", storage_dtype), ("compute_dtype", compute_dtype)):
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating torch.dtype, got {dtype!r}")
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._original_dtypes: dict[str, torch.dtype] = {}
        self._converts = False
        self._loan = _Loan()

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._original_dtypes = {name: tensor.dtype for name, _, _, tensor in _floating(module)}
        for path, hook in _casting_hooks(module):  # what they found is what the module had
            found = {_joined(path, name): dtype for name, dtype in hook._original_dtypes.items()}
            self._original_dtypes.update(found)
        # recurrent modules keep a second list of their weights, in which lent copies would stay
        self._converts = any(isinstance(below, nn.RNNBase) for below in module.modules())
        return module.to(self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to(self.storage_dtype, non_blocking=self.non_blocking)
        return output

    @converting()
    def detach_hook(self, module: nn.Module) -> nn.Module:
        stays: set[str] = set()  # what a hook of a module below goes on storing, and gives back later
        for path, hook in _casting_hooks(module):
            if path:
                for name in hook._original_dtypes:
                    full = _joined(path, name)
                    stays.add(full)
                    hook._original_dtypes[name] = self._original_dtypes.get(full, hook._original_dtypes[name])
        for name, owner, leaf, tensor in _floating(module):
            dtype = self._original_dtypes.get(name, tensor.dtype)
            if tensor.dtype == dtype or name in stays:
                continue
            if isinstance(tensor, nn.Parameter):
                gradient, tensor.grad = tensor.grad, None
                tensor.data = tensor.data.to(dtype)
                tensor.grad = None if gradient is None else gradient.to(dtype)
            else:
                owner._buffers[leaf] = tensor.to(dtype)
        return module

    def _run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._converts or self._is_overridden or self.no_grad or torch.compiler.is_compiling():
            return super()._run(module, forward, args, kwargs)
        if not self._begin_forward(module):
            return super()._run(module, forward, args, kwargs)
        try:
            return forward(module, *args, **kwargs)
        finally:
            self._end_forward()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        if not self._converts and not self._is_overridden:
            if torch.compiler.is_compiling():  # a lock cannot be traced, and one thread traces
                lent = self._lend(module)
                if lent is not None:
                    return args, kwargs, lent
            elif self._begin_forward(module):
                return args, kwargs, _COUNTED
        try:
            args, kwargs = self.pre_forward(module, *args, **kwargs)
        except BaseException:
            self.post_forward(module, None)
            raise
        return args, kwargs, None

    def _leave(self, module: nn.Module, output: Any, token: Any) -> Any:
        if token is None:
            return self.post_forward(module, output)
        self._abort(module, token)
        return output

    def _abort(self, module: nn.Module, token: Any) -> None:
        if token is _COUNTED:
            self._end_forward()
        elif token is None:
            self.post_forward(module, None)
        else:
            self._take_back(token)

    def _begin_forward(self, module: nn.Module) -> bool:
        """One more forward uses the lent copies; False if they cannot be lent."""
        loan = self._loan
        with loan.lock:
            if loan.forwards == 0:
                loan.lent = self._lend(module)
            if loan.lent is None:
                return False
            loan.forwards += 1
            return True

    def _end_forward(self) -> None:
        loan = self._loan
        with loan.lock:
            loan.forwards -= 1
            if loan.forwards == 0 and loan.lent is not None:
                lent, loan.lent = loan.lent, None
                self._take_back(lent)

    def _lend(self, module: nn.Module) -> _Lent | None:
        """Put cast copies where attribute access finds them first; None, and nothing done, if a weight has no value now."""
        storage, compute = self.storage_dtype, self.compute_dtype
        cast = _SHORT_CASTS.get(compute) or (lambda tensor: tensor.to(compute))
        is_recording = torch.is_grad_enabled()
        parameters: list[tuple[dict[str, Any], str]] = []
        buffers: list[_LentBuffer] = []
        for owner in module.modules() if module._modules else (module,):
            names = owner.__dict__
            for leaf, stored in owner._parameters.items():
                if stored is None or (dtype := stored.dtype) is compute or leaf in names:
                    continue
                if dtype is not storage and not dtype.is_floating_point:
                    continue
                if stored.is_meta:  # another hook of this module brings it later
                    self._take_back((parameters, buffers))
                    return None
                if is_recording or not stored.requires_grad:
                    names[leaf] = cast(stored)
                else:
                    with (
                        torch.enable_grad()
                    ):  # another thread's forward may share the copy, and want its gradient
                        names[leaf] = cast(stored)
                parameters.append((names, leaf))
            for leaf, buffer in owner._buffers.items():
                if buffer is None or (dtype := buffer.dtype) is compute or leaf in names:
                    continue
                if dtype is not storage and not dtype.is_floating_point:
                    continue
                names[leaf] = copy = cast(buffer)
                buffers.append((owner, leaf, buffer, copy, 0 if copy.is_inference() else copy._version))
        return parameters, buffers

    def _take_back(self, lent: _Lent) -> None:
        parameters, buffers = lent
        for names, leaf in parameters:
            names.pop(leaf, None)  # it is gone if the forward assigned a parameter
        for owner, leaf, stored, copy, version in buffers:
            owner.__dict__.pop(leaf, None)
            if owner._buffers.get(leaf) is not stored:  # the forward assigned another one
                current = owner._buffers.get(leaf)
                if current is not None:
                    owner._buffers[leaf] = current.to(self.storage_dtype)
            elif owner.training or copy.is_inference() or copy._version != version:
                # the forward may have written into it; running statistics are written without being counted
                with torch.no_grad():
                    stored.copy_(copy)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_loan"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._loan = _Loan()


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Append a LayerwiseCastingHook to each linear and convolution layer of `module`, unless it has one.

    Left out, with everything below it: a module whose dotted name one of the patterns finds (`re.search`; a str is one
    pattern), or whose class is among `skip_modules_classes`.
    """
    patterns = (
        (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    )
    searches = [re.compile(pattern) for pattern in patterns]
    classes = tuple(skip_modules_classes or ())
    chosen: dict[int, nn.Module] = {}
    left_out: set[int] = set()
    waiting = [("", module)]
    while waiting:
        name, submodule = waiting.pop()
        if isinstance(submodule, classes) or any(search.search(name) for search in searches):
            left_out.update(id(below) for below in submodule.modules())
        elif isinstance(submodule, SUPPORTED_CLASSES):
            chosen[id(submodule)] = submodule
        else:
            waiting += reversed(
                [(f"{name}.{child}" if name else child, below) for child, below in _children(submodule)]
            )
    for key, layer in chosen.items():
        hooks = iterate_hooks(attached_hook(layer))
        if key not in left_out and not any(isinstance(hook, LayerwiseCastingHook) for hook in hooks):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(layer, hook, append=True)


_LentBuffer = tuple[nn.Module, str, Tensor, Tensor, int]  # owner, name, stored, its copy, the copy's version
_Lent = tuple[list[tuple[dict[str, Any], str]], list[_LentBuffer]]  # parameters: instance dictionary, name
_COUNTED = object()


class _Loan:
    """What is lent now, and to how many forwards; not on the hook, where setting an attribute asks for a new plan."""

    __slots__ = ("forwards", "lent", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.forwards = 0
        self.lent: _Lent | None = None


# half the cost of `.to(dtype)`
_SHORT_CASTS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float64: torch.Tensor.double,
    torch.float32: torch.Tensor.float,
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
}


def _casting_hooks(module: nn.Module) -> Iterator[tuple[str, LayerwiseCastingHook]]:
    """(path, hook) of the casting hooks of the module and of those below it."""
    for path, submodule in module.named_modules():
        for hook in iterate_hooks(attached_hook(submodule)):
            if isinstance(hook, LayerwiseCastingHook):
                yield path, hook


def _joined(path: str, name: str) -> str:
    """A name of `_floating` in a module above, where the module is called `path`."""
    return path + name if not path or name.startswith(".") else f"{path}.{name}"


def _floating(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(full name, owner, name, tensor) of every floating parameter and buffer."""
    for path, owner in module.named_modules():
        for tensors in (owner._parameters, owner._buffers):
            for leaf, tensor in tensors.items():
                if tensor is not None and tensor.is_floating_point():
                    yield f"{path}.{leaf}", owner, leaf, tensor


def _children(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module._modules.items() if child is not None]
