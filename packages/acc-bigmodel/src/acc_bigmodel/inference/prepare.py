"""A model whose forward goes through a pipeline of processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from acc_bigmodel.inference.pipeline import Pipeline, share
from acc_bigmodel.inference.tracing import rows_of
from acc_ops.arguments import whole_number
from acc_ops.batches import pad_input_tensors
from acc_ops.collectives import broadcast
from acc_ops.exchange import tried
from acc_ops.optional import is_pippy_available
from acc_ops.tree import (
    flatten,
    get_data_structure,
    initialize_tensors,
    recursively_apply,
    send_to_device,
    unflatten,
)
from acc_ops.world import World, current_world


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Let each process of the current world run some of the layers of `model`, for inference; returns the model.

    Every process calls this with the same model, and then the model: rank 0's inputs are used, cut along their first dimension
    into at most `num_chunks` micro-batches (default: as many as processes), and the last rank returns the output, with
    `gather_output` all do; otherwise the others return None. No gradients are kept. Stages begin at the modules
    `split_points`, one fewer than processes; "auto" splits evenly by bytes (`generate_device_map`). The layers of this
    process are moved to its device; the others stay where they are and are not read. With examples, a whole batch,
    torch.export runs now, otherwise in the first forward; again for inputs of another shape, but not for a batch of up to half
    as many rows.

    Sets `hf_split_points`, `pippy_stage` (a `Pipeline`), `_original_forward` and `_original_call`. Undo it with
    `model.forward = model._original_forward`.

    Raises on every rank: ValueError for split points that do not fit, for inputs without a batch size and for offloaded models;
    TypeError for inputs or outputs, such as caches, that hide tensors; PipelineError where torch.export cannot take the
    model, or another rank's stage failed, whose own error is raised there; ImportError below torch 2.4.
    """
    if not is_pippy_available():
        raise ImportError("a pipeline needs torch 2.4 or later: pip install --upgrade torch")
    chunks = current_world().size if num_chunks is None else whole_number(num_chunks, "num_chunks")
    pipeline = Pipeline(model, split_points, chunks, no_split_module_classes)
    if len(example_args) or example_kwargs:
        pipeline.prepare(example_args, example_kwargs or {})
    original = pipeline.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return pippy_forward(pipeline.step, chunks, gather_output, *args, **kwargs)

    # names that scripts and libraries look for
    model._original_forward = original  # type: ignore[assignment]
    model._original_call = model.__call__  # type: ignore[assignment]
    model.pippy_stage = pipeline  # type: ignore[assignment]
    model.hf_split_points = pipeline.split_points  # type: ignore[assignment]
    model.forward = forward
    return model


def build_pipeline(
    model: nn.Module,
    split_points: str | Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_chunks: int,
) -> Pipeline:
    """This rank's `Pipeline`, traced for a batch like `args` and `kwargs`; its `step` runs the GPipe schedule."""
    pipeline = Pipeline(model, split_points, whole_number(num_chunks, "num_chunks"))
    pipeline.prepare(args, kwargs or {})
    return pipeline


def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any
) -> Any:
    """One forward of a pipeline through `forward`, the `step` of a `Pipeline` or of one of torch's schedules.

    Rank 0 feeds the inputs, padded with zeros to a multiple of `num_chunks` where `forward` does not do that itself, and the
    last rank returns the output without the padding; the others None, or, with `gather_output`, the same. Raises ValueError
    on every rank where rank 0 has no batch size.
    """
    world = current_world()
    if isinstance(getattr(forward, "__self__", None), Pipeline):
        output = forward(*args, **kwargs)
    else:
        output = _padded_forward(world, forward, num_chunks, args, kwargs)
    return _from_last(world, output) if gather_output else output


def _padded_forward(
    world: World,
    forward: Callable[..., Any],
    num_chunks: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    rows, error = tried(lambda: rows_of(args, kwargs)) if world.is_main else (0, None)
    batch = share(world, rows, error)[0]
    padded = batch + -batch % num_chunks
    if world.is_main:
        args, kwargs = recursively_apply(
            lambda leaf: pad_input_tensors(leaf, batch, num_chunks), (tuple(args), dict(kwargs))
        )
        output = forward(*args, **kwargs)
    else:
        output = forward()
    if not world.is_last:
        return None
    return recursively_apply(
        lambda leaf: leaf[:batch] if leaf.ndim and leaf.shape[0] == padded else leaf, output
    )


def _from_last(world: World, output: Any) -> Any:
    """The last rank's output, on every rank."""
    if world.size == 1:
        return output
    shapes = share(world, get_data_structure(output) if world.is_last else None, None)[-1]
    if not world.is_last:
        output = send_to_device(initialize_tensors(shapes), world.device)
    leaves, structure = flatten(output)
    return unflatten(structure, broadcast(leaves, world.size - 1, world))
