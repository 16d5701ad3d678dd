"""The axes of a mesh: what is off changes nothing, what is on and not built says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from acc_plugins import ParallelismConfig
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


def test_on_what_is_not_built_yet_is_refused():
    with pytest.raises(NotImplementedError, match=r"cp_size=2.*not built yet"):
        parallel.maybe_context_parallel(with_axes(cp_size=2), None, None, None)
    with pytest.raises(NotImplementedError, match=r"sp_size=2 for Linear.*not built yet"):
        parallel.ulysses_loader(with_axes(sp_size=2), object(), torch.nn.Linear(1, 1))
