"""The one switch that is meant to write the environment."""

from __future__ import annotations

import os

from acc_ops.environment import clear_environment
from acc_plugins import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading


def test_the_switch_is_what_transformers_reads() -> None:
    with clear_environment():
        enable_fsdp_ram_efficient_loading()
        assert dict(os.environ) == {"ACCELERATE_USE_FSDP": "True", "FSDP_CPU_RAM_EFFICIENT_LOADING": "True"}
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        enable_fsdp_ram_efficient_loading()
        assert os.environ["ACCELERATE_USE_FSDP"] == "false"
        disable_fsdp_ram_efficient_loading()
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"
