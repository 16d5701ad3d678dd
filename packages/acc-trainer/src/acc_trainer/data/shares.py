"""Which processes read the same samples: those that differ only on axes of a mesh along which layers or sequences are split."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from acc_trainer.data.shard import Tail


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Into how many shares the samples are split, which one is this process's, and whether it speaks for those that read the same."""

    count: int
    mine: int
    speaks: bool = True


def shares_of(mesh: Any, rank: int, size: int) -> Shares:
    """By the axes of `mesh` whose names begin with `dp`: copies and shards of the model see different samples. Without a mesh by rank alone."""
    names = [str(name) for name in getattr(mesh, "mesh_dim_names", None) or ()]
    if not names:
        return Shares(count=size, mine=rank)
    count, mine, speaks = 1, 0, True
    for name in names:
        place = mesh.get_local_rank(name)
        if name.startswith("dp"):
            along = mesh[name].size()
            count, mine = count * along, mine * along + place
        else:
            speaks = speaks and place == 0
    return Shares(count=count, mine=mine, speaks=speaks)


def share_of_each(mesh: Any, size: int) -> list[int]:
    """The share of every rank."""
    names = [str(name) for name in getattr(mesh, "mesh_dim_names", None) or ()]
    if not names:
        return list(range(size))
    apart = [axis for axis, name in enumerate(names) if name.startswith("dp")]
    together = [axis for axis, name in enumerate(names) if not name.startswith("dp")]
    ranks = mesh.mesh.permute(*apart, *together)
    groups = ranks.reshape(prod(ranks.shape[: len(apart)]), -1).tolist()
    of_rank = {rank: share for share, group in enumerate(groups) for rank in group}
    return [of_rank[rank] for rank in range(size)]


def tail_of_shares(tail: Tail | None, mesh: Any, size: int) -> Tail | None:
    """What is known of every rank's batch, for every share: ranks that have the same one said the same."""
    if tail is None or mesh is None:
        return tail
    of_rank = share_of_each(mesh, size)
    firsts = [of_rank.index(share) for share in range(max(of_rank) + 1)]
    return Tail(
        real=tuple(tail.real[rank] for rank in firsts), sizes=tuple(tail.sizes[rank] for rank in firsts)
    )
