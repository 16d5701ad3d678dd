"""A configuration file (YAML or JSON, accelerate's keys) as option values."""

from __future__ import annotations

from typing import Any

from acc_ops.options import closest, options_of

from .errors import LaunchError
from .options import LaunchOptions
from .unbuilt import FILE_KEYS, refusal, turns_on

_IGNORED = {"main_training_function"}  # always in the file, and only a TPU launch looks at it
_DISTRIBUTED = {
    "NO": {},
    "MULTI_GPU": {"multi_gpu": True},
    "MULTI_CPU": {"use_cpu": True},
    "FSDP": {"use_fsdp": True},
}
_BLOCKS = {  # sections of the file -> how the options in them begin, said or not
    "dynamo_config": "dynamo_",
    "fsdp_config": "fsdp_",
    "parallelism_config": "parallelism_config_",
    "fp8_config": "fp8_",
}
_OTHER_GPUS = ("MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")


def read_config_file(path: str) -> dict[str, Any]:
    """The file's values by key of LaunchOptions.

    LaunchError when it cannot be read, holds an unknown key (named, with the closest known one), or asks for something
    that is not built yet.
    """
    if not path:
        raise LaunchError("--config_file is empty: name the file")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise LaunchError(f"--config_file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LaunchError(
            f"--config_file {path} is not a text file in UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    return _checked(_parsed(text, path), path)


def _parsed(text: str, path: str) -> dict[str, Any]:
    content: Any
    try:
        if text.lstrip().startswith("{"):
            import json  # noqa: PLC0415  as below

            content = json.loads(text)
        else:
            import yaml  # noqa: PLC0415  16 ms that only a launch with a YAML file pays

            try:
                content = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(error) from None
    except ValueError as error:
        raise LaunchError(
            f"--config_file {path} is neither YAML nor JSON: {' '.join(str(error).split())}"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise LaunchError(f"--config_file {path} must hold keys and values, found {type(content).__name__}")
    return content


def _checked(content: dict[str, Any], path: str) -> dict[str, Any]:
    known = {chosen.key for chosen in options_of(LaunchOptions) if chosen.key}
    special = {"compute_environment", "distributed_type", *_BLOCKS, *FILE_KEYS}
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key in known:
            values[key] = value
        elif key not in special:
            near = closest(str(key), known | special)
            raise LaunchError(f"{path}: unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
        elif key not in _IGNORED and turns_on(key, value):
            raise LaunchError(refusal(key, f"{path}: {key}"))
    if str(content.get("compute_environment") or "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise LaunchError(
            f"{path}: compute_environment {content['compute_environment']}: SageMaker is not built yet"
        )
    if values.get("num_processes") == -1:
        raise LaunchError(f"{path}: num_processes is -1; write how many processes there shall be")
    blocks = {key: value for name in _BLOCKS for key, value in _block(content, name, path).items()}
    if content.get("parallelism_config"):
        blocks["use_parallelism_config"] = True
    return {**_distributed(content, path), **blocks, **_without_none(values)}


def _distributed(content: dict[str, Any], path: str) -> dict[str, Any]:
    kind = content.get("distributed_type", "NO")
    name = "NO" if kind in (False, None) else str(kind).upper()  # YAML reads a bare NO as false
    if name in _OTHER_GPUS:
        name = "MULTI_GPU"
    if name not in _DISTRIBUTED:
        raise LaunchError(f"{path}: distributed_type {kind} is not built yet")
    if name == "MULTI_GPU" and content.get("num_processes") == 1:
        return {}
    return dict(_DISTRIBUTED[name])


def _block(content: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    """A section of the file as options."""
    settings = content.get(name) or {}
    if not isinstance(settings, dict):
        raise LaunchError(f"{path}: {name} must hold keys and values, found {settings!r}")
    prefix = _BLOCKS[name]
    named = {key if key.startswith(prefix) else f"{prefix}{key}": value for key, value in settings.items()}
    if named.get("dynamo_backend") is False:  # YAML reads a bare NO as false
        named["dynamo_backend"] = "no"
    texts = {chosen.key for chosen in options_of(LaunchOptions) if chosen.parse is not None}
    return _without_none(
        {key: str(value) if type(value) is int and key in texts else value for key, value in named.items()}
    )


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
