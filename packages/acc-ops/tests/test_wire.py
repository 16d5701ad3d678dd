"""Bytes of any tensor, and arithmetic that rounds once."""

from __future__ import annotations

import pytest
import torch

from acc_ops.wire import as_bytes, as_typed, check_parts, check_reduction, combine


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(True),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.empty(0, 4, dtype=torch.float16),
        torch.ones(3).expand(2, 3),
        torch.tensor([1.5], dtype=torch.float8_e5m2),
    ],
)
def test_any_tensor_is_bytes_and_back(tensor: torch.Tensor) -> None:
    again = as_typed(as_bytes(tensor), tensor.dtype, tensor.shape)
    assert (again == tensor).all()
    assert again.dtype == tensor.dtype


def test_a_contiguous_tensor_lends_its_memory() -> None:
    tensor = torch.zeros(4)
    as_bytes(tensor).fill_(0xFF)
    assert tensor.isnan().all()


def test_a_small_float_is_rounded_once() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert combine(parts, "sum").item() == 258.0  # in bfloat16, 256 + 1 is 256


def test_bools_are_joined_by_or_and_and() -> None:
    parts = [torch.tensor([True, False]), torch.tensor([True, True])]
    assert combine(parts, "sum").tolist() == [True, True]
    assert combine(parts, "product").tolist() == [True, False]


def test_a_dtype_without_arithmetic_is_refused() -> None:
    with pytest.raises(TypeError, match="uint64"):
        check_reduction("sum", torch.uint64)


def test_parts_are_counted() -> None:
    assert check_parts([1, 2], 2, 0) == [1, 2]
    with pytest.raises(ValueError, match="rank 0 has to give one part for each of the 2 ranks, got 3"):
        check_parts([1, 2, 3], 2, 0)
