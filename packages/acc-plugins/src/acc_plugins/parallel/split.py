"""`split_model`: one model made ready for the axes of a mesh on which layers or sequences are split, before anything wraps it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from acc_ops.comm import SoloComm, TorchComm
from acc_ops.exchange import together
from acc_ops.world import World, current_world
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.parallel.attention import Attention, Heads, Keys
from acc_plugins.parallel.exchange import line_of
from acc_plugins.parallel.masks import SequenceError
from acc_plugins.parallel.reach import Reach
from acc_plugins.parallel.tensor import check_tensor_parallel, split_layers

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_reaches: weakref.WeakKeyDictionary[nn.Module, Reach] = weakref.WeakKeyDictionary()


def split_model(
    model: nn.Module, parallelism: ParallelismConfig, mesh: DeviceMesh | None, world: World | None = None
) -> nn.Module:
    """`model`, in place: its layers split over `tp`, its attention opened over `cp` or `sp`; the same object. A second call does nothing.

    Every rank calls it, before anything wraps the model or takes its parameters. Raises PlanError (a ValueError), SequenceError (a
    ValueError) or NotImplementedError, on every rank and before anything is changed, when some rank's model cannot be split.
    """
    axes = [axis for axis in ("tp", "cp", "sp") if getattr(parallelism, f"{axis}_enabled")]
    if model in _reaches:
        axes = [axis for axis in axes if axis == "tp"]  # layers that are split already are left alone below
    if not axes:
        return model
    if mesh is None:
        raise ValueError(
            f"{' and '.join(f'{axis}_size' for axis in axes)} need a mesh: build it with build_device_mesh()"
        )
    world = world or current_world()
    styles: dict[str, Any] = together(world, lambda: _checked(model, axes, mesh))
    if "tp" in axes and styles:
        split_layers(model, styles, mesh["tp"], part_of(world, mesh["tp"].get_group()))
    if "cp" in axes or "sp" in axes:
        by_heads = "sp" in axes
        kind: type[Attention] = Heads if by_heads else Keys
        reach = Reach(kind(line_of(mesh, "sp" if by_heads else "cp")), open=by_heads)
        reach.attach(model)
        _reaches[model] = reach
    return model


def reach_of(model: nn.Module) -> Reach | None:
    """How the attention of a model that was split is reached, if it was."""
    return _reaches.get(model)


def part_of(world: World, group: Any) -> World:
    """The ranks of a group as a world of their own."""
    comm = TorchComm(group)
    return replace(
        world,
        rank=comm.rank,
        size=comm.size,
        local_rank=comm.rank,
        local_size=comm.size,
        comm=comm,
        mesh=None,
    )


def sharers_of(world: World, mesh: DeviceMesh) -> World:
    """The ranks that have the same parts of the weights as this one: those along all axes but `tp`. Every rank calls it."""
    names = [name for name in mesh.mesh_dim_names or () if name != "tp"]
    if not names:
        return replace(world, rank=0, size=1, local_rank=0, local_size=1, comm=SoloComm(), mesh=None)
    line = mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("dp_cp")
    return part_of(world, line.get_group())


def _checked(model: nn.Module, axes: list[str], mesh: DeviceMesh) -> dict[str, Any]:
    styles = check_tensor_parallel(model, mesh["tp"].size()) if "tp" in axes else {}
    for axis in ("cp", "sp"):
        if axis in axes:
            _check_sequence(model, axis, mesh[axis].size())
    return styles


def _check_sequence(model: nn.Module, axis: str, ranks: int) -> None:
    """Refuse what is seen to mix places of a sequence in another way than by torch's attention."""
    for name, module in model.named_modules():
        why = None
        if isinstance(module, _RECURRENT):
            why = "is recurrent: each place needs the state that the ranks before would have to compute first"
        elif isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
            why = f"mixes {module.kernel_size[0]} neighbouring places, some of which another rank has"
        elif isinstance(module, nn.MultiheadAttention):
            why = "attends to this rank's places only: use a model that calls torch.nn.functional.scaled_dot_product_attention"
        if why is not None:
            raise SequenceError(
                f"{axis}_size={ranks} splits sequences, but {name or 'the model'} ({type(module).__name__}) {why}. Leave {axis}_size out"
            )
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if chosen not in (None, "sdpa"):
        raise SequenceError(
            f"{axis}_size={ranks} splits sequences, and {type(model).__name__} computes attention by {chosen!r}, which sees this rank's places "
            "only: load it with attn_implementation='sdpa'"
        )
