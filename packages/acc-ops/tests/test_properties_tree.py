"""Properties of nested data on one rank: types, order and objects stay, and the user's containers are never written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from ops_checks import assert_shared, watched
from ops_data import KINDS, Leaf, Node, Other, Spec, build, leaves_of, raw, tensors_of
from ops_specs import STABLE, specs
from torch import Tensor

from acc_ops.batches import (
    concatenate,
    find_batch_size,
    ignorant_find_batch_size,
    pad_input_tensors,
    slice_tensors,
)
from acc_ops.precision import convert_outputs_to_fp32, convert_to_fp32
from acc_ops.tree import (
    TensorInformation,
    find_device,
    flatten,
    get_data_structure,
    get_shape,
    honor_type,
    initialize_tensors,
    is_namedtuple,
    leaves_with_paths,
    listify,
    recursively_apply,
    send_to_device,
    unflatten,
)

META = torch.device("meta")  # plays the other device
nested = specs(with_others=True)


@given(nested)
@STABLE
def test_where_nothing_changes_the_very_same_object_is_passed_on(spec: Spec) -> None:
    data = build(spec)
    unchanged = watched(spec, data)
    leaves, structure = flatten(data)
    for same in (
        recursively_apply(lambda t: t, data),
        send_to_device(data, "cpu"),
        unflatten(structure, leaves),
    ):
        assert same is data
    unchanged()


@given(nested, st.data())
@STABLE
def test_containers_are_rebuilt_as_what_they_are_and_only_where_a_leaf_changed(
    spec: Spec, draw: st.DataObject
) -> None:
    data = build(spec)
    unchanged = watched(spec, data)
    chosen = {id(tensor) for tensor in tensors_of(spec, data) if draw.draw(st.booleans())}
    result = recursively_apply(lambda t: t.detach().clone() if id(t) in chosen else t, data)
    unchanged()
    for (_, old), (_, new) in zip(leaves_of(spec, data), leaves_of(spec, result), strict=True):
        assert (new is old) == (id(old) not in chosen)
    assert_shared(spec, data, result)


@given(nested)
@STABLE
def test_tensors_come_out_in_order_with_paths_that_lead_to_them(spec: Spec) -> None:
    data = build(spec)
    leaves, structure = flatten(data)
    wanted = tensors_of(spec, data)
    assert len(leaves) == len(wanted)
    assert all(one is two for one, two in zip(leaves, wanted, strict=True))
    assert structure.num_others == sum(isinstance(leaf, Other) for leaf, _ in leaves_of(spec, data))
    assert flatten(build(spec))[1].key == structure.key
    paths = list(leaves_with_paths(data))
    assert [id(leaf) for _, leaf in paths] == [id(leaf) for _, leaf in leaves_of(spec, data)]
    assert len({path for path, _ in paths}) == len(paths)


@given(nested, st.booleans())
@STABLE
def test_other_leaves_pass_or_are_refused(spec: Spec, use_test_type: bool) -> None:
    data = build(spec)
    odd = [value for leaf, value in leaves_of(spec, data) if isinstance(leaf, Other)]

    def double(leaf: Any, factor: int, *, plus: str) -> Any:
        return (leaf, factor, plus)

    if use_test_type:  # a function of texts, with arguments of its own
        result = recursively_apply(double, data, 2, test_type=lambda leaf: isinstance(leaf, str), plus="!")
        for (_, old), (_, new) in zip(leaves_of(spec, data), leaves_of(spec, result), strict=True):
            assert new == (old, 2, "!") if isinstance(old, str) else new is old
    elif odd:
        with pytest.raises(TypeError, match=type(odd[0]).__name__):
            recursively_apply(lambda t: t, data, error_on_other_type=True)
    else:
        assert recursively_apply(lambda t: t, data, error_on_other_type=True) is data


@given(nested, st.sampled_from([None, "logits", ["logits", "", 2], ("ids",), {"mask", None}]))
@STABLE
def test_everything_moves_but_what_is_under_a_skipped_key(spec: Spec, skip_keys: Any) -> None:
    data = build(spec)
    unchanged = watched(spec, data)
    result = send_to_device(data, META, skip_keys=skip_keys)
    unchanged()
    skipped = [] if skip_keys is None else [skip_keys] if isinstance(skip_keys, str) else list(skip_keys)
    for (leaf, old), (_, new), stays in zip(
        leaves_of(spec, data), leaves_of(spec, result), under(spec, skipped), strict=True
    ):
        if isinstance(leaf, Leaf) and not stays:
            assert (new.device, new.shape, new.dtype) == (META, old.shape, old.dtype)
        else:
            assert new is old


def under(spec: Spec, keys: list[Any], inside: bool = False) -> list[bool]:
    """For each leaf: whether it is under one of the keys of a mapping, or fields of a dataclass, at any depth."""
    if not isinstance(spec, Node):
        return [inside]
    names = spec.keys or (
        ("ids", "mask") if spec.kind in ("batch", "frozen", "slotted") else (...,) * len(spec.children)
    )
    return [
        found
        for name, child in zip(names, spec.children, strict=True)
        for found in under(child, keys, inside or name in keys)
    ]


@given(nested)
@STABLE
def test_the_batch_size_is_of_the_first_tensor_that_has_one(spec: Spec) -> None:
    data = build(spec)
    sizes = [tensor.shape[0] for tensor in tensors_of(spec, data) if tensor.ndim]
    if sizes:
        assert find_batch_size(data) == ignorant_find_batch_size(data) == sizes[0]
        assert type(find_batch_size(data)) is int
        return
    assert ignorant_find_batch_size(data) is None
    with pytest.raises(TypeError if isinstance(spec, Other) else ValueError, match="no batch size"):
        find_batch_size(data)


@given(nested)
@STABLE
def test_shapes_structures_and_numbers_stand_where_the_tensors_were(spec: Spec) -> None:
    data = build(spec)
    unchanged = watched(spec, data)
    structure = get_data_structure(data)
    made = [
        leaves_of(spec, of)
        for of in (get_shape(data), structure, initialize_tensors(structure), listify(data))
    ]
    unchanged()
    for (leaf, old), *others in zip(leaves_of(spec, data), *made, strict=True):
        shape, info, empty, plain = [value for _, value in others]
        if not isinstance(leaf, Leaf):
            assert all(value is old for value in (shape, info, empty, plain))
            continue
        assert shape == list(old.shape)
        assert info == TensorInformation(old.shape, old.dtype)
        assert (empty.shape, empty.dtype, empty.device.type) == (old.shape, old.dtype, "cpu")
        again = torch.tensor(plain, dtype=torch.complex128 if old.is_complex() else _wide(old.dtype))
        assert again.shape == old.shape or not old.numel()
        assert _numbers(again.to(old.dtype)) == _numbers(old)
    tensors = tensors_of(spec, data)
    assert find_device(data) == (tensors[0].device if tensors else None)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _numbers(tensor: Tensor) -> list[str]:
    """The numbers as texts, so that NaN is NaN."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    wide = torch.complex128 if plain.is_complex() else _wide(plain.dtype)
    return [repr(number) for number in plain.to(wide).reshape(-1).tolist()]


@given(nested)
@STABLE
def test_halves_become_float32_and_nothing_else_changes(spec: Spec) -> None:
    data = build(spec)
    unchanged = watched(spec, data)
    result = convert_to_fp32(data)
    unchanged()
    for (leaf, old), (_, new) in zip(leaves_of(spec, data), leaves_of(spec, result), strict=True):
        if isinstance(leaf, Leaf) and leaf.dtype in ("float16", "bfloat16"):
            assert new.dtype == torch.float32
            assert raw(new) == raw(old.float())
        else:
            assert new is old
    assert_shared(spec, data, result)
    assert convert_outputs_to_fp32(lambda: None)() is None


@given(specs("rows", ("plain", "transposed", "offset"), with_others=True), st.integers(1, 5))
@STABLE
def test_batches_joined_are_the_rows_of_all_and_cut_again_are_what_they_were(spec: Spec, count: int) -> None:
    assume(not _has_list_without_tensors(spec))
    batches = [build(spec, index) for index in range(count)]
    unchanged = [watched(spec, batch) for batch in batches]
    joined = concatenate(batches)
    for check in unchanged:
        check()
    if count == 1:
        assert joined is batches[0]
        return
    for index, (leaf, whole) in enumerate(leaves_of(spec, joined)):
        parts = [leaves_of(spec, batch)[index][1] for batch in batches]
        if not isinstance(leaf, Leaf):
            assert whole is parts[0]
            continue
        assert whole.dtype == parts[0].dtype
        assert raw(whole) == b"".join(raw(part) for part in parts)
        start = 0
        for part in parts:
            stop = start + (part.shape[0] if part.ndim else 1)
            assert raw(slice_tensors([whole], slice(start, stop))[0]) == raw(part)
            start = stop
        assert start == whole.shape[0]


def _has_list_without_tensors(spec: Spec) -> bool:
    """Such lists are one item per sample and are chained instead: the next test."""
    if not isinstance(spec, Node):
        return False
    own = spec.kind in ("list", "tuple", "rows") and not any(
        isinstance(leaf, Leaf) for leaf, _ in leaves_of(spec, build(spec))
    )
    return own or any(_has_list_without_tensors(child) for child in spec.children)


texts = st.lists(
    st.text(max_size=2) | st.integers() | st.none() | st.lists(st.integers(), max_size=2), max_size=3
)


@given(
    st.lists(texts, min_size=2, max_size=4), st.sampled_from([list, tuple]), st.sampled_from(["dict", "pair"])
)
@STABLE
def test_lists_of_other_things_are_chained_and_constants_stay(
    items: list[list[Any]], kind: Any, around: str
) -> None:
    batches = [KINDS[around].make(("names", "constant"), [kind(own), "constant"]) for own in items]
    names, constant = KINDS[around].read(concatenate(batches))
    assert names == kind(item for own in items for item in own)
    assert constant == "constant"
    assert [KINDS[around].read(batch)[0] for batch in batches] == [kind(own) for own in items]


@given(nested, st.integers(-3, 3), st.integers(-3, 3), st.sampled_from([None, 1, 2]))
@STABLE
def test_slices_cut_every_tensor_with_rows(spec: Spec, start: int, stop: int, step: int | None) -> None:
    data = build(spec)
    unchanged = watched(spec, data)
    chosen = slice(start, stop, step)
    result = slice_tensors(data, chosen, process_index=1, num_processes=2)
    unchanged()
    for (leaf, old), (_, new) in zip(leaves_of(spec, data), leaves_of(spec, result), strict=True):
        if isinstance(leaf, Leaf) and old.ndim:
            wanted = [raw(old[index]) for index in range(old.shape[0])[chosen]]
            assert raw(new) == b"".join(wanted)
        else:
            assert new is old


@given(specs(), st.integers(1, 4), st.integers(1, 5), st.integers(-4, 3))
@STABLE
def test_input_is_padded_to_the_next_multiple_in_the_asked_dimension(
    spec: Spec, batch_size: int, processes: int, dim: int
) -> None:
    data = build(spec)
    unchanged = watched(spec, data)
    result = pad_input_tensors(data, batch_size, processes, dim)
    unchanged()
    for old, new in zip(tensors_of(spec, data), tensors_of(spec, result), strict=True):
        size = old.shape[dim] if -old.ndim <= dim < old.ndim else None
        if size != batch_size or size % processes == 0:
            assert new is old
            continue
        target = (size + processes - 1) // processes * processes
        assert (new.shape[dim], new.dtype, new.ndim) == (target, old.dtype, old.ndim)
        assert raw(new.narrow(dim, 0, size)) == raw(old)
        assert set(raw(new.narrow(dim, size, target - size))) <= set(raw(torch.zeros(1).to(old.dtype)))


@pytest.mark.parametrize("kind", ["list", "tuple", "pair", "max", "rows"])
def test_types_are_honoured(kind: str) -> None:
    model = KINDS[kind].make((), [torch.ones(1)] * 2)
    made = honor_type(model, (torch.full((1,), index) for index in range(2)))
    assert type(made) is type(model)
    assert [tensor.item() for tensor in KINDS[kind].read(made)] == [0, 1]


@given(specs(with_others=True))
@STABLE
def test_only_namedtuples_are_namedtuples(spec: Spec) -> None:
    assert is_namedtuple(build(spec)) == (isinstance(spec, Node) and spec.kind == "pair")


def test_results_of_max_and_topk_keep_their_type_and_names() -> None:
    best = torch.tensor([[1.0, 3.0], [2.0, 0.0]]).half().topk(1)
    made = convert_to_fp32(best)
    assert type(made) is type(best)
    assert (made.values.dtype, made.indices) == (torch.float32, best.indices)
    assert made.values.tolist() == [[3.0], [2.0]]
    assert type(send_to_device(best, META)) is type(best)
    assert concatenate([best, best]).values.tolist() == [[3.0], [2.0]] * 2
