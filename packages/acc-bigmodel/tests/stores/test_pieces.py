"""Tensors copied a piece at a time."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acc_bigmodel.stores import pieces
from acc_bigmodel.stores.pieces import copy_jobs, give_back, in_pieces, run_all
from acc_bigmodel.stores.safetensors import Entry, SafetensorsStore, write_safetensors


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    st.sampled_from([torch.float64, torch.float32]),
    st.integers(8, 40),
)
def test_pieces_together_are_the_whole(
    shape: list[int], stored: torch.dtype, wanted: torch.dtype, piece_bytes: int
) -> None:
    source = (torch.rand(shape) * 100).to(stored)
    target = torch.empty_like(source, dtype=wanted)
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "PIECE_BYTES", piece_bytes)
        assert all(max(p.nbytes for p in pair) <= piece_bytes for pair in in_pieces(target, source))
        run_all(copy_jobs(target, source, mapped=False, note=read.append))
    assert torch.equal(target, source.to(wanted))
    assert sum(read) == source.nbytes


def test_tensors_that_do_not_lie_in_row_order_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 8)
    source, target = torch.arange(12.0).reshape(3, 4).t(), torch.zeros(4, 3, requires_grad=True)
    assert len(list(in_pieces(target, source))) == 1
    run_all(copy_jobs(target.detach(), source, mapped=False, note=lambda nbytes: None))
    assert torch.equal(target, source)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_pages_given_back_are_no_memory_and_come_again(tmp_path: Path) -> None:
    def mapped_bytes() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("RssFile")).split()[1]) * 1024

    file = tmp_path / "x.safetensors"
    write_safetensors(file, {name: Entry.of(torch.ones(4_000_000)) for name in ("a", "b")})
    store = SafetensorsStore(file)
    before = mapped_bytes()
    weight = store["a"]
    assert weight.sum() == 4_000_000
    assert mapped_bytes() - before > 12_000_000
    give_back(weight)
    assert mapped_bytes() - before < 4_000_000
    assert weight.sum() == 4_000_000
    assert store["b"].sum() == 4_000_000


def test_jobs_run_in_several_threads_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_cpus", lambda: 4)
    meet, done = threading.Barrier(4, timeout=30), []

    def job(number: int) -> None:
        if number < 4:
            meet.wait()  # never passed by one thread
        done.append(number)

    run_all([lambda number=number: job(number) for number in range(50)])
    assert sorted(done) == list(range(50))


def test_an_error_is_raised_and_what_was_not_begun_stays_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_cpus", lambda: 2)
    done: list[int] = []

    def fail() -> None:
        raise MemoryError("no room")

    def note() -> None:
        done.append(1)

    with pytest.raises(MemoryError, match="no room"):
        run_all([note, note, fail, *[note] * 10_000])
    assert len(done) < 10_000
    assert threading.active_count() < 20
