"""Weights out of whatever files a strategy wrote, into a model of whatever strategy.

[Note: how a tensor comes in]
- into a plain model: mapped from its file, and copied by the model's own `load_state_dict`
- into a model in shards: each rank reads the slice that it has, straight into its memory
- out of a folder of shards: the chunks that overlap with what is wanted, one by one
So no rank ever holds the whole state a second time. Names and shapes are compared before the first value is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from acc_bigmodel.stores.store import WeightStore
from acc_hooks.ties import every_tensor, group_by_tensor
from acc_plugins.states.fsdp1 import has_fsdp1, in_shards
from acc_plugins.states.names import plain_name, plain_names
from acc_plugins.states.shards import Box, ShardStore
from acc_plugins.states.spread import has_sharded, local_pieces, shape_of
from acc_plugins.states.whole import DoesNotFitError

_COUNTED = "num_batches_tracked"  # old files of batch norms lack it, and torch adds it


def load_weights(module: nn.Module, store: WeightStore, strict: bool = True) -> Any:
    """Give `module` the weights of `store`; what its `load_state_dict` returned. Errors as of `ready_to_load`."""
    return ready_to_load(module, store, strict)()


def ready_to_load(module: nn.Module, store: WeightStore, strict: bool = True) -> Callable[[], Any]:
    """Compare the weights of `store` with those of `module`, of which nothing is changed yet; the call that loads them, and returns what the module's
    `load_state_dict` returned.

    Names are compared without what wrappers put into them (torch.compile's `_orig_mod`), on both sides. Raises DoesNotFitError (a RuntimeError),
    naming missing or unexpected weights (when `strict`) and those of another shape, ValueError for two names that are one without wrappers. A
    module whose own hooks change the names while they load is left to compare them itself.
    """
    with _shown_in_shards(module):
        own = module.state_dict()
        fit = _fit(module, own, store)
        if not (fit.mapped and _renames(module)):
            _check(module, store, own, fit, strict)
            fit.expanded.extend(
                name
                for name in fit.actual
                if fit.found[name] is not None and _is_expanded(own[fit.actual[name]])
            )
    return partial(_load_mapped if fit.mapped else _load_in_place, module, store, fit, strict)


def fill(tensor: Tensor, store: WeightStore, name: str) -> None:
    """Read this rank's part of the tensor called `name` into the memory of `tensor`."""
    for box, memory in local_pieces(tensor):
        if isinstance(store, ShardStore):
            store.read_into(memory, name, box)
        else:
            memory.copy_(sliced(store.peek(name), box))


def fill_all(state: Mapping[str, Any], store: WeightStore, owner: str) -> None:
    """Read every tensor of `state` into its memory. DoesNotFitError, before anything is read, for names that the store lacks or has in another shape."""
    wrong = [
        name for name, tensor in state.items() if name not in store or store.shape(name) != shape_of(tensor)
    ]
    if wrong:
        raise DoesNotFitError(
            f"Error(s) in loading state_dict for {owner}: missing, or of another shape: {_listed(wrong)}"
        )
    for name, tensor in state.items():
        fill(tensor, store, name)


def sliced(tensor: Tensor, box: Box) -> Tensor:
    """The part of a whole tensor that `box` says."""
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))]


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """Which weight of a store is which of a module, by plain names."""

    mapped: bool  # the module takes whole tensors, and the store has them mapped
    actual: Mapping[str, str]  # the module's own names
    theirs: Mapping[str, str]  # the store's own names
    found: Mapping[str, str | None]  # for the module's, which of the store's
    expanded: list[str] = field(default_factory=list)  # of the module's what torch cannot copy into
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def _shown_in_shards(module: nn.Module) -> AbstractContextManager[Any]:
    return in_shards(module) if has_fsdp1(module) else nullcontext()


def _fit(module: nn.Module, own: Mapping[str, Any], store: WeightStore) -> _Fit:
    actual, theirs = plain_names(own), plain_names([*store, *store.others])
    found = {name: theirs.get(name) for name in actual}
    if None in found.values():  # files keep a shared tensor once: under its first name
        twins = _tied_names(module)
        for name in [name for name, home in found.items() if home is None]:
            found[name] = next((theirs[twin] for twin in twins.get(name, ()) if twin in theirs), None)
    return _Fit(
        mapped=not (has_fsdp1(module) or has_sharded(module) or isinstance(store, ShardStore)),
        actual=actual,
        theirs=theirs,
        found=found,
        missing=[name for name, home in found.items() if home is None and not name.endswith(_COUNTED)],
        unexpected=[name for name in theirs if name not in actual],
    )


def _load_mapped(module: nn.Module, store: WeightStore, fit: _Fit, strict: bool) -> Any:
    paths = _paths_of(module, fit.actual)
    weights: dict[str, Any] = {
        _as_called(name, paths): _value(store, fit.theirs[name]) for name in fit.unexpected
    }  # or renamed while loading
    for name, home in fit.found.items():
        if home is not None:
            weights[fit.actual[name]] = _value(store, home)
    if not fit.expanded:
        return module.load_state_dict(weights, strict=strict)
    _fill_expanded(module, store, fit)
    for name in fit.expanded:
        weights.pop(fit.actual[name])
    result = module.load_state_dict(weights, strict=False)  # what is missing was compared
    filled = {fit.actual[name] for name in fit.expanded}
    return type(result)([name for name in result.missing_keys if name not in filled], result.unexpected_keys)


def _load_in_place(module: nn.Module, store: WeightStore, fit: _Fit, strict: bool) -> Any:  # noqa: ARG001  it was compared
    with _shown_in_shards(module):
        own = module.state_dict()
        _fill_expanded(module, store, fit)
        for name, home in fit.found.items():
            if name in fit.expanded:
                own.pop(fit.actual[name])
            elif home is not None and home in store.others:
                own[fit.actual[name]] = store.others[home]
            elif home is not None and isinstance(own[fit.actual[name]], Tensor):
                fill(own[fit.actual[name]], store, home)
        result = module.load_state_dict(own, strict=not fit.expanded)
    return type(result)(fit.missing, fit.unexpected)


def _value(store: WeightStore, home: str) -> Any:
    return store.others[home] if home in store.others else store.peek(home)


def _check(module: nn.Module, store: WeightStore, own: Mapping[str, Any], fit: _Fit, strict: bool) -> None:
    """DoesNotFitError as told by `ready_to_load`, in torch's words."""
    missing, unexpected = fit.missing, fit.unexpected
    wrong = [f"Missing key(s) in state_dict: {_listed(missing)}"] if strict and missing else []
    wrong += [f"Unexpected key(s) in state_dict: {_listed(unexpected)}"] if strict and unexpected else []
    for name, home in fit.found.items():
        mine = own[fit.actual[name]]
        if home is None or home in store.others or not isinstance(mine, Tensor):
            continue
        if store.shape(home) != shape_of(mine):
            wrong.append(
                f"size mismatch for {name}: the checkpoint has {tuple(store.shape(home))}, the model has {tuple(shape_of(mine))}"
            )
        elif _is_expanded(mine) and not _can_be_expanded(store[home], mine):
            wrong.append(
                f"{name} is one value shown several times (Tensor.expand) in the model, the checkpoint has several values: clone() it in the model"
            )
    if wrong:
        raise DoesNotFitError(
            "\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *wrong])
        )


def _is_expanded(tensor: Any) -> bool:
    """Whether several elements lie at one place in memory, which torch refuses to copy into."""
    if (
        type(tensor) not in (Tensor, nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_contiguous()
    ):
        return False
    return bool(_repeated(tensor))


def _repeated(tensor: Tensor) -> list[int]:
    return [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]


def _once(tensor: Tensor, dims: Iterable[int]) -> Tensor:
    """The first of what is repeated along `dims`."""
    for dim in dims:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _can_be_expanded(value: Tensor, like: Tensor) -> bool:
    """Whether `value` repeats itself where `like` does; two NaN are the same."""
    once = _once(value, _repeated(like)).expand_as(value)
    return bool(((once == value) | ((once != once) & (value != value))).all())


def _fill_expanded(module: nn.Module, store: WeightStore, fit: _Fit) -> None:
    """Write the values of expanded tensors where they lie once."""
    own = module.state_dict() if fit.expanded else {}
    for name in fit.expanded:
        mine, home = own[fit.actual[name]], fit.found[name]
        assert home is not None
        dims = _repeated(mine)
        _once(mine, dims).copy_(_once(store[home], dims))


def _paths_of(module: nn.Module, actual: Mapping[str, str]) -> dict[str, str]:
    """By plain path the modules' own, the innermost of wrappers; none where all names are plain."""
    if all(plain == name for plain, name in actual.items()):
        return {}
    return {plain_name(path): path for path, _ in module.named_modules()}


def _as_called(name: str, paths: Mapping[str, str]) -> str:
    """What a module with `paths` calls a plain name that it does not have: its hooks may know it."""
    parts = name.split(".")
    for count in range(len(parts) - 1, -1, -1):
        path = paths.get(".".join(parts[:count]))
        if path is not None:
            return ".".join([*([path] if path else []), *parts[count:]])
    return name


def _tied_names(module: nn.Module) -> dict[str, list[str]]:
    """For every weight the other names of the same tensor in the module."""
    named = ((plain_name(name), tensor) for name, tensor in every_tensor(module) if not is_lazy(tensor))
    groups = group_by_tensor(named)
    return {name: [other for other in names if other != name] for names in groups for name in names}


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
