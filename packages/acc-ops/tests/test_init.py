"""The package's top level: a table of names that costs nothing, and a stub that agrees with it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import acc_ops
from acc_ops.testing import stub_names


def test_the_stub_and_the_table_are_the_same() -> None:
    assert stub_names(acc_ops) == acc_ops._NAMES


def test_every_name_is_where_the_table_says() -> None:
    for name, home in acc_ops._NAMES.items():
        module = importlib.import_module(f"acc_ops.{home}")
        assert getattr(acc_ops, name) is getattr(module, name)


def test_no_submodule_bears_the_name_of_an_exported_object() -> None:
    modules = {path.stem for path in Path(str(acc_ops.__file__)).parent.glob("*.py")}
    assert not modules & set(acc_ops._NAMES)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        acc_ops.nonsense
    assert "gather" in dir(acc_ops)


def test_importing_it_loads_no_torch_and_using_it_nothing_slow() -> None:
    code = (
        "import sys, acc_ops; early = 'torch' in sys.modules; "
        "from acc_ops import gather, World, send_to_device, set_seed; "
        "slow = ['torch.distributed.fsdp', 'torch.distributed.checkpoint', 'torch._dynamo', 'transformers', 'yaml']; "
        "print(early, [m for m in slow if m in sys.modules])"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert made.strip() == "False []"


ALONE = (
    "world",
    "comm",
    "collectives",
    "exchange",
    "options",
    "enums",
    "environment",
)  # heavier than what follows


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("set_seed", ALONE),
        ("find_executable_batch_size", ALONE),
        ("send_to_device", ALONE),
        ("get_logger", ("collectives", "exchange", "tree", "options", "enums", "watch")),
        ("gather", ("options", "option_fields", "enums", "environment", "watch", "xla_comm", "rng_sharing")),
        ("join_world", ("collectives", "tree", "options", "enums", "watch", "xla_comm")),
    ],
)
def test_a_name_is_imported_with_what_it_needs_only(name: str, without: tuple[str, ...]) -> None:
    code = (
        f"import sys, torch; before = set(sys.modules); from acc_ops import {name}; "
        f"import acc_ops; late = set(sys.modules) - before; "
        f"print([m for m in {without!r} if 'acc_ops.' + m in late], [m for m in late if not m.startswith('acc_ops')])"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert made.strip() == "[] []"
