"""quantization/device_maps.py: maps are made with the sizes that the weights will have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel.device_map import expand_device_map, state_names
from acc_ops.enums import CustomDtype
from acc_ops.world import current_world
from acc_plugins.quantization.device_maps import get_quantized_model_device_map

Empty = Callable[[], nn.Module]


def test_no_map_is_this_process_device(empty: Empty, halved: Any) -> None:
    assert get_quantized_model_device_map(empty(), halved()) == {"": current_world().device}


def test_a_mapping_stays_as_it_is(empty: Empty, halved: Any) -> None:
    given = {"": "cpu", "body.0": "disk"}
    assert get_quantized_model_device_map(empty(), halved(), given) == given


@pytest.mark.parametrize(("dtype", "fits"), [(torch.int8, False), (CustomDtype.INT4, True)])
def test_a_map_is_made_with_the_bits_that_the_weights_will_have(
    empty: Empty, halved: Any, dtype: Any, fits: bool
) -> None:
    kind = halved(target_dtype=dtype, rest_dtype=torch.float16)
    rest = 8 * 64 + 64 + 2 * 64 + 8 * 64 + 8  # elements that are not quantised
    budget = rest * 2 + 4 + 64 * 64 * 2 // 2  # and the two weights in 4 bits
    made = get_quantized_model_device_map(empty(), kind, "sequential", {"cpu": budget})
    homes = expand_device_map(made, state_names(empty()))
    assert ("disk" not in homes.values()) is fits


def test_an_unknown_name_is_refused(empty: Empty, halved: Any) -> None:
    with pytest.raises(ValueError, match=r"balanced_low_0.*got 'best'"):
        get_quantized_model_device_map(empty(), halved(), "best")


def test_a_format_that_cannot_be_offloaded_refuses_the_disk_for_its_weights_only(
    empty: Empty, halved: Any
) -> None:
    kind = halved(can_offload=False)
    get_quantized_model_device_map(empty(), kind, {"": "cpu", "emb": "disk", "head": "disk"})
    with pytest.raises(ValueError, match=r"1 weights.*'body\.0\.weight'.*skip_modules"):
        get_quantized_model_device_map(empty(), kind, {"": "cpu", "body.0": "disk"})
