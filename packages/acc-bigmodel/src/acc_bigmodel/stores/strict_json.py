"""JSON from files that nobody vouches for: what is ambiguous or out of bounds is an error."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The content of a JSON text in UTF-8; ValueError for one that is none, that gives a name twice or has NaN for a number."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice!r} stands in it twice")
    return content


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number that a size can have")
