"""A pipeline of processes: rank 0 gives the inputs, the last rank has the output, and no rank waits for one that failed.

[Note: the calls of a step]
1. All ranks hear rank 0's order: which graph, how many micro-batches, how many rows; or why there is none.
2. A layout seen for the first time is traced, on every rank by itself, and all hear whether that went well.
3. GPipe: the micro-batches go through the stages one after the other. A stage that fails goes on with zeros, so that the others get
   what they wait for.
4. All hear who failed, and raise the same error; the ranks can go on together afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_bigmodel.inference.stages import choose_split_points
from acc_bigmodel.inference.tracing import (
    INPUT,
    Layout,
    OpaqueError,
    PipelineError,
    Traced,
    lay_out,
)
from acc_hooks.visit import has_offloaded_params
from acc_ops.comm import TorchComm
from acc_ops.exchange import tried
from acc_ops.object_collectives import gather_object
from acc_ops.tree import send_to_device
from acc_ops.world import World, current_world


@dataclass(frozen=True, kw_only=True)
class Order:
    """What rank 0 tells the others of one step."""

    number: int  # of the graph
    layout: Layout | None  # of a graph that is new
    chunks: int
    rows: int  # of the whole batch


class Pipeline:
    """One rank of a pipeline. `step` is called on every rank: with the inputs on rank 0, without on the others.

    Graphs are kept for the layouts seen last. A batch that is smaller than one before it is padded to the micro-batches of that
    graph while they are at most twice as large, so that the sizes of batches lead to few graphs.
    """

    GRAPHS = 8

    def __init__(
        self,
        model: nn.Module,
        split_points: str | Sequence[str],
        num_chunks: int,
        no_split_module_classes: str | Sequence[str] | None = None,
    ) -> None:
        self.world = current_world()
        self.num_chunks = num_chunks
        self._model = model
        self.forward: Callable[..., Any] = vars(model).get("_original_forward", model.forward)
        points, error = tried(lambda: self._check(split_points, no_split_module_classes))
        said = (type(model).__name__, points, num_chunks)
        told = share(self.world, said, error)
        if any(other != said for other in told):
            raise PipelineError(
                f"every rank must prepare the same model alike; (class, split points, num_chunks) are {told}"
            )
        self.split_points: list[str] = points or []
        if self.world.size == 1:
            model.to(self.world.device)
        self._graphs: dict[int, _Graph] = {}  # those used last are at the end
        self._made = 0  # graphs so far
        self._lines = Lines(self.world)
        self._inputs: list[Tensor] = []  # of the step, on rank 0

    def _check(self, split_points: str | Sequence[str], whole: str | Sequence[str] | None) -> list[str]:
        if self.num_chunks < 1:
            raise ValueError(f"num_chunks must be at least 1, got {self.num_chunks}")
        if any(map(has_offloaded_params, self._model.modules())):
            raise ValueError(
                "a model that is offloaded cannot be a pipeline: remove_hook_from_module(model, recurse=True) first; "
                "weights that are mapped from a file cost nothing until a stage uses them"
            )
        if self.world.size > 1 and not isinstance(self.world.comm, TorchComm):
            raise ValueError(
                "a pipeline needs processes in a torch.distributed group, which these ranks are not: use a launcher"
            )
        if self.world.size > 1 and self.world.size != dist.get_world_size():
            raise ValueError(
                f"a pipeline takes all {dist.get_world_size()} processes, and this world has {self.world.size} of them: run "
                "the others without it in a launch of their own"
            )
        return choose_split_points(self._model, split_points, self.world.size, whole)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Trace the model for batches like this one, which rank 0 gives."""
        order = self._hear(args, kwargs)
        if self.world.size > 1:
            self._graph(order)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The output on the last rank, None on the others. Every rank raises where one fails."""
        order = self._hear(args, kwargs)
        if self.world.size == 1:
            args, kwargs = send_to_device((args, kwargs), self.world.device)
            with torch.no_grad():
                return self.forward(*args, **kwargs)
        graph = self._graph(order)
        inputs, self._inputs = self._inputs, []
        output, error = tried(lambda: graph.run(order.chunks, order.rows, inputs))
        share(self.world, None, graph.stage.error or error)
        return output

    def _hear(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Order:
        """Rank 0's order, on every rank."""
        order, error = tried(lambda: self._order(args, kwargs)) if self.world.is_main else (None, None)
        told = share(self.world, (order, self._model.training), error)
        modes = [training for _, training in told]
        if len(set(modes)) > 1:
            raise PipelineError(
                f"the ranks of a pipeline must all have called train(), or all eval(): training is {modes}"
            )
        first: Order = told[0][0]
        return first

    def _order(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Order:
        """Which graph the batch goes through, its tensors made ready for that."""
        layout, rows = lay_out(args, kwargs, self.num_chunks, self._model.training)
        number = self._known(layout)
        if number is not None:
            layout = self._graphs[number].traced.layout
        chunks = -(-rows // layout.rows)
        self._inputs = send_to_device(layout.inputs(args, kwargs, chunks), self.world.device)
        return Order(
            number=self._made if number is None else number,
            layout=layout if number is None else None,
            chunks=chunks,
            rows=rows,
        )

    def _known(self, layout: Layout) -> int | None:
        """The graph for the least micro-batches of this layout that hold as many rows, and no more than twice as many."""
        key = layout.key()
        fitting = [
            (graph.traced.layout.rows, number)
            for number, graph in self._graphs.items()
            if graph.key == key
            and layout.rows <= graph.traced.layout.rows <= 2 * layout.rows
            and (graph.traced.has_only_rows or graph.traced.layout.rows == layout.rows)
        ]
        return min(fitting)[1] if fitting else None

    def _graph(self, order: Order) -> _Graph:
        """The graph of an order, traced if it is new."""
        if order.layout is None:
            graph = self._graphs.pop(order.number)
        else:
            layout = order.layout
            made, error = tried(lambda: self._trace(layout))
            share(self.world, None, error)
            assert made is not None
            graph = made
            self._made += 1
        self._graphs[order.number] = graph
        if len(self._graphs) > self.GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def _trace(self, layout: Layout) -> _Graph:
        traced = Traced(self._model, self.forward, self.split_points, layout, self.world.rank)
        return _Graph(traced, self.world, self._lines)


class _Graph:
    """A traced model and this rank's stage of it, ready to run."""

    def __init__(self, traced: Traced, world: World, lines: Lines) -> None:
        self.traced = traced
        self.key = traced.layout.key()
        self.stage = _Stage(traced.module, world.device)
        self._world = world
        self._lines = {edge: lines.between(*edge) for edge in traced.edges}  # on every rank, in one order
        self._sources = sorted(source for source, target in traced.edges if target == world.rank)

    @torch.no_grad()
    def run(self, chunks: int, rows: int, inputs: Sequence[Tensor]) -> Any:
        """The output on the last rank. An error of this stage is in `stage.error` afterwards."""
        self.stage.error = None
        parts = []
        for number in range(chunks):
            given = self._receive([leaf[number : number + 1] for leaf in inputs])
            made = self.stage(*given)
            for target, positions in self.traced.gives.items():
                for position in positions:
                    self._line(self._world.rank, target).broadcast(made[position].contiguous(), 0)
            if self._world.is_last:
                parts.append([made[position] for position in self.traced.positions])
        if not self._world.is_last or self.stage.error is not None:
            return None
        return self.traced.outputs([torch.cat(leaf) for leaf in zip(*parts, strict=True)], rows)

    def _receive(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the stage takes: in the order of its sources, so that no two ranks wait for each other."""
        given: dict[int, Tensor] = {}
        shapes = self.stage.input_shapes
        for place, (source, position) in enumerate(self.traced.takes):
            if source == INPUT:
                given[place] = inputs[position]
        for source in self._sources:
            for place, (other, _) in enumerate(self.traced.takes):
                if other == source:
                    room = torch.empty(
                        shapes[place].shape, dtype=shapes[place].dtype, device=self._world.device
                    )
                    given[place] = self._line(source, self._world.rank).broadcast(room, 0)
        return [given[place] for place in range(len(given))]

    def _line(self, source: int, target: int) -> TorchComm:
        line = self._lines[source, target]
        assert line is not None, (source, target)
        return line


class Lines:
    """Groups of two ranks, made when the first graph needs them: the watch of each tells who does not come."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: dict[tuple[int, int], TorchComm | None] = {}

    def between(self, source: int, target: int) -> TorchComm | None:
        """The line between two ranks, the first of which is rank 0 in it; None on others. All ranks ask for the same lines."""
        edge = (source, target)
        if edge not in self._made:
            outer = self._world.comm.group if isinstance(self._world.comm, TorchComm) else None
            ranks = list(edge) if outer is None else [dist.get_global_rank(outer, rank) for rank in edge]
            group = dist.new_group(ranks)
            self._made[edge] = TorchComm(group) if self._world.rank in edge else None
        return self._made[edge]


class _Stage(nn.Module):
    """A stage that answers with zeros once it has failed, and keeps the error."""

    def __init__(self, module: torch.fx.GraphModule, device: torch.device) -> None:
        super().__init__()
        self.module = module.to(device)
        self.error: Exception | None = None
        nodes: list[Any] = list(module.graph.nodes)
        (results,) = nodes[-1].args
        results = results if isinstance(results, (tuple, list)) else (results,)
        self.input_shapes: list[Tensor] = [node.meta["val"] for node in nodes if node.op == "placeholder"]
        self._output_shapes: list[Tensor] = [node.meta["val"] for node in results]
        self._device = device

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        if self.error is None:
            made, self.error = tried(lambda: self.module(*args))
            if self.error is None:
                return (made,) if isinstance(made, Tensor) else tuple(made or ())
        return tuple(
            torch.zeros(shape.shape, dtype=shape.dtype, device=self._device) for shape in self._output_shapes
        )


def share(world: World, value: Any, error: Exception | None) -> list[Any]:
    """Every rank's `value`, unless one has an `error`: then that rank raises it, and the others raise the like of it."""
    said = None if error is None else (type(error).__name__, str(error))
    told = gather_object([(value, said)], world)
    for rank, (_, failure) in enumerate(told):
        if failure is not None and rank == world.rank and error is not None:
            raise error
        if failure is not None:
            kind, text = failure
            own = _SAME_EVERYWHERE.get(kind)
            raise (
                own(f"rank {rank}: {text}")
                if own
                else PipelineError(f"rank {rank} failed with {kind}: {text}")
            ) from error
    return [own for own, _ in told]


_SAME_EVERYWHERE: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, OpaqueError, PipelineError)
}
