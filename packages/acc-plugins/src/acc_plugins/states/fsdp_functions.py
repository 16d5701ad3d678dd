"""States of FSDP models by the functions that other libraries call. `accelerator.save_state` does the same for a whole run, as a transaction.

[Note: the arguments] `fsdp_plugin.state_dict_type` chooses the form. Of `accelerator` nothing is needed but, with FSDP1 and `use_orig_params=False`, the
strategy that prepared the optimizer. `use_dcp` changes nothing here: there is one way, whose files are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from acc_ops.collectives import barrier
from acc_ops.modules import is_peft_model
from acc_ops.optional import require
from acc_ops.world import current_world
from acc_plugins.precisions.precision import Precision
from acc_plugins.states.files import open_weights
from acc_plugins.states.fsdp1 import has_fsdp1, in_shards
from acc_plugins.states.part import Part
from acc_plugins.states.read import fill_all
from acc_plugins.strategies.sharded import ShardedStrategy

logger = logging.getLogger(__name__)


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,  # noqa: ARG001  see the note
) -> None:
    """Write the weights into `output_dir`: as `pytorch_model_fsdp.bin` (`_1`, ... for a `model_index`), or as folder `pytorch_model_fsdp_0` of shards.

    `adapter_only` writes the adapter of a PEFT model only. Every rank calls it. ValueError for LOCAL_STATE_DICT.
    """
    strategy = _strategy(fsdp_plugin, accelerator, [model])
    state = strategy.state_for_hooks(model)
    if adapter_only and _has_adapter(model):
        state = _adapter(strategy.unwrap(model), state) if state else state
    _write(strategy, strategy.model_part(model, state, _named("model", model_index)), output_dir)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,  # noqa: ARG001
) -> Any:
    """Load what `save_fsdp_model` wrote, or weights of any other strategy, from a checkpoint or from the folder of shards itself.

    What loading the state dict returned. Errors as of `Strategy.load_model`; every rank reads its own part, whatever the plugin says.
    """
    strategy = _strategy(fsdp_plugin, accelerator, [model])
    name = _named("model", model_index)
    if not (adapter_only and _has_adapter(model)):
        return strategy.load_model(model, input_dir, name)
    peft = require("peft", "loading an adapter")
    own, module = strategy.unwrap(model), strategy.module_with_states(model)
    state = _adapter(own, strategy.shards(model))
    fill_all(state, open_weights(input_dir, name), type(own).__name__)
    with in_shards(module) if has_fsdp1(module) else nullcontext():
        return peft.set_peft_model_state_dict(own, state, adapter_name=own.active_adapter)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,  # noqa: ARG001
) -> None:
    """Write the optimizer's state into `output_dir`: as `optimizer.bin` (`_1`, ...), or as folder `optimizer_0` of shards. Every rank calls it."""
    strategy = _strategy(fsdp_plugin, accelerator, [model])
    _write(strategy, strategy.optimizer_part(optimizer, _named("optimizer", optimizer_index)), output_dir)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: str | Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,  # noqa: ARG001  the optimizer of an adapter has the adapter's parameters only
    use_dcp: bool = True,  # noqa: ARG001
) -> None:
    """Load what `save_fsdp_optimizer` wrote, or an optimizer's state of any other strategy. Errors as of `Strategy.load_optimizer`."""
    strategy = _strategy(fsdp_plugin, accelerator, [model])
    strategy.load_optimizer(optimizer, input_dir, _named("optimizer", optimizer_index))


def _strategy(plugin: Any, accelerator: Any, models: Iterable[nn.Module]) -> ShardedStrategy:
    """One that reads and writes as `plugin` says, and knows the names that the accelerator's own knows."""
    strategy = ShardedStrategy(current_world(), Precision())
    strategy.state_dict_type = plugin.state_dict_type.name
    strategy.names = getattr(getattr(accelerator, "strategy", None), "names", strategy.names)
    strategy.names.add(models)
    return strategy


def _named(kind: str, index: int) -> str:
    return kind if index == 0 else f"{kind}_{index}"


def _write(strategy: ShardedStrategy, part: Part | None, folder: str | Path) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    if part is not None:
        part.write(folder)
    barrier(strategy.world)  # another rank may read it next


def _has_adapter(model: nn.Module) -> bool:
    if is_peft_model(model):
        return True
    logger.warning(
        "adapter_only has no effect: %s is no PEFT model, all of its weights are meant", type(model).__name__
    )
    return False


def _adapter(own: Any, state: Any) -> dict[str, Any]:
    """The adapter's part of the weights, by the names that PEFT gives it in files."""
    peft = require("peft", "the weights of an adapter")
    part: dict[str, Any] = peft.get_peft_model_state_dict(
        own, state_dict=dict(state), adapter_name=own.active_adapter
    )
    return part
