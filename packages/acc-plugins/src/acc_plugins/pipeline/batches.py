"""The form of a batch that stages are cut for: every later batch has the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acc_plugins.pipeline.errors import PipelineError
from acc_plugins.pipeline.graph import split_inputs


class BatchForm:
    """What `example` (args and kwargs, args, kwargs or one tensor) is made of, and `rows` for each of the `microbatches`.

    PipelineError for tensors with different numbers of rows, and where the micro-batches do not divide them.
    """

    def __init__(self, example: Any, microbatches: int) -> None:
        self.spec, self.constants, tensors = split_inputs(*_as_call(example))
        self.microbatches = microbatches
        self.rows = _rows_of(tensors, microbatches)
        self._forms = _forms_of(tensors)
        self._tensors = tensors

    def one(self, device: torch.device) -> list[Tensor]:
        """The tensors of the example's first micro-batch."""
        return [tensor[: self.rows].to(device) for tensor in self._tensors]

    def given(self, args: Any, kwargs: Any, target: Any, device: torch.device) -> dict[str, Any]:
        """A batch and its target as named tensors. PipelineError for one of another form."""
        spec, constants, tensors = split_inputs(args, kwargs)
        forms = _forms_of(tensors)
        same = spec == self.spec and all(
            a is b or a == b for a, b in zip(constants, self.constants, strict=True)
        )
        if not same or forms != self._forms:
            raise PipelineError(
                f"this batch has another form than the example, for which the stages were cut: {forms} after the rows, the example had {self._forms}"
            )
        rows = _rows_of(tensors, self.microbatches)
        if rows != self.rows:
            raise PipelineError(
                f"a batch of {rows * self.microbatches} rows does not fit the stages, which were cut for {self.rows * self.microbatches}: use drop_last=True "
                "in the loader, or fill the batch up"
            )
        given = {f"batch_{number}": tensor.to(device) for number, tensor in enumerate(tensors)}
        if isinstance(target, Tensor):
            given["batch_target"] = target.to(device)
        elif target is not None:
            raise PipelineError(
                f"target must be a tensor with a row for each of the batch, got {type(target).__name__}"
            )
        return given


def _as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if (
        isinstance(example, tuple)
        and len(example) == 2
        and isinstance(example[0], tuple)
        and isinstance(example[1], Mapping)
    ):
        return example[0], dict(example[1])
    return (example if isinstance(example, tuple) else (example,)), {}


def _forms_of(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], str]]:
    """Of each its shape after the rows, and its format."""
    return [(tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]


def _rows_of(tensors: Sequence[Tensor], microbatches: int) -> int:
    """Rows of a micro-batch."""
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(rows) != 1 or 0 in rows:
        raise PipelineError(
            f"every tensor of a batch needs the same number of rows, got shapes {[tuple(tensor.shape) for tensor in tensors]}: put what is "
            "the same for all rows into the model"
        )
    (count,) = rows
    if count % microbatches:
        raise PipelineError(f"{count} rows cannot be cut into microbatches={microbatches} of the same size")
    return count // microbatches
