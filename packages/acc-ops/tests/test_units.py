"""Sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acc_ops.enums import CustomDtype
from acc_ops.shown_bytes import convert_bytes
from acc_ops.units import convert_file_size_to_int, dtype_byte_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 2**30),
        ("1GB", 10**9),
        ("1Gb", 10**9 // 8),
        ("1Gib", 2**30 // 8),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 * 2**40),
        ("1PB", 10**15),
        ("1.5 GiB", 3 * 2**29),
        (" 10 kB ", 10_000),
        ("0MB", 0),
        ("100MiB", 100 * 2**20),
        ("12", 12),
        ("12B", 12),
        ("16b", 2),
        (".5KiB", 512),
        ("0.1GB", 10**8),
        ("10 gIb", 10 * 2**30 // 8),
        ("3tib", 3 * 2**40 // 8),
        ("7 TIB", 7 * 2**40),
        ("1.MB", 10**6),
    ],
)
def test_sizes_are_read(text, size):
    assert convert_file_size_to_int(text) == size


def test_numbers_pass():
    assert convert_file_size_to_int(5) == 5
    assert convert_file_size_to_int(5.7) == 5
    assert type(convert_file_size_to_int(5.7)) is int


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "GB",
        "5G",
        "-1GB",
        "1e3KB",
        "5 GB more",
        "5iB",
        "-5",
        "1e3",
        "1,5GB",
        "1_000KB",
        "\u0663GB",  # a digit, but none of ours
        ".GB",
        -1,
        -0.5,
        float("nan"),
        float("inf"),
        True,
        None,
        [1],
    ],
)
def test_bad_sizes_are_refused_with_the_value(bad):
    with pytest.raises(ValueError, match="a size is"):
        convert_file_size_to_int(bad)


@given(st.integers(0, 10**6), st.sampled_from("KMGTPE"))
def test_units_are_exact(number, prefix):
    power = "KMGTPE".index(prefix) + 1
    assert convert_file_size_to_int(f"{number}{prefix}B") == number * 1000**power
    assert convert_file_size_to_int(f"{number}{prefix.lower()}iB") == number * 1024**power


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4),
        (torch.bfloat16, 2),
        (torch.float8_e4m3fn, 1),
        (torch.int8, 1),
        (torch.uint64, 8),
        (torch.complex64, 8),
        (torch.bool, 1),
        (torch.uint4, 1),
        (torch.quint4x2, 1 / 2),
        (CustomDtype.FP8, 1),
        (CustomDtype.INT4, 1 / 2),
        (CustomDtype.INT2, 1 / 4),
        ("float16", 2),
        ("torch.int64", 8),
        ("int4", 1 / 2),
        ("torch.uint4", 1),
    ],
)
def test_element_sizes(dtype, size):
    assert dtype_byte_size(dtype) == size


@pytest.mark.parametrize(
    "dtype", sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
)
def test_every_dtype_is_as_large_as_torch_stores_it(dtype):
    stored = torch.empty(64, dtype=dtype).untyped_storage().nbytes() / 64
    assert dtype_byte_size(dtype) == stored


@pytest.mark.parametrize("bad", ["float15", torch.ones, None, 3])
def test_what_is_no_dtype_is_refused(bad):
    with pytest.raises(ValueError, match="dtype"):
        dtype_byte_size(bad)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KB"),
        (88_750_000, "84.64 MB"),
        (2**50, "1.0 PB"),
        (2**62, "4096.0 PB"),
    ],
)
def test_sizes_for_people(size, text):
    assert convert_bytes(size) == text
