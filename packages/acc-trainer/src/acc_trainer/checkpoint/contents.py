"""What a checkpoint of a run consists of: its objects by kind and name, and which of them are those of a saved run.

[Note: how objects find each other] First by the names that the script gave (`name_for_checkpoints`, `register_for_checkpointing(ema=ema)`); what has
none goes by its place, in the order of `prepare`, with a check: the classes, and for models the names and shapes of their weights, for
optimizers the shapes of what they train, must not be those of the saved run in another order. Two objects of one class and the same shapes
that change places cannot be told apart. Files are called by the place in the run that saved them: `model`, `model_1`.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from acc_ops.world import World

from .layout import CheckpointError, class_name, numbered

KINDS = {
    "models": "model",
    "optimizers": "optimizer",
    "schedulers": "scheduler",
    "loaders": "loader",
    "custom": "custom",
}
_SHELVES = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")  # in the same order
_INSIDE = {"optimizers": "optimizer", "schedulers": "scheduler"}  # the user's own object in a wrapper of ours


class Run(Protocol):
    """What `save_state` and `load_state` use of an Accelerator."""

    step: int
    world: World
    strategy: Any
    precision: Any
    grad_sync: Any
    project_configuration: Any
    _models: list[Any]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]
    _save_model_state_pre_hook: Mapping[Any, Any]
    _load_model_state_pre_hook: Mapping[Any, Any]
    _background: Any  # background.Background, from the first save that does not block


class Item(NamedTuple):
    """One object to save: its place among those of its kind in the checkpoint, its class, itself, and the name it was given."""

    kind: str
    place: int
    kind_of: str
    thing: Any
    own: Any  # the user's own object in it
    given: str | None

    @property
    def name(self) -> str:
        """What its files are called."""
        return numbered(KINDS[self.kind], self.place)

    def described(self) -> dict[str, Any]:
        """As the manifest tells of it."""
        told = {"name": self.name, "class": self.kind_of, "given": self.given, "shapes": self.shapes()}
        return {key: value for key, value in told.items() if value is not None}

    def shapes(self) -> str | None:
        """A digest of what tells this object from others of its class; None where nothing does."""
        if self.kind == "models" and hasattr(self.own, "named_parameters"):
            named = (*self.own.named_parameters(), *self.own.named_buffers())
            return _digest((name, *tensor.shape) for name, tensor in named)
        if self.kind == "optimizers":
            groups = getattr(self.own, "param_groups", ())
            return _digest([tuple(p.shape) for p in group["params"]] for group in groups)
        return None

    def told(self, shapes: str | None = None) -> str:
        """As an error tells of it."""
        return _told({"class": self.kind_of, "given": self.given, "shapes": shapes})


class Contents(NamedTuple):
    """Everything of a run that a checkpoint holds."""

    models: list[Item]
    optimizers: list[Item]
    schedulers: list[Item]
    loaders: list[Item]
    custom: list[Item]

    def described(self) -> dict[str, list[dict[str, Any]]]:
        """Names and classes by kind, for the manifest."""
        return {kind: [item.described() for item in getattr(self, kind)] for kind in self._fields}

    def named_weights(self, left: Sequence[Any]) -> list[tuple[Any, str]]:
        """The models that hooks have left, each with the name of its weights: once a hook took some, the others are counted anew."""
        places = {id(item.thing): item.place for item in self.models}
        in_order = sorted(left, key=lambda model: places.get(id(model), len(places)))
        if len(left) == len(self.models):
            return [
                (model, numbered("model", places.get(id(model), at))) for at, model in enumerate(in_order)
            ]
        return [(model, numbered("model", at)) for at, model in enumerate(in_order)]


def collect(run: Run) -> Contents:
    """The objects of `run`, as they would be saved."""
    names = getattr(run, "_checkpoint_names", None) or Names()
    own: dict[str, Callable[[Any], Any]] = {"models": run.strategy.unwrap}
    items: dict[str, list[Item]] = {}
    for kind, shelf in zip(KINDS, _SHELVES, strict=True):
        inner = own.get(kind, _inside(kind))
        items[kind] = [
            Item(kind, place, class_name(inner(thing)), thing, inner(thing), names.of(thing))
            for place, thing in enumerate(getattr(run, shelf))
        ]
    return Contents(**items)


class Names:
    """The names that a script gave its objects. They are forgotten with the objects."""

    def __init__(self) -> None:
        self._given: list[tuple[Callable[[], Any], str]] = []

    def of(self, thing: Any) -> str | None:
        """The name of `thing`, None where it has none."""
        return next((name for held, name in self._given if held() is thing), None)

    def give(self, thing: Any, name: str) -> None:
        """Call `thing` so. ValueError for a name that another one has."""
        self._given = [(held, old) for held, old in self._given if held() is not None and held() is not thing]
        if any(old == name for _, old in self._given):
            raise ValueError(f"another object is called {name!r} in checkpoints already: choose another name")
        try:
            held: Callable[[], Any] = weakref.ref(thing)
        except TypeError:  # no weak references, as of a dict: what is registered lives as long as the run
            held = _Held(thing)
        self._given.append((held, name))


class _Held:
    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __call__(self) -> Any:
        return self.thing


def give_names(run: Any, named: Mapping[str, Any]) -> None:
    """Remember the names of prepared or registered objects; ValueError for any other object, and for a name that is taken."""
    if not named:
        return
    run._checkpoint_names = run._checkpoint_names or Names()
    contents = collect(run)
    known = [item for kind in contents._fields for item in getattr(contents, kind)]
    for name, thing in named.items():
        found = next((item for item in known if thing is item.thing or thing is item.own), None)
        if found is None:
            raise ValueError(
                f"name_for_checkpoints: {name}={type(thing).__name__} is not in this run's checkpoints: prepare() or "
                "register_for_checkpointing() it first"
            )
        run._checkpoint_names.give(found.thing, name)


def matched(contents: Contents, saved: Mapping[str, list[dict[str, Any]]], folder: object) -> Contents:
    """The objects of the run, each at the place that it has in the checkpoint.

    CheckpointError, listing both, when the run has other objects than the checkpoint, or the same in another order without names.
    """
    return Contents(
        **{
            kind: _placed(kind, items, saved[kind], folder) if kind in saved else items
            for kind, items in contents._asdict().items()
        }
    )


def check_same_objects(contents: Contents, saved: Mapping[str, list[dict[str, Any]]], folder: object) -> None:
    """The errors of `matched`."""
    matched(contents, saved, folder)


def _placed(kind: str, items: list[Item], saved: list[dict[str, Any]], folder: object) -> list[Item]:
    by_name = {entry["given"]: place for place, entry in enumerate(saved) if entry.get("given")}
    places = {at: by_name[item.given] for at, item in enumerate(items) if item.given in by_name}
    ours = [at for at in range(len(items)) if at not in places]
    theirs = [place for place in range(len(saved)) if place not in places.values()]
    shapes = {at: items[at].shapes() for at in ours}

    def refuse(why: str) -> CheckpointError:
        return CheckpointError(
            f"the {kind} of this run are not those of the checkpoint {folder}{why}: it holds {[_told(one) for one in saved]}, "
            f"this run has {[item.told(shapes.get(at)) for at, item in enumerate(items)]}; prepare and register the same objects in the "
            "same order, or give them names (name_for_checkpoints) before they are saved"
        )

    strangers = [items[at].given for at in ours if items[at].given and by_name]
    if len(ours) != len(theirs) or strangers:
        raise refuse(f", which knows no {strangers[0]!r}" if strangers else "")
    if kind != "loaders":
        classes = [items[at].kind_of for at in ours]
        exact = [(kind_of, shapes[at]) for at, kind_of in zip(ours, classes, strict=True)]
        saved_exact = [(saved[place]["class"], saved[place].get("shapes")) for place in theirs]
        for mine, others in ((classes, [kind_of for kind_of, _ in saved_exact]), (exact, saved_exact)):
            if mine != others and Counter(mine) == Counter(others):
                raise refuse(" in the same order")
    places.update(zip(ours, theirs, strict=True))
    return [item._replace(place=places[at]) for at, item in enumerate(items)]


def _inside(kind: str) -> Callable[[Any], Any]:
    attribute = _INSIDE.get(kind, "")
    return lambda thing: getattr(thing, attribute, thing) if attribute else thing


def _told(entry: Mapping[str, Any]) -> str:
    given, shapes = entry.get("given"), entry.get("shapes")
    name = entry["class"] if given is None else f"{given}={entry['class']}"
    return name if shapes is None else f"{name} (shapes {shapes[:6]})"


def _digest(parts: Iterable[Any]) -> str:
    made = hashlib.blake2b(digest_size=8)
    for part in parts:
        made.update(repr(part).encode())
    return made.hexdigest()
