"""Whatever is copied by however many threads is equal, and an error of any of them is raised."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acc_trainer.checkpoint import copying

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that small tensors are large ones here."""
    monkeypatch.setattr(copying, "_TORCH_SPLITS", 40)
    monkeypatch.setattr(copying, "_LEAST_BYTES", 64)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    made = torch.randn(shape).mul(9).to(draw(st.sampled_from(DTYPES)))
    form = draw(st.sampled_from(["plain", "turned", "cut", "conjugate"]))
    if form == "turned" and made.dim() > 1:
        return made.transpose(0, 1)
    if form == "cut" and made.dim():
        return made[::2]
    return made.conj() if form == "conjugate" else made


@given(st.lists(tensors(), max_size=12), st.integers(1, 4))
def test_copies_are_equal(sources, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
        copying.copy_all(targets, sources)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))


def test_small_tensors_are_copied_many_at_a_time(monkeypatch):
    sizes = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch,
        "_foreach_copy_",
        lambda targets, sources, **options: sizes.append(len(sources)) or copy(targets, sources, **options),
    )
    sources = [torch.full((4,), float(number)) for number in range(11)]  # 16 bytes each, 64 at a time
    targets = [torch.empty(4) for _ in sources]
    copying.copy_all(targets, sources)
    assert sorted(sizes) == [3, 4, 4]
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))


def test_a_copy_needs_no_gradients():
    source = torch.randn(90, requires_grad=True)
    target = torch.zeros(90)
    copying.copy_all([target], [source])
    assert not target.requires_grad
    assert torch.equal(target, source.detach())


def test_the_error_of_another_thread_is_raised_and_the_rest_is_left():
    here = threading.current_thread()
    failed, done = threading.Event(), []

    def fail_elsewhere():
        if threading.current_thread() is here:
            assert failed.wait(10)
            done.append(True)
        else:
            failed.set()
            raise MemoryError("no memory")

    with pytest.raises(MemoryError, match="no memory"):
        copying._share_out(deque([fail_elsewhere, fail_elsewhere, *[lambda: done.append(False)] * 40]), 2)
    assert len(done) < 40


def test_where_there_are_no_threads_the_caller_copies_alone(monkeypatch):
    def none(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    done: list[int] = []
    copying._share_out(deque([lambda number=number: done.append(number) for number in range(5)]), 4)
    assert done == [0, 1, 2, 3, 4]
