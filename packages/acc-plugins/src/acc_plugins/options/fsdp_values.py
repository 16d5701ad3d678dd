"""The values of the FSDP options as torch's objects, from text, numbers and dictionaries, and back to plain data.

torch is loaded when a value is made, so that the launcher reads the declarations without it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from acc_ops.option_text import FALSE_WORDS, TRUE_WORDS, truth_of
from acc_ops.options import OptionError, closest

if TYPE_CHECKING:
    import torch
    from torch import nn

BY_CLASS = "transformer_based_wrap"
BY_SIZE = "size_based_wrap"
NO_WRAP = "no_wrap"
_POLICIES = (BY_CLASS, BY_SIZE, NO_WRAP)
_PRECISIONS = {"fp8": "bfloat16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def truth(raw: str, name: str = "the value") -> bool:
    """A boolean from a word; OptionError naming the option."""
    try:
        return truth_of(raw)
    except ValueError as error:
        raise OptionError(f"{name}: {error}") from None


def truth_or_text(raw: str) -> bool | str:
    """A boolean from a word; numbers and anything else as text, for they may name a strategy."""
    word = raw.strip().lower()
    return raw if word.isdigit() or word not in TRUE_WORDS | FALSE_WORDS else truth_of(word)


def name_of(value: Any) -> Any:
    """An enum member of torch by its name, anything else as it is."""
    return value.name if isinstance(value, enum.Enum) else value


def sharding_strategy(value: Any, option: str) -> Any:
    """torch's ShardingStrategy by name, number or member."""
    from torch.distributed.fsdp import ShardingStrategy  # noqa: PLC0415

    return _member(ShardingStrategy, value, option)


def backward_prefetch(value: Any) -> Any:
    """torch's BackwardPrefetch by name, number or member; None for NO_PREFETCH."""
    from torch.distributed.fsdp import BackwardPrefetch  # noqa: PLC0415

    if value is None or (isinstance(value, str) and value.strip().upper() == "NO_PREFETCH"):
        return None
    return _member(BackwardPrefetch, value, "backward_prefetch", "NO_PREFETCH")


def state_dict_type(value: Any) -> Any:
    """torch's StateDictType by name (`FULL_STATE_DICT`, `full`), number or member."""
    from torch.distributed.fsdp import StateDictType  # noqa: PLC0415

    if isinstance(value, str) and value.strip().lower() in ("full", "local", "sharded"):
        value = f"{value.strip()}_state_dict"
    return _member(StateDictType, value, "state_dict_type")


def state_dict_configs(kind: Any) -> tuple[Any, Any]:
    """torch's settings for model and optimizer states of that type: in CPU memory, and full ones on rank 0 only."""
    from torch.distributed import fsdp  # noqa: PLC0415

    if kind.name == "FULL_STATE_DICT":
        full = {"offload_to_cpu": True, "rank0_only": True}
        return fsdp.FullStateDictConfig(**full), fsdp.FullOptimStateDictConfig(**full)
    if kind.name == "SHARDED_STATE_DICT":
        return fsdp.ShardedStateDictConfig(offload_to_cpu=True), fsdp.ShardedOptimStateDictConfig(
            offload_to_cpu=True
        )
    return fsdp.LocalStateDictConfig(offload_to_cpu=True), fsdp.LocalOptimStateDictConfig(offload_to_cpu=True)


def auto_wrap_policy(value: Any) -> Any:
    """torch's wrapping function by name in any case, None for no_wrap; functions as they are."""
    if value is None or callable(value):
        return value
    from torch.distributed.fsdp import wrap  # noqa: PLC0415

    known = {
        BY_CLASS: wrap.transformer_auto_wrap_policy,
        BY_SIZE: wrap.size_based_auto_wrap_policy,
        NO_WRAP: None,
    }
    name = str(value).strip().lower()
    if name not in known:
        near = closest(name, known)
        raise OptionError(
            f"auto_wrap_policy must be a function or one of {', '.join(_POLICIES)}, got {value!r}"
            + (f": did you mean {near}?" if near else "")
        )
    return known[name]


def policy_name(policy: Any) -> Any:
    """The name of one of torch's two wrapping functions, also when it has its arguments; anything else as it is."""
    base = policy.func if isinstance(policy, functools.partial) else policy
    names = {"transformer_auto_wrap_policy": BY_CLASS, "size_based_auto_wrap_policy": BY_SIZE}
    if getattr(base, "__module__", None) == "torch.distributed.fsdp.wrap":
        return names.get(getattr(base, "__name__", ""), policy)
    return policy


def offload_policy(offload: bool, version: int | None) -> Any:
    """torch's policy for parameters in CPU memory, or for those that stay on the device."""
    from torch.distributed import fsdp  # noqa: PLC0415

    if version == 1:
        return fsdp.CPUOffload(offload_params=offload)
    return fsdp.CPUOffloadPolicy() if offload else fsdp.OffloadPolicy()


def offload_types(version: int | None) -> tuple[type, ...]:
    """The classes of torch that say it in that version; CPUOffloadPolicy is an OffloadPolicy."""
    from torch.distributed import fsdp  # noqa: PLC0415

    return (fsdp.CPUOffload,) if version == 1 else (fsdp.OffloadPolicy,)


def offloads(policy: Any) -> Any:
    """Whether that policy moves parameters to CPU memory, as a boolean."""
    if isinstance(policy, bool):
        return policy
    return bool(getattr(policy, "offload_params", type(policy).__name__ == "CPUOffloadPolicy"))


def precision_policy(name: str | torch.dtype, version: int | None, buffer_autocast: bool = False) -> Any:
    """torch's policy that computes and reduces in the format `name`, or torch's own name of it."""
    import torch  # noqa: PLC0415

    known = {short: getattr(torch, long) for short, long in _PRECISIONS.items()}
    dtype = known.get(name, name) if isinstance(name, str) else name
    if dtype not in known.values():
        raise OptionError(
            f"mixed precision must be one of {', '.join(known)} or such a torch dtype, got {name!r}"
        )
    last = "output_dtype" if version == 2 else "buffer_dtype"
    made = {"param_dtype": dtype, "reduce_dtype": dtype, last: dtype}
    if version == 1 and buffer_autocast:
        made[last] = torch.float32
    return _precision_class(version)(**made)


def checked_precision(value: Any, version: int | None) -> Any:
    """torch's policy from a name or a dtype, a dictionary of its fields (formats also by name), or itself."""
    import torch  # noqa: PLC0415

    kind = _precision_class(version)
    if isinstance(value, (str, torch.dtype)):
        return precision_policy(value, version)
    if isinstance(value, Mapping):
        known = [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]
        for key in value:
            if key not in known:
                raise OptionError(
                    f"mixed_precision_policy has no key {key!r} with fsdp_version={version}. Known: {', '.join(known)}"
                )
        return kind(**{key: _dtype(key, one) if key.endswith("dtype") else one for key, one in value.items()})
    if not isinstance(value, kind):
        raise OptionError(
            f"mixed_precision_policy must be one of {', '.join(_PRECISIONS)}, a dtype, a dictionary or a {kind.__name__} with "
            f"fsdp_version={version}, got {value!r}"
        )
    return value


def check_pattern(pattern: str) -> None:
    """OptionError for text that is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"ignored_modules={pattern!r} is no regular expression: {error}") from None


def to_empty(module: nn.Module) -> None:
    """Give a module memory on this rank's device, without values: rank 0's are sent afterwards."""
    from acc_ops.world import current_world  # noqa: PLC0415

    module.to_empty(device=current_world().device, recurse=False)


def _member(kind: Any, value: Any, option: str, *others: str) -> Any:
    """The member of an enum of torch by name in any case, number, number as text, or itself."""
    if isinstance(value, kind):
        return value
    text = str(value).strip().upper()
    for member in kind:
        if not isinstance(value, bool) and text in (member.name, str(member.value)):
            return member
    known = [member.name for member in kind] + list(others)
    near = closest(text, known)
    raise OptionError(
        f"{option} must be one of {', '.join(known)}, got {value!r}"
        + (f": did you mean {near}?" if near else "")
    )


def _precision_class(version: int | None) -> Any:
    from torch.distributed import fsdp  # noqa: PLC0415

    return fsdp.MixedPrecisionPolicy if version == 2 else fsdp.MixedPrecision


def _dtype(key: str, value: Any) -> torch.dtype | None:
    import torch  # noqa: PLC0415

    if value is None or isinstance(value, torch.dtype):
        return value
    name = str(value).removeprefix("torch.")
    found = getattr(torch, _PRECISIONS.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise OptionError(
            f"mixed_precision_policy[{key!r}] must be a torch dtype or one of {', '.join(_PRECISIONS)}, got {value!r}"
        )
    return found
