"""The process's environment: typed reads, changes that are undone, and what a launcher tells a CPU process."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from acc_ops.lazy import LazyLogger
from acc_ops.option_text import truth_of

T = TypeVar("T")
logger = LazyLogger(__name__)

_OWN_PREFIX = "ACCELERATE_"
_UNSAFE = (";", "\n", "<", ">", " ")  # in a file of variables a shell would read these as more than text


@dataclass
class CPUInformation:
    """Who this process is in a CPU launch."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def str_to_bool(value: str | bool, to_bool: bool = False) -> int | bool:
    """1 or 0 (True or False with `to_bool`) for a word of yes or no, in any case; ValueError for any other."""
    truth = truth_of(str(value))
    return truth if to_bool else int(truth)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A boolean variable; `default` when it is not set. ValueError, with the name, for a word that is no boolean."""
    text = os.environ.get(key)
    if text is None:
        return bool(default)
    try:
        return truth_of(text)
    except ValueError as error:
        raise ValueError(f"environment variable {key}: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """A text variable; `str(default)` when it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: list[str] | tuple[str, ...], default: int) -> int:
    """The first of the variables that holds a number of at least 0, else `default`. ValueError, with the name, for text that is no number."""
    for key in env_keys:
        text = os.environ.get(key)
        if text is None:
            continue
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"environment variable {key} must be a whole number, got {text!r}") from None
        if number >= 0:
            return number
    return default


def get_cpu_distributed_information() -> CPUInformation:
    """Rank and size, of the world and of this machine, from torchrun's, PMI's, OpenMPI's or MVAPICH's variables."""
    return CPUInformation(
        rank=get_int_from_env(("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"), 0),
        world_size=get_int_from_env(
            ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"), 1
        ),
        local_rank=get_int_from_env(
            ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"), 0
        ),
        local_world_size=get_int_from_env(
            (
                "LOCAL_WORLD_SIZE",
                "MPI_LOCALNRANKS",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
                "MV2_COMM_WORLD_LOCAL_SIZE",
            ),
            1,
        ),
    )


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables (names upper-cased, values as text) inside the block; afterwards all of them are as before.

    The environment is the process's: blocks that overlap in several threads restore what they found, which may be another block's.
    """
    wanted = {key.upper(): str(value) for key, value in kwargs.items()}
    before = {key: os.environ.get(key) for key in wanted}
    try:
        os.environ.update(wanted)
        yield
    finally:
        _restore(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """An empty environment inside the block; afterwards it is exactly as before, whatever the block set. See `patch_environment` on threads."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorator: ACCELERATE_* variables are after the call as they were before it.

    For a function, or for a class: then for its `test*` methods and its subclasses'.
    """
    if isinstance(func_or_cls, type):
        _purge_class(func_or_cls)
        return func_or_cls
    wrapped: T = _purged(func_or_cls)
    return wrapped


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """`KEY=value\\n` lines for a file of variables. Entries that are empty or hold one of `;`, newline, `<`, `>`, space are left out, with a warning."""
    lines = []
    for key, value in current_env.items():
        if key and value and not any(character in key + value for character in _UNSAFE):
            lines.append(f"{key}={value}\n")
        else:
            logger.warning(
                "left out the environment variable %r: it is empty or has a character a shell would read", key
            )
    return lines


def _purge_class(cls: Any) -> None:
    for name, member in list(vars(cls).items()):
        if name.startswith("test") and inspect.isfunction(member):
            setattr(cls, name, _purged(member))
    inherited = cls.__dict__.get("__init_subclass__")

    def wrap_subclass(subclass: type, **kwargs: Any) -> None:
        if isinstance(inherited, classmethod):
            inherited.__get__(None, subclass)(**kwargs)
        else:
            super(cls, subclass).__init_subclass__(**kwargs)
        for name, member in list(vars(subclass).items()):
            if name.startswith("test") and inspect.isfunction(member):
                setattr(subclass, name, _purged(member))

    setattr(cls, "__init_subclass__", classmethod(wrap_subclass))  # noqa: B010  mypy takes no assignment here


def _purged(func: Any) -> Any:
    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with _own_variables_restored():
                return await func(*args, **kwargs)

        return awaited

    @functools.wraps(func)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _own_variables_restored():
            return func(*args, **kwargs)

    return called


@contextmanager
def _own_variables_restored() -> Iterator[None]:
    before = {key: value for key, value in os.environ.items() if key.startswith(_OWN_PREFIX)}
    try:
        yield
    finally:
        new = [key for key in os.environ if key.startswith(_OWN_PREFIX) and key not in before]
        _restore({**dict.fromkeys(new), **before})


def _restore(before: Mapping[str, str | None]) -> None:
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
