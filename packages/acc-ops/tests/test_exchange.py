"""What travels with the header, and digests that every process computes alike."""

from __future__ import annotations

import copy
import datetime
import threading
from dataclasses import dataclass
from enum import Enum, Flag

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acc_ops.exchange import Call, MismatchError, Row, agree, digest_of, room_bytes, together
from acc_ops.prepared import MayDiffer
from acc_ops.testing import run_threads
from acc_ops.wire import from_bytes, to_bytes
from acc_ops.world import current_world


class Task(Enum):
    NER = "ner"
    QA = "qa"


class Kind(str, Enum):
    NER = "ner"


class Colour(Flag):
    RED = 1
    BLUE = 2


class Name(str):
    __slots__ = ()


@dataclass(frozen=True)
class Point:
    x: object
    y: object


@given(st.binary(max_size=100))
def test_bytes_survive_the_way_through_a_tensor(data: bytes) -> None:
    assert to_bytes(from_bytes(data)) == data


def test_digests_do_not_depend_on_the_process() -> None:
    parts = (
        dict,
        ("a", 1, None, torch.float32),
        b"x",
        frozenset({"a", "b", "c"}),
        datetime.date(2020, 1, 2),
        MayDiffer.ROWS,
        torch.device("cpu"),
    )  # a hash of a str, or an address, would differ
    assert digest_of(*parts).hex() == "3b07aaf5c9c5e94153d5a2e4ce3cd1c1"


KEYS = [
    Task.NER,
    Task.QA,
    Kind.NER,
    Colour.RED,
    Colour.RED | Colour.BLUE,
    (Task.NER,),
    (Task.QA,),
    "ner",
    1,
    2.0,
    frozenset({0}),
    frozenset({Task.NER, "b"}),
    frozenset({Task.QA, "b"}),
    datetime.date(2020, 1, 1),
    datetime.date(2020, 1, 2),
    torch.device("cpu"),
    torch.device("cuda:1"),
    torch.float32,
    torch.channels_last,
    range(1),
    range(2),
    Point(1, Task.NER),
    Point(1, Task.QA),
    Point(frozenset({"x", "y"}), Task.QA),
    Name("ner"),
    int,
    torch.relu,
]


def test_keys_of_every_kind_are_told_apart_and_known_again() -> None:
    digests = [digest_of(key) for key in KEYS]
    assert len(set(digests)) == len(KEYS)
    assert digests == [digest_of(copy.deepcopy(key)) for key in KEYS]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (object(), "equal only to itself"),
        (torch.nn.Linear(1, 1), "equal only to itself"),
        (Point(object(), 1), "equal only to itself"),
        (torch.ones(2), r"a tensor \(\(2,\)\)"),
        (lambda: 1, "has no name"),
        (Point(threading.Lock(), 1), "equal only to itself|cannot be compared"),
    ],
)
def test_keys_that_no_two_processes_can_compare_are_refused_with_a_remedy(key: object, said: str) -> None:
    with pytest.raises(TypeError, match=f"{said}.*use a str"):
        digest_of((dict, key))


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
        agreed = agree(
            current_world(), Call(name="x", sizes=b"size" * rank if length == 0 else b""), lambda: own
        )
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


def test_a_rank_that_cannot_pack_is_an_error_on_every_rank_and_the_ranks_go_on() -> None:
    def pack() -> torch.Tensor:
        if current_world().rank == 1:
            raise OSError("no space")
        return torch.ones(1, dtype=torch.uint8)

    def call() -> tuple[str, bool]:
        with pytest.raises(MismatchError) as caught:
            agree(current_world(), Call(name="x"), pack)
        return str(caught.value), agree(current_world(), Call(name="y")).same_sizes

    said = "operation: rank 0 x, rank 1 cannot take part: OSError: no space"
    assert run_threads(2, call) == [(said, True)] * 2


@pytest.mark.parametrize("part", ["describe", "error"])
def test_a_rank_that_cannot_even_explain_itself_keeps_nobody_waiting(part: str) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def describe() -> list[Row]:
        raise Mute

    def call() -> str:
        odd = (
            Call(name="x", describe=describe, digest=b"1")
            if part == "describe"
            else Call(name="x", error=Mute())
        )
        with pytest.raises(MismatchError) as caught:
            agree(current_world(), odd if current_world().rank else Call(name="x"))
        return str(caught.value)

    first, second = run_threads(2, call)
    assert first == second
    assert "rank 1 cannot be described: " in first


class Unpicklable(Exception):
    def __init__(self, number: int, more: str) -> None:
        super().__init__(f"{number} {more}")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("bad file"), ValueError, "bad file"),
        (Unpicklable(3, "times"), RuntimeError, "Unpicklable: 3 times"),
    ],
)
def test_the_error_of_one_rank_is_raised_on_all(error: Exception, kind: type[Exception], text: str) -> None:
    def work() -> int:
        if current_world().rank == 1:
            raise error
        return current_world().rank

    def run() -> str:
        with pytest.raises(kind) as caught:
            together(current_world(), work)
        cause = caught.value.__cause__
        assert (cause is error) == (current_world().rank == 1)
        assert current_world().rank == 1 or str(cause) == "rank 1 raised this"
        return str(caught.value)

    assert run_threads(3, run) == [text] * 3
    assert run_threads(3, lambda: together(current_world(), lambda: 7)) == [7, 7, 7]
