"""The contents of a configuration file as an object, for programs that read and write one: `ClusterConfig` has accelerate's fields.

`acc launch` itself reads the file by its own options (`launch/config_file.py`), which also says what is not built yet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from acc_ops.enums import (
    ComputeEnvironment,
    DistributedType,  # noqa: TID251  what the file says, nothing is decided by it here
    DynamoBackend,
)
from acc_ops.options import closest
from acc_trainer.launch.config_path import default_config_path
from acc_trainer.launch.worker import inherited

default_config_file = default_json_config_file = default_yaml_config_file = default_config_path(inherited())
cache_dir = os.path.dirname(default_config_file)
hf_cache_home = os.path.dirname(cache_dir)

_Config = TypeVar("_Config", bound="BaseConfig")


@dataclass
class BaseConfig:
    """What every configuration says. Texts become members of their enums; ValueError for one that is none."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        self.distributed_type = DistributedType(self.distributed_type)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by key, without those that are None or an empty mapping."""
        said = {name: value for name, value in vars(self).items() if value is not None and value != {}}
        return {name: value.value if isinstance(value, Enum) else value for name, value in said.items()}

    @staticmethod
    def process_config(config_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The keys and values of a file with what it may leave out; a bare `NO` of YAML and the older `dynamo_backend` are understood.

        ValueError without `distributed_type`.
        """
        made = {"compute_environment": ComputeEnvironment.LOCAL_MACHINE, **config_dict}
        if "distributed_type" not in made:
            raise ValueError("distributed_type is missing: write NO, MULTI_GPU, MULTI_CPU, FSDP, ...")
        if made["distributed_type"] is False:
            made["distributed_type"] = DistributedType.NO
        if str(made["distributed_type"]).upper() == "NO" or made["distributed_type"] == DistributedType.NO:
            made.setdefault("num_processes", 1)
        if made.get("mixed_precision") is False:
            made["mixed_precision"] = "no"
        for name, value in (
            ("mixed_precision", None),
            ("use_cpu", False),
            ("debug", False),
            ("enable_cpu_affinity", False),
        ):
            made.setdefault(name, value)
        backend = made.pop("dynamo_backend", None)
        if backend is not None and str(backend).upper() not in ("NO", "FALSE"):
            made.setdefault("dynamo_config", {"dynamo_backend": DynamoBackend(str(backend).upper()).value})
        return made

    @classmethod
    def from_yaml_file(cls: type[_Config], yaml_file: str | None = None) -> _Config:
        """From a YAML file, the default one when None. ValueError for keys that are not known, OSError of the disk."""
        import yaml  # noqa: PLC0415  16 ms that only a file in YAML costs

        path = yaml_file or default_yaml_config_file
        with open(path, encoding="utf-8") as file:
            try:
                content = yaml.safe_load(file)
            except yaml.YAMLError as error:
                raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
        return cls._from(content, path)

    @classmethod
    def from_json_file(cls: type[_Config], json_file: str | None = None) -> _Config:
        """From a JSON file, the default one when None. Errors as of `from_yaml_file`."""
        path = json_file or default_json_config_file
        with open(path, encoding="utf-8") as file:
            return cls._from(json.load(file), path)

    @classmethod
    def _from(cls: type[_Config], content: Any, path: str) -> _Config:
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold keys and values, found {type(content).__name__}")
        values = cls.process_config(content)
        if ComputeEnvironment(values["compute_environment"]) is not ComputeEnvironment.LOCAL_MACHINE:
            raise ValueError(
                f"{path}: compute_environment {values['compute_environment']}: SageMaker is not built yet"
            )
        known = {one.name: one for one in fields(cls)}
        for key in values:
            if key not in known:
                near = closest(str(key), known)
                raise ValueError(
                    f"{path}: unknown key {key!r}" + (f"; did you mean {near!r}?" if near else "")
                )
        missing = [name for name, one in known.items() if name not in values and one.default is MISSING]
        if missing:
            raise ValueError(f"{path}: {', '.join(missing)} is missing")
        return cls(**values)

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write `to_dict()` as YAML."""
        import yaml  # noqa: PLC0415  as above

        with open(yaml_file, "w", encoding="utf-8") as file:
            yaml.safe_dump(self.to_dict(), file)

    def to_json_file(self, json_file: str) -> None:
        """Write `to_dict()` as JSON, which is YAML, too."""
        with open(json_file, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")


@dataclass
class ClusterConfig(BaseConfig):
    """A configuration of machines of one's own. Sections that are None become empty mappings."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for one in fields(self):
            if one.name.endswith("_config") and getattr(self, one.name) is None:
                setattr(self, one.name, {})


def load_config_from_file(config_file: str | None) -> ClusterConfig:
    """The configuration in a file, the default one when None.

    Raises FileNotFoundError for a file that is not there, ValueError for one that cannot be read or is one of SageMaker's, which is not built yet.
    """
    path = config_file or default_config_path(inherited())
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"there is no configuration file {path}: name one that exists, or write one with `acc config default`"
        )
    read = ClusterConfig.from_json_file if path.endswith(".json") else ClusterConfig.from_yaml_file
    return read(path)
