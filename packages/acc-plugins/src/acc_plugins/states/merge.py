"""A folder of shards to one set of weights that everybody reads, one tensor in memory at a time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import acc_bigmodel  # lazy: what writes files is loaded when it is first used
from acc_ops.exchange import together
from acc_ops.world import current_world
from acc_plugins.states.shards import METADATA, ShardFolder, ShardStore, is_shard_folder
from acc_plugins.states.whole import check_no_checkpoint, check_no_part

_WEIGHTS, _OPTIMIZERS = "pytorch_model_fsdp_*", "optimizer*"


def merge_fsdp_weights(
    checkpoint_dir: str,
    output_path: str,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of a folder of shards as `model.safetensors` (or `pytorch_model.bin`) into the folder `output_path`.

    `checkpoint_dir` is the folder of shards, or a checkpoint that holds one. The main process does it, the others wait. Raises ValueError on all
    of them for a folder that holds no shards of weights, with a hint which one does, and for `remove_checkpoint_dir` (which takes the shards
    away afterwards) where more than the shards would go, CheckpointError where a checkpoint of `save_state` would not be whole any more (it lies in
    `output_path`, or the shards to remove are a part of it), and what the disk raises.
    """
    world = current_world()

    def merge() -> None:
        if world.is_main:
            merge_shards(
                checkpoint_dir,
                output_path,
                safe_serialization=safe_serialization,
                remove_checkpoint_dir=remove_checkpoint_dir,
            )

    together(world, merge)


def merge_shards(
    checkpoint_dir: str | Path,
    output_path: str | Path,
    *,
    max_shard_size: int | str | None = None,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> list[str]:
    """As `merge_fsdp_weights`, in this process; the names of the files.

    More than `max_shard_size` (bytes, or "5GB") makes several files and an index. The files appear when they are whole; with safetensors one
    tensor at a time is in memory, with torch files all of one file. Extra state that is no tensor goes into the first torch file; it is left out
    of safetensors files, and a warning names it.
    """
    for check in (check_no_checkpoint, check_no_part):
        check(output_path, "merging weights into it")
    folder = find_shards(checkpoint_dir)
    if remove_checkpoint_dir:
        _check_removable(Path(checkpoint_dir), folder, Path(output_path))
        check_no_part(folder, "remove_checkpoint_dir")
    store = ShardStore(ShardFolder(folder))
    if not len(store) or ("optimizer", "state") in {key[:2] for key in store.folder.tensors}:
        raise ValueError(f"{folder} holds no weights but the state of an optimizer.{_hint(folder.parent)}")
    files = acc_bigmodel.save_weights(store, output_path, "model", max_shard_size, safe=safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(folder)
    return files


def find_shards(checkpoint_dir: str | Path) -> Path:
    """The folder of shards that is meant: the given one, or the only one of weights in it. ValueError with a hint otherwise."""
    if not os.fspath(checkpoint_dir):
        raise ValueError("the folder of shards to merge is '': name it ('.' for the working directory)")
    folder = Path(checkpoint_dir)
    if is_shard_folder(folder):
        return folder
    inside = (
        [path for path in sorted(folder.glob(_WEIGHTS)) if is_shard_folder(path)] if folder.is_dir() else []
    )
    if len(inside) == 1:
        return inside[0]
    if inside:
        names = ", ".join(str(path) for path in inside)
        raise ValueError(f"{folder} holds the shards of {len(inside)} models: name one of {names}")
    near = folder if folder.is_dir() else folder.parent
    raise ValueError(
        f"Tried to load from {folder} but couldn't find a valid metadata file ({METADATA}).{_hint(near)}"
    )


def _hint(near: Path) -> str:
    """Which folders near the given one hold shards."""
    if not near.is_dir():
        return ""
    weights = [
        str(path)
        for path in sorted([*near.glob(_WEIGHTS), *near.glob(f"*/{_WEIGHTS}")])
        if is_shard_folder(path)
    ]
    if weights:
        return f" Please pass the folder of the weights: {', '.join(weights[:5])}"
    optimizers = [str(path) for path in sorted(near.glob(_OPTIMIZERS)) if is_shard_folder(path)]
    if optimizers:
        return f" There is only the state of an optimizer ({', '.join(optimizers[:5])}), which cannot be merged into weights."
    whole = [path.name for path in sorted(near.iterdir()) if path.suffix in (".safetensors", ".bin")]
    return f" {near} holds files that are whole and need no merging: {', '.join(whole[:5])}" if whole else ""


def _check_removable(given: Path, shards: Path, output: Path) -> None:
    if given != shards:
        raise ValueError(
            f"remove_checkpoint_dir removes a folder of shards, but {given} is a whole checkpoint, of which more would go: name {shards}, or "
            "leave the option out"
        )
    if output.resolve().is_relative_to(shards.resolve()):
        raise ValueError(
            f"remove_checkpoint_dir would remove the result, too: {output} lies in {shards}. Write it elsewhere"
        )
