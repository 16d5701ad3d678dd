"""Options of the specification that belong to things not built yet: known by name, so that the answer can say so."""

from __future__ import annotations

from acc_ops.environment import parse_flag_from_env

_GROUPS: dict[str, tuple[str, ...]] = {  # a name with * stands for every option that starts like it
    "DeepSpeed": (
        "use_deepspeed",
        "deepspeed_*",
        "zero_stage",
        "zero3_*",
        "offload_optimizer_*",
        "offload_param_*",
        "gradient_clipping",
    ),
    "Megatron-LM": ("use_megatron_lm", "megatron_lm_*"),
    "TPU": (
        "tpu",
        "tpu_*",
        "no_tpu_cluster",
        "vm",
        "env",
        "main_training_function",
        "downcast_bf16",
        "commands",
        "command_file",
    ),
    "SageMaker": ("aws_*",),
    "MPI": ("mpirun_*",),
}
_SWITCHES = {  # take no value
    "use_deepspeed",
    "use_megatron_lm",
    "tpu",
    "tpu_cluster",
    "no_tpu_cluster",
    "tpu_use_sudo",
    "downcast_bf16",
}
_TURN_ON = {  # choose the thing by being given; the others only tune it
    "use_deepspeed",
    "use_megatron_lm",
    "tpu",
    "tpu_cluster",
    "tpu_use_sudo",
    "downcast_bf16",
    "vm",
    "env",
    "aws_access_key_id",
    "aws_secret_access_key",
    "mpirun_hostfile",
    "deepspeed_config",
    "megatron_lm_config",
    "mpirun_config",
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_vm",
    "tpu_env",
    "commands",
    "command_file",
}
_OFF = {"", "no", "none", "false", "0", "off", "f", "n"}
FILE_KEYS = (  # what a configuration file of accelerate may hold beside our own options
    "deepspeed_config",
    "megatron_lm_config",
    "mpirun_config",
    "main_training_function",
    "downcast_bf16",
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "command_file",
    "commands",
    "tpu_vm",
    "tpu_env",
)


def thing_of(name: str) -> str | None:
    """What the option belongs to ("FSDP"), None for an option that is not in the list."""
    for thing, patterns in _GROUPS.items():
        for pattern in patterns:
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
                return thing
    return None


def is_switch(name: str) -> bool:
    """Whether the option stands without a value."""
    return name in _SWITCHES


def turns_on(name: str, value: object) -> bool:
    """Whether giving `value` asks for the thing; settings of a thing that is not asked for do nothing."""
    if isinstance(value, (dict, list)):
        return name in _TURN_ON and bool(value)
    return name in _TURN_ON and str(value).strip().lower() not in _OFF


def refusal(name: str, spelled: str) -> str:
    """The error for an option that was turned on."""
    return f"{spelled}: {thing_of(name)} is not built yet"


def refuse_unbuilt(**given: object) -> None:
    """Raise `ValueError` for an argument of Python that belongs to such a thing; silence would train something else."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(refusal(name, f"{name} was given ({value!r:.80})") + ", leave it out")


def refuse_unbuilt_variables() -> None:
    """Raise `ValueError` for an environment variable that turns such a thing on."""
    for name in ("use_deepspeed", "use_megatron_lm"):
        variable = f"ACCELERATE_{name.upper()}"
        if parse_flag_from_env(variable):
            raise ValueError(refusal(name, f"{variable} is set") + ", unset it")
