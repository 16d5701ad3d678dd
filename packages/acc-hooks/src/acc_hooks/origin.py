"""What a placeholder knows of the weight it stands for, and what is said where it cannot stand in."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from torch import Tensor

ORIGIN = "_acc_offloaded"  # in the instance dictionary of a placeholder, beside what users hung on the weight


class OffloadedWeightError(RuntimeError):
    """A weight that is offloaded was asked for something only a weight that stays can do."""


@dataclass(frozen=True, kw_only=True)
class Loan:
    """The real tensor of a placeholder, for who computes with it: 1 `settle` after each use 2 `end`."""

    tensor: Tensor  # on the device that the weight's module runs on
    settle: Callable[[], None]  # brings home what was written to it
    end: Callable[[], None]  # may be called twice
    can_be_kept: bool  # until the outermost forward ends; else for one use


Home = Tensor | tuple[Mapping[str, Tensor], str]  # a tensor that stays, or a weights map and a key in it


class Source(Protocol):
    """Who can give and take the value behind a placeholder. Each says None or False to one that is not its own."""

    def _lend(self, placeholder: Tensor) -> Loan | None:
        """The real tensor where the weight's module runs."""

    def _value_behind(self, placeholder: Tensor) -> Tensor | None:
        """The real tensor where it is kept."""

    def _home_behind(self, placeholder: Tensor) -> Home | None:
        """Where the real tensor is kept; nothing is read."""

    def _write_behind(self, placeholder: Tensor, value: Tensor) -> bool:
        """Bring a new value home."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a tensor was made that shares its weight's memory: `func(*args)`, and where in the result it is."""

    func: Callable[..., Any]
    args: tuple[Any, ...]  # with placeholders in it
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[int, ...] = ()  # indices into nested tuples
    is_whole: bool = False  # it is the weight itself, in another dtype or without its history


@dataclass(kw_only=True)
class Origin:
    """Sources are held weakly: a placeholder keeps no hook alive."""

    name: str
    sources: list[weakref.ref[Source]] = field(default_factory=list)
    recipe: Recipe | None = None
    stored: Any = None  # what is copied and pickled for it, so that it comes back as a placeholder
    refuses_gradient: bool = False  # the placeholder itself does
    settled: Callable[[], Tensor] | None = None  # gives what the weight became when its hook was removed

    def living_sources(self) -> list[Source]:
        return [source for reference in self.sources if (source := reference()) is not None]


class RefuseGradient:
    """Stops a backward pass that would leave a gradient on a copy nobody keeps."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, gradient: Tensor | None = None) -> NoReturn:  # noqa: ARG002
        raise OffloadedWeightError(
            f"{self._name} is offloaded: it cannot be trained, its gradient would be lost with the copy the forward used. "
            "Call requires_grad_(False) on the weights that are not trained, and keep those that are on their device"
        )


class _StoredForm(threading.local):
    """The placeholder that this thread copies or pickles as one, and what is stored for it."""

    placeholder: Tensor | None = None
    stored: Any = None

    def of(self, placeholder: Tensor) -> Any:
        """None for a placeholder that is copied as its real value."""
        return self.stored if self.placeholder is placeholder else None


stored_form = _StoredForm()


def origin_of(value: Any) -> Origin | None:
    """The origin of a placeholder; None for anything else."""
    return vars(value).get(ORIGIN) if isinstance(value, Tensor) else None


def root_of(placeholder: Tensor) -> Tensor | None:
    """The placeholder that a module was given, of which this one is the whole; None for a view of a part."""
    origin = origin_of(placeholder)
    while origin is not None and origin.recipe is not None:
        if not origin.recipe.is_whole:
            return None
        placeholder = origin.recipe.args[0]
        origin = origin_of(placeholder)
    return placeholder


def is_settled(tensor: Any) -> bool:
    """Whether this is a placeholder whose hook was removed, or a view of one: it stands for a tensor that stays."""
    origin = origin_of(tensor)
    if origin is None:
        return False
    if origin.recipe is not None:
        return any(map(is_settled, (*origin.recipe.args, *origin.recipe.kwargs.values())))
    return origin.settled is not None and not origin.living_sources()


def refuse_call(name: str, call: str) -> OffloadedWeightError:
    """A call that would take the weight out of its weights map, or change its shape there."""
    return OffloadedWeightError(
        f"{name} is offloaded and stays where its weights map keeps it: {call!r} cannot move or reshape it. Write to it "
        "inside `with align_module_device(module)`; to move, fill or offload the model anew, call "
        "remove_hook_from_module(model, recurse=True) first"
    )


def refuse_orphan(name: str) -> OffloadedWeightError:
    """The hook that could bring the value is gone, or serves another tensor under this name now."""
    return OffloadedWeightError(
        f"{name} is offloaded, and the hook that brings its value is gone: keep the model as long as you use its weights, "
        "and take them from it anew after a hook was removed or the model was copied"
    )


def refuse_twice(name: str) -> ValueError:
    """Another hook offloads this weight."""
    return ValueError(
        f"{name} is offloaded already, by a hook that is there: call remove_hook_from_module(model, recurse=True) first, "
        "which brings the weights back"
    )
