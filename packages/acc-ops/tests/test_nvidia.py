"""nvidia-smi, with a script in its place."""

from __future__ import annotations

import sys

import pytest

from acc_ops.nvidia import (
    check_cuda_fp8_capability,
    check_cuda_p2p_ib_support,
    get_driver_version,
    get_gpu_info,
)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Put an nvidia-smi on the path that knows these answers, and nothing else."""

    def build(names=(), driver="550.54.15", compute_cap=(), broken=False):
        answers = {
            "name": list(names),
            "driver_version": [driver] * len(names),
            "compute_cap": list(compute_cap),
        }
        script = tmp_path / "nvidia-smi"
        script.write_text(
            f"#!{sys.executable}\nimport sys\n"
            f"if {broken}: sys.exit('no devices were found')\n"
            f"what = [a for a in sys.argv if a.startswith('--query-gpu=')][0].partition('=')[2]\n"
            f"print('\\n'.join({answers!r}[what]))\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        check_cuda_fp8_capability.cache_clear()

    yield build
    check_cuda_fp8_capability.cache_clear()


def test_names_and_number(machine):
    machine(names=["NVIDIA H200", "NVIDIA H200"])
    assert get_gpu_info() == (["NVIDIA H200", "NVIDIA H200"], 2)
    assert get_driver_version() == "550.54.15"


def test_a_machine_without_the_tool_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nvidia-smi"):
        get_gpu_info()
    assert check_cuda_p2p_ib_support() is True


@pytest.mark.parametrize(
    ("names", "driver", "expected"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, "535.10.01", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.40.07", True),
        (["NVIDIA GeForce RTX 4090"], "535.10.01", True),
        (["NVIDIA A100", "NVIDIA GeForce RTX 4080"], "470.1", False),
        (["NVIDIA A100", "NVIDIA A100"], "470.1", True),
        (["NVIDIA RTX 4090"] * 2, "unknown", True),
    ],
)
def test_only_several_rtx_40_with_an_old_driver_cannot_talk(machine, names, driver, expected):
    machine(names=names, driver=driver)
    assert check_cuda_p2p_ib_support() is expected


def test_a_tool_that_fails_counts_as_support(machine):
    machine(broken=True)
    assert check_cuda_p2p_ib_support() is True


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [(["8.9"], True), (["9.0", "8.0"], False), (["8.6"], False), (["10.0"], True)],
)
def test_fp8_needs_capability_8_9_on_every_gpu(machine, capabilities, expected):
    machine(compute_cap=capabilities)
    assert check_cuda_fp8_capability() is expected
