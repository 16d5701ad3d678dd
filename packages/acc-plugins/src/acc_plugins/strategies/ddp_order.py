"""In which order DistributedDataParallel adds up gradients: read from a model, and given to another, so that a resumed run adds up in the same one.

[Note: why there is an order] DDP sums gradients in buckets. Before its second step it fills the buckets anew, in the order in which the
gradients came in the first one, and keeps them from then on. With three or more ranks a sum depends in its last digit on where in which bucket
a number lies. So a run that is resumed, and makes its first step later, would get other last digits. torch has no public way to the buckets: these
are the calls that its own forward and constructor make.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from acc_ops.world import World
from acc_plugins.states.names import plain_name

Order = list[list[str]]  # buckets, each with the names of its parameters

# the buckets of models that have chosen, as they choose only once
_chosen: weakref.WeakKeyDictionary[DistributedDataParallel, Order] = weakref.WeakKeyDictionary()


def order_of(model: DistributedDataParallel, world: World) -> Order | None:
    """The buckets that `model` has chosen; None while it has the first ones, an empty list where they cannot be told.

    Call it on every rank, between two steps.
    """
    if model in _chosen or _keeps_the_first(model):
        return _chosen.get(model)
    if not _can_be_ordered(model):
        return []
    if not model._has_rebuilt_buckets:
        _rebuild_now(model, world)
    model.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
    told = model._get_ddp_logging_data()
    text = told.get("rebuilt_per_bucket_param_indices", "")
    if not told.get("has_rebuilt_buckets") or not text:
        return [] if model._has_rebuilt_buckets else None
    names = _names_of(model, model._build_params_for_reducer()[0])
    _chosen[model] = [[names[int(place)] for place in bucket.split()] for bucket in text.split(",")]
    return _chosen[model]


def put_in_order(model: DistributedDataParallel, order: Sequence[Sequence[str]] | None) -> bool:
    """Let `model` add up in the buckets of `order` (None: in its first ones) from the next step on; whether it does. Call it on every rank.

    The buckets are made anew. False where that cannot be, and for another model's `order`.
    """
    if _keeps_the_first(model):
        return order is None
    if order == _chosen.get(model) and order != [] and bool(order) == model._has_rebuilt_buckets:
        return True
    if order == [] or not _can_be_ordered(model):
        return False
    first, sparse = model._build_params_for_reducer()
    names = _names_of(model, first)
    wanted = names if order is None else [name for bucket in order for name in bucket]
    if sorted(wanted) != sorted(names):
        return False
    place_of = {name: place for place, name in enumerate(names)}
    places = [place_of[name] for name in wanted]
    parameters, expect_sparse = [first[at] for at in places], [sparse[at] for at in places]
    original = vars(model).get("_orig_mod", model)  # a copy with compiled regions has taken its attributes
    for one in {model, original}:
        del one.reducer, one.logger  # the old one takes its hooks with it
    model._ddp_init_helper(parameters, expect_sparse, dict(enumerate(wanted)), model.static_graph)
    original.reducer, original.logger = model.reducer, model.logger
    for hook, state in model._comm_hooks:
        dist._register_comm_hook(model.reducer, state, hook)
    model._has_rebuilt_buckets = False
    _chosen.pop(model, None)
    if order is not None:
        model.reducer._push_all_rebuilt_params()
        model._has_rebuilt_buckets = model.reducer._rebuild_buckets()
        _chosen[model] = [list(bucket) for bucket in order]
    return True


def _keeps_the_first(model: DistributedDataParallel) -> bool:
    """Whether the first buckets are those of the whole run."""
    return model.find_unused_parameters and not model.static_graph


def _can_be_ordered(model: DistributedDataParallel) -> bool:
    """Whether this torch has the calls, and the model no way of its own: what torch learns of a static graph cannot be given to another."""
    of_reducer = ("_rebuild_buckets", "_push_all_rebuilt_params", "_check_reducer_finalized")
    of_model = (
        "_ddp_init_helper",
        "_get_ddp_logging_data",
        "_build_params_for_reducer",
        "_has_rebuilt_buckets",
    )
    there = all(hasattr(model.reducer, name) for name in of_reducer) and all(
        hasattr(model, name) for name in of_model
    )
    own_ways = ("static_graph", "mixed_precision", "_use_python_reducer", "_delay_all_reduce_all_params")
    return there and not any(getattr(model, name, None) for name in own_ways)


def _rebuild_now(model: DistributedDataParallel, world: World) -> None:
    """What the next forward would begin with. The ranks agree first, as one whose backward has failed cannot take part."""
    try:
        model.reducer._check_reducer_finalized()
        ready = 1
    except RuntimeError:
        ready = 0
    answer = torch.tensor([ready], dtype=torch.int32, device=world.comm.control_device)
    if int(world.comm.all_reduce(answer, "min")) and model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True


def _names_of(model: DistributedDataParallel, parameters: Sequence[torch.Tensor]) -> list[str]:
    names = {id(parameter): plain_name(name) for name, parameter in model.module.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]
