"""A script for a Python in which `accelerate` is acc: transformers loads models with a device map, runs and saves them.

Argument: an empty folder. Prints `model/placement` for each that computed what the model in memory does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.integrations.accelerate as placing
from architectures import ARCHITECTURES, SWEPT, Architecture, by_layer, by_parameter
from torch import nn

from acc_bigmodel import dispatch_model
from acc_hooks.hook import remove_hook_from_module
from acc_hooks.visit import has_offloaded_params


def device_maps(model: nn.Module, architecture: Architecture) -> dict[str, dict[str, Any]]:
    """What `from_pretrained` is told, by the name of the placement."""
    half = sum(tensor.nbytes for tensor in model.parameters()) // 2
    maps: list[dict[str, Any]] = [
        {"device_map": {"": "cpu"}},
        {"device_map": {"": "disk"}},
        {"device_map": by_layer(model, architecture)},
        {"device_map": by_parameter(model, architecture)},
        {"device_map": "auto", "max_memory": {"cpu": half}},
    ]
    return dict(zip(SWEPT, maps, strict=True))


def check(name: str, folder: Path) -> None:
    architecture = ARCHITECTURES[name]
    torch.manual_seed(1)
    plain: Any = architecture.build().eval()
    plain.save_pretrained(folder / name, max_shard_size="20KB")
    expected = architecture.run(plain)
    for placement, options in device_maps(plain, architecture).items():
        offload = folder / name / placement
        load: Callable[..., Any] = type(plain).from_pretrained
        model = load(folder / name, offload_folder=offload, **options).eval()
        assert any(map(has_offloaded_params, model.modules())) == (placement != "cpu"), model.hf_device_map
        compare(architecture.run(model), expected)
        model.save_pretrained(folder / "again")
        compare(architecture.run(load(folder / "again").eval()), expected)
        compare(dict(remove_hook_from_module(model, recurse=True).state_dict()), plain.state_dict())
        compare(architecture.run(model), expected)
        print(f"{name}/{placement}")


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    assert placing.dispatch_model is dispatch_model, "transformers places its models with something else"
    torch.set_num_threads(1)
    for name in ("gpt2", "llama", "t5"):
        check(name, Path(sys.argv[1]))
