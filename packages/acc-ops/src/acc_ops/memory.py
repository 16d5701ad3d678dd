"""Out of memory: recognise it, clear up after it, and find the batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from acc_ops import devices

R = TypeVar("R")

# What torch and the libraries below it say when memory is short, or when cuDNN has no algorithm that fits.
_OUT_OF_MEMORY = re.compile(
    r"\b(CUDA|HIP|XPU|MPS backend|NPU|MLU|MUSA|SDAA|HPU|Neuron)( error:)? out of memory"
    r"|CUDNN_STATUS_(NOT_SUPPORTED|ALLOC_FAILED)"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|RESOURCE_EXHAUSTED"  # XLA
    r"|UR_RESULT_ERROR_OUT_OF_(DEVICE_MEMORY|RESOURCES)"  # Intel GPUs
    r"|PT_DEVMEM Allocation failed",  # Gaudi
    re.IGNORECASE,
)


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an error says that memory ran out: torch.OutOfMemoryError, or a RuntimeError of one argument with a known phrase."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    return _OUT_OF_MEMORY.search(str(exception.args[0])) is not None


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the memory that torch keeps in reserve back to the accelerator, after a garbage collection if wanted. Nothing to do on a CPU."""
    if garbage_collection:
        gc.collect()
    devices.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """As many None as there are arguments, after a garbage collection and a cleared cache.

    The caller's names still hold the objects during the call: assign the result to them, `model, batch = release_memory(model, batch)`.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


@overload
def find_executable_batch_size(
    function: Callable[..., R],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., R]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorator: run `function(batch_size, ...)` with a smaller batch size each time memory runs out, until it fits.

    The batch size is the function's first parameter (of a method the one after `self` or `cls`), and callers leave it out. The next size is `int(0.9 * size)`, or what
    `reduce_batch_size_fn()` returns. The size that fitted is where later calls start. RuntimeError when no size is left or the reducer does not
    reduce; TypeError when the caller passes a batch size; any error that is not about memory passes through.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    name = getattr(function, "__name__", repr(function))
    parameter, before, limit = _batch_parameter(function, name)
    batch_size = starting_batch_size

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        if (limit is not None and len(args) >= limit) or parameter in kwargs:
            shown = ", ".join([repr(arg) for arg in args] + [f"{key}={kwargs[key]!r}" for key in kwargs])
            raise TypeError(
                f"{name} gets its batch size ({parameter}) from find_executable_batch_size: leave it out of the call, "
                f"which was {name}({shown})"
            )
        shortage: BaseException | None = None
        while batch_size > 0:
            try:
                return function(*args[:before], batch_size, *args[before:], **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                shortage = _without_frames(error)
            # after the except block, whose frames would keep the tensors of the failed attempt
            clear_device_cache(garbage_collection=True)
            batch_size = _smaller(batch_size, reduce_batch_size_fn)
        raise RuntimeError(f"no batch size fits: {name} ran out of memory down to 0") from shortage

    return run


def _batch_parameter(function: Callable[..., Any], name: str) -> tuple[str, int, int | None]:
    """The parameter for the batch size, how many come before it (the `self` or `cls` of a method that is not bound yet), and how many
    positional arguments would be one too many (None: any number is fine)."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    before = 1 if positional and positional[0].name in ("self", "cls") else 0
    if len(positional) <= before and not takes_any:
        place = f"its first parameter after {positional[0].name}" if before else "its first parameter"
        raise TypeError(f"{name} must take the batch size as {place}, and takes no positional one there")
    parameter = positional[before].name if len(positional) > before else ""
    return parameter, before, (None if takes_any else len(positional))


def _smaller(batch_size: int, reduce_batch_size_fn: Callable[[], int] | None) -> int:
    if reduce_batch_size_fn is None:
        return int(0.9 * batch_size)
    smaller = reduce_batch_size_fn()
    if smaller >= batch_size:
        raise RuntimeError(
            f"no batch size fits: memory ran out at {batch_size} and reduce_batch_size_fn() returned {smaller}, which is not smaller"
        )
    return smaller


def _without_frames(error: BaseException) -> BaseException:
    """The error, and those behind it, without the tracebacks that keep the failed attempt's tensors alive."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        behind = waiting.pop()
        if behind is None or id(behind) in seen:
            continue
        seen.add(id(behind))
        behind.__traceback__ = None
        waiting += [
            behind.__cause__,
            behind.__context__,
            *getattr(behind, "exceptions", ()),
        ]  # those of a group
    return error
