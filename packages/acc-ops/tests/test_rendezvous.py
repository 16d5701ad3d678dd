"""Where ranks meet, what is said when they cannot, and that each group finds a place of its own there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from acc_ops import rendezvous
from acc_ops.processes import get_free_port
from acc_ops.ranks import Ranks
from acc_ops.rendezvous import WorldError, make_group


@pytest.fixture(autouse=True)
def _no_group_left_behind() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def make(ranks: Ranks, **options: Any) -> None:
    make_group(ranks, "gloo", {"timeout": timedelta(seconds=5), **options})


def test_each_group_at_a_meeting_point_has_keys_of_its_own(tmp_path: Path) -> None:
    one = Ranks(main_address="127.0.0.1", main_port=get_free_port())
    stores = []
    for _ in range(3):
        make(one)
        stores.append(rendezvous._kept[1])
        dist.destroy_process_group()
    assert stores[0] is stores[1] is stores[2]  # a rank that is late to leave does not lose it
    for number in range(3):  # what gloo wrote
        assert dist.PrefixStore(f"acc/{number}", stores[0]).num_keys() >= 3
    make(one, init_method=f"file://{tmp_path}/meeting")  # elsewhere
    assert rendezvous._kept[1] is not stores[0]


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("::1", "tcp://[::1]:29500"),
        ("node1", "tcp://node1:29500"),
        (None, "tcp://127.0.0.1:29500"),
    ],
)
def test_a_meeting_point_is_written_as_url(address: str | None, url: str) -> None:
    assert rendezvous._meeting_point(Ranks(main_address=address)) == url


@pytest.mark.parametrize("port", [0, 99999])
def test_a_number_that_is_no_port_is_named(port: int) -> None:
    with pytest.raises(WorldError, match=f"MASTER_PORT={port} is no port: set it"):
        make(Ranks(main_address="127.0.0.1", main_port=port))


def test_ranks_that_cannot_meet_are_told_where_and_what_to_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            WorldError, match=rf"rank 0 of 1 could not meet the others at 127.0.0.1:{port}: .*MASTER_PORT"
        ):
            make(Ranks(main_address="127.0.0.1", main_port=port))
    with pytest.raises(WorldError, match=r"rank 1 of 2 could not meet the others at 127.0.0.1:.*MASTER_ADDR"):
        make(
            Ranks(rank=1, size=2, local_rank=1, local_size=2, main_port=get_free_port()),
            timeout=timedelta(seconds=0.1),
        )
    assert not dist.is_initialized()
