"""Which files a checkpoint consists of: a file, an index, a folder, a set of shards or a repository of the hub.

[Note: how a folder is read]
1. safetensors before torch.save files. An ignored file of the other format is named in a warning when it is newer.
2. `model.safetensors` (or `pytorch_model.bin`) and an index of shards: the newer one, and a warning names the other.
3. Shards `NAME-00001-of-00002.EXT` without an index: when the set is complete and the only one.
4. A single `*.safetensors` file of any name.
Anything else is a ValueError that lists what is there.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from acc_bigmodel.stores.safetensors import SafetensorsStore, check_format
from acc_bigmodel.stores.store import ChainedStore, WeightStore
from acc_bigmodel.stores.strict_json import parse_json
from acc_bigmodel.stores.torch_file import TorchFileStore
from acc_ops.optional import require

logger = logging.getLogger(__name__)

SAFETENSORS = ".safetensors"
TORCH = ".bin"
INDEX = ".index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<kind>\.safetensors|\.bin)")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """The weight files of one checkpoint, and the index that ties them together when there is one."""

    files: tuple[Path, ...]
    index: Path | None = None
    weight_map: dict[str, str] | None = None


def open_store(path: str | os.PathLike[str]) -> WeightStore:
    """A store of the weights in a safetensors or torch.save file, an index of shards, a folder, or a hub repository.

    Raises ValueError when nothing usable is there, a file is damaged, or the index and its shards disagree.
    """
    return open_files(find_checkpoint(path))


def open_files(checkpoint: CheckpointFiles) -> WeightStore:
    """A store over files that were found already."""
    stores = {file.name: _open_file(file) for file in checkpoint.files}
    if checkpoint.weight_map is None:
        only = tuple(stores.values())
        return only[0] if len(only) == 1 else ChainedStore(only)
    homes: dict[str, WeightStore] = {}
    for name, shard in checkpoint.weight_map.items():
        store = stores[PurePath(shard).name]
        if name not in store:
            raise ValueError(f"{checkpoint.index} says that {name!r} is in {shard}, but it is not there")
        homes[name] = store
    for store in stores.values():
        for name in store:  # names of shared tensors stand in the shard's metadata only
            if store.alias_of(name) in checkpoint.weight_map:
                homes.setdefault(name, store)
    return ChainedStore(tuple(stores.values()), homes)


def find_checkpoint(checkpoint: str | os.PathLike[str]) -> CheckpointFiles:
    """The files of a checkpoint given as file, index, folder or hub id; see the note above for folders."""
    if not os.fspath(checkpoint):
        raise ValueError(
            "the checkpoint is '': name a file, a folder ('.' for the working directory) or a hub repository"
        )
    path = Path(checkpoint)
    if path.is_file():
        return _read_index(path) if path.suffix == ".json" else CheckpointFiles(files=(path,))
    if path.is_dir():
        return _find_in_folder(path)
    if isinstance(checkpoint, str) and _HUB_ID.fullmatch(checkpoint):
        return _find_in_folder(_download(checkpoint))
    raise ValueError(
        f"{str(checkpoint)!r} is neither a weights file, an index of shards, a folder that holds one of them, nor a "
        "hub repository (org/name)"
    )


def find_weights(folder: str | os.PathLike[str], name: str) -> CheckpointFiles:
    """The files that `save_weights(state, folder, name)` wrote, in either format.

    Raises FileNotFoundError when there are none.
    """
    folder = Path(folder)
    choices = [_newest(_named(folder, name, safe)) for safe in (True, False)]
    chosen = _by_format(folder, choices)
    if chosen is None:
        wanted = " nor ".join(
            stem_of(name, safe) + (SAFETENSORS if safe else TORCH) for safe in (True, False)
        )
        raise FileNotFoundError(
            f"{folder} holds no weights called {name!r}: neither {wanted}, nor an index of shards"
        )
    return _read_index(chosen) if chosen.suffix == ".json" else CheckpointFiles(files=(chosen,))


def stem_of(name: str, safe: bool) -> str:
    """The file name of weights without its ending: torch.save files of `model`, `model_1`... start with `pytorch_`."""
    return name if safe or not re.fullmatch(r"model(_\d+)?", name) else f"pytorch_{name}"


def shards_in(folder: Path, stem: str, kind: str) -> list[Path]:
    """The shard files `STEM-00001-of-0000N.KIND` in a folder, of any N, in order."""
    found = []
    for file in folder.iterdir():
        match = _SHARD.fullmatch(file.name)
        if match and match["stem"] == stem and match["kind"] == kind:
            found.append(file)
    return sorted(found)


def _named(folder: Path, name: str, safe: bool) -> list[Path]:
    whole = stem_of(name, safe) + (SAFETENSORS if safe else TORCH)
    return [file for file in (folder / whole, folder / (whole + INDEX)) if file.is_file()]


def _open_file(file: Path) -> WeightStore:
    if file.suffix != SAFETENSORS:
        return TorchFileStore(file)
    store = SafetensorsStore(file)
    check_format(store)
    return store


def _find_in_folder(folder: Path) -> CheckpointFiles:
    indexes = sorted(folder.glob(f"*{INDEX}"))
    choices: list[Path | None] = []
    for safe, kind in ((True, SAFETENSORS), (False, TORCH)):
        mine = [index for index in indexes if index.name.endswith(kind + INDEX)]
        mine += (
            []
            if safe
            else [index for index in indexes if not index.name.endswith((SAFETENSORS + INDEX, TORCH + INDEX))]
        )
        if len(mine) > 1:
            raise ValueError(
                f"{folder} holds several indexes: {_listing(mine)}; pass the one to load instead of the folder"
            )
        whole = folder / (stem_of("model", safe) + kind)
        choices.append(_newest(([whole] if whole.is_file() else []) + mine))
    chosen = _by_format(folder, choices)
    if chosen is not None:
        return _read_index(chosen) if chosen.suffix == ".json" else CheckpointFiles(files=(chosen,))
    return _find_without_index(folder)


def _find_without_index(folder: Path) -> CheckpointFiles:
    sets: dict[tuple[str, int, str], list[Path]] = {}
    for file in sorted(folder.iterdir()):
        match = _SHARD.fullmatch(file.name)
        if match:
            sets.setdefault((match["stem"], int(match["count"]), match["kind"]), []).append(file)
    if len(sets) > 1:
        names = [files[0] for files in sets.values()]
        raise ValueError(
            f"{folder} holds several sets of shards ({_listing(names)}, ...) and no index that chooses"
        )
    for (stem, count, kind), files in sets.items():
        missing = [
            shard
            for i in range(1, count + 1)
            if not (folder / (shard := shard_name(stem, i, count, kind))).is_file()
        ]
        if missing:
            raise ValueError(f"{folder} holds an incomplete set of shards: {', '.join(missing[:5])} missing")
        interrupted = folder / staging_name(stem) / COMMITTING
        if interrupted.exists():
            raise ValueError(
                f"a save into {folder} was interrupted while it replaced the shards of {stem!r}: save again"
            )
        return CheckpointFiles(files=tuple(files))
    single = sorted(folder.glob(f"*{SAFETENSORS}"))
    if len(single) == 1:
        return CheckpointFiles(files=(single[0],))
    here = sorted(folder.iterdir())
    raise ValueError(
        f"{folder} holds no weights to load (model.safetensors, pytorch_model.bin, or one index of shards); it holds "
        f"{_listing(here) or 'nothing'}"
    )


COMMITTING = "committing"


def staging_name(stem: str) -> str:
    """The folder in which a save prepares the files of one set of weights."""
    return f".{stem}.writing"


def shard_name(stem: str, number: int, count: int, kind: str) -> str:
    """`model-00001-of-00002.safetensors`."""
    return f"{stem}-{number:05d}-of-{count:05d}{kind}"


def _newest(files: Sequence[Path]) -> Path | None:
    """The file modified last, an index winning a tie; the others are named in a warning."""
    if not files:
        return None
    chosen = max(files, key=lambda file: (file.stat().st_mtime_ns, file.suffix == ".json"))
    others = [file for file in files if file != chosen]
    if others:
        logger.warning(
            "%s holds both %s and %s: loading %s, which is newer. Delete the other one to silence this.",
            chosen.parent, chosen.name, _listing(others), chosen.name,
        )  # fmt: skip
    return chosen


def _by_format(folder: Path, choices: Sequence[Path | None]) -> Path | None:
    safe, unsafe = choices
    if safe is None or unsafe is None:
        return safe or unsafe
    if unsafe.stat().st_mtime_ns > safe.stat().st_mtime_ns:
        logger.warning(
            "%s: loading %s, but %s is newer. Pass the file itself to load that one.",
            folder,
            safe.name,
            unsafe.name,
        )
    return safe


def _read_index(index: Path) -> CheckpointFiles:
    try:
        content = parse_json(index.read_bytes())
    except ValueError as error:
        raise ValueError(f"{index} is not a JSON index of shards: {error}") from error
    weight_map = content.get("weight_map", content) if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(
            f"{index} is not an index of shards: it needs a 'weight_map' of tensor name -> file name"
        )
    files = []
    for shard in sorted(set(weight_map.values())):
        if PurePath(shard).name != shard:
            raise ValueError(
                f"{index} points to {shard!r}: shards must be files in the folder of their index"
            )
        if not (index.parent / shard).is_file():
            raise ValueError(f"{index} points to {shard!r}, which is not there")
        files.append(index.parent / shard)
    if not files:
        raise ValueError(f"{index} names no shards")
    return CheckpointFiles(files=tuple(files), index=index, weight_map=dict(weight_map))


def _download(repository: str) -> Path:
    hub = require("huggingface_hub", f"loading {repository!r} from the hub", extra="acc-bigmodel[hub]")
    for kind in (SAFETENSORS, TORCH):
        try:
            found = hub.snapshot_download(repository, allow_patterns=[f"*{kind}", f"*{kind}{INDEX}"])
        except (OSError, ValueError) as error:  # which the errors of the hub are, offline ones too
            raise ValueError(
                f"there is no file or folder {repository!r} here, and no hub repository of that name can be had: {error}"
            ) from error
        folder = Path(found)
        if any(folder.glob(f"*{kind}")):
            break
    return folder


def _listing(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files[:8]) + (", ..." if len(files) > 8 else "")
