"""ParallelismConfig and its handlers."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from acc_ops.options import OptionError, environment_is, from_env, to_env
from acc_ops.rendezvous import WorldError
from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins.options.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from acc_plugins.parallel.split import sharers_of
from acc_plugins.strategies.fsdp2_mesh import shard_mesh


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_parameters_come_in_the_documented_order() -> None:
    assert list(inspect.signature(ParallelismConfig).parameters) == [
        "dp_replicate_size",
        "dp_shard_size",
        "tp_size",
        "cp_size",
        "cp_backend",
        "sp_size",
        "sp_backend",
        "tp_handler",
        "cp_handler",
        "sp_handler",
    ]


def test_without_anything_every_axis_has_one_rank() -> None:
    config = ParallelismConfig()
    assert (config.total_size, config.active_mesh_dims, config.tp_handler) == (1, [], None)
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")


def test_sizes_come_from_the_launcher_and_arguments_win() -> None:
    variables = to_env(ParallelismConfig(2, 2, tp_size=4))
    assert from_env(ParallelismConfig, variables) == ParallelismConfig(2, 2, tp_size=4)
    with environment_is(variables):
        config = ParallelismConfig(dp_replicate_size=1, tp_size=2)
    assert (config.dp_replicate_size, config.dp_shard_size, config.tp_size) == (1, 2, 2)


def test_names_and_sizes_follow_from_the_axes_in_use() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=5, cp_size=7)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (210, 6, 35)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert isinstance(config.tp_handler, TorchTensorParallelConfig)
    assert isinstance(config.cp_handler, TorchContextParallelConfig)
    assert config.sp_handler is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelismConfig(tp_size=0), "tp_size must be at least 1, got 0"),
        (lambda: ParallelismConfig(cp_backend="mine"), r"cp_backend.*'mine'"),
        (lambda: ParallelismConfig(cp_size=2, sp_size=2), "choose one"),
        (lambda: ParallelismConfig(dp_replicate_size=2, tp_size=2), "needs dp_shard_size > 1"),
        (
            lambda: ParallelismConfig(tp_handler=TorchContextParallelConfig()),
            "must be a TorchTensorParallelConfig",
        ),
        (lambda: TorchContextParallelConfig("ring"), "'ring'"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False), "give sp_seq_length"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"), "'eager'"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash-attn"), "hub id"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_built(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_attention_kernels_of_the_hub_are_allowed() -> None:
    config = DeepSpeedSequenceParallelConfig(sp_attn_implementation="kernels-community/flash-attn2")
    assert config.sp_attn_implementation == "kernels-community/flash-attn2"


def test_the_mesh_has_the_axes_in_use_and_the_joined_ones(eight_ranks: None) -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    mesh = config.build_device_mesh("cpu")
    assert mesh is not None
    assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert mesh["tp"].mesh.tolist() == [4, 5]
    assert mesh["dp"].mesh.tolist() == [1, 3, 5, 7]
    assert mesh["dp_shard_cp"].mesh.tolist() == [5, 7]
    assert mesh["dp_cp"].size() == 4
    assert config.get_device_mesh() is config.get_device_mesh("cpu") is config.device_mesh is mesh
    with pytest.raises(ValueError, match=r"'cpu'.*'cuda'"):
        config.get_device_mesh("cuda")


def test_sequence_parallel_ranks_count_among_those_that_average_and_shard(eight_ranks: None) -> None:
    config = ParallelismConfig(dp_shard_size=2, sp_size=2, tp_size=2)
    mesh = config.build_device_mesh("cpu")
    assert mesh is not None
    assert mesh.mesh_dim_names == ("dp_shard", "sp", "tp")
    assert mesh["dp_shard_cp"].mesh.tolist() == mesh["dp_cp"].mesh.tolist() == [1, 3, 5, 7]
    assert mesh["dp"].size() == 2
    ParallelismConfig(sp_size=4)._validate_accelerator(SimpleNamespace(num_processes=4, is_fsdp2=True))


def test_joined_axes_are_found_again_and_torch_does_not_warn(eight_ranks: None) -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = config.build_device_mesh("cpu")
        assert mesh is not None
        again = [config.joined_mesh("dp_shard_cp", mesh) for _ in range(2)]
        shards = shard_mesh(current_world(), mesh, config)
        assert shards.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
        assert shards.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert sharers_of(current_world(), mesh).size == 8
        assert ParallelismConfig(tp_size=8).joined_mesh("dp_cp", mesh) is None
    names = {line.get_group().group_name for line in again if line is not None}
    assert names == {shards.get_group("dp_shard_cp").group_name}


def test_tensor_parallel_alone_makes_a_mesh_of_one_axis(eight_ranks: None) -> None:
    mesh = ParallelismConfig(tp_size=8).build_device_mesh("cpu")
    assert mesh is not None
    assert (mesh.mesh_dim_names, mesh["tp"].size()) == (("tp",), 8)


def test_a_world_that_does_not_fit_is_named(eight_ranks: None) -> None:
    with pytest.raises(ValueError, match=r"tp=3 make 3 ranks, but the world has 8"):
        ParallelismConfig(tp_size=3).build_device_mesh("cpu")


def test_ranks_that_disagree_hear_so_on_all_of_them_before_anything_is_built() -> None:
    def build() -> str:
        config = ParallelismConfig(tp_size=2) if current_world().rank < 2 else ParallelismConfig(sp_size=2)
        with pytest.raises(ValueError, match=r"disagree on sp_size: rank 0 has 1, rank 2 has 2"):
            config.build_device_mesh("cpu")
        assert config.device_mesh is None
        return "heard"

    assert run_threads(3, build) == ["heard"] * 3


@pytest.mark.parametrize("other", [4, (4, {}), "words", None])
def test_a_rank_that_builds_no_mesh_is_told_of_on_those_that_do(other: object) -> None:
    def build() -> None:
        world = current_world()
        if world.rank == 1:
            world.comm.all_gather_object(other)
        else:
            with pytest.raises(
                ValueError, match="rank 1 is at another place of the program: give every rank the same"
            ):
                ParallelismConfig(dp_replicate_size=2).build_device_mesh("cpu")

    run_threads(2, build)


def test_a_mesh_without_a_process_group_says_what_is_missing() -> None:
    def build() -> None:
        with pytest.raises(WorldError, match="process group"):
            ParallelismConfig(dp_shard_size=2).build_device_mesh("cpu")

    run_threads(2, build)


def test_a_handler_of_an_axis_that_is_off_is_said(caplog: pytest.LogCaptureFixture) -> None:
    ParallelismConfig(cp_handler=TorchContextParallelConfig())
    assert "cp_handler has no effect with cp_size=1" in caplog.text


def test_no_mesh_where_there_is_none_to_build() -> None:
    assert ParallelismConfig().build_device_mesh("cpu") is None
    with pytest.raises(ValueError, match="device_type"):
        ParallelismConfig(tp_size=2).get_device_mesh()


def test_an_accelerator_must_have_as_many_processes_as_the_sizes_make() -> None:
    config = ParallelismConfig()
    config._validate_accelerator(SimpleNamespace(num_processes=4))
    assert config.dp_replicate_size == 4
    with pytest.raises(ValueError, match="tp_size=2 makes 2 ranks, but there are 4 processes"):
        ParallelismConfig(tp_size=2)._validate_accelerator(SimpleNamespace(num_processes=4))
    sharding = SimpleNamespace(num_processes=4, is_fsdp2=True)
    ParallelismConfig(dp_shard_size=2, tp_size=2)._validate_accelerator(sharding)
    ParallelismConfig()._validate_accelerator(SimpleNamespace(num_processes=1, is_fsdp2=True))
    for config in (ParallelismConfig(dp_replicate_size=4), ParallelismConfig()):
        with pytest.raises(ValueError, match=r"all are 1 \(of 4 processes\): give dp_shard_size"):
            config._validate_accelerator(sharding)


def test_json_has_sizes_and_backends() -> None:
    content = json.loads(ParallelismConfig(tp_size=2).to_json())
    assert content["parallelism_config_tp_size"] == 2
    assert content["parallelism_config_cp_backend"] == "torch"
