"""Models whose layers or sequences are split over a mesh, in whole copies beside each other: nothing is sharded.

[Note: who has what] Ranks along `tp` have parts of the same layers and see the same samples; ranks along `cp` or `sp` have the same weights and
other parts of the same sequences; ranks along `dp_replicate` have the same weights and other samples. So gradients are averaged over all axes
but `tp`, after each backward that synchronises. A loss is the mean over a rank's part: the mean over those ranks is that of the whole batch.
What tensor parallelism leaves whole gets the same gradient on every rank of `tp`, because torch sums what its neighbours give it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from acc_ops.comm import TorchComm
from acc_ops.world import World
from acc_plugins.options.kwargs import DistributedDataParallelKwargs
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.parallel.split import sharers_of, split_model
from acc_plugins.parallel.tensor import split_like
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.agreement import Facts
from acc_plugins.strategies.optimizer_kinds import check_for_dtensors
from acc_plugins.strategies.placing import follow
from acc_plugins.strategies.replicated import AveragingStrategy, sum_partial_gradients
from acc_plugins.strategies.sharded import ShardedStrategy, mesh_text, told_plan
from acc_plugins.strategies.strategy import Bundle, Strategy


class MeshStrategy(AveragingStrategy, ShardedStrategy):
    """Tensor, context and sequence parallelism with copies of the model, without sharding. Gradients are averaged in `backward` of the strategy."""

    name: ClassVar[str] = "mesh"
    fsdp_files = False

    def __init__(
        self,
        world: World,
        precision: Precision,
        parallelism: ParallelismConfig,
        *,
        mesh: Any,
        ddp_options: DistributedDataParallelKwargs | None = None,
        save_on_each_node: bool = False,
    ) -> None:
        """Raises ValueError where there is no mesh, for axes that need FSDP, and for options that only DistributedDataParallel can honour."""
        super().__init__(world, precision, save_on_each_node=save_on_each_node)
        if mesh is None or not isinstance(world.comm, TorchComm):
            raise ValueError(
                f"{', '.join(parallelism.active_mesh_dims) or 'this parallelism_config'} needs a mesh over torch.distributed processes, got mesh={mesh!r}"
            )
        if parallelism.dp_shard_enabled:
            raise ValueError(
                f"dp_shard_size={parallelism.dp_shard_size} shards the weights, which FSDP2 does: give a FullyShardedDataParallelPlugin(fsdp_version=2), or "
                "dp_replicate_size in its place"
            )
        options = ddp_options or DistributedDataParallelKwargs()
        if options.has_comm_hook:
            raise ValueError(
                f"comm_hook={options.comm_hook} compresses gradients inside DistributedDataParallel, which does not hold split models: leave it out"
            )
        self.parallelism = parallelism
        self.mesh = mesh
        self.broadcast_buffers = options.broadcast_buffers
        self.averaging = sharers_of(world, mesh)
        self._moved: WeakIdKeyDictionary = (
            WeakIdKeyDictionary()
        )  # parameters before they were split -> after it
        if parallelism.tp_enabled:
            precision.agree_over(world)

    def options_of_all_ranks(self) -> dict[str, str]:
        return {
            **super().options_of_all_ranks(),
            "parallelism_config": mesh_text(self.mesh),
            "broadcast_buffers": str(self.broadcast_buffers),
        }

    def treatment(self, model: nn.Module) -> Facts:
        return told_plan(model) if self.parallelism.tp_enabled else []

    def _must_agree(self, bundle: Bundle) -> bool:
        return bool(bundle.models or bundle.optimizers)  # models for evaluation are split, too

    def shard(self, bundle: Bundle) -> Bundle:
        """The models' layers split and their attention opened; optimizers follow, with what they keep for each parameter.

        An optimizer that comes in a later call than its model follows, too.
        """
        if self.parallelism.tp_enabled:
            check_for_dtensors(bundle.optimizers)
        before = [p for model in bundle.models for p in model.parameters()]
        owners = {id(state): p for optimizer in bundle.optimizers for p, state in optimizer.state.items()}
        made = Strategy._make(self, bundle)
        after = [p for model in made.models for p in model.parameters()]
        self._moved.update({old: new for old, new in zip(before, after, strict=True) if old is not new})
        follow(made.optimizers, list(self._moved), list(self._moved.values()))
        for optimizer in made.optimizers:
            for parameter, state in optimizer.state.items():
                old = owners[id(state)]
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = split_like(value, old, parameter)
        return made

    def _prepare_model(self, model: nn.Module, bundle: Bundle) -> nn.Module:
        model = super()._prepare_model(model, bundle)
        split_model(model, self.parallelism, self.mesh, self.world)
        if not bundle.evaluation:
            self._begin_training(model)
        return model

    def backward(self, loss: Tensor, *, divisor: float = 1, **kwargs: Any) -> None:
        """Differentiate, then average; sums that ranks of `tp` still had to make are made."""
        super().backward(loss, divisor=divisor, **kwargs)
        if self.parallelism.tp_enabled:
            sum_partial_gradients(p for model in self._training for p in model.parameters())

    def gradient_layout(self, model: nn.Module) -> str:  # noqa: ARG002
        return f"{self.name} over {mesh_text(self.mesh)}"

    def close(self) -> None:
        super().close()
        self._moved.clear()
