"""How many ranks stand along each axis of parallelism, and the mesh of devices that follows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from acc_ops.lazy import LazyLogger
from acc_ops.options import OptionError, fill_from_env, option, to_mapping
from acc_plugins.options.checks import require_at_least, settle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = LazyLogger(__name__)

_PREFIX = "PARALLELISM_CONFIG_"
_MARK = "the sizes of a mesh"
_AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")  # the order in the mesh: the last one varies fastest
JOINED = {  # what build_device_mesh joins to one axis; sp stands where cp would: ranks that share a sequence average their gradients, and shard over each other
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp", "sp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp", "sp"),
}


def _size(axis: str, meaning: str) -> Any:
    spelling = f"parallelism_config_{axis}_size"
    return option(
        None, env=f"{_PREFIX}{axis.upper()}_SIZE", flag=spelling, key=spelling, help=f"{meaning}; default: 1"
    )


@dataclass
class TorchTensorParallelConfig:
    """Settings of torch's tensor parallelism."""

    enable_async_tp: bool = option(
        False, flag=False, help="overlap communication with computation (experimental in torch)"
    )

    def __post_init__(self) -> None:
        settle(self)
        if self.enable_async_tp:
            logger.warning("enable_async_tp has no effect yet: tensor parallelism runs synchronously")


@dataclass
class TorchTensorParallelPlugin:
    """A number of ranks that split each layer; deprecated: `ParallelismConfig(tp_size=...)` says it. Raises OptionError for one below 1."""

    tp_size: int = option(1, flag=False, help="ranks that split each layer")
    torch_device_mesh: Any = option(None, flag=False, key=False, help="the mesh of those ranks")

    def __post_init__(self) -> None:
        settle(self)
        require_at_least(self, "tp_size", 1)


@dataclass
class TorchContextParallelConfig:
    """Settings of torch's context parallelism."""

    cp_comm_strategy: Literal["allgather", "alltoall"] | None = option(
        None,
        env=f"{_PREFIX}CP_COMM_STRATEGY",
        flag="parallelism_config_cp_comm_strategy",
        key="parallelism_config_cp_comm_strategy",
        help="how keys and values go round; default: allgather",
    )

    def __post_init__(self) -> None:
        fill_from_env(self)
        settle(self)
        self.cp_comm_strategy = self.cp_comm_strategy or "allgather"


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings of sequence parallelism by heads (Ulysses), which DeepSpeed gave its name. Raises OptionError (a ValueError) for an attention it cannot split."""

    sp_seq_length: int | None = option(
        None,
        env=f"{_PREFIX}SP_SEQ_LENGTH",
        flag="parallelism_config_sp_seq_length",
        key="parallelism_config_sp_seq_length",
        help="tokens of every sequence, where that is fixed",
    )
    sp_seq_length_is_variable: bool | None = option(
        None,
        env=f"{_PREFIX}SP_SEQ_LENGTH_IS_VARIABLE",
        flag="parallelism_config_sp_seq_length_is_variable",
        key="parallelism_config_sp_seq_length_is_variable",
        help="sequences differ in length from batch to batch; default: true",
    )
    sp_attn_implementation: str | None = option(
        None,
        env=f"{_PREFIX}SP_ATTN_IMPLEMENTATION",
        flag="parallelism_config_sp_attn_implementation",
        key="parallelism_config_sp_attn_implementation",
        help="the model's attention: sdpa, flash_attention_2, flash_attention_3, or a flash-attn kernel of the hub; default: sdpa",
    )

    def __post_init__(self) -> None:
        fill_from_env(self)
        settle(self)
        require_at_least(self, "sp_seq_length", 1)
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise OptionError("sequences of a fixed length need that length: give sp_seq_length")
        self.sp_attn_implementation = self.sp_attn_implementation or "sdpa"
        known = ("sdpa", "flash_attention_2", "flash_attention_3")
        if self.sp_attn_implementation not in known and not re.fullmatch(
            r"[\w.-]+/.*flash-attn.*", self.sp_attn_implementation
        ):
            raise OptionError(
                f"sequence parallelism cannot split sp_attn_implementation={self.sp_attn_implementation!r}: use {', '.join(known)} or a "
                "hub id such as kernels-community/flash-attn2"
            )


@dataclass
class ParallelismConfig:
    """Ranks along each axis; sizes left None come from the environment, then are 1.

    Raises OptionError (a ValueError) for sizes or backends that cannot be, alone or together.
    """

    dp_replicate_size: int | None = _size(
        "dp_replicate", "copies of the model, gradients averaged between them"
    )
    dp_shard_size: int | None = _size("dp_shard", "ranks that share one copy of the model in shards")
    tp_size: int | None = _size("tp", "ranks that split each layer")
    cp_size: int | None = _size("cp", "ranks that split each sequence (context parallel)")
    cp_backend: Literal["torch"] | None = option(
        None,
        env=f"{_PREFIX}CP_BACKEND",
        flag="parallelism_config_cp_backend",
        key="parallelism_config_cp_backend",
        help="who does context parallelism; default: torch",
    )
    sp_size: int | None = _size("sp", "ranks that split each sequence, and its heads in attention (Ulysses)")
    sp_backend: Literal["deepspeed"] | None = option(
        None,
        env=f"{_PREFIX}SP_BACKEND",
        flag="parallelism_config_sp_backend",
        key="parallelism_config_sp_backend",
        help="who does sequence parallelism; default: deepspeed",
    )
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    _mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fill_from_env(self)
        settle(self)
        self.cp_backend = self.cp_backend or "torch"
        self.sp_backend = self.sp_backend or "deepspeed"
        for axis in _AXES:
            require_at_least(self, f"{axis}_size", 1)
            if getattr(self, f"{axis}_size") is None:
                setattr(self, f"{axis}_size", 1)
        self._check_together()
        for axis, kind in (
            ("tp", TorchTensorParallelConfig),
            ("cp", TorchContextParallelConfig),
            ("sp", DeepSpeedSequenceParallelConfig),
        ):
            handler = getattr(self, f"{axis}_handler")
            if handler is not None and not isinstance(handler, kind):
                raise OptionError(
                    f"{axis}_handler must be a {kind.__name__}, got {type(handler).__name__}: {handler!r}"
                )
            if handler is None and self._of(axis) > 1:
                setattr(self, f"{axis}_handler", kind())
            elif handler is not None and self._of(axis) == 1:
                logger.warning("%s_handler has no effect with %s_size=1", axis, axis)

    def _check_together(self) -> None:
        if self.cp_enabled and self.sp_enabled:
            raise OptionError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both split the sequence: choose one of them"
            )
        split = next((axis for axis in ("tp", "cp") if self._of(axis) > 1), None)
        if split is not None and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise OptionError(
                f"{split}_size={self._of(split)} with dp_replicate_size={self.dp_replicate_size} needs dp_shard_size > 1: copies of a split "
                "model are only kept equal where they are sharded, too"
            )

    def _of(self, axis: str) -> int:
        return int(getattr(self, f"{axis}_size"))

    def _enabled(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._of(axis) > 1]

    @property
    def total_size(self) -> int:
        """Ranks that the sizes make together."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples."""
        return self._of("dp_replicate") * self._of("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Ranks that share a sample."""
        return self._of("tp") * self._of("cp") * self._of("sp")

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are copies of the model."""
        return self._of("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether the model is sharded."""
        return self._of("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split."""
        return self._of("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split by context parallelism."""
        return self._of("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split by sequence parallelism."""
        return self._of("sp") > 1

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes in use along which ranks see different samples."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes in use along which ranks share a sample."""
        return self._enabled("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes in use that `dp_shard_cp` joins."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes in use that `dp_cp` joins: those over which a loss is averaged."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes a sharded model needs: copies where there are some, then shards."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes in use."""
        return self.dp_dim_names + self.non_dp_dim_names

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh with the axes in use, and with `dp`, `dp_shard_cp` and `dp_cp` joined from them; None where no axis is in use.

        Every rank calls it. Raises ValueError on all of them when their sizes differ from each other or do not fit the world, WorldError without
        a process group.
        """
        # loaded here: the launcher reads option classes without torch
        import torch.distributed as dist  # noqa: PLC0415
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

        from acc_ops.mesh import mesh_shape  # noqa: PLC0415
        from acc_ops.rendezvous import WorldError  # noqa: PLC0415
        from acc_ops.world import current_world  # noqa: PLC0415

        world = current_world()
        grouped = dist.is_available() and dist.is_initialized()
        if not (grouped and dist.get_backend() == "fake"):  # where no other rank is there to be asked
            self._compare(world.comm.all_gather_object((_MARK, {axis: self._of(axis) for axis in _AXES})))
        axes = self._enabled(*_AXES)
        if not axes:
            return None
        shape = mesh_shape({axis: self._of(axis) for axis in axes}, world.size)
        if not grouped:
            raise WorldError(
                "a mesh needs a process group: start with a launcher and make an Accelerator or call join_world() first"
            )
        mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        for name in JOINED:
            self.joined_mesh(name, mesh)
        self._mesh = mesh
        return mesh

    def joined_mesh(self, name: str, mesh: DeviceMesh) -> DeviceMesh | None:
        """The axes of `mesh` that `name` joins (`dp`, `dp_shard_cp` or `dp_cp`), as one; None where none of them is in use.

        Every rank calls it. torch makes it once for a mesh and then finds it again, where `mesh[name]` warns from torch 2.11 on.
        """
        axes = self._enabled(*JOINED[name])
        return mesh[tuple(axes)]._flatten(name) if axes else None

    @staticmethod
    def _compare(told: list[Any]) -> None:
        elsewhere = next(
            (rank for rank, one in enumerate(told) if not isinstance(one, tuple) or one[:1] != (_MARK,)), None
        )
        if elsewhere is not None:
            raise ValueError(
                f"this rank builds the mesh of its parallelism_config, rank {elsewhere} is at another place of the program: give every rank the same "
                "parallelism_config, and call the same functions in the same order"
            )
        everyone = [sizes for _, sizes in told]
        for rank, sizes in enumerate(everyone):
            other = next((axis for axis in _AXES if sizes[axis] != everyone[0][axis]), None)
            if other is not None:
                raise ValueError(
                    f"the ranks disagree on {other}_size: rank 0 has {everyone[0][other]}, rank {rank} has {sizes[other]}. Give all ranks the same "
                    "arguments and variables"
                )

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh, None before it is built."""
        return self._mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh, built at the first call. Raises ValueError without a `device_type` then, and for another one later."""
        if self._mesh is None:
            if device_type is None:
                raise ValueError(
                    "the mesh has not been built yet: say on which device_type, such as 'cuda' or 'cpu'"
                )
            return self.build_device_mesh(device_type)
        if device_type is not None and self._mesh.device_type != device_type:
            raise ValueError(
                f"the mesh was built on {self._mesh.device_type!r}, and is now asked for on {device_type!r}"
            )
        return self._mesh

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Fit the sizes to `accelerator.num_processes`: all left at 1 means copies only.

        Raises ValueError where they do not fit, and where FSDP would have nothing to shard over.
        """
        if self.total_size == 1:
            self.dp_replicate_size = accelerator.num_processes
        elif self.total_size != accelerator.num_processes:
            sizes = " x ".join(f"{axis}_size={self._of(axis)}" for axis in self._enabled(*_AXES))
            raise ValueError(
                f"{sizes} makes {self.total_size} ranks, but there are {accelerator.num_processes} processes"
            )
        sharded = getattr(accelerator, "is_fsdp2", False)
        if sharded and accelerator.num_processes > 1 and not self._enabled(*JOINED["dp_shard_cp"]):
            raise ValueError(
                f"FSDP shards over dp_shard, cp and sp, and all are 1 (of {accelerator.num_processes} processes): give dp_shard_size, or leave "
                "FSDP out"
            )

    def to_json(self) -> str:
        """Sizes and backends as JSON text."""
        import json  # noqa: PLC0415  the command line starts without it

        return json.dumps(to_mapping(self))
