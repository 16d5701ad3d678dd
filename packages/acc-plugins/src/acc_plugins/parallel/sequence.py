"""Sequence parallelism: batches cut along the sequence as a loader hands them out."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from acc_plugins.parallel.exchange import Line, line_of
from acc_plugins.parallel.inputs import shifted
from acc_plugins.parallel.masks import SequenceError
from acc_plugins.parallel.reach import Reach


def split_batch(batch: Any, line: Line) -> Any:
    """A mapping of tensors (batch, time, ...) with this rank's places of each; `labels` become `shift_labels`, shifted before the cut.

    The length is that of `input_ids` (else of `inputs_embeds`, else of the first tensor with two dimensions); tensors of another length and
    values that are no tensors stay whole. Without `position_ids` they are added. Raises SequenceError for a length the ranks do not divide, and
    TypeError for what is no mapping.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"sequence parallelism cuts batches that are mappings of names to tensors, got {type(batch).__name__}: let the collate function return a "
            "dict with input_ids, and labels"
        )
    length = _length(batch)
    if length % line.size:
        raise SequenceError(
            f"a batch of {length} places cannot be cut for {line.size} ranks: fill sequences up to a multiple of {line.size} in the collate function "
            "(pad_to_multiple_of), with labels of -100"
        )
    whole: dict[Any, Any] = dict(batch)
    if isinstance(whole.get("labels"), Tensor):
        labels = whole.pop("labels")
        whole.setdefault("shift_labels", shifted(labels))
    if "position_ids" not in whole:
        like = next(one for one in whole.values() if _has(one, length))
        whole["position_ids"] = torch.arange(length, device=like.device)[None].expand(like.shape[0], -1)
    cut = {
        key: line.mine(value, 1).contiguous() if _has(value, length) else value
        for key, value in whole.items()
    }
    return _like(batch, cut)


def _length(batch: Mapping[Any, Any]) -> int:
    names = [*(name for name in ("input_ids", "inputs_embeds") if name in batch), *batch]
    for name in names:
        value = batch[name]
        if isinstance(value, Tensor) and value.dim() > 1:
            return int(value.shape[1])
    raise SequenceError(
        f"no tensor of a batch with {', '.join(map(str, batch)) or 'nothing'} has a sequence, as in (batch, time)"
    )


def _has(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length


def _like(original: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    kind: Any = type(original)
    if kind is dict:
        return content
    try:
        return kind(content)
    except TypeError:
        return content


def split_loader(loader: Any, mesh: DeviceMesh, reach: Reach) -> SplitLoader:
    """`loader` with batches cut for the ranks of `sp`; the attention that is reached is told how long they are. One that cuts already is the result."""
    made = loader if isinstance(loader, SplitLoader) else SplitLoader(loader, line_of(mesh, "sp"))
    made.tell(reach)
    return made


class SplitLoader:
    """A loader whose batches are cut; anything else is that of the loader inside."""

    def __init__(self, loader: Any, line: Line) -> None:
        self.loader = loader
        self._line = line
        self._reaches: weakref.WeakSet[Reach] = weakref.WeakSet()

    def tell(self, reach: Reach) -> None:
        """Let the attention of a model know how long the parts are."""
        self._reaches.add(reach)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            cut = split_batch(batch, self._line)
            for reach in self._reaches:  # loops read ahead, so the lengths of earlier batches count, too
                reach.attention.lengths.add(_length(cut))
            yield cut

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # a copy asks before there is one
            raise AttributeError(name)
        return getattr(self.loader, name)
