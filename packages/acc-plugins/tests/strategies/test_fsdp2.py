"""FSDP version 2 in a process that is alone: what it does to a model and to optimizers. What several ranks show is in integration-tests/."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from acc_ops.comm import SoloComm
from acc_ops.world import World
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.fsdp2 import FSDP2Strategy
from acc_plugins.strategies.registry import choose_precision
from acc_plugins.strategies.strategy import Bundle
from acc_plugins.support import UnsupportedError

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP version 2 on a CPU"
)


def strategy(world: World, precision: Precision | None = None, **options: Any) -> FSDP2Strategy:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    return FSDP2Strategy(world, precision or Precision(), plugin)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def test_what_it_cannot_do_is_said_when_it_is_built(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs fsdp_version=2, got 1: use FSDP1Strategy"):
        FSDP2Strategy(alone, Precision(), FullyShardedDataParallelPlugin(fsdp_version=1))
    solo = World(device=torch.device("cpu"), comm=SoloComm())
    with pytest.raises(ValueError, match="speaks through SoloComm"):
        strategy(solo)
    monkeypatch.setattr(torch.cpu, "Stream", object)
    with pytest.raises(UnsupportedError, match=r"does not run on a CPU with torch .* fsdp_version=1"):
        strategy(alone)


@needs_fsdp2
def test_the_policy_of_the_plugin_wins_and_a_derived_one_returns_float32(alone: World) -> None:
    own = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    bf16 = choose_precision("bf16", "cpu")
    assert strategy(alone, bf16, mixed_precision_policy=own).sharding.policy == own
    derived = strategy(alone, bf16).sharding.policy
    assert (derived.param_dtype, derived.reduce_dtype, derived.output_dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    assert strategy(alone).sharding.policy == MixedPrecisionPolicy()


@needs_fsdp2
def test_memory_is_not_pinned_on_a_cpu(alone: World) -> None:
    assert strategy(alone, cpu_offload=True).sharding.offload == CPUOffloadPolicy(pin_memory=False)


@needs_fsdp2
def test_an_output_format_is_the_roots_only(alone: World) -> None:
    policy = {"param_dtype": "bf16", "output_dtype": "fp16"}
    bf16 = choose_precision("no", "cpu")
    made = strategy(alone, bf16, auto_wrap_policy=is_linear, mixed_precision_policy=policy)
    (model,) = made.prepare(Bundle(models=[net()])).models
    assert model(torch.ones(1, 4)).dtype is torch.float16


@needs_fsdp2
def test_two_formats_that_are_trained_in_one_unit_are_refused_before_anything_is_changed(
    alone: World,
) -> None:
    def two_formats() -> nn.Sequential:
        model = net()
        model[2].to(torch.bfloat16)
        return model

    model = two_formats()
    said = r"0\.weight of Sequential holds numbers of torch\.float32 and 2\.weight of torch\.bfloat16: both are trained, .*auto_wrap_policy"
    with pytest.raises(ValueError, match=said):
        strategy(alone).prepare(Bundle(models=[model]))
    assert type(model) is nn.Sequential
    made = strategy(alone, auto_wrap_policy=is_linear)
    made.prepare(Bundle(models=[model]))
    made.backward(model[2](model[0](torch.ones(1, 4)).bfloat16()).sum())
    strategy(alone, choose_precision("bf16", "cpu")).prepare(
        Bundle(models=[two_formats()])
    )  # both become float32
    frozen = two_formats()
    frozen[2].requires_grad_(False)
    assert isinstance(strategy(alone).prepare(Bundle(models=[frozen])).models[0], FSDPModule)


@needs_fsdp2
def test_a_parameter_without_elements_stays_whole_and_the_rest_is_trained(alone: World) -> None:
    model = net()
    model.none = nn.Parameter(torch.ones(0, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    made = strategy(alone, auto_wrap_policy=is_linear)
    made.prepare(Bundle(models=[model], optimizers=[optimizer]))
    before = model[0].weight.full_tensor().detach().clone()
    made.backward(model(torch.ones(1, 4)).sum() + model.none.sum())
    optimizer.step()
    assert type(model.none) is nn.Parameter
    assert model.none.grad.shape == (0, 3)
    assert not torch.equal(model[0].weight.full_tensor(), before)
    assert list(made.state(model)) == ["none", "0.weight", "0.bias", "2.weight", "2.bias"]


@needs_fsdp2
def test_without_sync_nests_and_a_backward_may_synchronise_inside(alone: World) -> None:
    made = strategy(alone, auto_wrap_policy=is_linear)
    (model,) = made.prepare(Bundle(models=[net()])).models

    def syncs() -> set[bool]:
        return {part._get_fsdp_state()._fsdp_param_group.reduce_grads for part in model if is_linear(part)}

    with made.without_sync(model):
        with made.without_sync(model):
            assert syncs() == {False}
        assert syncs() == {False}
        with made.sync_next_backward(model):
            assert syncs() == {True}
        assert syncs() == {False}
    assert syncs() == {True}


@needs_fsdp2
def test_a_failed_prepare_leaves_no_precision_behind(alone: World) -> None:
    made = strategy(alone, choose_precision("bf16", "cpu"), auto_wrap_policy="transformer_based_wrap",
                    transformer_cls_names_to_wrap=["Missing"])  # fmt: skip
    model = net()
    with pytest.raises(ValueError, match="'Missing'"):
        made.prepare(Bundle(models=[model]))
    assert type(model) is nn.Sequential
    assert model(torch.ones(1, 4)).dtype is torch.float32


@needs_fsdp2
def test_nothing_that_was_prepared_is_kept_after_close(alone: World) -> None:
    made = strategy(alone)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = next(model.parameters())
    made.prepare(Bundle(models=[model]))
    made.close()
    made.prepare(Bundle(optimizers=[optimizer]))
    assert optimizer.param_groups[0]["params"][0] is old


@needs_fsdp2
def test_blocks_compute_again_only_where_a_policy_chooses_some(
    alone: World, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: Any) -> Any:
            calls.append(1)
            return super().forward(x)

    for options, expected in (({}, 1), ({"auto_wrap_policy": is_linear}, 2)):
        calls.clear()
        made = strategy(alone, activation_checkpointing=True, **options)
        (model,) = made.prepare(Bundle(models=[nn.Sequential(Counted(2, 2), nn.Tanh())])).models
        made.backward(model(torch.ones(1, 2)).sum())
        assert len(calls) == expected
        with torch.no_grad():
            model(torch.ones(1, 2))
        assert len(calls) == expected + 1
    assert "activation_checkpointing has no effect on Sequential" in caplog.text


@needs_fsdp2
def test_the_classes_of_the_user_stay(alone: World) -> None:
    made = strategy(alone, auto_wrap_policy=is_linear)
    model = net()
    (prepared,) = made.prepare(Bundle(models=[model])).models
    assert prepared is model
    assert made.unwrap(prepared) is model
    assert isinstance(model, nn.Sequential)
    assert isinstance(model[0], FSDPModule)
