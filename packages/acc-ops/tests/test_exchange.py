"""What travels with the header, and digests that every process computes alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acc_ops.exchange import Call, MismatchError, agree, digest_of, room_bytes
from acc_ops.testing import run_threads
from acc_ops.wire import from_bytes, to_bytes
from acc_ops.world import current_world


@given(st.binary(max_size=100))
def test_bytes_survive_the_way_through_a_tensor(data: bytes) -> None:
    assert to_bytes(from_bytes(data)) == data


def test_digests_do_not_depend_on_the_process() -> None:
    parts = (
        dict,
        ("a", 1, None, torch.float32),
        b"x",
        object(),
    )  # a hash of a str, or an address, would differ
    assert digest_of(*parts).hex() == "a76dc0bfead80c6652c8f79a0002e8ef"


@given(
    st.recursive(st.integers() | st.text(max_size=2), lambda inner: st.lists(inner, max_size=3).map(tuple))
)
def test_digests_tell_nestings_apart(part: object) -> None:
    assert digest_of(part) != digest_of((part,))
    assert digest_of(part, 1) != digest_of((part, 1))


def test_the_room_is_cut_with_the_world_so_that_the_header_stays_small() -> None:
    assert room_bytes(2) == 16 * 1024
    assert room_bytes(64) == 4 * 1024
    assert room_bytes(4096) == 1024


@pytest.mark.parametrize("length", [0, 10, 50_000])
def test_payloads_of_any_length_arrive_in_rank_order(length: int) -> None:
    def call() -> list[list[int]]:
        rank = current_world().rank
        own = torch.full((length * rank,), rank, dtype=torch.uint8)
        agreed = agree(current_world(), Call(name="x", sizes=b"size" * rank if length == 0 else b""), own)
        rows = agreed.payloads
        assert agreed.lengths == [0, length, 2 * length]
        return [] if rows is None else [rows[r, : agreed.lengths[r]].unique().tolist() for r in range(3)]

    wanted = [] if length == 0 else [[], [1], [2]]
    if length:
        assert run_threads(3, call) == [wanted] * 3


def test_the_same_error_on_every_rank_is_raised_as_it_is() -> None:
    def call() -> str:
        with pytest.raises(KeyError) as caught:
            agree(current_world(), Call(name="x", error=KeyError("mine")))
        return str(caught.value)

    assert run_threads(2, call) == ["'mine'"] * 2


def test_errors_that_differ_name_both() -> None:
    def call() -> str:
        with pytest.raises(MismatchError) as caught:
            agree(current_world(), Call(name="x", error=KeyError(current_world().rank)))
        return str(caught.value)

    said = "operation: rank 0 cannot take part: KeyError: 0, rank 1 cannot take part: KeyError: 1"
    assert run_threads(2, call) == [said] * 2
