"""A weights map is any Mapping of names to tensors: the view of one on the part of a module, and what a map tells of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


class PrefixedDataset(Mapping[str, Tensor]):
    """The part of `dataset` under `prefix`, looked up without it.

    Iterating gives the full keys that have the prefix; `len` is that of the whole dataset. Writing works if the dataset
    can be written to.
    """

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.dataset[f"{self.prefix}{key}"] = value  # type: ignore[index]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return len(self.dataset)


def innermost(weights_map: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What a chain of PrefixedDataset looks into."""
    return home_of(weights_map, "")[0]


def home_of(weights_map: Mapping[str, Tensor], name: str) -> tuple[Mapping[str, Tensor], str]:
    """The map that a chain of PrefixedDataset looks into, and what it calls `name`."""
    while isinstance(weights_map, PrefixedDataset):
        name = f"{weights_map.prefix}{name}"
        weights_map = weights_map.dataset
    return weights_map, name


def lacks(weights_map: Mapping[str, Tensor], name: str) -> bool:
    """Whether the map says, without reading a value, that it has no such tensor."""
    if type(innermost(weights_map)).__contains__ is Mapping.__contains__:  # it would read the tensor
        return False
    return name not in weights_map


def is_writable(weights_map: Mapping[str, Tensor]) -> bool:
    """Whether values can be put into the map; a read-only map has no `__setitem__`."""
    return hasattr(type(innermost(weights_map)), "__setitem__")


def is_at_hand(home: Mapping[str, Tensor], key: str) -> bool | None:
    """Whether a map that is no PrefixedDataset says that reading would wait for nothing; None if it says nothing."""
    kind = type(home)
    if isinstance(home, dict) and kind.__getitem__ is dict.__getitem__ and not hasattr(kind, "__missing__"):
        return True
    ask = getattr(home, "is_at_hand", None)
    return None if ask is None else bool(ask(key))
