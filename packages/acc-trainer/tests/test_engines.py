"""Which engines a run asks for: by argument or by variable, the same errors for all that cannot be, and a process alone can have them too."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from acc_ops.enums import DistributedType
from acc_ops.testing import run_threads
from acc_plugins import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
    UnsupportedError,
)
from acc_trainer import Accelerator
from acc_trainer.state import AcceleratorState, PartialState, is_initialized

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP version 2 on a CPU"
)


@pytest.fixture(autouse=True)
def no_group_is_left():
    """A process group that a run made goes with it."""
    yield
    if is_initialized():
        AcceleratorState().destroy_process_group()
    assert not dist.is_initialized()


@needs_fsdp2
def test_a_process_alone_shards_over_itself_and_leaves_no_group() -> None:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    state = accelerator.state
    assert (accelerator.distributed_type, accelerator.is_fsdp2) == (DistributedType.FSDP, True)
    assert state.fsdp_plugin.fsdp_version == 2
    assert PartialState().distributed_type is DistributedType.NO
    model = nn.Linear(3, 2)
    expected = model.weight.detach().clone()
    model, optimizer = accelerator._prepare_fsdp2(model, torch.optim.SGD(model.parameters(), lr=0.5))
    assert accelerator.prepare(model, optimizer) == (model, optimizer)
    named = accelerator._get_named_parameters(optimizer, model)
    assert named == dict(model.named_parameters())
    places = accelerator._get_named_parameters(model, drop_refs=True)
    assert places == {name: p.to_local().data_ptr() for name, p in named.items()}
    assert model.weight.full_tensor().equal(expected)
    accelerator.backward(model(torch.ones(1, 3)).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 100.0).item() == pytest.approx(8**0.5)
    optimizer.step()
    torch.testing.assert_close(accelerator.get_state_dict(model)["weight"], expected - 0.5)
    accelerator.end_training()
    assert not dist.is_initialized()
    assert Accelerator().distributed_type is DistributedType.NO


def test_a_run_without_shards_or_split_sequences_says_so_to_who_counts_on_them() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"prepared by Strategy here, not by FSDP2.*fsdp_version=2"):
        accelerator._prepare_fsdp2(model)
    assert accelerator._prepare_cp(model, "else") == (model, "else")
    assert accelerator._get_named_parameters(model) == dict(model.named_parameters())


@needs_fsdp2
def test_a_run_that_could_not_begin_leaves_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        assert dist.is_initialized()
        raise ValueError("no mesh today")

    with monkeypatch.context() as patch:
        patch.setattr("acc_trainer.state.mesh_of", fails)
        with pytest.raises(ValueError, match="no mesh today"):
            Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert not dist.is_initialized()
    assert not is_initialized()
    assert PartialState().world.comm.__class__.__name__ == "SoloComm"
    Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)).end_training()
    assert not dist.is_initialized()


@needs_fsdp2
@pytest.mark.parametrize(("version", "name"), [("1", "fsdp1"), ("2", "fsdp2")])
def test_variables_turn_fsdp_on(monkeypatch: pytest.MonkeyPatch, version: str, name: str) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    accelerator = Accelerator()
    assert (accelerator.strategy.name, accelerator.is_fsdp2) == (name, version == "2")
    assert Accelerator().state.fsdp_plugin is accelerator.state.fsdp_plugin
    accelerator.end_training()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert Accelerator().strategy.name == "single"


def test_variables_turn_a_parallelism_config_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(ValueError, match="tp_size=2 makes 2 ranks, but there are 1 processes"):
        Accelerator()
    assert not is_initialized()


@needs_fsdp2
def test_transformers_hears_that_only_rank_0_reads_while_the_run_lasts() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    accelerator = Accelerator(fsdp_plugin=plugin)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == os.environ["ACCELERATE_USE_FSDP"] == "true"
    accelerator.end_training()
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ
    assert Accelerator().distributed_type is DistributedType.NO


@pytest.mark.parametrize("name", ["fsdp_plugin", "torch_tp_plugin", "parallelism_config"])
@pytest.mark.parametrize("door", [Accelerator, AcceleratorState])
def test_what_is_no_plugin_is_a_type_error_at_both_doors(name: str, door: type) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be a \w+, got int: 5"):
        door(**{name: 5})
    assert not is_initialized()


@needs_fsdp2
def test_engines_that_contradict_each_other_are_refused_with_a_remedy() -> None:
    fsdp1, fsdp2 = (FullyShardedDataParallelPlugin(fsdp_version=version) for version in (1, 2))
    with pytest.raises(ValueError, match=r"needs fsdp_version=2, got 1: give Fully"):
        Accelerator(fsdp_plugin=fsdp1, parallelism_config=ParallelismConfig(dp_shard_size=2))
    with pytest.raises(
        ValueError, match=r"dp_shard_size=2 shards the model, which FSDP does: give fsdp_plugin="
    ):
        Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))
    with pytest.raises(ValueError, match="leave out torch_tp_plugin"):
        Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(), parallelism_config=ParallelismConfig())
    accelerator = Accelerator(fsdp_plugin=fsdp2)
    assert Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)).strategy.name == "fsdp2"
    with pytest.raises(ValueError, match=r"started with another fsdp_plugin.* end_training\(\)"):
        Accelerator(fsdp_plugin=fsdp1)
    with pytest.raises(ValueError, match="started without a parallelism_config"):
        Accelerator(parallelism_config=ParallelismConfig())
    accelerator.end_training()


def test_the_old_plugin_of_tensor_parallelism_is_a_parallelism_config() -> None:
    with pytest.warns(FutureWarning, match=r"write parallelism_config=ParallelismConfig\(tp_size=1\)"):
        accelerator = Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=1))
    assert accelerator.parallelism_config.tp_size == 1
    assert accelerator.strategy.name == "single"
    assert accelerator.tensor_parallel_rank == 0


def test_ranks_that_are_threads_are_told_that_fsdp_needs_processes() -> None:
    def work() -> None:
        with pytest.raises(UnsupportedError, match=r"this world speaks through ThreadComm: start processes"):
            Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        assert not is_initialized()

    run_threads(2, work)
