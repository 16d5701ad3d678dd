"""The ranks tell each other what they are about to prepare, and all raise the same error where they do not agree.

[Note: why first, and under one form] Strategies exchange other things in other orders, so ranks with different ones would wait for each other, or read what was
meant for something else. This exchange is the first one of every strategy (of FSDP1's constructor, too, where that speaks), and looks the
same for all. What is compared: options that decide what is sent or written, and of every model its weights, which of them are trained, and how it
is split.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from torch import Tensor, nn

from acc_ops.comm import Comm
from acc_plugins.states import fsdp1

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MARK = "what a strategy prepares"

Facts = list[tuple[Any, ...]]  # plain data, each with a name first


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the ranks must agree on for one model: its `weights`, and how it is `treated` (split, wrapped, left out)."""

    kind: str
    weights: Facts
    treated: Facts


def check_agreement(comm: Comm, options: Mapping[str, str], models: Sequence[ModelFacts] = ()) -> None:
    """Raise the same ValueError on every rank, naming what differs and where, unless all of them say the same. Every rank calls it.

    Only a digest of what is told of the models is sent, and the rest where that differs.
    """
    digest = hashlib.sha256(repr(models).encode()).hexdigest()
    told = comm.all_gather_object((_MARK, dict(options), digest))
    for rank, one in enumerate(told):
        if not (isinstance(one, tuple) and one[:1] == (_MARK,)):
            raise ValueError(
                f"this rank prepares under {options.get('the strategy')}, rank {rank} is at another place of the program: start every rank with the same "
                "options, and call the same functions in the same order"
            )
    _compare_options([one[1] for one in told])
    if len({one[2] for one in told}) > 1:
        _refuse_models(comm.all_gather_object(list(models)))


def _compare_options(everyone: list[dict[str, str]]) -> None:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in [*first, *theirs]:
            if first.get(name) != theirs.get(name):
                raise ValueError(
                    f"the ranks were started with different options: {name} is {first.get(name, 'not there')} on rank 0 and "
                    f"{theirs.get(name, 'not there')} on rank {rank}. Give every rank the same"
                )


def _refuse_models(everyone: list[list[ModelFacts]]) -> NoReturn:
    rank, theirs = next((rank, one) for rank, one in enumerate(everyone) if one != everyone[0])
    if len(theirs) != len(everyone[0]):
        raise ValueError(
            f"rank 0 prepares {len(everyone[0])} models at once and rank {rank} {len(theirs)}: call prepare with the same things on every rank"
        )
    here, there = next((a, b) for a, b in zip(everyone[0], theirs, strict=True) if a != b)
    if here.weights != there.weights:
        mine, other = _first_difference(here.weights, there.weights)
        raise ValueError(
            f"the ranks built different models: rank 0 has {mine}, rank {rank} has {other}. Build the same model on every rank"
        )
    mine, other = _first_difference(here.treated, there.treated)
    raise ValueError(
        f"the ranks would treat {here.kind} differently: {mine} on rank 0, {other} on rank {rank}. Give every rank the same options"
    )


def _first_difference(here: Facts, there: Facts) -> tuple[Any, Any]:
    """Two facts of one name that are not the same; else what only one side has, else two of one place (another order)."""
    ours, theirs = ({fact[0]: fact for fact in side} for side in (here, there))
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            return ours.get(name, f"no {name!r}"), theirs.get(name, f"no {name!r}")
    return next(((a, b) for a, b in zip(here, there, strict=False) if a != b), (len(here), len(there)))


def model_facts(model: nn.Module, treated: Facts) -> ModelFacts:
    """What this rank tells of a model."""
    return ModelFacts(kind=type(model).__name__, weights=list(_weights(model)), treated=treated)


def _weights(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Name, shape, format, and for parameters whether they are trained; of buffers those that are saved."""
    if fsdp1.has_fsdp1(model):  # each rank shows its own part
        yield "", "prepared before"
        return
    for prefix, module in model.named_modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield *_layout(prefix, name, tensor), "trained" if tensor.requires_grad else "frozen"
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield _layout(prefix, name, tensor)


def _layout(prefix: str, name: str, tensor: Tensor) -> tuple[Any, ...]:
    return f"{prefix}.{name}".lstrip("."), tuple(tensor.shape), str(tensor.dtype)


def told(value: Any) -> str:
    """A setting as every rank writes it: no addresses, functions by their names."""
    if isinstance(value, str):
        return value
    if isinstance(value, Enum):
        return value.name
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{getattr(value, '__module__', '')}.{name}"
    text = repr(value)
    if _ADDRESS.search(text) and hasattr(value, "__dict__"):
        text = f"{type(value).__name__}({vars(value)!r})"
    return _ADDRESS.sub("", text)
