"""The Accelerator: what a training script talks to. Each method names the room that does the work."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import acc_bigmodel  # lazy: what writes files is loaded when it is first used
from acc_ops.collectives import gather, pad_across_processes, reduce
from acc_ops.enums import DynamoBackend, LoggerType, PrecisionType, RNGType
from acc_ops.files import save
from acc_ops.handlers import KwargsHandler
from acc_ops.memory import release_memory
from acc_ops.unwrap import extract_model_from_parallel
from acc_plugins.options.accumulation import GradientAccumulationPlugin
from acc_plugins.options.compile import TorchDynamoPlugin
from acc_plugins.options.dataloader import DataLoaderConfiguration
from acc_plugins.options.kwargs import AutocastKwargs, ProfileKwargs
from acc_plugins.options.project import ProjectConfiguration
from acc_trainer import metrics, preparing, uneven
from acc_trainer.data.prepare import skip_first_batches
from acc_trainer.grad_sync import AdvanceOnly, HoldBack
from acc_trainer.profiling import profiled
from acc_trainer.setup import (
    UNSET,
    count_of_steps,
    dataloader_of,
    dynamo_of,
    project_of,
    refuse_unbuilt,
    set_up,
    sort_handlers,
)
from acc_trainer.state import GradientState, leave_run
from acc_trainer.tracking.run import Trackers
from acc_trainer.tracking.tracker import GeneralTracker
from acc_trainer.views import Views


class Accelerator(Views):
    """Runs one training script on any number of processes and devices.

    Options are explained in the README. Raises `ValueError` for options that contradict each other or that this device cannot do, and
    for plugins of engines that are not built yet. A second Accelerator has its own accumulation, loaders, trackers and prepared objects.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = UNSET,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: str | LoggerType | GeneralTracker | list[str | LoggerType | GeneralTracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        refuse_unbuilt(
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            deepspeed_plugins=deepspeed_plugins,
            parallelism_config=parallelism_config,
        )
        made = set_up(
            mixed_precision=mixed_precision,
            cpu=cpu,
            grad_sync=count_of_steps(gradient_accumulation_steps, gradient_accumulation_plugin),
            project=project_of(project_dir, project_config),
            dataloader=dataloader_of(dataloader_config, split_batches),
            dynamo=dynamo_of(dynamo_backend, dynamo_plugin),
            handlers=sort_handlers(kwargs_handlers),
            rng_types=rng_types,
            log_with=log_with,
        )
        self.state = made.state
        self.strategy = made.strategy
        self.grad_sync = made.grad_sync
        self.gradient_state = GradientState.of(made.grad_sync)
        self.project_configuration = made.project
        self.dataloader_config = made.dataloader
        self.dynamo_plugin = made.dynamo
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = made.rng_types
        self.flag_tensor: torch.Tensor | None = None
        self._handlers = made.handlers
        self._trackers = Trackers(made.log_with, made.project.logging_dir, made.strategy.world)
        self._advance_only = AdvanceOnly(made.grad_sync)
        self._models: list[Any] = []
        self._only_evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers = []
        self._schedulers: list[Any] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Any] = []
        self._save_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self

    # preparing ---------------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Models, optimizers, schedulers and data loaders made ready for these processes, in the order given; one alone comes back alone."""
        made = preparing.prepare(self, args, device_placement)
        return made[0] if len(made) == 1 else tuple(made)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """One model; with `evaluation_mode` it is not wrapped for training."""
        return preparing.prepare(self, [model], [device_placement], evaluation_mode)[0]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """One optimizer."""
        return preparing.prepare(self, [optimizer], [device_placement])[0]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """One scheduler, bound to the prepared optimizer it was built on, else to all."""
        return preparing.prepare(self, [scheduler])[0]

    def prepare_data_loader(
        self,
        data_loader: torch.utils.data.DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """One data loader; `slice_fn_for_dispatch(data, slice, process_index, num_processes)` cuts what rank 0 sends."""
        placed = self.device_placement if device_placement is None else device_placement
        return preparing.prepare_loader(self, data_loader, placed, slice_fn_for_dispatch)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader without its first batches, for a resumed epoch; see `acc_trainer.data.prepare`."""
        return skip_first_batches(dataloader, num_batches)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether some module of `model` was dispatched over more than one place."""
        return preparing.has_device_map(model)

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The user's own module; `keep_fp32_wrapper=False` also gives its original forward back."""
        inner = extract_model_from_parallel(model, True, keep_torch_compile)
        return (
            inner
            if keep_fp32_wrapper
            else extract_model_from_parallel(self.precision.unwrap(inner), False, keep_torch_compile)
        )

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget everything that was prepared, and return a None for each object: `model, optimizer = free_memory(model, optimizer)`."""
        for shelf in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            shelf.clear()
        self.strategy.close()
        self.grad_sync.reset()
        return release_memory(*(None for _ in objects))

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    # a training step ---------------------------------------------------------------------------------------------------------

    def accumulate(self, *models: Any) -> AbstractContextManager[Any]:
        """Around one micro-batch: gradients add up, and the optimizer steps on the last of a window (see `grad_sync`)."""
        if self.strategy.synchronises:
            return HoldBack(self.grad_sync, self.strategy.without_sync, models)
        return self._advance_only

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Around forward and backward whose gradients stay on this process."""
        return self.strategy.without_sync(model)

    def trigger_sync_in_backward(self, model: Any) -> AbstractContextManager[Any]:
        """Around a backward whose forward ran under `no_sync`: gradients are exchanged after all."""
        return self.strategy.sync_next_backward(model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Differentiate the loss, divided by `gradient_accumulation_steps`; `kwargs` go to `Tensor.backward`."""
        self.strategy.backward(loss, divisor=self.grad_sync.num_steps, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Give the gradients of `optimizer` (one, several, or by default all) their true size; only fp16 scales them."""
        if self.precision.scaler is None:
            return
        chosen = self._optimizers if optimizer is None else [optimizer]
        for one in chosen if not isinstance(optimizer, (list, tuple)) else optimizer:
            self.strategy.unscale(getattr(one, "optimizer", one))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip gradients to a common norm; the norm they had, over all processes."""
        self.unscale_gradients()
        return self.strategy.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every element of the gradients to [-clip_value, clip_value]."""
        self.unscale_gradients()
        self.strategy.clip_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Around code outside a model's forward that shall run in the same precision."""
        return self.precision.context(**({} if autocast_handler is None else autocast_handler.to_kwargs()))

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Around a loop in which the processes have unequal numbers of batches."""
        return uneven.join_uneven_inputs(joinables, even_batches, self._dataloaders, self.world)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """torch's profiler around the block; profile_RANK.json is written when `output_trace_dir` is set."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with profiled(handler, self.world) as profiler:
            yield profiler

    # between processes -------------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes joined along the first dimension, in nested structures too."""
        return gather(tensor, world=self.world)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` that counts every sample exactly once; see `metrics`."""
        return metrics.gather_for_metrics(input_data, self.grad_sync, self.world, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors of all processes combined element by element: "sum", "mean" or "max"."""
        return reduce(tensor, reduction, scale, world=self.world)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Tensors made as long along `dim` as the longest among the processes."""
        return pad_across_processes(tensor, dim, pad_index, pad_first, world=self.world)

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` sees on every process."""
        self.flag_tensor = torch.ones(1, dtype=torch.int64, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process raised the flag since the last check; every process must ask."""
        mine = (
            self.flag_tensor
            if self.flag_tensor is not None
            else torch.zeros(1, dtype=torch.int64, device=self.device)
        )
        self.flag_tensor = None
        return bool(reduce(mine, "sum", world=self.world).item())

    # saving ------------------------------------------------------------------------------------------------------------------

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write any object once (or once per machine, as the project says)."""
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization, world=self.world)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """All weights of a model; `unwrap=False` keeps the names of the wrapper."""
        return self.strategy.state(model) if unwrap else dict(model.state_dict())

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights for loading elsewhere: model.safetensors, or shards and an index; older ones there are removed.

        `ValueError` for an empty folder name. A failure on the process that writes raises on all: CheckpointError on the others.
        """
        from acc_trainer.checkpoint.together import together  # noqa: PLC0415 (a lazy start: loaded when a run saves)

        if not os.fspath(save_directory):
            raise ValueError("save_model needs a folder to write into, got an empty name; '.' is this folder")
        with together(self.world, f"saving a model into {os.fspath(save_directory)}"):
            state = preparing.full_state(self, model)
            if self.strategy.writes:
                acc_bigmodel.save_weights(state, save_directory, "model", max_shard_size, safe_serialization)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Write a checkpoint of everything prepared and registered, whole or not at all; its folder."""
        from acc_trainer.checkpoint import save_state  # noqa: PLC0415 (a lazy start: loaded when a run saves)

        run: Any = self  # the protocol over there asks for plain attributes
        return save_state(run, output_dir, safe_serialization, **save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Go back to a checkpoint: the folder given, or the newest whole one with automatic naming."""
        from acc_trainer.checkpoint import load_state  # noqa: PLC0415 (a lazy start: loaded when a run resumes)

        run: Any = self
        load_state(run, input_dir, load_kwargs, **load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with `state_dict` and `load_state_dict` that checkpoints shall hold too; `ValueError` for others."""
        wrong = [
            one for one in objects if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))
        ]
        if wrong:
            raise ValueError(
                f"only objects with state_dict() and load_state_dict() can be checkpointed, these lack them: {wrong}"
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """`hook(models, weights, folder)` before a checkpoint is written; it may write itself and empty `weights`."""
        return _registered(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """`hook(models, folder)` before a checkpoint is read; it may read itself and empty `models`."""
        return _registered(self._load_model_state_pre_hook, hook)

    # tracking ----------------------------------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with`; `init_kwargs[name]` go to the tracker of that name."""
        self._trackers.start(project_name, config, init_kwargs or {})

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Give `values` to every tracker."""
        self._trackers.log(values, step, log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker called `name`, or with `unwrap` the library's own run; `ValueError` for an unknown name."""
        return self._trackers.get(name, unwrap)

    @property
    def trackers(self) -> list[Any]:
        """The trackers that are running."""
        return self._trackers.running

    @property
    def log_with(self) -> list[Any]:  # type: ignore[override]
        """What `init_trackers` starts."""
        return self._trackers.log_with

    def end_training(self) -> None:
        """Finish the trackers and leave the process group."""
        self._trackers.finish()
        leave_run(self.state)


def _registered(hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
