"""Degrees of parallelism become one mesh of devices."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from acc_ops.rendezvous import WorldError
from acc_ops.world import World, chosen_world


def mesh_shape(degrees: Mapping[str, int], size: int) -> dict[str, int]:
    """`degrees` (axis name -> number of ranks along it) for a world of `size`; one of them may be -1, for what remains.

    Raises ValueError naming both when their product is not `size`.
    """
    if not degrees:
        raise ValueError("a mesh needs at least one axis, got none")
    for name, degree in degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or (degree < 1 and degree != -1):
            raise ValueError(f"the degree of {name!r} must be a positive whole number or -1, got {degree!r}")
    open_axes = [name for name, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise ValueError(f"only one degree may be -1, got -1 for {', '.join(open_axes)}")
    known = prod(degree for degree in degrees.values() if degree != -1)
    text = " x ".join(f"{name}={degree}" for name, degree in degrees.items())
    if (open_axes and size % known) or (not open_axes and known != size):
        raise ValueError(f"the degrees {text} make {known} ranks, but the world has {size}")
    return {name: size // known if degree == -1 else degree for name, degree in degrees.items()}


def build_mesh(degrees: Mapping[str, int], world: World | None = None) -> DeviceMesh:
    """The mesh of the world's devices with the axes of `degrees`, the last one varying fastest.

    Raises ValueError when the degrees do not fit the world, WorldError when there is no process group. Every rank calls it.
    """
    world = chosen_world(world)
    shape = mesh_shape(degrees, world.size)
    if not dist.is_available() or not dist.is_initialized():
        raise WorldError("a mesh needs a process group: start with a launcher and call join_world() first")
    return init_device_mesh(world.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
