"""Ranks that join, leave and join again, in step or not, and that join differently."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from acc_ops.collectives import gather
from acc_ops.processes import get_free_port
from acc_ops.rendezvous import WorldError
from acc_ops.testing import run_processes
from acc_ops.world import join_world, leave_world


def _launched(port: int, **more: str) -> int:
    """Be a rank as a launcher would start it, and return its number."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **more)
    return int(rank)


def _join_thrice(port: int, late: int) -> list[list[int]]:
    rank = _launched(port, TORCHELASTIC_USE_AGENT_STORE="True")
    told = []
    for time_of_joining in range(3):
        if time_of_joining and rank == late:
            time.sleep(0.3)  # the other one is joining already
        join_world(cpu=True)
        told.append(gather(torch.tensor([rank])).tolist())
        if time_of_joining < 2:
            leave_world()
    return told


def test_ranks_that_are_not_in_step_leave_and_join_again_in_a_store_that_stays() -> None:
    for late in range(2):
        agents = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )  # as torchrun's agent has one
        assert run_processes(2, _join_thrice, agents.port, late) == [[[0, 1]] * 3] * 2


def _join_differently(port: int) -> list[str]:
    rank = _launched(port)
    told = []
    for verify in (rank == 0, False, True):  # on two ranks: differs, is the same, is another than before
        try:
            told.append(str(join_world(cpu=True, verify=verify).verify))
        except WorldError as error:
            told.append(str(error))
    told.append(str(join_world().verify))
    return told


def test_ranks_that_differ_in_verify_are_the_same_error_and_can_join_afterwards() -> None:
    told = run_processes(2, _join_differently, get_free_port())
    assert told[0] == told[1]
    differ, first, again, still = told[0]
    assert differ == "join_world(verify=) must be the same on all ranks, got rank 0 True, rank 1 False"
    assert first == still == "False"
    assert again.startswith(
        "this process already joined its world with verify=False, and now verify=True is asked for"
    )
