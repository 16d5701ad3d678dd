"""A script, folder, zip file or module, run in this interpreter as `python` itself would run it.

[Note: a fresh __main__] `runpy` runs a program in a module that is gone when the program returns, which breaks what
still runs then (threads, exit handlers) and whoever looks `__main__` up. Here the program gets a new `__main__` that
stays, with the attributes that Python gives it (the table in the reference, "__main__ Special considerations").
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any, NamedTuple


class ProgramError(Exception):
    """The program cannot be started; `code` is the exit code that Python uses then."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Program(NamedTuple):
    """What is to be run: its code, and what `__main__` says about it."""

    code: CodeType
    name: str  # sys.argv[0]
    attributes: dict[str, Any]


def from_path(path: str) -> Program:
    """The program in a script, or in a folder or zip file with a `__main__`; puts its folder on `sys.path` as Python does.

    Raises ProgramError when there is none.
    """
    if pkgutil.get_importer(path) is not None:
        return _from_container(path)
    whole = _absolute(path)
    try:
        with io.open_code(whole) as stream:
            code = pkgutil.read_code(stream)  # None unless it is a .pyc file
            stream.seek(0)
            code = code or compile(stream.read(), whole, "exec", dont_inherit=True)
    except OSError as error:
        raise ProgramError(
            f"can't open file {whole!r}: [Errno {error.errno}] {error.strerror}", code=2
        ) from error
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    loader = importlib.machinery.SourceFileLoader("__main__", whole)
    return Program(code, path, {"__file__": whole, "__loader__": loader, "__cached__": None})


def from_module(name: str) -> Program:
    """The program that `python -m name` runs. Raises ProgramError when there is none."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            package, spec = name, importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                raise ProgramError(
                    f"No module named {package}.__main__; {package!r} is a package and cannot be directly executed",
                    1,
                )
    except ImportError as error:  # a parent is missing, or a module's main is not built
        raise ProgramError(
            f"Error while finding module specification for {name!r} ({error})", code=1
        ) from error
    if spec is None:
        raise ProgramError(f"No module named {name}", code=1)
    return _from_spec(spec, spec.origin or name)


def run(program: Program, arguments: Sequence[str]) -> None:
    """Run it as `__main__`; whatever it raises, SystemExit too, comes out."""
    main = ModuleType("__main__")
    vars(main).update({"__builtins__": builtins, "__annotations__": {}, **program.attributes})
    sys.argv[:] = [program.name, *arguments]
    sys.modules["__main__"] = main
    exec(program.code, vars(main))


def _absolute(path: str) -> str:
    return os.path.join(os.getcwd(), path)  # not normalised: Python does not do it either


def _from_container(path: str) -> Program:
    whole = _absolute(path)
    if getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path.insert(0, whole)
    else:
        sys.path[0] = whole
    spec = importlib.machinery.PathFinder.find_spec("__main__", [whole])
    if spec is None:
        raise ProgramError(f"can't find '__main__' module in {whole!r}", code=1)
    return _from_spec(spec, path)


def _from_spec(spec: importlib.machinery.ModuleSpec, name: str) -> Program:
    find_code = getattr(spec.loader, "get_code", None)
    code = find_code(spec.name) if find_code else None
    if code is None:
        raise ProgramError(f"No code object available for {spec.name}", code=1)
    attributes = {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__cached__": spec.cached,
        "__package__": spec.parent,
        "__spec__": spec,
    }
    return Program(code, name, attributes)
