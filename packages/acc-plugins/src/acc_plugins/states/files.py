"""Which files a model's weights and an optimizer's state are in, whatever strategy wrote them.

| written by | weights `model`, `model_1`, ... | state of `optimizer`, `optimizer_1`, ... |
|---|---|---|
| one device, DDP, a mesh without sharding | model.safetensors, an index of shards, pytorch_model.bin | optimizer.bin, by place |
| FSDP, FULL_STATE_DICT | pytorch_model_fsdp.bin, pytorch_model_fsdp_1.bin | optimizer.bin, by name |
| FSDP, SHARDED_STATE_DICT | pytorch_model_fsdp_0/, pytorch_model_fsdp_1/ | optimizer_0/, optimizer_1/, by name |
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from acc_bigmodel.checkpoint_files import find_weights, open_files, open_store
from acc_bigmodel.stores.store import WeightStore
from acc_plugins.states.names import stem_and_index
from acc_plugins.states.shards import METADATA, ShardFolder, ShardStore

logger = logging.getLogger(__name__)


def fsdp_weights(name: str) -> str:
    """The stem of FSDP's single file of weights."""
    stem, index = stem_and_index(name)
    return f"pytorch_{stem}_fsdp" + (f"_{index}" if index else "")


def fsdp_folder(name: str) -> str:
    """FSDP's folder of weights."""
    stem, index = stem_and_index(name)
    return f"pytorch_{stem}_fsdp_{index}"


def optimizer_folder(name: str) -> str:
    """FSDP's folder of an optimizer's state."""
    return "_".join(map(str, stem_and_index(name)))


def open_weights(folder: str | Path, name: str) -> WeightStore:
    """The weights called `name` in a checkpoint, of which nothing but names and shapes is read.

    Raises FileNotFoundError where there are none, ValueError for files that are damaged or not to be trusted.
    """
    folder = Path(folder)
    if (folder / METADATA).is_file():  # the folder of shards itself
        return ShardStore(ShardFolder(folder))
    whole = f"{fsdp_weights(name)}.bin"
    try:
        plain = find_weights(folder, name)
    except FileNotFoundError:
        plain = None
    found = [] if plain is None else [plain.index or plain.files[0]]
    found += [path for path in (folder / whole, folder / fsdp_folder(name) / METADATA) if path.is_file()]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no weights called {name!r}: neither {name}.safetensors nor pytorch_{name}.bin (or an index of shards), nor "
            f"{whole}, nor a folder {fsdp_folder(name)} with {METADATA}"
        )
    chosen = _newest(found)
    if plain is not None and chosen == found[0]:
        return open_files(plain)
    return ShardStore(ShardFolder(chosen.parent)) if chosen.name == METADATA else open_store(chosen)


def find_optimizer(folder: str | Path, name: str) -> Path:
    """The file or the folder that an optimizer's state is in. FileNotFoundError where there is none."""
    folder = Path(folder)
    if (folder / METADATA).is_file():  # the folder of shards itself
        return folder
    found = [
        path
        for path in (folder / f"{name}.bin", folder / optimizer_folder(name) / METADATA)
        if path.is_file()
    ]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no optimizer state called {name!r}: neither {name}.bin nor a folder {optimizer_folder(name)} with {METADATA}"
        )
    chosen = _newest(found)
    return chosen.parent if chosen.name == METADATA else chosen


def _newest(found: Sequence[Path]) -> Path:
    """The one modified last; the others are named in a warning."""
    chosen = max(found, key=lambda path: path.stat().st_mtime_ns)
    for other in found:
        if other != chosen:
            logger.warning(
                "%s was written before %s, which is loaded; delete it to silence this", other, chosen
            )
    return chosen
