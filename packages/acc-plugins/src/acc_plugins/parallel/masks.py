"""Attention masks where a rank holds only its part of a sequence: what it was given, made to fit what attention will see."""

from __future__ import annotations

import torch
from torch import Tensor

from acc_plugins.parallel.exchange import Line


class SequenceError(ValueError):
    """Something that cannot be computed with the sequence split over ranks."""


def with_all_keys(mask: Tensor, keys: int, line: Line) -> Tensor:
    """`mask` (..., rows, keys) over the keys of all ranks, each of which holds `keys` of them.

    A mask that has them all, or one for all, stays; one row for all queries is joined. Raises SequenceError for a mask from local queries to local
    keys: nothing in it says what the other ranks' keys are to these queries.
    """
    columns = mask.shape[-1]
    if columns in (1, keys * line.size):
        return mask
    if columns == keys and (mask.dim() == 1 or mask.shape[-2] == 1):
        return line.join(mask, -1)
    raise SequenceError(
        f"this attention mask has shape {tuple(mask.shape)} and covers {columns} keys, but with the sequence split over {line.size} ranks there are "
        f"{keys * line.size}, of which {keys} are here: give a mask over all keys (this rank's rows, or all), a mask of keys alone (one row), or "
        "is_causal=True without a mask"
    )


def rows_here(mask: Tensor, rows: int, line: Line) -> Tensor:
    """The rows of this rank's `rows` queries, out of a mask that may have those of all ranks."""
    if mask.dim() > 1 and mask.shape[-2] == rows * line.size:
        return line.mine(mask, -2)
    return mask


def rows_of_all(mask: Tensor, rows: int, line: Line) -> Tensor:
    """The rows of the queries of all ranks, each of which has `rows`, out of a mask that may have only those here."""
    if mask.dim() > 1 and mask.shape[-2] == rows:
        return line.join(mask, -2)
    return mask


def causal(
    first: int, rows: int, keys: int, device: torch.device | None = None, window: int | None = None
) -> Tensor:
    """(rows, keys): True where the query at place `first` + row may see the key: its own place and before, the nearest `window` of them."""
    behind = torch.arange(first, first + rows, device=device)[:, None] - torch.arange(keys, device=device)
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def from_padding(
    present: Tensor, first: int, rows: int, *, is_causal: bool, window: int | None = None
) -> Tensor:
    """(batch, 1, rows, keys): what queries from place `first` on see, out of a padding mask (batch, keys), True for tokens.

    A query that sees nothing, which is padding itself, gets zeros from torch's attention.
    """
    seen = present[:, None, None, :].expand(-1, 1, rows, -1)
    if is_causal:
        seen = seen & causal(first, rows, present.shape[-1], present.device, window)
    return seen
