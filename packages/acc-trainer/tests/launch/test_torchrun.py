"""What goes to torch.distributed.run is accepted by its own parser and means the same there."""

from __future__ import annotations

import pytest

from acc_trainer.launch.arguments import read_arguments
from acc_trainer.launch.plan import make_plan
from acc_trainer.launch.torchrun import torchrun_command


@pytest.fixture
def parsed(tmp_path):
    from torch.distributed.run import get_args_parser

    script = tmp_path / "s.py"
    script.write_text("")

    def parse(*words):
        plan = make_plan(
            read_arguments([*words, str(script), "--num_processes", "9"]), {"HF_HOME": str(tmp_path)}
        )
        command = torchrun_command(plan)
        assert command[1:3] == ["-m", "torch.distributed.run"]
        return get_args_parser().parse_args(command[3:])

    return parse


def test_several_machines_meet_at_the_first(parsed):
    args = parsed(
        "--cpu",
        "--num_processes",
        "4",
        "--num_machines",
        "2",
        "--machine_rank",
        "1",
        "--main_process_ip",
        "h1",
    )
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "2", 1)
    assert (args.master_addr, args.master_port) == ("h1", 29500)
    assert args.training_script_args == ["--num_processes", "9"]


def test_an_elastic_rendezvous_is_passed_on(parsed):
    args = parsed(
        *(
            "--cpu",
            "--num_processes",
            "2",
            "--num_machines",
            "2",
            "--main_process_ip",
            "h1",
            "--main_process_port",
            "77",
        ),
        *("--rdzv_backend", "c10d", "--rdzv_conf", "timeout=9"),
    )
    assert (args.rdzv_backend, args.rdzv_endpoint, args.rdzv_conf) == ("c10d", "h1:77", "timeout=9")


def test_restarts_and_logs_on_one_machine_stand_alone(parsed):
    args = parsed(
        "--cpu",
        "--num_processes",
        "2",
        "--max_restarts",
        "3",
        "--log_dir",
        "logs",
        "--tee",
        "3",
        "--role",
        "r",
    )
    assert args.standalone
    assert (args.max_restarts, args.log_dir, args.tee, args.role) == (3, "logs", "3", "r")


def test_a_module_stays_a_module(parsed):
    assert parsed("-m", "--cpu", "--num_processes", "2", "--max_restarts", "1").module
