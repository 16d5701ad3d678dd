"""Random numbers: seed them, and keep and restore where they are."""

from __future__ import annotations

import operator
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from acc_ops.callers import warn_caller
from acc_ops.devices import DeviceRow, device_module, device_row, present_kind

if TYPE_CHECKING:
    from acc_ops.world import World


def set_seed(
    seed: int, device_specific: bool = False, deterministic: bool = False, world: World | None = None
) -> None:
    """Seed Python, NumPy if it is loaded (torch loads it where it is installed), torch, and every device of the present kind.

    With `device_specific` each rank adds its rank. With `deterministic` torch uses deterministic algorithms and cuDNN stops measuring which
    one is fastest; without it both flags are left alone. Raises ValueError unless 0 <= seed < 2**63.
    """
    try:
        number = operator.index(seed)  # NumPy's integers, too
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number < 2**63:
        raise ValueError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
    if device_specific:
        from acc_ops.world import current_world  # noqa: PLC0415 - costs more than the rest, which needs no ranks

        number = (number + (world or current_world()).rank) % 2**63
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)
    with _asking:
        torch.manual_seed(number)  # also every device torch itself knows, now or when its driver starts
    module = generators_of(device_row(present_kind()))
    if module is not None and hasattr(module, "manual_seed_all"):
        module.manual_seed_all(number)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def capture_rng() -> dict[str, Any]:
    """Where the generators of Python, NumPy, torch and the present kind of device are, as plain numbers, texts and tensors.

    The keys say which parts there are: `python`, `torch`, `numpy` if it is loaded, and the kind of device, such as `cuda`. `torch.save`
    writes it, and `torch.load` reads it with `weights_only=True`.
    """
    return {name: part.capture() for name, part in _parts().items()}


def restore_rng(state: Mapping[str, Any]) -> list[str]:
    """Put the generators where `capture_rng` found them; returns, and warns of, the names of what could not be.

    That is what `state` has and this process has not, and the other way round: `numpy`, `cuda`, `cuda:3`. Raises TypeError for what is no
    mapping, and ValueError, with its name, for a part that holds something else than a state; then every generator is as it was.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"restore_rng takes the mapping that capture_rng() returned, got {state!r:.60}")
    missing: list[str] = []
    parts = _parts()
    before: dict[str, Any] = {}
    for name in sorted(parts.keys() | state.keys()):
        if name not in parts or name not in state:
            missing.append(name)
            continue
        before[name] = parts[name].capture()
        try:
            missing += parts[name].restore(state[name]) or ()
        except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            for changed, old in before.items():
                parts[changed].restore(old)
            raise ValueError(
                f"state[{name!r}] is no state of that random generator ({error}): pass what capture_rng() returned"
            ) from error
    if missing:
        warn_caller(
            f"the state of these random generators could not be restored: {', '.join(missing)}; "
            "what depends on them does not continue as before"
        )
    return missing


def generators_of(row: DeviceRow) -> Any | None:
    """The torch module with an accelerator's generator functions."""
    module = None if row.kind == "cpu" else device_module(row)
    return module if hasattr(module, "get_rng_state") else None


class _Part(NamedTuple):
    """The random generators of one kind."""

    capture: Callable[[], Any]
    restore: Callable[[Any], list[str] | None]  # returns the names of what it could not set


def torch_state() -> Tensor:
    """The state of torch's CPU generator; several threads may ask.

    [Note: two threads and torch's generator] torch makes the tensor of the answer while it holds the generator's mutex. Making it may collect
    garbage, which lets another thread run; if that one asks or seeds, it waits for the mutex with the interpreter lock, and both wait for ever
    (seen once, with ranks as threads, in torch 2.13). So one thread asks or seeds at a time. Drawing waits without the interpreter lock.
    """
    with _asking:
        return torch.get_rng_state()


def set_torch_state(state: Tensor) -> None:
    """Put torch's CPU generator where `torch_state` found it."""
    with _asking:
        torch.set_rng_state(state.cpu())


_asking = threading.RLock()
_FORK_WAITS_S = 5.0  # for a lock; not for ever, since the thread that forks may hold it itself
_forking = threading.local()


def _hold_seeding() -> None:
    """Before a fork: wait for the threads that seed, ask or draw.

    [Note: a fork while another thread seeds] What another thread holds stays locked in the child for ever, and torch.manual_seed, with which
    every worker of a DataLoader begins, takes our lock, locks of torch's device modules (also without such a device) and the generator's mutex.
    That one cannot be held from here. Asking for the state waits for who draws now, and holds the interpreter lock, so that nobody begins anew.
    """
    modules = (getattr(torch, name, None) for name in ("cuda", "xpu", "mtia"))  # in the order of manual_seed
    locks = [_asking, *(getattr(module, "_initialization_lock", None) for module in modules)]
    _forking.held = [lock for lock in locks if lock is not None and lock.acquire(timeout=_FORK_WAITS_S)]
    for _ in range(4):  # threads that waited for the mutex, too
        torch.get_rng_state()


def _let_seed() -> None:
    """After a fork, in parent and child."""
    for lock in reversed(_forking.__dict__.pop("held", ())):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_seeding, after_in_parent=_let_seed, after_in_child=_let_seed)


def _parts() -> dict[str, _Part]:
    """What this process has, by name."""
    parts = {
        "python": _Part(random.getstate, _restore_python),
        "torch": _Part(torch_state, set_torch_state),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        parts["numpy"] = _Part(partial(_capture_numpy, numpy), partial(_restore_numpy, numpy))
    row = device_row(present_kind())
    module = generators_of(row)
    if module is not None:
        parts[row.kind] = _Part(
            partial(_capture_devices, module), partial(_restore_devices, module, row.kind)
        )
    return parts


def _restore_python(state: Any) -> None:
    version, numbers, gauss = state
    random.setstate((version, tuple(numbers), gauss))


def _capture_numpy(numpy: Any) -> dict[str, Any]:
    state = numpy.random.get_state(legacy=False)
    inner = {k: v if isinstance(v, int) else v.tolist() for k, v in state["state"].items()}
    return {**state, "state": inner}


def _restore_numpy(numpy: Any, state: Mapping[str, Any]) -> None:
    inner = {
        k: numpy.array(v, dtype=numpy.uint32) if isinstance(v, (list, tuple)) else v
        for k, v in state["state"].items()
    }
    numpy.random.set_state({**state, "state": inner})


def _capture_devices(module: Any) -> list[Tensor]:
    everyone = getattr(module, "get_rng_state_all", None)
    return everyone() if everyone is not None else [module.get_rng_state()]


def _restore_devices(module: Any, kind: str, states: list[Tensor]) -> list[str]:
    if not hasattr(module, "get_rng_state_all"):
        module.set_rng_state(states[0].cpu())
        return []
    count = int(module.device_count())
    for index, state in enumerate(states[:count]):
        module.set_rng_state(state.cpu(), index)
    return [f"{kind}:{index}" for index in range(min(count, len(states)), max(count, len(states)))]
