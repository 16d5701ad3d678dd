"""How a model is trained: options, strategies and precisions, as small classes that compose."""

from __future__ import annotations

from acc_ops.lazy import lazy_exports

from .__about__ import __version__ as __version__

_NAMES = {
    # options
    "AutocastKwargs": "options.kwargs",
    "DataLoaderConfiguration": "options.dataloader",
    "DistributedDataParallelKwargs": "options.kwargs",
    "GradScalerKwargs": "options.kwargs",
    "GradientAccumulationPlugin": "options.accumulation",
    "InitProcessGroupKwargs": "options.kwargs",
    "ParallelismConfig": "options.parallelism",
    "ProfileKwargs": "options.kwargs",
    "ProjectConfiguration": "options.project",
    "DeepSpeedSequenceParallelConfig": "options.parallelism",
    "TorchContextParallelConfig": "options.parallelism",
    "TorchDynamoPlugin": "options.compile",
    "TorchTensorParallelConfig": "options.parallelism",
    # precisions
    "BFloat16Autocast": "precisions.amp",
    "Float16Autocast": "precisions.amp",
    "Precision": "precisions.precision",
    "get_grad_scaler": "precisions.scaler",
    # strategies
    "Bundle": "strategies.strategy",
    "DDPStrategy": "strategies.ddp",
    "ReplicatedStrategy": "strategies.replicated",
    "StepOutcome": "outcome",
    "Strategy": "strategies.strategy",
    "choose_precision": "strategies.registry",
    "choose_strategy": "strategies.registry",
    # what works with what
    "UnsupportedError": "support",
    "check_support": "support",
    "support_table": "support",
}
__getattr__, __dir__, __all__ = lazy_exports(__name__, _NAMES)
