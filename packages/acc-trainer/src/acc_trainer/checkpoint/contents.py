"""What a checkpoint of a run consists of: its objects by kind and name, and which of them are those of a saved run.

[Note: how objects find each other] First by the names that the script gave (`name_for_checkpoints`, `register_for_checkpointing(ema=ema)`); what has
none goes by its place, in the order of `prepare`, with a check. An optimizer, a scheduler or a registered object must be of the class that was saved
in its place (its last name: modules are moved), a loader's data a stream or not, as they were. And nothing may be in another place than it was: what
is looked at is the class, for models the names and shapes of their weights, for optimizers the shapes of what they train, for schedulers which
optimizer they have, for loaders the class and number of samples of the data. Two objects that are alike in that cannot be told apart. A manifest
that says less (an older one) is compared in what it says. Files are called by the place in the run that saved them: `model`, `model_1`.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.utils.data import IterableDataset

from acc_ops.exchange import tried
from acc_ops.unwrap import extract_model_from_parallel
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
_TOLD_APART_BY = ("class", "shapes", "of", "data", "samples")  # of what a manifest tells
_OF_ONE_CLASS = ("optimizers", "schedulers", "custom")  # a state of another class is none for these
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
    of: str | None = None  # the optimizer of a scheduler

    @property
    def name(self) -> str:
        """What its files are called."""
        return numbered(KINDS[self.kind], self.place)

    def described(self) -> dict[str, Any]:
        """As the manifest tells of it."""
        told = {
            "name": self.name,
            "class": self.kind_of,
            "given": self.given,
            "shapes": self.shapes(),
            "of": self.of,
        }
        told.update(self._data())
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

    def _data(self) -> dict[str, Any]:
        """The class and the number of samples of a loader's data; no number for a stream."""
        dataset = getattr(self.own, "dataset", None) if self.kind == "loaders" else None
        if dataset is None:
            return {}
        samples, error = tried(lambda: _number_of_samples(dataset))
        if error is not None:  # a file that is closed by now, say: nothing is known, so nothing is compared
            return {}
        return {"data": type(dataset).__qualname__, "samples": samples}


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
    items: dict[str, list[Item]] = {}
    for kind, shelf in zip(KINDS, _SHELVES, strict=True):
        things = [(thing, _own(kind, thing, run)) for thing in getattr(run, shelf)]
        items[kind] = [
            Item(kind, place, class_name(own), thing, own, names.of(thing))
            for place, (thing, own) in enumerate(things)
        ]
    called = {id(item.own): item.given or item.name for item in items["optimizers"]}
    items["schedulers"] = [
        item._replace(of=called.get(id(_own("optimizers", getattr(item.own, "optimizer", None), run))))
        for item in items["schedulers"]
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

    CheckpointError, listing both, when the run has other objects than the checkpoint, or the same in another order without names (see the note).
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
    told = [item.described() for item in items]

    def refuse(why: str) -> CheckpointError:
        return CheckpointError(
            f"the {kind} of this run are not those of the checkpoint {folder}{why}: it holds {[_told(one) for one in saved]}, "
            f"this run has {[_told(one) for one in told]}; prepare and register the same objects in the same order, or give them names "
            "(name_for_checkpoints) before they are saved: what has a name takes the state of that name, whatever its class. A single state can be "
            "loaded by hand, from its file"
        )

    strangers = [items[at].given for at in ours if items[at].given and by_name]
    if len(ours) != len(theirs) or strangers:
        raise refuse(f", which knows no {strangers[0]!r}" if strangers else "")
    _check_places(kind, [told[at] for at in ours], [saved[place] for place in theirs], refuse)
    places.update(zip(ours, theirs, strict=True))
    return [item._replace(place=places[at]) for at, item in enumerate(items)]


def _check_places(
    kind: str,
    mine: list[dict[str, Any]],
    saved: list[dict[str, Any]],
    refuse: Callable[[str], CheckpointError],
) -> None:
    """Raise what `refuse` makes for an object of another class than the saved one in its place, and for one that was in another place."""
    known = [
        key
        for key in _TOLD_APART_BY
        if any(key in one for one in saved) and (kind, key) != ("loaders", "class")
    ]
    here, there = ([_facts(one, known) for one in entries] for entries in (mine, saved))
    for at, facts in enumerate(here):  # also where only some have moved, and the others are new
        if any(facts == other != here[place] and there[at] != facts for place, other in enumerate(there)):
            raise refuse(" in the same order")
    for one, other in zip(mine, saved, strict=True):
        if kind in _OF_ONE_CLASS and _last(one["class"]) != _last(other["class"]):
            raise refuse(
                f", which holds the state of a {_last(other['class'])} where this run has a {_last(one['class'])}"
            )
        if (
            kind == "loaders"
            and "data" in other
            and "data" in one
            and ("samples" in one) != ("samples" in other)
        ):
            raise refuse(": where one has a stream, the other has samples that can be counted")


def _facts(entry: Mapping[str, Any], keys: Iterable[str]) -> tuple[Any, ...]:
    return tuple(_last(entry[key]) if key == "class" else entry.get(key) for key in keys)


def _last(kind_of: str) -> str:
    """The class's own name: modules, and functions that classes are made in, may have been renamed."""
    return kind_of.rpartition(".")[2]


def _own(kind: str, thing: Any, run: Run) -> Any:
    """The user's own object, out of a wrapper of ours, of torch or of torch.compile."""
    if kind == "models":
        return run.strategy.unwrap(thing)
    if isinstance(thing, nn.Module):
        return extract_model_from_parallel(thing, keep_torch_compile=False)
    return getattr(thing, _INSIDE[kind], thing) if kind in _INSIDE else thing


def _number_of_samples(dataset: Any) -> int | None:
    if isinstance(dataset, IterableDataset):
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _told(entry: Mapping[str, Any]) -> str:
    given, shapes = entry.get("given"), entry.get("shapes")
    name = entry["class"] if given is None else f"{given}={entry['class']}"
    details = [f"shapes {shapes[:6]}"] if shapes is not None else []
    details += [f"of {entry['of']}"] if "of" in entry else []
    details += [f"{entry.get('samples', 'a stream')} of {entry['data']}"] if "data" in entry else []
    return f"{name} ({', '.join(details)})" if details else name


def _digest(parts: Iterable[Any]) -> str:
    text = "".join(map(repr, parts)).replace("_orig_mod.", "")  # torch.compile's, which is no part of a name
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
