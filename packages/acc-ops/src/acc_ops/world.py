"""Who am I among the ranks, and how do I speak to them: the one place that keeps state."""

from __future__ import annotations

import atexit
import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from acc_ops.comm import Comm, SoloComm, TorchComm
from acc_ops.devices import (
    DeviceLike,
    canonical_device,
    default_device,
    device_count,
    device_row,
    present_kind,
    set_device,
)
from acc_ops.forks import is_forked_from_a_rank
from acc_ops.parting import destroy_group, let_gloo_finish, tell_others
from acc_ops.ranks import Ranks, RanksError, read_ranks
from acc_ops.rendezvous import WorldError, make_group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class World:
    """One process among others: its ranks, its device, and the `comm` to speak with the others.

    Raises RanksError for a rank that is not below its size, TypeError for what is no number or device, WorldError when `comm` has another
    rank or size.
    """

    rank: int = (
        0  # among all processes; for a part of them, make a world of `TorchComm(group)` with the group's rank
    )
    size: int = 1
    local_rank: int = 0  # among the processes of this machine
    local_size: int = 1
    device: torch.device  # where this process computes; `comm.control_device` is where the program reads from
    comm: Comm = field(repr=False)
    mesh: DeviceMesh | None = (
        None  # the same processes along several axes, when somebody made one (`build_mesh`)
    )
    verify: bool = True  # collectives compare what the ranks hand in before they send it

    def __post_init__(self) -> None:
        for name in ("rank", "size", "local_rank", "local_size"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"World({name}=) must be an int, got {getattr(self, name)!r}")
        if not isinstance(self.device, torch.device):
            raise TypeError(
                f"World(device=) must be a torch.device such as torch.device('cpu'), got {self.device!r}"
            )
        Ranks(rank=self.rank, size=self.size, local_rank=self.local_rank, local_size=self.local_size)
        if (self.comm.rank, self.comm.size) != (self.rank, self.size):
            raise WorldError(
                f"a world of rank {self.rank} of {self.size} cannot speak through a comm "
                f"of rank {self.comm.rank} of {self.comm.size}"
            )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank."""
        return self.rank == self.size - 1

    @property
    def node_rank(self) -> int:
        """Which machine this is, when each runs `local_size` processes."""
        return self.rank // self.local_size

    @property
    def num_nodes(self) -> int:
        """How many machines there are, when each runs `local_size` processes."""
        return -(-self.size // self.local_size)


class _Joined(NamedTuple):
    world: World
    group: Any | None  # the default process group it speaks through
    owns_group: bool


_bound: ContextVar[World | None] = ContextVar("acc_world", default=None)
_joined: _Joined | None = None
_derived: tuple[Any, World] | None = None  # the default process group it was derived from, and the world
_solo: World | None = None
_ever_joined = False  # whoever left a world knows that it is alone


def current_world() -> World:
    """The world of this thread if one is bound, else the joined one, else torch.distributed's, else a world of one rank."""
    bound = _bound.get()
    if bound is not None:
        return bound
    group = _default_group()
    joined = _joined
    if joined is not None and joined.group is group:  # else somebody made or destroyed a process group since
        return joined.world
    if group is not None:
        return _world_of(group)
    return _solo_world()


def chosen_world(world: World | None) -> World:
    """What a function's `world` argument means: None is the current one. Raises TypeError for what is no World."""
    if world is None:
        return current_world()
    if not isinstance(world, World):
        raise TypeError(f"world must be a World, such as join_world() returns, or None, got {world!r}")
    return world


def bound_world() -> World | None:
    """The world bound in this thread by `use_world`, if there is one; asking joins nothing and warns of nothing."""
    return _bound.get()


def join_world(
    *,
    cpu: bool = False,
    device: DeviceLike | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    verify: bool | None = None,
    warn_after_s: float | None = None,
    **init_process_group_options: Any,
) -> World:
    """Become one of the ranks the launcher started, and keep that world for the whole process.

    Without a launcher it is a world of one rank and no process group is made. A process group that exists is used as it is.
    `device` defaults to the accelerator with this process's local rank (`cpu=True`: the CPU), `backend` to gloo
    on the CPU and to gloo for CPU tensors beside the device's own backend elsewhere, `timeout` to torch's. A rank that waits longer than
    `warn_after_s` seconds for others (default: ACC_WARN_AFTER in the environment, or 30) logs which are missing and what they do. A second call
    returns the joined world. Raises WorldError when it asks for another device or, beside other ranks, for another `verify` (default: True),
    when the ranks of a new group differ in that, and when they cannot meet.
    """
    global _joined, _ever_joined
    asked = None if device is None else canonical_device(device)
    if cpu and asked is not None and asked.type != "cpu":
        raise WorldError(f"cpu=True and device={device!r} contradict each other")
    asked = torch.device("cpu") if cpu else asked
    group = _default_group()
    if _joined is not None and _joined.group is group:
        return _rejoin(_joined, asked, verify)
    verify = True if verify is None else verify
    if group is not None:
        world, owns_group = _reuse(group, asked, backend, verify), False
        if warn_after_s is not None:
            TorchComm(warn_after_s=warn_after_s)  # the group's ranks have one watch, which keeps it
    elif (present_kind() if asked is None else asked.type) == "xla":
        unused = {
            "backend": backend,
            "timeout": timeout,
            "warn_after_s": warn_after_s,
            **init_process_group_options,
        }
        return _join_xla(verify, [name for name, value in unused.items() if value is not None])
    else:
        ranks = read_ranks()
        chosen = asked if asked is not None else default_device(ranks.local_rank)
        options = {**init_process_group_options, **({} if timeout is None else {"timeout": timeout})}
        owns_group = _needs_group(ranks)
        if chosen.type != "cpu":
            set_device(chosen)
        if owns_group:
            make_group(ranks, backend or _backend_for(chosen), options)
            atexit.register(let_gloo_finish)  # also where a script ends without leave_world
        world = World(
            rank=ranks.rank if owns_group else 0,
            size=ranks.size,
            local_rank=ranks.local_rank if owns_group else 0,
            local_size=ranks.local_size,
            device=chosen,
            comm=TorchComm(warn_after_s=warn_after_s) if owns_group else SoloComm(),
            verify=verify,
        )
        if owns_group:
            _agree(world)
    _joined = _Joined(world=world, group=_default_group(), owns_group=owns_group)
    _ever_joined = True
    return world


def leave_world() -> None:
    """Forget the joined world; destroys the process group only if `join_world` made it, in this process."""
    global _joined, _derived, _solo
    joined, _joined, _derived, _solo = _joined, None, None, None
    owned = joined is not None and joined.owns_group and joined.group is _default_group()
    if owned and not is_forked_from_a_rank():
        tell_others("called leave_world()")
        destroy_group()


@contextmanager
def use_world(world: World) -> Iterator[World]:
    """Make `world` the current one inside the block, for this thread (or asyncio task) only."""
    token = _bound.set(world)
    try:
        yield world
    finally:
        _bound.reset(token)


def _default_group() -> Any | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _world_of(group: Any) -> World:
    global _derived
    if _derived is None or _derived[0] is not group:
        _derived = (group, _derive())
    return _derived[1]


def _derive() -> World:
    """The world of a process group that somebody else made."""
    comm = TorchComm()
    said = read_ranks()
    if (said.rank, said.size) != (comm.rank, comm.size):  # not from a launcher: take it for one machine
        said = Ranks(rank=comm.rank, size=comm.size, local_rank=comm.rank, local_size=comm.size)
    kind = present_kind()
    if comm.backend(kind) in (None, "gloo"):  # gloo can move an accelerator's tensors, but nobody trains so
        device = torch.device("cpu")
    else:
        current = canonical_device(kind)
        device = (
            current
            if current.index or said.local_rank >= device_count(kind)
            else torch.device(kind, said.local_rank)
        )
    return World(
        rank=comm.rank,
        size=comm.size,
        local_rank=said.local_rank,
        local_size=said.local_size,
        device=device,
        comm=comm,
    )


def _solo_world() -> World:
    global _solo
    if _solo is None:
        _warn_if_others_wait()
        _solo = World(device=default_device(), comm=SoloComm())
    return _solo


def _warn_if_others_wait() -> None:
    if _ever_joined:
        return
    try:
        ranks = read_ranks()
    except RanksError:  # `join_world` raises it, for those who want to join
        return
    if ranks.size > 1:
        logger.warning(
            "this process was started as rank %d of %d and has not joined the others, so it counts as alone until "
            "join_world() (or an Accelerator) makes them one world",
            ranks.rank,
            ranks.size,
        )


def _agree(world: World) -> None:
    """A rank that sends headers and one that sends none would abort both: what each is given is not what it expects."""
    own = torch.tensor(world.verify, device=world.comm.control_device)
    said = world.comm.all_gather(own).tolist()
    if len(set(said)) > 1:
        destroy_group()
        ranks = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(said[:64]))
        raise WorldError(f"join_world(verify=) must be the same on all ranks, got {ranks}")


def _rejoin(joined: _Joined, asked: torch.device | None, verify: bool | None) -> World:
    global _joined
    world = joined.world
    if asked is not None and asked != world.device:
        raise WorldError(
            f"this process already joined its world on {world.device}, and now {asked} is asked for: "
            "call leave_world() first, or pass the device to the first join_world()"
        )
    if verify is not None and verify != world.verify:
        if world.size > 1:  # others may not do so in the same moment
            raise WorldError(
                f"this process already joined its world with verify={world.verify}, and now verify={verify} is asked for: "
                "call leave_world() first, or pass it to the first join_world()"
            )
        world = dataclasses.replace(world, verify=verify)
        _joined = joined._replace(world=world)
    return world


def _reuse(group: Any, asked: torch.device | None, backend: str | None, verify: bool) -> World:
    world = _world_of(group)
    if asked is not None:
        set_device(asked)
    have = dist.get_backend()
    if backend is not None and backend != have:
        raise WorldError(
            f"backend={backend!r} is asked for, but this process already has a process group of {have!r}; "
            "leave `backend` out to use it"
        )
    return dataclasses.replace(world, device=world.device if asked is None else asked, verify=verify)


def _join_xla(verify: bool, unused: list[str]) -> World:
    """The world of the ranks torch_xla started; bound in this thread where a process has several devices and a thread for each."""
    global _joined, _ever_joined
    from acc_ops import xla, xla_comm  # noqa: PLC0415 - needed where there are such devices only

    if unused:
        logger.warning(
            "on XLA devices %s has no effect: torch_xla has started the ranks already", ", ".join(unused)
        )
    ranks, comm = xla.read_xla_ranks(), xla_comm.XlaComm()
    world = World(
        rank=ranks.rank,
        size=ranks.size,
        local_rank=ranks.local_rank,
        local_size=ranks.local_size,
        device=comm.control_device,
        comm=comm,
        verify=verify,
    )
    if xla.drives_several() and ranks.size > 1:
        _bound.set(world)
    else:
        _joined = _Joined(world=world, group=None, owns_group=False)
    _ever_joined = True
    return world


def _needs_group(ranks: Ranks) -> bool:
    """One rank needs no group, but torchrun promises one to the script it starts."""
    return ranks.size > 1 or (ranks.launcher == "torchrun" and ranks.main_address is not None)


def _backend_for(device: torch.device) -> str:
    own = device_row(device).backend
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"
