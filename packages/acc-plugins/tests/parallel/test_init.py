"""The top of acc_plugins.parallel."""

from __future__ import annotations

import subprocess
import sys

import acc_plugins.parallel
from acc_ops.testing import stub_names


def test_the_stub_lists_the_names_of_the_table_and_each_loads() -> None:
    assert stub_names(acc_plugins.parallel) == acc_plugins.parallel._NAMES
    for name in acc_plugins.parallel.__all__:
        assert getattr(acc_plugins.parallel, name).__name__ == name


def test_it_loads_no_torch_before_it_is_used() -> None:
    code = "import sys, acc_plugins.parallel; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
