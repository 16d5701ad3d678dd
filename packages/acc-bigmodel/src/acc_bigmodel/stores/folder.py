"""The files of an offload folder: one raw file per tensor, the index that says what they are, and how both are replaced.

[Note: the offload folder]
`NAME.dat` holds the bytes of one tensor in row order and nothing else; `index.json` says what they are:
`{"NAME": {"dtype": "bfloat16", "shape": [4, 8]}}`. An entry with `"same_as": OTHER` shares OTHER's file, as tied weights
do. An entry may instead point into a safetensors file: `{"safetensors_file": PATH, "weight_name": NAME, "dtype":
"bfloat16"}` (the last two are optional).
The statistics of an 8-bit weight `LAYER.weight` are the tensor `LAYER.SCB`.
Files are replaced, never rewritten, so that a model which mapped them before keeps its own weights. Every writer stages
under a name of its own (stores/locking.py), and the index is merged under a lock, so that several processes and threads may
write at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from acc_bigmodel.stores.dtypes import dtype_named
from acc_bigmodel.stores.locking import locked, replacing
from acc_bigmodel.stores.safetensors import write_bytes
from acc_bigmodel.stores.strict_json import parse_json

INDEX_FILE = "index.json"
LOCK_FILE = ".index.lock"
_STATISTICS = "SCB"  # in the place of "weight"
_TOO_MANY = 2**60  # elements: more than torch could count the bytes of


def raw_file(folder: str | os.PathLike[str], name: str) -> str:
    """The file of one raw tensor; a slash in the name does not make a folder, and two names never share a file."""
    return os.path.join(folder, _without_slashes(name.replace("%", "%25")) + ".dat")


def stored_raw_file(folder: str | os.PathLike[str], name: str) -> str:
    """The raw file of a tensor that is there already; older folders did not escape `%` in names."""
    file = raw_file(folder, name)
    if "%" in name and not os.path.exists(file):
        earlier = os.path.join(folder, _without_slashes(name) + ".dat")
        return earlier if os.path.exists(earlier) else file
    return file


def home_of(name: str, info: Mapping[str, Any]) -> str:
    """The name whose raw file an index entry uses: its own, or that of the tensor it is tied to."""
    return str(info.get("same_as", name))


def statistics_of(name: str) -> str:
    """The name under which the statistics of an 8-bit weight are kept: what acc-hooks hangs on it; ValueError if there is none."""
    path, dot, local = name.rpartition(".")
    if local != "weight":
        raise ValueError(
            f"the statistics of {name!r} have no name: only parameters called 'weight' are quantised to 8 bits"
        )
    return f"{path}{dot}{_STATISTICS}"


def weight_of(name: str) -> str:
    """The name of the weight whose statistics are kept under `name`; any other name as it is."""
    path, dot, local = name.rpartition(".")
    return f"{path}{dot}weight" if local == _STATISTICS else name


def layout_of_entry(info: Mapping[str, Any]) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype in the index entry of a raw file; ValueError for an entry that has none, or an impossible one."""
    shape = info.get("shape")
    whole = isinstance(shape, (list, tuple)) and all(type(size) is int and size >= 0 for size in shape)
    if shape is None or not whole or math.prod(size or 1 for size in shape) >= _TOO_MANY:
        raise ValueError(f"the shape is {shape!r}, but must be a list of sizes")
    if not isinstance(info.get("dtype"), (str, torch.dtype)):
        raise ValueError(f"the dtype is {info.get('dtype')!r}, but must be a name like 'bfloat16'")
    return torch.Size(shape), dtype_named(info["dtype"])


def read_raw(file: str | os.PathLike[str], info: Mapping[str, Any]) -> torch.Tensor:
    """The tensor in a raw file, mapped; `info` has its "dtype" (a name) and "shape".

    Raises FileNotFoundError, or ValueError when the file has another size than `info` says.
    """
    try:
        shape, dtype = layout_of_entry(info)
    except ValueError as error:
        raise ValueError(f"{os.fspath(file)}: its entry in the offload index is damaged: {error}") from error
    nbytes = math.prod(shape) * dtype.itemsize
    found = os.path.getsize(file)
    if found < nbytes or (nbytes and found > nbytes):
        raise ValueError(
            f"{os.fspath(file)} has {found} bytes, but {info['dtype']} of shape {tuple(shape)} has {nbytes}; the file is "
            "damaged or belongs to another model: offload again"
        )
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage: Any = torch.UntypedStorage.from_file(os.fspath(file), False, nbytes)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)


def write_raw(tensor: torch.Tensor, file: str) -> None:
    """Write the bytes of one tensor; the file appears whole, and who mapped an earlier one keeps it."""
    with replacing(file) as staged, open(staged, "wb") as out:
        write_bytes(out, tensor)


def read_offload_index(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The index of an offload folder; FileNotFoundError or ValueError when there is no usable one."""
    file = Path(folder) / INDEX_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not an offload folder: it has no {INDEX_FILE}")
    try:
        content = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON file: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(info, dict) for info in content.values()):
        raise ValueError(f"{file} is not an offload index: it must map tensor names to what they are")
    for name, info in content.items():
        for key in ("safetensors_file", "weight_name", "same_as"):
            if not isinstance(info.get(key, ""), str):
                raise ValueError(f"{file}: {key!r} of {name!r} must be a name, got {info[key]!r}")
    return content


def known_entries(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The index of a folder; an empty one when it has none."""
    return read_offload_index(folder) if (Path(folder) / INDEX_FILE).exists() else {}


def merge_index(
    folder: str | os.PathLike[str],
    index: Mapping[str, Any],
    is_stale: Callable[[str, Mapping[str, Any]], bool] | None = None,
) -> None:
    """Merge `index` into the folder's, which is replaced whole; earlier entries that `is_stale(name, info)` go."""
    with locked(folder, LOCK_FILE):
        known = known_entries(folder)
        kept = {name: info for name, info in known.items() if is_stale is None or not is_stale(name, info)}
        merged = {**kept, **index}
        if merged == known:
            return
        with replacing(Path(folder) / INDEX_FILE) as staged:
            Path(staged).write_text(json.dumps(merged, indent=2) + "\n", encoding="utf-8")


def same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on the CPU have the same dtype, shape and bytes: NaN equals itself."""
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    return torch.equal(_bytes_of(tensor), _bytes_of(other))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # of one element every stride counts as contiguous, but only 1 can be viewed as bytes
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _without_slashes(name: str) -> str:
    return name.replace("/", "%2F").replace(os.sep, "%5C")
