"""The state of an optimizer by the names of its parameters, in files of every strategy, and into an optimizer of every strategy.

[Note: places and names] torch's optimizers number parameters by their place in the groups, and so do files of strategies whose models are whole. FSDP's
files have names instead, since places change with the sharding. A file is read by what it has; both sides list their parameters in the order in
which the user gave them.
[Note: what a value becomes] A value in the shape of its parameter is spread as the parameter is. Another one (Adafactor's rows and columns) is spread as
the one that is there already, or else is whole on every rank. A single number (`step`) is a plain tensor.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from acc_plugins.states.files import find_optimizer
from acc_plugins.states.names import Names, inner_optimizer
from acc_plugins.states.read import sliced
from acc_plugins.states.shards import METADATA, Box, Key, ShardFolder
from acc_plugins.states.spread import is_dtensor, local_pieces, map_tensors
from acc_plugins.states.whole import DoesNotFitError

# what torch's own optimizers keep in the shape of the parameter; another shape is another model's
_LIKE_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "square_avg", "grad_avg", "acc_delta", "prev", "step_size", "ax"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Value:
    """One tensor of a saved state, of which only the shape and the dtype are known until it is read."""

    tensor: Tensor | None = None  # mapped from a file
    folder: ShardFolder | None = None
    key: Key = ()

    @property
    def shape(self) -> torch.Size:
        return self.folder.shape(self.key) if self.folder is not None else self._mapped.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.folder.dtype(self.key) if self.folder is not None else self._mapped.dtype

    @property
    def _mapped(self) -> Tensor:
        assert self.tensor is not None
        return self.tensor

    def read(self) -> Tensor:
        """All of it, as new memory on the CPU."""
        return self.folder.read(self.key) if self.folder is not None else self._mapped.clone()

    def read_into(self, memory: Tensor, box: Box) -> None:
        """The slice that `memory` stands for."""
        if self.folder is not None:
            self.folder.read_into(memory, self.key, box)
        else:
            memory.copy_(sliced(self._mapped, box))


@dataclass(frozen=True, kw_only=True)
class SavedOptimizer:
    """What a file or a folder says: by place or name of the parameter its state, with `Value`s for tensors, and the groups."""

    where: Path
    state: Mapping[Any, Any]
    groups: list[dict[str, Any]]
    more: Mapping[str, Any] = field(default_factory=dict)  # what some optimizers keep beside state and groups
    identity: tuple[int, ...] = ()  # of the file when it was opened

    def latest(self, folder: str | Path, name: str) -> SavedOptimizer:
        """Itself, or what lies there now, where that is another one. Errors as of `open_optimizer`."""
        where = find_optimizer(folder, name)
        return (
            self if (self.where, self.identity) == (where, _identity(where)) else open_optimizer(folder, name)
        )

    @property
    def by_name(self) -> bool:
        return any(isinstance(parameter, str) for group in self.groups for parameter in group["params"])


def open_optimizer(folder: str | Path, name: str) -> SavedOptimizer:
    """The state called `name` in a checkpoint; its tensors are read later.

    Raises FileNotFoundError where there is none, ValueError for files that are damaged or not to be trusted.
    """
    where = find_optimizer(folder, name)
    identity = _identity(where)
    content = _nested(ShardFolder(where)) if where.is_dir() else read_plain(where)
    if len(content) == 1 and "optimizer" in content:
        content = content["optimizer"]
    if not isinstance(content, Mapping) or not isinstance(content.get("param_groups"), (list, tuple)):
        raise ValueError(
            f"{where} holds no optimizer's state: it has {', '.join(map(repr, content)) or 'nothing'}, not state and param_groups"
        )
    more = {key: value for key, value in content.items() if key not in ("state", "param_groups")}
    groups = [{"params": [], **group} for group in content["param_groups"]]
    state = content.get("state", {})
    return SavedOptimizer(where=where, state=state, groups=groups, more=more, identity=identity)


def state_by_name(optimizer: Any, names: Names) -> dict[str, Any]:
    """The optimizer's `state_dict()` with names in the place of numbers. Tensors are the optimizer's own."""
    state = inner_optimizer(optimizer).state_dict()
    named: dict[Any, str] = {}
    groups = []
    for group, called in zip(state["param_groups"], names, strict=True):
        named.update(zip(group["params"], called, strict=True))
        groups.append({**group, "params": list(called)})
    return {
        **state,
        "state": {named.get(key, key): value for key, value in state["state"].items()},
        "param_groups": groups,
    }


def check_fits(saved: SavedOptimizer, optimizer: Any, names: Names, *, shapes: bool = True) -> None:
    """DoesNotFitError (a ValueError) when the parameters are not those of the optimizer, or have another shape.

    `shapes=False`: the parameters are not the user's own but what FSDP1 has made of them, and only their names are compared.
    """
    keys = saved_keys(saved, names)
    if shapes:
        parameters = [p for group in inner_optimizer(optimizer).param_groups for p in group["params"]]
        _check_shapes(saved, keys, parameters, [name for group in names for name in group])


def state_to_load(
    saved: SavedOptimizer, optimizer: Any, names: Names, map_location: Any = None
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes: this rank's part of every tensor, in the memory that the optimizer has for it, or in new memory.

    Nothing is compared here: that is `check_fits`.
    """
    parameters = [p for group in inner_optimizer(optimizer).param_groups for p in group["params"]]
    keys = saved_keys(saved, names)
    state: dict[Any, Any] = {}
    present = inner_optimizer(optimizer).state
    taken: set[int] = set()
    for place, (key, parameter) in enumerate(zip(keys, parameters, strict=True)):
        if key in saved.state:
            own = present.get(parameter, {})
            state[place] = {
                part: _placed(
                    value, parameter, own.get(part) if isinstance(own, Mapping) else None, map_location, taken
                )
                for part, value in saved.state[key].items()
            }
    known = set(keys)
    state.update({key: read_all(value) for key, value in saved.state.items() if key not in known})
    return {**read_all(saved.more), "state": state, "param_groups": _numbered(saved, names)}


def state_to_load_by_name(saved: SavedOptimizer, names: Names) -> dict[str, Any]:
    """The same by name, each parameter's tensors whole and read when they are asked for."""
    keys = saved_keys(saved, names)
    called = [name for group in names for name in group]
    groups = [
        {**group, "params": list(own)} for group, own in zip(_numbered(saved, names), names, strict=True)
    ]
    state = _Reading(
        {name: saved.state[key] for name, key in zip(called, keys, strict=True) if key in saved.state}
    )
    return {"state": state, "param_groups": groups}


def saved_keys(saved: SavedOptimizer, names: Names) -> list[Any]:
    """For every parameter of the optimizer, in its order, the key that the file has for it. DoesNotFitError where the two do not fit."""
    if len(saved.groups) != len(names):
        raise DoesNotFitError(
            f"{saved.where} has {len(saved.groups)} parameter groups, the optimizer has {len(names)}: build it with the groups that were saved"
        )
    keys: list[Any] = []
    for place, (group, own) in enumerate(zip(saved.groups, names, strict=True)):
        theirs = list(group["params"])
        if saved.by_name and set(theirs) != set(own):
            missing, unknown = sorted(set(own) - set(theirs)), sorted(set(theirs) - set(own))
            raise DoesNotFitError(
                f"the parameters of group {place} in {saved.where} are not those of the optimizer: it lacks {missing[:10]}, and has {unknown[:10]} "
                "that the optimizer does not train"
            )
        if len(theirs) != len(own):
            raise DoesNotFitError(
                f"group {place} in {saved.where} has {len(theirs)} parameters, that of the optimizer has {len(own)}: build it with the parameters that "
                "were saved, in the same order"
            )
        keys += own if saved.by_name else theirs
    return keys


def read_plain(file: Path, **options: Any) -> Any:
    """What torch.save wrote, plain data only, tensors as `Value`s mapped from the file. ValueError for more than plain data, and damaged files."""
    try:
        content = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file), **options
        )
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds objects that torch does not load from an untrusted file: {error}. If you trust it, name their classes "
            "with torch.serialization.add_safe_globals([...]) first"
        ) from error
    return map_tensors(lambda tensor: Value(tensor=tensor), content)


def read_all(state: Any) -> Any:
    """The nested `state` with every `Value` read."""
    if isinstance(state, Value):
        return state.read()
    if isinstance(state, Mapping):
        return {key: read_all(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(read_all(value) for value in state)
    return state


class _Reading(Mapping[str, Any]):
    """States by name whose values are read each time one is asked for."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Any:
        return read_all(self._state[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __contains__(self, name: object) -> bool:
        return name in self._state


def _identity(where: Path) -> tuple[int, ...]:
    file = where / METADATA if where.is_dir() else where
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _numbered(saved: SavedOptimizer, names: Names) -> list[dict[str, Any]]:
    groups, first = [], 0
    for group, own in zip(saved.groups, names, strict=True):
        groups.append({**read_all(group), "params": list(range(first, first + len(own)))})
        first += len(own)
    return groups


def _check_shapes(
    saved: SavedOptimizer, keys: list[Any], parameters: list[Tensor], called: list[str]
) -> None:
    for key, parameter, name in zip(keys, parameters, called, strict=True):
        entries = saved.state.get(key, {})
        for part, value in entries.items() if isinstance(entries, Mapping) else ():
            if (
                part in _LIKE_PARAMETER
                and not is_lazy(parameter)
                and isinstance(value, Value)
                and value.shape not in (parameter.shape, ())
            ):
                raise DoesNotFitError(
                    f"{saved.where} has {part} of shape {tuple(value.shape)} for {name}, whose shape is {tuple(parameter.shape)}: it was saved for "
                    "another model, or with the parameters in another order"
                )


def _placed(value: Any, parameter: Tensor, present: Any, map_location: Any, taken: set[int]) -> Any:
    """One entry of a parameter's state, where the note above says. `taken`: memory that has its value already."""
    if not isinstance(value, Value):
        return read_all(value)
    if not is_dtensor(parameter) or not len(value.shape):
        if _fits(present, value) and present.data_ptr() not in taken:  # no second copy of the state
            taken.add(present.data_ptr())
            value.read_into(present, ((0,) * len(value.shape), tuple(value.shape)))
            return present
        return value.read() if map_location is None else value.read().to(map_location)
    if is_dtensor(present) and present.shape == value.shape:
        made = torch.empty_like(present, dtype=value.dtype)
    elif parameter.shape == value.shape:
        made = torch.empty_like(parameter.detach(), dtype=value.dtype)
    else:
        from torch.distributed.tensor import Replicate, empty  # noqa: PLC0415  whoever has a DTensor has it loaded

        mesh = parameter.device_mesh
        made = empty(value.shape, dtype=value.dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
    for box, memory in local_pieces(made):
        value.read_into(memory, box)
    return made


def _fits(present: Any, value: Value) -> bool:
    """Whether the tensor that is there can take the value as it is."""
    return (
        type(present) is Tensor
        and present.layout is torch.strided
        and not present.requires_grad
        and (present.shape, present.dtype) == (value.shape, value.dtype)
    )


def _nested(folder: ShardFolder) -> dict[str, Any]:
    """The nested state out of the places that its entries had."""
    root: dict[Any, Any] = {}
    entries: dict[Key, Any] = {key: Value(folder=folder, key=key) for key in folder.tensors}
    for key, value in {**entries, **folder.values}.items():
        inside = root
        for part in key[:-1]:
            inside = inside.setdefault(part, {})
        inside[key[-1]] = value
    nested: dict[str, Any] = _with_lists(root)
    return nested


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree)]
    return {key: _with_lists(value) for key, value in tree.items()}
