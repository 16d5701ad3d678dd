"""What several test files need: a clean interpreter to run code in, and the name given back after each test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import acc_compat
from acc_compat import alias
from acc_ops.testing import use_test_profile

use_test_profile()

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Run a fresh Python with arguments, in `cwd` (a temporary folder), with extra environment variables."""

    def run(*arguments: str, cwd: Path = tmp_path, **variables: str) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if key != "ACC_COMPAT"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**clean, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def name_is_ours() -> Iterator[None]:
    """`accelerate` means acc for one test, and what was there before is back afterwards."""
    before = alias.installed()
    acc_compat.install(force=True)
    yield
    if before is None:
        acc_compat.uninstall()
