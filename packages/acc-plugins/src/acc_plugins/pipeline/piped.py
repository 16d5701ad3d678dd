"""Which weights a pipeline trains: it has one part of them on each rank and saves them itself, so nobody may take that part for the whole."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_piped = WeakIdKeyDictionary()


class Piped:
    """What `Pipelined` is, for those who do not load it."""


def mark_piped(parameters: Iterable[Tensor]) -> None:
    """These belong to a pipeline from now on."""
    for parameter in parameters:
        _piped[parameter] = True


def any_piped(parameters: Iterable[Tensor]) -> bool:
    """Whether a pipeline trains one of them."""
    return bool(_piped) and any(parameter in _piped for parameter in parameters)
