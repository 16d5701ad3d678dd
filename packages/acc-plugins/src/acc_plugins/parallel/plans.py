"""Plans of tensor parallelism: which style each layer of a model gets, checked before any layer is touched.

[Note: whose plan] What `set_plan` was told for a model comes first, then the model's own: `tp_plan` or `_tp_plan`, which transformers' models
carry. A plan maps names of modules, in which `*` stands for one part between dots, to the name of a style or to a
`torch.distributed.tensor.parallel.ParallelStyle`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

_told: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()

# style -> what it cuts: the columns of a layer (the features it puts out), its rows (what it takes), None for nothing
STYLES: dict[str, str | None] = {
    "colwise": "columns",
    "colwise_gather_output": "columns",
    "colwise_rep": "columns",  # transformers' older name of it
    "rowwise": "rows",
    "rowwise_split_input": "rows",
    "rowwise_rep": "rows",
    "embedding_rowwise": "rows",
    "embedding_colwise": "columns",
    "sequence_parallel": None,
    "replicated_with_grad_allreduce": None,
    "replicate": None,
}


class PlanError(ValueError):
    """A plan that cannot be followed; the message names every layer and its sizes."""


def set_plan(model: nn.Module, plan: Mapping[str, Any]) -> None:
    """Split `model` by `plan` when it is prepared for tensor parallelism, whatever plan it carries itself.

    `{"layers.*.attention.q": "colwise", "layers.*.attention.out": "rowwise"}`; styles by name are `colwise`, `rowwise`,
    `colwise_gather_output` (a head whose output every rank needs), `rowwise_split_input`, `embedding_rowwise`, `embedding_colwise`,
    `sequence_parallel`, `replicated_with_grad_allreduce` (a norm over single heads) and `replicate`. Raises TypeError for what is no such mapping.
    """
    if not isinstance(plan, Mapping) or not all(isinstance(name, str) for name in plan):
        raise TypeError(f"a plan maps names of modules to styles, got {plan!r:.80}")
    _told[model] = dict(plan)


def plan_of(model: nn.Module) -> dict[str, Any] | None:
    """The plan for `model`: that of `set_plan`, else the one it carries; None without any."""
    if model in _told:
        return _told[model]
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(model, name, None)
        if isinstance(plan, Mapping) and plan:
            return dict(plan)
    return None


@dataclass
class Found:
    """The style of each module that a plan names."""

    styles: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def resolve(model: nn.Module, plan: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Module name -> style. Raises PlanError, naming every one, for patterns that match nothing, styles that are not known, and layers that `ranks` do
    not divide or that are of a kind that cannot be split."""
    found = Found()
    given = model in _told
    modules = dict(model.named_modules())
    exact: set[str] = set()
    for pattern, style in plan.items():
        names = [name for name in modules if _matches(name, pattern)]
        if not names and _names_parameter(model, pattern):
            found.problems.append(
                f"{pattern}: {style!r} names a parameter, and only whole layers can be split here"
            )
        elif not names and given:
            found.problems.append(f"{pattern}: no module has such a name")
        for name in names:
            _put(found, name, pattern, style, exact)
    if not found.styles and not found.problems:
        found.problems.append(f"none of {', '.join(plan)} is the name of a module")
    for name, style in found.styles.items():
        problem = _problem(modules[name], style, ranks) or _problem_of_heads(model, name, style, ranks)
        if problem:
            found.problems.append(f"{name}: {problem}")
    if found.problems:
        raise PlanError(
            f"{type(model).__name__} cannot be split over {ranks} ranks (tp_size={ranks}):\n  "
            + "\n  ".join(found.problems)
            + "\nChoose a tp_size that divides these sizes, or another plan: acc_plugins.parallel.set_plan(model, plan)"
        )
    return found.styles


def _put(found: Found, name: str, pattern: str, style: Any, exact: set[str]) -> None:
    """A full name counts more than a pattern; two patterns must agree."""
    other = found.styles.get(name)
    if pattern == name:
        exact.add(name)
        found.styles[name] = style
    elif other is None:
        found.styles[name] = style
    elif name not in exact and other != style:
        found.problems.append(f"{name}: two patterns give it different styles, {other!r} and {style!r}")


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _names_parameter(model: nn.Module, pattern: str) -> bool:
    return any(_matches(name, pattern) for name, _ in model.named_parameters())


def _problem(module: nn.Module, style: Any, ranks: int) -> str | None:
    """Why this layer cannot have this style."""
    if not isinstance(style, str):
        return None  # torch's own object says so itself
    if style not in STYLES:
        return f"the style {style!r} is not known here (known: {', '.join(STYLES)}); a model with it can be loaded split by transformers itself"
    at = split_dim(module, style)
    if at is None:
        return None
    linear, embedding = isinstance(module, nn.Linear), isinstance(module, nn.Embedding)
    if not (linear or embedding) or type(module).forward not in (nn.Linear.forward, nn.Embedding.forward):
        return f"{type(module).__name__} computes in a way of its own, and {style!r} splits nn.Linear and nn.Embedding"
    if style.startswith("embedding") and not embedding:
        return f"{style!r} splits an nn.Embedding, and this is a {type(module).__name__}"
    weight: Any = module.weight
    if weight.shape[at] % ranks:
        what = ("out_features", "in_features") if linear else ("num_embeddings", "embedding_dim")
        return f"{what[at]}={weight.shape[at]} of {type(module).__name__} {tuple(weight.shape)} is not a multiple of {ranks}"
    return None


def _problem_of_heads(model: nn.Module, name: str, style: Any, ranks: int) -> str | None:
    """Whether a rank would get a part of an attention head."""
    parent, layer = model.get_submodule(name.rpartition(".")[0]), model.get_submodule(name)
    at = split_dim(layer, style)
    if at is None or not isinstance(style, str):
        return None
    size = getattr(parent, "head_dim", None)
    if not isinstance(size, int) or size < 1 or not isinstance(layer, nn.Linear):
        return None
    width = layer.weight.shape[at]
    heads, rest = divmod(width, size)
    if rest or heads % ranks == 0:
        return None
    return f"{heads} heads of {size} ({width} features of {type(parent).__name__}) cannot be divided over {ranks} ranks"


def split_dim(module: nn.Module, style: Any) -> int | None:
    """The dimension of a layer's weight that a style, or torch's object for one, cuts; None for nothing, and for what is not known here.

    A linear layer's weight is (columns, rows) in size, an embedding's (rows, columns).
    """
    if isinstance(style, (ColwiseParallel, RowwiseParallel)):
        part: str | None = "columns" if isinstance(style, ColwiseParallel) else "rows"
    else:
        part = STYLES.get(style) if isinstance(style, str) else None
    if part is None:
        return None
    return int((part == "columns") == isinstance(module, nn.Embedding))
