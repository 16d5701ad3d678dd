"""Out of memory."""

from __future__ import annotations

import gc
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
from acc_ops.testing import count_calls

SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB"


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
