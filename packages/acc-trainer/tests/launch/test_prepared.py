"""A function as a rank of processes that somebody else starts."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from acc_ops.enums import DistributedType
from acc_ops.testing import RankFailed
from acc_trainer.launch.prepared import PrepareForLaunch

SEEN = []
NAMES = ("RANK", "LOCAL_RANK", "FORK_LAUNCHED")


def note(*args):
    SEEN.append((args, {name: os.environ.get(name) for name in NAMES}))


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch):
    SEEN.clear()
    for name in (*NAMES, "NPROC", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_rank_knows_its_number_and_its_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setenv("NODE_RANK", "1")
    prepared = pickle.loads(pickle.dumps(PrepareForLaunch(note, "MULTI_GPU")))
    prepared(2, "a", 3)
    assert SEEN == [(("a", 3), {"RANK": "6", "LOCAL_RANK": "2", "FORK_LAUNCHED": "1"})]
    assert not set(NAMES) & set(os.environ)


def test_without_machines_the_index_is_the_rank():
    PrepareForLaunch(note, DistributedType.MULTI_CPU)(1)
    assert SEEN[0][1] == {"RANK": "1", "LOCAL_RANK": "1", "FORK_LAUNCHED": "1"}


@pytest.mark.parametrize("kind", ["NO", "XLA"])
def test_where_nobody_counts_no_rank_is_said(kind):
    PrepareForLaunch(note, kind)(1)
    assert SEEN[0][1] == {"RANK": None, "LOCAL_RANK": None, "FORK_LAUNCHED": "1"}


def test_the_environment_is_put_back_after_an_error():
    def fail():
        raise RankFailed("no")

    with pytest.raises(RankFailed):
        PrepareForLaunch(fail, "MULTI_GPU")(0)
    assert not set(NAMES) & set(os.environ)


def meet():
    note(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.distributed.get_backend())


def test_debug_ranks_meet_through_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_DEBUG_RDV_FILE", str(tmp_path / "meeting"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    try:
        PrepareForLaunch(meet, debug=True)(0)
    finally:
        torch.distributed.destroy_process_group()
    assert SEEN[0][0] == (0, 1, "gloo")


def test_debug_without_a_meeting_place_names_the_variable(monkeypatch):
    monkeypatch.delenv("ACCELERATE_DEBUG_RDV_FILE", raising=False)
    with pytest.raises(ValueError, match=r"set ACCELERATE_DEBUG_RDV_FILE .* got '' and"):
        PrepareForLaunch(note, debug=True)(0)


def test_what_cannot_be_called_and_what_is_no_type_are_refused():
    with pytest.raises(TypeError, match=r"launcher must be the function .*got 5"):
        PrepareForLaunch(5)
    with pytest.raises(ValueError, match="MULTI_MOON"):
        PrepareForLaunch(note, "MULTI_MOON")
