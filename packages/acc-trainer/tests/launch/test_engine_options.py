"""Options of engines: what a worker is told, what it reads back, and what cannot go together."""

from __future__ import annotations

import pytest

from acc_ops.options import OptionError, from_env, options_of, resolve
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
)
from acc_trainer.launch import plan as planning
from acc_trainer.launch.arguments import read_arguments
from acc_trainer.launch.engine_options import ENGINE_SECTIONS, EngineOptions, names_of
from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.options import SECTIONS, LaunchOptions
from acc_trainer.launch.plan import LaunchPlan, make_plan

PLUGINS = (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchContextParallelConfig,
    DeepSpeedSequenceParallelConfig,
)
SAID = {  # a value of each option that is not its default
    "fsdp_version": "2",
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_reshard_after_forward": "false",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Block,Other",
    "fsdp_min_num_params": "7",
    "fsdp_ignored_modules": "head.*",
    "fsdp_offload_params": "true",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_use_orig_params": "false",
    "fsdp_sync_module_states": "false",
    "fsdp_cpu_ram_efficient_loading": "false",
    "fsdp_backward_prefetch": "BACKWARD_POST",
    "fsdp_forward_prefetch": "true",
    "fsdp_activation_checkpointing": "true",
    "fsdp_activation_checkpointing_offload": "true",
    "parallelism_config_dp_replicate_size": "2",
    "parallelism_config_dp_shard_size": "2",
    "parallelism_config_tp_size": "2",
    "parallelism_config_cp_size": "2",
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "alltoall",
    "parallelism_config_sp_size": "2",
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length": "512",
    "parallelism_config_sp_seq_length_is_variable": "false",
    "parallelism_config_sp_attn_implementation": "flash_attention_2",
    "fp8_backend": "te",
    "fp8_pad_inner_dim": "false",
    "fp8_enable_fsdp_float8_all_gather": "false",
    "fp8_use_autocast_during_eval": "true",
    "fp8_margin": "1",
    "fp8_interval": "2",
    "fp8_format": "e4m3",
    "fp8_amax_history_len": "16",
    "fp8_amax_compute_algo": "max",
    "fp8_use_mxfp8_block_scaling": "true",
    "fp8_override_linear_precision": "true,false,false",
    "fp8_opt_level": "O1",
}


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "count_accelerators", lambda environ: 0)
    script = tmp_path / "train.py"
    script.write_text("")

    def make(*words: str, environ: dict[str, str] | None = None, processes: int = 2) -> LaunchPlan:
        said = ["--cpu", "--num_processes", str(processes), *words, str(script)]
        return make_plan(read_arguments(said), {"HF_HOME": str(tmp_path), **(environ or {})})

    return make


def _told(plan: LaunchPlan) -> dict[str, str]:
    return {
        name: text
        for name, text in plan.environ.items()
        if name.startswith(("FSDP_", "PARALLELISM_", "ACCELERATE_FP8_"))
    }


def test_every_option_has_its_section_and_an_example_here():
    assert set(SAID) == {name for section in ENGINE_SECTIONS for name in names_of(section)}
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(chosen.name for chosen in options_of(LaunchOptions))


def test_every_flag_of_the_plugins_is_the_launchers():
    flags = {declared.flag for kind in PLUGINS for declared in options_of(kind) if declared.flag}
    launched = {chosen.flag: chosen for chosen in options_of(EngineOptions)}
    assert flags - set(launched) == set()
    for kind in PLUGINS:
        for declared in options_of(kind):
            if declared.flag:
                assert (launched[declared.flag].env, launched[declared.flag].help) == (
                    declared.env,
                    declared.help,
                )


@pytest.mark.parametrize("flag", SAID)
def test_what_is_said_reaches_the_worker_and_nothing_else_does(plan_of, flag):
    on = ["--use_fsdp"] if flag.startswith("fsdp") else ["--use_parallelism_config"]
    if flag.startswith("fp8"):
        on = ["--mixed_precision", "fp8"]
    if flag == "parallelism_config_dp_shard_size":
        on += ["--use_fsdp", "--fsdp_version", "2"]
    with_it, without = _told(plan_of(*on, f"--{flag}", SAID[flag])), _told(plan_of(*on))
    chosen = next(chosen for chosen in options_of(EngineOptions) if chosen.name == flag)
    if flag == "fp8_override_linear_precision":
        assert [with_it[f"ACCELERATE_FP8_OVERRIDE_{name}"] for name in ("FPROP", "DGRAD", "WGRAD")] == [
            "true",
            "false",
            "false",
        ]
        return
    assert with_it[chosen.env].lower() == SAID[flag].lower()
    changed = {name for name in with_it if with_it[name] != without.get(name)}
    assert changed <= {chosen.env}
    off = plan_of(f"--{flag}", SAID[flag])
    assert _told(off) == {}
    assert any(flag in note and "no effect without" in note for note in off.notes)


@pytest.mark.parametrize("flag", [name for name in SAID if name.startswith("fsdp")])
@pytest.mark.parametrize("version", ["1", "2"])
def test_the_plugin_reads_what_the_launcher_wrote(plan_of, flag, version, monkeypatch):
    only = {"1": ("activation_checkpointing_offload", "reshard_after_forward"), "2": ("forward_prefetch",)}[
        version
    ]
    if flag.endswith(only) or flag == "fsdp_version":
        return  # an error of that version, which test_fsdp.py of acc-plugins has
    words = ["--use_fsdp", "--fsdp_version", version, f"--{flag}", SAID[flag]]
    if flag.endswith("checkpointing_offload"):
        words += ["--fsdp_activation_checkpointing", "true"]
    plan = plan_of(*words)
    plugin = from_env(FullyShardedDataParallelPlugin, plan.environ)
    assert plugin.fsdp_version == int(version)
    assert plugin.cpu_ram_efficient_loading is (flag != "fsdp_cpu_ram_efficient_loading")


def test_defaults_of_the_specification_are_written_where_they_count(plan_of):
    first = _told(plan_of("--use_fsdp"))
    assert first == {
        "FSDP_VERSION": "1",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    }
    second = _told(plan_of("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "size_based_wrap"))
    assert second["FSDP_MIN_NUM_PARAMS"] == "100000000"
    assert "FSDP_USE_ORIG_PARAMS" not in second
    assert _told(plan_of("--use_parallelism_config")) == _told(plan_of("--mixed_precision", "fp8")) == {}


def test_a_variable_of_the_user_is_left_to_be_inherited(plan_of):
    environ = {"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true", "ACCELERATE_USE_FSDP": "true"}
    plan = plan_of(environ=environ)
    assert plan.options.fsdp_version == 2
    assert not {"FSDP_VERSION", "FSDP_OFFLOAD_PARAMS"} & set(plan.environ)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--use_parallelism_config", "--use_fsdp"], "needs --fsdp_version 2, got 1"),
        (
            ["--use_parallelism_config", "--parallelism_config_dp_shard_size", "2"],
            "add --use_fsdp --fsdp_version 2",
        ),
        (
            ["--use_parallelism_config", "--parallelism_config_tp_size", "4"],
            "tp 4 of .* makes 4 processes, but there are 2",
        ),
        (["--use_parallelism_config", "--parallelism_config_tp_size", "0"], "tp_size"),
        (
            [
                "--use_parallelism_config",
                "--parallelism_config_cp_size",
                "2",
                "--parallelism_config_sp_size",
                "2",
            ],
            "both split the sequence",
        ),
        (
            ["--mixed_precision", "fp8", "--fp8_override_linear_precision", "true"],
            "takes three of true and false",
        ),
        (["--fsdp_version", "3"], "expected one of 1, 2"),
        (["--fp8_backend", "x"], "expected one of AO, TE, MSAMP"),
    ],
)
def test_what_cannot_go_together_is_refused_before_anything_starts(plan_of, words, said):
    with pytest.raises(LaunchError, match=said):
        plan_of(*words)


def test_tensor_parallelism_needs_no_fsdp(plan_of):
    plan = plan_of("--use_parallelism_config", "--parallelism_config_tp_size", "2")
    assert plan.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert from_env(ParallelismConfig, plan.environ).tp_size == 2


def test_options_are_checked_when_they_are_built():
    with pytest.raises(OptionError, match="fsdp_version"):
        resolve(LaunchOptions, given={"fsdp_version": "x"})
