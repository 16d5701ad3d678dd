"""Folders of shards, which all ranks write together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta

from acc_ops.optional import require
from acc_plugins.states.part import Part
from acc_plugins.states.shards import METADATA


@dataclass(frozen=True, kw_only=True)
class ShardedPart(Part):
    """A nested state of DTensors, plain tensors and plain values as folder `<name>/`, which every rank writes its shards into.

    Format: torch.distributed.checkpoint's. What is the same on all ranks is written once.
    """

    together: ClassVar[bool] = True

    def write(self, folder: str | Path, group: Any = None) -> list[str]:
        require("numpy", "writing a folder of shards")  # torch sends the plans of the ranks through it
        target = Path(folder, self.name)
        try:
            dcp.save(self.state, storage_writer=_Writer(target), process_group=group)
        except CheckpointException as error:
            raise _why(error, target) from error
        rank = dist.get_rank(group)
        own = [file.name for file in target.iterdir() if file.name.startswith(f"__{rank}_")]
        return [f"{self.name}/{file}" for file in (*sorted(own), *([METADATA] if rank == 0 else []))]


def _why(error: CheckpointException, target: Path) -> Exception:
    """What went wrong on the first rank that failed, as an error that an `except Exception` catches, which torch's is not."""
    rank, (reason, _) = min(error.failures.items())
    told = f"writing {target} failed on rank {rank}: {reason}"
    return OSError(reason.errno, told) if isinstance(reason, OSError) and reason.errno else RuntimeError(told)


class _Writer(dcp.FileSystemWriter):
    """torch's writer, but the folder's name stays out of its files: a checkpoint is renamed when it is whole."""

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self.save_id)
