"""The ranks tell each other what they are about to prepare, and all raise the same error where they do not agree.

[Note: why first, and under one form] Strategies exchange other things in other orders, so ranks with different ones would wait for each other, or read what was
meant for something else. This exchange is the first one of every strategy (of FSDP1's constructor, too, where that speaks), and looks the
same for all. What is compared: options that decide what is sent or written; of every model its weights, which of them are trained, which are
shared, and how it is split; of every optimizer its groups, by the names of their parameters, and their settings. A rank that cannot say what it
would do (a user's wrap policy or `tie_weights` raises) tells its error here, and all raise that.
"""

from __future__ import annotations

import hashlib
import itertools
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from torch import Tensor, nn

from acc_ops.comm import Comm
from acc_ops.exchange import portable, raise_first
from acc_plugins.states import fsdp1

T = TypeVar("T")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MARK = "what a strategy prepares"

_SHOWN_NUMBERS = 64  # of a tensor among an optimizer's settings

Facts = list[tuple[Any, ...]]  # plain data, each with a name first


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the ranks must agree on for one model: its `weights`, and how it is `treated` (split, wrapped, left out)."""

    kind: str
    weights: Facts
    treated: Facts


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """The same for one optimizer: for each group the names of its `parameters` and its `settings`, by name as text."""

    kind: str
    parameters: list[list[str]]
    settings: list[dict[str, str]]


def check_agreement(
    comm: Comm,
    options: Mapping[str, str],
    models: Sequence[ModelFacts] = (),
    optimizers: Sequence[OptimizerFacts] = (),
    *,
    error: Exception | None = None,
) -> None:
    """Raise the same ValueError on every rank, naming what differs and where, unless all of them say the same. Every rank calls it.

    `error` is why this rank cannot say it: then every rank raises that of the first that has one. Only a digest of what is told of models and
    optimizers is sent, and the rest where that differs.
    """
    digest = hashlib.sha256(repr((models, optimizers)).encode()).hexdigest()
    told = comm.all_gather_object((_MARK, dict(options), digest, portable(error)))
    for rank, one in enumerate(told):
        if not (isinstance(one, tuple) and one[:1] == (_MARK,)):
            raise ValueError(
                f"this rank prepares under {options.get('the strategy')}, rank {rank} is at another place of the program: start every rank with the same "
                "options, and call the same functions in the same order"
            )
    _compare_options([one[1] for one in told])
    raise_first([one[3] for one in told], comm.rank, error)
    if len({one[2] for one in told}) > 1:
        everyone = comm.all_gather_object((list(models), list(optimizers)))
        _compare_models([one[0] for one in everyone])
        _compare_optimizers([one[1] for one in everyone])


def _compare_options(everyone: list[dict[str, str]]) -> None:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in [*first, *theirs]:
            if first.get(name) != theirs.get(name):
                raise ValueError(
                    f"the ranks were started with different options: {name} is {first.get(name, 'not there')} on rank 0 and "
                    f"{theirs.get(name, 'not there')} on rank {rank}. Give every rank the same"
                )


def _compare_models(everyone: list[list[ModelFacts]]) -> None:
    rank, theirs = _first_other(everyone)
    if rank is None:
        return
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


def _compare_optimizers(everyone: list[list[OptimizerFacts]]) -> None:
    rank, theirs = _first_other(everyone)
    if rank is None:  # what is the same may have other digests: 1 and True
        return
    at, here, there = next(
        (at, a, b) for at, (a, b) in enumerate(zip(everyone[0], theirs, strict=True)) if a != b
    )
    kind = here.kind if len(theirs) == 1 else f"optimizer {at} ({here.kind})"
    what, mine, other = _how_optimizers_differ(here, there)
    raise ValueError(
        f"the ranks built different optimizers: {what} of {kind} is {mine} on rank 0 and {other} on rank {rank}. Build the same optimizer on every rank"
    )


def _how_optimizers_differ(here: OptimizerFacts, there: OptimizerFacts) -> tuple[str, Any, Any]:
    """What, how it is in the one and in the other."""
    if len(here.parameters) != len(there.parameters):
        return "the number of parameter groups", len(here.parameters), len(there.parameters)
    for group, (ours, theirs) in enumerate(zip(here.parameters, there.parameters, strict=True)):
        for at, (one, other) in enumerate(itertools.zip_longest(ours, theirs, fillvalue="not there")):
            if one != other:
                return f"parameter {at} in group {group}", one, other
    for group, (mine, its) in enumerate(zip(here.settings, there.settings, strict=True)):
        for name in [*mine, *its]:
            if mine.get(name) != its.get(name):
                return f"{name} in group {group}", mine.get(name, "not there"), its.get(name, "not there")
    raise AssertionError("they are alike")


def _first_other(everyone: Sequence[T]) -> tuple[int | None, T]:
    """The first rank that says something else than rank 0, and what; None where there is none."""
    return next(((rank, one) for rank, one in enumerate(everyone) if one != everyone[0]), (None, everyone[0]))


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


def optimizer_facts(optimizer: Any, names: list[list[str]]) -> OptimizerFacts:
    """What this rank tells of an optimizer, whose parameters have those names in each group.

    Of its settings what is plain: numbers, words, and lists and tensors of them. Functions and other objects cannot be compared.
    """
    settings = []
    for group in optimizer.param_groups:
        # sorted, as a load may have put them into another order
        keys = sorted(group.keys() - {"params", "param_names"}, key=str)
        shown = {key: _setting(group[key]) for key in keys}
        settings.append({key: text for key, text in shown.items() if text is not None})
    return OptimizerFacts(kind=type(optimizer).__name__, parameters=names, settings=settings)


def _setting(value: Any) -> str | None:
    """The same text for the same value, 1 for 1.0; None for what is not plain."""
    if isinstance(value, Tensor):
        if value.is_meta or hasattr(value, "device_mesh") or value.numel() > _SHOWN_NUMBERS:
            return f"a tensor of shape {tuple(value.shape)}"
        return _setting(value.detach().tolist())
    if value is None or isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value)).removesuffix(".0")
    if isinstance(value, (list, tuple)):
        items = [_setting(item) for item in value]
        return None if None in items else f"({', '.join(map(str, items))})"
    return None


def _weights(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Name, shape, format, and for parameters whether they are trained; of buffers those that are saved. Of what stands elsewhere, too, where."""
    if fsdp1.has_fsdp1(model):  # each rank shows its own part
        yield "", "prepared before"
        return
    first: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                fact = (*_layout(prefix, name, tensor), "trained" if tensor.requires_grad else "frozen")
                home = first.setdefault(id(tensor), fact[0])
                yield fact if home == fact[0] else (*fact, f"shared with {home}")
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
