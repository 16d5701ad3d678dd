"""Which strategy and precision a run gets."""

from __future__ import annotations

import logging

import pytest
import torch

from acc_ops.comm import SoloComm
from acc_ops.enums import PrecisionType
from acc_ops.testing import run_threads
from acc_ops.world import World, current_world
from acc_plugins.options.fp8 import MSAMPRecipeKwargs
from acc_plugins.options.kwargs import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.registry import choose_precision, choose_strategy
from acc_plugins.support import UnsupportedError

SOLO = World(device=torch.device("cpu"), comm=SoloComm())


def test_one_rank_gets_a_single_device() -> None:
    strategy = choose_strategy(
        SOLO, Precision(), ddp_options=DistributedDataParallelKwargs(), save_on_each_node=True
    )
    assert (strategy.name, strategy.save_on_each_node) == ("single", True)


def test_ranks_that_are_threads_get_the_replicated_strategy() -> None:
    def run() -> tuple[str, bool]:
        strategy = choose_strategy(
            current_world(), Precision(), ddp_options=DistributedDataParallelKwargs(broadcast_buffers=False)
        )
        return strategy.name, strategy.broadcast_buffers

    assert run_threads(2, run) == [("replicated", False)] * 2


def test_communication_hooks_without_ddp_are_refused() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="ThreadComm"):
            choose_strategy(
                current_world(), Precision(), ddp_options=DistributedDataParallelKwargs(comm_hook="fp16")
            )

    run_threads(2, run)


@pytest.mark.parametrize(
    ("given", "name"),
    [(None, "no"), ("no", "no"), ("bf16", "bf16"), ("FP16", "fp16"), (PrecisionType.BF16, "bf16")],
)
def test_precisions_by_name(given: str | None, name: str) -> None:
    assert choose_precision(given, "cpu").name == name


@pytest.mark.parametrize("kind", ["xla", "hpu"])
def test_a_device_without_a_torch_module_is_not_asked_for_its_hardware(kind: str) -> None:
    assert choose_precision("bf16", kind).name == "bf16"


def test_an_unknown_precision_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fp4'.*no, fp8, fp16, bf16"):
        choose_precision("fp4", "cpu")


def test_fp8_where_the_device_has_none_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"on xla: neither torchao .* use mixed_precision='bf16'"):
        choose_precision("fp8", "xla")


@pytest.mark.parametrize("name", ["no", "bf16", "fp16"])
def test_a_recipe_for_fp8_without_fp8_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="MSAMPRecipeKwargs is a recipe for mixed_precision='fp8'"):
        choose_precision(name, "cpu", fp8_recipe=MSAMPRecipeKwargs())


def test_fp16_where_there_is_no_scaler_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="bf16"):
        choose_precision("fp16", "xla")


def test_options_reach_the_precision() -> None:
    precision = choose_precision(
        "fp16",
        "cpu",
        scaler_options=GradScalerKwargs(init_scale=8.0),
        autocast_options=AutocastKwargs(enabled=False),
    )
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 8
    with precision.context():
        assert not torch.is_autocast_enabled("cpu")
    with precision.context(enabled=True):
        assert torch.is_autocast_enabled("cpu")


def test_options_without_effect_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choose_precision("bf16", "cpu", scaler_options=GradScalerKwargs())
        choose_precision("no", "cpu", autocast_options=AutocastKwargs())
    assert [record.message.split()[0] for record in caplog.records] == ["GradScalerKwargs", "AutocastKwargs"]
