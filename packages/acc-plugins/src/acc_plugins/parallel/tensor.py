"""Tensor parallelism: the layers of a model split over the ranks of an axis by a plan."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from acc_hooks.ties import Place, shared_parameters, tie_again
from acc_ops.rng_sharing import synchronize_rng_states
from acc_ops.world import World
from acc_plugins.parallel.plans import PlanError, plan_of, resolve, split_dim

logger = logging.getLogger(__name__)
_COUNTS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads")


def check_tensor_parallel(model: nn.Module, ranks: int) -> dict[str, Any]:
    """Module name -> style; empty for a model whose weights are split already.

    Raises PlanError for a plan that cannot be followed, and NotImplementedError for a model without one.
    """
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    if split:
        sizes = {p.device_mesh.size() for p in split}
        if sizes != {ranks}:
            raise PlanError(
                f"{type(model).__name__} was loaded split over {', '.join(map(str, sorted(sizes)))} ranks, but tp_size={ranks}: make them equal"
            )
        return {}
    plan = plan_of(model)
    if plan is None:
        raise NotImplementedError(
            f"tp_size={ranks} splits layers, and nothing says how those of {type(model).__name__} are split: give a plan "
            "(acc_plugins.parallel.set_plan(model, {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'})), or a model that carries one (tp_plan)"
        )
    styles = resolve(model, plan, ranks)
    _complete_shared(model, styles)
    _say_counted_heads(model, styles)
    return styles


def split_layers(model: nn.Module, styles: dict[str, Any], mesh: DeviceMesh, line: World) -> None:
    """Give every layer its style, with the values that the first rank of `line` has.

    What no style touches stays whole on every rank, with the same values. The random generators go on from where the first rank's are, since
    dropout must leave out the same of what every rank has.
    """
    weights = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        for tensor in weights:
            if not tensor.is_meta and not isinstance(tensor, DTensor):
                tensor.copy_(
                    line.comm.broadcast(tensor.detach().clone(memory_format=torch.contiguous_format), 0)
                )
    synchronize_rng_states(["torch", *([] if line.device.type == "cpu" else [line.device.type])], world=line)
    groups = shared_parameters(model)
    for name, style in styles.items():
        made = _style(style, model.get_submodule(name))
        if made is not None:
            parallelize_module(model.get_submodule(name), mesh, made, **_FROM_HERE)
    for group in groups:
        _check_layouts(group)
        tie_again(group)


def split_like(state: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """What an optimizer keeps for a parameter, as it keeps it for the split one."""
    if not isinstance(after, DTensor) or isinstance(state, DTensor) or state.shape != before.shape:
        return state
    return distribute_tensor(state, after.device_mesh, after.placements)


# every rank has the first one's values already, so that nothing is sent again
_FROM_HERE: dict[str, Any] = (
    {"src_data_rank": None} if "src_data_rank" in inspect.signature(parallelize_module).parameters else {}
)


def _style(style: Any, module: nn.Module) -> ParallelStyle | None:
    """torch's object for a style's name."""
    if not isinstance(style, str):
        checked: ParallelStyle = style
        return checked
    if style == "replicate":
        return None
    if style == "sequence_parallel":
        return SequenceParallel()
    if style == "replicated_with_grad_allreduce":
        # the ranks have different heads, which are rows to a norm over one head: its weight's gradient is the sum over the ranks
        return SequenceParallel(sequence_dim=0, use_local_output=True)
    embedding = isinstance(module, nn.Embedding)
    if split_dim(module, style) == int(embedding):  # its columns
        return ColwiseParallel(output_layouts=None if style == "colwise" else Replicate())
    # the numbers that an embedding takes are on every rank
    return RowwiseParallel(input_layouts=Shard(-1) if style == "rowwise" and not embedding else Replicate())


def _complete_shared(model: nn.Module, styles: dict[str, Any]) -> None:
    """Layers that share a weight with one that is split are split the same way. Raises PlanError where that is not possible."""
    for group in shared_parameters(model):
        cuts = {name: split_dim(module, styles[name]) for module, _, name in group if name in styles}
        if not cuts or set(cuts.values()) == {None}:
            continue
        for module, attribute, name in group:
            if name in styles:
                continue
            completed = _completion(module, attribute, set(cuts.values()))
            if completed is None:
                raise PlanError(
                    f"{name or type(model).__name__}.{attribute} shares its weight with {', '.join(cuts)}, which the plan splits: give it a style "
                    "that splits it the same way"
                )
            styles[name] = completed
            cuts[name] = split_dim(module, completed)
        if len(set(cuts.values())) > 1:
            raise PlanError(
                f"{' and '.join(cuts)} share one weight, but the plan splits it in different ways: "
                f"{', '.join(f'{name} {styles[name]!r}' for name in cuts)}"
            )


def _completion(module: nn.Module, attribute: str, cuts: set[int | None]) -> str | None:
    if attribute != "weight" or len(cuts) != 1:
        return None
    dim = next(iter(cuts))
    if isinstance(module, nn.Embedding):
        return "embedding_rowwise" if dim == 0 else "embedding_colwise"
    if type(module) is nn.Linear:
        return "colwise_gather_output" if dim == 0 else "rowwise_split_input"
    return None


def _check_layouts(group: Sequence[Place]) -> None:
    """The places that shared a parameter can share the split one. Raises PlanError where their styles left it in two layouts."""
    first, *others = group
    one: Any = first.module._parameters[first.attribute]
    for place in others:
        other: Any = place.module._parameters[place.attribute]
        if getattr(one, "placements", None) != getattr(other, "placements", None):
            raise PlanError(
                f"{first.name} and {place.name} shared one weight, and their styles left it in two layouts: {_layout(one)} and "
                f"{_layout(other)}. Give both a style that splits it the same way"
            )


def _layout(parameter: Tensor) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else "whole"


def _say_counted_heads(model: nn.Module, styles: dict[str, Any]) -> None:
    """A module that reshapes to a number of heads of its own would silently get heads of another size."""
    for name, style in styles.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        count = next((one for one in _COUNTS if isinstance(getattr(parent, one, None), int)), None)
        if (
            style == "colwise"
            and count is not None
            and not isinstance(getattr(parent, "head_dim", None), int)
        ):
            logger.warning(
                "%s is split over its output features, and %s has %s=%d: if its forward reshapes to that number, each rank must have its own "
                "share of it; reshape to (..., -1, head_dim) instead",
                name,
                type(parent).__name__,
                count,
                getattr(parent, count),
            )
            return
