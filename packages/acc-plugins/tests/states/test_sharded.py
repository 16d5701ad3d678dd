from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from acc_ops.optional import is_available
from acc_plugins.states.sharded import ShardedPart, gathered, local_pieces, map_tensors, shape_of
from acc_plugins.states.shards import ShardFolder

needs_numpy = pytest.mark.skipif(
    not is_available("numpy"), reason="torch sends the plans of the ranks through NumPy"
)


@pytest.fixture
def mesh(tmp_path: Path) -> Any:
    """A mesh of one rank: what the ranks of a larger one do with each other is in integration-tests."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_pieces_of_a_tensor_are_its_memory(mesh: Any) -> None:
    plain = torch.zeros(3, 2)
    spread = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
    for tensor in (plain, spread):
        for box, memory in local_pieces(tensor):
            assert box == ((0, 0), (3, 2))
            memory.fill_(4)
        assert gathered(tensor, keep=True).sum() == 24
        assert shape_of(tensor) == (3, 2)


def test_gathering_keeps_what_is_one_tensor_one_and_gives_others_nothing(mesh: Any) -> None:
    tied = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    state = {"a": tied, "b": tied, "c": [torch.ones(1), 3], "d": (None, "text")}
    whole = gathered(state, keep=True)
    assert whole["a"] is whole["b"]
    assert not isinstance(whole["a"], DTensor)
    assert whole["c"][1] == 3
    assert whole["d"] == (None, "text")
    assert gathered(state, keep=False) is None


@needs_numpy
def test_a_part_is_a_folder_that_does_not_remember_where_it_was_written(mesh: Any, tmp_path: Path) -> None:
    state = {"model": {"a": distribute_tensor(torch.ones(2), mesh, [Shard(0)]), "n": 3}}
    files = ShardedPart(name="pytorch_model_fsdp_0", state=state).write(tmp_path)
    assert files == ["pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata"]
    assert all((tmp_path / file).is_file() for file in files)
    assert str(tmp_path).encode() not in (tmp_path / "pytorch_model_fsdp_0" / ".metadata").read_bytes()
    moved = (tmp_path / "pytorch_model_fsdp_0").rename(tmp_path / "moved")
    folder = ShardFolder(moved)
    assert folder.read(("model", "a")).tolist() == [1.0, 1.0]
    assert folder.values[("model", "n")] == 3


@needs_numpy
def test_a_disk_that_fails_raises_its_own_error(mesh: Any, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file where the folder should be")
    with pytest.raises(OSError, match=r"writing .*x failed on rank 0") as caught:
        ShardedPart(name="x", state={"a": torch.ones(1)}).write(tmp_path)
    assert caught.value.errno == errno.EEXIST


def test_tensors_are_mapped_wherever_they_are_nested() -> None:
    state = {"a": [torch.ones(1), {"b": torch.ones(1)}], "c": (torch.ones(1), 2)}
    assert map_tensors(lambda tensor: tensor.item(), state) == {"a": [1.0, {"b": 1.0}], "c": (1.0, 2)}
