"""`.ci/run` itself: it passes when each of its steps passes and fails when one does not, with every command replaced by one that ends at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# `python3 -m venv FOLDER` makes a "hatch" there that fails for the words in FAILING, and says what it was asked
PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\nexit 0\\n' >"$3/bin/pip"
printf '#!/bin/sh\\necho "acc-ops: 3 passed, asked for $2"\\n[ "$2" != "$FAILING" ]\\n' >"$3/bin/hatch"
chmod +x "$3/bin/pip" "$3/bin/hatch"
"""


@pytest.fixture
def pipeline(tmp_path: Path, root: Path) -> Path:
    """A copy of the script, beside stand-ins for what it calls."""
    for name in (".ci", "stand-ins", "temporary"):
        (tmp_path / name).mkdir()
    python = tmp_path / "stand-ins" / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return Path(shutil.copy(root / ".ci" / "run", tmp_path / ".ci" / "run"))


def run(pipeline: Path, failing: str) -> subprocess.CompletedProcess[str]:
    home = pipeline.parent.parent
    path = f"{home / 'stand-ins'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(pipeline)],
        env={**os.environ, "PATH": path, "FAILING": failing, "TMPDIR": str(home / "temporary")},
        capture_output=True,
        text=True,
        timeout=60,
    )


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the pipeline is a bash script")


def test_it_passes_with_its_steps_and_leaves_nothing_behind(pipeline: Path) -> None:
    done = run(pipeline, failing="nothing")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== done" in done.stdout
    assert list((pipeline.parent.parent / "temporary").iterdir()) == []


@pytest.mark.parametrize("step", ["lint", "types", "layers", "sizes", "docs", "demo", "test", "isolation"])
def test_it_fails_with_any_step_and_leaves_nothing_behind(pipeline: Path, step: str) -> None:
    done = run(pipeline, failing=step)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"asked for {step}" in done.stdout
    assert "== done" not in done.stdout
    assert list((pipeline.parent.parent / "temporary").iterdir()) == []
