"""Weights stored in a small dtype and cast for each forward; see lending.py for how."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from acc_hooks.borrowing import converting
from acc_hooks.hook import ModelHook, add_hook_to_module, attached_hook, iterate_hooks
from acc_hooks.lending import CastLoan, LentBuffer, LentParameters, lend, take_back

SUPPORTED_CLASSES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)

_original_dtype = (
    WeakTensorKeyDictionary()
)  # of each tensor that is stored small, before the first hook that does so


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
        self._is_attached = False
        self._loan = CastLoan()

    def init_hook(self, module: nn.Module) -> nn.Module:
        if self._is_attached:
            raise ValueError(
                f"this casting hook is attached already, and was given to a {type(module).__name__}, too: make one hook "
                "for each module"
            )
        self._original_dtypes = {
            name: _original_dtype.get(tensor, tensor.dtype) for name, _, _, tensor in _floating(module)
        }
        for path, hook in _casting_hooks(module):  # what they found is what the module had
            found = {_joined(path, name): dtype for name, dtype in hook._original_dtypes.items()}
            self._original_dtypes.update(found)
        # recurrent modules keep a second list of their weights, in which lent copies would stay
        self._converts = any(isinstance(below, nn.RNNBase) for below in module.modules())
        module = module.to(self.storage_dtype, non_blocking=self.non_blocking)
        for name, _, _, tensor in _floating(module):
            _original_dtype[tensor] = self._original_dtypes.get(name, tensor.dtype)
        self._is_attached = True
        return module

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
        self._is_attached = False
        stays: set[str] = set()  # what a hook of a module below goes on storing, and gives back later
        for path, hook in _casting_hooks(module):
            if path:
                for name in hook._original_dtypes:
                    full = _joined(path, name)
                    stays.add(full)
                    hook._original_dtypes[name] = self._original_dtypes.get(full, hook._original_dtypes[name])
        for name, owner, leaf, tensor in _floating(module):
            if name in stays:
                continue
            _original_dtype.pop(tensor, None)
            dtype = self._original_dtypes.get(name, tensor.dtype)
            if tensor.dtype == dtype:
                continue
            if isinstance(tensor, nn.Parameter):
                gradient, tensor.grad = tensor.grad, None
                tensor.data = tensor.data.to(dtype)
                tensor.grad = None if gradient is None else gradient.to(dtype)
            else:
                owner._buffers[leaf] = tensor.to(dtype)
        return module

    def _run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_overridden or self.no_grad or torch.compiler.is_compiling():
            return super()._run(module, forward, args, kwargs)
        use = self._loan.use(self._make_ready, module, self.storage_dtype)
        try:
            next(use)
            output = forward(module, *args, **kwargs)
        finally:
            use.close()
        return self._steps(module, output) if type(output) is GeneratorType else output

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        if not self._is_overridden:
            if not torch.compiler.is_compiling():
                use = self._loan.use(self._make_ready, module, self.storage_dtype)
                next(use)
                return args, kwargs, use
            if not self._converts:  # a lock cannot be traced, and one thread traces
                lent: _Lent = ([], [])
                if lend(module, self.storage_dtype, self.compute_dtype, *lent):
                    return args, kwargs, lent
                take_back(*lent, self.storage_dtype)
        try:
            args, kwargs = self._call_pre_forward(module, args, kwargs)
        except BaseException:
            self.post_forward(module, None)
            raise
        return args, kwargs, None

    def _leave(self, module: nn.Module, output: Any, token: Any) -> Any:
        if token is None:
            return self.post_forward(module, output)
        self._abort(module, token)
        if type(output) is GeneratorType and type(token) is GeneratorType:
            return self._steps(module, output)
        return output

    def _abort(self, module: nn.Module, token: Any) -> None:
        if token is None:
            self.post_forward(module, None)
        elif type(token) is tuple:
            take_back(token[0], token[1], self.storage_dtype)
        else:
            token.close()

    def _is_around_call(self) -> bool:
        return True

    @contextlib.contextmanager
    def _around_call(self, module: nn.Module) -> Iterator[None]:
        if self._is_overridden or torch.compiler.is_compiling():
            yield
            return
        use = self._loan.use(self._make_ready, module, self.storage_dtype)
        try:
            next(use)
            yield
        finally:
            use.close()

    def _steps(self, module: nn.Module, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """What a forward that is a generator yields: each of its steps has the cast weights."""
        step: Callable[[], Any] = functools.partial(next, steps)
        while True:
            with self._around_call(module):
                try:
                    item = step()
                except StopIteration as end:
                    return end.value
            try:
                step = functools.partial(steps.send, (yield item))
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:  # noqa: BLE001 - thrown into the generator, which answers it
                step = functools.partial(steps.throw, error)

    def _make_ready(self, module: nn.Module) -> None:
        """Lend, or convert the module where that cannot be."""
        loan, attached = self._loan, attached_hook(module)
        # offloaded weights of the module are here as long as their casts
        if attached is not None and attached is not self:
            for hook in iterate_hooks(attached):
                if hook._holds_weights():
                    loan.hold(hook._around_call(module))
        if not self._converts:
            if lend(module, self.storage_dtype, self.compute_dtype, loan.parameters, loan.buffers):
                return
            take_back(loan.parameters, loan.buffers, self.storage_dtype)  # a module below has no weights now
        loan.convert_back = functools.partial(module.to, self.storage_dtype, non_blocking=self.non_blocking)
        module.to(self.compute_dtype, non_blocking=self.non_blocking)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_loan"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._loan = CastLoan()


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


_Lent = tuple[LentParameters, list[LentBuffer]]


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
