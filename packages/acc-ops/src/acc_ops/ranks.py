"""Which rank this process is, read from what torchrun, MPI or Slurm put into the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class RanksError(ValueError):
    """The launcher's variables are not numbers, or contradict each other."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What the launcher said: global and per-machine rank and size, where to meet, and which launcher it was."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str | None = None  # "torchrun", "openmpi", "mvapich", "pmi", "slurm"; None: started by hand
    main_address: str | None = None  # MASTER_ADDR, or Slurm's first node
    main_port: int | None = None  # MASTER_PORT

    def __post_init__(self) -> None:
        for name, value, bound in (
            ("rank", self.rank, self.size),
            ("local_rank", self.local_rank, self.local_size),
        ):
            if not 0 <= value < bound:
                of = "size" if name == "rank" else "local_size"
                raise RanksError(f"{name} must be from 0 to {of} - 1, got {name}={value} with {of}={bound}")
        if self.local_size > self.size:
            raise RanksError(f"local_size={self.local_size} is more than size={self.size}")


class _Launcher(NamedTuple):
    """The variables of one launcher; of several for one number the first that is set and not negative counts."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


# In the order they are asked: torchrun may itself have been started by mpirun or srun, never the other way round.
_LAUNCHERS = (
    _Launcher(
        name="torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
    ),
    _Launcher(
        name="openmpi",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        name="mvapich",
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        name="pmi",  # MPICH, Intel MPI, and Cray's launcher, which has names of its own for the local numbers
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    # The step's size: SLURM_NTASKS is also set in a batch script that nobody started with srun.
    _Launcher(
        name="slurm",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_STEP_TASKS_PER_NODE",),
    ),
)


def read_ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """The ranks the launcher gave to this process; rank 0 of 1 with `launcher=None` when there was none.

    `environ` defaults to the process's environment. A negative number counts as unset. Raises RanksError naming the
    variable and its value when it is not a number, when a rank is not below its size, or when a part is missing that cannot be known.
    """
    environ = os.environ if environ is None else environ
    for launcher in _LAUNCHERS:
        size = _number(environ, launcher.size)
        if size is not None and not _knows_less_than_slurm(launcher, environ):
            return _ranks_of(launcher, size, environ)
    sizes = {launcher.rank: launcher.size for launcher in _LAUNCHERS}
    for name in ("LOCAL_RANK", *_PMIX_RANKS, *sizes):
        value = _number(environ, name)
        if value:  # rank 0 alone may be a leftover; any other rank has siblings that would each train alone
            missing = sizes.get(name, "WORLD_SIZE")
            raise RanksError(
                f"{name}={value} is set but {missing} is not: start this script with a launcher that says how many ranks "
                f"there are, or set RANK and WORLD_SIZE"
            )
    return Ranks()


_PMIX_RANKS = (
    "PMIX_RANK",
)  # PMIx alone (prun) tells a rank and no size; mpirun and srun tell theirs beside it


def _knows_less_than_slurm(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    """Whether this is what `srun --mpi=pmi2` sets for MPI: its own variables also tell which ranks share a machine."""
    if launcher.name != "pmi" or any(name in environ for name in launcher.local_rank):
        return False
    slurm = _LAUNCHERS[-1]
    return all(
        _number(environ, own) == _number(environ, theirs)
        for own, theirs in ((launcher.rank, slurm.rank), (launcher.size, slurm.size))
    )


def _ranks_of(launcher: _Launcher, size: int, environ: Mapping[str, str]) -> Ranks:
    if size == 0:
        raise RanksError(f"{launcher.size}={environ[launcher.size]!r} must be at least 1")
    rank = _number(environ, launcher.rank)
    local_rank = _first_number(environ, launcher.local_rank)
    local_size = _local_size(launcher, environ)
    if rank is None:
        one_machine = local_size in (None, size)
        if size > 1 and (local_rank is None or not one_machine):
            raise RanksError(f"{launcher.size}={size} is set but {launcher.rank} is not")
        rank = local_rank if size > 1 and local_rank is not None else 0
    if rank >= size:
        raise RanksError(f"{launcher.rank}={rank} must be below {launcher.size}={size}")
    if local_size is None:  # nothing said: one machine, unless the two ranks differ
        if local_rank not in (None, rank):
            raise RanksError(
                f"{launcher.rank}={rank} and {launcher.local_rank[0]}={local_rank} tell of several machines, and not how many "
                f"ranks each has: set {launcher.local_size[0]} on every rank to the number of ranks of its machine"
            )
        local_size = size
    if local_rank is None:
        local_rank = rank % local_size
    if local_rank >= local_size:
        raise RanksError(
            f"{launcher.local_rank[0]}={local_rank} must be below {launcher.local_size[0]}={local_size}"
        )
    if local_size > size:
        raise RanksError(f"{launcher.local_size[0]}={local_size} must be at most {launcher.size}={size}")
    return Ranks(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        launcher=launcher.name,
        main_address=_main_address(environ) or _first_slurm_node(launcher, environ),
        main_port=_number(environ, "MASTER_PORT"),
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        raise RanksError(f"the environment variable {name} must be a whole number, got {text!r}") from None
    return value if value >= 0 else None


def _first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := _number(environ, name)) is not None), None)


def _local_size(launcher: _Launcher, environ: Mapping[str, str]) -> int | None:
    if launcher.name != "slurm":
        return _first_number(environ, launcher.local_size)
    (variable,) = launcher.local_size
    text = environ.get(variable, "").strip()  # "4", "2(x3),1": tasks of each node in turn
    if not text:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise RanksError(f"the environment variable {variable} reads like '4' or '2(x3),1', got {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID") or 0
    if node >= len(counts):
        raise RanksError(f"SLURM_NODEID={node} is not among the nodes of {variable}={text!r}")
    return counts[node]


def _main_address(environ: Mapping[str, str]) -> str:
    """MASTER_ADDR without the brackets that an IPv6 address has in URLs."""
    text = environ.get("MASTER_ADDR", "").strip()
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def _first_slurm_node(launcher: _Launcher, environ: Mapping[str, str]) -> str | None:
    """The host of rank 0 from a compressed list such as `gpu[003-005,7],login1` (srun's host list format)."""
    if launcher.name != "slurm":
        return None
    text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", text)  # up to the first comma outside of brackets
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0]) if match else None
