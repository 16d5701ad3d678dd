"""Out of memory: recognise it, clear up after it, and find the batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from acc_ops import devices
from acc_ops.arguments import whole_number

R = TypeVar("R")
logger = logging.getLogger(__name__)

# What torch and the libraries below it say when memory is short, or when cuDNN has no algorithm that fits.
_OUT_OF_MEMORY = re.compile(
    r"\b(CUDA|HIP|XPU|MPS backend|NPU|MLU|MUSA|SDAA|HPU|Neuron)( error:)? out of memory"
    r"|hipErrorOutOfMemory"
    r"|\b(CU|HIP|ROC)(BLAS|DNN|SOLVER|SPARSE|FFT)\w*_ALLOC(ATION)?_FAILED"  # CUBLAS_STATUS_ALLOC_FAILED, CUFFT_ALLOC_FAILED
    r"|CUDNN_STATUS_NOT_SUPPORTED"
    # what making a handle says without room for its workspace, and after a failed kernel, which the next attempt then reports
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublasCreate"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|unable to allocate shared memory"  # what loader workers hand batches over in
    r"|RESOURCE_EXHAUSTED"  # XLA
    r"|(UR_RESULT|PI)_ERROR_OUT_OF_(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)"  # Intel GPUs
    r"|Invalid buffer size: \d"  # Apple GPUs: larger than one buffer can be
    r"|PT_DEVMEM Allocation failed",  # Gaudi
    re.IGNORECASE,
)


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an error says that memory ran out.

    So do torch.OutOfMemoryError, Python's MemoryError (NumPy's too), and a RuntimeError of one argument (torch.AcceleratorError is
    one) with a known phrase; an error raised `from` one of these; and a group of nothing else.
    """
    seen: set[int] = set()
    error: BaseException | None = exception
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if (
            isinstance(error, RuntimeError)
            and len(error.args) == 1
            and _OUT_OF_MEMORY.search(str(error.args[0]))
        ):
            return True
        members = _members(error)
        if members:
            return all(should_reduce_batch_size(member) for member in members)
        error = error.__cause__
    return False


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

    The batch size is the function's first parameter (of a method the one after `self` or `cls`), and callers leave it out. The next size is
    `int(0.9 * size)`, or what `reduce_batch_size_fn()` returns; a warning of this module's logger tells each. What the failed attempt
    held is freed before the next, unless the caller holds it too. The size that fitted is where later calls start.

    RuntimeError when no size is left or the reducer does not reduce; TypeError when the caller passes a batch size, for a coroutine or
    generator function, and for a function that returns something to await; any error that is not about memory passes through.

    Each rank searches by itself: a rank that starts again while others wait for it in a collective does not meet them again. With
    several ranks search before they meet (one rank's share of a step, without gradients' exchange), and take the smallest of
    the sizes: `reduce(torch.tensor(size), "min")`.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    name = getattr(function, "__name__", repr(function))
    parameter, before, limit = _batch_parameter(function, name)
    fitting = start = whole_number(starting_batch_size, "starting_batch_size")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal fitting
        if (limit is not None and len(args) >= limit) or parameter in kwargs:
            shown = ", ".join([repr(arg) for arg in args] + [f"{key}={kwargs[key]!r}" for key in kwargs])
            raise TypeError(
                f"{name} gets its batch size ({parameter}) from find_executable_batch_size: leave it out of the call, "
                f"which was {name}({shown})"
            )
        batch_size = fitting  # this call's own: threads may share the function
        shortage: BaseException | None = None
        while batch_size > 0:
            shortage = None  # an error may hold tensors of its attempt, too
            try:
                return _plain_result(function(*args[:before], batch_size, *args[before:], **kwargs), name)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                shortage, place = error, _place_of(error)
            # after the except block, in which the frames keep the tensors of the failed attempt; what the caller handles stays as it is
            _drop_frames(shortage, sys.exc_info()[1])
            clear_device_cache(garbage_collection=True)
            smaller = _smaller(batch_size, reduce_batch_size_fn, shortage)
            _tell(name, batch_size, smaller, shortage, place)
            batch_size = smaller
            fitting = min(fitting, batch_size)
        raise RuntimeError(f"no batch size fits: {_why_none_is_left(name, start, shortage)}") from shortage

    return run


_COROUTINE = (
    "is a coroutine or generator function, which runs after the call has returned, when nobody can start it again: "
    "decorate a plain function that runs it to its end"
)


def _plain_result(result: Any, name: str) -> Any:
    """`result`; TypeError for what has yet to be awaited, as an object with an async `__call__` or a wrapper of a coroutine returns."""
    if not inspect.isawaitable(result):
        return result
    if inspect.iscoroutine(result):
        result.close()
    raise TypeError(f"{name} {_COROUTINE}; it returned a {type(result).__name__}")


def _why_none_is_left(name: str, start: int, shortage: BaseException | None) -> str:
    if shortage is not None:
        return f"{name} ran out of memory with every size that was tried from {start} on"
    if start < 1:
        return f"{name} was not run, as starting_batch_size={start} is no size; start with at least 1"
    return f"{name} was not run, as an earlier call ran out of memory with every size from {start} on"


def _batch_parameter(function: Callable[..., Any], name: str) -> tuple[str, int, int | None]:
    """The parameter for the batch size, how many come before it (the `self` or `cls` of a method that is not bound yet), and how many
    positional arguments would be one too many (None: any number is fine)."""
    if isinstance(function, classmethod):
        raise TypeError(
            f"{name} is a classmethod already, which cannot be called: write @classmethod above @find_executable_batch_size"
        )
    if not callable(function):
        raise TypeError(f"find_executable_batch_size decorates a function, got {function!r:.60}")
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise TypeError(f"{name} {_COROUTINE}")
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    before = 1 if positional and positional[0].name in ("self", "cls") else 0
    if len(positional) <= before and not takes_any:
        place = f"its first parameter after {positional[0].name}" if before else "its first parameter"
        raise TypeError(f"{name} must take the batch size as {place}, and takes no positional one there")
    parameter = positional[before].name if len(positional) > before else ""
    return parameter, before, (None if takes_any else len(positional))


def _smaller(batch_size: int, reduce_batch_size_fn: Callable[[], int] | None, shortage: BaseException) -> int:
    if reduce_batch_size_fn is None:
        return int(0.9 * batch_size)
    smaller = whole_number(reduce_batch_size_fn(), "what reduce_batch_size_fn() returns")
    if smaller >= batch_size:
        raise RuntimeError(
            f"no batch size fits: memory ran out at {batch_size} and reduce_batch_size_fn() returned {smaller}, which is not smaller"
        ) from shortage
    return smaller


def _tell(name: str, batch_size: int, smaller: int, shortage: BaseException, place: str) -> None:
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    others = torch.distributed.get_world_size() - 1 if spread else 0
    logger.warning(
        "%s ran out of memory with batch size %d, %s. %s: %s%s",
        name,
        batch_size,
        f"trying {smaller}" if smaller > 0 else "and no smaller one is left",
        place,
        (str(shortage) or type(shortage).__name__).splitlines()[0],
        f" ({others} other ranks do not know of this)" if others > 0 else "",
    )


def _place_of(error: BaseException) -> str:
    """The last line outside torch that an error came through, which is forgotten with its frames."""
    place = "nowhere in Python"
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not traceback.tb_frame.f_globals.get("__name__", "").startswith("torch."):
            place = f"{code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def _drop_frames(error: BaseException, outer: BaseException | None) -> None:
    """Take the tracebacks, which keep the failed attempt's tensors alive, from an error and those behind it, up to the `outer` one that was
    being handled before."""
    waiting: list[BaseException | None] = [error]
    seen = {id(outer)}
    while waiting:
        behind = waiting.pop()
        if behind is None or id(behind) in seen:
            continue
        seen.add(id(behind))
        behind.__traceback__ = None
        waiting += [behind.__cause__, behind.__context__, *_members(behind)]


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """The errors in an exception group; nothing for any other."""
    members = getattr(error, "exceptions", ())
    return members if isinstance(members, tuple) else ()
