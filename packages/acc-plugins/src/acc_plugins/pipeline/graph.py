"""A model's forward as one graph, cut into stages: what each computes, takes from the stage before and hands on.

[Note: what goes from stage to stage] Every rank of a pipeline has the batch, so what follows from the batch and constants alone (masks, positions) is computed
again wherever it is needed. All else that a later stage needs goes through the stages between, which only hand it on. It must be something that gradients can
flow back through: a number that is chosen by weights (an index of experts, say) must not cross a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from acc_plugins.pipeline.errors import PipelineError

_RANDOM = torch.Tag.nondeterministic_seeded


class Outputs:
    """What a model returned while it was traced: its structure, and what in it is no tensor."""

    def __init__(self) -> None:
        self._spec: TreeSpec | None = None
        self._constants: list[Any] = []

    def note(self, output: Any) -> tuple[Tensor, ...]:
        """The tensors in it."""
        leaves, self._spec = tree_flatten(output)
        self._constants = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """What the model would have returned with these tensors in it."""
        assert self._spec is not None
        given = iter(tensors)
        return tree_unflatten([next(given) if one is _HOLE else one for one in self._constants], self._spec)


class Leaves(nn.Module):
    """The model as a function from tensors to tensors: what is no tensor in its inputs and outputs is held here."""

    def __init__(self, model: nn.Module, inputs: TreeSpec, constants: Sequence[Any]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.constants = constants  # a leaf of the inputs each; _HOLE where a tensor comes
        self.outputs = Outputs()  # an object, since torch.export undoes what else is set while it traces

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if constant is _HOLE else constant for constant in self.constants]
        args, kwargs = tree_unflatten(leaves, self.inputs)
        return self.outputs.note(self.model(*args, **kwargs))


_HOLE = object()


def split_inputs(args: Any, kwargs: Any) -> tuple[TreeSpec, list[Any], list[Tensor]]:
    """The structure of the inputs, its leaves with holes for tensors, and the tensors."""
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return spec, [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves], tensors


@dataclass(frozen=True)
class Cut:
    """One stage: `module` takes the values of the stage before, then the tensors of the batch numbered `batch`, and returns what it hands on.

    `takes` and `gives` are tensors of the fake kind, with the shapes and formats of those values.
    """

    module: fx.GraphModule
    takes: tuple[Tensor, ...]
    gives: tuple[Tensor, ...]
    batch: tuple[int, ...]
    parameters: tuple[str, ...]  # names in the whole model
    buffers: tuple[str, ...]  # likewise; the first stage that has one may write to it


def trace(leaves: Leaves, tensors: Sequence[Tensor]) -> fx.GraphModule:
    """The forward for inputs of these shapes. Raises PipelineError where it cannot be written down as one graph."""
    try:
        exported = torch.export.export(leaves, tuple(tensors), strict=False)
    except Exception as error:
        raise PipelineError(
            f"the forward of {type(leaves.model).__name__} cannot be written down as one graph, so it cannot be cut: {_first_line(error)}"
        ) from error
    made: fx.GraphModule = exported.module()
    return made


def cut(whole: fx.GraphModule, starts: Sequence[str], named: dict[str, Any]) -> list[Cut]:
    """The stages of the graph `whole`, the second and later of which begin at the modules `starts`.

    `named` are the model's own parameters and buffers, which the stages are given. Raises PipelineError for cuts through which no gradient can flow.
    """
    nodes = [node for node in whole.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    (returned,) = next(node for node in whole.graph.nodes if node.op == "output").args
    weighty = _weighty(nodes, named)
    stage_of = _stages(nodes, starts, weighty)
    count = len(starts) + 1
    results = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    last_use = {node: stage_of[node] for node in weighty}
    for node in weighty:
        for source in _needs(node, weighty):
            last_use[source] = max(last_use[source], stage_of[node])
    for result in results:
        for source in _needed([result], weighty) & weighty if isinstance(result, fx.Node) else ():
            last_use[source] = count
    cuts = []
    for stage in range(count):
        taken = [node for node in nodes if node in weighty and stage_of[node] < stage <= last_use[node]]
        given = [node for node in nodes if node in weighty and stage_of[node] <= stage < last_use[node]]
        _check_flow([*taken, *(given if stage + 1 < count else [])], stage)
        own = [node for node in nodes if node in weighty and stage_of[node] == stage]
        cuts.append(_stage(whole, inputs, taken, own, results if stage == count - 1 else given, named))
    return cuts


def _weighty(nodes: Sequence[fx.Node], named: dict[str, Any]) -> set[fx.Node]:
    """The nodes that depend on a parameter, on chance, or change something: those must be computed once."""
    found: set[fx.Node] = set()
    for node in nodes:
        tags = getattr(node.target, "tags", ())
        schema = getattr(node.target, "_schema", None)
        sources = node.all_input_nodes
        if (
            _RANDOM in tags
            or (schema is not None and schema.is_mutable)
            or any(one in found for one in sources)
            or any(
                one.op == "get_attr" and isinstance(named.get(_name(one)), nn.Parameter) for one in sources
            )
        ):
            found.add(node)
    return found


def _stages(nodes: Sequence[fx.Node], starts: Sequence[str], weighty: set[fx.Node]) -> dict[fx.Node, int]:
    """In which stage each of the weighty nodes is computed. Raises PipelineError for a module that computes nothing by itself."""
    stage, waiting, made = 0, list(starts), {}
    for node in nodes:
        if node not in weighty:
            continue
        inside = _modules_of(node)
        if waiting and any(path == waiting[0] or path.startswith(waiting[0] + ".") for path in inside):
            waiting.pop(0)
            stage += 1
        made[node] = stage
    if waiting:
        raise PipelineError(
            f"no stage can begin at {waiting[0]}: the forward does not come to it after {starts[: len(starts) - len(waiting)] or 'its start'}. "
            "Give split= the names of modules in the order in which they are called"
        )
    return made


def _modules_of(node: fx.Node) -> list[str]:
    stack = node.meta.get("nn_module_stack") or {}
    return [path.removeprefix("L['self'].").removeprefix("model.") for path, _ in stack.values()]


def _needs(node: fx.Node, weighty: set[fx.Node]) -> set[fx.Node]:
    """The weighty nodes whose values this one needs, through what is computed again."""
    return (_needed(node.all_input_nodes, weighty) & weighty) - {node}


def _check_flow(crossing: Sequence[fx.Node], stage: int) -> None:
    for node in crossing:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            what = (
                f"{value.dtype} of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise PipelineError(
                f"{node.name} ({what}, made in {(_modules_of(node) or ['the model'])[-1]}) would cross the cut beside stage {stage}, and no gradient "
                "can flow through it: give split= other modules to begin stages at"
            )


def _stage(
    whole: fx.GraphModule,
    inputs: Sequence[fx.Node],
    taken: Sequence[fx.Node],
    own: Sequence[fx.Node],
    gives: Sequence[Any],
    named: dict[str, Any],
) -> Cut:
    """The graph of one stage: placeholders for what it takes and for the batch, copies of its nodes, and of the light ones they need."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    attributes: dict[str, Any] = {}
    wanted = [*own, *(one for one in gives if isinstance(one, fx.Node))]
    used = _needed(wanted, set(taken))
    asked = [number for number, node in enumerate(inputs) if node in used]
    placed = [(f"taken_{number}", node) for number, node in enumerate(taken)]
    placed += [(f"batch_{number}", inputs[number]) for number in asked]
    for name, node in placed:
        copies[node] = graph.placeholder(name)
    for node in whole.graph.nodes:
        if node in copies or node not in used:
            continue
        if node.op == "get_attr":
            name = _name(node)
            attributes[name] = named[name] if name in named else _attribute(whole, str(node.target))
            copies[node] = graph.get_attr(name)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[one] if isinstance(one, fx.Node) else one for one in gives))
    return Cut(
        module=fx.GraphModule(attributes, graph),  # with the model's own parameters, no copies
        takes=tuple(node.meta["val"] for node in taken),
        gives=tuple(one.meta["val"] for one in gives if isinstance(one, fx.Node)),
        batch=tuple(asked),
        parameters=tuple(name for name, value in attributes.items() if isinstance(value, nn.Parameter)),
        buffers=tuple(
            name
            for name, value in attributes.items()
            if name in named and not isinstance(value, nn.Parameter)
        ),
    )


def _needed(nodes: Sequence[fx.Node], known: set[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are computed from, up to what is `known`."""
    stack, seen = list(nodes), set(nodes)
    while stack:
        node = stack.pop()
        for source in () if node in known else node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return seen


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("model.")


def _attribute(module: Any, target: str) -> Any:
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
