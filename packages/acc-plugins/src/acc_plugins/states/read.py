"""Weights out of whatever files a strategy wrote, into a model of whatever strategy.

[Note: how a tensor comes in]
- into a plain model: mapped from its file, and copied by the model's own `load_state_dict`
- into a model in shards: each rank reads the slice that it has, straight into its memory
- out of a folder of shards: the chunks that overlap with what is wanted, one by one
So no rank ever holds the whole state a second time. Names and shapes are compared before the first value is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from acc_bigmodel.stores.store import WeightStore
from acc_plugins.states.fsdp1 import has_fsdp1, in_shards
from acc_plugins.states.names import plain_name
from acc_plugins.states.shards import Box, ShardStore
from acc_plugins.states.spread import has_sharded, local_pieces, shape_of

_COUNTED = "num_batches_tracked"  # old files of batch norms lack it, and torch adds it


def load_weights(module: nn.Module, store: WeightStore, strict: bool = True) -> Any:
    """Give `module` the weights of `store`; what its `load_state_dict` returned.

    Raises RuntimeError, before anything is changed, naming missing or unexpected weights (when `strict`) and those of another shape. A module
    whose own hooks change the names while they load is left to compare them itself.
    """
    fsdp1 = has_fsdp1(module)
    within: AbstractContextManager[Any] = in_shards(module) if fsdp1 else nullcontext()
    with within:
        own = module.state_dict()
        actual = {plain_name(name): name for name in own}
        twins = _tied_names(module)
        found = {name: _home(name, store, twins) for name in actual}
        if not fsdp1 and not has_sharded(module) and not isinstance(store, ShardStore):
            if not _renames(module):
                _check(module, store, own, actual, found, strict)
            return _load_mapped(module, store, actual, found, strict)
        missing, unexpected = _check(module, store, own, actual, found, strict)
        for name, home in found.items():
            if home is None:
                continue
            if home in store.others:
                own[actual[name]] = store.others[home]
            elif isinstance(own[actual[name]], Tensor):
                fill(own[actual[name]], store, home)
        result = module.load_state_dict(own)
    return type(result)(missing, unexpected)


def fill(tensor: Tensor, store: WeightStore, name: str) -> None:
    """Read this rank's part of the tensor called `name` into the memory of `tensor`."""
    for box, memory in local_pieces(tensor):
        if isinstance(store, ShardStore):
            store.read_into(memory, name, box)
        else:
            memory.copy_(sliced(store.peek(name), box))


def fill_all(state: Mapping[str, Any], store: WeightStore, owner: str) -> None:
    """Read every tensor of `state` into its memory. RuntimeError, before anything is read, for names that the store lacks or has in another shape."""
    wrong = [
        name for name, tensor in state.items() if name not in store or store.shape(name) != shape_of(tensor)
    ]
    if wrong:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {owner}: missing, or of another shape: {_listed(wrong)}"
        )
    for name, tensor in state.items():
        fill(tensor, store, name)


def sliced(tensor: Tensor, box: Box) -> Tensor:
    """The part of a whole tensor that `box` says."""
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))]


def _load_mapped(
    module: nn.Module,
    store: WeightStore,
    actual: Mapping[str, str],
    found: Mapping[str, str | None],
    strict: bool,
) -> Any:
    weights: dict[str, Any] = {
        name: store.peek(name) for name in store if name not in actual
    }  # unexpected, or renamed while loading
    weights.update({name: value for name, value in store.others.items() if name not in actual})
    for name, home in found.items():
        if home is not None:
            weights[actual[name]] = store.others[home] if home in store.others else store.peek(home)
    return module.load_state_dict(weights, strict=strict)


def _check(
    module: nn.Module,
    store: WeightStore,
    own: Mapping[str, Any],
    actual: Mapping[str, str],
    found: Mapping[str, str | None],
    strict: bool,
) -> tuple[list[str], list[str]]:
    """The missing and the unexpected names. RuntimeError as told by `load_weights`, in torch's words."""
    missing = [name for name, home in found.items() if home is None and not name.endswith(_COUNTED)]
    unexpected = [name for name in (*store, *store.others) if name not in actual]
    wrong = [f"Missing key(s) in state_dict: {_listed(missing)}"] if strict and missing else []
    wrong += [f"Unexpected key(s) in state_dict: {_listed(unexpected)}"] if strict and unexpected else []
    for name, home in found.items():
        mine = own[actual[name]]
        if (
            home is not None
            and home in store
            and isinstance(mine, Tensor)
            and store.shape(home) != shape_of(mine)
        ):
            wrong.append(
                f"size mismatch for {name}: the checkpoint has {tuple(store.shape(home))}, the model has {tuple(shape_of(mine))}"
            )
    if wrong:
        raise RuntimeError(
            "\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *wrong])
        )
    return missing, unexpected


def _home(name: str, store: WeightStore, twins: Mapping[str, list[str]]) -> str | None:
    """The name in the store for one of the model: its own, or one that it is tied to, since files keep a shared tensor once."""
    return next((one for one in (name, *twins.get(name, ())) if one in store or one in store.others), None)


def _tied_names(module: nn.Module) -> dict[str, list[str]]:
    """For every weight the other names of the same tensor in the module."""
    groups: dict[int, list[str]] = {}
    for every in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in every:
            groups.setdefault(id(tensor), []).append(plain_name(name))
    return {
        name: [other for other in names if other != name]
        for names in groups.values()
        if len(names) > 1
        for name in names
    }


def _renames(module: nn.Module) -> bool:
    """Whether code of the user's, or of torch's parametrizations, may change names while they are loaded."""
    return any(
        part._load_state_dict_pre_hooks
        or not type(part)._load_from_state_dict.__module__.startswith("torch.nn.")
        or type(part).load_state_dict is not nn.Module.load_state_dict
        for part in module.modules()
    )


def _listed(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names[:20]) + (
        f" and {len(names) - 20} more" if len(names) > 20 else ""
    )
