"""The steps by the names that other libraries use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule

from acc_ops.world import World
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.strategies import fsdp_utils

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP version 2 on a CPU"
)


def accelerator(world: World, **options: Any) -> Any:
    """What these functions ask of an accelerator."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        device=world.device,
        torch_device_mesh=None,
        parallelism_config=None,
        mixed_precision="no",
        is_main_process=True,
    )


@needs_fsdp2
def test_a_model_is_sharded_once(alone: World) -> None:
    own = accelerator(alone, auto_wrap_policy=lambda module: isinstance(module, nn.Linear))
    model = nn.Sequential(nn.Linear(2, 2))
    assert fsdp_utils.fsdp2_prepare_model(own, model) is model
    assert isinstance(model[0], FSDPModule)
    weight = model[0].weight
    assert fsdp_utils.fsdp2_prepare_model(own, model)[0].weight is weight


@needs_fsdp2
def test_whole_weights_of_rank_0_are_sharded_into_a_model_on_meta(alone: World) -> None:
    own = accelerator(alone)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    torch.distributed.fsdp.fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    values = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict()
    with pytest.raises(KeyError, match=r"full_sd on rank 0 lacks 0\.weight"):
        fsdp_utils.fsdp2_load_full_state_dict(
            own, model, {k: v for k, v in values.items() if k != "0.weight"}
        )
    fsdp_utils.fsdp2_load_full_state_dict(own, model, values)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, values[name]), (
            name
        )
    assert model(torch.ones(2, 2)).shape == (2, 3)


def test_a_policy_is_a_question_about_modules_or_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert (
        fsdp_utils.fsdp2_prepare_auto_wrap_policy(FullyShardedDataParallelPlugin(fsdp_version=2), model)
        is None
    )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    asked = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert asked is not None
    assert [asked(module) for module in model] == [True, False]


def test_names_lose_what_wrappers_put_into_them() -> None:
    given = {"_orig_mod.a._checkpoint_wrapped_module.weight": 1, "b.bias": 2}
    assert fsdp_utils.fsdp2_canonicalize_names(given) == {"a.weight": 1, "b.bias": 2}


def test_an_optimizer_gets_the_parameters_of_a_mapping() -> None:
    old, new = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([old], lr=0.1)
    with pytest.raises(KeyError):
        fsdp_utils.fsdp2_switch_optimizer_parameters(optimizer, {-1: new})
    fsdp_utils.fsdp2_switch_optimizer_parameters(optimizer, {old.data_ptr(): new})
    assert optimizer.param_groups[0]["params"][0] is new
    placeholder = torch.empty(1)
    placeholder.data_ptr = 7
    optimizer.param_groups[0]["params"] = [placeholder]
    fsdp_utils.fsdp2_switch_optimizer_parameters(optimizer, {7: old})
    assert optimizer.param_groups[0]["params"][0] is old


def test_the_scaler_is_torchs() -> None:
    scaler = fsdp_utils.get_fsdp2_grad_scaler(device="cpu", init_scale=4.0)
    assert type(scaler) is GradScaler
    assert scaler.get_scale() == 4


def test_parameters_of_modules_by_name_or_by_themselves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = fsdp_utils.get_parameters_from_modules
    assert found(None, model, "cpu") == set()
    assert found("1", model, "cpu") == set(model[1].parameters()) == found([model[1]], model, "cpu")
    assert found(r"\d", model, "cpu") == set(model.parameters())
    assert all(p.is_meta for p in found("0", model, "meta"))


def test_shared_weights_are_shared_again_after_they_are_made() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("meta")
    model[1].weight = model[0].weight

    def make(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)

    assert fsdp_utils.ensure_weights_retied(make, model, "cpu") is make
    model._tied_weights_keys = ["1.weight"]
    retied = fsdp_utils.ensure_weights_retied(make, model, "cpu")
    for module in model:
        retied(module)
    assert model[0].weight is model[1].weight
    assert not model[0].weight.is_meta
    assert model[0].bias is not model[1].bias


@needs_fsdp2
def test_blocks_compute_again_where_the_policy_says_so(alone: World) -> None:
    calls: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: Any) -> Any:
            calls.append(1)
            return super().forward(x)

    model = nn.Sequential(Counted(2, 2))
    own = accelerator(alone, auto_wrap_policy=lambda module: isinstance(module, Counted))
    for _ in range(2):  # asked twice it is done once
        assert fsdp_utils.fsdp2_apply_ac(own, model) is model
    model(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 2
