"""What every strategy shares whose weights are spread over ranks: their states, as files, and back.

[Note: what a subclass writes] `shard(bundle)`: wrap the models, let the optimizers follow, keep the order. `prepare` calls it, and remembers by
what names the parameters of each optimizer were known before it. `state_dict_type` says how states are written: "FULL_STATE_DICT" (one file, by
rank 0) or "SHARDED_STATE_DICT" (a folder, every rank its shards). The rest is here: parameters may be DTensors, FSDP1's flat parameters,
plain tensors that every rank has whole, or a mix. What is loaded may have been written by any strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from acc_ops.exchange import together
from acc_ops.lazy import LazyModule
from acc_ops.regions import is_compiled_module
from acc_plugins.states import fsdp1
from acc_plugins.states.names import inner_optimizer, plain_state, with_versions
from acc_plugins.states.part import Part, TorchFilePart, WeightsPart
from acc_plugins.states.sharded import ShardedPart
from acc_plugins.states.spread import gathered
from acc_plugins.strategies.agreement import Facts, told
from acc_plugins.strategies.strategy import Bundle, Strategy

if TYPE_CHECKING:
    from acc_plugins.states.names import Names
    from acc_plugins.states.optimizers import SavedOptimizer

files = LazyModule("acc_plugins.states.files")  # what reads files is loaded when it is first used
read = LazyModule("acc_plugins.states.read")
plans = LazyModule("acc_plugins.parallel.plans")
optimizers = LazyModule("acc_plugins.states.optimizers")


class ShardedStrategy(Strategy):
    """Base of FSDP2Strategy, FSDP1Strategy and MeshStrategy."""

    gathers = True
    waits_for_all = True
    state_dict_type: str = "FULL_STATE_DICT"  # a strategy with a plugin sets it: plugin.state_dict_type.name
    fsdp_files: bool = (
        True  # FSDP's file names, and names in optimizer.bin; else those of a model that is whole
    )

    # 1
    def _make(self, bundle: Bundle) -> Bundle:
        return self.shard(bundle)

    def shard(self, bundle: Bundle) -> Bundle:
        """The models sharded and wrapped, the optimizers over their new parameters; order kept."""
        raise NotImplementedError

    # 6
    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """All weights, whole and on the CPU, by the user's names, on the ranks that write; nothing on the others. Call it on every rank."""
        shards = self.shards(model)
        return with_versions(gathered(shards, self.writes) or {}, shards)

    def shards(self, model: nn.Module) -> dict[str, Any]:
        """The weights as they are: DTensors of which this rank has its shards, and plain tensors; FSDP1's are copies."""
        module = self.module_with_states(model)
        if fsdp1.has_fsdp1(module):
            return fsdp1.weights(module)
        detached: dict[int, Tensor] = {}  # what is one parameter stays one tensor
        state = plain_state(module.state_dict(keep_vars=True))
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = detached.setdefault(id(value), value.detach())
        return state

    def module_with_states(self, model: nn.Module) -> nn.Module:
        """The module whose state dict has all weights by the user's names: FSDP1's own wrapper is needed for that, others are not."""
        inner = model
        while is_compiled_module(inner) or isinstance(inner, DistributedDataParallel):
            inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod  # type: ignore[assignment]
        return inner if fsdp1.has_fsdp1(inner) else self.unwrap(model)

    def state_for_hooks(self, model: nn.Module) -> Mapping[str, Any]:
        return self.shards(model) if self._in_shards else self.state(model)

    def model_part(
        self, model: nn.Module, state: Mapping[str, Any] | None, name: str, safe: bool = True
    ) -> Part | None:
        if state is None:
            state = self.state_for_hooks(model)
        if self._in_shards:
            return ShardedPart(name=files.fsdp_folder(name), state={"model": state})
        if not self.writes:
            return None
        if self.fsdp_files:
            return TorchFilePart(name=files.fsdp_weights(name), state=state)
        return WeightsPart(name=name, state=state, safe=safe)

    def optimizer_part(self, optimizer: Optimizer, name: str) -> Part | None:
        if self._in_shards:
            named = self.optimizer_shards(optimizer)
            return ShardedPart(name=files.optimizer_folder(name), state={"optimizer": named})
        state = (
            self.optimizer_shards(optimizer) if self.fsdp_files else inner_optimizer(optimizer).state_dict()
        )
        whole = gathered(state, self.writes)
        return TorchFilePart(name=name, state=whole) if self.writes else None

    def optimizer_shards(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer by the names of its parameters, in shards."""
        root = self._fsdp1_model(optimizer)
        if root is not None:
            return fsdp1.optimizer_state(root, inner_optimizer(optimizer))
        named: dict[str, Any] = optimizers.state_by_name(optimizer, self.names.of(optimizer))
        return named

    def open_model(
        self,
        model: nn.Module,
        folder: str | Path,
        name: str,
        map_location: Any = "cpu",  # noqa: ARG002
        strict: bool = True,
    ) -> Callable[[], Any]:
        """As of `Strategy.open_model`; each rank reads the slices that it has."""
        module = self.module_with_states(model)
        if fsdp1.has_fsdp1(module):  # it gathers to tell its names: no rank may fail before that alone
            store = together(self.world, lambda: files.open_weights(folder, name))
        else:
            store = files.open_weights(folder, name)
        load: Callable[[], Any] = read.ready_to_load(module, store, strict)
        return load

    def _shows_shapes(self, optimizer: Optimizer) -> bool:
        return self._fsdp1_model(optimizer) is None

    def _state_to_load(
        self, saved: SavedOptimizer, optimizer: Optimizer, names: Names, map_location: Any
    ) -> dict[str, Any]:
        root = self._fsdp1_model(optimizer)
        if root is None:
            return super()._state_to_load(saved, optimizer, names, map_location)
        named = optimizers.state_to_load_by_name(saved, names)
        return fsdp1.optimizer_state_to_load(root, inner_optimizer(optimizer), named)

    def gradient_layout(self, model: nn.Module) -> str:  # noqa: ARG002
        """A strategy over the axes of a mesh says which."""
        return self.name

    @property
    def _in_shards(self) -> bool:
        if self.state_dict_type == "LOCAL_STATE_DICT":
            raise ValueError(
                "state_dict_type=LOCAL_STATE_DICT cannot be saved: its parts fit only the same ranks. Use SHARDED_STATE_DICT, which every rank "
                "writes its shards into, too"
            )
        return self.state_dict_type == "SHARDED_STATE_DICT"

    def _fsdp1_model(self, optimizer: Optimizer) -> nn.Module | None:
        """The FSDP1 model whose parameters the optimizer has; None where it has none of one. ValueError for several models."""
        models = [self.module_with_states(model) for model in self.names.models_of(optimizer)]
        if not any(fsdp1.has_fsdp1(model) for model in models):
            return None
        if len(models) > 1:
            raise ValueError(
                f"{type(inner_optimizer(optimizer)).__name__} trains parameters of {len(models)} models, one of them under FSDP version 1, which can "
                "save an optimizer of one model only: build one optimizer for each model, or use fsdp_version=2"
            )
        return models[0]


def told_plan(model: nn.Module) -> Facts:
    """The model's plan of tensor parallelism, as every rank with the same one tells it."""
    return [(pattern, told(style)) for pattern, style in (plans.plan_of(model) or {}).items()]


def mesh_text(mesh: Any) -> str:
    """`dp_shard=2, tp=2`: the axes of a mesh."""
    shape = tuple(mesh.shape)
    names = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(len(shape))]
    return ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))
