"""Tests of the package's top level."""

from __future__ import annotations

import acc_compat
from acc_ops.testing import stub_names


def test_the_stub_names_what_the_table_names() -> None:
    assert stub_names(acc_compat) == acc_compat._NAMES


def test_every_exported_name_is_there() -> None:
    for name in acc_compat.__all__:
        assert getattr(acc_compat, name).__name__ == name
