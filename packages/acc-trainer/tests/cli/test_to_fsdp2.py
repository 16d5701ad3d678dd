"""`acc to-fsdp2`: what version 2 has is kept, what it has not is said."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from acc_ops.options import from_mapping
from acc_trainer.cli.main import main
from acc_trainer.cli.to_fsdp2 import (
    ARGUMENT_KEY_MAPPING,
    ConversionStatus,
    convert_config_to_fsdp2,
    load_config,
    to_fsdp2_command_parser,
)
from acc_trainer.launch.config_file import read_config_file
from acc_trainer.launch.options import LaunchOptions

OLD: dict[str, Any] = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_activation_checkpointing": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
    "mixed_precision": "bf16",
}


def converted(**settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = convert_config_to_fsdp2({"fsdp_config": settings})["fsdp_config"]
    return found


def test_keys_are_renamed_dropped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    before = json.dumps(OLD)
    made = convert_config_to_fsdp2(OLD)
    assert json.dumps(OLD) == before
    assert made == {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
            "fsdp_activation_checkpointing": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_reshard_after_forward": False,
            "fsdp_version": 2,
        },
        "mixed_precision": "bf16",
    }
    dropped = {key for key, new in ARGUMENT_KEY_MAPPING.items() if isinstance(new, ConversionStatus)}
    assert {record.getMessage().split()[0] for record in caplog.records} == dropped


def test_nothing_to_convert_is_the_same_object(caplog: pytest.LogCaptureFixture) -> None:
    for config in (
        {},
        {"fsdp_config": {}},
        {"fsdp_config": {"fsdp_version": "2", "fsdp_use_orig_params": True}},
    ):
        assert convert_config_to_fsdp2(config) is config
    assert [record.getMessage()[:25] for record in caplog.records] == ["fsdp_version is 2 already"]


@pytest.mark.parametrize(
    ("said", "reshards", "warning"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, True, None),
        ({"sharding_strategy": "shard_grad_op"}, False, None),  # a key without its prefix, small letters
        ({"fsdp_sharding_strategy": 4}, True, "set dp_replicate_size"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, False, "set dp_replicate_size"),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, False, "always shards"),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, False, None),
        ({"fsdp_reshard_after_forward": False}, False, None),
        ({"fsdp_reshard_after_forward": True, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, False, "gives way"),
    ],
)
def test_a_strategy_becomes_whether_weights_are_freed(
    said: dict[str, Any], reshards: bool, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert converted(**said) == {"fsdp_reshard_after_forward": reshards, "fsdp_version": 2}
    assert ([warning in record.getMessage() for record in caplog.records] or [None]) == [
        True if warning else None
    ]


def test_what_cannot_be_converted_is_named() -> None:
    with pytest.raises(
        ValueError, match="fsdp_sharding_strategy: HALF is no sharding strategy: write one of FULL"
    ):
        converted(fsdp_sharding_strategy="HALF")
    with pytest.raises(
        ValueError, match="fsdp_sharding_strategy: 2 and fsdp_reshard_after_forward: FULL_SHARD contra"
    ):
        converted(fsdp_sharding_strategy=2, fsdp_reshard_after_forward="FULL_SHARD")
    with pytest.raises(ValueError, match="must hold keys and values"):
        convert_config_to_fsdp2({"fsdp_config": ["fsdp_version"]})


def test_states_in_local_parts_become_shards() -> None:
    assert converted(fsdp_state_dict_type="LOCAL_STATE_DICT")["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_the_converted_file_is_one_that_acc_launch_reads(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / f"old.{suffix}", tmp_path / f"new.{suffix}"
    text = json.dumps(OLD) if suffix == "json" else yaml.safe_dump(OLD)
    old.write_text(text)
    assert main(["to-fsdp2", "--config-file", str(old), "--output-file", str(new)]) == 0
    assert str(new) in capsys.readouterr().out
    options = from_mapping(LaunchOptions, read_config_file(str(new)))
    assert (options.fsdp_version, options.fsdp_reshard_after_forward, options.use_fsdp) == (2, False, True)
    assert old.read_text() == text
    assert new.read_text().startswith("{") == (suffix == "json")
    assert main(["to-fsdp2", "--config_file", str(old), "--overwrite"]) == 0
    assert load_config(str(old)) == load_config(str(new))
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, old.name]


def test_mistakes_are_one_line_and_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, other, empty = tmp_path / "old.yaml", tmp_path / "other.yaml", tmp_path / "empty.yaml"
    old.write_text(yaml.safe_dump(OLD))
    other.write_text("mine: 1\n")
    empty.write_text("")
    for words, said in (
        (["--config_file", str(old)], "say where to write"),
        (["--config_file", "nowhere.yaml", "--overwrite"], "nowhere.yaml does not exist"),
        (["--config_file", str(old), "--output_file", str(other)], "exists: choose another one"),
        (["--config_file", str(empty), "--overwrite"], "is empty"),
    ):
        assert main(["to-fsdp2", *words]) == 1
        shown = capsys.readouterr().err
        assert said in shown
        assert shown.count("\n") == 1
    assert other.read_text() == "mine: 1\n"
    assert main(["to-fsdp2"]) == 2
    for content in ("[1]", "a: [", "just words"):
        other.write_text(content)
        with pytest.raises(ValueError, match=str(other)):
            load_config(str(other))


def test_it_is_one_command_of_a_larger_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    program = argparse.ArgumentParser()
    to_fsdp2_command_parser(program.add_subparsers())
    old = tmp_path / "old.yaml"
    old.write_text(yaml.safe_dump(OLD))
    args = program.parse_args(["to-fsdp2", "--config-file", str(old), "--overwrite"])
    args.func(args)
    assert load_config(str(old))["fsdp_config"]["fsdp_version"] == 2
