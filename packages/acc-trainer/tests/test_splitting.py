"""What each process gets of a list, a tensor, a data set or a dict: every row once, in order, and the input left alone."""

from __future__ import annotations

import copy
import types
from collections import UserDict, deque
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from acc_ops.testing import run_threads
from acc_trainer.splitting import split
from acc_trainer.state import PartialState


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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr"])
def test_a_sparse_tensor_is_refused_on_any_number_of_processes(kind, size):
    sparse = torch.eye(4).to_sparse(layout=getattr(torch, kind))
    for inputs in (sparse, {"a": sparse, "b": [1, 2, 3, 4]}):
        with pytest.raises(
            ValueError, match=f"got a {kind} one: give a list of its rows, or tensor.to_dense"
        ):
            split(inputs, 0, size)


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


class Rows(Dataset):
    """Any torch data set."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return self.rows[place]


class Stream(IterableDataset):
    """Has a length and no rows with numbers."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter("abc")


def test_a_torch_data_set_is_split_by_its_rows():
    parts = [split(Rows("abcde"), rank, 2) for rank in range(2)]
    assert [list(DataLoader(part, batch_size=None)) for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [
        part[0][0].item() for part in (split(TensorDataset(torch.arange(3)), r, 2) for r in range(2))
    ] == [0, 2]
    assert [split(Rows("abc"), rank, 2, apply_padding=True)[-1] for rank in range(2)] == ["b", "c"]
    assert len(split(Rows(""), 1, 2, apply_padding=True)) == 0


def test_a_stream_is_handed_out_whole():
    stream = Stream()
    assert split(stream, 1, 2) is stream


@pytest.fixture
def library_like():
    """A data set as that of the `datasets` library, which is known by its module alone, and its own subclass of it."""

    class LibraryDataset:
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, place):
            return self.rows[place]

        def select(self, places):
            return type(self)([self.rows[place] for place in places])

    LibraryDataset.__module__ = "datasets.arrow_dataset"

    class Mine(LibraryDataset):
        pass

    return LibraryDataset, Mine


def test_a_library_data_set_is_split_by_select_its_subclass_too(library_like):
    for kind in library_like:
        rows = kind([1, 2, 3])
        parts = [split(rows, rank, 2, apply_padding=True) for rank in range(2)]
        assert [type(part) for part in parts] == [kind, kind]
        assert [part.rows for part in parts] == [[1, 2], [3, 3]]
        assert rows.rows == [1, 2, 3]
        assert split({"a": rows, "b": [4, 5, 6]}, 1, 2)["a"].rows == [3]


def test_a_real_library_data_set_is_split():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    assert [split(rows, rank, 2, apply_padding=True)["x"][:] for rank in range(2)] == [[1, 2], [3, 3]]
    assert [len(split(rows.select([]), rank, 2, apply_padding=True)) for rank in range(2)] == [0, 0]


def test_kinds_of_dict_and_of_sequence_that_are_not_builtin():
    part = split(UserDict(a=[1, 2, 3]), 1, 2)
    assert type(part) is UserDict
    assert dict(part) == {"a": [3]}
    assert split(deque([1, 2, 3]), 0, 2) == [1, 2]
    fixed = types.MappingProxyType({"a": [1, 2, 3]})
    assert split(fixed, 0, 2)["a"] == [1, 2]


nested = st.integers(0, 6).flatmap(
    lambda rows: st.fixed_dictionaries(
        {
            "list": st.lists(st.integers(), min_size=rows, max_size=rows),
            "tuple": st.lists(st.text(max_size=2), min_size=rows, max_size=rows).map(tuple),
            "tensor": st.lists(st.floats(-1, 1), min_size=rows, max_size=rows).map(torch.tensor),
            "deep": st.fixed_dictionaries({"x": st.lists(st.none(), min_size=rows, max_size=rows)}),
        }
    )
)


@given(data=nested, size=st.integers(1, 4), padding=st.booleans())
def test_the_input_is_never_touched_and_the_parts_are_the_whole(data, size, padding):
    before = copy.deepcopy(data)
    parts = [split(data, rank, size, padding) for rank in range(size)]
    longest = max(len(part["list"]) for part in parts)
    assert all(len(part["list"]) == len(part["tensor"]) == len(part["deep"]["x"]) for part in parts)
    if padding:
        assert {len(part["list"]) for part in parts} == {longest}
    else:
        assert [item for part in parts for item in part["list"]] == before["list"]
        assert tuple(item for part in parts for item in part["tuple"]) == before["tuple"]
        assert torch.equal(torch.cat([part["tensor"] for part in parts]), before["tensor"])
    for part in parts if size > 1 else []:
        part["list"].append("changed")
        part["tensor"] += 1
        part["deep"]["x"].clear()
    assert data["list"] == before["list"]
    assert data["deep"] == before["deep"]
    assert torch.equal(data["tensor"], before["tensor"])
    assert list(data) == list(before)
