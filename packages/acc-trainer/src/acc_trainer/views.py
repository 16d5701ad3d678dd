"""What an Accelerator shows of its options and of its run: names for things that live elsewhere, a few of which can be set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import acc_plugins  # lazy
from acc_ops.arguments import at_least_0
from acc_trainer.grad_sync import GradSync
from acc_trainer.processes import Processes
from acc_trainer.rooms import lomo, parallel, preparing

if TYPE_CHECKING:
    import torch
    from torch.amp import GradScaler

    from acc_ops.enums import FP8BackendType, RNGType
    from acc_ops.world import World
    from acc_plugins.options.compile import TorchDynamoPlugin
    from acc_plugins.options.dataloader import DataLoaderConfiguration
    from acc_plugins.options.project import ProjectConfiguration
    from acc_plugins.precisions.precision import Precision
    from acc_plugins.strategies.strategy import Strategy
    from acc_trainer.optimizer import AcceleratedOptimizer
    from acc_trainer.setup import Handlers
    from acc_trainer.state import AcceleratorState
    from acc_trainer.tracking.run import Trackers


class Views(Processes):
    """Names that scripts read; each says where the thing lives."""

    state: AcceleratorState
    strategy: Strategy
    grad_sync: GradSync
    project_configuration: ProjectConfiguration
    dataloader_config: DataLoaderConfiguration
    dynamo_plugin: TorchDynamoPlugin
    rng_types: list[str | RNGType]
    _handlers: Handlers
    _optimizers: list[AcceleratedOptimizer]
    _trackers: Trackers

    # the processes
    @property
    def world(self) -> World:
        """Who this process is among the others."""
        return self.strategy.world

    @property
    def device(self) -> torch.device:
        """Where models and batches go."""
        return self.strategy.world.device

    @property
    def num_processes(self) -> int:
        """How many processes train together."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """This process among all."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """This process among those of its machine."""
        return self.world.local_rank

    @property
    def distributed_type(self) -> Any:
        """The set-up by the specification's name."""
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        """Whether several processes train on an accelerator each."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def torch_device_mesh(self) -> Any:
        """The world's mesh, or None."""
        return self.world.mesh

    # precision
    @property
    def precision(self) -> Precision:
        """The number format that forwards run in."""
        return self.strategy.precision

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16" or "bf16"."""
        return self.precision.name

    @property
    def native_amp(self) -> bool:
        """Whether forwards run under autocast."""
        return self.precision.name != "no"

    @property
    def scaler(self) -> GradScaler | None:
        """The fp16 gradient scaler, or None."""
        return self.precision.scaler

    # accumulation
    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends a window, so that the optimizer steps."""
        return self.grad_sync.sync

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.grad_sync.sync = bool(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a full window."""
        return self.grad_sync.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        GradSync(value)  # checks it
        self.grad_sync.num_steps = value

    @property
    def step(self) -> int:
        """Micro-batches that `accumulate` has seen."""
        return self.grad_sync.steps

    @step.setter
    def step(self, value: int) -> None:
        self.grad_sync.steps = at_least_0(value, "step")

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of some prepared optimizer moved no weight."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # loaders
    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads and sends; None: only streams."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last group of batches is filled up."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = bool(value)

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order follows from seed and epoch alone, also on one process."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device are asynchronous."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders continue by themselves after a resume."""
        return self.dataloader_config.use_stateful_dataloader

    # the project
    @property
    def project_dir(self) -> str | None:
        """The folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of the trackers."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes the files that only one process writes."""
        return self.strategy.writes

    @property
    def trackers(self) -> list[Any]:
        """The trackers that are running."""
        return self._trackers.running

    @property
    def log_with(self) -> list[Any]:
        """What `init_trackers` starts."""
        return self._trackers.log_with

    # handlers
    @property
    def ddp_handler(self) -> Any:
        """The DistributedDataParallelKwargs given, or None."""
        return self._handlers.ddp

    @property
    def scaler_handler(self) -> Any:
        """The GradScalerKwargs given, or None."""
        return self._handlers.scaler

    @property
    def init_handler(self) -> Any:
        """The InitProcessGroupKwargs given, or None."""
        return self._handlers.init

    @property
    def autocast_handler(self) -> Any:
        """The AutocastKwargs given, or None."""
        return self._handlers.autocast

    @property
    def profile_handler(self) -> Any:
        """The ProfileKwargs given, or None."""
        return self._handlers.profile

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a LOMO optimizer, which updates while it differentiates, was prepared."""
        return any(lomo.is_lomo(optimizer) for optimizer in self._optimizers)

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Which library computes in fp8."""
        return self.strategy.precision.fp8_backend

    @property
    def fp8_enabled(self) -> bool:
        """Whether forwards run in fp8."""
        return self.mixed_precision == "fp8"

    delayed_fp8_autocast = False  # ours starts with the first forward

    @property
    def has_fp8_handler(self) -> bool:
        """Whether a recipe for fp8 was given."""
        return self._handlers.fp8 is not None

    @property
    def fp8_recipe_handler(self) -> Any:
        """The recipe for fp8 that was given, or None."""
        return self._handlers.fp8

    @property
    def ao_recipe_handler(self) -> Any:
        """The AORecipeKwargs given, or None."""
        return self._recipe(acc_plugins.AORecipeKwargs)

    @property
    def te_recipe_handler(self) -> Any:
        """The TERecipeKwargs given, or None."""
        return self._recipe(acc_plugins.TERecipeKwargs)

    @property
    def msamp_recipe_handler(self) -> Any:
        """The MSAMPRecipeKwargs given, or None."""
        return self._recipe(acc_plugins.MSAMPRecipeKwargs)

    def _recipe(self, kind: type) -> Any:
        return self._handlers.fp8 if isinstance(self._handlers.fp8, kind) else None

    # engines that are not in use
    @property
    def deepspeed_plugin(self) -> None:
        """The DeepSpeed plugin in use: none."""
        return

    @property
    def parallelism_config(self) -> Any:
        """The ParallelismConfig in use, or None."""
        return self.state.parallelism_config

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with FSDP2."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether models may be sharded along several axes of a mesh: with FSDP2 only."""
        return self.is_fsdp2

    # this process on the axes of the mesh: 0 on an axis that is not in use, RuntimeError without a parallelism_config
    @property
    def tensor_parallel_rank(self) -> int:
        """Among the processes that share one layer."""
        return parallel.rank_along(self, "tp")

    @property
    def data_parallel_rank(self) -> int:
        """Among the copies of the model."""
        return parallel.rank_along(self, "dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Among the processes that share the weights of one copy."""
        return parallel.rank_along(self, "dp_shard")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Raises `NotImplementedError`: there is no pipeline axis."""
        raise NotImplementedError(
            "an Accelerator has no pipeline axis: torch.distributed.pipelining has its own ranks"
        )

    @property
    def context_parallel_rank(self) -> int:
        """Raises `NotImplementedError`: which part of a sequence a process has is the engine's own business."""
        raise NotImplementedError(
            "an Accelerator does not tell the rank on the context axis: use torch_device_mesh['cp'].get_local_rank()"
        )

    # private names that other projects call
    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        """What `prepare` does with these objects, where it shards models by FSDP2; a tuple also for one. RuntimeError where it does not."""
        return preparing.prepare_sharded(self, args)

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """The same objects, the attention of the models among them opened over the axes that split sequences, in place."""
        return parallel.open_attention(self, args)

    def _get_named_parameters(self, *args: Any, drop_refs: bool = False) -> dict[str, Any]:
        """The parameters of the models among `args` by name, or with `drop_refs` where their data lie: `data_ptr()` as a number."""
        return preparing.named_parameters(args, drop_refs)
