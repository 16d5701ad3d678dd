"""Numbers and tables for people. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def in_units(nbytes: float) -> str:
    """Bytes for people: 1536 is "1.5 KiB"."""
    if nbytes < 1024:
        return f"{int(nbytes)} B"
    power = min(int(math.log2(nbytes) // 10), 5)
    return f"{nbytes / 1024**power:.1f} {' KMGTP'[power]}iB"


def aligned(rows: Sequence[tuple[str, ...]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table whose first row is its head; columns in `right` end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
