"""Out of memory."""

from __future__ import annotations

import gc
import inspect
import logging
import pickle
import sys
import threading
import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acc_ops import memory
from acc_ops.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
from acc_ops.testing import count_calls, run_threads

SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB"


def caused(error, by):
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(SHORT),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory. (out of memory)"),
        torch.OutOfMemoryError("anything", "at all"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: 1 bytes"
        ),
        RuntimeError("XPU out of memory. Tried to allocate"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"),
        RuntimeError("RESOURCE_EXHAUSTED: Attempting to reserve 1G"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        RuntimeError("Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)"),
        RuntimeError("Invalid buffer size: 24.00 GiB"),
        RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB"),
        RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
        ),
        RuntimeError(
            "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback: CUDA out of memory. x"
        ),
        MemoryError(),
        caused(KeyError("step"), by=RuntimeError(SHORT)),
        caused(ValueError("a"), by=caused(TypeError("b"), by=MemoryError())),
    ],
)
def test_shortage_of_memory_is_recognised(error):
    assert should_reduce_batch_size(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError(SHORT, "and something else"),
        RuntimeError(),
        ValueError(SHORT),
        RuntimeError("the shop is out of memory cards"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa)`"),
        caused(RuntimeError("a"), by=ValueError(SHORT)),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not(error):
    assert not should_reduce_batch_size(error)


def limited(limit, tried, error=SHORT):
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > limit:
            raise RuntimeError(error)
        return batch_size

    return train


def test_the_size_shrinks_by_a_tenth_until_it_fits_and_stays():
    tried = []
    train = find_executable_batch_size(limited(80, tried), starting_batch_size=128)
    assert train() == 73
    assert tried == [128, 115, 103, 92, 82, 73]
    assert train() == 73
    assert tried[-2:] == [73, 73]


def test_the_given_reducer_is_used_in_both_forms():
    for decorate in (
        lambda f, reducer: find_executable_batch_size(f, 64, reducer),
        lambda f, reducer: find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=reducer)(
            f
        ),
    ):
        tried, sizes = [], iter([32, 16, 8])
        assert decorate(limited(10, tried), lambda sizes=sizes: next(sizes))() == 8
        assert tried == [64, 32, 16, 8]


@given(st.integers(1, 300), st.integers(1, 300))
def test_any_size_that_fits_is_found(start, limit):
    with mock.patch.object(memory, "clear_device_cache"):  # a full collection each time takes long
        found = find_executable_batch_size(limited(limit, []), starting_batch_size=start)()
    assert found <= min(start, limit)
    assert found == start or int(found / 0.9) + 2 > limit


def test_when_nothing_fits_the_last_shortage_is_the_cause():
    with pytest.raises(RuntimeError, match="no batch size fits") as caught:
        find_executable_batch_size(limited(0, []), starting_batch_size=4)()
    assert str(caught.value.__cause__) == SHORT


def test_a_reducer_that_does_not_reduce_ends_the_search():
    tried = []
    with pytest.raises(RuntimeError, match=r"8 and reduce_batch_size_fn\(\) returned 8"):
        find_executable_batch_size(limited(0, tried), 8, lambda: 8)()
    assert tried == [8]


def test_arguments_reach_the_function():
    @find_executable_batch_size(starting_batch_size=8)
    def run(batch_size, *items, flag=False):
        if batch_size > 4:
            raise RuntimeError(SHORT)
        return batch_size, items, flag

    assert run("a", "b", flag=True) == (4, ("a", "b"), True)


def test_defaults_may_be_left_out_or_given():
    @find_executable_batch_size
    def run(batch_size, rate=0.1):
        return batch_size, rate

    assert run() == (128, 0.1)
    assert run(0.2) == (128, 0.2)


def test_a_caller_that_passes_the_batch_size_is_told():
    @find_executable_batch_size
    def run(batch_size, rate):
        return batch_size, rate

    with pytest.raises(TypeError, match=r"leave it out.*run\(16, 0.1\)"):
        run(16, 0.1)
    with pytest.raises(TypeError, match=r"run\(0.1, batch_size=16\)"):
        run(0.1, batch_size=16)


def test_a_function_without_parameters_is_refused_at_once():
    with pytest.raises(TypeError, match="first parameter"):

        @find_executable_batch_size
        def run():
            return 1


def test_other_errors_pass_through_untouched():
    @find_executable_batch_size
    def run(batch_size):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()


def test_the_wrapper_looks_like_the_function():
    @find_executable_batch_size
    def run(batch_size):
        """Train."""

    assert (run.__name__, run.__doc__) == ("run", "Train.")
    assert run.__wrapped__.__name__ == "run"


def test_tensors_of_a_failed_attempt_are_gone_before_the_next():
    alive, seen = [], []

    @find_executable_batch_size(starting_batch_size=2)
    def run(batch_size):
        seen.append([reference() is not None for reference in alive])
        held = torch.ones(4)
        alive.append(weakref.ref(held))
        if batch_size > 1:
            raise RuntimeError(SHORT)
        return batch_size

    run()
    assert seen == [[], [False]]


def test_nothing_is_collected_when_it_fits(monkeypatch):
    monkeypatch.setattr(memory, "clear_device_cache", lambda **_: pytest.fail("costly"))
    run = find_executable_batch_size(limited(128, []))
    run()
    assert count_calls(run) < 30


def test_release_memory_gives_as_many_nones():
    first, second = torch.ones(2), object()
    reference = weakref.ref(first)
    first, second = release_memory(first, second)
    assert first is second is None
    assert reference() is None
    assert release_memory() == []


def test_cycles_are_collected_only_when_asked_for():
    class Node:
        pass

    gc.disable()
    try:
        node = Node()
        node.self = node
        reference = weakref.ref(node)
        del node
        clear_device_cache()
        assert reference() is not None
        clear_device_cache(garbage_collection=True)
        assert reference() is None
    finally:
        gc.enable()


def test_a_method_gets_the_size_after_self_however_it_is_called():
    class Trainer:
        @find_executable_batch_size(starting_batch_size=8)
        def train(self, batch_size, *, scale=1):
            if batch_size > 4:
                raise RuntimeError(SHORT)
            return self, batch_size * scale

        @classmethod
        @find_executable_batch_size(starting_batch_size=6)
        def build(cls, batch_size, x):
            return cls, batch_size, x

        @staticmethod
        @find_executable_batch_size(starting_batch_size=5)
        def plain(batch_size):
            return batch_size

        def bound(self, batch_size):
            return self, batch_size

    class Child(Trainer):
        def train(self):
            return super().train(scale=10)

    trainer, child = Trainer(), Child()
    assert trainer.train() == (trainer, 4)
    assert Trainer.train(trainer, scale=2) == (trainer, 8)
    assert child.train() == (child, 40)
    assert Child.build("x") == (Child, 6, "x")
    assert trainer.plain() == Trainer.plain() == 5
    assert find_executable_batch_size(trainer.bound, 3)() == (trainer, 3)
    with pytest.raises(TypeError, match="leave it out"):
        trainer.train(4)
    with pytest.raises(TypeError, match="first parameter after self"):
        find_executable_batch_size(lambda self: 1)


def test_the_frames_behind_a_cause_and_a_context_are_let_go_too():
    alive, seen = [], []

    def fail():
        held = torch.ones(4)
        alive.append(weakref.ref(held))
        raise KeyError(held.shape)

    @find_executable_batch_size(starting_batch_size=2)
    def run(batch_size):
        seen.append([reference() is not None for reference in alive])
        if batch_size == 1:
            return batch_size
        try:
            fail()
        except KeyError:
            raise RuntimeError(SHORT) from ValueError("a cause that was never raised")

    run()
    assert seen == [[], [False]]


@pytest.mark.parametrize("work", [lambda: torch.empty(2**58), lambda: [0] * 10**14, lambda: bytearray(2**50)])
def test_what_this_machine_says_without_memory_is_recognised(work):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        work()
    assert should_reduce_batch_size(caught.value)


def test_numpys_own_error_is_recognised():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(MemoryError) as caught:
        numpy.empty(2**50)
    assert should_reduce_batch_size(caught.value)


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch before 2.8")
def test_an_accelerators_error_is_judged_by_its_text():
    assert should_reduce_batch_size(torch.AcceleratorError("CUDA error: out of memory"))
    assert not should_reduce_batch_size(torch.AcceleratorError("CUDA error: an illegal memory access"))


def test_an_error_that_was_only_being_handled_does_not_count():
    with pytest.raises(ValueError, match="mine") as caught:
        try:
            raise RuntimeError(SHORT)
        except RuntimeError:
            raise ValueError("mine")  # noqa: B904 - without a cause is the point
    assert not should_reduce_batch_size(caught.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups")
def test_a_group_counts_when_all_its_errors_do():
    short, other = RuntimeError(SHORT), KeyError("x")
    group = ExceptionGroup  # noqa: F821 - of Python 3.11
    assert should_reduce_batch_size(group("g", [short, group("h", [MemoryError()])]))
    assert not should_reduce_batch_size(group("g", [short, other]))


def test_a_circle_of_causes_ends():
    one, two = KeyError(1), KeyError(2)
    one.__cause__, two.__cause__ = two, one
    assert not should_reduce_batch_size(one)


def test_each_retry_is_told_with_sizes_place_and_reason(caplog):
    train = find_executable_batch_size(limited(103, []), starting_batch_size=128)
    with caplog.at_level(logging.WARNING, logger="acc_ops.memory"):
        train()
    line = limited.__code__.co_firstlineno + 4  # of the raise
    assert caplog.messages == [
        f"train ran out of memory with batch size {size}, trying {smaller}. {__file__}:{line}: {SHORT}"
        for size, smaller in [(128, 115), (115, 103)]
    ]
    caplog.clear()
    train()
    assert caplog.messages == []
    with pytest.raises(RuntimeError, match="no batch size fits"):
        find_executable_batch_size(limited(0, []), 1)()
    assert "no smaller one is left" in caplog.messages[0]


def holding(alive, fail):
    """A function that reports whether tensors of earlier attempts are alive when it is called, and then fails by `fail(held, batch_size)`."""
    seen = []

    def run(batch_size):
        seen.append([reference() is not None for reference in alive])
        if batch_size > 2:
            held = torch.ones(batch_size, requires_grad=True)
            alive.append(weakref.ref(held))
            fail(held, batch_size)
        return batch_size

    return run, seen


def fail_in_a_generator(held, batch_size):
    def numbers():
        inner = held * 2
        yield inner
        raise RuntimeError(SHORT)

    for number in numbers():
        number.sum().backward()


def fail_and_keep_the_error_in_a_circle(held, batch_size):
    try:
        raise RuntimeError(SHORT)
    except RuntimeError as error:
        kept = error  # noqa: F841 - frame -> kept -> traceback -> frame
        raise


def fail_in_a_nested_search(held, batch_size):
    @find_executable_batch_size(starting_batch_size=2)
    def inner(size):
        more = held + size
        raise RuntimeError(SHORT, more) if size == 99 else RuntimeError(SHORT)

    inner()


def fail_in_a_finally(held, batch_size):
    try:
        raise KeyError(held)
    finally:
        raise RuntimeError(SHORT)


def fail_in_backward(held, batch_size):
    class Short(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError(SHORT)

    Short.apply(held).sum().backward()


def fail_in_a_group(held, batch_size):
    errors = []
    for _ in range(2):
        try:
            more = held + 1
            raise RuntimeError(SHORT + "x" * more.ndim)
        except RuntimeError as error:
            errors.append(error)
    raise ExceptionGroup("both", errors)  # noqa: F821 - of Python 3.11


@pytest.mark.parametrize(
    "fail",
    [
        fail_in_a_generator,
        fail_in_a_nested_search,  # which ends with an error that has a shortage as its cause, so the outer one goes on
        fail_and_keep_the_error_in_a_circle,
        fail_in_a_finally,
        fail_in_backward,
        pytest.param(
            fail_in_a_group, marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups")
        ),
    ],
)
def test_nothing_of_an_attempt_is_alive_in_the_next_however_it_failed(fail):
    alive = []
    run, seen = holding(alive, fail)
    assert find_executable_batch_size(run, 4)() == 2
    assert seen == [[], [False], [False, False]]


def test_the_error_that_the_caller_is_handling_keeps_its_traceback():
    tracebacks = []
    alive = []
    run, seen = holding(alive, fail_in_a_finally)
    for search in (find_executable_batch_size(limited(2, []), 4), find_executable_batch_size(run, 4)):
        try:
            raise KeyError("the caller's")
        except KeyError as outer:
            assert search() == 2
            tracebacks.append(outer.__traceback__)
    assert None not in tracebacks
    assert seen == [[], [False], [False, False]]


def test_the_end_of_the_search_can_be_pickled_and_has_no_frames_of_the_attempts():
    with pytest.raises(RuntimeError) as caught:
        find_executable_batch_size(limited(0, []), 2)()
    assert caught.value.__cause__.__traceback__ is None
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("returned", [None, 3.5, "4"])
def test_a_reducer_that_returns_no_whole_number_is_told(returned):
    with pytest.raises(TypeError, match=r"reduce_batch_size_fn\(\) returns must be a whole number, got"):
        find_executable_batch_size(limited(0, []), 8, lambda: returned)()


def test_a_starting_size_that_is_no_number_is_told_at_once():
    with pytest.raises(TypeError, match="starting_batch_size must be a whole number, got '8'"):
        find_executable_batch_size(limited(0, []), "8")


@pytest.mark.parametrize("start", [0, -3])
def test_a_size_that_leaves_nothing_to_try_is_told(start):
    tried = []
    with pytest.raises(RuntimeError, match=rf"was not run, as starting_batch_size={start} is no size"):
        find_executable_batch_size(limited(9, tried), start)()
    assert tried == []


def test_a_call_after_one_in_which_nothing_fitted_says_so():
    function = find_executable_batch_size(limited(0, []), 4)
    with pytest.raises(RuntimeError, match="ran out of memory with every size that was tried from 4 on"):
        function()
    with pytest.raises(RuntimeError, match="was not run, as an earlier call ran out of memory"):
        function()


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="write @classmethod above @find_executable_batch_size"):
        find_executable_batch_size(classmethod(lambda cls, batch_size: batch_size))
    with pytest.raises(TypeError, match="decorates a function, got 3"):
        find_executable_batch_size(3)


def test_what_returns_a_coroutine_without_looking_like_it_is_refused():
    async def coroutine(batch_size):
        return batch_size

    class Called:
        async def __call__(self, batch_size):
            return batch_size

    for function in (Called(), lambda batch_size: coroutine(batch_size)):
        with pytest.raises(TypeError, match=r"is a coroutine or generator.*it returned a coroutine"):
            find_executable_batch_size(function)()


def test_what_would_run_after_the_call_is_refused():
    async def coroutine(batch_size):
        return batch_size

    def generator(batch_size):
        yield batch_size

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match=f"{function.__name__} is a coroutine or generator"):
            find_executable_batch_size(function)


def test_threads_that_share_the_function_each_try_every_size():
    gate = threading.Barrier(2)
    tried = {0: [], 1: []}

    def work():
        mine = tried[threading.current_thread().index]
        return train(mine)

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size, mine):
        mine.append(batch_size)
        if batch_size == 100:
            gate.wait(10)  # both have begun
        if batch_size > 85:
            raise RuntimeError(SHORT)
        return batch_size

    def start():
        from acc_ops.world import current_world

        threading.current_thread().index = current_world().rank
        return work()

    assert run_threads(2, start) == [81, 81]
    assert tried == {0: [100, 90, 81], 1: [100, 90, 81]}


def test_the_signature_is_kept_for_help():
    def run(batch_size, *items):
        return batch_size, items

    assert inspect.signature(find_executable_batch_size(run)) == inspect.signature(run)
