"""tools/release.py on a copy of the workspace: what it bumps, what it moves, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    tool = folder / "tools" / "release.py"
    command = [sys.executable, str(tool), *arguments, "--root", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def read(folder: Path, package: str, file: str) -> str:
    return (folder / "packages" / package / file).read_text()


def only_fragment(folder: Path, package: str, name: str | None) -> None:
    changes = folder / "packages" / package / "changelog.d"
    for path in changes.iterdir():
        path.unlink()
    if name is not None:
        (changes / name).write_text("Something users notice.\n")


def test_a_minor_release_bumps_the_version_and_moves_the_pins_of_the_dependents(workspace_copy: Path) -> None:
    only_fragment(workspace_copy, "acc-ops", "12.fixed.md")
    done = release(workspace_copy, "acc-ops", "minor")
    assert done.returncode == 0, done.stderr
    assert '__version__ = "0.2.0"' in read(workspace_copy, "acc-ops", "src/acc_ops/__about__.py")
    changelog = read(workspace_copy, "acc-ops", "CHANGELOG.md")
    assert "## 0.2.0" in changelog
    assert "Something users notice. (#12)" in changelog
    for dependent in ("acc-hooks", "acc-bigmodel", "acc-plugins", "acc-trainer", "acc-compat"):
        assert '"acc-ops>=0.2,<0.3"' in read(workspace_copy, dependent, "pyproject.toml")
        assert "acc-ops >=0.2,<0.3" in read(
            workspace_copy, dependent, "changelog.d/+acc-ops-0.2.0.changed.md"
        )
    assert "git tag acc-ops-v0.2.0" in done.stdout


def test_extras_of_a_pin_are_kept(workspace_copy: Path) -> None:
    only_fragment(workspace_copy, "acc-bigmodel", "+new.added.md")
    assert release(workspace_copy, "acc-bigmodel", "minor").returncode == 0
    assert '"acc-bigmodel[hub]>=0.2,<0.3"' in read(workspace_copy, "acc-trainer", "pyproject.toml")


def test_a_patch_release_leaves_the_pins_alone(workspace_copy: Path) -> None:
    only_fragment(workspace_copy, "acc-ops", "3.fixed.md")
    before = read(workspace_copy, "acc-hooks", "pyproject.toml")
    assert release(workspace_copy, "acc-ops", "patch").returncode == 0
    assert '__version__ = "0.1.1"' in read(workspace_copy, "acc-ops", "src/acc_ops/__about__.py")
    assert read(workspace_copy, "acc-hooks", "pyproject.toml") == before


def test_the_fragments_are_used_up_so_that_the_next_release_refuses(workspace_copy: Path) -> None:
    only_fragment(workspace_copy, "acc-ops", "3.fixed.md")
    assert release(workspace_copy, "acc-ops", "patch").returncode == 0
    again = release(workspace_copy, "acc-ops", "patch")
    assert again.returncode != 0
    assert "no changelog fragment" in again.stderr
    assert '__version__ = "0.1.1"' in read(workspace_copy, "acc-ops", "src/acc_ops/__about__.py")


def test_wrong_words_are_refused_before_anything_is_written(workspace_copy: Path) -> None:
    only_fragment(workspace_copy, "acc-ops", "3.fixed.md")
    for arguments, message in [
        (("acc-opz", "minor"), "no package 'acc-opz'"),
        (("acc-ops", "mini"), "'mini' is neither"),
        (("acc-ops", "0.0.9"), "not newer"),
    ]:
        done = release(workspace_copy, *arguments)
        assert done.returncode != 0
        assert message in done.stderr
    assert '__version__ = "0.1.0"' in read(workspace_copy, "acc-ops", "src/acc_ops/__about__.py")


def test_a_misnamed_fragment_is_refused(workspace_copy: Path) -> None:
    only_fragment(workspace_copy, "acc-ops", "3.bugfix.md")
    done = release(workspace_copy, "acc-ops", "minor")
    assert done.returncode != 0
    assert "<id>.<kind>.md" in done.stderr
