"""Sizes: of an element, written by people, shown to people."""

from __future__ import annotations

import math
import operator
import re

import torch

from acc_ops.enums import CustomDtype

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?:([kmgtpe]?)(i?)(b))?\s*", re.IGNORECASE)
_POWERS = {prefix: power for power, prefix in enumerate(("", "k", "m", "g", "t", "p", "e"))}
_CUSTOM_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 1 / 2, CustomDtype.INT2: 1 / 4}
_PACKED_BYTES = {torch.quint4x2: 1 / 2, torch.quint2x4: 1 / 4}  # the only ones whose elements share a byte


def dtype_byte_size(dtype: torch.dtype | CustomDtype | str) -> float:
    """Bytes per element, as torch stores it: a whole one for bool and for torch.int4, a fraction for quint4x2 and for CustomDtype's INT4 and INT2.

    Text names a type, too: `float16`, or `int4` for CustomDtype's. ValueError for anything else.
    """
    if isinstance(dtype, str):
        dtype = _dtype_named(dtype)
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype is needed, such as torch.float16, got {dtype!r}")
    return _PACKED_BYTES.get(dtype, dtype.itemsize)


def convert_file_size_to_int(size: int | float | str) -> int:
    """Bytes of a size: a number of bytes, or text with a unit.

    `KiB MiB GiB TiB PiB EiB` are powers of 1024, `KB MB GB TB PB EB` of 1000; a lower-case `b` at the end means bits (1/8), with either; the rest
    may have any case, blanks and decimals. ValueError for anything else and for negative numbers.
    """
    if isinstance(size, str):
        return _bytes_of_text(size)
    if isinstance(size, bool):
        raise ValueError(_complaint(size))
    if isinstance(size, float):
        if not math.isfinite(size) or size < 0:
            raise ValueError(_complaint(size))
        return int(size)
    try:
        number = operator.index(size)
    except TypeError:
        raise ValueError(_complaint(size)) from None
    if number < 0:
        raise ValueError(_complaint(size))
    return number


def _bytes_of_text(text: str) -> int:
    from decimal import Decimal  # noqa: PLC0415 - 1 ms that a script which never reads a size need not wait

    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(_complaint(text))
    number, prefix, binary, unit = match.groups()
    if prefix is None:
        return int(Decimal(number))
    if binary and not prefix:
        raise ValueError(_complaint(text))
    factor = (1024 if binary else 1000) ** _POWERS[prefix.lower()]
    return int(Decimal(number) * factor / (8 if unit == "b" else 1))


def _complaint(size: object) -> str:
    return f"a size is a number of bytes of at least 0 or text such as '5GB' or '1.5 GiB', got {size!r}"


def _dtype_named(name: str) -> torch.dtype | CustomDtype:
    plain = name.strip()
    if plain in [
        kind.value for kind in CustomDtype
    ]:  # before torch's own int4, of which each element takes a byte
        return CustomDtype(plain)
    found = getattr(torch, plain.removeprefix("torch."), None)
    if isinstance(found, torch.dtype):
        return found
    raise ValueError(f"no dtype is called {name!r}; examples are float32, bfloat16, int8, int4")
