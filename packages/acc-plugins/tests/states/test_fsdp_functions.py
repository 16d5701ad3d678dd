from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from acc_ops.optional import is_available
from acc_ops.parting import destroy_group
from acc_plugins import (
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event") or not is_available("numpy"),
    reason="this torch has no FSDP version 2 on a CPU, or no NumPy to send plans through",
)
ACCELERATOR = SimpleNamespace()  # they need nothing of it


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    destroy_group()


def _plugin(kind: str) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)


def _trained(seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "index", "files"),
    [
        ("FULL_STATE_DICT", 0, {"pytorch_model_fsdp.bin", "optimizer.bin"}),
        ("FULL_STATE_DICT", 1, {"pytorch_model_fsdp_1.bin", "optimizer_1.bin"}),
        ("SHARDED_STATE_DICT", 0, {"pytorch_model_fsdp_0", "optimizer_0"}),
        ("SHARDED_STATE_DICT", 1, {"pytorch_model_fsdp_1", "optimizer_1"}),
    ],
)
def test_what_is_saved_comes_back(tmp_path: Path, kind: str, index: int, files: set[str]) -> None:
    folder = tmp_path / "ck"
    model, optimizer = _trained(0)
    save_fsdp_model(_plugin(kind), ACCELERATOR, model, folder, index)
    save_fsdp_optimizer(_plugin(kind), ACCELERATOR, optimizer, model, folder, index)
    assert {file.name for file in folder.iterdir()} == files
    other, again = _trained(1)
    result = load_fsdp_model(_plugin("FULL_STATE_DICT"), ACCELERATOR, other, folder, index)
    load_fsdp_optimizer(_plugin("FULL_STATE_DICT"), ACCELERATOR, again, other, folder, index)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for one, its in ((model, optimizer), (other, again)):
        one(torch.ones(1, 2)).sum().backward()
        its.step()
    state = model.state_dict()
    assert all(
        torch.equal(value.to_local(), state[name].to_local()) for name, value in other.state_dict().items()
    )


def test_the_folder_of_shards_may_be_given_itself(tmp_path: Path) -> None:
    model, _ = _trained(0)
    save_fsdp_model(_plugin("SHARDED_STATE_DICT"), ACCELERATOR, model, tmp_path)
    other, _ = _trained(1)
    load_fsdp_model(_plugin("SHARDED_STATE_DICT"), ACCELERATOR, other, tmp_path / "pytorch_model_fsdp_0")
    assert torch.equal(other[0].weight.to_local(), model[0].weight.to_local())


class _PeftModel(nn.Module):
    """As peft's: a frozen base, an adapter with its name in the names of its weights, which files lack."""

    active_adapter = "mine"

    def __init__(self, value: float) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2)
        self.lora_A = nn.ModuleDict({"mine": nn.Linear(2, 2, bias=False)})
        nn.init.constant_(self.lora_A["mine"].weight, value)
        nn.init.constant_(self.base.weight, value)


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library, which is not installed everywhere."""

    def get_state(model: nn.Module, state_dict: Any = None, adapter_name: str = "default") -> Any:
        state = model.state_dict() if state_dict is None else state_dict
        return {
            name.replace(f".{adapter_name}", ""): value for name, value in state.items() if "lora_" in name
        }

    def set_state(model: nn.Module, state: Any, adapter_name: str = "default") -> Any:
        return model.load_state_dict(
            {name.replace("lora_A", f"lora_A.{adapter_name}"): value for name, value in state.items()},
            strict=False,
        )

    module: Any = ModuleType("peft")
    module.PeftModel, module.get_peft_model_state_dict, module.set_peft_model_state_dict = (
        _PeftModel,
        get_state,
        set_state,
    )
    module.__version__ = "0.0"
    monkeypatch.setitem(sys.modules, "peft", module)


@pytest.mark.usefixtures("peft")
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_of_an_adapter_only_the_adapter_is_saved_and_loaded(tmp_path: Path, kind: str) -> None:
    model, other = _PeftModel(3.0), _PeftModel(5.0)
    for one in (model, other):
        fully_shard(one)
    save_fsdp_model(_plugin(kind), ACCELERATOR, model, tmp_path / "ck", adapter_only=True)
    if kind == "FULL_STATE_DICT":
        assert list(torch.load(tmp_path / "ck" / "pytorch_model_fsdp.bin", weights_only=True)) == [
            "lora_A.weight"
        ]
    load_fsdp_model(_plugin(kind), ACCELERATOR, other, tmp_path / "ck", adapter_only=True)
    assert other.lora_A["mine"].weight.full_tensor().unique().tolist() == [3.0]
    assert other.base.weight.full_tensor().unique().tolist() == [5.0]


def test_adapter_only_says_when_it_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = _trained(0)
    save_fsdp_model(_plugin("FULL_STATE_DICT"), ACCELERATOR, model, tmp_path / "ck", adapter_only=True)
    assert "adapter_only has no effect" in caplog.text
    assert len(torch.load(tmp_path / "ck" / "pytorch_model_fsdp.bin", weights_only=True)) == 4


def test_local_parts_are_refused_with_the_way_out(tmp_path: Path) -> None:
    model, _ = _trained(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type="LOCAL_STATE_DICT")
    with pytest.raises(ValueError, match="Use SHARDED_STATE_DICT"):
        save_fsdp_model(plugin, ACCELERATOR, model, tmp_path)
