"""Ranks from every launcher's variables, and clear errors when those contradict each other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from acc_ops.ranks import Ranks, RanksError, read_ranks

NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mvapich": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


@pytest.mark.parametrize("launcher", NAMES)
def test_every_launcher_is_understood(launcher: str) -> None:
    environ = dict(zip(NAMES[launcher], ("5", "8", "1", "4"), strict=True))
    ranks = read_ranks(environ)
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size) == (5, 8, 1, 4)
    assert ranks.launcher == launcher


def test_without_a_launcher_there_is_one_rank() -> None:
    assert read_ranks({}) == Ranks()
    assert read_ranks({}).launcher is None


def test_torchrun_counts_when_mpi_started_it() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}
    assert (read_ranks(environ).rank, read_ranks(environ).size) == (1, 2)


def test_a_negative_number_counts_as_unset() -> None:
    assert read_ranks({"LOCAL_RANK": "-1", "WORLD_SIZE": "-1"}) == Ranks()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_a_text_that_is_no_number_is_named_with_its_variable(name: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", name: "two"}
    with pytest.raises(RanksError, match=f"{name}.*'two'"):
        read_ranks(environ)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        (
            {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"LOCAL_RANK": "1"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "RANK is not"),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
            "RANK=5 and LOCAL_RANK=1 tell of several machines.*set LOCAL_WORLD_SIZE",
        ),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], said: str) -> None:
    with pytest.raises(RanksError, match=said):
        read_ranks(environ)


def test_pmi_has_two_names_for_the_local_numbers() -> None:
    environ = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
    ranks = read_ranks(environ)
    assert (ranks.launcher, ranks.local_rank, ranks.local_size) == ("pmi", 1, 4)


def test_srun_for_mpi_tells_which_ranks_share_a_machine_in_its_own_variables() -> None:
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_NODEID": "1",
    }
    ranks = read_ranks({"PMI_RANK": "5", "PMI_SIZE": "8", "PMIX_RANK": "5", **slurm})
    assert (ranks.launcher, ranks.local_rank, ranks.local_size) == ("slurm", 1, 4)
    inside = read_ranks(
        {"PMI_RANK": "1", "PMI_SIZE": "2", **slurm}
    )  # an mpirun inside the step is a world of its own
    assert (inside.launcher, inside.rank, inside.size) == ("pmi", 1, 2)


def test_pmix_beside_open_mpi_changes_nothing_and_alone_names_no_size() -> None:
    open_mpi = dict(zip(NAMES["openmpi"], ("5", "8", "1", "4"), strict=True))
    assert read_ranks({**open_mpi, "PMIX_RANK": "5"}) == read_ranks(open_mpi)
    with pytest.raises(RanksError, match="PMIX_RANK=5 is set but WORLD_SIZE is not"):
        read_ranks({"PMIX_RANK": "5"})
    assert read_ranks({"PMIX_RANK": "0"}) == Ranks()


@pytest.mark.parametrize("launcher", NAMES)
def test_a_rank_without_its_size_is_an_error_for_every_launcher(launcher: str) -> None:
    rank, size, _, _ = NAMES[launcher]
    with pytest.raises(RanksError, match=f"{rank}=1 is set but {size} is not"):
        read_ranks({rank: "1"})


def test_the_local_rank_is_the_rank_on_a_single_machine() -> None:
    ranks = read_ranks({"WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert (ranks.rank, ranks.local_rank, ranks.local_size) == (1, 1, 2)


def test_slurm_tells_tasks_per_node_in_its_short_form() -> None:
    environ = {
        "SLURM_PROCID": "6",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_STEP_NODELIST": "gpu[003-005,7],login1",
    }
    ranks = read_ranks(environ)
    assert (ranks.local_rank, ranks.local_size) == (0, 1)
    assert ranks.main_address == "gpu003"
    with pytest.raises(RanksError, match="two each"):
        read_ranks({**environ, "SLURM_STEP_TASKS_PER_NODE": "two each"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("tux-[1-3]-eth0.cluster.org,b", "tux-1-eth0.cluster.org"),
        ("a,b[1,2]", "a"),
    ],
)
def test_the_first_host_of_slurms_list_is_where_the_ranks_meet(nodes: str, first: str) -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": nodes}
    assert read_ranks(environ).main_address == first


@pytest.mark.parametrize("text", ["::1", "[::1]", " ::1 ", " [::1]"])
def test_an_address_is_read_without_brackets_and_blanks(text: str) -> None:
    assert read_ranks({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": text}).main_address == "::1"


def test_a_batch_script_that_srun_did_not_start_is_one_rank() -> None:
    assert read_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == Ranks()


def test_reading_ranks_loads_no_torch() -> None:
    code = "import sys, acc_ops.ranks as r; r.read_ranks(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
