"""Flags over file over environment over defaults; a plan that cannot work is refused before anything starts."""

from __future__ import annotations

import sys

import pytest

from acc_trainer.launch import plan as planning
from acc_trainer.launch.arguments import read_arguments
from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.plan import IN_PLACE, SUPERVISED, TORCHRUN, make_plan


@pytest.fixture(autouse=True)
def _a_machine_with_four_cores_and_no_accelerator(monkeypatch):
    monkeypatch.setattr(planning, "count_accelerators", lambda environ: 0)
    monkeypatch.setattr(planning, "count_cores", lambda: 4)
    monkeypatch.setattr(planning, "visibility_variable", lambda environ: "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def plan_of(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")

    def make(*words, environ=None, script=str(script), args=()):
        home = {"HF_HOME": str(tmp_path / "home")}
        return make_plan(
            read_arguments([*words, *([script] if script else []), *args]), {**home, **(environ or {})}
        )

    return make


def test_one_process_runs_in_place_and_several_under_our_supervisor(plan_of):
    assert plan_of("--cpu", "--num_processes", "1").runner == IN_PLACE
    assert plan_of("--cpu", "--num_processes", "2").runner == SUPERVISED


@pytest.mark.parametrize(
    "words",
    [
        ["--max_restarts", "1"],
        ["--tee", "3"],
        ["--log_dir", "logs"],
        ["--rdzv_backend", "c10d"],
        ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"],
    ],
)
def test_machines_restarts_and_log_files_go_to_torch_distributed_run(plan_of, words):
    assert plan_of("--cpu", "--num_processes", "2", *words).runner == TORCHRUN


def test_flags_win_over_the_file_the_file_over_the_environment(plan_of, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("mixed_precision: fp16\nnum_processes: 3\nuse_cpu: true\n")
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "eager"}
    plan = plan_of("--config_file", str(config), "--num_processes", "2", environ=environ)
    assert (plan.options.mixed_precision, plan.num_processes) == ("fp16", 2)
    assert plan.options.dynamo_backend == "eager"
    assert plan.environ["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert plan.environ["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_DYNAMO_BACKEND" not in plan.environ  # it is inherited as it was spelled


def test_the_default_file_is_read_unless_cpu_is_asked_for(plan_of, tmp_path):
    (tmp_path / "home" / "accelerate").mkdir(parents=True)
    (tmp_path / "home" / "accelerate" / "default_config.yaml").write_text("mixed_precision: bf16\n")
    assert plan_of("--num_processes", "1").options.mixed_precision == "bf16"
    assert plan_of("--cpu", "--num_processes", "1").options.mixed_precision == "no"


def test_a_bad_value_in_the_file_names_the_file(plan_of, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("num_processes: many\n")
    with pytest.raises(LaunchError, match=r"c\.yaml: key num_processes"):
        plan_of("--config_file", str(config))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num_processes", "0"], "--num_processes must be at least 1, got 0"),
        (["--num_processes", "two"], "num_processes: .*'two'"),
        (["--num_machines", "0"], "--num_machines must be at least 1"),
        (["--mixed_precision", "fp7"], "expected one of no, fp16, bf16, fp8, got 'fp7'"),
        (["--gradient_accumulation_steps", "0"], "must be at least 1, got 0"),
        (["--multi_gpu", "--num_processes", "1"], "--multi_gpu needs at least 2 processes, got 1"),
        (["--multi_gpu", "--cpu"], "exclude each other"),
        (["-m", "--no_python"], "--module and --no_python exclude each other"),
        (["--main_process_port", "70000"], "between 0 and 65535, got 70000"),
        (["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "a"], "needs --machine_rank"),
        (["--num_machines", "2", "--num_processes", "2", "--machine_rank", "0"], "needs --main_process_ip"),
        (
            ["--num_machines", "2", "--num_processes", "3", "--machine_rank", "0"],
            "3 cannot be shared out evenly over 2",
        ),
        (["--num_machines", "2", "--num_processes", "2", "--machine_rank", "2"], "from 0 to 1, got 2"),
        (["--config_file", ""], "--config_file is empty"),
    ],
)
def test_wrong_values_are_refused_with_the_value(plan_of, words, said):
    with pytest.raises(LaunchError, match=said):
        plan_of(*words)


def test_a_missing_script_is_refused(plan_of, tmp_path):
    with pytest.raises(LaunchError, match="no script was given"):
        plan_of("--cpu", script=None)
    with pytest.raises(LaunchError, match=r"the script nowhere\.py does not exist"):
        plan_of("--cpu", script="nowhere.py")
    with pytest.raises(LaunchError, match="not a program that can be run"):
        plan_of("--cpu", "--no_python", script="no-such-program", environ={"PATH": str(tmp_path)})


def test_processes_default_to_the_accelerators_and_to_one_on_a_cpu(plan_of, monkeypatch):
    assert plan_of().num_processes == 1
    monkeypatch.setattr(planning, "count_accelerators", lambda environ: 3)
    plan = plan_of()
    assert plan.num_processes == 3
    assert plan.notes == ("--num_processes was not given: starting 3",)
    assert plan_of("--cpu").num_processes == 1
    assert plan_of("--gpu_ids", "0,2").num_processes == 2


def test_gpu_ids_limit_what_the_workers_see(plan_of):
    assert plan_of("--gpu_ids", "1,3").environ["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in plan_of("--gpu_ids", "all").environ


def test_cores_are_shared_out_unless_the_user_has_said_how_many(plan_of):
    assert plan_of("--cpu", "--num_processes", "2").environ["OMP_NUM_THREADS"] == "2"
    assert plan_of("--cpu", "--num_processes", "9").environ["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in plan_of("--cpu", "--num_processes", "1").environ
    assert (
        "OMP_NUM_THREADS"
        not in plan_of("--cpu", "--num_processes", "2", environ={"OMP_NUM_THREADS": "3,2"}).environ
    )
    given = plan_of("--cpu", "--num_processes", "2", "--num_cpu_threads_per_process", "5")
    assert given.environ["OMP_NUM_THREADS"] == "5"


def test_the_accumulation_steps_reach_the_worker_only_when_they_are_given(plan_of):
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    assert plan_of("--gradient_accumulation_steps", "4").environ[name] == "4"
    assert name not in plan_of().environ


def test_the_command_is_pythons_and_keeps_the_scripts_arguments(plan_of):
    module = plan_of("--cpu", "-m", "--num_processes", "1", script="pkg.mod", args=("--x", "1"))
    assert module.command() == [sys.executable, "-m", "pkg.mod", "--x", "1"]
    program = plan_of("--cpu", "--no_python", "--num_processes", "2", script=sys.executable)
    assert program.command() == [sys.executable]


def test_a_plan_prints_what_will_run_and_where_each_value_comes_from(plan_of):
    text = str(plan_of("--cpu", "--num_processes", "2", environ={"ACCELERATE_MIXED_PRECISION": "bf16"}))
    assert "run by        our supervisor" in text
    assert "num_processes = 2 (argument)" in text
    assert "mixed_precision = bf16 (environment)" in text


def test_a_plan_cannot_be_changed(plan_of):
    with pytest.raises(AttributeError):
        plan_of().num_processes = 4
