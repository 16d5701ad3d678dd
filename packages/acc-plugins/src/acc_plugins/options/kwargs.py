"""Keyword arguments for torch's autocast, gradient scaler, process group, DistributedDataParallel and profiler."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from acc_ops.enums import DDPCommunicationHookType
from acc_ops.handlers import KwargsHandler
from acc_ops.options import OptionError, closest, option
from acc_plugins.options.checks import require_at_least, settle

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import profile

_HOOK = DDPCommunicationHookType
_HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")
_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments for `torch.autocast`."""

    enabled: bool = option(True, help="autocast at all")
    cache_enabled: bool | None = option(
        None, help="keep weights in the low format within a forward; none: torch's choice"
    )

    def __post_init__(self) -> None:
        settle(self)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments for the fp16 gradient scaler. Raises OptionError (a ValueError) for a scale that could never settle."""

    init_scale: float = option(65536.0, help="the first scale")
    growth_factor: float = option(2.0, help="what the scale is multiplied by when it has held long enough")
    backoff_factor: float = option(0.5, help="what it is multiplied by after an overflow")
    growth_interval: int = option(2000, help="steps without overflow before it grows")
    enabled: bool = option(True, help="scale at all")

    def __post_init__(self) -> None:
        settle(self)
        require_at_least(self, "growth_interval", 1)
        for name, fits, wanted in (
            ("init_scale", self.init_scale > 0, "above 0"),
            ("growth_factor", self.growth_factor > 1, "above 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
        ):
            if not fits:
                raise OptionError(f"GradScalerKwargs.{name} must be {wanted}, got {getattr(self, name)}")


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments for `torch.distributed.init_process_group`. A timeout may be given in seconds; 600 s for nccl, else 1800 s."""

    backend: str | None = option("nccl", help="backend of torch.distributed")
    init_method: str | None = option(None, help="URL by which the processes find each other")
    timeout: timedelta | None = option(
        None,
        parse=lambda text: timedelta(seconds=float(text)),
        plain=timedelta.total_seconds,
        help="how long a collective may wait, in seconds",
    )

    def __post_init__(self) -> None:
        settle(self)
        given: Any = self.timeout
        if given is None:
            given = 600 if self.backend == "nccl" else 1800
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            given = timedelta(seconds=given)
        self.timeout = given
        if not isinstance(given, timedelta) or given <= timedelta(0):
            raise OptionError(
                f"InitProcessGroupKwargs.timeout must be a positive timedelta, or seconds, got {given!r}"
            )


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments for `DistributedDataParallel`, and the communication hook that compresses its gradients.

    Raises OptionError (a ValueError) for hook settings that would have no effect.
    """

    dim: int = option(0, help="dimension along which inputs are scattered")
    broadcast_buffers: bool = option(True, help="take rank 0's buffers at each forward")
    bucket_cap_mb: int = option(25, help="size of the buckets in which gradients travel, in MiB")
    find_unused_parameters: bool = option(False, help="look for parameters that a forward did not use")
    check_reduction: bool = option(False, help="deprecated by torch, which always checks")
    gradient_as_bucket_view: bool = option(False, help="gradients share memory with the buckets")
    static_graph: bool = option(
        False, help="promise that every step uses the same parameters in the same way"
    )
    comm_hook: DDPCommunicationHookType = option(_HOOK.NO, help="how gradients are compressed on the wire")
    comm_wrapper: DDPCommunicationHookType = option(
        _HOOK.NO, choices=(_HOOK.NO, _HOOK.FP16, _HOOK.BF16), help="a second compression around the hook"
    )
    comm_state_option: dict[str, Any] = option(
        factory=dict, flag=False, help="arguments of the PowerSGD state"
    )

    def __post_init__(self) -> None:
        settle(self)
        require_at_least(self, "bucket_cap_mb", 1)
        if self.comm_wrapper is not _HOOK.NO and self.comm_hook is _HOOK.NO:
            raise OptionError(f"comm_wrapper={self.comm_wrapper} has no effect without comm_hook")
        if self.comm_state_option and not self._is_power_sgd:
            raise OptionError(
                f"comm_state_option={self.comm_state_option} has no effect with comm_hook={self.comm_hook}: "
                "it belongs to power_sgd and batched_power_sgd"
            )

    @property
    def has_comm_hook(self) -> bool:
        """Whether `register_comm_hook` does anything."""
        return self.comm_hook is not _HOOK.NO

    @property
    def _is_power_sgd(self) -> bool:
        return self.comm_hook in (_HOOK.POWER_SGD, _HOOK.BATCHED_POWER_SGD)

    def to_dict(self, ignore_keys: Iterable[str] = _HOOK_FIELDS) -> dict[str, Any]:
        """Every field but the `ignore_keys`: by default, the arguments of DistributedDataParallel alone."""
        ignored = frozenset(ignore_keys)
        return {name: value for name, value in super().to_dict().items() if name not in ignored}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Let `model` compress its gradients as `comm_hook` says."""
        if not self.has_comm_hook:
            return
        # loaded here: most runs have no hook, and these modules cost time
        from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: PLC0415
            default_hooks,
            powerSGD_hook,
        )

        hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            _HOOK.FP16: default_hooks.fp16_compress_hook,
            _HOOK.BF16: default_hooks.bf16_compress_hook,
            _HOOK.POWER_SGD: powerSGD_hook.powerSGD_hook,
            _HOOK.BATCHED_POWER_SGD: _batched_power_sgd(powerSGD_hook),
        }
        wrappers: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            _HOOK.FP16: default_hooks.fp16_compress_wrapper,
            _HOOK.BF16: default_hooks.bf16_compress_wrapper,
        }
        hook = hooks[self.comm_hook]
        if self.comm_wrapper is not _HOOK.NO:
            hook = wrappers[self.comm_wrapper](hook)
        state: Any = model.process_group
        if self._is_power_sgd:
            state = powerSGD_hook.PowerSGDState(process_group=model.process_group, **self.comm_state_option)
        try:
            model.register_comm_hook(state=state, hook=hook)
        except TypeError as error:
            name = "comm_hook" if self.comm_hook is _HOOK.BF16 else "comm_wrapper"
            raise ValueError(
                f"{name}=bf16 cannot be used here: {error}. Use fp16, which compresses as much, leave it out, or train on GPUs through nccl"
            ) from error


def _batched_power_sgd(module: Any) -> Callable[..., Any]:
    """torch's hook. It hands one matrix to a helper that takes a batch of them, and fails: a copy of the hook gets a helper that takes one."""
    import torch  # noqa: PLC0415  the launcher reads option classes without torch

    def orthogonalize(matrix: Any) -> None:
        # by Householder in float32 at least: Gram-Schmidt, torch's, is lost where the gradient has a lower rank, and in float16
        wide = matrix.double() if matrix.dtype == torch.float64 else matrix.float()
        matrix.copy_(torch.linalg.qr(wide).Q)

    hook = module.batched_powerSGD_hook
    return types.FunctionType(
        hook.__code__, {**vars(module), "_orthogonalize": orthogonalize}, hook.__name__, hook.__defaults__
    )


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments for `torch.profiler.profile`. Raises OptionError (a ValueError) for an unknown activity or schedule entry."""

    activities: list[str] | None = option(
        None, choices=("cpu", "xpu", "mtia", "cuda", "hpu"), help="what is recorded; none: all there is"
    )
    schedule_option: dict[str, int] | None = option(None, help=f"steps per phase: {', '.join(_SCHEDULE)}")
    on_trace_ready: Callable[..., Any] | None = option(
        None, flag=False, key=False, help="called with each finished trace"
    )
    record_shapes: bool = option(False, help="record the shapes of inputs")
    profile_memory: bool = option(False, help="record allocations")
    with_stack: bool = option(False, help="record the lines of code")
    with_flops: bool = option(False, help="estimate floating point operations")
    with_modules: bool = option(False, help="record the module hierarchy")
    output_trace_dir: str | None = option(None, help="folder for profile_RANK.json, a trace for each rank")

    def __post_init__(self) -> None:
        settle(self)
        for name in self.schedule_option or ():
            if name not in _SCHEDULE:
                near = closest(name, _SCHEDULE)
                hint = f"did you mean {near!r}?" if near else f"choose from {', '.join(_SCHEDULE)}"
                raise OptionError(f"ProfileKwargs.schedule_option has no entry {name!r}: {hint}")

    def build(self) -> profile:
        """A new `torch.profiler.profile`, not started. Raises OptionError for an activity this torch does not record."""
        import torch  # noqa: PLC0415  the launcher reads option classes without torch

        schedule = None
        if self.schedule_option is not None:
            schedule = torch.profiler.schedule(**{"wait": 0, "warmup": 0, **self.schedule_option})
        activities = None
        if self.activities is not None:
            known = torch.profiler.ProfilerActivity.__members__
            missing = [name for name in self.activities if name.upper() not in known]
            if missing:
                raise OptionError(
                    f"torch {torch.__version__} does not record {missing[0]!r}: it has {', '.join(known).lower()}"
                )
            activities = [known[name.upper()] for name in self.activities]
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )
