"""The files of an offload folder: one raw file per tensor, the index that says what they are, and how both are replaced.

[Note: the offload folder]
`NAME.dat` holds the bytes of one tensor in row order and nothing else; `index.json` says what they are:
`{"NAME": {"dtype": "bfloat16", "shape": [4, 8]}}`. An entry with `"same_as": OTHER` shares OTHER's file, as tied weights
do. An entry may instead point into a safetensors file: `{"safetensors_file": PATH, "weight_name": NAME, "dtype":
"bfloat16"}` (the last two are optional).
Files are replaced, never rewritten, so that a model which mapped them before keeps its own weights. Every writer stages
under a name of its own, and the index is merged under a lock, so that several processes and threads may write at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from acc_bigmodel.stores.dtypes import dtype_named
from acc_bigmodel.stores.safetensors import write_bytes

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

logger = logging.getLogger(__name__)

INDEX_FILE = "index.json"
LOCK_FILE = ".index.lock"


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


def read_raw(file: str | os.PathLike[str], info: Mapping[str, Any]) -> torch.Tensor:
    """The tensor in a raw file, mapped; `info` has its "dtype" (a name) and "shape".

    Raises FileNotFoundError, or ValueError when the file has another size than `info` says.
    """
    dtype, shape = dtype_named(info["dtype"]), torch.Size(info["shape"])
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


@contextlib.contextmanager
def replacing(file: str | os.PathLike[str]) -> Iterator[str]:
    """A name to write to, nobody else's, which becomes `file` at the end; on an exception it goes, and `file` stays."""
    staged = os.path.join(os.path.dirname(file), f".{os.getpid()}-{secrets.token_hex(8)}.writing")
    try:
        yield staged
        os.replace(staged, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staged)
        raise


def read_offload_index(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The index of an offload folder; FileNotFoundError or ValueError when there is no usable one."""
    file = Path(folder) / INDEX_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not an offload folder: it has no {INDEX_FILE}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON file: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(info, dict) for info in content.values()):
        raise ValueError(f"{file} is not an offload index: it must map tensor names to what they are")
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
    with _locked(folder):
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


@contextlib.contextmanager
def _locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """One writer of the index at a time, among threads and processes; a killed one holds nothing."""
    path = os.path.join(folder, LOCK_FILE)
    while True:
        with open(path, "a+b") as file:  # closing it releases the lock
            _lock(file)
            if not _is_file(path, file):
                continue  # the one before took it away
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError, PermissionError):  # Windows keeps an open file
                    os.unlink(path)
            return


def _lock(file: BinaryIO) -> None:
    if sys.platform == "win32":
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
    else:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): entries of others that offload there now may be lost",
                file.name,
                error,
            )


def _is_file(path: str, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
