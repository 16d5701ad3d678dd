from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from acc_ops.optional import is_available
from acc_plugins.states.sharded import ShardedPart
from acc_plugins.states.shards import ShardFolder

needs_numpy = pytest.mark.skipif(
    not is_available("numpy"), reason="torch sends the plans of the ranks through NumPy"
)


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
