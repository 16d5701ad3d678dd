"""What a script talks to: the Accelerator, its data loaders, checkpoints, trackers and the acc command."""

from acc_ops.lazy import lazy_exports

from .__about__ import __version__ as __version__

# public name -> the submodule that defines it; __init__.pyi gives the types
_NAMES = {
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "Accelerator": "accelerator",
    "AcceleratorState": "state",
    "BatchSamplerShard": "data.shard",
    "CheckpointError": "checkpoint",
    "DataLoaderAdapter": "data.adapter",
    "DataLoaderDispatcher": "data.dispatch",
    "DataLoaderShard": "data.loader",
    "DataLoaderStateMixin": "data.adapter",
    "GeneralTracker": "tracking.tracker",
    "GradSync": "grad_sync",
    "GradientState": "state",
    "IterableDatasetShard": "data.shard",
    "LOGGER_TYPE_TO_CLASS": "tracking.registry",
    "LaunchPlan": "launch.plan",
    "LoaderPosition": "data.position",
    "LocalSGD": "local_sgd",
    "PartialState": "state",
    "SeedableRandomSampler": "data.samplers",
    "SkipBatchSampler": "data.samplers",
    "SkipDataLoader": "data.loader",
    "TensorBoardTracker": "tracking.tensorboard",
    "debug_launcher": "launch.notebook",
    "filter_trackers": "tracking.registry",
    "get_available_trackers": "tracking.registry",
    "get_sampler": "data.samplers",
    "is_initialized": "state",
    "is_whole": "checkpoint",
    "load_state": "checkpoint",
    "newest_whole": "checkpoint",
    "notebook_launcher": "launch.notebook",
    "on_main_process": "tracking.tracker",
    "prepare_data_loader": "data.prepare",
    "register_tracker_class": "tracking.registry",
    "save_state": "checkpoint",
    "skip_first_batches": "data.prepare",
    # what a training script needs of the packages below
    "AutocastKwargs": "acc_plugins.options.kwargs",
    "DataLoaderConfiguration": "acc_plugins.options.dataloader",
    "DistributedDataParallelKwargs": "acc_plugins.options.kwargs",
    "GradScalerKwargs": "acc_plugins.options.kwargs",
    "GradientAccumulationPlugin": "acc_plugins.options.accumulation",
    "InitProcessGroupKwargs": "acc_plugins.options.kwargs",
    "ProfileKwargs": "acc_plugins.options.kwargs",
    "ProjectConfiguration": "acc_plugins.options.project",
    "TorchDynamoPlugin": "acc_plugins.options.compile",
    "find_executable_batch_size": "acc_ops.memory",
    "get_logger": "acc_ops.logging",
    "set_seed": "acc_ops.random",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _NAMES)
