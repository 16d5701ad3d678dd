"""A module of the interface: it holds nothing, and reads, writes and deletes where a name is defined.

[Note: one value, many doors] The interface shows a function under several dotted names, and the packages below bind
it with `from ... import` where they use it. Downstream libraries patch such names. A door therefore keeps no copy:
reading goes to the module that defines the name, and assigning sets the name there and in every module of ours that
holds the same object under that name, so that the code which uses it meets the new one.

Tools that patch (`unittest.mock`, pytest's monkeypatch) do not find the name in the door's `__dict__` and undo by
deleting. So deleting what was assigned through a door brings the value before it back; only a name that nobody
assigned is really deleted, where it is defined.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from acc_compat import names
from acc_compat.errors import NotBuiltAttributeError, not_built
from acc_compat.names import Home

_ABSENT = object()
_PAST = (
    "__past__"  # on the door that owns the names: name -> the values before the one it has now, oldest first
)


class Door(ModuleType):
    """One dotted name of the interface; `names.exports` says what it shows."""

    def __getattr__(self, name: str) -> Any:
        shown = names.exports(self.__name__)
        home = shown.get(name)
        if home is not None:
            return _read(home)
        if name == "__all__":
            return sorted(key for key, at in shown.items() if at.module and not key.startswith("_"))
        if f"{self.__name__}.{name}" in names.modules():
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        home = names.exports(self.__name__).get(name)
        if home is None:
            super().__setattr__(name, value)
        elif not (isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"):
            _assign(home, value)
        # else the import system binds utils.tqdm, the module: the function of that name is what is shown

    def __delattr__(self, name: str) -> None:
        home = names.exports(self.__name__).get(name)
        if home is None:
            super().__delattr__(name)
        else:
            _delete(home)

    def __dir__(self) -> list[str]:
        built = (key for key, home in names.exports(self.__name__).items() if home.module)
        return sorted({*vars(self), *built, *names.submodules(self.__name__)} - {_PAST})


def _definer(home: Home) -> ModuleType:
    """The module that has the name in its `__dict__`: ours, or the owning door for a name that is not built."""
    name = home.module or home.owner
    return sys.modules.get(name) or importlib.import_module(name)


def _past(home: Home) -> list[Any]:
    values: list[Any] = (
        vars(importlib.import_module(home.owner)).setdefault(_PAST, {}).setdefault(home.name, [])
    )
    return values


def _read(home: Home) -> Any:
    definer = _definer(home)
    if home.module is not None:
        return getattr(definer, home.attribute)
    if home.attribute in vars(definer):  # somebody has put one there
        return vars(definer)[home.attribute]
    raise NotBuiltAttributeError(not_built(home), name=home.name)


def _assign(home: Home, value: Any) -> None:
    past = _past(home)
    at = next((index for index, earlier in enumerate(past) if earlier is value), None)
    now = vars(_definer(home)).get(home.attribute, _ABSENT)
    _put(home, value)
    if at is not None:
        del past[at:]  # an earlier value is put back: what came after it is over
    elif now is not value:
        past.append(now)


def _delete(home: Home) -> None:
    now = _read(home)  # raises when there is nothing to delete
    past = _past(home)
    if past and past[-1] is not _ABSENT:
        _put(home, past.pop())
        return
    del vars(_definer(home))[home.attribute]
    if past:
        past.pop()
    else:
        past.append(now)


def _put(home: Home, value: Any) -> None:
    """Set the name where it is defined, and wherever else ours hold the object that it had."""
    definer = _definer(home)
    values = [*_past(home), vars(definer).get(home.attribute, _ABSENT)]
    held = next((found for found in reversed(values) if found is not _ABSENT), _ABSENT)
    vars(definer)[home.attribute] = value
    for holder in _modules_of_ours() if held is not _ABSENT and home.module else ():
        if vars(holder).get(home.attribute, _ABSENT) is held:
            vars(holder)[home.attribute] = value


def _modules_of_ours() -> Iterator[ModuleType]:
    ours = names.packages()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ours and isinstance(module, ModuleType):
            yield module
