"""Small helpers for any Python object."""

from __future__ import annotations

import functools
import threading
from typing import Any


def recursive_getattr(obj: Any, attr: str) -> Any:
    """The attribute at a dotted path; AttributeError naming the first step that is missing."""
    return functools.reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """The qualified name of a function or class, or of an object's class."""
    for holder in (obj, type(obj)):
        for name in ("__qualname__", "__name__"):
            found = getattr(holder, name, None)
            if isinstance(found, str):
                return found
    return str(obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """`destination`, changed in place: the entries of `source` win, dictionaries are merged at every depth."""
    for key, value in source.items():
        if isinstance(value, dict):
            inner = destination.get(key)
            destination[key] = merge_dicts(value, inner if isinstance(inner, dict) else {})
        else:
            destination[key] = value
    return destination


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept anything and return None: what ranks call that must not run a function."""


class ThreadLocalSharedDict(threading.local):
    """A class attribute that is one dictionary per thread.

    >>> class Shared:
    ...     state = ThreadLocalSharedDict()
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._thread_local = thread_local
        self._storage: dict[Any, Any] = {}

    def __get__(self, instance: Any, owner: type | None = None) -> dict[Any, Any]:
        return self._storage

    def __set__(self, instance: Any, value: dict[Any, Any]) -> None:
        self._storage = value
