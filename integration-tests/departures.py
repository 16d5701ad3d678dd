"""A script whose ranks leave one after the other, each in its own way; two that stay print, as JSON lines, what they are told.

At the end one of these waits for a rank that is there and does not come, is interrupted as by Ctrl-C, and must be able to end.

It forks its ranks, so that torch is loaded once. Arguments: the port at which they meet.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from acc_ops import gather, join_world, leave_world
from acc_ops.comm import CommError, TorchComm
from acc_ops.world import World

STAYING = (1, 2)
LEAVING = (3, 4, 5, 6, 7, 8, 0)  # rank 0 last: it keeps the store
INTERRUPTED, ABSENT = 2, 9
LIMIT = timedelta(seconds=10)  # after which gloo would end a wait, with another text


def start_ranks(size: int, port: str) -> None:
    """Return in each of `size` forked processes as one rank; end the script in this one when those that stay have ended."""
    children = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            os.environ.update({name: str(value) for name, value in ranks.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            return
        children[rank] = pid
    codes = [os.waitstatus_to_exitcode(os.waitpid(children.pop(rank), 0)[1]) for rank in STAYING]
    for pid in children.values():
        os.kill(pid, signal.SIGKILL)
    os._exit(max(codes))


def in_group(world: World, group: dist.ProcessGroup) -> World:
    comm = TorchComm(group)
    return dataclasses.replace(
        world, rank=comm.rank, size=comm.size, local_rank=comm.rank, local_size=comm.size, comm=comm
    )


def depart(rank: int) -> None:
    """Leave as rank 3, 4, ... does; rank 3 returns."""
    time.sleep(0.2)  # the others wait by now
    if rank == 8 and os.fork() == 0:  # a worker that outlives its rank, and with it every connection of gloo
        os.close(1)
        os.close(2)
        time.sleep(12)
        os._exit(0)
    if rank == 4:
        os._exit(3)
    if rank in (0, 5, 8):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 6:
        raise KeyError("lost")
    if rank == 7:
        leave_world()
        time.sleep(60)


def wait_for_the_absent(world: World, pair: dist.ProcessGroup) -> None:
    """Wait until Ctrl-C; the group's timeout is torch's half hour."""
    if world.rank == ABSENT:
        TorchComm(pair)  # so that it can be asked
        time.sleep(60)
    if world.rank == INTERRUPTED:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        try:
            gather(torch.ones(1), in_group(world, pair))
        except KeyboardInterrupt:
            say(world.rank, ABSENT, "interrupted")


def say(*what: object) -> None:
    os.write(1, f"{json.dumps(what)}\n".encode())  # whole lines, whoever else writes


def main() -> None:
    world = join_world(cpu=True)
    groups = {leaving: dist.new_group(sorted((*STAYING, leaving)), timeout=LIMIT) for leaving in LEAVING}
    pair = dist.new_group([INTERRUPTED, ABSENT])
    for leaving in LEAVING:
        if world.rank not in (*STAYING, leaving):
            continue
        few = in_group(world, groups[leaving])
        told = [gather(torch.tensor(world.rank), few).tolist()]
        if world.rank == leaving:
            depart(leaving)
            return
        try:
            gather(torch.ones(1), few)
        except CommError as error:
            told.append(str(error))
        say(world.rank, leaving, *told)
    wait_for_the_absent(world, pair)


if __name__ == "__main__":
    torch.set_num_threads(1)
    start_ranks(len(STAYING) + len(LEAVING) + 1, sys.argv[1])
    main()
