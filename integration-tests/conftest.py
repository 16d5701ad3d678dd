"""Shared by the integration tests: the workspace root, and a copy of it that a test may break."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from acc_ops.testing import use_test_profile

use_test_profile()
ROOT = Path(__file__).resolve().parent.parent
# ops_data.py, ops_specs.py and ops_checks.py, architectures.py; processes that a test starts inherit the path.
sys.path[:0] = [str(ROOT / "packages" / "acc-ops" / "tests"), str(ROOT / "integration-tests")]


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def workspace_copy(tmp_path: Path) -> Path:
    """packages/ and tools/ in a folder of their own."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "dist", ".mypy_cache")
    for folder in ("packages", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    return tmp_path
