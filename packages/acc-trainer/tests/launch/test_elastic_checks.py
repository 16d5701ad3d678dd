"""What torch.distributed.run would refuse is refused in one line, with --dry_run too."""

from __future__ import annotations

import os

import pytest

from acc_trainer.launch.arguments import read_arguments
from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.plan import make_plan


@pytest.fixture
def plan_of(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")

    def make(*words):
        arguments = read_arguments(["--cpu", "--dry_run", "--num_processes", "2", *words, str(script)])
        return make_plan(arguments, {"HF_HOME": str(tmp_path)})

    return make


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tee", "9"], r"--tee must be 0 .*got '9'"),
        (["--tee", "0:3,1:7"], r"--tee must be .*got '0:3,1:7'"),
        (["--rdzv_conf", "a"], r"--rdzv_conf must be key=value,key=value; found 'a' in 'a'"),
        (["--rdzv_conf", "timeout=9,b="], r"found 'b=' in 'timeout=9,b='"),
        (["--rdzv_backend", "nosuch"], r"--rdzv_backend nosuch is not known; there are static, c10d"),
        (["--monitor_interval", "-1"], r"--monitor_interval must be .* above 0, got -1"),
        (["--monitor_interval", "0"], r"--monitor_interval must be .* above 0, got 0"),
        (["--monitor_interval", "nan"], r"--monitor_interval must be .*got nan"),
        (["--monitor_interval", "inf"], r"--monitor_interval must be .*got inf"),
        (["--log_dir", ""], r"--log_dir is empty"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_value(plan_of, words, said):
    with pytest.raises(LaunchError, match=said):
        plan_of(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["--tee", "0:3,1:1"],
        ["--rdzv_backend", "c10d", "--rdzv_conf", "timeout=9,join_timeout=3"],
        ["--rdzv_backend", "etcd-v2"],
        ["--monitor_interval", "0.5"],
    ],
)
def test_what_torch_accepts_is_accepted(plan_of, words):
    assert plan_of(*words).num_processes == 2


def test_a_folder_for_logs_that_cannot_be_made_is_refused_and_the_trial_leaves_nothing(plan_of, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"--log_dir .*file/logs cannot be written: Not a directory"):
        plan_of("--log_dir", str(tmp_path / "file" / "logs"))
    before = sorted(os.listdir(tmp_path))
    plan_of("--log_dir", str(tmp_path / "logs" / "deep"))
    assert sorted(os.listdir(tmp_path)) == before
    if os.path.isdir("/proc/self"):
        with pytest.raises(LaunchError, match="--log_dir /proc/x cannot be written"):
            plan_of("--log_dir", "/proc/x")
