"""Random generators that the ranks of a world share: every rank continues where rank 0 is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acc_ops.collectives import broadcast, chained_operation
from acc_ops.devices import device_row, is_present
from acc_ops.enums import RNGType
from acc_ops.exchange import Call, agree, tried
from acc_ops.random import generators_of, set_torch_state, torch_state
from acc_ops.world import World, chosen_world


class GeneratorMissing(AssertionError, ValueError):
    """The random generator that is asked for is not there."""


@chained_operation
def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None, world: World | None = None
) -> None:
    """Give every rank rank 0's state of each of these generators, all in one collective.

    Raises ValueError for an unknown name, and GeneratorMissing (an AssertionError and a ValueError) when this process has no such
    generator. Where only some ranks lack one, or theirs are of another kind, every rank raises MismatchError. No generator has changed then.
    """
    if isinstance(rng_types, (str, RNGType)):
        rng_types = [rng_types]
    _share(rng_types, generator, chosen_world(world))


@chained_operation
def synchronize_rng_state(
    rng_type: RNGType | str | None = None,
    generator: torch.Generator | None = None,
    world: World | None = None,
) -> None:
    """Give every rank rank 0's state of one kind of generator, or of `generator` for RNGType.GENERATOR.

    Raises what `synchronize_rng_states` raises.
    """
    _share([rng_type], generator, chosen_world(world))


class _Source(NamedTuple):
    """One random generator of this process."""

    name: str  # with its kind of device, so that ranks with another kind notice
    state: Tensor
    set_state: Callable[[Tensor], Any]


def _share(rng_types: Iterable[Any], generator: torch.Generator | None, world: World) -> None:
    found, error = tried(lambda: _sources(rng_types, generator))
    if error is not None:
        if world.size > 1 and world.verify:
            agree(world, Call(name="broadcast", root=0, error=error))  # raises, on every rank
        raise error
    if world.size == 1 or found is None:
        return
    states = broadcast({source.name: source.state for source in found}, 0, world)
    for source in found:
        source.set_state(states[source.name])


def _sources(rng_types: Any, generator: torch.Generator | None) -> list[_Source]:
    if not isinstance(rng_types, Iterable):
        raise TypeError(
            f"rng_types must be kinds of random generators, such as ['torch', 'cuda'], got {rng_types!r:.60}"
        )
    return [_source(rng_type, generator) for rng_type in rng_types]


def _source(rng_type: Any, generator: torch.Generator | None) -> _Source:
    try:
        kind = RNGType(rng_type)
    except ValueError:
        known = ", ".join(RNGType.list())
        raise ValueError(f"a kind of random generator is one of {known}, got {rng_type!r}") from None
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise GeneratorMissing("rng_type='generator' needs the generator itself, got None")
        name = f"generator on {generator.device.type}"
        return _Source(name, generator.get_state().cpu(), generator.set_state)
    if kind is RNGType.TORCH:
        return _Source("torch", torch_state(), set_torch_state)
    row = device_row(str(kind))
    module = generators_of(row) if is_present(row) else None
    if module is None:
        raise GeneratorMissing(f"rng_type={str(kind)!r} is asked for, but this machine has no such device")
    return _Source(str(kind), module.get_rng_state().cpu(), module.set_rng_state)
