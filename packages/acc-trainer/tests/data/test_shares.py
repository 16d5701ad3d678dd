"""Which processes read the same samples."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from acc_trainer.data.shares import Shares, shares_of


def mesh_at(places: dict[str, int], sizes: dict[str, int]) -> object:
    """What is asked of a mesh, at one place of it."""

    class Mesh(dict):
        mesh_dim_names = tuple(sizes)

        def get_local_rank(self, name: str) -> int:
            return places[name]

    return Mesh({name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()})


def test_without_a_mesh_every_process_reads_its_own() -> None:
    assert shares_of(None, 2, 4) == Shares(count=4, mine=2, speaks=True)
    assert shares_of(SimpleNamespace(mesh_dim_names=None), 2, 4) == Shares(count=4, mine=2, speaks=True)


@pytest.mark.parametrize("split", ["tp", "cp", "sp"])
def test_processes_on_an_axis_that_splits_layers_or_sequences_read_the_same_and_the_first_speaks(
    split: str,
) -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 3, split: 2}
    got = []
    for rank, places in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        got.append(shares_of(mesh_at(dict(zip(sizes, places, strict=True)), sizes), rank, 12))
    assert [one.mine for one in got] == [n for n in range(6) for _ in range(2)]
    assert {one.count for one in got} == {6}
    assert [one.speaks for one in got] == [True, False] * 6


def test_a_mesh_that_only_splits_layers_has_one_share() -> None:
    assert shares_of(mesh_at({"tp": 1}, {"tp": 4}), 1, 4) == Shares(count=1, mine=0, speaks=False)
