"""One micro-batch of a model as a graph, cut into stages: what goes in, what comes out, and torch's Pipe in between.

[Note: rows and the rest]
Tensors of an input whose first dimension is the batch size are its rows: they are cut into micro-batches. Others (a position bias, a
number) are the same for all micro-batches. The same holds for what comes out. torch's pipelining sees tuples of tensors only, with one
more dimension in front: the micro-batch, along which it cuts and joins; nesting, flags and numbers around them are put back here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acc_hooks.tensors import owner_of, put_tensor
from acc_ops.batches import ignorant_find_batch_size
from acc_ops.optional import require
from acc_ops.tree import Structure, flatten, leaves_with_paths, recursively_apply, unflatten

INPUT = -1  # in the place of a stage: the inputs of the model


class PipelineError(RuntimeError):
    """A model cannot be a pipeline, or a stage of one failed; every rank raises it."""


class OpaqueError(TypeError):
    """Something that may hide tensors goes into a model or comes out of it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The inputs of one micro-batch without their values. Can be pickled."""

    template: Any  # (args, kwargs) with tensors on meta, rows included
    is_row: tuple[bool, ...]  # for every tensor
    rows: int  # in a micro-batch
    training: bool

    def key(self) -> Any:
        """Equal for layouts that have one graph."""
        leaves, structure = flatten(self.template)
        others = [
            (where, type(leaf), leaf)
            for where, leaf in leaves_with_paths(self.template)
            if not isinstance(leaf, Tensor)
        ]
        shapes = [
            (tuple(leaf.shape[is_row:]), leaf.dtype) for leaf, is_row in zip(leaves, self.is_row, strict=True)
        ]
        return structure.key, self.is_row, tuple(shapes), tuple(others), self.training

    def with_rows(self, rows: int) -> Layout:
        """The same with micro-batches of another size."""
        leaves, structure = flatten(self.template)
        resized = [
            leaf.new_empty((rows, *leaf.shape[1:])) if is_row else leaf
            for leaf, is_row in zip(leaves, self.is_row, strict=True)
        ]
        return Layout(
            template=unflatten(structure, resized), is_row=self.is_row, rows=rows, training=self.training
        )

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], chunks: int) -> list[Tensor]:
        """The tensors of a batch, each as (micro-batch, *shape in a micro-batch): rows filled up with zeros at the end."""
        leaves, _ = flatten((tuple(args), dict(kwargs)))
        ready = []
        for leaf, is_row in zip(leaves, self.is_row, strict=True):
            if not is_row:
                ready.append(leaf.expand(chunks, *leaf.shape))
                continue
            missing = chunks * self.rows - leaf.shape[0]
            whole = torch.cat([leaf, leaf.new_zeros((missing, *leaf.shape[1:]))]) if missing else leaf
            ready.append(whole.unflatten(0, (chunks, self.rows)))
        return ready


def find_pippy_batch_size(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> int | None:
    """The first dimension of the first tensor in `args`, then in `kwargs`, that has one; None without one."""
    found = ignorant_find_batch_size(list(args or ()))
    return ignorant_find_batch_size(dict(kwargs or {})) if found is None else found


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The batch size. Raises ValueError where there is none."""
    batch = find_pippy_batch_size(args, kwargs)
    if not batch:
        said = [type(value).__name__ for value in args]
        said += [f"{name}={type(value).__name__}" for name, value in kwargs.items()]
        raise ValueError(
            "a pipeline cuts its inputs into micro-batches, but no batch size is to be found: give at least one tensor "
            f"whose first dimension is the batch, with a row or more; got ({', '.join(said)})"
        )
    return batch


def lay_out(
    args: Sequence[Any], kwargs: Mapping[str, Any], chunks: int, training: bool
) -> tuple[Layout, int]:
    """The layout of a batch cut into `chunks` micro-batches, and the rows of the whole batch.

    Raises ValueError where there is no batch size, TypeError for what is neither a tensor, a container, nor a plain value.
    """
    batch = rows_of(args, kwargs)
    inputs = (tuple(args), dict(kwargs))
    refuse_opaque(inputs, "input")
    leaves, _ = flatten(inputs)
    template = recursively_apply(lambda leaf: torch.empty_like(leaf, device="meta"), inputs)
    is_row = tuple(leaf.ndim > 0 and leaf.shape[0] == batch for leaf in leaves)
    layout = Layout(template=template, is_row=is_row, rows=batch, training=training)
    return layout.with_rows(-(-batch // chunks)), batch


def refuse_opaque(data: Any, root: str) -> None:
    """Raise OpaqueError for leaves that may hide tensors, such as a cache."""
    for where, leaf in leaves_with_paths(data, root):
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise OpaqueError(
                f"{where} is a {type(leaf).__name__}, which a pipeline can neither cut nor send: only tensors, containers and "
                "plain values go through one (transformers models: pass use_cache=False)"
            )


class Traced:
    """A model cut into stages for one layout, and the module of one of them."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        split_points: Sequence[str],
        layout: Layout,
        stage: int,
    ) -> None:
        self.layout = layout
        recorder = _Recorder(forward, layout)
        pipe = _trace(_Flat(model, recorder), split_points, recorder.examples())
        if pipe.num_stages != len(split_points) + 1:
            raise PipelineError(
                f"cutting {type(model).__name__} at {list(split_points)} gives {pipe.num_stages} stages, not "
                f"{len(split_points) + 1}: each of these modules must run exactly once in a forward, after the first layer"
            )
        takes, self.positions = _wiring(pipe.split_gm.graph)
        self.edges = sorted({(s, t) for t, taken in enumerate(takes) for s, _ in taken if s != INPUT})
        self.takes = takes[stage]
        self.gives = {
            target: [position for source, position in taken if source == stage]
            for target, taken in enumerate(takes)
            if any(source == stage for source, _ in taken)
        }
        self.module: torch.fx.GraphModule = pipe.get_stage_module(stage)
        _share_tensors(self.module, model)
        made = recursively_apply(
            lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), recorder.structure.template
        )
        self.structure, self.is_row = flatten(made)[1], recorder.is_row

    @property
    def has_only_rows(self) -> bool:
        """Whether every tensor that comes out is cut like the batch."""
        return all(self.is_row)

    def outputs(self, leaves: Sequence[Tensor], batch: int) -> Any:
        """What the model returns for a batch, from what its micro-batches gave, one after the other.

        Raises PipelineError for a tensor that is not cut like the batch and is not the same for every micro-batch.
        """
        whole = []
        places = [
            where
            for where, leaf in leaves_with_paths(self.structure.template, "output")
            if isinstance(leaf, Tensor)
        ]
        ordered = [leaves[position] for position in self.positions]  # each (micro-batch, *shape)
        for leaf, is_row, where in zip(ordered, self.is_row, places, strict=True):
            if is_row:
                whole.append(leaf.flatten(0, 1)[:batch])
                continue
            if not torch.allclose(leaf, leaf[:1].expand_as(leaf), rtol=0, atol=0, equal_nan=True):
                raise PipelineError(
                    f"{where} has no row for each of the batch and differs between micro-batches, so that its value for the "
                    "whole batch is not known: compute it from the other outputs (a loss: do not pass labels), or use "
                    "num_chunks=1"
                )
            whole.append(leaf[0])
        return unflatten(self.structure, whole)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


class _Recorder:
    """Calls the model with nested inputs and keeps the nesting of what it returns. Not a module: export looks into those."""

    def __init__(self, forward: Callable[..., Any], layout: Layout) -> None:
        self._forward, self._layout = forward, layout
        self._inputs = flatten(layout.template)[1]
        self.structure: Structure
        self.is_row: tuple[bool, ...] = ()

    def examples(self) -> tuple[Tensor, ...]:
        """Inputs for the trace: nobody looks at their values."""
        leaves, _ = flatten(self._layout.template)
        return tuple(torch.zeros((1, *leaf.shape), dtype=leaf.dtype) for leaf in leaves)

    def __call__(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # an operation on each here and below, so that only the first stage takes inputs and only the last one has outputs
        args, kwargs = unflatten(self._inputs, [leaf[0] for leaf in leaves])
        output = self._forward(*args, **kwargs)
        refuse_opaque(output, "output")
        found, self.structure = flatten(output)
        self.is_row = tuple(leaf.ndim > 0 and leaf.shape[0] == self._layout.rows for leaf in found)
        return tuple(leaf.unsqueeze(0) for leaf in found)


class _Flat(nn.Module):
    """The model as a function of tensors that returns tensors."""

    def __init__(self, model: nn.Module, recorder: _Recorder) -> None:
        super().__init__()
        self.model = model
        self.recorder = recorder

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        return self.recorder(leaves)


def _trace(flat: _Flat, split_points: Sequence[str], examples: tuple[Tensor, ...]) -> Any:
    pipelining = require("torch.distributed.pipelining", "a pipeline of processes")
    try:
        with torch.no_grad(), _marked(flat.model, split_points, pipelining.pipe_split):
            # without `strict`, which `pipeline` alone would be in older torch: it takes more models
            graph = torch.export.export(flat, examples, strict=False).module()
        with torch.no_grad():
            return pipelining.pipeline(graph, examples)
    except OpaqueError:
        raise
    except Exception as error:
        raise PipelineError(
            f"torch.export could not turn {type(flat.model).__name__} into one graph, which a pipeline needs "
            f"({type(error).__name__}: {_first_lines(error)}). What depends on the values of tensors, and code that is not "
            "torch's, stand in its way: rewrite that part, or leave the model whole (dispatch_model)"
        ) from error


def _wiring(graph: torch.fx.Graph) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """For every stage, what its arguments are: (stage, position in its results) or (INPUT, position in the inputs).

    And which of the last stage's results each output is.
    """
    known: dict[torch.fx.Node, tuple[int, int]] = {}
    takes: list[list[tuple[int, int]]] = []
    inputs = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = (INPUT, inputs)
            inputs += 1
        elif node.op == "call_module":
            known[node] = (len(takes), 0)
            takes.append([known[argument] for argument in node.args])
        elif node.op == "call_function":  # getitem
            known[node] = (known[node.args[0]][0], node.args[1])
    (outputs,) = next(node for node in graph.nodes if node.op == "output").args
    return takes, [known[node][1] for node in outputs]


def _share_tensors(stage: nn.Module, model: nn.Module) -> None:
    """Give a stage the tensors of `model` itself: torch copies those that have several names."""
    own = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    names = [name for name, _ in stage.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in stage.named_buffers(remove_duplicate=False)]
    for name in names:
        original = own.get(name.removeprefix("model."))
        if original is not None:
            put_tensor(*owner_of(stage, name), original)


@contextmanager
def _marked(model: nn.Module, split_points: Sequence[str], mark: Callable[[], None]) -> Iterator[None]:
    """Inside, a stage begins where one of these modules is called."""
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_: mark()) for name in split_points
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:400]
