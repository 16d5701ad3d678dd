"""`KwargsHandler`: a bundle of keyword arguments for one call of torch."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

from acc_ops.options import environment_is


@dataclass
class KwargsHandler:
    """Base of the handler dataclasses: each field is a keyword argument of the call that it configures."""

    def to_dict(self) -> dict[str, Any]:
        """Every field and attribute, deep-copied."""
        return copy.deepcopy(
            {name: value for name, value in vars(self).items() if not name.startswith("_option_")}
        )

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from a default instance. Values that came from the environment count as differences."""
        with environment_is({}):
            plain = vars(type(self)())
        return {name: value for name, value in self.to_dict().items() if not _same(plain.get(name), value)}


def _same(first: Any, second: Any) -> bool:
    """Equality that also works for fields whose `==` gives no single truth (tensors, arrays)."""
    if dataclasses.is_dataclass(first) and type(first) is type(second):
        return all(_same(getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(first))
    try:
        return bool(first == second)
    except (TypeError, ValueError, RuntimeError):
        return first is second
