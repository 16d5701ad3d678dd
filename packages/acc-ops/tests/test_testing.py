"""Ranks as threads and as processes, and what happens when one of them fails."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings

from acc_ops.collectives import gather
from acc_ops.testing import RankFailed, run_processes, run_threads, stub_names
from acc_ops.world import current_world


def test_examples_are_the_same_everywhere_and_none_is_judged_by_its_time() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None
    assert settings.default.derandomize


def test_each_thread_is_a_rank_of_its_own_world() -> None:
    def call() -> tuple[int, int, bool, list[int]]:
        world = current_world()
        return world.rank, world.size, world.verify, gather(torch.tensor(world.rank)).tolist()

    assert run_threads(3, call) == [(r, 3, True, [0, 1, 2]) for r in range(3)]
    assert [w.verify for w in run_threads(2, current_world, verify=False)] == [False, False]
    assert [str(w.device) for w in run_threads(2, current_world, device="meta")] == ["meta", "meta"]


def test_the_cause_is_raised_not_what_followed_from_it() -> None:
    def call() -> None:
        if current_world().rank == 2:
            raise LookupError("the cause")
        gather(torch.ones(1))

    with pytest.raises(LookupError, match="the cause") as caught:
        run_threads(3, call)
    assert caught.value.__notes__ == ["on rank 2"]


def test_a_rank_that_hangs_is_shown() -> None:
    def call() -> None:
        while current_world().rank == 1:
            time.sleep(0.01)
            if time.monotonic() > deadline:
                return

    deadline = time.monotonic() + 20
    with pytest.raises(RankFailed, match=r"(?s)rank 1 did not end within 0.1 s.*time.sleep"):
        run_threads(2, call, timeout_s=0.1, grace_s=0.1)


def fails_on_one(code: int) -> int:
    if current_world().rank == 1:
        raise LookupError(f"code {code} in process {os.getpid()}")
    gather(torch.ones(1))  # never met: what this rank raises follows from the other's error
    return code


def test_a_process_that_raises_shows_its_traceback_and_not_what_followed_from_it() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 raised.*fails_on_one.*LookupError: code 7"):
        run_processes(2, fails_on_one, 7)


def test_stub_names_reads_what_a_stub_exports(tmp_path: Path) -> None:
    package = ModuleType("example")
    package.__file__ = str(tmp_path / "__init__.py")
    (tmp_path / "__init__.pyi").write_text(
        "from .__about__ import __version__ as __version__\nfrom .a import x as x\nfrom .b.c import y as y, z\n"
    )
    assert stub_names(package) == {"x": "a", "y": "b.c"}
    with pytest.raises(ValueError, match="bare has no file"):
        stub_names(ModuleType("bare"))


def test_a_function_of_a_file_that_no_name_leads_to_runs_in_processes(tmp_path: Path) -> None:
    file = tmp_path / "hidden_from_imports.py"
    file.write_text("def double(x):\n    return 2 * x\n")
    spec = importlib.util.spec_from_file_location("hidden_from_imports", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hidden_from_imports"] = module
    try:
        spec.loader.exec_module(module)
        assert run_processes(1, module.double, 21) == [42]
    finally:
        del sys.modules["hidden_from_imports"]
