"""The axes of a mesh: what is off changes nothing, what is on and not built says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from acc_plugins import ParallelismConfig, TorchContextParallelConfig
from acc_trainer import Accelerator, parallel

RANKS = ("tensor_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank")


@pytest.mark.parametrize("name", RANKS)
def test_without_a_config_there_is_no_axis(name):
    with pytest.raises(RuntimeError, match="without a parallelism_config"):
        getattr(Accelerator(), name)


@pytest.mark.parametrize("name", ["pipeline_parallel_rank", "context_parallel_rank"])
def test_some_axes_are_never_told(name):
    with pytest.raises(NotImplementedError, match="axis"):
        getattr(Accelerator(), name)


class Axis(SimpleNamespace):
    def get_local_rank(self):
        return self.rank


def with_axes(**sizes):
    """An Accelerator as it will be once it takes a parallelism_config."""
    mesh = {"tp": Axis(rank=3), "dp_shard": Axis(rank=1)}
    return SimpleNamespace(parallelism_config=ParallelismConfig(**sizes), torch_device_mesh=mesh)


def test_an_axis_in_use_tells_the_place_on_it_and_another_one_0():
    accelerator = with_axes(tp_size=4, dp_shard_size=2)
    assert [parallel.rank_along(accelerator, axis) for axis in ("tp", "dp_shard", "dp_replicate")] == [
        3,
        1,
        0,
    ]


def test_off_context_parallelism_does_nothing_and_says_so_once(caplog):
    accelerator = Accelerator()
    buffer = torch.arange(4)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with accelerator.maybe_context_parallel([buffer], [0], {buffer}):
                assert buffer.tolist() == [0, 1, 2, 3]
    assert [record.message for record in caplog.records].count(
        "maybe_context_parallel has no effect: cp_size of the Accelerator's parallelism_config is not above 1"
    ) <= 1
    with accelerator.maybe_context_parallel():
        pass


def test_off_sequence_parallelism_leaves_the_loader():
    loader = object()
    assert Accelerator().deepspeed_ulysses_dl_adapter(loader, torch.nn.Linear(1, 1)) is loader


def test_a_model_that_was_not_prepared_has_no_attention_to_split():
    accelerator = with_axes(sp_size=2)
    accelerator.strategy = SimpleNamespace(unwrap=lambda model: model)
    with pytest.raises(ValueError, match=r"sp_size=2.*this Linear was not prepared.*prepare\(model"):
        parallel.ulysses_loader(accelerator, object(), torch.nn.Linear(1, 1))


def test_passing_keys_round_is_for_accelerators():
    accelerator = with_axes(cp_size=2, cp_handler=TorchContextParallelConfig("alltoall"))
    accelerator.torch_device_mesh = SimpleNamespace(device_type="cpu")
    accelerator._models = []
    with pytest.raises(ValueError, match=r"'alltoall'.*does not run on the CPU: use 'allgather'"):
        parallel.maybe_context_parallel(accelerator, None, None, None)
