"""The switch that transformers reads: with it, rank 0 reads the weights of a model that FSDP will shard, and the others start empty."""

from __future__ import annotations

import os


def enable_fsdp_ram_efficient_loading() -> None:
    """Let models that are loaded from now on be read by rank 0 only. Writes this process's environment: it is where transformers looks."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")  # noqa: TID251  likewise
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"  # noqa: TID251  writing it is what this is for


def disable_fsdp_ram_efficient_loading() -> None:
    """Let every rank read models that are loaded from now on. Writes this process's environment."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"  # noqa: TID251  likewise
