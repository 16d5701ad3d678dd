"""A configuration file in accelerate's keys becomes options; what is unknown or unbuilt is refused by name."""

from __future__ import annotations

import json

import pytest

from acc_ops.options import resolve
from acc_trainer.launch.config_file import read_config_file
from acc_trainer.launch.config_path import default_config_path
from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.options import LaunchOptions

ORDINARY = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


@pytest.fixture
def written(tmp_path):
    def write(text, name="c.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_an_ordinary_file_of_accelerate_is_understood(written):
    values = read_config_file(written(ORDINARY))
    assert values["multi_gpu"] is True
    assert values["dynamo_backend"] == "INDUCTOR"
    assert values["mixed_precision"] == "bf16"
    assert values["num_processes"] == 4
    assert "distributed_type" not in values


def test_json_is_understood_under_any_name(written):
    text = json.dumps(
        {"mixed_precision": "no", "num_processes": 1, "distributed_type": "NO", "use_cpu": True}
    )
    assert read_config_file(written(text))["use_cpu"] is True
    assert read_config_file(written(text, "c.json"))["num_processes"] == 1


def test_an_unknown_key_is_named_with_the_closest_known_one(written):
    with pytest.raises(LaunchError, match="unknown key 'num_procesess'; did you mean 'num_processes'"):
        read_config_file(written("num_procesess: 2\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: DEEPSPEED\n", "distributed_type DEEPSPEED is not built yet"),
        ("deepspeed_config:\n  zero_stage: 2\n", "deepspeed_config: DeepSpeed is not built yet"),
        ("fsdp_config: 2\n", "fsdp_config must hold keys and values, found 2"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "SageMaker is not built yet"),
        ("num_processes: -1\n", "num_processes is -1"),
        ("- 1\n- 2\n", "must hold keys and values, found list"),
        ("a: [1\n", "neither YAML nor JSON"),
        ('{"a": ', "neither YAML nor JSON"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(written, text, said):
    with pytest.raises(LaunchError, match=said):
        read_config_file(written(text))


ENGINES = """\
distributed_type: FSDP
mixed_precision: fp8
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: BertLayer,GPT2Block
  offload_params: false
parallelism_config:
  parallelism_config_tp_size: 2
  cp_comm_strategy: alltoall
fp8_config:
  backend: TE
  fp8_format: E4M3
  override_linear_precision: [true, false, false]
"""


def test_the_sections_of_engines_become_options_with_or_without_their_prefix(written):
    options = resolve(LaunchOptions, file=read_config_file(written(ENGINES)))
    assert options.use_fsdp
    assert options.use_parallelism_config
    assert (options.fsdp_sharding_strategy, options.fsdp_offload_params) == ("2", False)
    assert options.fsdp_reshard_after_forward is True
    assert options.fsdp_transformer_layer_cls_to_wrap == ["BertLayer", "GPT2Block"]
    assert (options.parallelism_config_tp_size, options.parallelism_config_cp_comm_strategy) == (
        2,
        "alltoall",
    )
    assert (options.fp8_backend, options.fp8_format) == ("TE", "E4M3")
    assert options.fp8_override_linear_precision == (True, False, False)


def test_a_section_alone_tunes_an_engine_and_does_not_turn_it_on(written):
    assert "use_fsdp" not in read_config_file(
        written("distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2\n")
    )


def test_a_missing_file_is_named():
    with pytest.raises(LaunchError, match=r"--config_file nowhere.yaml cannot be read"):
        read_config_file("nowhere.yaml")


def test_empty_sections_of_unbuilt_things_and_an_empty_file_are_nothing(written):
    assert read_config_file(written("fsdp_config: {}\ndeepspeed_config:\n")) == {}
    assert read_config_file(written("")) == {}


def test_a_bare_no_which_yaml_reads_as_false_is_still_no(written):
    values = read_config_file(written("distributed_type: NO\ndynamo_config:\n  dynamo_backend: NO\n"))
    assert values == {"dynamo_backend": "no"}


def test_the_default_file_follows_hf_home_then_the_cache_folder():
    assert default_config_path({"HF_HOME": "/h"}) == "/h/accelerate/default_config.yaml"
    assert default_config_path({"XDG_CACHE_HOME": "/c"}) == "/c/huggingface/accelerate/default_config.yaml"


def test_a_file_that_is_no_text_is_named_with_the_byte(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"use_cpu: \xff")
    with pytest.raises(LaunchError, match=r"c\.yaml is not a text file in UTF-8: byte 9 is 0xff"):
        read_config_file(str(path))
