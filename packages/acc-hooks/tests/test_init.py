from __future__ import annotations

import subprocess
import sys

import acc_hooks
from acc_ops.testing import stub_names


def test_the_stub_names_what_the_table_names():
    stub = stub_names(acc_hooks)
    stub.pop("__version__", None)
    assert stub == acc_hooks._NAMES


def test_every_public_name_can_be_had_and_is_documented():
    for name in acc_hooks.__all__:
        assert getattr(acc_hooks, name).__doc__


def test_no_submodule_bears_the_name_of_an_export():
    assert not set(acc_hooks._NAMES) & set(acc_hooks._NAMES.values())


def test_importing_the_package_does_not_import_torch():
    code = "import sys, acc_hooks; dir(acc_hooks); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_first_hooked_call_does_not_import_dynamo():
    code = """
import sys, torch
from acc_hooks import *
m = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
attach_align_device_hook_on_blocks(m, {"0": "cpu", "1": "cpu"}, {"0": False, "1": True})
attach_layerwise_casting_hooks(m, torch.bfloat16, torch.float32)
with torch.no_grad():
    m(torch.ones(1, 2))
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
