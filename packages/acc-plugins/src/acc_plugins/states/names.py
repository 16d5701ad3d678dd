"""By what names parameters are known: those of the user's own model, whatever was put around it or made of it.

[Note: names of an optimizer's parameters] An optimizer knows its parameters by their place in its groups. That says nothing once another strategy
has replaced them: FSDP1 lays many parameters into one. So the names are noted before anything is replaced. Parameters of a second model in the
same optimizer get the model's place before their name (`model_1.weight`), and those that no model has are called after their place in the optimizer.
"""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from acc_ops.unwrap import extract_model_from_parallel

_WRAPPERS = {
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_orig_mod",
}  # FSDP1, activation checkpoints, torch.compile
_NUMBERED = re.compile(r"(?P<stem>.+?)(?:_(?P<index>\d+))?")

Names = list[list[str]]  # for every group of an optimizer the names of its parameters, in their order


def plain_name(name: str) -> str:
    """The name without the parts that wrappers of torch put into it."""
    if not any(part in name for part in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def plain_names(names: Collection[str]) -> dict[str, str]:
    """By plain name the name as it is, in the same order. ValueError for two names that become one."""
    text = "\0".join(names)
    if not any(part in text for part in _WRAPPERS):  # one search, not one for each of thousands
        return dict(zip(names, names, strict=True))
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(plain_name(name), name)
        if other != name:
            raise ValueError(
                f"{other} and {name} are both called {plain_name(name)} in a checkpoint, where {', '.join(sorted(_WRAPPERS))} are left out, as "
                "torch's wrappers put them in: rename one of the modules"
            )
    return found


def plain_state(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A module's `state_dict()` by plain names, with the versions of its modules (`_metadata`): the same object where the names are plain already."""
    names = plain_names(state)
    if isinstance(state, OrderedDict) and all(plain == name for plain, name in names.items()):
        return state
    return with_versions({plain: state[name] for plain, name in names.items()}, state)


def with_versions(state: Mapping[str, Any], of: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """`state` with the `_metadata` of `of`, by the plain names of the modules: of a wrapper and what it wraps the latter's."""
    made: OrderedDict[str, Any] = OrderedDict(state)
    versions = getattr(of, "_metadata", None)
    if versions is not None:
        vars(made)["_metadata"] = OrderedDict((plain_name(path), told) for path, told in versions.items())
    return made


def stem_and_index(name: str) -> tuple[str, int]:
    """`model_2` -> (`model`, 2); `model` -> (`model`, 0)."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        raise ValueError(f"the name of a saved object must not be empty, got {name!r}")
    return found["stem"], int(found["index"] or 0)


def inner_optimizer(optimizer: Any) -> Any:
    """torch's own optimizer out of a wrapper that holds it in `optimizer`."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


class ParameterNames:
    """The models that were prepared, and what the parameters of each optimizer were called before. Both are held weakly."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._noted: weakref.WeakKeyDictionary[Any, Names] = weakref.WeakKeyDictionary()

    def note(self, models: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
        """Remember the optimizers' names while `models`, which are about to be prepared, still have the parameters that they had."""
        names = _names_of([*self._living(), *models])
        self._optimizers.update(inner_optimizer(optimizer) for optimizer in optimizers)
        for optimizer in self._optimizers:  # also one that was prepared before its model
            if all(id(p) in names for group in optimizer.param_groups for p in group["params"]):
                self._noted[optimizer] = _in_groups(optimizer, names)

    def add(self, models: Iterable[nn.Module]) -> None:
        """Remember prepared models, in the order of `prepare`."""
        for model in models:
            if all(known is not model for known in self._living()):
                self._models.append(weakref.ref(model))

    def of(self, optimizer: Any) -> Names:
        """The names of the optimizer's parameters, group by group: in the order of the user's own where FSDP1 has laid several into one."""
        inner = inner_optimizer(optimizer)
        names = _names_of(self._living())
        noted = self._noted.get(inner)
        if noted is not None and any(
            _is_flat(p) or id(p) not in names for group in inner.param_groups for p in group["params"]
        ):
            return noted
        return _in_groups(inner, names)

    def about(self, models: Iterable[nn.Module], optimizers: Iterable[Any]) -> list[Names]:
        """The names of each optimizer's parameters, group by group, while `models` are about to be prepared: nothing is remembered."""
        names = _names_of([*models, *self._living()])
        return [_in_groups(inner_optimizer(optimizer), names) for optimizer in optimizers]

    def models_of(self, optimizer: Any) -> list[nn.Module]:
        """The prepared models that have parameters in this optimizer."""
        ids = {id(p) for group in inner_optimizer(optimizer).param_groups for p in group["params"]}
        return [model for model in self._living() if any(id(p) in ids for p in model.parameters())]

    def clear(self) -> None:
        """Forget all of it."""
        self._models.clear()
        self._optimizers.clear()
        self._noted.clear()

    def _living(self) -> list[nn.Module]:
        return [model for ref in self._models if (model := ref()) is not None]


def _names_of(models: Iterable[nn.Module]) -> dict[int, tuple[int, list[str]]]:
    """Parameters by identity: the place of the first model that has them, and the name it gives them; a flat one of FSDP1 has several."""
    found: dict[int, tuple[int, list[str]]] = {}
    for place, model in enumerate(models):
        own = extract_model_from_parallel(model, keep_torch_compile=False)
        for name, parameter in own.named_parameters():
            names = [name]
            if _is_flat(parameter):
                names = [name.removesuffix("_flat_param") + inner for inner in parameter._fqns]
            found.setdefault(id(parameter), (place, [plain_name(one) for one in names]))
    return found


def _is_flat(parameter: Tensor) -> bool:
    """Whether it is one of FSDP1's, which holds several parameters of the user's."""
    return "_fqns" in vars(parameter)


def _in_groups(optimizer: Any, names: Mapping[int, tuple[int, list[str]]]) -> Names:
    groups: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
    places = sorted({names[id(p)][0] for group in groups for p in group if id(p) in names})
    several = len(places) > 1
    counted = 0
    result: Names = []
    for group in groups:
        called = []
        for parameter in group:
            place, own = names.get(id(parameter), (None, [f"parameter.{counted}"]))
            called += [f"model_{place}.{name}" if several and place is not None else name for name in own]
            counted += 1
        result.append(called)
    return result
