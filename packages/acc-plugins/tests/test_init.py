"""The package's top level."""

from __future__ import annotations

import subprocess
import sys

import pytest

import acc_plugins
from acc_ops.testing import stub_names


def test_the_stub_lists_the_names_of_the_table() -> None:
    listed = {name: home for name, home in stub_names(acc_plugins).items() if name != "__version__"}
    assert listed == acc_plugins._NAMES


@pytest.mark.parametrize("name", acc_plugins.__all__)
def test_every_name_loads_and_no_submodule_bears_it(name: str) -> None:
    assert getattr(acc_plugins, name).__name__ == name
    assert not any(module == f"acc_plugins.{name}" for module in sys.modules)


def run_alone(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_options_and_the_top_level_load_no_torch() -> None:
    homes = sorted({home for home in acc_plugins._NAMES.values() if home.startswith("options")})
    lines = [f"import acc_plugins.{home}" for home in homes]
    run_alone("\n".join(["import sys", *lines, "import acc_plugins", "assert 'torch' not in sys.modules"]))


def test_strategies_load_none_of_torchs_slow_modules() -> None:
    slow = ("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo")
    run_alone(
        "import sys, torch\n"
        "import acc_plugins.strategies.registry, acc_plugins.support\n"
        f"loaded = [name for name in {slow} if name in sys.modules]\n"
        "assert not loaded, loaded"
    )
