"""Launch helpers for an argparse namespace give what `acc launch` would do."""

from __future__ import annotations

import argparse
import logging
import socket
import sys

import pytest

from acc_ops.options import from_env
from acc_plugins.options.fp8 import LinearOverrides
from acc_plugins.options.parallelism import ParallelismConfig
from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.namespaces import (
    env_var_path_add,
    prepare_extend_env_parallelism_config,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
    setup_fp8_env,
)

LATER_ENGINES = {
    "use_fsdp": False,
    "use_deepspeed": False,
    "fp8_margin": 0,
    "mpirun_hostfile": None,
    "tpu": False,
}


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("OMP_NUM_THREADS", "ACCELERATE_USE_CPU", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def namespace(tmp_path):
    script = tmp_path / "train.py"
    script.touch()

    def make(**said):
        return argparse.Namespace(
            training_script=str(script), training_script_args=["--lr", 1], **LATER_ENGINES, **said
        )

    return make


@pytest.fixture
def taken_port():
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_one_process_is_a_command_and_an_environment(namespace, monkeypatch):
    monkeypatch.setenv("MINE", "kept")
    args = namespace(
        cpu=True, mixed_precision="bf16", num_cpu_threads_per_process=2, num_processes=0, num_machines=None
    )
    command, environ = prepare_simple_launcher_cmd_env(args)
    assert command == [sys.executable, args.training_script, "--lr", "1"]
    wanted = {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "OMP_NUM_THREADS": "2",
        "MINE": "kept",
    }
    assert {name: environ.get(name) for name in wanted} == wanted


def test_a_module_is_run_as_one(namespace):
    args = namespace(module=True)
    args.training_script = "package.train"
    assert prepare_simple_launcher_cmd_env(args)[0] == [sys.executable, "-m", "package.train", "--lr", "1"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"mixed_precision": "fp7"}, "mixed_precision.*fp7"),
        ({"dynamo_backend": "moon"}, "dynamo_backend.*moon"),
        ({"module": True, "no_python": True}, "--module and --no_python exclude each other"),
    ],
)
@pytest.mark.parametrize("prepare", [prepare_simple_launcher_cmd_env, prepare_multi_gpu_env])
def test_what_cannot_be_is_an_error(prepare, said, why, namespace):
    with pytest.raises(ValueError, match=why):
        prepare(namespace(num_processes=2, **said))


@pytest.mark.parametrize(("name", "value"), [("use_deepspeed", True), ("mpirun_hostfile", "hosts")])
def test_things_that_are_not_built_are_refused(name, value, namespace):
    args = namespace()
    setattr(args, name, value)
    with pytest.raises(LaunchError, match=f"--{name}: .* is not built yet"):
        prepare_simple_launcher_cmd_env(args)


def test_a_script_is_needed():
    with pytest.raises(LaunchError, match="no script was given"):
        prepare_simple_launcher_cmd_env(argparse.Namespace())


def test_several_processes_on_one_machine_get_a_port(namespace):
    args = namespace(num_processes=4, gpu_ids="0,1", main_process_port=0, gradient_accumulation_steps=3)
    environ = prepare_multi_gpu_env(args)
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "3"
    assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("4", "1", 0)
    assert 0 < int(args.master_port) < 65536


def test_several_machines_meet_at_the_first(namespace):
    args = namespace(
        num_processes=4, num_machines=2, machine_rank=1, main_process_ip="1.2.3.4", main_process_port=777
    )
    prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank, args.rdzv_endpoint) == (
        "2",
        "2",
        1,
        "1.2.3.4:777",
    )


def test_a_port_in_use_on_one_machine_is_not_taken(namespace, taken_port, caplog):
    args = namespace(num_processes=2, main_process_port=taken_port)
    with caplog.at_level(logging.WARNING):
        prepare_multi_gpu_env(args)
    assert args.standalone
    assert not hasattr(args, "master_port")
    assert f"port {taken_port} is in use" in caplog.text


def test_a_port_in_use_on_the_first_of_several_machines_is_an_error(namespace, taken_port):
    said = {
        "num_processes": 2,
        "num_machines": 2,
        "main_process_ip": "localhost",
        "main_process_port": taken_port,
    }
    with pytest.raises(ConnectionError, match=f"--main_process_port {taken_port} is in use"):
        prepare_multi_gpu_env(namespace(machine_rank=0, **said))
    prepare_multi_gpu_env(namespace(machine_rank=1, **said))  # its own port of that number is not asked about


def test_a_folder_is_added_to_a_path(monkeypatch):
    monkeypatch.setenv("SOME_PATH", "/a:/b")
    assert env_var_path_add("SOME_PATH", "/c") == "/a:/b:/c"
    monkeypatch.delenv("SOME_PATH")
    assert env_var_path_add("SOME_PATH", "/c") == "/c"


def test_options_of_fp8_become_variables_that_the_recipe_reads():
    said = argparse.Namespace(
        fp8_backend="te", fp8_margin=3, fp8_override_linear_precision=(False, True, False), other=1
    )
    environ = {"KEPT": "1"}
    assert setup_fp8_env(said, environ) is environ
    assert environ["KEPT"] == "1"
    assert environ["ACCELERATE_FP8_BACKEND"] == "TE"
    assert environ["ACCELERATE_FP8_MARGIN"] == "3"
    overrides = from_env(LinearOverrides, environ)
    assert overrides == LinearOverrides(False, True, False)
    assert all(name == "KEPT" or name.startswith("ACCELERATE_FP8_") for name in environ)
    for name, value in (("fp8_format", "E9"), ("fp8_override_linear_precision", (True, True, True, True))):
        with pytest.raises(LaunchError, match=name):
            setup_fp8_env(argparse.Namespace(**{name: value}), {})


def test_sizes_of_axes_become_variables_that_the_config_reads():
    said = argparse.Namespace(parallelism_config_tp_size=2, parallelism_config_dp_shard_size="4")
    environ = prepare_extend_env_parallelism_config(said, {})
    assert environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    config = from_env(ParallelismConfig, environ)
    assert (config.tp_size, config.dp_shard_size, config.cp_size) == (2, 4, 1)
    assert all(name.startswith(("ACCELERATE_USE_", "PARALLELISM_CONFIG_")) for name in environ)
    assert vars(said) == {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": "4"}
