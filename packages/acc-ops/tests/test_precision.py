"""float32 outputs."""

from __future__ import annotations

import pickle
from collections import namedtuple
from types import MethodType

import pytest
import torch
from torch import nn

from acc_ops.precision import ConvertOutputsToFp32, convert_outputs_to_fp32, convert_to_fp32

Pair = namedtuple("Pair", ["first", "second"])


def test_half_tensors_become_float_at_every_depth():
    data = {"a": [torch.ones(2, dtype=torch.float16)], "b": Pair(torch.ones(1, dtype=torch.bfloat16), "text")}
    converted = convert_to_fp32(data)
    assert converted["a"][0].dtype is torch.float32
    assert type(converted["b"]) is Pair
    assert converted["b"].first.dtype is torch.float32
    assert converted["b"].second == "text"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_other_types_are_untouched(dtype):
    data = {"a": torch.zeros(2).to(dtype), "b": [1, None]}
    assert convert_to_fp32(data) is data


class Half(nn.Module):
    def forward(self, x, scale=1):
        """Scale."""
        return {"logits": x.half() * scale}


@pytest.mark.parametrize("wrap", [convert_outputs_to_fp32, ConvertOutputsToFp32])
def test_a_wrapped_forward_gives_float(wrap):
    model = Half()
    original = model.forward
    model.forward = wrap(original)
    assert model(torch.ones(2), scale=2)["logits"].dtype is torch.float32
    assert model.forward.__wrapped__ == original
    assert model.forward.__doc__ == "Scale."


def test_the_function_form_can_be_bound():
    model = Half()
    model.forward = MethodType(convert_outputs_to_fp32(type(model).forward), model)
    assert model(torch.ones(2))["logits"].dtype is torch.float32


def test_the_object_form_refuses_pickling_and_says_what_to_do():
    with pytest.raises(pickle.PicklingError, match="unwrap"):
        pickle.dumps(ConvertOutputsToFp32(Half().forward))
