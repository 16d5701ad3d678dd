"""Memory limits of control groups, from a folder that looks like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from acc_bigmodel.cgroup import group_free_bytes

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def member(root: Path, *lines: str) -> None:
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def group(root: Path, path: str, **files: object) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        text = (
            "\n".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
        )
        (folder / f"memory.{name}").write_text(f"{text}\n")


def test_without_groups_there_is_no_limit(root: Path) -> None:
    assert group_free_bytes(root) is None
    member(root, "0::/user.slice")
    assert group_free_bytes(root) is None


def test_a_container_that_sees_itself_as_the_top(root: Path) -> None:
    member(root, "0::/")
    group(root, "", max=4 * GIB, high="max", current=GIB, stat={"anon": GIB})
    assert group_free_bytes(root) == 3 * GIB


def test_file_pages_that_can_be_dropped_are_free(root: Path) -> None:
    member(root, "0::/")
    stat = {"anon": GIB, "file": 3 * GIB, "shmem": GIB, "active_file": GIB, "inactive_file": GIB}
    group(root, "", max=8 * GIB, current=5 * GIB, stat=stat)
    assert group_free_bytes(root) == (8 - 3) * GIB


def test_the_high_mark_counts_too_since_beyond_it_everything_crawls(root: Path) -> None:
    member(root, "0::/")
    group(root, "", max=8 * GIB, high=6 * GIB, current=GIB, stat={})
    assert group_free_bytes(root) == 5 * GIB


def test_the_least_of_all_groups_around_counts(root: Path) -> None:
    member(root, "0::/pods/one/box")
    group(root, "pods", max=10 * GIB, current=8 * GIB)  # others are in it, too
    group(root, "pods/one", max="max", current=GIB)
    group(root, "pods/one/box", max=4 * GIB, current=GIB)
    assert group_free_bytes(root) == 2 * GIB
    group(root, "pods", max=20 * GIB)
    assert group_free_bytes(root) == 3 * GIB
    group(root, "other", max=1, current=0)  # not ours
    assert group_free_bytes(root) == 3 * GIB


def test_the_first_version_has_a_folder_for_memory(root: Path) -> None:
    member(root, "11:cpu,cpuacct:/a", "4:memory:/docker/abc", "0::/")
    limit = {"limit_in_bytes": 4 * GIB, "usage_in_bytes": 3 * GIB}
    stat = {"total_active_file": GIB, "total_inactive_file": GIB // 2, "inactive_file": 7}
    group(root, "memory", limit_in_bytes=UNLIMITED_V1, usage_in_bytes=9 * GIB, stat={})
    group(root, "memory/docker/abc", **limit, stat=stat)
    assert group_free_bytes(root) == GIB + GIB * 3 // 2


def test_a_path_of_the_host_that_the_container_does_not_have_is_the_top(root: Path) -> None:
    member(root, "4:memory:/docker/abc")
    group(root, "memory", limit_in_bytes=2 * GIB, usage_in_bytes=GIB)
    assert group_free_bytes(root) == GIB


def test_a_limit_around_the_container_that_only_its_statistics_tell(root: Path) -> None:
    member(root, "4:memory:/docker/abc")
    files = {"limit_in_bytes": UNLIMITED_V1, "usage_in_bytes": GIB}
    group(root, "memory", **files, stat={"hierarchical_memory_limit": 3 * GIB})
    assert group_free_bytes(root) == 2 * GIB


def test_a_full_group_has_nothing_free(root: Path) -> None:
    member(root, "0::/")
    group(root, "", max=GIB, current=2 * GIB)
    assert group_free_bytes(root) == 0
