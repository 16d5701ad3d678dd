"""What bitsandbytes is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from acc_ops.enums import CustomDtype
from acc_ops.options import OptionError, from_mapping, to_mapping
from acc_plugins import BnbQuantizationConfig


def test_formats_become_torch_dtypes_and_the_rest_follows_the_bits() -> None:
    eight = BnbQuantizationConfig(load_in_8bit=True)
    assert (eight.torch_dtype, eight.target_dtype) == (torch.float16, torch.int8)
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert four.bnb_4bit_compute_dtype is four.torch_dtype is torch.bfloat16
    assert four.target_dtype is CustomDtype.INT4


def test_a_file_gives_every_field_back() -> None:
    made = BnbQuantizationConfig(False, 6.0, True, "nf4", True, torch.bfloat16, "fp32", ["head"], ["norm"])
    assert from_mapping(BnbQuantizationConfig, to_mapping(made)) == made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "exactly one"),
        ({"load_in_8bit": "perhaps"}, "load_in_8bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "np4"}, "bnb_4bit_quant_type"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "int8"}, "bnb_4bit_compute_dtype"),
        ({"load_in_8bit": True, "torch_dtype": "half"}, "torch_dtype"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "skip_modules must be a list"),
        ({"load_in_8bit": True, "keep_in_fp32_modules": 3}, "keep_in_fp32_modules must be a list"),
    ],
)
def test_impossible_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BnbQuantizationConfig(**given)


def test_a_threshold_for_8_bit_is_told_to_have_no_effect_in_4(caplog: pytest.LogCaptureFixture) -> None:
    BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=5.0)
    assert "llm_int8_threshold=5.0 has no effect" in caplog.text
