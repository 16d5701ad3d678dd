"""A configuration file as an object, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from acc_ops.enums import ComputeEnvironment, DistributedType
from acc_ops.options import from_mapping
from acc_trainer.cli.config_args import BaseConfig, ClusterConfig, load_config_from_file
from acc_trainer.launch.config_file import read_config_file
from acc_trainer.launch.options import LaunchOptions


def config(**more: Any) -> ClusterConfig:
    values: dict[str, Any] = {"distributed_type": "FSDP", "num_processes": 2, **more}
    return ClusterConfig(**ClusterConfig.process_config(values))


def test_texts_become_enums_and_are_left_out_when_they_say_nothing() -> None:
    made = config(fsdp_config={"fsdp_version": 2})
    assert (made.distributed_type, made.compute_environment) == (
        DistributedType.FSDP,
        ComputeEnvironment.LOCAL_MACHINE,
    )
    assert made.dynamo_config == made.fp8_config == {}
    shown = made.to_dict()
    assert shown["distributed_type"] == "FSDP"
    assert shown["fsdp_config"] == {"fsdp_version": 2}
    assert not {"gpu_ids", "dynamo_config", "mixed_precision"} & set(shown)
    with pytest.raises(ValueError, match="BAD"):
        config(distributed_type="BAD")


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_what_is_written_is_read_again_here_and_by_the_launcher(tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / f"c.{suffix}")
    made = config(mixed_precision="bf16", fsdp_config={"fsdp_version": 2}, gpu_ids="0,1")
    getattr(made, f"to_{suffix}_file")(path)
    assert load_config_from_file(path) == made
    assert getattr(ClusterConfig, f"from_{suffix}_file")(path) == made
    options = from_mapping(LaunchOptions, read_config_file(path))
    assert (options.mixed_precision, options.fsdp_version, options.gpu_ids) == ("bf16", 2, "0,1")


def test_what_a_file_leaves_out_is_filled_in() -> None:
    assert BaseConfig.process_config({"distributed_type": False, "mixed_precision": False}) == {
        "compute_environment": ComputeEnvironment.LOCAL_MACHINE,
        "distributed_type": DistributedType.NO,
        "num_processes": 1,
        "mixed_precision": "no",
        "use_cpu": False,
        "debug": False,
        "enable_cpu_affinity": False,
    }
    older = BaseConfig.process_config({"distributed_type": "FSDP", "dynamo_backend": "inductor"})
    assert older["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    assert "num_processes" not in older


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "distributed_type: NO\nnum_proceses: 2\n",
            "unknown key 'num_proceses'; did you mean 'num_processes'",
        ),
        ("use_cpu: true\n", "distributed_type is missing"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\n", "SageMaker is not built yet"),
        ("- 1\n", "must hold keys and values"),
        ("a: [\n", "is no YAML"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        load_config_from_file(str(path))


def test_the_default_file_is_looked_for_when_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"default_config\.yaml.*acc config default"):
        load_config_from_file(None)
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("distributed_type: MULTI_CPU\n")
    assert load_config_from_file(None).distributed_type is DistributedType.MULTI_CPU
