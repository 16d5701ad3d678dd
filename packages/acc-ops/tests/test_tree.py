"""Nested data is changed, moved, cut and joined without touching what holds it."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acc_ops import tree
from acc_ops.batches import (
    concatenate,
    find_batch_size,
    ignorant_find_batch_size,
    pad_input_tensors,
    slice_tensors,
)
from acc_ops.testing import count_calls
from acc_ops.tree import (
    TensorInformation,
    find_device,
    flatten,
    get_data_structure,
    get_shape,
    honor_type,
    initialize_tensors,
    leaves_with_paths,
    listify,
    recursively_apply,
    send_to_device,
    unflatten,
)

Pair = namedtuple("Pair", "left right")
META = torch.device("meta")  # plays the other device


@dataclass
class Batch:
    ids: Any
    note: Any = "n"


leaf = (
    st.builds(lambda n: torch.full((n, 2), n), st.integers(0, 3))
    | st.integers()
    | st.text(max_size=3)
    | st.none()
)
nested = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Batch, inner, inner)
    ),
    max_leaves=10,
)


def same(one: Any, other: Any) -> bool:
    pairs = list(leaves_with_paths(one)), list(leaves_with_paths(other))
    return len(pairs[0]) == len(pairs[1]) and all(
        p == q and type(a) is type(b) and (torch.equal(a, b) if isinstance(a, Tensor) else a == b)
        for (p, a), (q, b) in zip(*pairs, strict=True)
    )


@given(nested)
def test_nothing_changed_is_the_very_same_object(data: Any) -> None:
    assert recursively_apply(lambda t: t, data) is data
    assert send_to_device(data, "cpu") is data
    assert unflatten(flatten(data)[1], flatten(data)[0]) is data


@given(nested)
def test_leaves_change_and_containers_do_not(data: Any) -> None:
    before = [(path, value) for path, value in leaves_with_paths(data)]
    new = recursively_apply(lambda t: t + 1, data)
    assert type(new) is type(data)
    assert [p for p, _ in leaves_with_paths(new)] == [p for p, _ in before]
    for (_, old), (_, made) in zip(before, leaves_with_paths(new), strict=True):
        assert torch.equal(made, old + 1) if isinstance(old, Tensor) else made is old
    assert all(a is b for (_, a), (_, b) in zip(before, leaves_with_paths(data), strict=True))


@given(nested)
def test_flattening_and_putting_back_is_the_identity(data: Any) -> None:
    leaves, structure = flatten(data)
    again = unflatten(structure, [t.clone() for t in leaves])
    assert same(again, data)
    assert flatten(again)[1].key == structure.key
    hash(structure.key)


def test_unflatten_counts_its_leaves() -> None:
    _, structure = flatten([torch.ones(1), torch.ones(1)])
    with pytest.raises(ValueError, match="fewer leaves"):
        unflatten(structure, [torch.ones(1)])
    with pytest.raises(ValueError, match="more leaves"):
        unflatten(structure, [torch.ones(1)] * 3)


def test_functions_get_their_arguments_and_other_leaves_can_be_refused() -> None:
    assert recursively_apply(lambda x, y, z=0: x * y + z, [2, "a"], 3, z=1, test_type=lambda x: x == 2) == [
        7,
        "a",
    ]
    with pytest.raises(TypeError, match="a leaf of str: 'a'"):
        recursively_apply(lambda t: t, {"x": [torch.ones(1), "a"]}, error_on_other_type=True)


def test_skipped_keys_stay_at_every_depth_and_a_string_is_one_key() -> None:
    data = {"mask": torch.ones(1), "deep": [OrderedDict(mask=torch.ones(1), ids=torch.ones(1))]}
    out = send_to_device(data, META, skip_keys="mask")
    assert out["mask"] is data["mask"]
    assert out["deep"][0]["mask"] is data["deep"][0]["mask"]
    assert out["deep"][0]["ids"].device == META
    assert type(out["deep"][0]) is OrderedDict
    assert send_to_device(data, META, skip_keys=["mask", "deep"]) is data


def test_a_shared_tensor_moves_once_per_call() -> None:
    shared = torch.ones(1)
    out = send_to_device({"a": shared, "b": [shared, (shared,)]}, META)
    assert out["a"] is out["b"][0] is out["b"][1][0]


def test_tensors_that_are_made_as_they_are_asked_for_are_told_apart() -> None:
    class Lazy(UserDict):
        def __getitem__(self, key: str) -> Tensor:
            return torch.ones(int(key))

    rows = [Lazy({str(i): None}) for i in range(1, 9)]
    assert [moved.data[key].shape[0] for moved in send_to_device(rows, META) for key in moved.data] == list(
        range(1, 9)
    )


def test_objects_with_a_to_of_their_own_move_themselves() -> None:
    class Own:
        def __init__(self, device: str = "cpu") -> None:
            self.device = device

        def to(self, device: torch.device) -> Own:  # knows no non_blocking
            return Own(str(device))

    assert send_to_device([Own()], META, non_blocking=True)[0].device == "meta"
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    moved = send_to_device(packed, META)
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"  # recursing into it would have moved this one, too


def test_dicts_that_move_themselves_in_place_are_not_written_to() -> None:
    class Encoding(UserDict):  # like transformers' BatchEncoding
        def to(self, device: Any) -> Any:
            raise AssertionError("it would write to the user's object")

    encoding = Encoding(ids=torch.ones(1))
    out = send_to_device(encoding, META)
    assert type(out) is Encoding
    assert out["ids"].device == META
    assert encoding["ids"].device.type == "cpu"


def test_copies_to_the_cpu_are_never_left_unfinished() -> None:
    seen = []

    class Spy:
        def to(self, device: torch.device, non_blocking: bool = False) -> Spy:
            seen.append(non_blocking)
            return self

    send_to_device(Spy(), "cpu", non_blocking=True)
    send_to_device(Spy(), META, non_blocking=True)
    assert seen == [False, True]


def test_a_skip_key_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match=r"skip_keys is a key or a collection of keys, got 1; write \[1\]"):
        send_to_device({1: torch.ones(1)}, META, skip_keys=1)


def test_a_device_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="'nowhere'"):
        send_to_device(torch.ones(1), "nowhere")


def test_the_batch_size_is_of_the_first_tensor_that_has_one() -> None:
    assert find_batch_size({"name": "x", "step": torch.tensor(3), "ids": [torch.ones(5, 2)]}) == 5
    assert find_batch_size(torch.ones(0, 2)) == 0
    for empty in ([], {"a": 1}, torch.tensor(1)):
        with pytest.raises(ValueError, match="no tensor with at least one dimension"):
            find_batch_size(empty)
        assert ignorant_find_batch_size(empty) is None
    with pytest.raises(TypeError, match="got int"):
        find_batch_size(3)
    assert ignorant_find_batch_size(3) is None


def test_shapes_structures_devices_and_numbers_keep_the_nesting() -> None:
    data = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": (torch.tensor(True), "x")}
    assert get_shape(data) == {"a": [2, 3], "b": ([], "x")}
    structure = get_data_structure(data)
    assert structure["a"] == TensorInformation(torch.Size([2, 3]), torch.bfloat16)
    made = initialize_tensors(structure)
    assert (made["a"].shape, made["a"].dtype, made["b"][1]) == ((2, 3), torch.bfloat16, "x")
    assert listify(data) == {"a": [[1.0] * 3] * 2, "b": (True, "x")}
    assert find_device([1, {"x": torch.ones(1, device=META)}]) == META
    assert find_device([1]) is None


def test_slices_cut_tensors_with_rows_only() -> None:
    data = [torch.arange(4), torch.tensor(1), "x"]
    cut = slice_tensors(data, slice(1, 3), 0, 2)
    assert (cut[0].tolist(), cut[1].item(), cut[2]) == ([1, 2], 1, "x")


def test_batches_are_joined_with_lists_and_constants() -> None:
    batches = [
        defaultdict(list, x=torch.ones(2, 3), name="a", flag=True, labels=["p", "q"], n=torch.tensor(1)),
        defaultdict(list, x=torch.zeros(1, 3), name="a", flag=True, labels=["r"], n=torch.tensor(2)),
    ]
    out = concatenate(batches)
    assert type(out) is defaultdict
    assert out["x"].shape == (3, 3)
    assert (out["labels"], out["name"], out["flag"], out["n"].tolist()) == (
        ["p", "q", "r"],
        "a",
        True,
        [1, 2],
    )
    assert batches[0]["labels"] == ["p", "q"]
    pairs = concatenate(
        [Pair(torch.ones(1, 2), [torch.ones(1)]), Pair(torch.ones(1, 3), [torch.ones(2)])], dim=-1
    )
    assert (pairs.left.shape, pairs.right[0].shape) == ((1, 5), (3,))
    assert concatenate([3]) == 3


def test_what_has_no_dimension_is_stacked_whatever_the_dimension() -> None:
    batches = [
        {"loss": torch.tensor(1.0), "x": torch.ones(2, 1)},
        {"loss": torch.tensor(2.0), "x": torch.ones(2, 2)},
    ]
    joined = concatenate(batches, dim=1)
    assert joined["loss"].tolist() == [1.0, 2.0]
    assert joined["x"].shape == (2, 3)
    with pytest.raises(
        TypeError, match=r"batch\['x'\].*dimension 2, which all must have; they are \(2, 1\), \(2, 2\)"
    ):
        concatenate(batches, dim=2)


def test_records_without_tensors_are_no_lists_of_samples() -> None:
    kind = type(torch.ones(2, 2).max(dim=1))
    assert concatenate([kind(["a", None])] * 2) == kind(["a", None])
    assert concatenate([Pair("a", 1)] * 2) == Pair("a", 1)
    assert concatenate([torch.Size([2, 3])] * 2) == torch.Size([2, 3])


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([], "non-empty list"),
        ([{"a": 1}, {"a": 2}], r"batch\['a'\].*differs \(1, 2"),
        ([{"a": torch.ones(1)}, {"a": 2}], r"batch\['a'\].*Tensor, int"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], "keys or lengths differ"),
        ([[torch.ones(1)], [torch.ones(1)] * 2], "keys or lengths differ"),
        (
            [{"a": torch.ones(1, 2)}, {"a": torch.ones(1, 3)}],
            r"batch\['a'\].*dimension 0.*\(1, 2\), \(1, 3\)",
        ),
        ([{"a": torch.ones(1, 2)}, {"a": torch.ones(1)}], r"batch\['a'\].*\(1, 2\), \(1,\)"),
    ],
)
def test_batches_that_do_not_fit_are_named(batches: list[Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        concatenate(batches)


@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 2), st.booleans())
def test_padding_reaches_the_next_multiple_in_the_asked_dimension(
    size: int, processes: int, dim: int, negative: bool
) -> None:
    shape = [2, 2, 2]
    shape[dim] = size
    tensor = torch.ones(shape, dtype=torch.int16)
    out = pad_input_tensors([tensor], size, processes, dim - 3 if negative else dim)[0]
    want = -(-size // processes) * processes
    assert out.shape[dim] == want
    assert out.dtype == torch.int16
    assert out.sum() == tensor.sum()
    assert out is tensor or size % processes


def test_types_are_honoured() -> None:
    assert honor_type(Pair(1, 2), (x for x in (3, 4))) == Pair(3, 4)
    assert honor_type([1], iter([2])) == [2]
    best = torch.ones(2, 2).max(dim=1)
    assert type(honor_type(best, iter(best))) is type(best)
    assert not tree.is_torch_xpu_tensor(torch.ones(1))


def test_work_grows_with_the_number_of_leaves_only() -> None:
    def calls(count: int) -> int:
        data = {str(i): [tensor, i] for i in range(count)}
        return count_calls(lambda: recursively_apply(lambda t: t, data))

    tensor = torch.zeros(1)
    assert calls(40_000) < 21 * calls(2_000)


def test_an_argument_of_padding_that_is_no_whole_number_is_named() -> None:
    wrong: Any = "5"
    for arguments, said in (
        ((wrong, 2), "batch_size"),
        ((5, wrong), "num_processes"),
        ((5, 2, wrong), "dim"),
    ):
        with pytest.raises(TypeError, match=f"{said} must be a whole number, got '5'"):
            pad_input_tensors(torch.ones(5), *arguments)
