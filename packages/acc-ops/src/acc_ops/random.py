"""Random numbers: seed them, make ranks agree on them, and keep and restore where they are."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from acc_ops.collectives import broadcast
from acc_ops.devices import DeviceRow, device_module, device_row, is_present, present_kind
from acc_ops.enums import RNGType
from acc_ops.optional import is_available, require
from acc_ops.world import World, current_world


class GeneratorMissing(AssertionError, ValueError):
    """The random generator that is asked for is not there."""


def set_seed(
    seed: int, device_specific: bool = False, deterministic: bool = False, world: World | None = None
) -> None:
    """Seed Python, NumPy if installed, torch, and every device of the present kind.

    With `device_specific` each rank adds its rank. With `deterministic` torch uses deterministic algorithms and cuDNN stops measuring which
    one is fastest; without it both flags are left alone. Raises ValueError unless 0 <= seed < 2**63.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
    if device_specific:
        seed = (seed + (world or current_world()).rank) % 2**63
    random.seed(seed)
    if is_available("numpy"):
        _numpy().random.seed(seed % 2**32)
    torch.manual_seed(seed)  # also every device torch itself knows, now or when its driver starts
    module = _device_generators(device_row(present_kind()))
    if module is not None and hasattr(module, "manual_seed_all"):
        module.manual_seed_all(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None, world: World | None = None
) -> None:
    """Give every rank rank 0's state of each of these generators.

    Raises ValueError for an unknown name, and GeneratorMissing before anything is sent.
    """
    kinds = [RNGType(rng_type) for rng_type in rng_types]
    for kind in kinds:
        synchronize_rng_state(kind, generator, world)


def synchronize_rng_state(
    rng_type: RNGType | str | None = None,
    generator: torch.Generator | None = None,
    world: World | None = None,
) -> None:
    """Give every rank rank 0's state of one kind of generator, or of `generator` for RNGType.GENERATOR.

    Raises GeneratorMissing (an AssertionError and a ValueError) when this rank has no such generator.
    """
    if rng_type is None:
        raise ValueError("rng_type must be one of " + ", ".join(str(kind) for kind in RNGType) + ", got None")
    kind = RNGType(rng_type)
    world = world or current_world()
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise GeneratorMissing("rng_type='generator' needs the generator itself, got None")
        generator.set_state(_from_rank_0(generator.get_state(), world))
        return
    if kind is RNGType.TORCH:
        torch.set_rng_state(_from_rank_0(torch.get_rng_state(), world))
        return
    row = device_row(str(kind))
    module = _device_generators(row) if is_present(row) else None
    if module is None:
        raise GeneratorMissing(f"rng_type={str(kind)!r} is asked for, but this machine has no such device")
    module.set_rng_state(_from_rank_0(module.get_rng_state(), world))


def capture_rng() -> dict[str, Any]:
    """Where the generators of Python, NumPy, torch and the present kind of device are, as plain numbers and tensors.

    The keys say which parts there are: `python`, `numpy`, `torch`, and the kind of device, such as `cuda`.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if is_available("numpy"):
        numpy_state = _numpy().random.get_state(legacy=False)
        inner = {k: v if isinstance(v, int) else v.tolist() for k, v in numpy_state["state"].items()}
        state["numpy"] = {**numpy_state, "state": inner}
    row = device_row(present_kind())
    module = _device_generators(row)
    if module is not None:
        everyone = getattr(module, "get_rng_state_all", None)
        state[row.kind] = everyone() if everyone is not None else [module.get_rng_state()]
    return state


def restore_rng(state: Mapping[str, Any]) -> list[str]:
    """Put the generators where `capture_rng` found them; returns, and warns of, the names of what could not be.

    That is what `state` has and this process has not, and the other way round: `numpy`, `cuda`, `cuda:3`.
    """
    missing = []
    row = device_row(present_kind())
    here = {"python", "torch"}
    if is_available("numpy"):
        here.add("numpy")
    if _device_generators(row) is not None:
        here.add(row.kind)
    for name in sorted(here | set(state)):
        if name not in here or name not in state:
            missing.append(name)
        elif name == "python":
            version, numbers, gauss = state[name]
            random.setstate((version, tuple(numbers), gauss))
        elif name == "numpy":
            _restore_numpy(state[name])
        elif name == "torch":
            torch.set_rng_state(state[name].cpu())
        else:
            missing += _restore_devices(row, state[name])
    if missing:
        warnings.warn(
            f"the state of these random generators could not be restored: {', '.join(missing)}; "
            "what depends on them does not continue as before",
            stacklevel=2,
        )
    return missing


def _from_rank_0(state: Tensor, world: World) -> Tensor:
    received: Tensor = broadcast(state.cpu().clone(), 0, world)
    return received


def _device_generators(row: DeviceRow) -> Any | None:
    """The torch module with an accelerator's generator functions."""
    module = None if row.kind == "cpu" else device_module(row)
    return module if hasattr(module, "get_rng_state") else None


def _restore_numpy(state: Mapping[str, Any]) -> None:
    numpy = _numpy()
    inner = {
        k: numpy.array(v, dtype=numpy.uint32) if isinstance(v, (list, tuple)) else v
        for k, v in state["state"].items()
    }
    numpy.random.set_state({**state, "state": inner})


def _restore_devices(row: DeviceRow, states: list[Tensor]) -> list[str]:
    module = _device_generators(row)
    if module is None:
        return [row.kind]
    if not hasattr(module, "get_rng_state_all"):
        module.set_rng_state(states[0].cpu())
        return []
    count = int(module.device_count())
    for index, state in enumerate(states[:count]):
        module.set_rng_state(state.cpu(), index)
    return [f"{row.kind}:{index}" for index in range(min(count, len(states)), max(count, len(states)))]


def _numpy() -> Any:
    return require("numpy", "NumPy's random numbers")
