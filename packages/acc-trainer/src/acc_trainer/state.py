"""PartialState and AcceleratorState: the public faces over World, and over what the first Accelerator chose.

[Note: shared state] Every instance of a state class shows the same dict, `_shared_state`, which existing code clears and writes to.
There is one such dict for a process. Where ranks are threads, each rank has its own.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from acc_ops.comm import ThreadComm
from acc_ops.devices import default_device, device_row, set_device
from acc_ops.enums import DistributedType, PrecisionType
from acc_ops.environment import parse_choice_from_env, parse_flag_from_env
from acc_ops.parting import destroy_group
from acc_ops.world import World, bound_world, join_world, leave_world
from acc_plugins.options.deepspeed_active import answer_with
from acc_trainer.engines import (
    Engines,
    check_plugins,
    check_same,
    environment_of,
    given_engines,
    group_of_one,
    mesh_of,
    with_variables,
)
from acc_trainer.processes import Processes


class SharedState:
    """Class attribute: the dict that all instances show; one for the process, and one for each rank that is a thread."""

    def __init__(self) -> None:
        self._process: dict[str, Any] = {}
        self._threads: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    def __get__(self, instance: Any, owner: type) -> dict[str, Any]:
        bound = bound_world()
        if bound is not None and isinstance(bound.comm, ThreadComm):
            return self._threads.setdefault(bound.comm, {})
        return self._process

    def renew(self) -> None:
        """Instances to come show a new, empty dict; those that were made keep theirs."""
        bound = bound_world()
        if bound is not None and isinstance(bound.comm, ThreadComm):
            self._threads[bound.comm] = {}
        else:
            self._process = {}


class PartialState(Processes):
    """Who this process is: `device`, `distributed_type`, `num_processes`, `process_index`, `local_process_index`, `backend`, `debug`.

    The first one joins the processes the launcher started; later ones show the same. `cpu=True` (or ACCELERATE_USE_CPU) stays on the
    CPU; other arguments go to `torch.distributed.init_process_group`.
    """

    _shared_state = SharedState()

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            return
        cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        world = bound_world()
        if world is None or not isinstance(world.comm, ThreadComm):
            world = join_world(cpu=cpu, **{k: v for k, v in kwargs.items() if v is not None})
        self.__dict__.update(_facts(world, cpu))

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type.value}{_backend_text(self.backend)}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_absent(self, name))

    @staticmethod
    def _reset_state() -> None:
        """Forget everything; the next PartialState starts anew (a process group that exists is used again)."""
        PartialState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether a PartialState was built."""
        return "_world" in self.__dict__

    @property
    def world(self) -> World:
        """The World behind this face."""
        if not self.initialized:
            raise AttributeError(_absent(self, "world"))
        world: World = self.__dict__["_world"]
        return world

    @property
    def default_device(self) -> torch.device:
        """The accelerator of this machine, else its CPU."""
        return default_device()

    def set_device(self) -> None:
        """Make `device` the current one of its kind."""
        set_device(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the process group (or only `group`); nothing happens where none was made."""
        if group is not None:
            torch.distributed.destroy_process_group(group)
        elif not self.fork_launched:
            leave_world()


def _facts(world: World, cpu: bool) -> dict[str, Any]:
    """What the world is called in the specification."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    threads = isinstance(world.comm, ThreadComm)
    return {
        "_world": world,
        "_cpu": cpu,
        "backend": torch.distributed.get_backend() if distributed and not threads else None,
        "device": world.device,
        "debug": parse_flag_from_env("ACCELERATE_DEBUG_MODE"),
        "distributed_type": _distributed_type(world),
        "num_processes": world.size,
        "process_index": world.rank,
        "local_process_index": world.local_rank,
        "fork_launched": parse_flag_from_env("FORK_LAUNCHED"),
    }


def _distributed_type(world: World) -> DistributedType:
    return (
        DistributedType.NO if world.size == 1 else DistributedType(device_row(world.device).distributed_type)
    )


def _backend_text(backend: str | None) -> str:
    return f"  Backend: {backend}" if backend else ""


def _absent(state: Any, name: str) -> str:
    kind = type(state).__name__
    if not state.__dict__:
        return f"{kind} has no {name!r}: nothing is initialised yet (or it was reset); build an Accelerator() or a {kind}() first"
    return f"{kind} has no attribute {name!r}"


_SHOWN_RUN = SharedState()  # what AcceleratorState shows


class AcceleratorState(Processes):
    """PartialState plus the precision and the plugins of the run; built by `Accelerator`.

    Attributes of a plugin that is not in use are absent, so `getattr(state, "fsdp_plugin", None)` works. Raises `ValueError` when it is
    first built outside an Accelerator, when a later one asks for another precision, engine or for the CPU, and for engines that do not fit
    together or do not fit the processes.
    """

    _shared_state = _SHOWN_RUN

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        ours = {
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "parallelism_config": parallelism_config,
        }
        check_plugins(deepspeed_plugin=deepspeed_plugin, megatron_lm_plugin=megatron_lm_plugin, **ours)
        given = given_engines(**ours)
        if "_over" in self.__dict__ and _from_accelerator:
            _SHOWN_RUN.renew()
            PartialState._reset_state()
            self.__dict__ = self._shared_state
        if self.initialized:
            self._check_initialized(mixed_precision, cpu)
            check_same(given, self.engines)
            return
        if not _from_accelerator:
            raise ValueError(
                "AcceleratorState is built by Accelerator: make an Accelerator() first, or use PartialState()"
            )
        engines = with_variables(given)
        partial = PartialState(cpu, **kwargs)
        self.__dict__.update(
            _partial=partial,
            _mixed_precision=precision_name(mixed_precision),
            _world=partial.world,
            dynamo_plugin=dynamo_plugin,
            parallelism_config=engines.parallelism,
        )
        try:
            self._take(engines, partial)
        except BaseException:  # the next one must be free to choose something that works
            self._reset_state()
            raise

    def _take(self, engines: Engines, partial: PartialState) -> None:
        """Show the engines, and the world with the mesh that they need."""
        if engines.fsdp is not None:
            self.__dict__.update(fsdp_plugin=engines.fsdp, distributed_type=DistributedType.FSDP)
        if engines.parallelism is not None:
            engines.parallelism._validate_accelerator(self)
        alone = group_of_one(partial.world) if engines.need_a_group else None
        if alone is not None:
            self.__dict__["_without_group"] = dict(partial.__dict__)
            partial.__dict__.update(_facts(alone, partial._cpu))
        self.__dict__["_world"] = replace(partial.world, mesh=mesh_of(engines, self.device))
        self.__dict__["_environment"] = stack = ExitStack()
        stack.enter_context(environment_of(engines))

    def __repr__(self) -> str:
        return f"{self._partial!r}Mixed precision type: {self.mixed_precision}\n"

    def __getattr__(self, name: str) -> Any:
        partial = self.__dict__.get("_partial")
        if partial is not None and name in partial.__dict__:
            return partial.__dict__[name]
        raise AttributeError(_absent(self, name))

    def _check_initialized(self, mixed_precision: str | None = None, cpu: bool | None = None) -> None:
        """Refuse what cannot be changed any more."""
        if cpu and self.device.type != "cpu":
            raise ValueError(
                f"this process already runs on {self.device}: pass cpu=True to the first Accelerator, "
                "or end the run before with its end_training()"
            )
        if mixed_precision is not None and precision_name(mixed_precision) != self._mixed_precision:
            raise ValueError(
                f"mixed_precision is {self._mixed_precision!r} already and cannot become {str(mixed_precision)!r}: "
                "pass it to the first Accelerator, or end the run before with its end_training()"
            )

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget everything; `reset_partial_state` forgets the PartialState too."""
        _restore_environment(AcceleratorState._shared_state)
        _leave_group_of_one(AcceleratorState._shared_state)
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def initialized(self) -> bool:
        """Whether an Accelerator was built."""
        return "_partial" in self.__dict__

    @property
    def world(self) -> World:
        """The World behind this face, with the mesh of the run."""
        world: World = self.__dict__["_world"]
        return world

    @property
    def engines(self) -> Engines:
        """The plugins of this run."""
        return Engines(fsdp=self.__dict__.get("fsdp_plugin"), parallelism=self.parallelism_config)

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16", "bf16" or "fp8"."""
        name: str = self._mixed_precision
        return name

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with FSDP2."""
        plugin = self.__dict__.get("fsdp_plugin")
        return plugin is not None and plugin.fsdp_version == 2

    @property
    def device_mesh(self) -> Any:
        """The world's mesh, or None."""
        return self.world.mesh

    @property
    def deepspeed_plugin(self) -> None:
        """The DeepSpeed plugin in use: none."""
        return

    @property
    def deepspeed_plugins(self) -> None:
        """All DeepSpeed plugins by name: none."""
        return

    def get_deepspeed_plugin(self, name: str) -> Any:
        """The DeepSpeed plugin called `name`. Raises `ValueError` where DeepSpeed is not in use."""
        raise ValueError(f"there is no DeepSpeed plugin {name!r}: this run does not use DeepSpeed")

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Go on with the DeepSpeed plugin called `name`. Raises `ValueError` where DeepSpeed is not in use."""
        raise ValueError(f"DeepSpeed plugin {name!r} cannot be chosen: this run does not use DeepSpeed")

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook launcher forked this process."""
        return bool(self._partial.fork_launched)

    def destroy_process_group(self, group: Any = None) -> None:
        """See `PartialState.destroy_process_group`."""
        if group is None:
            _leave_group_of_one(self.__dict__)
        self._partial.destroy_process_group(group)
        if group is None and self.parallelism_config is not None:
            self.parallelism_config._mesh = None  # its groups are gone


def leave_run(state: AcceleratorState) -> None:
    """Leave the process group. What was built goes on showing the run that is over; the next Accelerator starts a new one."""
    if "_over" in state.__dict__:  # a newer run may have begun
        return
    _restore_environment(state.__dict__)
    if not isinstance(state.world.comm, ThreadComm):
        state.destroy_process_group()
    state.__dict__["_over"] = True


def _leave_group_of_one(shown: dict[str, Any]) -> None:
    """Destroy the process group that was made for a process that is alone, which its PartialState forgets."""
    before = shown.pop("_without_group", None)
    if before is not None:
        if torch.distributed.is_initialized():
            destroy_group()
        shown["_partial"].__dict__.update(before)


def _restore_environment(shown: dict[str, Any]) -> None:
    """Take away the variables that told other libraries of the run's engines."""
    told = shown.pop("_environment", None)
    if told is not None:
        told.close()


def precision_name(mixed_precision: Any) -> str:
    """The name of a precision; ACCELERATE_MIXED_PRECISION where it is None. Raises `ValueError` for an unknown one."""
    name = (
        mixed_precision
        if mixed_precision is not None
        else parse_choice_from_env("ACCELERATE_MIXED_PRECISION")
    )
    text = str(name).lower()
    if text not in PrecisionType.list():
        raise ValueError(f"mixed_precision must be one of {', '.join(PrecisionType.list())}, got {name!r}")
    return text


def is_initialized() -> bool:
    """Whether an Accelerator was built in this process, and neither ended its training nor was reset."""
    shown = AcceleratorState._shared_state
    return bool(shown) and "_over" not in shown


answer_with(lambda: AcceleratorState() if is_initialized() else None)  # what acc-plugins asks about the run
