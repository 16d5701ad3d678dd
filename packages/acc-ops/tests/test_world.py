"""Which world is the current one, and how a process joins the ranks it was started with."""

from __future__ import annotations

import dataclasses
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from acc_ops import devices, world
from acc_ops.collectives import gather
from acc_ops.comm import CommError, SoloComm, TorchComm
from acc_ops.object_collectives import gather_object
from acc_ops.processes import get_free_port
from acc_ops.rendezvous import WorldError
from acc_ops.testing import run_threads
from acc_ops.world import World, current_world, join_world, leave_world, use_world


def solo(**changes: object) -> World:
    return dataclasses.replace(World(device=torch.device("cpu"), comm=SoloComm()), **changes)


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an accelerator."""
    monkeypatch.setattr(devices, "DEVICE_TABLE", (devices.DEVICE_TABLE[-1],))


@pytest.fixture
def torchrun_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun puts into the environment of a single process."""
    values = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_without_anything_this_is_a_world_of_one(no_launcher: None) -> None:
    world = current_world()
    assert (world.rank, world.size, world.is_main, world.is_local_main, world.is_last) == (
        0,
        1,
        True,
        True,
        True,
    )
    assert current_world() is world


def test_a_bound_world_counts_in_its_thread_only() -> None:
    mine = solo()
    seen: list[World] = []
    with use_world(mine):
        assert current_world() is mine
        thread = threading.Thread(target=lambda: seen.append(current_world()))
        thread.start()
        thread.join()
    assert seen[0] is not mine
    assert current_world() is not mine


def test_a_bound_world_is_forgotten_after_an_error() -> None:
    with pytest.raises(KeyError), use_world(solo()):
        raise KeyError
    assert current_world().comm is not None


def test_machines_are_counted_from_the_local_size() -> None:
    def ranks() -> tuple[int, int]:
        me = dataclasses.replace(current_world(), local_size=2, local_rank=current_world().rank % 2)
        return me.node_rank, me.num_nodes

    assert run_threads(4, ranks) == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_a_world_must_fit_its_comm() -> None:
    with pytest.raises(WorldError, match="rank 0 of 2 cannot speak through a comm of rank 0 of 1"):
        solo(size=2, local_size=2)
    with pytest.raises(ValueError, match="local_rank=3"):
        solo(local_rank=3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": "0"}, r"World\(rank=\) must be an int, got '0'"),
        ({"local_size": True}, r"World\(local_size=\) must be an int, got True"),
        (
            {"device": "cpu"},
            r"World\(device=\) must be a torch.device such as torch.device\('cpu'\), got 'cpu'",
        ),
        ({"device": None}, r"World\(device=\) must be .*, got None"),
    ],
)
def test_a_world_of_wrong_types_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        solo(**changes)


def test_a_world_argument_that_is_no_world_is_refused_by_all_that_take_one() -> None:
    for call in (lambda: gather(torch.ones(1), "w"), lambda: gather_object([1], world=3)):
        with pytest.raises(
            TypeError, match=r"world must be a World, such as join_world.. returns, or None, got"
        ):
            call()


def test_joining_without_a_launcher_makes_no_process_group(no_launcher: None, cpu_only: None) -> None:
    world = join_world()
    assert isinstance(world.comm, SoloComm)
    assert not dist.is_initialized()
    assert current_world() is world is join_world()


def test_joining_again_may_change_the_check_but_not_the_device(no_launcher: None) -> None:
    join_world(cpu=True)
    assert join_world(verify=False).verify is False
    assert current_world().verify is False
    with pytest.raises(WorldError, match="already joined its world on cpu, and now meta is asked for"):
        join_world(device="meta")


def test_cpu_and_another_device_contradict_each_other() -> None:
    with pytest.raises(WorldError, match="contradict"):
        join_world(cpu=True, device="cuda:0")


def test_torchrun_promises_a_process_group_even_to_one_rank(torchrun_of_one: None) -> None:
    world = join_world(cpu=True, timeout=timedelta(seconds=30))
    assert isinstance(world.comm, TorchComm)
    assert dist.is_initialized()
    leave_world()
    assert not dist.is_initialized()
    assert isinstance(current_world().comm, SoloComm)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_keeps_the_number_of_its_rank_and_is_none(torchrun_of_one: None) -> None:
    join_world(cpu=True, timeout=timedelta(seconds=30))
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        said = [str(current_world().rank)]
        for _ in range(2):  # the joined world, then the one that is derived from the group
            comm = current_world().comm
            for call in (lambda: comm.all_gather(torch.ones(1)), comm.barrier):  # noqa: B023 - called here
                try:
                    said.append(str(call()))
                except CommError as error:
                    said.append(str(error)[:49])
            leave_world()
        said.append(str(dist.is_initialized()))
        os.write(theirs, ";".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    refused = "this process was forked from rank 0 and is no rank"[:49]
    assert os.read(ours, 1000).decode().split(";") == ["0", *[refused] * 4, "True"]
    assert current_world().comm.all_gather(torch.ones(1)).tolist() == [[1.0]]


def test_the_users_process_group_is_found_and_outlives_the_world(gloo_group: None, no_launcher: None) -> None:
    found = current_world()
    assert isinstance(found.comm, TorchComm)
    assert current_world() is found
    joined = join_world(cpu=True)
    assert joined.comm is found.comm
    with pytest.raises(WorldError, match=r"backend='mpi' is asked for.*process group of 'gloo'"):
        leave_world()
        join_world(backend="mpi")
    leave_world()
    assert dist.is_initialized()


def test_a_world_of_one_ends_when_the_user_makes_a_process_group(no_launcher: None, tmp_path: Path) -> None:
    join_world(cpu=True)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        assert isinstance(current_world().comm, TorchComm)
    finally:
        dist.destroy_process_group()
    assert isinstance(current_world().comm, SoloComm)


def test_several_machines_need_an_address(monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> None:
    for name, value in {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match="set MASTER_ADDR"):
        join_world(cpu=True)
    assert not dist.is_initialized()


def test_a_rank_that_has_not_joined_is_told_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave_world()
    monkeypatch.setattr(world, "_ever_joined", False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    try:
        assert current_world().size == 1
        current_world()
        assert [record.message for record in caplog.records].count(
            "this process was started as rank 1 of 2 and has not joined the others, so it counts as alone until "
            "join_world() (or an Accelerator) makes them one world"
        ) == 1
        leave_world()
        monkeypatch.setenv("RANK", "7")  # nonsense is for join_world to complain about
        assert current_world().size == 1
    finally:
        leave_world()
