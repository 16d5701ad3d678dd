"""Bytes of any tensor, and arithmetic that rounds once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from acc_ops.wire import (
    as_bytes,
    as_typed,
    check_parts,
    check_reduction,
    combine,
    mean_of_shares,
    share_of_mean,
    shares_elements,
    to_bytes,
)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(True),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.empty(0, 4, dtype=torch.float16),
        torch.ones(3).expand(2, 3),
        torch.tensor([1.5], dtype=torch.float8_e5m2),
        torch.randn(1, 5)[:, 0],
        torch.randn(0, 5)[:, 0],
        torch.randn(2, 1, 5).transpose(0, 2)[1:2, :, :1],
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


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_the_mean_of_equal_numbers_is_that_number_at_the_edge_of_every_dtype(size: int) -> None:
    edges = {
        torch.float16: [65504.0, 6e-8],
        torch.bfloat16: [3.38e38, 1e-20],
        torch.float32: [3.4e38, 1e-37],
        torch.float64: [1.7e308, 1e-300],
        torch.float8_e4m3fn: [448.0, 2.0],
        torch.float8_e5m2: [57344.0, -2.0],
        torch.complex32: [2 - 3j],
        torch.complex64: [2 - 3j],
    }
    for dtype, values in edges.items():
        own = torch.tensor(values).to(dtype) if dtype != torch.float64 else torch.tensor(values, dtype=dtype)
        mean = mean_of_shares(combine([share_of_mean(own, size)] * size, "sum"), size, dtype)
        assert mean.dtype == dtype
        wide = torch.complex64 if dtype.is_complex else torch.float64
        torch.testing.assert_close(mean.to(wide), own.to(wide), rtol=1e-6, atol=0.0)
    for whole in (2**62 + 1, -(2**63), 200):
        own = torch.tensor([whole])
        mean = mean_of_shares(combine([share_of_mean(own, size)] * size, "sum"), size, torch.int64)
        assert mean.tolist() == [torch.tensor(float(whole)).item()]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=4))
def test_elements_are_shared_where_there_are_fewer_places_than_elements(dims: list[tuple[int, int]]) -> None:
    sizes, steps = [size for size, _ in dims], [step for _, step in dims]
    tensor = torch.zeros(64).as_strided(sizes, steps)
    places = torch.arange(64).as_strided(sizes, steps).flatten().tolist()
    assert shares_elements(tensor) == (len(set(places)) < len(places))


def test_no_memory_is_read_where_there_is_none() -> None:
    with FakeTensorMode():
        tensor = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(TypeError, match="got a FakeTensor, which has no memory of its own"):
        to_bytes(tensor)
