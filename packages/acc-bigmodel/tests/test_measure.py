"""Bytes of tensors, modules and layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    get_module_leaves,
    get_module_size_with_ties,
)
from acc_bigmodel.measure import take_inventory
from acc_ops.enums import CustomDtype

BLOCK = (8 * 16 + 16 + 16 * 8 + 8) * 4


def test_every_prefix_has_its_bytes_and_ties_count_once(tied_model: nn.Module) -> None:
    sizes = compute_module_sizes(tied_model)
    norm = 4 * 8 * 4 + 8  # weight, bias, mean, variance; a count of 8 bytes
    assert sizes["layers.1"] == BLOCK
    assert sizes["layers"] == 3 * BLOCK
    assert sizes["embed.weight"] == 12 * 8 * 4
    assert sizes["head"] == 0
    assert sizes[""] == 12 * 8 * 4 + 3 * BLOCK + norm + 4
    assert sizes["not there"] == 0


def test_a_dtype_caps_floating_tensors_only(tied_model: nn.Module) -> None:
    sizes = compute_module_sizes(tied_model, dtype="float16")
    assert sizes["layers.1"] == BLOCK // 2
    assert sizes["norm.num_batches_tracked"] == 8
    assert compute_module_sizes(tied_model, dtype=torch.float64)["layers.1"] == BLOCK


def test_special_dtypes_go_first(tied_model: nn.Module) -> None:
    sizes = compute_module_sizes(
        tied_model,
        dtype=torch.float16,
        special_dtypes={"layers.0.up.weight": CustomDtype.INT4, "layers.0.up.bias": "float32"},
    )
    assert (sizes["layers.0.up.weight"], sizes["layers.0.up.bias"]) == (8 * 16 // 2, 16 * 4)


def test_buffers_alone(tied_model: nn.Module) -> None:
    assert compute_module_total_buffer_size(tied_model) == 2 * 8 * 4 + 8 + 4
    assert compute_module_sizes(tied_model, buffers_only=True)["layers"] == 0


def test_largest_layer_respects_whole_classes(tied_model: nn.Module) -> None:
    sizes = compute_module_sizes(tied_model)
    children = list(tied_model.named_children())
    assert get_max_layer_size(children, sizes, ["Block"]) == (BLOCK, ["layers.0", "layers.1", "layers.2"])
    largest = (8 * 16 + 16) * 4
    assert get_max_layer_size(children, sizes, []) == (largest, [f"layers.{i}.up" for i in range(3)])
    assert get_max_layer_size(children, sizes, "Block")[0] == BLOCK


def test_maximum_sizes_read_the_models_own_list(tied_model: nn.Module) -> None:
    assert calculate_maximum_sizes(tied_model)[1][0] == (8 * 16 + 16) * 4
    tied_model._no_split_modules = ["Block"]
    total, (largest, names) = calculate_maximum_sizes(tied_model)
    assert (total, largest, names) == (
        compute_module_sizes(tied_model)[""],
        BLOCK,
        [f"layers.{i}" for i in range(3)],
    )


def test_leaves_are_nobodys_parent() -> None:
    assert get_module_leaves({"": 3, "a": 3, "a.w": 2, "a.b": 1, "c": 0}) == ["a.w", "a.b", "c"]


def test_size_with_ties_counts_the_shared_tensor_once() -> None:
    sizes = {"a": 10, "a.w": 6, "b": 9, "b.w": 6, "c": 1}
    modules = [("b", nn.Linear(1, 1)), ("c", nn.Linear(1, 1))]
    total, names, found = get_module_size_with_ties(["b.w"], 10, sizes, modules)
    assert (total, names, found) == (10 + 9 - 6, ["b"], [modules[0][1]])


def test_a_tied_name_that_is_nowhere_is_said() -> None:
    with pytest.raises(ValueError, match=r"'z\.w' is in none of the modules b, c"):
        get_module_size_with_ties(["z.w"], 1, {}, [("b", nn.Linear(1, 1)), ("c", nn.Linear(1, 1))])


def test_the_lists_and_sizes_that_are_given_stay_as_they_are(tied_model: nn.Module) -> None:
    sizes, modules = compute_module_sizes(tied_model), list(tied_model.named_children())
    before = dict(sizes), list(modules)
    get_max_layer_size(modules, sizes, None)
    get_module_leaves(sizes)
    get_module_size_with_ties(["head.weight"], 1, sizes, modules)
    assert (dict(sizes), modules) == before


def test_inventory_has_a_module_under_each_of_its_names() -> None:
    shared = nn.Linear(2, 2)
    inventory = take_inventory(nn.ModuleDict({"x": shared, "y": shared}), no_split_module_classes="Linear")
    assert list(inventory.sizes) == ["x.weight", "x.bias", "y.weight", "y.bias"]
    assert inventory.ties == (("x.weight", "y.weight"), ("x.bias", "y.bias"))
    assert inventory.blocks == {"x", "y"}
