"""What can be done with processes: decorators, order, splitting."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acc_ops.collectives import MismatchError, gather
from acc_ops.comm import CommError
from acc_ops.testing import run_threads
from acc_trainer.processes import split
from acc_trainer.state import PartialState


def test_decorators_choose_the_rank_when_called():
    def ask():
        state = PartialState()
        return (
            state.on_main_process(lambda: "main")(),
            state.on_last_process(lambda: "last")(),
            state.on_process(process_index=1)(lambda: "one")(),
            state.on_local_process(lambda: "zero", local_process_index=0)(),
            state.on_local_main_process()(lambda: "local")(),
        )

    assert run_threads(3, ask) == [
        ("main", None, None, "zero", "local"),
        (None, None, "one", None, None),
        (None, "last", None, None, None),
    ]


def test_a_decorator_refuses_what_cannot_be_called():
    with pytest.raises(TypeError, match="takes a function, got 3"):
        PartialState().on_main_process(3)


def test_print_happens_once(capsys):
    run_threads(3, lambda: PartialState().print("hello", end="!"))
    assert capsys.readouterr().out == "hello!"


def test_the_main_process_goes_first():
    order, lock = [], threading.Lock()

    def work():
        state = PartialState()
        with state.main_process_first():
            with lock:
                order.append(state.process_index)

    run_threads(3, work)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


def test_a_failing_main_process_does_not_leave_the_others_waiting():
    def work():
        state = PartialState()
        with state.main_process_first():
            if state.is_main_process:
                raise RuntimeError("no data")
            return "went on"

    with pytest.raises(RuntimeError, match="no data"):
        run_threads(2, work, timeout_s=10)


def test_wait_for_everyone_meets():
    def work():
        PartialState().wait_for_everyone()
        return True

    try:
        assert run_threads(2, work, timeout_s=10) == [True, True]
    except CommError as error:  # pragma: no cover
        pytest.fail(str(error))


@given(length=st.integers(0, 20), size=st.integers(1, 5))
def test_the_parts_are_the_whole_in_order_and_the_first_get_one_more(length, size):
    items = list(range(length))
    parts = [split(items, rank, size) for rank in range(size)]
    assert [item for part in parts for item in part] == items
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@given(length=st.integers(1, 20), size=st.integers(2, 5))
def test_padding_repeats_the_last_item_until_all_parts_are_as_long(length, size):
    items = list(range(length))
    parts = [split(items, rank, size, apply_padding=True) for rank in range(size)]
    assert {len(part) for part in parts} == {-(-length // size)}
    for part, plain in zip(parts, (split(items, rank, size) for rank in range(size)), strict=True):
        assert part[: len(plain)] == plain
        assert set(part[len(plain) :]) <= {length - 1}


def test_tuples_stay_tuples_with_padding_too():
    assert [split(("a", "b", "c"), rank, 2, apply_padding=True) for rank in range(2)] == [
        ("a", "b"),
        ("c", "c"),
    ]


def test_tensors_are_split_by_rows():
    rows = torch.arange(10).reshape(5, 2)
    assert split(rows, 1, 2, apply_padding=True).tolist() == [[6, 7], [8, 9], [8, 9]]
    assert split(rows[:0], 1, 2, apply_padding=True).shape == (0, 2)


def test_a_dict_is_split_value_by_value_and_left_alone():
    data = {"prompt": ["a", "b", "c", "d"], "id": [0, 1, 2, 3], "deep": {"x": torch.arange(4)}}
    part = split(data, 1, 2)
    assert part["prompt"] == ["c", "d"]
    assert part["deep"]["x"].tolist() == [2, 3]
    assert data["prompt"] == ["a", "b", "c", "d"]
    assert data["id"] == [0, 1, 2, 3]


def test_a_dict_with_unequal_values_is_refused_with_the_lengths():
    with pytest.raises(ValueError, match=r"'a': 1, 'b': 2"):
        split({"a": [1], "b": [1, 2]}, 0, 2)
    with pytest.raises(ValueError, match="'a' holds 3"):
        split({"a": 3}, 0, 2)


def test_other_types_are_handed_out_whole():
    assert split("text", 1, 2) == "text"
    assert split(5, 1, 2) == 5


def test_the_context_manager_gives_this_ranks_part():
    def ask():
        with PartialState().split_between_processes([1, 2, 3]) as part:
            return part

    assert run_threads(2, ask) == [[1, 2], [3]]


class Pair(NamedTuple):
    x: list[int]
    y: torch.Tensor


def test_a_namedtuple_is_split_field_by_field():
    part = split(Pair([1, 2, 3], torch.arange(3)), 1, 2, apply_padding=True)
    assert type(part) is Pair
    assert (part.x, part.y.tolist()) == ([3, 3], [2, 2])
    with pytest.raises(ValueError, match=r"'x': 1, 'y': 2"):
        split(Pair([1], torch.arange(2)), 0, 2)


def test_arrays_and_ranges_are_split_by_rows():
    numpy = pytest.importorskip("numpy")
    rows = numpy.arange(10).reshape(5, 2)
    assert [split(rows, rank, 2).tolist() for rank in range(2)] == [rows[:3].tolist(), rows[3:].tolist()]
    assert split(rows, 1, 2, apply_padding=True).tolist() == [[6, 7], [8, 9], [8, 9]]
    assert split(rows[:1], 1, 2).shape == (0, 2)
    assert split({"a": numpy.arange(3), "b": [1, 2, 3]}, 1, 2)["a"].tolist() == [2]
    assert list(split(range(5), 1, 2)) == [3, 4]
    assert split(numpy.array(3), 1, 2) == numpy.array(3)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("value", ["xyz", {1, 2, 3}, iter([1, 2, 3])])
def test_a_dict_with_a_value_that_cannot_be_split_is_refused(size, value):
    with pytest.raises(ValueError, match=r"'a' holds .*put it into a list"):
        split({"a": value, "b": [1, 2, 3]}, 0, size)


@pytest.mark.parametrize("wait", ["wait_for_everyone", "main_process_first"])
def test_a_rank_in_another_collective_is_an_error_on_all_and_no_hang(wait):
    def work():
        state = PartialState()
        try:
            if wait == "wait_for_everyone":
                gather(torch.ones(1)) if state.is_main_process else state.wait_for_everyone()
            else:
                with state.main_process_first():
                    gather(torch.ones(1))
        except MismatchError as error:
            return str(error)

    said = run_threads(2, work, timeout_s=20)
    assert said[0] == said[1]
    assert "barrier" in said[0]
