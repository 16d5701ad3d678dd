"""The Accelerator: what a training script talks to. Each method names the room that does the work; `rooms.py` opens it when it is entered."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import acc_ops
import acc_plugins
from acc_trainer.exchanges import Exchanges
from acc_trainer.grad_sync import AdvanceOnly, HoldBack
from acc_trainer.rooms import (
    checkpoint,
    clipping,
    data,
    gradient_state,
    lomo,
    parallel,
    preparing,
    profiling,
    saving,
    setup,
    state,
    timing,
    tracking,
    uneven,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch.utils.hooks import RemovableHandle

    from acc_ops.enums import DynamoBackend, LoggerType, PrecisionType, RNGType
    from acc_ops.handlers import KwargsHandler
    from acc_plugins.options.accumulation import GradientAccumulationPlugin
    from acc_plugins.options.compile import TorchDynamoPlugin
    from acc_plugins.options.dataloader import DataLoaderConfiguration
    from acc_plugins.options.kwargs import AutocastKwargs, ProfileKwargs
    from acc_plugins.options.project import ProjectConfiguration
    from acc_trainer.checkpoint import Checkpoints
    from acc_trainer.timing import StepTimer
    from acc_trainer.tracking.tracker import GeneralTracker

_UNSET: Any = object()


class Accelerator(Exchanges):
    """Runs one training script on any number of processes and devices.

    Options are explained in the README. Raises `ValueError` for options that contradict each other or that this device cannot do, and
    for plugins of engines that are not built yet. A second Accelerator has its own accumulation, loaders, trackers and prepared objects.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _UNSET,
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
        plugins = {
            "deepspeed_plugin": deepspeed_plugin,
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": parallelism_config,
        }
        setup.check_plugins(deepspeed_plugins=deepspeed_plugins, **plugins)
        self.grad_sync = setup.count_of_steps(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.project_configuration = setup.project_of(project_dir, project_config)
        split = None if split_batches is _UNSET else split_batches
        self.dataloader_config = setup.dataloader_of(dataloader_config, split)
        self.dynamo_plugin = setup.dynamo_of(dynamo_backend, dynamo_plugin)
        self.rng_types = setup.rng_types_of(rng_types)
        self._handlers = setup.sort_handlers(kwargs_handlers)
        self.state, self.strategy = setup.join_run(
            mixed_precision=mixed_precision,
            cpu=cpu,
            dynamo=self.dynamo_plugin,
            handlers=self._handlers,
            save_on_each_node=self.project_configuration.save_on_each_node,
            plugins=plugins,
        )
        self.grad_sync.holder = weakref.ref(self.strategy)
        self.gradient_state = gradient_state.GradientState.of(self.grad_sync)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.flag_tensor = None
        self._trackers = tracking.Trackers(setup.as_list(log_with), self.logging_dir, self.world)
        self._advance_only = AdvanceOnly(self.grad_sync)
        self._models: list[Any] = []
        self._only_evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers = []
        self._schedulers: list[Any] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Any] = []
        self._checkpoint_names: Any = None  # made when the first name is given
        self._save_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._background: Any = (
            None  # what saves beside the training, from the first save that does not block
        )

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
        return data.skip_first_batches(dataloader, num_batches)

    def rest_of_epoch(self, dataloader: Any) -> Any:
        """A prepared loader without what the loaded checkpoint has seen of the epoch, at any number of processes; see `acc_trainer.data.prepare`."""
        return data.rest_of_epoch(dataloader)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether some module of `model` was dispatched over more than one place."""
        return preparing.has_device_map(model)

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The user's own module; `keep_fp32_wrapper=False` also gives its original forward back."""
        return preparing.unwrapped(self, model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget everything that was prepared, and return a None for each object: `model, optimizer = free_memory(model, optimizer)`."""
        if self._background is not None:
            self._background.release()
        for shelf in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            shelf.clear()
        self.strategy.close()
        self.grad_sync.reset()
        return acc_ops.release_memory(*(None for _ in objects))

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
        """Around forward and backward whose gradients stay on this process: a step inside takes its own, one behind it exchanges them first."""
        return self.strategy.without_sync(model, apart=True)

    def trigger_sync_in_backward(self, model: Any) -> AbstractContextManager[Any]:
        """Around a backward whose forward ran under `no_sync`: gradients are exchanged after all."""
        return self.strategy.sync_next_backward(model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Differentiate the loss, divided by `gradient_accumulation_steps` (see `grad_sync`); `kwargs` go to `Tensor.backward`.

        A `learning_rate` is for optimizers of the LOMO kind, see `lomo_backward`.
        """
        if "learning_rate" in kwargs and self.has_lomo_optimizer:
            lomo.backward(self, loss / self.grad_sync.divisor, **kwargs)
        else:
            self.strategy.backward(loss, divisor=self.grad_sync.divisor, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Differentiate and update in one go, as the LOMO optimizers of `lomo-optim` do; `ValueError` where none was prepared."""
        lomo.backward(self, loss, learning_rate)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Give the gradients of `optimizer` (one, several, or by default all) their true size: only fp16 scales them.

        Gradients that a window which was broken off has left on each process are exchanged before.
        """
        if self.grad_sync.sync:
            self.strategy.exchange_held()
        if self.precision.scaler is None:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            self.strategy.unscale(getattr(one, "optimizer", one))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float | str = 2) -> torch.Tensor:
        """Clip gradients of `parameters` (or of a module's) to a common norm; the norm they had, over all processes."""
        return self.strategy.clip_norm(clipping.with_true_gradients(self, parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every element of the gradients to [-clip_value, clip_value]."""
        self.strategy.clip_value(clipping.with_true_gradients(self, parameters), clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Around code outside a model's forward that shall run in the same precision."""
        return self.precision.context(**({} if autocast_handler is None else autocast_handler.to_kwargs()))

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Around a loop in which the processes have unequal numbers of batches."""
        return uneven.join_uneven_inputs(
            joinables, even_batches, self._dataloaders, self.world, self.strategy.waits_for_all
        )

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Around a step whose `buffers` are split along the sequence; without context parallelism it says once that it does nothing."""
        return parallel.maybe_context_parallel(self, buffers, buffer_seq_dims, no_restore_buffers)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """The loader for sequence parallelism; without it, the same loader."""
        return parallel.ulysses_loader(self, dl, model)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """torch's profiler around the block; profile_RANK.json is written when `output_trace_dir` is set."""
        handler = profile_handler or self.profile_handler or acc_plugins.ProfileKwargs()
        return profiling.profiled(handler, self.world)

    def time_steps(self) -> AbstractContextManager[StepTimer]:
        """Around training steps: the timer says how long data, forward, backward, sync and step took (see `timing`)."""
        return timing.timed(self)

    # saving ------------------------------------------------------------------------------------------------------------------

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write any object once (or once per machine, as the project says)."""
        each_node = self.project_configuration.save_on_each_node
        acc_ops.save(obj, f, each_node, safe_serialization, world=self.world)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """All weights of a model; `unwrap=False` keeps the names of the wrapper."""
        state: dict[str, torch.Tensor] = self.strategy.state(model) if unwrap else model.state_dict()
        return state

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights for loading elsewhere: model.safetensors, or shards and an index; older ones there are removed.

        Every process calls it where weights are sharded; elsewhere the main process may call it alone, and where all do, its folder counts. `ValueError`
        for an empty folder name. A failure on the process that writes raises on all that call it: CheckpointError on the others.
        """
        saving.save_model(self, model, save_directory, max_shard_size, safe_serialization)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Write a checkpoint of everything prepared and registered, whole or not at all; its folder.

        `blocking=False`: copy everything and write the copy beside the training; `metric`: how good the run is now; `wait_s`: how long rank 0
        waits for the others. CheckpointError when a rank fails, and when an earlier save beside the training did.
        """
        folder: Path = checkpoint.save_state(self, output_dir, safe_serialization, **save_model_func_kwargs)
        return folder

    def wait_for_save(self) -> None:
        """Return when what `save_state(blocking=False)` promised is on the disk. CheckpointError, naming the folder, when it failed."""
        if self._background is not None:
            self._background.wait()

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Go back to a checkpoint: the folder given, or the newest whole one with automatic naming."""
        checkpoint.load_state(self, input_dir, load_kwargs, **load_model_func_kwargs)

    def checkpoints(self, folder: str | os.PathLike[str] | None = None) -> Checkpoints:
        """What checkpoints lie in `folder`, or with automatic naming in the project's: step, age, size, whole or why not. It prints as a table."""
        found: Checkpoints = checkpoint.look_in_project(self.project_configuration, folder)
        return found

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Objects with `state_dict` and `load_state_dict` that checkpoints shall hold too, with a name or by their order; `ValueError` for others."""
        self._custom_objects.extend(saving.checkpointable([*objects, *named.values()]))
        checkpoint.give_names(self, named)

    def name_for_checkpoints(self, **objects: Any) -> None:
        """`name_for_checkpoints(generator=model)`: prepared or registered objects that a checkpoint finds by these names, whatever their order.

        `ValueError` for an object that is neither, and for a name that is taken.
        """
        checkpoint.give_names(self, objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """`hook(models, weights, folder)` before a checkpoint is written; it may write itself and empty `weights`."""
        return saving.registered(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """`hook(models, folder)` before a checkpoint is read; it may read itself and empty `models`."""
        return saving.registered(self._load_model_state_pre_hook, hook)

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

    def end_training(self) -> None:
        """Wait for a save in the background, finish the trackers and leave the process group. CheckpointError when that save failed."""
        try:
            self.wait_for_save()
        finally:
            self._trackers.finish()
            state.leave_run(self.state)
