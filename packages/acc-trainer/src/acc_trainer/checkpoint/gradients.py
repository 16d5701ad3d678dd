"""The gradients of an open accumulation window: of one rank, by name, so that a resumed window is the same window.

[Note: half a window] Between the micro-batches of a window this rank's gradients are its own sum, which no other rank has and no other
file holds, whether a parameter shows it as its `grad` or a strategy holds it back. A checkpoint taken there keeps it, one file per rank.
Another number of ranks cannot share the sums out again, nor can a strategy that lays gradients out in another way: the half window is then
left out, and the load says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from acc_ops.callers import warn_caller
from acc_plugins.strategies.gradients import GradientPlace, OfParameter, of_parameters
from acc_plugins.support import UnsupportedError

from .contents import Contents, Run
from .layout import CheckpointError

LOST = "the micro-batches of the accumulation window in which it was saved (the next one begins a new window)"


class Gradients(TypedDict):
    """What the file of one rank holds."""

    layouts: dict[str, str]  # object name -> how its strategy lays gradients out
    gradients: dict[str, dict[str, Any]]  # object name -> name of the place -> what lay there
    out_of_reach: dict[str, str]  # object name -> why nobody could take all of its gradients


def window_is_open(grad_sync: Mapping[str, Any]) -> bool:
    """Whether the state of a `GradSync` lies between two micro-batches of one window, or behind one that was broken off: a step may still come."""
    return int(grad_sync.get("index", 0)) > 0 or bool(grad_sync.get("broken", False))


def gradients_of(run: Run, contents: Contents) -> Gradients:
    """This rank's gradients as they are. What cannot be taken is named in a warning: a resumed run will lack it."""
    out_of_reach: dict[str, str] = {}
    found: dict[str, dict[str, Any]] = {}
    for owner, name, place in _places(run, contents, out_of_reach):
        if (gradient := place.take()) is not None:
            found.setdefault(owner, {})[name] = gradient
    for owner, why in out_of_reach.items():
        warn_caller(
            f"the checkpoint will lack the micro-batches of the open accumulation window: gradients of {owner} are out of reach ({why}). Save "
            "between two windows, when accelerator.sync_gradients is True"
        )
    return Gradients(layouts=_layouts(run, contents), gradients=found, out_of_reach=out_of_reach)


def scales(run: Run) -> bool:
    """Whether the gradients of `run` are scaled, as fp16's are."""
    scaler = run.precision.scaler
    return scaler is not None and bool(scaler.is_enabled())


def why_lost(run: Run, contents: Contents, saved: Gradients, *, scaled: bool) -> str | None:
    """Why the half window cannot go on in this run; None where it can. The same on all ranks. `scaled`: whether it was saved with a scale."""
    if scaled != scales(run):
        was, now = ("scaled", "none are") if scaled else ("not scaled", "they are")
        return f"its gradients were {was} as fp16 has them, in this run {now}"
    for owner, why in saved["out_of_reach"].items():
        return f"gradients of {owner} were out of reach: {why}"
    for owner, layout in _layouts(run, contents).items():
        if saved["layouts"].get(owner, layout) != layout:
            return f"it was saved with {saved['layouts'][owner]} for {owner}, now it is {layout}"
    return None


def check_gradients(run: Run, contents: Contents, saved: Gradients, path: Path) -> None:
    """CheckpointError when the run has no place for a saved gradient, or one of another shape."""
    places = {(owner, name): place for owner, name, place in _places(run, contents, {})}
    for owner, named in saved["gradients"].items():
        for name, gradient in named.items():
            place = places.get((owner, name))
            what = "no such parameter" if place is None else place.misfit(gradient)
            if what is not None:
                part = gradient["part"] if isinstance(gradient, Mapping) else gradient
                raise CheckpointError(
                    f"{path} holds a gradient of shape {tuple(part.shape)} for {name} of {owner}, this run has {what}"
                )


def give_gradients(run: Run, contents: Contents, saved: Gradients | None) -> None:
    """Every place gets its saved gradient, or nothing."""
    gradients = {} if saved is None else saved["gradients"]
    for item in contents.models:
        run.strategy.note_held(item.thing, saved is not None)
    for owner, name, place in _places(run, contents, {}):
        place.give(gradients.get(owner, {}).get(name))


def _layouts(run: Run, contents: Contents) -> dict[str, str]:
    return {item.name: run.strategy.gradient_layout(item.thing) for item in contents.models}


def _places(
    run: Run, contents: Contents, out_of_reach: dict[str, str]
) -> Iterator[tuple[str, str, GradientPlace]]:
    """Parameters once each: of models by their own names, others that only an optimizer knows by their place in it."""
    seen: set[int] = set()
    for item in contents.models:
        try:
            places = run.strategy.gradient_places(item.thing)
        except UnsupportedError as error:
            out_of_reach[item.name] = str(error)
            places = of_parameters(run.strategy.unwrap(item.thing))
        for name, place in places.items():
            if not (isinstance(place, OfParameter) and seen.issuperset(map(id, place.parameters))):
                yield item.name, name, place
        seen.update(id(parameter) for place in places.values() for parameter in place.parameters)
    for item in contents.optimizers:
        groups = getattr(item.thing, "param_groups", ())
        for number, parameter in enumerate(p for group in groups for p in group["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield item.name, str(number), OfParameter(parameter)
