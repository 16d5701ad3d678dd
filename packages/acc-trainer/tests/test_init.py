"""The package's top level: a table that agrees with its stub, and that costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import acc_trainer
from acc_ops.testing import stub_names

HEAVY = ("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo")


def test_the_stub_names_what_the_table_names():
    assert stub_names(acc_trainer) == acc_trainer._NAMES


@pytest.mark.parametrize("name", sorted(acc_trainer._NAMES))
def test_every_name_is_where_the_table_says(name):
    assert getattr(acc_trainer, name) is not None


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_loads_no_torch():
    assert run("import sys, acc_trainer; print('torch' in sys.modules)").strip() == "False"


def test_the_accelerator_loads_nothing_heavy():
    code = f"import sys, torch; from acc_trainer import Accelerator; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run(code).strip() == "[]"


def test_importing_the_accelerator_opens_few_rooms_beside_torch():
    code = "import sys, torch; before = set(sys.modules); from acc_trainer import Accelerator; print(*set(sys.modules) - before)"
    new = run(code).split()
    assert "acc_trainer.accelerator" in new
    assert len(new) <= 20, new


def test_building_an_accelerator_opens_only_the_rooms_that_every_run_needs():
    code = (
        "import sys, torch; from acc_trainer import Accelerator; Accelerator(cpu=True); "
        "print(*(m for m in sys.modules if m.startswith('acc_')))"
    )
    opened = set(run(code).split())
    assert "acc_trainer.setup" in opened
    late = ("metrics", "profiling", "saving", "uneven", "parallel", "checkpoint", "preparing", "data.prepare")
    assert not opened & {f"acc_trainer.{room}" for room in late}
